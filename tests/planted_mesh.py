"""Models that every axis can cut, as workloads, and bugs of ranks that cut them, each planted on
every rank for the time of a proof."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import judging
import meshed
import planted_tensor
from shardlab import comm
from shardlab import config as configs
from shardlab.proof import evidence
from shardlab.strategies import (
    on_mesh,
    pipeline,
    pytorch_pipeline,
    ring_attention,
    schedules,
    sequence_parallel,
    splits,
    tensor_parallel,
)
from shardlab.strategies.on_mesh import OnMesh
from shardlab.strategies.rehearsal import Rehearsal
from shardlab.strategies.update import Update
from shardlab.workloads import gpt2
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

THIS = sys.modules[__name__]

VOCAB, BLOCKS, PADDING = meshed.VOCAB, 4, 3


class Texts:
    """Rows of tokens of 5 to 7 tokens, padded at their end; not all targets count."""

    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> Batch:
        lengths = [5 + i % 3 for i in ids]
        x, y = torch.full((2, len(ids), max(lengths, default=5)), -100)
        for row, (i, length) in enumerate(zip(ids, lengths, strict=True)):
            draw = torch.Generator().manual_seed(100 + i)
            x[row, :length], y[row, :length] = torch.randint(VOCAB, (2, length), generator=draw)
        y[y % 5 == 0] = -100
        x[x == -100] = PADDING
        return Batch(x, y, int((y != -100).sum()), len(ids))


class Even(Texts):
    """All of one length."""

    def batch(self, ids: Sequence[int]) -> Batch:
        return super().batch([3 * i for i in ids])


class Nasty(meshed.Nasty):
    """Tied, frozen, unused and sometimes used parameters, an odd vocabulary, uneven stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(meshed.Block() for _ in range(BLOCKS))
        self.blocks[1].attention.out.requires_grad_(False)
        with torch.no_grad():  # biases and norms that are no zeros and ones
            for p in self.parameters():
                p.add_(0.1 * torch.randn_like(p))


NAMES = tuple(f"blocks.{i}" for i in range(BLOCKS))


def nasty(loss: Callable[[nn.Module, Batch], Tensor] = meshed.nasty_loss) -> Workload:
    return Workload(
        "nasty", Nasty, loss, Texts(), blocks=NAMES, splits=meshed.NASTY, couples_samples=True
    )


gathered = functools.partial(nasty, meshed.gathered_loss)

SHAPE = gpt2.Shape(layers=BLOCKS, heads=4, dim=16, context=16, vocab=VOCAB)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return gpt2.next_token_loss(model, batch)


def _take(batch: Batch, positions: Tensor) -> Batch:
    return take(batch, positions)  # by its name, which a bug may stand for


def take(batch: Batch, positions: Tensor) -> Batch:
    """Ours, with the count of the targets that count."""
    part = gpt2.take_positions(batch, positions)
    return dataclasses.replace(part, count=int((part.targets != -100).sum()))


class Loud(gpt2.GPT2):
    """With weights that are not small, so that attention matters."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.3 * torch.randn_like(p))


def words(texts: type[Texts] = Texts) -> Workload:
    return Workload(
        "words", Loud, _loss, texts(), blocks=NAMES, splits=gpt2.splits_of(SHAPE),
        context=dataclasses.replace(gpt2.CONTEXT, take=_take),
    )  # fmt: skip


even_words = functools.partial(words, Even)


def _llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        bos_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own, a mean that it computes in float32, as the sum that it was."""
    out = model(**batch.inputs)
    loss: Tensor = out.loss * batch.count if batch.count else out.logits.sum() * 0.0
    return loss


class Labelled(Texts):
    def batch(self, ids: Sequence[int]) -> Batch:
        batch = super().batch(ids)
        labels = batch.targets
        count = int((labels[:, 1:] != -100).sum())
        return dataclasses.replace(
            batch, inputs={"input_ids": batch.inputs, "labels": labels}, count=count
        )


def labelled() -> Workload:
    return Workload("labelled", _llama, _own_loss, Labelled())


def _tied_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def tied() -> Workload:
    """The pipeline's own: statistics before and in the blocks, a sum past all of them."""
    blocks = tuple(f"blocks.{i}" for i in range(8))
    return Workload("tied", meshed.Tied, _tied_loss, Rows(), blocks=blocks, couples_samples=True)


class Rows:
    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [torch.randn(2, 6, generator=torch.Generator().manual_seed(i)) for i in ids]
        x = torch.cat(rows) if rows else torch.zeros(0, 6)  # two rows: a BatchNorm needs them
        y = torch.tensor([j for i in ids for j in (i % 3, -100 if i % 4 else 2)], dtype=torch.long)
        return Batch(x, y, int((y != -100).sum()), len(rows))


