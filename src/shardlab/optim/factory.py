"""The optimizer of a run: named by the config or made by the user, over what a rank keeps.

A user's function gets the model's parameters by name, in their own shapes, and returns one
optimizer. A rank may keep other tensors than those: 1-D pieces of some of them (ZeRO's flat
shards), or only some of them. So the function is called with *stand-ins* wherever a rank does not
have the whole parameter, and in the optimizer's groups each stand-in is then replaced by the
rank's own tensor. Groups, rates and the class are thus the same on every rank.

Whether an optimizer may be treated so is measured, not looked up: it takes a few steps on small
tensors, whole and cut up, and the results must be the same.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlab import naming
from shardlab.config import NO_DECAY, OPTIMIZERS, TrainingConfig
from shardlab.errors import UsageError, unknown
from shardlab.optim import muon
from shardlab.optim.traits import Traits, fails_on_rows, measured, name_of
from shardlab.workloads.base import AfterStep, MakeUsers
from shardlab.workloads.blame import blame

KEPT = "after."  # what after_step keeps stands in the optimizer's state under such keys
AVERAGE = f"{KEPT}ema"  # the key of the moving average that training.ema_decay asks for
STAND_IN = 0.625  # the value of a stand-in's elements; exact in every dtype
FLAT = "keeps flat pieces of parameters"
ROWS = "keeps rows of parameters (DTensor)"
DEALT = "gives each rank some of the parameters to update"


# What is known about an optimizer that a plan has made.
_MADE: WeakKeyDictionary[Optimizer, tuple[Traits, After | None]] = WeakKeyDictionary()


def of_class(kind: Callable[..., Optimizer], **options: Any) -> Callable[..., Optimizer]:
    """The plainest factory of the strategies' contract: one group, nothing measured."""

    def make(params: Mapping[str, nn.Parameter]) -> Optimizer:
        return kind(list(params.values()) or [nn.Parameter(torch.zeros(0))], **options)

    return make


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """Makes a rank's optimizer; a strategy calls it with what the rank updates, by name."""

    make: MakeUsers
    label: str  # whose it is, for messages
    whole: Mapping[str, Tensor]  # the model's parameters as stand-ins: shape, dtype, requires_grad
    after: tuple[AfterStep, ...] = ()  # called one after the other when a step was made
    traits: Traits | None = None  # None: not measured, in a simulation without values

    def __call__(self, params: Mapping[str, nn.Parameter]) -> Optimizer:
        optimizer, after = self.over(params)
        traits = self.traits or Traits()
        if traits.is_random and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                f"{name_of(optimizer)} draws random numbers to update: ranks would drift apart"
            )
        _MADE[optimizer] = traits, after
        return optimizer

    def over(
        self, params: Mapping[str, nn.Parameter], as_they_are: bool = False
    ) -> tuple[Optimizer, After | None]:
        """The user's optimizer with this rank's tensors in its groups.

        ``as_they_are``: its function is given them all, also those of another shape.
        """
        if strange := params.keys() - self.whole.keys():
            raise UsageError(
                f"the strategy updates '{min(strange)}', which the model does not have"
            )

        given = self.stand_ins()
        for name, p in params.items():
            if as_they_are or p.shape == self.whole[name].shape:
                given[name] = p
        optimizer = self.built(given)
        names = {p: name for name, p in given.items()}
        self._refuse_own_lists(optimizer, {given[name] for name in params} - {*params.values()})
        # A group that does not train at all is left out, on every rank.
        trained = [g for g in optimizer.param_groups if any(p.requires_grad for p in g["params"])]
        optimizer.param_groups[:] = trained
        for group in trained:
            mine = []
            for p in group["params"]:
                state = optimizer.state.pop(p, {})
                if (held := params.get(names[p])) is None:
                    continue
                mine.append(held)
                if state:  # as Adagrad's, which is there from the beginning
                    optimizer.state[held] = {
                        key: value if held is p else self._moved(key, value, p, held)
                        for key, value in state.items()
                    }
            group.pop("param_names", None)
            # A rank may have none of a group's parameters; groups stay the same on every rank.
            group["params"] = mine or [nn.Parameter(torch.zeros(0, device=self.device))]
        after = None
        if self.after:
            updated = {p for group in optimizer.param_groups for p in group["params"]}
            after = After(self.after, {p: name for name, p in params.items() if p in updated})
            optimizer.register_step_pre_hook(after.before)
            optimizer.register_step_post_hook(after.then)
        return optimizer, after

    @property
    def device(self) -> torch.device:
        return next(iter(self.whole.values())).device

    def stand_ins(self) -> dict[str, nn.Parameter]:
        return {name: _stand_in(like) for name, like in self.whole.items()}

    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group, of those that train."""
        given = self.stand_ins()
        names = {p: name for name, p in given.items() if p.requires_grad}
        groups = (group["params"] for group in self.built(given).param_groups)
        found = ([names[p] for p in group if p in names] for group in groups)
        return [group for group in found if group]

    def built(self, given: Mapping[str, nn.Parameter]) -> Optimizer:
        """What the function makes of these parameters, looked over."""
        with blame(self.label, "the optimizer"):
            optimizer: Any = self.make(list(given.items()))
        if not isinstance(optimizer, Optimizer):
            hint = ": put several into one class, which treats its groups differently"
            raise UsageError(
                f"the optimizer of {self.label} is a {type(optimizer).__name__}, not one "
                f"torch.optim.Optimizer{hint * isinstance(optimizer, list | tuple)}"
            )
        found = Counter(p for group in optimizer.param_groups for p in group["params"])
        names = {p: name for name, p in given.items()}
        if found.keys() - names.keys():
            raise UsageError(
                f"the optimizer of {self.label} has a tensor that is none of the parameters that "
                "its function was given: take them from the argument, not from a model"
            )
        if twice := [names[p] for p, times in found.items() if times > 1]:
            raise UsageError(f"the optimizer of {self.label} has the parameter '{twice[0]}' twice")
        if not any(p.requires_grad for p in found):
            raise UsageError(f"the optimizer of {self.label} updates no parameter that trains")
        for i, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if isinstance(rate, bool) or not isinstance(rate, float | int | Tensor):
                raise UsageError(
                    f"group {i} of {name_of(optimizer)} has no learning rate 'lr', which the "
                    f"schedule is multiplied with, but {rate!r}"
                )
        return optimizer

    def _refuse_own_lists(self, optimizer: Optimizer, replaced: set[nn.Parameter]) -> None:
        """A list of parameters of its own would still have the stand-ins."""
        own = vars(optimizer).keys() - {"param_groups", "state", "defaults"}
        for attribute in sorted(own):
            leaves = tree_leaves(getattr(optimizer, attribute))
            if any(isinstance(leaf, Tensor) and leaf in replaced for leaf in leaves):
                raise UsageError(
                    f"{name_of(optimizer)} keeps parameters in '{attribute}' beside its groups: a "
                    "strategy that shards cannot replace them there"
                )

    def _moved(self, key: str, value: Any, stand_in: Tensor, held: Tensor) -> Any:
        """State that an optimizer made for a stand-in, for the tensor in its place."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != stand_in.shape:
            raise UsageError(
                f"{self.label}: the optimizer begins with the state '{key}' of shape "
                f"{tuple(value.shape)} for a parameter of {tuple(stand_in.shape)}, which has no "
                "pieces"
            )
        first = value.reshape(-1)[:1]
        return first.expand(held.numel()).clone().view(held.shape)

    def state_tensors(self) -> dict[str, float]:
        """Tensors of its size that the optimizer keeps for each parameter that it updates."""
        assert self.traits is not None
        groups = zip(self.groups(), self.traits.state, strict=True)
        return {name: count for names, count in groups for name in names}

    def whole_names(self) -> frozenset[str]:
        """The parameters that the optimizer must be given whole."""
        if self.traits is None or self.traits.flat is None:
            return frozenset()
        groups = zip(self.groups(), self.traits.whole, strict=True)
        return frozenset(name for names, is_whole in groups if is_whole for name in names)


