"""What a strategy does, measured on the ranks. Nothing is judged here: see ``judge``.

Ranks start from different weights, so that a missing broadcast shows, and everything is run
twice. What is sent comes from the ledger; where more was launched than the ledger has (by DDP, by
FSDP between replicas, or by a strategy that does not use ``comm``), from the profiler.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardlab import axes, pulse, wire
from shardlab import world as worlds
from shardlab.config import Config
from shardlab.errors import UsageError, unknown
from shardlab.guard import sequence, watchdog
from shardlab.launch.rank_set import on_its_ranks
from shardlab.ledger import LEDGER, members
from shardlab.plan import claims
from shardlab.proof import TIMEOUT_S, chance, locate, subjects, watch
from shardlab.proof import reference as plain
from shardlab.proof.difference import ComparedRun
from shardlab.proof.reference import Reference
from shardlab.proof.subjects import Subject
from shardlab.proof.watch import Message
from shardlab.strategies.base import Rounds, Strategy
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.local.rounds import shortest
from shardlab.strategies.local.workers import Workers
from shardlab.strategies.pipeline import schedule_analysis
from shardlab.strategies.pipeline.executor import Executor
from shardlab.trace.intervals import union
from shardlab.training import builders
from shardlab.wire import wire_bytes
from shardlab.workloads.base import Batch
from shardlab.world import World

WATCHED = -1  # the ledger's number for the steps that are watched
MOST_STEPS = 65
SETTLE_S = 5.0
GRADIENT_OPS = ("all_reduce", "reduce_scatter", "all_to_all", "reduce")
Work = Callable[[], Any]


@dataclass
class ReferenceRun:
    """A model of the proof with what one process made of it, the same for every strategy."""

    subject: Subject
    reference: Reference
    outside: watch.Held  # what the plain model itself keeps, beyond parameters and buffers
    rounds: Rounds | None = None  # the process played workers that exchange so


# "stack", "even stack" and "users", by the rounds that were played: of which config, and it.
_prepared: dict[tuple[str, Rounds | None], tuple[str, ReferenceRun]] = {}


@on_its_ranks
def prepare(world: World, config: Config) -> None:
    """Run the models in one process: what is wrong with them is not the fault of a strategy."""
    _prepare("users", world, config)


@on_its_ranks
def examine(world: World, config: Config) -> dict[str, Any]:
    """Everything that is measured of one strategy on this rank, as plain values."""
    config, rounds = _telling(config, world)
    mesh, _ = builders.axes_of(config, world)
    users = _prepare("users", world, config, rounds)
    # The stack has nothing that the tensor and context axes could cut.
    has_stack = mesh is None or mesh.tensor == mesh.context == 1
    make = builders.resolve_strategy(config)
    is_even = issubclass(make, CutModel) and make.ONE_SHAPE
    which = "even stack" if is_even else "stack"
    claim = claim_of(config)
    alive, on_stack = watch.Alive(), {}
    with _watching(config, world):
        on_users = _examine_users(users, _in_dtype(config, users), world, claim, alive)
    if has_stack:  # afterwards: it is the user's model that was asked about
        stack = _prepare(which, world, config, rounds)
        with _watching(config, world):
            on_stack = _examine_stack(stack, config, world, claim)
    models = [found.pop("model") for found in (on_stack, on_users) if found]
    return {
        "ranks": world.size,
        **on_users,
        **on_stack,
        "models": models,
        "one_shape": make.__name__ if is_even else None,
    }


@contextmanager
def _watching(config: Config, world: World) -> Iterator[None]:
    """Ranks that hang are ended, and compiled models draw what uncompiled ones do."""
    timeout_s = min(config.launch.timeout_s, TIMEOUT_S)
    with watchdog.watching(world, None, timeout_s), _eager_chance(config):
        pulse.PULSE.enter(pulse.PROOF)
        yield


def _examine_users(
    prepared: ReferenceRun,
    config: Config,
    world: World,
    claim: claims.Claim | None,
    alive: watch.Alive,
) -> dict[str, Any]:
    """The user's model: against one process, what is alive, what is sent; then again, unwatched."""
    subject, reference = prepared.subject, prepared.reference
    if subject.uses_rng and builders.axes_of(config, world)[0] is not None:
        raise UsageError(
            f"the forward of {subject.workload.name} draws random numbers, and ranks that cut a "
            "model between them draw others than one process: leave its dropout out"
        )
    share, _ = builders.data_share(config, world)
    held: dict[str, watch.Held] = {}
    strategy, model = _build(subject, config, world)
    job = _job(subject, config, strategy)

    def weigh(what: str, model: nn.Module = model) -> None:
        held[what] = alive.weigh(model)

    trail = _run(strategy, subject, share, ComparedRun(reference), after=weigh)
    is_cut = isinstance(strategy, CutModel)
    replica = _digest(model) if strategy.in_step() and not is_cut else None
    watched = _watch(strategy, subject.steps[0][share])
    groups = {} if claim is None else claim.groups(job)
    used = reference.used(job, subject.stateful)
    of_data = [m for m in watched.messages if m.axis is None]
    live = _live(strategy, subject, world)
    pipeline: Executor | None = strategy.pipeline if isinstance(strategy, CutModel) else None
    room = 0 if pipeline is None else pipeline.receive_buffers()
    del strategy, model, weigh
    strategy, _ = _build(subject, config, world)
    again = _run(strategy, subject, share, ComparedRun(reference), looks=False)
    del strategy
    return {
        "claimed": None if claim is None else claim.of(job),
        "claimed_of_used": None if claim is None else claim.of(used),
        # The profiler does not say among how many ranks something was sent.
        "sends_claimed": not is_cut or watched.source == "ledger",
        "mesh": is_cut,
        "axes": watched.on_axes if is_cut else None,
        "live": live,
        "room": room,
        "irregular": reference.is_irregular,
        "full": _full(job),
        "micro": job.micro,
        "replica": replica,
        "held": {
            "params": held["step"].params,
            "gradients": held["gradients"].rest,
            "optimizer": held["step"].optimizer,
            "kept": held["step"].rest,
        },
        "outside": {"params": prepared.outside.params, "rest": prepared.outside.rest},
        "sent": _by_op(watched.messages, watched.steps, _small(job), world.size, groups),
        "sent_of_data": _by_op(of_data, watched.steps, _small(job), world.size, groups),
        "source": watched.source,
        "model": _model(prepared, trail, again, config, world),
    }


