"""A model cut into the stages of a pipeline, without a word from its author.

The model's own forward runs on every stage. Blocks before the stage are not run: a stand-in is
their output, and what was received stands for the output of the last of them. Behind the stage's
last block the forward ends by an exception that carries the block's output. What lies between the
blocks, and before the first one, runs on every stage that passes it; whatever it makes of a
stand-in is NaN, as are the parameters that a rank does not hold. So a value that finds a way around
the cut makes the loss NaN and is found out, instead of being silently wrong.

One probe says which part of the model needs which parameters: a forward of one sample in which
every block's output is cut off from what made it. Autograd then names, for each block and for the
loss, the parameters and the earlier outputs that it depends on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardlab.errors import UsageError
from shardlab.numbers import count, names
from shardlab.strategies.refusals import option
from shardlab.strategies.uses import in_backward
from shardlab.workloads.base import Batch, LossFn

# By what the stages are made equal.
BALANCES = {"parameters": "parameters", "time": "time"}
Shape = tuple[tuple[int, ...], torch.dtype, bool]  # of a tensor; and whether a gradient comes back


class EndOfStage(BaseException):
    """The stage's last block has run: the rest of the forward belongs to others. It is no
    ``Exception``, which a model might catch."""


@dataclass(frozen=True)
class Output:
    """How a block returns its tensors: alone, or in tuples, lists and dicts, with constants."""

    spec: TreeSpec
    constants: tuple[Any, ...]  # a place that holds a tensor is marked by TENSOR

    def join(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is TENSOR else leaf for leaf in self.constants]
        return tree_unflatten(leaves, self.spec)


TENSOR = object()
# An attribute of a block: what is called with its arguments where a stage does not run it.
WHEN_SKIPPED = "_when_skipped"


def taken_apart(value: Any, block: str) -> tuple[Output, list[Tensor]]:
    """What a block has returned: its tensors, and all else."""
    leaves, spec = tree_flatten(value)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str)):
            raise UsageError(
                f"pipeline: the block '{block}' returns a {type(leaf).__name__}, which cannot be "
                "sent to the next stage; return tensors, in tuples or dicts if there are several"
            )
    constants = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Output(spec, constants), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# ------------------------------------------------------------------ the probe


@dataclass
class Probe:
    """What one forward has shown. Part i is the code behind block i - 1 up to the end of block i;
    the last part is all behind the last block, the loss included."""

    blocks: list[str] = field(default_factory=list)  # in the order of their calls
    outputs: list[Output] = field(default_factory=list)
    uses: list[set[str]] = field(default_factory=list)  # the parameters of each part
    reads: list[set[int]] = field(default_factory=list)  # the blocks whose output each part reads
    shapes: list[list[Shape]] = field(default_factory=list)  # of each block's output
    seconds: list[float] = field(default_factory=list)  # of each block's forward
    changed: dict[str, int] = field(default_factory=dict)  # buffers, with the part that writes them
    touched: dict[str, set[int]] = field(default_factory=dict)  # buffers, with all parts using them
    overwritten: set[int] = field(default_factory=set)  # blocks whose output is changed in place
    counted: list[str] = field(default_factory=list)  # numbers outside the blocks that it changes
    loss: float = 0.0


@contextmanager
def intercepted(
    model: nn.Module, blocks: Sequence[str], call: Callable[..., Any]
) -> Iterator[None]:
    """Inside, ``call(name, original, *args, **kwargs)`` stands for each block's call."""
    before = {name: getattr(model.get_submodule(name), _SLOT) for name in blocks}
    try:
        for name in blocks:
            intercept(model.get_submodule(name), partial(call, name))
        yield
    finally:
        for name, value in before.items():
            setattr(model.get_submodule(name), _SLOT, value)


# PyTorch's own place for what stands for a module's call, its hooks included.
_SLOT = "_compiled_call_impl"


def intercept(module: nn.Module, call: Callable[..., Any]) -> None:
    """``call(original, *args, **kwargs)`` stands for a module's call from now on."""
    original = getattr(module, _SLOT) or module._call_impl
    setattr(module, _SLOT, partial(call, original))


