"""Reading a trace: each answer against our solution's, and a wrong one against known mistakes.

Nothing is written down here: all comes from the trace, at every check.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shardlab.learn.exercise import Case, Evidence, Finding, Rows, Stage, say
from shardlab.trace.intervals import Intervals, union
from shardlab.trace.model import CPU_OP, Collective

CASES = (Case("questions", 1),)
# How near an answer must be: relative, and absolute.
QUESTIONS = {
    "STEP_MS": (0.04, 0.0),
    "LATE_RANK": (0.0, 0.0),
    "LATE_BECAUSE": (0.0, 0.0),
    "WAIT_MS": (0.08, 0.0),
    "COMM_MS": (0.08, 0.0),
    "OVERLAP_PERCENT": (0.0, 4.0),
    "BYTES_PER_STEP": (0.01, 0.0),
    "TOP_OPERATOR": (0.0, 0.0),
    "EXPOSED_BUCKET": (0.0, 0.0),
}
FAST, LATE = 0, 1  # seen in the table of stragglers, and checked in the tests


def run(at: Stage) -> dict[str, Any]:
    values = {name: getattr(at.submission, name, None) for name in QUESTIONS}
    return {"answers": {n: v() if callable(v) else v for n, v in values.items()}}


def judge(evidence: Evidence) -> list[Finding]:
    return [replace(f, case=case) for case, ranks in evidence.items() for f in _wrong(ranks)]


def _wrong(ranks: Rows) -> list[Finding]:
    given = ranks[0]["answers"]
    if all(value is None for value in given.values()):
        return [say("not-done/trace")]
    return [f for name in QUESTIONS if (f := _wrong_answer(name, given[name]))]


def _wrong_answer(name: str, given: Any) -> Finding | None:
    if given is None:
        return say("not-done/question", name=name)
    if matches(name, given, right(name)):
        return None
    shown = f"{given:.6g}" if isinstance(given, float) else repr(given)
    near = [(c, value) for question, c, value in mistakes()
            if question == name and matches(name, given, value)]  # fmt: skip
    if near and not isinstance(given, str):
        near.sort(key=lambda item: abs(given - item[1]))
    return say(near[0][0] if near else "wrong-answer", answer=f"{name} = {shown}")


def matches(name: str, given: Any, value: Any) -> bool:
    if isinstance(value, str) or isinstance(given, str):
        return str(given).strip().lower() == str(value).strip().lower()
    if not isinstance(given, int | float) or isinstance(given, bool):
        return False
    relative, absolute = QUESTIONS[name]
    return bool(abs(given - value) <= relative * abs(value) + absolute)


def _solution() -> Any:
    """Imported only now: it reads the trace."""
    return importlib.import_module("shardlab.learn.exercises.read_trace.solution")


def right(name: str) -> Any:
    return getattr(_solution(), name)


def mistakes() -> Iterator[tuple[str, str, Any]]:
    """What each known mistake would answer: question, cause, value."""
    solution = _solution()
    traces, calls, mean = solution.traces, solution.collectives, solution.mean_ms
    steps = len({call.step for call in calls})

    def with_warm_up(rank: int, part: str) -> float:
        values = [getattr(row, part) for row in traces.breakdown() if row.rank == rank]
        return float(sum(values)) / len(values) / 1000

    def overlap(mean: Callable[[int, str], float], rank: int) -> float:
        return 100 * mean(rank, "hidden_comm_us") / mean(rank, "comm_us")

    for name, rank, part in (
        ("STEP_MS", FAST, "wall_us"), ("WAIT_MS", FAST, "wait_us"), ("COMM_MS", LATE, "comm_us")
    ):  # fmt: skip
        ms = mean(rank, part)
        yield name, "counted-warm-up", with_warm_up(rank, part)
        yield name, "microseconds", ms * 1000
        yield name, "seconds", ms / 1000
        yield name, "whole-trace", ms * steps
    yield "STEP_MS", "whole-trace", with_warm_up(FAST, "wall_us") * (steps + 1)

    yield "LATE_RANK", "blamed-the-victim", FAST
    yield "LATE_BECAUSE", "not-the-cause", "compute"
    yield "LATE_BECAUSE", "not-the-cause", "communication"

    waits = [p.wait_us / 1000 for c in calls for p in c.participants if p.rank == FAST]
    yield "WAIT_MS", "wait-is-communication", mean(FAST, "comm_us")
    yield "WAIT_MS", "summed-intervals", sum(waits) / steps
    yield "WAIT_MS", "wrong-rank", mean(LATE, "wait_us")
    yield "COMM_MS", "summed-intervals", sum(_span(c, LATE).length / 1e6 for c in calls) / steps
    yield "COMM_MS", "counted-the-wait", mean(FAST, "comm_us")
    yield "COMM_MS", "exposed-only", mean(LATE, "exposed_comm_us")

    hidden = overlap(mean, LATE)
    yield "OVERLAP_PERCENT", "fraction-not-percent", hidden / 100
    yield "OVERLAP_PERCENT", "exposed-not-hidden", 100 - hidden
    yield "OVERLAP_PERCENT", "counted-the-wait", overlap(mean, FAST)
    of_the_step = mean(LATE, "hidden_comm_us") / mean(LATE, "wall_us")
    yield "OVERLAP_PERCENT", "of-the-step", 100 * of_the_step
    yield "OVERLAP_PERCENT", "counted-warm-up", overlap(with_warm_up, LATE)

    moved = solution.BYTES_PER_STEP
    yield "BYTES_PER_STEP", "ranks-added", 2 * moved
    yield "BYTES_PER_STEP", "whole-trace", steps * moved
    yield "BYTES_PER_STEP", "whole-trace", sum(c.bytes or 0 for c in traces.collectives())
    yield "BYTES_PER_STEP", "elements-not-bytes", moved / 4
    yield "BYTES_PER_STEP", "megabytes", moved / 1e6
    yield "BYTES_PER_STEP", "megabytes", moved / 2**20

    # Operators of the fast rank that are long because of what runs inside them.
    one = next(t for t in traces.traces if t.rank == FAST)
    own = {k.name: k.sum_us * 1000 for k in traces.kernels(top=len(one.names)) if k.rank == FAST}
    total = np.bincount(one.events.name, one.events.dur_ns, minlength=len(one.names))
    operators = set(one.events.name[one.events.kind == CPU_OP].tolist())
    for i, operator in enumerate(one.names):
        if i in operators and total[i] > 2 * own.get(operator, 0.0):
            yield "TOP_OPERATOR", "not-own-time", operator

    lengths: dict[str, float] = defaultdict(float)
    for call in calls:
        lengths[call.label] += _span(call, FAST).length
    yield "EXPOSED_BUCKET", "blamed-the-wait", max(lengths, key=lambda label: lengths[label])
    for label in lengths:
        is_bucket = label.startswith("bucket")
        yield "EXPOSED_BUCKET", "another-bucket" if is_bucket else "no-bucket", label


def _span(call: Collective, rank: int) -> Intervals:
    part = next(p for p in call.participants if p.rank == rank)
    return union(np.array([part.start_ns]), np.array([part.end_ns]))
