"""The judge itself: what is right is called right, what is wrong is found and its layer named."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import commands
import judging
import planted
from conftest import GetRanks, deep_unless
from judging import checks_of_case, failures
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.proof import chance, evidence, judge, locate, reference, subjects
from shardlab.proof.prove import cases_of, prove, small, worlds_of
from shardlab.report import proof as report
from shardlab.strategies.data_parallel.simple_ddp_ga import SimpleDDPGradientAccumulation
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

ROOT = Path(__file__).parents[2]
checks_of = functools.cache(judging.checks_of)


# ------------------------------------------------------------------ small models, as people write


class _Rows:
    """Samples that are rows of numbers: (6,) each, and targets (3,)."""

    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> Batch:
        x = torch.sin(torch.as_tensor(list(ids), dtype=torch.float32)[:, None] + torch.arange(6))
        return Batch(inputs=x, targets=x[:, :3].cos(), count=3 * len(x), samples=len(x))


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.targets, reduction="sum")


def _workload(model: type[nn.Module], blocks: tuple[str, ...] = ()) -> Workload:
    return Workload(model.__name__.lower(), model, _squares, _Rows(), blocks=blocks)


class Headed(nn.Module):
    """A layer and a head: what the models change."""

    def __init__(self, inside: int = 6, width: int = 16) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inside, width), nn.Linear(width, 3)


class Counts(Headed):
    """Its loss depends on how often it was called: a warm-up that is counted in Python."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(torch.tanh(self.body(x)) * min(1.0, 0.1 * self.calls))
        return out


class OwnGenerator(Headed):
    """Draws its noise from a generator of its own, which no seed of ours reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x + torch.randn(x.shape, generator=self.draw)))
        return out


class Projects(Headed):
    """A random projection in a plain attribute, and a teacher that is in no list of modules."""

    def __init__(self) -> None:
        super().__init__(40, 40)
        self.projection = torch.randn(6, 40)
        self.teacher = [nn.Linear(40, 40).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.projection.to(x.dtype)
        with torch.no_grad():
            help_ = self.teacher[0].to(x.dtype)(x)
        self.last = torch.tanh(self.body(x)) + help_
        out: Tensor = self.head(self.last)
        return out


class Teaches(nn.Module):
    """A teacher that follows its student in every forward: a frozen parameter that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mine.lerp_(theirs, 0.1)
            said = self.teacher(x)
        out: Tensor = self.student(x) + 0.5 * said
        return out


class Unused(Headed):
    """A part that no forward comes to, as large as the rest."""

    def __init__(self) -> None:
        super().__init__(6, 24)
        self.spare = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


class LeadsNowhere(Headed):
    """Computes a state for the next call, as recurrent layers do, and drops it."""

    def __init__(self) -> None:
        super().__init__(6, 2000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x.exp()  # autograd saves its output
        out: Tensor = self.head(torch.tanh(x))
        return out


class PassesOn(nn.Module):
    """Its first block makes a bias, which the others are given by keyword and return as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(with_table=i == 0) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return x[:, :3]


class Biased(nn.Module):
    def __init__(self, with_table: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 40), nn.Linear(40, 6)
        if with_table:
            self.table = nn.Embedding(1, 40)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.table.weight * 2
        return x + self.down(torch.tanh(self.up(x) * bias)), bias


class Small(nn.Module):
    """No tensor of a KiB: each gradient that is sent might be a count, by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.inlet, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layers(self.inlet(x))))
        return out


