"""What ranks that cut a model must send of it in a step, by one process's shapes.

One process runs the whole model on each micro-batch, and hooks note the tensors that would have to
travel: what goes into and comes out of split layers (tensor), the keys and values of attention
(context), what the last block of a stage returns (pipeline). Nothing of the strategies' code is
used but the words of the workload's splits and, of a pipeline, behind which blocks it was cut. So a
rank that sends once too often, or the wrong tensor, differs from this.

A step's traffic is, by axis and collective, the number of messages and the bytes of their tensors.
Messages of no bytes do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shardlab.axes import Axes
from shardlab.batch import tensors_of
from shardlab.strategies import splits
from shardlab.workloads import token_loss
from shardlab.workloads.base import Batch, ContextSplit, LossFn

Traffic = dict[str, tuple[int, int]]  # "axis collective": messages, bytes of their tensors
SUM = 8  # bytes of a number that is summed over ranks: a loss, the square of a norm


@dataclass(frozen=True)
class Cuts:
    """Where a pipeline was cut: the blocks in the order of their calls, and the last of each
    stage."""

    blocks: Sequence[str]
    ends: Sequence[int]

    def stage_of(self, block: int) -> int:
        return sum(end < block for end in self.ends)


@dataclass(frozen=True)
class Place:
    """A rank on the mesh, and what it holds."""

    mesh: Axes
    at: Mapping[str, int]  # its coordinate on each axis
    sizes: Mapping[str, int]  # bytes of its part of each parameter
    cuts: Cuts | None = None  # of a pipeline

    def rank_of(self, stage: int) -> int:
        """Stages are dealt round robin; those of ZBV go down the ranks and up again."""
        turn, place = divmod(stage, self.mesh.pipeline)
        is_back = self.mesh.schedule == "zbv" and turn % 2
        return self.mesh.pipeline - 1 - place if is_back else place

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        every = range(len(self.cuts.ends) if self.cuts else 1)
        return [s for s in every if self.rank_of(s) == self.at["pipeline"]]


class _Made(NamedTuple):
    """What a block has returned, as it was then: the model may change it in place."""

    tensor: Tensor
    has_gradient: bool
    node: Any  # of autograd's graph


class NoFormula(Exception):
    """What is sent of this model on this mesh cannot be said beforehand, and why."""


def of_step(
    model: nn.Module,
    place: Place,
    loss: LossFn,
    microbatches: Sequence[Batch],
    words: Mapping[str, str] | None = None,
    context: ContextSplit | None = None,
    sample: Batch | None = None,
) -> Traffic:
    """The traffic of a rank in one step. ``words`` are the workload's splits, for the tensor axis;
    ``sample`` is the one by which a pipeline found out which stage uses which parameter."""
    one_process = _OneProcess(model, place, loss, words)
    device = next(model.parameters()).device

    def part_of(batch: Batch) -> Batch:
        is_cut = context is not None and place.mesh.context > 1
        return _part(batch, context, place, device) if context and is_cut else batch

    for batch in microbatches:
        if context is not None and place.mesh.context > 1:
            one_process.attend(batch, context)
        if place.mesh.tensor > 1 or place.mesh.pipeline > 1:
            one_process.run(part_of(batch))
    if place.cuts is not None and sample is not None:
        one_process.end_step(part_of(sample))
    return one_process.traffic


def received(model: nn.Module, place: Place, loss: LossFn, microbatches: Sequence[Batch]) -> int:
    """Bytes of the activations and gradients that a rank of a pipeline receives in a step."""
    one_process = _OneProcess(model, place, loss, None)
    for batch in microbatches:
        one_process.run(batch)
    return one_process.received


# ------------------------------------------------------------------ one process


class _OneProcess:
    """Runs the whole model, and notes what the rank at ``place`` would have to send."""

    def __init__(
        self, model: nn.Module, place: Place, loss: LossFn, words: Mapping[str, str] | None
    ) -> None:
        self.model, self.place, self.loss = model, place, loss
        self.named = splits.read(model, words) if place.mesh.tensor > 1 else {}
        self.traffic: Traffic = {}
        self.summands = _summands(model, self.named, place.mesh.sequence)
        # While a forward runs:
        self.block: int | None = None  # that runs
        self.passed = 0  # blocks that have run
        self.outputs: list[list[_Made]] = []  # of the blocks
        self.written: set[str] = set()  # buffers that code outside of the blocks has changed
        self.used: set[str] = set()  # parameters that got a gradient, in any micro-batch
        self.received = 0  # bytes of what comes from other stages

    def note(self, axis: str, op: str, size: int, times: int = 1) -> None:
        if size and times:
            messages, total = self.traffic.get(f"{axis} {op}", (0, 0))
            self.traffic[f"{axis} {op}"] = messages + times, total + times * size

    def times(self) -> int:
        """On how many of this rank's stages the code that runs now runs. Code outside of the blocks
        runs on every stage that comes past it."""
        cuts = self.place.cuts
        if cuts is None:
            return 1
        if self.block is not None:
            return int(cuts.stage_of(self.block) in self.place.stages)
        last = len(cuts.ends) - 1
        return sum(s == last or self.passed <= cuts.ends[s] for s in self.place.stages)

    @contextmanager
    def hooked(self, hooks: Iterator[Any] | Collection[Any] = ()) -> Iterator[None]:
        """Inside, it is known which block runs; also to the ``hooks`` of a block itself."""
        begins, ends = self._follow_blocks()
        held = [*begins(), *hooks, *ends()]
        self.block, self.passed, self.outputs = None, 0, []
        try:
            yield
        finally:
            for hook in held:
                hook.remove()

    def _follow_blocks(self) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
        versions = {name: buffer._version for name, buffer in self.model.named_buffers()}

        def look(is_outside: bool) -> None:
            for name, buffer in self.model.named_buffers():
                if buffer._version != versions[name]:
                    versions[name] = buffer._version
                    if is_outside:
                        self.written.add(name)

        def begin(block: int, *_: Any) -> None:
            look(is_outside=True)
            self.block = block

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            look(is_outside=False)
            self.block, self.passed = None, self.passed + 1
            self.outputs.append([_made(t) for t in tensors_of(output)])

        self.look = look
        blocks = [self.model.get_submodule(b) for b in (self.place.cuts or Cuts((), ())).blocks]
        return (
            lambda: [
                block.register_forward_pre_hook(lambda *_, n=n: begin(n))
                for n, block in enumerate(blocks)
            ],
            lambda: [
                *(block.register_forward_hook(end) for block in blocks),
                *(
                    module.register_forward_hook(partial(self._statistics, name))
                    for name, module in self.model.named_modules()
                    if isinstance(module, _BatchNorm)
                ),
            ],
        )

    def _statistics(self, name: str, module: nn.Module, *_: Any) -> None:
        """Running statistics change without a new version."""
        if self.block is None:
            self.written |= {key for key, _ in module.named_buffers(name)}

    def run(self, batch: Batch) -> None:
        """A micro-batch: the tensor axis, and what travels between stages."""
        with self.hooked(self._split_layers()), _Losses(self) as losses:
            self.losses = losses
            value = self.loss(self.model, batch)
            self.look(is_outside=True)
        uses = self.uses(value)
        sizes = {n: _bytes(p) for n, p in self.model.named_parameters()}
        for stage in self.place.stages:
            for name in uses[stage] & self.summands:
                self.note("tensor", "all_reduce", sizes[name])
        self.used |= set().union(*uses)
        self._between_stages()

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
        if stream.requires_grad:
            self._meet("all_gather", stream)  # of the gradient

    def _ends(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._meet("all_gather", tensors_of(output)[0])

    def _enters(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._refuse_outside()
        stream, *others = tensors_of((args, kwargs))
        if self.place.mesh.sequence:
            self._meet("all_gather", stream)
        if stream.requires_grad:
            self._meet("reduce_scatter" if self.place.mesh.sequence else "all_reduce", stream)
        for other in others:
            if other.requires_grad:
                self._meet("all_reduce", other)

    def _leaves(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._refuse_outside()
        self._meet("reduce_scatter" if self.place.mesh.sequence else "all_reduce", output)
        if self.place.mesh.sequence and output.requires_grad:
            self._meet("all_gather", output)  # of the gradient

    def _looked_up(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._meet("all_reduce", output)

    def _head(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entering, *targets = tensors_of((args, kwargs))  # (..., dim)
        if entering.requires_grad:
            self._meet("all_reduce", entering)
        if targets:
            self.meet_in_loss(entering.shape[:-1].numel(), entering)
        elif token_loss.is_awaited():
            self.losses.awaits = True
        else:  # somebody else wants whole logits
            self._meet("all_gather", output)

    def meet_in_loss(self, rows: int, like: Tensor) -> None:
        """The ranks send two messages: the largest logit of each row, and then the row's sum with
        the logit of its target."""
        for numbers in (1, 2):
            self.note("tensor", "all_reduce", numbers * rows * like.element_size(), self.times())

    def _refuse_outside(self) -> None:
        """A split layer between the blocks runs on several stages, and it depends on the model on
        which of them it has a gradient."""
        if self.place.cuts is not None and self.block is None:
            raise NoFormula("a layer outside of the blocks is split, and stages pass it")

    # ------------------------------------------------------------ context

    def attend(self, batch: Batch, context: ContextSplit) -> None:
        """Keys and values go once round the ring without the last hop, forward and backward, and
        their gradients go all the way home. Each message is as large as the fullest rank's."""
        device = next(self.model.parameters()).device
        pieces = _pieces(batch, context, self.place.mesh.context)
        most = max(len(early) + len(late) for early, late in pieces)
        ranks, heads = self.place.mesh.context, self.place.mesh.tensor

        def note(keys: Tensor, values: Tensor, has_gradient: bool) -> None:
            size = (_bytes(keys) + _bytes(values)) // keys.shape[-2] * most // heads
            self.note(
                "context",
                "send",
                size,
                self.times() * (3 * ranks - 2 if has_gradient else ranks - 1),
            )

        whole = context.take(batch, torch.arange(context.length(batch), device=device))
        with self.hooked(), _Attention(note):
            self.loss(self.model, whole)

    # ------------------------------------------------------------ pipeline

    def uses(self, loss: Tensor) -> list[set[str]]:
        """The parameters that each stage uses, by the graph of the last forward."""
        ends = self.place.cuts.ends if self.place.cuts else []
        borders = [self.outputs[end] for end in ends[:-1]]
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        return [
            {names[p] for p in _reached(after, before) if p in names}
            for before, after in pairwise([[], *borders, [_made(loss)]])
        ]

    def _between_stages(self) -> None:
        place = self.place
        for stage, end in enumerate(place.cuts.ends[:-1] if place.cuts else ()):
            if place.rank_of(stage) == place.rank_of(stage + 1):
                continue
            for number, (tensor, has_gradient, _) in enumerate(self.outputs[end]):
                size = self._share(tensor) if number == 0 else _bytes(tensor)
                back = size if has_gradient else 0  # its gradient
                if stage in place.stages:
                    self.note("pipeline", "send", size)
                    self.received += back
                if stage + 1 in place.stages:
                    self.note("pipeline", "send", back)
                    self.received += size

    def _share(self, stream: Tensor) -> int:
        """Bytes of this rank's positions of the stream, of which each has some with ``sequence``;
        the first ranks have one more where they do not divide."""
        if not self.place.mesh.sequence:
            return _bytes(stream)
        positions, ranks = stream.shape[-2], self.place.mesh.tensor
        own = positions // ranks + (self.place.at["tensor"] < positions % ranks)
        return _bytes(stream) // max(1, positions) * own

    def end_step(self, sample: Batch) -> None:
        """Behind the last micro-batch: gradients of parameters that several stages hold are sent by
        each to each, after a byte for each that says whether there is one; and the loss."""
        assert self.place.cuts is not None
        in_step = set(self.used)
        together: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self._holders(sample).items():
            ranks = tuple(sorted({self.place.rank_of(s) for s in stages}))
            if len(ranks) > 1 and self.place.at["pipeline"] in ranks:
                together.setdefault(ranks, []).append(name)
        for ranks, names in together.items():
            for size in (len(names), *(self.place.sizes[n] for n in names if n in in_step)):
                self.note("pipeline", "send", size, len(ranks) - 1)
        buffers = dict(self.model.named_buffers())
        for name in self.written:  # one stage has the right values, and all go on with them
            self.note("pipeline", "all_reduce", _bytes(buffers[name]))
        self.note("pipeline", "all_reduce", SUM)

    def _holders(self, sample: Batch) -> dict[str, set[int]]:
        """The stages that hold each parameter that trains: those that use it; if the sample's
        forward did not, that of its block, and outside of the blocks all."""
        cuts = self.place.cuts
        assert cuts is not None
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.training]
        for norm in norms:  # they cannot train on one sample
            norm.training = False
        with self.hooked():
            value = self.loss(self.model, sample)
            self.look(is_outside=True)
        for norm in norms:
            norm.training = True
        found: dict[str, set[int]] = {}
        for stage, names in enumerate(self.uses(value)):
            for name in names:
                found.setdefault(name, set()).add(stage)
        for name, p in self.model.named_parameters():
            if p.requires_grad and name not in found:
                at = [b for b, block in enumerate(cuts.blocks) if name.startswith(f"{block}.")]
                found[name] = {cuts.stage_of(b) for b in at} or set(range(len(cuts.ends)))
        return found


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


