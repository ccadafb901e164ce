"""A proof: what is right passes every check, and every planted bug fails with its cause named."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commands
import saboteurs
from conftest import GetRanks, long_unless
from shardlab import comm
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.plan import claims
from shardlab.proof import difference, explain, judge, reference, watch
from shardlab.proof.prove import cases_in, cases_of, small, worlds_of
from shardlab.report import proof as report
from shardlab.strategies.base import Setup
from shardlab.strategies.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.strategies.simple_ddp_async import SimpleDDPAsync
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation
from shardlab.strategies.zero2 import Zero2
from shardlab.strategies.zero3 import Zero3
from shardlab.workloads.base import Batch

Checks = dict[str, dict[str, Any]]


@functools.cache
def checks_of(ranks: GetRanks, strategy: str, world: int = 2) -> Checks:
    """What ``shardlab prove`` finds out about one strategy, on the tests' own ranks."""
    config = configs.load(None, {"data.seq_len": 16, "training.steps": 3})
    (case,) = cases_of(small(config), [strategy], [world])
    evidence = ranks(world).run("shardlab.proof.evidence:examine", case.to_dict())
    return judge.judge([e for e in evidence if e is not None])


def equal_of(ranks: GetRanks, strategy: str) -> dict[str, Any]:
    """The same of its first check alone, in a third of the time."""
    config = configs.load(None, {"data.seq_len": 16, "training.steps": 3})
    (case,) = cases_of(small(config), [strategy], [2])
    return judge.equal(ranks(2).run("judging:examine_equal", case.to_dict()))


def failures(checks: Checks) -> dict[str, str]:
    return {name: check["message"] for name, check in checks.items() if not check["pass"]}


# ------------------------------------------------------------------ what is right


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ours_do_what_they_claim(strategy: str, ranks: GetRanks) -> None:
    assert strategy in claims.CLAIMS
    checks = checks_of(ranks, strategy)
    assert failures(checks) == {}
    assert list(checks) == list(judge.CHECKS)
    json.dumps(checks, allow_nan=False)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero2", "pytorch_hsdp"])
def test_four_ranks(strategy: str, ranks: GetRanks) -> None:
    checks = checks_of(ranks, strategy, world=4)
    assert failures(checks) == {}
    full = checks_of(ranks, "single")["state"]["measured"]
    share = {"zero2": 4, "pytorch_hsdp": 2}[strategy]
    assert checks["state"]["measured"]["optimizer"] == pytest.approx(
        full["optimizer"] / share, rel=0.01
    )


@pytest.mark.long
def test_no_claim_is_measured_all_the_same(ranks: GetRanks) -> None:
    checks = checks_of(ranks, "test_prove:Unclaimed")
    assert failures(checks) == {}
    assert [checks[c]["claimed"] for c in ("state", "bytes", "overlap")] == [None] * 3
    assert checks["bytes"]["measured"]["all_reduce"]["bytes"] > 1e5
    assert checks["overlap"]["measured"]["share"] == 0


class Unclaimed(SimpleDDPGradientAccumulation):
    """A user's own, that says nothing of what it costs."""


class Mistaken(SimpleDDPGradientAccumulation):
    claim = "zero9"


def test_a_claim_that_does_not_exist(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="unknown claim 'zero9'; did you mean 'zero"):
        checks_of(ranks, "test_prove:Mistaken")


# ------------------------------------------------------------------ planted bugs: not equal

MESSAGES = {
    "NoAveraging": "gradients are exactly 2.0x: summed over the ranks, not averaged",
    "AveragesWeights": "each rank has the gradients of its own data only: they are not reduced",
    "ReducesOnlyTheLast": "only the last of 3 micro-batches is reduced over the ranks",
    "NoBroadcast": "rank 1 starts from other weights ('offset'): equal on rank 0 only",
    "NoBufferBroadcast": "buffer 'drift'",
    "MeanOfMeans": "each rank divides by its own count: a mean of means",
    "ReadsAnothersData": "the data of rank 1 is not in it, the rest 2.0x: ranks read the same",
    "BucketTooEarly": "gradient",  # a race: what is lost differs from run to run
    "NobodyWaits": "nobody waits for all_reduce 'grad",
    "EveryMicrobatch": "the sum so far is all-reduced after each",
    "ShardOffByOne": "shifted by one element, as by a shard's offset that is off by one",
    "ForgetsToGather": "not updated in this step; were the shards gathered?",
}


