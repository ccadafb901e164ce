"""An optimizer over the whole model, whose parameters a rank's own tensors then replace.

When it is made, the model is still whole: a user's function gets the model's own parameters, by
name, and returns one optimizer. A rank may update other tensors than those: 1-D pieces of some of
them (ZeRO's flat shards), or only some of them. In the optimizer's groups they then take the
places of the whole parameters. Groups, rates and the class are thus the same on every rank.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlab.errors import UsageError
from shardlab.optim.after_step import AfterStepHooks
from shardlab.workloads.base import AfterStep, MakeUsers
from shardlab.workloads.user_errors import blame


class WholeModelOptimizer:
    """An optimizer made over the whole model. A strategy calls this with the tensors that its rank
    updates, by name: they take the places of the whole parameters."""

    def __init__(
        self,
        make: MakeUsers,
        label: str,  # whose optimizer it is, for messages
        params: Mapping[str, nn.Parameter],
        after: Sequence[AfterStep] = (),  # called one after the other when a step was made
    ) -> None:
        self.label = label
        self.optimizer = checked(make, label, params)
        self.device = next(iter(params.values())).device
        self.shapes = {name: p.shape for name, p in params.items()}
        names = {p: name for name, p in params.items()}
        groups, state = self.optimizer.param_groups, self.optimizer.state
        # A group that does not train at all is left out, on every rank.
        groups[:] = [g for g in groups if any(p.requires_grad for p in g["params"])]
        self.groups = [[names[p] for p in g["params"] if p.requires_grad] for g in groups]
        # Only names stay here: a strategy that shards frees the whole parameters.
        self.whole = WeakValueDictionary(params)
        for group in groups:
            group["params"] = []
            group.pop("param_names", None)
        # Most have no state before the first step; Adagrad has.
        self.first: dict[str, dict[str, Any]] = {
            name: state.pop(p) for p, name in names.items() if p in state
        }
        self.after = AfterStepHooks(after) if after else None
        if self.after is not None:
            self.optimizer.register_step_pre_hook(self.after.take_out)
            self.optimizer.register_step_post_hook(self.after.call)

    def __call__(self, params: Mapping[str, nn.Parameter]) -> Optimizer:
        """The optimizer, which now updates these. A later call may leave some of them out."""
        if strange := params.keys() - self.shapes.keys():
            raise UsageError(
                f"the strategy updates '{min(strange)}', which the model does not have"
            )
        self._refuse_own_lists(params)
        self.first = {name: state for name, state in self.first.items() if name in params}
        return self.swapped(params)

    def swapped(self, params: Mapping[str, nn.Parameter], for_trial: bool = False) -> Optimizer:
        """``for_trial``: the parameters are tiny ones, with tiny state in place of the real."""
        optimizer = self.optimizer
        mine = [{n: params[n] for n in names if n in params} for names in self.groups]
        for group, held in zip(optimizer.param_groups, mine, strict=True):
            for p in group["params"]:
                optimizer.state.pop(p, None)
            # A rank may have none of a group's parameters; groups stay the same on every rank.
            nothing = nn.Parameter(torch.zeros(0, device=self.device))
            group["params"] = list(held.values()) or [nothing]
            for name in held.keys() & self.first.keys():
                optimizer.state[held[name]] = self._first_of(name, held[name], for_trial)
        if self.after is not None:
            self.after.names = {p: name for held in mine for name, p in held.items()}
        return optimizer

    def _refuse_own_lists(self, params: Mapping[str, nn.Parameter]) -> None:
        """Refuse a class with lists of parameters, which would still hold the whole ones."""
        replaced = {self.whole.get(name) for name in params} - {*params.values(), None}
        own = vars(self.optimizer).keys() - {"param_groups", "state", "defaults"}
        for attribute in sorted(own):
            leaves = tree_leaves(getattr(self.optimizer, attribute))
            if any(isinstance(leaf, Tensor) and leaf in replaced for leaf in leaves):
                raise UsageError(
                    f"{type(self.optimizer).__name__} keeps parameters in '{attribute}' beside its "
                    "groups: a strategy that shards cannot replace them there"
                )

    def _first_of(self, name: str, held: Tensor, for_trial: bool) -> dict[str, Any]:
        """The state that the optimizer began with for a parameter, for what takes its place. A
        piece does not say where it lies, so only equal elements can be those of a piece."""
        shape = self.shapes[name]
        if held.shape == shape and not isinstance(held, DTensor):
            return self.first[name]
        state = dict(self.first[name])
        for key, value in state.items():
            if not has_elements(key, value, len(shape)):
                continue
            first = value.reshape(-1)[:1]  # of no elements: none
            is_even = value.shape == shape and bool((value == first).all())
            if not is_even and not for_trial:
                raise UsageError(
                    f"{self.label}: the optimizer begins with the state '{key}' of shape "
                    f"{tuple(value.shape)} for '{name}' of {tuple(shape)}: a strategy that shards "
                    "can only cut state of the same shape whose elements are equal"
                )
            state[key] = torch.full_like(held, first.sum().item(), dtype=value.dtype)
        return state


def checked(make: MakeUsers, label: str, params: Mapping[str, nn.Parameter]) -> Optimizer:
    """What the function makes of these parameters, if a strategy can work with it."""
    with blame(label, "the optimizer"):
        optimizer: Any = make(list(params.items()))
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        hint = ": put several into one class, which treats its groups differently"
        raise UsageError(
            f"the optimizer of {label} is a {kind}, not one "
            f"torch.optim.Optimizer{hint * isinstance(optimizer, list | tuple)}"
        )
    found = Counter(p for group in optimizer.param_groups for p in group["params"])
    names = {p: name for name, p in params.items()}
    if found.keys() - names.keys():
        raise UsageError(
            f"the optimizer of {label} has a tensor that is none of the parameters that "
            "its function was given: take them from the argument, not from a model"
        )
    if twice := [names[p] for p, times in found.items() if times > 1]:
        raise UsageError(f"the optimizer of {label} has the parameter '{twice[0]}' twice")
    if not any(p.requires_grad for p in found):
        raise UsageError(f"the optimizer of {label} updates no parameter that trains")
    for i, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, float | int | Tensor):
            raise UsageError(
                f"group {i} of {kind} has no learning rate 'lr', which the schedule is multiplied "
                f"with, but {rate!r}"
            )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(f"{kind} needs sparse gradients, which no strategy makes; use adam")
    required = [
        p.name for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if required:
        raise UsageError(
            f"{kind}.step() needs a {required[0]}: it computes the loss again itself, several "
            "times; no strategy does that"
        )
    return optimizer


def has_elements(key: str, value: Any, dim: int) -> bool:
    """Whether this state of a parameter with so many dimensions is a tensor, and not one number."""
    return isinstance(value, Tensor) and key != "step" and not value.dim() == 0 < dim