def _examine_stack(
    prepared: ReferenceRun, config: Config, world: World, claim: claims.Claim | None
) -> dict[str, Any]:
    """The stack: against one process, when it sends; then again, and what is held meanwhile."""
    subject, reference = prepared.subject, prepared.reference
    asked = config.strategy.options.get("bucket_mb")
    config = _with_small_buckets(config, subject.job(config).held)
    share, _ = builders.data_share(config, world)
    strategy, _ = _build(subject, config, world)
    cut = isinstance(strategy, CutModel)
    job = _job(subject, config, strategy)
    trail = _run(strategy, subject, share, ComparedRun(reference))
    # One micro-batch is enough to see when gradients are sent, but not for PyTorch's pipelines.
    shown = subject.steps[0][share][: None if cut else 1]
    watched = _watch(strategy, shown)
    overlap = _overlap(watched, _small(job))
    sent = [_sent_of_stack(claim, replace(job, micro=job.micro if cut else 1), watched)]
    if watched.source == "ledger" and not cut:
        every = watched.steps
        for first in range(1, len(subject.steps) - every + 1):  # in the first step some learn
            of_steps = replace(watched, messages=_recorded(range(first, first + every)))
            sent.append({**_sent_of_stack(claim, job, of_steps), "step": first})
    del strategy
    memory = watch.Memory()
    phases: list[watch.Phase] = []

    def weighed(work: Work) -> Any:
        result, phase = memory.phase(work)
        phases.append(phase)
        return result

    strategy, _ = weighed(lambda: _build(subject, config, world))
    again = _run(strategy, subject, share, ComparedRun(None), around=weighed, steps=2)
    *_, gradients, step = phases
    # A pipeline's stage adds its gradients up until the step's last backward, and buckets of a size
    # that was asked for may be as large as the stack.
    is_open = cut or asked is not None
    return {
        "claimed_of_stack": claim and (replace(claim, peak=None) if is_open else claim).of(job),
        "stack": {
            **_full(job),
            "resident": step.held,
            "peak": gradients.peak,
            "forward_peak": gradients.forward_peak,
        },
        "sent_of_stack": sent,
        "overlap": overlap,
        "model": _model(prepared, trail, again, config, world),
    }


