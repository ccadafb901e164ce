"""Known mistakes, recognised from evidence: pure functions, each finding with its numbers.

Tensors come as (nested) lists of numbers, by name. ``ranks`` is each rank's evidence of one case,
``rows`` each rank's row of one of its steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardlab.learn.exercise import Finding, say

Row = Mapping[str, Any]
Rows = Sequence[Row]
TOLERANCE = 1e-9  # of the largest value: everything is in float64


# ------------------------------------------------------------------ numbers


def flat(value: Any) -> list[float]:
    """The numbers of a nested list, in order."""
    if isinstance(value, list | tuple):
        return [x for part in value for x in flat(part)]
    return [float(value)]


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    """Equal up to rounding, relative to the largest value of either."""
    x, y = flat(a), flat(b)
    if len(x) != len(y) or not all(map(math.isfinite, x)):
        return False
    scale = max((abs(v) for v in (*x, *y)), default=0.0) or 1.0
    return all(abs(p - q) <= tolerance * scale for p, q in zip(x, y, strict=True))


def ratio(a: Any, b: Any, tolerance: float = 1e-6) -> float | None:
    """The one number by which ``a`` is ``b`` multiplied, if there is one; not 0."""
    x, y = flat(a), flat(b)
    norm = sum(q * q for q in y)
    if len(x) != len(y) or norm == 0 or not all(map(math.isfinite, x)):
        return None
    found = sum(p * q for p, q in zip(x, y, strict=True)) / norm
    return found if found and close(x, [found * q for q in y], tolerance) else None


def error(a: Any, b: Any) -> float:
    """The largest difference; infinite where the sizes differ."""
    x, y = flat(a), flat(b)
    if len(x) != len(y):
        return math.inf
    return max((abs(p - q) for p, q in zip(x, y, strict=True)), default=0.0)


def listed(names: Iterable[str], most: int = 3) -> str:
    """`a`, `b` and 4 more."""
    every = [f"`{name}`" for name in names]
    if len(every) <= most:
        return ", ".join(every[:-1]) + (" and " if len(every) > 1 else "") + every[-1]
    return f"{', '.join(every[:most])} and {len(every) - most} more"


def ranks_text(numbers: Sequence[int], world: int) -> str:
    if len(numbers) == world:
        return "every rank" if world > 1 else "the only rank"
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"


def same(got: Any, want: Any) -> bool:
    """Both are there, and equal up to rounding."""
    return got is not None and want is not None and close(got, want)


def first(ranks: Rows, look: Callable[[Rows, int], Finding | None]) -> Finding | None:
    """What is wrong in the first step that has something wrong."""
    for step, rows in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True)):
        if found := look(rows, step):
            return found
    return None


# ------------------------------------------------------------------ gradients


def gradients(rows: Rows, _step: int = 0) -> Finding | None:
    """Each rank's gradients by name (``got``) against the mean over the ranks, which one process
    would have; ``own`` is what each rank had before it communicated."""
    got, own, mean = [row["got"] for row in rows], rows[0]["own"], rows[0]["mean"]
    every = range(len(rows))
    known = [name for name, value in mean.items() if value is not None]
    wrong = [name for name in known if not all(same(g.get(name), mean[name]) for g in got)]
    if not wrong:
        return None
    for name in wrong:
        if missing := [r for r in every if got[r].get(name) is None]:
            return _no_gradient(name, missing, own)
    kept = [n for n in wrong if len(rows) > 1 and all(same(got[r][n], own[r][n]) for r in every)]
    if kept:
        which = "every gradient" if kept == known else f"the gradient of {listed(kept)}"
        return say("not-communicated", which=which)
    for source in every:
        if all(same(g[name], own[source][name]) for name in wrong for g in got):
            return say("not-averaged-but-copied", source=source)
    if found := _scaled(rows, wrong):
        return found
    differ = [name for name in wrong if any(not same(g[name], got[0][name]) for g in got)]
    if differ:
        return say("ranks-differ", names=listed(differ))
    off = error(got[0][wrong[0]], mean[wrong[0]])
    return say("wrong-gradient", names=listed(wrong), error=off)


def _no_gradient(name: str, missing: list[int], own: Rows) -> Finding:
    had = [r for r, gradients in enumerate(own) if gradients[name] is not None]
    where = ranks_text(missing, len(own))
    if had and set(missing) - set(had):
        there = ranks_text(had, len(own))
        return say("no-gradient/elsewhere", name=name, missing=where, had=there)
    return say("no-gradient", name=name, missing=where)


def _scaled(rows: Rows, wrong: list[str]) -> Finding | None:
    n, mean = len(rows), rows[0]["mean"]
    values = [x for name in wrong for row in rows for x in flat(row["got"][name])]
    if not all(map(math.isfinite, values)):
        return say("not-finite", names=listed(wrong))
    if not any(values):
        return say("zeroed", names=listed(wrong))
    factor = common_ratio(rows, wrong)
    if factor is None:
        return None
    everything = len(wrong) == len(mean)
    which = "your gradients are" if everything else f"{listed(wrong)}: the gradient is"
    rounded = round(factor, 4)
    times = f"{rounded:.1f}" if rounded.is_integer() else f"{rounded:g}"
    known = {"not-averaged": n, "averaged-twice": 1 / n}
    cause = next((c for c, f in known.items() if math.isclose(factor, f, rel_tol=1e-5)), "scaled")
    return say(cause, which=which, times=times, n=n)


def common_ratio(rows: Rows, names: Iterable[str]) -> float | None:
    """The one number by which all these gradients are the mean multiplied, if there is one."""
    ratios = [
        ratio(row["got"][name], row["mean"][name])
        for name in names
        for row in rows
        if row["got"][name] is not None
    ]
    one = ratios[0] if ratios else None
    if one is None or any(r is None or not math.isclose(r, one, rel_tol=1e-5) for r in ratios):
        return None
    return one


def weights_averaged(rows: Rows, _step: int = 0) -> Finding | None:
    """The famous one: the parameters are averaged, the gradients never."""
    for row in rows:
        sent = [c["what"].partition(":")[2] for c in row["calls"] if c["what"].startswith("param:")]
        if row["moved"] or sent:
            return say("weights-averaged", names=listed(row["moved"] or sent))
    return None


# ------------------------------------------------------------------ calls


def wire_bytes(call: Row, world: int) -> float:
    """What each rank sends of it by the best algorithm (Ψ(n-1)/n, twice that for all_reduce)."""
    if call["op"] in ("send", "isend"):
        return float(call["bytes"])
    if call["op"] in ("recv", "irecv", "barrier"):
        return 0.0
    times = 2 if call["op"] == "all_reduce" else 1
    return float(times * call["bytes"] * (world - 1) / world)


def too_many_bytes(calls: Rows, world: int, should: float) -> Finding | None:
    """What a rank sends against what it should; a few bytes to agree on something are fine."""
    sent = sum(wire_bytes(call, world) for call in calls)
    if sent <= 1.05 * should + 256:
        return None
    ops = ", ".join(sorted({call["op"] for call in calls}))
    return say("too-many-bytes", sent=sent, ops=ops, n=world, should=should, ratio=sent / should)


def not_by_hand(ranks: Rows) -> Finding | None:
    """The result is right, but somebody else's code communicated."""
    return None if any(all_calls(ranks)) else say("not-by-hand")


