"""The comparison: what it measures, what it writes, and that one failure is one row."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
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
import people
from conftest import GetRanks
from shardlab import config as configs
from shardlab import naming, stats
from shardlab.cli import app
from shardlab.cli import compare as cli_compare
from shardlab.errors import Late, UsageError
from shardlab.launch.rank_set import RankSet
from shardlab.measure import cells as measured_cells
from shardlab.measure import compare as comparison
from shardlab.measure import gate
from shardlab.measure.cells import Cell, Plan
from shardlab.measure.memory import peak_bytes
from shardlab.naming import STRATEGIES
from shardlab.proof import chance, judge
from shardlab.report import compare as report
from shardlab.report import compare_charts, compare_terminal
from shardlab.specs import parse_spec
from shardlab.strategies.data_parallel.simple_ddp_ga import SimpleDDPGradientAccumulation
from shardlab.trace.model import PARTS
from shardlab.training import loop
from shardlab.world import World

SHORT = ["--size", "tiny", "--repeats", "2", "--warmup", "1", "--steps", "2"]


class Fails(SimpleDDPGradientAccumulation):
    def step(self) -> None:
        if self.group.rank() == 1:
            raise ArithmeticError("planted")
        super().step()


@pytest.mark.long
def test_losses_agree_with_single_and_a_failure_is_a_row(tmp_path: Path) -> None:
    """With nothing but JSON on the standard output of the command and of its ranks."""
    done = commands.shardlab(
        "compare", *SHORT, "--no-prove", "--no-profile", "--world", "2", "--out", "out", "--json",
        "--strategies", f"{__file__}:Fails,single,simple_ddp,pytorch_ddp:bucket_mb=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == result
    assert result["schema"] == 1
    assert result["baseline"] == "single"
    assert result["command"].startswith("shardlab compare")
    assert (result["workload"], result["parameters"]) == ("gpt2-tiny", 120_576)
    assert result["env"]["chosen"] == {"data.source": "stdlib"}
    failed, *cells = result["cells"]
    assert failed["status"] == "failed"
    assert failed["reason"] == "rank 1: ArithmeticError: planted"
    assert failed["step_ms"] is None
    assert [(c["label"], c["world"], c["options"]) for c in cells] == [
        ("single", 1, {}), ("simple_ddp", 2, {}),
        ("pytorch_ddp (bucket_mb=1)", 2, {"bucket_mb": 1}),
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
        names = [row["strategy"] for row in csv.DictReader(file)]
    assert names == [cell["strategy"] for cell in result["cells"]]


@pytest.mark.long
def test_every_strategy_is_proved_and_explained(tmp_path: Path) -> None:
    """The model of a proof has a block for each stage, though the smallest has two."""
    wrong = f"{Path(__file__).parents[1] / 'bugs' / 'saboteurs.py'}:NoAveraging"
    done = commands.here(
        "compare", *SHORT, "--world", "2", "--out", "out", "--micro-batch", "1",
        "--global-batch", "8", "--strategies",
        f"single,pipeline_interleaved,{wrong}",
        "--set", "profile.active=1", "--set", "model.options.layers=4", "--fresh", cwd=tmp_path,
        COLUMNS="80",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # one of them is proved wrong
    assert done.stdout.count("out/compare.") == 3  # where its files are: json, csv, md
    assert not (tmp_path / "out" / "run.lock").exists()
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    page = (tmp_path / "out" / "report.html").read_text()
    data = result["env"]["data"]
    assert data.startswith("stdlib: the text of Python's library")
    assert f"data: {data}" in " ".join(done.stdout.split())
    assert str(markupsafe.escape(data)) in page
    cells = result["cells"]
    assert [(c["label"].rpartition(":")[2], c["world"], c["proof"]["pass"]) for c in cells] == [
        ("single", 1, True), ("pipeline_interleaved", 2, True), ("NoAveraging", 2, False),
    ]  # fmt: skip
    for cell in cells:
        assert (cell["status"], cell["baseline"]) == ("ok", "single")
        profile = cell["profile"]
        parts = sum(profile[part.replace("_us", "_ms")] for part in PARTS)
        assert parts == pytest.approx(profile["wall_ms"], rel=1e-6)
        assert (profile["bubble_ms"] > 0) == (cell["label"] == "pipeline_interleaved")
        files = [tmp_path / name for name in cell["traces"]["files"]]
        assert [path.exists() for path in files] == [True] * cell["world"]
        low, high = cell["speed_interval"]
        assert low <= cell["speed_to_baseline"] <= high
    assert "equal: " in cells[-1]["proof"]["message"]
    assert "is wrong: equal: " in " ".join(done.stdout.split())
    assert "NoAveraging" not in result["answer"]["choice"]
    assert cells[0]["sent"]["bytes"] == 0
    psi = 4 * result["parameters"]
    assert cells[-1]["sent"]["bytes"] == pytest.approx(psi, rel=0.01)  # 2 Ψ (n - 1) / n
    assert "where a profiled step goes" in done.stdout
    assert "forward 3, stage 2" in page
    assert "| bubble ms |" in (tmp_path / "out" / "compare.md").read_text()


# ------------------------------------------------------------------ interrupted


@pytest.mark.long
def test_an_interrupted_comparison_reports_what_was_measured(tmp_path: Path) -> None:
    process = commands.start(
        *commands.SHARDLAB, "compare", *SHORT, "--out", "out", "--set", "profile.active=1",
        "--strategies", "single,simple_ddp", cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    while "simple_ddp · repeat 1" not in said:  # single has its first visit behind it
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what was measured so far: out/report.html" in rest
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert result["interrupted"]
    first, second = result["cells"]
    assert first["step_ms"]["n"] == 2
    assert first["proof"]["message"] == "the comparison was interrupted"
    assert second["step_ms"] is None
    assert second["reason"] == "not measured: the comparison was interrupted"
    for page in ("report.html", "compare.md"):
        text = (tmp_path / "out" / page).read_text()
        assert "The comparison was interrupted." in text
        assert "not measured: the comparison was interrupted" in text
    listed = commands.here("runs", "show", "out", cwd=tmp_path).stdout
    assert "compare, interrupted" in listed


# ------------------------------------------------------------------ models as people bring them

PEOPLE = Path(__file__).parents[1] / "models" / "people.py"
SAID = dict.fromkeys(people.RANDOM, chance.RANDOM)
SAID["dino"] = chance.STATE  # a buffer that follows the batches


def of_people(name: str) -> configs.Config:
    return configs.load(None, {"model.workload": f"{PEOPLE}:{name}", "launch.device": "cpu"})


@pytest.mark.long
@pytest.mark.parametrize("name", people.EVERYONE)
def test_what_is_random_is_seen(name: str, ranks: GetRanks) -> None:
    found = ranks(1).run(chance.why_losses_differ, of_people(name))[0]
    assert found == SAID.get(name)


@pytest.mark.long
def test_right_strategies_are_called_right_where_forward_is_random(tmp_path: Path) -> None:
    """All of these models are proved in ``tests/proof/test_people_prove.py``."""
    plan = Plan(repeats=1, warmup=1, steps=1)
    found = cells(of_people("stochastic_depth"), "single,zero3", plan)
    with torch.random.fork_rng(devices=[]):
        result = comparison.compare(found, plan, "shardlab compare")
    for cell in result["cells"]:
        assert (cell["status"], cell["reason"]) == ("ok", None)
        assert cell["proof"]["pass"] is True, (cell["label"], cell["proof"]["message"])
        assert cell["estimated_bytes"]["total"], cell["estimated_bytes"]
    assert "wrong" not in " ".join(compare_terminal.verdict_lines(result))
    assert result["loss_not_compared"] == chance.RANDOM
    assert [c["loss_difference"] for c in result["cells"]] == [0.0, None]
    report.write(tmp_path, result)


# ------------------------------------------------------------------ pure


def cells(
    config: configs.Config,
    specs: str,
    plan: Plan | None = None,
    **flags: str,
) -> list[Cell]:
    names = ("world", "precision", "micro_batch")
    axes = measured_cells.axes_of(config, *(flags.get(name) for name in names), default_world=2)
    return measured_cells.cells_of(config, specs.split(","), axes, plan or Plan())


def point(cell: Cell) -> tuple[str, int, str, int, Any]:
    config = cell.config
    return (
        config.strategy.name,
        cell.world,
        config.precision.compute,
        config.accumulate,
        config.strategy.options.get("bucket_mb"),
    )


def test_axes_are_multiplied_where_it_makes_sense() -> None:
    found = cells(
        configs.Config(),
        "single,pytorch_ddp:bucket_mb=1,simple_ddp",
        world="1,2",
        precision="fp32,bf16",
    )
    fp32 = [
        ("single", 1, "fp32", 1, None),  # one for all worlds
        ("pytorch_ddp", 1, "fp32", 1, 1),
        ("simple_ddp", 1, "fp32", 1, None),
        ("pytorch_ddp", 2, "fp32", 1, 1),
        ("simple_ddp", 2, "fp32", 1, None),
    ]
    bf16 = [(name, world, "bf16", a, mb) for name, world, _, a, mb in fp32]
    assert [point(cell) for cell in found] == fp32 + bf16
    assert len({cell.label for cell in found}) == len(found)
    assert found[3].label == "pytorch_ddp (bucket_mb=1, world=2, fp32)"
    assert all(cell.config.training.global_batch == 8 for cell in found)


def test_a_micro_batch_is_the_same_in_every_world() -> None:
    """The global batch is that of the first world; accumulation follows in each."""
    config = configs.load(None, {"training.micro_batch": 2, "training.epochs": 3})
    found = cells(config, "baseline,simple_ddp", world="4,1,2")
    assert [(c.world, c.config.accumulate) for c in found] == [
        (1, 4), (4, 1), (1, 4), (2, 2),
    ]  # fmt: skip
    assert {c.config.training.global_batch for c in found} == {8}
    assert {c.config.training.steps for c in found} == {3}  # and not what 3 epochs would take


def test_an_axis_of_one_value_is_in_no_label() -> None:
    found = cells(configs.Config(), "single,zero1", world="4", micro_batch="1")
    assert [cell.label for cell in found] == ["single", "zero1"]
    assert [cell.parts for cell in found] == [8, 8]


def test_the_strategies_with_buckets_are_known() -> None:
    names = ("single", "simple_ddp", "bucket_ddp_async", "pytorch_zero3", "zero2")
    found = {name for name in names if measured_cells.has_buckets(name)}
    assert found == {"bucket_ddp_async", "zero2"}


ENV = {"workload": "w", "parameters": 1, "device": "cpu"}


def summarized(
    found: list[Cell], ms: float | Sequence[float] = 1.0, losses: Sequence[float] = (), **env: Any
) -> dict[str, Any]:
    """As if each cell had been visited twice."""
    of_cells = [ms] * len(found) if isinstance(ms, float) else ms
    for cell, one, loss in zip(found, of_cells, losses or [5.0] * len(found), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[one, one], [one, one]], [0.0], [loss]
    return comparison.summarize(found, Plan(), "shardlab compare", ENV | env)


def test_each_precision_has_its_own_baseline() -> None:
    found = cells(configs.Config(), "single,simple_ddp", precision="fp32,bf16")
    rows = summarized(found, (100.0, 50.0, 400.0, 100.0))["cells"]
    assert [row["baseline"] for row in rows] == ["single (fp32)"] * 2 + ["single (bf16)"] * 2
    assert [row["speed_to_baseline"] for row in rows] == [1, 2, 1, 4]


def test_mfu_is_a_share_of_the_measured_rate_of_a_device() -> None:
    found = cells(configs.Config(), "single,simple_ddp")
    for cell in found:
        cell.samples = 8

    def mfu(**env: Any) -> list[float | None]:
        return [row["mfu"] for row in summarized(found, 100.0, **env)["cells"]]

    peak = {"flops_per_s": 160e9, "devices": 2}
    known = {"flops_per_sample": 1e9, "matmul": {"fp32": peak}}
    assert mfu(**known) == [0.5, 0.25]  # 80 GFLOP/s, by one device, by two
    known["matmul"] = {"fp32": peak | {"devices": 1}}  # that the two share
    assert mfu(**known) == [0.5, 0.5]
    assert mfu() == [None, None]


@pytest.mark.parametrize(
    ("seen", "difference"),
    [({}, 1.0), ({"normalizes_batches": True}, None), ({"couples_samples": True}, None)],
)
def test_loss_over_micro_batches_is_compared_only_on_the_same_ones(
    seen: dict[str, bool], difference: float | None
) -> None:
    found = cells(configs.Config(), "single,simple_ddp", world="1,2")
    rows = summarized(found, losses=(5.0, 5.0, 6.0), **seen)["cells"]
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
    assert (proof.training.global_batch, proof.accumulate) == (8, 2)
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
        low, high = stats.ratio_interval(times(200.0), times(100.0))
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
        low, high = stats.ratio_interval(*first, paired=True)
        within += abs(stats.ratio(*first) - stats.ratio(*second)) < high - low
        inside += low <= stats.ratio(*second) <= high
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
    values = configs.load(None, {**options, **tiny})
    steps, found = ranks(2).run(timed, values, 2)[0]
    assert steps == range(7)  # and not 9
    assert (found["every"], len(found["losses"]), len(set(found["slowest_ms"]))) == (5, 4, 1)
    assert len(found["slowest_ms"]) == 4


def timed(world: World, config: configs.Config, warmup: int) -> tuple[range, Any]:
    """On a rank: the steps that are made, and what is found."""
    with mock.patch.object(loop, "train", wraps=loop.train) as train:
        found = comparison.time_cell(world, config, warmup)
    return train.call_args.args[3], found


def process(_world: World) -> int:
    return os.getpid()


@pytest.mark.long
def test_each_repeat_on_a_cpu_has_new_ranks_and_nothing_slows_what_is_timed() -> None:
    found = cells(configs.Config(), "single,simple_ddp")
    estimates = comparison._Estimates(ENV, Plan(), found, None)
    ranks = RankSet(configs.LaunchConfig(), 2)
    plan = Plan(profile=configs.ProfileConfig())
    jobs = [*comparison._jobs(ranks, found, plan, Path("traces"), estimates, None)]
    repeats = [f"repeat {n} of 4" for n in (1, 2, 3, 4)]
    assert [*dict.fromkeys(j.what for j in jobs)] == [*repeats, "memory", "proof", "traces"]
    assert [j.what for j in jobs if j.begins_repeat] == repeats[1:]
    with RankSet(configs.LaunchConfig(), 2) as ranks:
        first = ranks.run(process)
        assert ranks.run(process) == first
        ranks.renew()
        assert not set(ranks.run(process)) & set(first)


def one_visit_to_each() -> dict[str, Any]:
    found = cells(configs.Config(), "single,simple_ddp", plan=Plan(repeats=1))
    for cell, ms in zip(found, (100.0, 50.0), strict=True):
        cell.times_ms, cell.skews_ms, cell.losses = [[ms, ms + 1]], [0.0], [5.0]
    return comparison.summarize(found, Plan(repeats=1), "shardlab compare", ENV)


def test_one_repeat_has_no_interval_and_chooses_nothing() -> None:
    times = [[100.0, 101.0], [99.0, 100.0], [100.0, 100.0], [101.0, 99.0]]
    assert stats.ratio(times, times) == 1
    assert not stats.can_tell([[5.0, 6.0]], times)  # nothing is known of its noise
    assert stats.can_tell(times, times)
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
    for cell in found:
        cell.proof = {"pass": True, "message": "", "checks": {}} if proved else None
    result = summarized(found, losses=(5.0, 6.0), loss_not_compared=chance.RANDOM)
    assert [row["loss_difference"] for row in result["cells"]] == [0.0, None]
    assert result["answer"]["choice"] == "single"
    assert "Left out" not in str(result["answer"])
    said = compare_terminal.verdict(result)
    assert "were not compared, as forward draws random numbers" in said
    assert ("the proof decides" if proved else "only a proof can decide") in said
    chart = compare_charts.loss_chart(result)
    assert chart is not None
    assert chart.note.startswith("They need not coincide: forward draws random numbers")


def profiled_apart(world: World, config: configs.Config, folder: str) -> Any:
    """As on two nodes, of which one has the folder."""
    here = folder if world.rank == 0 else f"{folder}/gone"
    return comparison.profile_cell(world, config, here, "simple_ddp")


def test_nodes_that_share_no_folder_are_told_so(ranks: GetRanks, tmp_path: Path) -> None:
    config = configs.load(None, {"model.size": "tiny", "launch.world": 2})
    said = (
        r"where the traces go, is not visible to rank 1 on .*: name a folder that all nodes share"
    )
    with pytest.raises(UsageError, match=said):
        ranks(2).run(profiled_apart, config, str(tmp_path))


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


@pytest.mark.parametrize(
    ("proved", "status", "code"),
    [(True, "ok", 0), (None, "ok", 0), (False, "ok", 1), (None, "failed", 1)],
)
def test_a_strategy_that_is_proved_wrong_fails_the_command(
    proved: bool | None, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a comparison in which nothing ran; a proof that came to no end does not."""

    def measured(cells: list[Cell], *_: Any) -> Any:
        (cell,) = cells
        cell.status, cell.proof = status, {"pass": proved, "message": "said", "checks": {}}
        return summarized(cells, shardlab="", time="", backend="gloo")

    monkeypatch.setattr(comparison, "compare", measured)
    done = commands.here("compare", "--strategies", "zero3", "--out", "out", cwd=tmp_path)
    assert done.returncode == code
    assert (tmp_path / "out" / "report.html").exists(), done
    (row,) = json.loads((tmp_path / "out" / "compare.json").read_text())["cells"]
    assert row["loss_difference"] is None  # there is no single to differ from
    assert row["speed_to_baseline"] == (1.0 if status == "ok" else None)


# ------------------------------------------------------------------ the rest


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
    assert stats.spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == {
        "median": 6, "p10": 2, "p90": 10, "n": 11,
    }  # fmt: skip
    assert stats.throughput([100, 200, 900], 8, 64) == {
        "samples_per_s": 40, "tokens_per_s": 2560,
    }  # fmt: skip
    assert stats.throughput([100], 8, None)["tokens_per_s"] is None


@pytest.mark.long
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
