"""The run folder: what a run leaves behind, and the boundary between running and looking.

Everything that analyses or draws reads these files and nothing else. No torch is needed to
read or mark a folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shardlab import runlock
from shardlab.errors import Halt, RankFailure, UsageError
from shardlab.files import json_text, read_jsonl, write_json, write_text

# What a training run writes: file, when, what it is. README.md of the folder says the same.
FILES = (
    ("README.md", "", "this table"),
    ("config.yaml", "", "the resolved configuration; again: `shardlab train --config config.yaml`"),
    ("env.json", "", "versions, CPU, GPU, git commit, command"),
    ("status.json", "", "running, finished, crashed (which rank, where), hung, interrupted"),
    ("run.lock", "", "held while the run is active, so that no second run writes into this folder"),
    ("rank<r>.jsonl", "",
     "a line per optimizer step of rank r: loss, times, samples, bytes, memory"),
    ("ledger.rank<r>.jsonl", "",
     "a line per collective that our code called: what, where, when"),
    ("chosen.json", "if the strategy chose options by itself", "the options, as `bucket_mb`"),
    ("traces/rank<r>/", "with `--profile`",
     "PyTorch profiler traces; `shardlab trace analyze .`"),
    ("clocks.json", "with traces of several nodes", "how far their clocks were apart"),
    ("tensorboard/", "with `output.tensorboard`", "for `tensorboard --logdir .`"),
    ("wandb/", "with `output.wandb`", "what Weights & Biases keeps of the run"),
    ("evaluation.jsonl", "if the run evaluated", "a line per evaluation on the held-out samples"),
    ("checkpoints/step-<n>/", "with `--checkpoint-every`", "what `--resume .` continues from"),
    ("checkpoints.jsonl", "with `--checkpoint-every`",
     "a line per checkpoint: how long it took, how large, what went wrong"),
    ("resumes.jsonl", "if the run was resumed", "a line each time, from where and as what"),
    ("faults.rank<r>.jsonl", "with `--inject`", "the faults that struck rank r"),
    ("crash.txt", "after a crash", "the first failing rank and its traceback"),
    ("hang.txt", "after a hang", "who was missing, and each rank's Python stack"),
    ("hang.json", "after a hang", "the same, for programs"),
    ("lost.*", "if ranks of another node were lost", "which"),
    ("out-of-step.*", "if a guard ended the run", "what it found"),
    ("drifted.*", "if a guard ended the run", "what it found"),
    ("not-finite.*", "if a guard ended the run", "what it found"),
    ("interrupted.*", "if a run that was asked to stop could not", "which rank did not answer"),
)  # fmt: skip

# By which file a folder of another command is known; that of `train` is known by status.json.
KINDS = {
    "compare": "compare.json", "to-loss": "to_loss.json", "prove": "prove.json",
    "throughput": "throughput.json", "memory": "memory.json", "network": "network.json",
    "plan": "plan.json", "plan check": "plan-check.json",
}  # fmt: skip

END_OF_README = """
Times ending in `_ns` are of the host's monotonic clock. `step_ms` covers forward, backward,
communication and update; `data_ms` is the wait for the batch before it.
"""


def readme(title: str) -> str:
    """The table of a training run's files, for whoever opens its folder."""
    rows = [
        f"| `{name}` | {f'only {when}: ' if when else ''}{about} |" for name, when, about in FILES
    ]
    return "\n".join([f"# {title}\n", "| file | what it is |", "|---|---|", *rows, END_OF_README])


OF_LOGGERS = ("tensorboard", "wandb")  # they write links


def new_folder(root: Path, name: str, chosen: Path | None = None) -> Path:
    """An empty folder: the chosen one, or ``root/<time>-<name>``."""
    try:
        return _made(root, name, chosen)
    except OSError as error:
        raise UsageError(f"cannot write the run folder: {error}") from None


def refuse_links(folder: Path) -> None:
    """Refuse a run's folder that leads elsewhere: a run that continues writes into its files."""
    for inside, folders, names in os.walk(folder):  # it does not follow links
        for path in (Path(inside, name) for name in (*folders, *names)):
            kind = path.lstat().st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                what = "a link" if stat.S_ISLNK(kind) else "neither a file nor a folder"
                raise UsageError(f"cannot continue in {folder}: {path} is {what}")
        if inside == str(folder):
            folders[:] = [name for name in folders if name not in OF_LOGGERS]


