"""What ranks that cut a model must send between them in a step, by one process's shapes.

One process runs the whole model on each micro-batch. Hooks note the tensors that have to travel:
what goes into and comes out of split layers (tensor), the keys and values of attention (context),
what the last block of a stage returns (pipeline). What activation checkpointing computes again in
backward (not re-entrant) is sent again, as far as it comes. The strategies' code only says where a
pipeline is cut and what its stages share, and reads the workload's splits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.axes import Axes
from shardlab.batch import tensors_of
from shardlab.config import Config
from shardlab.proof import evidence, reference
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.steps import in_backward
from shardlab.strategies.tensor import splits
from shardlab.training import builders
from shardlab.workloads import token_loss
from shardlab.workloads.base import Batch, ContextSplit, LossFn
from shardlab.workloads.context import context_of
from shardlab.world import World

Sent = dict[str, tuple[int, int]]  # "axis collective": messages, bytes of their tensors
SUM = 8  # bytes of a number that is summed over ranks: a loss, the square of a norm


@dataclass(frozen=True)
class Place:
    """A rank on the mesh, and how the model was cut into stages."""

    mesh: Axes
    at: Mapping[str, int]  # its coordinate on each axis
    blocks: Sequence[str] = ()  # in the order of their calls
    ends: Sequence[int] = ()  # the last block of each stage
    # Parameters that several ranks of the pipeline hold: those ranks, and the bytes of each.
    shared: Sequence[tuple[tuple[int, ...], Mapping[str, int]]] = ()

    def stage_of(self, block: int) -> int:
        return sum(end < block for end in self.ends)

    def rank_of(self, stage: int) -> int:
        """Stages are dealt round robin."""
        return stage % self.mesh.pipeline

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        every = range(max(1, len(self.ends)))
        return [s for s in every if self.rank_of(s) == self.at["pipeline"]]


def of_proof(world: World, config: Config) -> Sent | None:
    """In a step of a proof's strategy on this rank. None where PyTorch's own code sends."""
    users = evidence._prepare("users", world, config)
    config = evidence._in_dtype(config, users)
    strategy, _ = evidence._build(users.subject, config, world)
    assert isinstance(strategy, CutModel)
    if config.strategy.name.startswith("pytorch"):
        return None
    mesh, workload, pipeline = strategy.axes, users.subject.workload, strategy.pipeline
    place = Place(mesh, mesh.place(world.rank))
    if pipeline is not None:
        names = {p: name for name, p in pipeline.model.named_parameters()}
        shared = [
            (ranks, {names[p]: p.numel() * p.itemsize for p in params})
            for ranks, params in pipeline.shared
        ]
        runner = pipeline.runner
        place = Place(mesh, mesh.place(world.rank), runner.blocks, runner.ends, shared)
    model = reference.build(users.subject)
    builders.prepare_blocks(model, workload, config.training)
    share = builders.data_share(config, world)[0]
    microbatches = users.subject.steps[0][share]
    words, context = workload.splits_of(model), context_of(workload, model)
    sent = of_step(model, place, workload.loss, microbatches, words, context)
    if config.training.clip_norm and min(mesh.tensor, mesh.pipeline) == 1:
        # The gradient's norm is summed over all that cut the model: here, over one axis.
        for axis in ("tensor", "pipeline"):
            if getattr(mesh, axis) > 1:
                messages, size = sent.get(f"{axis} all_reduce", (0, 0))
                sent[f"{axis} all_reduce"] = messages + 1, size + SUM
    return sent


def of_step(
    model: nn.Module,
    place: Place,
    loss: LossFn,
    microbatches: Sequence[Batch],
    words: Mapping[str, str] | None = None,
    context: ContextSplit | None = None,
) -> Sent:
    """What a rank sends in one step. ``words`` are the workload's splits, for the tensor axis."""
    one_process = _OneProcess(model, place, loss, words)
    for batch in microbatches:
        if context is not None and place.mesh.context > 1:
            one_process.attend(batch, context)
            pieces = _pieces(batch, context, place.mesh.context)[place.at["context"]]
            batch = context.take(batch, torch.tensor([*pieces[0], *pieces[1]]).long())
        if place.mesh.tensor > 1 or place.mesh.pipeline > 1:
            one_process.run(batch)
    if place.ends:
        one_process.end_step()
    return one_process.sent


