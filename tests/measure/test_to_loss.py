"""Time, bytes and steps to a held-out loss: what is measured, ranked, drawn and refused."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import browser
import commands
import results
from conftest import deep_unless
from shardlab import config as configs
from shardlab import stats
from shardlab.measure import choice, to_loss
from shardlab.measure.cells import Cell
from shardlab.measure.to_loss import Goal, Row
from shardlab.report import to_loss as report

RUN = ["compare", "--size", "tiny", "--world", "2", "--out", "out"]
PAIR = ["--strategies", "simple_ddp_ga,zero2:comm_dtype=bf16"]


def found(done: Any, tmp_path: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "out" / "to_loss.json").read_text())
    return result


@pytest.mark.long
def test_to_a_loss(tmp_path: Path) -> None:
    words = [*PAIR, "--to-loss", "4.9", "--steps", "40", "--seeds", "2"]
    done = commands.here(*RUN, *words, cwd=tmp_path, COLUMNS="80")
    result = found(done, tmp_path)
    plain, rounded = result["cells"]
    assert result["seeds"] == [0, 1]
    for cell in (plain, rounded):
        assert (cell["ranked"], cell["reached"]) == (True, 2)
        first, second = (run["points"] for run in cell["runs"])
        assert first[0]["loss"] != second[0]["loss"], "the seed must change the initial weights"
        for run in cell["runs"]:
            steps, seconds = ([p[k] for p in run["points"]] for k in ("steps", "seconds"))
            assert steps == list(range(len(steps)))  # 40 steps: one evaluation after each
            assert seconds == sorted(seconds)
            assert run["loss"] <= 4.9 < run["points"][-2]["loss"]
    # The same seeds for all of them: before the first step they are the same model.
    starts = [[run["points"][0]["loss"] for run in cell["runs"]] for cell in result["cells"]]
    assert starts[0] == starts[1]
    # Gradients of 120,576 parameters in float32, and a loss with its count, by two ranks.
    steps = plain["runs"][0]["steps"]
    assert plain["runs"][0]["bytes"] == pytest.approx(steps * 4 * 120_576, rel=1e-3)
    assert rounded["bytes"]["median"] < plain["bytes"]["median"]
    assert plain["changes"] is None
    assert "rounds what is sent" in rounded["changes"]
    low, high = rounded["seconds_ratio"]["interval"]
    assert low < rounded["seconds_ratio"]["mean"] < high
    assert "Milliseconds per step alone do not rank these" in done.stdout
    table = done.stdout[: done.stdout.index("reached 4.9")]
    assert max(cell_len(line) for line in table.splitlines()) <= 80
    assert "Loss against tokens" in (tmp_path / "out" / "report.html").read_text()


def by_torchrun(*words: str, cwd: Path) -> Any:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return commands.run(*torchrun, "-m", "shardlab", *words, cwd=cwd)


@pytest.mark.long
@pytest.mark.parametrize(
    "start", deep_unless(lambda start: start is commands.here, [commands.here, by_torchrun])
)
def test_after_tokens(start: Callable[..., Any], tmp_path: Path) -> None:
    """8 samples of 64 tokens a step: 1,500 tokens are three steps. PyTorch's own bytes are seen."""
    words = ["--strategies", "single,pytorch_ddp", "--tokens", "1500", "--seeds", "1"]
    done = start(*RUN, *words, cwd=tmp_path)
    single, ddp = found(done, tmp_path)["cells"]
    assert [cell["steps"]["median"] for cell in (single, ddp)] == [3, 3]
    assert ddp["loss"]["median"] == pytest.approx(single["loss"]["median"], rel=1e-5)
    assert ddp["bytes"]["median"] == pytest.approx(3 * 4 * 120_576, rel=1e-2)
    assert single["bytes"]["median"] == 0
    assert "one seed has no interval" in done.stdout


