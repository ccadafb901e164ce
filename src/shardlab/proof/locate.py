"""Where two runs part: the first module whose output, or its gradient, differs.

Hooks on every module note a summary of what it returns in forward, and of the gradient that comes
back to it. They see the micro-batches of one rank, in a plain process and in the strategy, whose
modules may be wrapped, sharded or computed again. It is done only once a difference is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardlab.proof.chance import Place, Seeded
from shardlab.proof.difference import ratio_of
from shardlab.proof.reference import largest, wide
from shardlab.proof.subjects import sample

# A smaller share of a tensor's largest value is rounding, which a step of Adam may have enlarged.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True)
class Event:
    place: Place
    direction: str  # "forward" or "backward"
    module: str
    call: int  # of this module, with this micro-batch
    part: int  # of what it returns, or was given
    of: str = "output"  # or "input"


@dataclass
class Probe:
    """The events of one run on one rank, in the order in which they happen."""

    loss: Seeded
    rank: int
    events: dict[Event, Tensor] = field(default_factory=dict)  # summaries: (some elements + 2,)
    users: dict[Event, list[str]] = field(default_factory=dict)  # who takes an output as input
    calls: Counter[tuple[Place, str]] = field(default_factory=Counter)
    made: dict[int, Event] = field(default_factory=dict)  # by the tensor's identity, in a forward
    alive: list[Tensor] = field(default_factory=list)  # so that no identity is used twice
    now: Place | None = None  # the micro-batch that they are of

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name))

    def _place(self) -> Place | None:
        """The micro-batch that is computed, if it is this rank's and not computed again."""
        place = self.loss.current
        if place is None or place.rank != self.rank or torch._C._current_graph_task_id() != -1:
            return None
        if place != self.now:
            self.now = place
            self.made.clear()
            self.alive.clear()
        return place

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        place = self._place()
        if place is None:
            return
        for part, tensor in enumerate(_tensors((args, kwargs))):
            if id(tensor) not in self.made:
                event = Event(place, "backward", name, self.calls[place, name], part, "input")
                self.made[id(tensor)] = event
                self.alive.append(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note, event))
            self.users.setdefault(self.made[id(tensor)], []).append(name)

    def _leave(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        place = self._place()
        if place is None:
            return
        call = self.calls[place, name]
        self.calls[place, name] += 1
        for part, tensor in enumerate(_tensors(output)):
            event = Event(place, "forward", name, call, part)
            self._note(event, tensor)
            self.alive.append(tensor)
            back = Event(place, "backward", name, call, part)
            self.made.setdefault(id(tensor), back)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, back))

    def _note(self, event: Event, tensor: Tensor) -> None:
        if event not in self.events:
            whole = wide(tensor.detach())
            if whole.is_complex():
                whole = torch.view_as_real(whole)
            totals = torch.stack([whole.sum(), whole.abs().sum()])
            self.events[event] = torch.cat([sample(whole), totals]).cpu()


def _tensors(value: Any) -> list[Tensor]:
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel()]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def first_difference(mine: Probe, theirs: Probe, dtype: torch.dtype) -> dict[str, Any] | None:
    """The first event that differs between one process and the strategy's run.

    A strategy may scale its losses: gradients may differ by one factor, that of the first of them.
    """
    rounding = ROUNDING[dtype]
    tops = {
        way: max((largest(s) for e, s in theirs.events.items() if e.direction == way), default=0.0)
        for way in ("forward", "backward")
    }
    factors: dict[Place, float] = {}
    for event, want in theirs.events.items():
        if event not in mine.events:
            continue
        got, is_backward, ratio = mine.events[event], event.direction == "backward", None
        if got.shape == want.shape:
            if is_backward:
                if event.place not in factors:
                    factors[event.place] = ratio_of(got, want, rounding) or 1.0
                want = factors[event.place] * want
            if _close(got, want, rounding, floor=1e-9 * tops[event.direction]):
                continue
            ratio = ratio_of(got, want, rounding)
        return {
            "direction": event.direction,
            "of": event.of,
            "module": event.module,
            "step": event.place.step,
            "micro": event.place.micro,
            "call": event.call,
            "ratio": ratio,
            **(_of_users(theirs.users.get(event, [])) if is_backward else {}),
        }
    return None


def _of_users(users: list[str]) -> dict[str, Any]:
    """A gradient comes from the modules that used the tensor: the innermost of them, if any."""
    names = [name for name in dict.fromkeys(users) if name]
    inner = [n for n in names if not any(o.startswith(f"{n}.") for o in names)]
    return {"of": "input", "module": inner[0], "modules": inner} if inner else {}


def _close(got: Tensor, want: Tensor, rounding: float, floor: float) -> bool:
    """The sampled elements by the largest of them; the sums by the sum of what they add up."""
    limit = torch.full_like(want, rounding * largest(want[:-2]) + floor)
    limit[-2:] = rounding * float(want[-1]) + floor
    return bool(((got - want).abs() <= limit).all())
