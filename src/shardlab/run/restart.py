"""A run that goes on when a rank dies: the world is started again, from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlab.checkpoint import files
from shardlab.config import Config, check_batch
from shardlab.errors import Halt, Interrupted, RankFailure, UsageError
from shardlab.run import launch
from shardlab.run.launch import Event

TARGET = "shardlab.run.rank:train_rank"


def train(config: Config, command: str, on_event: Callable[[Event], None]) -> Any:
    """The run, started again at most ``launch.max_restarts`` times; rank 0's result.

    At most ``checkpoint.every`` steps are repeated each time. Replicas that have drifted apart, or
    ranks out of step, go on from the newest checkpoint too: before each is written all ranks have
    compared what they hold and what they have called. Input that is refused, Ctrl-C and a
    loss that is not finite are not tried again: it would end the same way.
    """
    folder: Path | None = None

    def listen(event: Event) -> None:
        nonlocal folder
        folder = Path(event["folder"]) if "folder" in event else folder
        on_event(event)

    restarts = 0
    while True:
        try:
            saves = config.checkpoint.every is not None
            return launch.launch(
                TARGET, config.launch, config.to_dict(), command, saves=saves, on_event=listen
            )
        except Interrupted as stopped:
            _say_where(stopped, folder)
            raise
        except RankFailure as failure:
            if restarts >= config.launch.max_restarts or folder is None or _is_final(failure):
                _say_where(failure, folder)
                raise
            restarts += 1
            config = config.with_overrides(
                {
                    "checkpoint.resume": "auto",
                    "output.dir": str(folder),
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


def _say_where(error: Exception, folder: Path | None) -> None:
    """Whoever hears of the failure can say how to go on."""
    if folder is not None and files.steps_in(folder):
        error.folder = folder  # type: ignore[attr-defined]


def _is_final(failure: RankFailure) -> bool:
    is_not_finite = isinstance(failure, Halt) and failure.state == "not finite"
    return is_not_finite or failure.is_final


def next_world(config: Config) -> int:
    """As many ranks as before; with ``min_world``, fewer: as many as can share the batch."""
    world, least = config.launch.world, config.launch.min_world
    assert world is not None
    for fewer in range(world - 1, (least or world) - 1, -1):
        try:
            check_batch(config.training, fewer)
        except UsageError:
            continue
        return fewer
    return world
