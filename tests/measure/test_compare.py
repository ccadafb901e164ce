"""The comparison: what it measures, what it writes, and that one failure is one row."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import markupsafe
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab import naming, numbers
from shardlab.cli import app
from shardlab.cli import compare as cli_compare
from shardlab.errors import Late, UsageError
from shardlab.measure import cells as measured_cells
from shardlab.measure import compare as comparison
from shardlab.measure import gate
from shardlab.measure.cells import Cell, Plan
from shardlab.measure.memory import peak_bytes
from shardlab.naming import STRATEGIES
from shardlab.proof import chance, judge
from shardlab.report import compare_charts, compare_terminal
from shardlab.run import loop
from shardlab.run.rankset import RankSet
from shardlab.specs import parse_spec
from shardlab.trace.model import PARTS
from shardlab.world import World

SHORT = ["--size", "tiny", "--repeats", "2", "--warmup", "1", "--steps", "2"]
TINY = [*SHORT, "--no-prove", "--no-profile"]


def compare(tmp_path: Path, *args: str) -> dict[str, Any]:
    done = commands.here("compare", *TINY, "--out", "out", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("out/compare.") == 3  # where its files are: json, csv, md
    result: dict[str, Any] = json.loads((tmp_path / "out" / "compare.json").read_text())
    data = result["env"]["data"]
    assert data.startswith("stdlib: the text of Python's library")
    assert f"data: {data}" in done.stdout
    assert str(markupsafe.escape(data)) in (tmp_path / "out" / "report.html").read_text()
    assert result["env"]["chosen"] == {"data.source": "stdlib"}
    return result


@pytest.mark.long
def test_losses_agree_with_single(tmp_path: Path) -> None:
    result = compare(tmp_path, "--strategies", "single,simple_ddp,pytorch_ddp", "--world", "2")
    assert result["schema"] == 1
    assert result["baseline"] == "single"
    assert result["command"].startswith("shardlab compare")
    assert (result["workload"], result["parameters"]) == ("gpt2-tiny", 120_576)
    cells = result["cells"]
    assert [(c["strategy"], c["world"]) for c in cells] == [
        ("single", 1), ("simple_ddp", 2), ("pytorch_ddp", 2),
    ]  # fmt: skip
    for cell in cells:
        assert (cell["status"], cell["reason"]) == ("ok", None)
        assert cell["step_ms"]["n"] == 4
        assert cell["step_ms"]["p10"] <= cell["step_ms"]["median"] <= cell["step_ms"]["p90"]
        assert cell["tokens_per_s"] == pytest.approx(cell["samples_per_s"] * 64)
        assert cell["loss_difference"] < 1e-5
        assert len(cell["losses"]) == 3
        # fp32 parameters, gradients and Adam's two moments, at the least, and little of them.
        assert 16 * 120_576 < cell["peak_bytes"]["total"] < 160 * 120_576
        estimate = cell["estimated_bytes"]["total"]
        assert estimate == pytest.approx(cell["peak_bytes"]["total"], rel=0.05)
    with (tmp_path / "out" / "compare.csv").open() as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == [c["strategy"] for c in cells]
    assert "<html" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.long
def test_every_strategy_is_proved_and_explained_in_each_world(tmp_path: Path) -> None:
    wrong = f"{Path(__file__).parents[1] / 'saboteurs.py'}:NoAveraging"
    done = commands.here(
        "compare", *SHORT, "--world", "1,2", "--out", "out", "--strategies",
        f"single,pytorch_ddp,{wrong}", "--set", "profile.active=1", "--fresh", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # one of them is proved wrong
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    cells = result["cells"]
    assert [(c["strategy"].rpartition(":")[2], c["world"]) for c in cells] == [
        ("single", 1), ("pytorch_ddp", 1), ("NoAveraging", 1), ("pytorch_ddp", 2),
        ("NoAveraging", 2),
    ]  # fmt: skip
    for cell in cells:
        assert cell["status"] == "ok"
        assert cell["baseline"] == "single"
        profile = cell["profile"]
        parts = sum(profile[part.replace("_us", "_ms")] for part in PARTS)
        assert parts == pytest.approx(profile["wall_ms"], rel=1e-6)
        low, high = cell["speed_interval"]
        assert low <= cell["speed_to_baseline"] <= high
    # With one rank there is nothing to average: what is wrong shows in a world of two.
    assert [c["proof"]["pass"] for c in cells] == [True, True, True, True, False]
    assert "equal: " in cells[-1]["proof"]["message"]
    assert "is wrong: equal: " in done.stdout
    assert (
        "NoAveraging" not in result["answer"]["choice"] or "world=1" in result["answer"]["choice"]
    )
    psi = 4 * 120_576
    assert [c["sent"]["bytes"] for c in cells[:2]] == [0, 0]
    assert cells[3]["sent"]["bytes"] == pytest.approx(psi, rel=0.01)  # 2 Ψ (n - 1) / n
    assert (tmp_path / "out" / "compare.md").read_text().count("\n| ") == 6
    assert "Scaling" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.long
def test_axes_are_compared_proved_and_explained(tmp_path: Path) -> None:
    """The model of a proof has a block for each stage, though the smallest has two."""
    done = commands.here(
        "compare", *SHORT, "--world", "2", "--out", "out", "--accumulate", "4", "--strategies",
        "zero1,zero1:tensor=2,pipeline_interleaved", "--set", "profile.active=1",
        "--set", "model.options.layers=4", "--fresh", cwd=tmp_path, COLUMNS="80",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "out" / "compare.json").read_text())["cells"]
    assert [(c["label"], c["proof"]["pass"]) for c in cells] == [
        ("zero1", True), ("zero1 (tensor=2)", True), ("pipeline_interleaved", True)
    ]  # fmt: skip
    assert [c["profile"]["bubble_ms"] > 0 for c in cells] == [False, False, True]
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("pipeline bubble", ">Bubble<", "(tensor=2)", "forward 3, stage 2"):
        assert words in page, words
    table = done.stdout.partition("where a profiled step goes")[2].partition("\n\n")[0]
    assert "bubble" in table
    assert max(map(len, table.splitlines()[1:])) <= 80
    assert "| bubble ms |" in (tmp_path / "out" / "compare.md").read_text()


# ------------------------------------------------------------------ interrupted

JOBS = ["--strategies", "single,simple_ddp", "--no-prove", "--repeats", "2",
        "--size", "tiny", "--warmup", "1", "--steps", "2", "--set", "profile.active=1"]  # fmt: skip


def progress(stderr: str) -> list[str]:
    """What was done, in order: ``single · repeat 1 of 2``."""
    found = re.findall(r"^\[\d+/\d+\] (.* · .*)$", stderr, flags=re.M)
    return [str(line) for line in found]


@pytest.mark.long
def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    everything = [f"{name} · repeat {r} of 2" for r, order in
                  ((1, ("single", "simple_ddp")), (2, ("simple_ddp", "single")))
                  for name in order]  # fmt: skip
    everything += [f"{name} · {what}" for what in ("memory", "estimate", "traces")
                   for name in ("single", "simple_ddp")]  # fmt: skip
    done: list[str] = []
    measured: list[list[float]] = []
    command = [*commands.SHARDLAB, "compare"]
    for arguments, stop, file in (
        ([*JOBS, "--out", "out"], signal.SIGTERM, "0.json"),
        ([*JOBS, "--resume", "out"], signal.SIGKILL, "1.json"),  # nobody can say goodbye
    ):
        process = commands.start(*command, *arguments, cwd=tmp_path)
        wait_for(tmp_path / "out" / "cells" / file, process)
        process.send_signal(stop)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == (130 if stop == signal.SIGTERM else -signal.SIGKILL)
        if stop == signal.SIGTERM:
            assert "to continue where it stopped: shardlab compare --resume out" in stderr
        done = join(done, progress(stderr))
        assert not (tmp_path / "out" / "compare.json").exists()
        measured = json.loads((tmp_path / "out" / "cells" / "0.json").read_text())["times_ms"]
    other = commands.here("compare", *JOBS, "--steps", "3", "--resume", "out", cwd=tmp_path)
    assert other.returncode == 2
    assert "out was begun with other settings: steps was 2, now 3" in other.stderr
    rest = commands.here("compare", "--resume", "out", cwd=tmp_path)  # as it was begun
    assert rest.returncode == 0, rest.stderr
    assert done
    assert join(done, progress(rest.stderr)) == everything  # nothing twice, nothing left out
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [c["step_ms"]["n"] for c in result["cells"]] == [4, 4]
    assert result["cells"][0]["step_ms_repeats"][: len(measured)] == measured
    assert "--out out" in result["command"]


def join(before: list[str], after: list[str]) -> list[str]:
    """What two runs did. The last of the first may not have ended, and then is done again."""
    return before[:-1] + after if before[-1:] == after[:1] else before + after


def wait_for(path: Path, process: subprocess.Popen[str], timeout: float = 80) -> None:
    limit = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    done = commands.here("compare", "--resume", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing to resume: none has no cells/plan.json" in done.stderr


FAILING = """
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation

