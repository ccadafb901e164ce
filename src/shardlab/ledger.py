"""The ledger: every collective of this rank, in order, with its bytes and its times.

``bytes`` of an entry is Ψ, the whole tensor that the collective is about (for all_gather its
output, for reduce_scatter its input). ``wire_bytes`` is what the best algorithm makes one rank
send. ``sent_inside`` and ``sent_between`` are what the backend's own makes this rank send inside
its node and to other nodes (``wire.link_shares``).
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.pulse import Call
from shardlab.wire import link_shares

Group = dist.ProcessGroup
REMEMBERED = 1024  # calls that ``recent`` keeps, to tell ranks apart that are out of step

_members: WeakKeyDictionary[Group, list[int]] = WeakKeyDictionary()


def members(group: Group) -> list[int]:
    """The ranks of a group, by their numbers in the world."""
    if group not in _members:
        _members[group] = dist.get_process_group_ranks(group)
    return _members[group]


@dataclass(slots=True)
class Entry:
    """One collective of one rank. Times are of the host's monotonic clock, in nanoseconds."""

    seq: int
    step: int | None
    op: str
    bytes: int
    dtype: str
    ranks: int
    label: str
    site: str  # file:line of the strategy that called
    enqueue_ns: int
    call: Call  # what the guards compare; no column of its own
    wait_ns: int | None = None  # when the strategy began to wait for it
    # When it had finished. None on NCCL, where only the GPU knows, and in a recorded run where it
    # finished before the wait.
    done_ns: int | None = None
    ready_ns: int | None = None  # when the wait was over and the strategy continued
    launches: int = 1  # messages that the backend was given for it
    sent_inside: int = 0  # bytes that this rank sends to ranks of its node
    sent_between: int = 0  # and to other nodes
    among: str = ""  # "0>1": a message of rank 0 to 1; "0 2": a group of these; empty: all ranks


@dataclass
class Ledger:
    """Full entries for some steps, totals for all."""

    entries: list[Entry] = field(default_factory=list)
    step: int | None = None  # set by the loop's recorder; None outside a step
    full_steps: int | None = None  # entries are kept for this many steps; None keeps all
    calls: int = 0
    bytes: int = 0
    sent_between: int = 0  # bytes that this rank sends to other nodes
    ranks_per_node: int = 0  # 0: one node, or not known; ``reset`` keeps it
    # For the watchdog: the last calls, the one that is waited for, and how many waits are over.
    recent: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    waiting: Call | None = None
    waited: int = 0
    # How many calls were made in each channel (pulse.Call), and their fingerprint. Both are the
    # same on every rank that takes part in the channel.
    channels: dict[str, tuple[int, int]] = field(default_factory=dict)
    # It is asked before each call is launched, or when a message has been received.
    check: Callable[[Call, Group], None] | None = None
    # An injected fault (faults/inject.py). It is asked before each call; True skips that.
    skips: Callable[[], bool] | None = None

    def open(
        self,
        op: str,
        tensor: Tensor,
        group: Group,
        label: str,
        reduction: str = "",
        link: tuple[int, int] | None = None,
        lane: str | None = None,
        ours: bool = True,
    ) -> Entry:
        """``link``: sender and receiver of a message, by their places in the group. ``lane``:
        messages of one kind, which both ends make in the same order; None: every rank of the group
        makes this call. ``ours``: sent as comm.py sends over Gloo, not as Gloo itself does. A call
        that an injected fault skips is not counted, and is over at once."""
        if self.skips is not None and self.skips():
            now, none = time.perf_counter_ns(), Call(-1, None, "", "")
            return Entry(-1, None, op, 0, "", group.size(), "", "", now, none, ready_ns=now)
        frame = sys._getframe(2)  # open <- the collective <- the strategy
        site = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119
        dtype = str(tensor.dtype).removeprefix("torch.")
        ranks, among = members(group), ""
        channel = " ".join(map(str, ranks))
        if link is not None and lane is not None:
            among = f"{ranks[link[0]]}>{ranks[link[1]]}"
            channel = f"{among} {lane}"
        elif len(ranks) < dist.get_world_size():
            among = channel
        turn, fingerprint = self.channels.get(channel, (0, 0))
        what = f"{op}{reduction} {tuple(tensor.shape)} {dtype} '{label}'"
        call = Call(self.calls, self.step, what, site, channel, turn)
        size = tensor.numel() * tensor.element_size()
        now = time.perf_counter_ns()
        entry = Entry(
            self.calls, self.step, op, size, dtype, len(ranks), label, site, now, call, among=among
        )
        entry.sent_inside, entry.sent_between = self._sent(op, size, group, link, ours)
        self.recent.append(call)
        same = call.kind if call.is_message else what
        self.channels[channel] = turn + 1, zlib.crc32(same.encode(), fingerprint)
        self.calls += 1
        self.bytes += size
        self.sent_between += entry.sent_between
        if self.check is not None and op != "recv":
            self.waiting = call
            with span("wait:check", entry):
                self.check(call, group)
            self.waiting = None
        if self.step is None or self.full_steps is None or self.step < self.full_steps:
            self.entries.append(entry)
        return entry

    def _sent(
        self, op: str, size: int, group: Group, link: tuple[int, int] | None, ours: bool
    ) -> tuple[int, int]:
        """The bytes that this rank sends inside its node, and to other nodes."""
        ranks = members(group) if link is None else [members(group)[end] for end in link]
        place = group.rank() if link is None else int(op == "recv")
        nodes = tuple(rank // self.ranks_per_node if self.ranks_per_node else 0 for rank in ranks)
        inside, between = link_shares(op, nodes, place, group.name(), ours)
        return round(inside * size), round(between * size)

    def take(self) -> list[dict[str, Any]]:
        """The finished entries so far, as plain rows; they leave the ledger."""
        finished = [e for e in self.entries if e.ready_ns is not None]
        self.entries = [e for e in self.entries if e.ready_ns is None]
        columns = [name for name in Entry.__slots__ if name != "call"]
        return [{name: getattr(e, name) for name in columns} for e in finished]

    def reset(self, full_steps: int | None = None) -> None:
        """Begin again, as at the start of a run."""
        kept = Ledger(full_steps=full_steps, ranks_per_node=self.ranks_per_node, skips=self.skips)
        vars(self).update(vars(kept))


LEDGER = Ledger()  # a rank is a process: one ledger


def span(what: str, entry: Entry) -> AbstractContextManager[Any]:
    """A span in the profiler, with the ledger's number, so that a trace can be joined to it."""
    if not torch.autograd._profiler_enabled():  # the span costs ten microseconds, the question none
        return nullcontext()
    among = f" (ranks {entry.among})" if entry.among else ""
    return torch.profiler.record_function(f"shardlab::{what} #{entry.seq} {entry.label}{among}")
