"""What ranks that split each layer must send of activations, from the shapes of one process's run.

Nothing of the strategies' code is used here but the words of the workload's splits. So a rank that
sends once too often, or the wrong tensor, differs from this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardlab.batch import tensors_of
from shardlab.strategies import splits
from shardlab.workloads.base import Batch, LossFn

NUMBERS = 3  # that the loss of a target needs of all ranks: a maximum, a sum, the target's logit


def of_tensor(
    model: nn.Module, words: Mapping[str, str], loss: LossFn, microbatches: Sequence[Batch]
) -> int:
    """Bytes of all tensors that the ranks of the tensor axis sum in a step, forward and backward.

    Forward, what layers by rows and split embeddings return is a sum over the ranks. Backward, the
    gradient of what goes into layers by columns is, once for those that share their input, and
    that of what goes into a split head.
    """
    named = splits.read(model, words)
    branches = [name for name, kind in named.items() if kind == "branch"]
    total = 0

    def count_output(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal total
        total += sum(map(_bytes, tensors_of(output)[:1]))

    def count_input(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal total
        entering = tensors_of((args, kwargs))[:1]
        total += sum(_bytes(t) for t in entering if t.requires_grad)

    def count_head(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal total
        count_input(_module, args, kwargs)
        entering = tensors_of((args, kwargs))[0]  # (..., dim)
        total += NUMBERS * _bytes(entering) // entering.shape[-1]

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
            hooks.append(module.register_forward_pre_hook(count_head, with_kwargs=True))
        elif kind == "branch" or (kind in ("columns", "heads") and not shares_input):
            hooks.append(module.register_forward_pre_hook(count_input, with_kwargs=True))
    for batch in microbatches:
        loss(model, batch)
    for hook in hooks:
        hook.remove()
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