# ------------------------------------------------------------------ what may be done with it


def check(make_optimizer: Any, how: str, strategy: str, mesh: DeviceMesh | None = None) -> None:
    """Refuse an optimizer that would not do the same to what a strategy's ranks keep.

    ``mesh`` holds the ranks that share rows of parameters. A factory that is no plan was not
    measured, and passes.
    """
    plan = make_optimizer
    if not isinstance(plan, Plan) or plan.traits is None:
        return
    reason = plan.traits.dealt if how == DEALT else plan.traits.flat
    if reason is None and mesh is not None:
        reason = fails_on_rows(plan, mesh)
    if reason is not None:
        raise _refused(strategy, how, reason)


def kept_whole(make_optimizer: Any, strategy: str) -> frozenset[str]:
    """The parameters that the optimizer must be given whole, for a strategy that may cut them.

    An optimizer that needs several of them at once, or whose state has other shapes, is refused.
    """
    plan = make_optimizer
    if not isinstance(plan, Plan) or not (whole := plan.whole_names()):
        return frozenset()
    traits = plan.traits or Traits()
    if traits.dealt or traits.reshaped:
        reasons = (traits.flat, traits.reshaped if not traits.dealt else None)
        raise _refused(strategy, FLAT, ", and ".join(reason for reason in reasons if reason))
    return whole


