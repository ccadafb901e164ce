"""A proof: what is right passes every check, and what is measured is judged and told."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commands
import judging
from conftest import GetRanks, deep_unless
from judging import Checks, failures
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.plan import claims
from shardlab.proof import difference, explain, judge, reference, watch
from shardlab.proof.prove import cases_in, cases_of, small, worlds_of
from shardlab.report import proof as report
from shardlab.strategies.data_parallel.simple_ddp_ga import SimpleDDPGradientAccumulation


@functools.cache
def evidence_of(ranks: GetRanks, strategy: str, world: int = 2) -> list[dict[str, Any]]:
    """What ``shardlab prove`` finds out about one strategy."""
    config = configs.load(None, {"data.seq_len": 16, "training.steps": 3})
    (case,) = cases_of(small(config), [strategy], [world])
    return judging.evidence_of(ranks, case, "whole")


def checks_of(ranks: GetRanks, strategy: str, world: int = 2) -> Checks:
    return judge.judge(evidence_of(ranks, strategy, world))


# ------------------------------------------------------------------ what is right


# Of what they send the profiler sees more than the ledger.
NOT_IN_THE_LEDGER = ("pytorch_ddp", "pytorch_zero1", "pytorch_hsdp")
# One of each mechanism; and by PyTorch.
MECHANISMS = (
    "simple_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "local_sgd", "pytorch_zero3",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("strategy", deep_unless(lambda name: name in MECHANISMS, STRATEGIES))
def test_ours_do_what_they_claim(strategy: str, ranks: GetRanks) -> None:
    assert strategy in claims.CLAIMS
    checks = checks_of(ranks, strategy)
    assert {name: check["message"] for name, check in checks.items() if not check["pass"]} == {}
    assert list(checks) == list(judge.CHECKS)
    json.dumps(checks, allow_nan=False)
    source = "profiler" if strategy in NOT_IN_THE_LEDGER else "ledger"
    assert checks["bytes"]["measured"]["source"] == source
    assert unfailing(evidence_of(ranks, strategy)) == []


@pytest.mark.long
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in MECHANISMS])
def test_the_others_hold_and_send_what_they_claim(strategy: str, ranks: GetRanks) -> None:
    """Of the user's model alone, which takes a third of the time."""
    assert strategy in claims.CLAIMS
    assert failures(judging.checks_of(ranks, "gpt2", strategy, data__seq_len=16)) == {}


Numbers = dict[str, Any]
CLAIMS = ("claimed", "claimed_of_used", "claimed_of_stack", "sent_of_stack")  # of the evidence


