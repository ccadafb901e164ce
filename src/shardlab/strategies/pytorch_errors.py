"""Errors of PyTorch's own strategies as refusals of one line: in its words, where they will do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import torch

from shardlab.errors import LOST_PEER, UsageError

_TORCH = str(Path(torch.__file__).parent)
_STRATEGIES = tuple(
    f"{_TORCH}/{part}"
    for part in (
        "distributed/fsdp/",
        "distributed/tensor/",
        "distributed/optim/",
        "distributed/pipelining/",
        "nn/parallel/distributed.py",
    )
)
# These words tell a user neither whose error it is nor what to do: C++ has them.
_MEANING = {
    "variable ready only once": (
        "the gradient of {name} came twice, or DDP had not found it in the model's output: "
        "re-entrant checkpointing, a parameter used outside forward, or an output that it cannot "
        "look into; use checkpoint(use_reentrant=False) and tensors as output"
    ),
    "mixed torch.tensor and dtensor": (
        "a parameter is used outside the forward of its block (by the loss, or by another module), "
        "and FSDP has it whole only there; use zero1 or zero2"
    ),
    "its data is not allocated yet": (
        "a block's parameter is used after the block, when FSDP has freed it; use zero1 or zero2"
    ),
    "out of bounds for storage of size 0": (
        "backward came to a block without FSDP's knowing (its output was changed in place, or FSDP "
        "finds no tensor in it), and its parameters were not gathered; use zero1 or zero2"
    ),
    "would mutate a captured tensor": (
        "a block runs inside torch.func (grad, vjp, jacrev …), where FSDP cannot gather its "
        "parameters; use torch.autograd.grad, or zero1 or zero2"
    ),
    "output 0 of registerpostbackwardfunction": (
        "a block changes its input in place, and FSDP has put a function of its own there; use an "
        "operation that is not in place, or zero1 or zero2"
    ),
    "appears to not have been used in the graph": (
        "autograd.grad() was asked for a parameter that the result does not use; under FSDP the "
        "model computes with another tensor than model.parameters() has; use zero1 or zero2"
    ),
}


@contextmanager
def refusals(who: str, last: Callable[[], str] = lambda: "a parameter") -> Iterator[None]:
    """Turn an error of PyTorch's strategy into a line; a lost peer, and the model's own, stay.

    ``last`` names the parameter whose gradient came last.
    """
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        known = (meaning for words, meaning in _MEANING.items() if words in said.lower())
        if meaning := next(known, ""):
            raise UsageError(f"{who}: {meaning.format(name=last())}") from None
        if not _is_by_a_strategy(error):
            raise
        raise UsageError(
            f"{who}: PyTorch cannot train this model: {said[:300]}; use another strategy"
        ) from None


def _is_by_a_strategy(error: BaseException) -> bool:
    """Whether PyTorch's strategy raised it, not the model that it runs, nor the network."""
    network = (*LOST_PEER, "gloo/transport", "timed out", "timeout")
    if any(words in str(error).lower() for words in network):
        return False
    files = (frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__)))
    inside = takewhile(lambda file: file.startswith(_TORCH) and "/nn/modules/" not in file, files)
    return any(file.startswith(_STRATEGIES) for file in inside)
