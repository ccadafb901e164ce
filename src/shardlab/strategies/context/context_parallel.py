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
from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.context.ring_attention import Zigzag, ring_attention
from shardlab.strategies.cut_model import Cut, CutModel
from shardlab.strategies.lockstep import Lockstep
from shardlab.strategies.steps import in_backward
from shardlab.workloads.base import Batch, ContextSplit

WHO = "context_parallel"


@dataclass(frozen=True)
class SequencePart:
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
        needs = f"{WHO}: ranks that share a sequence must run the same layers"
        self.lockstep = Lockstep(group, needs)
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
                    "that (in place of nn.MultiheadAttention, too; for a model of transformers': "
                    "attn_implementation='sdpa')"
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
        enable_gqa: bool = False,  # noqa: ARG002 (the ring shares keys' heads in any case)
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
        self._check_shapes(query, key, value)
        self.calls += 1
        self.lockstep.before("attention", self.module[0])
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

    def _check_shapes(self, *tensors: Tensor) -> None:
        """A kernel might read past the end of what is too short."""
        assert self.split is not None
        tokens = self.split.tokens(self.group.rank())
        shapes = q, k, v = [tuple(t.shape) for t in tensors]
        is_cut = all(len(s) == 4 and (s[0], s[2]) == (q[0], tokens) for s in shapes)
        if not is_cut or k[1] != v[1] or q[1] % k[1]:
            raise UsageError(
                f"{WHO}: {self._named} attends with queries, keys and values {shapes}, and this "
                f"rank has {tokens} of {self.split.length} tokens: (batch, heads, tokens, size) "
                "belongs, of one sequence that is cut as the workload's context says, with as many "
                "heads of keys as of values, and that many or a multiple of queries"
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


def refuse_batchnorm(model: nn.Module) -> None:
    """Its statistics in training would be those of a rank's tokens, and one sample is computed
    without them: the comparison before the first step sees nothing of it."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise UsageError(
                f"{WHO}: module '{name}' ({type(module).__name__}) looks at several tokens of a "
                "sequence, of which a rank has a part: use another strategy"
            )


def cut(strategy: CutModel, setup: base.Setup) -> Cut:
    """Make the model's attention a ring of ranks. Every rank keeps the whole model."""
    model, context, loss, group = setup.model, setup.context, setup.loss_fn, strategy.groups.context
    if context is None:
        raise UsageError(
            f"{WHO}: this workload does not say how its sequences are cut; give it a context "
            "(shardlab.workloads.base.ContextSplit, docs/parallel.md), or use another strategy"
        )
    refuse_batchnorm(model)
    ring = Ring(group)
    for name, module in attention_modules(model, context).items():
        module.forward = partial(ring.around, name, module, module.forward)
    device = next(model.parameters()).device

    def take_part(batch: Batch) -> Batch:
        length = max(context.length(batch), 2 * group.size() if context.pads else 0)
        split = Zigzag(length, group.size())
        part = context.take(batch, split.positions(group.rank(), device))
        count = part.count if batch.count else 0  # nothing of a row that stands in for none
        return replace(part, inputs=SequencePart(part.inputs, split.length), count=count)

    def loss_of_part(model: nn.Module, batch: Batch) -> Tensor:
        with ring.over(Zigzag(batch.inputs.length, group.size())):
            return loss(model, replace(batch, inputs=batch.inputs.inputs))

    around_step = partial(ring.lockstep.on_course, "step")
    return Cut(None, loss_of_part, take_part=take_part, around_step=around_step)


class ContextParallel(CutModel):
    """Each rank has a part of every sequence, and attention is a ring."""
