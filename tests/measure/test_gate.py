"""A comparison against an earlier one: what is noise, what is not, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commands
from results import cell, drawn_table, result_of, without_numbers
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.measure import gate
from shardlab.report import compare_terminal


def noisy(strategy: str, ms: float, seed: int, noise: float = 0.02, **more: Any) -> dict[str, Any]:
    """Three repeats of eight steps, with luck of their own."""
    draw = np.random.default_rng(seed)
    luck = 1 + noise * draw.standard_normal((3, 1))
    times = ms * luck * (1 + noise * draw.standard_normal((3, 8)))
    return cell(strategy, ms, step_ms_repeats=times.tolist(), **more)


def record(*cells: dict[str, Any]) -> dict[str, Any]:
    return result_of(*cells) | {"config": configs.Config().to_dict()}


SLOWER = {"slower": 0.05}


def verdicts(new: dict[str, Any], old: dict[str, Any], limits: gate.Limits) -> dict[str, str]:
    return {row["label"]: row["verdict"] for row in gate.check(new, old, limits)["cells"]}


@pytest.mark.parametrize(
    ("before", "now", "noise", "by_chance"),
    [(100, 101, 0.02, 0), (100, 50, 0.02, 0), (100, 115, 0.3, 1)],  # an interval is of 95%
)
def test_what_is_not_surely_slower_passes(
    before: float, now: float, noise: float, by_chance: int
) -> None:
    pairs = ((noisy("a", before, i, noise), noisy("a", now, i + 100, noise)) for i in range(20))
    passed = [gate.check(record(new), record(old), SLOWER)["pass"] for old, new in pairs]
    assert passed.count(False) <= by_chance


def test_a_slowdown_beyond_the_limit_fails_and_one_within_does_not() -> None:
    old = record(noisy("a", 100, 1), noisy("b", 100, 2))
    new = record(noisy("a", 130, 3), noisy("b", 103, 4))
    found = gate.check(new, old, SLOWER)
    assert not found["pass"]
    slow, same = found["cells"]
    assert (slow["verdict"], same["verdict"]) == ("slower", "ok")
    low, high = slow["time_interval"]
    assert 1.05 < low < slow["time_ratio"] < high
    assert slow["reason"].startswith("at least ")
    assert gate.check(new, old, {"slower": 0.5})["pass"]


def test_memory_is_compared_as_it_is() -> None:
    old, new = record(noisy("a", 100, 1, mib=100)), record(noisy("a", 100, 2, mib=112))
    found = gate.check(new, old, {"memory": 0.1})
    assert found["cells"][0]["reason"] == "12.0% more memory, above 10%"
    assert not found["pass"]
    assert gate.check(new, old, {"memory": 0.15})["pass"]
    assert gate.check(new, old, SLOWER)["pass"]  # nobody asked for memory


def test_what_fails_now_fails_and_what_is_new_is_said() -> None:
    old = record(noisy("a", 100, 1), noisy("gone", 100, 2))
    new = record(without_numbers("a", "failed", "rank 1: oh"), noisy("b", 100, 3))
    found = gate.check(new, old, SLOWER)
    assert verdicts(new, old, SLOWER) == {"a": "broken", "b": "new"}
    assert found["cells"][0]["reason"] == "failed: rank 1: oh"
    assert not found["pass"]
    assert found["warnings"] == ["gone was in the earlier record, and is not in this one"]


def test_another_machine_is_said() -> None:
    old, new = record(noisy("a", 100, 1)), record(noisy("a", 100, 2))
    old["env"]["cpu"], new["env"]["cpu"] = "slow", "fast"
    assert gate.check(new, old, SLOWER)["warnings"] == [
        "the CPU was slow, now fast: times may differ for that alone"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": "resnet"}, "--against has workload resnet, this has gpt2-mini"),
        ({"global_batch": 16}, "--against has global_batch 16, this has 8"),
        ({"env": {"device": "cuda"}}, "measured on cuda, this on cpu"),
        ({"cells": [cell("a", 100, world=4)]}, "none of these strategies in this world; it has a"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], message: str) -> None:
    new = record(noisy("a", 100, 1))
    with pytest.raises(UsageError, match=message):
        gate.check(new, new | change, SLOWER)


def test_the_table_says_what_failed() -> None:
    old, new = record(noisy("a", 100, 1), noisy("b", 9, 2)), record(noisy("a", 130, 3))
    found = gate.check(new, old, SLOWER)
    text = drawn_table(compare_terminal.gate_table(found), 100)
    assert "slower: at least" in text
    assert compare_terminal.gate_verdict(found) == "failed: a"
    passed = gate.check(old, old, SLOWER)
    assert compare_terminal.gate_verdict(passed) == "passed: nothing is surely beyond slower 5%"


def test_what_is_not_proved_right() -> None:
    """Wrong, without a proof, and with one that was refused; what did not run is not judged."""
    proofs = {"right": True, "wrong": False, "late": None}
    cells: list[dict[str, Any]] = [
        {"label": name, "status": "ok", "proof": {"pass": passed, "message": "why"}}
        for name, passed in proofs.items()
    ]
    cells += [{"label": "bare", "status": "ok", "proof": None}]
    cells += [{"label": "refused", "status": "refused", "proof": None}]
    found = gate.not_right({"cells": cells})
    assert found == ["wrong (why)", "late (why)", "bare (there is no proof)"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["slower=5%"], {"slower": 0.05}),
        (["slower=5%,memory=2.5%"], {"slower": 0.05, "memory": 0.025}),
        (["slower=5%,wrong"], {"slower": 0.05, "wrong": 0.0}),
        (["slower=5%", "memory=0%"], {"slower": 0.05, "memory": 0.0}),
    ],
)
def test_limits(texts: list[str], expected: dict[str, float]) -> None:
    assert gate.limits_of(texts) == pytest.approx(expected)


@pytest.mark.long
def test_the_command_fails_on_a_slowdown(tmp_path: Path) -> None:
    """Against a record that took no time at all, all that is measured is slower."""
    old = record(noisy("simple_ddp", 0.001, 1))
    old |= {"workload": "gpt2-tiny", "parameters": 120_576}
    old["config"]["model"]["size"] = "tiny"
    (tmp_path / "old.json").write_text(json.dumps(old))
    done = commands.here(
        "compare", "--size", "tiny", "--repeats", "2", "--warmup", "1", "--steps", "2",
        "--no-prove", "--no-profile", "--strategies", "simple_ddp",
        "--against", "old.json", "--fail-if", "slower=5%", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: simple_ddp" in done.stdout
    assert "warning: the CPU was None, now " in done.stdout