def _refused(strategy: str, how: str, reason: str) -> UsageError:
    return UsageError(
        f"{strategy} {how}, and {reason}; use a strategy with whole parameters, such as "
        "bucket_ddp_async or pytorch_ddp"
    )


def _known(optimizer: Optimizer) -> tuple[Traits, After | None]:
    return _MADE.get(optimizer, (Traits(), None))


def steps_by_parts(optimizer: Optimizer) -> bool:
    """Whether step() may be called several times in an update, for some parameters each time."""
    return _known(optimizer)[0].by_parts


def counters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers in each of the optimizer's groups that step() changes."""
    keys = _known(optimizer)[0].counters
    return [{key: group[key] for key in keys} for group in optimizer.param_groups] if keys else []


def resumed(optimizer: Optimizer, steps: int) -> None:
    """The optimizer's state has been loaded: mend what a checkpoint cannot tell apart.

    A checkpoint knows tensors and numbers: a count may have been an int, and the state of a
    parameter with one element may have been one number.
    """
    traits, after = _known(optimizer)
    if after is not None:
        after.steps = steps
    for state in optimizer.state.values():
        for key, kind in traits.numbers.items():
            if key in state and isinstance(kind, torch.dtype):
                state[key] = torch.as_tensor(state[key]).reshape(()).to(kind)
            elif key in state:
                state[key] = kind(state[key])


def _stand_in(like: Tensor) -> nn.Parameter:
    """A parameter of that shape without memory of its own."""
    one = torch.full((), STAND_IN, dtype=like.dtype, device=like.device)
    return nn.Parameter(one.expand(like.shape), requires_grad=like.requires_grad)


