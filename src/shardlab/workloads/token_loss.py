"""The loss of a language model, written so that a head split over ranks need not be gathered."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from shardlab.workloads.samples import IGNORED

# The summed loss of logits (rows, columns), of which each rank has other columns, at targets
# (rows,); the last argument is the target that counts for nothing.
LossOfColumns = Callable[[Tensor, Tensor, int], Tensor]

_asking: list[list[LossOfColumns]] = []  # what heads have answered to each token_loss under way


def token_loss(logits_of: Callable[[], Tensor], targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """The cross-entropy of the logits (..., vocabulary) that ``logits_of`` computes, summed over
    all targets (...) but those that are ``ignored``: ().

    A head that is split over ranks gives its own columns alone while ``logits_of`` runs, so what it
    does with the logits must treat each of them by itself (scale them, leave out positions).
    """
    _asking.append([])
    try:
        logits = logits_of()
    finally:
        answers = _asking.pop()
    logits, targets = logits.flatten(0, -2), targets.flatten()  # (rows, columns), (rows,)
    if answers:
        return answers[-1](logits, targets, ignored)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignored)


def takes_columns(loss: LossOfColumns) -> bool:
    """Asked by a split head: whether a ``token_loss`` waits for its logits. If so, it computes them
    with ``loss`` from this rank's columns."""
    if _asking:
        _asking[-1].append(loss)
    return bool(_asking)
