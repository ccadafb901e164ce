"""``compare`` on models as people bring them: right strategies are not called wrong.

With the settings that a user gets, but one short visit, few strategies and no profile. Each of
these models is proved under each kind of strategy in ``tests/proof/test_people_prove.py`` and
estimated in ``test_estimate.py``; here some of them are, to see that a comparison takes the word of
both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import people
from conftest import GetRanks
from shardlab import config as configs
from shardlab.measure import compare as comparison
from shardlab.measure.cells import Plan, axes_of, cells_of
from shardlab.proof import chance
from shardlab.report import compare as report
from shardlab.report import compare_terminal

PEOPLE = Path(__file__).parents[1] / "people.py"
STATEFUL = ("dino",)  # a buffer that follows the batches
PLAN = Plan(repeats=1, warmup=1, steps=1)
PROVED = ("gpt2", "dino", "stochastic_depth")
EVERYONES = ("single", "simple_ddp", "zero3")


def config_of(name: str, file: Path = PEOPLE) -> configs.Config:
    return configs.load(None, {"model.workload": f"{file}:{name}", "launch.device": "cpu"})


def compare(config: configs.Config, strategies: tuple[str, ...], plan: Plan = PLAN) -> Any:
    axes = axes_of(config, None, None, None, None, default_world=2)
    cells = cells_of(config, strategies, axes, plan)
    return comparison.compare(cells, plan, "shardlab compare")


def not_estimated(_estimates: Any, _config: configs.Config) -> dict[str, Any]:
    return {"total": None, "reason": "test_estimate.py does it"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As a rank has; and nothing here may change the random state of other tests."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", people.EVERYONE)
def test_right_strategies_are_called_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_proved = name in PROVED
    if not is_proved:
        monkeypatch.setattr(comparison._Estimates, "_estimate", not_estimated)
    strategies = EVERYONES if is_proved else ("single", "zero3")
    result = compare(config_of(name), strategies, replace(PLAN, prove=is_proved))
    for cell in result["cells"]:
        assert (cell["status"], cell["reason"]) == ("ok", None)
        assert cell["peak_bytes"]["total"] > 0
        if is_proved:
            assert cell["proof"]["pass"] is True, (cell["label"], cell["proof"]["message"])
            assert cell["estimated_bytes"]["total"], cell["estimated_bytes"]
    assert "wrong" not in " ".join(compare_terminal.verdict_lines(result))
    expected = chance.RANDOM if name in people.RANDOM else None
    expected = chance.STATE if name in STATEFUL else expected
    assert result["loss_not_compared"] == expected
    if expected:
        unknown = [None] * (len(strategies) - 1)
        assert [c["loss_difference"] for c in result["cells"]] == [0.0, *unknown]
    report.write(tmp_path, result)


@pytest.mark.long
@pytest.mark.parametrize("name", people.EVERYONE)
def test_what_is_random_is_seen(name: str, ranks: GetRanks) -> None:
    found = ranks(1).run(chance.why_losses_differ, config_of(name).to_dict())[0]
    expected = chance.RANDOM if name in people.RANDOM else None
    assert found == (chance.STATE if name in STATEFUL else expected)
