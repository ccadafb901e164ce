"""A forward of one sample that leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardlab.errors import UsageError


@dataclass
class Quiet:
    """What a forward of one sample must be kept from changing."""

    norms: dict[str, nn.Module]  # those that would train
    counted: list[str] = field(default_factory=list)  # attributes that it did change, put back


@contextmanager
def probing(model: nn.Module) -> Iterator[Quiet]:
    """Inside, every parameter has a gradient, frozen ones too, and a forward leaves no trace:
    buffers, numbers in plain attributes and the random state are as before.

    A BatchNorm cannot train on the one value of one sample: none of them does inside.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    plain = [(name, module, _plain(module)) for name, module in model.named_modules()]
    versions = {name: p._version for name, p in model.named_parameters()}
    frozen = [p for p in model.parameters() if not p.requires_grad and _is_differentiable(p)]
    quiet = Quiet(
        {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training}
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        try:
            for p in frozen:
                p.requires_grad_()
            for norm in quiet.norms.values():
                norm.training = False
            yield quiet
        finally:
            for p in frozen:
                p.requires_grad_(False)
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(value)
            for name, module, values in plain:
                now = _plain(module)
                changed = [k for k in now if k != "training" and now[k] != values.get(k, None)]
                quiet.counted += [f"{name}.{key}" if name else key for key in changed]
                for key in now.keys() - values.keys():
                    delattr(module, key)
                vars(module).update(values)
    for name, p in model.named_parameters():
        if p._version != versions[name]:
            raise UsageError(
                f"the forward changes the parameter '{name}' in place; ranks that share one model "
                "would change it more often than one process: do it between steps"
            )


def _plain(module: nn.Module) -> dict[str, Any]:
    """Numbers among a module's attributes, such as a count of its calls."""
    return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float)}


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
