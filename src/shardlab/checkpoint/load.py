"""A checkpoint into a strategy: every rank reads what it will hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardlab import config as configs
from shardlab.checkpoint import parts, planning, storage
from shardlab.checkpoint.fit import refuse_other_model
from shardlab.checkpoint.manifest import MODEL, OWN, Manifest
from shardlab.checkpoint.save import cause
from shardlab.checkpoint.start import Start
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.strategies.base import Strategy
from shardlab.workloads import huggingface
from shardlab.world import World

Own = dict[int, dict[str, Tensor]]  # by the rank that had it


def load(start: Start, strategy: Strategy, world: World, config: Config) -> Own:
    """Every rank reads what it will hold, and what was its own. A collective.

    In another world rank r gets what belonged to r, r + world, r + 2 world …; a rank that was not
    there gets nothing.
    """
    manifest, folder = start.manifest, start.checkpoint
    assert manifest is not None
    assert folder is not None
    tied = parts.tied_names(strategy)
    saved = {
        n: (t.shape, parts.kind_of(getattr(torch, t.dtype))) for n, t in manifest.model().items()
    }
    expected = parts.expected_model(strategy)
    for name in parts.unsaved_names(strategy):
        if name not in saved:  # an exported state_dict has not got it: it stays as it was made
            del expected[name]
    refuse_other_model(start, saved, expected, tied)
    _refuse_untied(folder, manifest, tied)
    places = parts.Places(strategy, manifest)
    own: Own = {}
    wanted = dict(places.parts)
    for rank in range(world.rank, manifest.world, world.size):
        own[rank] = {}
        for name, entry in manifest.own(rank).items():
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            own[rank][name.removeprefix(f"{OWN}{rank}/")] = tensor
            wanted[name] = parts.Part(tensor.shape, 0, tensor.view(-1))
    try:
        dcp.load(
            wanted,
            storage_reader=storage.Reader(folder, manifest),
            planner=planning.Loading(),
            process_group=world.group,
        )
    except dcp.CheckpointException as failed:
        reason = cause(failed)
        if isinstance(reason, UsageError):
            raise reason from None
        raise RuntimeError(f"cannot load {folder}: {reason!r}") from failed
    places.settle(_update_of(manifest, config))
    return own


def _refuse_untied(folder: Path, manifest: Manifest, tied: Mapping[str, str]) -> None:
    """Weights from elsewhere may have a tied tensor under each of its names: all must be equal."""
    names = {n: first for n, first in tied.items() if MODEL + n in manifest.tensors}
    for name, first in names.items():
        ours, other = (storage.whole_tensor(folder, manifest, MODEL + n) for n in (first, name))
        if huggingface.raw(ours) != huggingface.raw(other):
            raise UsageError(
                f"{folder} is of another model: '{name}' and '{first}' are one tensor here, and "
                "differ there"
            )


def _update_of(manifest: Manifest, config: Config) -> dict[str, Any]:
    """The update's own state. A loss scale is fp16's: from and to another precision it is new."""
    was = manifest.config.get("precision", {}).get("compute")
    state = {"steps": manifest.step, "good_steps": 0, "scale": 1.0, **manifest.update}
    if was != config.precision.compute:
        is_fp16 = config.precision.compute == "fp16"
        scale = (config.precision.loss_scale or configs.LOSS_SCALE) if is_fp16 else 1.0
        state |= {"scale": scale, "good_steps": 0}
    return state