class Fails(SimpleDDPGradientAccumulation):
    def step(self):
        if self.group.rank() == 1:
            raise ArithmeticError("planted")
        super().step()
"""


@pytest.mark.long
def test_a_failure_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    result = compare(tmp_path, "--strategies", "fails.py:Fails,simple_ddp,single")
    failed, good, single = result["cells"]
    assert failed["status"] == "failed"
    assert failed["reason"] == "rank 1: ArithmeticError: planted"
    assert failed["step_ms"] is None
    assert (good["status"], single["status"]) == ("ok", "ok")
    assert result["baseline"] == "single"


@pytest.mark.long
def test_only_failures_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILING)
    done = commands.here(
        "compare", *TINY, "--strategies", "fails.py:Fails", "--quiet", cwd=tmp_path
    )
    assert done.returncode == 1
    assert (tmp_path / done.stdout.strip() / "compare.json").exists()


@pytest.mark.long
def test_json_alone_on_stdout(tmp_path: Path) -> None:
    done = commands.shardlab(
        "compare", *TINY, "--strategies", "pytorch_ddp:bucket_mb=1", "--json", cwd=tmp_path
    )
    result = json.loads(done.stdout)
    (cell,) = result["cells"]
    assert (cell["options"], cell["label"]) == ({"bucket_mb": 1}, "pytorch_ddp (bucket_mb=1)")
    assert result["baseline"] == cell["label"]
    assert cell["loss_difference"] is None  # there is no single to differ from
    assert cell["speed_to_baseline"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--strategies", "single,zero9"], "unknown strategy 'zero9'"),
        (["--strategies", "single,single"], "strategy single is named twice"),
        (["--strategies", "pytorch_ddp:bucket=4"], "unknown option of strategy pytorch_ddp"),
        (["--strategies", "pytorch_ddp:bucket_mb=x"], "pytorch_ddp's bucket_mb must be a number"),
        (["--world", "3"], "a global batch of 8 cannot be divided evenly over 3 ranks"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--fresh", "--no-prove"], "--fresh makes proofs anew, and --no-prove makes none"),
        (["--size", "huge"], "unknown gpt2 size 'huge'"),
    ],
)
def test_wrong_input(args: list[str], message: str, tmp_path: Path) -> None:
    done = commands.here("compare", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ pure


def cells(
    config: configs.Config,
    specs: str,
    plan: Plan | None = None,
    takes_buckets: Callable[[str], bool] | None = None,
    **flags: str,
) -> list[Cell]:
    names = ("world", "precision", "accumulate", "bucket_mb")
    axes = measured_cells.axes_of(config, *(flags.get(name) for name in names), default_world=2)
    return measured_cells.cells_of(config, specs.split(","), axes, plan or Plan(), takes_buckets)


def point(cell: Cell) -> tuple[str, int, str, int, Any]:
    config = cell.config
    return (
        config.strategy.name,
        cell.world,
        config.precision.compute,
        config.training.accumulate,
        config.strategy.options.get("bucket_mb"),
    )


def test_axes_are_multiplied_where_it_makes_sense() -> None:
    found = cells(
        configs.Config(),
        "single,pytorch_ddp,simple_ddp",
        takes_buckets=lambda name: name == "pytorch_ddp",
        world="1,2",
        precision="fp32,bf16",
        bucket_mb="1,4",
    )
    fp32 = [
        ("single", 1, "fp32", 1, None),  # one for all worlds
        ("pytorch_ddp", 1, "fp32", 1, 1),
        ("pytorch_ddp", 1, "fp32", 1, 4),
        ("simple_ddp", 1, "fp32", 1, None),  # it has no buckets
        ("pytorch_ddp", 2, "fp32", 1, 1),
        ("pytorch_ddp", 2, "fp32", 1, 4),
        ("simple_ddp", 2, "fp32", 1, None),
    ]
    bf16 = [(name, world, "bf16", a, mb) for name, world, _, a, mb in fp32]
    assert [point(cell) for cell in found] == fp32 + bf16
    assert len({cell.label for cell in found}) == len(found)
    assert found[4].label == "pytorch_ddp (bucket_mb=1, world=2, fp32)"
    assert all(cell.config.training.global_batch == 8 for cell in found)


def test_a_micro_batch_is_the_same_in_every_world() -> None:
    """The global batch is that of the first world; accumulation follows in each."""
    config = configs.load(None, {"training.micro_batch": 2, "training.epochs": 3})
    found = cells(config, "baseline,simple_ddp", world="4,1,2")
    assert [(c.world, c.config.training.accumulate) for c in found] == [
        (1, 4), (4, 1), (1, 4), (2, 2),
    ]  # fmt: skip
    assert {c.config.training.global_batch for c in found} == {8}
    assert {c.config.training.steps for c in found} == {3}  # and not what 3 epochs would take
    with pytest.raises(UsageError, match=r"leave out training\.accumulate: it would be 1"):
        cells(config, "simple_ddp", world="4", accumulate="2")


def test_an_axis_of_one_value_is_in_no_label() -> None:
    found = cells(configs.Config(), "single,zero1", world="4", accumulate="2")
    assert [cell.label for cell in found] == ["single", "zero1"]
    assert [cell.parts for cell in found] == [8, 8]


def test_the_strategies_with_buckets_are_known() -> None:
    specs = "single,simple_ddp,bucket_ddp_async,pytorch_zero3,zero2:bucket_mb=9"
    found = cells(configs.Config(), specs, bucket_mb="1,4")
    assert [point(cell)[-1] for cell in found] == [None, None, 1, 4, None, 9]


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("world", "2,x", "--world 2,x: not whole numbers"),
        ("world", "0", "--world must be at least 1, got 0"),
        ("precision", "fp32,bf61", "unknown value of --precision 'bf61'; did you mean 'bf16'"),
        ("accumulate", "1.5", "--accumulate 1.5: not whole numbers"),
        ("accumulate", "1,8", "cannot be divided evenly over 2 ranks x 8 micro-batches"),
        ("bucket_mb", "1,-4", "--bucket-mb 1,-4: not sizes in MB above 0"),
    ],
)
def test_axes_refuse(flag: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        cells(configs.Config(), "single,simple_ddp", **{flag: text})


ENV = {"workload": "w", "parameters": 1, "device": "cpu"}


def test_each_precision_has_its_own_baseline() -> None:
    found = cells(configs.Config(), "single,simple_ddp", precision="fp32,bf16")
    for cell, ms in zip(found, (100.0, 50.0, 400.0, 100.0), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[ms, ms], [ms, ms]], [0.0], [5.0]
    rows = comparison.summarize(found, Plan(), "shardlab compare", ENV)["cells"]
    assert [row["baseline"] for row in rows] == ["single (fp32)"] * 2 + ["single (bf16)"] * 2
    assert [row["speed_to_baseline"] for row in rows] == [1, 2, 1, 4]


def test_mfu_is_a_share_of_the_measured_rate_of_a_device() -> None:
    found = cells(configs.Config(), "single,simple_ddp")
    for cell in found:
        cell.times_ms, cell.skews_ms, cell.losses, cell.samples = [[100.0]], [0.0], [5.0], 8
    peak = {"flops_per_s": 160e9, "devices": 2}
    env = ENV | {"flops_per_sample": 1e9, "matmul": {"fp32": peak}}
    rows = comparison.summarize(found, Plan(), "shardlab compare", env)["cells"]
    assert [row["mfu"] for row in rows] == [0.5, 0.25]  # 80 GFLOP/s, by one device, by two
    env["matmul"] = {"fp32": peak | {"devices": 1}}  # that the two share
    rows = comparison.summarize(found, Plan(), "shardlab compare", env)["cells"]
    assert [row["mfu"] for row in rows] == [0.5, 0.5]
    rows = comparison.summarize(found, Plan(), "shardlab compare", ENV)["cells"]
    assert rows[0]["mfu"] is None


@pytest.mark.parametrize(("normalizes", "difference"), [(False, 1.0), (True, None)])
def test_loss_with_batchnorm_is_compared_only_on_the_same_micro_batches(
    normalizes: bool, difference: float | None
) -> None:
    found = cells(configs.Config(), "single,simple_ddp", world="1,2")
    for cell, loss in zip(found, (5.0, 5.0, 6.0), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[1.0]], [0.0], [loss]
    env = ENV | {"normalizes_batches": normalizes}
    rows = comparison.summarize(found, Plan(), "shardlab compare", env)["cells"]
    assert [row["loss_difference"] for row in rows] == [0.0, 0.0, difference]


def test_a_proof_is_small_and_of_the_same_strategy() -> None:
    config = configs.load(
        None,
        {
            "model.size": "small", "data.seq_len": 1024, "training.global_batch": 64,
            "precision.compute": "bf16", "strategy.name": "zero1", "launch.world": 2,
            "training.compile": "blocks",
        },
    )  # fmt: skip
    proof = comparison.proof_config(config)
    assert (proof.model.size, proof.precision.compute) == ("tiny", "fp64")
    assert (proof.training.global_batch, proof.training.accumulate) == (8, 2)
    assert proof.strategy == config.strategy


# ------------------------------------------------------------------ how sure


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Repeats with luck of their own, as a busy machine has: 95% is claimed, 85% demanded."""
    draw = np.random.default_rng(7)

    def times(ms: float) -> list[list[float]]:
        luck = 1 + 0.03 * draw.standard_normal((6, 1))
        noisy = ms * luck * (1 + 0.02 * draw.standard_normal((6, 8)))
        return [list(map(float, repeat)) for repeat in noisy]

    held = 0
    for _ in range(40):
        low, high = numbers.ratio_interval(times(200.0), times(100.0))
        held += low <= 2.0 <= high
        assert high - low < 0.4
    assert held >= 34


