"""Known mistakes of the ZeRO exercises, from the evidence of ``toys.train_sharded``; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardlab.learn import mistakes
from shardlab.learn.exercise import Evidence, Finding, judging, say
from shardlab.learn.mistakes import Row, Rows, flat
from shardlab.learn.toys import RATE

Array = np.ndarray[Any, Any]
ITEM = 8  # bytes of an element: everything is float64
REDUCES = (
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce",
    "all_reduce",
)  # fmt: skip
CLOSE = 1e-7  # of the largest: an update loses some digits of its gradient


def judge(
    evidence: Evidence,
    psis: Callable[[int], int],
    formula: str,
    memory: Callable[[Rows], Finding | None] | None = None,
) -> list[Finding]:
    """Result first, then where it is held, then what was sent: at most ``psis(k)`` times Ψ(n-1)/n
    with k micro-batches. One thing at a time: the first that says what is wrong, not only that
    something is. Without ``memory`` gradients may be sent in step(), too."""

    def look(case: str, ranks: Rows) -> Finding | None:
        if memory and case == "memory":
            return memory(ranks)
        return (
            mistakes.not_waited(mistakes.all_calls(ranks))
            or (after_backward(ranks) if memory else None)
            or own_optimizer(ranks)
            or left(ranks)
            or update(ranks)
            or held(ranks)
            or sent(ranks, psis, formula)
        )

    findings = judging(look)(evidence)
    telling = [f for f in findings if f.cause != "wrong-update"]
    return (telling or findings)[:1]


# ------------------------------------------------------------------ the update


def update(ranks: Rows) -> Finding | None:
    """Parameters after each step against one process; of SGD's, which gradient was used instead."""
    max_norm, made = ranks[0]["max_norm"], max(rank["made"] for rank in ranks)
    tolerance = 1e-9 if max_norm is None else 1e-5

    def look(rows: Rows, step: int) -> Finding | None:
        for r, row in enumerate(rows):
            if missing := [name for name in row["want"] if name not in row["got"]]:
                return say("missing-parameter", rank=r, names=mistakes.listed(missing))
            for name, want in row["want"].items():
                sizes = len(flat(row["got"][name])), len(flat(want))
                if sizes[0] != sizes[1]:
                    return say("wrong-size", name=name, got=sizes[0], rank=r, want=sizes[1])
        if all(
            mistakes.close(row["got"][name], want, tolerance)
            for row in rows
            for name, want in row["want"].items()
        ):
            return None
        if ranks[0]["kind"] == "sgd":
            return explained(rows, step, max_norm)
        if step > 0 and made > 1:
            return say("state-lost", step=step, made=made)
        return _off("AdamW's", rows, step)

    return mistakes.first(ranks, look)


def _off(whose: str, rows: Rows, step: int) -> Finding:
    off, name, rank = max(
        (mistakes.error(row["got"][name], want), name, r)
        for r, row in enumerate(rows)
        for name, want in row["want"].items()
    )
    return say("wrong-update", whose=whose, step=step, name=name, rank=rank, error=off)


def explained(rows: Rows, step: int, max_norm: float | None) -> Finding:
    """Which gradient a wrong step of SGD used, and so which mistake it is."""
    n, right = len(rows), "mean" if max_norm is None else "clipped"
    maybe = candidates(rows[0], max_norm)
    tolerance = CLOSE * abs(maybe["mean"]).max()
    # What SGD subtracted: (ranks, elements)
    used = np.array([_whole(r["before"]) - _whole(r["got"], r["want"]) for r in rows]) / RATE

    def where(*names: str) -> Array:
        """The elements that were updated by one of these gradients."""
        known = [abs(used - maybe[n]) <= tolerance for n in names if n in maybe]
        return np.logical_or.reduce(known) if known else np.zeros_like(used, dtype=bool)

    def each_is(*names: str) -> bool:
        return bool(where(*names).all())

    if each_is("unchanged"):
        return say("not-updated")
    if each_is(right, "unchanged"):
        return _partly(where(right))
    if step > 0:
        return say("not-reset/zero", step=step)
    if each_is("sum", "unchanged"):
        return say("not-averaged/zero", n=n)
    if each_is("mean/n", "unchanged"):
        return say("averaged-twice/zero", n=n)
    if each_is("last micro-batch", "unchanged"):
        return say("microbatches-lost")
    if max_norm is not None and each_is("mean"):
        return say("not-clipped")
    if max_norm is not None and each_is("clipped first"):
        return say("clipped-before-averaging")
    if max_norm is not None and (local := _local_norm(used, maybe["mean"], maybe["clipped"])):
        return local
    if each_is(*(f"own {r}" for r in range(n)), "unchanged"):
        return say("not-communicated/zero")
    factor = mistakes.ratio(used.tolist(), [maybe[right].tolist()] * n)
    if factor is not None:
        return say("scaled/zero", factor=factor)
    # Most values are right ones in wrong places.
    known = abs(used[:, :, None] - maybe[right]).min(axis=2) <= tolerance
    if (known.mean(axis=1) > 0.8).all():
        return say("wrong-shard")
    return _off("the", rows, step)


