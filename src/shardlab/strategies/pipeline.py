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

import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.axes import Axes
from shardlab.batch import tensors_of
from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, phase
from shardlab.strategies import base, layout, refusals, schedules, stages
from shardlab.strategies.layout import Cut
from shardlab.strategies.messages import ACTIVATION, GRADIENT, PARTS, Key, Messages
from shardlab.strategies.schedules import Action
from shardlab.strategies.stages import Shape, Track
from shardlab.strategies.weight_gradients import Deferred, _of_weight
from shardlab.workloads.base import Batch, LossFn

AHEAD = 2  # messages whose receiving is begun before they are needed
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Signature = tuple[Any, ...]


def cut(
    setup: base.Setup,
    axes: Axes,
    group: comm.Group,
    loss: LossFn,
    executor: type[Pipeline] | None = None,
) -> Cut:
    """Cut the model into stages, and keep this rank's. ``executor`` runs them; None: ours does."""
    model, ranks = setup.model, group.size()
    if setup.sample is None:
        raise UsageError("pipeline: stages are found by running the model: Setup.sample is missing")
    if hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise UsageError(
            "pipeline: a model that is compiled as one has no stages; use training.compile: blocks"
        )
    chunks = schedules.chunks_of(axes.schedule, axes.chunks or None)
    found = stages.probe(model, setup.blocks, loss, setup.sample)
    if chunks > 1 and found.counted:
        raise UsageError(
            f"pipeline: the forward changes '{found.counted[0]}', and with {chunks} stages on a "
            "rank it runs more often than in one process; use a schedule with one, such as 1f1b"
        )
    ends = stages.ends_of(found, model, ranks * chunks, axes.balance)
    message = torch.tensor(ends, device=next(model.parameters()).device)
    # Times differ: the first rank of all decides, also for those of other pipelines.
    comm.broadcast(message, refusals.dp_group(setup.mesh), label="stages")
    ends = message.tolist()
    where = [schedules.rank_of(stage, ranks, axes.schedule) for stage in range(len(ends))]
    holders = stages.holders_of(found, model, ends)
    buffers = stages.buffers_of(found, model, ends)
    _refuse_idle_ranks(model, holders, where, ranks)
    held = {n for n, on in (holders | buffers).items() if any(where[s] == group.rank() for s in on)}
    writes = {n: on[0] for n, on in buffers.items() if n in found.changed}
    tensors = (*model.named_parameters(), *model.named_buffers())
    kept = {name: layout.whole(t) for name, t in tensors if name in held}
    inside = {n for n in writes if any(n.startswith(f"{b}.") for b in found.blocks)}
    cells = {n: _cell(model, n) for n in writes}
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, on in holders.items():
        among = tuple(sorted({where[s] for s in on}))
        if group.rank() in among and len(among) > 1:
            shared.setdefault(among, []).append(name)
    stages.drop(model, held, cells.keys() - inside)
    pipeline = (executor or Pipeline)(
        model, loss, group, axes.schedule, chunks, Track(found, ends, message.device)
    )
    pipeline.share(shared)
    pipeline.written = {
        stage: [cells[n] for n in writes if n in inside and writes[n] == stage]
        for stage in range(len(ends))
    }
    pipeline.outside = [(*cells[n], where[writes[n]]) for n in writes if n not in inside]
    ask = functools.partial(setattr, pipeline, "divisor")
    return Cut(kept, pipeline.loss, infer=pipeline.infer, ask_divisor=ask, executor=pipeline)


def _refuse_idle_ranks(
    model: nn.Module, holders: dict[str, list[int]], where: Sequence[int], ranks: int
) -> None:
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    busy = {where[stage] for name in trained for stage in holders[name]}
    for rank in range(ranks):
        if rank not in busy:
            mine = [str(stage) for stage, on in enumerate(where) if on == rank]
            raise UsageError(
                f"pipeline: no parameter of stage {' and '.join(mine)} trains, so its rank would "
                "have nothing to update; use fewer ranks, or train more of the model"
            )


