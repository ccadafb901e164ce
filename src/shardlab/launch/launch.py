"""One run on every rank of a world: ranks that are started here, or a launcher's, of which this
process is one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from shardlab import runfolder
from shardlab.checkpoint import files
from shardlab.config import Config, LaunchConfig
from shardlab.errors import Interrupted, RankFailure, UsageError
from shardlab.guard import graceful_stop
from shardlab.launch import cluster, launcher_env, remote_ranks, same_setup
from shardlab.launch.ranks import Event, Ranks, unless_stopped

DEFAULT_WORLD = 2  # the fewest that communicate


def default_ranks() -> int:
    """How many ranks a measurement has by default: the launcher's, or two."""
    place = launcher_env.joined()
    return DEFAULT_WORLD if place is None else place.size


def default_world(config: Config) -> int:
    """How many ranks a run has by default: two, the fewest that communicate.

    One task of srun or mpirun is one rank. A Slurm job with more tasks, in which srun has not
    started this command, is refused: it would use one node of many.
    """
    if tasks := launcher_env.tasks_without_srun(os.environ):
        if tasks > 1:
            raise UsageError(
                f"Slurm gave this job {tasks} tasks, but srun did not start this command: put srun "
                "before it, or add --world N to start N ranks on this machine alone"
            )
    elif launcher_env.resolve(os.environ) is not None:
        return 1
    return 1 if config.strategy.name == "single" else DEFAULT_WORLD


def lead(config: LaunchConfig) -> None:
    """Prepare a command that runs many short jobs on ranks. Under a launcher, the first process
    leads the others, which run its jobs: in those this does not return."""
    place = launcher_env.joined()
    if place is None:
        return
    config = structs.replace(config, world=None)  # a measurement may use fewer ranks than there are
    store = cluster.meet(place, config, same_setup.setup(config, ()))
    if place.rank > 0:
        remote_ranks.serve(place, store)
    remote_ranks.LEADER = remote_ranks.Leader(place, store)


def launch(
    target: str,
    config: LaunchConfig,
    *args: Any,
    saves: bool = False,
    on_event: Callable[[Event], None] = lambda _event: None,
) -> Any:
    """Run ``target`` on every rank of a world and return rank 0's result.

    Under torchrun, srun and mpirun this process is one of the ranks, and the others' result is
    None. Else the ranks are started here. An event with a "folder" names the run folder: where the
    run fails, the folder will say so.

    Ctrl-C and SIGTERM end the ranks. A run that ``saves`` is asked to stop first: it finishes its
    step and writes a checkpoint. A second signal ends it at once.
    """
    folder: Path | None = None

    def listen(event: Event) -> None:
        nonlocal folder
        folder = Path(event["folder"]) if "folder" in event else folder
        if "halted" in event:
            mark(event["halted"], event.get("unless_told", False))
        else:
            on_event(event)

    def mark(how: RankFailure | str, unless_told: bool = False) -> None:
        if folder is not None:
            runfolder.mark_failed(folder, how, unless_told)

    place = launcher_env.joined()
    signals = _Signals(lambda: saves and folder is not None)
    try:
        if place is not None:
            return cluster.run(target, config, args, place, listen, mark)
        assert config.world is not None
        with signals, Ranks(config, config.world) as ranks:
            signals.ranks = ranks
            result = ranks.run(target, *args, on_event=listen)[0]
        return unless_stopped(result)
    except RankFailure as failure:
        failure.is_final = signals.number is not None  # it was to end: it is not started again
        failure.folder = folder
        mark(failure)
        raise
    except (KeyboardInterrupt, Interrupted) as ended:
        stopped = ended if isinstance(ended, Interrupted) else Interrupted()
        stopped.number = signals.number or stopped.number
        stopped.folder = folder
        mark(signal.Signals(stopped.number).name, unless_told=True)
        raise stopped from None
    except UsageError as error:  # in mid-run: a strategy cannot do what the model needs
        mark(str(error), unless_told=True)
        raise
    finally:
        if folder is not None and place is None:
            files.sweep(folder)  # every rank is gone: none will finish a checkpoint


class _Signals:
    """What Ctrl-C and SIGTERM do to the ranks that this process has started.

    The first asks a run that can save to stop; any other ends it, by a ``KeyboardInterrupt``.
    """

    def __init__(self, can_save: Callable[[], bool]) -> None:
        self.can_save = can_save
        self.ranks: Ranks | None = None
        self.number: int | None = None  # of the first
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in graceful_stop.heeded()}

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._when = number, now
            if self.ranks is not None and self.can_save():
                self.ranks.ask_to_stop(number)
                return
        elif number == signal.SIGTERM and now - self._when < graceful_stop.SAME_S:
            return
        for other in self._before:  # ending the ranks is not to be interrupted in its turn
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt
