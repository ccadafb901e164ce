"""A training run's numbers for TensorBoard or Weights & Biases, during the run, from rank 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.config import Config, OutputConfig
from shardlab.errors import UsageError

TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "step_ms": "time/step_ms",
    "data_ms": "time/waiting_for_data_ms",
    "collectives": "communication/collectives",
    "collective_bytes": "communication/bytes",
    "between_bytes": "communication/bytes_to_other_nodes",
    "rss_bytes": "memory/resident_bytes",
    "cuda_peak_bytes": "memory/cuda_peak_bytes",
}
BESIDE = ("steps", "samples", "targets", "seconds")  # in an evaluation's row, but no results
PACKAGES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}


def check(output: OutputConfig) -> None:
    """Refuse a board whose package is missing, before anything is built."""
    for package, name in PACKAGES.items():
        if getattr(output, package) and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"output.{package} needs {name}: pip install 'shardlab[{package}]'; without "
                "it, rank0.jsonl has the same numbers"
            )


def of_run(config: Config, folder: Path, first: int = 0) -> list[Board]:
    """The boards that the config asks for. ``first``: the step that a resumed run begins with."""
    output = config.output
    return [
        *([TensorBoard(folder, first)] if output.tensorboard else []),
        *([WeightsAndBiases(folder, config)] if output.wandb else []),
    ]


def of_step(row: Mapping[str, Any]) -> dict[str, float]:
    return {tag: row[name] for name, tag in TAGS.items() if row.get(name) is not None}


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    return {f"held_out/{name}": value for name, value in row.items() if name not in BESIDE}


class TensorBoard:
    """The folder ``tensorboard`` of a run: ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Remove what was shown of the steps that a resumed run repeats.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project shardlab; where it goes is wandb's own business (``WANDB_MODE`` …)."""

    def __init__(self, folder: Path, config: Config) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project="shardlab",
            name=folder.name,
            id=folder.name,  # a resumed run keeps its place
            resume="allow",
            dir=str(folder),
            config=config.to_dict(),
        )
        # An axis of our own: numbers of a step may come after an evaluation of a later one, and
        # wandb's own counter cannot go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | WeightsAndBiases
