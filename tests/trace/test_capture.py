"""Traces of real ranks: what is in them, what they cost, and what analysis makes of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import commands
from chrome_trace import Event, events_of, read
from conftest import GetRanks, deep_unless
from shardlab import config as configs
from shardlab import trace as traces
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP

TRAIN_RANK = "shardlab.training.run:train_rank"
PROFILE = {
    "model.size": "tiny",
    "launch.world": 2,
    "profile.enabled": True,
    "training.steps": 6,
    "profile.active": 2,
}


class Fails(SimpleDDP):
    steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3 and self.group.rank() == 1:
            raise ValueError("planted")
        super().step()


def captured(ranks: GetRanks, folder: Path, **overrides: Any) -> dict[str, Any]:
    """A run of two ranks, its traces in ``folder``."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    config = configs.load(None, {**PROFILE, "output.dir": str(folder), **changes})
    result: dict[str, Any] = ranks(2).run(TRAIN_RANK, config, "a test")[0]
    return result


def spans(path: Path, pattern: str) -> list[Event]:
    return [event for event in events_of(path) if re.fullmatch(pattern, event["name"])]


@pytest.mark.long
def test_a_window_is_of_optimizer_steps_and_says_what_it_is(
    ranks: GetRanks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = captured(
        ranks, run, training__global_batch=8, training__micro_batch=2, profile__shapes=True
    )
    files = [run / f"traces/rank{r}/rank{r}.steps2-3.pt.trace.json.gz" for r in (0, 1)]
    assert result["traces"]["files"] == [str(f) for f in files]
    assert sorted((run / "traces").rglob("*.*")) == files  # and nothing half written
    assert 0.5 < result["traces"]["estimated_bytes"] / result["traces"]["bytes"] < 2
    # Step 0 is left alone, 1 is the warm-up, 2 and 3 are kept.
    profiled = [row["profiled"] for row in read_jsonl(run / "rank0.jsonl")]
    assert profiled == [False, True, True, True, False, False]
    for rank, path in enumerate(files):
        trace = read(path)
        stamp = trace["shardlab"]
        assert (stamp["rank"], stamp["world"], stamp["strategy"]) == (rank, 2, "simple_ddp")
        assert (stamp["run"], stamp["steps"]) == ("run", [2, 3])
        assert any("Input Dims" in e.get("args", {}) for e in spans(path, "aten::addmm"))

        marks = spans(path, r"ProfilerStep#\d+")
        assert [m["name"] for m in marks] == ["ProfilerStep#2", "ProfilerStep#3"]
        for phase, times in (("forward", 2), ("backward", 2), ("optimizer", 1)):
            for mark in marks:
                begins, ends = mark["ts"], mark["end"]
                inside = [begins <= s["ts"] and s["end"] <= ends for s in spans(path, phase)]
                assert sum(inside) == times, phase

        # The spans bear the ledger's numbers: all of the two steps', in order, and no others.
        mine = [e for e in read_jsonl(run / f"ledger.rank{rank}.jsonl") if e["step"] in (2, 3)]
        names = [f"shardlab::{e['op']} #{e['seq']} {e['label']}" for e in mine]
        ours = [e for e in trace["traceEvents"] if re.match(r"shardlab::[a-z_]+ #", e["name"])]
        ours.sort(key=lambda e: e["ts"])
        assert [e["name"] for e in ours] == names
        assert stamp["ledger"] == [mine[0]["seq"], mine[-1]["seq"]]

        # The stamp joins the clocks: a ledger entry's time is that of its span.
        clock = stamp["clock"][0]
        unix = ours[0]["ts"] * 1000 + trace["baseTimeNanoseconds"]
        enqueued = mine[0]["enqueue_ns"] - clock["monotonic_ns"] + clock["unix_ns"]
        assert abs(unix - enqueued) < 20e6

    # What analysis makes of them: every collective of ours by its label, with the ledger's bytes.
    found = traces.load(run)
    assert {c.matched_by for c in found.collectives()} == {"ledger"}
    assert [c.label for c in found.collectives()] == [e["label"] for e in mine]
    [total] = found.collective_summary()
    assert total.bytes == sum(e["bytes"] for e in mine)
    assert len(found.breakdown()) == 2 * 2


@pytest.mark.long
def test_windows_repeat_and_may_end_with_the_run(ranks: GetRanks, tmp_path: Path) -> None:
    result = captured(
        ranks, tmp_path / "run", profile__repeat=2, profile__wait=0, profile__memory=True
    )
    files = [Path(f) for f in result["traces"]["files"][:2]]
    assert [f.name for f in files] == [f"rank0.steps{s}.pt.trace.json.gz" for s in ("1-2", "4-5")]
    marks = [m["name"] for m in spans(files[1], "ProfilerStep#.*")]
    assert marks == ["ProfilerStep#4", "ProfilerStep#5"]
    assert any(e["name"] == "[memory]" for e in read(files[1])["traceEvents"])
    assert all(row["data_ms"] < 1000 for row in read_jsonl(tmp_path / "run" / "rank0.jsonl"))


# A collective that ends after the profiler has crashes the process (torch 2.13): those that
# leave some under way after a step, and PyTorch's own.
@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    deep_unless(
        lambda strategy: strategy in ("zero3", "pytorch_ddp"),
        ["zero1", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"],
    ),
)
def test_windows_close_whatever_is_under_way(
    ranks: GetRanks, tmp_path: Path, strategy: str
) -> None:
    result = captured(ranks, tmp_path / "run", strategy__name=strategy, profile__active=1)
    for path in map(Path, result["traces"]["files"]):
        assert len(spans(path, "gloo:.*")) >= 2
        assert len(spans(path, "backward")) == 1


@pytest.mark.long
def test_a_run_without_a_profile_has_no_traces(ranks: GetRanks, tmp_path: Path) -> None:
    result = captured(ranks, tmp_path / "run", profile__enabled=False)
    assert result["traces"] is None
    assert not (tmp_path / "run" / "traces").exists()
    assert not any(row["profiled"] for row in read_jsonl(tmp_path / "run" / "rank0.jsonl"))


@pytest.mark.long
def test_a_crash_in_a_window_is_the_error_that_is_told_and_leaves_no_trace(tmp_path: Path) -> None:
    """Python's own end with the profiler on would be a second crash, and torchrun tell of that."""
    done = commands.run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
        "-m", "shardlab", "train", "--size", "tiny", "--steps", "6", "--profile", "--out", "run",
        "--strategy", f"{__file__}:Fails",
        cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: rank 1: ValueError: planted" in done.stderr
    assert "SIGSEGV" not in done.stderr
    assert len(read_jsonl(tmp_path / "run" / "rank1.jsonl")) == 2
    assert not list(tmp_path.rglob("*.json.*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"profile.shapes": True}, "profile.shapes is for a profiled run; add --profile"),
        ({"profile.enabled": True, "training.steps": 4}, "the profile needs 5 steps"),
        ({"profile.enabled": True, "profile.warmup": 0}, "profile.warmup must be at least 1"),
        ({"profile.active": 0}, "profile.active must be at least 1, got 0"),
        ({"profile.wait": -1}, "profile.wait must be at least 0, got -1"),
        ({"profile.actve": 3}, "did you mean 'active'"),
    ],
)
def test_refusals(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configs.load(None, overrides)


@pytest.mark.long
def test_no_snapshot_without_a_gpu(ranks: GetRanks, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"made by PyTorch's CUDA allocator.*use profile.memory"):
        captured(ranks, tmp_path / "run", profile__memory_snapshot=True)
    assert not (tmp_path / "run").exists()