def test_every_saboteur_has_its_message() -> None:
    planted = (*saboteurs.SABOTEURS, *saboteurs.RUNG_SABOTEURS)
    assert {s.__name__ for s in planted} == MESSAGES.keys()


@pytest.mark.parametrize("name", long_unless(lambda name: name == "NoAveraging", MESSAGES))
def test_saboteurs_are_told_what_they_did(name: str, ranks: GetRanks) -> None:
    equal = equal_of(ranks, f"saboteurs:{name}")
    assert not equal["pass"]
    assert MESSAGES[name] in equal["message"]
    assert "\n" not in equal["message"]


class TooEarly(BucketDDPAsync):
    """A bucket is launched before its last gradient is in."""

    def _lay_out(self) -> None:
        super()._lay_out()
        all_but_one = [dict([*need.items()][: max(1, len(need) - 1)]) for need in self.queue.needs]
        self.queue = saboteurs.Careless(all_but_one, self._launch)

    def _launch(self, bucket: int) -> None:
        super()._launch(bucket)
        self.under_way[-1].wait()  # not to be saved by luck


class LosesTheEdge(Zero2):
    """The last element of each shard does not get its gradient."""

    def receive_all(self) -> None:
        super().receive_all()
        for unit in self.units:
            if unit.grad is not None:
                unit.grad[-1] = 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TooEarly", "gradient 'blocks.15.weight': the last micro-batch of the other ranks is not"),
        (
            "LosesTheEdge",
            "gradient 'blocks.15.weight': off by 1.5e-01 (6.5e+14 ulp), in only 1 of 50,176",
        ),
    ],
)
def test_more_that_is_not_equal(name: str, message: str, ranks: GetRanks) -> None:
    equal = equal_of(ranks, f"test_prove:{name}")
    assert not equal["pass"]
    assert message in equal["message"]


# ------------------------------------------------------------------ planted bugs: not as claimed


class WholeOptimizer(SimpleDDPGradientAccumulation):
    """Calls itself ZeRO-1, and shards nothing. Its results are right."""

    claim = "zero1"


class FreesAtTheEnd(Zero2):
    """All buckets stay until backward is over."""

    claim = "zero2"
    IN_FLIGHT = 1000


class GathersEverything(Zero3):
    """No blocks: the whole model is one unit."""

    claim = "zero3"

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, blocks=()))


class Leaks(SimpleDDPGradientAccumulation):
    """Keeps the gradients of the step before."""

    claim = "simple_ddp_ga"

    def step(self) -> None:
        self.old = [p.grad for p in self.params.values()]
        super().step()


class SendsEachTime(SimpleDDP):
    """Right, but all is sent for each micro-batch."""

    claim = "simple_ddp_ga"


class HookEachTime(saboteurs.EveryMicrobatch):
    claim = "simple_ddp_hook"


class SendsLate(SimpleDDPGradientAccumulation):
    claim = "simple_ddp_async"


class SendsEarly(SimpleDDPAsync):
    claim = "simple_ddp_ga"


