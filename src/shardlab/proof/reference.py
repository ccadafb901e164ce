"""What one plain process makes of a subject, and how far from it another order of summation ends.

The loop knows nothing of shardlab's strategies: it sees every rank's micro-batches one after
another, and clips, schedules and updates in PyTorch's own words. Of a strategy whose ranks take
steps of their own it plays the workers one after another. It is run twice. The second run
(the *twin*) scales its losses and adds its micro-batches up in another order, which is all that a
right strategy may do differently. What the two disagree in is rounding, measured where it arises:
a bias before a normalisation has a true gradient of zero, and all of what is computed is rounding.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import world as worlds
from shardlab.batch import tensors_of
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.plan.claims import Job, Parameter
from shardlab.proof.chance import Place, Seeded, put_back, untrained
from shardlab.proof.judge import DECIDES
from shardlab.proof.subjects import Subject, sample
from shardlab.strategies.base import Rounds
from shardlab.strategies.local.rounds import cut, due
from shardlab.training import builders
from shardlab.workloads.base import cast_model

Gradients = dict[str, Tensor | None]

TWIN = 0.9  # the twin's scale of the loss: not a power of two, so that every rounding is another
# More than the coarsest arithmetic inside a model (bf16) makes of another order. What differs more
# would hide any mistake.
UNJUDGEABLE = 0.03
# How much more than the twin a right strategy may differ: both are samples of the same noise, and
# of a tensor with a single element the twin's may happen to be small.
MARGIN = 64.0
# How many units of last place of its own dtype a loss may be away.
ROUNDINGS = 16.0
# A tensor that is smaller than this part of the largest is measured by this part: its values come
# from sums of larger ones, whose rounding they carry.
FLOOR = 2.0**-20
SMALLEST = math.ulp(0.0)


@dataclass(frozen=True)
class Scale:
    """How errors are measured in a precision: in units of last place of a tensor's largest value.

    The tolerance is far above another order of summation, which moves a gradient by tens, and far
    below a mistake: a factor of 1.001 is 4e12 units in float64 and 8e3 in float32.
    """

    eps: float
    tolerance: float

    def unit(self, size: float) -> float:
        """The unit of last place of a number of this size."""
        return max(self.eps * 2.0 ** (math.frexp(size)[1] - 1), SMALLEST)


SCALES = {
    torch.float64: Scale(2.0**-52, 2.0**26),
    torch.float32: Scale(2.0**-23, 2.0**9),
}


@dataclass
class Reference:
    """What one process did: its tensors at the start, then of each step.

    Gradients are in the order in which backward makes them. ``units`` says of each tensor what its
    errors are measured in: a number, or one for each of its elements.
    """

    start: dict[str, Tensor]
    scale: Scale
    losses: list[Tensor] = field(default_factory=list)
    loss_eps: list[float] = field(default_factory=list)  # a unit of last place of the loss's dtype
    gradients: list[Gradients] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    parts: list[list[dict[str, Tensor]]] = field(default_factory=list)  # [step][rank, micro]
    units: list[dict[tuple[str, str], Tensor]] = field(default_factory=list)  # [step][kind, name]
    noise: float = 0.0  # the twin's largest error, as a part of the gradient's largest value
    # What passes unseen, by kind: the tolerances of all tensors together, as a part of them.
    within: dict[str, float] = field(default_factory=dict)
    runs_again: bool = False  # a block runs more than once in a micro-batch
    # The micro-batches that ran a block, and those whose backward came to it.
    forward: dict[str, set[Place]] = field(default_factory=dict)
    backward: dict[str, set[Place]] = field(default_factory=dict)
    # What was updated by, [step][worker], and each worker's count; without rounds there is one.
    own: list[list[Gradients]] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)

    def unit(self, step: int | None, kind: str, name: str) -> Tensor:
        """What the errors of a tensor are measured in."""
        if step is None:  # before the first step nothing has been rounded
            tensor = self.start.get(name)
            return _unit(self.scale.unit(0.0 if tensor is None else largest(tensor)))
        return self.units[step].get((kind, name), _unit(self.scale.unit(0.0)))

    @property
    def irregular(self) -> set[str]:
        """What has no gradient in some micro-batch of the first step, on some rank, or in all."""
        names = set(self.gradients[0])
        return {n for part in self.parts[0] for n in names if n not in part}

    def used(self, job: Job, stateful: bool) -> Job:
        """What the formulas need to know of the first step, less what was not used in it: that need
        not be sent, nor have optimizer state yet. A ``stateful`` model may leave out other
        parts later: of it, less what was not used in any of the steps."""
        ranks = len(self.counts[0])
        micro = len(self.parts[0]) // ranks
        steps = range(len(self.parts) if stateful else 1)
        places = [Place(*at) for at in product(steps, range(ranks), range(micro))]
        arrived: dict[str, set[Place]] = {}
        for place in places:
            for name in self.parts[place.step][place.rank * micro + place.micro]:
                arrived.setdefault(name, set()).add(place)

        def share(seen: Collection[Place]) -> float:
            """Of the micro-batches, in which some rank has."""
            turns = {(place.step, place.micro) for place in seen}
            return min(sum((step, m) in turns for m in range(micro)) for step in steps) / micro

        def of(p: Parameter) -> Parameter:
            arrives = share(arrived.get(p.name, ()))
            return replace(
                p,
                trains=p.trains and arrives > 0,
                state=0.0 if p.name in self.irregular else p.state,
                forward=share(self.forward.get(p.block, ())) if p.block else 1.0,
                backward=share(self.backward.get(p.block, ())) if p.block else 1.0,
                arrives=arrives,
            )

        blocks = {p.block for p in job.params if p.block}
        leaves_out = any(not self.forward.get(b, set()).issuperset(places) for b in blocks)
        return replace(job, params=tuple(map(of, job.params)), leaves_out=leaves_out)

    @property
    def is_irregular(self) -> bool:
        """Something is used more than once in a micro-batch, or not in all, in any step."""
        names = set(self.gradients[0])
        return self.runs_again or any(names - part.keys() for step in self.parts for part in step)


def refer(subject: Subject, config: Config, rounds: Rounds | None = None) -> Reference:
    """One process, with the units that a strategy's errors are to be measured in."""
    calls: Counter[str] = Counter()  # of each block
    forward: defaultdict[str, set[Place]] = defaultdict(set)
    backward: defaultdict[str, set[Place]] = defaultdict(set)
    loss = subject.workload.loss
    assert isinstance(loss, Seeded)

    def here() -> Place:
        assert loss.current is not None
        return loss.current

    def entered(name: str) -> None:
        calls[name] += 1
        forward[name].add(here())

    def left(name: str, given: Any, output: Any) -> None:
        its_own = {id(t) for t in tensors_of(given)}  # a block that is skipped returns its input
        for tensor in tensors_of(output):
            if tensor.requires_grad and id(tensor) not in its_own:
                tensor.register_hook(lambda _: backward[name].add(here()))

    def watch(model: nn.Module) -> None:
        for name in subject.workload.blocks_of(model):
            block = model.get_submodule(name)
            block.register_forward_pre_hook(lambda _m, _i, name=name: entered(name))
            block.register_forward_hook(lambda _m, i, output, name=name: left(name, i, output))

    reference = run(subject, config, attach=watch, rounds=rounds)
    reference.forward, reference.backward = forward, backward
    micro_batches = sum(len(share) for shares in subject.steps for share in shares)
    reference.runs_again = max(calls.values(), default=0) > micro_batches
    twin = run(subject, config, scale=TWIN, backwards=True, rounds=rounds)
    measure(reference, twin, subject, config, rounds)
    return reference


