"""Known mistakes, recognised from evidence: pure functions, each finding with its numbers.

Tensors come as (nested) lists of numbers, by name. ``ranks`` is each rank's evidence of one case,
``rows`` each rank's row of one of its steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardlab import wire
from shardlab.learn.exercise import Finding, Row, Rows, each_step, say

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-9  # of the largest value: everything is in float64


# ------------------------------------------------------------------ numbers


def flat(value: Any) -> Array:
    """The numbers of a list of tensors or of one, in order: (elements,)."""
    if isinstance(value, list | tuple) and any(np.ndim(part) for part in value):
        return np.concatenate([flat(part) for part in value])
    return np.array(value, float).ravel()


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    """Both are there, and equal up to rounding, relative to the largest value of either."""
    if a is None or b is None:
        return False
    x, y = flat(a), flat(b)
    scale = max(abs(x).max(initial=0.0), abs(y).max(initial=0.0)) or 1.0
    return bool(np.isfinite(x).all()) and error(x, y) <= tolerance * scale


def ratio(a: Any, b: Any, tolerance: float = 1e-6) -> float | None:
    """The one number by which ``a`` is ``b`` multiplied, if there is one; not 0."""
    x, y = flat(a), flat(b)
    if len(x) != len(y) or not y.any() or not np.isfinite(x).all():
        return None
    found = float(x @ y / (y @ y))
    return found if found and close(x, found * y, tolerance) else None


def error(a: Any, b: Any) -> float:
    """The largest difference; infinite where the sizes differ."""
    x, y = flat(a), flat(b)
    return float(abs(x - y).max(initial=0.0)) if len(x) == len(y) else math.inf


def listed(names: Iterable[str], most: int = 3) -> str:
    """`a`, `b` and 4 more."""
    every = [f"`{name}`" for name in names]
    if len(every) > most:
        every[most:] = [f"{len(every) - most} more"]
    *head, last = every
    return f"{', '.join(head)} and {last}" if head else last


def ranks_text(which: Sequence[int], world: int) -> str:
    if len(which) == world:
        return "every rank" if world > 1 else "the only rank"
    return f"rank{'s' * (len(which) > 1)} {', '.join(map(str, which))}"


# ------------------------------------------------------------------ gradients


def wrong_gradient(rows: Rows) -> Finding | None:
    """Each rank's gradients by name (``got``) against the mean over the ranks, which one process
    would have; ``own`` is what each rank had before it communicated."""
    got, own, mean = [row["got"] for row in rows], rows[0]["own"], rows[0]["mean"]
    every = range(len(rows))
    known = [name for name, value in mean.items() if value is not None]
    wrong = [name for name in known if not all(close(g.get(name), mean[name]) for g in got)]
    if not wrong:
        return None
    for name in wrong:
        if missing := [r for r in every if got[r].get(name) is None]:
            return _no_gradient(name, missing, own)
    kept = [n for n in wrong if len(rows) > 1 and all(close(got[r][n], own[r][n]) for r in every)]
    if kept:
        which = "every gradient" if kept == known else f"the gradient of {listed(kept)}"
        return say("not-communicated", which=which)
    for source in every:
        if all(close(g[name], own[source][name]) for name in wrong for g in got):
            return say("not-averaged-but-copied", source=source)
    names = listed(wrong)
    values = flat([g[name] for g in got for name in wrong])
    if not np.isfinite(values).all():
        return say("not-finite", names=names)
    if not values.any():
        return say("zeroed", names=names)
    if factor := common_ratio(rows, wrong):
        which = "your gradients are" if len(wrong) == len(mean) else f"{names}: the gradient is"
        return _scaled(which, factor, len(rows))
    if differ := [name for name in wrong if not all(close(g[name], got[0][name]) for g in got)]:
        return say("ranks-differ", names=listed(differ))
    return say("wrong-gradient", names=names, error=error(got[0][wrong[0]], mean[wrong[0]]))


def _no_gradient(name: str, missing: list[int], own: Rows) -> Finding:
    had = [r for r, gradients in enumerate(own) if gradients[name] is not None]
    where = ranks_text(missing, len(own))
    if had and set(missing) - set(had):
        there = ranks_text(had, len(own))
        return say("no-gradient/elsewhere", name=name, missing=where, had=there)
    return say("no-gradient", name=name, missing=where)


def _scaled(which: str, factor: float, n: int) -> Finding:
    rounded = round(factor, 4)
    times = f"{rounded:.1f}" if rounded.is_integer() else f"{rounded:g}"
    known = {"not-averaged": n, "averaged-twice": 1 / n}
    cause = next((c for c, f in known.items() if math.isclose(factor, f, rel_tol=1e-5)), "scaled")
    return say(cause, which=which, times=times, n=n)


def common_ratio(rows: Rows, names: Iterable[str]) -> float | None:
    """The one number by which all these gradients are the mean multiplied, if there is one."""
    there = [(row, n) for row in rows for n in names if row["got"][n] is not None]
    return ratio([row["got"][n] for row, n in there], [row["mean"][n] for row, n in there])


@each_step
def gradients(rows: Rows, _step: int) -> Finding | None:
    return wrong_gradient(rows)


@each_step
def weights_averaged(rows: Rows, _step: int) -> Finding | None:
    """The famous one: the parameters are averaged, the gradients never."""
    for row in rows:
        sent = [c["what"].partition(":")[2] for c in row["calls"] if c["what"].startswith("param:")]
        if row["moved"] or sent:
            return say("weights-averaged", names=listed(row["moved"] or sent))
    return None


# ------------------------------------------------------------------ calls


def all_calls(ranks: Rows) -> list[list[Row]]:
    """The calls of all steps, by rank."""
    return [[call for row in rank.get("steps", ()) for call in row["calls"]] for rank in ranks]


def wire_bytes(calls: Rows, world: int) -> float:
    """What a rank sends in these calls, by the best algorithm."""
    total = 0.0
    for call in calls:
        if call["op"] in ("send", "isend"):
            total += call["bytes"]
        elif call["op"] not in ("recv", "irecv", "barrier"):
            # Gathers, scatters and exchanges send as much as a broadcast: all but one share.
            op = "all_reduce" if call["op"] == "all_reduce" else "broadcast"
            total += wire.wire_bytes(op, call["bytes"], world)
    return total


def too_many_bytes(calls: Rows, world: int, should: float) -> Finding | None:
    """What a rank sends against what it should; a few bytes to agree on something are fine."""
    sent = wire_bytes(calls, world)
    if sent <= 1.05 * should + 256:
        return None
    ops = ", ".join(sorted({call["op"] for call in calls}))
    return say("too-many-bytes", sent=sent, ops=ops, n=world, should=should, ratio=sent / should)


def not_by_hand(ranks: Rows) -> Finding | None:
    """The result is right, but somebody else's code communicated."""
    return None if any(all_calls(ranks)) else say("not-by-hand")


