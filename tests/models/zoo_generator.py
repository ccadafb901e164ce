"""Models put together at random from the zoo's traits, each under strategies and in one process.

    python tests/models/zoo_generator.py --models 1000 --seed 7 --strategies ours --minutes 60

prints a table, and every model under which a strategy neither equals one process nor refuses, with
its traits and its number; ``--only NUMBER`` runs that one again. The number alone builds the model:
its traits, its layers, the order of its calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import secrets
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import zoo
import zookeeper
from conformance import Arrays, arrays, set_state, state_of
from shardlab.config import LaunchConfig
from shardlab.launch.ranks import Ranks
from zoo import CLASSES, GROUPS, Animal, Sample, W, says_so, score
from zookeeper import Verdict

SPAN = 1_000_000  # models of one --seed
CHUNK = 40  # models per call of the ranks


@dataclass
class Call:
    """One call of a block in the model's forward."""

    block: int
    how: str = "plain"  # how it is called
    when: str = "always"
    after: str = "plain"  # what is done with its output


@dataclass
class Plan:
    """All that the number decides."""

    number: int
    random: random.Random
    kinds: list[str]
    calls: list[Call]
    listed: list[str]
    traits: list[str] = field(default_factory=list)
    loss: str = "plain"
    wrap: str = "plain"
    frozen: list[str] = field(default_factory=list)  # prefixes or suffixes of names
    edits: list[Callable[[Any], None]] = field(
        default_factory=list
    )  # of the model, once it is built
    inputs: list[Callable[[Any, Tensor], Tensor]] = field(
        default_factory=list
    )  # at forward's start
    toggled: str = ""
    evaluates: bool = False
    tolerance: float = 1e-9
    empty_ranks: bool = True

    @property
    def some(self) -> int:
        """A block, at random."""
        return self.random.randrange(len(self.kinds))


# ------------------------------------------------------------------ blocks


class Part(nn.Module):
    """A block: its kind says what is in it, ``wrap`` what it returns."""

    def __init__(self, kind: str, wrap: str) -> None:
        super().__init__()
        self.kind, self.wrap = kind, wrap
        self.drop = False  # pass the input through
        width = {"wide": 17, "narrow": 2}.get(kind, W)
        self.linear = nn.Linear(W, width, bias=kind != "no_bias")
        if kind in ("wide", "narrow"):
            self.back = nn.Linear(width, W)
        elif kind == "normed":
            self.norm = nn.LayerNorm(W)
        elif kind == "batchnorm":
            self.norm = nn.BatchNorm1d(W)
        elif kind == "experts":
            self.inner = zoo.Experts()
        elif kind == "lora":
            self.linear.requires_grad_(False)
            self.down, self.up = nn.Linear(W, 2, bias=False), nn.Linear(2, W, bias=False)
        elif kind == "nested":
            self.inner = zoo.Block()
        elif kind == "gru":
            self.inner = zoo.Recurrent(nn.GRU)
        elif kind == "attention":
            self.inner = zoo.Attending()
        elif kind == "scalar":
            self.gain = nn.Parameter(torch.tensor(0.9))
        elif kind == "empty":
            self.nothing = nn.Parameter(torch.zeros(0, W))
        elif kind == "transposed":
            self.linear.weight = nn.Parameter(torch.randn(W, W).t() * 0.4)

    def compute(self, x: Tensor) -> Tensor:
        kind = self.kind
        if kind == "bare":  # no residual: one branch only
            return torch.tanh(self.linear(x))
        if kind == "function":
            return x + 0.3 * zoo.Reversal.apply(x, self.linear.weight) + self.linear.bias
        y = torch.tanh(self.linear(x))
        if kind in ("wide", "narrow"):
            y = self.back(y)
        elif kind in ("normed", "batchnorm"):
            y = self.norm(y)
        elif kind in ("experts", "nested", "gru", "attention"):
            y = self.inner(y)
        elif kind == "lora":
            y = y + self.up(self.down(x))
        elif kind == "scalar":
            y = y * self.gain
        elif kind == "empty":
            y = y + self.nothing.sum()
        elif kind == "branch" and says_so(x):
            y = y * 2 + F.linear(x, self.linear.weight)
        elif kind == "inside":
            y = checkpoint(lambda t: torch.tanh(self.linear(t)), x, use_reentrant=False)
        return x + y

    def forward(self, x: Any, bias: Tensor | None = None) -> Any:
        if self.wrap == "state":
            x["hidden"] = x["hidden"] if self.drop else self.compute(x["hidden"])
            return None
        y = x if self.drop else self.compute(x)
        if self.wrap == "bias":
            made = self.linear.weight.sum(0)[:W] if bias is None else bias
            return y + made * 0.1, made
        return WRAPS[self.wrap][0](y)


