"""Ranks for many short jobs, some of which may fail: started here, or a launcher's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from shardlab.config import Config, LaunchConfig
from shardlab.launch import remote_ranks
from shardlab.launch.rank_process import Target
from shardlab.launch.ranks import Ranks

if TYPE_CHECKING:
    from shardlab.world import World

P = ParamSpec("P")
T = TypeVar("T")


class RankSet(ExitStack):
    """One set of ranks for all jobs; replaced when a failing job has taken it down."""

    def __init__(self, launch: LaunchConfig, size: int, deadline_s: float | None = None) -> None:
        super().__init__()
        self.launch = launch
        self.size = size
        self.deadline_s = deadline_s  # for each job; None: no limit
        self.ranks: Ranks | None = None

    def run(self, target: Target, *args: Any) -> list[Any]:
        """Every rank's result of ``target(world, *args)``, in rank order."""
        if (leader := remote_ranks.LEADER) is not None:
            return leader.run(self.launch, self.size, target, args, self.deadline_s)
        if self.ranks is None or not self.ranks.alive:
            self.ranks = self.enter_context(Ranks(self.launch, self.size))
        return self.ranks.run(target, *args, deadline_s=self.deadline_s)

    def renew(self) -> None:
        """The next job gets new processes. A launcher's stay, and join a new world."""
        if remote_ranks.LEADER is not None:
            remote_ranks.LEADER.renew()
        self.close()
        self.ranks = None


def on_its_ranks(
    job: Callable[Concatenate[World, Config, P], T],
) -> Callable[Concatenate[World, Config, P], T | None]:
    """Run a job on as many ranks as its config asks for; the ranks beyond them return None."""

    @functools.wraps(job)
    def run(world: World, config: Config, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        member = world.first(config.launch.world or 1)
        return None if member is None else job(member, config, *args, **kwargs)

    return run
