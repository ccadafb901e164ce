"""The collectives give what they promise, and the ledger counts them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conftest import GetRanks
from shardlab import comm, seal
from shardlab.errors import Halt
from shardlab.guard.sequence import Sequence
from shardlab.ledger import LEDGER
from shardlab.measure import memory
from shardlab.wire import wire_bytes
from shardlab.world import World

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def every_collective(world: World, dtype: torch.dtype, async_op: bool) -> dict[str, list[float]]:
    LEDGER.reset()
    mine = torch.arange(4 * world.size).to(dtype) + 10 * world.rank  # (4 * ranks,)
    summed, largest, sent = mine.clone(), mine.clone(), mine.clone()
    gathered = torch.empty(3 * world.size, dtype=dtype)
    shard = torch.empty(4, dtype=dtype)
    pending = [
        comm.all_reduce(summed, world.group, async_op=async_op),
        comm.all_reduce(largest, world.group, op="max", async_op=async_op),
        comm.broadcast(sent, world.group, async_op=async_op),
        comm.all_gather(gathered, mine[:3], world.group, async_op=async_op),
        comm.reduce_scatter(shard, mine, world.group, async_op=async_op),
        comm.barrier(world.group, async_op=async_op),
    ]
    before = torch.empty_like(mine)
    if world.size > 1:  # a ring
        to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        ring = comm.exchange(mine, before, world.group, to=to, source=source, async_op=async_op)
        pending.append(ring)
    for p in pending:
        p.wait()
    return {
        "sum": summed.tolist(),
        "max": largest.tolist(),
        "broadcast": sent.tolist(),
        "gather": gathered.tolist(),
        "scatter": shard.tolist(),
        "exchange": before.tolist() if world.size > 1 else mine.tolist(),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_results(world: int, async_op: bool, ranks: GetRanks) -> None:
    base = torch.arange(4 * world)
    inputs = torch.stack([base + 10 * r for r in range(world)])  # (ranks, 4 * ranks)
    for dtype in DTYPES:
        results = ranks(world).run(every_collective, dtype, async_op)
        for rank, result in enumerate(results):
            assert result["sum"] == inputs.sum(0).tolist()
            assert result["max"] == inputs.amax(0).tolist()
            assert result["broadcast"] == inputs[0].tolist()
            assert result["gather"] == inputs[:, :3].flatten().tolist()
            assert result["scatter"] == inputs.sum(0)[4 * rank : 4 * rank + 4].tolist()
            assert result["exchange"] == inputs[rank - 1].tolist()


def uneven(world: World, sizes: list[int], async_op: bool) -> tuple[list[float], list[float]]:
    mine = torch.arange(sum(sizes)).double() + 10 * world.rank
    begin, length = sum(sizes[: world.rank]), sizes[world.rank]
    shard, gathered = torch.empty(length).double(), torch.zeros(sum(sizes)).double()
    how: Any = {"sizes": sizes, "async_op": async_op}
    comm.reduce_scatter(shard, mine, world.group, **how).wait()
    comm.all_gather(gathered, mine[begin : begin + length], world.group, **how).wait()
    return shard.tolist(), gathered.tolist()


@pytest.mark.parametrize("sizes", [[5], [2, 5], [0, 3], [4, 0], [1, 0, 6], [0, 0, 2]], ids=str)
def test_parts_of_different_sizes(sizes: list[int], ranks: GetRanks) -> None:
    world, base = len(sizes), torch.arange(sum(sizes))
    summed = world * base + 10 * sum(range(world))
    expected = torch.cat([p + 10 * r for r, p in enumerate(base.split(sizes))]).tolist()
    for async_op in (False, True):
        for rank, (shard, gathered) in enumerate(ranks(world).run(uneven, sizes, async_op)):
            assert shard == summed.split(sizes)[rank].tolist()
            assert gathered == expected


def ledger_of(world: World, async_op: bool) -> list[dict[str, Any]]:
    every_collective(world, torch.float32, async_op)
    return LEDGER.take()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_the_ledger(async_op: bool, ranks: GetRanks) -> None:
    for rows in ranks(2).run(ledger_of, async_op):
        assert [r["seq"] for r in rows] == list(range(7))
        assert [r["op"] for r in rows] == [
            "all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier",
            "send",
        ]  # fmt: skip
        # Ψ: the whole tensor, 8 floats; for all_gather its output, 6.
        assert [r["bytes"] for r in rows] == [32, 32, 32, 24, 32, 0, 32]
        assert {r["ranks"] for r in rows} == {2}
        assert all(r["site"].startswith("test_comm.py:") for r in rows)
        for row in rows:
            assert row["enqueue_ns"] <= row["wait_ns"] <= row["ready_ns"]
            # The end is stamped by Gloo's own thread, which may come to it after the waiter.
            assert row["done_ns"] is None or row["enqueue_ns"] <= row["done_ns"]


def as_pytorch(world: World) -> tuple[list[list[float]], list[dict[str, Any]]]:
    LEDGER.reset()
    LEDGER.ranks_per_node = 1
    mine = torch.arange(4.0 * world.size) + 10 * world.rank  # (4 * ranks,)
    gathered, shard = torch.empty(3 * world.size), torch.empty(4)
    comm.gather_as_pytorch(gathered, mine[:3], world.group, label="whole")
    comm.scatter_as_pytorch(shard, mine, world.group, dist.ReduceOp.SUM, label="part")
    LEDGER.ranks_per_node = 0
    return [gathered.tolist(), shard.tolist()], LEDGER.take()


def test_as_pytorch_makes_them(ranks: GetRanks) -> None:
    """Gloo's reduce_scatter is an all-reduce: twice the bytes of ours."""
    inputs = torch.arange(12.0) + 10 * torch.arange(3)[:, None]  # (ranks, 4 * ranks)
    for rank, (found, rows) in enumerate(ranks(3).run(as_pytorch)):
        assert found == [inputs[:, :3].flatten().tolist(), inputs.sum(0)[4 * rank :][:4].tolist()]
        kept = [(r["op"], r["label"], r["bytes"], r["sent_between"]) for r in rows]
        assert kept == [("all_gather", "whole", 36, 24), ("reduce_scatter", "part", 48, 64)]
        assert all(r["site"].startswith("test_comm.py:") for r in rows)
        assert all(r["wait_ns"] <= r["done_ns"] <= r["ready_ns"] for r in rows)


