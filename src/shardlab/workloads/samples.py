"""The data of the short form: what people have, read by number and made into batches.

Map-style data (a ``Dataset``, a list, a dict or tuple of columns) is read by number. An iterable
has no numbers, so it is given some: sample i is the i-th that it yields. Every rank reads the whole
stream and keeps its own samples, and the stream begins again when it ends. A resumed run reads past
the samples before the one where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    TensorDataset,
    default_collate,
)

from shardlab.config import CONTINUOUS, DataConfig
from shardlab.errors import UsageError
from shardlab.workloads.base import Batch, map_tensors, tensors_of
from shardlab.workloads.user_errors import blame, short

TARGETS = ("labels", "label", "targets", "target", "y")  # looked for in a dict, in this order
IGNORED = -100  # a target that PyTorch's and Hugging Face's losses leave out
ENDLESS = 1 << 40  # samples: the length of what has none
KEPT = 64  # samples of a stream, at the least, that can be asked for again

Collate = Callable[[list[Any]], Any]


# ------------------------------------------------------------------ how a model is called


def call(model: nn.Module, inputs: Any) -> Any:
    """``model(**inputs)`` for a dict, ``model(*inputs)`` for a list or tuple, else
    ``model(inputs)``. (A list of strings is one input.)"""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    is_several = isinstance(inputs, list | tuple) and not hasattr(inputs, "_fields")
    if is_several and not (inputs and all(isinstance(part, str) for part in inputs)):
        return model(*inputs)
    return model(inputs)


def divide(batch: Any, keep_targets: bool) -> tuple[Any, Any]:
    """A collated batch as inputs and targets. The last of a tuple is the target, and of a dict the
    entry of such a name. What has no target is its own, as for an autoencoder.

    ``keep_targets``: the model computes its loss, so the targets are among its inputs, too.
    """
    batch = _as_dict(batch)
    if isinstance(batch, Mapping):
        batch = dict(batch)
        name = next((name for name in TARGETS if name in batch), None)
        targets = batch if name is None else batch[name]
        if keep_targets or name is None:
            return batch, targets
        return {k: v for k, v in batch.items() if k != name}, targets
    if not isinstance(batch, list | tuple) or not batch:
        return batch, batch
    if len(batch) == 1:
        return batch[0], batch[0]
    *inputs, targets = batch
    if keep_targets:
        return tuple(batch), targets
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


def _as_dict(value: Any) -> Any:
    """A dataclass as the dict of its fields; anything else as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


# What a mean may be over; the likelier come first.
RULES = ("targets", "next tokens", "rows of classes", "elements", "samples")


# ------------------------------------------------------------------ batches


@dataclass
class Samples:
    """Map-style data as a data set of ours: samples by number, batches by a collate function."""

    name: str  # the workload's, for messages
    data: Any
    collate: Collate
    keep_targets: bool
    ignored: int = IGNORED
    note: str = ""  # what of the given data is not used
    rule: str = "targets"  # by which targets are counted
    digest: str = ""  # identifies a stream's first samples
    identity: str = ""  # what every rank must have found the same

    def __len__(self) -> int:
        return len(self.data)

    def sample(self, number: int) -> Any:
        return self.data[number]

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = []
        for number in map(int, ids):
            with blame(self.name, f"sample {number}"):
                rows.append(self.sample(number))
        collated = self._collate(rows, ids) if rows else self._no_rows()
        inputs, targets = divide(collated, self.keep_targets)
        batch = Batch(inputs=inputs, targets=targets, count=0, samples=len(rows))
        return replace(batch, count=self.count(self.rule, batch)) if rows else batch

    def count(self, rule: str, batch: Batch) -> int:
        """How many targets a mean by this rule is over; -1 where they are not of such a kind."""
        targets = batch.targets
        if rule == "samples" or (rule == "targets" and not isinstance(targets, Tensor)):
            return batch.samples
        if not isinstance(targets, Tensor):
            return -1
        if rule == "elements":
            return targets.numel()
        is_real = targets.is_floating_point()
        if rule == "rows of classes":  # (rows, classes, …): a probability for each class
            is_rows = is_real and targets.dim() > 1
            return targets.numel() // max(1, targets.shape[1]) if is_rows else -1
        if rule == "next tokens" and targets.dim() < 2:
            return -1
        # A causal model shifts its labels by one.
        counted: Tensor = targets[:, 1:] if rule == "next tokens" else targets
        if is_real or targets.dtype == torch.bool:
            return counted.numel()
        return int((counted != self.ignored).sum())

    def _collate(self, rows: list[Any], ids: Sequence[int]) -> Any:
        with blame(self.name, f"the batch of samples {_few(ids)}"):
            return map_tensors(self.collate(rows), _as_trained)

    def _no_rows(self) -> Any:
        """A batch without rows, for a rank with nothing to do: one of sample 0, cut to none."""
        with blame(self.name, "sample 0"):
            row = self.sample(0)
        found = [self._collate([row] * times, [0] * times) for times in (1, 2)]
        empty = _cut(*found)
        if [t.shape for t in tensors_of(empty)] == [t.shape for t in tensors_of(found[0])]:
            raise UsageError(
                f"a rank has no samples in this step, and of {short(found[0])} no batch without "
                f"rows can be made ({self.name}): use a global batch that gives every rank some"
            )
        return empty