def _cell(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


# ------------------------------------------------------------------ the executor


@dataclass
class Live:
    """What is kept of one micro-batch on one stage, from its forward on."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Plan:
    """What this rank does in a step of so many micro-batches."""

    actions: list[Action]
    # For each message that is received from a rank: those of ours that it has surely received.
    received: dict[Key, list[Key]] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What the model is called with to run a whole step."""

    batches: Sequence[Batch]


class Pipeline(Messages):
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
        track: Track,
    ) -> None:
        where = [schedules.rank_of(s, group.size(), schedule) for s in range(len(track.ends))]
        super().__init__(group, where, track.device)
        self.model, self.loss_fn, self.track = model, loss, track
        self.schedule, self.chunks = schedule, chunks
        self.divisor: Callable[[], Tensor | None] = lambda: None  # what the loss is divided by
        self.is_running = False
        self.deferred = Deferred()
        # The buffers that the blocks of a stage write; and those that code outside the blocks
        # writes, each with the rank whose values count.
        self.written: dict[int, list[tuple[nn.Module, str]]] = {}
        self.outside: list[tuple[nn.Module, str, int]] = []
        self.shared: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        self.own_hooks: dict[nn.Parameter, dict[int, Any]] = {}
        self.plans: dict[int, Plan] = {}
        self.known: dict[tuple[int, Signature], list[list[Shape]]] = {}  # by the receiving stage
        self.peak_live = 0  # micro-batches whose activations were kept at a time, in the last step
        self._clear()
        for p in model.parameters():
            if p._backward_hooks:  # the model's own: they see each micro-batch's gradient
                self.own_hooks[p] = dict(p._backward_hooks)
                p._backward_hooks.clear()
        track.attach(model)
        if self.PUTS_OFF and any(a.kind == "W" for a in self.lists(1)[self.rank]):
            self.deferred.attach(model)
        stages.intercept(model, self._call)

    def _clear(self) -> None:
        self._clear_messages()
        self.live: dict[tuple[int, int], Live] = {}
        self.put_off: dict[tuple[int, int], list[Any]] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.seen: dict[int, list[Tensor]] = {}  # the buffers before a micro-batch's forward

    def share(self, among: dict[tuple[int, ...], list[str]]) -> None:
        """Parameters that several ranks hold, by the places of those in the group."""
        params = dict(self.model.named_parameters())
        for places, held in sorted(among.items()):
            trained = [params[name] for name in held if params[name].requires_grad]
            if trained:
                self.shared.append((places, trained))

    # ------------------------------------------------------------ what the strategy calls

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed loss of all micro-batches; its backward gives the parameters' gradients."""
        value: Tensor = model(Job(batch.inputs))
        return value

    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)``: each call of the model passes through all stages, and every
        rank gets what it returns."""
        return function(self.model, batch)

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_running:
            return original(*args, **kwargs)
        if args and isinstance(args[0], Job):
            return self._step(args[0].batches)
        if torch.is_grad_enabled():
            raise UsageError("pipeline: the model is run outside of gradients() and infer()")
        return self._relay(lambda: original(*args, **kwargs), _signature((args, kwargs)))

    def _step(self, batches: Sequence[Batch]) -> Tensor:
        total = self.run(batches)
        params = [p for p in self.model.parameters() if p in self.gradients]
        anchor = torch.zeros((), device=self.device, requires_grad=True)  # if there are none
        out: Tensor = _HandOut.apply(self, total, anchor, *params)  # type: ignore[no-untyped-call]
        return out

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
        signatures = [_signature((b.inputs, b.targets)) for b in batches]
        self._agree_on_buffers()
        with _recorded("pipeline"):
            with self._in_private(), torch.enable_grad():
                total = self._carry_out(batches, signatures)
                self.gradients = {p: p.grad for p in self.model.parameters() if p.grad is not None}
            self.seen.clear()
            self._sum_shared()
            comm.all_reduce(total, self.group, label="loss of the last stage")
        return total

    def _carry_out(self, batches: Sequence[Batch], signatures: Sequence[Signature]) -> Tensor:
        """This rank's actions. Returns the sum of the losses that it has computed: ()."""
        plan = self._plan(len(batches))
        self.acknowledged = plan.received
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, action in enumerate(plan.actions):
            self._look_ahead(plan.actions[i:], signatures)
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
        signature = signatures[micro]
        shapes: list[list[Shape]] = []
        received: list[Tensor] = []
        if stage:
            shapes = self._shapes(stage, micro, signature)
            received = self._take((ACTIVATION, stage, micro), shapes[-1])
            received = [
                t.detach().requires_grad_(has_gradient)
                for t, (_, _, has_gradient) in zip(received, shapes[-1], strict=True)
            ]
        forward = functools.partial(self.loss_fn, self.model, batch)
        with span(action):
            value = self._run_stage(stage, micro, forward, shapes, received)
        if stage == self.stages - 1:
            self.live[stage, micro] = Live(received, [value])
            found: Tensor = value.detach().double()
            return found
        outputs = self.track.result
        self.track.result = []
        self.live[stage, micro] = Live(received, outputs)
        self._announce(stage, micro, signature)
        self._give((ACTIVATION, stage + 1, micro), outputs)
        return 0.0

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        kept = self.live.pop((stage, micro))
        ends = [t for t in kept.outputs if t.requires_grad]
        if stage == self.stages - 1:
            if not ends:
                raise UsageError(
                    "the loss of a micro-batch depends on no parameter that requires a gradient; "
                    "one process could not train on it either"
                )
            gradients = [self.seed.to(t.dtype).expand_as(t) for t in ends]
        else:
            shapes: list[Shape] = [(tuple(t.shape), t.dtype, False) for t in ends]
            gradients = self._take((GRADIENT, stage, micro), shapes) if ends else []
        self.deferred.into = [] if kind == "I" else None
        if ends:
            with span(action):
                torch.autograd.backward(ends, gradients)
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

    def _run_stage(
        self,
        stage: int,
        micro: int,
        forward: Callable[[], Any],
        shapes: list[list[Shape]],
        received: list[Tensor],
    ) -> Any:
        """Each forward writes to copies of the buffers: other micro-batches' forwards come before
        its backward, which may need what it has seen.

        Code outside the blocks runs on every stage. A rank's first stage keeps what it wrote, and
        the others see for each micro-batch what that one saw.
        """
        cells = [*self.written.get(stage, ()), *((m, key) for m, key, _ in self.outside)]
        kept = [(module, key, getattr(module, key)) for module, key in cells]
        inside = len(kept) - len(self.outside)
        is_first = stage == self.where.index(self.rank)
        if is_first and self.outside:
            self.seen[micro] = [buffer.clone() for _, _, buffer in kept[inside:]]
        seen = [buffer for _, _, buffer in kept[:inside]] + self.seen.get(micro, [])
        for (module, key, _), buffer in zip(kept, seen, strict=True):
            setattr(module, key, buffer.clone())
        self.is_running = True
        try:
            return self.track.run(stage, forward, shapes, received)
        finally:
            self.is_running = False
            for place, (module, key, buffer) in enumerate(kept):
                if place < inside or is_first:
                    buffer.copy_(getattr(module, key).detach())
                setattr(module, key, buffer)

    def _agree_on_buffers(self) -> None:
        """Those that code outside the blocks writes are right on one rank, and may be NaN on
        others. A rank that needs them begins each step with the right ones."""
        for module, key, owner in self.outside:
            buffer = getattr(module, key)
            if self.rank != owner:
                buffer.zero_()
            comm.all_reduce(buffer, self.group, label=f"buffer {key}")

    @contextmanager
    def _in_private(self) -> Iterator[None]:
        """Inside, gradients are added up where the strategy does not see it: its hooks are for what
        is handed out. Hooks of the model's own see each micro-batch, as in one process."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        before: list[tuple[nn.Parameter, Tensor | None, list[tuple[Any, list[Any]]]]] = []
        for p in params:
            hooks: list[Any] = [
                h for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h is not None
            ]
            before.append((p, p.grad, [(h, list(h.items())) for h in hooks]))
            for h in hooks:
                h.clear()
            p.grad = None
            if p in self.own_hooks and p._backward_hooks is not None:
                p._backward_hooks.update(self.own_hooks[p])
        try:
            yield
        finally:
            for p, gradient, kept in before:
                p.grad = gradient
                for hook, items in kept:
                    hook.clear()
                    hook.update(items)

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

    def _plan(self, micro: int) -> Plan:
        if micro in self.plans:
            return self.plans[micro]
        lists = self.lists(micro)
        plan = Plan(lists[self.rank])
        for other, actions in enumerate(lists):
            taken: list[Key] = []
            for action in actions if other != self.rank else ():
                of = schedules.source(action, self.stages)
                if of is not None and self.where[of] == self.rank:
                    taken.append((_lane(action), action.stage, action.micro))
                to = schedules.target(action, self.stages)
                if to is not None and self.where[to] == self.rank:
                    plan.received[_lane(action), to, action.micro] = taken
                    taken = []
        self.plans[micro] = plan
        return plan

    def _look_ahead(self, actions: Sequence[Action], signatures: Sequence[Signature]) -> None:
        begun = 0
        for action in actions[: 3 * AHEAD]:
            kind, stage, micro = action
            of = schedules.source(action, self.stages)
            if of is None or self.where[of] == self.rank:
                continue
            if kind == "F":
                shapes = self.known.get((stage, signatures[micro]))
                if shapes is None:
                    return
                self._begin((ACTIVATION, stage, micro), shapes[-1])
            elif (stage, micro) in self.live:
                ends = [t for t in self.live[stage, micro].outputs if t.requires_grad]
                self._begin(
                    (GRADIENT, stage, micro), [(tuple(t.shape), t.dtype, False) for t in ends]
                )
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
            if self.known[key] != self.track.shapes:
                block = self.track.blocks[self.track.ends[stage]]
                raise UsageError(
                    f"pipeline: the output of '{block}' has another shape than it had for a "
                    "micro-batch of this one's shape, or needs a gradient where it did not; the "
                    "next stage could not know what it receives"
                )
            return
        self.known[key] = self.track.shapes
        to = self.where[stage + 1]
        if to != self.rank:
            message = (ACTIVATION, stage + 1, micro)
            data = torch.frombuffer(bytearray(pickle.dumps(self.track.shapes)), dtype=torch.uint8)
            size = torch.tensor([data.numel()], device=self.device)
            what = f"shapes of micro-batch {micro} from stage {stage}"
            self.going[message] = [
                self._send(message, to, size, PARTS - 2, what),
                self._send(message, to, data.to(self.device), PARTS - 1, what),
            ]

    def _shapes(self, stage: int, micro: int, signature: Signature) -> list[list[Shape]]:
        key = stage, signature
        if key not in self.known:
            message, of = (ACTIVATION, stage, micro), self.where[stage - 1]
            what = f"shapes of micro-batch {micro} from stage {stage - 1}"
            size = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._receive(message, of, size, PARTS - 2, what)[1].wait()
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            self._receive(message, of, data, PARTS - 1, what)[1].wait()
            self.known[key] = pickle.loads(data.cpu().numpy().tobytes())
        return self.known[key]

    # ------------------------------------------------------------ without gradients

    def _relay(self, forward: Callable[[], Any], signature: Signature) -> Any:
        """One call of the model, stage after stage. Every rank returns what it returns."""
        self._clear()
        self._agree_on_buffers()
        signature = ("relay", *signature)
        value: Any = None
        for stage in range(self.stages):
            if self.where[stage] != self.rank:
                continue
            shapes: list[list[Shape]] = []
            received: list[Tensor] = []
            if stage:
                shapes = self._shapes(stage, 0, signature)
                received = self._take((ACTIVATION, stage, 0), shapes[-1])
            value = self._run_stage(stage, 0, forward, shapes, received)
            if stage < self.stages - 1:
                outputs, self.track.result = self.track.result, []
                self._announce(stage, 0, signature)
                self._give((ACTIVATION, stage + 1, 0), outputs)
        self._finish_sending()
        return self._tell(value)


class _HandOut(torch.autograd.Function):
    """The loss of a step, whose backward gives the gradients that were added up already."""

    @staticmethod
    def forward(ctx: Any, pipeline: Pipeline, loss: Tensor, _: Tensor, *params: Tensor) -> Tensor:
        kept: dict[Any, Tensor] = pipeline.gradients
        ctx.gradients = [kept.pop(p) for p in params]
        ctx.seed = pipeline.seed
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
    return _recorded(f"{NAMES[action.kind]} {action.micro}, stage {action.stage}")


def _recorded(name: str) -> AbstractContextManager[Any]:
    if not torch.autograd._profiler_enabled():  # a span takes microseconds, the question none
        return nullcontext()
    return torch.profiler.record_function(f"shardlab::{name}")


def _signature(value: Any) -> Signature:
    """What decides the shapes of all that a model makes of a batch."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors_of(value))
