"""Known mistakes, recognised from evidence: pure functions, each finding with its numbers.

Tensors come as (nested) lists of numbers, by name; ``ranks`` is each rank's evidence of one case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardlab.learn.exercise import Finding

Row = dict[str, Any]
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


# ------------------------------------------------------------------ gradients


def gradients(
    case: str,
    ranks: Sequence[Mapping[str, Any]],
    *,
    got: str = "got",
    want: str = "want",
    own: str = "own",
) -> list[Finding]:
    """Each rank's gradients by name (``got``) against the mean over the ranks (``want``), which
    one process would have; ``own`` is what the rank had before it communicated."""
    n = len(ranks)
    wrong = [
        name
        for name, value in ranks[0][want].items()
        if value is not None and not all(_is(rank[got].get(name), value) for rank in ranks)
    ]
    if not wrong:
        return []
    for name in wrong:
        if missing := [r for r, rank in enumerate(ranks) if rank[got].get(name) is None]:
            return [Finding("no-gradient", _no_gradient(name, missing, ranks, own), case)]
    kept = [
        name for name in wrong if n > 1 and all(_is(k[got][name], k[own].get(name)) for k in ranks)
    ]
    if kept:
        all_of_them = len(kept) == len([v for v in ranks[0][want].values() if v is not None])
        which = "every gradient" if all_of_them else f"the gradient of {listed(kept)}"
        return [
            Finding(
                "not-communicated",
                f"{which} is still the rank's own: rank 0 and rank 1 hold different values, each "
                "that of its own batch. Every gradient must be all-reduced, on every rank",
                case,
            )
        ]
    source = next(
        (
            s
            for s in range(n)
            if n > 1
            and all(_is(k[got][name], ranks[s][own].get(name)) for name in wrong for k in ranks)
        ),
        None,
    )
    if source is not None:
        message = (
            f"every rank ends with rank {source}'s gradients: the other ranks' are "
            "lost. Broadcasting copies; what is asked for is the mean over the ranks"
        )
        return [Finding("not-averaged-but-copied", message, case)]
    if found := _scaled(case, ranks, wrong, got, want):
        return [found]
    differ = [
        name for name in wrong if any(not _is(k[got][name], ranks[0][got][name]) for k in ranks)
    ]
    if differ:
        message = (
            f"the ranks do not agree on the gradient of {listed(differ)}: averaged it must be "
            "the same on every rank, or the copies of the model drift apart"
        )
        return [Finding("ranks-differ", message, case)]
    name = wrong[0]
    message = (
        f"the gradient of {listed(wrong)} is not the mean over the ranks: off by up to "
        f"{error(ranks[0][got][name], ranks[0][want][name]):.2g} from what one process has"
    )
    return [Finding("wrong-gradient", message, case)]


def _is(got: Any, want: Any) -> bool:
    return got is not None and want is not None and close(got, want)


def _no_gradient(
    name: str, missing: list[int], ranks: Sequence[Mapping[str, Any]], own: str
) -> str:
    had = [r for r, rank in enumerate(ranks) if rank[own].get(name) is not None]
    text = f"`{name}` has no gradient (None) on {ranks_text(missing, len(ranks))} after your code"
    if had and set(missing) - set(had):
        text += (
            f", though it has one on {ranks_text(had, len(ranks))}: a rank without one counts as "
            "zeros, and gets the mean like the others"
        )
    return text


def _scaled(
    case: str, ranks: Sequence[Mapping[str, Any]], wrong: list[str], got: str, want: str
) -> Finding | None:
    n = len(ranks)
    values = [k for name in wrong for rank in ranks for k in flat(rank[got][name])]
    if not all(map(math.isfinite, values)):
        return Finding("not-finite", f"the gradient of {listed(wrong)} has nan or inf in it", case)
    if not any(values):
        return Finding("zeroed", f"the gradient of {listed(wrong)} is all zeros", case)
    ratios = [ratio(rank[got][name], rank[want][name]) for name in wrong for rank in ranks]
    first = ratios[0]
    if first is None or not all(
        r is not None and math.isclose(r, first, rel_tol=1e-5) for r in ratios
    ):
        return None
    which = (
        "your gradients are"
        if len(wrong) == len(ranks[0][want])
        else f"{listed(wrong)}: the gradient is"
    )
    rounded = round(first, 4)
    times = f"{rounded:.1f}" if rounded.is_integer() else f"{rounded:g}"
    text = f"{which} exactly {times}x the mean over the ranks on {n} ranks"
    if math.isclose(first, n, rel_tol=1e-5):
        return Finding("not-averaged", f"{text}: all_reduce sums; divide by the world size", case)
    if math.isclose(first, 1 / n, rel_tol=1e-5):
        return Finding("averaged-twice", f"{text}: divided by the world size once too often", case)
    return Finding("scaled", f"{text}: something is multiplied or divided that must not be", case)


# ------------------------------------------------------------------ calls


def select(calls: Iterable[Row], **fields: Any) -> list[Row]:
    """The calls whose fields have these values."""
    return [c for c in calls if all(c[k] == v for k, v in fields.items())]


def wire_bytes(call: Row, world: int) -> float:
    """What each rank sends of it by the best algorithm (Ψ(n-1)/n, twice that for all_reduce)."""
    if call["op"] in ("send", "isend"):
        return float(call["bytes"])
    if call["op"] in ("recv", "irecv", "barrier"):
        return 0.0
    times = 2 if call["op"] == "all_reduce" else 1
    return float(times * call["bytes"] * (world - 1) / world)


def weights_averaged(case: str, ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The famous one: the parameters are averaged, the gradients never. Ranks give the weights
    ``before`` and ``after``, by name, and their ``calls``."""
    for rank in ranks:
        changed = [n for n, v in rank["before"].items() if not close(v, rank["after"][n])]
        whats = [c["what"] for c in rank["calls"]]
        sent = [what.partition(":")[2] for what in whats if what.startswith("param:")]
        if changed or sent:
            message = (
                f"your code communicates or changes the weights ({listed(changed or sent)}): what "
                "must be averaged is each parameter's `.grad`"
            )
            return [Finding("weights-averaged", message, case)]
    return []


