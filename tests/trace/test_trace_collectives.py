"""Collectives across ranks: matched, measured, and who was late is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chrome_trace import (
    ENGINE,
    GLOO,
    Event,
    document,
    kernel,
    load,
    operator,
    span,
    step,
    write,
)
from shardlab import trace as traces
from shardlab.trace.parts import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32", "reduce"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("nccl:all_to_all", "all_to_all"),
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:barrier", "barrier"),
        ("_allgather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void rcclGenericKernel<1, 1>", "collective"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def nccl(ts: float, dur: float, id: int, **args: Any) -> list[Event]:
    about = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000,
        "Group size": 2, "dtype": "Float", "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]", **args,
    }  # fmt: skip
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ts, dur, launched=ts - 5, id=id,
                  stream=20, thread=ENGINE, **about)  # fmt: skip


def test_by_ncclls_own_numbers(tmp_path: Path) -> None:
    """Though rank 1's trace lacks the first: by order it would be off by one."""
    a = [step(1, 0, 1000), *nccl(100, 20, 1, Seq=5), *nccl(300, 120, 2, Seq=6)]
    b = [step(1, 0, 1000), *nccl(380, 40, 1, Seq=6)]
    first, second = load(tmp_path, a, b).collectives()
    assert first.matched_by == "alone"
    assert first.last_rank is None
    assert (second.matched_by, second.id, second.last_rank) == ("seq", "0:6", 1)
    assert (second.skew_us, second.transfer_us, second.wait_us) == (80, 40, 80)
    assert [p.wait_us for p in second.participants] == [80, 0]
    assert (second.bytes, second.dtype, second.group_size) == (4000, "Float", 2)
    assert second.algorithm_gbps == pytest.approx(4000 / 40_000)
    assert second.bus_gbps == pytest.approx(4000 / 40_000)  # 2 (n-1)/n of two ranks is 1
    assert second.participants[0].ready_ns == 295_000


def test_by_order_within_group_and_step(tmp_path: Path) -> None:
    a = [step(1, 0, 500), step(2, 500, 500), *nccl(100, 50, 1), *nccl(600, 50, 2)]
    b = [step(2, 500, 500), *nccl(630, 20, 2)]  # rank 1 recorded the second step only
    first, second = load(tmp_path, a, b).collectives()
    assert (first.matched_by, first.step) == ("alone", 1)
    assert (second.matched_by, second.step, second.wait_us) == ("order", 2, 30)


def test_groups_that_share_a_name_are_not_one(tmp_path: Path) -> None:
    """Ranks 0 and 1 are one group, 2 and 3 another; both are called "shard"."""
    ranks = []
    for rank in range(4):
        members = "[0, 1]" if rank < 2 else "[2, 3]"
        group = {"Process Group Name": "shard", "Process Group Ranks": members}
        ranks.append([step(1, 0, 900), *nccl(100 + 10 * rank, 100, 1, Seq=1, **group)])
    found = load(tmp_path, *ranks).collectives()
    assert [[p.rank for p in c.participants] for c in found] == [[0, 1], [2, 3]]
    assert [c.wait_us for c in found] == [10, 10]


def test_an_order_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    """In time, and by their number."""
    a = [step(1, 0, 9000), *nccl(100, 50, 1), *nccl(3000, 50, 2)]
    b = [step(1, 0, 9000), *nccl(3000, 50, 1), *nccl(6000, 50, 2)]
    for other, why in ((b, "cannot be trusted"), (b[:3], "different numbers of collectives")):
        found = load(tmp_path / why, a, other)
        assert {c.matched_by for c in found.collectives()} == {"alone"}
        assert any(why in note for note in found.warnings)
        assert found.stragglers() == ()


def test_bus_bandwidth_is_that_of_the_kind(tmp_path: Path) -> None:
    """4,000 bytes in 50 µs, three ranks: nccl-tests' factors, and none where the bytes may be a
    part."""
    for name, factor in (("allreduce", 4 / 3), ("broadcast", 1), ("reduce", 1), ("gather", None)):
        about = {"Collective name": name, "Group size": 3}
        rank = [step(1, 0, 900), *nccl(100, 50, 1, **about)]
        [row] = load(tmp_path / name, rank, rank, rank).collectives()
        bus = None if factor is None else pytest.approx(factor * 4_000 / 50_000)
        assert (row.kind, row.bus_gbps) == (kind_of(name), bus)


def ours(
    seq: int, label: str, ts: float, start: float, end: float, messages: int = 1
) -> list[Event]:
    """One of our collectives on Gloo: the call, what it enqueued, what Gloo did, the wait."""
    events = [span(f"shardlab::all_gather #{seq} {label}", ts, 10)]
    for i in range(messages):
        events.append(operator("c10d::broadcast_", ts + 1 + 2 * i, 1))
        share = (end - start) / messages
        events.append(span("gloo:broadcast", start + i * share, share, GLOO))
    return [*events, span(f"shardlab::wait:all_gather #{seq} {label}", ts + 10, end - ts - 10)]


