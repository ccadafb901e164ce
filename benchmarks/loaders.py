"""Samples per second of our loaders, and of ``torch.utils.data.DataLoader`` doing the same.

    python benchmarks/loaders.py [--batch 32] [--batches 150] [--out FILE]

Tokens (gpt2), images (resnet_cifar10) and reviews (causal_lm), each from one dataset: ours reads it
as a run does, in the sampler's order and one batch ahead in a thread. DataLoader gets the same
dataset in two ways: sample by sample, put together afterwards, as most scripts do; and a list of
samples at a time, which is the quickest that it can. Both without workers and with two. All take
turns, and nobody computes on what they give. Prints the median of each, and ours as a multiple of
the quickest of theirs with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from shardlab import config as configs
from shardlab import stats
from shardlab.launch import environment
from shardlab.launch.ranks import Ranks
from shardlab.training import builders, loop
from shardlab.workloads.base import Batch

CASES: dict[str, dict[str, Any]] = {
    "tokens": {"model.workload": "gpt2", "model.size": "tiny"},
    "images": {"model.workload": "resnet_cifar10", "data.source": "synthetic"},
    "reviews": {"model.workload": "causal_lm", "model.size": "tiny", "data.source": "synthetic"},
}
ROUNDS = 6
OURS = "ours"


class ByLists(Dataset[Batch]):
    """Gives a whole batch for a list of numbers."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, ids: Any) -> Batch:
        batch: Batch = self.data.batch(ids)
        return batch


class OneByOne(ByLists):
    def __getitem__(self, number: Any) -> Batch:
        return super().__getitem__([number])


def together(rows: Sequence[Batch]) -> Batch:
    """Rows of any length as one batch, padded to the longest."""
    parts = [tree_flatten((row.inputs, row.targets)) for row in rows]
    merged = []
    for tensors in zip(*(leaves for leaves, _ in parts), strict=True):
        firsts = [t[0] for t in tensors]  # of one sample each
        is_label = firsts[0].dim() == 0
        merged.append(torch.stack(firsts) if is_label else pad_sequence(firsts, batch_first=True))
    inputs, targets = tree_unflatten(merged, parts[0][1])
    return Batch(inputs, targets, sum(row.count for row in rows), len(rows))


def theirs(data: Any, batch: int, workers: int, is_by_lists: bool) -> Iterator[Batch]:
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    order = RandomSampler(range(len(data)))
    if is_by_lists:
        loader: Any = DataLoader(
            ByLists(data), batch_size=None, sampler=BatchSampler(order, batch, True), **more
        )
    else:
        loader = DataLoader(
            OneByOne(data), batch, sampler=order, collate_fn=together, drop_last=True, **more
        )
    while True:
        yield from loader


def measure(world: Any, values: dict[str, Any], batches: int) -> dict[str, Any]:
    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    batch = config.training.global_batch
    ours = loop.Batches(workload, config, world)
    sources: dict[str, Any] = {OURS: (one for many in ours for one in many)}
    for workers in (0, 2):
        for is_by_lists in (False, True):
            name = f"{'lists' if is_by_lists else 'one by one'}, {workers} workers"
            sources[name] = theirs(workload.dataset, batch, workers, is_by_lists)
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(ROUNDS + 1):
        for name, source in sources.items():
            start = time.perf_counter()
            samples = sum(next(source).samples for _ in range(batches))
            if number:  # the first round starts threads and workers
                rates[name].append(samples / (time.perf_counter() - start))
    ours.close()
    medians = {name: stats.spread(found) for name, found in rates.items()}
    best = max((n for n in rates if n != OURS), key=lambda n: medians[n]["median"])
    return {
        "samples": len(workload.dataset),
        "data": workload.data,
        "batch": batch,
        "samples_per_s": medians,
        "quickest_of_theirs": best,
        "ratio": stats.ratio([rates[OURS]], [rates[best]]),
        "ratio_95": stats.ratio_interval([rates[OURS]], [rates[best]]),
        "env": environment.describe(world.device, " ".join(["python", *sys.argv])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=150, help="in a turn")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for kind, settings in CASES.items():
        steps = arguments.batches * (ROUNDS + 1)
        more = {"training.global_batch": arguments.batch, "training.steps": steps}
        config = configs.load(None, {**settings, **more, "launch.world": 1, "launch.device": "cpu"})
        with Ranks(config.launch, 1) as ranks:
            rows[kind] = ranks.run(measure, config.to_dict(), arguments.batches)[0]
        row = rows[kind]
        low, high = row["ratio_95"]
        best = row["quickest_of_theirs"]
        print(f"{kind}: ours {row['ratio']:.2f}x [{low:.2f}, {high:.2f}] of theirs by {best}")
        for name, found in row["samples_per_s"].items():
            print(f"  {name:>22} {found['median']:>12,.0f} samples/s")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
