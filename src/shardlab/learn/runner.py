"""One rank of a check: the process in which the learner's file runs.

Everything that happens here may be the learner's doing, so nothing said here is believed by
itself: the guard reads plain JSON lines from a pipe of its own, each with a token that the
learner's file is not told, and anything else on that pipe is tampering.
"""

from __future__ import annotations

import json
import linecache
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.learn.exercise import Case, Checks, Rejected
from shardlab.learn.spy import Spy

MODULE = "submission"


@dataclass(frozen=True)
class Job:
    """What a rank is told."""

    rank: int
    path: str  # of the learner's file, for tracebacks
    source: str
    token: str
    timeout_s: float  # of a collective


class Speaker:
    """Writes lines to the guard. Threads of the learner's file may call collectives, too."""

    def __init__(self, fd: int, token: str) -> None:
        self._fd, self._token, self._pid = fd, token, os.getpid()
        self._lock = threading.Lock()

    def __call__(self, kind: str, value: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a copy that the learner's file has forked, and that came back to us
        # A line of its own even if somebody has written garbage before it.
        data = f"\n{self._token} {json.dumps([kind, plain(value)])}\n".encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def plain(value: Any) -> Any:
    """As JSON has it. A tensor is its list; what has no plain form, its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return repr(value)[:200]


def run_rank(job: Job, checks: Checks, say_fd: int, hear_fd: int) -> NoReturn:
    """Load the learner's file, run the cases that the guard names, report; never return."""
    say = Speaker(say_fd, job.token)
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's deprecations are not the learner's mistakes
        port = int(_hear(hear_fd))
        spy = Spy(say, job.path)
        spy.install()
        submission = load(job.path, job.source)
        _say_tampered(spy, say)
        say("loaded", None)
        store: dist.Store | None = None
        while True:
            index = int(_hear(hear_fd))
            case = checks.CASES[index]
            if job.rank < case.world:
                store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
                evidence = run_case(job, case, checks, submission, spy, store)
                _say_tampered(spy, say)
                say("case", evidence)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # it may hold all the memory there is
        say("raised", describe(error, job.path))
    _stay()


def run_case(
    job: Job, case: Case, checks: Checks, submission: ModuleType, spy: Spy, store: dist.Store
) -> dict[str, Any]:
    """One case in a process group of its own: what it leaves under way cannot reach the next.

    The one before is left only now, when every rank is done with it: who leaves early closes
    connections that a slower rank still needs.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(case.name, store),
        rank=job.rank,
        world_size=case.world,
        timeout=timedelta(seconds=job.timeout_s),
    )
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(case.world), LOCAL_RANK=str(job.rank))
    seed(0)
    spy.clear()
    evidence = checks.run(case, job.rank, submission, spy)
    if not isinstance(evidence, dict):
        raise TypeError(f"checks.run returned {type(evidence).__name__}")
    return evidence


def load(path: str, source: str) -> ModuleType:
    """The learner's file as a module, from the text that the grader has read."""
    module = ModuleType(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module
    sys.path.insert(0, str(Path(path).parent))  # what lies beside it can be imported
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def describe(error: BaseException, path: str) -> dict[str, Any]:
    """An exception in plain words: its type, its text, and the learner's line if it came there."""
    if isinstance(error, Rejected):
        return {"kind": "rejected", "cause": error.finding.cause, "message": str(error)}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    line, function = (frames[-1].lineno, frames[-1].name) if frames else (None, "")
    if isinstance(error, SyntaxError) and error.filename == path:
        line, function = error.lineno, ""
    missing = isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == MODULE
    return {
        "kind": "exited" if isinstance(error, SystemExit) else "raised",
        "type": type(error).__name__,
        "text": str(error).strip()[:2000],
        "line": line,
        "function": function,
        "code": linecache.getline(path, line).strip() if line else "",
        "missing": error.name if missing and not frames else None,  # type: ignore[attr-defined]
    }


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _say_tampered(spy: Spy, say: Speaker) -> None:
    if names := spy.tampered():
        say("tampered", names)
        _stay()


def _hear(fd: int) -> str:
    """One line of the guard's; it ends us when there is nothing more to do."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            os._exit(1)
        line += byte
    return line.decode()


def _stay() -> NoReturn:
    """Until the guard ends us: to leave now would look like a failure to the other ranks."""
    while True:
        threading.Event().wait(60)
