"""What an optimizer does to small tensors: whole, cut into pieces, some at a time. Measured.

One process updates whole tensors, all at once. A strategy may have its ranks update flat pieces of
them, rows of them, or some of them each, and may call step() for one bucket after another. Whether
that comes to the same is a property of the optimizer, and is found out here, by trying.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.optim.factory import After, Plan

_MEASURED: dict[Any, Traits] = {}


@dataclass(frozen=True)
class Traits:
    """What was found out about an optimizer. A reason is None where all is well."""

    flat: str | None = None  # why it cannot update pieces of a parameter one by one
    dealt: str | None = None  # why it cannot update some parameters without the others
    by_parts: bool = True  # step() may be called for some of the parameters at a time
    is_random: bool = False
    unsaved: str | None = None  # why a run with it cannot be resumed from a checkpoint
    state: tuple[float, ...] = ()  # by group: state tensors for each parameter
    numbers: Mapping[str, Any] = field(default_factory=dict)  # state that is one number: its type
    counters: frozenset[str] = frozenset()  # options of groups that step() changes


STEPS = 30  # some optimizers change their rule after a number of steps (Shampoo: 25)
SIZES = (5, 4, 3, 2, 2)  # a small tensor has as many of these as its parameter has dimensions
UNMEASURED = {"fused": False, "foreach": False, "capturable": False, "lr": 0.05}
Part = slice | DeviceMesh | None  # a flat piece of a tensor, this rank's rows, or all of it
Places = list[dict[str, Part]]  # for each rank, the part that it has of each tensor


def measured(plan: Plan) -> Traits:
    """What an optimizer does to small tensors, whole and cut up; once for each kind in a process.

    Whole: as one process would. Then all at once: two ranks that have uneven pieces of each tensor
    and step for one of them at a time. Where the result is another, it is found out why.
    """
    optimizer = plan.built(plan.stand_ins())
    name = name_of(optimizer)
    required = [
        p.name for p in inspect.signature(optimizer.step).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if required:
        raise UsageError(
            f"{name}.step() needs a {required[0]}: it computes the loss again itself, several "
            "times; no strategy does that"
        )
    samples = _samples(plan)
    options = [
        sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "param_names"))
        for group in optimizer.param_groups
    ]
    dims = [[plan.whole[n].dim() for n in names] for names in samples]
    key = type(optimizer), repr(options), repr(dims), plan.after, plan.device
    if key not in _MEASURED:
        _MEASURED[key] = _measure(plan, samples, name)
    return _MEASURED[key]


def _samples(plan: Plan) -> list[list[str]]:
    """For each group, the names of two parameters of each number of dimensions."""
    result = []
    for names in plan.groups():
        by_dim: dict[int, list[str]] = {}
        for name in names:
            by_dim.setdefault(plan.whole[name].dim(), []).append(name)
        result.append([name for alike in by_dim.values() for name in alike[:2]])
    return result


def _measure(plan: Plan, samples: list[list[str]], name: str) -> Traits:
    names = [n for group in samples for n in group]
    whole: Places = [dict.fromkeys(names)]
    try:
        trial = _Trial(plan, names, whole, torch.float64)
    except UsageError:
        raise
    except Exception:
        try:  # a kernel may know float32 alone
            trial = _Trial(plan, names, whole, torch.float32)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"{name} cannot take a step: {reason}") from None
    cut: Places = [{}, {}]
    for n in names:
        size = math.prod(_small(plan, n))
        cut[0][n], cut[1][n] = slice(0, size // 3), slice(size // 3, size)

    def fails(places: Places, **how: Any) -> str | None:
        try:
            again = _Trial(plan, names, places, trial.dtype, **how)
        except Exception as error:
            return _reason(error)
        return None if again.agrees(trial) else "the result is another"

    traits = _of_state(trial, samples, name)
    if fails(whole, resumed=True) and traits.unsaved is None:
        traits = replace(traits, unsaved=f"{name} keeps what it needs outside of its state")
    is_alone = bool(plan.after)  # its hook must be called once in an update
    if not fails(cut, by_parts=not is_alone, seed=1):
        return replace(traits, by_parts=not is_alone)
    flat, dealt = fails(cut), fails([dict.fromkeys(names[::2]), dict.fromkeys(names[1::2])])
    what = name
    if plan.after and flat and measured(replace(plan, after=())).flat is None:
        what = "after_step"
    if dealt:
        dealt = f"{what} updates a parameter from what it knows of others ({dealt})"
    if flat:
        flat = dealt or f"{what} does not update each element by itself ({flat})"
    return replace(
        traits,
        flat=flat,
        dealt=dealt,
        by_parts=not is_alone and fails(whole, by_parts=True) is None,
        is_random=fails(whole, seed=1) is not None,
    )


def _small(plan: Plan, name: str) -> tuple[int, ...]:
    dim = plan.whole[name].dim()
    return (SIZES + (2,) * dim)[:dim]


class _Trial:
    """A few steps of the optimizer on small tensors that ranks share as ``places`` says."""

    def __init__(
        self,
        plan: Plan,
        names: list[str],
        places: Places,
        dtype: torch.dtype,
        by_parts: bool = False,
        seed: int = 0,
        resumed: bool = False,
    ) -> None:
        self.plan, self.dtype, self.by_parts, self.resumed = plan, dtype, by_parts, resumed
        generator = torch.Generator().manual_seed(0)

        def random(name: str) -> Tensor:
            values = torch.randn(_small(plan, name), generator=generator, dtype=dtype)
            return (values * torch.arange(1, values.numel() + 1).view(values.shape)).to(plan.device)

        self.start = {name: random(name) for name in names}
        self.gradients = [{name: random(name) for name in names} for _ in range(STEPS)]
        self.spans: dict[str, slice] = {}  # what this rank knows of the end, if not all
        self.end = {name: torch.zeros_like(t).reshape(-1) for name, t in self.start.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for place in places:
                self._of_rank(place)

    def _of_rank(self, place: Mapping[str, Part]) -> None:
        def cut(tensor: Tensor, name: str) -> Tensor:
            part = place[name]
            if isinstance(part, DeviceMesh):
                return _rows(tensor, part)
            return tensor.clone() if part is None else tensor.reshape(-1)[part].clone()

        self.held = {name: nn.Parameter(cut(self.start[name], name)) for name in place}
        self.optimizer, after = self._made()
        for number, gradients in enumerate(self.gradients):
            if self.resumed and number == STEPS - 1:
                old = self.optimizer
                self.optimizer, after = self._made()
                self._resume(old)
                if after is not None:
                    after.steps = number
            turns = [[name] for name in place] if self.by_parts else [list(place)]
            for turn in turns:
                for name in turn:
                    self.held[name].grad = cut(gradients[name], name)
                self.optimizer.step()
                for name in turn:
                    self.held[name].grad = None
        for name, part in place.items():
            end = self.held[name].detach()
            if isinstance(end, DTensor):
                assert isinstance(part, DeviceMesh)
                end = end.to_local()
                before = sum(
                    len(t) for t in self.start[name].chunk(part.size(part.ndim - 1))[: _at(part)]
                )
                start = before * math.prod(end.shape[1:])
                part = self.spans[name] = slice(start, start + end.numel())
            self.end[name][part if isinstance(part, slice) else slice(None)] = end.reshape(-1)

    def _made(self) -> tuple[Optimizer, After | None]:
        is_whole = all(p.shape == self.start[name].shape for name, p in self.held.items())
        try:  # whole tensors as in one process, so that only what is cut has stand-ins
            optimizer, after = self.plan.over(self.held, as_they_are=is_whole)
        except UsageError:  # the function may want its model's own sizes
            optimizer, after = self.plan.over(self.held)
        for group in optimizer.param_groups:
            group.update({key: value for key, value in UNMEASURED.items() if key in group})
        self.options = [_plain(group) for group in optimizer.param_groups]
        return optimizer, after

    def _resume(self, old: Optimizer) -> None:
        """As from a checkpoint: the state of each parameter, and the groups' numbers."""
        for p, state in old.state.items():
            self.optimizer.state[p] = dict(state)
        for group, was in zip(self.optimizer.param_groups, old.param_groups, strict=True):
            group.update(_plain(was))

    def agrees(self, other: _Trial) -> bool:
        """Whether both ended alike, but for rounding; against what the steps have changed."""
        slack = 1e-9 if self.dtype is torch.float64 else 1e-4
        for name, end in other.end.items():
            span = self.spans.get(name, slice(None))
            change = (end - other.start[name].reshape(-1)).abs().nan_to_num()
            atol = slack * float(change.max()) if change.numel() else 0.0
            if not torch.allclose(
                self.end[name][span], end[span], rtol=0, atol=atol, equal_nan=True
            ):
                return False
        return True