@dataclass
class Stream(Samples):
    """An iterable: sample i is the i-th that it yields, and it begins again when it ends."""

    def __post_init__(self) -> None:
        self._keep = KEPT
        with blame(self.name, "iterating over the data"):
            self.digest = self._digest()
            if self.digest != self._digest():
                raise UsageError(
                    f"the data of {self.name} yield other samples each time they are iterated, so "
                    "ranks would read different ones and a resumed run could not continue where it "
                    "stopped: shuffle with a fixed seed"
                )

    def __len__(self) -> int:
        return ENDLESS

    def _digest(self) -> str:
        """A hash of the first samples, read from the start."""
        self._begin()
        leaves = tree_leaves([plain(self.sample(i)) for i in range(4)])
        values = [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in leaves]
        text = repr([value for value in values if isinstance(value, list | str | int | float)])
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def _begin(self) -> None:
        self._passes = self._read()
        self._next = 0
        self._kept: dict[int, Any] = {}  # the last that were read, by number

    def _read(self) -> Iterator[Any]:
        """Every sample, in one pass after the other."""
        while True:
            is_empty = True
            for row in self.data:
                is_empty = False
                yield row
            if is_empty:
                raise UsageError(f"the data of {self.name} yield no samples")

    def batch(self, ids: Sequence[int]) -> Batch:
        if len(ids):  # a step's micro-batches are asked for one after the other, and interleave
            self._keep = max(self._keep, 2 * (max(ids) - min(ids) + 1))
        return super().batch(ids)

    def sample(self, number: int) -> Any:
        if number < self._next and number not in self._kept:
            self._begin()
        while number >= self._next:
            self._kept[self._next] = next(self._passes)
            self._kept.pop(self._next - self._keep, None)
            self._next += 1
        return self._kept[number]


