"""Rung 8. ZeRO-3: parameters too are kept only for one's own share, and gathered for use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardlab import comm
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies import base, refusals, steps
from shardlab.strategies.agenda import GATHER, Agenda, Op
from shardlab.strategies.block import GATHERING, SHARDED, Block, units_of
from shardlab.strategies.groups import inside_and_between
from shardlab.strategies.sharded import DTYPES, Sent, Sharded
from shardlab.strategies.uses import Uses, in_backward, refuse_compiled
from shardlab.workloads.base import Batch


class Zero3(Sharded):
    """Gather a block's parameters just before they are used, and free them right after.

    A unit is a block that the workload names, or the root: all that lies outside of blocks.
    Schedule, for n ranks, Ψ bytes of parameters and as many of gradients, each micro-batch:

        at construction     broadcast parameters and buffers from rank 0; keep one n-th of each unit
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             before a unit: all_gather its parameters, having prefetched them
                            during the one before                         Ψ
                            after a block: free them (not the last: backward begins with it)
        backward            before a block: all_gather its parameters again, prefetched
                            when the one before was half done             Ψ
                            after a unit: free its parameters,
                            reduce_scatter its gradients, asynchronously  Ψ
                            add the result to this rank's shard
        after backward      all_reduce what each rank needed and which parameters got a gradient
        after the last      all_reduce the loss
        step                update this rank's shard: nothing to send

    Cost: 3Ψ(n-1)/n on the wire per micro-batch, less what is gathered once (root, last block).
    Memory: of everything one n-th, plus two blocks' parameters and gradients.

    With ``shards=s``, s neighbours (the ranks of a node) gather and scatter among themselves, and
    the n/s groups are replicas. Added to the schedule is

        the last backward   all_reduce gradients of this rank's shard between groups, asynchronously

    Cost: 3Ψ(s-1)/s inside a group, only 2(Ψ/s)(g-1)/g between g = n/s groups. Memory: one s-th.

    When a unit is needed and when it is done with is noticed by hooks (``uses.py``). In which order
    all ranks gather and scatter is learnt by running (``agenda.py``): whoever needs an operation
    starts all that are planned before it. So it does not matter in which order blocks run, how
    often, or whether every rank runs them.

    Freeing means to shrink the storage to nothing: what autograd saved are views of the same
    storage, and they are whole again when the unit has been gathered for backward.
    """

    WORKS_BY_BLOCK = True

    def __init__(
        self, setup: base.Setup, *, comm_dtype: str = "fp32", shards: int | None = None
    ) -> None:
        refuse_compiled(setup.model)
        super().__init__(setup)
        self.peers, self.between = inside_and_between(setup.mesh, shards, "zero3")
        self.scattered: list[Block] = []  # whose shards are still to be sent between the groups
        self.crossing: list[Sent] = []  # those that are on their way
        self.comm_dtype = refusals.option("zero3's comm_dtype", comm_dtype, DTYPES)
        self.units: list[Block]  # type: ignore[assignment]
        parts = units_of(self.model, setup.blocks)
        self.own_units(setup, [Block(*part, self.peers, self.comm_dtype) for part in parts])
        self.agenda = Agenda(len(self.units), self._start, self._agree)
        self.uses = Uses(
            self.units,
            need=self._need,
            entered=self._prefetch,
            left=self._left,
            passed=self._passed,
        )
        for i, unit in enumerate(self.units):
            for name, p in unit.params.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._arrived, i, name))

    # ------------------------------------------------------------ the collectives

    def _start(self, op: Op) -> bool:
        """Start a collective, in the common order. True: this rank had gradients to send."""
        unit = self.units[op.unit]
        if op.kind == GATHER:
            into, shard = unit.room()  # (padded,), (shard,)
            label = f"params {unit.label or 'root'}"
            unit.gathers(into, comm.all_gather(into, shard, self.peers, label=label, async_op=True))
            return False
        was_complete, has_gradients = unit.is_complete, unit.has_gradients
        self._move_arrived()
        unit.seen.clear()
        if was_complete and not unit.stays and not unit.is_recomputed:
            unit.free()
        full, mine = self.taken(unit)  # (padded,), (shard,)
        self._cross(self.scattered)  # in the common order too: taken() has received them
        self.scattered = [unit]
        label = f"grad {unit.label}"
        pending = comm.reduce_scatter(mine, full, self.peers, label=label, async_op=True)
        self.in_flight.append(Sent(unit, full, mine, pending))
        return has_gradients

    def _cross(self, units: Sequence[Block]) -> None:
        """Add up the groups' gradients of this rank's shards, without waiting for it."""
        for unit in units if self.is_last else ():
            if unit.grad is not None and self.between is not None:
                grad, label = unit.grad, f"grad {unit.label} between groups"  # (shard,)
                pending = comm.all_reduce(grad, self.between, label=label, async_op=True)
                self.crossing.append(Sent(unit, grad, grad, pending))
                unit.grad = None

    def _agree(self, flags: Sequence[bool]) -> list[bool]:
        return steps.any_rank(flags, self.group, label="agreement")

    # ------------------------------------------------------------ what a use of a unit leads to

    def _need(self, i: int) -> None:
        """The unit's parameters are about to be read: make it whole."""
        unit = self.units[i]
        if unit.state is SHARDED:
            self.agenda.reach(GATHER, i, in_backward())
        self.agenda.use(i)
        unit.wait()

    def _prefetch(self) -> None:
        """Forward has entered a module: while it computes, the next unit may travel."""
        if not any(unit.state is GATHERING for unit in self.units):
            self.agenda.ahead(in_backward=False)

    def _left(self, i: int) -> None:
        """Forward has left the unit's module."""
        if not self.agenda.keeps(i):
            self.units[i].free()

    def _passed(self, i: int) -> None:
        """Backward has passed through a call. Parameters that checkpointing has used again are kept
        until all inputs of all calls have a gradient: it holds views that nobody asks us for. The
        others may go when each call has one."""
        unit = self.units[i]
        if unit.untouched_calls == 0 and unit.has_gradients:
            self.agenda.offer(i)
        if unit.open_calls == 0 or (unit.untouched_calls == 0 and not unit.is_recomputed):
            unit.free()

    def _arrived(self, i: int, name: str, parameter: nn.Parameter) -> None:
        """Half way through a block, the gradients of the one before have had time to travel: when
        their buffers are free there is room for this block's, and to prefetch the next.
        """
        if parameter.grad is None:  # frozen after its use: autograd calls the hook all the same
            return
        unit = self.units[i]
        unit.arrived.append((name, parameter))
        unit.seen.add(name)
        if len(unit.seen) == max(1, unit.trained // 2):
            self.receive_all()
        if not self.in_flight:
            self._move_arrived()
        if len(unit.seen) == unit.trained * 3 // 4:
            self.agenda.ahead(in_backward=True)
        if unit.is_complete:
            self.agenda.offer(i)

    def _move_arrived(self) -> None:
        for unit in self.units:
            for name, parameter in unit.arrived:
                self.move_gradient(unit, name, parameter)
            unit.arrived.clear()

    # ------------------------------------------------------------ a micro-batch, a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        self.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        is_used: list[bool] = []
        for i, batch in enumerate(microbatches):
            self._begin("training", is_last=i + 1 == len(microbatches))
            with saved_tensors_hooks(self.uses.pack, self.uses.unpack):
                with phase(FORWARD), self.uses.in_forward():
                    loss = self.loss_fn(self.model, batch)  # ()
                self._end_forward()
                with phase(BACKWARD):
                    steps.backward(loss, divisor)
            loss_sum += loss.detach()
            is_used = self._finish()
        self.unused = [name for name, used in zip(self.params, is_used, strict=True) if not used]
        return steps.global_mean(loss_sum, total, self.group)

    def _begin(self, kind: str, is_last: bool = False) -> None:
        self.settle()
        self.is_last = is_last
        self.agenda.begin(kind, extras=len(self.params))
        for unit in self.units:
            unit.begin()
        self.uses.begin()

    def _end_forward(self) -> None:
        for unit in self.units:
            unit.depth = 0
            if unit.strays and not unit.stays:
                unit.free()

    def _finish(self) -> list[bool]:
        """Serve the other ranks until all are through. Which parameters got a gradient on any?"""
        self._move_arrived()
        unsent = [unit.has_gradients for unit in self.units]
        is_used = self.agenda.finish(unsent, [name in self.used for name in self.params])
        self.receive_all()
        self._cross(self.units)  # the last, and what only the micro-batches before it used
        self.settle()
        return is_used

    def settle(self) -> None:
        """Wait for what is under way, and free every unit."""
        self.uses.is_running = False
        self.receive_all()
        for unit in self.units:
            unit.free()
        for of, _, grad, pending in self.crossing:
            pending.wait()
            of.grad = grad if of.grad is None else of.grad.add_(grad)
        self.crossing, self.scattered = [], []

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        self._begin("inference")
        result = function(self.model, batch)
        self._finish()
        return result

    def step(self) -> None:
        self.update_shards()
        for unit in self.units:
            unit.grad = None
