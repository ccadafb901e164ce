"""The optimizer of a run, by the config's name or the user's function, and facts about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlab import naming
from shardlab.config import OPTIMIZERS, TrainingConfig
from shardlab.errors import UsageError, unknown
from shardlab.optim import muon, traits
from shardlab.optim.after_step import AfterStepHooks, moving_average
from shardlab.optim.swap import WholeModelOptimizer, has_elements
from shardlab.workloads.base import AfterStep, MakeUsers
from shardlab.workloads.user_errors import blame

# The state of a parameter that PyTorch's classes keep as one number.
NUMBERS = dict.fromkeys(("step", "eta", "mu", "mu_product"), torch.float32)


@dataclass(frozen=True)
class Facts:
    """What is known of an optimizer of ours, besides its class."""

    numbers: Mapping[str, Any]  # the types of its state that is one number
    lost: Sequence[str]  # attributes that change in a step, and that a checkpoint does not hold
    after: AfterStepHooks | None


_FACTS: WeakKeyDictionary[Optimizer, Facts] = WeakKeyDictionary()


def of_class(kind: Callable[..., Optimizer], **options: Any) -> Callable[..., Optimizer]:
    """The plainest factory of the strategies' contract: one group."""

    def make(params: Mapping[str, nn.Parameter]) -> Optimizer:
        return kind(list(params.values()) or [nn.Parameter(torch.zeros(0))], **options)

    return make


def build(
    training: TrainingConfig,
    make: MakeUsers | None,
    after: AfterStep | None,
    model: nn.Module,
    label: str,
    blocks: Sequence[str] = (),
) -> WholeModelOptimizer:
    """The optimizer of a run. ``blocks``: the names of the model's, whose matrices are Muon's."""
    if make is not None:
        _refuse_both(training, label)
        if not callable(given := cast(Any, make)):
            raise UsageError(
                f"{label}: the optimizer is a {type(given).__name__}, not a function that makes "
                "one, as each rank updates tensors of its own: give lambda parameters: "
                "torch.optim.AdamW(parameters, lr=1e-3)"
            )
    else:
        is_muon = training.optimizer == "muon"
        make = named_by(training, muon.matrices(model, blocks) if is_muon else frozenset())
        label = f"training.optimizer {training.optimizer}"
    functions: tuple[AfterStep, ...] = () if after is None else (after,)
    if training.ema_decay is not None:
        functions += (moving_average(training.ema_decay),)
    params = dict(model.named_parameters())
    made = WholeModelOptimizer(make, label, params, functions)
    numbers: Mapping[str, Any] = NUMBERS
    lost: list[str] = []
    if not traits.is_known(made.optimizer):
        states, lost = first_step(WholeModelOptimizer(make, label, params, functions), params)
        numbers = {
            key: value.dtype if isinstance(value, Tensor) else type(value)
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor | int | float)
            and not has_elements(key, value, params[name].dim())
        }
    _FACTS[made.optimizer] = Facts(numbers, lost, made.after)
    return made


# ------------------------------------------------------------------ what is known of it


State = dict[str, dict[str, Any]]


def first_step(
    made: WholeModelOptimizer, params: Mapping[str, nn.Parameter]
) -> tuple[State, list[str]]:
    """What the optimizer keeps of each parameter that trains, after one step on tiny ones; and in
    which attributes of its own it keeps what the step has changed. It is spent then."""
    small = {
        name: nn.Parameter(torch.ones((2,) * p.dim(), dtype=p.dtype, device=p.device))
        for name, p in params.items()
        if p.requires_grad
    }
    optimizer = made.swapped(small, for_trial=True)
    for p in small.values():
        p.grad = torch.ones_like(p)
    before = _own_values(optimizer)
    with blame(made.label, "the optimizer"):
        optimizer.step()
    lost = [key for key, values in _own_values(optimizer).items() if values != before.get(key, [])]
    return {name: dict(optimizer.state.get(p, {})) for name, p in small.items()}, lost


def state_tensors(
    made: WholeModelOptimizer, params: Mapping[str, nn.Parameter]
) -> dict[str, float]:
    """Tensors of its size that the optimizer keeps for each parameter that it updates. The
    optimizer is spent then."""
    counts = {}
    for name, state in first_step(made, params)[0].items():
        dim = params[name].dim()
        kept = [value.numel() for key, value in state.items() if has_elements(key, value, dim)]
        counts[name] = sum(kept) / 2**dim
    return counts


def _own_values(optimizer: Optimizer) -> dict[str, list[Any]]:
    """The numbers in each attribute that a class has beside those of every optimizer."""
    every = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])).keys()
    found = {}
    for key in vars(optimizer).keys() - every:
        leaves = [v for v in tree_leaves(getattr(optimizer, key)) if type(v) is not nn.Parameter]
        sums = [leaf.sum().tolist() for leaf in leaves if isinstance(leaf, Tensor)]
        found[key] = [*sums, *(leaf for leaf in leaves if isinstance(leaf, int | float))]
    return found


