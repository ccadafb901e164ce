"""What a strategy does, measured on the ranks. Nothing is judged here: see ``verdict``.

Ranks start from different weights, so that a missing broadcast shows, and everything is run
twice. What is sent comes from the ledger; where more was launched than the ledger has (PyTorch's
own strategies, or one that does not use ``comm``), from the profiler.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from shardlab import comm, train
from shardlab import config as configs
from shardlab.config import Config
from shardlab.errors import unknown
from shardlab.guard import pulse, sequence, watchdog
from shardlab.measure import watch
from shardlab.measure.watch import Message, Running
from shardlab.plan import claims
from shardlab.proof import subjects
from shardlab.proof.difference import Trail
from shardlab.proof.subjects import Subject
from shardlab.prove import TIMEOUT_S
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Batch
from shardlab.world import World

WATCHED = -1  # the ledger's number for the step that is watched
SETTLE_S = 5.0
GRADIENT_OPS = ("all_reduce", "reduce_scatter", "all_to_all")
Work = Callable[[], Any]

# The stack and the user's model with their references, the same for every strategy.
_prepared: dict[str, tuple[Subject, Subject]] = {}


def examine(world: World, values: dict[str, Any]) -> dict[str, Any] | None:
    """Everything that is measured of one strategy on this rank, as plain values."""
    config = configs.from_dict(values)
    member = world.first(config.launch.world or 1)
    if member is None:
        return None
    stack, users = _prepare(member, config)
    claim = claim_of(config)
    timeout_s = min(config.launch.timeout_s, TIMEOUT_S)
    with watch.Alive() as alive, watchdog.watching(member, None, timeout_s):
        pulse.PULSE.enter(pulse.PROOF)
        on_users = _examine_users(users, config, member, claim, alive)
        on_stack = _examine_stack(stack, config, member, claim)
    return {
        "ranks": member.size,
        **{key: value for key, value in on_users.items() if key != "model"},
        **{key: value for key, value in on_stack.items() if key != "model"},
        "models": [on_stack["model"], on_users["model"]],
    }


def _examine_users(
    subject: Subject,
    config: Config,
    world: World,
    claim: claims.Claim | None,
    alive: watch.Alive,
) -> dict[str, Any]:
    """The user's model: against one process, what is alive, what is sent; then again."""
    job = subject.job(config)
    held: dict[str, watch.Held] = {}
    strategy, model = _build(subject, config, world)

    def weigh(what: str, model: nn.Module = model) -> None:
        held[what] = alive.weigh(model)

    trail = _run(strategy, subject, world.rank, after=weigh)
    replica = _digest(model)
    source, messages, _ = _watch(strategy, subject.steps[0][world.rank])
    groups = {} if claim is None else claim.groups(job)
    del strategy, model, weigh
    again = _run(_build(subject, config, world)[0], subject, world.rank, compare=False)
    return {
        "claimed": None if claim is None else claim.of(job),
        "full": _full(job),
        "micro": job.micro,
        "replica": replica,
        "held": {
            "params": held["step"].params,
            "gradients": held["gradients"].rest,
            "optimizer": held["step"].optimizer,
            "kept": held["step"].rest,
        },
        "sent": _by_op(messages, _small(job), world.size, groups),
        "source": source,
        "model": _model(subject, trail, again),
    }


def _examine_stack(
    subject: Subject, config: Config, world: World, claim: claims.Claim | None
) -> dict[str, Any]:
    """The stack: against one process, when it sends; then again, and what is held meanwhile."""
    job = subject.job(config)
    config = _with_small_buckets(config, job.held)
    strategy, _ = _build(subject, config, world)
    trail = _run(strategy, subject, world.rank)
    overlap = _overlap(*_watch(strategy, subject.steps[0][world.rank][:1]), _small(job))
    del strategy
    memory = watch.Memory()
    phases: list[watch.Phase] = []

    def weighed(work: Work) -> Any:
        result, phase = memory.phase(work)
        phases.append(phase)
        return result

    strategy, _ = weighed(lambda: _build(subject, config, world))
    again = _run(strategy, subject, world.rank, compare=False, around=weighed, steps=2)
    *_, gradients, step = phases
    return {
        "claimed_of_stack": None if claim is None else claim.of(job),
        "stack": {
            **_full(job),
            "resident": step.held,
            "peak": gradients.peak,
            "forward_peak": gradients.forward_peak,
        },
        "overlap": overlap,
        "model": _model(subject, trail, again),
    }


