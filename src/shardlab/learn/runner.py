"""One rank of a check: the process in which the learner's file runs.

Everything that happens here may be the learner's doing, so nothing reported here is believed by
itself: the guard reads plain JSON lines from a pipe of its own, each with a token that the
learner's file does not know, and anything else on that pipe is tampering.
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
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.learn.exercise import Case, Checks, Rejected, Stage
from shardlab.learn.reports import Job
from shardlab.learn.spy import Spy

MODULE = "submission"
Report = Callable[[str, Any], None]  # a kind of report, and its value


def speaker(fd: int, token: str) -> Report:
    """Writes lines to the guard. Threads of the learner's file may call collectives, too."""
    pid, lock = os.getpid(), threading.Lock()

    def report(kind: str, value: Any) -> None:
        if os.getpid() != pid:
            os._exit(1)  # a copy that the learner's file has forked, and that came back to us
        # A line of its own even if somebody has written garbage before it.
        data = f"\n{token} {json.dumps([kind, value], default=plain)}\n".encode()
        with lock:
            while data:
                data = data[os.write(fd, data) :]

    return report


def plain(value: Any) -> Any:
    """What JSON does not know: a tensor is its list, anything else its text."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return repr(value)[:200]


def run_rank(rank: int, job: Job, checks: Checks, report: Report, hear_fd: int) -> NoReturn:
    """Load the learner's file, run the cases that the guard names, report; never return."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's deprecations are not the learner's mistakes
        hear = os.fdopen(hear_fd)
        file = hear.readline().strip()
        spy = Spy(report, job.path)
        spy.install()
        submission = load(job.path, job.source)
        _report_tampered(spy, report)
        report("loaded", None)
        store: dist.Store | None = None
        while line := hear.readline():
            case = checks.CASES[int(line)]
            store = store or dist.FileStore(file)
            join(rank, case, job.deadline_s + 60, store)
            spy.clear()
            evidence = checks.run(Stage(case, rank, submission, spy))
            _report_tampered(spy, report)
            report("case", evidence)
        os._exit(1)  # the guard is gone
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # it may hold all the memory there is
        report("raised", describe(error, job.path))
    _stay()


def join(rank: int, case: Case, timeout_s: float, store: dist.Store) -> None:
    """A process group for each case: what one leaves under way cannot reach the next.

    The one before is left only now, when every rank is done with it: a rank that leaves early
    closes connections that a slower rank still needs.
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
        return {"kind": "rejected", **vars(error.args[0])}
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


def _report_tampered(spy: Spy, report: Report) -> None:
    if names := spy.tampered():
        report("tampered", names)
        _stay()


def _stay() -> NoReturn:
    """Until the guard ends us: to leave now would look like a failure to the other ranks."""
    while True:
        threading.Event().wait(60)
