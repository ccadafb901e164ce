"""``bucket_mb=auto``: chosen for the link, agreed on, kept, and the same after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import commands
import hosts
import resuming
from conftest import GetRanks
from shardlab.batch import Batch
from shardlab.errors import UsageError
from shardlab.strategies.base import Setup
from shardlab.strategies.data_parallel import bucket_size
from shardlab.strategies.data_parallel.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.data_parallel.bucket_size import Link, best, finish
from shardlab.world import World

MB = 2**20
GBIT = 8e-9  # seconds for each byte at 1 Gbit/s


def layers(count: int, each_mb: float) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        return {f"{i}": nn.Parameter(torch.empty(int(each_mb * MB / 4))) for i in range(count)}


def chosen_parts(link: Link, count: int = 40, each_mb: float = 1.0) -> float:
    """Into how many buckets the chosen size cuts a model whose backward takes 0.2 s."""
    params = layers(count, each_mb)
    ready = [0.2 * (i + 1) / count for i in range(count)]
    return round(count * each_mb / best(params, list(params), ready, link, first_mb=1.0), 3)


def test_what_is_chosen() -> None:
    # The threads that send take the core that computes: nothing can be hidden.
    assert chosen_parts(Link(0.6e-3, GBIT / 4, taken=1.0)) == 2
    # The link is slow and takes no core: the shorter the end, the better.
    assert chosen_parts(Link(0.6e-3, GBIT / 4, taken=0.2)) >= 4
    # Messages cost more than hiding them gains.
    assert chosen_parts(Link(30e-3, GBIT / 4, taken=0.0)) <= 3
    # Nothing to gain: all of it takes less than one in fifty of the time.
    assert chosen_parts(Link(1e-5, 1e-11, taken=0.0)) == 2
    # Of a large model the default is DDP's size, and smaller ones are tried from there.
    assert chosen_parts(Link(1e-5, 1e-12, taken=0.0), 100, 5.0) == 500 / 25
    assert chosen_parts(Link(1e-5, 5e-10, taken=0.0), 100, 5.0) > 500 / 25


def test_when_a_layout_ends() -> None:
    """By hand: two buckets of 4 MB at 1 MB/ms, ready after 10 and 20 ms."""
    params = layers(2, 4.0)
    buckets = [{"0": params["0"]}, {"1": params["1"]}]
    link = Link(1e-3, 1e-3 / MB, taken=0.0)
    assert finish(buckets, ["0", "1"], [0.010, 0.020], link) == pytest.approx(0.025)
    # The first takes 5 ms of backward's core, all of it hidden: the second is ready after 25.
    busy = Link(1e-3, 1e-3 / MB, taken=1.0)
    assert finish(buckets, ["0", "1"], [0.010, 0.020], busy) == pytest.approx(0.030)
    # The second is ready after 12 ms, and waits until the link is free after 15.
    assert finish(buckets, ["0", "1"], [0.010, 0.012], link) == pytest.approx(0.020)
    # One bucket is sent when backward is over.
    assert finish([params], ["0", "1"], [0.010, 0.020], link) == pytest.approx(0.029)


@pytest.mark.parametrize("size", ["large", "Auto", "", True])
def test_another_word_is_refused(size: str | bool, ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="bucket_mb is a number of MB or auto"):
        ranks(2).run(stack_after, 0, {"bucket_mb": size})


# ------------------------------------------------------------------ on ranks

# With the slow one the stack's 16 MB take 0.1 s, in a backward of 0.15.
FAST, SLOW = Link(1e-5, 1e-12, 0.0), Link(1e-4, 0.1 / (16 * MB), 0.0)


class Stack(nn.Module):
    """Sixteen layers of 1 MB: enough that the link is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, 512)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.inputs).square().sum()


def stack(world: World, options: dict[str, Any]) -> BucketDDPAsync:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params.values(), lr=0.01)

    torch.manual_seed(world.rank)
    return BucketDDPAsync(Setup(Stack(), sgd, loss, world.mesh), **options)


def step(world: World, strategy: BucketDDPAsync, number: int) -> None:
    rows = torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * number + world.rank))
    strategy.gradients([Batch(rows, rows, 4, 4)])
    strategy.step()


def stack_after(world: World, steps: int, options: dict[str, Any]) -> Any:
    strategy = stack(world, options)
    for number in range(steps):
        step(world, strategy, number)
    strategy.settle()
    return strategy.chosen(), [len(names) for names in strategy.buckets.names]


@contextmanager
def seeing(link: Link) -> Iterator[None]:
    """This rank measures that link, and a gradient every 10 ms."""
    with (
        mock.patch.object(bucket_size, "measure", return_value=link),
        mock.patch.object(bucket_size, "seconds", lambda s: [0.01 * i for i in range(len(s))]),
    ):
        yield


def with_links(world: World, links: list[Link], steps: int, options: dict[str, Any]) -> Any:
    """Each rank measures a link of its own."""
    with seeing(links[world.rank]):
        return stack_after(world, steps, options)