def test_two_comparisons_differ_by_less_than_their_interval() -> None:
    """As many visits and steps as a comparison has, each with its luck, each step with noise."""
    draw = np.random.default_rng(3)

    def times() -> list[list[float]]:
        luck = 1 + 0.04 * draw.standard_normal((Plan().repeats, 1))
        noise = 1 + 0.04 * draw.standard_normal((Plan().repeats, Plan().steps))
        return [list(map(float, repeat)) for repeat in 100 * luck * noise]

    within = inside = 0
    for _ in range(60):
        first, second = ((times(), times()) for _ in range(2))
        low, high = numbers.ratio_interval(*first, paired=True)
        within += abs(numbers.ratio(*first) - numbers.ratio(*second)) < high - low
        inside += low <= numbers.ratio(*second) <= high
    assert within >= 59
    assert inside >= 51


def test_the_commands_defaults_are_the_plans() -> None:
    """They stand in both, so that --help needs no import."""
    known = inspect.signature(cli_compare.compare).parameters
    names = ("repeats", "warmup", "steps", "prove", "time_limit")
    assert {name: known[name].default.default for name in names} == {
        "repeats": Plan.repeats, "warmup": Plan.warmup, "steps": Plan.steps, "prove": Plan.prove,
        "time_limit": Plan.time_limit_s,
    }  # fmt: skip


