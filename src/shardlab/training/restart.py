"""A run that survives the death of a rank: the world starts again from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardlab.config import Config, data_ranks, share_batch
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
                config.to_dict(),
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
            config = config.with_overrides(
                {
                    "checkpoint.resume": "auto",
                    "output.dir": str(failure.folder),
                    "launch.world": next_world(config),
                }
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
    training = config.training
    if training.micro_batch is not None:  # then accumulate follows from the number of ranks
        training = replace(training, accumulate=0)
    for fewer in range(world - 1, (least or world) - 1, -1):
        try:
            share_batch(training, data_ranks(config.strategy, fewer))
        except UsageError:
            continue
        return fewer
    return world
