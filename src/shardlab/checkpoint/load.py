"""A checkpoint into a strategy: every rank reads what it will hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardlab import config as configs
from shardlab.checkpoint import parts, planning, storage
from shardlab.checkpoint.fit import refuse_other_model
from shardlab.checkpoint.manifest import OWN, Manifest
from shardlab.checkpoint.save import cause
from shardlab.checkpoint.start import Start
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.strategies.base import Strategy
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
    refuse_other_model(start, parts.expected_model(strategy))
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


def _update_of(manifest: Manifest, config: Config) -> dict[str, Any]:
    """The update's own state. A loss scale is fp16's: from and to another precision it is new."""
    was = manifest.config.get("precision", {}).get("compute")
    state = {"steps": manifest.step, "good_steps": 0, "scale": 1.0, **manifest.update}
    if was != config.precision.compute:
        is_fp16 = config.precision.compute == "fp16"
        scale = (config.precision.loss_scale or configs.LOSS_SCALE) if is_fp16 else 1.0
        state |= {"scale": scale, "good_steps": 0}
    return state
