"""Buckets: the mean, in few large messages, each launched when its gradients are in."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

from shardlab.learn import mistakes, overlapped
from shardlab.learn.exercise import Case, Finding, Look, Row, Rows, Stage, each_step, judging, say
from shardlab.learn.mistakes import Array, close, flat, listed

LAYER = (36 + 6) * 8  # bytes of a layer of ``toys.Skipping``
CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 700}),
    Case("three micro-batches", 2, {"toy": "frozen", "micros": 3, "bucket_bytes": 400}),
    Case("a large parameter", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 200}),
    Case("unused parameters", 2, {"toy": "skipping", "micros": 1, "bucket_bytes": LAYER}),
    Case("unused, two micro-batches", 2, {"toy": "skipping", "micros": 2, "bucket_bytes": 500}),
    Case("many layers", 2, {"toy": "many", "micros": 1, "bucket_bytes": 1000}),
)


def run(at: Stage) -> dict[str, Any]:
    limit = at.options["bucket_bytes"]
    return overlapped.run(at, lambda model: at.submission.BucketDDP(model, limit))


def where_all_are_used(look: Look) -> Look:
    """Elsewhere buckets may leave in finish(), and in any order."""
    return lambda ranks: None if ranks[0]["toy"] == "skipping" else look(ranks)


@each_step
def early(rows: Rows, _step: int) -> Finding | None:
    """More bytes on their way than there were gradients yet."""
    for rank, row in enumerate(rows):
        sent: dict[str, int] = defaultdict(int)  # by micro-batch
        for call in row["calls"]:
            sent[call["mark"]] += call["bytes"]
            if call["in_backward"] and sent[call["mark"]] > call["come"]:
                return say(
                    "launched-early", rank=rank, sent=sent[call["mark"]], come=call["come"],
                    call=mistakes.described(call),
                )  # fmt: skip
    return None


@each_step
def mixed_up(rows: Rows, _step: int) -> Finding | None:
    """One layer's gradient added to another's; or the right numbers in the wrong places."""
    n, own, mean = len(rows), rows[0]["own"], rows[0]["mean"]
    known = [name for name, value in mean.items() if value is not None]
    wrong = [(r, name) for name in known for r in range(n)
             if not close(rows[r]["got"][name], mean[name])]  # fmt: skip
    for r, name in wrong:
        mine = _numbers(own[r], name, mean)
        for s, other in itertools.product(range(n), mean):
            theirs = _numbers(own[s], other, mean)
            if s == r or other == name or len(theirs) != len(mine) or not any(theirs):
                continue
            if close(rows[r]["got"][name], (mine + theirs) / n):
                return say("order-differs", rank=r, name=name, other=s, theirs=other)
    means = sorted(flat([mean[name] for name in known]))
    if wrong and all(
        close(sorted(flat([row["got"][name] or [] for name in known])), means) for row in rows
    ):
        return say("wrong-place", names=listed(dict.fromkeys(name for _, name in wrong)))
    return None


def _numbers(own: Row, name: str, mean: Row) -> Array:
    """A rank's own gradient; zeros where it has none."""
    return flat(own[name]) if own[name] is not None else 0 * flat(mean[name] or [])


@each_step
def forgotten(rows: Rows, _step: int) -> Finding | None:
    own = rows[0]["own"]
    names = [name for name, value in own[0].items() if value is not None]
    kept = [n for n in names if all(close(row["got"][n], own[r][n]) for r, row in enumerate(rows))]
    sent = sum(c["bytes"] for c in rows[0]["calls"])
    if not kept or not sent:
        return None
    if len(kept) == len(names):
        return say("not-copied-back", sent=sent)
    unused = sorted({name for each in own for name, g in each.items() if g is None})
    if unused:
        return say("bucket-forgotten/unused", names=listed(kept), unused=listed(unused))
    return say("bucket-forgotten", names=listed(kept))


def messages(ranks: Rows) -> Finding | None:
    """Neither too large nor too many: two buckets in a row hold more than one may."""
    sizes, limit = ranks[0]["sizes"], ranks[0]["bucket_bytes"]
    psi = sum(sizes.values())
    for row in ranks[0]["steps"]:
        sent = [c["bytes"] for c in row["calls"]]
        if max(sent, default=0) > max(limit, *sizes.values()):
            return say("bucket-too-large", largest=max(sent), limit=limit)
        if len(sent) > 2 * math.ceil(psi / limit) + 1 and limit > max(sizes.values()):
            return say("too-many-messages", messages=len(sent), psi=psi, limit=limit)
        if sum(sent) > psi + 64:
            return say("too-many-bytes/buckets", sent=sum(sent), psi=psi)
    return None


def forward_order(ranks: Rows) -> Finding | None:
    total = len(ranks[0]["sizes"])
    for row in ranks[0]["steps"]:
        if len(row["calls"]) > 1 and row["calls"][0]["ready"] == total:
            return say("forward-order", messages=len(row["calls"]), total=total)
    return None


judge = judging(
    overlapped.weights,
    overlapped.every_microbatch,
    mistakes.not_waited,
    overlapped.touched,
    where_all_are_used(early),
    mixed_up,
    forgotten,
    overlapped.gradients,
    messages,
    where_all_are_used(overlapped.overlap),
    where_all_are_used(forward_order),
    only_first=True,
)