class After:
    """Calls ``after_step`` when the optimizer has stepped, and keeps its tensors in the state.

    There they are checkpointed, and change hands with the parameter. During step() they are taken
    out: most optimizers make their own state when they find none.
    """

    def __init__(self, functions: Sequence[AfterStep], names: Mapping[nn.Parameter, str]) -> None:
        self.functions = functions
        self.names = dict(names)
        self.steps = 0
        self.kept: dict[str, dict[str, Tensor]] = {}

    def before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.kept = {name: {} for name in self.names.values()}
        for p, name in self.names.items():
            state = optimizer.state.get(p, {})
            for key in [key for key in state if key.startswith(KEPT)]:
                self.kept[name][key.removeprefix(KEPT)] = state.pop(key)
            if not state:
                optimizer.state.pop(p, None)

    @torch.no_grad()
    def then(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parts = {name: p.detach() for p, name in self.names.items()}
        with blame("the workload", "after_step"):
            for function in self.functions:
                function(self.steps, parts, self.kept)
        self.steps += 1
        for p, name in self.names.items():
            for key, value in self.kept[name].items():
                if not isinstance(value, Tensor) or value.shape != p.shape:
                    raise UsageError(
                        f"after_step keeps '{key}' of '{name}', which is no tensor of the shape "
                        "that it was given for that parameter"
                    )
                optimizer.state[p][KEPT + key] = value
        self.kept = {}


def moving_average(decay: float) -> AfterStep:
    """The first parameters, then ``decay`` of the average and the rest of the new ones."""

    def average(
        _step: int, parts: Mapping[str, Tensor], kept: Mapping[str, dict[str, Tensor]]
    ) -> None:
        for name, part in parts.items():
            if "ema" in kept[name]:
                kept[name]["ema"].lerp_(part, 1 - decay)
            else:
                kept[name]["ema"] = part.clone()

    return average


@torch.no_grad()
def exchange_averages(optimizer: Optimizer) -> None:
    """This rank's parameters become their moving average, and that them; the same again undoes it.

    Before the first update there is no average, and nothing changes.
    """
    for p, state in optimizer.state.items():
        if AVERAGE in state:
            parameters = p.detach().clone()
            p.copy_(state[AVERAGE])
            state[AVERAGE].copy_(parameters)


# ------------------------------------------------------------------ from the config


def plan(
    training: TrainingConfig,
    make: MakeUsers | None,
    after: AfterStep | None,
    model: nn.Module,
    label: str,
    measures: bool = True,
    blocks: Sequence[str] = (),
) -> Plan:
    """How to make the optimizer of a run. ``blocks``: the names of the model's, whose matrices are
    Muon's."""
    if make is not None:
        _refuse_both(training, label)
    else:
        is_muon = training.optimizer == "muon"
        make = named_by(training, muon.matrices(model, blocks) if is_muon else frozenset())
        label = f"training.optimizer {training.optimizer}"
    functions: tuple[AfterStep, ...] = () if after is None else (after,)
    if training.ema_decay is not None:
        functions += (moving_average(training.ema_decay),)
    whole = {name: _stand_in(p) for name, p in model.named_parameters()}
    made = Plan(make, label, whole, functions)
    return replace(made, traits=measured(made)) if measures else made


def knows_what_is_whole(plan: Plan) -> Plan:
    """For a simulation without values: the plan with what was measured on small tensors of the CPU,
    if the optimizer needs whole parameters. Otherwise nothing of it matters there."""
    whole = {
        name: nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
        for name, p in plan.whole.items()
    }
    traits = measured(replace(plan, whole=whole))
    return plan if traits.flat is None else replace(plan, traits=traits)


# The settings of the config that are arguments of an optimizer's class, under its names.
ARGUMENTS = {
    "lr": "learning_rate", "weight_decay": "weight_decay", "momentum": "momentum",
    "betas": "betas", "eps": "eps",
}  # fmt: skip


def _refuse_both(training: TrainingConfig, label: str) -> None:
    """A setting of the config that the user's own optimizer would not know of."""
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
            decays = training.no_decay == NO_DECAY[0] or p.dim() > 1
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
    """A fused update takes what it is given for contiguous, without asking (torch 2.13 on a CPU):
    a gradient in another order would update other elements than its own. This is looked at before
    each step: a strategy that shards puts its shards in place of the whole parameters later, and
    anybody may set p.data."""
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
