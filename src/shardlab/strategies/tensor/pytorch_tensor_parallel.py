"""PyTorch's parallelize_module, under the same contract as tensor_parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from shardlab.errors import UsageError
from shardlab.strategies import base, pytorch_errors
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.tensor import splits
from shardlab.strategies.tensor.splits import Layer
from shardlab.workloads.base import Batch
from shardlab.workloads.token_loss import takes_columns

NAME = "pytorch_tensor_parallel"


class PyTorchTensorParallel(CutModel):
    """PyTorch's ``parallelize_module``, with ``loss_parallel`` for the loss.

    The workload's splits say what becomes of each layer: by columns and by heads they are
    ``ColwiseParallel``, by rows ``RowwiseParallel``, as is an embedding. PyTorch cuts a layer's
    outputs into equal runs, so those of a fused layer (queries, keys, values) are put in the ranks'
    order first. It makes two parameters of one that is tied; here they are one again.

    Between forwards a rank's part is a plain tensor, and each forward makes the DTensor of it that
    ``parallelize_module`` made. So the strategies that share the data see what they know; FSDP2 is
    the one that does, if only some of the ranks share a model.

    Schedule of a step:

        at construction     broadcast parameters and buffers from rank 0; each keeps its part
        each micro-batch    DTensor's collectives: those of tensor_parallel, and one more in
                            backward for each further layer by columns with the same input
        else                the inner strategy's, among the ranks that hold the same part
    """

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        with pytorch_errors.refusals(NAME), loss_parallel():
            return super().gradients(microbatches)

    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        with pytorch_errors.refusals(NAME), loss_parallel():
            return super().infer(function, batch)


def cut(strategy: CutModel, setup: base.Setup) -> Cut:
    """Keep this rank's part of a model that is whole, and the same, on every rank."""
    model, group = setup.model, strategy.groups.tensor
    named = splits.read(model, setup.splits)
    found = splits.layers_of(model, named, group)
    layers = {layer.module: _cut_evenly(layer, group.size(), group.rank()) for layer in found}
    divided = splits.divided_by(model, named, group.size())
    layout, partial = splits.agreed(model, named, list(layers.values()), sequence=False)
    parts: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter has one
    ranks = DeviceMesh.from_group(group, setup.mesh.device_type)
    for module, layer in layers.items():
        before = dict(module.named_parameters(recurse=False))
        if layer.kind == "heads":
            _put_in_order(layer, named[layer.name], group.size(), parts)
        # Every rank has the whole: nothing need be sent.
        with pytorch_errors.refusals(NAME):
            parallelize_module(module, ranks, _style(layer), src_data_rank=None)
        for name, whole in before.items():
            _Plain(module, name, whole, parts)
    for module, attribute, number in divided:
        setattr(module, attribute, number)
    return Cut(layout, setup.loss_fn, partial=dict.fromkeys(partial, group))


def _cut_evenly(layer: Layer, ranks: int, rank: int) -> Layer:
    """The same layer, cut as PyTorch does: the first ranks have equal parts, the last ones less."""
    what = f"'{layer.name}' ({type(layer.module).__name__})"
    if not isinstance(layer.module, nn.Linear | nn.Embedding):
        raise UsageError(
            f"{NAME}: {what} is neither an nn.Linear nor an nn.Embedding, and PyTorch cannot "
            "cut it; use tensor_parallel"
        )
    size = layer.weight.shape[layer.axis]
    each = -(-size // ranks)
    if each * (ranks - 1) >= size or (layer.kind != "vocabulary" and size % ranks):
        raise UsageError(
            f"{NAME}: {what} has {size} to cut, and PyTorch cannot cut that for {ranks} ranks; "
            "use tensor_parallel, or another number of ranks (tensor=…)"
        )
    if layer.kind == "heads":
        return layer
    return replace(layer, kept=[range(rank * each, min(size, (rank + 1) * each))])


def _put_in_order(
    layer: Layer, heads: str, ranks: int, done: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let the outputs of rank 0 stand before those of rank 1: its queries, keys and values."""
    numbers = [int(number) for number in heads.split()[1:]]
    size = layer.weight.shape[0]
    kinds = torch.arange(size).split([size // sum(numbers) * number for number in numbers])
    order = torch.cat([kind.chunk(ranks)[rank] for rank in range(ranks) for kind in kinds])
    for p, _, axis in layer.cuts():
        if p not in done:
            p.data = p.data.index_select(axis, order.to(p.device))


def _style(layer: Layer) -> ParallelStyle:
    if isinstance(layer.module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if layer.kind == "rows":
        return RowwiseParallel()
    return _Head() if layer.kind == "vocabulary" else ColwiseParallel()


class _Head(ColwiseParallel):
    """A layer by columns that may be given targets too, and gives their loss then.

    Whoever asks for logits gets all of them, gathered, unless a ``token_loss`` waits for them.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> Any:
        first = ColwiseParallel._prepare_input_fn(input_layouts, desired, module, inputs, mesh)
        return first, *inputs[1:]  # they are lost otherwise

    @staticmethod
    def _prepare_output_fn(
        _layouts: Any, _local: bool, _module: nn.Module, output: DTensor, _mesh: DeviceMesh
    ) -> Tensor:
        if not output.dim():
            return output.to_local().clone()  # the loss; FSDP2 warns of a view
        if takes_columns(_loss_of_columns):
            return output
        return output.redistribute(placements=(Replicate(),)).to_local().clone()


def _loss_of_columns(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignored)
    assert isinstance(loss, DTensor)
    return loss.to_local()


class _Plain:
    """A parameter of a layer that is a DTensor in the layer's forward alone."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        whole: nn.Parameter,
        parts: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        cut: Any = module._parameters[name]  # a parameter that is a DTensor too
        self.name, self.mesh, self.placements = name, cut.device_mesh, cut.placements
        self.shape, self.stride = cut.shape, cut.stride()
        self.held: list[nn.Parameter | None] = []  # while a forward is under way
        if whole not in parts:
            part = cut.to_local().detach().clone()  # no view, which would keep the whole
            parts[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
        module._parameters[name] = parts[whole]
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, _args: Any) -> None:
        part: Any = module._parameters[self.name]
        self.held.append(part)
        module._parameters[self.name] = DTensor.from_local(  # type: ignore[assignment]
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self.held:
            module._parameters[self.name] = self.held.pop()