def _sent_of_stack(claim: claims.Claim | None, job: claims.Job, watched: Watched) -> dict[str, Any]:
    """What the judge needs to know of a step of the stack. All of the stack is used once in every
    micro-batch, so nothing is left open: what is claimed is sent, no more and no less."""
    groups = {} if claim is None else claim.groups(job)
    of_data = [m for m in watched.messages if m.axis is None]
    claimed = None if claim is None else replace(claim, most={}).of(job)
    return {
        "step": None,  # one more, of a single micro-batch
        "ranks": job.ranks,
        "micro": job.micro,
        "full": _full(job),
        "irregular": False,
        "claimed": claimed,
        "claimed_of_used": claimed,
        "sent_of_data": _by_op(of_data, watched.steps, _small(job), job.ranks, groups),
    }


def _recorded(steps: range) -> list[Message]:
    """What the ledger has of some steps of a run."""
    entries = [e for e in LEDGER.entries if e.step in steps]
    return [Message(e.op, e.bytes, e.enqueue_ns, e.ranks) for e in entries]


def claim_of(config: Config) -> claims.Claim | None:
    """The claim of one of our strategies, or the one that a user's strategy names. On a mesh it is
    that of the strategy which shares the data, about a rank's part of the model."""
    name: str | None = axes.shares_data(
        config.strategy.name, config.strategy.options, config.launch.world or 1
    )
    if name not in claims.CLAIMS:
        name = builders.resolve_strategy(config).claim
    if name is not None and name not in claims.CLAIMS:
        raise unknown("claim", name, claims.CLAIMS)
    return None if name is None else claims.CLAIMS[name]


def _job(subject: Subject, config: Config, strategy: Strategy) -> claims.Job:
    """What the formulas need to know of this rank's model, which may be a part of the user's."""
    job = subject.job(config)
    if not isinstance(strategy, CutModel):
        return job
    held = dict(strategy.model.named_parameters())
    params = tuple(
        replace(p, shape=tuple(held[p.name].shape)) for p in job.params if p.name in held
    )
    micro = job.micro if strategy.pipeline is None else 1
    return replace(job, params=params, ranks=strategy.groups.data.size(), micro=micro)


def _live(strategy: Strategy, subject: Subject, world: World) -> dict[str, Any] | None:
    """How many micro-batches' activations a rank of a pipeline has kept at a time, and how many its
    schedule says. None: it is no pipeline, or PyTorch runs it."""
    if not isinstance(strategy, CutModel) or strategy.pipeline is None:
        return None
    pipeline: Executor = strategy.pipeline
    mesh, micro = strategy.axes, len(subject.steps[0][0])
    if not pipeline.peak_live:
        return None
    said = schedule_analysis.claim(
        mesh.schedule, mesh.pipeline, micro, schedule_analysis.Times(), pipeline.chunks
    )
    claimed = said.live[mesh.place(world.rank)["pipeline"]]
    return {"schedule": mesh.schedule, "claimed": claimed, "kept": pipeline.peak_live}


