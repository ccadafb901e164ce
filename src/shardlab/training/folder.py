"""A run's folder, made and filled by rank 0 and seen by every rank before the first step."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from shardlab import runlock
from shardlab.checkpoint import files
from shardlab.checkpoint import resume as resumes
from shardlab.checkpoint.resume import Start
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.files import write_json
from shardlab.launch import environment
from shardlab.runfolder import mark, readme
from shardlab.runlock import RunLock
from shardlab.strategies.base import T
from shardlab.training.builders import notes
from shardlab.workloads.base import Workload
from shardlab.world import World


def make_folder(
    config: Config,
    workload: Workload,
    world: World,
    command: str,
    start: Start,
    lock: RunLock,
) -> Path:
    """The run folder, which rank 0 makes and fills; of a resumed run, the one that it has."""
    pids = world.gather(os.getpid())  # for a debugger, or for a person who must end a rank by hand
    folder = Path(_agreed(world, lambda: str(_take_folder(config, workload, world, start, lock))))
    try:
        _agreed(world, lambda: _fill_folder(folder, config, workload, world, command, start, pids))
    except UsageError:
        if start.run is None:
            lock.discard()
        raise
    return folder


def _agreed(world: World, act: Callable[[], T]) -> T:
    """What rank 0 does with the folder, for all ranks: if it cannot, all are refused alike."""

    def writing() -> T:
        try:
            return act()
        except OSError as error:
            raise UsageError(f"cannot write the run folder: {error}") from None

    found: T = resumes.agree(world, writing)
    return found


def _take_folder(
    config: Config, workload: Workload, world: World, start: Start, lock: RunLock
) -> Path:
    """Runs on rank 0. From here on no other run may use the folder."""
    if start.run is not None:
        lock.take(start.run)
        return start.run
    strategy = config.strategy.name.rpartition(":")[2]
    name = f"{workload.name}-{strategy}-w{world.size}"
    wanted = config.output.dir or config.output.root
    try:
        wanted.encode()
    except UnicodeEncodeError:  # the file system would take it, but no text file could name it
        raise UsageError(f"the name of the run folder is not UTF-8: {wanted}") from None
    folder = config.new_folder(name)
    lock.take(folder)
    if any(path.name != runlock.NAME for path in folder.iterdir()):
        raise UsageError(f"the output folder {folder} has been used meanwhile; choose another")
    return folder


def _fill_folder(
    folder: Path,
    config: Config,
    workload: Workload,
    world: World,
    command: str,
    start: Start,
    pids: list[int],
) -> None:
    """Runs on rank 0: writes what is in the folder before the first step."""
    if start.run is not None:
        resumes.clear(start)
    else:
        described = environment.describe(world.device, command)
        about = {"data": workload.data, "notes": notes(config, workload)}
        write_json(folder / "env.json", {**described, **about})
        (folder / "README.md").write_text(readme(folder.name), encoding="utf-8")
    (folder / "config.yaml").write_text(config.started_anew().to_yaml(), encoding="utf-8")
    if start.is_resumed:
        world.tell({"resumed": resumes.note(folder, start, config, command)})
    mark(folder, "running", pids=pids, host=socket.gethostname())


def refuse_apart(config: Config, world: World) -> None:
    """Refuse a run of which some ranks do not see where rank 0 will make its folder. A collective.

    Only a launcher's ranks may be on several nodes. It is asked first of all: a model may take
    minutes to build.
    """
    if world.pulse is not None or world.size == 1:
        return
    world.gather(None)  # every rank has checked that its output folder is empty
    probe: Path = _agreed(world, lambda: _write_probe(config))
    try:
        missing = resumes.unseen(probe, world)
    finally:
        if world.rank == 0:
            probe.unlink(missing_ok=True)
    if missing:
        host, folder = world.share((socket.gethostname(), str(probe.parent.resolve())))
        raise UsageError(
            f"{folder}, where rank 0 on {host} keeps the run, is not visible to "
            f"{'; '.join(missing)}: name a folder that all nodes share, as in --out /shared/run"
        )


def _write_probe(config: Config) -> Path:
    """Runs on rank 0: a file, with a name and a content of its own, where the run will be."""
    resume = config.checkpoint.resume
    folder = Path(config.output.dir or config.output.root)
    if resume not in (None, resumes.AUTO) and not files.is_checkpoint(found := files.find(resume)):
        folder = found  # the run continues there
    folder = next(path for path in (folder, *folder.parents) if path.is_dir() or path == Path())
    token = secrets.token_hex(8)
    probe = folder / f".probe-{token}"
    probe.write_text(token, encoding="utf-8")
    return probe
