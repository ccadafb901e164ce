"""How a check ended, in the teacher's words: pure, from what the guard knows to findings."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.launch import LOST_PEER
from shardlab.learn import mistakes
from shardlab.learn.exercise import Evidence, Exercise, Finding

Told = dict[str, Any]  # of a rank: see guard.Rank.told
NO_MEMORY = ("can't allocate memory", "not enough memory", "memoryerror", "cannot allocate memory")
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
GLOO = ("gloo", "enforce fail", "preamble", "mismatch")


@dataclass(frozen=True)
class End:
    """How a check ended: ``kind`` is "ok", or what stopped it in which case."""

    kind: str
    case: str = ""
    detail: Any = None


def outcome(
    name: str,
    path: str,
    source: str,
    end: End,
    evidence: Evidence,
    ranks: Sequence[Told],
    deadline_s: float,
) -> dict[str, Any]:
    """The findings of the cases that ran to their end, then what stopped the one that did not."""
    findings: list[Finding] = []
    if evidence:
        try:
            findings = list(Exercise(name).checks().judge(evidence))
        except Exception as error:
            # What the learner's code left was of a kind that the check did not foresee.
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"the check could not use what your code left: {type(error).__name__}: {error}"
            findings = [Finding("unusable", f"{text} ({where.name})")]
    findings += ended(end, path, source, ranks, deadline_s)
    return {"findings": [vars(finding) for finding in findings]}


def ended(
    end: End, path: str, source: str, ranks: Sequence[Told], deadline_s: float
) -> list[Finding]:
    if end.kind == "ok":
        return []
    if end.kind == "tampered":
        return [_tampered(end)]
    if end.kind == "processes":
        message = (
            f"your file had started {end.detail} processes when it was stopped; a check needs none "
            "beyond its ranks"
        )
        return [Finding("processes", message, end.case)]
    if end.kind == "memory":
        message = (
            f"the ranks held {end.detail / 2**30:.1f} GiB of memory: far more than the toys need"
        )
        return [Finding("memory", message, end.case)]
    if end.kind == "timed-out":
        message = f"not done within {deadline_s:g} s, and stopped. " + _positions(
            ranks, path, source
        )
        return [Finding("timed-out", message, end.case)]
    if end.kind == "deadlock":
        return [Finding("deadlock", _standstill(ranks, path, source), end.case)]
    return [_failed(end, path, ranks)]


def _tampered(end: End) -> Finding:
    names = (end.detail or {}).get("names") or []
    if names:
        message = (
            f"your file replaces {mistakes.listed(f'torch.distributed.{n}' for n in names)}: the "
            "grader must see the calls that you make; call them, do not replace them"
        )
    else:
        message = (
            "something was written to the grader's own pipe: your file writes to a descriptor that "
            "it did not open"
        )
    return Finding("tampered", message, end.case)


# ------------------------------------------------------------------ a rank that failed


def _failed(end: End, path: str, ranks: Sequence[Told]) -> Finding:
    failed = [rank for rank in ranks if rank["phase"] in ("raised", "dead")]
    rank = min(failed, key=_suspicion)
    error = rank["error"] or {}
    same = [r["rank"] for r in failed if (r["error"] or {}).get("text") == error.get("text")]
    on = mistakes.ranks_text(same, len(ranks))
    kind = error.get("kind")
    if kind == "rejected":
        return Finding(error["cause"], error["message"], end.case)
    if kind == "died":
        return _died(rank, error["code"], ranks, end.case)
    line, text, name = error["line"], error["text"], error["type"]
    at = f" in line {line}: `{error['code']}`" if line else ""
    if kind == "exited":
        message = f"{on} left with {name}({text}){at}: a rank must not exit, its peers would wait"
        return Finding("exited", message, end.case)
    if error.get("missing"):
        message = f"your file has no `{error['missing']}`: keep the names of the template"
        return Finding("missing", message, end.case)
    if name == "NotImplementedError" and line:
        what = (
            f"`{error['function']}`" if error["function"] not in ("", "<module>") else "something"
        )
        message = f"{what} is not written yet (line {line}): {text or 'NotImplementedError'}"
        return Finding("not-done", message, end.case)
    if name == "SyntaxError" or name == "IndentationError":
        return Finding("raised", f"{path} is not Python: {text}{at}", end.case)
    if name == "MemoryError" or any(words in text.lower() for words in NO_MEMORY):
        message = f"{on} asked for more memory than a check allows (1 GiB){at}: {_first(text)}"
        return Finding("memory", message, end.case)
    if any(words in text.lower() for words in GLOO) and (why := _parting(ranks)):
        return Finding("calls-differ", f"{why} (rank {rank['rank']} failed{at})", end.case)
    if not line and not end.case:
        return Finding("raised", f"{path} cannot be loaded: {name}: {_first(text)}")
    if not line:
        message = f"what your code left could not be used on {on}: {name}: {_first(text)}"
        return Finding("unusable", message, end.case)
    return Finding("raised", f"{on} raised {name}{at}: {_first(text)}", end.case)


def _suspicion(rank: Told) -> tuple[int, int]:
    """The least is the cause; a rank that only lost its peer comes last."""
    error = rank["error"] or {}
    if any(words in error.get("text", "").lower() for words in LOST_PEER):
        return 2, rank["rank"]
    return int(error.get("kind") == "died"), rank["rank"]


def _died(rank: Told, code: int, ranks: Sequence[Told], case: str) -> Finding:
    number = rank["rank"]
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGABRT and (why := _parting(ranks)):
            return Finding("calls-differ", f"{why} (rank {number} {how})", case)
        last = (
            f"; its last call was {mistakes.described(rank['calls'][-1])}" if rank["calls"] else ""
        )
        return Finding("crashed", f"the process of rank {number} {how}{last}", case)
    message = (
        f"the process of rank {number} left with exit code {code} before the case was over: a rank "
        "must not exit, its peers would wait for it"
    )
    return Finding("exited", message, case)


def _first(text: str) -> str:
    return text.partition("\n")[0][:300]


# ------------------------------------------------------------------ ranks that stand still


def _standstill(ranks: Sequence[Told], path: str, source: str) -> str:
    why = _one_way(ranks) or _parting(ranks)
    return f"{why + '. ' if why else ''}{_positions(ranks, path, source)}, and none goes on"


def _one_way(ranks: Sequence[Told]) -> str:
    """All ranks send, or all receive."""
    inside = [rank["inside"] for rank in ranks if rank["phase"] != "idle"]
    ops = {call["op"] if call else "" for call in inside}
    if ops == {"send"}:
        return (
            "every rank sends and nobody receives. Start the message (isend), receive, then wait "
            "for it; or let one rank receive first"
        )
    started = any(c["op"] == "isend" for rank in ranks for c in rank["calls"])
    if ops <= {"recv", "irecv"} and started:
        return (
            "every rank waits to receive. A message that was started with isend leaves for certain "
            "only while its handle is kept and waited for"
        )
    return ""


def _parting(ranks: Sequence[Told]) -> str:
    """Where the ranks' calls part, if they do. Messages between two ranks may differ."""
    first, *others = [rank for rank in ranks if rank["phase"] != "idle"]
    if any(c["op"] in POINT_TO_POINT for c in first["calls"]):
        return ""
    for other in others:
        text = mistakes.difference(first["calls"], other["calls"], first["rank"], other["rank"])
        if text:
            return text
    return ""


def _positions(ranks: Sequence[Told], path: str, source: str) -> str:
    """Where each rank is, one after another."""
    return "; ".join(
        f"rank {rank['rank']} {_position(rank, path, source)}"
        for rank in ranks
        if rank["phase"] != "idle"
    )


def _position(rank: Told, path: str, source: str) -> str:
    if rank["phase"] == "done":
        return "has finished"
    if rank["phase"] in ("raised", "dead"):
        return "has failed"
    if rank["inside"]:
        verb = "waits for" if rank["inside"].get("waits") else "waits in"
        return f"{verb} {mistakes.described(rank['inside'])}"
    # The stack is most recent call first.
    found = re.search(rf'File "{re.escape(path)}", line (\d+)', rank["stack"])
    if not found:
        return "was busy, not in your file"
    line = int(found.group(1))
    lines = source.splitlines()
    code = lines[line - 1].strip() if line <= len(lines) else ""
    return f"was busy in line {line}: `{code}`"
