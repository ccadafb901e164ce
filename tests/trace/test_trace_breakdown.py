"""The parts of a step are what they should be, add up to wall time, and none is negative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chrome
from chrome import ENGINE, GLOO, MAIN, document, event, kernel, operator, span, step, write
from shardlab import trace as traces
from shardlab.trace.breakdown import BreakdownError, check
from shardlab.trace.intervals import Intervals, union
from shardlab.trace.model import PARTS, Breakdown

# ------------------------------------------------------------------ sets of time

moments = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12)


def intervals(spans: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in spans], np.int64)
    return union(start, start + np.array([d for _, d in spans], np.int64))


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {t for s, d in spans for t in range(s, s + d)}


def covered(part: Intervals) -> set[int]:
    assert (part.end > part.start).all()
    assert (part.start[1:] > part.end[:-1]).all()
    return {t for s, e in zip(part.start, part.end, strict=True) for t in range(s, e)}


@settings(max_examples=300, deadline=None)
@given(moments, moments, st.integers(0, 50), st.integers(0, 50))
def test_sets_of_time(a: Any, b: Any, low: int, high: int) -> None:
    left, right = intervals(a), intervals(b)
    assert covered(left) == points(a)
    assert covered(left & right) == points(a) & points(b)
    assert covered(left | right) == points(a) | points(b)
    assert covered(left - right) == points(a) - points(b)
    assert left.length == len(points(a))
    low, high = sorted((low, high))
    inside = {t for t in points(a) if low <= t < high}
    assert left.lengths(np.array([low, high]))[0] == len(inside)


# ------------------------------------------------------------------ known answers


def one(path: Path, *documents: dict[str, Any]) -> traces.TraceSet:
    for rank, content in enumerate(documents):
        write(path / f"rank{rank}.json", content)
    return traces.load(path)


def parts(row: Breakdown) -> dict[str, float]:
    found = {name.removesuffix("_us"): getattr(row, name) for name in PARTS}
    return {name: value for name, value in found.items() if value} | {"wall": row.wall_us}


def test_a_gpu_step(tmp_path: Path) -> None:
    """Compute hides communication, which hides copies; idle time has a cause."""
    events = [
        step(1, 0, 1000),
        *kernel("gemm", 100, 200, launched=90, id=1),  # 100-300; launched at 90: 0-100 the host's
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 250, 150, launched=91, id=2, stream=20),
        *kernel("Memcpy DtoH", 380, 70, launched=92, id=3, cat="gpu_memcpy", stream=30),
        *kernel("gemm", 500, 100, launched=93, id=4),  # 450-500: launched long before
        *kernel("gemm", 700, 100, launched=650, id=5),  # 600-700: launched too late
        event("cuda_sync", "Stream Sync", 800, 100, 7, stream=7, correlation=9),
        event("gpu_user_annotation", "forward", 0, 1000, 7),
    ]
    [row] = one(tmp_path, document(events)).breakdown()
    assert parts(row) == {
        "compute": 400, "exposed_comm": 100, "memory": 50, "idle_host": 400, "idle": 50,
        "wall": 1000,
    }  # fmt: skip
    assert row.hidden_comm_us == 50
    assert row.comm_us == 150
    assert row.overlap_pct == pytest.approx(100 / 3)


def test_two_half_busy_gpus_are_half_idle(tmp_path: Path) -> None:
    """HTA lays them over one another and finds no idle time."""
    events = [
        step(1, 0, 100),
        *kernel("gemm", 0, 50, launched=0, id=1, device=0),
        *kernel("gemm", 50, 50, launched=1, id=2, device=1),
    ]
    found = one(tmp_path, document(events))
    [row] = found.breakdown()
    assert row.compute_us == 50
    assert row.idle_us + row.idle_host_us == 50
    [exact], [compat] = found.hta(), found.hta(compat=True)
    assert exact.rules == ("gpus-merged",)
    assert (compat.idle_time_us, compat.compute_time_us) == (0, 100)


def gloo_rank(first: float, then: float) -> list[chrome.Event]:
    """Backward until 400, an all-reduce from ``first`` to 600, the optimizer from ``then``."""
    return [
        step(1, 0, 1000),
        operator("aten::linear", 50, 150),
        span("forward", 40, 160),
        span("backward", 200, 200),
        operator("autograd::engine::evaluate_function: MmBackward0", 200, 190),
        operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 390, 210),
        operator("c10d::allreduce_", first - 10, 10),
        span("gloo:all_reduce", first, 600 - first, GLOO),
        operator("aten::copy_", 560, 20, GLOO),  # on Gloo's thread: part of the collective
        span("optimizer", then, 100),
        operator("aten::add_", then, 100),
    ]


def test_a_gloo_step(tmp_path: Path) -> None:
    """Rank 1 comes at 500: what rank 0 waited before that, with nothing else to do, is wait."""
    found = one(
        tmp_path,
        document(gloo_rank(300, 600), rank=0, host_name="a"),
        document(gloo_rank(500, 600), rank=1, host_name="a"),
    )
    first, second = found.breakdown()
    assert parts(first) == {
        "compute": 440, "exposed_comm": 100, "wait": 110, "idle_host": 350, "wall": 1000
    }  # fmt: skip
    assert first.hidden_comm_us == 100  # 290-390, behind backward
    assert parts(second) == {
        "compute": 440, "exposed_comm": 110, "idle_host": 450, "wall": 1000
    }  # fmt: skip
    assert second.wait_us == 0


def test_waiting_in_a_hook_is_no_computation(tmp_path: Path) -> None:
    """Our wait span lies inside an operator's; blocked with nothing under way is idle."""
    events = [
        step(1, 0, 100),
        operator("MyFunctionBackward", 0, 100),
        span("shardlab::wait:all_reduce #3 bucket 0", 20, 50),
        span("gloo:all_reduce", 30, 40, GLOO),
    ]
    [row] = one(tmp_path, document(events)).breakdown()
    assert parts(row) == {"compute": 50, "exposed_comm": 40, "idle": 10, "wall": 100}


