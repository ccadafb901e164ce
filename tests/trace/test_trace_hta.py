"""HTA's numbers: equal to those it recorded on real traces, and right where it is wrong."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import chrome
from chrome import document, event, kernel, operator, step, write
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
    return [f / kind for f in chrome.FOLDERS if (f / kind / "temporal_breakdown.csv").is_file()]


def named(folders: list[Path]) -> dict[str, list[Any]]:
    return {"argvalues": folders, "ids": [f"{f.parent.name}-{f.name}" for f in folders]}  # type: ignore[dict-item]


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
    for row in found.hta(compat=by_its_rules):
        assert row.kernel_time_us is not None
        theirs = recorded[row.rank]
        whole = float(theirs["kernel_time(us)"])
        differs = {rule for r in found.hta() for rule in r.rules} - {hta.ROUNDING}
        for mine, name in TIMES.items():
            share = 100 * getattr(row, mine) / row.kernel_time_us
            same = share == pytest.approx(100 * float(theirs[name]) / whole, abs=0.01)
            assert same or (differs and not by_its_rules)
        text = overlaps[row.rank]["comp_comm_overlap_pctg"]
        if text:
            assert row.comm_comp_overlap_pctg == pytest.approx(float(text), abs=0.0051)
        else:
            assert row.comm_comp_overlap_pctg is None


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


@pytest.mark.parametrize("tables", **named(with_tables("hta")))
def test_exact_numbers_differ_from_htas_only_by_named_rules(tables: Path) -> None:
    found = traces.load(tables.parent)
    for exact, compat in zip(found.hta(), found.hta(compat=True), strict=True):
        same = all(
            getattr(exact, name) == pytest.approx(getattr(compat, name), rel=1e-9)
            for name in (*TIMES, "kernel_time_us")
        )
        assert same or exact.rules
        assert exact.rules == RULES[tables.parent.name]


def test_hta_fails_on_a_trace_of_ours_whose_kernels_are_shorter_than_a_microsecond() -> None:
    """It rounds them to a negative length, and stops: only its numbers without rounding exist."""
    found = traces.load(chrome.RECORDED / "h200_unmarked")
    [compat], [exact] = found.hta(compat=True), found.hta()
    assert compat.non_compute_time_us < 0  # type: ignore[operator]
    assert exact.non_compute_time_us > 0  # type: ignore[operator]


TYPES_AND_IDLE = [
    folder
    for folder in chrome.FOLDERS
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


def load(path: Path, events: list[chrome.Event], **metadata: Any) -> traces.TraceSet:
    return traces.load(write(path / "rank0.json", document(events, **metadata)))


def both(found: traces.TraceSet) -> tuple[Any, Any]:
    return found.hta()[0], found.hta(compat=True)[0]


def test_rounding_to_microseconds_shrinks_kernels(tmp_path: Path) -> None:
    """Ten kernels of 1.8 µs, back to back: HTA sees them idle more than half of the time."""
    events = [step(1, 0.5, 100)]
    for i in range(10):
        events += kernel("k", 10.5 + 1.8 * i, 1.8, launched=1.5, id=i)
    exact, compat = both(load(tmp_path, events))
    assert exact.idle_time_us == pytest.approx(0, abs=0.02)
    assert exact.compute_time_us == pytest.approx(18, abs=0.02)
    assert exact.rules == (hta.ROUNDING,)
    assert compat.idle_time_us > 0.3 * compat.kernel_time_us


def test_a_kernel_under_a_microsecond_counts_negative_in_hta(tmp_path: Path) -> None:
    events = [step(1, 0.5, 100), *kernel("k", 10.2, 0.5, launched=1, id=1)]
    events += kernel("k", 20.0, 4.0, launched=2.5, id=2)
    _, compat = both(load(tmp_path, events))
    assert compat.compute_time_us == 3  # 4, less the 1 of [11, 10]


def test_operators_with_a_stream_are_not_gpu_work(tmp_path: Path) -> None:
    events = [
        step(1, 0, 200),
        operator("triton_poi_fused_0", 10, 90, stream=0, kernel_backend="triton"),
        *kernel("triton_poi_fused_0", 120, 10, launched=50, id=1),
    ]
    exact, compat = both(load(tmp_path, events))
    assert (exact.compute_time_us, compat.compute_time_us) == (10, 100)
    assert exact.rules == (hta.OPERATORS,)


def test_waiting_for_a_stream_is_not_work(tmp_path: Path) -> None:
    events = [
        step(1, 0, 200),
        *kernel("k", 10, 10, launched=1, id=1),
        event("cuda_sync", "Stream Sync", 20, 50, 7, stream=7, correlation=2),
        *kernel("k", 80, 10, launched=2, id=3),
    ]
    exact, compat = both(load(tmp_path, events))
    assert (exact.idle_time_us, compat.idle_time_us) == (60, 10)
    assert exact.rules == (hta.SYNCS,)


def test_step_markers_on_the_gpu_do_not_move_the_cut(tmp_path: Path) -> None:
    """The last of several steps is left out: from where the host began it."""
    events = [
        step(1, 0, 100), step(2, 100, 100),
        event("gpu_user_annotation", "ProfilerStep#2", 180, 50, 7),
        *kernel("k", 50, 10, launched=10, id=1),
        *kernel("k", 190, 10, launched=150, id=2),  # of step 2
    ]  # fmt: skip
    exact, compat = both(load(tmp_path, events))
    assert (exact.compute_time_us, compat.compute_time_us) == (10, 20)
    assert exact.rules == (hta.GPU_MARKERS,)


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
    found = load(tmp_path, events)
    [trace] = found.traces
    words = ("comm", "memory", "compute", "other")
    assert words[int(hta.gpu_events(trace).type[0])] == ours
    assert words[int(hta.gpu_events(trace, hta.RULES).type[0])] == theirs


def test_a_rank_written_without_a_space_is_read(tmp_path: Path) -> None:
    """HTA's pattern wants one, else every file is rank 0."""
    events = document([step(1, 0, 10), *kernel("k", 1, 2, launched=0, id=1)], rank=5)
    text = json.dumps(events, separators=(",", ":")).encode()
    assert traces.load(write(tmp_path / "t.json", text)).ranks == (5,)


def test_cpu_traces_have_none_of_htas_numbers(tmp_path: Path) -> None:
    [row] = load(tmp_path, [step(1, 0, 10), operator("aten::mm", 1, 5)]).hta()
    assert row.kernel_time_us is None
    assert row.comm_comp_overlap_pctg is None
