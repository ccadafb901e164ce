"""Where a run begins: anew, or from which checkpoint, and whether that fits the run. No torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardlab import config as configs
from shardlab import runfolder, runlock
from shardlab.checkpoint import files
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.manifest import Manifest
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.files import append_jsonl, read_jsonl
from shardlab.runlock import RunLock

if TYPE_CHECKING:
    from shardlab.world import World

AUTO = "auto"
# What makes a run another run: with these changed its numbers would mean nothing together.
MUST_MATCH = (
    "model.workload", "model.size", "model.options",
    "data.source", "data.seq_len", "data.shuffle", "data.epoch",
    "training.global_batch", "training.optimizer", "training.seed",
)  # fmt: skip
# What may change, and is reported, because the losses will differ from the uninterrupted run's.
TOLD = (
    "strategy.name", "strategy.options", "launch.world", "training.steps",
    "training.learning_rate", "training.weight_decay", "training.schedule",
    "training.warmup_steps", "training.min_rate", "training.clip_norm", "training.compile",
    "training.activation_checkpointing", "precision.compute",
    "training.optimizer_options", "training.no_decay", "training.ema_decay",
    "training.epochs", "training.micro_batch", "training.patience",
)  # fmt: skip
# The settings that can name code to import, and how a command names it.
CODE = {
    "model.workload": "--workload ",
    "strategy.name": "--strategy ",
    "training.optimizer": "--optimizer ",
    "training.schedule": "--set training.schedule=",
}
OFF: tuple[Any, ...] = (None, False, 0, [], {})
VISIBLE_S = 4.0  # how long a rank looks for a folder that rank 0 has made
T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The run folder to continue in (None: a new one), and the checkpoint to begin from, if any."""

    run: Path | None
    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()  # why newer checkpoints were passed over

    @property
    def step(self) -> int:
        return 0 if self.manifest is None else self.manifest.step

    @property
    def is_resumed(self) -> bool:
        return self.run is not None or self.manifest is not None

    def evaluations(self) -> list[dict[str, Any]]:
        """Those before the checkpoint: in the folder of its run, if it is still in one."""
        if self.checkpoint is None:
            return []
        path = self.checkpoint.absolute().parent.parent / "evaluation.jsonl"
        rows = read_jsonl(path) if path.is_file() else []
        last = self.step
        return [row for row in rows if isinstance(n := row.get("steps"), int) and n <= last]

    def keeps_rows(self, world: int) -> bool:
        """Whether this run's rows follow those in the folder: same ranks, same folder."""
        return self.run is not None and self.manifest is not None and self.manifest.world == world


# ------------------------------------------------------------------ before any rank


def settings_of(
    resume: str | None, named: Mapping[str, str | None] | None = None, keep_world: bool = True
) -> dict[str, Any]:
    """The settings of the run that a user named, which the flags then change.

    ``named`` has the values of ``CODE`` that the user gave, by key. A checkpoint does not decide
    where to write, nor which code to run: the user must name their own code again.
    """
    if resume in (None, AUTO):
        return {}
    path = files.find(resume)
    if files.is_checkpoint(path):
        manifest = manifests.read(path)
        values, world = manifest.config, manifest.world
    else:
        values = files.settings_in(path / "config.yaml") or {}
        world = setting(values, "launch", "world", None)
    base = {key: dict(value) for key, value in values.items() if isinstance(value, Mapping)}
    _translate(base.setdefault("training", {}), base.get("strategy", {}), world)
    standard = Config().to_dict()
    for section, inside in base.items():  # keys that an older version had, and that were off
        gone = [key for key in inside if key not in standard.get(section, inside)]
        base[section] = {k: v for k, v in inside.items() if k not in gone or v not in OFF}
    base.setdefault("launch", {})["world"] = world if keep_world else None
    for key in ("address", "interface"):  # of the machines that it ran on
        base["launch"].pop(key, None)
    for key in ("root", "dir"):
        base.get("output", {}).pop(key, None)
    for dotted, flag in CODE.items():
        section, _, key = dotted.partition(".")
        given, saved = (named or {}).get(dotted), base.get(section, {}).get(key)
        if given is None and ":" in str(saved):
            raise UsageError(
                f"{path} was made with code of its own, {saved}, which is run only if you name it: "
                f"{flag}{saved}"
            )
        if section in ("model", "strategy") and given is not None and given != saved:
            base[section] = {}  # the saved options belong to another workload or strategy
    return base