def _as_trained(tensor: Tensor) -> Tensor:
    """Numbers of Python and numpy come in float64; models are trained in float32."""
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _cut(one: Any, two: Any) -> Any:
    """``one``, a batch of one row, without it; ``two`` is of the same row twice, and so shows which
    dimension the rows are along."""
    one, two = _as_dict(one), _as_dict(two)
    if isinstance(one, Tensor):
        sizes = zip(one.shape, two.shape, strict=True)
        along = next((dim for dim, (a, b) in enumerate(sizes) if a != b), None)
        return one if along is None else one.narrow(along, 0, 0)
    if isinstance(one, Mapping):
        return {k: _cut(v, two[k]) for k, v in one.items()}
    if isinstance(one, list | tuple):
        if len(one) != len(two):  # an entry for each row
            return type(one)()
        parts = [_cut(a, b) for a, b in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


# ------------------------------------------------------------------ collating


def collate(rows: list[Any]) -> Any:
    """``default_collate`` that also takes dataclasses and lists of numbers, and drops None."""
    plain_rows = [plain(row) for row in rows]
    try:
        return default_collate(plain_rows)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        shapes = [[tuple(getattr(x, "shape", ())) for x in tree_leaves(r)] for r in plain_rows]
        other = next((s for s in shapes if s != shapes[0]), None)
        if other is None:
            raise
        raise ValueError(
            f"samples of different shapes, {short(shapes[0])} and {short(other)}, make no batch: "
            "give a DataLoader with a collate_fn that pads them"
        ) from error


def plain(value: Any, inside: bool = False) -> Any:
    """A sample as tensors, tuples and dicts. A list of numbers in it is a tensor."""
    value = _as_dict(value)
    if isinstance(value, Mapping):
        return {k: plain(v, inside=True) for k, v in value.items() if v is not None}
    if inside and isinstance(value, list) and isinstance(_innermost(value), int | float):
        return torch.tensor(value)
    if isinstance(value, list | tuple):
        return tuple(plain(v, inside=True) for v in value if v is not None)
    return value


def _innermost(value: Any) -> Any:
    while isinstance(value, list) and value:
        value = value[0]
    return value


# ------------------------------------------------------------------ what people have


def samples_of(name: str, data: Any, config: DataConfig | None, keep_targets: bool) -> Samples:
    """What the short form was given for its data, or a ``TypeError`` that says why not.

    ``config``: None for held-out data, of which every evaluation reads all.
    """
    made_by: Collate = collate
    note = ""
    if isinstance(data, DataLoader):
        note = _check_loader(data)
        made_by = collate if data.collate_fn is default_collate else data.collate_fn
        data = data.dataset
    is_dict = isinstance(data, Mapping)
    if is_dict or (isinstance(data, tuple) and data and all(hasattr(c, "shape") for c in data)):
        columns: dict[Any, Any] = dict(data if is_dict else enumerate(map(torch.as_tensor, data)))
        lengths = {name: len(column) for name, column in columns.items()}
        if len({*lengths.values()}) != 1:
            raise TypeError(
                f"the data is a {type(data).__name__} of columns of different lengths: "
                + (", ".join(f"{name} {length}" for name, length in lengths.items()) or "none")
            )
        data = StackDataset(**columns) if is_dict else TensorDataset(*columns.values())
    kind = Samples
    has_numbers = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not has_numbers:
        _check_stream(data, config)
        kind = Stream
    return kind(name, data, made_by, keep_targets, note=note)


def _check_loader(loader: Any) -> str:
    """Refuse what cannot be kept of a ``DataLoader``; say what is not used."""
    if loader.batch_size is None and type(loader.batch_sampler) in (BatchSampler, type(None)):
        raise TypeError(
            "the DataLoader has batch_size=None, so its samples are batches already: give single "
            "samples, of which each rank takes its own"
        )
    chosen_by = [loader.batch_sampler]
    if not isinstance(loader.dataset, IterableDataset):
        chosen_by.append(loader.sampler)
    known = (BatchSampler, RandomSampler, SequentialSampler, DistributedSampler)
    for sampler in chosen_by:
        if type(sampler) not in known or getattr(sampler, "replacement", False):
            raise TypeError(
                f"the DataLoader's {type(sampler).__name__} cannot be kept: which samples a step "
                "reads is shardlab's to decide (for a part of the data, torch.utils.data.Subset)"
            )
    return (
        "of the DataLoader, the samples and the collate function are used; its batch size "
        f"({loader.batch_size}), order and workers are not: training.global_batch, data.shuffle "
        "and data.prefetch decide"
    )


def _check_stream(data: Any, config: DataConfig | None) -> None:
    """Refuse what cannot be read twice, and what a stream cannot do."""
    if not isinstance(data, Iterable):
        raise TypeError(
            f"the data, a {type(data).__name__}, can be neither indexed nor iterated: give a "
            "Dataset, a list of samples or a DataLoader"
        )
    if iter(data) is data:
        raise TypeError(
            f"the data, a {type(data).__name__}, can be read only once: give an object whose "
            "__iter__ begins again, such as an IterableDataset"
        )
    what = f"the data, a {type(data).__name__}, is iterable and has no numbered samples"
    if config is None:
        raise TypeError(f"{what}, so it cannot be held out: give a list of its samples")
    if config.shuffle:
        raise TypeError(f"{what}, so it is read in its own order: --set data.shuffle=false")
    if config.epoch != CONTINUOUS:
        raise TypeError(f"{what}, so data.epoch {config.epoch} is not possible: leave it out")


def _few(ids: Sequence[int]) -> str:
    return str([int(i) for i in ids]) if len(ids) <= 8 else f"{int(ids[0])} … {int(ids[-1])}"
