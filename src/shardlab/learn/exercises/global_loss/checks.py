"""The global loss: the sum over all ranks' targets, divided once, by their number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rejected, Row, Rows, Stage, judging, say

Part = tuple[float, int, int]  # of a micro-batch: sum of losses, targets that count, all targets
IGNORED, CLASSES = -100, 4
TOLERANCE = 1e-5  # the contract allows float32
CALLS, BYTES = 4, 2048  # per step; gathering two small objects is still fine
# sizes: by rank, then by micro-batch: (targets that count, all targets).
CASES = (
    Case("two ranks", 2, {"sizes": [[(8, 8)], [(5, 5)]]}),
    Case("targets that do not count", 2, {"sizes": [[(6, 8)], [(3, 9)]]}),
    Case("micro-batches", 2, {"sizes": [[(n, n + 1) for n in (3, 7, 1, 5, 2, 9)],
                                        [(n, n + 1) for n in (8, 2, 6, 4, 3, 1)]]}),
    Case("bfloat16", 2, {"sizes": [[(1777, 2000)], [(413, 2000)]], "dtype": "bfloat16"}),
    Case("a micro-batch without targets", 3, {"sizes": [[(5, 6)], [(0, 4)], [(2, 3)]]}),
    Case("more micro-batches on one rank", 3, {"sizes": [[(4, 5), (6, 6)], [(5, 5)],
                                                         [(3, 3), (1, 2), (7, 7)]]}),
    Case("a rank without micro-batches", 2, {"sizes": [[(1, 3), (0, 2)], []]}),
    Case("no targets at all", 2, {"sizes": [[(0, 4)], [(0, 2)]]}),
)  # fmt: skip


def batch(rank: int, micro: int, size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Each rank's and each micro-batch's losses are of another height, to tell them apart."""
    counted, rows = size
    generator = torch.Generator().manual_seed(toys.SEED + 100 * rank + micro)
    scale = 1 + rank + 0.5 * micro
    logits = scale * torch.randn(rows, CLASSES, generator=generator)  # (rows, CLASSES)
    targets = torch.randint(CLASSES, (rows,), generator=generator)
    targets[torch.randperm(rows, generator=generator)[counted:]] = IGNORED
    return logits.to(dtype), targets


def part(logits: Tensor, targets: Tensor) -> Part:
    total = F.cross_entropy(logits.double(), targets, ignore_index=IGNORED, reduction="sum")
    return float(total), int((targets != IGNORED).sum()), len(targets)


def run(at: Stage) -> dict[str, Any]:
    dtype = getattr(torch, at.options.get("dtype", "float32"))
    data = [
        [batch(rank, micro, size, dtype) for micro, size in enumerate(sizes)]
        for rank, sizes in enumerate(at.options["sizes"])
    ]
    parts = [[part(*each) for each in batches] for batches in data]
    # As a model's output would be: with a graph behind it.
    mine = [(logits.requires_grad_(), targets) for logits, targets in data[at.rank]]
    got = at.submission.global_loss(mine)
    has_graph = isinstance(got, Tensor) and got.requires_grad
    kind = type(got).__name__
    if isinstance(got, Tensor):
        kind = f"a tensor of {got.numel()} elements" if got.numel() != 1 else "float"
    if kind not in ("int", "float", "float32", "float64"):  # NumPy's are numbers, too
        raise Rejected(say("wrong-type/loss", type=kind, rank=at.rank))
    row = {"got": float(got), "has_graph": has_graph, "parts": parts, "calls": at.spy.calls}
    return {"steps": [row]}


# ------------------------------------------------------------------ what is wrong


