"""What a workload is: a model, a loss that is a sum, and samples by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.axes import Axes
from shardlab.batch import Batch as Batch
from shardlab.batch import Dataset as Dataset
from shardlab.batch import map_tensors as map_tensors
from shardlab.batch import tensors_of as tensors_of
from shardlab.config import Config

# The loss of a batch: a sum over batch.count targets, never their mean, so that batches of
# different sizes add up to the exact global mean. It must call model(...), not a part of the
# model: PyTorch's own strategies act in the model's forward.
LossFn = Callable[[nn.Module, Batch], Tensor]


# What evaluation adds up over the held-out samples, by name: sums, never means. "loss" is shown per
# target (batch.count), "correct" as accuracy, per sample, and any other quantity per sample.
Sums = dict[str, Tensor]
Evaluate = Callable[[nn.Module, Batch], Sums]


# The user's optimizer: one, over some or all of the named parameters of the whole model. It is
# called on every rank, also with tensors without content: names, shapes, dtypes and requires_grad
# may decide what it does, values may not.
MakeUsers = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

# Called on every rank after each update, with the number of the step from 0, what this rank
# updates, by the parameter's name (the whole, its rows, or a flat piece of it), and for each a dict
# in which it may keep tensors of that shape. They are checkpointed. It must treat each element by
# itself, and keep nothing elsewhere.
AfterStep = Callable[[int, Mapping[str, Tensor], Mapping[str, dict[str, Tensor]]], None]


@dataclass(frozen=True)
class ContextSplit:
    """How a workload is cut along its sequence, so that a rank has a part of every sample."""

    length: Callable[[Batch], int]  # tokens of each sequence in the batch
    # The batch of these positions alone, (tokens,) in rising order, with the count of their
    # targets. It must tell the model the positions, which it cannot count itself any more.
    take: Callable[[Batch, Tensor], Batch]
    # The modules that call F.scaled_dot_product_attention; "*" stands for any part of a name. All
    # else that the model does, it must do to each token by itself.
    attention: tuple[str, ...]
    # The model cannot be called without tokens: where there are fewer than ranks, positions may lie
    # behind the end of the sequence, and ``take`` fills them with something that does not count.
    pads: bool = False


@dataclass(frozen=True)
class Workload:
    name: str
    make_model: Callable[[], nn.Module]  # initialised from torch's random state
    loss: LossFn
    dataset: Dataset
    tokens_per_sample: int | None = None  # None: throughput is in samples
    # Names of the modules to shard or checkpoint one by one; None: they are guessed.
    blocks: tuple[str, ...] | None = None
    # How ranks may split the model between them, by names of modules: strategies/tensor/splits.py
    # has the words. None: not known, unless the architecture of the model is (Hugging Face's).
    splits: Mapping[str, str] | None = None
    compile_also: tuple[str, ...] = ()  # modules outside the blocks that are worth compiling
    held_out: Dataset | None = None  # samples that are never trained on; None: no evaluation
    evaluate: Evaluate | None = None  # None: the loss alone
    flops_per_sample: float | None = None  # forward and backward; None: unknown
    optimizer: MakeUsers | None = None  # None: the config's
    schedule: Callable[[int], float] | None = None  # a step's factor for all rates; None: config's
    after_step: AfterStep | None = None
    couples_ranks: str | None = None  # what in forward looks at other ranks' samples, if anything
    # The loss looks at a micro-batch's samples together (contrastive, dice), and that is meant.
    couples_samples: bool = False
    context: ContextSplit | None = None  # how its sequences are cut; None: they cannot be
    notes: tuple[str, ...] = ()  # findings about it, to be printed once
    data: str = ""  # where its samples come from, in words; empty if that is not known
    # What it decided where the config left it open, by key: what data.source "auto" stands for.
    chosen: Mapping[str, Any] = field(default_factory=dict)
    # Raises a UsageError if the model cannot be trained as asked: in this run, on these axes of a
    # mesh if there is one, and on this device. None: it always can.
    refuse: Callable[[Config, Axes | None, torch.device], None] | None = None

    def splits_of(self, model: nn.Module) -> Mapping[str, str] | None:
        """How the model may be split: as given, or as is known of its architecture."""
        from shardlab.workloads.architectures import known_splits

        return known_splits(model) if self.splits is None else self.splits

    def blocks_of(self, model: nn.Module) -> tuple[str, ...]:
        """The names of the blocks: as given, or guessed from ``model``."""
        from shardlab.workloads.blocks import guess_blocks

        return guess_blocks(model) if self.blocks is None else self.blocks


def cast_model(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on the device, its real numbers in ``dtype`` and its complex ones as wide.

    ``model.to(device, dtype)`` would cut off imaginary parts.
    """
    of_complex = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(device, of_complex)
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    model._apply(cast)
    return model


@dataclass(frozen=True)
class Part:
    """A run of another data set's samples, under their numbers from 0 on."""

    whole: Dataset
    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        return self.whole.batch([self.first + int(i) for i in ids])


def hold_out(whole: Dataset, fraction: float) -> tuple[Dataset, Dataset | None]:
    """The first samples to train on and the last to evaluate on, one between them left out.

    Left out, because a window of a token stream ends with the first token of the next.
    """
    kept = max(1, round(len(whole) * fraction))
    if len(whole) < kept + 2:
        return whole, None
    return Part(whole, 0, len(whole) - kept - 1), Part(whole, len(whole) - kept, kept)


def classify(model: nn.Module, batch: Batch) -> Sums:
    """Loss and right answers of a classifier: logits (samples, classes), targets (samples,)."""
    logits = model(batch.inputs)
    return {
        "loss": F.cross_entropy(logits, batch.targets, reduction="sum"),
        "correct": (logits.argmax(1) == batch.targets).sum(),
    }


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def count_flops(make_model: Callable[[], nn.Module], loss: LossFn, batch: Batch) -> float:
    """FLOPs of a sample, forward and backward, counted on the meta device: nothing is computed."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = torch.device("meta")
    with meta, FlopCounterMode(display=False) as counter:
        torch.autograd.backward(loss(make_model(), batch.to(meta)))
    return float(counter.get_total_flops()) / batch.samples