def sent_by_hand(ranks: Rows) -> Finding | None:
    """By the learner's own calls, and each gradient once per step."""
    n, steps = len(ranks), len(ranks[0]["steps"])
    should = steps * 2 * sum(ranks[0]["sizes"].values()) * (n - 1) / n
    return not_by_hand(ranks) or too_many_bytes(all_calls(ranks)[0], n, should)


def not_waited(calls_by_rank: Sequence[Rows]) -> Finding | None:
    """Asynchronous calls that nobody waited for: their result may be used before it is there."""
    for rank, calls in enumerate(calls_by_rank):
        launched = [c for c in calls if c["is_async"]]
        lost = [c for c in launched if not c["waited"]]
        if lost:
            call = described(lost[0])
            return say("not-waited", lost=len(lost), all=len(launched), rank=rank, call=call)
    return None


def all_calls(ranks: Rows) -> list[list[Row]]:
    """The calls of all steps, by rank."""
    return [[call for row in rank["steps"] for call in row["calls"]] for rank in ranks]


def calls_differ(calls_by_rank: Sequence[Rows]) -> Finding | None:
    """Collectives must be the same on every rank: same order, same sizes."""
    for rank, calls in enumerate(calls_by_rank[1:], start=1):
        if text := difference(calls_by_rank[0], calls, 0, rank):
            return say("calls-differ", text=text)
    return None


def difference(a: Rows, b: Rows, rank_a: int, rank_b: int) -> str:
    """Where two ranks' collectives part, in words; empty: they do not."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if (x["op"], x["bytes"], x["dtype"]) != (y["op"], y["bytes"], y["dtype"]):
            return (
                f"call {i + 1} is {described(x)} with {sized(x)} on rank {rank_a}, but "
                f"{described(y)} with {sized(y)} on rank {rank_b}: the ranks' calls must come in "
                "the same order with the same sizes" + absent(a, b, rank_a, rank_b)
            )
    if len(a) == len(b):
        return ""
    ops = [c["op"] for c in (a if len(a) > len(b) else b)[min(len(a), len(b)) :]]
    op = ops[0]
    return f"rank {rank_a} entered {op} {times(a, op)}, rank {rank_b} {times(b, op)}" + absent(
        a, b, rank_a, rank_b
    )


def absent(a: Rows, b: Rows, rank_a: int, rank_b: int) -> str:
    """Which parameter one rank communicates and the other does not, if that is it."""
    x, y = Counter(c["what"] for c in a if c["what"]), Counter(c["what"] for c in b if c["what"])
    for more, less, lacking in ((x, y, rank_b), (y, x, rank_a)):
        for what in more - less:
            kind, _, name = what.partition(":")
            if kind == "grad":
                return f": the parameter `{name}` has no gradient on rank {lacking}"
            return f": rank {lacking} leaves out `{name}`"
    return ""


def times(calls: Rows, op: str) -> str:
    count = sum(call["op"] == op for call in calls)
    return "once" if count == 1 else "never" if count == 0 else f"{count} times"


def described(call: Row) -> str:
    """all_reduce of the gradient of `head.bias` in line 12."""
    kind, _, name = call.get("what", "").partition(":")
    words = {"grad": "the gradient of ", "param": "the parameter ", "buffer": "the buffer "}
    what = f" of {words[kind]}`{name}`" if kind in words else ""
    line = f" in line {call['line']}" if call.get("line") else ""
    return f"{call['op']}{what}{line}"


def sized(call: Row) -> str:
    shape = "x".join(map(str, call["shape"])) or "1"
    return f"{call['bytes']} bytes ({shape}, {call['dtype'] or 'no tensor'})"