def value(ranks: Rows) -> Finding | None:
    parts, n = ranks[0]["steps"][0]["parts"], len(ranks)
    got = [row["steps"][0]["got"] for row in ranks]
    every = list(itertools.chain(*parts))
    total, count = _sum(every), _count(every)
    right = total / max(count, 1)
    wrong = [rank for rank in range(n) if not _close(got[rank], right)]
    facts = {"got": got[0], "right": right, "n": n}
    if not wrong:
        return None
    if not all(math.isfinite(number) for number in got):
        return say("not-a-number" if count else "not-a-number/nobody", **facts)
    for key, values in _candidates(parts, total, count):
        if all(_close(a, b) for a, b in zip(got, values, strict=True)):
            return say(key, **facts)
    if "dtype" in ranks[0] and all(abs(number - right) < 0.05 * right for number in got):
        return say("low-precision", dtype=ranks[0]["dtype"], **facts)
    if len(wrong) < n:
        on = mistakes.ranks_text([r for r in range(n) if r not in wrong], n)
        return say("only-one-rank", on=on, rank=wrong[0], has=got[wrong[0]], **facts)
    if any(not _close(number, got[0]) for number in got):
        numbers = ", ".join(f"{number:.6g} (rank {r})" for r, number in enumerate(got))
        return say("ranks-differ/loss", numbers=numbers)
    return say("wrong-loss", **facts)


def _candidates(
    parts: list[list[Part]], total: float, count: int
) -> Iterator[tuple[str, list[float]]]:
    """What each rank returns under a known mistake."""
    n, every = len(parts), list(itertools.chain(*parts))
    means = [_mean(each) for each in parts]
    micro_means = [_average([_mean([one]) for one in each]) for each in parts]
    all_micros = [_mean([one]) for one in every]
    last = list(itertools.chain(*(each[-1:] for each in parts)))
    for own in (means, micro_means):
        yield "not-communicated/loss", own
        yield from (("not-averaged-but-copied/loss", [one] * n) for one in own)
        yield "mean-of-means", [_average(own)] * n
        yield "not-divided", [sum(own)] * n
    yield "mean-of-means/micro", [_average(all_micros)] * n
    yield "not-divided", [sum(all_micros)] * n
    yield "not-divided/sum", [total] * n
    yield "not-divided/sum", [_sum(each) for each in parts]
    yield "padding-counted", [total / (sum(rows for _, _, rows in every) or 1)] * n
    yield "padding-counted", [_sum(e) / (sum(rows for _, _, rows in e) or 1) for e in parts]
    yield "padding-counted", [sum(_mean([p]) * p[2] for p in every) / sum(p[2] for p in every)] * n
    yield "local-count", [total / max(_count(each), 1) for each in parts]
    yield "sum-not-communicated", [_sum(each) / max(count, 1) for each in parts]
    yield "divided-twice", [total / max(count, 1) / n] * n
    yield "divided-twice", [total / max(count, 1) / (len(each) or 1) for each in parts]
    yield "only-the-last/loss", [_mean(last)] * n
    yield "only-the-last/loss", [_sum(last) / max(count, 1)] * n
    yield "only-the-last/loss", [total / max(_count(last), 1)] * n


def _sum(parts: list[Part]) -> float:
    return sum(loss for loss, _, _ in parts)


def _count(parts: list[Part]) -> int:
    return sum(counted for _, counted, _ in parts)


def _mean(parts: list[Part]) -> float:
    return _sum(parts) / _count(parts) if _count(parts) else math.nan


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * abs(b)


def mechanism(ranks: Rows) -> Finding | None:
    for row in (rank["steps"][0] for rank in ranks):
        if row["has_graph"]:
            return say("graph-kept")
        if found := _sent(row):
            return found
    return None


def _sent(row: Row) -> Finding | None:
    calls, micros = row["calls"], max(map(len, row["parts"]))
    if len(calls) > CALLS:
        return say("communicates-each-micro-batch/loss", calls=len(calls), micros=micros)
    if (sent := sum(call["bytes"] for call in calls)) > BYTES:
        return say("too-many-bytes/loss", sent=sent)
    return None


judge = judging(mistakes.not_waited, value, mechanism, only_first=True)