class _OneProcess:
    """Runs the whole model, and notes what the rank at ``place`` would have to send."""

    def __init__(
        self, model: nn.Module, place: Place, loss: LossFn, words: Mapping[str, str] | None
    ) -> None:
        self.model, self.place, self.loss = model, place, loss
        self.named = splits.read(model, words) if place.mesh.tensor > 1 else {}
        self.sent: Sent = {}
        self.summands = _summands(model, self.named, place.mesh.sequence)
        self.used: set[str] = set()  # parameters that got a gradient, in any micro-batch
        # While a forward runs:
        self.block: int | None = None  # that runs
        self.passed = 0  # blocks that have run
        self.outputs: list[list[Tensor]] = []  # of the blocks
        self.awaits = False  # a split head has given its logits to a token_loss

    def note(self, axis: str, op: str, size: int, times: int = 1) -> None:
        if size and times:
            messages, total = self.sent.get(f"{axis} {op}", (0, 0))
            self.sent[f"{axis} {op}"] = messages + times, total + times * size

    def times(self) -> int:
        """On how many of this rank's stages the code that runs now runs. Code outside of the blocks
        runs on every stage that comes past it."""
        place = self.place
        if not place.ends:
            return 1
        if self.block is not None:
            return int(place.stage_of(self.block) in place.stages)
        last = len(place.ends) - 1
        return sum(s == last or self.passed <= place.ends[s] for s in place.stages)

    @contextmanager
    def hooked(self, hooks: Callable[[], Collection[Any] | Iterator[Any]]) -> Iterator[None]:
        """Inside, it is known which block runs; also to the ``hooks`` of a block itself."""

        def begin(block: int) -> None:
            self.block = block

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            self.block = None
            if not in_backward():
                self.passed += 1
                self.outputs.append(list(tensors_of(output)))

        blocks = [self.model.get_submodule(name) for name in self.place.blocks]
        held = [
            *(b.register_forward_pre_hook(lambda *_, n=n: begin(n)) for n, b in enumerate(blocks)),
            *hooks(),
            *(b.register_forward_hook(end) for b in blocks),
        ]
        self.block, self.passed, self.outputs = None, 0, []
        try:
            yield
        finally:
            for hook in held:
                hook.remove()

    def run(self, batch: Batch) -> None:
        """A micro-batch: the tensor axis, and what travels between stages."""
        with self.hooked(self._split_layers), _heard("cross_entropy", self._cross_entropy):
            value = self.loss(self.model, batch)
            self.model.zero_grad()
            value.backward()
        self._between_stages()
        got = {name: p for name, p in self.model.named_parameters() if p.grad is not None}
        for name in got.keys() & self.summands:
            at = [n for n, b in enumerate(self.place.blocks) if name.startswith(f"{b}.")]
            if not self.place.ends or self.place.stage_of(at[0]) in self.place.stages:
                self.note("tensor", "all_reduce", _bytes(got[name]))
        self.used |= got.keys()

    # ------------------------------------------------------------ tensor

    def _split_layers(self) -> Iterator[Any]:
        """Where the ranks of the tensor axis meet.

        What goes into layers by columns is known to all ranks, and its gradient is a sum over them;
        what comes out of layers by rows is such a sum. With ``sequence`` each rank has some of the
        positions: a sum is scattered, and what goes in is gathered.
        """
        modules = dict(self.model.named_modules())
        branches = [name for name, kind in self.named.items() if kind == "branch"]
        blocks = [modules[name] for name, kind in self.named.items() if kind == "block"]
        if self.place.mesh.sequence:
            yield blocks[0].register_forward_pre_hook(self._begins, with_kwargs=True)
            yield blocks[-1].register_forward_hook(self._ends)
        for name, text in self.named.items():
            kind, module = text.partition(" ")[0], modules.get(name)
            if module is None:
                continue
            shares_input = any(name.startswith(f"{branch}.") for branch in branches)
            if kind == "vocabulary" and isinstance(module, nn.Embedding):
                yield module.register_forward_hook(self._looked_up)
            elif kind == "vocabulary":
                yield module.register_forward_hook(self._head, with_kwargs=True)
            elif kind == "rows":
                yield module.register_forward_hook(self._leaves)
            elif kind == "branch" or (kind in ("columns", "heads") and not shares_input):
                yield module.register_forward_pre_hook(self._enters, with_kwargs=True)

    def _meet(self, op: str, tensor: Tensor) -> None:
        self.note("tensor", op, _bytes(tensor), self.times())

    def _begins(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        stream, *_ = tensors_of((args, kwargs))
        if _has_gradient(stream):
            self._meet("all_gather", stream)  # of the gradient

    def _ends(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._meet("all_gather", tensors_of(output)[0])

    def _enters(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        stream, *others = tensors_of((args, kwargs))
        if self.place.mesh.sequence:
            self._meet("all_gather", stream)
        if _has_gradient(stream):
            self._meet("reduce_scatter" if self.place.mesh.sequence else "all_reduce", stream)
        for other in others:
            if _has_gradient(other):
                self._meet("all_reduce", other)

    def _leaves(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._meet("reduce_scatter" if self.place.mesh.sequence else "all_reduce", output)
        if self.place.mesh.sequence and _has_gradient(output):
            self._meet("all_gather", output)  # of the gradient

    def _looked_up(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._meet("all_reduce", output)

    def _head(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entering, *targets = tensors_of((args, kwargs))  # (..., dim)
        if _has_gradient(entering):
            self._meet("all_reduce", entering)
        if targets:
            self._meet_in_loss(entering.shape[:-1].numel(), entering)
        elif token_loss._asking:
            self.awaits = True
        else:  # somebody else wants whole logits
            self._meet("all_gather", output)

    def _cross_entropy(self, input: Tensor, *_: Any, **__: Any) -> None:
        if self.awaits:
            self.awaits = False
            self._meet_in_loss(len(input), input)  # (rows, vocabulary)

    def _meet_in_loss(self, rows: int, like: Tensor) -> None:
        """The ranks send two messages: the largest logit of each row, and then the row's sum with
        the logit of its target."""
        for numbers in (1, 2):
            self.note("tensor", "all_reduce", numbers * rows * like.element_size(), self.times())

    # ------------------------------------------------------------ context

    def attend(self, batch: Batch, context: ContextSplit) -> None:
        """Keys and values go once round the ring without the last hop, forward and backward, and
        their gradients go all the way home. Each message is as large as the fullest rank's."""
        ranks, heads = self.place.mesh.context, self.place.mesh.tensor
        pieces = _pieces(batch, context, ranks)
        most = max(len(early) + len(late) for early, late in pieces)

        def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
            size = (_bytes(key) + _bytes(value)) // key.shape[-2] * most // heads
            hops = 3 * ranks - 2 if _has_gradient(query, key, value) else ranks - 1
            self.note("context", "send", size, self.times() * hops)

        whole = context.take(batch, torch.arange(context.length(batch)))
        with self.hooked(list), _heard("scaled_dot_product_attention", attention):
            self.loss(self.model, whole).backward()

    # ------------------------------------------------------------ pipeline

    def _between_stages(self) -> None:
        place = self.place
        for stage, end in enumerate(place.ends[:-1]):
            if place.rank_of(stage) == place.rank_of(stage + 1):
                continue
            for number, tensor in enumerate(self.outputs[end]):
                size = self._own_positions(tensor) if number == 0 else _bytes(tensor)
                if stage in place.stages:
                    self.note("pipeline", "send", size)
                if stage + 1 in place.stages and tensor.requires_grad:
                    self.note("pipeline", "send", size)  # its gradient

    def _own_positions(self, stream: Tensor) -> int:
        """Bytes of this rank's positions of the stream, of which each has some with ``sequence``;
        the first ranks have one more where they do not divide."""
        if not self.place.mesh.sequence:
            return _bytes(stream)
        positions, ranks = stream.shape[-2], self.place.mesh.tensor
        own = positions // ranks + (self.place.at["tensor"] < positions % ranks)
        return _bytes(stream) // max(1, positions) * own

    def end_step(self) -> None:
        """Behind the last micro-batch: gradients of parameters that several stages hold are sent by
        each to each, after a byte for each that says whether there is one; and the loss."""
        for ranks, sizes in self.place.shared:
            for size in (len(sizes), *(sizes[n] for n in sizes if n in self.used)):
                self.note("pipeline", "send", size, len(ranks) - 1)
        self.note("pipeline", "all_reduce", SUM)


def _summands(model: nn.Module, named: Mapping[str, str], sequence: bool) -> set[str]:
    """Parameters that every rank of the tensor axis has, and of whose gradient each computes a
    summand: those that work on a rank's heads, and on its positions with ``sequence``."""
    kinds = ("inside", "norm") if sequence else ("inside",)
    first = {p: name for name, p in model.named_parameters()}
    found = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        kind = named.get(name, named.get(owner, ""))
        if kind in kinds or (sequence and kind == "rows" and last == "bias"):
            found.add(first[p])
    return found


def _heard(name: str, hear: Callable[..., None]) -> AbstractContextManager[Any]:
    """``hear`` is given the arguments of each call of a function of torch's. (A TorchFunctionMode
    would not hear what checkpointing computes again.)"""
    original = getattr(F, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        hear(*args, **kwargs)
        return original(*args, **kwargs)

    return mock.patch.object(F, name, call)


def _pieces(batch: Batch, context: ContextSplit, ranks: int) -> list[tuple[range, range]]:
    """The early and the late piece of a sequence that each rank has: a zigzag."""
    length = max(context.length(batch), 2 * ranks if context.pads else 0)
    cuts = [i * length // (2 * ranks) for i in range(2 * ranks + 1)]
    pieces = [range(*ends) for ends in pairwise(cuts)]
    return [(pieces[i], pieces[-1 - i]) for i in range(ranks)]


def _has_gradient(*tensors: Tensor) -> bool:
    """Whether backward comes to one of them. Not if checkpointing has computed it again: backward
    is of what forward has computed."""
    return not in_backward() and any(tensor.requires_grad for tensor in tensors)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