def _at(mesh: DeviceMesh) -> int:
    """This rank's place among those that share the rows."""
    return int(mesh.get_local_rank(mesh.ndim - 1))


def _rows(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor of which this rank has some rows, as fully_shard deals them out."""
    parts = tensor.chunk(mesh.size(mesh.ndim - 1))
    local = parts[_at(mesh)].clone() if _at(mesh) < len(parts) else tensor[:0].clone()
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    result: Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return result


def fails_on_rows(plan: Plan, mesh: DeviceMesh) -> str | None:
    """Why PyTorch's DTensor cannot be updated by this optimizer; None: it can."""
    # A parameter without dimensions has no rows: fully_shard refuses it itself.
    names = [n for group in _samples(plan) for n in group if plan.whole[n].dim()]
    whole = _Trial(plan, names, [dict.fromkeys(names)], torch.float64)
    try:
        rows = _Trial(plan, names, [dict.fromkeys(names, mesh)], torch.float64)
    except Exception as error:
        return f"{name_of(whole.optimizer)} fails on it ({_reason(error)})"
    if rows.agrees(whole):
        return None
    return f"{name_of(whole.optimizer)} makes something else of it"


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
    return f"{kind}{error}".partition("\n")[0]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if isinstance(v, bool | int | float)}


def _of_state(trial: _Trial, samples: list[list[str]], name: str) -> Traits:
    """What the optimizer keeps: tensors, numbers, and whether a checkpoint can hold them."""
    counts: list[float] = []
    numbers: dict[str, Any] = {}
    unsaved = None
    for names in samples:
        kept, elements = 0, 0
        for n in names:
            p = trial.held[n]
            elements += p.numel()
            for key, value in trial.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
                    kept += value.numel()
                elif isinstance(value, Tensor) and value.dim() == 0:
                    if p.dim():
                        numbers[key] = value.dtype
                    elif key != "step":
                        kept += 1
                elif isinstance(value, bool | int | float):
                    numbers[key] = type(value)
                elif isinstance(value, Tensor):  # with another shape, as Adafactor's
                    kept += value.numel()
                elif value is not None:
                    unsaved = f"{name} keeps a {type(value).__name__} for a parameter ('{key}')"
        counts.append(kept / max(1, elements))
    changed = {
        key
        for group, options in zip(trial.optimizer.param_groups, trial.options, strict=True)
        for key, value in _plain(group).items()
        if options.get(key) != value
    }
    return Traits(
        state=tuple(counts), numbers=numbers, unsaved=unsaved, counters=frozenset(changed)
    )


def name_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