def _made(tensor: Tensor) -> _Made:
    return _Made(tensor, tensor.requires_grad, tensor.grad_fn)


def _reached(ends: Sequence[_Made], stops: Sequence[_Made]) -> set[Tensor]:
    """The leaves of the graph that some tensors were computed from, not beyond ``stops``."""
    seen = {made.node for made in stops if made.node is not None}
    waiting = [made.node for made in ends if made.node is not None]
    leaves = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        waiting += [n for n, _ in node.next_functions if n is not None]
    return leaves


# ------------------------------------------------------------------ what functions are given


class _Losses(TorchFunctionMode):
    """The rows of the cross-entropy that a split head's logits were made for."""

    def __init__(self, one_process: _OneProcess) -> None:
        super().__init__()
        self.one_process = one_process
        self.awaits = False  # a head has given its logits to a token_loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy and self.awaits:
            self.awaits = False
            logits = args[0] if args else kwargs["input"]  # (rows, vocabulary)
            self.one_process.meet_in_loss(len(logits), logits)
        return func(*args, **(kwargs or {}))


class _Attention(TorchFunctionMode):
    """Hears of the keys and values of each call of attention, and whether it has a backward."""

    def __init__(self, note: Callable[[Tensor, Tensor, bool], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            tensors = [given[word] for word in ("query", "key", "value")]
            self.note(given["key"], given["value"], any(t.requires_grad for t in tensors))
        return func(*args, **(kwargs or {}))


def _pieces(batch: Batch, context: ContextSplit, ranks: int) -> list[tuple[range, range]]:
    """The early and the late piece of a sequence that each rank has: a zigzag."""
    length = max(context.length(batch), 2 * ranks if context.pads else 0)
    cuts = [i * length // (2 * ranks) for i in range(2 * ranks + 1)]
    pieces = [range(*ends) for ends in pairwise(cuts)]
    return [(pieces[i], pieces[-1 - i]) for i in range(ranks)]


def _part(batch: Batch, context: ContextSplit, place: Place, device: torch.device) -> Batch:
    """This rank's positions of a batch's sequences."""
    pieces = _pieces(batch, context, place.mesh.context)[place.at["context"]]
    return context.take(batch, torch.tensor([*pieces[0], *pieces[1]], device=device).long())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
