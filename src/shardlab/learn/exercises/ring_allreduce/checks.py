"""Ring all-reduce: every rank's values counted once, in place, with 2(n-1) chunks sent per rank."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from shardlab.learn import mistakes
from shardlab.learn.exercise import Case, Finding, Row, Rows, Stage, each_step, judging, say

ODD = {"shapes": [[7], [2, 4]], "dtypes": ["float64", "int64"]}
CASES = (
    Case("three ranks", 3, {"shapes": [[12], [3, 4]], "dtypes": ["float64", "float32"]}),
    Case("sizes that 3 does not divide", 3, ODD),
    Case("fewer elements than ranks", 3, {"shapes": [[2], [1]], "dtypes": ["float64"]}),
    Case("two ranks", 2, {"shapes": [[5]], "dtypes": ["float64"]}),
)
BASE = 1000  # rank r holds BASE**r everywhere: the sum's digits say how often each was counted
ALLOWED = ("send", "recv", "isend", "irecv")


def run(at: Stage) -> dict[str, Any]:
    """The evidence of each tensor is a step's."""
    rows = []
    for dtype, shape in itertools.product(at.options["dtypes"], at.options["shapes"]):
        first = len(at.spy.calls)
        counted = torch.full(shape, BASE**at.rank, dtype=getattr(torch, dtype))
        at.submission.ring_all_reduce(counted)
        calls = at.spy.calls[first:]
        everybody = [values(shape, dtype, r) for r in range(at.world)]
        got = everybody[at.rank].clone()
        at.submission.ring_all_reduce(got)
        rows.append(
            {
                "counted": counted.flatten(),
                "got": got.flatten(),
                "want": torch.stack(everybody).sum(0).flatten(),
                "calls": calls,
                "sends": [call for call in calls if call["op"] in ("send", "isend")],
                "itemsize": counted.element_size(),
                "label": f"{'x'.join(map(str, shape))} {dtype}",
            }
        )
    return {"steps": rows}


def values(shape: list[int], dtype: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    numbers = 100 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return numbers.to(getattr(torch, dtype))


def collective_used(ranks: Rows) -> Finding | None:
    ops = {c["op"] for calls in mistakes.all_calls(ranks) for c in calls}
    used = sorted(ops - set(ALLOWED))
    return say("collective-used", names=mistakes.listed(used)) if used else None


def counts(value: float, world: int) -> list[int] | None:
    """How often each rank was counted in an element of ``BASE**rank``; None: not a count at all."""
    if not math.isfinite(value) or value < 0 or value != int(value) or value >= BASE**world:
        return None
    return [int(value) // BASE**r % BASE for r in range(world)]


@each_step
def counted(rows: Rows, _step: int) -> Finding | None:
    n = len(rows)
    for rank, row in enumerate(rows):
        found = [counts(x, n) for x in row["counted"]]
        wrong = [i for i, count in enumerate(found) if count != [1] * n]
        if not wrong:
            continue
        at = found[wrong[0]]
        how = "is no sum of whole values"
        if at is not None:
            how = "counts " + ", ".join(f"rank {r} {_times(c)}" for r, c in enumerate(at))
        seen = (
            f"{row['label']}, rank {rank}: {len(wrong)} of {len(found)} elements are wrong; "
            f"element {wrong[0]} {how}"
        )
        return _miscounted(seen, rank, found, row, n)
    return None


def _times(count: int) -> str:
    return {0: "not at all", 1: "once"}.get(count, f"{count} times")


def _miscounted(seen: str, rank: int, found: list[list[int] | None], row: Row, n: int) -> Finding:
    mine = [int(r == rank) for r in range(n)]
    sends, chunks = len(row["sends"]), 2 * (n - 1)
    mean = sum(BASE**r for r in range(n)) / n
    if not sends:
        return say("not-communicated/ring", seen=seen)
    if all(count == mine for count in found):
        return say("not-in-place/ring", seen=seen)
    if all(abs(x - mean) < 1 for x in row["counted"]):
        return say("averaged/ring", seen=seen)
    if any(count is not None and max(count) > 1 for count in found):
        return say("counted-twice", seen=seen, hops=n - 1)
    if sends < chunks:
        return say("too-few-hops", seen=seen, chunks=chunks, rank=rank, sends=sends)
    size = len(found)
    untouched = [i for i, count in enumerate(found) if count == mine]
    if size % n and untouched and untouched == list(range(size - len(untouched), size)):
        return say("rest-forgotten/ring", seen=seen, size=size, n=n, rest=len(untouched))
    return say("wrong-chunk", seen=seen)


@each_step
def neighbours(rows: Rows, _step: int) -> Finding | None:
    n = len(rows)
    to = [{call["peer"] for call in row["sends"]} for row in rows]
    if any(all(peers <= {(r + way) % n} for r, peers in enumerate(to)) for way in (1, -1)):
        return None
    rank = max(range(n), key=lambda r: len(to[r]))
    peers = mistakes.listed(f"rank {p}" for p in sorted(to[rank]))
    return say("not-a-ring", rank=rank, peers=peers)


@each_step
def sent(rows: Rows, _step: int) -> Finding | None:
    chunks = 2 * (len(rows) - 1)
    limit = chunks * math.ceil(len(rows[0]["want"]) / len(rows)) * rows[0]["itemsize"]
    for rank, row in enumerate(rows):
        messages = [call["bytes"] for call in row["sends"]]
        facts = {"label": row["label"], "rank": rank, "sent": sum(messages)}
        if sum(messages) > limit and len(messages) > chunks:
            return say("too-many-hops", messages=len(messages), chunks=chunks, **facts)
        if sum(messages) > limit:
            return say("too-many-bytes/ring", limit=limit, **facts)
    return None


@each_step
def sums(rows: Rows, _step: int) -> Finding | None:
    label = rows[0]["label"]
    tolerance = 1e-5 if "float32" in label else 1e-12
    for rank, row in enumerate(rows):
        if not mistakes.close(row["got"], row["want"], tolerance):
            off = mistakes.error(row["got"], row["want"])
            return say("wrong-sum", label=label, rank=rank, error=off)
        if row["got"] != rows[0]["got"]:
            return say("ranks-differ/ring", label=label, rank=rank)
    return None


judge = judging(
    collective_used, mistakes.not_waited, counted, neighbours, sent, sums, only_first=True
)
