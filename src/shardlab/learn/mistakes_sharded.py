"""Known mistakes of the ZeRO exercises, from the evidence of ``toys.train_sharded``; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from shardlab.learn import mistakes
from shardlab.learn.exercise import Evidence, Finding, Look, Row, Rows, each_step, judging, say
from shardlab.learn.mistakes import Array, flat
from shardlab.learn.toys import RATE

ITEM = 8  # bytes of an element: everything is float64
REDUCES = (
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "reduce",
    "all_reduce",
)  # fmt: skip
CLOSE = 1e-7  # of the largest: an update loses some digits of its gradient


def judging_sharded(
    psis: Callable[[int], int], formula: str, memory: Look | None = None
) -> Callable[[Evidence], list[Finding]]:
    """A ``judge`` that looks at the result, then at what each rank holds, then at what was sent: at
    most ``psis(k)`` times Ψ(n-1)/n with k micro-batches. It reports one thing at a time: the first
    that says what is wrong, not only that something is. Without ``memory``, gradients may be sent
    in step(), too."""

    @each_step
    def sent(rows: Rows, step: int) -> Finding | None:
        return _sent(rows, step, psis(rows[0]["micros"]), formula)

    in_backward = [after_backward] if memory else []
    looks = (mistakes.not_waited, *in_backward, own_optimizer, left, update, held, sent)

    def judge(evidence: Evidence) -> list[Finding]:
        trained = {case: ranks for case, ranks in evidence.items() if "steps" in ranks[0]}
        weighed = {case: ranks for case, ranks in evidence.items() if case not in trained}
        findings = judging(*looks)(trained)
        if memory:
            findings += judging(memory)(weighed)
        telling = [f for f in findings if f.cause != "wrong-update"]
        return (telling or findings)[:1]

    return judge


# ------------------------------------------------------------------ the update


def update(ranks: Rows) -> Finding | None:
    """Parameters after each step against one process; for SGD, which gradient was used instead."""
    max_norm, made = ranks[0].get("max_norm"), max(rank["made"] for rank in ranks)
    tolerance = 1e-9 if max_norm is None else 1e-5

    @each_step
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

    return look(ranks)


def _off(whose: str, rows: Rows, step: int) -> Finding:
    off, name, rank = max(
        (mistakes.error(row["got"][name], want), name, r)
        for r, row in enumerate(rows)
        for name, want in row["want"].items()
    )
    return say("wrong-update", whose=whose, step=step, name=name, rank=rank, error=off)


def explained(rows: Rows, step: int, max_norm: float | None) -> Finding:
    """Which gradient a wrong step of SGD used, and so which mistake it is."""
    n, mean = len(rows), _whole(rows[0]["mean"])
    right = mean if max_norm is None else _clipped(mean, max_norm)
    tolerance = CLOSE * abs(mean).max()
    # What SGD subtracted: (ranks, elements)
    used = np.array([_whole(r["before"]) - _whole(r["got"], r["want"]) for r in rows]) / RATE
    unchanged = abs(used) <= tolerance

    def is_one_of(gradients: Iterable[Array]) -> bool:
        """Each element was updated by one of these, or not at all."""
        found = [abs(used - gradient) <= tolerance for gradient in gradients]
        return bool(np.logical_or.reduce([unchanged, *found]).all())

    if unchanged.all():
        return say("not-updated")
    if is_one_of([right]):
        return _partly(abs(used - right) <= tolerance)
    if step > 0:
        return say("not-reset/zero", step=step)
    for key, gradients in wrong_gradients(rows[0], mean, max_norm).items():
        if is_one_of(gradients):
            return say(key, n=n)
    if max_norm is not None and (local := _local_norm(used, mean, right)):
        return local
    factor = mistakes.ratio(used, np.tile(right, n))
    if factor is not None:
        return say("scaled/zero", factor=factor)
    # Most values are right ones in wrong places.
    known = abs(used[:, :, None] - right).min(axis=2) <= tolerance
    if (known.mean(axis=1) > 0.8).all():
        return say("wrong-shard")
    return _off("the", rows, step)


def wrong_gradients(row: Row, mean: Array, max_norm: float | None) -> dict[str, list[Array]]:
    """What an update may have used in place of the right gradient, by the mistake."""
    own = [_whole(gradients) for gradients in row["own"]]
    found = {"not-averaged/zero": [mean * len(own)], "averaged-twice/zero": [mean / len(own)]}
    if row["micros"] > 1:
        found["microbatches-lost"] = [_whole(row["last"]) / row["micros"]]
    if max_norm is not None:
        found["not-clipped"] = [mean]
        clipped = [_clipped(each, max_norm) for each in own]
        found["clipped-before-averaging"] = [np.mean(clipped, axis=0)]
    return found | {"not-communicated/zero": own}


def _whole(tensors: Row, names: Iterable[str] | None = None) -> Array:
    """All elements, (elements,), or those of the named ones."""
    return flat([tensors[name] for name in sorted(names or tensors)])


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


@each_step
def left(rows: Rows, step: int) -> Finding | None:
    for rank, row in enumerate(rows):
        if row["left"] and step > 0:
            return say("not-reset/zero", step=step)
        if row["left"]:
            return say("grad-kept", rank=rank, names=mistakes.listed(row["left"]))
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


def _sent(rows: Rows, step: int, psis: int, formula: str) -> Finding | None:
    """What each rank sent in a step; padding and a norm are allowed."""
    n, sizes = len(rows), [len(flat(want)) for want in rows[0]["want"].values()]
    psi = sum(sizes) * ITEM
    should = psis * psi * (n - 1) / n
    for rank, row in enumerate(rows):
        total = mistakes.wire_bytes(row["calls"], n)
        if total <= should + ITEM * n * (len(sizes) * psis + 8):
            continue
        ops = sorted({c["op"] for c in row["calls"]})
        advice = ". An all_reduce gives every rank what only one needs: twice the bytes"
        return say(
            "too-many-bytes/zero", step=step, rank=rank, sent=total, ops=", ".join(ops),
            formula=formula.format(k=row["micros"]), should=should, psi=psi,
            advice=advice if "all_reduce" in ops else "",
        )  # fmt: skip
    return None


@each_step
def after_backward(rows: Rows, _step: int) -> Finding | None:
    """Gradients that are reduced in step(), where none was during backward."""
    for rank, row in enumerate(rows):
        calls = [c for c in row["calls"] if c["op"] in REDUCES]
        late = [c for c in calls if c["mark"] == "step"]
        if late and not any(c["in_backward"] for c in calls):
            call = mistakes.described(late[0])
            return say("after-backward/zero", rank=rank, late=len(late), call=call)
    return None
