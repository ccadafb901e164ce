"""The contract of a strategy.

N ranks act as one. The gradient of a step is the sum of the losses of all targets, on all
ranks and in all micro-batches, divided by their number. The number is agreed on before
forward (it is known from the data), so unequal micro-batches, ragged labels and a rank with
no samples at all come out exact; a mean of per-rank means would not.

Some strategies change the mathematics: their ranks are workers that take steps of their own, and
exchange what they have learnt now and then. They say so with ``rounds``, and then another law
holds: N ranks are what one process would hold had it played the N workers one after another
(docs/decisions/0011).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import numbers
from shardlab.optim import factory
from shardlab.strategies import refusals, steps
from shardlab.strategies.slots import Slots, whole_slots
from shardlab.strategies.update import Rule, Update
from shardlab.strategies.whole import Whole
from shardlab.workloads.base import Batch, ContextSplit, LossFn

T = TypeVar("T")
Infer = Callable[[nn.Module, Batch], T]
# What this rank updates, by the parameter's name: the whole parameter, its rows (DTensor), or a 1-D
# piece of it. There may be nothing.
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setup:
    """What every strategy is built from. Its own options are keyword arguments beside this."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    loss_fn: LossFn
    mesh: DeviceMesh  # its dimension "dp" holds the data-parallel ranks
    # What the update does beside the optimizer: clip, follow a schedule, scale the loss.
    rule: Rule = field(default_factory=Rule)
    blocks: Sequence[str] = ()  # names of the modules that may be sharded one by one
    ranks_per_node: int = 0  # neighbours in the mesh; 0: there is one node, or it is not known
    sample: Batch | None = None  # one sample, where axes cut the model
    splits: Mapping[str, str] | None = None  # how tensor parallelism may split it; None: not known
    context: ContextSplit | None = None  # how the workload's sequences are cut


@dataclass(frozen=True)
class Rounds:
    """When workers that take steps of their own exchange what they have learnt, and how.

    After every ``every`` steps the difference between the anchor (what all workers had after the
    last exchange) and each worker's parameters is averaged. A worker weighs as much as the targets
    that it has seen since. The average is the gradient of an outer SGD with Nesterov momentum. It
    moves the anchor, and all workers continue from there. With rate 1 and no momentum the anchor
    becomes the average of the workers. Buffers follow worker 0's at the end of a round.

    With several ``fragments`` the parameters are cut into so many parts of about the same size, in
    the model's order. They are exchanged in turn during a round, each by itself. What is sent after
    a step may arrive ``delay`` steps later. The anchor moves then, and a worker keeps ``mix`` of
    its own parameters beside what the anchor has become.

    With fewer than 32 ``bits`` each worker's difference, times its weight, is rounded before it is
    sent (``lowbit.py``).

    With ``min_workers`` an exchange goes on without those who are late, or lost, when at least so
    many are there (``table.py``). ``absent`` is a plan of a proof: (round, worker, whether it makes
    the steps of that round, which are dropped).
    """

    every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    bits: int = 32
    min_workers: int | None = None
    absent: tuple[tuple[int, int, bool], ...] = ()

    def __post_init__(self) -> None:
        refusals.refuse_number("every", self.every, self.every >= 1, "1 or more")
        refusals.refuse_number("outer_lr", self.outer_lr, self.outer_lr > 0, "above 0")
        is_right = 0 <= self.outer_momentum < 1
        refusals.refuse_number("outer_momentum", self.outer_momentum, is_right, "from 0 to below 1")
        is_right = 1 <= self.fragments <= self.every
        within = f"from 1 to every, which is {self.every}"
        refusals.refuse_number("fragments", self.fragments, is_right, within)
        is_right = 0 <= self.delay < self.every
        refusals.refuse_number(
            "delay", self.delay, is_right, f"from 0 to below {self.every} (every)"
        )
        is_right = 0 <= self.mix < 1 if self.delay else self.mix == 0
        wanted = "from 0 to below 1" if self.delay else "0 without a delay"
        refusals.refuse_number("mix", self.mix, is_right, wanted)
        refusals.refuse_number("bits", self.bits, self.bits in (4, 8, 16, 32), "4, 8, 16 or 32")
        least = self.min_workers
        refusals.refuse_number("min_workers", least or 0, least is None or least >= 1, "1 or more")

    @property
    def shortest(self) -> int:
        """The fewest steps of a round that shows everything which this one does."""
        return max(2, self.fragments, self.delay + 1)

    def due(self, fragment: int) -> int:
        """After which step of a round a fragment is sent, from 1 to ``every``."""
        return (fragment + 1) * self.every // self.fragments

    def without(self, number: int) -> list[int]:
        """The workers that are planned not to take part in the exchange of a round."""
        return [worker for when, worker, _ in self.absent if when == number]

    def rests(self, number: int, worker: int) -> bool:
        """Whether a worker is planned to make no steps in a round."""
        return (number, worker, False) in self.absent

    def cut(self, params: Mapping[str, Tensor]) -> list[list[str]]:
        """The names of the parameters in each fragment."""
        sizes = {name: p.numel() * p.element_size() for name, p in params.items()}
        return numbers.cut_evenly(sizes, self.fragments)


