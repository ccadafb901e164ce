"""The folders that commands have left behind, and the size of the cache. No torch.

A folder is known by the file that its command writes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shardlab import runfolder, runlock
from shardlab.checkpoint import files as checkpoints
from shardlab.data import sources
from shardlab.data.catalog import ENTRIES
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.runlock import table_in

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
    for command, name in runfolder.KINDS.items():
        if found := table_in(folder / name):
            return _measurement(folder, command, found)
    return None


def _training(folder: Path) -> Run:
    status, env = runfolder.state_of(folder), table_in(folder / "env.json")
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


def _measurement(folder: Path, command: str, found: Mapping[str, Any]) -> Run:
    rows = found.get("cells") or found.get("verdicts") or found.get("rows") or []
    labels = [str(r.get("label") or r.get("strategy")) for r in rows if isinstance(r, dict)]
    labels = [label for label in dict.fromkeys(labels) if label != "None"]
    model = _part(_part(found, "config"), "model")
    state = "interrupted" if found.get("interrupted") else "finished"
    if command == "prove":
        state = "passed" if all(row.get("pass") for row in rows) else "failed"
    return Run(
        folder, command, state, _when(folder / runfolder.KINDS[command]), size_of(folder),
        strategy=(", ".join(labels) if len(labels) < 3 else f"{len(labels)} strategies") or NOTHING,
        workload=str(found.get("workload") or model.get("workload") or NOTHING),
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


def cache_bytes() -> int:
    """The bytes that this package has put into the cache; other things there are not counted."""
    found = [*sources.cache_folder().glob("stdlib-*-bytes.bin"), sources.kept_proofs()]
    found += [sources.cached(name) for name in ENTRIES]
    return sum(size_of(path) for path in found if path.exists() and not path.is_symlink())