def _telling(config: Config, world: World) -> tuple[Config, Rounds | None]:
    """For workers: short rounds, unless they were asked for, and steps for two rounds and the
    beginning of a third. In the first a momentum that is not kept would look right."""
    if builders.axes_of(config, world)[0] is not None:  # which refuses workers
        return config, None
    make = builders.resolve_strategy(config)
    if make.__module__.startswith("shardlab.strategies.") and not issubclass(make, Workers):
        return config, None
    shares = builders.data_share(config, world)[1]
    strategy, _ = _build(subjects.stack(shares, 0, world.device, 1), config, world)
    rounds = strategy.rounds
    if rounds is None:
        return config, None
    if "every" not in config.strategy.options:
        rounds = replace(rounds, every=shortest(rounds))
        options = {**config.strategy.options, "every": rounds.every}
        config = config.with_overrides({"strategy.options": options})
    steps = max(config.training.steps, 2 * rounds.every + rounds.delay + 1)
    if steps > MOST_STEPS:
        raise UsageError(
            f"a proof is of two rounds and a step: with every={rounds.every} that takes {steps} "
            f"steps; leave it out, and it is made with every={shortest(rounds)}"
        )
    return config.with_overrides({"training.steps": steps}), rounds


def _prepare(
    which: str, world: World, config: Config, rounds: Rounds | None = None
) -> ReferenceRun:
    """The stack or the user's model, once for all strategies of a config that obey one law."""
    shares = builders.data_share(config, world)[1]
    key, place = json.dumps({**config.to_dict(), "strategy": shares}), (which, rounds)
    if place not in _prepared or _prepared[place][0] != key:
        _prepared.pop(place, None)  # it was made for another world size
        if which == "users":
            made = _prepare_users(config, world, rounds)
        else:
            steps = 3 if rounds is None else config.training.steps
            even = config.accumulate if which == "even stack" else 0
            stack = subjects.stack(shares, config.training.seed, world.device, steps, even)
            made = _run_plain(stack, config, world, rounds)
        _prepared[place] = (key, made)
    return _prepared[place][1]


def _prepare_users(config: Config, world: World, rounds: Rounds | None) -> ReferenceRun:
    """In float64, or in float32 if the plain model cannot be run in float64 here."""
    why = None
    for dtype in (torch.float64, torch.float32):
        shares = builders.data_share(config, world)[1]
        subject = subjects.users(config, shares, world.device, dtype)
        subject.why_dtype = why and f"it does not run in float64 ({why})"
        try:
            return _run_plain(subject, config, world, rounds)
        except UsageError:
            raise
        except Exception as error:
            why = why or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    raise UsageError(f"one process by itself fails on {subject.workload.name}: {why}")


def _run_plain(
    subject: Subject, config: Config, world: World, rounds: Rounds | None
) -> ReferenceRun:
    """What a plain process does, and what its model keeps."""
    build = partial(plain.build, subject)
    assert isinstance(subject.workload.loss, chance.Seeded)
    nature = chance.nature(build, subject.workload.loss)
    if not nature.repeats:
        raise UsageError(
            f"the forward of {subject.workload.name} computes something else each time, with the "
            "same parameters, data and seeds: a proof cannot tell that from a mistake (are there "
            "random numbers that torch.manual_seed, numpy and random.seed do not govern?)"
        )
    subject.uses_rng, subject.stateful = nature.uses_rng, nature.stateful
    subject.ranks_per_node = world.ranks_per_node
    alive = watch.Alive()
    model = build()
    for shares in subject.steps:
        for batch in shares[world.rank % len(shares)]:
            subject.workload.loss(model, batch).backward()
        model.zero_grad()
    held = alive.weigh(model)
    held.params -= sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    return ReferenceRun(subject, plain.refer(subject, config, rounds), held, rounds)


