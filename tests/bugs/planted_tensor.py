"""Bugs of tensor parallelism, each planted on every rank for the time of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from shardlab import comm
from shardlab.axes import cut_range
from shardlab.strategies.tensor import (
    sequence_layers,
    splits,
    tensor_layers,
    tensor_parallel,
    vocabulary,
)


def _row_bias_on_each_rank(self: Any, x: Tensor) -> Tensor:
    weight = self.weight.t() if self.is_transposed else self.weight
    out: Tensor = self.stream.leave(F.linear(x, weight, self.bias), self.label)
    return out


def _no_sum_in_backward(_ctx: Any, gradient: Tensor) -> Any:
    return gradient, None, None


def _sum_in_both_directions(ctx: Any, gradient: Tensor) -> Any:
    """The gradient of a sum is summed again: too large by the number of ranks."""
    total = gradient.clone()
    comm.all_reduce(total, ctx.group)
    return total, None, None


def _leave_keeps_group(ctx: Any, x: Tensor, group: Any, label: str) -> Tensor:
    ctx.group = group
    ctx.mark_dirty(x)
    comm.all_reduce(x, group, label=label)
    return x


def _one_block(_what: str, size: int, _heads: Any, group: Any) -> list[range]:
    """Queries, keys and values are cut as if they were one."""
    return [cut_range(size, group.size())[group.rank()]]


def _own_maxima(tensor: Tensor, group: Any, *, op: str = "sum", **rest: Any) -> Any:
    """Each rank shifts its logits by its own largest: the sums are of different things."""
    return None if op == "max" else _all_reduce(tensor, group, op=op, **rest)


def _counts_ignored(ctx: Any, gradient: Tensor) -> Any:
    softmax, at, is_own, _ = ctx.saved_tensors
    of_logits = softmax * gradient
    of_logits.scatter_add_(1, at, -(gradient * is_own)[:, None])
    return of_logits, None, None, None


def _others_tokens_too(self: Any, tokens: Tensor) -> Tensor:
    """Tokens of other ranks are looked up here as well, as token 0."""
    _, at = self.vocabulary.find(tokens)
    found = F.embedding(at, self.weight, self.padding_idx)
    return tensor_layers.leave(found, self.vocabulary.group, self.label)


def _sums_whole_gradient(self: Any, gradient: Tensor, label: str) -> Tensor:
    """As if every rank went on with something else after the gather."""
    total = gradient.contiguous().clone()
    comm.all_reduce(total, self.group)
    return _keep(self, total, label)


def _no_summands(*args: Any) -> Any:
    held, _ = _agreed(*args)
    return held, []


def _ends_with_a_scatter(self: Any, x: Tensor, label: str) -> Tensor:
    """The gradient of all positions, which every rank has, is summed over the ranks."""
    ranks = sequence_layers.Exchange(self, x)
    return sequence_layers.exchanged(x, ranks.gather, ranks.scatter, label)


def _begins_without_a_gather(self: Any, x: Tensor, label: str) -> Tensor:
    """Only this rank's positions reach the embedding's gradient."""
    self.divide(x)
    ranks = sequence_layers.Exchange(self)

    def alone(gradient: Tensor, _label: str) -> Tensor:
        part, size = ranks.part, ranks.parts[-1].stop
        whole = gradient.new_zeros(*gradient.shape[:-2], size, gradient.shape[-1])
        whole[..., part.start : part.stop, :] = gradient
        return whole

    return sequence_layers.exchanged(x, ranks.keep, alone, label)


def _separate_parameters(layer: Any, made: Any, branches: Any, stream: Any) -> torch.nn.Module:
    """Every layer gets a parameter of its own: what was tied drifts apart."""
    copies = {old: torch.nn.Parameter(new.detach().clone()) for old, new in made.items()}
    return _made(layer, copies, branches, stream)


def _padding_everywhere(self: Any, weight: Any, padding: Any, words: Any, label: str) -> None:
    """The number of the padding's token is not translated."""
    _embedding(self, weight, None, words, label)
    self.padding_idx = min(padding, len(weight) - 1)


_all_reduce = comm.all_reduce
_keep = vocabulary.Vocabulary.keep
_agreed, _made = splits.agreed, tensor_parallel._made
_embedding = vocabulary.VocabularyEmbedding.__init__

# What is replaced by what: (object, attribute, value).
BUGS: dict[str, list[tuple[Any, str, Any]]] = {
    "the row's bias is added on each rank": [
        (tensor_layers.RowLinear, "forward", _row_bias_on_each_rank)
    ],
    "no sum where the stream entered": [
        (tensor_layers._Enter, "backward", staticmethod(_no_sum_in_backward))
    ],
    "the gradient is too large by the ranks": [
        (tensor_layers._Leave, "forward", staticmethod(_leave_keeps_group)),
        (tensor_layers._Leave, "backward", staticmethod(_sum_in_both_directions)),
    ],
    "qkv is cut as one block": [(splits, "_by_heads", _one_block)],
    "the maxima are each rank's own": [(comm, "all_reduce", _own_maxima)],
    "ignored targets have a gradient": [
        (vocabulary._CrossEntropy, "backward", staticmethod(_counts_ignored))
    ],
    "a token is looked up on every rank": [
        (vocabulary.VocabularyEmbedding, "forward", _others_tokens_too)
    ],
    "gathered logits' gradients are summed": [
        (vocabulary.Vocabulary, "keep", _sums_whole_gradient),
    ],
    "the norm of each head is not summed": [(splits, "agreed", _no_summands)],
    "tied parameters come apart": [(tensor_parallel, "_made", _separate_parameters)],
    "the padding's number is not translated": [
        (vocabulary.VocabularyEmbedding, "__init__", _padding_everywhere)
    ],
    "sequence: the last block's gradient is summed": [
        (sequence_layers.Positions, "end", _ends_with_a_scatter)
    ],
    "sequence: the first block's gradient stays on its rank": [
        (sequence_layers.Positions, "begin", _begins_without_a_gather)
    ],
    "sequence: norms and biases are not summed": [(splits, "agreed", _no_summands)],
}


def planted(name: str, function: Callable[[], Any]) -> Any:
    patches = [mock.patch.object(*replaced) for replaced in BUGS[name]]
    for patch in patches:
        patch.start()
    try:
        return function()
    finally:
        for patch in patches:
            patch.stop()
