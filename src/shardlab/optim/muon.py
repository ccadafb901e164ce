"""Muon for the matrices of a model's blocks and AdamW for the rest, as one optimizer.

Muon makes the update of a whole matrix orthogonal. AdamW updates embeddings, the head, norms and
biases, as in Muon's own experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardlab.errors import UsageError


def matrices(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """The parameters that Muon updates: the matrices inside the blocks, or, of a model without
    blocks, all that are not an embedding's."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    inside = tuple(f"{block}." for block in blocks) or ("",)
    found = frozenset(
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and p not in tables and name.startswith(inside)
    )
    if not found:
        raise UsageError("training.optimizer muon: the model has no matrix that Muon could update")
    return found


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for groups with ``by_muon=True``, ``torch.optim.AdamW`` for the others.

    One learning rate serves both: Muon's updates are made as large as AdamW's are
    (``adjust_lr_fn="match_rms_adamw"``). ``betas`` and ``eps`` are AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        # These two parameters are never updated: step() gives both optimizers our groups.
        self._muon = torch.optim.Muon(
            [nn.Parameter(torch.zeros(1, 1))], momentum=momentum, nesterov=nesterov,
            ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, **both,
        )  # fmt: skip
        self._adamw = torch.optim.AdamW(
            [nn.Parameter(torch.zeros(1))], betas=betas, eps=eps, **both
        )
        groups = [dict(group) for group in params]
        for group in groups:
            inner = self._muon if group.setdefault("by_muon", False) else self._adamw
            group.update({k: v for k, v in inner.defaults.items() if k not in group})
        super().__init__(groups, both)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise UsageError("Muon takes no closure")
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [g for g in self.param_groups if g["by_muon"] == is_muon]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call]
