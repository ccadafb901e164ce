"""What is inside checkpoints, as plain rows. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardlab.checkpoint import files
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.manifest import OPTIMIZER
from shardlab.errors import UsageError


def overview(path: Path) -> list[dict[str, Any]]:
    """A row for each checkpoint of a run folder, or for the one that ``path`` is."""
    folders = [path] if files.is_checkpoint(path) else list(files.steps_in(path).values())
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, Any]:
    """A damaged checkpoint is a row that says so: the others are still worth seeing."""
    manifest, damage = None, None
    try:
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest.files)
    except UsageError as error:
        damage = str(error)
    row: dict[str, Any] = {"path": str(folder), "damage": damage}
    if manifest is None:
        return row
    of_model = manifest.model().values()
    return row | {
        "step": manifest.step,
        "created": manifest.created,
        "strategy": manifest.strategy,
        "world": manifest.world,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "model_tensors": len(of_model),
        "parameters": sum(t.size for t in of_model),
        "optimizer_tensors": len(manifests.inside(manifest.tensors, OPTIMIZER)),
    }


def tensors(folder: Path) -> list[dict[str, Any]]:
    """A row for each tensor of a checkpoint's model, with what the optimizer keeps for it."""
    manifest = manifests.read(folder)
    keys = manifest.optimizer_keys()
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "chunks": len(tensor.chunks),
            "files": sorted({chunk.file for chunk in tensor.chunks}),
            "optimizer": sorted(keys.get(name, {})),
        }
        for name, tensor in manifest.model().items()
    ]