class Noisy(SimpleDDPGradientAccumulation):
    """Right up to the last bits, which are random."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        loss = super().gradients(microbatches)
        noise = 1 + torch.tensor(os.urandom(1)[0] * 1e-15, dtype=torch.float64)
        comm.broadcast(noise, self.group)
        for p in self.params.values():
            assert p.grad is not None
            p.grad *= noise
        return loss


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        (
            "WholeOptimizer",
            "state",
            "the optimizer state on each rank is full size, 1.84 MiB: nothing is sharded",
        ),
        ("WholeOptimizer", "bytes", "no reduce_scatter was sent, 471 KiB are claimed"),
        ("FreesAtTheEnd", "state", "full gradients are kept until backward ends"),
        ("GathersEverything", "state", "it gathers the whole model for forward"),
        ("Leaks", "state", "gradients that are not freed?"),
        ("SendsEachTime", "bytes", "2.00x the claim: it communicates in each of the 2 micro-batch"),
        ("HookEachTime", "bytes", "2.00x the claim: it communicates in each of the 2 micro-batch"),
        ("SendsLate", "overlap", "overlap is claimed, but 0% of the gradients' bytes launched"),
        ("SendsEarly", "overlap", "no overlap is claimed, but 100% of the gradients' bytes"),
        ("Noisy", "reproducible", "two runs differ, first in stack, step 0: gradient"),
    ],
)
def test_claims_that_do_not_hold(name: str, check: str, message: str, ranks: GetRanks) -> None:
    found = checks_of(ranks, f"test_prove:{name}")[check]
    assert not found["pass"]
    assert message in found["message"]
    assert "\n" not in found["message"]


# ------------------------------------------------------------------ diagnoses, without ranks

ONCE = [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("mixture", "counts", "message"),
    [
        ([[2.0, 2.0], [2.0, 2.0]], [[3] * 2] * 2, "exactly 2.0x: summed over the ranks"),
        ([[0.5, 0.5], [0.5, 0.5]], [[3] * 2] * 2, "0.5x: divided by the number of ranks once too"),
        ([[3.0] * 3] * 2, [[1] * 3] * 2, "exactly 3.0x: summed over the micro-batches, not aver"),
        ([[1 / 3] * 3] * 2, [[1] * 3] * 2, "0.3333x: divided by the number of micro-batches"),
        ([[6.0] * 3] * 2, [[1] * 3] * 2, "exactly 6.0x: summed over ranks and micro-batches"),
        ([[5.0, None], [5.0, 5.0]], [[1, 0], [1, 1]], "exactly 5.0x: a wrong factor"),
        ([[1.0, 1.0], [0.0, 0.0]], [[3] * 2] * 2, "its own data only: they are not reduced"),
        ([[1.0, 1.0], [0.0, 1.0]], [[3] * 2] * 2, "only the last of 2 micro-batches is reduced"),
        ([[1.0, 1.0], [1.0, 0.0]], [[3] * 2] * 2, "the last micro-batch of the other ranks is not"),
        ([[0.0, 1.0], [0.0, 1.0]], [[3] * 2] * 2, "only the last of 2 micro-batches is in it"),
        ([[1.0, 0.0], [1.0, 0.0]], [[3] * 2] * 2, "only the first of 2 micro-batches is in it"),
        ([[2.0, 1.0], [2.0, 1.0]], [[3] * 2] * 2, "reduced again with every later one"),
        ([[2.0] * 2, [2 / 3] * 2], [[1, 1], [3, 3]], "each rank divides by its own count: a mean"),
        ([[4.0] * 2, [4 / 3] * 2], [[1, 1], [3, 3]], "and the sum over ranks is not averaged"),
        ([[2.0, 2 / 3], [2.0, 2 / 3]], [[1, 3], [1, 3]], "each micro-batch divides by its own"),
        ([[2.0, 2.0], [0.0, 0.0]], [[3] * 2] * 2, "the data of rank 1 is not in it, the rest 2.0x"),
        ([[1.0, 1.0], [0.0, 3.0]], [[3] * 2] * 2, "micro-batch 0 of rank 1 counts 0.0x and micro"),
    ],
)
def test_what_a_mixture_says(mixture: Any, counts: Any, message: str) -> None:
    assert message in explain.mixed(mixture, counts, rank=0)


def test_a_mixture_is_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    names = {"a": (9, 9), "b": (3,)}
    parts = [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in names.items()}
        for _ in range(4)
    ]
    weights = [1.0, 0.0, 2.5, 1.0]
    got = {n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) for n in names}
    samples = [{n: difference.sample(t) for n, t in part.items()} for part in parts]
    assert difference.mixture_of(got, samples, "a") == pytest.approx(weights)
    nothing = {n: torch.zeros_like(t) for n, t in samples[0].items()}  # a rank without rows
    found = difference.mixture_of(got, [*samples, nothing], "a")
    assert found is not None
    assert found[-1] is None
    # One gradient that no mixture explains: the other still can be.
    got["b"] = got["b"] + torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    assert difference.mixture_of(got, samples, "a") == pytest.approx(weights)
    assert difference.mixture_of({"b": got["b"]}, samples, "b") is None


def unit_of(tensor: torch.Tensor) -> torch.Tensor:
    """The unit of last place of its largest value."""
    size = reference.SCALES[torch.float64].unit(reference.largest(tensor))
    return torch.tensor(size, dtype=torch.float64)


def test_units_of_last_place() -> None:
    want = torch.tensor([1.0, -2.0], dtype=torch.float64)
    unit = unit_of(want)
    assert difference.ulps(want, want, unit) == 0
    assert difference.ulps(want + torch.tensor([3 * math.ulp(2.0), 0]), want, unit) == 3
    # In units that are given, for all elements or for each: what is zero in theory is not measured
    # by its own size.
    assert difference.ulps(want * 2, want, torch.tensor(4.0, dtype=torch.float64)) == 0.5
    assert difference.ulps(want * 2, want, torch.tensor([4.0, 1.0], dtype=torch.float64)) == 2
    assert difference.ulps(want * 2e-16, want * 1e-16, unit_of(want * 1e-16)) > 1e15
    assert difference.ulps(None, None, unit) == 0
    for other in (None, want[:1], want * math.nan, want * math.inf):
        assert difference.ulps(other, want, unit) == math.inf
    assert difference.ulps(torch.empty(0), torch.empty(0), unit) == 0
    imaginary = torch.complex(want, want)
    assert difference.ulps(imaginary, imaginary, unit_of(imaginary)) == 0
    assert difference.ulps(imaginary.conj(), imaginary, unit_of(imaginary)) > 1e15


def compared(got: torch.Tensor, want: torch.Tensor, before: torch.Tensor) -> dict[str, Any]:
    allowed = reference.SCALES[torch.float64].tolerance * unit_of(want)
    return difference.compare(got, want, allowed, before)


def first_of(**looks: Any) -> dict[str, Any]:
    return {"step": 1, "kind": "parameter", "tensor": "w", "model": "m", "rank": 1, "ranks": [1],
            "world": 2, "counts": [[1], [1]], "gradients_equal": True, "ulp": 1e9,
            **looks}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (first_of(missing=True), "step 1 of m, parameter 'w': it is missing"),
        (first_of(missing=False), "one process has no such tensor"),
        (first_of(kind="gradient", none="one process"), "in one process it is None"),
        (first_of(kind="gradient", none="the strategy"), "it is None, in one process it is there"),
        (first_of(shapes=[[2], [3]]), "its shape is [2], not [3]"),
        (first_of(step=None, ranks=[1, 2], world=3), "ranks 1 and 2 starts from other weights"),
    ],
)
def test_differences_in_words(first: dict[str, Any], message: str) -> None:
    assert message in explain.explain(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t + t.sign(),
            "on rank 1 only, though the gradients are equal: look at the update",
        ),
        (lambda t: t * 3, "on rank 1 only: exactly 3.0x"),
        (lambda t: t.roll(1), "shifted by one element"),
        (lambda t: t.index_fill(0, torch.tensor([50, 51]), 7.0), "2 of 100 elements, 50 to 51, at"),
        (lambda t: t.index_fill(0, torch.tensor([9]), 7.0), "in only 1 of 100 elements, 9 to 9"),
        (lambda t: t * math.nan, "it is not finite"),
    ],
)
def test_elements_in_words(change: Any, message: str) -> None:
    want = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    looks = compared(change(want), want, want - 1)
    assert message in explain.explain(first_of(**looks))


def test_an_update_in_words() -> None:
    before = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    update = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = update * (torch.arange(100) < 50)
    for change, message in (
        (update.roll(1), "shifted by one element"),
        (half, "50 of 100 elements were not updated in this step"),
        (0 * update, "it was not updated in this step"),
    ):
        looks = compared(before + change, before + update, before)
        assert message in explain.explain(first_of(**looks))


# ------------------------------------------------------------------ claims


def job(ranks: int, micro: int, **options: Any) -> claims.Job:
    params = [
        claims.Parameter("root", (10, 10), 8, True, ""),
        *(claims.Parameter(f"b{i}", (10, 20), 8, True, f"b{i}") for i in range(4)),
        claims.Parameter("frozen", (5,), 8, False, ""),
    ]
    return claims.Job(tuple(params), 0, ranks, micro, options)


def test_every_strategy_has_a_claim() -> None:
    assert STRATEGIES.keys() <= claims.CLAIMS.keys()


def test_formulas_are_those_of_the_papers() -> None:
    n, k = 4, 3
    one, share = job(n, 1), (n - 1) / n
    psi = one.psi
    assert psi == 7200

    def sent(name: str, of: claims.Job) -> dict[str, float]:
        moved: dict[str, float] = claims.CLAIMS[name].of(of)["moved"]
        return moved

    assert sent("simple_ddp_ga", one) == {"all_reduce": 2 * psi * share}
    assert sent("simple_ddp", job(n, k)) == {"all_reduce": k * 2 * psi * share}
    halves = {"reduce_scatter": psi * share, "all_gather": psi * share}
    assert sent("zero1", one) == sent("zero1", job(n, k)) == sent("zero2", one) == halves
    assert sum(sent("zero2", job(n, k)).values()) == (k + 1) * psi * share
    # 3Ψ, less what need not be gathered twice: the root and the last block.
    saved = one.params[0].bytes + one.params[4].bytes
    everything = 3 * psi + one.params[5].bytes
    assert sum(sent("zero3", one).values()) == (everything - saved) * share
    assert sum(sent("single", job(1, k)).values()) == 0
    claimed = claims.CLAIMS["zero3"].of(job(n, k))
    assert claimed["least_optimizer"] == 2 * psi / n
    # What is frozen may all lie on one rank, and the others' parts are then all trained.
    assert claimed["optimizer"] == 2 * one.held / n
    assert claimed["params"] == one.held / n


def test_formulas_with_groups_of_ranks() -> None:
    """Gathered and scattered inside a group of s, summed between g = n/s groups, once in a step."""
    psi = job(4, 1).psi
    zero3, plain = (claims.CLAIMS["zero3"].of(job(4, 3, **o)) for o in ({"shards": 2}, {}))
    assert zero3["moved"]["all_reduce"] == psi / 2
    assert "all_reduce" not in plain["moved"]
    assert zero3["moved"]["reduce_scatter"] == 3 * psi / 2
    assert zero3["params"] == 2 * plain["params"]
    nodes = claims.CLAIMS["bucket_ddp_async"].of(job(4, 1, hierarchical=True, ranks_per_node=2))
    halves = {"reduce_scatter": psi / 2, "all_gather": psi / 2}
    assert nodes["moved"] == {"all_reduce": psi / 2, **halves}
    follows = replace(job(8, 1), ranks_per_node=4)
    assert claims.within_group(follows) == 4
    assert claims.within_group(replace(follows, ranks_per_node=1)) == 2


def test_fully_shard_pads_rows() -> None:
    assert claims.Parameter("w", (10, 3), 8, True, "").padded(4) == 12 * 3 * 8
    assert claims.Parameter("s", (), 8, True, "").padded(4) == 4 * 8
    hybrid = claims.CLAIMS["pytorch_hsdp"].of(job(4, 1, shards=2))
    assert hybrid["moved"]["all_reduce"] == 7200 / 2  # shards of half, between two groups
    assert hybrid["optimizer"] == 7200


# ------------------------------------------------------------------ instruments


def test_memory_is_followed_until_it_is_gone() -> None:
    mib = 1 << 20
    memory, kept = watch.Memory(), []

    def work() -> str:
        a = torch.empty(3 * mib, dtype=torch.uint8)
        kept.append(torch.empty(2 * mib, dtype=torch.uint8))
        (torch.ones(4, requires_grad=True).sum()).backward()
        del a
        late = torch.empty(4 * mib, dtype=torch.uint8)
        late.untyped_storage().resize_(0)
        return "done"

    for _ in range(2):
        result, phase = memory.phase(work)
        assert result == "done"
        assert phase.forward_peak == pytest.approx(5 * mib, rel=1e-3)
        assert phase.peak == pytest.approx(6 * mib, rel=1e-3)
    assert phase.held == pytest.approx(4 * mib, rel=1e-3)


def test_what_is_alive_is_weighed_by_what_it_is_for() -> None:
    old = [nn.Parameter(torch.ones(100))]
    alive = watch.Alive()
    model = nn.BatchNorm1d(1000, affine=False)
    flat = torch.zeros(2000)
    params = [nn.Parameter(flat[:1000]), nn.Parameter(flat[1000:])]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    assert alive.weigh(model) == watch.Held(params=8000, optimizer=0, rest=0)
    for p in params:
        p.grad = torch.ones(1000)
    assert alive.weigh(model).rest == 8000
    optimizer.step()
    optimizer.zero_grad()
    assert alive.weigh(model) == watch.Held(params=8000, optimizer=8000, rest=0)
    assert len(old) == 1


# ------------------------------------------------------------------ the command


def test_cases() -> None:
    config = small(configs.load())
    assert (config.model.size, config.training.accumulate) == ("tiny", 2)
    assert small(configs.load(), given={"training.accumulate"}).training.accumulate == 1
    long = {"training.steps": 99, "training.warmup_steps": 50, "training.global_batch": 512}
    large = configs.load(None, {"model.size": "small", "data.seq_len": 1024, **long})
    assert small(large, steps=2, worlds=[2, 4]) == configs.load(
        None,
        {
            "model.size": "tiny",
            "training.steps": 2,
            "training.warmup_steps": 1,
            "training.global_batch": 16,
            "training.accumulate": 2,
            "training.batch_split": "uneven",
        },
    )
    given = {"model.size", "data.seq_len", "training.global_batch"}
    kept = small(large, given=given)
    assert (kept.model.size, kept.data.seq_len) == ("small", 1024)
    assert kept.training.global_batch == 512
    cases = cases_of(config, ["single", "zero1:bucket_mb=1"], [2, 4])
    assert [(c.strategy.label, c.launch.world) for c in cases] == [
        ("single", 1), ("zero1 (bucket_mb=1)", 2), ("zero1 (bucket_mb=1)", 4),
    ]  # fmt: skip
    assert {c.precision.compute for c in cases} == {"fp64"}
    for worlds in ([2, 4], [2, 1], [1, 2], [4]):
        cases = cases_of(config, ["single", "zero1"], worlds)
        run = [case for size in worlds for case in cases_in(size, cases, worlds)]
        assert sorted(run, key=cases.index) == cases
    with pytest.raises(UsageError, match="zero1 is named twice"):
        cases_of(config, ["zero1", "zero1"], [2])
    with pytest.raises(UsageError, match="a proof is made in float64"):
        cases_of(configs.load(None, {"precision.compute": "bf16"}), ["zero1"], [2])


def test_worlds() -> None:
    config = configs.load()
    assert worlds_of(None, config) == [2]
    assert worlds_of("2,4,2", config) == [2, 4]
    for text in ("two", "2,", "0"):
        with pytest.raises(UsageError, match="--world"):
            worlds_of(text, config)


BAD = """
from shardlab.errors import UsageError
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation as Right