def test_traces_are_short_unless_somebody_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plans: list[Plan] = []

    def noted(_cells: list[Cell], plan: Plan, *_: Any) -> None:
        plans.append(plan)
        raise UsageError("that is enough")

    monkeypatch.setattr(comparison, "compare", noted)
    (tmp_path / "file.yaml").write_text("profile: {wait: 1}")
    for more in ([], ["--set", "profile.active=3"], ["--config", "file.yaml"], ["--no-profile"]):
        CliRunner().invoke(app, ["compare", "--strategies", "zero2", *more])
    windows = [p.profile and (p.profile.wait, p.profile.warmup, p.profile.active) for p in plans]
    assert windows == [(0, 1, 2), (0, 1, 3), (1, 1, 2), None]


@pytest.mark.long
def test_of_workers_a_round_is_timed_after_the_warm_up(ranks: GetRanks) -> None:
    options = {"strategy.name": "local_sgd", "strategy.options": {"every": 5}}
    tiny = {"model.size": "tiny", "launch.world": 2, "launch.device": "cpu", "training.steps": 4}
    values = configs.load(None, {**options, **tiny}).to_dict()
    steps, found = ranks(2).run(timed, values, 2)[0]
    assert steps == range(7)  # and not 9
    assert (found["every"], len(found["losses"]), len(set(found["slowest_ms"]))) == (5, 4, 1)
    assert len(found["slowest_ms"]) == 4


