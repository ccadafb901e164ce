"""What an optimizer does to small tensors: whole, cut into pieces, some at a time. Measured.

One process updates whole tensors, all at once. A strategy may have its ranks update flat pieces of
them, rows of them, or some of them each, and may call step() for one bucket after another. Whether
the result is the same is a property of the optimizer, and is found out here, by trying.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.optim.factory import After, Plan

_MEASURED: dict[Any, Traits] = {}
_ON_ROWS: dict[Any, str | None] = {}


@dataclass(frozen=True)
class Traits:
    """What was found out about an optimizer. A reason is None where all is well."""

    flat: str | None = None  # why it cannot update pieces of a parameter one by one
    dealt: str | None = None  # why it cannot update some parameters without the others
    by_parts: bool = True  # step() may be called for some of the parameters at a time
    is_random: bool = False
    whole: tuple[bool, ...] = ()  # by group: it needs whole parameters, where pieces will not do
    reshaped: str | None = None  # why its state cannot be gathered as its parameters are
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
    and step for one of them at a time. If the result differs, it is found out why.
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
    key = _kind(plan, optimizer, samples)
    if key not in _MEASURED:
        _MEASURED[key] = _measure(plan, samples, name)
    return _MEASURED[key]


def _kind(plan: Plan, optimizer: Optimizer, samples: list[list[str]]) -> tuple[Any, ...]:
    """What makes two optimizers do the same to small tensors."""
    options = [
        sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "param_names"))
        for group in optimizer.param_groups
    ]
    dims = [[plan.whole[n].dim() for n in names] for names in samples]
    return type(optimizer), repr(options), repr(dims), plan.after, plan.device


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
            raise UsageError(f"{name} cannot take a step: {_first_line(error)}") from None

    def fails(places: Places, **how: Any) -> str | None:
        try:
            again = _Trial(plan, names, places, trial.dtype, **how)
        except Exception as error:
            return _reason(error)
        return None if again.agrees(trial) else "the result is another"

    traits = _of_state(trial, samples, name)
    if fails(whole, resumed=True) and traits.unsaved is None:
        traits = replace(traits, unsaved=f"{name} keeps what it needs outside of its state")
    thirds = {n: trial.start[n].numel() // 3 for n in names}
    cut: Places = [{n: slice(0, third) for n, third in thirds.items()},
                   {n: slice(third, None) for n, third in thirds.items()}]  # fmt: skip
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
        # Each group by itself: Muon's matrices must be whole, what AdamW updates beside them not.
        whole=tuple(bool(fails([{n: p[n] for n in group} for p in cut])) for group in samples),
        by_parts=not is_alone and fails(whole, by_parts=True) is None,
        is_random=fails(whole, seed=1) is not None,
    )


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
        self.plan, self.places, self.dtype = plan, places, dtype
        generator = torch.Generator().manual_seed(0)

        def random(name: str) -> Tensor:
            dim = plan.whole[name].dim()
            shape = (SIZES + (2,) * dim)[:dim]
            values = torch.randn(shape, generator=generator, dtype=dtype)
            return (values * torch.arange(1, values.numel() + 1).view(shape)).to(plan.device)

        self.start = {name: random(name) for name in names}
        gradients = [{name: random(name) for name in names} for _ in range(STEPS)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.ends = [self._of_rank(place, gradients, by_parts, resumed) for place in places]

    def _of_rank(
        self,
        place: Mapping[str, Part],
        gradients: list[dict[str, Tensor]],
        by_parts: bool,
        resumed: bool,
    ) -> dict[str, nn.Parameter]:
        """What a rank has of each tensor after its steps."""
        held = {name: nn.Parameter(_cut(self.start[name], part)) for name, part in place.items()}
        after = self._make(held)
        for number, of_step in enumerate(gradients):
            if resumed and number == STEPS - 1:  # as from a checkpoint: state, and groups' numbers
                old = self.optimizer
                after = self._make(held)
                for p, state in old.state.items():
                    self.optimizer.state[p] = dict(state)
                for group, was in zip(self.optimizer.param_groups, old.param_groups, strict=True):
                    group.update(_plain(was))
                if after is not None:
                    after.steps = number
            turns = [[name] for name in place] if by_parts else [list(place)]
            for turn in turns:
                for name in turn:
                    held[name].grad = _cut(of_step[name], place[name])
                self.optimizer.step()
                for name in turn:
                    held[name].grad = None
        return held

    def _make(self, held: Mapping[str, nn.Parameter]) -> After | None:
        is_whole = all(p.shape == self.start[name].shape for name, p in held.items())
        try:  # whole tensors as in one process, so that only what is cut has stand-ins
            self.optimizer, after = self.plan.over(held, as_they_are=is_whole)
        except UsageError:  # the function may want its model's own sizes
            self.optimizer, after = self.plan.over(held)
        for group in self.optimizer.param_groups:
            group.update({key: value for key, value in UNMEASURED.items() if key in group})
        self.options = [_plain(group) for group in self.optimizer.param_groups]
        return after

    def agrees(self, whole: _Trial) -> bool:
        """Whether it ended as with whole tensors, but for rounding relative to what has changed."""
        slack = 1e-9 if self.dtype is torch.float64 else 1e-4
        for place, ends in zip(self.places, self.ends, strict=True):
            for name, part in place.items():
                end = whole.ends[0][name].detach()
                change = (end - whole.start[name]).abs().nan_to_num()
                atol = slack * float(change.max()) if change.numel() else 0.0
                mine, theirs = _local(ends[name].detach()), _local(_cut(end, part))
                if not torch.allclose(mine, theirs, rtol=0, atol=atol, equal_nan=True):
                    return False
        return True


def _cut(tensor: Tensor, part: Part) -> Tensor:
    """A rank's part of a tensor; for a mesh, a DTensor with rows as fully_shard deals them out."""
    if isinstance(part, DeviceMesh):
        placements = [Replicate()] * (part.ndim - 1) + [Shard(0)]
        # From this rank's own data: no rank sends any.
        return distribute_tensor(tensor.clone(), part, placements, src_data_rank=None)
    return tensor.clone() if part is None else tensor.reshape(-1)[part].clone()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fails_on_rows(plan: Plan, mesh: DeviceMesh) -> str | None:
    """Why PyTorch's DTensor cannot be updated by this optimizer; None if it can. Like ``measured``
    it is found out once for each kind in a process."""
    samples = _samples(plan)
    kind = _kind(plan, plan.built(plan.stand_ins()), samples)
    # By the ranks themselves: an optimizer that sends something does so among all of them at once.
    key = (*kind, repr(mesh.mesh.tolist()))
    if key not in _ON_ROWS:
        # A parameter without dimensions has no rows: fully_shard refuses it itself.
        names = [n for group in samples for n in group if plan.whole[n].dim()]
        _ON_ROWS[key] = _fails_on_rows(plan, names, mesh)
    return _ON_ROWS[key]


