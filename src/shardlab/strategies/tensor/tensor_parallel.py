"""Tensor parallelism: every rank has a part of each layer, and all work on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.axes import cut_range
from shardlab.batch import map_tensors, tensors_of
from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.cut_model import WHEN_SKIPPED, Cut, CutModel
from shardlab.strategies.tensor import splits
from shardlab.strategies.tensor.sequence_layers import Positions
from shardlab.strategies.tensor.splits import Layer
from shardlab.strategies.tensor.tensor_layers import (
    ColumnLinear,
    LinearPart,
    RowLinear,
    Stream,
    enter,
)
from shardlab.strategies.tensor.vocabulary import Vocabulary, VocabularyEmbedding, VocabularyHead


class TensorParallel(CutModel):
    """Ranks share each layer's weights, and send activations instead of gradients.

    A layer by columns has some of the outputs, and the next, by rows, has just these as inputs.
    What a rank computes between the two is its own: some heads, some channels of an MLP. So in each
    half of a block (attention, MLP) ranks meet twice: where the residual stream goes into their
    parts (``enter``: nothing forward, a sum backward), and where what their parts add to it is
    summed (``leave``: the reverse). The embedding and the head have some of the tokens each
    (``vocabulary.py``), and which module is split how the workload says (``splits.py``).

    Schedule, for n ranks, L blocks, and A bytes of the residual stream (batch x positions x dim):

        at construction     broadcast parameters and buffers from rank 0; each keeps its part
        forward             all_reduce activations after the embedding  A
                            all_reduce activations after each half      2LA
                            all_reduce the loss's maxima, then its sums 3 numbers per target
        backward            all_reduce activation gradients of the head A
                            all_reduce activation gradients, each half  2LA
        step                update                                      nothing

    Cost: (4L + 2)A for each micro-batch, all of it exposed: the next layer needs the sum. It does
    not grow with the model's width squared, as gradients do, but it does with the batch. What a
    rank holds of split layers, their gradients and optimizer state is 1/n; norms and the residual
    stream every rank has whole (``sequence_parallel`` cuts these, too). If only some of the ranks
    share a model (``tensor_parallel:tensor=2`` on 4), the others share the data as bucket_ddp_async
    does.
    """


class SequenceParallel(CutModel):
    """Tensor parallelism whose ranks have some positions each of the norms and residuals.

    In ``tensor_parallel`` every rank computes all norms, and keeps the whole residual stream. Here,
    inside the blocks, a rank has some of the positions of both. Its all-reduce after each half
    becomes a reduce-scatter, and the positions are gathered where the next half begins: as many
    bytes. A norm sees some of the positions, so its gradient is a summand, as is that of a bias
    which is added to them.

    Schedule, for n ranks, L blocks, and A bytes of the residual stream (batch x positions x dim):

        at construction     broadcast parameters and buffers from rank 0; each keeps its part
        forward             all_reduce activations after the embedding  A
                            all_gather activations before each half     2LA
                            reduce_scatter activations after each half  2LA
                            all_gather activations after the last block A
                            all_reduce the loss's maxima, then its sums 3 numbers per target
        backward            all_reduce activation gradients of the head A
                            all_gather activation gradients, each half  2LA
                            reduce_scatter activation gradients, too    2LA
                            all_reduce the gradients of norms and biases
                            all_gather activation gradients, first block A
        step                update                                      nothing

    Cost: A gather or a scatter moves half of what an all-reduce does, so blocks cost what they cost
    in ``tensor_parallel``, and the ends of the blocks A more. What a rank keeps for backward of
    norms and residuals is 1/n; the gathered inputs of layers by columns it keeps whole.
    """


def cut(strategy: CutModel, setup: base.Setup) -> Cut:
    """Keep this rank's part of a model that is whole, and the same, on every rank."""
    model, group, sequence = setup.model, strategy.groups.tensor, strategy.axes.sequence
    named = splits.read(model, setup.splits)
    stream = Stream(group)
    if sequence:
        splits.refuse_for_sequence(named)
        stream = Positions(group, has_dropout=bool(splits.dropouts(model)))
    layers = splits.layers_of(model, named, group)
    if not layers:
        raise UsageError("tensor parallelism: the workload's splits cut no layer; see splits.py")
    divided = splits.divided_by(model, named, group.size())
    layout, partial = splits.agreed(model, named, layers, sequence)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is made once
    for layer in layers:
        for p, kept, axis in layer.cuts():
            if p not in made:
                part = torch.cat([p.detach().narrow(axis, r.start, len(r)) for r in kept], axis)
                made[p] = nn.Parameter(part, requires_grad=p.requires_grad)
    branches = [name for name, kind in named.items() if kind == "branch"]
    replaced = {layer.module: _made(layer, made, branches, stream) for layer in layers}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in replaced:
                parent._modules[key] = replaced[child].train(child.training)
    for module, attribute, number in divided:
        setattr(module, attribute, number)
    for name in branches:
        _share_input(model.get_submodule(name), stream, name)
    blocks = [name for name, kind in named.items() if kind == "block"]
    if isinstance(stream, Positions):
        _begin_at(model.get_submodule(blocks[0]), stream, blocks[0])
        _end_at(model.get_submodule(blocks[-1]), stream, blocks[-1])
    return Cut(layout, setup.loss_fn, partial=dict.fromkeys(partial, group))