def refuse_lost(optimizer: Optimizer) -> None:
    """Refuse to checkpoint an optimizer whose attributes a checkpoint would lose."""
    facts = _FACTS.get(optimizer)
    if facts is not None and facts.lost:
        raise UsageError(
            f"a checkpoint cannot hold '{min(facts.lost)}' of {type(optimizer).__name__}, which "
            "step() changes: an optimizer must keep such numbers in its groups (param_groups) or "
            "in its state, by parameter"
        )


def resumed(optimizer: Optimizer, steps: int) -> None:
    """Restore the types of the loaded state, which a checkpoint cannot tell apart.

    A checkpoint knows tensors and numbers: a count may have been an int, and the state of a
    parameter with one element may have been one number.
    """
    facts = _FACTS.get(optimizer)
    if facts is None:
        return
    if facts.after is not None:
        facts.after.steps = steps
    for state in optimizer.state.values():
        for key, kind in facts.numbers.items():
            if key in state and isinstance(kind, torch.dtype):
                state[key] = torch.as_tensor(state[key]).reshape(()).to(kind)
            elif key in state:
                state[key] = kind(state[key])


# ------------------------------------------------------------------ named by the config


# The settings of the config that are arguments of an optimizer's class, under its names.
ARGUMENTS = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def _refuse_both(training: TrainingConfig, label: str) -> None:
    """Refuse a setting of the config that the user's own optimizer would ignore."""
    standard = TrainingConfig()
    for key in ("optimizer", *ARGUMENTS.values(), "optimizer_options", "no_decay"):
        if getattr(training, key) != getattr(standard, key):
            raise UsageError(
                f"training.{key} is for an optimizer of the config; {label} makes its own, and "
                "would not know of it: leave one of them out"
            )


def named_by(training: TrainingConfig, matrices: frozenset[str] = frozenset()) -> MakeUsers:
    """The class that the config names, with its settings as arguments. ``matrices``: Muon's."""
    kind = _resolved(training.optimizer)
    parameters = inspect.signature(kind).parameters.values()
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    standard = TrainingConfig()
    options: dict[str, Any] = {}
    for argument, key in ARGUMENTS.items():
        is_asked = getattr(training, key) != getattr(standard, key)
        if is_asked and argument not in takes and not takes_any:
            raise UsageError(f"training.{key}: {kind.__name__} has no such setting")
        # Decay is passed as it stands: AdamW's own default is 0.01, and the config says 0.
        if is_asked or (argument in takes and argument in ("lr", "weight_decay")):
            options[argument] = getattr(training, key)
    known = sorted(takes - {"params"} - ARGUMENTS.keys())
    for name, value in training.optimizer_options.items():
        if name in ARGUMENTS:
            raise UsageError(
                f"training.optimizer_options.{name} has its own key: training.{ARGUMENTS[name]}"
            )
        if name not in known and not takes_any:
            raise unknown(f"option of {kind.__name__}", name, known)
        options[name] = value
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    # One pass over all that an update reads and writes: on a GPU it saves a tenth of the step of a
    # small batch, on a CPU it takes a quarter of the time.
    may_fuse = training.optimizer in ("adam", "adamw") and not {"fused", "foreach"} & options.keys()

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        groups: list[dict[str, Any]] = []
        by_kind: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, p in named:
            decays = training.no_decay == "nothing" or p.dim() > 1
            by_kind.setdefault((name not in matrices, not decays), []).append(p)
        for (is_others, no_decay), params in sorted(by_kind.items(), key=lambda item: item[0]):
            group: dict[str, Any] = {"params": params}
            if matrices:
                group["by_muon"] = not is_others
            if no_decay:
                group["weight_decay"] = 0.0
            groups.append(group)
        trained = [p for group in groups for p in group["params"]]
        if not may_fuse or not all(p.is_floating_point() for p in trained):
            return cast(Optimizer, kind(groups, **options))
        optimizer = cast(Optimizer, kind(groups, **options, fused=True))
        optimizer.register_step_pre_hook(_keep_fused_right)
        return optimizer

    return make


def _keep_fused_right(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    """A fused update assumes contiguous tensors and does not check (torch 2.13 on a CPU): a
    gradient in another order would update the wrong elements. We check before each step, because
    strategies that shard replace the parameters later, and anybody may set p.data."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.is_contiguous():
                group["fused"] = False
            if p.grad is not None and not p.grad.is_contiguous():
                p.grad = p.grad.contiguous()


def _resolved(name: str) -> Any:
    if name == "muon":
        return muon.Muon
    if ":" not in name:
        classes = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type)}
        kind = classes.get(name)
        if kind is None or name not in OPTIMIZERS:
            raise unknown("training.optimizer", name, [n for n in OPTIMIZERS if n in classes])
        return kind
    with blame(name, "importing it"):
        kind = naming.resolve(name, {}, "training.optimizer")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"training.optimizer {name} is no class of torch.optim.Optimizer's kind")
    return kind
