"""Rung 8. ZeRO-3: parameters too are kept only for one's own share, and gathered for use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardlab import comm
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies import base, buckets, steps
from shardlab.strategies.buckets import on_gradient
from shardlab.strategies.sharded.collective_order import GATHER, CollectiveOrder, Op
from shardlab.strategies.sharded.gathered_unit import GATHERING, SHARDED, GatheredUnit, units_of
from shardlab.strategies.sharded.param_use_hooks import ParamUseHooks, refuse_compiled
from shardlab.strategies.sharded.zero import Sent, Sharded
from shardlab.strategies.steps import in_backward
from shardlab.workloads.base import Batch


class Zero3(Sharded):
    """Gather a block's parameters just before they are used, and free them right after.

    A unit is a block that the workload names, or the root: all that lies outside of blocks.
    Schedule, for n ranks, Ψ bytes of parameters and Ψ of gradients, each micro-batch:

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

    Hooks notice when a unit is needed and when no longer (``param_use_hooks.py``). The order in
    which all ranks gather and scatter is learnt by running (``collective_order.py``): a rank that
    needs an operation starts all that are planned before it. So blocks may run in any order,
    several times, or on some ranks only.

    Freeing means to shrink the storage to nothing: what autograd saved are views of the same
    storage, and they are whole again when the unit has been gathered for backward.
    """

    WORKS_BY_BLOCK = True

    def __init__(self, setup: base.Setup, *, comm_dtype: str = "fp32") -> None:
        refuse_compiled(setup.model)
        super().__init__(setup)
        dtype = buckets.comm_dtype("zero3", comm_dtype, self.params)
        self.units: list[GatheredUnit]  # type: ignore[assignment]
        parts = units_of(self.model, setup.blocks)
        self.own_units(setup, [GatheredUnit(part, self.group, dtype) for part in parts])
        blocks = [unit.module for unit in self.units]
        self.order = CollectiveOrder(blocks, self._start, self._agree)
        self.hooks = ParamUseHooks(
            self.units,
            need=self._need,
            entered=self._prefetch,
            left=self._left,
            passed=self._passed,
        )
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        for i, unit in enumerate(self.units):
            on_gradient(unit.params, partial(self._arrived, i))

    # ------------------------------------------------------------ the collectives

    def _start(self, op: Op) -> bool:
        """Start a collective, in the common order. True: this rank had gradients to send."""
        unit = self.units[op.unit]
        if op.kind == GATHER:
            into, shard = unit.room()  # (padded,), (shard,)
            label = f"params {unit.label or 'root'}"
            unit.gathers(into, comm.all_gather(into, shard, self.group, label=label, async_op=True))
            return False
        was_complete, has_gradients = unit.is_complete, unit.has_gradients
        self._move_arrived()
        unit.seen.clear()
        if was_complete and not unit.stays and not unit.is_recomputed:
            unit.free()
        full, mine = self.send_buffers(unit)  # (padded,), (shard,)
        label = f"grad {unit.label}"
        pending = comm.reduce_scatter(mine, full, self.group, label=label, async_op=True)
        self.in_flight.append(Sent(unit, full, mine, pending))
        return has_gradients

    def _agree(self, flags: Sequence[bool]) -> list[bool]:
        return steps.any_rank(flags, self.group, label="agreement")

    # ------------------------------------------------------------ what a use of a unit leads to

    def _need(self, i: int) -> None:
        """The unit's parameters are about to be read: make it whole."""
        unit = self.units[i]
        if unit.state is SHARDED:
            self.order.reach(GATHER, i, in_backward())
        self.order.use(i)
        unit.wait()

    def _prefetch(self) -> None:
        """Forward has entered a module: while it computes, the next unit may travel."""
        if not any(unit.state is GATHERING for unit in self.units):
            self.order.ahead(in_backward=False)

    def _left(self, i: int) -> None:
        """Forward has left the unit's module."""
        if not self.order.keeps(i):
            self.units[i].free()

    def _passed(self, i: int) -> None:
        """Backward has passed through a call. Parameters that checkpointing has used again are kept
        until all inputs of all calls have a gradient: it holds views that hooks cannot see. The
        others may go when each call has one."""
        unit = self.units[i]
        if unit.untouched_calls == 0 and unit.has_gradients:
            self.order.offer(i)
        if unit.open_calls == 0 or (unit.untouched_calls == 0 and not unit.is_recomputed):
            unit.free()

    def _arrived(self, i: int, name: str, parameter: nn.Parameter) -> None:
        """Half way through a block, the gradients of the one before have had time to travel: when
        their buffers are free there is room for this block's, and to prefetch the next.
        """
        unit = self.units[i]
        unit.arrived.append((name, parameter))
        unit.seen.add(name)
        if len(unit.seen) == max(1, unit.trained // 2):
            self.receive_all()
        if not self.in_flight:
            self._move_arrived()
        if len(unit.seen) == unit.trained * 3 // 4:
            self.order.ahead(in_backward=True)
        if unit.is_complete:
            self.order.offer(i)

    def _move_arrived(self) -> None:
        for unit in self.units:
            self.used |= unit.move_arrived()

    # ------------------------------------------------------------ a micro-batch, a step

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        self.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        is_used: list[bool] = []
        for batch in microbatches:
            self._begin("training")
            with saved_tensors_hooks(self.hooks.pack, self.hooks.unpack):
                with phase(FORWARD), self.hooks.in_forward():
                    loss = self.loss_fn(self.model, batch)  # ()
                self._end_forward()
                with phase(BACKWARD):
                    steps.backward(loss, divisor)
            loss_sum += loss.detach()
            is_used = self._finish()
        self.unused = [name for name, used in zip(self.params, is_used, strict=True) if not used]
        return steps.global_mean(loss_sum, total, self.group)

    def _begin(self, kind: str) -> None:
        self.settle()
        self.order.begin(kind, extras=len(self.params))
        for unit in self.units:
            unit.begin()
        self.hooks.begin()

    def _end_forward(self) -> None:
        for unit in self.units:
            unit.depth = 0
            if unit.strays and not unit.stays:
                unit.free()

    def _finish(self) -> list[bool]:
        """Serve the other ranks until all are through. Which parameters got a gradient on any?"""
        self._move_arrived()
        unsent = [unit.has_gradients for unit in self.units]
        is_used = self.order.finish(unsent, [name in self.used for name in self.params])
        self.settle()
        return is_used

    def settle(self) -> None:
        """Wait for what is under way, and free every unit."""
        self.hooks.is_running = False
        self.receive_all()
        for unit in self.units:
            unit.free()

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        self._begin("inference")
        result = function(self.model, batch)
        self._finish()
        return result