class Recurs(nn.Module):
    """Its blocks run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class KeyBias(nn.Module):
    """Attention with a bias of its keys, whose true gradient is zero, and one before BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(1, 16)
        self.norm = nn.BatchNorm1d(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        x = self.norm(self.inlet(100 * x[..., None]).flatten(0, 1)).view(len(x), 6, 16)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = (q @ k.transpose(1, 2) / 4).softmax(-1) @ v
        out: Tensor = self.head(x.mean(1))
        return out


class LoudKeyBias(KeyBias):
    """Keys alone, under a loss with large gradients: their rounding is large enough for Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return 1e6 * super().forward(x)


class SinglePrecision(nn.Module):
    """Makes a tensor of torch's default type in forward: in float64 it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        mix = torch.eye(6)  # float32, whatever x is
        x = x @ mix
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class Mixes(Headed):
    """Normalises in float32, as the norms of T5 and Llama do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        size = y.float().square().mean(-1, keepdim=True)
        out: Tensor = self.head(y * torch.rsqrt(size + 1e-6).to(y.dtype))
        return out


class Masks(nn.Module):
    """A causal mask in two buffers: booleans, and zeros with minus infinity, as scores take it."""

    allowed: Tensor
    added: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
        self.register_buffer("allowed", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("added", torch.zeros(6, 6).masked_fill(~self.allowed, -torch.inf))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        x = torch.tanh(self.inlet(x[..., None]))  # (rows, 6, 8)
        scores = x @ x.transpose(1, 2)
        for attention in (scores.masked_fill(~self.allowed, -1e9), scores + self.added):
            x = x + attention.softmax(-1) @ x
        out: Tensor = self.head(x.mean(1))
        return out


class Coarse(Headed):
    """Multiplies in bfloat16."""

    def __init__(self) -> None:
        super().__init__(width=40)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(x)).bfloat16() @ self.head.weight.T.bfloat16()
        return y.to(x.dtype) + self.head.bias


class Folds(Headed):
    """A table of places in a buffer that is a view of another tensor, as Swin has them."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(4096).view(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x + self.places[0, :6]))
        return out


class Restless(Headed):
    """Something else each time, whatever is seeded."""

    def forward(self, x: Tensor) -> Tensor:
        noise = int.from_bytes(os.urandom(4), "big") / 2**32  # one byte is now and then the same
        out: Tensor = self.head(self.body(x * (1 + noise)))
        return out


class Explodes(Headed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.head(self.body(x)) - 1e3)


counts = functools.partial(_workload, Counts)
own_generator = functools.partial(_workload, OwnGenerator)
projects = functools.partial(_workload, Projects)
teaches = functools.partial(_workload, Teaches)
unused = functools.partial(_workload, Unused)
leads_nowhere = functools.partial(_workload, LeadsNowhere)
passes_on = functools.partial(_workload, PassesOn, ("blocks.0", "blocks.1", "blocks.2"))
small_tensors = functools.partial(_workload, Small)
recurs = functools.partial(_workload, Recurs, ("layers.0", "layers.1"))
key_bias = functools.partial(_workload, KeyBias)
loud_key_bias = functools.partial(_workload, LoudKeyBias)
single_precision = functools.partial(
    _workload, SinglePrecision, ("layers.0", "layers.1", "layers.2")
)
mixes = functools.partial(_workload, Mixes)
masks = functools.partial(_workload, Masks)
coarse = functools.partial(_workload, Coarse)
narrow = replace(_workload(Coarse), name="narrow", loss=lambda m, b: _squares(m, b).bfloat16())
folds = functools.partial(_workload, Folds)
restless = functools.partial(_workload, Restless)
explodes = functools.partial(_workload, Explodes)


ODD = (
    "counts", "own_generator", "projects", "teaches", "key_bias", "loud_key_bias", "mixes", "masks",
    "folds",
)  # fmt: skip
SHARED = ("teaches", "masks", "folds")  # what PyTorch's DDP sends by itself


def is_fast(model: str, strategy: str) -> bool:
    return strategy == "zero2" or (strategy == "pytorch_ddp" and model in SHARED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "strategy"),
    deep_unless(is_fast, itertools.product(ODD, ("single", "zero2", "pytorch_ddp"))),
)
def test_what_is_right_is_called_right(model: str, strategy: str, ranks: GetRanks) -> None:
    assert failures(checks_of(ranks, f"test_judge:{model}", strategy)) == {}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["bucket_ddp_async", "zero2"])
def test_what_nobody_uses_has_no_state(strategy: str, ranks: GetRanks) -> None:
    assert failures(checks_of(ranks, "test_judge:unused", strategy)) == {}


@pytest.mark.parametrize("model", ["leads_nowhere", "passes_on"])
def test_what_is_held_and_sent_is_claimed(model: str, ranks: GetRanks) -> None:
    assert failures(checks_of(ranks, f"test_judge:{model}", "zero3")) == {}