@pytest.mark.long
def test_a_model_that_is_there_already_is_refused(tmp_path: Path) -> None:
    done = commands.here(*RUN, "--strategies", "simple_ddp", "--to-loss", "9", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert "--to-loss 9 is nothing to train for: the untrained model's held-out loss" in done.stderr


NO_HELD_OUT = """
import torch
from torch import nn

def workload():
    return nn.Linear(3, 1), [(torch.ones(3), torch.ones(1))] * 32, nn.MSELoss()
"""


@pytest.mark.long
def test_a_workload_that_holds_nothing_out_has_no_such_goal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NO_HELD_OUT)
    words = ["--strategies", "simple_ddp", "--workload", "mine.py:workload", "--to-loss", "3"]
    done = commands.here("compare", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no samples out, and --to-loss" in done.stderr


# ------------------------------------------------------------------ numbers and words, by hand


def run_of(seconds: float, reached: bool = True, loss: float = 3.1) -> dict[str, Any]:
    points = [
        {"steps": 0, "seconds": 0.0, "bytes": 0.0, "loss": 5.0},
        {"steps": 40, "seconds": seconds, "bytes": 1e6, "loss": loss},
    ]
    last = {**points[-1], "step_ms": 25 * seconds}
    return {"seed": 0, "reached": reached, "changes": None, **last, "points": points}


def summarized(goal: Goal, **runs: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        Row(Cell(configs.load(None, {"strategy.name": name, "launch.world": 2}), name), each)
        for name, each in runs.items()
    ]
    env = {"workload": "toy", "parameters": 5, "shardlab": "1", "device": "cpu"}
    overrides = {"training.steps": 50, "training.evaluate_every": 5, "training.evaluate_samples": 9}
    known = {"tokens_per_sample": 8, "held_out": 4}
    base = configs.load(None, {})
    return to_loss.summarize(rows, goal, overrides, base, 64, known, env, "shardlab compare")


def test_ratios_are_paired_by_seed() -> None:
    """Half the time with each seed is half the time, however much the seeds differ."""
    times = [10.0, 40.0, 90.0]
    result = summarized(
        Goal(loss=3.2),
        simple_ddp=[run_of(t) for t in times],
        zero1=[run_of(t / 2) for t in times],
        zero2=[run_of(t * factor) for t, factor in zip(times, (0.5, 1, 2), strict=True)],
    )
    _, half, noisy = result["cells"]
    assert half["seconds_ratio"] == {"mean": pytest.approx(0.5), "interval": [
        pytest.approx(0.5), pytest.approx(0.5)]}  # fmt: skip
    assert noisy["seconds_ratio"]["mean"] == pytest.approx(1)
    low, high = noisy["seconds_ratio"]["interval"]
    assert high == pytest.approx(1 / low)
    assert math.log(high) == pytest.approx(4.303 * math.log(2) / math.sqrt(3), rel=0.01)
    first = next(report.sentences(result))
    assert first.startswith("zero1 reached 3.2 in the least time, 20.0 s and 40 steps: 0.50× the")


def test_one_seed_short_is_not_ranked() -> None:
    short = [run_of(1), run_of(1, reached=False, loss=3.3)]
    broken = [run_of(1), run_of(1, reached=False, loss=math.nan)]
    result = summarized(
        Goal(loss=3.2, seeds=2), simple_ddp=[run_of(9)] * 2, zero1=short, zero2=broken
    )
    _, zero1, zero2 = result["cells"]
    assert (zero1["ranked"], zero1["reached"], zero1["seconds"]) == (False, 1, None)
    assert report.not_ranked(result, zero1) == (
        "reached it with 1 of 2 seeds in 50 steps; the lowest was 3.1000"
    )
    assert report.not_ranked(result, zero2) == "its held-out loss was no longer a number"
    assert next(report.sentences(result)).startswith("simple_ddp reached 3.2")
    page = report.html(result)
    assert "not ranked: its held-out loss" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


EVIL = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_opens_without_a_complaint(
    chromium: browser.Browser, dark: bool, tmp_path: Path
) -> None:
    result = summarized(
        Goal(loss=3.2, seeds=2),
        simple_ddp=[run_of(9), run_of(8)],
        zero1=[run_of(1), run_of(1, reached=False, loss=math.nan)],
    )
    result["cells"][1] |= {"label": EVIL, "status": "failed", "reason": EVIL, "changes": EVIL}
    files = report.write(tmp_path, result)
    json.loads(files["json"].read_text())  # a loss that is no number is null there
    with chromium.page(files["html"], dark=dark) as page:
        assert page.run("document.images.length") == 0
        widths = page.run(
            "[...document.querySelectorAll('path.curve')].map(p => p.getBoundingClientRect().width)"
        )
        assert len(widths) == 2 * 4  # charts, runs
        assert min(widths) >= 0
        assert max(widths) > 100
        assert page.problems == []


def test_nothing_that_is_ranked_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = Goal(loss=1, max_steps=50, seeds=1)
    result = summarized(goal, simple_ddp=[run_of(1, reached=False)])
    monkeypatch.setattr(to_loss, "run", lambda *_: result)
    words = ["--strategies", "simple_ddp", "--to-loss", "1"]
    done = commands.here(*RUN, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "simple_ddp is not ranked: reached it with 0 of 1 seed in 50 steps" in done.stdout
    assert "No strategy reached 1 with every seed within 50 steps" in done.stderr


def test_a_baseline_that_does_not_get_there_has_no_ratios() -> None:
    result = summarized(
        Goal(loss=3.2, seeds=1), simple_ddp=[run_of(1, reached=False)], zero1=[run_of(1)]
    )
    assert result["cells"][1]["ranked"]
    assert result["cells"][1]["seconds_ratio"] is None
    assert " – " in results.drawn_table(report.table(result))


def test_an_interval_of_the_mean() -> None:
    assert stats.mean_interval([1.0]) is None
    assert stats.mean_interval([2.0, 2.0]) == (2.0, 2.0)
    low, high = stats.mean_interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low, high) == (pytest.approx(2 - 2.484, abs=0.02), pytest.approx(2 + 2.484, abs=0.02))


def test_ms_per_step_does_not_choose_what_changes_the_mathematics() -> None:
    """The fastest step is not the answer if it is another step."""
    cells = [results.cell("single", 200), results.cell("pytorch_ddp", 100)]
    fast = results.cell("zero1", 50, changes="its ranks take 10 steps of their own")
    answer = choice.answer(results.result_of(*cells, fast))
    assert answer["choice"] == "pytorch_ddp"
    assert answer["otherwise"][-1].startswith("Ms per step does not rank zero1, as it takes other")
    alone = choice.answer(results.result_of(fast))
    assert alone["choice"] is None
    assert "--to-loss" in alone["why"]