def sent_by_hand(ranks: Rows) -> Finding | None:
    """Each gradient must be sent once per step, by the learner's own calls."""
    n, steps = len(ranks), len(ranks[0]["steps"])
    should = steps * wire.wire_bytes("all_reduce", sum(ranks[0]["sizes"].values()), n)
    return not_by_hand(ranks) or too_many_bytes(all_calls(ranks)[0], n, should)


def not_waited(ranks: Rows) -> Finding | None:
    """Asynchronous calls that nobody waited for: their result may be used before it is there."""
    for rank, calls in enumerate(all_calls(ranks)):
        launched = [c for c in calls if c["is_async"]]
        lost = [c for c in launched if c["waited"] is None]
        if lost:
            call = described(lost[0])
            return say("not-waited", lost=len(lost), all=len(launched), rank=rank, call=call)
    return None


def calls_differ(ranks: Rows) -> Finding | None:
    """Collectives must be the same on every rank: same order, same sizes."""
    first, *others = all_calls(ranks)
    for rank, calls in enumerate(others, start=1):
        if text := difference(first, calls, 0, rank):
            return say("calls-differ", text=text)
    return None


def difference(a: Rows, b: Rows, rank_a: int, rank_b: int) -> str:
    """Where two ranks' collectives begin to differ, in words; empty if they do not."""
    for i, (x, y) in enumerate(zip(a, b, strict=False), start=1):
        if any(x[key] != y[key] for key in ("op", "bytes", "dtype")):
            # A call without a known tensor was put in between: then no parameter is missing.
            why = absent(a, b, rank_a, rank_b) if x["what"] and y["what"] else ""
            return (
                f"call {i} is {described(x)} with {sized(x)} on rank {rank_a}, but "
                f"{described(y)} with {sized(y)} on rank {rank_b}: the ranks' calls must come in "
                f"the same order with the same sizes{why}"
            )
    if len(a) == len(b):
        return ""
    op = max(a, b, key=len)[min(len(a), len(b))]["op"]
    entered = f"rank {rank_a} entered {op} {times(a, op)}, rank {rank_b} {times(b, op)}"
    return entered + absent(a, b, rank_a, rank_b)


def absent(a: Rows, b: Rows, rank_a: int, rank_b: int) -> str:
    """Which parameter one rank communicates and the other does not, if that is it."""
    x, y = (Counter(c["what"] for c in calls if c["what"]) for calls in (a, b))
    for more, less, lacking in ((x, y, rank_b), (y, x, rank_a)):
        for what in more - less:
            kind, _, name = what.partition(":")
            if kind == "grad":
                return f": the parameter `{name}` has no gradient on rank {lacking}"
            return f": rank {lacking} leaves out `{name}`"
    return ""


def times(calls: Rows, op: str) -> str:
    count = sum(call["op"] == op for call in calls)
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def described(call: Row) -> str:
    """all_reduce of the gradient of `head.bias` in line 12."""
    kind, _, name = call["what"].partition(":")
    words = {"grad": "the gradient of ", "param": "the parameter ", "buffer": "the buffer "}
    what = f" of {words[kind]}`{name}`" if kind in words else ""
    line = f" in line {call['line']}" if call["line"] else ""
    return f"{call['op']}{what}{line}"


def sized(call: Row) -> str:
    shape = "x".join(map(str, call["shape"])) or "1"
    return f"{call['bytes']} bytes ({shape}, {call['dtype'] or 'no tensor'})"
