"""The guard: a process between the grader and the learner's ranks, which ends when they have.

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
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardlab.learn import outcomes, processes
from shardlab.learn.exercise import Finding, checks_of, say
from shardlab.learn.reports import FAILED, Job, Rank

MEMORY_IN_ALL = 4 * processes.GIB  # resident, of all processes
PROCESSES_PER_RANK = 16  # a data loader with workers is fine
TICK_S = 0.02
STANDSTILL_S = 3.0  # a deadlock, if every rank waits and nothing has happened for this long
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
            stopped = watch.watch()
        finally:
            watch.kill_all()
        found = outcomes.judged(watch.checks, watch.evidence)
        if stopped is not None:
            found.append(replace(stopped, case=watch.case_name))
        outcome = {
            "findings": tuple(found),
            "cases": tuple(watch.evidence),
            "seconds": time.monotonic() - begin,
            # Some versions of torch announce each connection on stdout.
            "printed": tuple(re.sub(r"(?m)^\[Gloo\].*\n", "", r.printed) for r in watch.ranks),
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
        self.checks = checks_of(job.exercise)
        self.evidence: dict[str, list[dict[str, Any]]] = {}
        self.case = -1  # index; -1: the file is being imported
        self.ranks: list[Rank] = []
        self.first_failure: float | None = None
        self.next_look = 0.0

    @property
    def case_name(self) -> str:
        return self.checks.CASES[self.case].name if self.case >= 0 else ""

    def kill_all(self) -> None:
        processes.kill_all([rank.pid for rank in self.ranks])

    def watch(self) -> Finding | None:
        """Run every case; what stopped that, if something did."""
        from shardlab.launch.rank_process import private_file, stay_on_loopback

        stay_on_loopback()
        world = max(case.world for case in self.checks.CASES)
        self.ranks = [self._fork(number) for number in range(world)]
        with private_file() as file:  # ours, so that no rank's leaving takes it away
            for rank in self.ranks:
                self._tell(rank, file)
            while True:
                self._listen()
                if stopped := self._stopped():
                    return stopped
                is_over = all(rank.phase in ("idle", "done") for rank in self.ranks)
                if is_over and not self._next_case():
                    return None

    def _next_case(self) -> bool:
        """Let every rank begin the next case; false if there is none."""
        cases = self.checks.CASES
        if self.case >= 0:
            done = cases[self.case]
            ranks = self.ranks[: done.world]
            self.evidence[done.name] = [{**done.options, **rank.evidence} for rank in ranks]
        self.case += 1
        if self.case == len(cases):
            return False
        for rank in self.ranks:
            rank.phase = "idle"
            if rank.number < cases[self.case].world:
                rank.begin()
                self._tell(rank, self.case)
        return True

    # -------------------------------------------------------------- reasons to stop

    def _stopped(self) -> Finding | None:
        now = time.monotonic()
        for rank in self.ranks:
            if rank.phase == "tampered":
                return outcomes.tampered(rank)
        if any(rank.phase in FAILED for rank in self.ranks):
            # A rank that lost its peer may speak before the one that caused it.
            self.first_failure = self.first_failure or now
            if now - self.first_failure > GRACE_S:
                return outcomes.failed(self.job, self.case >= 0, self.ranks)
            return None
        if now >= self.next_look:
            self.next_look = now + LOOK_S
            if too_much := self._too_much():
                return too_much
        if now > self.limit:
            self._ask_where()
            positions = outcomes.positions(self.ranks, self.job)
            return say("timed-out", seconds=self.job.deadline_s, positions=positions)
        # Every rank has either finished the case or is inside a call, and none has moved.
        waiting = [rank for rank in self.ranks if rank.phase == "running"]
        stuck = waiting and all(rank.inside is not None for rank in waiting)
        if stuck and now - max(rank.changed for rank in self.ranks) > STANDSTILL_S:
            return outcomes.deadlock(self.ranks, self.job)
        return None

    def _too_much(self) -> Finding | None:
        """More processes or memory than a check can need."""
        running = processes.descendants(os.getpid())
        if len(running) > PROCESSES_PER_RANK * len(self.ranks):
            return say("processes", count=len(running))
        # They are copies of this process and share its pages: only what they added counts.
        shared = processes.resident_bytes(os.getpid())
        resident = sum(max(0, processes.resident_bytes(pid) - shared) for pid in running)
        if resident > MEMORY_IN_ALL:
            return say("memory", gib=resident / processes.GIB)
        return None

    def _ask_where(self) -> None:
        """Each rank's Python stack, written by a signal handler in C: a busy rank answers, too."""
        running = [rank for rank in self.ranks if rank.phase in ("loading", "running")]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, processes.WHERE_SIGNAL)
        time.sleep(GRACE_S)
        for rank in running:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                rank.stack = (Path(self.job.scratch) / f"where.{rank.number}").read_text()

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
                runner.run_rank(number, self.job, self.checks, runner.speaker(say, token), hear)
            finally:
                os._exit(1)
        for fd in (theirs_hear, theirs_say, theirs_print):
            os.close(fd)
        for fd in (report, control):
            os.set_blocking(fd, False)
        return Rank(number, pid, report, output, control, token.encode())

    def _tell(self, rank: Rank, value: int | str) -> None:
        with contextlib.suppress(OSError):  # a dead rank: found out by its pipe
            os.write(rank.control, f"{value}\n".encode())

    def _listen(self) -> None:
        read = {rank.report: rank.read_report for rank in self.ranks}
        read |= {rank.output: rank.read_output for rank in self.ranks}
        read.pop(-1, None)
        ready, _, _ = select.select([*read, self.pipe.fileno()], [], [], TICK_S)
        for fd in ready:
            if fd == self.pipe.fileno():  # the grader never writes: it is gone
                self.kill_all()
                shutil.rmtree(self.job.scratch, ignore_errors=True)
                os._exit(1)
            read[fd]()
        self._reap()

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
