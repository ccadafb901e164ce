"""Ten mistakes in one layer, planted into copies of strategies: each must be found, and its layer.

A mistake is planted from outside, by hooks on the layer's module and parameters, so that it does
not depend on how a strategy is written. ``Zero2Factor`` is zero2 with the mistake ``Factor``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.strategies.base import Setup
from shardlab.strategies.data_parallel.pytorch_ddp import PyTorchDDP
from shardlab.strategies.sharded.pytorch_fsdp import PyTorchZero3
from shardlab.strategies.sharded.zero2 import Zero2
from shardlab.strategies.sharded.zero3 import Zero3
from shardlab.workloads.base import Batch, Workload

Mistake = Callable[[Any, nn.Module], None]  # of the layer, in the model

WIDTH = 12
LAYER = "layers.2"


class Layers(nn.Module):
    """Square layers, alike in shape, so that one can be taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.outlet = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 5)
        x = self.inlet(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.outlet(x)  # (rows, 3)
        return out


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.targets, reduction="sum")


class _Data:
    def __len__(self) -> int:
        return 64

    def batch(self, ids: Any) -> Batch:
        rows = torch.as_tensor(list(ids), dtype=torch.float32)[:, None] + torch.arange(5)
        x = torch.sin(rows)
        return Batch(inputs=x, targets=x[:, :3].cos(), count=3 * len(x), samples=len(x))


def layers() -> Workload:
    blocks = tuple(f"layers.{i}" for i in range(4))
    return Workload("layers", Layers, _loss, _Data(), blocks=blocks)


class TiedLayers(Layers):
    """Two layers share a weight, and forward changes a buffer that it depends on."""

    drift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight
        self.register_buffer("drift", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 5)
        out = super().forward(x)
        if len(x):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * out.mean(0))
        return out * (1 + self.drift)


class _Uneven(_Data):
    """Not all samples count alike, so the shares of two ranks count differently in each step."""

    def batch(self, ids: Any) -> Batch:
        batch = super().batch(ids)
        return replace(batch, count=sum(1 + i % 3 for i in ids))


def tied_layers() -> Workload:
    return replace(layers(), name="tied-layers", make_model=TiedLayers, dataset=_Uneven())


def _is_here(model: nn.Module) -> bool:
    """The mistake is in the user's model alone: not in the stack, which has no such layer."""
    return any(name == LAYER for name, _ in model.named_modules())


def _on_rank_1() -> bool:
    return dist.get_rank() == 1


# ------------------------------------------------------------------ mistakes of gradients


def factor(layer: nn.Linear, _model: nn.Module) -> None:
    """A thousandth too much."""
    layer.weight.register_hook(lambda g: g * 1.001)


def doubled(layer: nn.Linear, _model: nn.Module) -> None:
    """Twice, on one rank."""
    layer.bias.register_hook(lambda g: g * 2 if _on_rank_1() else g)


def forgotten(layer: nn.Linear, _model: nn.Module) -> None:
    """The second micro-batch's gradient is lost."""
    calls = []

    def drop(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient if len(calls) % 2 else torch.zeros_like(gradient)

    layer.weight.register_hook(drop)


def swapped(layer: nn.Linear, model: nn.Module) -> None:
    """Two layers get each other's: the later one's is given to both."""
    kept: list[Tensor] = []
    model.get_parameter("layers.3.weight").register_hook(lambda g: kept.append(g.clone()))
    layer.weight.register_hook(lambda g: kept.pop() if kept else g)


def edge(layer: nn.Linear, _model: nn.Module) -> None:
    """An element in the middle is lost, as at the edge of a shard."""

    def cut(gradient: Tensor) -> Tensor:
        flat = gradient.clone().reshape(-1)
        flat[flat.numel() // 2] = 0
        return flat.view_as(gradient)

    layer.weight.register_hook(cut)


# ------------------------------------------------------------------ mistakes of parameters


def skipped(layer: nn.Linear, _model: nn.Module) -> None:
    """The layer is passed over, on one rank."""
    layer.register_forward_hook(lambda _m, x, y: 0 * y + x[0] if _on_rank_1() else None)


def _before(layer: nn.Linear, change: Callable[[Tensor], None]) -> None:
    """Change the layer's weight where it is used, each time."""

    def run(*_: Any) -> None:
        with torch.no_grad():
            change(layer.weight.data)

    layer.register_forward_pre_hook(run)


def transposed(layer: nn.Linear, _model: nn.Module) -> None:
    """The view has rows for columns. (Odd calls only, or a weight that stays would be right.)"""
    calls = []

    def change(weight: Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:
            weight.copy_(weight.t().clone())

    _before(layer, change)


def stale(layer: nn.Linear, _model: nn.Module) -> None:
    """One rank computes with the weights of the first step for ever."""
    first: list[Tensor] = []

    def change(weight: Tensor) -> None:
        if not first:
            first.append(weight.clone())
        if _on_rank_1():
            weight.copy_(first[0])

    _before(layer, change)


def another(layer: nn.Linear, _model: nn.Module) -> None:
    """Rows of the shard are shifted by one."""
    _before(layer, lambda weight: weight.copy_(weight.roll(1, 0)))


def overwritten(layer: nn.Linear, _model: nn.Module) -> None:
    """Between forward and backward somebody writes into the weights that backward still needs."""

    def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        def spoil(_gradient: Tensor) -> None:
            with torch.no_grad():
                if layer.weight.untyped_storage().nbytes():
                    layer.weight.data.mul_(1.5)

        if output.requires_grad:
            output.register_hook(spoil)

    layer.register_forward_hook(after)


MISTAKES: dict[str, Mistake] = {
    f.__name__: f
    for f in (
        factor, doubled, forgotten, swapped, edge,
        skipped, transposed, stale, another, overwritten,
    )
}  # fmt: skip


def _with(base: Any, name: str, mistake: Mistake) -> Any:
    class Mistaken(base):  # type: ignore[misc]
        def __init__(self, setup: Setup, **options: Any) -> None:
            super().__init__(setup, **options)
            if _is_here(self.model):
                mistake(self.model.get_submodule(LAYER), self.model)

    Mistaken.__signature__ = inspect.signature(base)  # its options, for whoever asks
    Mistaken.__name__ = Mistaken.__qualname__ = f"{base.__name__}{name.title()}"
    return Mistaken


for _base in (Zero2, Zero3, PyTorchDDP, PyTorchZero3):
    for _name, _mistake in MISTAKES.items():
        _made = _with(_base, _name, _mistake)
        globals()[_made.__name__] = _made