def refuse_led_away(folder: Path, named: Sequence[Path]) -> None:
    """Refuse to write where a link inside of a folder leads that the user named."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and any(path in place.parents for path in named):
            raise UsageError(
                f"cannot write to {folder}: {place} is a link; name a folder with --out"
            )


def refuse_unwritable(folder: Path) -> None:
    """Say so before the work is done, if it cannot be there."""
    folder = folder.absolute()
    place = next(place for place in (folder, *folder.parents) if place.exists())
    is_writable = place.is_dir() and os.access(place, os.W_OK)
    if is_writable and place != folder:  # in /proc, permissions do not say what can be made
        try:
            Path(tempfile.mkdtemp(dir=place)).rmdir()
        except OSError:
            is_writable = False
    if not is_writable:
        raise UsageError(f"cannot write the folder: {place} is not a folder to write to")


def _made(root: Path, name: str, chosen: Path | None) -> Path:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = root / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # two runs in one second
            continue
    raise FileExistsError(root / f"{stamp}-{name}")


def state_of(folder: Path) -> dict[str, Any]:
    """What ``status.json`` says; empty if it cannot be read."""
    return runlock.table_in(folder / "status.json")


def mark(folder: Path, state: str, **details: Any) -> None:
    write_json(folder / "status.json", {"state": state, **details})


def mark_failed(folder: Path, how: RankFailure | str, unless_told: bool = False) -> None:
    """Say in a run's folder why it did not finish: a failure, or the signal that ended it.

    ``unless_told``: an earlier explanation is better, and stays.
    """
    if unless_told and state_of(folder).get("state") != "running":
        return
    with contextlib.suppress(OSError):  # the disk is full; the failure is printed anyway
        if isinstance(how, str):
            mark(folder, "interrupted", reason=how)
        elif isinstance(how, Halt):
            _mark_halted(folder, how)
        else:
            _mark_crashed(folder, how)


def _mark_crashed(folder: Path, failure: RankFailure) -> None:
    path = folder / f"rank{failure.rank}.jsonl"
    steps = read_jsonl(path) if path.exists() else []
    last = steps[-1]["step"] if steps else None
    at = {"where": failure.where} if failure.where else {}
    step = {"last_finished_step": last}
    mark(folder, "crashed", rank=failure.rank, **at, **step, reason=failure.message)
    where = "before its first step was finished" if last is None else f"after step {last}"
    text = failure.traceback or "(no traceback: the process was ended from outside)\n"
    (folder / "crash.txt").write_text(
        f"{failure.name} failed {where}: {failure.message}\n\n{text}", encoding="utf-8"
    )


def _mark_halted(folder: Path, halt: Halt) -> None:
    """The verdict of a guard: its state in the status, and all it knows in two files."""
    at = {"where": halt.where} if halt.where else {}
    mark(folder, halt.state, rank=halt.rank, **at, reason=halt.message)
    name = {"hung": "hang"}.get(halt.state, halt.state.replace(" ", "-"))
    write_json(folder / f"{name}.json", {"schema": 1, "state": halt.state, **halt.details})
    write_text(folder / f"{name}.txt", f"{halt.message}\n\n{halt.traceback or ''}")


def cut_back(folder: Path, step: int) -> None:
    """Remove what was recorded of ``step`` and later, by all ranks: it will be done again."""
    for path in _files(folder, "rank*.jsonl"):
        _keep(path, [row for row in read_jsonl(path) if _number(row, "step") < step])
    for name, key in (("evaluation.jsonl", "steps"), ("checkpoints.jsonl", "step")):
        if (folder / name).is_file():
            rows = [row for row in read_jsonl(folder / name) if _number(row, key) <= step]
            _keep(folder / name, rows)
    for path in _files(folder, "ledger.rank*.jsonl"):
        rows = read_jsonl(path)
        later = (i for i, r in enumerate(rows) if r.get("step", 0) is not None
                 and _number(r, "step") >= step)  # fmt: skip
        _keep(path, rows[: next(later, len(rows))])


def _files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.is_file()]


def _number(row: Mapping[str, Any], key: str) -> float:
    """A number of a row. In a damaged row it is infinite, so the row is not kept."""
    value = row.get(key)
    return value if isinstance(value, int) else math.inf


def _keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json_text(row) + "\n" for row in rows))