def _in_dtype(config: Config, prepared: ReferenceRun) -> Config:
    """The strategy computes in the precision that one process did."""
    compute = "fp64" if prepared.subject.dtype == torch.float64 else "fp32"
    return config.with_overrides({"precision.compute": compute})


def _eager_chance(config: Config) -> AbstractContextManager[Any]:
    """A compiled model draws the random numbers that an uncompiled one does."""
    if config.training.compile == "none":
        return nullcontext()
    from torch._inductor import config as inductor

    patch: AbstractContextManager[Any] = inductor.patch(fallback_random=True)
    return patch


def _with_small_buckets(config: Config, size: int) -> Config:
    """Where no size of buckets is asked for, one that holds one block of the stack: else all of
    it would fit into one, and nothing could be seen of when they are sent and freed."""
    known = inspect.signature(builders.resolve_strategy(config)).parameters
    wanted = 0.5 * size / subjects.Stack.BLOCKS / 2**20
    options = dict.fromkeys({"bucket_mb", "first_bucket_mb"} & known.keys(), wanted)
    return config.with_overrides({"strategy.options": {**options, **config.strategy.options}})


def _build(
    subject: Subject, config: Config, world: World, probe: locate.Probe | None = None
) -> tuple[Strategy, nn.Module]:
    made: list[nn.Module] = []

    def make_model() -> nn.Module:
        model = subject.workload.make_model()
        if world.rank:  # so that a missing broadcast shows
            worlds.seed(subject.seed + world.rank)
            _take_values(model, subject.workload.make_model())
        made.append(model)
        return model

    own = config.with_overrides({"training.seed": subject.seed})
    LEDGER.reset()
    if world.size > 1:  # ranks out of step get an error, rather than wrong numbers or a hang
        LEDGER.check = sequence.Sequence(world).check
    strategy = builders.build_strategy(own, replace(subject.workload, make_model=make_model), world)
    if probe is not None:  # after the strategy's own hooks: what a module returns in the end
        probe.attach(made[0])
    return strategy, made[0]


@torch.no_grad()
def _take_values(model: nn.Module, other: nn.Module) -> None:
    """Parameters and buffers of another model; what it keeps outside of them stays.

    In place: a buffer may be a view, which would hold what it was a view of beside its new values.
    """
    theirs = plain.named_tensors(other)
    for name, tensor in plain.named_tensors(model).items():
        if not torch.equal(tensor, theirs[name]):  # an expanded buffer cannot be written to
            tensor.copy_(theirs[name])


def _run(
    strategy: Strategy,
    subject: Subject,
    rank: int,
    trail: ComparedRun,
    steps: int | None = None,
    around: Callable[[Work], Any] = lambda work: work(),
    after: Callable[[str], None] = lambda _what: None,
    looks: bool = True,
) -> ComparedRun:
    """All steps, or the first ``steps``; ``around`` makes the calls, ``after`` hears of each.

    Without ``looks`` nothing is asked of the strategy before the last step is over: looking at
    parameters may gather or free them, and so hide that the strategy did not.
    """
    if looks:
        trail.start(strategy.full_tensors())
    shares_of_steps = subject.steps[:steps]
    last = len(shares_of_steps) - 1
    for step, shares in enumerate(shares_of_steps):
        LEDGER.step = step
        loss = around(partial(strategy.gradients, shares[rank]))
        LEDGER.step = None
        # Looking at gradients waits for them, so the last step is not looked at: step() must wait.
        looks_here = looks and (step == 0 or step < last)
        if looks_here:
            strategy.settle()
            after("gradients")
        trail.gradients(step, loss, strategy.full_grads() if looks_here else None)
        LEDGER.step = step
        around(strategy.step)
        LEDGER.step = None
        if strategy.rounds is None:  # what workers exchange may travel during their next step
            trail.unwaited += _unwaited(step)
        after("step")
        if looks or step == last:
            trail.tensors(step, strategy.full_tensors())
    if strategy.rounds is not None:
        strategy.settle()
        for step in range(len(shares_of_steps)):
            trail.unwaited += _unwaited(step)
    return trail


