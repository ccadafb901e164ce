"""A strategy that is written from its documentation alone: docs/your-strategy.md, as printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from torch import Tensor

import commands
from commands import ROOT, bash_lines
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.strategies.base import Setup, Strategy
from shardlab.training import builders

LINES = bash_lines("docs/your-strategy.md")


def test_it_is_short() -> None:
    source = (ROOT / "examples" / "my_strategy.py").read_text()
    body = source[source.index("class OneMessage") :]
    assert len(body.splitlines()) <= 30


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_it_is_proved_trained_resumed_and_compared(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = []
    for line in LINES:
        fewer = ["--no-prove", "--repeats", "1"] if "compare" in line else []  # proved just now
        done = commands.here(*shlex.split(line)[1:], *fewer, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said.append(done.stdout)
    assert len(said) == 4
    assert "OneMessage" in said[0]
    run = tmp_path / "runs" / "mine"
    assert [row["step"] for row in read_jsonl(run / "rank0.jsonl")] == list(range(12))
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == "step-000012"
    compared = json.loads((tmp_path / "runs" / "mine-compared" / "compare.json").read_text())
    assert "OneMessage" in json.dumps(compared)


@pytest.mark.long
def test_what_is_no_strategy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def gradients(self, batches): ...\n")
    done = commands.here("train", "--strategy", "mine.py:Mine", "--size", "tiny", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.py:Mine is not a strategy: write a class that inherits from" in done.stderr


class Needy(Strategy):
    """A strategy whose option has no default."""

    def __init__(self, setup: Setup, *, at: int) -> None: ...


def test_an_option_without_a_default_is_asked_for() -> None:
    config = configs.load(None, {"strategy.name": f"{__file__}:Needy"})
    with pytest.raises(UsageError, match="needs its option 'at', which has no default"):
        builders.resolve_strategy(config)
    given = config.with_overrides({"strategy.options": {"at": 3}})
    assert issubclass(builders.resolve_strategy(given), Strategy)


class Older(Strategy):
    """Written when a checkpoint asked for ``slots()``: without it, it would be asked nothing."""

    def slots(self) -> list[str]:
        return []


class Apart(Strategy):
    """Has whole tensors of its own, which a checkpoint would not have."""

    def full_params(self) -> dict[str, Tensor]:
        return {}


class Beside(Strategy):
    """Keeps something that would not be saved."""

    def own_state(self) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("Older", "slots", "shards"),
        ("Apart", "full_params", "shards"),
        ("Beside", "own_state", "extra_state"),
    ],
)
def test_what_nobody_asks_for_is_refused(name: str, old: str, new: str) -> None:
    config = configs.load(None, {"strategy.name": f"{__file__}:{name}"})
    with pytest.raises(UsageError, match=rf"has {old}\(\) of its own; write {new}\(\) in its"):
        builders.resolve_strategy(config)
