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
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.learn.exercise import Case, Checks, Rejected
from shardlab.learn.reports import Job
from shardlab.learn.spy import Spy

MODULE = "submission"


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


def run_rank(rank: int, job: Job, checks: Checks, report: Speaker, hear_fd: int) -> NoReturn:
    """Load the learner's file, run the cases that the guard names, report; never return."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's deprecations are not the learner's mistakes
        port = int(_hear(hear_fd))
        spy = Spy(report, job.path)
        spy.install()
        submission = load(job.path, job.source)
        _report_tampered(spy, report)
        report("loaded", None)
        store: dist.Store | None = None
        while True:
            case = checks.CASES[int(_hear(hear_fd))]
            store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
            join(rank, case, job.deadline_s + 60, store)
            spy.clear()
            evidence = checks.run(case, rank, submission, spy)
            _report_tampered(spy, report)
            report("case", evidence)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # it may hold all the memory there is
        report("raised", describe(error, job.path))
    _stay()


def join(rank: int, case: Case, timeout_s: float, store: dist.Store) -> None:
    """A process group for each case: what one leaves under way cannot reach the next.

    The one before is left only now, when every rank is done with it: who leaves early closes
    connections that a slower rank still needs.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(case.name, store),
        rank=rank,
        world_size=case.world,
        timeout=timedelta(seconds=timeout_s),
    )
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.world), LOCAL_RANK=str(rank))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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


def _report_tampered(spy: Spy, report: Speaker) -> None:
    if names := spy.tampered():
        report("tampered", names)
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
