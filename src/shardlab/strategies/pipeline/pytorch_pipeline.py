"""PyTorch's torch.distributed.pipelining, under the same contract as our pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from shardlab.errors import UsageError, option
from shardlab.strategies import base, pytorch_errors
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.pipeline import pipeline
from shardlab.strategies.pipeline.executor import Executor, Signature, span
from shardlab.strategies.pipeline.schedules import Action
from shardlab.strategies.pipeline.stages import Shape
from shardlab.strategies.probing import probing
from shardlab.workloads.base import Batch

NAME = "pytorch_pipeline"
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")  # their classes take a stage; the others take a list


class PyTorchPipeline(CutModel):
    """PyTorch's ``PipelineStage`` and its schedules (option ``schedule``: gpipe, 1f1b …).

    The stages are those of our pipelines, each wrapped in a module from which PyTorch makes a
    ``PipelineStage``. What is around it stays ours: tied parameters, which PyTorch leaves to its
    user, are summed between their stages, and the gradients go to the data-parallel strategy.

    PyTorch divides gradients by the number of micro-batches, in every call of ``step()``, and so
    the earlier ones too, if an update takes two calls. ``scale_grads=False`` turns that off. The
    losses are sums, and divided by the count of all targets, as everywhere here.

    Its stages know one shape: the micro-batches of a step must be equal in shape.

    Schedule of a step:

        each micro-batch    in the order of PyTorch's schedule: activations are sent forward, their
                            gradients back
        after the last      all_reduce the gradients of parameters that several stages hold, once
                            all_reduce the loss of the last stage               8 bytes
        then                the inner strategy's, as for one micro-batch
    """

    ONE_SHAPE = True


def cut(strategy: CutModel, setup: base.Setup) -> Cut:
    """Keep this rank's stages, which PyTorch runs."""
    option("schedule", strategy.axes.schedule, SCHEDULES)
    return pipeline.cut(strategy, setup, _PyTorchExecutor)


class _PyTorchExecutor(Executor):
    """Runs this rank's stages by PyTorch's schedule."""

    PUTS_OFF = False  # PyTorch finds what a weight gradient needs in the graph

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: Sequence[Batch] = ()  # of the step that is under way
        self.total = torch.zeros(())  # the losses of its last stage
        self.dtype = torch.float32  # of the losses, if this rank has the last stage
        self.made: dict[tuple[int, Signature], Any] = {}  # schedules
        self.own = [stage for stage, rank in enumerate(self.where) if rank == self.rank]

    def _carry_out(self, batches: Sequence[Batch], signatures: Sequence[Signature]) -> Tensor:
        if len(set(signatures)) > 1:
            shapes = " and ".join(sorted({str(list(s[0][0])) for s in signatures}))
            raise UsageError(
                f"{NAME}: the micro-batches of a step differ in shape ({shapes}), and PyTorch's "
                "stages know one shape; use pipeline_1f1b, or a global batch that divides evenly"
            )
        key = len(batches), signatures[0]
        if key not in self.made:
            self._rehearse(batches[0], signatures[0])
            self.made[key] = self._schedule(*key)
        self.batches = batches
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        which = torch.arange(len(batches))
        try:
            with pytorch_errors.refusals(NAME):
                self.made[key].step(which=which, target=which)
        except RuntimeError as error:
            if isinstance(error.__cause__, UsageError):  # PyTorch has wrapped it
                raise error.__cause__ from None
            raise
        finally:
            self.batches = ()
        return self.total

    def _rehearse(self, batch: Batch, signature: Signature) -> None:
        """Run the stages once, so that each knows the shapes of what it will receive."""
        with probing(self.model):
            for stage in self.own:
                self._forward(Action("F", stage, 0), batch, [signature])
            self._finish_sending()
        for kept in self.live.values():
            self.dtype = kept.outputs[0].dtype
        self.live.clear()
        for stage in self.own:
            for place, (_, _, has_gradient) in enumerate(self._between(stage, signature)):
                if not has_gradient:
                    before = self.runner.blocks[self.runner.ends[stage - 1]]
                    raise UsageError(
                        f"{NAME}: tensor {place} that the block '{before}' returns has no "
                        "gradient, and PyTorch's stages want one of each; use pipeline_1f1b"
                    )

    def receive_buffers(self) -> int:
        """Each of PyTorch's stages keeps a place for what each micro-batch receives: activations,
        and the gradients of those that it sends."""
        total = 0
        for micro, signature in self.made:
            for stage in self.own:
                sent = self._between(stage + 1, signature) if stage + 1 < self.stages else []
                total += micro * sum(
                    math.prod(shape) * dtype.itemsize
                    for shape, dtype, _ in (*self._between(stage, signature), *sent)
                )
        return total

    def _between(self, stage: int, signature: Signature) -> list[Shape]:
        """The tensors that a stage receives."""
        return self.known[stage, signature][-1] if stage else []

    def _schedule(self, micro: int, signature: Signature) -> Any:
        def tensors(stage: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(shape, dtype=dtype, device="meta").requires_grad_()
                for shape, dtype, _ in self._between(stage, signature)
            )

        made = []
        for stage in self.own:
            is_last = stage == self.stages - 1
            loss = torch.empty(1, dtype=self.dtype, device="meta")
            made.append(
                _Recorded(
                    _Stage(self, stage, signature),
                    stage,
                    self.stages,
                    self.device,
                    input_args=tensors(stage),
                    output_args=loss if is_last else tensors(stage + 1),
                    group=self.group,
                )
            )
        given: Any = made[0] if self.schedule in ONE_STAGE else made
        make = SCHEDULES[self.schedule]
        with pytorch_errors.refusals(NAME):
            return make(given, micro, loss_fn=self._divided, scale_grads=False)

    def _divided(self, output: Tensor, _target: Tensor) -> Tensor:
        return output.sum() * self.seed.to(output.dtype)


class _Recorded(pipelining.PipelineStage):
    """Its work is marked in a profiler's trace as that of our pipelines."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with span(Action("F", self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with span(Action(kind, self.stage_index, bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with span(Action("W", self.stage_index, bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class _Stage(nn.Module):
    """A stage as a module: from the activations received to those that are sent, or to the loss."""

    def __init__(self, executor: _PyTorchExecutor, stage: int, signature: Signature) -> None:
        super().__init__()
        self.model = executor.model
        self.executor, self.stage, self.signature = executor, stage, signature

    def forward(self, *received: Tensor, which: Tensor) -> Any:
        executor, stage = self.executor, self.stage
        micro = int(which)
        forward = partial(executor.loss_fn, executor.model, executor.batches[micro])
        shapes = executor.known[stage, self.signature] if stage else []
        value = executor.runner.run(stage, forward, shapes, list(received))
        if stage == executor.stages - 1:
            executor.total += value.detach()
            return torch.stack([value])  # PyTorch joins what the last stage returns
        # PyTorch detaches them in place, which a view does not allow.
        outputs = [t.clone() if t._is_view() else t for t in value]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
