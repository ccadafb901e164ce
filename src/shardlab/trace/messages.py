"""Which send of others belongs to which receive.

Our own messages, and those of a trace with shapes, name both ranks. Over Gloo the others name none:
they are matched by time, where only one send fits a receive.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardlab.trace.model import Trace
from shardlab.trace.parts import Errors, Key, Part, begun_at

End = tuple[Part, Key]  # of a message of others
Way = tuple[int, int]  # from rank to rank


def pair(
    keyed: dict[Key, list[Part]],
    traces: Sequence[Trace],
    offsets: Mapping[int, int],
    errors: Errors,
    *,
    is_one_clock: bool,
) -> int:
    """Match the messages of others; the number of ends that remain, if there are several ranks."""
    steps: dict[int, tuple[list[End], list[End]]] = defaultdict(lambda: ([], []))
    for key, [part, *_] in keyed.items():
        if part.step is not None and part.begun_ns is not None and not part.is_message:
            steps[part.step][part.kind == "recv"].append((part, key))
    for ends in itertools.chain(*steps.values()):
        ends.sort(key=lambda end: begun_at(end[0], offsets))
    ways: set[Way] = set()
    for step, both in steps.items():
        pairs = _by_ends(*both)
        ways |= {(sent.rank, got.rank) for (sent, _), (got, _) in pairs}
        _join(keyed, step, both, pairs)
    if is_one_clock and len(traces) == traces[0].world:
        every = set(itertools.permutations((trace.rank for trace in traces), 2))
        fits = {step: _by_time(*both, every, offsets, errors) for step, both in steps.items()}
        # Where several fit, those between ranks that surely send to one another.
        for step, (sends, recvs) in steps.items():
            sure = (
                (sends[min(j)][0], recvs[i][0]) for i, j in enumerate(fits[step]) if len(j) == 1
            )
            ways |= {(send.rank, recv.rank) for send, recv in sure}
        for step, (sends, recvs) in steps.items():
            own = _by_time(sends, recvs, ways, offsets, errors) or fits[step]
            _not_before(keyed, sends, recvs, own, offsets)
            found = [(sends[min(j)], recvs[i]) for i, j in enumerate(own) if len(j) == 1]
            ways |= {(sent.rank, got.rank) for (sent, _), (got, _) in found}
            _join(keyed, step, (sends, recvs), found)
    for key, parts in keyed.items():  # a ring sends one way only: nobody waits there by a schedule
        is_pair = key[0] == "message" and not parts[0].is_message
        if is_pair and (parts[-1].rank, parts[0].rank) not in ways:
            keyed[key] = [replace(part, is_between=False) for part in parts]
    return sum(map(len, itertools.chain(*steps.values()))) if len(traces) > 1 else 0


def _join(
    keyed: dict[Key, list[Part]],
    step: int,
    both: tuple[list[End], list[End]],
    pairs: Sequence[tuple[End, End]],
) -> None:
    """Put the two ends of messages under one key, and take them from those that have none."""
    for sent, got in pairs:
        del keyed[sent[1]], keyed[got[1]]
        way = f"{step}:{sent[0].rank}>{got[0].rank}:{sent[1][2]}"
        keyed["message", "", way] = [sent[0], got[0]]
    for ends in both:
        ends[:] = (end for end in ends if end[1] in keyed)


def _by_ends(sends: Sequence[End], recvs: Sequence[End]) -> list[tuple[End, End]]:
    """Messages whose ranks are known at both ends, in the order of those from rank to rank."""
    ways: dict[Way, tuple[list[End], list[End]]] = defaultdict(lambda: ([], []))
    for i, own in enumerate((sends, recvs)):
        for end in own:
            if len(end[0].peers) == 1:
                [peer] = end[0].peers
                ways[(peer, end[0].rank) if i else (end[0].rank, peer)][i].append(end)
    both = (ends for ends in ways.values() if len(ends[0]) == len(ends[1]))
    return [pair for sent, got in both for pair in zip(sent, got, strict=True)]


def _by_time(
    sends: Sequence[End],
    recvs: Sequence[End],
    ways: Collection[Way],
    offsets: Mapping[int, int],
    errors: Errors,
) -> list[set[int]]:
    """For each receive the sends that it can be; empty if these cannot be all there were.

    Over Gloo neither end is done before both have begun, and messages from one rank to another
    keep their order.
    """
    source, target = [send.rank for send, _ in sends], [recv.rank for recv, _ in recvs]

    def fit(send: Part, recv: Part) -> bool:
        slack = errors.get((send.rank, recv.rank), 0)
        return (
            (send.rank, recv.rank) in ways
            and (not send.peers or recv.rank in send.peers)
            and (not recv.peers or send.rank in recv.peers)
            and begun_at(send, offsets) <= recv.end_ns - offsets[recv.rank] + slack
            and begun_at(recv, offsets) <= send.end_ns - offsets[send.rank] + slack
        )

    at = np.array([begun_at(send, offsets) for send, _ in sends], np.int64)
    until = np.array([send.end_ns - offsets[send.rank] for send, _ in sends], np.int64)
    most = max((*errors.values(), 0))
    found = []
    for recv, _ in recvs:  # most are not of that time: a look at each would take too long
        end = recv.end_ns - offsets[recv.rank]
        near = (at <= end + most) & (until >= begun_at(recv, offsets) - most)
        found.append({j for j in np.flatnonzero(near).tolist() if fit(sends[j][0], recv)})
    settled: set[int] = set()
    while len(sends) == len(recvs) and all(found):
        takers = Counter(j for fits in found for j in fits)
        sure = {
            i: fits if len(fits) == 1 else {j for j in fits if takers[j] == 1}
            for i, fits in enumerate(found)
            if i not in settled
        }
        new = {i: min(fits) for i, fits in sure.items() if len(fits) == 1}
        if not new:
            return found
        settled |= new.keys()
        for i, j in new.items():
            for k, fits in enumerate(found):
                if k in settled and j not in fits:
                    continue
                is_other = target[k] != target[i]
                found[k] = {
                    x
                    for x in fits
                    if (x == j) == (k == i)
                    and (is_other or source[x] != source[j] or (x <= j) == (k <= i))
                }
    return []


def _not_before(
    keyed: dict[Key, list[Part]],
    sends: Sequence[End],
    recvs: Sequence[End],
    fits: Sequence[set[int]],
    offsets: Mapping[int, int],
) -> None:
    """Note when the first of those that an end can belong to began: until then it surely waited."""
    others: dict[Key, list[Part]] = defaultdict(list)
    for (recv, key), own in zip(recvs, fits, strict=False):
        for j in own:
            others[key].append(sends[j][0])
            others[sends[j][1]].append(recv)
    for key, ends in others.items():
        [part] = keyed[key]
        first = min(begun_at(end, offsets) for end in ends) + offsets[part.rank]
        keyed[key] = [replace(part, other_ns=first if part.is_between else None)]