def _unwaited(step: int) -> list[str]:
    """The sums of a step that nobody has waited for yet."""
    return [
        f"{entry.op} '{entry.label}'"
        for entry in LEDGER.entries
        if entry.step == step and entry.op in GRADIENT_OPS and entry.ready_ns is None
    ]


def _model(
    prepared: ReferenceRun, trail: ComparedRun, again: ComparedRun, config: Config, world: World
) -> dict[str, Any]:
    subject, reference = prepared.subject, prepared.reference
    first = trail.first or (again.first and {**again.first, "unwatched": True})
    # Every rank takes part in the run that looks for the module, also one where all is well.
    found = world.gather(None if first is None else (first["step"], "unwatched" in first))
    where = [f for f in found if f is not None and f[0] is not None]
    if where and all(f is None or f[0] is not None for f in found):
        step = max(step for step, _ in where)
        located = _locate(prepared, config, world, step, any(unwatched for _, unwatched in where))
        if first is not None:
            first["located"] = located
    if first is not None:
        buffers = {name for name, _ in subject.workload.make_model().named_buffers()}
        if first["tensor"] in buffers:
            first["kind"] = "buffer"
    changed = (place for place, digest in again.digests.items() if trail.digests[place] != digest)
    return {
        "label": subject.workload.name,
        "steps": len(subject.steps),
        "counts": [[[b.count for b in share] for share in shares] for shares in subject.steps],
        "first": first,
        "worst": trail.worst,
        "tolerance": reference.scale.tolerance,
        "unwaited": trail.unwaited,
        "digests": trail.digests,
        "compared": len(again.digests),
        "changed": next(changed, None),
        "precision": "float64" if subject.dtype == torch.float64 else "float32",
        "why_precision": subject.why_dtype,
        "noise": reference.noise,
        "within": reference.within,
        "random": "seeded alike" if subject.uses_rng else "none",
        "every": None if prepared.rounds is None else prepared.rounds.every,
    }


def _locate(
    prepared: ReferenceRun, config: Config, world: World, step: int, unwatched: bool
) -> dict[str, Any] | None:
    """The first module whose output, or its gradient, is not what one process has. A third run."""
    subject = prepared.subject
    loss = subject.workload.loss
    assert isinstance(loss, chance.Seeded)
    if config.training.compile != "none":  # a compiled module's parts cannot be looked into
        return None
    share, shares = builders.data_share(config, world)
    if shares != world.size:  # a module here may have a part of the output
        return None
    mine, theirs = locate.Probe(loss, share), locate.Probe(loss, share)
    plain.run(subject, config, steps=step + 1, attach=theirs.attach, rounds=prepared.rounds)
    strategy, _ = _build(subject, config, world, mine)
    _run(strategy, subject, share, ComparedRun(None), steps=step + 1, looks=not unwatched)
    return locate.first_difference(mine, theirs, subject.dtype)


def _digest(model: nn.Module) -> str | None:
    """A digest of the parameters in this rank's model; None if they are not whole here."""
    content = hashlib.blake2b(digest_size=8)
    for p in model.parameters():
        if hasattr(p, "_local_tensor") or p.untyped_storage().nbytes() < p.numel() * p.itemsize:
            return None
        content.update(p.detach().cpu().numpy().tobytes())
    return content.hexdigest()


# ------------------------------------------------------------------ what is sent, and when


def _small(job: claims.Job) -> int:
    """What is smaller may be no gradient: counts, losses, which parameters were used."""
    return max(1024, 16 * len(job.params))


def _full(job: claims.Job) -> dict[str, float]:
    """What one rank would hold if nothing were sharded."""
    return {
        "params": job.held,
        "gradients": job.psi,
        "optimizer": round(job.state),
        "buffers": job.buffers,
        "tensors": len(job.params),
    }


