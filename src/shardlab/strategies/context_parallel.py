"""Context parallelism: each rank has a part of every sequence, and attention is a ring.

All else in a transformer treats each token by itself, so that a rank computes it for its own
tokens alone: activations shrink with the number of ranks. Every rank has the whole model. A
gradient is a sum over tokens, so that the ranks' gradients are summed as between those of the data
axis, by the strategy that runs on the cut model. What the ring sends, and when, is told in
``ring_attention.py``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shardlab import comm
from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.strategies import base, layout
from shardlab.strategies.layout import Cut
from shardlab.strategies.on_mesh import OnMesh
from shardlab.strategies.ring_attention import Zigzag, ring_attention
from shardlab.strategies.uses import in_backward
from shardlab.workloads.base import Batch, ContextSplit, LossFn

WHO = "context_parallel"


@dataclass(frozen=True)
class Part:
    """The inputs of a batch's part, and how long the sequences are that it was cut from."""

    inputs: Any
    length: int


class Ring(TorchFunctionMode):
    """While it is entered, ``F.scaled_dot_product_attention`` sees the whole sequence.

    It is entered for the forward of a part, and in backward for attention that activation
    checkpointing computes again. Outside of both (evaluation), attention is plain.
    """

    def __init__(self, group: comm.Group) -> None:
        super().__init__()
        self.group = group
        self.split: Zigzag | None = None  # of the part that was computed last
        self.is_open = False  # the forward of a part is running
        self.module: tuple[str, nn.Module] | None = None  # the attention that is running
        self.calls = 0

    @contextmanager
    def over(self, split: Zigzag) -> Iterator[None]:
        """Inside, the model is given this rank's part of sequences."""
        self.split, self.is_open = split, True
        try:
            with self:
                yield
        finally:
            self.is_open = False

    def around(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of an attention module."""
        if not (self.is_open or in_backward()):
            return forward(*args, **kwargs)
        before, self.module = (self.module, self.calls), (name, module)
        try:
            with self:
                result = forward(*args, **kwargs)
            if self.calls == before[1]:
                raise UsageError(
                    f"{WHO}: {self._named} computes its attention without "
                    "F.scaled_dot_product_attention, which is what the ring stands in for; call "
                    "that (for a model of transformers': attn_implementation='sdpa')"
                )
        finally:
            self.module = before[0]
        return result

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise UsageError(
                f"{WHO}: {self._named} is an nn.MultiheadAttention, into which the ring does not "
                "reach: write it with F.scaled_dot_product_attention"
            )
        return func(*args, **(kwargs or {}))

    @property
    def _named(self) -> str:
        return "the model" if self.module is None else f"module '{self.module[0]}'"

    def attend(
        self,
        query: Tensor,  # (batch, heads, tokens, size)
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert self.split is not None
        if self.module is None:
            raise UsageError(
                f"{WHO}: F.scaled_dot_product_attention was called outside of the modules that the "
                "workload's context names as its attention; name that module, too"
            )
        if attn_mask is not None:
            raise UsageError(
                f"{WHO}: {self._named} gives an attn_mask {tuple(attn_mask.shape)}, and the ring "
                "knows causal attention (is_causal=True) and attention to everything alone; pad "
                "at the end of a sequence and leave the mask out"
            )
        if dropout_p:
            raise UsageError(
                f"{WHO}: {self._named} drops out {dropout_p:g} of its attention weights, which no "
                "two ranks would draw alike: set the model's attention dropout to 0"
            )
        self._check_shapes(query, key, value, enable_gqa)
        self.calls += 1
        # transformers says so of a single query, which sees all keys when they are its own past.
        # Here they are other ranks', too.
        if query.shape[2] < 2:
            is_causal = is_causal or getattr(self.module[1], "is_causal", False)
        if torch.is_autocast_enabled(query.device.type):  # as autocast does with the original
            narrow = torch.get_autocast_dtype(query.device.type)
            query, key, value = (t if t.dtype == torch.float64 else t.to(narrow)
                                 for t in (query, key, value))  # fmt: skip
        how: Any = {"is_causal": is_causal, "scale": scale}
        return ring_attention(query, key, value, self.split, self.group, **how)

    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
        assert self.split is not None
        tokens = self.split.tokens(self.group.rank())
        shapes = [tuple(t.shape) for t in (q, k, v)]
        if [len(shape) for shape in shapes] != [4, 4, 4]:
            wrong = "(batch, heads, tokens, size) belongs"
        elif {shape[2] for shape in shapes} != {tokens}:
            wrong = (
                f"this rank has {tokens} of {self.split.length} tokens (is it attention between "
                "two sequences, or is the part not cut as the workload's context says?)"
            )
        elif len({shape[0] for shape in shapes}) > 1 or shapes[1][1] != shapes[2][1]:
            wrong = "they must have one batch size, and keys and values as many heads"
        elif shapes[0][1] != shapes[1][1] and (not enable_gqa or shapes[0][1] % shapes[1][1]):
            wrong = "heads of queries must share those of keys evenly, with enable_gqa=True"
        else:
            return
        raise UsageError(
            f"{WHO}: {self._named} attends with queries {shapes[0]}, keys {shapes[1]} and values "
            f"{shapes[2]}: {wrong}"
        )


def attention_modules(model: nn.Module, context: ContextSplit) -> dict[str, nn.Module]:
    """The modules that the workload names as its attention."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in context.attention:
        named = {n: modules[n] for n in modules if fnmatch.fnmatchcase(n, pattern)}
        if not named:
            raise UsageError(
                f"{WHO}: the workload's context names '{pattern}' as its attention, and the model "
                f"has no such module; its modules are {', '.join(list(modules)[1:9])} …"
            )
        found |= named
    return found


def refuse_mixers(model: nn.Module) -> None:
    """Refuse modules that look at several tokens of a sequence in another way than attention."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_wide = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if is_wide or isinstance(module, nn.RNNBase | _BatchNorm):
            raise UsageError(
                f"{WHO}: module '{name}' ({kind}) looks at several tokens of a sequence, of which "
                "a rank has a part: only attention is computed across ranks; use another strategy"
            )
        forward = getattr(module, "forward", None)
        if kind == "OptimizedModule" or hasattr(forward, "_torchdynamo_orig_callable"):
            raise UsageError(
                f"{WHO}: module '{name or kind}' is compiled, and the ring cannot stand in for "
                "attention in compiled code: leave out training.compile"
            )


def cut(setup: base.Setup, axes: Axes, group: comm.Group, loss: LossFn) -> Cut:  # noqa: ARG001
    """Make the model's attention a ring over ``group``. Every rank keeps the whole model."""
    model, context = setup.model, setup.context
    if context is None:
        raise UsageError(
            f"{WHO}: this workload does not say how its sequences are cut; give it a context "
            "(shardlab.workloads.base.ContextSplit, docs/parallel.md), or use another strategy"
        )
    refuse_mixers(model)
    ring = Ring(group)
    for name, module in attention_modules(model, context).items():
        module.forward = partial(ring.around, name, module, module.forward)
    device = next(model.parameters()).device

    def share(batch: Batch) -> Batch:
        length = max(context.length(batch), 2 * group.size() if context.pads else 0)
        split = Zigzag(length, group.size())
        part = context.take(batch, split.positions(group.rank(), device))
        return replace(part, inputs=Part(part.inputs, split.length))

    def loss_of_part(model: nn.Module, batch: Batch) -> Tensor:
        with ring.over(Zigzag(batch.inputs.length, group.size())):
            return loss(model, replace(batch, inputs=batch.inputs.inputs))

    return Cut(layout.whole_layout(model), loss_of_part, share=share)


class ContextParallel(OnMesh):
    """Each rank has a part of every sequence, and attention is a ring."""
