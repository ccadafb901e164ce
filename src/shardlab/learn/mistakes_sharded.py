"""Known mistakes of the ZeRO exercises, from the evidence of ``sharded.train``. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.learn import mistakes
from shardlab.learn.exercise import Finding
from shardlab.learn.sharded import RATE

Ranks = Sequence[Mapping[str, Any]]  # each rank's evidence of one case
ITEM = 8  # bytes of an element: everything is float64
REDUCES = {
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "reduce",
    "all_reduce",
}
CLOSE = 1e-7  # of the largest: an update loses some digits of its gradient


def judge(case: str, ranks: Ranks) -> list[Finding]:
    """Result first, then where it is held. What was sent depends on the stage."""
    return (
        own_optimizer(case, ranks) or left(case, ranks) or update(case, ranks) or held(case, ranks)
    )


def most_telling(findings: list[Finding]) -> list[Finding]:
    """One thing at a time: the first that says what is wrong, not only that something is."""
    telling = [f for f in findings if f.cause != "wrong-update"]
    return (telling or findings)[:1]


# ------------------------------------------------------------------ the update


def update(case: str, ranks: Ranks) -> list[Finding]:
    """Parameters after each step against one process; of SGD's, which gradient was used instead."""
    for step in range(len(ranks[0]["steps"])):
        rows = [rank["steps"][step] for rank in ranks]
        tolerance = 1e-9 if ranks[0]["max_norm"] is None else 1e-5
        if all(
            mistakes.close(row["got"].get(name), want, tolerance)
            for row in rows
            for name, want in row["want"].items()
        ):
            continue
        for r, row in enumerate(rows):
            if missing := [n for n in row["want"] if n not in row["got"]]:
                message = (
                    f"rank {r} has no {mistakes.listed(missing)}: all parameters, by their names"
                )
                return [Finding("missing-parameter", message, case)]
            for name, want in row["want"].items():
                sizes = len(mistakes.flat(row["got"][name])), len(mistakes.flat(want))
                if sizes[0] != sizes[1]:
                    message = f"`{name}` has {sizes[0]} elements on rank {r}, not {sizes[1]}"
                    return [Finding("wrong-size", f"{message}: whole, without padding", case)]
        if ranks[0]["kind"] == "sgd":
            return [explained(case, rows, step, ranks[0]["max_norm"])]
        return [adam(case, rows, step, ranks)]
    return []


def adam(case: str, rows: Sequence[Mapping[str, Any]], step: int, ranks: Ranks) -> Finding:
    if step > 0 and max(rank["made"] for rank in ranks) > 1:
        message = (
            f"AdamW is right in the first step and wrong in step {step}: make_optimizer was called "
            f"{ranks[0]['made']} times, and a new optimizer has lost its moments. Build it once"
        )
        return Finding("state-lost", message, case)
    return Finding("wrong-update", _off("AdamW's", rows, step), case)


def _off(whose: str, rows: Sequence[Mapping[str, Any]], step: int) -> str:
    errors = {
        (r, name): mistakes.error(row["got"][name], want)
        for r, row in enumerate(rows)
        for name, want in row["want"].items()
    }
    rank, name = max(errors, key=lambda key: errors[key])
    return (
        f"{whose} parameters differ from one process's in step {step}, most of all `{name}` on "
        f"rank {rank}: by {errors[rank, name]:.2g}"
    )


def used_gradient(row: Mapping[str, Any]) -> list[float]:
    """What SGD subtracted, element by element."""
    return [
        (b - a) / RATE
        for name in row["want"]
        for b, a in zip(
            mistakes.flat(row["before"][name]), mistakes.flat(row["got"][name]), strict=True
        )
    ]


def labels(used: Sequence[float], maybe: Mapping[str, Sequence[float]]) -> list[set[str]]:
    """For each element, the names of the gradients that it may have been updated by."""
    tolerance = CLOSE * max(map(abs, maybe["mean"]))
    named = {**maybe, "unchanged": [0.0] * len(used)}
    return [
        {name for name, values in named.items() if abs(values[i] - x) <= tolerance}
        for i, x in enumerate(used)
    ]