def timed(world: World, values: dict[str, Any], warmup: int) -> tuple[range, Any]:
    """On a rank: the steps that are made, and what is found."""
    with mock.patch.object(loop, "train", wraps=loop.train) as train:
        found = comparison.time_cell(world, values, warmup)
    return train.call_args.args[3], found


def process(_world: World) -> int:
    return os.getpid()


def test_each_repeat_on_a_cpu_has_new_ranks() -> None:
    found = cells(configs.Config(), "single,simple_ddp")
    estimates = comparison._Estimates(ENV, Plan(), found, None)
    ranks = RankSet(configs.LaunchConfig(), 2)
    jobs = comparison._jobs(ranks, found, Plan(), None, estimates, None)
    assert [j.what for j in jobs if j.begins_repeat] == [f"repeat {n} of 4" for n in (2, 3, 4)]
    with RankSet(configs.LaunchConfig(), 2) as ranks:
        first = ranks.run(process)
        assert ranks.run(process) == first
        ranks.renew()
        assert not set(ranks.run(process)) & set(first)


def test_the_interval_of_the_same_numbers() -> None:
    times = [[100.0, 101.0], [99.0, 100.0], [100.0, 100.0], [101.0, 99.0]]
    assert numbers.ratio(times, times) == 1
    low, high = numbers.ratio_interval(times, times, paired=True)
    assert 0.95 < low <= 1 <= high < 1.05
    assert not numbers.can_tell([[5.0, 6.0]], times)  # nothing is known of its noise
    assert numbers.can_tell(times, times)