class Crashes(Right):
    def step(self):
        raise ValueError("out of luck")

class Refuses(Right):
    def step(self):
        raise UsageError("not with this model")

class Forgets(Right):
    claim = "simple_ddp_async"
"""


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One command with everything that can happen to a strategy."""
    folder = tmp_path_factory.mktemp("proved")
    (folder / "bad.py").write_text(BAD)
    names = "single,bad.py:Crashes,bad.py:Refuses,bad.py:Forgets,simple_ddp_ga"
    return folder, commands.here(
        "prove", "--strategies", names, "--seq-len", "8", "--out", "out", cwd=folder, COLUMNS="80"
    )


@pytest.mark.long
def test_a_proof_on_the_terminal(proved: tuple[Path, Any]) -> None:
    _, done = proved
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if " ✓ " in line or " ✗ " in line}
    assert rows["single"].count("✓") == rows["simple_ddp_ga"].count("✓") == 5
    assert rows["bad.py:Crashes"].count("✗") == 5
    assert rows["bad.py:Forgets"].count("✗") == 1
    text = " ".join(done.stdout.split())
    assert "bad.py:Crashes, world 2, every check: it did not get through: rank" in text
    assert "ValueError: out of luck" in text
    assert "bad.py:Refuses, world 2, skipped: not with this model" in text
    assert "overlap is claimed, but 0% of the gradients' bytes" in text
    assert "do not do what is claimed; 2 of 4 proved." in text
    assert "out/prove.json" in text