def completed_while_away(world: World) -> tuple[bool, int]:
    """An asynchronous collective ends before anyone waits for it, and the ledger knows when."""
    import time

    LEDGER.reset()
    pending = comm.all_reduce(torch.ones(8), world.group, async_op=True)
    limit = time.monotonic() + 20
    while pending.entry.done_ns is None and time.monotonic() < limit:
        time.sleep(0.001)
    pending.wait()
    pending.wait()  # twice is harmless
    entry = pending.entry
    assert entry.done_ns is not None
    assert entry.wait_ns is not None
    return entry.done_ns < entry.wait_ns, len(LEDGER.take())


def test_completion_is_seen_without_waiting(ranks: GetRanks) -> None:
    assert ranks(2).run(completed_while_away) == [(True, 1)] * 2


def loopback_bytes(world: World, op: str, size: int) -> int:
    """Bytes that crossed the loopback device while one collective ran on all ranks."""
    tensor = torch.ones(size, dtype=torch.uint8)
    shard = torch.empty(size // world.size, dtype=torch.uint8)

    def collective() -> None:
        if op == "reduce_scatter":
            comm.reduce_scatter(shard, tensor, world.group)
        else:
            comm.all_reduce(tensor, world.group)

    collective()  # connections
    counts = []
    for _ in range(3):  # other traffic only adds: the least is ours
        comm.barrier(world.group)
        before = _sent_on_loopback()
        comm.barrier(world.group)
        collective()
        comm.barrier(world.group)
        counts.append(_sent_on_loopback() - before)
    return min(counts)


def _sent_on_loopback() -> int:
    from pathlib import Path

    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter_is_a_true_one(world: int, ranks: GetRanks) -> None:
    """On the wire Ψ(n-1)/n per rank, half of all_reduce's; Gloo's own sends as much as that."""
    size = 16 << 20
    for op in ("all_reduce", "reduce_scatter"):
        sent = ranks(world).run(loopback_bytes, op, size)[0]
        promised = wire_bytes(op, size, world) * world
        assert sent == pytest.approx(promised, rel=0.05), op


def profiled(world: World) -> list[str]:
    LEDGER.reset()
    with torch.profiler.profile() as profile:
        comm.all_reduce(torch.ones(4), world.group, label="grad head")
    return [event.name for event in profile.events() if "shardlab" in event.name]


def test_the_profiler_sees_the_ledgers_number(ranks: GetRanks) -> None:
    names = ["shardlab::all_reduce #0 grad head", "shardlab::wait:all_reduce #0 grad head"]
    assert ranks(2).run(profiled) == [names, names]


def two_steps(world: World) -> tuple[int, int, list[int | None]]:
    LEDGER.reset(full_steps=1)
    for step in range(2):
        LEDGER.step = step
        comm.all_reduce(torch.ones(2), world.group)
    return LEDGER.calls, LEDGER.bytes, [row["step"] for row in LEDGER.take()]


def test_later_steps_are_only_counted(ranks: GetRanks) -> None:
    assert ranks(1).run(two_steps) == [(2, 16, [0])]


def many_under_the_profiler(world: World) -> float:
    """A recorded run under the profiler, in which every message is waited for at once."""
    LEDGER.reset(full_steps=1)
    total = torch.zeros(64)

    def work() -> None:
        for _ in range(400):
            total.copy_(torch.ones(64))
            comm.all_reduce(total, world.group, label="many")

    memory.trace(world.device, work)
    LEDGER.reset()
    return float(total[0])


@pytest.mark.long
def test_a_wait_under_the_profiler_is_no_deadlock(ranks: GetRanks) -> None:
    """Gloo's thread ends a work with its lock held, and wants Python's."""
    assert ranks(2).run(many_under_the_profiler, deadline_s=60) == [2.0, 2.0]


def odd_layouts(world: World) -> dict[str, list[Any]]:
    """Tensors that are not one run of memory: expanded, strided, conjugated."""
    base = torch.full((2,), float(world.rank))
    expanded = base[:1].expand(4096)
    strided = torch.arange(12.0).view(3, 4).t()[::2] + 100 * world.rank
    strided = strided.t().contiguous().t()  # (2, 3) with gaps in its order
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).mul(1 + world.rank).conj()
    for tensor in (expanded, strided, conjugated):
        comm.broadcast(tensor, world.group)
    summed = torch.arange(6.0).view(2, 3).t()
    comm.all_reduce(summed, world.group)
    return {
        "expanded": [base.tolist(), expanded.sum().item()],
        "strided": strided.tolist(),
        "conjugated": torch.view_as_real(conjugated.resolve_conj()).tolist(),
        "summed": summed.tolist(),
    }


