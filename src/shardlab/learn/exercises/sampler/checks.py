"""The sampler: every sample is read, every rank equally often, in an order that all ranks share."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import torch

from shardlab.learn.exercise import Case, Evidence, Finding, Rejected
from shardlab.learn.spy import Spy

EPOCHS = (0, 1, 2)
SEEDS = (0, 7)
# shards: how many ranks the function is told of; the two real ones ask for all of them in turn.
CASES = (
    Case("in order", 2, {"length": 12, "shards": 2, "shuffle": False}),
    Case("in order, with padding", 2, {"length": 10, "shards": 4, "shuffle": False}),
    Case("shuffled", 2, {"length": 60, "shards": 2, "shuffle": True}),
    Case("shuffled, with padding", 2, {"length": 50, "shards": 3, "shuffle": True}),
    Case("fewer samples than ranks", 2, {"length": 3, "shards": 8, "shuffle": False}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:  # noqa: ARG001
    length, shards, shuffle = (case.options[k] for k in ("length", "shards", "shuffle"))
    torch.manual_seed(rank)  # as in real life: the ranks' random numbers are not in step
    random.seed(rank)
    np.random.seed(rank)

    def ask(shard: int, epoch: int, seed: int) -> list[int]:
        got = submission.indices(length, shards, shard, epoch=epoch, seed=seed, shuffle=shuffle)
        try:
            return [int(i) for i in got]
        except TypeError:
            text = f"`indices` returned {type(got).__name__}, which is no list of whole numbers"
            raise Rejected("wrong-type", text) from None

    before = _random_states()
    mine = range(rank, shards, case.world)
    orders = {
        str(seed): {str(epoch): {str(s): ask(s, epoch, seed) for s in mine} for epoch in EPOCHS}
        for seed in SEEDS
    }
    after = _random_states()
    return {
        "orders": orders,
        "again": {str(s): ask(s, EPOCHS[0], SEEDS[0]) for s in mine},
        "disturbed": [name for name in before if before[name] != after[name]],
        **case.options,
    }


def _random_states() -> dict[str, str]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "random": str(random.getstate()),
        "numpy": str(np.random.get_state()[1].tolist()),  # type: ignore[index]
    }


def judge(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for case, ranks in evidence.items():
        in_order_is_right = not any(f.case.startswith("in order") for f in findings)
        findings += _case(case, ranks, in_order_is_right)
    return findings


def _case(case: str, ranks: list[dict[str, Any]], in_order_is_right: bool) -> list[Finding]:
    length, shards, shuffle = (ranks[0][k] for k in ("length", "shards", "shuffle"))
    orders = {
        (seed, epoch): [
            ranks[s % len(ranks)]["orders"][str(seed)][str(epoch)][str(s)] for s in range(shards)
        ]
        for seed in SEEDS
        for epoch in EPOCHS
    }

    def found(cause: str, message: str) -> list[Finding]:
        return [Finding(cause, f"{length} samples on {shards} ranks: {message}", case)]

    first = orders[SEEDS[0], EPOCHS[0]]
    again = [ranks[s % len(ranks)]["again"][str(s)] for s in range(shards)]
    if again != first:
        return found(
            "not-reproducible",
            "asked twice for the same seed and epoch, it gives two orders. The order must be a "
            "function of seed and epoch alone: give a generator of your own that seed",
        )
    sizes = [len(part) for part in first]
    each = -(-length // shards)  # rounded up
    if strange := [i for part in first for i in part if not 0 <= i < length]:
        return found("out-of-range", f"index {strange[0]} is none of 0 … {length - 1}")
    if len(set(sizes)) > 1:
        few = sizes.index(min(sizes))
        return found(
            "unequal",
            f"the ranks get {', '.join(map(str, sizes))} indices. Rank {few} is done first, and "
            "the others wait for it in their next all-reduce: repeat some samples until all have "
            f"{each}",
        )
    if sizes[0] < each:
        lost = sorted(set(range(length)) - {i for part in first for i in part})
        return found(
            "dropped",
            f"each rank gets {sizes[0]}, and samples {_some(lost)} are read by nobody. Round up, "
            f"to {each}, and repeat some",
        )
    if sizes[0] > each:
        return found("too-many", f"each rank gets {sizes[0]} indices, {each} are enough")
    for order in orders.values():
        if wrong := _partition(order, length, shuffle, in_order_is_right, found):
            return wrong
    wrong = _shuffling(orders, length, found) if shuffle else _in_order(orders, found)
    if not wrong and (names := sorted({n for rank in ranks for n in rank["disturbed"]})):
        wrong = found(
            "global-random-state",
            f"it changes the random numbers that all other code draws ({', '.join(names)}): "
            "dropout and initialisation would change with the sampler. Use a generator of your own",
        )
    return wrong


def _partition(
    order: list[list[int]], length: int, shuffle: bool, in_order_is_right: bool, found: Any
) -> list[Finding]:
    counts = Counter(i for part in order for i in part)
    total = sum(counts.values())
    missing = [i for i in range(length) if not counts[i]]
    most = -(-total // length)  # of any sample, when padding is spread
    repeated = [i for i, count in counts.items() if count > most]
    if not missing and not repeated:
        return []
    if shuffle and in_order_is_right and missing:
        cause: list[Finding] = found(
            "ranks-shuffle-differently",
            f"samples {_some(missing)} are read by nobody and others by two ranks, though without "
            "shuffling it is right. Every rank must draw the same order: no rank in the seed, no "
            "shuffling of what is cut already",
        )
        return cause
    if missing:
        result: list[Finding] = found(
            "not-a-partition",
            f"samples {_some(missing)} are read by nobody, and {_some(sorted(_twice(counts)))} "
            "more than once. Rank r takes places r, r + n, r + 2n … of the padded order (or the "
            "r-th block of it)",
        )
        return result
    spread: list[Finding] = found(
        "padding-uneven",
        f"sample {repeated[0]} is read {counts[repeated[0]]} times in an epoch: pad with the order "
        "from its start, again and again if it is short",
    )
    return spread


def _twice(counts: Counter[int]) -> list[int]:
    return [i for i, count in counts.items() if count > 1]


def _shuffling(
    orders: dict[tuple[int, int], list[list[int]]], length: int, found: Any
) -> list[Finding]:
    first = orders[SEEDS[0], EPOCHS[0]]
    epochs = [orders[SEEDS[0], epoch] for epoch in EPOCHS]
    plain = [i for parts in zip(*first, strict=True) for i in parts][:length]
    blocks = [i for part in first for i in part][:length]
    wrong: list[Finding] = []
    if list(range(length)) in (plain, blocks):
        wrong = found("not-shuffled", "asked to shuffle, it gives the samples in order")
    elif all(epoch == first for epoch in epochs):
        wrong = found(
            "same-each-epoch",
            "every epoch has the same order: the epoch must go into the generator's seed",
        )
    elif all(set(epoch[0]) == set(first[0]) for epoch in epochs):
        wrong = found(
            "same-share-each-epoch",
            "rank 0 reads the same samples in every epoch, in another order: shuffle the whole "
            "data set first, then cut it",
        )
    elif orders[SEEDS[1], EPOCHS[0]] == first:
        wrong = found("ignores-seed", f"seeds {SEEDS[0]} and {SEEDS[1]} give the same order")
    return wrong


def _in_order(orders: dict[tuple[int, int], list[list[int]]], found: Any) -> list[Finding]:
    first = orders[SEEDS[0], EPOCHS[0]]
    moved = any(order != first for order in orders.values())
    falls = [sum(b < a for a, b in itertools.pairwise(part)) for part in first]
    if not moved and max(falls) <= 1:  # one: where padding begins again
        return []
    wrong: list[Finding] = found(
        "shuffled-anyway", f"asked not to shuffle, rank 0 gets {_some(first[0], 6)}"
    )
    return wrong


def _some(values: list[int], most: int = 4) -> str:
    text = ", ".join(map(str, values[:most]))
    return text + (" …" if len(values) > most else "")