def explained(
    case: str, rows: Sequence[Mapping[str, Any]], step: int, max_norm: float | None
) -> Finding:
    """Which gradient a wrong step of SGD used, and so which mistake it is."""
    n, right = len(rows), "mean" if max_norm is None else "clipped"
    used = [used_gradient(row) for row in rows]
    found = [labels(u, row["maybe"]) for u, row in zip(used, rows, strict=True)]
    elements = [s for each in found for s in each]

    def each_is(*names: str) -> bool:
        return all(s & set(names) for s in elements)

    if each_is("unchanged"):
        return Finding("not-updated", "no parameter changed in step(): write into p.data", case)
    if each_is(right, "unchanged"):
        return _partly(case, found, right)
    if step > 0:
        return _not_reset(case, step)
    if each_is("sum", "unchanged"):
        message = (
            f"the update used exactly {n}.0x the mean gradient on {n} ranks: the reduction sums; "
            "divide by the world size"
        )
        return Finding("not-averaged", message, case)
    if each_is("mean/n", "unchanged"):
        message = f"the update used 1/{n} of the mean gradient: divided by the world size twice"
        return Finding("averaged-twice", message, case)
    if each_is("last micro-batch", "unchanged"):
        message = (
            "the update used the last micro-batch's gradient alone: those before it were "
            "overwritten. Add each to what the share has already"
        )
        return Finding("microbatches-lost", message, case)
    if max_norm is not None and (clip := _clipping(case, used, rows[0], each_is)):
        return clip
    if each_is(*(f"own {r}" for r in range(n)), "unchanged"):
        message = (
            "the update used a rank's own gradient, not the mean: gradients were not communicated, "
            "or their sum was not used"
        )
        return Finding("not-communicated", message, case)
    factor = mistakes.ratio([x for u in used for x in u], rows[0]["maybe"][right] * n)
    if factor is not None:
        message = (
            f"the update used exactly {factor:.4g}x the gradient that one process has: something "
            "is multiplied or divided that must not be"
        )
        return Finding("scaled", message, case)
    if _moved(used, rows[0]["maybe"][right]):
        message = (
            "the parameters were updated by the mean gradient of *other* elements: the share of "
            "the gradients is not the same slice as the share of the parameters"
        )
        return Finding("wrong-shard", message, case)
    return Finding("wrong-update", _off("the", rows, step), case)


def _not_reset(case: str, step: int) -> Finding:
    message = (
        f"the first step is right, step {step} is not: what the last step left (gradients, sums, "
        "counters, handles) was not set back"
    )
    return Finding("not-reset", message, case)


def _partly(case: str, found: list[list[set[str]]], right: str) -> Finding:
    """Updated where it was, but not everywhere."""
    size = len(found[0])
    nowhere = [i for i in range(size) if all(right not in each[i] for each in found)]
    if nowhere:
        message = (
            f"{len(nowhere)} of {size} elements changed on no rank: they are in nobody's share. "
            f"What {len(found)} does not divide has a rest: pad, or let one share be larger"
        )
        return Finding("rest-forgotten", message, case)
    done = [sum(right in s for s in each) for each in found]
    message = (
        f"rank 0 has updated {done[0]} of {size} elements, rank 1 {done[1]}: each its own share, "
        "and nobody has told the others. Gather the shares after the update"
    )
    return Finding("not-gathered", message, case)


def _clipping(
    case: str, used: list[list[float]], row: Mapping[str, Any], each_is: Any
) -> Finding | None:
    if each_is("mean"):
        return Finding("not-clipped", "max_norm is set, and the gradient was not clipped", case)
    if each_is("clipped first"):
        message = (
            "each rank's own gradient was clipped before they were averaged: clip the mean, by the "
            "mean's norm"
        )
        return Finding("clipped-before-averaging", message, case)
    mean, clipped = row["maybe"]["mean"], row["maybe"]["clipped"]
    large = [i for i, m in enumerate(mean) if abs(m) > 1e-3 * max(map(abs, mean))]
    factors = sorted({round(u[i] / mean[i], 6) for u in used for i in large})
    if len(factors) > len(used):
        return None
    should = clipped[large[0]] / mean[large[0]]
    message = (
        f"the gradient was multiplied by {', '.join(f'{f:.4g}' for f in factors)}; the whole "
        f"gradient's norm asks for {should:.4g}, the same everywhere. A share's norm is not the "
        "gradient's: add up the squares of all shares (all_reduce) before the root"
    )
    return Finding("local-norm", message, case)