def test_a_moment_between_two_threads_counts_once(tmp_path: Path) -> None:
    events = [step(1, 0, 100), operator("aten::a", 0, 60), operator("aten::b", 40, 60, ENGINE)]
    [row] = one(tmp_path, document(events)).breakdown()
    assert parts(row) == {"compute": 100, "wall": 100}


def test_parts_that_do_not_add_up_are_an_error() -> None:
    good = Breakdown(0, 1, 1, 100, 60, 10, 10, 5, 10, 5, 0, 20)
    check(good)
    for wrong in (
        Breakdown(0, 1, 1, 100, 60, 10, 10, 5, 10, 4, 0, 20),
        Breakdown(0, 1, 1, 100, 70, -10, 20, 5, 10, 5, 0, 20),
    ):
        with pytest.raises(BreakdownError):
            check(wrong)


def test_phases_of_a_foreign_trace(tmp_path: Path) -> None:
    """PyTorch marks the optimizer; the autograd engine's thread is backward."""
    events = [
        step(1, 0, 1000),
        *kernel("ncclKernel_AllGather", 100, 10, launched=90, id=1),
        *kernel("gemm", 200, 10, launched=190, id=2, thread=ENGINE),
        *kernel("ncclKernel_ReduceScatter", 300, 10, launched=290, id=3, thread=ENGINE),
        span("Optimizer.step#AdamW.step", 400, 100),
        *kernel("ncclKernel_AllReduce", 450, 10, launched=440, id=4),
        *kernel("ncclKernel_Broadcast", 700, 10, launched=690, id=5),
    ]
    found = one(tmp_path, document(events)).collectives()
    assert [(c.kind, c.phase) for c in found] == [
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
        ("all_reduce", "optimizer"),
        ("broadcast", "other"),
    ]


def test_operators_by_the_time_in_them_alone(tmp_path: Path) -> None:
    events = [step(1, 0, 100), operator("aten::linear", 10, 50), operator("aten::addmm", 20, 30)]
    found = {k.name: k for k in one(tmp_path, document(events)).kernels()}
    assert found["aten::linear"].sum_us == 20
    assert found["aten::addmm"].sum_us == 30


def test_memory_over_time(tmp_path: Path) -> None:
    def at(ts: float, total: int, size: int) -> chrome.Event:
        args = {"Total Allocated": total, "Bytes": size, "Device Id": 0, "Device Type": 1}
        return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7, "tid": 1,
                "ts": ts, "args": args}  # fmt: skip

    events = [
        step(4, 0, 100), span("forward", 10, 40), span("backward", 50, 40),
        at(0, 100, 100), at(20, 300, 200), at(60, 900, 600), at(70, 200, -700), at(100, 100, -100),
    ]  # fmt: skip
    [row] = one(tmp_path, document(events)).memory()
    assert (row.device, row.peak_bytes, row.peak_step, row.peak_phase) == (
        "cuda:0", 900, 4, "backward"
    )  # fmt: skip
    assert (row.p50_bytes, row.p95_bytes, row.resident_bytes) == (200, 900, 100)


def test_what_if(tmp_path: Path) -> None:
    found = one(
        tmp_path,
        document(gloo_rank(300, 600), rank=0, host_name="a"),
        document(gloo_rank(500, 600), rank=1, host_name="a"),
    )
    answers = {a.question: a for a in found.what_if()}
    assert {a.now_us for a in answers.values()} == {1000}
    assert answers["communication were free"].step_us == 900  # rank 0 still waits
    assert answers["the link were twice as fast"].step_us == 950
    assert answers["the straggler were gone"].step_us == 890
    assert all(a.assumption for a in answers.values())


# ------------------------------------------------------------------ every trace we have


@chrome.every_real
def test_parts_sum_to_wall_time_on_every_real_trace(folder: Path) -> None:
    found = traces.load(folder, select="all")
    rows = (*found.breakdown(), *found.breakdown(per="rank"))
    assert len(rows) >= 2 * len(found.ranks)
    for row in rows:
        values = [getattr(row, name) for name in PARTS]
        assert sum(values) == pytest.approx(row.wall_us, rel=1e-3)
        assert min(values) >= 0
        assert 0 <= row.hidden_comm_us <= row.compute_us + 1e-6
    found.summary()
    for lane in found.lanes():
        assert (lane.end_ns > lane.start_ns).all()


def test_main_thread_is_where_steps_are_marked(tmp_path: Path) -> None:
    [trace] = one(tmp_path, document([step(1, 0, 10), operator("aten::a", 1, 1)])).traces
    assert trace.threads[trace.main_thread] == MAIN
