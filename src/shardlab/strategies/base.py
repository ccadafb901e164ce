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
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.optim import after_step
from shardlab.strategies import shards, steps
from shardlab.strategies.shards import ModelSpec, Shard, as_state_dict
from shardlab.strategies.update import Rule, Update
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

    @property
    def group(self) -> comm.Group:
        """The process group of the data-parallel ranks: the mesh's dimension "dp"."""
        if "dp" not in (self.mesh.mesh_dim_names or ()):
            names = ", ".join(self.mesh.mesh_dim_names or ()) or "none"
            raise UsageError(
                f"the device mesh needs a dimension named 'dp', and its names are: {names}; make "
                "it with init_device_mesh(device, (ranks,), mesh_dim_names=('dp',))"
            )
        return self.mesh.get_group("dp")


@dataclass(frozen=True)
class Rounds:
    """When workers that take steps of their own exchange what they have learnt, and how.

    ``local/rounds.py`` says what the numbers mean, and which are refused.
    """

    every: int  # steps from one exchange to the next
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0


class Strategy(ABC):
    """N ranks acting as one. It owns the model and the optimizer from its construction on.

    After ``gradients()`` and ``step()``, ``full_tensors()`` equals what one plain process would
    hold had it seen every rank's micro-batches.

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
    KEEPS_PARTS = False  # a rank keeps a part of the parameters or gradients; no rank has the whole
    LEARNS_LAYOUT = False  # its first step lays out buckets, so a resumed run rehearses one step

    # None: N ranks act as one. Else they are workers, equal only right after an exchange; `shardlab
    # prove` compares with one process that plays them. Set it in __init__.
    rounds: Rounds | None = None

    params: dict[str, nn.Parameter]  # that this rank's model has and trains, by their first names
    trained: tuple[str, ...]  # the names of all that train, on whichever rank
    optimizer: torch.optim.Optimizer
    update: Update  # step() must call it: it clips, follows the schedule, and skips bad gradients

    def __init__(self, setup: Setup, builds_optimizer: bool = True) -> None:
        """``builds_optimizer=False`` is for a strategy whose optimizer updates parts."""
        self.model = setup.model
        self.loss_fn = setup.loss_fn
        self.group = setup.group
        self.params = steps.trained_params(self.model)
        self.trained = tuple(self.params)
        self.device = next(iter(self.params.values())).device
        if builds_optimizer:
            self.own(setup, self.params)

    def own(self, setup: Setup, params: Mapping[str, nn.Parameter]) -> None:
        """Put what this rank updates into the optimizer, by the parameters' names. Do not keep the
        setup: it holds the state that an optimizer begins with for the whole model."""
        self.optimizer = setup.make_optimizer(params)
        self.update = Update(self.optimizer, setup.rule)

    # ------------------------------------------------------------ a step

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

    # ------------------------------------------------------------ what it holds

    def shards(self) -> list[Shard]:
        """Which elements of the model's tensors this rank holds, with their gradients and what the
        optimizer updates of them. All else follows from it: whole tensors, checkpoints, the drift
        guard. It is asked when nothing is under way. Override it where a rank keeps parts."""
        return shards.of_model(self.model, self.params)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, every rank's model is the one that N ranks have as one: it is evaluated and
        saved. A collective. Override it where ranks have models of their own between steps."""
        steps.broadcast_buffers(self.model, self.group)  # as before every step: rank 0's
        yield

    def in_step(self) -> bool:
        """Whether all ranks must hold the same values now. Override it where they are workers."""
        return True

    def model_spec(self) -> ModelSpec:
        """The names and shapes of the whole model's tensors. Override it where a rank's model has
        others."""
        return ModelSpec.of(self.model)

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint must hold beside model and optimizer: what is the same on every rank,
        and what is this rank's own. The first is given back to the same strategy in a world of any
        size, the second only in a world of the same size."""
        return {}, {}

    def load_extra_state(  # noqa: B027
        self, shared: dict[str, Tensor], own: dict[str, Tensor] | None
    ) -> None:
        """What ``extra_state()`` gave, when model and optimizer are in place. ``own`` is None in a
        world of another size. After another strategy they are empty and None."""

    # ------------------------------------------------------------ what follows from it

    def full_params(self) -> dict[str, Tensor]:
        """Copies of the whole model's tensors, for ``load_state_dict``: tied ones under every name,
        without buffers that are not persistent. A collective."""
        whole = self.model_spec()
        return as_state_dict(self.full_tensors(), whole.tied, whole.unsaved)

    def full_tensors(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer, whole, by its first name. A collective."""
        self.settle()
        with self.as_one():
            found = dict(shards.whole(self.shards(), lambda s: s.value, self.group, self.device))
        return {name: found[name] for name in self.model_spec().tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        """Copies of every gradient, whole, by name, before step() drops them: None, if no rank has
        any of it. A collective."""
        self.settle()
        found = dict(shards.whole(self.shards(), lambda s: s.grad, self.group, self.device))
        return {
            name: found[name] / self.update.scale if name in found else None
            for name in self.trained
        }

    @torch.no_grad()
    def exchange_averages(self) -> None:
        """Parameters and their moving average (training.ema_decay) change places, between steps.
        A collective."""
        self.settle()
        after_step.exchange_averages(self.update.inner)
        held = self.shards()
        copies = {s.name: s for s in held if s.key is None and s.value is not None}
        changed = [s for s in held if s.name in copies]
        for name, tensor in shards.whole(changed, lambda s: s.key, self.group, self.device):
            copy = copies.get(name)
            if copy is not None and copy.value is not None:  # of more than is updated here
                copy.value.copy_(shards.take(tensor.view(-1), copy.runs).view_as(copy.value))

    def updated_names(self) -> list[str]:
        """The parameters whose gradients step() gives to the update, in that order. It is asked in
        the middle of a step, to name a gradient that is not finite."""
        return [s.name for s in self.shards() if s.grad is not None] or list(self.params)