def claim_of(config: Config) -> claims.Claim | None:
    """The claim of one of our strategies, or the one that a user's strategy names."""
    name: str | None = config.strategy.name
    if name not in claims.CLAIMS:
        name = getattr(train.resolve_strategy(config), "claim", None)
        if name is None:
            return None
    if name not in claims.CLAIMS:
        raise unknown("claim", name, claims.CLAIMS)
    return claims.CLAIMS[name]


def _prepare(world: World, config: Config) -> tuple[Subject, Subject]:
    key = json.dumps({**config.to_dict(), "strategy": None})
    if key not in _prepared:
        _prepared.clear()  # of another world size
        stack = subjects.stack(world.size, config.training.seed, world.device)
        users = subjects.users(config, world.size, world.device)
        for subject in (stack, users):
            subject.reference = subjects.refer(subject, config, world.device)
        _prepared[key] = (stack, users)
    return _prepared[key]


def _with_small_buckets(config: Config, size: int) -> Config:
    """Where no size of buckets is asked for, one that holds one block of the stack: else all of
    it would fit into one, and nothing could be seen of when they are sent and freed."""
    known = inspect.signature(train.resolve_strategy(config)).parameters
    wanted = 0.5 * size / subjects.Stack.BLOCKS / 2**20
    options = {name: wanted for name in ("bucket_mb", "first_bucket_mb") if name in known}
    return config.with_overrides({"strategy.options": {**options, **config.strategy.options}})


def _build(subject: Subject, config: Config, world: World) -> tuple[Strategy, nn.Module]:
    made: list[nn.Module] = []

    def make_model() -> nn.Module:
        made.append(subject.workload.make_model())
        return made[0]

    own = config.with_overrides({"training.seed": subject.seed + world.rank})
    comm.LEDGER.reset()
    if world.size > 1:  # ranks out of step are told so, rather than wrong numbers or a hang
        comm.LEDGER.check = sequence.Sequence(world).check
    strategy = train.build_strategy(own, replace(subject.workload, make_model=make_model), world)
    return strategy, made[0]


def _run(
    strategy: Strategy,
    subject: Subject,
    rank: int,
    compare: bool = True,
    steps: int | None = None,
    around: Callable[[Work], Any] = lambda work: work(),
    after: Callable[[str], None] = lambda _what: None,
) -> Trail:
    """All steps, or so many; ``around`` makes the calls, ``after`` hears of each."""
    trail = Trail(subject.reference if compare else None)
    trail.start(strategy.full_params())
    shares_of_steps = subject.steps[:steps]
    for step, shares in enumerate(shares_of_steps):
        comm.LEDGER.step = step
        loss = around(partial(strategy.gradients, shares[rank]))
        comm.LEDGER.step = None
        # To look at gradients is to wait for them: step() must do so too, where nobody looks.
        looks = step == 0 or step + 1 < len(shares_of_steps)
        if looks:
            getattr(strategy, "settle", lambda: None)()
            after("gradients")
        trail.gradients(step, loss, strategy.full_grads() if looks else None)
        comm.LEDGER.step = step
        around(strategy.step)
        comm.LEDGER.step = None
        trail.unwaited += [
            f"{entry.op} '{entry.label}'"
            for entry in comm.LEDGER.entries
            if entry.step == step and entry.op in GRADIENT_OPS and entry.ready_ns is None
        ]
        after("step")
        trail.tensors(step, strategy.full_params())
    return trail


def _model(subject: Subject, trail: Trail, again: Trail) -> dict[str, Any]:
    buffers = {name for name, _ in subject.workload.make_model().named_buffers()}
    first = trail.first
    if first is not None and first["tensor"] in buffers:
        first["kind"] = "buffer"
    changed = (place for place, digest in again.digests.items() if trail.digests[place] != digest)
    return {
        "label": subject.workload.name,
        "steps": len(subject.steps),
        "counts": [[[b.count for b in share] for share in shares] for shares in subject.steps],
        "first": first,
        "worst": trail.worst,
        "unwaited": trail.unwaited,
        "digests": trail.digests,
        "compared": len(again.digests),
        "changed": next(changed, None),
    }


def _digest(model: nn.Module) -> str | None:
    """Of the parameters as this rank's model holds them; none if they are not whole here."""
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