class Strategy(ABC):
    """N ranks acting as one. It owns the model and the optimizer from its construction on.

    After ``gradients()`` and ``step()``, ``full_params()`` equals what one plain process would hold
    had it seen every rank's micro-batches.

    This class is the whole contract: the lab calls nothing on a strategy that does not stand here.
    A new strategy must write ``gradients()``. The other methods are right where every rank keeps
    the whole model and the whole optimizer; a strategy that keeps parts of them on each rank
    overrides those that say so. Options are keyword-only arguments of ``__init__``; the lab refuses
    an option that is not listed there.
    """

    # The built-in strategy of which it claims to send, hold and overlap as much; `shardlab prove`
    # holds it to that (plan/claims.py). None: only that its result equals one process.
    claim: str | None = None
    WORKS_BY_BLOCK = False  # it uses Setup.blocks
    KEEPS_PARTS = False  # a rank keeps a part of the parameters or gradients; nobody has the whole
    LEARNS_LAYOUT = False  # its first step lays out buckets, so a resumed run rehearses one step

    # None: N ranks act as one. Else they are workers, equal only right after an exchange; `shardlab
    # prove` compares with one process that plays them. Set it in __init__.
    rounds: Rounds | None = None
    rests: bool = False  # this worker was late, and makes no steps in this round

    optimizer: torch.optim.Optimizer
    update: Update  # step() must call it: it clips, follows the schedule, and skips bad gradients

    def __init__(self, setup: Setup, builds_optimizer: bool = True) -> None:
        """``builds_optimizer=False`` is for a strategy whose optimizer updates parts."""
        refusals.refuse_unsupported(setup.model, setup.mesh.size())
        self.model = setup.model
        self.loss_fn = setup.loss_fn
        self.group = refusals.dp_group(setup.mesh)
        # A tied parameter stands here once, under its first name.
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.params.values())).device
        if builds_optimizer:
            refusals.refuse_sparse_gradients(self.params)
            self.own(setup, self.params)

    def own(self, setup: Setup, params: Mapping[str, nn.Parameter]) -> None:
        """Build the optimizer over what this rank updates, by the parameters' names. The setup is
        not kept: its factory holds a small tensor for each parameter."""
        self.optimizer = setup.make_optimizer(params)
        self.update = Update(self.optimizer, setup.rule)

    # ------------------------------------------------------------ a step

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The mean loss over the global batch, from what ``gradients()`` has returned. A
        collective. Override it where that was this rank's own."""
        return loss

    @abstractmethod
    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all micro-batches; returns the mean loss over the global batch.

        Afterwards the gradients are those of the global batch, or on their way: step() waits.
        Every rank calls with the same number of micro-batches, one or more. A rank that has no
        samples left passes batches of zero rows.
        """

    def step(self) -> None:
        """Update the parameters and drop the gradients. Override it where a rank keeps parts."""
        self.update([p.grad for p in self.params.values() if p.grad is not None])
        steps.drop_gradients(self.params)

    def chosen(self) -> dict[str, float]:
        """Options that it has set by itself so far, by name. The run folder has them."""
        return {}

    def settle(self) -> None:  # noqa: B027
        """Wait for every collective that is under way, and free what is kept for a step only.

        The lab calls it between steps, before it measures or looks. Override it if ``step()`` or
        ``gradients()`` may return while something is still on its way.
        """

    @torch.no_grad()
    def infer(self, function: Infer[T], batch: Batch) -> T:
        """``function(model, batch)`` without gradients. Every rank calls it, perhaps with zero
        rows. Override it where parameters must be gathered first."""
        return function(self.model, batch)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, every rank's model is the one that ``full_params()`` gives: it is evaluated. A
        collective. Override it where ranks have models of their own between steps."""
        steps.broadcast_buffers(self.model, self.group)  # as before every step: rank 0's
        yield

    # ------------------------------------------------------------ what it holds

    def in_step(self) -> bool:
        """Whether all ranks must hold the same values now. Override it where they are workers."""
        return True

    def whole(self) -> Whole:
        """The names and shapes of the whole model's tensors. Override it where a rank's model has
        others."""
        return Whole.of(self.model)

    def part_of(self, name: str) -> str:  # noqa: ARG002
        """Which part of a tensor this rank's model has: ranks with the same answer hold the same
        elements. Override it where an axis of the mesh cuts the model."""
        return ""

    def full_params(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer, whole, by name. A collective.
        Override it where a rank keeps parts."""
        steps.broadcast_buffers(self.model, self.group)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        """Copies of every gradient, whole, by name, before step() drops them. A collective.
        Override it where a rank keeps parts."""
        scale = self.update.scale
        return {n: None if p.grad is None else p.grad / scale for n, p in self.params.items()}

    def slots(self) -> Slots:
        """Where this rank keeps which part of the model and of the optimizer's state: checkpoints
        are written from it and read into it. Override it where a rank keeps parts."""
        return whole_slots(self.model, self.params, self.optimizer)

    def saved(self) -> Slots:
        """What a checkpoint is written from: the same values wherever ranks hold the same elements.
        A collective. Override it where ranks have models of their own between steps."""
        slots = self.slots()
        steps.broadcast_buffers(self.model, self.group)  # rank 0's are right
        return slots

    def shared_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside model and optimizer, the same on every rank. It is
        given back to the same strategy in a world of any size."""
        return {}

    def load_shared_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """What ``shared_state()`` gave; nothing, if another strategy made the checkpoint. Model and
        optimizer are in place."""

    def own_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside model and optimizer, for this rank alone. It is given
        back only to the same strategy in a world of the same size."""
        return {}

    def load_own_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """What ``own_state()`` gave."""

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer as whole tensors by parameter name, which any strategy can load in a
        world of any size. A collective. Override it where a rank keeps parts."""
        optimizer = {
            name: {k: copied(v) for k, v in self.optimizer.state[p].items()}
            for name, p in self.params.items()
            if p in self.optimizer.state
        }
        update = self.update.state_dict()
        return {"model": self.full_params(), "optimizer": optimizer, "update": update}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What any strategy's ``state_dict()`` gave. Override it where a rank keeps parts."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(state["model"][name])
        # The optimizer numbers its parameters in the order of its groups.
        groups = self.optimizer.state_dict()["param_groups"]
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = {p: name for name, p in self.params.items()}
        numbered = {
            i: {k: copied(v) for k, v in state["optimizer"][names[p]].items()}
            for i, p in enumerate(held)
            if names.get(p) in state["optimizer"]
        }
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self.update.load_state_dict(state["update"])

    def exchange_averages(self) -> None:
        """Parameters and their moving average (training.ema_decay) change places, between steps.
        A collective. Override it where a rank keeps parts."""
        factory.exchange_averages(self.optimizer)

    def updated_names(self) -> list[str]:
        """The parameters whose gradients step() gives to the update, in that order. It is asked in
        the middle of a step, to name a gradient that is not finite."""
        return [n for n, p in self.params.items() if p.grad is not None] or list(self.params)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