@pytest.mark.long
def test_small_gradients_are_no_counts(ranks: GetRanks) -> None:
    model = "test_judge:small_tensors"
    assert failures(checks_of(ranks, model, "simple_ddp_ga")) == {}
    found = failures(checks_of(ranks, model, "saboteurs:SendsEachTime"))
    assert found.keys() == {"bytes"}
    assert "2.01x the claim: it communicates in each of the 2 micro-batches" in found["bytes"]


def test_how_often_a_block_that_runs_twice_is_gathered_is_not_claimed(ranks: GetRanks) -> None:
    """It may be right: so nothing is said, and no mark is given."""
    checks = checks_of(ranks, "test_judge:recurs", "pytorch_zero3")
    assert failures(checks) == {}
    assert checks["bytes"]["pass"] is None
    assert "not known how often a forward uses each layer" in checks["bytes"]["message"]


# ------------------------------------------------------------------ the reference does as the run


RULES = {
    "training__clip_norm": 0.01,
    "training__schedule": "cosine",
    "training__min_rate": 0.1,
    "training__warmup_steps": 1,
}


@pytest.mark.parametrize("strategy", ["single", "zero1"])
def test_one_process_clips_and_schedules(strategy: str, ranks: GetRanks) -> None:
    assert failures(checks_of(ranks, "planted:layers", strategy, **RULES)) == {}


# ------------------------------------------------------------------ chance


@pytest.mark.long
def test_chance_is_noticed_and_seeded_alike(ranks: GetRanks) -> None:
    checks = checks_of(ranks, "people:functional_dropout", "zero1")
    assert failures(checks) == {}
    assert checks["equal"]["measured"]["random"] == "seeded alike"
    assert checks["equal"]["message"].endswith("; random forward: seeded alike in both")
    plain = checks_of(ranks, "planted:layers", "zero1")
    assert plain["equal"]["measured"]["random"] == "none"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("restless", "the forward of restless computes something else each time"),
        ("explodes", "that is not finite in step 0 of explodes: there is nothing to compare with"),
    ],
)
def test_no_strategy_is_blamed_for_the_model(model: str, message: str, ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match=message):
        checks_of(ranks, f"test_judge:{model}", "simple_ddp")


def test_the_same_micro_batch_has_the_same_seed() -> None:
    data = _Rows()
    steps = [[[data.batch([i])] for i in range(2)] for _ in range(2)]
    loss = chance.Seeded(lambda _model, _batch: torch.rand(()), 0, steps)
    model = nn.Identity()
    values = [[loss(model, share[0]) for share in shares] for shares in steps]
    assert len({float(v) for row in values for v in row}) == 4
    assert loss(model, steps[1][0][0]) == values[1][0]
    assert loss.current == chance.Place(1, 0, 0)
    draws = chance.nature(lambda: nn.Linear(1, 1), loss)
    assert draws == chance.ForwardTraits(uses_rng=True, stateful=False, repeats=True)


class _Turns(nn.Linear):
    """What trains changes in forward, as in a GAN whose parts take turns."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.requires_grad_(not self.weight.requires_grad)
        return super().forward(x)


def test_what_trains_may_change_in_forward() -> None:
    data = _Rows()
    batch = data.batch([0])
    loss = chance.Seeded(lambda model, _: model(torch.ones(1, 4)).sum(), 0, [[[batch]]])
    found = chance.nature(lambda: _Turns(4, 1), loss)
    assert found == chance.ForwardTraits(uses_rng=False, stateful=False, repeats=True)


# ------------------------------------------------------------------ rounding, and what is not


def referred(workload: Workload, dtype: torch.dtype = torch.float64) -> reference.Reference:
    config = small(configs.load(None, {"training.learning_rate": 0.01}))
    data = workload.dataset
    steps = [
        [[data.batch(range(4 * (s + r + m), 4 * (s + r + m) + 4)) for m in (0, 1)] for r in (0, 1)]
        for s in range(3)
    ]
    cast = [[[subjects._cast(b, dtype) for b in m] for m in r] for r in steps]
    subject = subjects.Subject(subjects._seeded(workload, 0, cast), 0, cast, dtype)
    return reference.refer(subject, config)


def test_a_gradient_of_zero_is_measured_by_its_rounding() -> None:
    one = referred(key_bias())
    gradient = one.gradients[0]["inlet.bias"]
    assert gradient is not None
    assert 0 < float(gradient.abs().max()) < 1e-9  # before BatchNorm: nothing but rounding
    tolerance = one.scale.tolerance
    unit = one.unit(0, "gradient", "inlet.bias")
    assert float(unit) * tolerance > float(gradient.abs().max())
    # Adam makes something of it, and that much may differ; of the weights next to it, it may not.
    for step in range(3):
        noisy = one.unit(step, "parameter", "inlet.bias") * tolerance
        real = one.unit(step, "parameter", "head.bias") * tolerance
        assert float(noisy.max()) > 10 * float(real.max())
        assert float(real.max()) < 1e-7
    # Of a fused bias, the keys' third alone.
    q, k, v = (one.unit(2, "parameter", "qkv.bias") * tolerance).chunk(3)
    assert float(k.min()) > 10 * float(torch.cat([q, v]).max())


def test_a_factor_is_far_from_rounding() -> None:
    for dtype in (torch.float64, torch.float32):
        one = referred(key_bias(), dtype)
        for step, gradients in enumerate(one.gradients):
            top = max(reference.largest(g) for g in gradients.values() if g is not None)
            for name, gradient in gradients.items():
                assert gradient is not None
                if reference.largest(gradient) > 1e-3 * top:
                    allowed = one.unit(step, "gradient", name) * one.scale.tolerance
                    assert float(allowed) < 0.3e-3 * reference.largest(gradient), (dtype, name)


class LargestMask(Masks):
    """Its mask is the lowest number there is, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.added.clamp_(min=torch.finfo(torch.float32).min)