def one_visit_to_each() -> dict[str, Any]:
    found = cells(configs.Config(), "single,simple_ddp", plan=Plan(repeats=1))
    for cell, ms in zip(found, (100.0, 50.0), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[ms, ms + 1]], [0.0], [5.0]
    return comparison.summarize(found, Plan(repeats=1), "shardlab compare", ENV)


def test_one_repeat_has_no_interval_and_chooses_nothing() -> None:
    result = one_visit_to_each()
    assert result["cells"][1]["speed_to_baseline"] == pytest.approx(100.5 / 50.5)
    assert result["cells"][1]["speed_interval"] is None
    assert result["answer"]["choice"] is None
    assert "--repeats 2 or more" in result["answer"]["why"]
    assert result["answer"]["why"] in compare_terminal.verdict_lines(result)
    assert compare_terminal.explained_table(result) is None


def test_a_gate_wants_two_repeats() -> None:
    result = one_visit_to_each()
    row = gate.check(result, result, {"memory": 0.1})["cells"][0]
    assert (row["verdict"], row["time_ratio"], row["time_interval"]) == ("ok", 1.0, None)
    gate.refuse_unsure(result, 1, {"memory": 0.1})
    with pytest.raises(UsageError, match="needs --repeats 2 or more, got 1"):
        gate.refuse_unsure(result, 1, {"slower": 0.1})
    with pytest.raises(UsageError, match="--against has one visit to each"):
        gate.refuse_unsure(result, 4, {"slower": 0.1})


def test_a_crashed_proof_is_reported_once() -> None:
    crash = judge.failed("it did not get through: rank 1: ArithmeticError: planted")
    message = "it did not get through: rank 1: ArithmeticError: planted"
    assert comparison._what_is_wrong(crash) == message
    some = {
        "equal": {"pass": True},
        "state": {"pass": False, "message": "too much"},
        "bytes": {"pass": False, "message": "too many"},
    }
    assert comparison._what_is_wrong(some) == "state: too much; bytes: too many"
    assert comparison._what_is_wrong({"equal": {"pass": True}}) == ""


