"""Numbers for TensorBoard and Weights & Biases. The packages need not be there: stand-ins do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

import commands
from shardlab.config import OutputConfig
from shardlab.errors import UsageError
from shardlab.training import loggers


def test_every_step_and_evaluation_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mock.MagicMock()
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(sys.modules, name, module)
    board = loggers.TensorBoard(tmp_path, first=3)
    module.SummaryWriter.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=3)
    row = {"step": 3, "loss": 2.5, "step_ms": 10.0, "profiled": False, "rss_bytes": 7}
    board.show(3, loggers.of_step(row))
    result = {"steps": 4, "samples": 8, "loss": 2.0, "accuracy": 0.5, "seconds": 1.0}
    board.show(4, loggers.of_evaluation(result))
    board.close()
    assert module.SummaryWriter.return_value.mock_calls == [
        mock.call.add_scalar("train/loss", 2.5, 3),
        mock.call.add_scalar("time/step_ms", 10.0, 3),
        mock.call.add_scalar("memory/resident_bytes", 7, 3),
        mock.call.add_scalar("held_out/loss", 2.0, 4),
        mock.call.add_scalar("held_out/accuracy", 0.5, 4),
        mock.call.close(),
    ]


@pytest.mark.parametrize("package", loggers.PACKAGES)
def test_without_the_package_it_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    loggers.check(OutputConfig())
    with pytest.raises(UsageError, match=rf"pip install 'shardlab\[{package}\]'"):
        loggers.check(OutputConfig(**{package: True}))


WANDB = """
import json, pathlib, types

def init(**settings):
    file = pathlib.Path(settings["dir"], "seen.jsonl").open("w")
    def log(numbers):
        print(json.dumps(numbers), file=file, flush=True)
    log({key: settings[key] for key in ("project", "name", "id", "resume")})
    log(settings["config"]["training"])
    end = lambda: (log({"finished": True}), file.close())
    return types.SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=end)
"""


@pytest.mark.long
def test_a_run_tells_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")  # the ranks have it, too
    done = commands.here(
        "train", "--size", "tiny", "--steps", "2", "--set", "output.wandb=true", "-o", "run",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "seen.jsonl").read_text().splitlines()
    run, training, *steps, end = map(json.loads, lines)
    assert run == {"project": "shardlab", "name": "run", "id": "run", "resume": "allow"}
    assert training["steps"] == 2
    assert [row["step"] for row in steps] == [0, 1]
    assert all(row["train/loss"] > 0 for row in steps)
    assert end == {"finished": True}