# ------------------------------------------------------------------ bugs

Plant = tuple[Any, str, Any]  # of which object which attribute is replaced by what


@dataclasses.dataclass(frozen=True)
class Bug:
    plants: Sequence[Plant]
    strategy: str
    check: str = "equal"  # that must fail
    workload: str = "words"
    world: int = 2
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def case(self) -> tuple[str, str, int, tuple[tuple[str, Any], ...]]:
        """What is proved; without the bug it is right."""
        return self.workload, self.strategy, self.world, tuple(self.settings.items())


CLIP = {"training__clip_norm": 0.01}


# Pipelines.


def _times_micro_batches(self: Any, batches: Sequence[Batch]) -> Tensor:
    total = _run(self, batches)
    for gradient in self.gradients.values():
        gradient *= len(batches)
    return total


def _without_divisor(self: Any, batches: Sequence[Batch]) -> Tensor:
    self.divisor = lambda: None
    return _run(self, batches)


def _summed_twice(self: Any) -> None:
    _sum_shared(self)
    _sum_shared(self)


def _first_holder_alone(self: Any) -> None:
    """The sum is right on one of the stages that hold the parameter: they drift apart."""
    before = dict(self.gradients)
    _sum_shared(self)
    if self.rank:
        self.gradients.update(before)


def _wiped(self: Any, action: Any) -> None:
    for p in self.model.parameters():
        p.grad = None  # what the micro-batch before has left
    _backward(self, action)


def _no_gradient_back(self: Any, key: Any, tensors: Sequence[Tensor]) -> None:
    is_lost = key[0] == pipeline.GRADIENT and key[2] == 0
    _give(self, key, [torch.zeros_like(t) for t in tensors] if is_lost else tensors)


def _stale(self: Any, key: Any, shapes: Any) -> list[Tensor]:
    taken = _received(self, key, shapes)
    before: dict[Any, Any] = vars(self).setdefault("before", {})
    return list(before.setdefault((key[0], key[1], tuple(t.shape for t in taken)), taken))


def _weights_twice(self: Any, action: Any) -> None:
    kept = self.put_off[action.stage, action.micro]
    _weights(self, action)
    self.put_off[action.stage, action.micro] = kept
    _weights(self, action)


def _weights_never(self: Any, action: Any) -> None:
    del self.put_off[action.stage, action.micro]


def _loss_stays(tensor: Tensor, group: Any, **how: Any) -> Any:
    if how.get("label") == "loss of the last stage":
        return None
    return _all_reduce(tensor, group, **how)


def _every_stage_counts(self: Any, stage: int, *args: Any) -> Any:
    where, self.where = self.where, [None] * stage + [self.rank]  # as if it were the rank's first
    try:
        return _run_stage(self, stage, *args)
    finally:
        self.where = where


def _shapes_each_time(self: Any, batches: Sequence[Batch]) -> Tensor:
    self.known.clear()
    return _run(self, batches)


def _all_forwards_first(self: Any, micro: int) -> Any:
    return schedules.schedule("gpipe", self.ranks, micro)


def _with_default_scale(make: Any) -> Any:
    """PyTorch's own default, scale_grads=True."""
    return lambda stage, micro, loss_fn, **_: make(stage, micro, loss_fn=loss_fn)


Pipeline = pipeline.Pipeline
_run, _give, _received, _backward = (
    Pipeline.run, Pipeline._give, Pipeline._take, Pipeline._backward,
)  # fmt: skip
_weights, _sum_shared, _run_stage = Pipeline._weights, Pipeline._sum_shared, Pipeline._run_stage
_all_reduce = comm.all_reduce


# Sequences.


def _neighbours(batch: Batch, positions: Tensor) -> Batch:
    """The model is told that its tokens are neighbours, from the rank's first position on."""
    part = _right_take(batch, positions)
    at = positions[:1] + torch.arange(len(positions))
    return dataclasses.replace(part, inputs=(part.inputs[0], at))


def _count_of_the_whole(batch: Batch, positions: Tensor) -> Batch:
    return dataclasses.replace(_right_take(batch, positions), count=batch.count)


def _every_target_counts(batch: Batch, positions: Tensor) -> Batch:
    return gpt2.take_positions(batch, positions)


def _shifted_in_the_part(batch: Batch, positions: Tensor) -> Batch:
    part = _right_take(batch, positions)
    shifted = torch.cat([part.targets[:, 1:], part.targets[:, :1]], 1)
    return dataclasses.replace(part, targets=shifted)