@pytest.mark.parametrize("proved", [True, False])
def test_losses_of_a_random_forward_are_not_compared(proved: bool) -> None:
    found = cells(configs.Config(), "single,simple_ddp")
    for cell, loss in zip(found, (5.0, 6.0), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[1.0], [1.0]], [0.0], [loss]
        cell.proof = {"pass": True, "message": "", "checks": {}} if proved else None
    env = ENV | {"loss_not_compared": chance.RANDOM}
    result = comparison.summarize(found, Plan(), "shardlab compare", env)
    assert [row["loss_difference"] for row in result["cells"]] == [0.0, None]
    assert result["answer"]["choice"] == "single"
    assert "Left out" not in str(result["answer"])
    said = compare_terminal.verdict(result)
    assert "were not compared, as forward draws random numbers" in said
    assert ("the proof decides" if proved else "only a proof can decide") in said
    chart = compare_charts.loss_chart(result)
    assert chart is not None
    assert chart.note.startswith("They need not coincide: forward draws random numbers")


# ------------------------------------------------------------------ what takes too long


class NeverDone:
    """Ranks that give no answer to one function within 7 s."""

    def __init__(self, function: str) -> None:
        self.function = function

    def run(self, target: str, *_args: Any) -> list[Any]:
        if target.endswith(self.function):
            raise Late(0, "no answer within 7 s (waiting for 0, 1)")
        return [None]


@pytest.mark.parametrize(
    ("function", "said"), [("time_cell", "a visit"), ("weigh_cell", "weighing it")]
)
def test_what_takes_too_long_is_a_row(function: str, said: str) -> None:
    (cell,) = cells(configs.Config(), "simple_ddp")
    assert comparison._try_on_ranks(NeverDone(function), function, cell) is None  # type: ignore[arg-type]
    assert cell.status == "failed"
    assert cell.reason == (
        f"{said} took too long (--time-limit): rank 0: no answer within 7 s (waiting for 0, 1)"
    )


def test_a_proof_that_takes_too_long_calls_nothing_wrong() -> None:
    (cell,) = cells(configs.Config(), "simple_ddp")
    comparison._prove(NeverDone(":examine"), [cell], cell, None, False)  # type: ignore[arg-type]
    assert cell.proof is not None
    assert cell.proof["pass"] is None
    assert cell.proof["message"].startswith("the proof took too long (--time-limit): rank 0: no")


def nap(_world: World, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.long
def test_every_job_of_ranks_has_the_limit() -> None:
    with RankSet(configs.LaunchConfig(), 1, deadline_s=1) as ranks:
        with pytest.raises(Late, match=r"no answer within 1 s \(waiting for 0\)"):
            ranks.run(nap, 60.0)
        ranks.deadline_s = 60
        assert ranks.run(nap, 0.0) == [None]  # new ones


def test_a_strategy_that_is_proved_wrong_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = {}
    for passed in (True, None, False):

        def measured(cells: list[Cell], plan: Plan, command: str, *_: Any, p: Any = passed) -> Any:
            for cell in cells:
                cell.times_ms, cell.skews_ms, cell.losses = [[1.0], [1.0]], [0.0], [5.0]
            cells[1].proof = {"pass": p, "message": "said", "checks": {}}
            env = ENV | {"shardlab": "", "time": "", "backend": "gloo"}
            return comparison.summarize(cells, plan, command, env)

        monkeypatch.setattr(comparison, "compare", measured)
        out = f"out-{passed}"
        done = CliRunner().invoke(app, ["compare", "--strategies", "single,zero3", "--out", out])
        code[passed] = done.exit_code
        assert (tmp_path / out / "report.html").exists(), done
    assert code == {True: 0, None: 0, False: 1}


def test_help_says_what_the_proof_is_of_and_how_long_it_takes() -> None:
    text = " ".join(CliRunner().invoke(app, ["compare", "--help"]).stdout.replace("│", " ").split())
    assert "prove each strategy on your model" in text
    assert "3 s and 20 steps of your model on 4 samples a rank" in text


# ------------------------------------------------------------------ the rest


def test_single_has_every_ranks_microbatches() -> None:
    """So that BatchNorm sees batches of the same size, and the arithmetic is the same."""
    config = configs.load(None, {"training.accumulate": 2, "training.global_batch": 24})
    single, ddp = cells(config, "single,simple_ddp", world="3", plan=Plan(steps=5, warmup=2))
    assert (single.config.launch.world, single.config.training.accumulate) == (1, 6)
    assert (ddp.config.launch.world, ddp.config.training.accumulate) == (3, 2)
    assert single.config.training.steps == 7


@given(cells=st.integers(1, 20), repeats=st.integers(1, 50))
def test_the_schedule_varies_what_follows_what(cells: int, repeats: int) -> None:
    orders = list(comparison.schedule(cells, repeats))
    assert len(orders) == repeats
    assert all(sorted(order) == list(range(cells)) for order in orders)  # each once in a repeat
    follows = [set(itertools.pairwise(order)) for order in orders]
    if cells > 1:
        assert all(not one & next_ for one, next_ in itertools.pairwise(follows))
    # In a whole round each follows each equally often, and so has each place; until then, none
    # follows another more often than it will in the end.
    whole = 2 * cells if cells % 2 else cells
    once = 2 if cells % 2 else 1
    counts = Counter(pair for pairs in follows[:whole] for pair in pairs)
    assert max(counts.values(), default=0) <= once
    if repeats >= whole and cells > 1:
        assert set(counts.values()) == {once}
        assert len(counts) == cells * (cells - 1)
        places = Counter((place, cell) for o in orders[:whole] for place, cell in enumerate(o))
        assert set(places.values()) == {once}


def test_four_repeats_have_four_predecessors() -> None:
    """With as many repeats as usual, and all strategies: nobody follows the same one twice."""
    orders = comparison.schedule(len(STRATEGIES), Plan.repeats)
    pairs = [pair for order in orders for pair in itertools.pairwise(order)]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("single", ("single", {})),
        ("a:b=1:c=x", ("a", {"b": 1, "c": "x"})),
        ("pkg.mod:Class", ("pkg.mod:Class", {})),
        ("file.py:Class:rate=1e-4:on=true", ("file.py:Class", {"rate": 1e-4, "on": True})),
    ],
)
def test_parse_spec(spec: str, expected: tuple[str, dict[str, Any]]) -> None:
    assert parse_spec(spec) == expected