def too_many_bytes(case: str, calls: Sequence[Row], world: int, should: float) -> list[Finding]:
    """What a rank sends against what it should; a few bytes to agree on something are fine."""
    sent = sum(wire_bytes(call, world) for call in calls)
    if sent <= 1.05 * should + 256:
        return []
    ops = ", ".join(sorted({call["op"] for call in calls}))
    message = (
        f"each rank sends {sent:.0f} bytes ({ops}) on {world} ranks, where {should:.0f} are "
        f"enough: {sent / should:.1f} times as many"
    )
    return [Finding("too-many-bytes", message, case)]


def not_by_hand(case: str, calls_by_rank: Sequence[Sequence[Row]]) -> list[Finding]:
    """The result is right, but somebody else's code communicated."""
    if any(calls_by_rank):
        return []
    message = "the result is right, but your file calls no collective: write it by hand"
    return [Finding("not-by-hand", message, case)]


def not_waited(case: str, calls_by_rank: Sequence[Sequence[Row]]) -> list[Finding]:
    """Asynchronous calls that nobody waited for: their result may be used before it is there."""
    for rank, calls in enumerate(calls_by_rank):
        lost = [c for c in calls if c["is_async"] and not c["waited"]]
        if lost:
            message = (
                f"{len(lost)} of {len([c for c in calls if c['is_async']])} asynchronous calls on "
                f"rank {rank} were never waited for (the first: {described(lost[0])}): without "
                "wait() the result is whatever has arrived by then"
            )
            return [Finding("not-waited", message, case)]
    return []


def calls_differ(case: str, calls_by_rank: Sequence[Sequence[Row]]) -> list[Finding]:
    """Collectives must be the same on every rank: same order, same sizes."""
    for rank, calls in enumerate(calls_by_rank[1:], start=1):
        text = difference(calls_by_rank[0], calls, 0, rank)
        if text:
            return [Finding("calls-differ", text, case)]
    return []


def difference(a: Sequence[Row], b: Sequence[Row], rank_a: int, rank_b: int) -> str:
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


def absent(a: Sequence[Row], b: Sequence[Row], rank_a: int, rank_b: int) -> str:
    """Which parameter one rank communicates and the other does not, if that is it."""
    x, y = Counter(c["what"] for c in a if c["what"]), Counter(c["what"] for c in b if c["what"])
    for more, less, lacking in ((x, y, rank_b), (y, x, rank_a)):
        for what in more - less:
            kind, _, name = what.partition(":")
            if kind == "grad":
                return f": the parameter `{name}` has no gradient on rank {lacking}"
            return f": rank {lacking} leaves out `{name}`"
    return ""


def times(calls: Sequence[Row], op: str) -> str:
    count = len(select(calls, op=op))
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