def unfailing(ranks: list[dict[str, Any]]) -> list[str]:
    """The claims that may say something else and still pass: half, twice, or all parameters more
    than what is right. (What gradients() holds meanwhile is an upper bound: half of it must fail.)
    """

    of_others = (judge.equal, judge.overlap, judge.reproducible)
    passes = all(check(ranks)["pass"] for check in of_others)  # whatever the numbers are
    slim = [{**e, "models": [{**m, "digests": {}} for m in e["models"]]} for e in ranks]

    def wrong(parts: Callable[[dict[str, Any]], list[Numbers]], name: str, factor: float) -> bool:
        """Whether the judge still passes if this number is changed in some parts of the claims."""
        changed = [{**e, **copy.deepcopy({key: e[key] for key in CLAIMS})} for e in slim]
        for evidence in changed:
            more = evidence["full"]["params"] if factor > 1 else 0.0
            for part in parts(evidence):
                part[name] = factor * part[name] if part.get(name) else more
        return passes and all(check(changed)["pass"] for check in (judge.state, judge.sent))

    def users(e: dict[str, Any]) -> list[Numbers]:
        return [e["claimed"], e["claimed_of_used"]["least"]]

    def stacks(e: dict[str, Any]) -> list[Numbers]:
        return [e["claimed_of_stack"], e["claimed_of_stack"]["least"]]

    def sent(e: dict[str, Any]) -> list[Numbers]:
        return [e["claimed"]["moved"], e["claimed"]["most"], e["claimed_of_used"]["moved"]]

    first = ranks[0]
    found = []
    for factor in (0.5, 2.0):
        for kind in ("params", "gradients", "optimizer", "kept"):
            if (factor > 1 or first["claimed"][kind]) and wrong(users, kind, factor):
                found.append(f"{factor:g}x {kind}")
            on_stack = kind != "gradients" and (factor > 1 or first["claimed_of_stack"][kind])
            if on_stack and wrong(stacks, kind, factor):
                found.append(f"{factor:g}x {kind} of the stack")
        for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            if (factor > 1 or first["claimed"]["moved"].get(op)) and wrong(sent, op, factor):
                found.append(f"{factor:g}x {op}")
            for i, step in enumerate(first["sent_of_stack"]):

                def of_stack(e: dict[str, Any], i: int = i) -> list[Numbers]:
                    claimed = e["sent_of_stack"][i]["claimed"]
                    return [claimed["moved"], claimed["most"]]

                claimed = factor > 1 or step["claimed"]["moved"].get(op)
                if claimed and wrong(of_stack, op, factor):
                    found.append(f"{factor:g}x {op} in step {step['step']} of the stack")
    if first["claimed_of_stack"]["peak"] and wrong(stacks, "peak", 0.5):
        found.append("0.5x peak")
    other = {"some": "none", "none": "some"}[first["claimed"]["overlap"]]
    changed = [{**e, "claimed": {**e["claimed"], "overlap": other}} for e in ranks]
    if judge.overlap(changed)["pass"]:
        found.append(f"overlap: {other}")
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", deep_unless(lambda name: name == "zero2", ["zero2", "pytorch_hsdp"])
)
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
    passed = {name: check["pass"] for name, check in checks.items()}
    unchecked = dict.fromkeys(("state", "bytes", "overlap"))
    assert passed == {"equal": True, **unchecked, "reproducible": True}
    assert judge.unchecked(checks) == dict.fromkeys(unchecked, "the strategy names no claim")
    assert judge.passes(checks)
    assert [checks[c]["claimed"] for c in ("state", "bytes", "overlap")] == [None] * 3
    assert checks["bytes"]["measured"]["all_reduce"]["bytes"] > 1e5
    assert checks["overlap"]["measured"]["share"] == 0


@pytest.mark.long
def test_one_bucket_for_all_gradients_leaves_nothing_to_judge(ranks: GetRanks) -> None:
    checks = checks_of(ranks, "zero2:bucket_mb=25")
    assert failures(checks) == {}
    assert "what gradients() holds besides in the meantime is not claimed" in str(checks["state"])
    assert judge.unchecked(checks).keys() == {"overlap"}


class Unclaimed(SimpleDDPGradientAccumulation):
    """A user's own, that says nothing of what it costs."""


class Mistaken(SimpleDDPGradientAccumulation):
    claim = "zero9"


def test_a_claim_that_does_not_exist(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="unknown claim 'zero9'; did you mean 'zero"):
        checks_of(ranks, "test_prove:Mistaken")


# ------------------------------------------------------------------ diagnoses, without ranks


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


def sent(name: str, of: claims.Job) -> dict[str, float]:
    moved: dict[str, float] = claims.CLAIMS[name].of(of)["moved"]
    return moved


def test_formulas_are_those_of_the_papers() -> None:
    n, k = 4, 3
    one, share = job(n, 1), (n - 1) / n
    psi = one.psi
    assert psi == 7200

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
    assert claimed["optimizer"] == claimed["least"]["optimizer"] == 2 * psi / n  # of what trains
    assert claimed["params"] == one.held / n


def test_what_is_left_out_need_not_be_sent() -> None:
    """In one of two micro-batches no rank runs block b1: it is gathered and scattered half as
    often. Under zero3 each of the two ranks may end its forward with another block, which stays."""
    whole = job(2, 2)
    root, *blocks, frozen = whole.params
    blocks[1] = replace(blocks[1], forward=0.5, backward=0.5, arrives=0.5)
    some = replace(whole, params=(root, *blocks, frozen), leaves_out=True)
    block, share = blocks[1].bytes, 1 / 2

    for name, gathers in (("zero3", 2), ("pytorch_zero2", 1), ("pytorch_zero3", 2)):
        saved = {op: sent(name, whole)[op] - sent(name, some)[op] for op in sent(name, some)}
        stays = 2 * block if name == "zero3" else 0
        gathered = (gathers * block + stays) * share
        assert saved == {"all_gather": gathered, "reduce_scatter": block * share}
    # What is sent once in a step is sent if any micro-batch has used it.
    assert sent("zero1", some) == sent("zero1", whole)
    all_reduced = [sent("simple_ddp", of)["all_reduce"] for of in (whole, some)]
    assert all_reduced[0] - all_reduced[1] == 2 * block * share