@dataclass
class Watched:
    """The collectives of one more step, in the ledger's words if it has them all; of workers, those
    of a whole round."""

    source: str
    messages: list[Message]
    sent: watch.Sent
    steps: int
    travelling: int | None  # bytes of what workers exchange, on their way when a step had ended
    # What ranks that cut the model have sent of it, by the ledger: "axis collective" to the number
    # of messages and the bytes of their tensors.
    on_axes: dict[str, tuple[int, int]]


def _watch(strategy: Strategy, microbatches: Sequence[Batch]) -> Watched:
    among: dict[int, tuple[int, ...]] = {}  # the ranks that each call is made by
    LEDGER.check = lambda call, group: among.update({call.seq: tuple(members(group))})
    rounds = strategy.rounds
    steps = 1 if rounds is None else rounds.every
    travelling: dict[int, int] = {}

    def step() -> None:
        for _ in range(steps):
            LEDGER.step = WATCHED
            strategy.gradients(microbatches)
            strategy.step()
            LEDGER.step = None
            travelling.update({e.seq: e.bytes for e in LEDGER.entries if e.ready_ns is None})

    def settle() -> None:
        strategy.full_tensors()  # a strategy that has sent for parameters waits for them here
        limit = time.monotonic() + SETTLE_S  # a strategy that waits for nothing is not cut off
        while time.monotonic() < limit and any(
            e.ready_ns is None and e.done_ns is None for e in LEDGER.entries
        ):
            time.sleep(0.01)
        time.sleep(0.02)

    sent = watch.sent_by(step, settle)
    LEDGER.check = None
    entries = [entry for entry in LEDGER.entries if entry.step == WATCHED]
    axis_of = {e.seq: _axis(strategy, e.op, among.get(e.seq, ())) for e in entries}
    on_axes: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if (axis := axis_of[entry.seq]) and entry.op != "recv" and entry.bytes:
            messages, size = on_axes.get(f"{axis} {entry.op}", (0, 0))
            on_axes[f"{axis} {entry.op}"] = messages + 1, size + entry.bytes
    on_their_way = None if rounds is None else sum(travelling.values())
    if sum(entry.launches for entry in entries) != len(sent.messages):
        return Watched("profiler", sent.messages, sent, steps, on_their_way, on_axes)
    launched = iter(sent.messages)
    found = []
    for entry in entries:
        first, *_ = itertools.islice(launched, entry.launches)
        axis = axis_of[entry.seq]
        found.append(Message(entry.op, entry.bytes, first.launched_ns, entry.ranks, axis))
    return Watched("ledger", found, sent, steps, on_their_way, on_axes)


def _axis(strategy: Strategy, op: str, among: tuple[int, ...]) -> str | None:
    """The axis whose ranks have made a call; None: it is of the ranks that share the data."""
    if not isinstance(strategy, CutModel) or len(among) < 2:
        return None
    groups = {"tensor": strategy.groups.tensor, "pipeline": strategy.groups.pipeline}
    if op in ("send", "recv"):  # ranks of the context axis sum gradients as the data axis does
        groups["context"] = strategy.groups.context
    return next((a for a, group in groups.items() if among == tuple(members(group))), None)


