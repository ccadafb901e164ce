"""Grading a file: start the guard, wait, hand over the verdict. No torch in this process."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError
from shardlab.launch.forking import fork_server
from shardlab.learn import guard
from shardlab.learn.exercise import Exercise, Finding, say
from shardlab.learn.reports import Job

DEADLINE_S = 30.0  # of a check, from the moment its ranks start; most take less than one
START_S = 120.0  # for the fork server to import torch, on a slow and busy machine
MARGIN_S = 30.0  # beyond the deadline, for the guard to end everything and to judge
LONGEST_FILE = 1_000_000


@dataclass(frozen=True)
class Verdict:
    exercise: str
    file: str
    findings: tuple[Finding, ...]
    cases: tuple[str, ...] = ()  # that ran to their end
    seconds: float = 0.0  # from the ranks' start; importing torch before that is not counted
    printed: tuple[str, ...] = ()  # by each rank; shown, never believed

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "pass": self.passed, "seconds": round(self.seconds, 3)}


def grade(exercise: Exercise, path: Path, deadline_s: float = DEADLINE_S) -> Verdict:
    """Run the file's code on real ranks and judge what it did."""
    source = read(path)
    begin = time.monotonic()
    # Made here, so that it goes even if the guard does not live to remove it.
    with tempfile.TemporaryDirectory(
        prefix="shardlab-learn-", ignore_cleanup_errors=True
    ) as scratch:
        job = Job(exercise.name, str(path.resolve()), source, deadline_s, scratch)
        outcome = _guarded(job)
    if outcome is None:
        outcome = {"findings": (say("tampered/guard"),), "seconds": time.monotonic() - begin}
    if "broken" in outcome:
        raise RuntimeError(f"the grader itself failed: {outcome['broken']}")
    return Verdict(exercise.name, str(path), **outcome)


def _guarded(job: Job) -> Any:
    """The outcome of a check in a guard's process; None if the guard did not live to send it."""
    context = fork_server("shardlab.learn.runner")
    ours, theirs = context.Pipe()
    process = context.Process(target=guard.guard, args=(theirs, job), name="guard")
    process.start()
    theirs.close()
    try:
        outcome = _receive(ours, START_S)
        return _receive(ours, job.deadline_s + MARGIN_S) if outcome == "started" else outcome
    finally:
        ours.close()  # a guard that still runs sees it, and ends everything
        process.join(MARGIN_S)
        process.kill()
        process.join()
        process.close()


def _receive(pipe: Any, seconds: float) -> Any:
    """What the guard sends; None if it is gone, or silent for too long."""
    try:
        return pipe.recv() if pipe.poll(seconds) else None
    except (EOFError, ConnectionResetError):
        return None


def read(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"no file {path}; `shardlab learn start NAME` writes a template")
    if path.stat().st_size > LONGEST_FILE:
        raise UsageError(f"{path} is larger than {LONGEST_FILE} bytes: not a solution")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