@pytest.mark.long
def test_a_proof_in_its_file(proved: tuple[Path, Any]) -> None:
    folder, _ = proved
    result = json.loads((folder / "out" / "prove.json").read_text())
    assert result["schema"] == 1
    assert result["command"].startswith("shardlab prove --strategies single")
    assert result["env"]["workload"] == "gpt2-tiny"
    assert [s["strategy"] for s in result["skipped"]] == ["bad.py:Refuses"]
    for v in result["verdicts"]:
        assert list(v["checks"]) == list(judge.CHECKS)
        assert v["pass"] is all(c["pass"] for c in v["checks"].values())
        for check in v["checks"].values():
            assert {"pass", "claimed", "measured", "message"} == check.keys()
            assert check["message"]
    single, crashed, forgets, right = result["verdicts"]
    assert (single["world"], right["world"]) == (1, 2)
    assert crashed["checks"]["equal"]["measured"] is None
    assert forgets["checks"]["overlap"]["claimed"] == "some"
    assert (
        right["checks"]["equal"]["measured"]["max_ulp"]
        < right["checks"]["equal"]["claimed"]["max_ulp"]
    )
    sent = right["checks"]["bytes"]
    assert sent["measured"]["source"] == "ledger"
    assert sent["measured"]["all_reduce"]["bytes"] == pytest.approx(
        sent["claimed"]["all_reduce"], rel=0.02
    )


