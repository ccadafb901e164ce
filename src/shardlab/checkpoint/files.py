"""Where checkpoints lie, which are kept, which run can be continued, what is inside. No torch.

``<run folder>/checkpoints/step-000042/``. While it is written its name is ``.step-000042.part``; it
is renamed when every file is on the disk. So a folder with the final name is whole.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab import runfolder, runlock
from shardlab.checkpoint import manifest as manifests
from shardlab.errors import UsageError

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def path_of(run: Path, step: int) -> Path:
    return run / FOLDER / name_of(step)


def steps_in(run: Path) -> dict[int, Path]:
    """The checkpoints of a run folder, by step, the newest first."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in (run / FOLDER).iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def part_of(run: Path, step: int) -> Path:
    """Where a checkpoint is while it is written."""
    return run / FOLDER / f".{name_of(step)}.part"


def sweep(run: Path) -> None:
    """Remove what a killed run left half-written."""
    with suppress(FileNotFoundError):
        for path in (run / FOLDER).iterdir():
            if path.name.startswith(".step-"):
                shutil.rmtree(path, ignore_errors=True)


def put_in_place(part: Path, final: Path) -> None:
    """Give a checkpoint its name. It replaces one of the same step from before a resume."""
    sync_folder(part)
    old = set_aside(final) if final.exists() else None
    part.rename(final)
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename what is to be removed: half removed, it must not be taken for a checkpoint."""
    return checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old"))


def sync_folder(folder: Path) -> None:
    """Bring a folder to the disk: a new name is there only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_remove(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """The checkpoints that may be removed: they are older than the newest ``keep_last``, and
    ``keep_every`` does not divide their step."""
    older = sorted(steps)[:-keep_last]
    return [step for step in older if not keep_every or step % keep_every]


# ------------------------------------------------------------------ which run can be continued


def is_running(run: Path) -> bool:
    """Whether the run is still alive, as far as can be seen from this host."""
    status = runfolder.state_of(run)
    if status.get("state") != "running":
        return False
    if (is_held := runlock.is_held(run)) is not None:
        return is_held
    pids = status.get("pids")
    if status.get("host") != socket.gethostname() or not isinstance(pids, list):
        return False
    return any(isinstance(pid, int) and pid != os.getpid() and _is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):  # it may have ended, with a parent that has not noticed
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def unfinished(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The run folders under ``root`` that did not finish, with their configs, the newest first."""
    marked = [(path.stat().st_mtime_ns, path.parent) for path in root.glob("*/status.json")]
    for _, run in sorted(marked, reverse=True):
        if runfolder.state_of(run).get("state") in (None, "finished") or is_running(run):
            continue
        if (values := settings_in(run / "config.yaml")) is not None:
            yield run, values


def settings_in(path: Path) -> dict[str, Any] | None:
    """What a config file says; None if it cannot be read."""
    try:
        return configs.settings_in(path) or None
    except UsageError:
        return None


def is_checkpoint(path: Path) -> bool:
    return (path / manifests.NAME).is_file()


def find(text: str) -> Path:
    """The run folder or checkpoint that a user named."""
    path = Path(text).expanduser()
    if is_checkpoint(path) or steps_in(path):
        return path
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}: name a run's, or a checkpoint's")
    if (path / "config.yaml").is_file():
        raise UsageError(f"{path} is a run without a checkpoint")
    raise UsageError(f"{path} is neither a checkpoint nor the folder of a run that has some")


# ------------------------------------------------------------------ what is inside them


def overview(path: Path) -> list[dict[str, Any]]:
    """A row for each checkpoint of a run folder, or for the one that ``path`` is."""
    folders = [path] if is_checkpoint(path) else list(steps_in(path).values())
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, Any]:
    """A damaged checkpoint is a row that says so: the others are still worth seeing."""
    manifest, damage = None, None
    try:
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest.files)
    except UsageError as error:
        damage = str(error)
    row: dict[str, Any] = {"path": str(folder), "damage": damage}
    if manifest is None:
        return row
    of_model = manifest.model().values()
    return row | {
        "step": manifest.step,
        "created": manifest.created,
        "strategy": manifest.strategy,
        "world": manifest.world,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "model_tensors": len(of_model),
        "parameters": sum(t.size for t in of_model),
        "optimizer_tensors": len(manifests.inside(manifest.tensors, manifests.OPTIMIZER)),
    }


def tensors(folder: Path) -> list[dict[str, Any]]:
    """A row for each tensor of a checkpoint's model, with what the optimizer keeps for it."""
    manifest = manifests.read(folder)
    keys = manifest.optimizer_keys()
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "chunks": len(tensor.chunks),
            "files": sorted({chunk.file for chunk in tensor.chunks}),
            "optimizer": sorted(keys.get(name, {})),
        }
        for name, tensor in manifest.model().items()
    ]
