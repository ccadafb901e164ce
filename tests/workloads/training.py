"""Training in memory, on a rank: what several tests of workloads look at afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardlab import config as configs
from shardlab.config import Config
from shardlab.ledger import LEDGER
from shardlab.strategies.base import Strategy
from shardlab.training import builders, loop
from shardlab.training.recorder import Recorder
from shardlab.workloads.base import Workload
from shardlab.world import World


class Trained(NamedTuple):
    config: Config
    workload: Workload
    strategy: Strategy
    losses: list[float]  # the mean over the global batch, of each step


def train(world: World, settings: dict[str, Any]) -> Trained:
    here = {"launch.device": "cpu", "launch.world": world.size}
    config = configs.load(None, {**here, **settings})
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    steps = range(config.training.steps)
    with Recorder(None, world, LEDGER, len(steps)) as recorder:
        loop.train(strategy, loop.Batches(workload, config, world), recorder, steps)
    return Trained(config, workload, strategy, [row["loss"] for row in recorder.rows])