def build(subject: Subject) -> nn.Module:
    """The subject's model as every run of it begins."""
    worlds.seed(subject.seed)
    return cast_model(subject.workload.make_model(), subject.device, subject.dtype)


class Update:
    """The update of a plain loop, from the same config that every strategy's is made of."""

    def __init__(self, model: nn.Module, subject: Subject, config: Config) -> None:
        self.training = config.training
        self.model = model
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        make = builders.make_optimizer(self.training, subject.workload, model)
        self.optimizer = make(self.trained)
        self.factor = builders.make_schedule(self.training, subject.workload)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def __call__(self, step: int, gradients: Gradients) -> None:
        for name, p in self.trained.items():
            gradient = gradients[name]
            p.grad = None if gradient is None else gradient.clone()  # clipping is in place
        training = self.training
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained.values(), training.clip_norm)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.factor(step)
        self.optimizer.step()
        self.model.zero_grad()  # of all, also those that the optimizer leaves out


class Workers:
    """The models that one process updates: each worker's, or without rounds the only one."""

    def __init__(
        self, models: Sequence[nn.Module], subject: Subject, config: Config, rounds: Rounds | None
    ) -> None:
        self.models = models
        self.updates = [Update(model, subject, config) for model in models]
        self.rounds = rounds
        if rounds is None:
            return
        start = copies_of(self.updates[0].trained)
        self.anchor = {name: nn.Parameter(tensor) for name, tensor in start.items()}
        self.fragments = cut(rounds, start)
        self.seen = [[0] * len(models) for _ in self.fragments]  # targets, since it was sent
        self.fresh = set(start)  # what all workers hold alike
        self.outer = {
            name: torch.optim.SGD(
                [p], rounds.outer_lr, rounds.outer_momentum, nesterov=rounds.outer_momentum > 0
            )
            for name, p in self.anchor.items()
        }

    def __call__(self, step: int, gradients: Sequence[Gradients], counts: Sequence[int]) -> None:
        for update, own in zip(self.updates, gradients, strict=True):
            update(step, own)
        if self.rounds is not None:
            self.fresh.clear()
            for seen in self.seen:
                seen[:] = [n + count for n, count in zip(seen, counts, strict=True)]
            self._exchange(self.rounds, step + 1)

    @torch.no_grad()
    def _exchange(self, rounds: Rounds, done: int) -> None:
        """What is due after ``done`` steps: fragments are sent, or arrive."""
        for number, names in enumerate(self.fragments):
            due_at = due(rounds, number)
            sent_at = done - rounds.delay  # what was sent then arrives now
            if (done - due_at) % rounds.every == 0:
                average = self.average()
                for name in names:
                    self.anchor[name].grad = self.anchor[name] - average[name]
                self.seen[number] = [0] * len(self.models)
            if sent_at > 0 and (sent_at - due_at) % rounds.every == 0:
                for name in names:
                    self.outer[name].step()
                    for update in self.updates:
                        p, anchor = update.trained[name], self.anchor[name]
                        p.copy_(rounds.mix * p + (1 - rounds.mix) * anchor)
                if rounds.delay == 0:
                    self.fresh.update(names)
        if done % rounds.every == 0:
            buffers = copies_of(dict(self.models[0].named_buffers()))
            for model in self.models:
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])

    @torch.no_grad()
    def average(self) -> dict[str, Tensor]:
        """The workers' parameters, each by the targets that it has seen, and worker 0's buffers."""
        tensors = copies_of(named_tensors(self.models[0]))
        if self.rounds is None:
            return tensors
        for seen, names in zip(self.seen, self.fragments, strict=True):
            weights = seen if any(seen) else [1] * len(self.models)
            for name in set(names) - self.fresh:
                parts = [w * u.trained[name] for w, u in zip(weights, self.updates, strict=True)]
                tensors[name] = torch.stack(parts).sum(0) / sum(weights)
        return tensors


