"""What ranks that split layers or sequences must send of activations, by one process's shapes.

Nothing of the strategies' code is used here but the words of the workload's splits. So a rank that
sends once too often, or the wrong tensor, differs from this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardlab.batch import tensors_of
from shardlab.strategies import splits
from shardlab.workloads import token_loss
from shardlab.workloads.base import Batch, ContextSplit, LossFn

NUMBERS = 3  # that the loss of a target needs of all ranks: a maximum, a sum, the target's logit


def of_tensor(
    model: nn.Module, words: Mapping[str, str], loss: LossFn, microbatches: Sequence[Batch]
) -> dict[str, int]:
    """Bytes of all tensors that ranks of the tensor axis sum and gather in a step, by collective.

    Forward, what layers by rows and split embeddings return is a sum over the ranks. Backward, the
    gradient of what goes into layers by columns is, once for those that share their input, and
    that of what goes into a split head. Its logits are gathered where they are not known to be for
    a cross-entropy alone.
    """
    named = splits.read(model, words)
    branches = [name for name, kind in named.items() if kind == "branch"]
    total = gathered = 0

    def count_output(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal total
        total += sum(map(_bytes, tensors_of(output)[:1]))

    def count_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal total
        entering = tensors_of((args, kwargs))[:1]
        total += sum(_bytes(t) for t in entering if t.requires_grad)

    def count_head(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal total, gathered
        count_input(module, args, kwargs)
        entering, *targets = tensors_of((args, kwargs))  # (..., dim)
        if targets or token_loss.is_awaited():
            total += NUMBERS * _bytes(entering) // entering.shape[-1]
        else:
            gathered += _bytes(output)

    hooks = []
    for name, text in named.items():
        kind = text.partition(" ")[0]
        module = dict(model.named_modules()).get(name)
        if module is None:
            continue
        shares_input = any(name.startswith(f"{branch}.") for branch in branches)
        if kind == "rows" or (kind == "vocabulary" and isinstance(module, nn.Embedding)):
            hooks.append(module.register_forward_hook(count_output))
        elif kind == "vocabulary":
            hooks.append(module.register_forward_hook(count_head, with_kwargs=True))
        elif kind == "branch" or (kind in ("columns", "heads") and not shares_input):
            hooks.append(module.register_forward_pre_hook(count_input, with_kwargs=True))
    for batch in microbatches:
        loss(model, batch)
    for hook in hooks:
        hook.remove()
    return {"all_reduce": total, "all_gather": gathered}


class _Attention(TorchFunctionMode):
    """The bytes of the keys and values of each call of attention, for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.per_token = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            size = _bytes(given["key"]) + _bytes(given["value"])
            self.per_token += size / given["key"].shape[-2]
        return func(*args, **(kwargs or {}))


def of_context(
    model: nn.Module,
    context: ContextSplit,
    loss: LossFn,
    microbatches: Sequence[Batch],
    ranks: int,
) -> float:
    """Bytes that a rank of the context axis sends in a step. Keys and values go once round the ring
    without the last hop, forward and backward, and their gradients go all the way home."""
    total = 0.0
    for batch in microbatches:
        length = context.length(batch)
        device = next(model.parameters()).device
        with _Attention() as attention:
            loss(model, context.take(batch, torch.arange(length, device=device)))
        length = max(length, 2 * ranks if context.pads else 0)
        cuts = [i * length // (2 * ranks) for i in range(2 * ranks + 1)]
        pieces = [end - start for start, end in pairwise(cuts)]
        most = max(pieces[i] + pieces[-1 - i] for i in range(ranks))  # tokens of the fullest rank
        total += (3 * ranks - 2) * most * attention.per_token
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