def test_ranks_agree_on_what_the_slowest_saw(ranks: GetRanks) -> None:
    slow = ranks(2).run(with_links, [SLOW, SLOW], 2, {})
    mixed = ranks(2).run(with_links, [FAST, SLOW], 2, {})
    fast = ranks(2).run(with_links, [FAST, FAST], 2, {})
    for found in (slow, mixed, fast):
        assert found[0] == found[1]
    assert fast[0][0] == {"bucket_mb": 8.0}
    assert slow[0][0]["bucket_mb"] < 8.0
    assert mixed[0][0]["bucket_mb"] < 8.0
    assert len(mixed[0][1]) > len(fast[0][1])


def test_a_size_that_is_asked_for_is_not_measured(ranks: GetRanks) -> None:
    (chosen, names), _ = ranks(2).run(with_links, [SLOW, SLOW], 1, {"bucket_mb": 4})
    assert chosen == {}
    assert names == [1, 4, 4, 4, 3]
    (chosen, _), _ = ranks(2).run(with_links, [SLOW, SLOW], 1, {"comm_dtype": "bf16"})
    assert chosen == {"bucket_mb": 8.0}  # what is sent is not a plain all-reduce of the bucket
    (chosen, _), *_ = ranks(1).run(with_links, [SLOW], 1, {})
    assert chosen == {"bucket_mb": 8.0}


def test_the_link_is_really_measured(ranks: GetRanks) -> None:
    for chosen, names in ranks(2).run(stack_after, 2, {}):
        assert 1.0 <= chosen["bucket_mb"] <= 8.0
        assert sum(names) == 16
    for link in ranks(2).run(measured):
        assert 0 < link.latency_s < 1
        assert link.s_per_byte >= 0
        assert 0 <= link.taken <= 1


def measured(world: World) -> Link:
    return bucket_size.measure(world.group, world.device, world.size)


def saved_and_loaded(world: World) -> Any:
    """The first run measures a slow link; the second, which is given its state, a fast one."""
    with seeing(SLOW):
        first = stack(world, {})
        step(world, first, 0)
        first.settle()
    shared, own = first.extra_state()
    with seeing(FAST):
        second = stack(world, {})
        resuming.hand_over(world, first, second)
        second.load_extra_state(shared, own)
        for strategy in (first, second):
            step(world, strategy, 1)
            strategy.settle()
    pairs = zip(first.full_tensors().values(), second.full_tensors().values(), strict=True)
    asked = stack(world, {"bucket_mb": 2})  # what is asked for now counts, not what was chosen
    asked.load_extra_state(shared, own)
    return first.chosen(), second.chosen(), all(torch.equal(a, b) for a, b in pairs), asked.size.mb


@pytest.mark.long
def test_a_resumed_run_has_the_same_buckets(ranks: GetRanks) -> None:
    """With three ranks the order of a sum depends on them, so the bits do."""
    for first, second, is_equal, asked in ranks(3).run(saved_and_loaded):
        assert first == second
        assert first["bucket_mb"] < 8.0
        assert is_equal
        assert asked == 2


# ------------------------------------------------------------------ in runs

RUN = (
    "train", "--strategy", "bucket_ddp_async", "--workload", "gpt2", "--world", "2",
    "--data", "synthetic", "--seq-len", "64", "--global-batch", "8",
    "--set", "model.options={layers: 12, dim: 192, heads: 4, context: 64, vocab: 256}",
)  # fmt: skip


@pytest.mark.long
def test_a_run_keeps_what_was_chosen(tmp_path: Path) -> None:
    """Recorded, said, and the same after a resume, whatever is measured then."""
    folder = tmp_path / "run"
    out = ("--out", str(folder), "--steps", "2", "--checkpoint-every", "1")
    done = commands.here(*RUN, *out, cwd=tmp_path)
    chosen = json.loads((folder / "chosen.json").read_text())
    assert f"bucket_ddp_async chose bucket_mb={chosen['bucket_mb']:.4g}" in done.stderr
    again = ("train", "--resume", str(folder), "--steps", "3", "--json")
    done = commands.here(*again, cwd=tmp_path)
    assert json.loads(done.stdout)["chosen"] == {"bucket_mb": chosen["bucket_mb"]}
    asked = ("--steps", "4", "--set", "strategy.options.bucket_mb=2")
    commands.here("train", "--resume", str(folder), *asked, cwd=tmp_path)
    assert not (folder / "chosen.json").exists()


@pytest.mark.deep
def test_a_slow_link_gets_smaller_buckets(tmp_path: Path) -> None:
    """Two hosts with 500 Mbit/s between them: 21 MB take 0.35 s, and half of them would be left
    when backward is over."""
    if (reason := hosts.why_not()) is not None:
        pytest.skip(reason)
    with hosts.made(2, rate="500mbit") as two:
        folder = tmp_path / "run"
        words = ("-m", "shardlab", *RUN, "--steps", "2", "--out", str(folder))
        for done in two.torchrun(*words, timeout=120, cwd=tmp_path):
            assert done.returncode == 0, done.stderr
        chosen = json.loads((folder / "chosen.json").read_text())
    assert chosen["bucket_mb"] < 21 / 2 - 1
