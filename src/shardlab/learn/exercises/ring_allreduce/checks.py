"""Ring all-reduce: every rank's values counted once, in place, with 2(n-1) chunks sent per rank."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardlab.learn import mistakes
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("three ranks", 3, {"shapes": [[12], [3, 4]], "dtypes": ["float64", "float32"]}),
    Case(
        "sizes that 3 does not divide", 3, {"shapes": [[7], [2, 4]], "dtypes": ["float64", "int64"]}
    ),
    Case("fewer elements than ranks", 3, {"shapes": [[2], [1]], "dtypes": ["float64"]}),
    Case("two ranks", 2, {"shapes": [[5]], "dtypes": ["float64"]}),
)
BASE = (
    1000  # rank r holds BASE**r everywhere, so that the sum's digits say how often each was counted
)
ALLOWED = ("send", "recv", "isend", "irecv")


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    trials = []
    for dtype in case.options["dtypes"]:
        for shape in case.options["shapes"]:
            first = len(spy.calls)
            counted = torch.full(shape, BASE**rank, dtype=getattr(torch, dtype))
            submission.ring_all_reduce(counted)
            calls = spy.calls[first:]
            everybody = [values(shape, dtype, r) for r in range(case.world)]
            got = everybody[rank].clone()
            submission.ring_all_reduce(got)
            trials.append(
                {
                    "counted": counted.flatten(),
                    "got": got.flatten(),
                    "want": torch.stack(everybody).sum(0).flatten(),
                    "calls": calls,
                    "itemsize": counted.element_size(),
                    "label": f"{'x'.join(map(str, shape))} {dtype}",
                }
            )
    return {"trials": trials}


def values(shape: list[int], dtype: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
        getattr(torch, dtype)
    )


def judge(evidence: Evidence) -> list[Finding]:
    for case, ranks in evidence.items():
        for i in range(len(ranks[0]["trials"])):
            trial = [rank["trials"][i] for rank in ranks]
            calls = [each["calls"] for each in trial]
            found = (
                _collectives(case, trial)
                or mistakes.not_waited(case, calls)
                or _counts(case, trial)
                or _neighbours(case, trial)
                or _bytes(case, trial)
                or _sums(case, trial)
            )
            if found:
                return found  # one thing at a time: the cases after it are harder
    return []


Trial = list[dict[str, Any]]  # the same tensor on each rank


def _collectives(case: str, trial: Trial) -> list[Finding]:
    used = sorted({c["op"] for rank in trial for c in rank["calls"]} - set(ALLOWED))
    if used:
        message = f"{mistakes.listed(used)} was called: build it from send and receive"
        return [Finding("collective-used", message, case)]
    return []


def counts(value: float, world: int) -> list[int] | None:
    """How often each rank was counted in an element of ``BASE**rank``; None: not a count at all."""
    if not math.isfinite(value) or value < 0 or value != int(value) or value >= BASE**world:
        return None
    return [int(value) // BASE**r % BASE for r in range(world)]


def _counts(case: str, trial: Trial) -> list[Finding]:
    n, label = len(trial), trial[0]["label"]
    want = [1] * n
    for rank, each in enumerate(trial):
        found = [counts(x, n) for x in each["counted"]]
        wrong = [i for i, c in enumerate(found) if c != want]
        if not wrong:
            continue
        at, size = wrong[0], len(found)
        cause, why = _cause(rank, found, trial)
        how = found[at]
        seen = (
            "is no sum of whole values"
            if how is None
            else "counts " + ", ".join(f"rank {r} {_times(c)}" for r, c in enumerate(how))
        )
        message = (
            f"{label}, rank {rank}: {len(wrong)} of {size} elements are wrong; element {at} "
            f"{seen}. {why}"
        )
        return [Finding(cause, message, case)]
    return []


def _times(count: int) -> str:
    return "once" if count == 1 else "not at all" if count == 0 else f"{count} times"


def _cause(rank: int, found: list[list[int] | None], trial: Trial) -> tuple[str, str]:
    n = len(trial)
    mine = [int(r == rank) for r in range(n)]
    sends = len([c for c in trial[rank]["calls"] if c["op"] in ("send", "isend")])
    mean = sum(BASE**r for r in range(n)) / n
    if sends and all(c == mine for c in found):
        return "not-in-place", "The tensor is as it was: write the sums into it, not into a copy"
    if not sends:
        return "not-communicated", "Nothing was sent"
    if all(abs(x - mean) < 1 for x in trial[rank]["counted"]):
        return "averaged", "That is the mean; asked for is the sum: do not divide"
    if any(c is not None and max(c) > 1 for c in found):
        return "counted-twice", (
            f"A chunk is added up in n-1 = {n - 1} hops and then copied in n-1: one hop more, or "
            "adding in the second round, counts ranks again"
        )
    if sends < 2 * (n - 1):
        return "too-few-hops", (
            f"A rank sends 2(n-1) = {2 * (n - 1)} chunks: n-1 while adding up, n-1 while handing "
            f"on; rank {rank} sent {sends}"
        )
    size, rest = len(found), len(found) % n
    untouched = [i for i, c in enumerate(found) if c == mine]
    if rest and untouched and untouched == list(range(size - len(untouched), size)):
        return "rest-forgotten", (
            f"{size} elements do not divide by {n}: the last {len(untouched)} are in no chunk. "
            "tensor_split(n) makes chunks whose sizes differ by one"
        )
    return "wrong-chunk", (
        "Enough chunks were sent, but not the right ones: after the first round rank r has "
        "finished chunk r+1 (sending to the right), and that is the one it hands on first"
    )


def _sums(case: str, trial: Trial) -> list[Finding]:
    label = trial[0]["label"]
    tolerance = 1e-5 if "float32" in label else 1e-12
    for rank, each in enumerate(trial):
        if not mistakes.close(each["got"], each["want"], tolerance):
            off = mistakes.error(each["got"], each["want"])
            message = f"{label}: rank {rank}'s sums are off by up to {off:.3g} (random values)"
            return [Finding("wrong-sum", message, case)]
        if each["got"] != trial[0]["got"]:
            message = (
                f"{label}: rank {rank} and rank 0 differ in the last bits: each chunk must be "
                "summed on one rank and copied to the others, or the ranks drift apart"
            )
            return [Finding("ranks-differ", message, case)]
    return []


def _neighbours(case: str, trial: Trial) -> list[Finding]:
    n = len(trial)
    to = [{c["peer"] for c in each["calls"] if c["op"] in ("send", "isend")} for each in trial]
    if any(all(peers <= {(r + way) % n} for r, peers in enumerate(to)) for way in (1, -1)):
        return []
    rank = max(range(n), key=lambda r: len(to[r]))
    message = (
        f"rank {rank} sends to {mistakes.listed(f'rank {p}' for p in sorted(to[rank]))}: in a ring "
        "every rank sends to one neighbour only, all in the same direction; else one link carries "
        "more than the others and all wait for it"
    )
    return [Finding("not-a-ring", message, case)]


def _bytes(case: str, trial: Trial) -> list[Finding]:
    n = len(trial)
    size, item = len(trial[0]["want"]), trial[0]["itemsize"]
    limit = 2 * (n - 1) * math.ceil(size / n) * item
    for rank, each in enumerate(trial):
        messages = [c["bytes"] for c in each["calls"] if c["op"] in ("send", "isend")]
        sent = sum(messages)
        if sent > limit and len(messages) > 2 * (n - 1):
            message = (
                f"{each['label']}: rank {rank} sends {len(messages)} chunks; 2(n-1), here "
                f"{2 * (n - 1)}, are enough: n-1 hops in each round"
            )
            return [Finding("too-many-hops", message, case)]
        if sent > limit:
            message = (
                f"{each['label']}: rank {rank} sends {sent} bytes; 2(n-1) chunks of 1/n are "
                f"{limit}. Hand on one chunk per hop, not the whole tensor"
            )
            return [Finding("too-many-bytes", message, case)]
    return []
