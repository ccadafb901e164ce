"""The folders that commands have left behind, and the cache: listed, and removed. No torch.

Nothing is removed but what this package has written: a folder is known by the file that its command
writes, must hold nothing else, and must not be in use.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shardlab import runlock
from shardlab.checkpoint import files as checkpoints
from shardlab.data import sources
from shardlab.data.catalog import ENTRIES
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.runlock import RunLock, table_in

# What each command writes into its folder; the first file shows whose folder it is.
OF_A_RANK = ("rank*.jsonl", "ledger.rank*.jsonl", "traces")
WRITTEN = {
    "train": (
        "status.json", "config.yaml", "env.json", "README.md", "run.lock", "run.part", *OF_A_RANK,
        "tensorboard", "wandb", "audit.json", "evaluation.jsonl", "checkpoints",
        "checkpoints.jsonl", "resumes.jsonl", "faults.rank*.jsonl", "collected.json",
        "clocks.json", "crash.txt", "hang.*", "lost.*", "out-of-step.*", "drifted.*",
        "not-finite.*", "disk-full.*", "*.part",
    ),
    "compare": ("cells", "compare.json", "compare.csv", "compare.md", "report.html", "run.lock"),
    "prove": ("prove.json",),
    "throughput": ("throughput.json", "throughput.csv"),
    "memory": ("memory.json", "*.pickle"),
    "network": ("network.json", "network.html"),
}  # fmt: skip
NOTHING = "–"


@dataclass(frozen=True)
class Run:
    """A folder of a command."""

    folder: Path
    command: str  # train, compare …
    state: str
    time: str  # when it was last written to
    bytes: int
    strategy: str = NOTHING
    workload: str = NOTHING
    steps: int | None = None
    steps_asked: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder), "details": dict(self.details)}

    @property
    def is_active(self) -> bool:
        return self.state == "running"


def runs_in(root: Path) -> list[Run]:
    """The runs of a folder, newest first."""
    if not root.is_dir():
        return []
    try:
        found = [read(path) for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise UsageError(f"cannot read {root}: {error.strerror}") from None
    return sorted((run for run in found if run is not None), key=lambda r: r.time, reverse=True)


def find(folder: Path) -> Run:
    """The run that a user named."""
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}")
    found = read(folder)
    if found is None:
        inside = runs_in(folder)
        hint = f"; it holds {len(inside)} of them: --dir {folder}" if inside else ""
        raise UsageError(f"{folder} is not a run folder{hint}")
    return found


def read(folder: Path) -> Run | None:
    """What a folder says of its run; None if it is no run folder."""
    if (folder / "status.json").is_file() and (folder / "config.yaml").is_file():
        return _training(folder)
    if (folder / "cells" / "plan.json").is_file() or (folder / "compare.json").is_file():
        return _comparison(folder)
    for command in ("prove", "throughput", "memory", "network"):
        if found := table_in(folder / f"{command}.json"):
            return _measurement(folder, command, found)
    return None


def _training(folder: Path) -> Run:
    status, env = checkpoints.state_of(folder), table_in(folder / "env.json")
    settings = checkpoints.settings_in(folder / "config.yaml") or {}
    state = str(status.get("state", "unknown"))
    # On another host, and without a lock that is seen from here, it may still be running.
    is_unknown = runlock.is_held(folder) is None and status.get("host") != socket.gethostname()
    if state == "running" and not is_unknown and not checkpoints.is_running(folder):
        state = "gone"  # it ended without a word: the machine was switched off, or it was killed
    rows = read_jsonl(folder / "rank0.jsonl") if (folder / "rank0.jsonl").is_file() else []
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), int | float)]
    times = sorted(row["step_ms"] for row in rows if isinstance(row.get("step_ms"), int | float))
    model, training = _part(settings, "model"), _part(settings, "training")
    size = model.get("size")
    return Run(
        folder, "train", state, _when(folder / "status.json"), size_of(folder),
        strategy=str(_part(settings, "strategy").get("name", NOTHING)),
        workload=f"{model.get('workload', NOTHING)}{f' {size}' if size else ''}",
        steps=len(rows),
        steps_asked=training["steps"] if isinstance(training.get("steps"), int) else None,
        details={
            "command": env.get("command"),
            "world": _part(settings, "launch").get("world"),
            "reason": status.get("reason"),
            "first_loss": losses[0] if losses else None,
            "loss": losses[-1] if losses else None,
            "step_ms": times[len(times) // 2] if times else None,
            "checkpoints": list(checkpoints.steps_in(folder)),
        },
    )  # fmt: skip


def _comparison(folder: Path) -> Run:
    result, plan = table_in(folder / "compare.json"), table_in(folder / "cells" / "plan.json")
    cells = [cell for cell in (result or plan).get("cells", []) if isinstance(cell, dict)]
    labels = [str(cell.get("label")) for cell in cells]
    state = "finished" if result else "interrupted"
    if runlock.is_held(folder):
        state = "running"
    marker = folder / "compare.json" if result else folder / "cells"
    return Run(
        folder, "compare", state, _when(marker), size_of(folder),
        strategy=", ".join(labels) if len(labels) < 3 else f"{len(labels)} strategies",
        workload=str(result.get("workload", NOTHING)),
        details={"command": (result or plan).get("command"), "strategies": labels},
    )  # fmt: skip


def _measurement(folder: Path, command: str, found: Mapping[str, Any]) -> Run:
    rows = found.get("verdicts") or found.get("rows") or []
    labels = [str(r.get("label") or r.get("strategy")) for r in rows if isinstance(r, dict)]
    labels = [label for label in dict.fromkeys(labels) if label != "None"]
    state = "finished"
    if command == "prove":
        state = "passed" if all(row.get("pass") for row in rows) else "failed"
    return Run(
        folder, command, state, _when(folder / f"{command}.json"), size_of(folder),
        strategy=(", ".join(labels) if len(labels) < 3 else f"{len(labels)} strategies") or NOTHING,
        workload=str(found.get("workload") or NOTHING),
        details={"command": found.get("command"), "strategies": labels},
    )  # fmt: skip


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = settings.get(name)
    return part if isinstance(part, dict) else {}


def _when(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder. Links count as themselves."""
    total = path.lstat().st_size if not path.is_dir() or path.is_symlink() else 0
    for folder, _, names in os.walk(path) if not total else ():
        for name in names:
            try:
                total += Path(folder, name).lstat().st_size
            except OSError:  # it has just been removed
                continue
    return total


