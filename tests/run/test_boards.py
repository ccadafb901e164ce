"""Numbers for TensorBoard and Weights & Biases. The packages need not be there: stand-ins do."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import commands
from shardlab.config import OutputConfig
from shardlab.errors import UsageError
from shardlab.run import boards


class Writer:
    """Notes what it is given."""

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.folder, self.purge_step, self.closed = Path(folder), purge_step, False
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def close(self) -> None:
        self.closed = True


def test_every_step_and_evaluation_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    board = boards.TensorBoard(tmp_path, first=3)
    writer = board._writer
    assert writer.folder == tmp_path / "tensorboard"
    assert writer.purge_step == 3
    row = {"step": 3, "loss": 2.5, "step_ms": 10.0, "profiled": False, "rss_bytes": 7}
    board.show(3, boards.of_step(row))
    result = {"steps": 4, "samples": 8, "loss": 2.0, "accuracy": 0.5, "seconds": 1.0}
    board.show(4, boards.of_evaluation(result))
    assert writer.scalars == {
        ("train/loss", 3): 2.5,
        ("time/step_ms", 3): 10.0,
        ("memory/resident_bytes", 3): 7,
        ("held_out/loss", 4): 2.0,
        ("held_out/accuracy", 4): 0.5,
    }
    board.close()
    assert writer.closed


@pytest.mark.parametrize("package", boards.PACKAGES)
def test_without_the_package_it_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    boards.check(OutputConfig())
    with pytest.raises(UsageError, match=rf"pip install 'shardlab\[{package}\]'"):
        boards.check(OutputConfig(**{package: True}))


WANDB = """
import json, pathlib

class Run:
    def __init__(self, settings):
        self.file = pathlib.Path(settings["dir"], "seen.jsonl").open("w")
        self.log({key: settings[key] for key in ("project", "name", "id", "resume")})
        self.log(settings["config"]["training"])
    def define_metric(self, *names, **settings):
        pass
    def log(self, numbers):
        self.file.write(json.dumps(numbers) + "\\n")
    def finish(self):
        self.log({"finished": True})
        self.file.close()

def init(**settings):
    return Run(settings)
"""


@pytest.mark.long
def test_a_run_tells_weights_and_biases(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    done = commands.shardlab(
        "train", "--size", "tiny", "--steps", "2", "--set", "output.wandb=true", "-o", "run",
        cwd=tmp_path, PYTHONPATH=str(tmp_path / "packages"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "seen.jsonl").read_text().splitlines()
    run, training, *steps, end = map(json.loads, lines)
    assert run == {"project": "shardlab", "name": "run", "id": "run", "resume": "allow"}
    assert training["steps"] == 2
    assert [row["step"] for row in steps] == [0, 1]
    assert all(row["train/loss"] > 0 for row in steps)
    assert end == {"finished": True}