def _translate(training: dict[str, Any], strategy: Mapping[str, Any], world: Any) -> None:
    """The batch and the optimizer of a config that an older version wrote, in today's keys."""
    times, batch = training.pop("accumulate", 1), training.get("global_batch")
    if type(times) is type(batch) is int and times > 1 and training.get("micro_batch") is None:
        named = configs.StrategyConfig(
            **{k: strategy[k] for k in strategy.keys() & {"name", "options"}}
        )
        shares = configs.data_ranks(named, world or 1)
        training["micro_batch"] = max(1, -(-batch // (shares * times)))
    training.pop("batch_split", None)  # ranks whose shares differ are no other run
    for key in ("momentum", "betas", "eps"):
        if (value := training.pop(key, None)) not in OFF:
            training["optimizer_options"] = {**training.get("optimizer_options", {}), key: value}


def named_by(of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str | None]:
    """The values of ``CODE`` that the user gave: by a flag or setting, or in a config file."""
    named = dict(given)
    for dotted in CODE:
        section, _, key = dotted.partition(".")
        if named.get(dotted) is None:
            named[dotted] = setting(of_file, section, key, None)
    return {dotted: named[dotted] for dotted in CODE}


def is_restarted() -> bool:
    """Whether torchrun's agent has started these ranks again: then they resume, asked or not."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


# ------------------------------------------------------------------ which one


def choose(
    config: Config, world: World, lock: RunLock, chosen: Mapping[str, Any] | None = None
) -> Start:
    """What ``checkpoint.resume`` asks for; the same answer on every rank. A collective.

    A run that continues in its folder owns it from here on: rank 0 takes the lock before it looks
    which checkpoint is the newest.

    "auto" continues the newest run of this config under ``output.root`` that did not finish, or the
    run in ``output.dir``; if there is none, it begins a new run. A run folder is continued in
    place; from a checkpoint a new folder begins. Damaged checkpoints are passed over with a note.
    ``chosen`` are settings that the user left open, with what the workload took for them. If it
    took something else when that run began, ``refuse_unfit`` says so.
    """
    wanted = config.checkpoint.resume
    if wanted is None:
        return Start(None)
    if wanted == AUTO:
        run = agree(world, lambda: taken(find_run(config, chosen), lock))
        return Start(None) if run is None else newest_good(run, world)
    path = agree(world, lambda: taken(files.find(wanted), lock))
    is_checkpoint = agree(world, lambda: files.is_checkpoint(path))
    refuse_unseen(path / (manifests.NAME if is_checkpoint else runlock.NAME), world)
    if is_checkpoint:
        return Start(None, path, _read_whole(path, world))
    start = newest_good(path, world)
    if start.manifest is None:
        raise UsageError(f"no checkpoint of {path} is whole: {'; '.join(start.notes)}")
    return start


def taken(run: Path | None, lock: RunLock) -> Path | None:
    """Take the folder's lock: two runs in one folder would overwrite each other's files."""
    if run is None or files.is_checkpoint(run):
        return run
    is_running = files.is_running(run)  # asked before the lock is ours
    try:
        runfolder.refuse_links(run)
        lock.take(run)
    except OSError as error:
        raise UsageError(f"cannot continue in {run}: {error.strerror}") from None
    if is_running:  # by its processes, where the file system has no locks
        raise UsageError(f"{run} is running; wait for it, or choose another folder with --out")
    return run


def find_run(config: Config, chosen: Mapping[str, Any] | None = None) -> Path | None:
    """The run that "auto" means."""
    if config.output.dir is not None:
        run = Path(config.output.dir)
        return run if (run / "config.yaml").is_file() else None
    for run, values in files.unfinished(Path(config.output.root)):
        saved = configs.with_settings(values, chosen or {})
        if not differences(saved, config.to_dict(), MUST_MATCH):
            return run
    return None


def newest_good(run: Path, world: World) -> Start:
    """The newest checkpoint of a run that is whole, and what was wrong with newer ones."""
    notes: list[str] = []
    for path in agree(world, lambda: list(files.steps_in(run).values())):
        try:
            return Start(run, path, _read_whole(path, world), tuple(notes))
        except UsageError as error:
            notes.append(str(error))
    return Start(run, notes=tuple(notes))


def unseen(file: Path, world: World) -> list[str]:
    """The ranks that do not see the file as rank 0 does, with host and folder. A collective."""
    said = world.share(_content(file))
    limit = time.monotonic() + VISIBLE_S
    while not (is_seen := _content(file) == said) and time.monotonic() < limit:
        time.sleep(0.1)  # over NFS it may take a moment
        with suppress(OSError):  # there, listing the parent refreshes what this host knows of it
            list(file.parent.parent.iterdir())
    where = f"rank {world.rank} on {socket.gethostname()}, in {_current_folder()}"
    found = world.gather(None if is_seen else where)
    return [where for where in found if where is not None]


def refuse_unseen(file: Path, world: World) -> None:
    if missing := unseen(file, world):
        raise UsageError(
            f"{file.parent} on rank 0's node is not visible to {'; '.join(missing)}: to "
            "resume a run, all nodes must share its folder"
        )


def _content(file: Path) -> bytes | None:
    with suppress(OSError):
        return file.read_bytes()
    return None


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a folder that is gone"


def agree(world: World, look: Any) -> Any:
    """What rank 0 finds, on all ranks; its refusal is raised on all of them."""
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


def together(gather: Callable[[Any], list[Any]], act: Callable[[], T]) -> list[T]:
    """What ``act`` returns on each rank. If it is refused or cannot write on one, all ranks raise
    the error of the first."""
    try:
        mine: tuple[Any, UsageError | OSError | None] = act(), None
    except (UsageError, OSError) as error:
        mine = None, error
    found = gather(mine)
    for _, failure in found:
        if failure is not None:
            raise failure
    return [value for value, _ in found]


def _read_whole(folder: Path, world: World) -> Manifest:
    """A checkpoint's manifest, if all its files are whole. Each is read by one of the ranks."""
    manifest: Manifest = agree(world, lambda: manifests.read(folder))
    mine = dict(list(manifest.files.items())[world.rank :: world.size])
    together(world.gather, lambda: manifests.verify(folder, mine))
    return manifest


# ------------------------------------------------------------------ does it fit?


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """The settings in which two configs differ, in words; a missing one has its default."""
    standard = Config().to_dict()
    found = []
    for key in keys:
        section, _, name = key.partition(".")
        default = standard[section][name]
        was, is_now = (setting(values, section, name, default) for values in (saved, now))
        if was != is_now:
            found.append(f"{key} was {was!r}, is {is_now!r}")
    return found


def setting(values: Mapping[str, Any], section: str, name: str, default: Any) -> Any:
    inside = values.get(section)
    return inside.get(name, default) if isinstance(inside, Mapping) else default


def refuse_unfit(
    start: Start, config: Config, samples: int, chosen: Mapping[str, Any] | None = None
) -> None:
    """Refuse a checkpoint of another run, with what is different, and one that is too late.

    Older checkpoints do not record what the lab chose: they are taken to have ``chosen``.
    """
    manifest = start.manifest
    if manifest is None:
        return
    claimed = [key for key in MUST_MATCH if key.partition(".")[0] in manifest.config]
    untold = {k: v for k, v in (chosen or {}).items() if not _tells(manifest.config, k)}
    found = differences(configs.with_settings(manifest.config, untold), config.to_dict(), claimed)
    if manifest.samples not in (None, samples):
        found.append(f"the data had {manifest.samples:,} samples, and has {samples:,}")
    if found:
        raise UsageError(f"{start.checkpoint} is of another run: {', '.join(found)}")
    steps, world = config.training.steps, config.launch.world or 0
    if start.step > steps or (start.step == steps and not start.keeps_rows(world)):
        raise UsageError(
            f"{start.checkpoint} is of step {start.step} and training.steps is {steps}: nothing is "
            "left to do; ask for more with --steps"
        )


def _tells(saved: Any, key: str) -> bool:
    """Whether a saved config has a value of its own under a dotted key."""
    for part in key.split("."):
        saved = saved.get(part) if isinstance(saved, Mapping) else None
    return saved not in (None, configs.AUTO)


def changes(start: Start, config: Config) -> list[str]:
    """What is not as it was, in words."""
    if start.manifest is None or not start.manifest.config:
        return []
    saved = dict(start.manifest.config)
    launch = saved.get("launch")
    kept = launch if isinstance(launch, Mapping) else {}
    saved["launch"] = {**kept, "world": start.manifest.world}
    return differences(saved, config.to_dict(), TOLD)


# ------------------------------------------------------------------ the folder of a resumed run


def clear(start: Start) -> None:
    """Remove from a run's folder what will be done again, and what was left half-written."""
    assert start.run is not None
    files.sweep(start.run)
    runfolder.cut_back(start.run, start.step)


def note(folder: Path, start: Start, config: Config, command: str) -> dict[str, Any]:
    """Write a line into ``resumes.jsonl``, and return it for the terminal."""
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "strategy": config.strategy.label,
        "world": config.launch.world,
        "changed": changes(start, config),
        "passed_over": list(start.notes),
        "command": command,
    }
    append_jsonl(folder / "resumes.jsonl", row)
    return row
