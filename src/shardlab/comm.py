"""The collectives that our strategies may call: labelled in the profiler, counted in the ledger.

Each takes a tensor and a process group and returns when the result is there. With
``async_op=True`` it returns a ``Pending`` at once, and the result is there after
``pending.wait()``. The ledger does not see collectives that PyTorch's own strategies call from
C++. FSDP2 lets us make its gathers and scatters: the ledger has those, but not FSDP2's sums
between replicas.

``send`` and ``recv`` are messages between two ranks of a group. Both ends give the same tag, lane
and label, and make the messages of one lane and direction in the same order. Over Gloo the tag
pairs them. NCCL pairs by order alone, so each lane and direction needs a group of its own there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import seal
from shardlab.ledger import LEDGER, Entry, members, span
from shardlab.ledger import Group as Group

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# torch 2.13 renamed these two and warns on the old names; 2.11 has only the old ones.
def _by_either_name(new: str, old: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


_gather_into = _by_either_name("all_gather_single", "all_gather_into_tensor")
_scatter_into = _by_either_name("reduce_scatter_single", "reduce_scatter_tensor")

_host_groups: dict[Group, Group] = {}


def host_group(group: Group) -> Group:
    """The same ranks over Gloo: messages between hosts do not wait for their GPUs."""
    if group.name() == "gloo":
        return group
    if group not in _host_groups:
        _host_groups[group] = dist.new_group(
            members(group), backend="gloo", use_local_synchronization=True
        )
    return _host_groups[group]


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
                part.get_future().add_done_callback(partial(_stamp, entry))

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
        LEDGER.waiting = entry.call
        with span(f"wait:{entry.op}", entry):
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
    with span(entry.op, entry):
        pending = Pending(entry, start(), group, finish)
    if not async_op:
        pending.wait()
    return pending


def _dense(
    tensor: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Callable[[], None] | None]:
    """A contiguous tensor for the backend, and how to copy the result back, if it is a copy.

    Backends read and write numel() elements from the tensor's first on. With gaps or another order
    that is the wrong memory; of an expanded tensor it lies beyond the storage.
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
    dense, write_back = _dense(tensor, dtype)
    sent = tensor if dtype is None else dense
    entry = LEDGER.open("all_reduce", sent, group, label, "" if op == "sum" else f"({op})")
    start = partial(dist.all_reduce, dense, _REDUCTIONS[op], group, async_op=True)
    return _begin(entry, group, async_op, start, write_back)


def broadcast(tensor: Tensor, group: Group, *, label: str = "", async_op: bool = False) -> Pending:
    """``tensor`` becomes, on each rank, that of the group's rank 0."""
    entry = LEDGER.open("broadcast", tensor, group, label)
    dense, write_back = _dense(tensor)
    start = partial(dist.broadcast, dense, group=group, group_src=0, async_op=True)
    return _begin(entry, group, async_op, start, write_back)


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
        start = partial(_gather_into, output, shard, group=group, async_op=True)
        return _begin(entry, group, async_op, start)
    parts = output.view(-1).split(list(sizes or [shard.numel()] * group.size()))  # (n,) each
    if parts[group.rank()].data_ptr() != shard.data_ptr():
        parts[group.rank()].copy_(shard.flatten())
    sources = [source for source, part in enumerate(parts) if part.numel()]
    entry.launches = len(sources)

    def broadcasts() -> list[Any]:
        return [
            dist.broadcast(parts[source], group=group, group_src=source, async_op=True)
            for source in sources
        ]

    return _begin(entry, group, async_op, broadcasts)


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

    Gloo's own is an all-reduce in disguise: twice the bytes. There, each rank sends every
    other rank its part (all-to-all), and sums the parts that it received. ``sizes`` are the
    elements of each rank's shard where they differ; such parts are sent so on every backend. With
    ``dtype`` the tensors are rounded to it before they are sent, and added up in it.
    """
    sent = tensor if dtype is None else tensor.to(dtype)
    result, write_back = _dense(shard, dtype)
    entry = LEDGER.open("reduce_scatter", sent, group, label)
    if group.name() != "gloo" and sizes is None:
        start = partial(_scatter_into, result, sent, group=group, async_op=True)
        return _begin(entry, group, async_op, start, write_back)
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

    start = partial(dist.all_to_all_single, received, sent, here, there, group, async_op=True)
    return _begin(entry, group, async_op, start, add_up)


def gather_as_pytorch(output: Tensor, shard: Tensor, group: Group, *, label: str = "") -> None:
    """``all_gather`` as the backend itself does it: for PyTorch's own strategies."""
    entry = LEDGER.open("all_gather", output, group, label, ours=False)
    _begin_as_pytorch(entry, group, partial(_gather_into, output, shard, group=group))


def scatter_as_pytorch(
    shard: Tensor, tensor: Tensor, group: Group, op: Any, *, label: str = ""
) -> None:
    """``reduce_scatter`` as the backend itself does it, by a ReduceOp of PyTorch's."""
    entry = LEDGER.open("reduce_scatter", tensor, group, label, ours=False)
    start = partial(_scatter_into, shard, tensor, op=op, group=group)
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
    """A tensor that a message for ``tensor`` may be received in, and how to copy it over."""
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
    start = partial(dist.isend, _sendable(tensor, group), group=group, group_dst=to, tag=tag)
    return _begin(entry, group, async_op, start)


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
            LEDGER.check(entry.call, group)

    start = partial(dist.irecv, place, group=group, group_src=source, tag=tag)
    return _begin(entry, group, async_op, start, arrived)


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
    """Wait for an object, and read it only if a rank of this run has signed it."""
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

    Both are started together: if each rank of a ring sent first and received afterwards, NCCL
    would deadlock.
    """
    entry = LEDGER.open("send", sent, group, label, link=(group.rank(), to))
    entry.launches = 2
    place, bring_over = _receivable(received, group)
    pair = [
        dist.P2POp(dist.isend, _sendable(sent, group), group=group, group_peer=to),
        dist.P2POp(dist.irecv, place, group=group, group_peer=source),
    ]
    return _begin(entry, group, async_op, partial(dist.batch_isend_irecv, pair), bring_over)


def barrier(group: Group, *, label: str = "", async_op: bool = False) -> Pending:
    """Returns when every rank of the group is here."""
    entry = LEDGER.open("barrier", torch.empty(0), group, label)
    return _begin(entry, group, async_op, partial(dist.barrier, group=group, async_op=True))
