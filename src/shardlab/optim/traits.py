"""Which optimizers update each element of a parameter by itself, or at least each parameter.

A rank may update flat pieces of parameters, or rows of them. The result is that of one process
only if each element's update depends on nothing but its own gradient and state. A rank may also
update some parameters, each of them whole: then it must depend on nothing but the parameter's.
PyTorch's classes are known. A user's class, also a subclass of PyTorch's, says so itself, in its
body: ``elementwise = True`` or ``by_parameter = True``. Without either it may take one rate from
all gradients, and every rank must update all parameters.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import optim
from torch.optim import Optimizer

from shardlab.errors import UsageError
from shardlab.optim.muon import Muon
from shardlab.optim.swap import Made

ELEMENTWISE = frozenset({
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip
KNOWN = ELEMENTWISE | {optim.Adafactor, optim.Muon, Muon}
FLAT = "keeps flat pieces of parameters"
ROWS = "keeps rows of parameters (DTensor)"


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's or ours. Their step() may be called for some parameters at a
    time: they count the steps of each parameter, not those of a group."""
    return type(optimizer) in KNOWN


def by_parameter(optimizer: Optimizer) -> bool:
    """Whether it updates each parameter by itself."""
    kind = type(optimizer)
    says_so = getattr(kind, "elementwise", False) or getattr(kind, "by_parameter", False)
    return is_known(optimizer) or bool(says_so)


def whole_names(made: Made) -> frozenset[str]:
    """The parameters that the optimizer must be given whole."""
    kind = type(made.optimizer)
    if kind in ELEMENTWISE or getattr(kind, "elementwise", False):
        return frozenset()
    groups = zip(made.optimizer.param_groups, made.groups, strict=True)
    # The groups of our Muon that are not by_muon are its AdamW's.
    needed = [names for group, names in groups if kind is not Muon or group["by_muon"]]
    return frozenset(name for names in needed for name in names)


def refuse(optimizer: Optimizer) -> None:
    """Refuse what no strategy can work with."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.SparseAdam):
        raise UsageError(f"{name} needs sparse gradients, which no strategy makes; use adam")
    required = [
        p.name for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if required:
        raise UsageError(
            f"{name}.step() needs a {required[0]}: it computes the loss again itself, several "
            "times; no strategy does that"
        )


# ------------------------------------------------------------------ what a strategy refuses


def check(make_optimizer: Any, how: str, strategy: str) -> None:
    """Refuse an optimizer that would not do the same to what a strategy's ranks keep.

    A factory of another kind passes.
    """
    if not isinstance(make_optimizer, Made):
        return
    optimizer = make_optimizer.optimizer
    if whole_names(make_optimizer):
        reason = f"{type(optimizer).__name__} does not update each element by itself"
        if not is_known(optimizer):
            reason += ", or its class does not say so (elementwise = True)"
        raise _refused(strategy, how, reason)
    if how == ROWS and type(optimizer) is optim.Rprop:
        raise _refused(strategy, how, "Rprop fails on them")


def check_some(make_optimizer: Any, strategy: str) -> None:
    """Refuse an optimizer that may look at all gradients, where a rank updates some parameters."""
    if isinstance(make_optimizer, Made) and not by_parameter(make_optimizer.optimizer):
        name = type(make_optimizer.optimizer).__name__
        raise UsageError(
            f"{strategy} gives each rank some of the parameters, and the class {name} "
            "does not say that it updates each of them only from its own gradient and state: write "
            "by_parameter = True in the class if it does (elementwise = True if that holds for "
            "each element; `shardlab prove` checks it), or use a strategy whose ranks update all "
            "parameters, such as bucket_ddp_async or pytorch_ddp"
        )


def kept_whole(make_optimizer: Any, strategy: str) -> frozenset[str]:
    """The parameters that the optimizer must be given whole, for a strategy that may cut them."""
    if not isinstance(make_optimizer, Made):
        return frozenset()
    check_some(make_optimizer, strategy)
    if type(make_optimizer.optimizer) is optim.Adafactor:
        raise _refused(
            strategy, FLAT, "Adafactor does not update each element by itself, and its state has "
            "other shapes than the parameter",
        )  # fmt: skip
    return whole_names(make_optimizer)


def _refused(strategy: str, how: str, reason: str) -> UsageError:
    return UsageError(
        f"{strategy} {how}, and {reason}; use a strategy with whole parameters, such as "
        "bucket_ddp_async or pytorch_ddp"
    )