def test_by_the_ledger_of_a_run_folder(tmp_path: Path) -> None:
    """Several messages are one collective; its bytes are in the run's ledger."""
    for rank, late in ((0, 0), (1, 40)):
        events = [
            step(7, 0, 1000), span("backward", 0, 500),
            *ours(30, "params blocks.0", 100 + late, 110 + late, 200, messages=2),
            *ours(31, "params root", 300, 310, 400, messages=2),
        ]  # fmt: skip
        stamp = {"rank": rank, "world": 2, "run": "r", "strategy": "zero3", "host": "h"}
        write(
            tmp_path / "traces" / f"rank{rank}" / "t.json.gz",
            document(events, rank, shardlab=stamp),
        )
        row = {"seq": 30, "bytes": 5_000, "dtype": "float32", "ranks": 2}
        (tmp_path / f"ledger.rank{rank}.jsonl").write_text(json.dumps(row) + "\n")
    found = traces.load(tmp_path)
    first, second = found.collectives()
    assert (first.kind, first.label, first.matched_by) == (
        "all_gather",
        "params blocks.0",
        "ledger",
    )
    assert (first.bytes, first.wait_us, first.last_rank) == (5000, 40, 1)
    assert (second.label, second.wait_us, second.bytes) == ("params root", 0, None)
    [kind] = found.collective_summary()
    assert (kind.name, kind.count, kind.wait_us) == ("all_gather", 2, 40)
    assert (kind.bytes, kind.bytes_at_least) == (None, 5000)  # the other's are not known
    assert [row.name for row in found.collective_summary("label")] == [
        "all_gather params blocks.0", "all_gather params root"
    ]  # fmt: skip
    [straggler] = found.stragglers()
    assert (straggler.rank, straggler.phase, straggler.others_waited_us) == (1, "backward", 40)
    assert straggler.worst_label == "all_gather params blocks.0"
    ready = [p.ready_ns for p in first.participants]
    assert ready == [101_000, 141_000]  # launched; then start_ns, end_ns: the bucket's timeline


def test_a_reduce_scatter_of_the_ledger_that_gloo_emulates(tmp_path: Path) -> None:
    """FSDP's: with its label, and with what Gloo sends for it."""
    for rank in (0, 1):
        events = [
            step(7, 0, 1000),
            span("shardlab::reduce_scatter #4 grad root", 100, 10),
            operator("c10d::_reduce_scatter_base_", 101, 1),
            span("gloo:all_reduce", 110, 90, GLOO),
        ]
        stamp = {"rank": rank, "world": 2, "run": "r", "strategy": "pytorch_zero3", "host": "h"}
        path = tmp_path / "traces" / f"rank{rank}" / "t.json.gz"
        write(path, document(events, rank, shardlab=stamp))
    [found] = traces.load(tmp_path).collectives()
    assert (found.kind, found.emulates, found.label) == (
        "all_reduce", "reduce_scatter", "grad root"
    )  # fmt: skip


def test_waits_at_once_count_once(tmp_path: Path) -> None:
    """Two collectives under way wait for the same rank at the same time."""

    def rank(late: float) -> list[Event]:
        return [
            step(1, 0, 1000),
            operator("c10d::allreduce_", 90 + late, 1), operator("c10d::allreduce_", 92 + late, 1),
            span("gloo:all_reduce", 100 + late, 300 - late, GLOO),
            span("gloo:all_reduce", 101 + late, 299 - late, GLOO + 1),
        ]  # fmt: skip

    found = load(tmp_path, rank(0), rank(200))
    [straggler] = found.stragglers()
    assert straggler.collectives == 2
    assert straggler.others_waited_us == 201
    assert straggler.lost_us == 201
    assert sum(c.wait_us for c in found.collectives()) == 400


def test_clocks_of_two_hosts_are_aligned(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead; its collectives end when rank 0's do."""
    ahead = 5_000_000
    a, b = [step(1, 0, 10_000)], [step(1, ahead, 10_000)]
    for i in range(5):
        a += nccl(1000 * i + 100, 200, i)
        b += nccl(ahead + 1000 * i + 250, 50, i)
    found = load(tmp_path / "two", a, b, hosts="ab")
    assert all(c.wait_us == pytest.approx(150) and c.last_rank == 1 for c in found.collectives())
    unknown = load(tmp_path / "unknown", a, b, hosts="")
    assert all(c.wait_us == pytest.approx(150) for c in unknown.collectives())
