"""Models that every axis can cut, as workloads, and bugs of ranks that cut them."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshed
import planted_tensor
from bug import Bug, Plant
from shardlab import comm
from shardlab.strategies import cut_model
from shardlab.strategies.context import ring_attention
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.pipeline import executor, p2p, pytorch_pipeline, schedules
from shardlab.strategies.tensor import sequence_layers, tensor_layers, tensor_parallel
from shardlab.strategies.update import Update
from shardlab.workloads import gpt2
from shardlab.workloads.base import Batch, Workload

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


class Recomputed(Loud):
    """Computes each block again in backward, by itself (transformers' gradient checkpointing)."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = again  # type: ignore[method-assign]


def words(texts: type[Texts] = Texts, model: type[Loud] = Loud) -> Workload:
    return Workload(
        "words", model, _loss, texts(), blocks=NAMES, splits=gpt2.splits_of(SHAPE),
        context=dataclasses.replace(gpt2.CONTEXT, take=_take),
    )  # fmt: skip


even_words = functools.partial(words, Even)
recomputed = functools.partial(words, model=Recomputed)


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
    """The pipeline's own: statistics in the blocks, a sum past all of them."""
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

CLIP = {"training.clip_norm": 0.01}


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
    is_lost = key[0] == p2p.GRADIENT and key[2] == 0
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


def _statistics_are_lost(self: Any, batches: Sequence[Batch]) -> Tensor:
    last = tuple(self.runner.blocks[self.runner.first(self.stages - 1) :])
    named = self.model.named_buffers() if self.rank == self.where[-1] else ()
    running = [buffer for name, buffer in named if name.startswith(last) and "running" in name]
    before = [buffer.clone() for buffer in running]
    total = _run(self, batches)
    for buffer, kept in zip(running, before, strict=True):
        buffer.copy_(kept)
    return total


def _shapes_each_time(self: Any, batches: Sequence[Batch]) -> Tensor:
    self.known.clear()
    return _run(self, batches)


def _all_forwards_first(self: Any, micro: int) -> Any:
    return schedules.schedule("gpipe", self.ranks, micro)


def _with_default_scale(make: Any) -> Any:
    """PyTorch's own default, scale_grads=True."""
    return lambda stage, micro, loss_fn, **_: make(stage, micro, loss_fn=loss_fn)


SCALED = {name: _with_default_scale(make) for name, make in pytorch_pipeline.SCHEDULES.items()}
Executor = executor.Executor
_run, _give, _received, _backward = (
    Executor.run, Executor._give, Executor._take, Executor._backward,
)  # fmt: skip
_weights, _sum_shared = Executor._weights, Executor._sum_shared
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
_attend_backward, _groups_of = ring_attention.attend_backward, cut_model.groups_of


# The tensor axis, and several together.


def _sums_once_more(ctx: Any, gradient: Tensor) -> Any:
    comm.all_reduce(gradient.clone(), ctx.group, label="once more")
    return _entered(ctx, gradient)


def _reduces_all(self: Any, x: Tensor, label: str) -> Tensor:
    """Twice the bytes of a reduce-scatter, and the same numbers."""
    every = x.contiguous().clone()
    comm.all_reduce(every, self.group, label=label)
    return self.keep(every, label)


def _keeps_the_whole(layer: Any, made: Any, branches: Any, stream: Any) -> nn.Module:
    module = _made(layer, made, branches, stream)
    vars(module)["whole"] = layer.weight
    return module


def _norm_of_one_axis(self: Update, _group: Any, shares: Any) -> None:
    _across(self, shares.__self__.groups.tensor, shares)


def _counts_what_is_shared_twice(self: Any) -> list[float]:
    return [1.0 for _ in self.inner.updated_names()]


_entered, _made = tensor_layers._Enter.backward, tensor_parallel._made
_across = Update.across


def _pipeline(message: str, *plants: Plant, schedule: str = "1f1b", **more: Any) -> Bug:
    return Bug(f"pipeline_{schedule}", message, plants=plants, **{"workload": "words", **more})


def _context(message: str, *plants: Plant, **more: Any) -> Bug:
    return Bug("context_parallel", message, plants=plants, **{"workload": "words", **more})


def _tensor(message: str, *plants: Plant, sequence: bool = False, **more: Any) -> Bug:
    name = "sequence_parallel" if sequence else "tensor_parallel"
    return Bug(name, message, plants=plants, **{"workload": "words", **more})


def _both(message: str, *plants: Plant, **more: Any) -> Bug:
    """Of the tensor axis and a pipeline, beside two replicas' share of the data."""
    name = "zero1:tensor=2:pipeline=2"
    return Bug(name, message, plants=plants, workload="nasty", world=4, **more)


EVEN = {"workload": "even_words", "settings": {"training.global_batch": 8}}
OF_TENSORS = {  # what is said of each of planted_tensor
    "the row's bias is added on each rank": "step 0 of nasty, gradient 'head.bias': off by",
    "no sum where the stream entered": "step 0 of nasty, gradient 'scale': off by",
    "the gradient is too large by the ranks": "'blocks.3.down.weight': gradients are exactly 2.0x",
    "qkv is cut as one block": "step 0 of nasty, gradient 'head.bias': off by",
    "the maxima are each rank's own": "step 0 of nasty, gradient 'head.bias': off by",
    "ignored targets have a gradient": "step 0 of nasty, gradient 'head.bias': off by",
    "a token is looked up on every rank": "step 0 of nasty, gradient 'head.bias': off by",
    "gathered logits' gradients are summed": "gradient 'head.bias': gradients are exactly 2.0x",
    "the norm of each head is not summed": "gradient 'blocks.3.attention.scale.weight': off by",
    "tied parameters come apart": "updates 'head.weight', which the model does not have",
    "the padding's number is not translated": "in only 8 of 184 elements, 120 to 127",
    "sequence: the last block's gradient is summed": "'blocks.3.down.bias': gradients are exactly",
    "sequence: the first block's gradient stays on its rank": "gradient 'embed.weight': off by",
    "sequence: norms and biases are not summed": "gradient 'blocks.3.down.bias': off by",
}

BUGS: dict[str, Bug] = {
    f"tensor: {name.removeprefix('sequence: ')}": _tensor(
        message,
        *planted_tensor.BUGS[name],
        sequence=name.startswith("sequence"),
        workload="gathered" if name.startswith("gathered") else "nasty",
        check="refused" if name.startswith("tied") else "equal",
    )
    for name, message in OF_TENSORS.items()
}
BUGS |= {
    # The public ones: picotron; torchtitan #2972, #1733; Megatron-LM #844; PyTorch's default; and a
    # backward that gives input and weight gradient together, run for each of them.
    "public: not divided by the micro-batches": _pipeline(
        "gradient 'ln_f.weight': gradients are exactly 2.0x",
        (Executor, "run", _times_micro_batches),
    ),
    "public: too large by the tokens": _pipeline(
        "gradient 'ln_f.weight': gradients are exactly 35.0x: a wrong factor",
        (Executor, "run", _without_divisor),
        (executor, "_scaled", lambda gradient, _factor: gradient),
    ),
    "public: accumulation wipes gradients": _pipeline(
        "gradient 'ln_f.weight': only the last of 2 micro-batches is in it",
        (Executor, "_backward", _wiped),
    ),
    "public: tied embeddings are not summed": _pipeline(
        "step 0 of words, gradient 'wte.weight': off by",
        (Executor, "_sum_shared", lambda _self: None),
    ),
    "public: divided by the micro-batches in each call": Bug(
        "pytorch_pipeline",
        "divided by the number of micro-batches once too often",
        plants=[(pytorch_pipeline, "SCHEDULES", SCALED)],
        **EVEN,
    ),
    "public: the weight gradient comes twice": _pipeline(
        "gradient 'blocks.3.down.bias': gradients are exactly 2.0x",
        (Executor, "_weights", _weights_twice),
        schedule="zero_bubble",
    ),
    # Pipelines.
    "tied embeddings drift apart": _pipeline(
        "step 0 of words, gradient 'wte.weight': off by",  # on the stage that holds it, too
        (Executor, "_sum_shared", _first_holder_alone),
    ),
    "a gradient is not sent back": _pipeline(
        "gradient 'blocks.1.down.bias': only the last of 2 micro-batches is in it",
        (Executor, "_give", _no_gradient_back),
    ),
    "a stale activation": _pipeline(
        "step 0 of words, gradient 'ln_f.weight': off by",
        (Executor, "_take", _stale),
        schedule="gpipe",
        **EVEN,
    ),
    "the weight gradient never comes": _pipeline(
        "gradient 'blocks.3.down.bias': it is None, in one process it is there",
        (Executor, "_weights", _weights_never),
        schedule="zero_bubble",
    ),
    "the loss stays on its stage": _pipeline(
        "on rank 0 only: exactly 0.0x", (comm, "all_reduce", _loss_stays)
    ),
    "the last stage loses its statistics": _pipeline(
        "buffer 'blocks.6.norm.running_mean': off by",
        (Executor, "run", _statistics_are_lost),
        schedule="interleaved",
        workload="tied",
    ),
    "shapes are told in each step": _pipeline(
        "'pipeline send': (8, 9429)", (Executor, "run", _shapes_each_time), check="axes"
    ),
    "all forwards come first": _pipeline(
        "rank 1 keeps the activations of 2 micro-batches at a time; 1f1b says 1",
        (Executor, "lists", _all_forwards_first),
        check="state",
    ),
    # Sequences.
    "positions of neighbours": _context(
        "step 0 of words, gradient 'ln_f.weight': off by", (THIS, "take", _neighbours)
    ),
    "targets shifted in the part": _context(
        "step 0 of words, gradient 'ln_f.weight': off by", (THIS, "take", _shifted_in_the_part)
    ),
    "the count of the whole sequence": _context(
        "gradient 'ln_f.weight': gradients are exactly 0.5x", (THIS, "take", _count_of_the_whole)
    ),
    "ignored targets are counted": _context(
        "gradient 'ln_f.weight': gradients are exactly 0.7143x: a wrong factor",
        (THIS, "take", _every_target_counts),
    ),
    "a ring without the zigzag, under a loss in float32": _context(
        "step 0 of labelled, gradient 'lm_head.weight': off by",
        (ring_attention, "view", _without_zigzag),
        workload="labelled",
    ),
    "a late piece is seen": _context(
        "step 0 of words, gradient 'ln_f.weight': off by",
        (ring_attention, "view", _late_piece_is_seen),
    ),
    "blocks are not weighed again": _context(
        "step 0 of words, gradient 'ln_f.weight': off by", (ring_attention, "merge", _not_rescaled)
    ),
    "backward takes a block's own sum": _context(
        "gradient 'blocks.3.attention.qkv.bias': off by",
        (ring_attention, "attend_backward", _own_sum_in_backward),
    ),
    "a block goes round twice": _context(
        "({'context send': (64, 229376)}, {'context send': (32, 114688)})",
        (ring_attention.Blocks, "pass_on", _passed_on_twice),
        check="axes",
    ),
    "parts of a sequence are not summed": _context(
        "step 0 of words, gradient 'ln_f.weight': off by",
        (cut_model, "groups_of", _gradients_stay_in_their_part),
    ),
    # What a rank sends and holds besides.
    "a sum is made once more": _tensor(
        "({'tensor all_reduce': (58, 170520)}, {'tensor all_reduce': (40, 114072)})",
        (tensor_layers._Enter, "backward", staticmethod(_sums_once_more)),
        check="axes",
    ),
    "all is reduced where some is wanted": _tensor(
        "({'tensor all_reduce': (88, 120216), 'tensor all_gather': (36, 112896)},",
        (sequence_layers.Exchange, "scatter", _reduces_all),
        sequence=True,
        check="axes",
    ),
    "whole weights are kept": _tensor(
        "the parameters on the fullest rank: 155 KiB, not 56.5 KiB",
        (tensor_parallel, "_made", _keeps_the_whole),
        check="state",
    ),
    # Several axes.
    "clipping: norms of what all ranks hold count twice": _tensor(
        "though the gradients are equal: look at the update",
        (CutModel, "_shares", _counts_what_is_shared_twice),
        settings=CLIP,
    ),
    "clipping: each stage by its own norm": Bug(
        "zero1:pipeline=2",
        "though the gradients are equal: look at the update",
        plants=[(Update, "across", lambda *_: None)],
        workload="words",
        settings=CLIP,
    ),
    "tied embeddings are summed twice beside replicas": _both(
        "gradient 'embed.weight': gradients are exactly 2.0x",
        (Executor, "_sum_shared", _summed_twice),
    ),
    "no sum of a split layer's input, in a stage": _both(
        "step 0 of nasty, gradient 'scale': off by",
        *planted_tensor.BUGS["no sum where the stream entered"],
    ),
    "clipping: one axis forgets the other": _both(
        "though the gradients are equal: look at the update",
        (Update, "across", _norm_of_one_axis),
        settings=CLIP,
    ),
}
