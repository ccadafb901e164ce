"""HTA's numbers: equal to those it recorded on real traces, and right where it is wrong."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import chrome_trace
from chrome_trace import event, kernel, operator, step
from shardlab import trace as traces
from shardlab.trace import hta
from shardlab.trace.model import Trace

TIMES = {
    "idle_time_us": "idle_time(us)",
    "compute_time_us": "compute_time(us)",
    "non_compute_time_us": "non_compute_time(us)",
}


def table(path: Path) -> dict[int, dict[str, str]]:
    with path.open(newline="") as file:
        return {int(row["rank"]): row for row in csv.DictReader(file)}


def with_tables(kind: str) -> list[Path]:
    return [
        f / kind for f in chrome_trace.FOLDERS if (f / kind / "temporal_breakdown.csv").is_file()
    ]


def named(folders: list[Path]) -> dict[str, list[Any]]:
    return {"argvalues": folders, "ids": [f"{f.parent.name}-{f.name}" for f in folders]}  # type: ignore[dict-item]


# HTA's rules that change a number of these traces by more than 0.01 points.
RULES = {
    "cp_event_sync": ("sync-is-work",),
    "dlrm_kineto": (),
    "h200_gloo": ("ns-rounding",),
    "h200_nccl": ("ns-rounding", "gpu-step-markers"),
    "nccl_parser_config": ("ns-rounding",),
    "ns_resolution": ("ns-rounding",),
    "trace_filter": (),
    "triton_example": ("ns-rounding", "stream-on-operator"),
}


@pytest.mark.parametrize("tables", **named([*with_tables("hta"), *with_tables("hta_no_rounding")]))
def test_equal_to_what_hta_recorded(tables: Path) -> None:
    """By its rules (``hta``) and, where it was told not to round, exactly: to 0.01 points.

    A difference of the exact numbers must be named by a rule.
    """
    by_its_rules = tables.name == "hta"
    recorded = table(tables / "temporal_breakdown.csv")
    overlaps = table(tables / "comm_comp_overlap.csv")
    found = traces.load(tables.parent)
    assert set(recorded) == set(found.ranks)
    every_exact, every_compat = found.hta(), found.hta(compat=True)
    for exact, compat in zip(every_exact, every_compat, strict=True):
        same = all(
            getattr(exact, name) == pytest.approx(getattr(compat, name), rel=1e-9)
            for name in (*TIMES, "kernel_time_us")
        )
        assert same or exact.rules
        if by_its_rules:
            assert exact.rules == RULES[tables.parent.name]
    for row in every_compat if by_its_rules else every_exact:
        assert row.kernel_time_us is not None
        theirs = recorded[row.rank]
        whole = float(theirs["kernel_time(us)"])
        differs = {rule for r in every_exact for rule in r.rules} - {hta.ROUNDING}
        for mine, name in TIMES.items():
            share = 100 * getattr(row, mine) / row.kernel_time_us
            same = share == pytest.approx(100 * float(theirs[name]) / whole, abs=0.01)
            assert same or (differs and not by_its_rules)
        text = overlaps[row.rank]["comp_comm_overlap_pctg"]
        if text:
            assert row.comm_comp_overlap_pctg == pytest.approx(float(text), abs=0.0051)
        else:
            assert row.comm_comp_overlap_pctg is None


def test_hta_fails_on_a_trace_of_ours_whose_kernels_are_shorter_than_a_microsecond() -> None:
    """It rounds them to a negative length, and stops: only its numbers without rounding exist."""
    found = traces.load(chrome_trace.RECORDED / "h200_unmarked")
    [compat], [exact] = found.hta(compat=True), found.hta()
    assert compat.non_compute_time_us < 0  # type: ignore[operator]
    assert exact.non_compute_time_us > 0  # type: ignore[operator]


TYPES_AND_IDLE = [
    folder
    for folder in chrome_trace.FOLDERS
    if folder.name in ("dlrm_kineto", "trace_filter", "nccl_parser_config", "h200_gloo",
                       "h200_unmarked")
]  # fmt: skip


@pytest.mark.parametrize("folder", **named(TYPES_AND_IDLE))
def test_kernel_types_and_idle_time(folder: Path) -> None:
    exact, name = folder / "hta_no_rounding", folder.name
    recorded = exact if exact.is_dir() else folder / "hta"
    found = traces.load(folder)
    with (recorded / "kernel_type_breakdown.csv").open(newline="") as file:
        theirs = {row["kernel_type"]: float(row["percentage"]) for row in csv.DictReader(file)}
    ours = {row.type: row.percentage for row in found.kernel_types()}
    if exact.is_dir():  # HTA cuts every stretch down to whole microseconds
        ours = cut_to_microseconds(found.traces)
    assert set(theirs) <= set(ours) | {k for k, v in theirs.items() if v == 0}
    for kind, share in theirs.items():
        assert ours.get(kind, 0) == pytest.approx(share, abs=0.051)
    idle: dict[tuple[int, int, str], float] = {}
    with (recorded / "idle_time_breakdown.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = int(row["rank"]), int(row["stream"]), row["idle_category"]
            idle[key] = float(row["idle_time"])
    for mine in found.idle():
        theirs_now = [idle.get((mine.rank, mine.stream, kind), 0) for kind in CATEGORIES]
        ours_now = [getattr(mine, f"{kind}_us") for kind in CATEGORIES]
        assert sum(ours_now) == pytest.approx(sum(theirs_now), abs=1)
        if (name, mine.rank) not in LAUNCHED_BEFORE:
            assert ours_now == pytest.approx(theirs_now, abs=1)


def cut_to_microseconds(every: Iterable[Trace]) -> dict[str, float]:
    whole: Counter[str] = Counter()
    for trace in every:
        gpu = hta.gpu_events(trace)
        compute, comm, memory = (
            gpu.busy(kind) for kind in (hta.COMPUTATION, hta.COMMUNICATION, hta.MEMORY)
        )
        parts = {
            "COMPUTATION": compute - comm - memory,
            "COMMUNICATION": comm - compute - memory,
            "COMPUTATION overlapping COMMUNICATION": (compute & comm) - memory,
            "MEMORY": memory - compute - comm,
            "COMMUNICATION overlapping MEMORY": (comm & memory) - compute,
        }
        for name, part in parts.items():
            whole[name] += int(((part.end - part.start) // 1000).sum())
    return {name: 100 * time / whole.total() for name, time in whole.items()}


CATEGORIES = ("host_wait", "kernel_wait", "other")
# Kernels here were launched before the window. HTA takes the file's first event for their launch.
LAUNCHED_BEFORE = {("dlrm_kineto", 1), ("dlrm_kineto", 3)}


# ------------------------------------------------------------------ where HTA is wrong

SHORT_KERNELS = [step(1, 0.5, 100)]
for i in range(10):
    SHORT_KERNELS += kernel("k", 10.5 + 1.8 * i, 1.8, launched=1.5, id=i)
OPERATOR_WITH_A_STREAM = [
    step(1, 0, 100),
    operator("triton_poi_fused_0", 10, 90, stream=0, kernel_backend="triton"),
    *kernel("triton_poi_fused_0", 120, 10, launched=50, id=1),
]
WAITING_FOR_A_STREAM = [
    step(1, 0, 100),
    *kernel("k", 10, 10, launched=1, id=1),
    event("cuda_sync", "Stream Sync", 20, 50, 7, stream=7, correlation=2),
    *kernel("k", 80, 10, launched=2, id=3),
]
# The last of several steps is left out: from where the host began it.
STEP_MARKED_ON_THE_GPU = [
    step(1, 0, 100),
    step(2, 100, 100),
    event("gpu_user_annotation", "ProfilerStep#2", 180, 50, 7),
    *kernel("k", 50, 10, launched=10, id=1),
    *kernel("k", 190, 10, launched=150, id=2),  # of step 2
]
TWO_GPUS = [
    step(1, 0, 100),
    *kernel("gemm", 0, 50, launched=0, id=1, device=0),
    *kernel("gemm", 50, 50, launched=1, id=2, device=1),
]
UNDER_A_MICROSECOND = [
    step(1, 0.5, 100),
    *kernel("k", 10.2, 0.5, launched=1, id=1),
    *kernel("k", 20.0, 4.0, launched=2.5, id=2),
]


@pytest.mark.parametrize(
    ("events", "number", "ours", "theirs", "rules"),
    [
        # Back to back: HTA sees them idle more than half of the time.
        (SHORT_KERNELS, "idle_time_us", 0, 9, (hta.ROUNDING,)),
        (SHORT_KERNELS, "compute_time_us", 18, 8, (hta.ROUNDING,)),
        (UNDER_A_MICROSECOND, "compute_time_us", 4.5, 3, (hta.ROUNDING,)),  # 4, less 1 of [11, 10]
        (OPERATOR_WITH_A_STREAM, "compute_time_us", 10, 100, (hta.OPERATORS,)),
        (WAITING_FOR_A_STREAM, "idle_time_us", 60, 10, (hta.SYNCS,)),
        (STEP_MARKED_ON_THE_GPU, "compute_time_us", 10, 20, (hta.GPU_MARKERS,)),
        (TWO_GPUS, "compute_time_us", 50, 100, ("gpus-merged",)),  # HTA lays one over the other
    ],
)
def test_where_hta_is_wrong(
    events: list[chrome_trace.Event], number: str, ours: float, theirs: float,
    rules: tuple[str, ...], tmp_path: Path,
) -> None:  # fmt: skip
    found = chrome_trace.load(tmp_path, events)
    [exact], [compat] = found.hta(), found.hta(compat=True)
    assert getattr(exact, number) == pytest.approx(ours, abs=0.02)
    assert getattr(compat, number) == pytest.approx(theirs)
    assert exact.rules == rules


@pytest.mark.parametrize(
    ("name", "category", "ours", "theirs"),
    [
        ("void batch_norm_collect_SyncStatistics<float>()", "kernel", "compute", "other"),
        ("fused_dma_gemm", "kernel", "compute", "other"),
        ("hip_fused_layernorm", "kernel", "compute", "comm"),
        ("hipMemcpyAsync", "gpu_memcpy", "memory", "comm"),
        ("rcclGenericKernel", "kernel", "comm", "compute"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args)", "kernel", "comm", "comm"),
    ],
)  # fmt: skip
def test_what_a_kernel_is(name: str, category: str, ours: str, theirs: str, tmp_path: Path) -> None:
    events = [step(1, 0, 200), *kernel(name, 10, 10, launched=1, id=1, cat=category)]
    [trace] = chrome_trace.load(tmp_path, events).traces
    words = ("comm", "memory", "compute", "other")
    assert words[int(hta.gpu_events(trace).type[0])] == ours
    assert words[int(hta.gpu_events(trace, hta.RULES).type[0])] == theirs


def test_a_rank_written_without_a_space_is_read(tmp_path: Path) -> None:
    """HTA's pattern wants one, else every file is rank 0."""
    events = chrome_trace.document([step(1, 0, 10)], rank=5)
    text = json.dumps(events, separators=(",", ":")).encode()
    assert traces.load(chrome_trace.write(tmp_path / "t.json", text)).ranks == (5,)


def test_cpu_traces_have_none_of_htas_numbers(tmp_path: Path) -> None:
    [row] = chrome_trace.load(tmp_path, [step(1, 0, 10), operator("aten::mm", 1, 5)]).hta()
    assert row.kernel_time_us is None
    assert row.comm_comp_overlap_pctg is None
