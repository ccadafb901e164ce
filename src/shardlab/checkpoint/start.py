"""Where a run begins: anew, or from which checkpoint of which run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import runfolder
from shardlab.checkpoint import files
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.fit import MUST_MATCH, changes, differences, setting
from shardlab.checkpoint.manifest import Manifest
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.files import json_text
from shardlab.runlock import RunLock

if TYPE_CHECKING:
    from shardlab.world import World

AUTO = "auto"


@dataclass(frozen=True)
class Start:
    """Where a run goes on: its folder (none: a new one), and from which checkpoint, if any."""

    run: Path | None
    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()  # to be told

    @property
    def step(self) -> int:
        return 0 if self.manifest is None else self.manifest.step

    @property
    def is_resumed(self) -> bool:
        return self.run is not None or self.manifest is not None

    def keeps_rows(self, world: int) -> bool:
        """Whether this run's rows go on from those in the folder: same ranks, same folder."""
        return self.run is not None and self.manifest is not None and self.manifest.world == world


# ------------------------------------------------------------------ before any rank


def settings_of(
    resume: str | None,
    named: Mapping[str, str | None] | None = None,
    keep_world: bool = True,
) -> dict[str, Any]:
    """The settings of the run that a user named, which the flags then change. No torch.

    ``named`` are the workload and the strategy as the user named them, if so. Where to write is not
    for a checkpoint to say, nor which code to run: code of one's own must be named again.
    """
    if resume in (None, AUTO):
        return {}
    path = files.find(resume)
    if files.is_checkpoint(path):
        manifest = manifests.read(path)
        values, world = manifest.config, manifest.world
    else:
        values = files.config_of(path) or {}
        world = values.get("launch", {}).get("world")
    base = {key: dict(value) for key, value in values.items() if isinstance(value, Mapping)}
    base.setdefault("launch", {})["world"] = world if keep_world else None
    for key in ("root", "dir"):
        base.get("output", {}).pop(key, None)
    for section, key in (("model", "workload"), ("strategy", "name")):
        given, saved = (named or {}).get(section), base.get(section, {}).get(key)
        if given is None and ":" in str(saved):
            flag = {"model": "--workload", "strategy": "--strategy"}[section]
            raise UsageError(
                f"{path} was made with code of its own, {saved}, which is run only if you name it: "
                f"{flag} {saved}"
            )
        if given is not None and given != saved:
            base[section] = {}  # another's options would be refused
    return base


def named_by(
    config: Path | None, workload: str | None, strategy: str | None
) -> dict[str, str | None]:
    """Workload and strategy as the user named them: by a flag, or in a config file."""
    inside = {} if config is None else files.settings_in(config) or {}
    keys = {"model": ("workload", workload), "strategy": ("name", strategy)}
    return {
        section: given if given is not None else setting(inside, section, key, None)
        for section, (key, given) in keys.items()
    }


def is_restarted(environment: Mapping[str, int] | None) -> bool:
    """Whether torchrun's agent has started these ranks again: then they go on, asked or not."""
    return environment is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


# ------------------------------------------------------------------ which one


def choose(config: Config, world: World, lock: RunLock) -> Start:
    """What ``checkpoint.resume`` asks for; the same answer on every rank. A collective.

    A run that goes on in its folder has the folder from here on: rank 0 takes its lock before it
    looks which checkpoint is the newest.

    "auto": the newest run of this config under ``output.root`` that did not finish, or the run in
    ``output.dir``; nothing to go on with: a new run. A run folder: on in it. A checkpoint: from it
    in a new folder. Damaged checkpoints of a run are passed over, and that is said.
    """
    wanted = config.checkpoint.resume
    if wanted is None:
        return Start(None)
    if wanted == AUTO:
        run = agree(world, lambda: taken(find_run(config), lock))
        return Start(None) if run is None else newest_good(run, world)
    path = agree(world, lambda: taken(files.find(wanted), lock))
    if files.is_checkpoint(path):
        manifest = agree(world, lambda: manifests.read(path))
        _verify(path, manifest, world)
        return Start(None, path, manifest)
    start = newest_good(path, world)
    if start.manifest is None:
        raise UsageError(f"no checkpoint of {path} is whole: {'; '.join(start.notes)}")
    return start


def taken(run: Path | None, lock: RunLock) -> Path | None:
    """Two runs in one folder would write over each other: the first has it for itself."""
    if run is None or files.is_checkpoint(run):
        return run
    is_running = files.is_running(run)  # asked before the lock is ours
    try:
        lock.take(run)
    except OSError as error:
        raise UsageError(f"cannot go on in {run}: {error.strerror}") from None
    if is_running:  # by its processes, where the file system has no locks
        raise UsageError(f"{run} is running; wait for it, or choose another folder with --out")
    return run


def find_run(config: Config) -> Path | None:
    """The run that "auto" means."""
    if config.output.dir is not None:
        run = Path(config.output.dir)
        return run if (run / "config.yaml").is_file() else None
    for run, values in files.unfinished(Path(config.output.root)):
        if not differences(values, config.to_dict(), MUST_MATCH):
            return run
    return None


def newest_good(run: Path, world: World) -> Start:
    """The newest checkpoint of a run that is whole, and what was wrong with newer ones."""
    notes: list[str] = []
    for path in agree(world, lambda: list(files.steps_in(run).values())):
        try:
            manifest = agree(world, lambda path=path: manifests.read(path))
            _verify(path, manifest, world)
        except UsageError as error:
            notes.append(str(error))
            continue
        return Start(run, path, manifest, tuple(notes))
    return Start(run, notes=tuple(notes))


def agree(world: World, look: Any) -> Any:
    """Rank 0 looks, and all get what it found, or its refusal."""
    found: Any = None
    if world.rank == 0:
        try:
            found = look()
        except UsageError as error:
            found = error
    found = world.share(found)
    if isinstance(found, UsageError):
        raise found
    return found


def _verify(folder: Path, manifest: Manifest, world: World) -> None:
    """Every file is read once, by one of the ranks."""
    mine = dict(list(manifest.files.items())[world.rank :: world.size])
    error = None
    try:
        manifests.verify(folder, mine)
    except UsageError as damaged:
        error = str(damaged)
    for message in world.gather(error):
        if message is not None:
            raise manifests.Damaged(message)


# ------------------------------------------------------------------ the folder of a resumed run


def clear(start: Start) -> None:
    """Take out of a run's folder what will be done again, and what was left half-written."""
    assert start.run is not None
    files.sweep(start.run)
    runfolder.cut_back(start.run, start.step)


def note(folder: Path, start: Start, config: Config, command: str) -> dict[str, Any]:
    """A line in ``resumes.jsonl``; returned to be told."""
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "strategy": config.strategy.label,
        "world": config.launch.world,
        "changed": [] if start.manifest is None else changes(start, config),
        "passed_over": list(start.notes),
        "command": command,
    }
    with (folder / "resumes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json_text(row) + "\n")
    return row
