"""A comparison against an earlier one: what is noise, what is not, and what cannot be compared."""

from __future__ import annotations

import copy
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


def test_noise_passes() -> None:
    for seed in range(20):
        old, new = record(noisy("a", 100, seed)), record(noisy("a", 101, seed + 100))
        assert gate.check(new, old, SLOWER)["pass"]


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


def test_a_large_but_uncertain_slowdown_does_not_fail() -> None:
    old = record(noisy("a", 100, 1, noise=0.3))
    new = record(noisy("a", 115, 2, noise=0.3))
    assert gate.check(new, old, SLOWER)["pass"]


def test_faster_passes() -> None:
    assert gate.check(record(noisy("a", 50, 1)), record(noisy("a", 100, 2)), SLOWER)["pass"]


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
    ("key", "value", "message"),
    [
        ("workload", "resnet", "--against has workload resnet, this has gpt2-mini"),
        ("global_batch", 16, "--against has global_batch 16, this has 8"),
    ],
)
def test_another_workload_is_refused(key: str, value: Any, message: str) -> None:
    new = record(noisy("a", 100, 1))
    with pytest.raises(UsageError, match=message):
        gate.check(new, new | {key: value}, SLOWER)


def test_another_world_or_device_is_refused() -> None:
    new = record(noisy("a", 100, 1))
    old = record(noisy("a", 100, 1, world=4))
    with pytest.raises(UsageError, match="none of these strategies in this world; it has a in"):
        gate.check(new, old, SLOWER)
    old = copy.deepcopy(new)
    old["env"]["device"] = "cuda"
    with pytest.raises(UsageError, match="measured on cuda, this on cpu"):
        gate.check(new, old, SLOWER)


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fail-if", "slower=5%"], "--fail-if slower is for a comparison with an earlier one"),
        (["--fail-if", "wrong", "--no-prove"], "looks at the proofs; leave out --no-prove"),
        (["--fail-if", "wrong=5%"], "wrong has no share; a strategy is wrong or not"),
        (["--against", "old.json", "--fail-if", "slow=5%"], "did you mean 'slower'"),
        (["--against", "old.json", "--fail-if", "slower=5"], "not a share, as in slower=5%"),
        (["--against", "none.json"], "cannot read none.json"),
        (["--against", "text.json"], "text.json is not JSON"),
        (["--against", "other.json"], "other.json is not a compare.json of schema 1"),
        (["--against", "old.json", "-b", "16"], "measured with training.global_batch 8"),
        (["--against", "old.json", "--size", "tiny"], "measured with model.size None"),
        (["--against", "old.json"], "none of these strategies in this world; it has a in world 2"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(
    args: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "old.json").write_text(json.dumps(record(noisy("a", 100, 1))))
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "other.json").write_text("{}")
    before = set(tmp_path.iterdir())
    done = commands.here("compare", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert set(tmp_path.iterdir()) == before


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