def candidates(row: Row, max_norm: float | None) -> dict[str, Array]:
    """What an update may have used in place of the mean gradient, by the mistake's name."""
    own = [_whole(gradients) for gradients in row["own"]]
    mean, n = _whole(row["mean"]), len(own)
    found = {"mean": mean, "sum": mean * n, "mean/n": mean / n, "unchanged": 0 * mean}
    found |= {f"own {r}": gradient for r, gradient in enumerate(own)}
    if row["micros"] > 1:
        found["last micro-batch"] = _whole(row["last"]) / row["micros"]
    if max_norm is not None:
        found["clipped first"] = np.mean([_clipped(each, max_norm) for each in own], axis=0)
        found["clipped"] = _clipped(mean, max_norm)
    return found


def _whole(tensors: Row, names: Iterable[str] | None = None) -> Array:
    """All elements, (elements,), or those of the named ones."""
    return np.array(flat([tensors[name] for name in sorted(names or tensors)]))


def _clipped(gradient: Array, max_norm: float) -> Array:
    return gradient * min(1.0, max_norm / (float(np.linalg.norm(gradient)) + 1e-6))


def _partly(updated: Array) -> Finding:
    """Updated where it was, but not everywhere."""
    n, size = updated.shape
    if lost := size - updated.any(axis=0).sum():
        return say("rest-forgotten", lost=lost, size=size, n=n)
    return say("not-gathered", done=updated.sum(axis=1), size=size)


def _local_norm(used: Array, mean: Array, clipped: Array) -> Finding | None:
    """Each rank has multiplied the mean by a number of its own."""
    large = abs(mean) > 1e-3 * abs(mean).max()
    factors = np.unique((used[:, large] / mean[large]).round(6))
    if len(factors) > len(used):
        return None
    shown = ", ".join(f"{f:.4g}" for f in factors)
    return say("local-norm", factors=shown, should=(clipped[large] / mean[large])[0])


# ------------------------------------------------------------------ what is held


def own_optimizer(ranks: Rows) -> Finding | None:
    return None if all(rank["made"] for rank in ranks) else say("own-optimizer")


def left(ranks: Rows) -> Finding | None:
    for r, rank in enumerate(ranks):
        for step, row in enumerate(rank["steps"]):
            if row["left"] and step > 0:
                return say("not-reset/zero", step=step)
            if row["left"]:
                return say("grad-kept", rank=r, names=mistakes.listed(row["left"]))
    return None


def held(ranks: Rows) -> Finding | None:
    """A rank may own one n-th, give or take a parameter and the padding."""
    sizes = ranks[0]["sizes"].values()
    psi, share = sum(sizes), sum(sizes) / len(ranks)
    for r, rank in enumerate(ranks):
        owned = max(rank["held"], rank["state"] / 2)
        if owned > share + max(sizes) + len(sizes):
            state = f", and {rank['state']} of state" if rank["state"] else ""
            return say(
                "not-sharded", rank=r, owned=owned, psi=psi, state=state, share=math.ceil(share)
            )
    return None


# ------------------------------------------------------------------ what was sent


def sent(ranks: Rows, psis: Callable[[int], int], formula: str) -> Finding | None:
    """By each rank in a step; padding and a norm are allowed."""
    n, psi = len(ranks), sum(ranks[0]["sizes"].values()) * ITEM
    for r, rank in enumerate(ranks):
        for step, row in enumerate(rank["steps"]):
            times = psis(row["micros"])
            should = times * psi * (n - 1) / n
            total = sum(mistakes.wire_bytes(call, n) for call in row["calls"])
            if total <= should + ITEM * n * (len(ranks[0]["sizes"]) * times + 8):
                continue
            ops = sorted({c["op"] for c in row["calls"]})
            advice = ". An all_reduce gives every rank what only one needs: twice the bytes"
            return say(
                "too-many-bytes/zero", step=step, rank=r, sent=total, ops=", ".join(ops),
                formula=formula.format(k=row["micros"]), should=should, psi=psi,
                advice=advice if "all_reduce" in ops else "",
            )  # fmt: skip
    return None


def after_backward(ranks: Rows) -> Finding | None:
    """Gradients that are reduced in step(), where none was during backward."""
    for r, rank in enumerate(ranks):
        for row in rank["steps"]:
            calls = [c for c in row["calls"] if c["op"] in REDUCES]
            late = [c for c in calls if c["mark"] == "step"]
            if late and not any(c["in_backward"] for c in calls):
                call = mistakes.described(late[0])
                return say("after-backward/zero", rank=r, late=len(late), call=call)
    return None
