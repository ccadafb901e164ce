"""Ranks for many short jobs, some of which may fail."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from shardlab.config import LaunchConfig
from shardlab.launch import Ranks, Target


class RankSet:
    """One set of ranks for all jobs; replaced when a failing job has taken it down."""

    def __init__(self, launch: LaunchConfig, size: int, deadline_s: float | None = None) -> None:
        self.launch = launch
        self.size = size
        self.deadline_s = deadline_s  # of each job, if there is one
        self.stack = ExitStack()
        self.ranks: Ranks | None = None

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def run(self, target: Target, *args: Any) -> list[Any]:
        """Every rank's result of ``target(world, *args)``, in rank order."""
        if self.ranks is None or not self.ranks.alive:
            self.ranks = self.stack.enter_context(Ranks(self.launch, self.size))
        return self.ranks.run(target, *args, deadline_s=self.deadline_s)

    def renew(self) -> None:
        """The next job has new processes."""
        self.stack.close()
        self.ranks = None