def sent_per_step(
    strategy: Strategy, subject: Subject, config: Config, world: World
) -> dict[str, Any]:
    """What each rank sends in one more step of a strategy, in bytes: all of it, by collective. Of
    workers it is the average over a round."""
    job, claim = _job(subject, config, strategy), claim_of(config)
    watched = _watch(strategy, subject.steps[0][builders.data_share(config, world)[0]])
    groups = {} if claim is None else claim.groups(job)
    by_op = _by_op(watched.messages, watched.steps, 0, world.size, groups)
    found = {
        "source": watched.source,
        "bytes": sum(found["bytes"] for found in by_op.values()),
        "messages": sum(found["messages"] for found in by_op.values()),
        "by_op": {op: found["bytes"] for op, found in by_op.items()},
    }
    if world.ranks_per_node:
        own = world.gather(_sent_between(watched, world, groups))
        found["between_nodes"] = sum(own) / (world.size // world.ranks_per_node)
    return found


def _sent_between(watched: Watched, world: World, groups: Mapping[str, int]) -> float:
    """Bytes that this rank sends to other nodes in a step.

    The profiler does not say who takes part in a collective. In the groups of hybrid sharding
    neighbours gather and scatter, and ranks with the same place in each group sum.
    """
    if watched.source == "ledger":
        sent = sum(e.sent_between for e in LEDGER.entries if e.step == WATCHED)
        return sent / watched.steps
    total = 0.0
    for op, size in ((m.op, m.bytes) for m in watched.messages):
        among = groups.get(op, world.size)
        stride = world.size // among if op == "all_reduce" else 1
        first = world.rank % stride if stride > 1 else world.rank // among * among
        members = [first + stride * i for i in range(among)]
        nodes = tuple(rank // world.ranks_per_node for rank in members)
        place = members.index(world.rank)
        total += size * wire.link_shares(op, nodes, place, world.backend, ours=False)[1]
    return total / watched.steps


def _by_op(
    messages: Sequence[Message], steps: int, small: int, ranks: int, groups: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Bytes on the wire and number of messages in a step, by collective; the small ones apart."""
    sent: dict[str, dict[str, float]] = defaultdict(
        lambda: {"bytes": 0.0, "messages": 0, "small_bytes": 0.0, "small_messages": 0}
    )
    for message in messages:
        # Our reduce-scatter over Gloo is an all-to-all, among the same ranks.
        op = "reduce_scatter" if message.op == "all_to_all" else message.op
        among = message.ranks or groups.get(op, ranks)
        kind = "small_" if message.bytes < small else ""
        sent[message.op][f"{kind}bytes"] += wire_bytes(op, message.bytes, among)
        sent[message.op][f"{kind}messages"] += 1
    sent.pop("barrier", None)
    return {  # a whole number stays one, for people
        op: {k: v / steps if v % steps else v // steps for k, v in found.items()}
        for op, found in sent.items()
    }


def _overlap(watched: Watched, small: int) -> dict[str, Any]:
    """Which part of the gradients was launched before backward ended, and what came after it."""
    source, sent = watched.source, watched.sent
    gradients = [m for m in watched.messages if m.op in GRADIENT_OPS and m.bytes >= small]
    total = sum(m.bytes for m in gradients)
    if watched.travelling is not None:
        share = watched.travelling / total if total else None
        found = {"source": source, "messages": len(gradients), "share": share, "ahead": share}
        return {**found, "exposed_ms": None, "of_workers": True}
    if sent.backward_ns is None:  # it was not torch.autograd.backward
        return {"source": source, "messages": len(gradients), "share": None, "exposed_ms": None}
    begin, end = sent.backward_ns
    early = [m for m in gradients if m.launched_ns < end]
    last = sent.last_gradient_ns
    running = [r for r in sent.running if r.op in GRADIENT_OPS and r.bytes >= small]
    exposed = union(
        np.array([max(r.begin_ns, end) for r in running]), np.array([r.end_ns for r in running])
    )
    return {
        "source": source,
        "messages": len(gradients),
        "share": sum(m.bytes for m in early) / total if total else None,
        "ahead": sum(m.bytes for m in gradients if m.launched_ns < last) / total
        if total and last is not None
        else None,
        "largest": max(m.bytes for m in gradients) / total if total else None,
        "first_launch": (early[0].launched_ns - begin) / (end - begin) if early else None,
        "exposed_ms": exposed.length / 1e6 if sent.running else None,
        "backward_ms": (end - begin) / 1e6,
    }
