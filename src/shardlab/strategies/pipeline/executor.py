"""Pipeline parallelism: ranks hold stages of the model, and micro-batches travel through them.

Schedule of a step, for P ranks and M micro-batches:

    each micro-batch    in the order of ``schedules.py``:
                        forward of a stage; send its activations to the next, asynchronously
                        backward of a stage; send its input's gradient back, asynchronously
    after the last      exchange the gradients of parameters that several stages hold, once
                        all_reduce the loss of the last stage                      8 bytes
    then                the data-parallel strategy's collectives, as for one micro-batch

To the data-parallel strategy a step is one micro-batch with one loss. All forwards and backwards
run while that loss is computed, and add their gradients up in a place of their own; backward of the
loss hands them out, so that hooks, buckets and shards work as always. Gradients are sums over
micro-batches of losses that are sums: nothing is divided by their number.

The sender of an activation says how the tensors are shaped only once for each shape of micro-batch:
both ends see the same one. Over NCCL, where each direction of a link has a group of its own, this
has not been tested: it needs two GPUs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.batch import tensors_of
from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, phase
from shardlab.strategies.pipeline import schedules, stages
from shardlab.strategies.pipeline.p2p import ACTIVATION, GRADIENT, Key, Messages
from shardlab.strategies.pipeline.schedules import Action
from shardlab.strategies.pipeline.stages import Shape, StageRunner, shape_of
from shardlab.strategies.pipeline.weight_gradients import Deferred, _of_weight
from shardlab.workloads.base import Batch, LossFn

AHEAD = 2  # messages whose receiving is begun before they are needed
Signature = tuple[Any, ...]


@dataclass
class Live:
    """What is kept of one micro-batch on one stage, from its forward on."""

    inputs: list[Tensor]
    outputs: list[Tensor]  # those that have a gradient


@dataclass(frozen=True)
class Job:
    """What the model is called with to run a whole step."""

    batches: Sequence[Batch]


class Executor(Messages):
    """Runs any list of actions on this rank's stages."""

    PUTS_OFF = True  # linear layers leave their weights' gradients for later, if the list says so

    seed: Tensor  # the gradient of a micro-batch's loss: ()

    def __init__(
        self,
        model: nn.Module,
        loss: LossFn,
        group: comm.Group,
        schedule: str,
        chunks: int,
        where: Sequence[int],
        runner: StageRunner,
    ) -> None:
        super().__init__(group, where, runner.device)
        self.model, self.loss_fn, self.runner = model, loss, runner
        self.schedule, self.chunks = schedule, chunks
        self.divisor: Callable[[], Tensor | None] = lambda: None  # what the loss is divided by
        self.deferred = Deferred()
        # What trains and lies on several ranks, by the places of those in the group.
        self.shared: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        self.own_hooks: dict[nn.Parameter, Any] = {}
        # For each number of micro-batches: this rank's actions, and every message's turn.
        self.plans: dict[int, tuple[list[Action], dict[Key, int]]] = {}
        self.known: dict[tuple[int, Signature], list[list[Shape]]] = {}  # by the receiving stage
        self.peak_live = 0  # micro-batches whose activations were kept at a time, in the last step
        self._clear()
        for p in model.parameters():
            if p._backward_hooks:  # the model's own: they see each micro-batch's gradient
                self.own_hooks[p], p._backward_hooks = p._backward_hooks, None
        runner.attach(model)
        if self.PUTS_OFF and any(a.kind == "W" for a in self.lists(1)[self.rank]):
            self.deferred.attach(model)
        stages.intercept(model, self._call)

    def _clear(self) -> None:
        self._clear_messages()
        self.live: dict[tuple[int, int], Live] = {}
        self.put_off: dict[tuple[int, int], list[Any]] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}

    # ------------------------------------------------------------ what the strategy calls

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed loss of all micro-batches; its backward gives the parameters' gradients."""
        value: Tensor = model(Job(batch.inputs))
        return value

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.runner.stage is not None:
            return original(*args, **kwargs)
        if args and isinstance(args[0], Job):
            return self._step(args[0].batches)
        if torch.is_grad_enabled():
            raise UsageError("pipeline: the model is run outside of gradients() and infer()")
        return self._relay(lambda: original(*args, **kwargs), signature_of((args, kwargs)))

    def _step(self, batches: Sequence[Batch]) -> Tensor:
        total = self.run(batches)
        params = [p for p in self.model.parameters() if p in self.gradients]
        anchor = torch.zeros((), device=self.device, requires_grad=True)  # if there are none
        out: Tensor = _HandOut.apply(self, total, anchor, *params)  # type: ignore[no-untyped-call]
        return out

    def receive_buffers(self) -> int:
        """Bytes that stay allocated between steps, to receive into."""
        return 0

    # ------------------------------------------------------------ a step

    def lists(self, micro: int) -> list[list[Action]]:
        return schedules.schedule(self.schedule, self.ranks, micro, self.chunks)

    def run(self, batches: Sequence[Batch]) -> Tensor:
        """All forwards and backwards of a step. Returns the sum of the losses, on every rank: ();
        the gradients of that sum are in ``gradients``."""
        self._clear()
        self.peak_live = 0
        divisor = self.divisor()
        # As in one process, in which each loss is divided before its backward.
        self.seed = torch.ones((), dtype=torch.float64, device=self.device)
        if divisor is not None:
            self.seed = self.seed / divisor
        signatures = [signature_of((b.inputs, b.targets)) for b in batches]
        with _recorded("pipeline"):
            with self._in_private(), torch.enable_grad():
                total = self._carry_out(batches, signatures)
                self.gradients = {p: p.grad for p in self.model.parameters() if p.grad is not None}
            self._sum_shared()
            comm.all_reduce(total, self.group, label="loss of the last stage")
        return total

    def _carry_out(self, batches: Sequence[Batch], signatures: Sequence[Signature]) -> Tensor:
        """This rank's actions. Returns the sum of the losses that it has computed: ()."""
        actions, self.turns = self._plan(len(batches))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, action in enumerate(actions):
            self._look_ahead(actions[i:], signatures)
            if action.kind == "F":
                total += self._forward(action, batches[action.micro], signatures)
            elif action.kind == "W":
                self._weights(action)
            else:
                with phase(BACKWARD):
                    self._backward(action)
            self.peak_live = max(self.peak_live, len(self.live) + len(self.put_off))
        self._finish_sending()
        return total

    def _forward(
        self, action: Action, batch: Batch, signatures: Sequence[Signature]
    ) -> Tensor | float:
        _, stage, micro = action

        def forward() -> Tensor:
            with span(action):
                return self.loss_fn(self.model, batch)

        received, made = self._pass_on(stage, micro, signatures[micro], forward)
        is_last = stage == self.stages - 1
        outputs = [t for t in ([made] if is_last else made) if t.requires_grad]
        self.live[stage, micro] = Live(received, outputs)
        return made.detach().double() if is_last else 0.0

    def _pass_on(
        self, stage: int, micro: int, signature: Signature, forward: Callable[[], Any]
    ) -> tuple[list[Tensor], Any]:
        """Run a stage on what the one before has sent, and send what it makes to the next. Returns
        what was received, and what was made."""
        shapes: list[list[Shape]] = []
        received: list[Tensor] = []
        if stage:
            shapes = self._shapes(stage, micro, signature)
            received = [
                t.detach().requires_grad_(has_gradient)
                for t, (_, _, has_gradient) in zip(
                    self._take((ACTIVATION, stage, micro), shapes[-1]), shapes[-1], strict=True
                )
            ]
        made = self.runner.run(stage, forward, shapes, received)
        if stage < self.stages - 1:
            self._announce(stage, micro, signature)
            self._give((ACTIVATION, stage + 1, micro), made)
        return received, made

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        kept = self.live.pop((stage, micro))
        if stage == self.stages - 1:
            if not kept.outputs:
                raise UsageError(
                    "the loss of a micro-batch depends on no parameter that requires a gradient; "
                    "one process could not train on it either"
                )
            gradients = [self.seed.to(t.dtype).expand_as(t) for t in kept.outputs]
        elif kept.outputs:
            shapes = [shape_of(t) for t in kept.outputs]
            gradients = self._take((GRADIENT, stage, micro), shapes)
        self.deferred.into = [] if kind == "I" else None
        if kept.outputs:
            with span(action):
                torch.autograd.backward(kept.outputs, gradients)
        if kind == "I":
            self.put_off[stage, micro] = self.deferred.into or []
        self.deferred.into = None
        if stage:
            back = [
                torch.zeros_like(t) if t.grad is None else t.grad
                for t in kept.inputs
                if t.requires_grad
            ]
            self._give((GRADIENT, stage - 1, micro), back)

    def _weights(self, action: Action) -> None:
        """Catch up on the weight gradients that an input gradient has put off."""
        with torch.no_grad(), span(action):
            for weight, bias, x, gradient in self.put_off.pop((action.stage, action.micro)):
                for p, g in zip((weight, bias), _of_weight(weight, bias, x, gradient), strict=True):
                    if p is not None and g is not None:
                        p.grad = g if p.grad is None else p.grad.add_(g)

    @contextmanager
    def _in_private(self) -> Iterator[None]:
        """Inside, gradients are added up where the strategy does not see it: its hooks are for what
        is handed out. Hooks of the model's own see each micro-batch, as in one process."""
        before = [
            (p, p.grad, p._backward_hooks, p._post_accumulate_grad_hooks)
            for p in self.model.parameters()
            if p.requires_grad
        ]
        for p, *_ in before:
            p.grad, p._backward_hooks = None, self.own_hooks.get(p)
            p._post_accumulate_grad_hooks = OrderedDict()
        try:
            yield
        finally:
            for p, gradient, hooks, after in before:
                p.grad, p._backward_hooks = gradient, hooks
                p._post_accumulate_grad_hooks = OrderedDict() if after is None else after

    @torch.no_grad()
    def _sum_shared(self) -> None:
        """The gradient of what several stages hold is the sum of theirs. One that got none is
        None, as in one process."""
        for places, params in self.shared:
            used = torch.tensor([p in self.gradients for p in params], dtype=torch.uint8)
            used = self._summed(places, used.to(self.device), 0, "used parameters")
            for number, (p, is_used) in enumerate(zip(params, used.tolist(), strict=True)):
                if is_used:
                    mine = self.gradients.get(p)
                    mine = torch.zeros_like(p) if mine is None else mine.contiguous()
                    self.gradients[p] = self._summed(places, mine, number + 1, "gradient")

    # ------------------------------------------------------------ what comes when

    def _plan(self, micro: int) -> tuple[list[Action], dict[Key, int]]:
        if micro not in self.plans:
            lists = self.lists(micro)
            turns = {
                (_lane(action), action.stage, action.micro): turn
                for actions in lists
                for turn, action in enumerate(actions)
                if action.kind != "W"
            }
            self.plans[micro] = lists[self.rank], turns
        return self.plans[micro]

    def _look_ahead(self, actions: Sequence[Action], signatures: Sequence[Signature]) -> None:
        """Begin to receive what the next actions work on, as far as its shapes are known."""
        begun = 0
        for action in actions[: 3 * AHEAD]:
            kind, stage, micro = action
            of = schedules.source(action, self.stages)
            if of is None or self.where[of] == self.rank:
                continue
            if kind == "F" and (stage, signatures[micro]) in self.known:
                self._begin((ACTIVATION, stage, micro), self.known[stage, signatures[micro]][-1])
            elif kind != "F" and (stage, micro) in self.live:
                shapes = [shape_of(t) for t in self.live[stage, micro].outputs]
                self._begin((GRADIENT, stage, micro), shapes)
            else:
                return
            begun += 1
            if begun == AHEAD:
                return

    # ------------------------------------------------------------ shapes

    def _announce(self, stage: int, micro: int, signature: Signature) -> None:
        """Tell the next stage the shapes of all blocks' outputs so far, the first time."""
        key = stage + 1, signature
        if key in self.known:
            if self.known[key] != self.runner.shapes:
                block = self.runner.blocks[self.runner.ends[stage]]
                raise UsageError(
                    f"pipeline: the output of '{block}' has another shape than it had for a "
                    "micro-batch of this one's shape, or needs a gradient where it did not; the "
                    "next stage could not know what it receives"
                )
            return
        self.known[key] = self.runner.shapes
        self._send_shapes((ACTIVATION, stage + 1, micro), self.runner.shapes)

    def _shapes(self, stage: int, micro: int, signature: Signature) -> list[list[Shape]]:
        key = stage, signature
        if key not in self.known:
            self.known[key] = self._receive_shapes((ACTIVATION, stage, micro))
        return self.known[key]

    # ------------------------------------------------------------ without gradients

    def _relay(self, forward: Callable[[], Any], signature: Signature) -> Any:
        """One call of the model, stage after stage. Every rank returns what it returns."""
        self._clear()
        signature = ("relay", *signature)
        value: Any = None
        for stage in range(self.stages):
            if self.where[stage] == self.rank:
                _, value = self._pass_on(stage, 0, signature, forward)
        self._finish_sending()
        return self._share(value)


