"""What PyTorch's own strategies say of a model that they cannot train, as a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardlab.errors import LOST_PEER, UsageError

_TORCH = str(Path(torch.__file__).parent)
_THEIRS = tuple(
    f"{_TORCH}/{part}"
    for part in (
        "distributed/fsdp/",
        "distributed/tensor/",
        "distributed/optim/",
        "distributed/pipelining/",
        "nn/parallel/distributed.py",
    )
)
# Said by C++, where no frame of Python's tells whose it is, and what it means.
_SAID = {
    "variable ready only once": (
        "the gradient of {name} came twice, or DDP had not found it in the model's output: "
        "re-entrant checkpointing, a parameter used outside forward, or an output that it cannot "
        "look into; use checkpoint(use_reentrant=False) and tensors as output"
    ),
    "finished reduction in the prior iteration": (
        "a parameter got no gradient in the last step; set find_unused_parameters: true"
    ),
    "mixed torch.tensor and dtensor": (
        "a parameter is used outside the forward of its block (by the loss, or by another module), "
        "and FSDP has it whole only there; use zero1, zero2 or pytorch_ddp"
    ),
    "its data is not allocated yet": (
        "a block's parameter is used after the block, when FSDP has freed it; use zero1, zero2 or "
        "pytorch_ddp"
    ),
    "output 0 of registerpostbackwardfunction": (
        "a block changes its input in place, and FSDP has put a function of its own there; use an "
        "operation that is not in place, or zero1, zero2 or pytorch_ddp"
    ),
    "appears to not have been used in the graph": (
        "autograd.grad() was asked for a parameter that the result does not use; under FSDP the "
        "model computes with another tensor than model.parameters() has; use zero1 or zero2"
    ),
    "would mutate a captured tensor": (
        "a block runs inside torch.func (grad, vjp, jacrev …), where FSDP cannot gather its "
        "parameters; use torch.autograd.grad, or zero1, zero2 or pytorch_ddp"
    ),
    "out of bounds for storage of size 0": (
        "backward came to a block without FSDP's knowing (its output was changed in place, or was "
        "not found), and its parameters were not gathered; use zero1, zero2 or pytorch_ddp"
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
        if not is_theirs(error):
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        for words, meaning in _SAID.items():
            if words in what.lower():
                raise UsageError(f"{who}: {meaning.format(name=last())}") from None
        raise UsageError(
            f"{who}: PyTorch cannot train this model: {what[:300]}; use another strategy"
        ) from None


def is_theirs(error: BaseException) -> bool:
    """Whether PyTorch's strategy raised it itself, not the model that it runs, nor the network."""
    message = str(error).lower()
    if any(words in message for words in (*LOST_PEER, "gloo/transport", "timed out", "timeout")):
        return False
    if any(words in message for words in _SAID):
        return True
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_THEIRS):
            return True
        inside = frame.filename.startswith(_TORCH)
        if not inside or "/nn/modules/" in frame.filename.removeprefix(_TORCH):
            return False
    return False