def _fails_on_rows(plan: Plan, names: list[str], mesh: DeviceMesh) -> str | None:
    whole = _Trial(plan, names, [dict.fromkeys(names)], torch.float64)
    try:
        rows = _Trial(plan, names, [dict.fromkeys(names, mesh)], torch.float64)
    except Exception as error:
        return f"{name_of(whole.optimizer)} fails on it ({_reason(error)})"
    return None if rows.agrees(whole) else f"{name_of(whole.optimizer)} makes something else of it"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
    return f"{kind}{_first_line(error)}"


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if isinstance(v, bool | int | float)}


def _of_state(trial: _Trial, samples: list[list[str]], name: str) -> Traits:
    """What the optimizer keeps: tensors, numbers, and whether a checkpoint can hold them."""
    counts: list[float] = []
    numbers: dict[str, Any] = {}
    unsaved = reshaped = None
    for names in samples:
        params = [trial.ends[0][n] for n in names]
        kept = 0
        for p in params:
            for key, value in trial.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.dim():  # of any shape: see Adafactor's
                    kept += value.numel()
                    if value.shape != p.shape:
                        reshaped = f"{name} keeps '{key}' of another shape than the parameter's"
                elif isinstance(value, Tensor) and not p.dim():
                    kept += key != "step"
                elif isinstance(value, Tensor):
                    numbers[key] = value.dtype
                elif isinstance(value, bool | int | float):
                    numbers[key] = type(value)
                elif value is not None:
                    unsaved = f"{name} keeps a {type(value).__name__} for a parameter ('{key}')"
        counts.append(kept / max(1, sum(p.numel() for p in params)))
    changed = frozenset(
        key
        for group, options in zip(trial.optimizer.param_groups, trial.options, strict=True)
        for key, value in _plain(group).items()
        if options.get(key) != value
    )
    return Traits(
        state=tuple(counts),
        numbers=numbers,
        reshaped=reshaped,
        unsaved=unsaved,
        counters=changed,
    )


def name_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
