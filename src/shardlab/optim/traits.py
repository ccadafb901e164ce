"""Which optimizers update each element by itself, or at least each parameter by itself.

A rank may update flat pieces of parameters, or rows of them. The result is that of one process
only if each element's update depends on nothing but its own gradient and state. A rank may also
update some parameters, each of them whole: then each update may depend on that parameter alone.
PyTorch's classes are known. A user's class, also a subclass of PyTorch's, declares it in its body:
``elementwise = True`` or ``by_parameter = True``. A class with neither may take one rate from all
gradients, so every rank must update all parameters.
"""

from __future__ import annotations

from typing import Any

from torch import optim
from torch.optim import Optimizer

from shardlab.errors import UsageError
from shardlab.optim.muon import Muon
from shardlab.optim.swap import WholeModelOptimizer

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


def whole_names(made: WholeModelOptimizer) -> frozenset[str]:
    """The parameters that the optimizer must be given whole."""
    kind = type(made.optimizer)
    if kind in ELEMENTWISE or getattr(kind, "elementwise", False):
        return frozenset()
    groups = zip(made.optimizer.param_groups, made.groups, strict=True)
    # The groups of our Muon that are not by_muon are its AdamW's.
    needed = [names for group, names in groups if kind is not Muon or group["by_muon"]]
    return frozenset(name for names in needed for name in names)


# ------------------------------------------------------------------ what a strategy refuses


def check(make_optimizer: Any, how: str, strategy: str) -> None:
    """Refuse an optimizer that would not do the same to what a strategy's ranks keep.

    A factory of another kind passes.
    """
    if not isinstance(make_optimizer, WholeModelOptimizer):
        return
    optimizer = make_optimizer.optimizer
    name = type(optimizer).__name__
    if whole_names(make_optimizer):
        reason = f"{name} does not update each element by itself"
        if not is_known(optimizer):
            reason += ", or its class does not say so (elementwise = True)"
    elif how == ROWS and type(optimizer) is optim.Rprop:
        reason = f"{name} fails on them"
    else:
        return
    raise UsageError(
        f"{strategy} {how}, and {reason}; use a strategy with whole parameters, such as "
        "bucket_ddp_async or pytorch_ddp"
    )


def check_some(make_optimizer: Any, strategy: str) -> None:
    """Refuse an optimizer that may look at all gradients, where a rank updates some parameters."""
    if not isinstance(make_optimizer, WholeModelOptimizer):
        return
    kind = type(make_optimizer.optimizer)
    if kind in KNOWN or any(getattr(kind, a, False) for a in ("elementwise", "by_parameter")):
        return
    raise UsageError(
        f"{strategy} gives each rank some of the parameters, and the class {kind.__name__} "
        "does not say that it updates each of them only from its own gradient and state: write "
        "by_parameter = True in the class if it does (elementwise = True if that holds for "
        "each element; `shardlab prove` checks it), or use a strategy whose ranks update all "
        "parameters, such as bucket_ddp_async or pytorch_ddp"
    )


def kept_whole(make_optimizer: Any, strategy: str) -> frozenset[str]:
    """The parameters that the optimizer must be given whole, for a strategy that may cut them."""
    if not isinstance(make_optimizer, WholeModelOptimizer):
        return frozenset()
    check_some(make_optimizer, strategy)
    if type(make_optimizer.optimizer) is optim.Adafactor:  # its state has other shapes
        check(make_optimizer, FLAT, strategy)
    return whole_names(make_optimizer)