def _moved(used: list[list[float]], right: Sequence[float]) -> bool:
    """Most values are right ones in wrong places."""
    tolerance = CLOSE * max(map(abs, right))
    known = sorted(right)

    def is_known(x: float) -> bool:
        return any(abs(x - k) <= tolerance for k in known)

    return all(sum(map(is_known, each)) > 0.8 * len(each) for each in used)


# ------------------------------------------------------------------ what is held


def own_optimizer(case: str, ranks: Ranks) -> list[Finding]:
    if all(rank["made"] for rank in ranks):
        return []
    message = "make_optimizer was not called: the optimizer is the one that it gives you"
    return [Finding("own-optimizer", message, case)]


def left(case: str, ranks: Ranks) -> list[Finding]:
    for r, rank in enumerate(ranks):
        for step, row in enumerate(rank["steps"]):
            if row["left"] and step > 0:
                return [_not_reset(case, step)]
            if row["left"]:
                message = (
                    f"after its time there is still a gradient (p.grad) on rank {r}, of "
                    f"{mistakes.listed(row['left'])}: it must be None, for it keeps memory in use, "
                    "and the next backward adds to it"
                )
                return [Finding("grad-kept", message, case)]
    return []


def share(ranks: Ranks) -> float:
    """Elements that a rank may own: one n-th, give or take a parameter and the padding."""
    sizes = ranks[0]["sizes"].values()
    return float(sum(sizes) / len(ranks) + max(sizes) + len(sizes))


def held(case: str, ranks: Ranks) -> list[Finding]:
    psi = sum(ranks[0]["sizes"].values())
    for r, rank in enumerate(ranks):
        owned = max(rank["held"], rank["state"] / 2)
        if owned <= share(ranks):
            continue
        message = (
            f"the optimizer on rank {r} has {owned:.0f} of {psi} elements"
            + (f", and {rank['state']} of state" if rank["state"] else "")
            + f": nothing is sharded. Give it this rank's share, {math.ceil(psi / len(ranks))}"
        )
        return [Finding("not-sharded", message, case)]
    return []


# ------------------------------------------------------------------ what was sent


def sent(case: str, ranks: Ranks, psis: float, formula: str) -> list[Finding]:
    """At most ``psis`` times Ψ(n-1)/n by each rank in a step; padding and a norm are allowed."""
    n, psi = len(ranks), sum(ranks[0]["sizes"].values()) * ITEM
    room = ITEM * n * (len(ranks[0]["sizes"]) * math.ceil(psis) + 8)
    for r, rank in enumerate(ranks):
        for step, row in enumerate(rank["steps"]):
            total = sum(mistakes.wire_bytes(call, n) for call in row["calls"])
            if total <= psis * psi * (n - 1) / n + room:
                continue
            ops = sorted({c["op"] for c in row["calls"]})
            message = (
                f"in step {step} rank {r} sends {total:.0f} bytes ({', '.join(ops)}); {formula} is "
                f"{psis * psi * (n - 1) / n:.0f}, and Ψ {psi}"
            )
            if "all_reduce" in ops:
                message += ". An all_reduce gives every rank what only one needs: twice the bytes"
            return [Finding("too-many-bytes", message, case)]
    return []


def after_backward(case: str, ranks: Ranks) -> list[Finding]:
    """Gradients that are reduced in step(), where none was during backward."""
    for r, rank in enumerate(ranks):
        for row in rank["steps"]:
            calls = [c for c in row["calls"] if c["op"] in REDUCES]
            late = [c for c in calls if c["mark"] == "step"]
            if late and not any(c["in_backward"] for c in calls):
                message = (
                    f"on rank {r} no gradient leaves during backward, {len(late)} in step() "
                    f"({mistakes.described(late[0])}): by then all of them have been there at "
                    "once. Reduce-scatter each from its hook"
                )
                return [Finding("after-backward", message, case)]
    return []