@pytest.mark.long
def test_your_own_model(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "examples" / "your_model.py"
    flags = ["--workload", f"{model}:workload", "--strategies", "zero1,pytorch_zero3"]
    done = commands.here("prove", *flags, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["env"]["workload"] == "my-model"
    assert [v["pass"] for v in result["verdicts"]] == [True, True]
    sources = [v["checks"]["bytes"]["measured"]["source"] for v in result["verdicts"]]
    assert sources == ["ledger", "profiler"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-prove")
    assert json.loads((folder / "prove.json").read_text()) == result


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world", "two"], "--world two: not whole numbers, as in 2 or 1,2,4"),
        (["--strategies", "zero9"], "unknown strategy 'zero9'; "),
        (["--strategies", "zero1:buckets=1"], "unknown option of strategy zero1 'buckets'"),
        (["--set", "precision.compute=bf16"], "a proof is made in float64"),
        (["--size", "tinny"], "unknown gpt2 size 'tinny'; did you mean 'tiny'?"),
    ],
)
def test_wrong_input(args: list[str], message: str, tmp_path: Path) -> None:
    done = commands.here("prove", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table_reads_names_as_they_are() -> None:
    checks = judge.failed("no [bold] reason")
    row = {"label": "mine (a=[1])", "world": 2, "pass": False, "checks": checks}
    result = {
        "env": {"workload": "w", "parameters": 5},
        "config": {"training": {"steps": 3, "accumulate": 2}},
        "verdicts": [row],
        "skipped": [],
    }
    (reason,) = report.reasons(result)
    assert reason.plain == "mine (a=[1]), world 2, every check: no [bold] reason"
    assert report.summary(result).startswith("mine (a=[1]) (world 2) does not do what is claimed")
