"""A row that counts nothing, where a rank has none and the model cannot run without.

Under a sharded strategy the others need this rank's part of the parameters, so it cannot sit out.
It runs a row that another rank has as well, and nothing of that is left: the loss is 0, every
gradient is of zeros, buffers and the random state are as before. It costs the time of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.batch import NeverEmpty, StandIn, tensors_of
from shardlab.errors import UsageError
from shardlab.workloads.base import Batch, Evaluate, LossFn, Sums, Workload
from shardlab.workloads.batchnorm import SyncBatchNorm2d


def with_stand_ins(workload: Workload) -> Workload:
    """The same workload, for a model that cannot run zero rows."""
    held_out, evaluate = workload.held_out, workload.evaluate
    return replace(
        workload,
        loss=_uncounted_loss(workload.loss),
        dataset=NeverEmpty(workload.dataset),
        held_out=None if held_out is None else NeverEmpty(held_out),
        evaluate=None if evaluate is None else _uncounted_sums(evaluate),
    )


def _uncounted_loss(loss: LossFn) -> LossFn:
    def of_batch(model: nn.Module, batch: Batch) -> Tensor:
        if not isinstance(batch, StandIn):
            return loss(model, batch)
        with _without_trace(model):
            return _nothing_of(loss(model, _row(batch)))

    return of_batch


def _uncounted_sums(evaluate: Evaluate) -> Evaluate:
    def of_batch(model: nn.Module, batch: Batch) -> Sums:
        if not isinstance(batch, StandIn):
            return evaluate(model, batch)
        with _without_trace(model):
            sums = evaluate(model, _row(batch))
        return {name: _nothing_of(value) for name, value in sums.items()}

    return of_batch


def _row(batch: StandIn) -> Batch:
    return Batch(batch.inputs, batch.targets, batch.own_count, batch.own_samples)


def _nothing_of(value: Tensor) -> Tensor:
    return torch.nan_to_num(value) * 0.0  # NaN times zero is NaN


@contextmanager
def _without_trace(model: nn.Module) -> Iterator[None]:
    """Inside, the model's output hands back gradients of zeros, whatever the loss gives it."""

    def cut_off(_model: nn.Module, _args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(torch.zeros_like)

    buffers = []
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm2d) and module.training:
            raise UsageError(
                f"a rank has no samples in this step, and the model cannot run without rows: "
                f"'{name}' would count a row that stands in; use a global batch that gives every "
                "rank some"
            )
        buffers += [(module, key, b) for key, b in module._buffers.items() if b is not None]
    copies = {id(b): b.clone() for _, _, b in buffers}
    hook = model.register_forward_hook(cut_off)
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        for module, key, buffer in buffers:
            module._buffers[key] = copies[id(buffer)]
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        hook.remove()
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