def test_formulas_with_groups_of_ranks() -> None:
    """Gathered and scattered inside a group of s, summed between g = n/s groups."""
    hybrid, plain = (claims.CLAIMS[f"pytorch_{n}"].of(job(4, 3)) for n in ("hsdp", "zero3"))
    assert hybrid["moved"]["all_reduce"] == 3 * job(4, 3).psi / 2
    assert "all_reduce" not in plain["moved"]
    assert hybrid["params"] == job(4, 3).held / 2 + 4  # the 5 frozen rows are padded to 6
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
    assert (config.model.size, config.training.micro_batch) == ("tiny", None)
    three = configs.load(None, {"training.micro_batch": 3})
    assert small(three, given={"training.micro_batch"}).training.micro_batch == 3
    long = {"training.steps": 99, "training.warmup_steps": 50, "training.global_batch": 512}
    large = configs.load(None, {"model.size": "small", "data.seq_len": 1024, **long})
    assert small(large, steps=2, worlds=[2, 4]) == configs.load(
        None,
        {
            "model.size": "tiny",
            "training.steps": 2,
            "training.warmup_steps": 1,
            "training.global_batch": 16,
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
    assert {c.accumulate for c in cases} == {2}
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
from shardlab.strategies.data_parallel.simple_ddp_ga import SimpleDDPGradientAccumulation as Right

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
    assert "[0/5] single · world 1\n" in done.stderr
    assert re.search(r"\[1/5\] bad.py:Crashes · world 2 · about .* left\n", done.stderr)
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
        assert v["pass"] is all(c["pass"] is not False for c in v["checks"].values())
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
def test_your_own_model_and_strategy(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    model = f"{root / 'examples' / 'your_model.py'}:workload"
    names = f"{root / 'tests' / 'bugs' / 'saboteurs.py'}:NoAveraging,zero1"
    done = commands.here(
        "prove", "--workload", model, "--strategies", names, "--json", cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["env"]["workload"] == "my-model"
    assert [v["pass"] for v in result["verdicts"]] == [False, True]
    first = result["verdicts"][0]["checks"]["equal"]["message"]
    assert "exactly 2.0x" in first
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-prove")
    assert json.loads((folder / "prove.json").read_text()) == result


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world", "two"], "--world two: not whole numbers, as in 2 or 1,2,4"),
        (["--strategies", "zero1:buckets=1"], "unknown option of strategy zero1 'buckets'"),
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


CLEAN = {"loss": 1e-8, "gradient": 1e-7, "parameter": 1e-5}
COARSE = {"loss": 2e-6, "gradient": 2e-4, "parameter": 0.4}


@pytest.mark.parametrize(("ulp", "within", "cell", "message"), [
    (3.0, CLEAN, "✓ 3 ulp", "within 3.00 ulp of one process, 3 steps of mine, and within 136 "),
    (0.0, CLEAN, "✓ exact", "to the last bit of one process, 3 steps of mine, and within 136 ulp"),
    (3.0, COARSE, "✓ gradients\n  to 2e-04", "within rounding of one process, 3 steps of mine"),
    (3.0, COARSE | {"gradient": 0.3}, "✓ losses\n  to 2e-06", "within rounding of one process"),
    (3.0, COARSE | {"parameter": 2e-2}, "✓ to 2e-02", "within rounding of one process"),
])  # fmt: skip
def test_the_table_shows_ones_own_model(
    ulp: float, within: dict[str, float], cell: str, message: str
) -> None:
    """Not the stack, which was further away; and what was judged, where rounding hides the rest."""

    def model(label: str, ulp: float) -> dict[str, Any]:
        return {
            "label": label, "first": None, "worst": {"ulp": ulp, "where": "x"}, "tolerance": 1e8,
            "unwaited": [], "steps": 3, "every": None, "random": "none", "precision": "float64",
            "why_precision": None, "noise": 0.0 if within is CLEAN else 1e-4, "within": within,
        }  # fmt: skip

    equal = judge.equal([{"models": [model("stack", 136.0), model("mine", ulp)]}])
    assert equal["measured"]["max_ulp"] == 136
    assert equal["measured"]["users"] == {"max_ulp": ulp, "where": "x"}
    assert report._cell("equal", equal).plain == cell
    assert equal["message"].startswith(message)
    gone = [kind for kind in ("gradients", "parameters") if within[kind[:-1]] > 0.1]
    said = f"{' and '.join(gone)} could not be judged: rounding moves them as far as a mistake"
    assert (said in equal["message"]) == bool(gone)


def test_the_table_reads_names_as_they_are() -> None:
    checks = judge.failed("no [bold] reason")
    row = {"label": "mine (a=[1])", "world": 2, "pass": False, "checks": checks}
    result = {
        "env": {"workload": "w", "parameters": 5},
        "config": {"training": {"steps": 3, "micro_batch": 4}},
        "verdicts": [row],
        "skipped": [],
    }
    (reason,) = report.reasons(result)
    assert reason.plain == "mine (a=[1]), world 2, every check: no [bold] reason"
    assert report.summary(result).startswith("mine (a=[1]) (world 2) does not do what is claimed")
    assert report.notes(result) == []


def test_a_proof_of_a_loss_over_the_batch_says_what_one_process_was_given() -> None:
    (note,) = report.notes({"env": {"couples_samples": True}, "verdicts": []})
    assert "one process was given the ranks' micro-batches" in note


def test_what_was_not_checked_has_no_mark_and_its_reason() -> None:
    right = {"pass": True, "claimed": None, "measured": None, "message": "as claimed"}
    open_ = {**right, "pass": None, "message": "nobody can tell; 5 MiB sent"}
    checks = {**dict.fromkeys(judge.CHECKS, right), "bytes": open_}
    rows = [{"label": n, "world": 2, "pass": True, "checks": checks} for n in ("a", "b")]
    result = {
        "env": {"workload": "w", "parameters": 5},
        "config": {"training": {"steps": 3, "micro_batch": 4}},
        "verdicts": rows,
        "skipped": [],
    }
    assert judge.passes(checks)
    assert report.reasons(result) == []
    assert report.notes(result) == ["– Not checked of a and b, bytes: nobody can tell."]
    assert report.summary(result) == "All 2 do what is claimed, as far as it was checked."
    cells = [next(iter(column.cells)).plain.strip() for column in report.table(result).columns[2:]]
    assert cells == ["✓", "✓", "–", "✓", "✓"]


def overlap_of(claimed: str, ranks: int = 2, mesh: bool = False, **found: Any) -> Any:
    found = {
        "share": 1.0,
        "ahead": 0.99,
        "largest": 0.1,
        "messages": 9,
        "exposed_ms": None,
        **found,
    }
    evidence = {"claimed": {"overlap": claimed}, "mesh": mesh, "overlap": found}
    check = judge.overlap([evidence] * ranks)
    return check["pass"], check["message"].partition("; ")[0]


def test_overlap_is_judged_where_it_is_seen() -> None:
    assert overlap_of("some")[0] is True
    assert overlap_of("some", ahead=0.7)[0] is False
    assert overlap_of("none", share=0.0, ahead=0.0)[0] is True
    assert overlap_of("none", share=None, messages=0)[0] is True  # nothing was sent
    for (passed, why), message in (
        (overlap_of("none", share=None), "it does not call torch's backward"),
        (overlap_of("some", ranks=1), "a single rank has nobody to send to"),
        (overlap_of("some", ahead=0.1, largest=0.9), "most gradients are in one message, as its"),
        (overlap_of("some", mesh=True), "prove does not judge when ranks that cut a model send"),
    ):
        assert passed is None
        assert message in why
    assert judge.overlap([{"models": []}])["pass"] is None


def test_what_axes_send_is_not_judged() -> None:
    def why(**found: Any) -> str | None:
        return judge._why_unjudged(
            [{"claimed": {}, "sends_claimed": True, "axes": {}, **found}], []
        )

    assert why() is None
    assert "what the axes send" in str(why(axes={"tensor all_reduce": (1, 8)}))
    assert "PyTorch's own code sends" in str(why(sends_claimed=False))
    assert why(claimed=None) == judge.UNCLAIMED
