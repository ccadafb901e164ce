"""How a check ended, in the teacher's words: pure, from what the guard knows to findings."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence

from shardlab.errors import LOST_PEER
from shardlab.learn import mistakes
from shardlab.learn.exercise import Checks, Evidence, Finding, say
from shardlab.learn.reports import FAILED, Job, Rank

NO_MEMORY = ("can't allocate memory", "not enough memory", "memoryerror", "cannot allocate memory")
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
GLOO = ("gloo", "enforce fail", "preamble", "mismatch")
Ranks = Sequence[Rank]


def judged(checks: Checks, evidence: Evidence) -> list[Finding]:
    """The findings in the cases that ran to their end."""
    try:
        return checks.judge(evidence) if evidence else []
    except Exception as error:
        # What the learner's code left was of a kind that the check did not foresee.
        where = traceback.extract_tb(error.__traceback__)[-1].name
        return [say("unusable", error=f"{type(error).__name__}: {error}", where=where)]


def tampered(rank: Rank) -> Finding:
    if names := rank.error["names"]:
        return say("tampered", names=mistakes.listed(f"torch.distributed.{name}" for name in names))
    return say("tampered/pipe")


# ------------------------------------------------------------------ a rank that failed


def failed(job: Job, in_a_case: bool, ranks: Ranks) -> Finding:
    culprits = [rank for rank in ranks if rank.phase in FAILED]
    rank = min(culprits, key=_suspicion)
    error = rank.error
    if error["kind"] == "rejected":
        return Finding(error["cause"], error["message"])
    if error["kind"] == "died":
        return _died(rank, error["code"], ranks)
    line, text, name = error["line"], error["text"], error["type"]
    same = [r.number for r in culprits if r.error.get("text") == text]
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
        function = error["function"]
        what = "something" if function in ("", "<module>") else f"`{function}`"
        return say("not-done", what=what, line=line, text=text or name)
    if name in ("SyntaxError", "IndentationError"):
        return say("raised/syntax", **facts)
    if name == "MemoryError" or any(words in text.lower() for words in NO_MEMORY):
        return say("memory/asked", **facts)
    if any(words in text.lower() for words in GLOO) and (why := _parting(ranks)):
        return say("calls-differ/failed", why=why, rank=rank.number, how=f"failed{facts['at']}")
    if line:
        return say("raised", **facts)
    return say("unusable/left" if in_a_case else "raised/loading", **facts)


def _suspicion(rank: Rank) -> tuple[int, int]:
    """The least is the cause; a rank that only lost its peer comes last."""
    if any(words in rank.error.get("text", "").lower() for words in LOST_PEER):
        return 2, rank.number
    return int(rank.error["kind"] == "died"), rank.number


def _died(rank: Rank, code: int, ranks: Ranks) -> Finding:
    if code >= 0:
        return say("exited/code", rank=rank.number, code=code)
    how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGABRT and (why := _parting(ranks)):
        return say("calls-differ/failed", why=why, rank=rank.number, how=how)
    last = f"; its last call was {mistakes.described(rank.calls[-1])}" if rank.calls else ""
    return say("crashed", rank=rank.number, how=how, last=last)


# ------------------------------------------------------------------ ranks that stand still


def deadlock(ranks: Ranks, job: Job) -> Finding:
    why = _one_way(ranks) or _parting(ranks)
    return say("deadlock", why=why and f"{why}. ", positions=positions(ranks, job))


def _in_the_case(ranks: Ranks) -> list[Rank]:
    return [rank for rank in ranks if rank.phase != "idle"]


def _one_way(ranks: Ranks) -> str:
    """All ranks send, or all receive."""
    ops = {rank.inside["op"] if rank.inside else "" for rank in _in_the_case(ranks)}
    if ops == {"send"}:
        return (
            "every rank sends and nobody receives. Start the message (isend), receive, then wait "
            "for it; or let one rank receive first"
        )
    started = any(c["op"] == "isend" for rank in _in_the_case(ranks) for c in rank.calls)
    if ops <= {"recv", "irecv"} and started:
        return (
            "every rank waits to receive. A message that was started with isend leaves for certain "
            "only while its handle is kept and waited for"
        )
    return ""


def _parting(ranks: Ranks) -> str:
    """Where the ranks' calls begin to differ, if they do. Messages between two ranks may differ."""
    first, *others = _in_the_case(ranks)
    if any(c["op"] in POINT_TO_POINT for c in first.calls):
        return ""
    texts = (mistakes.difference(first.calls, o.calls, first.number, o.number) for o in others)
    return next(filter(None, texts), "")


def positions(ranks: Ranks, job: Job) -> str:
    """Where each rank is, one after another."""
    return "; ".join(f"rank {r.number} {_position(r, job)}" for r in _in_the_case(ranks))


def _position(rank: Rank, job: Job) -> str:
    if rank.phase == "done":
        return "has finished"
    if rank.inside:
        verb = "waits for" if rank.inside.get("waits") else "waits in"
        return f"{verb} {mistakes.described(rank.inside)}"
    # The stack is most recent call first.
    found = re.search(rf'File "{re.escape(job.path)}", line (\d+)', rank.stack)
    if not found:
        return "was busy, not in your file"
    line = int(found.group(1))
    return f"was busy in line {line}: `{job.source.splitlines()[line - 1].strip()}`"
