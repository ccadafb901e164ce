"""What a training run calls: to begin where another stopped, and to save as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shardlab import pulse
from shardlab import world as worlds
from shardlab.checkpoint import files, rng
from shardlab.checkpoint.load import load
from shardlab.checkpoint.save import About, Checkpoints, Outcome
from shardlab.checkpoint.start import Start
from shardlab.config import Config
from shardlab.data.audit import Audit
from shardlab.faults import inject
from shardlab.guard.guards import Guards
from shardlab.strategies import steps
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.run.recorder import Recorder


def restore(
    start: Start,
    strategy: Strategy,
    world: World,
    config: Config,
    audit: Audit | None,
    rehearse: Callable[[], Sequence[Batch]],
) -> None:
    """Model, optimizer, schedule, scaler, random states and notes as they were. A collective."""
    assert start.manifest is not None
    is_over = start.step >= config.training.steps
    if strategy.LEARNS_LAYOUT and world.size > 2 and not is_over:
        # DDP lays its buckets out anew after its first step, and the order in which more than two
        # ranks' gradients are added depends on that: let it have its first step before.
        strategy.gradients(rehearse())
        steps.drop_gradients(strategy.params)
    own = load(start, strategy, world, config)
    if own:
        rng.put(_inside(own[min(own)], "rng/"), world.device)
    else:  # this rank was not there: it must not draw again what it drew in another life
        worlds.seed_rank(config.training.seed, world.rank, start.step)
    is_same = (start.manifest.strategy, start.manifest.world) == (config.strategy.name, world.size)
    if is_same:
        strategy.load_own_state(_inside(own[world.rank], "strategy/"))
    if audit is not None:
        audit.steps = start.manifest.step
        for of_rank in own.values():
            if notes := _inside(of_rank, "audit/"):
                audit.add({name: tensor.numpy() for name, tensor in notes.items()})


def _inside(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def own_state(strategy: Strategy, device: torch.device, audit: Audit | None) -> dict[str, Tensor]:
    """What is this rank's alone."""
    own = {f"rng/{name}": tensor for name, tensor in rng.get(device).items()}
    own |= {f"strategy/{name}": tensor for name, tensor in strategy.own_state().items()}
    if audit is not None:
        arrays: dict[str, Any] = audit.state()
        own |= {f"audit/{n}": torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    return own


def checkpoints_of(
    folder: Path,
    config: Config,
    workload: Workload,
    world: World,
    strategy: Strategy,
    recorder: Recorder,
    guards: Guards,
) -> Checkpoints:
    """The run's checkpoints, which are recorded as they are written."""
    values = config.with_overrides({"output.dir": None, "checkpoint.resume": None}).to_dict()
    about = About(values, config.strategy.name, len(workload.dataset))

    def done(outcome: Outcome) -> None:
        recorder.checkpointed(outcome.row())
        if inject.ACTIVE is not None and outcome.error is None:
            written = folder / files.FOLDER / files.name_of(outcome.step)
            inject.ACTIVE.checkpoint_written(written, outcome.step)

    return Checkpoints(folder, config.checkpoint, world, strategy, about, done, guards)


def save(
    checkpoints: Checkpoints, recorder: Recorder, audit: Audit | None, finished: int, is_last: bool
) -> None:
    """A checkpoint after ``finished`` steps, whose rows are in their files before it. The last one
    is waited for and read back."""
    recorder.flush()
    write = checkpoints.save_last if is_last else checkpoints.save
    with pulse.PULSE.at(pulse.CHECKPOINT):
        write(finished, own_state(checkpoints.strategy, checkpoints.world.device, audit))
