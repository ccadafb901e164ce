"""A training run's numbers for TensorBoard, while it goes on. Written by rank 0, if asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError

TAGS = {
    "loss": "train/loss",
    "step_ms": "time/step_ms",
    "data_ms": "time/waiting_for_data_ms",
    "collectives": "communication/collectives",
    "collective_bytes": "communication/bytes",
    "rss_bytes": "memory/resident_bytes",
    "cuda_peak_bytes": "memory/cuda_peak_bytes",
}
BESIDE = ("steps", "samples", "targets", "seconds")  # of an evaluation: no result of it


def check() -> None:
    """Refuse before anything is built what cannot be written at the end."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "output.tensorboard needs TensorBoard: pip install 'shardlab[tensorboard]'; without "
            "it, rank0.jsonl has the same numbers"
        )


class Board:
    """The folder ``tensorboard`` of a run: ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        """``first``: the step that a resumed run begins with; what was shown of it before goes."""
        check()
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = first or None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def step(self, row: Mapping[str, Any]) -> None:
        for name, tag in TAGS.items():
            if row.get(name) is not None:
                self._writer.add_scalar(tag, row[name], row["step"])

    def evaluation(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in BESIDE:
                self._writer.add_scalar(f"held_out/{name}", value, row["steps"])

    def close(self) -> None:
        self._writer.close()