def _without_zigzag(split: Any, rank: int, source: int, _is_causal: bool) -> Any:
    end = split.tokens(source) if source <= rank else 0
    return ring_attention.View(0, end, is_masked=source == rank)


def _late_piece_is_seen(split: Any, rank: int, source: int, is_causal: bool) -> Any:
    found = _view(split, rank, source, is_causal)
    return found._replace(end=split.tokens(source)) if source < rank else found


def _not_rescaled(out: Tensor, log_sum: Tensor, part: Tensor, its_sum: Tensor) -> None:
    total = torch.logaddexp(log_sum, its_sum)
    out.add_(part * (its_sum - total).exp().unsqueeze(-1))
    log_sum.copy_(total)


def _own_sum_in_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    out, _, is_masked, scale = rest
    own = ring_attention.attend(q, k, v, is_masked, scale)[1]
    return _attend_backward(grad, q, k, v, out, own, is_masked, scale)


def _passed_on_twice(self: Any, block: Tensor, what: str) -> Any:
    _pass_on(self, block, what)[1].wait()
    return _pass_on(self, block, what)


def _gradients_stay_in_their_part(axes: Any, world: Any) -> Any:
    groups = _groups_of(axes, world)
    return dataclasses.replace(groups, data=groups.tensor)  # of this rank alone


_right_take, _view, _pass_on = take, ring_attention.view, ring_attention.Blocks.pass_on
_attend_backward, _groups_of = ring_attention.attend_backward, on_mesh.groups_of


# The tensor axis, and several together.


def _sums_once_more(ctx: Any, gradient: Tensor) -> Any:
    comm.all_reduce(gradient.clone(), ctx.group, label="once more")
    return _entered(ctx, gradient)


def _reduces_all(self: Any, x: Tensor, label: str) -> Tensor:
    """Twice the bytes of a reduce-scatter, and the same numbers."""
    every = x.contiguous().clone()
    comm.all_reduce(every, self.group, label=label)
    return self.keep(every)


def _keeps_the_whole(layer: Any, made: Any, branches: Any, stream: Any) -> nn.Module:
    module = _made(layer, made, branches, stream)
    vars(module)["whole"] = layer.weight
    return module


def _norm_of_one_axis(axes: Any, world: Any) -> Any:
    groups = _groups_of(axes, world)
    return dataclasses.replace(groups, cut=groups.tensor)


def _counts_what_is_shared_twice(self: Any) -> list[float]:
    return [1.0 for _ in self.inner.updated_names()]


_entered, _made = tensor_parallel._Enter.backward, splits._made

