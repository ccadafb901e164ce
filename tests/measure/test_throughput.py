"""Throughput by batch size: what does not fit is a row, the largest that does is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import RankFailure, UsageError
from shardlab.measure import throughput
from shardlab.measure.throughput import Goal, Plan, extrapolate, limit_of, sweep
from shardlab.report import throughput as report
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP

TINY = {"model.size": "tiny", "data.source": "synthetic", "launch.device": "cpu"}


# ------------------------------------------------------------------ numbers from numbers


@given(largest=st.integers(0, 5000), start=st.integers(1, 300))
def test_a_sweep_finds_the_largest_and_tries_nothing_twice(largest: int, start: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    assert sweep(fits, start, 1 << 16, lambda: False) is None
    assert len(tried) == len(set(tried))
    assert largest + 1 in tried
    assert largest == 0 or largest in tried
    assert len(tried) <= 30


def test_a_sweep_ends_where_it_is_told_to() -> None:
    tried: list[int] = []
    assert sweep(lambda batch: bool(tried.append(batch)) or True, 1, 10, lambda: False) == "most"
    assert tried == [1, 2, 4, 8, 10]
    tried.clear()
    assert sweep(lambda batch: bool(tried.append(batch)) or True, 4, 99, lambda: True) == "time"
    assert tried == [4]  # one size at least


def test_a_trillion_parameters() -> None:
    told = extrapolate(Goal(), 4e14, {"flops_per_s": 8e14})
    assert told["flops"] == 6e25
    assert told["days"] == pytest.approx(6e25 / 4e14 / 86400)
    assert told["years"] == pytest.approx(4753, abs=1)
    assert told["devices"] == 19291  # 19,290.1 would be late
    assert told["mfu"] == 0.5
    lines = list(report._extrapolation(told))
    assert "1T parameters on 10T tokens: 1,736,111 days (4,753 years)" in lines[0]
    assert "which is 66.7 tokens/s; for 90 days 19,291 of them" in lines[0]
    assert "6 FLOPs per parameter and token" in lines[1]
    assert told["cost"] is None
    priced = extrapolate(Goal(price_per_hour=2.5), 4e14, {"flops_per_s": 8e14})
    assert priced["cost"] == pytest.approx(24 * told["days"] * 2.5)
    assert list(report._extrapolation(priced))[1] == (
        "  at 2.5 per device and hour that costs 104,166,667"
    )


def _result(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    config = configs.load(None, {**TINY, "launch.world": 2, "training.global_batch": 2})
    env = {
        "workload": "w",
        "parameters": 10,
        "flops_per_sample": 100.0,
        "peak": {"flops_per_s": 8000.0, "dtype": "float32", "size": 768, "threads": 1},
    }
    limit = {"bytes": 2**20, "source": "given", "refused_beyond": None}
    stopped = more.pop("stopped", None)
    plan = Plan(batches=(1,), sweep=True)
    goal = more.pop("goal", None)
    return throughput.summarize(config, plan, goal, env, limit, rows, stopped, "command")


def _measured(batch: int, ms: float) -> dict[str, Any]:
    measured = {"oom": None, "slowest_ms": [ms] * 3, "peak_bytes": 7, "tokens_per_sample": 5}
    return {"batch": batch, "status": "ok", "reason": None, "measured": measured}


def _oom(batch: int) -> dict[str, Any]:
    return {"batch": batch, "status": "oom", "reason": "no room", "measured": None}


def test_rates_of_a_row() -> None:
    result = _result([_measured(4, 100.0), _oom(5)])
    row = result["rows"][0]
    assert row["global_batch"] == 8
    assert row["steps_per_s"] == pytest.approx(10)
    assert row["samples_per_s"] == pytest.approx(80)
    assert row["tokens_per_s"] == pytest.approx(400)
    assert row["flops_per_s"] == pytest.approx(100 * 80 / 2)  # of each of two ranks
    assert row["mfu"] == pytest.approx(0.5)
    assert (result["largest_batch"], result["largest_is_exact"]) == (4, True)
    assert result["extrapolation"] is None  # nobody asked
    asked = _result([_measured(4, 100.0)], goal=Goal(tokens=1e9))
    assert asked["extrapolation"]["mfu"] == pytest.approx(0.5)
    assert "on 1B tokens" in "\n".join(report.sentences(asked))
    text = "\n".join(report.sentences(result))
    assert "the largest batch that fits: 4 per rank" in text
    assert report.csv_text(result).splitlines()[2].startswith("5,10,oom,,")


def test_an_open_end_is_said() -> None:
    result = _result([_measured(4, 100.0)], stopped="time")
    assert not result["largest_is_exact"]
    assert "whether more does is open: the time was up" in "\n".join(report.sentences(result))
    nothing = _result([_oom(1)])
    assert nothing["largest_batch"] is None
    assert nothing["extrapolation"] is None
    assert "not even the first batch fits" in "\n".join(report.sentences(nothing))


def test_the_limit_is_what_is_free_unless_given() -> None:
    assert limit_of(5, "cpu", 2)["bytes"] == 5
    much = limit_of(1 << 60, "cpu", 2)  # more than there is: refused before
    assert much["bytes"] == 1 << 60
    assert much["refused_beyond"] < 1 << 50
    alone, shared = limit_of(None, "cpu", 1)["bytes"], limit_of(None, "cpu", 4)["bytes"]
    assert shared == pytest.approx(alone / 4, rel=0.5)  # others come and go meanwhile
    assert limit_of(None, "cuda", 1)["bytes"] is None
    with pytest.raises(UsageError, match="its own limit"):
        limit_of(10**9, "cuda", 1)


# ------------------------------------------------------------------ in ranks


def _refuse(_world: Any) -> tuple[str, int]:
    with throughput.refused_beyond(32 << 20):
        try:
            torch.ones(64 << 20)
            message = ""
        except RuntimeError as error:
            message = f"{type(error).__name__}: {error}"
    return message, torch.ones(64 << 20).numel()  # outside, there is enough


def test_memory_is_refused_before_the_machine_has_none(ranks: GetRanks) -> None:
    message, later = ranks(1).run(_refuse, deadline_s=60)[0]
    assert throughput.is_out_of_memory(message)
    assert later == 64 << 20
    assert not throughput.is_out_of_memory("RuntimeError: shapes do not match")


def _rate(world: Any) -> dict[str, Any]:
    return throughput.matmul_rate(world, "fp32", seconds=0.05)


def test_the_peak_is_measured(ranks: GetRanks) -> None:
    for rate in ranks(2).run(_rate, deadline_s=60):
        assert 1e8 < rate["flops_per_s"] < 1e13
        assert (rate["dtype"], rate["threads"]) == ("float32", 1)


@pytest.mark.long
@pytest.mark.timeout(100)
def test_ranks_that_are_refused_memory_are_a_row() -> None:
    """Two of them: one alone cannot go on, so all are replaced, and the next size is tried."""
    config = configs.load(None, {**TINY, "launch.world": 2, "training.global_batch": 2})
    plan = Plan(batches=(512, 1), steps=1, memory_limit=8 << 20)
    result = throughput.measure(config, plan, None, "command")
    assert [row["status"] for row in result["rows"]] == ["oom", "ok"]
    assert throughput.is_out_of_memory(result["rows"][0]["reason"])


@pytest.mark.long
def test_what_fails_for_another_reason_is_raised() -> None:
    values = {**TINY, "launch.world": 1, "strategy.name": f"{__file__}:Broken"}
    config = configs.load(None, {**values, "training.global_batch": 1})
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        throughput.measure(config, Plan(batches=(1,), steps=1), None, "command")


@pytest.mark.long
def test_a_size_that_fails_is_a_row_and_the_next_is_tried() -> None:
    """BatchNorm takes no batch of one sample, which is where --micro-batch begins."""
    workload = f"{Path(__file__).parents[1] / 'models' / 'people.py'}:batch_norm"
    values = {"model.workload": workload, "launch.world": 1, "strategy.name": "single"}
    config = configs.load(None, {**values, "training.global_batch": 1, "launch.device": "cpu"})
    result = throughput.measure(config, Plan(batches=(1, 2), steps=1), None, "command")
    assert [row["status"] for row in result["rows"]] == ["failed", "ok"]
    assert "Expected more than 1 value per channel" in result["rows"][0]["reason"]


class Broken(SimpleDDP):
    def step(self) -> None:
        raise ZeroDivisionError


# ------------------------------------------------------------------ as a user does


@pytest.mark.long
@pytest.mark.timeout(150)
def test_a_sweep_ends_with_the_largest_batch_that_fits(tmp_path: Path) -> None:
    command = (
        "throughput --size tiny --data synthetic --sweep --memory-limit 3MiB --steps 2 "
        "--device cpu --out out --model-params 7e9"
    )
    done = commands.here(*command.split(), cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for words in ("tokens/s", "MFU is of", "7B parameters on 10T tokens", "data: synthetic tokens"):
        assert words in done.stdout
    assert "batch 2" in done.stderr
    result = json.loads((tmp_path / "out" / "throughput.json").read_text())
    rows = {row["batch"]: row for row in result["rows"]}
    largest = result["largest_batch"]
    assert result["largest_is_exact"]
    assert rows[largest]["peak_bytes"] <= 3 * 2**20
    assert rows[largest + 1]["status"] == "oom"
    assert "the limit is 3 MiB" in rows[largest + 1]["reason"]
    peaks = [rows[b]["peak_bytes"] for b in sorted(rows) if rows[b]["status"] == "ok"]
    assert peaks == sorted(peaks)  # each size begins anew: nothing is left of a larger one
    assert all(0 < row["mfu"] < 3 for row in rows.values() if row["mfu"] is not None)
    assert (tmp_path / "out" / "throughput.csv").read_text().count("\n") == len(rows) + 1