def test_tensors_of_any_layout(ranks: GetRanks) -> None:
    first, second = ranks(2).run(odd_layouts)
    assert first["expanded"] == [[0.0, 0.0], 0.0]
    assert second["expanded"] == [[0.0, 1.0], 0.0]  # beside it nothing was written
    assert first["strided"] == second["strided"]
    assert first["conjugated"] == second["conjugated"] == [[1.0, -2.0], [3.0, 1.0]]
    assert first["summed"] == second["summed"] == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


def sums_in_16_bits(world: World) -> tuple[list[float], list[float], list[int]]:
    LEDGER.reset()
    values = torch.tensor([[1.0, 2.0], [2.0**-10, 3.0]])  # with 1, in 16 bits, 2**-10 is lost
    summed = (values + world.rank).t()  # not contiguous
    comm.all_reduce(summed, world.group, dtype=torch.bfloat16)
    scattered = torch.zeros(2)
    flat = values.flatten() + world.rank
    comm.reduce_scatter(scattered, flat, world.group, dtype=torch.bfloat16)
    sizes = [row["bytes"] for row in LEDGER.take()]
    return summed.flatten().tolist(), scattered.tolist(), sizes


def test_sums_in_16_bits(ranks: GetRanks) -> None:
    """Rounded, sent and added up so; the result is in the tensor's own type."""
    small = 2.0**-10 + 1.0
    assert small != torch.tensor(small).bfloat16().item() == 1.0
    for rank, (summed, scattered, sizes) in enumerate(ranks(2).run(sums_in_16_bits)):
        assert summed == [3.0, 1.0, 5.0, 7.0]
        assert scattered == ([3.0, 5.0], [1.0, 7.0])[rank]
        assert sizes == [8, 8]


