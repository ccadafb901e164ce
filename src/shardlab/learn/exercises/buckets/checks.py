"""Buckets: the mean, in few large messages, each launched when its gradients are in."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, overlapped
from shardlab.learn.exercise import Case, Finding, judging, say
from shardlab.learn.mistakes import Row, Rows, flat, listed, same
from shardlab.learn.spy import Spy

LAYER = (36 + 6) * 8  # bytes of a layer of ``toys.Skipping``
CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 700}),
    Case("three micro-batches", 2, {"toy": "frozen", "micros": 3, "bucket_bytes": 400}),
    Case("a large parameter", 2, {"toy": "deep", "micros": 1, "bucket_bytes": 200}),
    Case("unused parameters", 2, {"toy": "skipping", "micros": 1, "bucket_bytes": LAYER}),
    Case("unused, two micro-batches", 2, {"toy": "skipping", "micros": 2, "bucket_bytes": 500}),
    Case("many layers", 2, {"toy": "many", "micros": 1, "bucket_bytes": 1000}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    limit = case.options["bucket_bytes"]
    evidence = overlapped.run(case, rank, spy, lambda model: submission.BucketDDP(model, limit))
    return evidence | {"bucket_bytes": limit, "all_used": case.options["toy"] != "skipping"}


def look(_case: str, ranks: Rows) -> Finding | None:
    all_used = ranks[0]["all_used"]  # else buckets may leave in finish(), and in any order
    return (
        mistakes.first(ranks, overlapped.weights)
        or mistakes.first(ranks, overlapped.every_microbatch)
        or mistakes.first(ranks, overlapped.waits)
        or (_early(ranks) if all_used else None)
        or mistakes.first(ranks, _mixed_up)
        or mistakes.first(ranks, _forgotten)
        or mistakes.first(ranks, overlapped.gradients)
        or _messages(ranks)
        or (mistakes.first(ranks, overlapped.overlap) if all_used else None)
        or (_order(ranks) if all_used else None)
    )


judge = judging(look, only_first=True)


def _early(ranks: Rows) -> Finding | None:
    """More bytes on their way than there were gradients yet."""
    for rank, steps in enumerate(each["steps"] for each in ranks):
        for row in steps:
            come = sent = 0
            for kind, value in row["events"]:
                call = row["calls"][value] if kind == "call" else None
                if kind == "mark":
                    come = sent = 0
                elif kind == "ready":
                    come += ranks[0]["sizes"][value]
                elif call and call["in_backward"]:
                    sent += call["bytes"]
                    if sent > come:
                        name = mistakes.described(call)
                        return say("launched-early", rank=rank, sent=sent, come=come, call=name)
    return None


def _mixed_up(rows: Rows, _step: int) -> Finding | None:
    """One layer's gradient added to another's; or the right numbers in the wrong places."""
    n, own, mean = len(rows), rows[0]["own"], rows[0]["mean"]
    known = [name for name, value in mean.items() if value is not None]
    wrong = [(r, name) for name in known for r in range(n)
             if not same(rows[r]["got"][name], mean[name])]  # fmt: skip
    for r, name in wrong:
        mine = _numbers(own[r], name, mean)
        for s, other in itertools.product(range(n), mean):
            theirs = _numbers(own[s], other, mean)
            if s == r or other == name or len(theirs) != len(mine) or not any(theirs):
                continue
            if same(rows[r]["got"][name], [(a + b) / n for a, b in zip(mine, theirs, strict=True)]):
                return say("order-differs", rank=r, name=name, other=s, theirs=other)
    means = sorted(flat([mean[name] for name in known]))
    if wrong and all(
        same(sorted(flat([row["got"][name] or [] for name in known])), means) for row in rows
    ):
        return say("wrong-place", names=listed(dict.fromkeys(name for _, name in wrong)))
    return None


def _numbers(own: Row, name: str, mean: Row) -> list[float]:
    """A rank's own gradient; zeros where it has none."""
    return flat(own[name]) if own[name] is not None else [0.0] * len(flat(mean[name] or []))


def _forgotten(rows: Rows, _step: int) -> Finding | None:
    own = rows[0]["own"]
    names = [name for name, value in own[0].items() if value is not None]
    kept = [n for n in names if all(same(row["got"][n], own[r][n]) for r, row in enumerate(rows))]
    sent = sum(c["bytes"] for c in rows[0]["calls"])
    if not kept or not sent:
        return None
    if len(kept) == len(names):
        return say("not-copied-back", sent=sent)
    unused = sorted({name for each in own for name, g in each.items() if g is None})
    if unused:
        return say("bucket-forgotten/unused", names=listed(kept), unused=listed(unused))
    return say("bucket-forgotten", names=listed(kept))


def _messages(ranks: Rows) -> Finding | None:
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


def _order(ranks: Rows) -> Finding | None:
    total = len(ranks[0]["sizes"])
    for row in ranks[0]["steps"]:
        if len(row["calls"]) > 1 and row["calls"][0]["ready"] == total:
            return say("forward-order", messages=len(row["calls"]), total=total)
    return None
