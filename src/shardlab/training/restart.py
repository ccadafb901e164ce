"""A run that survives the death of a rank: the world starts again from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from shardlab.config import Config, data_ranks
from shardlab.errors import RankFailure, UsageError
from shardlab.launch import launch
from shardlab.launch.ranks import Event

TARGET = "shardlab.training.run:train_rank"


def train(config: Config, command: str, on_event: Callable[[Event], None]) -> Any:
    """Rank 0's result of a run that is started again at most ``launch.max_restarts`` times.

    At most ``checkpoint.every`` steps are repeated each time. Replicas that have drifted apart, or
    ranks out of step, restart from the newest checkpoint too: before it was written all ranks
    compared what they hold and what they have called. Input that is refused, Ctrl-C and a loss that
    is not finite are not tried again: the run would end the same way.
    """
    restarts = 0
    while True:
        try:
            return launch.launch(
                TARGET,
                config.launch,
                config,
                command,
                saves=config.checkpoint.every is not None,
                on_event=on_event,
            )
        except RankFailure as failure:
            # A loss that is not finite would be so again.
            is_final = failure.is_final or getattr(failure, "state", None) == "not finite"
            if is_final or failure.folder is None or restarts >= config.launch.max_restarts:
                raise
            restarts += 1
            config = replace(
                config.at_world(next_world(config)),
                checkpoint=replace(config.checkpoint, resume="auto"),
                output=replace(config.output, dir=str(failure.folder)),
            )
            on_event(
                {
                    "restart": restarts,
                    "of": config.launch.max_restarts,
                    "world": config.launch.world,
                    "reason": str(failure),
                }
            )


def next_world(config: Config) -> int:
    """The same number of ranks, or with ``min_world`` the next smaller that can share the batch."""
    world, least = config.launch.world, config.launch.min_world
    assert world is not None
    for fewer in range(world - 1, (least or world) - 1, -1):
        try:
            if config.training.global_batch >= data_ranks(config.strategy, fewer):
                return fewer
        except UsageError:  # the axes of the model need a multiple of other numbers
            continue
    return world