def messages(world: World, shape: list[int]) -> tuple[list[float], list[dict[str, Any]]]:
    """Both ranks send large messages first, several at a time, and receive in another order."""
    LEDGER.reset()
    other = 1 - world.rank
    sent = [torch.full(shape, 10.0 * world.rank + i) for i in range(3)]
    sends = [
        comm.send(t, world.group, other, tag=i, label=f"part {i}", async_op=True)
        for i, t in enumerate(sent)
    ]
    rooms = [torch.empty(shape) for _ in sent]
    receives = [
        comm.recv(t, world.group, other, tag=i, label=f"part {i}", async_op=True)
        for i, t in enumerate(rooms)
    ]
    for pending in (*reversed(receives), *sends):
        pending.wait()
    return [float(t.sum()) / max(1, t.numel()) for t in rooms], LEDGER.take()


@pytest.mark.parametrize("shape", [[2], [0, 3], [1 << 20]], ids=str)
def test_messages(shape: list[int], ranks: GetRanks) -> None:
    for rank, (found, rows) in enumerate(ranks(2).run(messages, shape)):
        size = 4 * torch.Size(shape).numel()
        assert found == ([10.0 * (1 - rank) + i for i in range(3)] if size else [0.0] * 3)
        assert [row["op"] for row in rows] == ["send"] * 3 + ["recv"] * 3
        assert [row["bytes"] for row in rows] == [size] * 6
        assert [row["sent_inside"] for row in rows] == [size] * 3 + [0] * 3
        assert all(row["ready_ns"] is not None for row in rows)
        assert sum(wire_bytes(row["op"], row["bytes"], 2) for row in rows) == 3 * size


def objects(world: World, key: bytes | None) -> tuple[Any, Any]:
    """Rank 1 sends an object, signed with a key of another run if there is one; and tells one."""
    how: dict[str, Any] = {"tag": 5, "lane": "", "label": "an object", "device": world.device}
    found: Any = None
    if world.rank == 1:
        with mock.patch.object(seal, "_key", key or seal._key):
            sent = comm.send_object({"of": (1, "rank")}, world.group, 0, **how)
        for pending in sent:
            pending.wait()
    else:
        try:
            found = comm.recv_object(world.group, 1, **how)
        except RuntimeError as error:
            found = str(error)
    return found, comm.broadcast_object([world.rank, torch.arange(3)], world.group, 1)


def test_objects_are_read_if_a_rank_of_this_run_has_sent_them(ranks: GetRanks) -> None:
    for key in (None, b"another"):
        (found, told), (_, own) = ranks(2).run(objects, key)
        if key is None:
            assert found == {"of": (1, "rank")}
        else:
            assert "an object that no rank of this run has sent" in found
        assert told[0] == own[0] == 1
        assert told[1].tolist() == [0, 1, 2]


def compared(world: World, label: str) -> str:
    """Under the guard of the first steps: a message for something else is not used."""
    guard = Sequence(world)
    LEDGER.reset()
    LEDGER.check = guard.check
    try:
        if world.rank == 0:
            comm.send(torch.ones(2), world.group, 1, label=label)
        else:
            comm.recv(torch.zeros(2), world.group, 0, label="micro-batch 0")
    except Halt as halt:
        return str(halt)
    finally:
        LEDGER.reset()
    return "right"


def test_a_message_for_something_else_is_not_used(ranks: GetRanks) -> None:
    assert ranks(2).run(compared, "micro-batch 0") == ["right", "right"]
    sender, receiver = ranks(2).run(compared, "micro-batch 1")
    assert sender == "right"
    assert "'micro-batch 1'" in receiver
    assert "(it was not used)" in receiver


def in_groups(world: World) -> str:
    """Ranks 0 and 1 do more in their group than 2 and 3 in theirs: that is right."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    guard = Sequence(world)
    LEDGER.reset()
    mine = halves[world.rank // 2]
    for i in range(1 if world.rank < 2 else 3):
        comm.all_reduce(torch.ones(1), mine, label=f"part {i}")
    comm.all_reduce(torch.ones(1), world.group, label="together")
    try:
        guard.compare()
        label = "odd" if world.rank == 3 else "even"
        comm.all_reduce(torch.ones(1), mine, label=label)
        guard.compare()
    except Halt as halt:
        return str(halt)
    return "right"


def test_ranks_are_compared_in_the_groups_that_they_share(ranks: GetRanks) -> None:
    for text in ranks(4).run(in_groups):
        assert "rank 3 is out of step" in text
        assert "'odd'" in text
        assert "'even'" in text