def test_a_large_buffer_hides_no_mistake_in_a_parameter() -> None:
    one = referred(_workload(LargestMask))
    for name in ("inlet.weight", "head.bias"):
        allowed = one.unit(2, "parameter", name) * one.scale.tolerance
        assert float(torch.as_tensor(allowed).max()) < 1e-6


def test_gradients_stand_in_the_order_of_backward() -> None:
    names = list(referred(planted.layers()).gradients[0])
    assert names[0].startswith("outlet")
    assert [n for n in names if n.endswith("weight")] == [
        "outlet.weight", "layers.3.weight", "layers.2.weight", "layers.1.weight",
        "layers.0.weight", "inlet.weight",
    ]  # fmt: skip


# ------------------------------------------------------------------ precision


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", deep_unless(lambda name: name == "zero2", ["single", "zero2", "pytorch_ddp"])
)
def test_a_model_without_float64(strategy: str, ranks: GetRanks) -> None:
    checks = checks_of(ranks, "test_judge:single_precision", strategy)
    assert failures(checks) == {}
    measured = checks["equal"]["measured"]
    assert measured["precision"] == "float32"
    assert measured["why_precision"].startswith("it does not run in float64 (RuntimeError: ")
    assert f"in float32: {measured['why_precision']}" in checks["equal"]["message"]


@pytest.mark.long
def test_a_thousandth_shows_in_float32(ranks: GetRanks) -> None:
    found = failures(checks_of(ranks, "test_judge:single_precision", "planted:Zero2Factor"))
    assert "gradient 'layers.2.weight': gradients are exactly 1.001x" in found["equal"]


@pytest.mark.long
def test_a_model_that_mixes_precisions_is_told_so(ranks: GetRanks) -> None:
    checks = checks_of(ranks, "test_judge:mixes", "zero2")
    assert checks["equal"]["measured"]["precision"] == "float64"
    assert checks["equal"]["measured"]["noise"] > judge.MIXED
    assert "the model computes in less than float64" in checks["equal"]["message"]
    assert (
        "losses are judged to 1e-08, gradients to 1e-06, parameters to 8e-06"
        in (checks["equal"]["message"])
    )
    assert checks_of(ranks, "planted:layers", "zero2")["equal"]["measured"]["noise"] < 1e-12


@pytest.mark.long
def test_what_rounding_hides_is_not_said_to_be_judged(ranks: GetRanks) -> None:
    """In bfloat16 the losses can be judged; gradients that lack a micro-batch look alike."""
    message = checks_of(ranks, "test_judge:coarse", "zero2")["equal"]["message"]
    assert re.search(r"losses are judged to \de-03; gradients and parameters could not be", message)
    with pytest.raises(UsageError, match="nothing can be proved on narrow: it rounds so much"):
        checks_of(ranks, "test_judge:narrow", "zero2")


