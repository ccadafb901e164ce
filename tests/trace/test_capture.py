"""Traces of real ranks: what is in them, what they cost, and what analysis makes of them."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import RankFailure, UsageError
from shardlab.files import read_jsonl
from shardlab.run.rank import train_rank
from shardlab.world import World

PROFILE = {
    "model.size": "tiny",
    "launch.world": 2,
    "profile.enabled": True,
    "training.steps": 6,
    "profile.active": 2,
}

LATE = '''
"""A strategy whose rank 1 is late, and one that fails on rank 1."""
import time

from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation


class Late(SimpleDDPGradientAccumulation):
    def gradients(self, microbatches):
        if self.group.rank() == 1:
            time.sleep(0.25)
        return super().gradients(microbatches)


class Fails(SimpleDDP):
    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 3 and self.group.rank() == 1:
            raise ValueError("planted")
        super().step()
'''


def run(world: World, values: dict[str, Any]) -> dict[str, Any]:
    return train_rank(world, values, "a test")


def captured(ranks: GetRanks, folder: Path, **overrides: Any) -> dict[str, Any]:
    """A run of two ranks, its traces in ``folder``."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    config = configs.load(None, {**PROFILE, "output.dir": str(folder), **changes})
    result: dict[str, Any] = ranks(2).run(run, config.to_dict())[0]
    return result


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def spans(trace: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    found = [
        e for e in trace["traceEvents"] if e.get("ph") == "X" and re.fullmatch(pattern, e["name"])
    ]
    return sorted(found, key=lambda e: e["ts"])


def test_a_window_is_of_optimizer_steps_and_says_what_it_is(
    ranks: GetRanks, tmp_path: Path
) -> None:
    result = captured(ranks, tmp_path / "run", training__accumulate=2)
    files = [tmp_path / f"run/traces/rank{r}/rank{r}.steps2-3.pt.trace.json.gz" for r in (0, 1)]
    assert result["traces"]["files"] == [str(f) for f in files]
    assert sorted((tmp_path / "run" / "traces").rglob("*.*")) == files  # and nothing half written
    for rank, path in enumerate(files):
        trace = read(path)
        stamp = trace["shardlab"]
        assert (stamp["rank"], stamp["world"], stamp["strategy"]) == (rank, 2, "simple_ddp")
        assert (stamp["run"], stamp["steps"]) == ("run", [2, 3])

        marks = spans(trace, r"ProfilerStep#\d+")
        assert [m["name"] for m in marks] == ["ProfilerStep#2", "ProfilerStep#3"]
        for phase, times in (("forward", 2), ("backward", 2), ("optimizer", 1)):
            for mark in marks:
                inside = [
                    s
                    for s in spans(trace, phase)
                    if mark["ts"] <= s["ts"] and s["ts"] + s["dur"] <= mark["ts"] + mark["dur"]
                ]
                assert len(inside) == times, phase

        # The spans bear the ledger's numbers: all of the two steps', in order, and no others.
        ledger = read_jsonl(tmp_path / "run" / f"ledger.rank{rank}.jsonl")
        mine = [e for e in ledger if e["step"] in (2, 3)]
        names = [f"shardlab::{e['op']} #{e['seq']} {e['label']}" for e in mine]
        assert [s["name"] for s in spans(trace, r"shardlab::[a-z_]+ #.*")] == names
        assert stamp["ledger"] == [mine[0]["seq"], mine[-1]["seq"]]

        # The stamp joins the clocks: a ledger entry's time is that of its span.
        clock = stamp["clock"][0]
        first = spans(trace, r"shardlab::[a-z_]+ #.*")[0]
        unix = first["ts"] * 1000 + trace["baseTimeNanoseconds"]
        enqueued = mine[0]["enqueue_ns"] - clock["monotonic_ns"] + clock["unix_ns"]
        assert abs(unix - enqueued) < 20e6


def test_the_size_is_estimated_before_and_steps_are_marked(ranks: GetRanks, tmp_path: Path) -> None:
    result = captured(ranks, tmp_path / "run", profile__shapes=True)
    size = result["traces"]["bytes"]
    assert 0.5 < result["traces"]["estimated_bytes"] / size < 2
    rows = read_jsonl(tmp_path / "run" / "rank0.jsonl")
    # Step 0 is left alone, 1 is the warm-up, 2 and 3 are kept.
    assert [row["profiled"] for row in rows] == [False, True, True, True, False, False]
    trace = read(Path(result["traces"]["files"][0]))
    assert any("Input Dims" in e.get("args", {}) for e in spans(trace, "aten::addmm"))


def test_windows_repeat_and_may_end_with_the_run(ranks: GetRanks, tmp_path: Path) -> None:
    result = captured(
        ranks, tmp_path / "run", profile__repeat=2, profile__wait=0, profile__memory=True
    )
    names = [Path(f).name for f in result["traces"]["files"][:2]]
    assert names == [f"rank0.steps{s}.pt.trace.json.gz" for s in ("1-2", "4-5")]
    trace = read(Path(result["traces"]["files"][1]))
    assert [m["name"] for m in spans(trace, r"ProfilerStep#.*")] == [
        "ProfilerStep#4", "ProfilerStep#5",
    ]  # fmt: skip
    assert any(e["name"] == "[memory]" for e in trace["traceEvents"])
    assert all(row["data_ms"] < 1000 for row in read_jsonl(tmp_path / "run" / "rank0.jsonl"))


# A collective that ends after the profiler has crashes the process (torch 2.13): those that
# leave some under way after a step, and PyTorch's own.
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"])
def test_windows_close_whatever_is_under_way(
    ranks: GetRanks, tmp_path: Path, strategy: str
) -> None:
    result = captured(ranks, tmp_path / "run", strategy__name=strategy, profile__active=1)
    for path in result["traces"]["files"]:
        trace = read(Path(path))
        assert len(spans(trace, "gloo:.*")) >= 2
        assert len(spans(trace, "backward")) == 1


def test_a_run_without_a_profile_has_no_traces(ranks: GetRanks, tmp_path: Path) -> None:
    result = captured(ranks, tmp_path / "run", profile__enabled=False)
    assert result["traces"] is None
    assert not (tmp_path / "run" / "traces").exists()
    assert not any(row["profiled"] for row in read_jsonl(tmp_path / "run" / "rank0.jsonl"))


def test_a_crash_in_a_window_leaves_no_broken_trace(ranks: GetRanks, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    with pytest.raises(RankFailure, match="rank 1: ValueError: planted") as caught:
        captured(ranks, tmp_path / "run", strategy__name=f"{tmp_path}/late.py:Fails")
    assert 'raise ValueError("planted")' in (caught.value.traceback or "")
    assert len(read_jsonl(tmp_path / "run" / "rank1.jsonl")) == 2
    assert not list((tmp_path / "run").rglob("*.json*.part"))
    assert not list((tmp_path / "run").rglob("*.gz"))


@pytest.mark.long
def test_a_crash_in_a_window_under_torchrun_is_the_error_that_is_told(tmp_path: Path) -> None:
    """Python's own end with the profiler on would be a second crash, and torchrun tell of that."""
    (tmp_path / "late.py").write_text(LATE)
    done = commands.run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
        "-m", "shardlab", "train", "--size", "tiny", "--steps", "6", "--profile", "--out", "run",
        "--strategy", "./late.py:Fails",
        cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: rank 1: ValueError: planted" in done.stderr
    assert "SIGSEGV" not in done.stderr
    assert not list(tmp_path.rglob("*.gz*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"profile.shapes": True}, "profile.shapes is for a profiled run; add --profile"),
        ({"profile.enabled": True, "training.steps": 4}, "the profile needs 5 steps"),
        ({"profile.enabled": True, "profile.warmup": 0}, "profile.warmup must be at least 1"),
        ({"profile.active": 0}, "profile.active must be at least 1, got 0"),
        ({"profile.wait": -1}, "profile.wait must be 0 or more, got -1"),
        ({"profile.actve": 3}, "did you mean 'active'"),
    ],
)
def test_refusals(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configs.load(None, overrides)


def test_no_snapshot_without_a_gpu(ranks: GetRanks, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"made by PyTorch's CUDA allocator.*use profile.memory"):
        captured(ranks, tmp_path / "run", profile__memory_snapshot=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_compare_profiles_after_it_has_timed(tmp_path: Path) -> None:
    done = commands.here(
        "compare", "--size", "tiny", "--repeats", "1", "--steps", "2", "--out", "out", "--profile",
        "--set", "profile.active=1", "--strategies", "single,pytorch_ddp:bucket_mb=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    single, ddp = result["cells"]
    assert single["step_ms"]["n"] == ddp["step_ms"]["n"] == 2
    assert result["config"]["profile"]["enabled"] is False  # while timing
    assert [len(c["traces"]["files"]) for c in (single, ddp)] == [1, 2]
    assert Path(ddp["traces"]["folder"]).name == "pytorch_ddp-bucket_mb=1"
    assert (tmp_path / ddp["traces"]["files"][1]).exists()
    lines = done.stderr.splitlines()
    order = [i for i, line in enumerate(lines) if "traces" in line]
    assert order[0] > max(i for i, line in enumerate(lines) if "memory" in line)
    trace = read(tmp_path / ddp["traces"]["files"][0])
    assert trace["shardlab"]["strategy"] == "pytorch_ddp (bucket_mb=1)"


# ------------------------------------------------------------------ what analysis makes of them


@pytest.mark.alone
def test_a_late_rank_is_named_and_its_lateness_measured(ranks: GetRanks, tmp_path: Path) -> None:
    """Rank 1 sleeps 250 ms in each step: that, within 10%, is what rank 0 waits."""
    from shardlab import trace as traces
    from shardlab.report import trace as report

    (tmp_path / "late.py").write_text(LATE)
    captured(ranks, tmp_path / "run", strategy__name=f"{tmp_path}/late.py:Late", profile__active=3)
    found = traces.load(tmp_path / "run")
    waits: dict[int, list[float]] = {0: [], 1: []}
    for row in found.breakdown():
        waits[row.rank].append(row.wait_us)
    assert len(waits[0]) == 3
    # The median: another process on the machine may hold up either rank in one of the steps.
    assert statistics.median(waits[0]) == pytest.approx(250_000, rel=0.1)
    assert statistics.median(waits[1]) < 25_000
    worst = max(found.stragglers(), key=lambda row: row.others_waited_us)
    assert worst.rank == 1
    assert "Rank 1 is the slow one" in report.verdict(found)


@pytest.mark.alone
def test_overlap_is_seen_where_there_is_some(ranks: GetRanks, tmp_path: Path) -> None:
    """DDP hides communication behind backward, and simple_ddp cannot."""
    from shardlab import trace as traces

    overlap = {}
    for strategy in ("simple_ddp_ga", "simple_ddp", "pytorch_ddp"):
        folder = tmp_path / strategy
        captured(
            ranks, folder, strategy__name=strategy, model__size="mini", profile__active=3,
            **({"strategy__options": {"bucket_mb": 1}} if strategy == "pytorch_ddp" else {}),
        )  # fmt: skip
        rows = traces.load(folder).breakdown(per="rank")
        overlap[strategy] = 100 * sum(r.hidden_comm_us for r in rows) / sum(r.comm_us for r in rows)
    assert overlap["simple_ddp_ga"] < 3
    assert overlap["pytorch_ddp"] > overlap["simple_ddp"] + 10