def probe(model: nn.Module, blocks: Sequence[str], loss: LossFn, sample: Batch) -> Probe:
    """Run the whole model on a sample. Nothing of it is changed."""
    if not blocks:
        raise UsageError(
            "pipeline: the workload names no blocks, and none can be guessed from its model, so "
            "there is nothing to cut between; name them in Workload.blocks"
        )
    with probing(model) as quiet:
        found = _probed(model, blocks, loss, sample, quiet.norms)
    found.counted = [n for n in quiet.counted if not any(n.startswith(f"{b}.") for b in blocks)]
    return found


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _probed(
    model: nn.Module,
    blocks: Sequence[str],
    loss: LossFn,
    sample: Batch,
    norms: Mapping[str, nn.Module],
) -> Probe:
    found = Probe()
    made: list[list[Tensor]] = []  # each block's outputs, with their graphs
    given: list[list[Tensor]] = []  # the same, cut off
    handed: list[list[Tensor]] = []  # and what the rest of the forward gets of them
    buffers = {name: (b, b._version) for name, b in model.named_buffers()}

    def look_for_changes() -> None:
        for name, now in model.named_buffers():
            before, version = buffers[name]
            if now is not before or now._version != version:
                found.changed.setdefault(name, len(found.blocks))
                buffers[name] = now, now._version

    def call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in found.blocks:
            raise UsageError(
                f"pipeline: the block '{name}' is called more than once in a forward, and a stage "
                "runs once; name larger blocks in Workload.blocks"
            )
        look_for_changes()
        began = time.perf_counter()
        value = original(*args, **kwargs)
        found.seconds.append(time.perf_counter() - began)
        look_for_changes()
        output, tensors = taken_apart(value, name)
        if not any(t.requires_grad for t in tensors):
            raise UsageError(
                f"pipeline: the block '{name}' returns nothing that has a gradient; run it without "
                "no_grad, or, if the model checkpoints it, with use_reentrant=False"
            )
        cut = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        made.append(tensors)
        given.append(cut)
        handed.append([t.clone() for t in cut])  # no leaves: the model may change them in place
        found.outputs.append(output)
        found.shapes.append([(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors])
        found.blocks.append(name)
        return output.join(handed[-1])

    def note_statistics(prefix: str, module: nn.Module, _args: Any) -> None:
        for key, _ in module.named_buffers(prefix):
            found.changed.setdefault(key, len(found.blocks))

    hooks = [m.register_forward_pre_hook(partial(note_statistics, n)) for n, m in norms.items()]
    try:
        with intercepted(model, blocks, call), _Touched(model, found):
            value = loss(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    look_for_changes()
    found.overwritten = {i for i, ts in enumerate(handed) if any(t._version for t in ts)}
    if missing := [name for name in blocks if name not in found.blocks]:
        raise UsageError(
            f"pipeline: the forward of a sample never calls the block{'s' * (len(missing) > 1)} "
            f"{names(missing)}; name those that every forward calls in Workload.blocks"
        )
    if not value.requires_grad:
        raise UsageError("pipeline: the loss of a sample depends on no parameter")
    found.loss = float(value.detach())
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for i, outputs in enumerate([*made, [value]]):
        ends = [t for t in outputs if t.requires_grad]
        before = [(j, t) for j in range(i) for t in given[j] if t.requires_grad]
        gradients = torch.autograd.grad(
            ends,
            [*params.values(), *(t for _, t in before)],
            [torch.ones_like(t) for t in ends],
            retain_graph=True,
            allow_unused=True,
        )
        ours, theirs = gradients[: len(params)], gradients[len(params) :]
        found.uses.append({n for n, g in zip(params, ours, strict=True) if g is not None})
        found.reads.append({j for (j, _), g in zip(before, theirs, strict=True) if g is not None})
    return found


def shapes_of(
    model: nn.Module, blocks: Sequence[str], loss: LossFn, batch: Batch
) -> list[list[Shape]]:
    """What each block returns for a batch, in the order of their calls. Nothing is changed."""
    found: list[list[Shape]] = []

    def call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        _, tensors = taken_apart(value, name)
        found.append([(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors])
        return value

    frozen = [p for p in model.parameters() if not p.requires_grad]
    with probing(model), intercepted(model, blocks, call):
        for p in frozen:  # what has no gradient here has none in a step
            p.requires_grad_(False)
        loss(model, batch)
    return found


class _Touched(TorchFunctionMode):
    """Notes which part of a forward uses which buffer."""

    def __init__(self, model: nn.Module, found: Probe) -> None:
        super().__init__()
        self.names = {id(buffer): name for name, buffer in model.named_buffers()}
        self.found = found

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_ours = function == torch.Tensor._version.__get__  # type: ignore[attr-defined]
        for leaf in () if is_ours else tree_leaves((args, kwargs)):
            if id(leaf) in self.names:
                parts = self.found.touched.setdefault(self.names[id(leaf)], set())
                parts.add(len(self.found.blocks))
        return function(*args, **kwargs)


@dataclass
class Quiet:
    """What a forward of one sample must be kept from changing."""

    norms: dict[str, nn.Module]  # those that would train
    counted: list[str] = field(default_factory=list)  # attributes that it did change, put back


@contextmanager
def probing(model: nn.Module) -> Iterator[Quiet]:
    """Inside, every parameter has a gradient, frozen ones too, and a forward leaves no trace:
    buffers, numbers in plain attributes and the random state are as before.

    A BatchNorm cannot train on the one value of one sample: none of them does inside.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    plain = [(name, module, _plain(module)) for name, module in model.named_modules()]
    versions = {name: p._version for name, p in model.named_parameters()}
    frozen = [p for p in model.parameters() if not p.requires_grad and _has_gradient(p)]
    quiet = Quiet(
        {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training}
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        try:
            for p in frozen:
                p.requires_grad_()
            for norm in quiet.norms.values():
                norm.training = False
            yield quiet
        finally:
            for p in frozen:
                p.requires_grad_(False)
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(value)
            for name, module, values in plain:
                now = _plain(module)
                changed = [k for k in now if k != "training" and now[k] != values.get(k, None)]
                quiet.counted += [f"{name}.{key}" if name else key for key in changed]
                for key in now.keys() - values.keys():
                    delattr(module, key)
                vars(module).update(values)
    for name, p in model.named_parameters():
        if p._version != versions[name]:
            raise UsageError(
                f"the forward changes the parameter '{name}' in place; ranks that share one model "
                "would change it more often than one process: do it between steps"
            )


def _plain(module: nn.Module) -> dict[str, Any]:
    """Numbers among a module's attributes, such as a count of its calls."""
    return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float)}


# ------------------------------------------------------------------ which block to which stage


def ends_of(found: Probe, model: nn.Module, stages: int, balance: str = "parameters") -> list[int]:
    """The last block of each stage: the cut that makes the largest stage as small as it can be. If
    it can be helped, something trains on each of them."""
    option("balance", balance, BALANCES)
    blocks = len(found.blocks)
    allowed = [k for k in range(blocks - 1) if _blocking(found, k) is None]
    if len(allowed) + 1 < stages:
        most = len(allowed) + 1
        why = "" if most == blocks else f"; {_skips(found)}"
        raise UsageError(
            f"pipeline: {count(stages, 'stage')} need as many blocks, and the model can be cut "
            f"into {most} ({count(blocks, 'block')}{why}); use fewer ranks or chunks"
        )
    costs = _costs(found, model, balance)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    ends = [*allowed, blocks - 1]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    trains = [bool(used & trained) for used in found.uses]
    trains[-2] |= trains.pop()  # what is behind the last block is on its stage

    def cut(is_wanted: Callable[[int, int], bool]) -> list[int] | None:
        # best[e]: the cost of the largest stage if those so far end with block e, and their ends.
        best: dict[int, tuple[float, list[int]]] = {-1: (0.0, [])}
        for left in range(stages - 1, -1, -1):
            reached: dict[int, tuple[float, list[int]]] = {}
            for e in ends if left else ends[-1:]:
                options = [
                    (max(worst, before[e + 1] - before[s + 1]), [*chosen, e])
                    for s, (worst, chosen) in best.items()
                    if s < e and is_wanted(s + 1, e)
                ]
                if options:
                    reached[e] = min(options)
            best = reached
        return best[blocks - 1][1] if blocks - 1 in best else None

    found_cut = cut(lambda first, last: any(trains[first : last + 1])) or cut(lambda *_: True)
    assert found_cut is not None
    return found_cut


def _blocking(found: Probe, k: int) -> tuple[int, int] | None:
    """A part behind block k that reads the output of a block before it, if there is one."""
    for part in range(k + 1, len(found.reads)):
        for read in sorted(found.reads[part]):
            if read < k:
                return part, read
    return None


def _skips(found: Probe) -> str:
    for k in range(len(found.blocks) - 1):
        if (pair := _blocking(found, k)) is not None:
            part, read = pair
            reader = f"block '{found.blocks[part]}'" if part < len(found.blocks) else "the loss"
            return f"{reader} reads the output of '{found.blocks[read]}', past '{found.blocks[k]}'"
    return ""


def _costs(found: Probe, model: nn.Module, balance: str) -> list[float]:
    """The cost of each block, with what runs before it. The last has what runs behind it too.

    By parameters it is the number of those that are multiplied with, and of the elements that the
    block returns for one sample. Rows that are looked up before the first block cost nothing.
    """
    if balance == "time":
        return list(found.seconds)
    looked_up = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    params = dict(model.named_parameters())
    costs = [
        float(sum(params[n].numel() for n in used if part or id(params[n]) not in looked_up))
        for part, used in enumerate(found.uses)
    ]
    costs[-2] += costs.pop()
    sizes = [sum(math.prod(shape) for shape, _, _ in output) for output in found.shapes]
    return [cost + size for cost, size in zip(costs, sizes, strict=True)]


# ------------------------------------------------------------------ who holds what


def holders_of(found: Probe, model: nn.Module, ends: Sequence[int]) -> dict[str, list[int]]:
    """The stages that hold each parameter, by its first name.

    A parameter that the sample did not use lies with its block. Outside the blocks nobody knows
    where it may be used: every stage has it, as it has what is used in several.
    """
    stage_of = [
        next(s for s, end in enumerate(ends) if block <= end) for block in range(ends[-1] + 1)
    ]
    stage_of.append(len(ends) - 1)  # of the loss
    holders: dict[str, set[int]] = {n: set() for n, _ in model.named_parameters()}
    for part, used in enumerate(found.uses):
        for name in used:
            holders[name].add(stage_of[part])
    inside = _inside(found.blocks, model)
    for name, stages in holders.items():
        if not stages:
            block = inside.get(name)
            stages.update(range(len(ends)) if block is None else [stage_of[block]])
    return {name: sorted(stages) for name, stages in holders.items()}


def _inside(blocks: Sequence[str], model: nn.Module) -> dict[str, int]:
    """The block in which a parameter or buffer lies; those outside are missing."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {
        name: i
        for name, _ in tensors
        for i, block in enumerate(blocks)
        if name.startswith(f"{block}.")
    }


def buffers_of(found: Probe, model: nn.Module, ends: Sequence[int]) -> dict[str, list[int]]:
    """The stages that hold each buffer: that of its block, or the one whose part writes it. All
    others are needed wherever the code outside the blocks runs, which is everywhere."""
    stage_of = [
        next(s for s, end in enumerate(ends) if block <= end) for block in range(ends[-1] + 1)
    ]
    stage_of.append(len(ends) - 1)
    inside = _inside(found.blocks, model)
    held = {}
    for name, _ in model.named_buffers():
        at = inside.get(name, found.changed.get(name))
        held[name] = list(range(len(ends))) if at is None else [stage_of[at]]
        users = {stage_of[part] for part in found.touched.get(name, ())}
        if name in found.changed and not users <= set(held[name]):
            first, last = min(users), max(users)
            raise UsageError(
                f"pipeline: stages {first} and {last} both use the buffer '{name}', which a "
                "forward changes: a micro-batch would have to wait for the one before to leave the "
                "last stage; use fewer ranks, so that one stage has all that uses it"
            )
    return held


@torch.no_grad()
def drop(model: nn.Module, kept: set[str], needed: set[str]) -> None:
    """Let go of the parameters and buffers that are not in ``kept``, under all their names.

    What is in ``needed`` stays usable, but is no longer a buffer of the model; of all else a NaN
    without memory is left, in the shape that it had.
    """
    first: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first[id(tensor)] = name
    stand_ins: dict[int, Tensor] = {}
    gone = []
    for module in model.modules():
        owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in owned:
            for key, tensor in list(tensors.items()):
                if tensor is None or first[id(tensor)] in kept:
                    continue
                if id(tensor) not in stand_ins:
                    is_needed = first[id(tensor)] in needed
                    stand_ins[id(tensor)] = tensor.detach() if is_needed else nothing_like(tensor)
                    gone.append((tensor, is_needed))
                del tensors[key]
                setattr(module, key, stand_ins[id(tensor)])
    for tensor, is_needed in gone:
        if not is_needed:  # somebody may hold the tensor itself
            tensor.data = stand_ins[id(tensor)]


def nothing_like(tensor: Tensor) -> Tensor:
    return nothing(tuple(tensor.shape), tensor.dtype, tensor.device)


def nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN in this shape, without memory; 0 where there is no NaN."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


# ------------------------------------------------------------------ running one stage


class Track:
    """Stands for every block's call, and runs those of one stage."""

    def __init__(self, found: Probe, ends: Sequence[int], device: torch.device) -> None:
        self.blocks, self.outputs = found.blocks, found.outputs
        self.overwritten = found.overwritten
        self.ends = list(ends)
        self.device = device
        self.stage: int | None = None  # that runs; None: no stage does
        self.next = 0  # the block that is called next
        self.given: list[Any] = []  # the outputs of the blocks before the stage
        self.result: list[Tensor] = []  # of the stage's last block
        self.shapes: list[list[Shape]] = []  # of each block's output, as far as the stage's last
        self.changed = set(found.changed)
        self.steady: dict[str, tuple[nn.Module, str]] = {}  # buffers that nobody should write
        self.skipped: dict[int, Callable[..., None]] = {}  # who hears of a block that is not run

    def attach(self, model: nn.Module) -> None:
        inside = _inside(self.blocks, model)
        for i, name in enumerate(self.blocks):
            module = model.get_submodule(name)
            intercept(module, partial(self._call, i))
            if WHEN_SKIPPED in vars(module):
                self.skipped[i] = vars(module)[WHEN_SKIPPED]
        for name, _ in model.named_buffers():
            if name not in inside and name not in self.changed:
                path, _, key = name.rpartition(".")
                self.steady[name] = model.get_submodule(path), key

    def first(self, stage: int) -> int:
        return 0 if stage == 0 else self.ends[stage - 1] + 1

    def run(
        self,
        stage: int,
        forward: Callable[[], Any],
        shapes: Sequence[list[Shape]],
        received: Sequence[Tensor],
    ) -> Any:
        """Run a forward as far as the stage goes. Returns what the last stage's returns; else None,
        and the tensors are in ``result``. ``shapes``: of the outputs of all blocks before."""
        first = self.first(stage)
        handed = [
            [nothing(s, dtype, self.device) for s, dtype, _ in shapes[i]] for i in range(first - 1)
        ]
        handed += [list(received)] if first else []
        self.given = [
            # A copy where the model changes it in place: what was received is a leaf.
            self.outputs[i].join([t.clone() for t in ts] if i in self.overwritten else ts)
            for i, ts in enumerate(handed)
        ]
        self.shapes = list(shapes[:first])
        self.stage, self.next, self.result = stage, 0, []
        before = {name: self._state(name) for name in self.steady}
        value, is_over = None, False
        try:
            value = forward()
        except EndOfStage:
            is_over = True
        finally:
            self.stage, self.given = None, []
        self._refuse_written(before)
        if is_over:
            return None
        if stage < len(self.ends) - 1 or self.next < len(self.blocks):
            missing = self.blocks[min(self.next, len(self.blocks) - 1)]
            raise UsageError(
                f"pipeline: this forward did not come to the block '{missing}', as that of the "
                "sample did; every forward must call the same blocks in the same order"
            )
        return value

    def _state(self, name: str) -> tuple[int, int]:
        module, key = self.steady[name]
        buffer = getattr(module, key)
        return id(buffer), buffer._version

    def _refuse_written(self, before: dict[str, tuple[int, int]]) -> None:
        """What the sample's forward did not show is not known to be one stage's to write."""
        for name, state in before.items():
            if self._state(name) != state:
                raise UsageError(
                    f"pipeline: code outside of the blocks changes the buffer '{name}' for this "
                    "micro-batch, as it did not for the sample, and several stages run it; change "
                    "it in every forward, or in a block"
                )

    def _call(self, i: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = self.blocks[i]
        if self.stage is None:
            if in_backward():  # the model checkpoints its blocks: this one is computed again
                return original(*args, **kwargs)
            raise UsageError(f"pipeline: '{name}' is run by itself, outside of the model's forward")
        if i != self.next:
            expected = self.blocks[self.next] if self.next < len(self.blocks) else "the end"
            raise UsageError(
                f"pipeline: the block '{name}' is called where '{expected}' was in the forward of "
                "the sample; every forward must call the same blocks in the same order"
            )
        self.next += 1
        if i < len(self.given):
            if i in self.skipped:
                self.skipped[i](*args, **kwargs)
            return self.given[i]
        value = original(*args, **kwargs)
        output, tensors = taken_apart(value, name)
        if output != self.outputs[i]:
            raise UsageError(
                f"pipeline: the block '{name}' returns something else than it did for the sample; "
                "it must return as many tensors, and the same constants"
            )
        self.shapes.append([(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors])
        if i == self.ends[self.stage] and self.stage < len(self.ends) - 1:
            self.result = tensors
            raise EndOfStage
        return value