def run(
    subject: Subject,
    config: Config,
    scale: float = 1.0,
    backwards: bool = False,
    steps: int | None = None,
    attach: Callable[[nn.Module], None] = lambda _model: None,
    rounds: Rounds | None = None,
) -> Reference:
    """A plain loop over every rank's micro-batches. Buffers follow rank 0's, as in DDP.

    ``backwards``: gradients are added up from the last micro-batch to the first. ``attach`` may
    hang hooks on the model, or on each of them. With ``rounds`` each rank is a worker with a model
    of its own, whose loss is divided by its own count.
    """
    # A model that remembers what it has seen has seen, on a rank, that rank's samples alone.
    ranks = len(subject.steps[0])
    model = build(subject)
    is_apart = subject.stateful or rounds is not None
    models = [build(subject) if is_apart and r else model for r in range(ranks)]
    for each in dict.fromkeys(models):
        attach(each)
    workers = Workers([model] if rounds is None else models, subject, config, rounds)
    trained = workers.updates[0].trained
    result = Reference(copies_of(named_tensors(model)), SCALES[subject.dtype])
    order: list[str] = []  # in which backward makes the gradients
    for name, p in trained.items():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for step, shares in enumerate(subject.steps[:steps]):
        counts = [sum(batch.count for batch in share) for share in shares]
        count = max(1, sum(counts))
        start = after = copies_of(untrained(model))
        losses, eps, parts, of_worker = [], 0.0, [], []
        for rank, share in enumerate(shares):
            own, divisor = models[rank], count if rounds is None else max(1, counts[rank])
            if rounds is None:
                if own is not model:
                    with torch.no_grad():
                        for theirs, p in zip(own.parameters(), model.parameters(), strict=True):
                            theirs.copy_(p)
                put_back(own, start)
            mine = []
            for batch in share:
                loss = subject.workload.loss(own, batch)
                (loss / (divisor / scale)).backward()
                losses.append(loss.detach().double())
                eps += torch.finfo(loss.dtype).eps * abs(float(losses[-1]))
                mine.append(_take_gradients(own, scale))
            added = _add_up(mine[::-1] if backwards else mine)
            of_worker.append({name: added.get(name) for name in trained})
            parts += mine
            if rounds is not None:  # as parts of the mean over the global batch
                part_of_all = divisor / count
                parts[-len(mine) :] = [{n: g * part_of_all for n, g in m.items()} for m in mine]
            if rank == 0:
                after = copies_of(untrained(own))
        if rounds is None:
            put_back(model, after)
        if backwards:
            losses.reverse()
        whole = _add_up(parts[::-1] if backwards else parts)
        gradients: Gradients = {n: whole.get(n) for n in dict.fromkeys([*order, *trained])}
        result.losses.append(torch.as_tensor(sum(losses) / count))
        result.loss_eps.append(eps / count)
        _refuse_nonfinite(subject.workload.name, step, result.losses[-1], gradients)
        result.gradients.append(gradients)
        result.parts.append([{n: sample(g) for n, g in part.items()} for part in parts])
        result.own.append([gradients] if rounds is None else of_worker)
        result.counts.append(counts)
        workers(step, result.own[-1], counts)
        result.tensors.append(workers.average())
    return result


