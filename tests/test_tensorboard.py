"""Numbers for TensorBoard. The package is large and need not be there: a stand-in takes them."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import commands
from shardlab import tensorboard
from shardlab.errors import UsageError


class Writer:
    """Notes what it is given."""

    def __init__(self, folder: str) -> None:
        self.folder, self.closed = Path(folder), False
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tensorboard.Board:
    module: Any = types.ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    monkeypatch.setattr(tensorboard, "check", lambda: None)
    return tensorboard.Board(tmp_path)


def test_every_step_and_evaluation_is_written(board: tensorboard.Board, tmp_path: Path) -> None:
    writer = board._writer
    assert writer.folder == tmp_path / "tensorboard"
    board.step({"step": 3, "loss": 2.5, "step_ms": 10.0, "profiled": False, "rss_bytes": 7})
    board.evaluation({"steps": 4, "samples": 8, "loss": 2.0, "accuracy": 0.5, "seconds": 1.0})
    assert writer.scalars == {
        ("train/loss", 3): 2.5,
        ("time/step_ms", 3): 10.0,
        ("memory/resident_bytes", 3): 7,
        ("held_out/loss", 4): 2.0,
        ("held_out/accuracy", 4): 0.5,
    }
    board.close()
    assert writer.closed


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    with pytest.raises(UsageError, match=r"pip install 'shardlab\[tensorboard\]'"):
        tensorboard.check()


def test_a_run_writes_or_refuses(tmp_path: Path) -> None:
    done = commands.shardlab(
        "train", "--size", "tiny", "--steps", "2", "--set", "output.tensorboard=true", "-o", "run",
        cwd=tmp_path,
    )  # fmt: skip
    if importlib.util.find_spec("tensorboard") is None:
        assert done.returncode == 2
        assert "output.tensorboard needs TensorBoard" in done.stderr
        assert not (tmp_path / "run").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "run" / "tensorboard").glob("events*"))
