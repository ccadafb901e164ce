"""The guard: a process between the grader and the learner's ranks, which outlives none of them.

It forks the ranks, reads what they report, and sees that all ends in time. What a learner's file
may not do to us:

- run for ever or stand still: a deadline, and a standstill is noticed before it;
- leave, crash, exit, close or flood its pipes, print: each is a verdict, not an accident;
- take the machine's memory: a limit per process and one for all together;
- start processes without end, or leave one behind: the guard is the *subreaper*, so whatever loses
  its parent, even in a session of its own, becomes a child of the guard, is counted, and is killed.

It is a grader for learners, not a sandbox: code that runs as the same user can read files, use the
network, and kill the guard (which is noticed, and fails). Untrusted code belongs into a container.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardlab.learn import outcomes, processes
from shardlab.learn.exercise import Exercise
from shardlab.learn.outcomes import End
from shardlab.learn.reports import Job, Rank

MEMORY_IN_ALL = 4 * processes.GIB  # resident, of all processes
PROCESSES_PER_RANK = 16  # a data loader with workers is fine
TICK_S = 0.02
STANDSTILL_S = 3.0  # all wait for one another, and nothing has happened for so long
GRACE_S = 0.3  # after a first failure, how long to listen for the one that caused it
LOOK_S = 0.05  # between looks at the processes: a fork bomb makes some tens in that time


def guard(pipe: Connection, job: Job) -> None:
    """Run a check from first to last; send its outcome. Called in a process of its own."""
    os.setsid()
    processes.subreaper()
    outcome: dict[str, Any]
    try:
        watch = Watch(pipe, job)
        try:
            pipe.send("started")
            begin = time.monotonic()
            end = watch.watch()
            if end.kind in ("timed-out", "deadlock"):
                watch.ask_where()
        finally:
            processes.kill_all([rank.pid for rank in watch.ranks])
        outcome = {
            "findings": outcomes.findings(job, end, watch.evidence, watch.ranks),
            "cases": list(watch.evidence),
            "seconds": time.monotonic() - begin,
            # Some versions of torch announce each connection on stdout.
            "printed": [re.sub(r"(?m)^\[Gloo\].*\n", "", r.printed) for r in watch.ranks],
        }
    except BaseException as error:  # a mistake of ours: the grader must hear of it
        outcome = {"broken": f"{error!r}\n{traceback.format_exc()}"}
    with contextlib.suppress(OSError):
        pipe.send(outcome)
    os._exit(0)


class Watch:
    """The ranks of one check, from fork to end."""

    def __init__(self, pipe: Connection, job: Job) -> None:
        self.pipe, self.job = pipe, job
        self.limit = time.monotonic() + job.deadline_s
        self.checks = Exercise(job.exercise).checks()
        self.evidence: dict[str, list[dict[str, Any]]] = {}
        self.case = -1  # index; -1: the file is being imported
        self.ranks: list[Rank] = []
        self.first_failure: float | None = None
        self.next_look = 0.0

    @property
    def case_name(self) -> str:
        return self.checks.CASES[self.case].name if self.case >= 0 else ""

    def watch(self) -> End:
        from shardlab.run.launch import loopback_store, stay_on_loopback

        stay_on_loopback()
        world = max(case.world for case in self.checks.CASES)
        self.ranks = [self._fork(number) for number in range(world)]
        # After the forks: it has threads. Ours, so that no rank's leaving takes it away.
        store = loopback_store()
        for rank in self.ranks:
            self._tell(rank, store.port)
        while True:
            self._listen()
            if (end := self._end()) is not None:
                return end
            if self._all("idle", "done") and not self._next_case():
                return End("ok")

    def _next_case(self) -> bool:
        """Let every rank begin the next case; false if there is none."""
        if self.case >= 0:
            world = self.checks.CASES[self.case].world
            self.evidence[self.case_name] = [r.evidence or {} for r in self.ranks[:world]]
        self.case += 1
        if self.case == len(self.checks.CASES):
            return False
        for rank in self.ranks:
            rank.phase, rank.calls, rank.inside, rank.evidence = "idle", [], None, None
            if rank.number < self.checks.CASES[self.case].world:
                rank.phase, rank.changed = "running", time.monotonic()
                self._tell(rank, self.case)
        return True

    def _all(self, *phases: str) -> bool:
        return all(rank.phase in phases for rank in self.ranks)

    def _end(self) -> End | None:
        """Whether it is over, and why."""
        now = time.monotonic()
        if any(rank.phase == "tampered" for rank in self.ranks):
            names = [r.error["names"] for r in self.ranks if r.phase == "tampered"]
            return End("tampered", self.case_name, names[0])
        if any(rank.phase in ("raised", "dead") for rank in self.ranks):
            # A rank that lost its peer may speak before the one that caused it.
            self.first_failure = self.first_failure or now
            if now - self.first_failure > GRACE_S:
                return End("failed", self.case_name)
            return None
        if now >= self.next_look and (end := self._too_much()) is not None:
            return end
        if now > self.limit:
            return End("timed-out", self.case_name)
        return self._standstill(now)

    def _too_much(self) -> End | None:
        """More processes or memory than a check can need."""
        self.next_look = time.monotonic() + LOOK_S
        running = processes.descendants(os.getpid())
        if len(running) > PROCESSES_PER_RANK * len(self.ranks):
            return End("processes", self.case_name, len(running))
        # They are copies of this process and share its pages: only what they added counts.
        shared = processes.resident_bytes(os.getpid())
        resident = sum(max(0, processes.resident_bytes(pid) - shared) for pid in running)
        if resident > MEMORY_IN_ALL:
            return End("memory", self.case_name, resident)
        return None

    def _standstill(self, now: float) -> End | None:
        """Every rank has either finished the case or is inside a call, and none has moved."""
        waiting = [rank for rank in self.ranks if rank.phase == "running"]
        stuck = waiting and all(rank.inside is not None for rank in waiting)
        if stuck and now - max(rank.changed for rank in self.ranks) > STANDSTILL_S:
            return End("deadlock", self.case_name)
        return None

    # -------------------------------------------------------------- talking to the ranks

    def _fork(self, number: int) -> Rank:
        from shardlab.learn import runner

        token = secrets.token_hex(16)
        theirs_hear, control = os.pipe()
        report, theirs_say = os.pipe()
        output, theirs_print = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                say, hear = processes.confine(
                    number, theirs_say, theirs_hear, theirs_print, self.job.scratch
                )
                runner.run_rank(number, self.job, self.checks, runner.Speaker(say, token), hear)
            finally:
                os._exit(1)
        for fd in (theirs_hear, theirs_say, theirs_print):
            os.close(fd)
        for fd in (report, output, control):
            os.set_blocking(fd, False)
        return Rank(number, pid, report, output, control, token.encode())

    def _tell(self, rank: Rank, value: int) -> None:
        with contextlib.suppress(OSError):  # a dead rank: found out by its pipe
            os.write(rank.control, f"{value}\n".encode())

    def _listen(self) -> None:
        reports = {rank.report: rank for rank in self.ranks if rank.open}
        outputs = {rank.output: rank for rank in self.ranks if rank.output >= 0}
        ready, _, _ = select.select([*reports, *outputs, self.pipe.fileno()], [], [], TICK_S)
        for fd in ready:
            if fd in reports:
                reports[fd].read_report()
            elif fd in outputs:
                outputs[fd].read_output()
            else:  # the grader never writes: it is gone
                processes.kill_all([rank.pid for rank in self.ranks])
                shutil.rmtree(self.job.scratch, ignore_errors=True)
                os._exit(1)
        self._reap()

    def ask_where(self) -> None:
        """Each rank's Python stack, written by a signal handler in C: a busy rank answers, too."""
        running = [rank for rank in self.ranks if rank.phase in ("loading", "running")]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, processes.WHERE_SIGNAL)
        time.sleep(GRACE_S)
        for rank in running:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                rank.stack = (Path(self.job.scratch) / f"where.{rank.number}").read_text()

    def _reap(self) -> None:
        """Collect the dead, also those that were left to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for rank in self.ranks:
                    if rank.pid == pid:
                        rank.read_report()  # its last words
                        if rank.phase not in ("raised", "tampered"):
                            rank.phase = "dead"
                            rank.error = {"kind": "died", "code": os.waitstatus_to_exitcode(status)}
