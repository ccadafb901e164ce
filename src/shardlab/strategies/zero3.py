"""Rung 8. ZeRO-3: parameters too are kept only for one's own share, and gathered for use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies import base
from shardlab.strategies.agenda import GATHER, Agenda, Op
from shardlab.strategies.block import GATHERING, SHARDED, Block, tensors_in
from shardlab.strategies.flat import units_of
from shardlab.strategies.sharded import DTYPES, Sharded
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

    The order is learnt by running (``agenda.py``), so it does not matter in which order blocks
    run, how often, or whether every rank runs them. What a unit is needed for is noticed in three
    places: hooks around its module; what autograd saved of it, when backward takes it out; and any
    other operation on a parameter whose content is away (``watched.py``).

    Freeing means to shrink the storage to nothing: what autograd saved are views of the same
    storage, and they are whole again when the unit has been gathered for backward.
    """

    WORKS_BY_BLOCK = True

    def __init__(self, setup: base.Setup, *, comm_dtype: str = "fp32") -> None:
        for name, module in setup.model.named_modules():
            kind = type(module).__name__
            if isinstance(module, torch.jit.ScriptModule) or kind == "OptimizedModule":
                raise UsageError(
                    f"zero3: module '{name or kind}' is compiled by the model itself, and zero3 "
                    "cannot see what it reads; use training.compile: blocks, or the strategy zero2"
                )
        super().__init__(setup)
        self.comm_dtype = base.option("zero3's comm_dtype", comm_dtype, DTYPES)
        self.units: list[Block]  # type: ignore[assignment]
        parts = units_of(self.model, setup.blocks)
        self.own_units(
            setup, [Block(*part, self.group, self.comm_dtype, self._accessed) for part in parts]
        )
        self.by_storage = {unit.storage._cdata: i for i, unit in enumerate(self.units)}
        self.agenda = Agenda(len(self.units), self._start, self._agree)
        self.is_running = False  # between the beginning and the end of a micro-batch
        self.thread = 0  # the thread that runs it; autograd may call hooks from threads of its own
        self.refusal: UsageError | None = None  # raised where the caller hears it
        modules: dict[nn.Module, list[int]] = {}
        for i, unit in enumerate(self.units):
            modules.setdefault(unit.module, []).append(i)
            for name, p in unit.params.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._arrived, i, name))
        for module, its in modules.items():
            # Before the user's hooks, which may read the parameters (weight_norm does).
            before, after = partial(self._before_forward, its), partial(self._after_forward, its)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)

    # ------------------------------------------------------------ one place starts, waits, frees

    def _start(self, op: Op) -> bool:
        """Start a collective, in the common order. True: this rank had gradients to send."""
        unit = self.units[op.unit]
        if op.kind == GATHER:
            unit.start_gather(self.group)
            return False
        was_complete, has_gradients = unit.is_complete, unit.has_gradients
        self._move_arrived()
        unit.seen.clear()
        if was_complete and not unit.stays and not unit.is_recomputed:
            unit.free()
        self.scatter(unit)
        return has_gradients

    def _need(self, i: int) -> None:
        """The unit's parameters are about to be read: make it whole."""
        unit = self.units[i]
        if not in_backward() and threading.get_ident() != self.thread:
            self.refusal = UsageError(
                f"zero3: the model runs '{unit.label or 'the root'}' in a thread of its own; ranks "
                "could not agree in which order to gather its parameters; use the strategy zero2"
            )
            raise SystemExit  # ends the model's thread without a traceback
        if unit.state is SHARDED:
            self.agenda.reach(GATHER, i, in_backward())
        self.agenda.use(i)
        unit.wait()

    def _accessed(self, unit: Block, operation: Any) -> None:
        """Somebody reads a parameter whose content is away, outside of its module's forward."""
        if not self.is_running:
            if operation in OF_THE_OUTSIDE:
                return
            raise RuntimeError(
                f"zero3: a parameter of '{unit.label or 'the root'}' is read between steps, when "
                "this rank has only a part of it; use full_params()"
            )
        if in_backward():
            unit.is_recomputed = True
        else:
            unit.strays = True  # a view of it may be read after its module's forward
        self._need(self.units.index(unit))

    # ------------------------------------------------------------ forward

    def _before_forward(self, units: list[int], _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_running:
            raise RuntimeError("zero3: the model is run outside of gradients() and infer()")
        for i in units:
            self.units[i].depth += 1
            self._need(i)
            if in_backward():  # activation checkpointing computes it again
                self.units[i].is_recomputed = True
            elif torch.is_grad_enabled() and not self.units[i].stays:
                self._watch_inputs(i, tensors_in((args, kwargs)))
        if not in_backward() and not any(unit.state is GATHERING for unit in self.units):
            self.agenda.ahead(in_backward=False)

    def _after_forward(
        self, units: list[int], _module: nn.Module, inputs: Any, output: Any
    ) -> None:
        given = {id(t) for t in tensors_in(inputs)}
        outputs = [t for t in tensors_in(output) if id(t) not in given]
        for i in units:
            unit = self.units[i]
            unit.depth -= 1
            if in_backward() or unit.depth or unit.stays:
                continue
            for tensor in outputs:
                if tensor.untyped_storage()._cdata == unit.storage._cdata:
                    unit.strays = True  # it returns a view of its own parameters
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, i))
            if not unit.strays and not self.agenda.keeps(i):
                unit.free()

    def _pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor for backward: if it is a parameter, know which unit it is of."""
        i = self.by_storage.get(tensor.untyped_storage()._cdata)
        return tensor if i is None else (i, tensor)

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        i, tensor = saved
        self._need(i)
        result: Tensor = tensor
        return result

    # ------------------------------------------------------------ backward

    def _before_backward(self, i: int, _gradient: Tensor) -> None:
        self._need(i)

    def _watch_inputs(self, i: int, inputs: Sequence[Tensor]) -> None:
        """When the gradient of a call's input is there, backward is through with the call."""
        unit, number = self.units[i], sum(t.requires_grad for t in inputs)
        if not number:
            return
        left = number  # the hook must not hold the tensors that hold the hook
        unit.open_calls += 1
        unit.untouched_calls += 1

        def came(_gradient: Tensor) -> None:
            nonlocal left
            if left == number:
                unit.untouched_calls -= 1
            left -= 1
            if left == 0:
                unit.open_calls -= 1
            self._call_done(i)

        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(came)

    def _call_done(self, i: int) -> None:
        """Parameters that checkpointing has used again are kept until all inputs have a gradient:
        it holds views that nobody asks us for. The others may go when the first has one."""
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

    def _begin(self, kind: str) -> None:
        self.settle()
        self.agenda.begin(kind, extras=len(self.params))
        for unit in self.units:
            unit.begin()
        self.is_running, self.thread, self.refusal = True, threading.get_ident(), None

    def _end_forward(self) -> None:
        for unit in self.units:
            unit.depth = 0
            if unit.strays and not unit.stays:
                unit.free()

    def _finish(self) -> list[bool]:
        """Until every rank is through: which parameters got a gradient on any rank, so far."""
        self._move_arrived()
        unsent = [unit.has_gradients for unit in self.units]
        is_used = self.agenda.finish(unsent, [name in self.used for name in self.params])
        self.settle()
        return is_used

    def _agree(self, flags: Sequence[bool]) -> list[bool]:
        return base.any_rank(flags, self.group, label="agreement")

    def settle(self) -> None:
        """Wait for what is under way, and free every unit."""
        self.is_running = False
        self.receive_all()
        for unit in self.units:
            unit.free()

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        self.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        is_used: list[bool] = []
        for batch in microbatches:
            self._begin("training")
            with saved_tensors_hooks(self._pack, self._unpack):
                with phase(FORWARD):
                    loss = self._forward(batch)  # ()
                self._end_forward()
                with phase(BACKWARD):
                    base.backward(loss, divisor)
            loss_sum += loss.detach()
            is_used = self._finish()
        self.unused = [name for name, used in zip(self.params, is_used, strict=True) if not used]
        return base.global_mean(loss_sum, total, self.group)

    def _forward(self, batch: Batch) -> Tensor:
        try:
            loss = self.loss_fn(self.model, batch)
        except BaseException as error:
            if self.refusal is not None:
                raise self.refusal from None
            if "saved tensor hooks" not in str(error):
                raise
            raise UsageError(
                "zero3: the model uses torch.func (grad, vjp, jacrev …), which does not run beside "
                "hooks on what autograd saves; use torch.autograd.grad, or the strategy zero2"
            ) from None
        if self.refusal is not None:  # the model does without what its thread did not compute
            raise self.refusal
        return loss

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        self._begin("inference")
        result = function(self.model, batch)
        self._finish()
        return result

    def step(self) -> None:
        self.update_shards()
        for unit in self.units:
            unit.grad = None


# Between steps a parameter's view may be taken, by a checkpoint for instance, but not read.
OF_THE_OUTSIDE = (torch.Tensor.detach, torch.Tensor.data.__get__, torch.Tensor.__repr__)  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether autograd is running: a backward, or a gradient that forward asked for."""
    return bool(torch._C._current_graph_task_id() != -1)
