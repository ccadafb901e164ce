"""The collectives that our strategies may call: labelled in the profiler, counted in a ledger.

Each takes a tensor and a process group and returns when the result is there; with
``async_op=True`` it returns a ``Pending`` at once and the result is there after
``pending.wait()``. Those that PyTorch's own strategies call from C++ are not in the ledger. FSDP2
lets us make its gathers and scatters: those are, though its sums between replicas are not.

``send`` and ``recv`` are messages between two ranks of a group. Both ends give the same tag, lane
and label, and make the messages of one lane and direction in the same order. Over Gloo the tag
pairs them. NCCL pairs by order alone, so each lane and direction needs a group of its own there.

What a ledger entry's ``bytes`` counts is Ψ, the whole tensor the collective is about (for
all_gather its output, for reduce_scatter its input). ``wire_bytes`` is what the best
algorithm makes one rank send. ``sent_inside`` and ``sent_between`` are what the backend's own makes
this rank send inside its node and to other nodes (``wire.link_shares``).
"""

from __future__ import annotations

import functools
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import seal
from shardlab.pulse import Call
from shardlab.wire import link_shares
from shardlab.wire import wire_bytes as wire_bytes

Group = dist.ProcessGroup
REMEMBERED = 1024  # calls that ``recent`` keeps, to tell ranks apart that are out of step

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# torch 2.13 renamed these two and warns on the old names; 2.11 has only the old ones.
def _by_either_name(new: str, old: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


_gather_into = _by_either_name("all_gather_single", "all_gather_into_tensor")
_scatter_into = _by_either_name("reduce_scatter_single", "reduce_scatter_tensor")


_members: WeakKeyDictionary[Group, list[int]] = WeakKeyDictionary()


def members(group: Group) -> list[int]:
    """The ranks of a group, by their numbers in the world."""
    if group not in _members:
        _members[group] = dist.get_process_group_ranks(group)
    return _members[group]


# Set by an injected fault (faults/inject.py). It is asked before each collective; True skips it.
# A module variable, as the collectives are plain functions that any strategy calls.
intercept: Callable[[], bool] | None = None


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
    """Every collective of this rank, in order: full entries for some steps, totals for all."""

    entries: list[Entry] = field(default_factory=list)
    step: int | None = None  # set by the loop's recorder; None outside a step
    full_steps: int | None = None  # entries are kept for this many steps; None keeps all
    calls: int = 0
    bytes: int = 0
    sent_between: int = 0  # bytes that this rank sends to other nodes
    ranks_per_node: int = 0  # 0: one node, or not known; it stays when the ledger begins anew
    # For the watchdog: what was entered last, what is waited for, and how many waits are over.
    recent: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    waiting: Entry | None = None
    waited: int = 0
    # How many calls were made in each channel (pulse.Call), and their fingerprint. Both are the
    # same on every rank that takes part in the channel.
    channels: dict[str, tuple[int, int]] = field(default_factory=dict)
    # It is asked before each call is launched, or when a message has been received.
    check: Callable[[Call, Group], None] | None = None

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
        """``link``: the sender and the receiver, by their places in the group, where it goes to one
        rank alone. ``lane``: messages of one kind, which both ends make in the same order; None:
        every rank of the group makes this call. ``ours``: it is sent as this file sends it over
        Gloo, not as Gloo itself does. A call that an injected fault skips is not counted, and over
        already."""
        if intercept is not None and intercept():
            now = time.perf_counter_ns()
            return Entry(-1, None, op, 0, "", group.size(), "", "", now, ready_ns=now)
        frame = sys._getframe(2)  # open <- the collective <- the strategy
        entry = Entry(
            seq=self.calls,
            step=self.step,
            op=op,
            bytes=tensor.numel() * tensor.element_size(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            ranks=group.size(),
            label=label,
            site=f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}",  # noqa: PTH119
            enqueue_ns=time.perf_counter_ns(),
        )
        entry.sent_inside, entry.sent_between = self._links(op, entry.bytes, group, link, ours)
        what = f"{op}{reduction} {tuple(tensor.shape)} {entry.dtype} '{label}'"
        ranks = members(group)
        channel = " ".join(map(str, ranks))
        if link is not None and lane is not None:
            entry.among = f"{ranks[link[0]]}>{ranks[link[1]]}"
            channel = f"{entry.among} {lane}"
        elif len(ranks) < dist.get_world_size():
            entry.among = channel
        turn, fingerprint = self.channels.get(channel, (0, 0))
        call = Call(entry.seq, entry.step, what, entry.site, channel, turn)
        self.recent.append(call)
        same = call.kind if call.is_message else what
        self.channels[channel] = turn + 1, zlib.crc32(same.encode(), fingerprint)
        self.calls += 1
        self.bytes += entry.bytes
        self.sent_between += entry.sent_between
        if self.check is not None and op != "recv":
            self.waiting = entry
            with _span("wait:check", entry):
                self.check(call, group)
            self.waiting = None
        if self.keeps_entries:
            self.entries.append(entry)
        return entry

    def _links(
        self, op: str, size: int, group: Group, link: tuple[int, int] | None, ours: bool
    ) -> tuple[int, int]:
        """The bytes that this rank sends inside its node, and to other nodes."""
        ranks = members(group) if link is None else [members(group)[place] for place in link]
        place = group.rank() if link is None else int(op == "recv")
        nodes = tuple(rank // self.ranks_per_node if self.ranks_per_node else 0 for rank in ranks)
        inside, between = link_shares(op, nodes, place, group.name(), ours)
        return round(inside * size), round(between * size)

    @property
    def keeps_entries(self) -> bool:
        return self.step is None or self.full_steps is None or self.step < self.full_steps

    def take(self) -> list[dict[str, Any]]:
        """The finished entries so far, as plain rows; they leave the ledger."""
        finished = [e for e in self.entries if e.ready_ns is not None]
        self.entries = [e for e in self.entries if e.ready_ns is None]
        return [{name: getattr(e, name) for name in Entry.__slots__} for e in finished]

    def reset(self, full_steps: int | None = None) -> None:
        """Begin anew, as at the start of a run."""
        self.entries = []
        self.step = None
        self.full_steps = full_steps
        self.calls = self.bytes = self.sent_between = self.waited = 0
        self.recent.clear()
        self.channels.clear()
        self.waiting = self.check = None

    def call_of(self, entry: Entry) -> Call:
        """The call of an entry, from ``recent`` or, if that has forgotten it, from the entry."""
        for call in reversed(self.recent):
            if call.seq == entry.seq:
                return call
        return Call(entry.seq, entry.step, f"{entry.op} '{entry.label}'", entry.site)


LEDGER = Ledger()  # a rank is a process: one ledger

_host_groups: dict[Group, Group] = {}


def host_group(group: Group) -> Group:
    """The same ranks over Gloo: what their hosts tell each other does not wait for their GPUs."""
    if group.name() == "gloo":
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _host_groups[group] = made
    return _host_groups[group]


def _span(what: str, entry: Entry) -> AbstractContextManager[Any]:
    """A span in the profiler, with the ledger's number, so that a trace can be joined to it."""
    if not torch.autograd._profiler_enabled():  # the span costs ten microseconds, the question none
        return nullcontext()
    among = f" (ranks {entry.among})" if entry.among else ""
    return torch.profiler.record_function(f"shardlab::{what} #{entry.seq} {entry.label}{among}")


class Pending:
    """A collective under way. ``wait()`` must be called before its tensors are touched."""

    def __init__(
        self,
        entry: Entry,
        work: Any,
        group: Group,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.entry = entry
        self._works: list[Any] = work if isinstance(work, list) else [work]
        self._finish = finish
        # Gloo runs on threads of its own; the last part to end stamps last. Such a callback waits
        # for Python's lock and costs 0.04 ms of processor time, in backward 2 ms of the clock.
        # So only where no limit says that a run is being recorded; there, see wait().
        # A message has no future: when it came, nobody can tell.
        self._is_gloo = group.name() == "gloo" and entry.op not in ("send", "recv")
        if self._is_gloo and LEDGER.full_steps is None:
            for part in self._works:
                part.get_future().add_done_callback(functools.partial(_stamp, entry))

    def wait(self) -> None:
        entry = self.entry
        if entry.ready_ns is not None:
            return
        entry.wait_ns = time.perf_counter_ns()
        # What ends while it is waited for ends when the wait does. What had ended before is not
        # stamped: when, only a callback could tell. The futures are asked, not the works: under the
        # profiler Gloo's thread may end a work with its lock held, and want Python's lock.
        ends_here = (
            self._is_gloo
            and LEDGER.full_steps is not None
            and not all(work.get_future().done() for work in self._works)
        )
        LEDGER.waiting = entry
        with _span(f"wait:{entry.op}", entry):
            for work in self._works:
                work.wait()
            if ends_here:
                entry.done_ns = time.perf_counter_ns()
            if self._finish is not None:
                self._finish()
        entry.ready_ns = time.perf_counter_ns()
        LEDGER.waiting = None
        LEDGER.waited += 1
        self._works, self._finish = [], None  # and with them the tensors that they hold


def _stamp(entry: Entry, _future: Any) -> None:
    """Runs on Gloo's thread. It holds only the entry: holding more would keep tensors alive."""
    entry.done_ns = time.perf_counter_ns()


def _begin(
    entry: Entry,
    group: Group,
    async_op: bool,
    start: Callable[[], Any],
    finish: Callable[[], None] | None = None,
) -> Pending:
    """Start a collective asynchronously; wait for it here unless ``async_op``."""
    if entry.ready_ns is not None:  # skipped: nothing is sent, and there is nothing to wait for
        return Pending(entry, [], group)
    with _span(entry.op, entry):
        pending = Pending(entry, start(), group, finish)
    if not async_op:
        pending.wait()
    return pending


def _dense(
    tensor: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Callable[[], None] | None]:
    """What a backend can be given for a tensor, and what is left to do afterwards.

    Backends read and write numel() elements from the tensor's first on. Where it has gaps or
    another order, that is the wrong memory; where it is expanded, it is beyond its storage.
    """
    dtype = dtype or tensor.dtype
    if tensor.is_contiguous() and not tensor.is_conj() and tensor.dtype == dtype:
        return tensor, None
    for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:  # one element stands for all
            tensor = tensor.narrow(axis, 0, 1)
    if tensor.is_contiguous() and not tensor.is_conj() and tensor.dtype == dtype:
        return tensor, None
    copy = tensor.to(dtype).resolve_conj().contiguous()

    def write_back() -> None:
        with torch.no_grad():
            tensor.copy_(copy)

    return copy, write_back


def all_reduce(
    tensor: Tensor,
    group: Group,
    *,
    op: str = "sum",
    dtype: torch.dtype | None = None,
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """``tensor`` becomes, on each rank, the sum (max, min) of all ranks' tensors. With ``dtype``
    they are rounded to it before they are sent, and added up in it."""
    reduction, (dense, finish) = _REDUCTIONS[op], _dense(tensor, dtype)
    sent = tensor if dtype is None else dense
    entry = LEDGER.open("all_reduce", sent, group, label, "" if op == "sum" else f"({op})")
    return _begin(
        entry,
        group,
        async_op,
        lambda: dist.all_reduce(dense, reduction, group, async_op=True),
        finish,
    )


def broadcast(tensor: Tensor, group: Group, *, label: str = "", async_op: bool = False) -> Pending:
    """``tensor`` becomes, on each rank, that of the group's rank 0."""
    entry = LEDGER.open("broadcast", tensor, group, label)
    dense, finish = _dense(tensor)
    return _begin(
        entry,
        group,
        async_op,
        lambda: dist.broadcast(dense, group=group, group_src=0, async_op=True),
        finish,
    )


def all_gather(
    output: Tensor,
    shard: Tensor,
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """``output`` (ranks * n,) becomes every rank's ``shard`` (n,), in rank order.

    Gloo's own goes through a buffer of the output's size and copies. There, each rank broadcasts
    its part in place: as many bytes, no buffer, and less time. ``sizes`` are the elements of each
    rank's shard where they differ; such parts are broadcast on every backend.
    """
    entry = LEDGER.open("all_gather", output, group, label)
    if group.name() != "gloo" and sizes is None:
        return _begin(
            entry, group, async_op, lambda: _gather_into(output, shard, group=group, async_op=True)
        )
    parts = output.view(-1).split(list(sizes or [shard.numel()] * group.size()))  # (n,) each
    if parts[group.rank()].data_ptr() != shard.data_ptr():
        parts[group.rank()].copy_(shard.flatten())
    sources = [source for source, part in enumerate(parts) if part.numel()]
    entry.launches = len(sources)
    return _begin(
        entry,
        group,
        async_op,
        lambda: [
            dist.broadcast(parts[source], group=group, group_src=source, async_op=True)
            for source in sources
        ],
    )


def reduce_scatter(
    shard: Tensor,
    tensor: Tensor,
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """``shard`` (n,) becomes this rank's part of the sum of all ranks' ``tensor`` (ranks * n,).

    Gloo's own is an all-reduce in disguise: twice the bytes. There, each rank sends each
    other the part that is theirs (all-to-all), and sums what it received. ``sizes`` are the
    elements of each rank's shard where they differ; such parts are sent so on every backend. With
    ``dtype`` the tensors are rounded to it before they are sent, and added up in it.
    """
    sent = tensor if dtype is None else tensor.to(dtype)
    result, write_back = _dense(shard, dtype)
    entry = LEDGER.open("reduce_scatter", sent, group, label)
    if group.name() != "gloo" and sizes is None:
        return _begin(
            entry,
            group,
            async_op,
            lambda: _scatter_into(result, sent, group=group, async_op=True),
            write_back,
        )
    ranks = group.size()
    # The price: a buffer of the full size while it runs.
    received = torch.empty(ranks * shard.numel(), dtype=sent.dtype, device=sent.device)
    there = None if sizes is None else list(sizes)
    here = None if sizes is None else [shard.numel()] * ranks

    def add_up() -> None:
        first, *rest = received.view(ranks, shard.numel())  # (n,) each
        total = result.view(-1)
        if not rest:
            total.copy_(first)
        for i, part in enumerate(rest):  # a third of the time of torch.sum over two rows
            torch.add(total if i else first, part, out=total)
        if write_back is not None:
            write_back()

    return _begin(
        entry,
        group,
        async_op,
        lambda: dist.all_to_all_single(received, sent, here, there, group, async_op=True),
        add_up,
    )


def gather_as_pytorch(output: Tensor, shard: Tensor, group: Group, *, label: str = "") -> None:
    """``all_gather`` as the backend itself does it: for PyTorch's own strategies."""
    entry = LEDGER.open("all_gather", output, group, label, ours=False)
    _begin_as_pytorch(entry, group, functools.partial(_gather_into, output, shard, group=group))


def scatter_as_pytorch(
    shard: Tensor, tensor: Tensor, group: Group, op: Any, *, label: str = ""
) -> None:
    """``reduce_scatter`` as the backend itself does it, by a ReduceOp of PyTorch's."""
    entry = LEDGER.open("reduce_scatter", tensor, group, label, ours=False)
    start = functools.partial(_scatter_into, shard, tensor, op=op, group=group)
    _begin_as_pytorch(entry, group, start)


def _begin_as_pytorch(entry: Entry, group: Group, call: Callable[..., Any]) -> None:
    """Gloo's host waits. NCCL's current stream does: an asynchronous call would leave it."""
    is_gloo = group.name() == "gloo"
    works: list[Any] = []  # not for Pending: Gloo's own reduce_scatter has no future to ask

    def start() -> list[Any]:
        works.append(call(async_op=is_gloo))
        return []

    def wait() -> None:
        if is_gloo:
            works[0].wait()
            entry.done_ns = time.perf_counter_ns()

    _begin(entry, group, False, start, wait)


def _sendable(tensor: Tensor, group: Group) -> Tensor:
    """The tensor as one message. Gloo's messages start in host memory; its collectives need not."""
    dense = tensor.detach().resolve_conj().contiguous()
    return dense.cpu() if group.name() == "gloo" else dense


def _receivable(tensor: Tensor, group: Group) -> tuple[Tensor, Callable[[], None]]:
    """Where a message for ``tensor`` may arrive, and what is left to do when it has."""
    if group.name() != "gloo" or tensor.device.type == "cpu":
        return tensor, lambda: None
    place = torch.empty_like(tensor, device="cpu")

    def bring_over() -> None:
        tensor.copy_(place)

    return place, bring_over


def send(
    tensor: Tensor,
    group: Group,
    to: int,
    *,
    tag: int = 0,
    lane: str = "",
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """Rank ``to`` of the group receives ``tensor`` by a ``recv`` with the same tag and lane."""
    entry = LEDGER.open("send", tensor, group, label, link=(group.rank(), to), lane=lane)
    dense = _sendable(tensor, group)
    return _begin(
        entry, group, async_op, lambda: dist.isend(dense, group=group, group_dst=to, tag=tag)
    )


def recv(
    tensor: Tensor,
    group: Group,
    source: int,
    *,
    tag: int = 0,
    lane: str = "",
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """``tensor``, which is contiguous, becomes what rank ``source`` of the group has sent."""
    entry = LEDGER.open("recv", tensor, group, label, link=(source, group.rank()), lane=lane)
    place, bring_over = _receivable(tensor, group)

    def arrived() -> None:
        bring_over()
        if LEDGER.check is not None:  # whether the message was meant for this call
            LEDGER.check(LEDGER.call_of(entry), group)

    return _begin(
        entry,
        group,
        async_op,
        lambda: dist.irecv(place, group=group, group_src=source, tag=tag),
        arrived,
    )


def send_object(
    value: Any, group: Group, to: int, *, tag: int, lane: str, label: str, device: torch.device
) -> list[Pending]:
    """Begin to send any object, signed (``seal.py``), to rank ``to`` of the group, which calls
    ``recv_object`` with the same tag, lane and label. It takes this tag and the next. ``device``
    is one that the group's messages may start from."""
    data = torch.frombuffer(bytearray(seal.dumps(value)), dtype=torch.uint8)
    return [
        send(part.to(device), group, to, tag=tag + i, lane=lane, label=label, async_op=True)
        for i, part in enumerate((torch.tensor([data.numel()]), data))
    ]


def recv_object(
    group: Group, source: int, *, tag: int, lane: str, label: str, device: torch.device
) -> Any:
    """Wait for an object. One that no rank of this run has sent is not read."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    recv(size, group, source, tag=tag, lane=lane, label=label)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    recv(data, group, source, tag=tag + 1, lane=lane, label=label)
    return seal.loads(data.cpu().numpy().tobytes())


def broadcast_object(value: Any, group: Group, source: int) -> Any:
    """Rank ``source``'s value, on every rank of the group. PyTorch's pickles are signed too
    (``seal.use``). The ledger does not count it."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def exchange(
    sent: Tensor,
    received: Tensor,
    group: Group,
    *,
    to: int,
    source: int,
    label: str = "",
    async_op: bool = False,
) -> Pending:
    """``sent`` goes to the group's rank ``to``, and ``received`` comes from its rank ``source``.

    Both are started together: where each rank of a ring sent first and received afterwards, NCCL
    would wait for ever.
    """
    entry = LEDGER.open("send", sent, group, label, link=(group.rank(), to))
    entry.launches = 2
    place, bring_over = _receivable(received, group)
    pair = [
        dist.P2POp(dist.isend, _sendable(sent, group), group=group, group_peer=to),
        dist.P2POp(dist.irecv, place, group=group, group_peer=source),
    ]
    return _begin(entry, group, async_op, lambda: dist.batch_isend_irecv(pair), bring_over)


def barrier(group: Group, *, label: str = "", async_op: bool = False) -> Pending:
    """Returns when every rank of the group is here."""
    entry = LEDGER.open("barrier", torch.empty(0), group, label)
    return _begin(entry, group, async_op, lambda: dist.barrier(group=group, async_op=True))