class _HandOut(torch.autograd.Function):
    """The loss of a step, whose backward gives the gradients that were added up already."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, loss: Tensor, _: Tensor, *params: Tensor) -> Tensor:
        kept: dict[Any, Tensor] = executor.gradients
        ctx.gradients = [kept.pop(p) for p in params]
        ctx.seed = executor.seed
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        # Nobody else keeps them: a parameter takes what it is given, without a copy.
        given, ctx.gradients = ctx.gradients, []
        rest = float(factor / ctx.seed)  # 1, unless the strategy divides by more than it said
        return None, None, None, *(_scaled(given.pop(0), rest) for _ in range(len(given)))


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient.mul_(factor)


def _lane(action: Action) -> str:
    return ACTIVATION if action.kind == "F" else GRADIENT


def span(action: Action) -> AbstractContextManager[Any]:
    """The work of an action as a span of a profiler's trace, without the wait for what it needs."""
    return _recorded(f"{schedules.NAMES[action.kind]} {action.micro}, stage {action.stage}")


def _recorded(name: str) -> AbstractContextManager[Any]:
    if not torch.autograd._profiler_enabled():  # a span takes microseconds, the question none
        return nullcontext()
    return torch.profiler.record_function(f"shardlab::{name}")


def signature_of(value: Any) -> Signature:
    """What decides the shapes of all that a model makes of a batch."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors_of(value))