# ------------------------------------------------------------------ removing


def why_not(run: Run) -> str:
    """Why a run's folder must not be removed; empty if it may be."""
    if run.folder.is_symlink():
        return "it is a link; name the folder that it leads to"
    if run.is_active:
        return "it is in use"
    if foreign := sorted(_foreign(run)):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        return f"it holds what shardlab did not write: {', '.join(foreign[:3])}{more}"
    return ""


def _foreign(run: Run) -> Iterator[str]:
    for entry in run.folder.iterdir():
        is_folder = entry.is_dir() and not entry.is_symlink()
        if _matches(entry.name, WRITTEN[run.command]):
            continue
        if run.command == "compare" and is_folder:  # that of a strategy, with its traces
            inside = {path.name for path in entry.iterdir()}
            if inside and all(_matches(name, (*OF_A_RANK, "*.part")) for name in inside):
                continue
        yield f"{entry.name}{'/' if is_folder else ''}"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def remove(run: Run) -> int:
    """Remove a run's folder, and say how many bytes that freed. Refused if it is in use by now."""
    with RunLock() as lock:
        if (run.folder / runlock.NAME).exists():
            lock.take(run.folder)
        if reason := why_not(run):
            raise UsageError(f"{run.folder} stays: {reason}")
        return _remove(run.folder, run.bytes)


def _remove(path: Path, size: int) -> int:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be removed: {error.strerror}") from None
    return size


@dataclass(frozen=True)
class Cached:
    """A data set, a file made once, or all kept proofs, in the cache."""

    path: Path
    bytes: int
    reason: str = ""  # why it must stay


def cached() -> list[Cached]:
    """What this package has put into the cache; other things there are not seen."""
    root = sources.cache_folder()
    found = [path for path in root.glob("stdlib-*-bytes.bin") if path.is_file()]
    found += [path for name in sorted(ENTRIES) if (path := root / "data" / name).is_dir()]
    found += [path for path in [sources.kept_proofs()] if path.is_dir()]
    return [
        Cached(path, size_of(path), "it is being filled" if _is_filled_now(path) else "")
        for path in found
        if not path.is_symlink()
    ]


def _is_filled_now(folder: Path) -> bool:
    """Whether a process holds the lock with which a data set is put in place."""
    try:
        with (folder.parent / f".{folder.name}.lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def remove_cached(item: Cached) -> int:
    return 0 if _is_filled_now(item.path) else _remove(item.path, item.bytes)