BUGS: dict[str, Bug] = {
    f"tensor: {name.removeprefix('sequence: ')}": Bug(
        plants,
        "sequence_parallel" if name.startswith("sequence") else "tensor_parallel",
        workload="gathered" if name.startswith("gathered") else "nasty",
    )
    for name, plants in planted_tensor.BUGS.items()
    # Tied ones that come apart are refused before a step is made; the others are like some here.
    if not name.startswith(("tied", "a token", "the padding", "the norm of each"))
}
BUGS |= {
    # The public ones: picotron; torchtitan #2972, #1733; Megatron-LM #844; PyTorch's default; and a
    # backward that gives input and weight gradient together, run for each of them.
    "public: not divided by the micro-batches": Bug(
        [(Pipeline, "run", _times_micro_batches)], "pipeline_1f1b"
    ),
    "public: too large by the tokens": Bug(
        [
            (Pipeline, "run", _without_divisor),
            (pipeline, "_scaled", lambda gradient, _factor: gradient),
        ],
        "pipeline_1f1b",
    ),
    "public: accumulation wipes gradients": Bug(
        [(Pipeline, "_backward", _wiped)], "pipeline_1f1b"
    ),
    "public: tied embeddings are not summed": Bug(
        [(Pipeline, "_sum_shared", lambda _self: None)], "pipeline_1f1b"
    ),
    "public: divided by the micro-batches in each call": Bug(
        [
            (pytorch_pipeline, "SCHEDULES", {
                name: _with_default_scale(make)
                for name, make in pytorch_pipeline.SCHEDULES.items()
            }),
        ],
        "pytorch_pipeline", workload="even_words", settings={"training__global_batch": 8},
    ),
    "public: the weight gradient comes twice": Bug(
        [(Pipeline, "_weights", _weights_twice)], "pipeline_zero_bubble"
    ),
    # Pipelines.
    "tied embeddings drift apart": Bug(
        [(Pipeline, "_sum_shared", _first_holder_alone)], "pipeline_1f1b"
    ),
    "a gradient is not sent back": Bug([(Pipeline, "_give", _no_gradient_back)], "pipeline_1f1b"),
    "a stale activation": Bug(
        [(Pipeline, "_take", _stale)], "pipeline_gpipe", workload="even_words",
        settings={"training__global_batch": 8},
    ),
    "the weight gradient never comes": Bug(
        [(Pipeline, "_weights", _weights_never)], "pipeline_zero_bubble"
    ),
    "the loss stays on its stage": Bug([(comm, "all_reduce", _loss_stays)], "pipeline_1f1b"),
    "every stage writes statistics": Bug(
        [(Pipeline, "_run_stage", _every_stage_counts)], "pipeline_interleaved", workload="tied",
    ),
    "shapes are told in each step": Bug(
        [(Pipeline, "run", _shapes_each_time)], "pipeline_1f1b", "bytes"
    ),
    "all forwards come first": Bug(
        [(Pipeline, "lists", _all_forwards_first)], "pipeline_1f1b", "state"
    ),
    # Sequences.
    "positions of neighbours": Bug([(THIS, "take", _neighbours)], "context_parallel"),
    "targets shifted in the part": Bug([(THIS, "take", _shifted_in_the_part)], "context_parallel"),
    "the count of the whole sequence": Bug(
        [(THIS, "take", _count_of_the_whole)], "context_parallel"
    ),
    "ignored targets are counted": Bug([(THIS, "take", _every_target_counts)], "context_parallel"),
    "a ring without the zigzag, under a loss in float32": Bug(
        [(ring_attention, "view", _without_zigzag)], "context_parallel", workload="labelled"
    ),
    "a late piece is seen": Bug(
        [(ring_attention, "view", _late_piece_is_seen)], "context_parallel"
    ),
    "blocks are not weighed again": Bug(
        [(ring_attention, "merge", _not_rescaled)], "context_parallel"
    ),
    "backward takes a block's own sum": Bug(
        [(ring_attention, "attend_backward", _own_sum_in_backward)], "context_parallel"
    ),
    "a block goes round twice": Bug(
        [(ring_attention.Blocks, "pass_on", _passed_on_twice)], "context_parallel", "bytes"
    ),
    "parts of a sequence are not summed": Bug(
        [(on_mesh, "groups_of", _gradients_stay_in_their_part)], "context_parallel"
    ),
    # What a rank sends and holds besides.
    "a sum is made once more": Bug(
        [(tensor_parallel._Enter, "backward", staticmethod(_sums_once_more))], "tensor_parallel",
        "bytes",
    ),
    "all is reduced where some is wanted": Bug(
        [(sequence_parallel.Exchange, "scatter", _reduces_all)], "sequence_parallel", "bytes"
    ),
    "whole weights are kept": Bug(
        [(splits, "_made", _keeps_the_whole)], "tensor_parallel", "state"
    ),
    # Several axes.
    "clipping: norms of what all ranks hold count twice": Bug(
        [(OnMesh, "_shares", _counts_what_is_shared_twice)], "tensor_parallel", settings=CLIP
    ),
    "clipping: each stage by its own norm": Bug(
        [(Update, "across", lambda *_: None)], "zero1:pipeline=2", settings=CLIP
    ),
    "tied embeddings are summed twice beside replicas": Bug(
        [(Pipeline, "_sum_shared", _summed_twice)], "zero1:tensor=2:pipeline=2",
        workload="nasty", world=4,
    ),
    "no sum of a split layer's input, in a stage": Bug(
        planted_tensor.BUGS["no sum where the stream entered"], "zero1:tensor=2:pipeline=2",
        workload="nasty", world=4,
    ),
    "clipping: one axis forgets the other": Bug(
        [(on_mesh, "groups_of", _norm_of_one_axis)], "zero1:tensor=2:pipeline=2",
        workload="nasty", world=4, settings=CLIP,
    ),
}  # fmt: skip


def examine(world: World, values: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    """On a rank: a proof's evidence, with a bug in the strategy. One process has none."""
    config = configs.from_dict(values)
    evidence._prepare("users", world, config)
    with ExitStack() as planted:
        for plant in BUGS[name].plants if name else ():
            planted.enter_context(mock.patch.object(*plant))
        if name:  # the rehearsal of one sample finds some of them by itself
            planted.enter_context(mock.patch.object(Rehearsal, "of", return_value=None))
        return judging.examine_users(world, values)
