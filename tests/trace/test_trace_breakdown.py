"""The parts of a step are what they should be, add up to wall time, and none is negative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chrome_trace
from chrome_trace import (
    ENGINE,
    GLOO,
    MAIN,
    Event,
    allocation,
    event,
    kernel,
    load,
    operator,
    parts,
    span,
    step,
)
from shardlab import trace as traces
from shardlab.trace.breakdown import BreakdownError, check, what_if
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

BUSY_GPU = [
    *kernel("gemm", 100, 200, launched=90, id=1),  # 100-300; launched at 90: 0-100 the host's
    *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 250, 150, launched=91, id=2, stream=20),
    *kernel("Memcpy DtoH", 380, 70, launched=92, id=3, cat="gpu_memcpy", stream=30),
    *kernel("gemm", 500, 100, launched=93, id=4),  # 450-500: launched long before
    *kernel("gemm", 700, 100, launched=650, id=5),  # 600-700: launched too late
    event("cuda_sync", "Stream Sync", 800, 100, 7, stream=7, correlation=9),
    event("gpu_user_annotation", "forward", 0, 1000, 7),
]
HALF_BUSY_GPUS = [
    *kernel("gemm", 0, 500, launched=0, id=1, device=0),
    *kernel("gemm", 500, 500, launched=1, id=2, device=1),
]
# Our wait span lies inside an operator's; blocked with nothing under way is idle.
WAITING_IN_A_HOOK = [
    operator("MyFunctionBackward", 0, 1000),
    span("shardlab::wait:all_reduce #3 bucket 0", 200, 500),
    span("gloo:all_reduce", 300, 400, GLOO),
]
# Of an operator that calls a collective, only the operators inside compute. A functional collective
# waits in an operator.
CALLING_A_COLLECTIVE = [
    operator("ParallelBackward", 0, 300),
    operator("aten::mm", 0, 100),
    operator("c10d::allreduce_", 100, 10),
    span("gloo:all_reduce", 110, 180, GLOO),
    operator("Torch-Compiled Region: 0/0", 400, 300),
    operator("_c10d_functional::all_reduce", 500, 20),
    operator("c10d::allreduce_", 505, 10),
    span("gloo:all_reduce", 515, 60, GLOO),
    operator("_c10d_functional::wait_tensor", 520, 60),
]
TWO_THREADS = [operator("aten::a", 0, 600), operator("aten::b", 400, 600, ENGINE)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Compute hides communication, which hides copies; idle time has a cause.
        (BUSY_GPU, {"compute": 400, "exposed_comm": 100, "memory": 50, "idle_host": 400,
                    "idle": 50, "hidden_comm": 50, "comm": 150}),
        (HALF_BUSY_GPUS, {"compute": 500, "idle_host": 500}),  # two of them are half idle
        (WAITING_IN_A_HOOK, {"compute": 500, "exposed_comm": 400, "idle": 100, "comm": 400}),
        (CALLING_A_COLLECTIVE, {"compute": 100 + 300 - 20 - 60, "exposed_comm": 10 + 180 + 20 + 60,
                                "idle_host": 410, "comm": 270}),
        (TWO_THREADS, {"compute": 1000}),  # a moment between two threads counts once
    ],
    ids=["gpu", "two gpus", "hook", "operator", "threads"],
)  # fmt: skip
def test_a_step_of_one_rank(
    events: list[Event], expected: dict[str, float], tmp_path: Path
) -> None:
    [row] = load(tmp_path, [step(1, 0, 1000), *events]).breakdown()
    all_comm = {"hidden_comm": row.hidden_comm_us, "comm": row.comm_us}
    assert parts(row) | {name: us for name, us in all_comm.items() if us} == expected
    assert row.wall_us == 1000
    comm = expected.get("comm")
    overlap = None if comm is None else 100 * expected.get("hidden_comm", 0) / comm
    assert row.overlap_pct == (overlap and pytest.approx(overlap))


def gloo_rank(first: float) -> list[Event]:
    """Backward until 400, an all-reduce from ``first`` to 600, the optimizer after it."""
    return [
        step(1, 0, 1000),
        operator("aten::linear", 50, 150),
        span("forward", 40, 160),
        span("backward", 200, 200),
        operator("autograd::engine::evaluate_function: MmBackward0", 200, 190),
        operator("MmBackward0", 200, 90),
        operator("MmBackward0", 300, 90),
        operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 390, 210),
        operator("c10d::allreduce_", first - 10, 10),
        span("gloo:all_reduce", first, 600 - first, GLOO),
        operator("aten::copy_", 560, 20, GLOO),  # on Gloo's thread: part of the collective
        span("optimizer", 600, 100),
        operator("aten::add_", 600, 100),
    ]


def test_a_gloo_step(tmp_path: Path) -> None:
    """Rank 1 comes at 500: what rank 0 waited before that, with nothing else to do, is wait."""
    found = load(tmp_path, gloo_rank(300), gloo_rank(500))
    first, second = found.breakdown()
    assert parts(first) == {"compute": 430, "exposed_comm": 110, "wait": 110, "idle_host": 350}
    assert first.hidden_comm_us == 90  # 300-390, behind backward
    assert parts(second) == {"compute": 430, "exposed_comm": 110, "idle_host": 460}
    answers = {a.question: a for a in found.what_if()}
    assert {a.now_us for a in answers.values()} == {1000}
    assert answers["communication were free"].step_us == 890  # rank 0 still waits
    assert answers["the link were twice as fast"].step_us == 945
    assert answers["the straggler were gone"].step_us == 890
    assert all(a.assumption for a in answers.values())


def test_without_the_straggler_a_step_is_shorter_by_no_more_than_was_waited() -> None:
    """The windows of two ranks differ by 20, although nobody waited for more than 5."""
    rest = {"exposed_comm_us": 0.0, "memory_us": 0.0, "idle_host_us": 0.0, "idle_us": 0.0,
            "hidden_comm_us": 0.0, "comm_us": 5.0}  # fmt: skip
    rows = [Breakdown(0, 1, 1, 100.0, 100.0, wait_us=0.0, **rest)]
    rows += [Breakdown(1, 1, 1, 80.0, 75.0, wait_us=5.0, **rest)]
    [gone] = [answer for answer in what_if(rows) if answer.question == "the straggler were gone"]
    assert (gone.now_us, gone.step_us) == (100, 95)


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
    found = load(tmp_path, events).collectives()
    assert [(c.kind, c.phase) for c in found] == [
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
        ("all_reduce", "optimizer"),
        ("broadcast", "other"),
    ]


def test_operators_by_the_time_in_them_alone(tmp_path: Path) -> None:
    """With the span that the autograd engine puts around one: each is listed once."""
    engine = "autograd::engine::evaluate_function: "
    events = [
        step(1, 0, 500),
        operator(f"{engine}MmBackward0", 10, 100), operator("MmBackward0", 20, 80),
        operator("aten::mm", 30, 60), operator(f"{engine}Other", 200, 50),
    ]  # fmt: skip
    found = load(tmp_path, events)
    assert [(row.name, row.count, row.sum_us) for row in found.kernels()] == [
        ("aten::mm", 1, 60), ("Other", 1, 50), ("MmBackward0", 1, 40)
    ]  # fmt: skip
    [trace] = found.traces
    assert trace.threads[trace.main_thread] == MAIN  # where steps are marked


def test_memory_over_time(tmp_path: Path) -> None:
    held = ((0, 100, 100), (20, 300, 200), (60, 900, 600), (70, 200, -700), (100, 100, -100))
    events = [step(4, 0, 100), span("forward", 10, 40), span("backward", 50, 40)]
    events += [allocation(*at, device=0) for at in held]
    [row] = load(tmp_path, events).memory()
    assert (row.device, row.peak_bytes, row.peak_step, row.peak_phase) == (
        "cuda:0", 900, 4, "backward"
    )  # fmt: skip
    assert (row.p50_bytes, row.p95_bytes, row.resident_bytes) == (200, 900, 100)


# ------------------------------------------------------------------ every trace we have


@chrome_trace.every_real
def test_parts_sum_to_wall_time_on_every_real_trace(folder: Path) -> None:
    found = traces.load(folder, select="all")
    rows = (*found.breakdown(), *found.breakdown(per="rank"))
    assert len(rows) >= 2 * len(found.ranks)
    for row in rows:
        values = [getattr(row, name) for name in PARTS]
        assert sum(values) == pytest.approx(row.wall_us, rel=1e-3)
        assert min(values) >= 0
        assert 0 <= row.hidden_comm_us <= row.compute_us + 1e-6
        assert row.comm_us == pytest.approx(
            row.hidden_comm_us + row.exposed_comm_us + row.wait_us, rel=1e-3
        )
    found.summary()
    for lane in found.lanes():
        assert (lane.end_ns > lane.start_ns).all()
