"""Weight gradients of linear layers that a pipeline puts off (zero bubble).

Backward of such a layer computes the gradient of its input alone, and keeps what that of the weight
is computed from until its turn has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Product = tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]  # weight, bias, input, gradient


@dataclass
class Deferred:
    """The weight gradients of linear layers that wait for their turn."""

    into: list[Product] | None = None  # None: they do not wait

    def attach(self, model: nn.Module) -> None:
        """Every plain nn.Linear leaves its weight's gradient for later, while ``into`` is set."""
        for module in model.modules():
            is_plain = "forward" not in vars(module) and type(module).forward is nn.Linear.forward
            if isinstance(module, nn.Linear) and is_plain:
                vars(module)["forward"] = _Linear(module, self)


class _Linear:
    def __init__(self, module: nn.Linear, deferred: Deferred) -> None:
        self.module, self.deferred = module, deferred

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        # Hooks see every gradient, what is computed has none of its own (parametrizations), and a
        # compiler makes one graph of all: these are left to autograd.
        is_plain = all(t is None or (t.is_leaf and not t._backward_hooks) for t in (weight, bias))
        is_put_off = is_plain and weight.requires_grad and torch.is_grad_enabled()
        if not is_put_off or torch.compiler.is_compiling():
            return nn.functional.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        out: Tensor = _PutOff.apply(self.deferred, input, weight, bias)  # type: ignore[no-untyped-call]
        return out


class _PutOff(torch.autograd.Function):
    """A linear layer whose backward may leave the gradients of weight and bias for later."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.deferred, ctx.weight, ctx.bias = deferred, weight, bias
        ctx.save_for_backward(x)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[1] else None
        bias = bias if bias is not None and bias.requires_grad else None
        if ctx.deferred.into is not None:
            ctx.deferred.into.append((weight, bias, x, gradient))
            return None, of_x, None, None
        return None, of_x, *_of_weight(weight, bias, x, gradient)


def _of_weight(
    weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor | None]:
    rows = gradient.reshape(-1, gradient.shape[-1])  # (rows, out)
    of_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
    return of_weight, None if bias is None else rows.sum(0).to(bias.dtype)