WRAPS = {**zoo.WRAPS, "plain": (lambda y: y, lambda out: out), "bias": (None, lambda out: out[0])}
KINDS = {  # and how often
    "plain": 8, "no_bias": 2, "bare": 2, "wide": 2, "narrow": 1, "normed": 3, "batchnorm": 1,
    "experts": 1, "lora": 1, "nested": 1, "gru": 1, "attention": 1, "scalar": 1, "empty": 1,
    "transposed": 1, "function": 1, "branch": 1, "inside": 1,
}  # fmt: skip
NO_EMPTY_BATCH = ("gru", "attention")


class Made(nn.Module):
    """The model of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.blocks = nn.ModuleList(Part(kind, plan.wrap) for kind in plan.kinds)
        self.head = nn.Linear(W, CLASSES)
        for edit in plan.edits:
            edit(self)
        for name, p in self.named_parameters():
            if any(name.startswith(f) or name.endswith(f) for f in plan.frozen):
                p.requires_grad_(False)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        plan, depth = self.plan, len(self.blocks)
        for i, block in enumerate(self.blocks):
            if plan.toggled == "turns":
                block.requires_grad_(i == step % depth)
            elif plan.toggled == "unfreezing":
                block.requires_grad_(i >= depth - step)
            elif plan.toggled == "freezing":
                block.requires_grad_(i >= step)
            block.drop = "passes_through" in plan.traits and (i + step) % 3 == 0
        for change in plan.inputs:
            x = change(self, x)
        calls, kept, bias = plan.calls, [], None
        if "data_order" in plan.traits and says_so(x):
            calls = calls[::-1]
        for call in calls:
            if not _is_due(call, x, step, rank):
                continue
            y, bias = self._call(call, x, bias)
            if call.after == "discarded":
                continue
            if call.after == "detached":
                y = y.detach()
            elif call.after == "in_place":
                y = y.mul_(0.9)
            elif call.after == "kept":
                kept.append(y)
                continue
            elif call.after == "added":
                y = y + x
            x = y
            if "early_exit" in plan.traits and says_so(x):
                break
        for y in kept:
            x = x + 0.5 * y
        return self.head(x)

    def _call(self, call: Call, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        block, wrap = self.blocks[call.block], self.plan.wrap
        given: tuple[Any, ...] = (x, bias) if wrap == "bias" else (x,)
        state = {"hidden": x}
        if wrap == "state":
            given = (state,)
        if call.how == "no_grad":
            with torch.no_grad():
                out = block(*given)
        elif call.how == "direct":
            out = block.forward(*given)
        elif call.how == "checkpoint":
            out = checkpoint(block, *given, use_reentrant=False)
        elif call.how == "reentrant":
            given = (x if x.requires_grad else x.clone().requires_grad_(), *given[1:])
            out = checkpoint(block, *given, use_reentrant=True)
        elif call.how == "functional":
            scaled = {n: p * 0.9 for n, p in block.named_parameters()}
            out = torch.func.functional_call(block, scaled, given)
        elif call.how == "twice":
            with torch.no_grad():
                block(*given)
            out = block(*given)
        else:
            out = block(*given)
        if wrap == "state":
            return state["hidden"], None
        return WRAPS[wrap][1](out), (out[1] if wrap == "bias" else None)


def _is_due(call: Call, x: Tensor, step: int, rank: int) -> bool:
    return {
        "always": True,
        "data": says_so(x),
        "even_steps": step % 2 == 0,
        "odd_steps": step % 2 == 1,
        "rank_0": rank == 0,
        "rank_1": rank == 1,
        "never": False,
    }[call.when]


# ------------------------------------------------------------------ traits


TRAITS: dict[str, Callable[[Plan], None]] = {}


def trait(function: Callable[[Plan], None]) -> Callable[[Plan], None]:
    TRAITS[function.__name__] = function
    return function


def _calls(plan: Plan) -> list[Call]:
    """Some of the calls, one at least."""
    return plan.random.sample(plan.calls, plan.random.randint(1, len(plan.calls)))


def _each(name: str, attribute: str, value: str) -> None:
    def change(plan: Plan) -> None:
        for call in _calls(plan):
            setattr(call, attribute, value)

    TRAITS[name] = change


for _how in ("no_grad", "direct", "checkpoint", "reentrant", "functional", "twice"):
    _each(f"call_{_how}", "how", _how)
for _when in ("data", "even_steps", "odd_steps", "rank_0", "rank_1", "never"):
    _each(f"when_{_when}", "when", _when)
for _after in ("discarded", "detached", "in_place", "kept", "added"):
    _each(f"then_{_after}", "after", _after)
for _wrap in ("dataclass", "output", "opaque", "nested", "views", "iterator", "bias", "state"):
    TRAITS[f"wrap_{_wrap}"] = functools.partial(lambda plan, w: setattr(plan, "wrap", w), w=_wrap)
for _loss in ("penalty", "penalty_first", "zero_times", "gradient_penalty", "model_twice", "parts"):
    TRAITS[f"loss_{_loss}"] = functools.partial(lambda plan, w: setattr(plan, "loss", w), w=_loss)
for _toggled in ("turns", "unfreezing", "freezing"):
    TRAITS[f"toggled_{_toggled}"] = functools.partial(
        lambda plan, w: setattr(plan, "toggled", w), w=_toggled
    )


@trait
def frozen_blocks(plan: Plan) -> None:
    plan.frozen += [f"blocks.{plan.some}." for _ in range(plan.random.randint(1, 2))]


@trait
def frozen_first(plan: Plan) -> None:
    plan.frozen.append(f"blocks.{plan.calls[0].block}.")


@trait
def frozen_tail(plan: Plan) -> None:
    plan.frozen += [f"blocks.{plan.calls[-1].block}.", "head."]


@trait
def frozen_weights(plan: Plan) -> None:
    plan.frozen.append(plan.random.choice(["weight", "bias"]))


@trait
def reused(plan: Plan) -> None:
    for _ in range(plan.random.randint(1, 3)):
        plan.calls.insert(plan.random.randint(0, len(plan.calls)), Call(plan.some))


@trait
def reordered(plan: Plan) -> None:
    plan.random.shuffle(plan.calls)


@trait
def left_out(plan: Plan) -> None:
    if len(plan.calls) > 1:
        plan.calls.pop(plan.random.randrange(len(plan.calls)))


@trait
def listed_anyhow(plan: Plan) -> None:
    plan.random.shuffle(plan.listed)


@trait
def listed_in_part(plan: Plan) -> None:
    plan.listed = plan.random.sample(plan.listed, plan.random.randint(0, len(plan.listed)))


@trait
def head_listed(plan: Plan) -> None:
    plan.listed.insert(plan.random.randint(0, len(plan.listed)), "head")


@trait
def inner_listed(plan: Plan) -> None:
    nested = [i for i, kind in enumerate(plan.kinds) if kind == "nested"]
    if not nested:
        nested = [plan.some]
        plan.kinds[nested[0]] = "nested"
    plan.listed.insert(plan.random.randint(0, len(plan.listed)), f"blocks.{nested[0]}.inner")


for _name in ("data_order", "early_exit", "passes_through"):  # which Made.forward looks for
    TRAITS[_name] = lambda _plan: None


@trait
def evaluated(plan: Plan) -> None:
    plan.evaluates = True


def _square(plan: Plan) -> list[int]:
    """Blocks whose linear layer is W by W, made to be at least two."""
    for i in range(min(2, len(plan.kinds))):
        if plan.kinds[i] in ("wide", "narrow"):
            plan.kinds[i] = "plain"
    return [i for i, kind in enumerate(plan.kinds) if kind not in ("wide", "narrow", "transposed")]


@trait
def tied_blocks(plan: Plan) -> None:
    pair = plan.random.sample(_square(plan), k=min(2, len(_square(plan))))

    def tie(model: Any) -> None:
        model.blocks[pair[0]].linear.weight = model.blocks[pair[-1]].linear.weight

    plan.edits.append(tie)


@trait
def tied_to_the_root(plan: Plan) -> None:
    which = plan.random.choice(_square(plan) or [0])

    def tie(model: Any) -> None:
        model.project = nn.Linear(W, W)
        if model.blocks[which].linear.weight.shape == (W, W):
            model.project.weight = model.blocks[which].linear.weight

    plan.edits.append(tie)
    plan.inputs.append(lambda model, x: model.project(x))


@trait
def one_module_twice(plan: Plan) -> None:
    a, b = plan.some, plan.some

    def alias(model: Any) -> None:
        model.blocks[a] = model.blocks[b]

    plan.edits.append(alias)
    plan.kinds[a] = plan.kinds[b]


@trait
def borrowed(plan: Plan) -> None:
    which = plan.some
    plan.inputs.append(lambda model, x: x + model.blocks[which].linear.weight.sum() * 0.1)


@trait
def embedding(plan: Plan) -> None:
    plan.edits.append(lambda model: setattr(model, "embed", nn.Embedding(11, W, padding_idx=0)))
    plan.inputs.append(lambda model, x: x + model.embed(zoo.tokens(x)).mean(1))


def on_a_block(edit: Callable[[Any], None]) -> None:
    """A trait that changes a block, any one."""

    def change(plan: Plan) -> None:
        which = plan.some
        plan.edits.append(lambda model: edit(model.blocks[which]))

    TRAITS[edit.__name__] = change


@trait
def unused(plan: Plan) -> None:
    which = plan.some
    plan.edits.append(lambda m: setattr(m.blocks[which], "never", nn.Parameter(torch.ones(5))))
    plan.edits.append(lambda model: setattr(model, "never", nn.Parameter(torch.ones(3))))


@on_a_block
def pre_hook(block: Any) -> None:
    block.scale = nn.Parameter(torch.ones(1))
    block.register_forward_pre_hook(_scaled)


def _scaled(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(given[0], dict):
        given[0]["hidden"] = given[0]["hidden"] * module.scale
        return given
    return (given[0] * module.scale, *given[1:])


@on_a_block
def forward_hook(block: Any) -> None:
    def read(module: Any, _given: Any, out: Any) -> Any:
        module.seen = float(module.linear.weight.detach().sum())
        return out

    block.register_forward_hook(read)


@on_a_block
def backward_hook(block: Any) -> None:
    block.linear.register_full_backward_hook(lambda _m, gin, _gout: tuple(gin))


@on_a_block
def parameter_hook(block: Any) -> None:
    if block.linear.weight.requires_grad:
        block.linear.weight.register_hook(lambda gradient: gradient * 0.5)


def _normalised(name: str, normalise: Callable[[nn.Module], Any]) -> None:
    def change(plan: Plan) -> None:
        which = plan.some

        def edit(model: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                normalise(model.blocks[which].linear)

        plan.edits.insert(0, edit)

    TRAITS[name] = change


_normalised("weight_norm_old", nn.utils.weight_norm)
_normalised("weight_norm_new", parametrizations.weight_norm)
_normalised("spectral_norm_old", nn.utils.spectral_norm)


@trait
def parametrized(plan: Plan) -> None:
    which = plan.random.choice(_square(plan) or [0])

    def edit(model: Any) -> None:
        linear = model.blocks[which].linear
        if linear.weight.shape == (W, W):
            parametrize.register_parametrization(linear, "weight", zoo.Symmetric())

    plan.edits.insert(0, edit)


@trait
def mixed_dtypes(plan: Plan) -> None:
    which = plan.some
    plan.tolerance = 1e-4

    def edit(model: Any) -> None:
        model.blocks[which].extra = nn.Parameter(torch.rand(W, dtype=torch.float32))

    plan.edits.append(edit)
    plan.inputs.append(lambda model, x: x * (model.blocks[which].extra.double() + 0.5))


@trait
def frozen_integers(plan: Plan) -> None:
    which = plan.some

    def edit(model: Any) -> None:
        levels = torch.randint(-3, 4, (W,), dtype=torch.int8)
        model.blocks[which].levels = nn.Parameter(levels, requires_grad=False)

    plan.edits.append(edit)
    plan.inputs.append(lambda model, x: x + 0.01 * model.blocks[which].levels.to(x.dtype))


@trait
def complex_numbers(plan: Plan) -> None:
    plan.empty_ranks = False

    def edit(model: Any) -> None:
        model.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        model.register_buffer("turn", torch.polar(torch.ones(4), torch.rand(4)))

    plan.edits.append(edit)
    plan.inputs.append(
        lambda model, x: torch.fft.irfft(torch.fft.rfft(x) * model.spectrum * model.turn, n=W)
    )


@trait
def expanded_buffer(plan: Plan) -> None:
    plan.edits.append(lambda model: model.register_buffer("ones", torch.ones(1).expand(4096)))
    plan.inputs.append(lambda model, x: x * model.ones[:W])


@trait
def moving_buffer(plan: Plan) -> None:
    def move(model: Any, x: Tensor) -> Tensor:
        if len(x):
            with torch.no_grad():
                model.mean.lerp_(x.mean(0), 0.1)
        return x - model.mean

    plan.edits.append(lambda model: model.register_buffer("mean", torch.zeros(W)))
    plan.inputs.append(move)


@trait
def clipped(plan: Plan) -> None:
    which = plan.some

    def clip(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p in model.blocks[which].parameters():
                if p.is_floating_point():
                    p.clamp_(-0.3, 0.3)
        return x

    plan.inputs.append(clip)


# ------------------------------------------------------------------ from a number to an animal


def plan_of(number: int) -> Plan:
    rng = random.Random(number)
    depth = rng.randint(1, 5)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=depth)
    calls = [Call(i) for i in range(depth)]
    plan = Plan(number, rng, kinds, calls, [f"blocks.{i}" for i in range(depth)])
    chosen = rng.sample(list(TRAITS), rng.randint(1, 6))
    plan.traits = sorted(chosen)
    for name in chosen:
        TRAITS[name](plan)
    if any(kind in NO_EMPTY_BATCH for kind in plan.kinds) or plan.loss == "gradient_penalty":
        plan.empty_ranks = False
    return plan


def _loss(kind: str, model: Any, batch: Sample) -> Tensor:
    given = (batch.step, batch.rank)
    if kind == "gradient_penalty":
        x = batch.inputs.clone().requires_grad_()
        out = model(x, *given)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return score(out, batch) + 0.1 * slope.square().sum()
    if kind == "model_twice":
        return score(model(batch.inputs, *given) + model(batch.inputs * 0.5, *given), batch)
    if kind == "parts":
        inner = getattr(model, "module", model)
        return score(inner.head(inner.blocks[0].compute(batch.inputs)), batch)
    floats = [p for p in model.parameters() if p.dtype is torch.float64]
    penalty: Any = 0.0
    if kind == "penalty_first":
        penalty = 0.01 * batch.count * sum(p.square().sum() for p in floats)
    loss = score(model(batch.inputs, *given), batch)
    if kind == "penalty":
        penalty = 0.01 * batch.count * sum(p.square().sum() for p in floats)
    elif kind == "zero_times":
        penalty = 0 * sum(p.sum() for p in floats)
    return loss + penalty


def _evaluate(model: Any, batch: Sample) -> Tensor:
    out = model(batch.inputs, batch.step, batch.rank)
    return score(out + model(batch.inputs * 0.5, batch.step, batch.rank), batch)


@functools.lru_cache(maxsize=2000)
def find(name: str) -> Animal:
    """The animal of a number."""
    plan = plan_of(int(name))
    return Animal(
        name,
        ", ".join(plan.traits) or "no trait",
        lambda: Made(plan),
        functools.partial(_loss, plan.loss),
        tuple(dict.fromkeys(plan.listed)),
        _evaluate if plan.evaluates else None,
        {},
        plan.empty_ranks,
        0,
        plan.tolerance,
    )


@functools.lru_cache(maxsize=4000)
def is_sound(name: str, world: int) -> bool:
    """Whether one process can train it: some traits do not go together."""
    course = zookeeper.refer(find(name), world)
    if isinstance(course, Exception) or not course.grads:  # nothing trains
        return False
    return all(abs(loss) < 1e6 for loss in course.losses) and _adds_up(find(name))


def _adds_up(animal: Animal) -> bool:
    """Whether PyTorch's gradient is the same if it is added to zeros.

    It is not where a scalar parameter keeps a gradient that shares its memory with another's, and
    a re-entrant backward adds to it in place (docs/log.md). One process that accumulates then gets
    another sum than several that do.
    """
    model = animal.build(seed=0)
    params, start = dict(model.named_parameters()), state_of(model)
    found: list[Arrays] = []
    for _ in range(2):
        set_state(model, start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, about what a model does on purpose
            animal.loss(model, animal.batch(0, 0, 0)).backward()
        found.append(arrays({n: p.grad for n, p in params.items() if p.requires_grad}))
        for p in params.values():
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad)
    return zookeeper._difference(found[1], found[0], 1e-9) is None


# ------------------------------------------------------------------ the command


@dataclass
class Hunt:
    """What was found."""

    tried: int = 0
    unsound: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)  # by strategy
    failures: list[dict[str, Any]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def note(self, number: str, strategy: str, world: int, verdict: Verdict) -> None:
        self.verdicts.setdefault(strategy, Counter())[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refusals[f"{strategy}: {verdict.text[:100]}"] += 1
        elif verdict.kind != "equal":
            self.failures.append(
                {
                    "number": int(number),
                    "strategy": strategy,
                    "world": world,
                    "verdict": str(verdict),
                    "traits": find(number).why,
                }
            )

    def table(self) -> str:
        kinds = ("equal", "refused", "WRONG", "CRASH", "HANG")
        lines = [f"{'strategy':18}" + "".join(f"{kind:>9}" for kind in kinds)]
        for strategy, counts in self.verdicts.items():
            lines.append(f"{strategy:18}" + "".join(f"{counts[kind]:9}" for kind in kinds))
        sound = self.tried - self.unsound
        lines.append(f"{sound} models ({self.unsound} more that one process cannot train)")
        return "\n".join(lines)


def hunt(
    get_ranks: Callable[[int], Ranks],
    numbers: Sequence[int],
    strategies: Sequence[str],
    world: int = 2,
    until: float | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Hunt:
    """Run the models of these numbers, until they or the time are used up."""
    found = Hunt()
    for start in range(0, len(numbers), CHUNK):
        if until is not None and time.monotonic() > until:
            break
        names = [str(n) for n in numbers[start : start + CHUNK]]
        sound = [name for name in names if is_sound(name, world)]
        found.tried += len(names)
        found.unsound += len(names) - len(sound)
        cells = [(name, strategy) for strategy in strategies for name in sound]
        for cell, verdict in zip(cells, zookeeper.run(get_ranks, world, find, cells), strict=True):
            before = len(found.failures)
            found.note(*cell, world, verdict)
            for failure in found.failures[before:]:
                say(json.dumps(failure))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, help="another one finds other models; default: fresh")
    parser.add_argument("--strategies", default="ours", help="ours, all, or names with commas")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", type=int, help="the one model of this number")
    parser.add_argument("--out", type=Path, help="a file for the failures, as JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seed = secrets.randbelow(10_000) if given.seed is None else given.seed
    numbers = [seed * SPAN + i for i in range(given.models)]
    if given.only is not None:
        numbers = [given.only]
        plan = plan_of(given.only)
        print(f"{given.only}: {find(str(given.only)).why}")
        print(f"blocks {plan.kinds}, listed {plan.listed}, loss {plan.loss}, wrap {plan.wrap}")
        for call in plan.calls:
            print(f"  {call}")
        if not is_sound(str(given.only), given.world):
            print(f"one process: {zookeeper.refer(find(str(given.only)), given.world)}")
    strategies = GROUPS.get(given.strategies, tuple(given.strategies.split(",")))
    strategies = tuple(s for s in strategies if s != "single")
    worlds: dict[int, Ranks] = {}

    def get_ranks(size: int) -> Ranks:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = Ranks(LaunchConfig(device="cpu", timeout_s=60), size)
        return worlds[size]

    until = time.monotonic() + 60 * given.minutes
    print(f"seed {seed}, world {given.world}: {', '.join(strategies)}", flush=True)
    found = hunt(get_ranks, numbers, strategies, given.world, until, _say)
    for ranks in worlds.values():
        ranks.close()
    print(found.table())
    for text, count in found.refusals.most_common(20):
        print(f"  refused {count} times: {text}")
    if given.out is not None:
        given.out.write_text(json.dumps(found.failures, indent=1) + "\n")
    return 1 if found.failures else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # What is sent to the ranks must have a name there: this file is a module, not the program.
    import zoo_generator

    sys.exit(zoo_generator.main())
