"""The sampler: every sample is read, every rank equally often, in an order that all ranks share."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardlab.learn.exercise import Case, Evidence, Finding, Rejected, Rows, Stage, judging, say

Order = list[list[int]]  # by rank
Orders = dict[tuple[int, int], Order]  # by seed and epoch
Say = Callable[..., Finding]  # exercise.say, with the samples and ranks that it is about
EPOCHS = (0, 1, 2)
SEEDS = (0, 7)
# shards: the number of ranks that the function is given; the two real ones ask for all in turn.
CASES = (
    Case("in order", 2, {"length": 12, "shards": 2, "shuffle": False}),
    Case("in order, with padding", 2, {"length": 10, "shards": 4, "shuffle": False}),
    Case("shuffled", 2, {"length": 60, "shards": 2, "shuffle": True}),
    Case("shuffled, with padding", 2, {"length": 50, "shards": 3, "shuffle": True}),
    Case("fewer samples than ranks", 2, {"length": 3, "shards": 8, "shuffle": False}),
)


def run(at: Stage) -> dict[str, Any]:
    length, shards, shuffle = (at.options[k] for k in ("length", "shards", "shuffle"))
    torch.manual_seed(at.rank)  # as in real life: the ranks' random numbers are not in step
    random.seed(at.rank)
    np.random.seed(at.rank)

    def ask(seed: int, epoch: int, shard: int) -> list[int]:
        got = at.submission.indices(length, shards, shard, epoch=epoch, seed=seed, shuffle=shuffle)
        try:
            return [int(i) for i in got]
        except TypeError:
            raise Rejected(say("wrong-type/sampler", type=type(got).__name__)) from None

    before = _random_states()
    mine = range(at.rank, shards, at.world)
    asked = [(*of, ask(*of)) for of in itertools.product(SEEDS, EPOCHS, mine)]
    after = _random_states()
    return {
        "asked": asked,
        "again": [(*of, ask(*of)) for of in itertools.product(SEEDS[:1], EPOCHS[:1], mine)],
        "disturbed": [name for name in before if before[name] != after[name]],
    }


def _random_states() -> dict[str, str]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "random": str(random.getstate()),
        "numpy": str(np.random.get_state()[1].tolist()),  # type: ignore[index]
    }


def judge(evidence: Evidence) -> list[Finding]:
    in_order = {case: ranks for case, ranks in evidence.items() if case.startswith("in order")}
    is_right = not judging(functools.partial(look, False))(in_order)
    return judging(functools.partial(look, is_right))(evidence)


def look(in_order_is_right: bool, ranks: Rows) -> Finding | None:
    length, shards, shuffle = (ranks[0][k] for k in ("length", "shards", "shuffle"))
    say_here = functools.partial(say, samples=f"{length} samples on {shards} ranks")
    if any(again not in rank["asked"] for rank in ranks for again in rank["again"]):
        return say_here("not-reproducible")
    answers = {tuple(of): indices for rank in ranks for *of, indices in rank["asked"]}
    orders = {
        (seed, epoch): [answers[seed, epoch, s] for s in range(shards)]
        for seed, epoch in itertools.product(SEEDS, EPOCHS)
    }
    found = _sizes(orders[SEEDS[0], EPOCHS[0]], length, say_here)
    for order in orders.values():
        found = found or _partition(order, length, shuffle and in_order_is_right, say_here)
    found = found or (_shuffling if shuffle else _in_order)(orders, length, say_here)
    disturbed = sorted({name for rank in ranks for name in rank["disturbed"]})
    if not found and disturbed:
        return say_here("global-random-state", names=", ".join(disturbed))
    return found


def _sizes(order: Order, length: int, say: Say) -> Finding | None:
    sizes = [len(part) for part in order]
    each = -(-length // len(order))  # rounded up
    read = list(itertools.chain(*order))
    if strange := [i for i in read if not 0 <= i < length]:
        return say("out-of-range", index=strange[0], last=length - 1)
    if len(set(sizes)) > 1:
        few = sizes.index(min(sizes))
        return say("unequal", sizes=", ".join(map(str, sizes)), few=few, each=each)
    if sizes[0] < each:
        lost = sorted(set(range(length)) - set(read))
        return say("dropped", size=sizes[0], lost=_some(lost), each=each)
    return say("too-many", size=sizes[0], each=each) if sizes[0] > each else None


def _partition(order: Order, length: int, blame_shuffling: bool, say: Say) -> Finding | None:
    counts = Counter(itertools.chain(*order))
    most = -(-counts.total() // length)  # of any sample, when padding is spread
    repeated = [i for i, count in counts.items() if count > most]
    missing = [i for i in range(length) if not counts[i]]
    if missing and blame_shuffling:
        return say("ranks-shuffle-differently", missing=_some(missing))
    if missing:
        twice = sorted(i for i, count in counts.items() if count > 1)
        return say("not-a-partition", missing=_some(missing), twice=_some(twice))
    if repeated:
        return say("padding-uneven", index=repeated[0], times=counts[repeated[0]])
    return None


def _shuffling(orders: Orders, length: int, say: Say) -> Finding | None:
    first = orders[SEEDS[0], EPOCHS[0]]
    epochs = [orders[SEEDS[0], epoch] for epoch in EPOCHS]
    plain = list(itertools.chain(*zip(*first, strict=True)))[:length]
    blocks = list(itertools.chain(*first))[:length]
    if list(range(length)) in (plain, blocks):
        return say("not-shuffled")
    if all(epoch == first for epoch in epochs):
        return say("same-each-epoch")
    if all(set(epoch[0]) == set(first[0]) for epoch in epochs):
        return say("same-share-each-epoch")
    if orders[SEEDS[1], EPOCHS[0]] == first:
        return say("ignores-seed", seeds=SEEDS)
    return None


def _in_order(orders: Orders, _length: int, say: Say) -> Finding | None:
    first = orders[SEEDS[0], EPOCHS[0]]
    moved = any(order != first for order in orders.values())
    falls = [sum(b < a for a, b in itertools.pairwise(part)) for part in first]
    if not moved and max(falls) <= 1:  # one: where padding begins again
        return None
    return say("shuffled-anyway", order=_some(first[0], 6))


def _some(values: list[int], most: int = 4) -> str:
    return ", ".join(map(str, values[:most])) + " …" * (len(values) > most)