def test_parse_spec_refuses() -> None:
    for spec, why in (("zero1:bucket_mb=", "has no value"), ("zero1:a=1:a=2", "a is given twice")):
        with pytest.raises(UsageError, match=why):
            parse_spec(spec)
    with pytest.raises(UsageError, match="is not option=value"):
        parse_spec("a:b=1:c")
    for spec in ("zero1::bucket_mb=2", "zero1:"):
        with pytest.raises(UsageError, match=f"a colon in '{spec}' has no option=value"):
            parse_spec(spec)


def test_an_option_without_a_value_is_no_module(tmp_path: Path, monkeypatch: Any) -> None:
    """Unless there is one of that name: somebody's own ddp.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for spec in ("zero1:bucket_mb", "ddp:bucket_mb"):
        with pytest.raises(UsageError, match=f"'bucket_mb' in '{spec}' is not option=value"):
            naming.resolve(parse_spec(spec)[0], naming.EVERY_STRATEGY, "strategy")
    Path("ddp.py").write_text("class Mine: ...")
    name, options = parse_spec("ddp:Mine:rate=2")
    assert naming.resolve(name, naming.EVERY_STRATEGY, "strategy").__name__ == "Mine"
    assert options == {"rate": 2}


def test_spread_and_throughput() -> None:
    assert numbers.spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == {
        "median": 6, "p10": 2, "p90": 10, "n": 11,
    }  # fmt: skip
    assert numbers.throughput([100, 200, 900], 8, 64) == {
        "samples_per_s": 40, "tokens_per_s": 2560,
    }  # fmt: skip
    assert numbers.throughput([100], 8, None)["tokens_per_s"] is None


def test_peak_is_the_peak() -> None:
    """Not what is left, not a sum, not what an earlier measurement held."""
    mib = 1 << 20
    kept: list[torch.Tensor] = []

    def work() -> str:
        a = torch.empty(3 * mib, dtype=torch.uint8)
        b = torch.empty(4 * mib, dtype=torch.uint8)
        del a
        kept.append(torch.empty(2 * mib, dtype=torch.uint8))
        del b
        return "done"

    for _ in range(2):
        result, peak = peak_bytes(torch.device("cpu"), work)
        assert result == "done"
        assert peak == pytest.approx(7 * mib, rel=0.001)
    kept.clear()
    _, peak = peak_bytes(torch.device("cpu"), work)
    assert peak == pytest.approx(7 * mib, rel=0.001)