def _full(job: claims.Job) -> dict[str, int]:
    """What one rank would hold if nothing were sharded."""
    return {
        "params": job.held,
        "gradients": job.psi,
        "optimizer": round(job.state * job.psi),
        "buffers": job.buffers,
        "tensors": len(job.params),
    }


def _watch(
    strategy: Strategy, microbatches: Sequence[Batch]
) -> tuple[str, list[Message], watch.Sent]:
    """The collectives of one more step, in the ledger's words if it has them all."""
    comm.LEDGER.check = None  # it would be in the times

    def step() -> None:
        comm.LEDGER.step = WATCHED
        strategy.gradients(microbatches)
        strategy.step()
        comm.LEDGER.step = None

    def settle() -> None:
        strategy.full_params()  # whoever has sent for parameters waits for them here
        limit = time.monotonic() + SETTLE_S  # and whoever waits for nothing is not cut off
        while time.monotonic() < limit and any(
            e.ready_ns is None and e.done_ns is None for e in comm.LEDGER.entries
        ):
            time.sleep(0.01)
        time.sleep(0.02)

    sent = watch.sent_by(step, settle)
    entries = [entry for entry in comm.LEDGER.entries if entry.step == WATCHED]
    if sum(entry.launches for entry in entries) != len(sent.messages):
        return "profiler", sent.messages, sent
    launched = iter(sent.messages)
    messages = []
    for entry in entries:
        first, *_ = itertools.islice(launched, entry.launches)
        messages.append(Message(entry.op, entry.bytes, first.launched_ns, entry.ranks))
    return "ledger", messages, sent


def sent_per_step(
    strategy: Strategy, subject: Subject, config: Config, world: World
) -> dict[str, Any]:
    """What each rank sends in one more step of a strategy, in bytes: all of it, by collective."""
    job, claim = subject.job(config), claim_of(config)
    source, messages, _ = _watch(strategy, subject.steps[0][world.rank])
    groups = {} if claim is None else claim.groups(job)
    by_op = _by_op(messages, 0, world.size, groups)
    return {
        "source": source,
        "bytes": sum(found["bytes"] for found in by_op.values()),
        "messages": sum(found["messages"] for found in by_op.values()),
        "by_op": {op: found["bytes"] for op, found in by_op.items()},
    }


def _by_op(
    messages: Iterable[Message], small: int, ranks: int, groups: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Bytes on the wire and number of messages, by collective; the small ones apart."""
    sent: dict[str, dict[str, float]] = defaultdict(
        lambda: {"bytes": 0.0, "messages": 0, "small_bytes": 0.0, "small_messages": 0}
    )
    for message in messages:
        # An all-to-all sends each rank its part of the tensor, as a reduce-scatter does.
        op = "reduce_scatter" if message.op == "all_to_all" else message.op
        among = message.ranks or groups.get(op, ranks)
        kind = "small_" if message.bytes < small else ""
        sent[message.op][f"{kind}bytes"] += comm.wire_bytes(op, message.bytes, among)
        sent[message.op][f"{kind}messages"] += 1
    sent.pop("barrier", None)
    return dict(sent)


def _overlap(
    source: str, messages: Sequence[Message], sent: watch.Sent, small: int
) -> dict[str, Any]:
    """Which part of the gradients was launched before backward ended, and what came after it."""
    gradients = [m for m in messages if m.op in GRADIENT_OPS and m.bytes >= small]
    total = sum(m.bytes for m in gradients)
    if sent.backward_ns is None:  # it was not torch.autograd.backward
        return {"source": source, "messages": len(gradients), "share": None, "exposed_ms": None}
    begin, end = sent.backward_ns
    early = [m for m in gradients if m.launched_ns < end]
    late = [r for r in sent.running if r.op in GRADIENT_OPS and r.bytes >= small and r.end_ns > end]
    return {
        "source": source,
        "messages": len(gradients),
        "share": sum(m.bytes for m in early) / total if total else None,
        "first_launch": (early[0].launched_ns - begin) / (end - begin) if early else None,
        "exposed_ms": _union_ns(late, end) / 1e6 if sent.running else None,
        "backward_ms": (end - begin) / 1e6,
    }


def _union_ns(running: Sequence[Running], after_ns: int) -> int:
    """How long at least one of them was running, from a moment on."""
    total, until = 0, after_ns
    for collective in sorted(running, key=lambda r: r.begin_ns):
        total += max(0, collective.end_ns - max(until, collective.begin_ns))
        until = max(until, collective.end_ns)
    return total