# ------------------------------------------------------------------ what becomes of the modules


def _made(
    layer: Layer,
    made: Mapping[nn.Parameter, nn.Parameter],
    branches: Sequence[str],
    stream: Stream,
) -> nn.Module:
    """What takes the layer's place."""
    old, weight, group = layer.module, made[layer.weight], stream.group
    if layer.kind == "vocabulary":
        vocabulary = Vocabulary(cut_range(layer.weight.shape[layer.axis], group.size()), group)
        if isinstance(old, nn.Embedding):
            return VocabularyEmbedding(weight, old.padding_idx, vocabulary, layer.name)
    bias = old._parameters.get("bias")
    bias = None if bias is None else made.get(bias, bias)
    part = LinearPart(weight, bias, layer.is_transposed, layer.name)
    if layer.kind == "vocabulary":
        return VocabularyHead(part, vocabulary)
    if layer.kind == "rows":
        return RowLinear(part, stream)
    is_shared = any(outer in branches for outer in splits.around(layer.name))
    return ColumnLinear(part, None if is_shared else stream)


def _share_input(module: nn.Module, stream: Stream, name: str) -> None:
    """What the branch is given enters once for all layers in it. Its first tensor is the stream;
    others that need a gradient, such as another model's output, get the sum of theirs too."""

    def enter_once(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen: list[Tensor] = []

        def enter_one(x: Tensor) -> Tensor:
            seen.append(x)
            if len(seen) == 1:
                return stream.enter(x, name)
            return enter(x, stream.group, name) if x.requires_grad else x

        return map_tensors(args, enter_one), map_tensors(kwargs, enter_one)

    module.register_forward_pre_hook(enter_once, with_kwargs=True)


def _begin_at(module: nn.Module, stream: Positions, name: str) -> None:
    def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _first_changed((args, kwargs), lambda x: stream.begin(x, name))

    def note(*args: Any, **kwargs: Any) -> None:
        """A later stage of a pipeline does not run the block, and must know the positions too."""
        stream.divide(tensors_of((args, kwargs))[0])

    module.register_forward_pre_hook(begin, with_kwargs=True)
    vars(module)[WHEN_SKIPPED] = note


def _end_at(module: nn.Module, stream: Positions, name: str) -> None:
    def end(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _first_changed(output, lambda x: stream.end(x, name))

    module.register_forward_hook(end)


def _first_changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with its first tensor changed."""
    seen: list[Tensor] = []

    def change_first(x: Tensor) -> Tensor:
        seen.append(x)
        return change(x) if len(seen) == 1 else x

    return map_tensors(value, change_first)