def _take_gradients(model: nn.Module, scale: float) -> dict[str, Tensor]:
    """A micro-batch's gradients; the model has none afterwards."""
    taken = {}
    for name, p in model.named_parameters():
        if p.grad is not None and p.requires_grad:
            taken[name] = p.grad / scale if scale != 1 else p.grad
        p.grad = None
    return taken


def _add_up(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


def _refuse_nonfinite(model: str, step: int, loss: Tensor, gradients: Gradients) -> None:
    bad = next((n for n, g in gradients.items() if g is not None and not g.isfinite().all()), None)
    if not loss.isfinite() or bad is not None:
        what = "loss" if bad is None else f"gradient of '{bad}'"
        raise UsageError(
            f"one process by itself has a {what} that is not finite in step {step} of {model}: "
            "there is nothing to compare with"
        )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# ------------------------------------------------------------------ what is rounding


def measure(
    reference: Reference,
    twin: Reference,
    subject: Subject,
    config: Config,
    rounds: Rounds | None = None,
) -> None:
    """The units of every tensor, from what the twin found.

    A parameter's error comes from a gradient's, through the update: Adam divides by the gradient's
    own size and makes much of little. So the update is made twice more, from gradients that lie as
    far to either side as rounding may move them; where that takes a parameter is no mistake.
    """
    scale = reference.scale
    noise: dict[str, float] = {}  # of each gradient, in any step so far
    rounding: list[dict[str, float]] = []  # how far each gradient may be moved, [step]
    for gradients, others in zip(reference.gradients, twin.gradients, strict=True):
        sizes = {n: largest(g) for n, g in gradients.items() if g is not None}
        top = max(sizes.values(), default=0.0)
        units, moved = {}, {}
        for name, size in sizes.items():
            mine, other = gradients[name], others[name]
            assert mine is not None
            assert other is not None
            noise[name] = max(noise.get(name, 0.0), largest(mine - other))
            if size > 2.0**-10 * top:  # smaller ones are the remains of what cancels
                reference.noise = max(reference.noise, noise[name] / size)
            floor = scale.unit(max(size, FLOOR * top))
            units["gradient", name] = _unit(floor, MARGIN * noise[name] / scale.tolerance)
            moved[name] = MARGIN * noise[name] + scale.eps * (256 * size + 64 * top)
        if not rounding and reference.noise > UNJUDGEABLE:
            raise UsageError(
                f"nothing can be proved on {subject.workload.name}: in one process its gradients "
                f"differ by {reference.noise:.0e} of themselves when the loss is scaled, or added "
                "up in another order (a hook on a gradient that is not linear?)"
            )
        reference.units.append(units)
        rounding.append(moved)
    lower, upper = (_moved(reference, rounding, sign, subject, config, rounds) for sign in (-1, 1))
    for step, tensors in enumerate(reference.tensors):
        sizes = {n: largest(t) for n, t in tensors.items() if t.is_floating_point()}
        top = max(sizes.values(), default=0.0)
        # A mask in a buffer may hold the largest number there is: it says nothing of parameters.
        top_trained = max((size for n, size in sizes.items() if n in lower[step]), default=0.0)
        for name, tensor in tensors.items():
            small = FLOOR * (top_trained if name in lower[step] else top)
            floor = scale.unit(max(largest(tensor), small))
            ways = [reached[step][name] for reached in (lower, upper) if name in reached[step]]
            if ways:
                spread = torch.stack([wide(way - tensor).abs() for way in ways]).amax(0)
                unit = floor + 2 * spread / scale.tolerance
            else:
                away = largest(wide(tensor) - wide(twin.tensors[step][name]))
                unit = _unit(floor, MARGIN * away / scale.tolerance)
            reference.units[step]["parameter", name] = unit
        loss, other = reference.losses[step], twin.losses[step]
        # A loss that the model itself computes in float32 is rounded there, whatever comes before:
        # the twin adds the same numbers up, but ranks that cut a sequence round each part's.
        away = max(MARGIN * abs(float(loss - other)), ROUNDINGS * reference.loss_eps[step])
        unit = _unit(scale.unit(abs(float(loss))), away / scale.tolerance)
        reference.units[step]["loss", ""] = unit
    reference.within = _within(reference)
    if min(reference.within.values()) >= DECIDES:
        raise UsageError(
            f"nothing can be proved on {subject.workload.name}: it rounds so much that a loss off "
            f"by {reference.within['loss']:.0%} of itself would pass, and any gradient"
        )


def _within(reference: Reference) -> dict[str, float]:
    """How far losses and gradients may be off, as a part of them; and the parameters after the last
    step, as a part of what training has done to them."""
    last = len(reference.tensors) - 1
    after, start = reference.tensors[last], reference.start
    kinds = {
        "loss": [(s, "", loss) for s, loss in enumerate(reference.losses)],
        "gradient": [
            (s, name, g)
            for s, gradients in enumerate(reference.gradients)
            for name, g in gradients.items()
            if g is not None
        ],
        "parameter": [(last, n, wide(after[n]) - wide(start[n])) for n in reference.gradients[0]],
    }
    within = {}
    for kind, tensors in kinds.items():
        units = [reference.unit(step, kind, name).square().mean() for step, name, _ in tensors]
        allowed = sum(float(u) * t.numel() for u, (*_, t) in zip(units, tensors, strict=True))
        size = sum(float(wide(tensor).abs().square().sum()) for *_, tensor in tensors)
        part = math.sqrt(allowed / size) if size else math.inf
        within[kind] = reference.scale.tolerance * part
    return within


def _moved(
    reference: Reference,
    rounding: list[dict[str, float]],
    sign: int,
    subject: Subject,
    config: Config,
    rounds: Rounds | None,
) -> list[Mapping[str, Tensor]]:
    """The trained parameters of each step, had every gradient been moved by its rounding."""
    models = [build(subject) for _ in reference.own[0]]
    workers = Workers(models, subject, config, rounds)
    reached: list[Mapping[str, Tensor]] = []
    for step, (of_worker, counts) in enumerate(zip(reference.own, reference.counts, strict=True)):
        moved = []
        for gradients, count in zip(of_worker, counts, strict=False):
            # A worker divides by its own count, and its rounding is larger by as much.
            times = sign if rounds is None else sign * sum(counts) / max(1, count)
            known = {n: g for n, g in gradients.items() if g is not None}
            shifted = {n: g + times * rounding[step][n] for n, g in known.items()}
            moved.append({**gradients, **shifted})
        workers(step, moved, counts)
        average = workers.average()
        reached.append({name: average[name] for name in workers.updates[0].trained})
    return reached


def _unit(*candidates: float) -> Tensor:
    return torch.tensor(max(candidates), dtype=torch.float64)


def wide(tensor: Tensor) -> Tensor:
    """Convert to double precision, in which errors are computed."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest(tensor: Tensor) -> float:
    """The largest finite value, without its sign: a mask may be of booleans, or infinite."""
    sizes = wide(tensor.detach()).abs().nan_to_num(0.0, 0.0)
    return float(sizes.max()) if tensor.numel() else 0.0