# ------------------------------------------------------------------ the layer is named


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_nothing_is_found_where_nothing_is_planted(strategy: str, ranks: GetRanks) -> None:
    assert failures(checks_of(ranks, "planted:layers", strategy)) == {}


def test_a_factor_of_all_gradients_is_no_place() -> None:
    """A strategy may scale its losses: only what departs from that factor is a difference."""
    loss = chance.Seeded(_squares, 0, [[[_Rows().batch(range(4))]]])

    def probed(factor: float, spoiled: float) -> locate.Probe:
        probe = locate.Probe(loss, 0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        model[1].register_full_backward_hook(lambda _m, grads, _g: (grads[0] * spoiled,))
        probe.attach(model)
        (factor * loss(model, loss.batches[0])).backward()
        return probe

    one = probed(1.0, 1.0)
    assert locate.first_difference(probed(2.0, 1.0), one, torch.float64) is None
    found = locate.first_difference(probed(2.0, 3.0), one, torch.float64)
    assert found is not None
    assert (found["direction"], found["of"], found["module"]) == ("backward", "input", "1")
    assert found["ratio"] == pytest.approx(3.0)


# ------------------------------------------------------------------ limits, and one reason


class Hangs(SimpleDDPGradientAccumulation):
    def step(self) -> None:
        time.sleep(3600)


@pytest.mark.long
def test_a_proof_that_does_not_end_is_ended(tmp_path: Path) -> None:
    config = small(configs.load(None, {"model.workload": "planted:layers"}))
    cases = cases_of(config, ["test_judge:Hangs"], [2])
    started = time.monotonic()
    result = prove(cases, [2], "a test", limit_s=8)
    assert time.monotonic() - started < 60
    (found,) = result["verdicts"]
    text = json.dumps(found)
    assert text.count("no answer within 8 s") == 1
    assert [c["pass"] for c in found["checks"].values()] == [False] * 5
    (line,) = report.reasons(result)
    assert line.plain.startswith("test_judge:Hangs, world 2, every check: it did not get through")
    assert judge.reasons(found["checks"]).keys() == {"every check"}
    assert list(tmp_path.iterdir()) == []


def prepared_when_the_users_model_fails(world: World, config: configs.Config) -> list[str]:
    evidence._prepared.clear()
    with (
        mock.patch.object(evidence, "_examine_users", side_effect=ArithmeticError),
        contextlib.suppress(ArithmeticError),
    ):
        evidence.examine(world, config)
    return [name for name, _ in evidence._prepared]


def test_the_users_model_is_proved_before_the_stack(ranks: GetRanks) -> None:
    config = small(configs.load(None, {"model.workload": "planted:layers"}))
    (case,) = cases_of(config, ["simple_ddp_ga"], [2])
    found = ranks(2).run(prepared_when_the_users_model_fails, case)
    assert found == [["users"]] * 2


def test_help_says_what_is_proved_and_how_long_it_takes(tmp_path: Path) -> None:
    done = commands.here("prove", "--help", cwd=tmp_path)
    text = " ".join(done.stdout.split())
    assert "The proof is of your model" in text
    assert "It takes a few seconds for each strategy" in text
    assert "the progress says how long the rest will take" in text


# ------------------------------------------------------------------ the examples

EXPERIMENTS = sorted((ROOT / "examples" / "experiments").glob("*.yaml"))


def is_typical(path: Path) -> bool:
    return path.stem in ("cnn_mnist", "gpt2_fsdp_full_shard")


@pytest.mark.long
@pytest.mark.parametrize("path", deep_unless(is_typical, EXPERIMENTS), ids=lambda p: p.stem)
def test_every_experiment_passes_its_own_proof(path: Path, ranks: GetRanks) -> None:
    asked = configs.load(path)
    if asked.model.workload == "causal_lm":
        pytest.importorskip("transformers")
    if asked.model.workload != "gpt2":
        asked = configs.load(path, {"data.source": "synthetic"})
    (case,) = cases_of(small(asked), [asked.strategy.name], worlds_of(None, asked))
    # The stack is the strategy's alone, and proved in test_prove; but not by so many ranks.
    part = "users" if (case.launch.world or 1) <= 2 else "whole"
    assert failures(checks_of_case(ranks, case, part)) == {}
