"""How a check ended, in the teacher's words: pure, from what the guard knows to findings."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.errors import LOST_PEER
from shardlab.learn import mistakes
from shardlab.learn.exercise import Evidence, Exercise, Finding, say
from shardlab.learn.reports import Job, Rank

NO_MEMORY = ("can't allocate memory", "not enough memory", "memoryerror", "cannot allocate memory")
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
GLOO = ("gloo", "enforce fail", "preamble", "mismatch")


@dataclass(frozen=True)
class End:
    """How a check ended: ``kind`` is "ok", or what stopped it in which case."""

    kind: str
    case: str = ""
    detail: Any = None


def findings(job: Job, end: End, evidence: Evidence, ranks: Sequence[Rank]) -> list[Finding]:
    """Those of the cases that ran to their end, then what stopped the one that did not."""
    found: list[Finding] = []
    if evidence:
        try:
            found = Exercise(job.exercise).checks().judge(evidence)
        except Exception as error:
            # What the learner's code left was of a kind that the check did not foresee.
            where = traceback.extract_tb(error.__traceback__)[-1].name
            found = [say("unusable", error=f"{type(error).__name__}: {error}", where=where)]
    if end.kind == "ok":
        return found
    return [*found, replace(_ended(job, end, ranks), case=end.case)]


def _ended(job: Job, end: End, ranks: Sequence[Rank]) -> Finding:
    if end.kind == "tampered" and end.detail:
        names = mistakes.listed(f"torch.distributed.{name}" for name in end.detail)
        return say("tampered", names=names)
    if end.kind == "tampered":
        return say("tampered/pipe")
    if end.kind == "processes":
        return say("processes", count=end.detail)
    if end.kind == "memory":
        return say("memory", gib=end.detail / 2**30)
    if end.kind == "timed-out":
        return say("timed-out", seconds=job.deadline_s, positions=_positions(ranks, job))
    if end.kind == "deadlock":
        why = _one_way(ranks) or _parting(ranks)
        return say("deadlock", why=why and f"{why}. ", positions=_positions(ranks, job))
    return _failed(job, bool(end.case), ranks)


# ------------------------------------------------------------------ a rank that failed


def _failed(job: Job, in_a_case: bool, ranks: Sequence[Rank]) -> Finding:
    failed = [rank for rank in ranks if rank.phase in ("raised", "dead")]
    rank = min(failed, key=_suspicion)
    error = rank.error
    if error["kind"] == "rejected":
        return Finding(error["cause"], error["message"])
    if error["kind"] == "died":
        return _died(rank, error["code"], ranks)
    same = [r.number for r in failed if r.error.get("text") == error["text"]]
    line, text, name = error["line"], error["text"], error["type"]
    facts = {
        "on": mistakes.ranks_text(same, len(ranks)),
        "name": name,
        "text": text,
        "first": text.partition("\n")[0][:300],
        "at": f" in line {line}: `{error['code']}`" if line else "",
        "path": job.path,
    }
    if error["kind"] == "exited":
        return say("exited", **facts)
    if error["missing"]:
        return say("missing", missing=error["missing"])
    if name == "NotImplementedError" and line:
        what = error["function"]
        what = f"`{what}`" if what not in ("", "<module>") else "something"
        return say("not-done", what=what, line=line, text=text or name)
    if name in ("SyntaxError", "IndentationError"):
        return say("raised/syntax", **facts)
    if name == "MemoryError" or any(words in text.lower() for words in NO_MEMORY):
        return say("memory/asked", **facts)
    if any(words in text.lower() for words in GLOO) and (why := _parting(ranks)):
        return say("calls-differ/failed", why=why, rank=rank.number, how=f"failed{facts['at']}")
    if not line:
        return say("unusable/left" if in_a_case else "raised/loading", **facts)
    return say("raised", **facts)


def _suspicion(rank: Rank) -> tuple[int, int]:
    """The least is the cause; a rank that only lost its peer comes last."""
    if any(words in rank.error.get("text", "").lower() for words in LOST_PEER):
        return 2, rank.number
    return int(rank.error["kind"] == "died"), rank.number


def _died(rank: Rank, code: int, ranks: Sequence[Rank]) -> Finding:
    if code >= 0:
        return say("exited/code", rank=rank.number, code=code)
    how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGABRT and (why := _parting(ranks)):
        return say("calls-differ/failed", why=why, rank=rank.number, how=how)
    last = f"; its last call was {mistakes.described(rank.calls[-1])}" if rank.calls else ""
    return say("crashed", rank=rank.number, how=how, last=last)


# ------------------------------------------------------------------ ranks that stand still


def _one_way(ranks: Sequence[Rank]) -> str:
    """All ranks send, or all receive."""
    ops = {rank.inside["op"] if rank.inside else "" for rank in ranks if rank.phase != "idle"}
    if ops == {"send"}:
        return (
            "every rank sends and nobody receives. Start the message (isend), receive, then wait "
            "for it; or let one rank receive first"
        )
    started = any(c["op"] == "isend" for rank in ranks for c in rank.calls)
    if ops <= {"recv", "irecv"} and started:
        return (
            "every rank waits to receive. A message that was started with isend leaves for certain "
            "only while its handle is kept and waited for"
        )
    return ""


def _parting(ranks: Sequence[Rank]) -> str:
    """Where the ranks' calls part, if they do. Messages between two ranks may differ."""
    first, *others = [rank for rank in ranks if rank.phase != "idle"]
    if any(c["op"] in POINT_TO_POINT for c in first.calls):
        return ""
    texts = (mistakes.difference(first.calls, o.calls, first.number, o.number) for o in others)
    return next(filter(None, texts), "")


def _positions(ranks: Sequence[Rank], job: Job) -> str:
    """Where each rank is, one after another."""
    running = [rank for rank in ranks if rank.phase != "idle"]
    return "; ".join(f"rank {rank.number} {_position(rank, job)}" for rank in running)


def _position(rank: Rank, job: Job) -> str:
    if rank.phase == "done":
        return "has finished"
    if rank.phase in ("raised", "dead"):
        return "has failed"
    if rank.inside:
        verb = "waits for" if rank.inside.get("waits") else "waits in"
        return f"{verb} {mistakes.described(rank.inside)}"
    # The stack is most recent call first.
    found = re.search(rf'File "{re.escape(job.path)}", line (\d+)', rank.stack)
    if not found:
        return "was busy, not in your file"
    line = int(found.group(1))
    lines = job.source.splitlines()
    code = lines[line - 1].strip() if line <= len(lines) else ""
    return f"was busy in line {line}: `{code}`"
