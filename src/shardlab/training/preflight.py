"""Before anything is measured or proved, the ranks look: what runs where, and can it run?"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.guard.guards import refuse_unequal_data
from shardlab.launch import environment
from shardlab.specs import BASELINE
from shardlab.training import builders
from shardlab.world import World


def describe(world: World, config: Config, command: str) -> dict[str, Any]:
    """The machine, the workload and its parameters."""
    workload = builders.build_workload(config)
    model = workload.make_model()
    no_blocks = [builders.nothing_to_shard_by("zero3")] if workload.blocks == () else []
    return {
        **environment.describe(world.device, command),
        "backend": world.backend,
        "nodes": environment.nodes_of(world),
        "workload": workload.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": workload.data,
        "chosen": dict(workload.chosen),
        "notes": [*workload.notes, *no_blocks],
        # A sample's loss then depends on the others in its micro-batch.
        "normalizes_batches": any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
        ),
        "couples_samples": workload.couples_samples,  # and so does the loss
    }


def check(world: World, config: Config) -> None:
    """Refuse unknown options, sizes and data."""
    builders.resolve_strategy(config)
    workload = builders.build_workload(config)
    refuse_unequal_data(workload, world)
    if workload.couples_ranks and config.strategy.name == BASELINE and world.size > 1:
        raise UsageError(
            f"{BASELINE} would run each rank's samples by themselves, but {workload.name} looks at "
            f"all ranks' together ({workload.couples_ranks}): its loss would be another. Leave out "
            f"{BASELINE} or {workload.couples_ranks}"
        )
