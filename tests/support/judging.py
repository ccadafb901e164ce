"""Proofs on the tests' own ranks: of a part of what ``shardlab prove`` looks at, and with bugs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import axis_bytes
from conftest import GetRanks
from shardlab import config as configs
from shardlab import pulse
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.guard import watchdog
from shardlab.proof import evidence, judge, subjects, watch
from shardlab.proof.difference import ComparedRun
from shardlab.proof.prove import cases_of, small
from shardlab.training import builders
from shardlab.world import World

Checks = dict[str, dict[str, Any]]
CHECKS = {
    "equal": judge.equal,
    "state": judge.state,
    "bytes": judge.sent,
    "reproducible": judge.reproducible,
}
# What the stack would say if it had nothing to hold.
NO_STACK = {
    "stack": {"params": 0, "buffers": 0, "tensors": 0, "resident": 0, "peak": 0, "forward_peak": 0},
    "claimed_of_stack": {
        "params": 0,
        "optimizer": 0,
        "kept": 0,
        "peak": None,
        "least": {"params": 0, "optimizer": 0, "kept": 0},
    },
}
# Of the stack where a bug is planted. A proof has 16 of them, which take most of its time, and with
# fewer what is on its way is as much as all gradients.
BLOCKS = 6
_prepared: dict[Any, Any] = {}  # of small stacks: a proof's own must not be taken for one of them


@contextmanager
def _planted(bug: str | None) -> Iterator[None]:
    from registry import BUGS  # which imports every strategy

    with ExitStack() as planted:
        if bug:
            for plant in BUGS[bug].plants:
                planted.enter_context(mock.patch.object(*plant))
            if not BUGS[bug].is_located:
                planted.enter_context(mock.patch.object(evidence, "_locate", return_value=None))
        yield


@contextmanager
def _small_stack() -> Iterator[None]:
    with (
        mock.patch.object(subjects.Stack, "BLOCKS", BLOCKS),
        mock.patch.object(evidence, "_prepared", _prepared),
    ):
        yield


def examine(
    world: World, config: Config, part: str, bug: str | None = None
) -> dict[str, Any] | None:
    """On a rank: what ``evidence.examine`` finds out. ``part`` is ``whole``, ``users`` (without the
    stack), ``equal`` or ``equal stack`` (of one of them, whether it equals one process alone)."""
    member = world.first(config.launch.world or 1)
    if member is None:
        return None
    with _small_stack() if bug else nullcontext():
        told, rounds = evidence._telling(config, member)
        which = "stack" if part == "equal stack" else "users"
        prepared = evidence._prepare(which, member, told, rounds)  # one process has no bug
        if part == "whole":
            evidence._prepare("stack", member, told, rounds)
        with _planted(bug):
            if part == "whole":
                found: dict[str, Any] = evidence.examine(member, config)
                return found
            with watchdog.watching(member, None, 60):
                pulse.PULSE.enter(pulse.PROOF)
                if part != "users":
                    return _examine_equal(prepared, told, member)
                found = _examine_users(prepared, told, member)
        expected = None if found["axes"] is None else axis_bytes.of_proof(member, told)
        return {**found, "expected": expected}


def _examine_users(prepared: evidence.ReferenceRun, config: Config, world: World) -> dict[str, Any]:
    claim, own = evidence.claim_of(config), evidence._in_dtype(config, prepared)
    found = evidence._examine_users(prepared, own, world, claim, watch.Alive())
    return {"ranks": world.size, **found, **NO_STACK, "models": [found["model"]]}


def _examine_equal(prepared: evidence.ReferenceRun, config: Config, world: World) -> dict[str, Any]:
    """The first of the five checks: a run that is looked at, and if that is right, one that is not
    looked at."""
    subject = prepared.subject
    if subject.workload.name == "stack":
        config = evidence._with_small_buckets(config, subject.job(config).held)
    else:
        config = evidence._in_dtype(config, prepared)
    share, _ = builders.data_share(config, world)
    strategy, _ = evidence._build(subject, config, world)
    trail = again = evidence._run(strategy, subject, share, ComparedRun(prepared.reference))
    del strategy
    if not any(world.gather(trail.first is not None)):
        strategy, _ = evidence._build(subject, config, world)
        again = evidence._run(
            strategy, subject, share, ComparedRun(prepared.reference), looks=False
        )
    return {"models": [evidence._model(prepared, trail, again, config, world)]}


# ------------------------------------------------------------------ in the tests' own process


def checks_of(
    ranks: GetRanks, workload: str, strategy: str, world: int = 2, **settings: Any
) -> Checks:
    """The checks of ``shardlab prove --workload``, less the overlap, which is the stack's."""
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    config = configs.load(None, {"model.workload": workload, **changes})
    (case,) = cases_of(small(config), [strategy], [world])
    return checks_of_case(ranks, case)


def evidence_of(
    ranks: GetRanks, case: Config, part: str = "users", bug: str | None = None
) -> list[dict[str, Any]]:
    size = case.launch.world or 1
    found = ranks(size).run("judging:examine", case, part, bug, deadline_s=100)
    return [e for e in found if e is not None]


def checks_of_case(
    ranks: GetRanks, case: Config, part: str = "users", bug: str | None = None
) -> Checks:
    try:
        found = evidence_of(ranks, case, part, bug)
    except UsageError as refusal:
        if bug is None:
            raise
        return {"refused": {"pass": False, "message": str(refusal)}}
    if part == "whole":
        return judge.judge(found)
    if part != "users":
        return {"equal": judge.equal(found)}
    checks = {name: check(found) for name, check in CHECKS.items()}
    if found[0]["axes"] is not None:
        sent = [(e["axes"], e["expected"]) for e in found if e["expected"] is not None]
        is_right = all(axes == expected for axes, expected in sent)
        checks["axes"] = {"pass": is_right, "message": f"sent, expected: {sent}"}
    return checks


def failures(checks: Checks) -> dict[str, str]:
    return {n: check["message"] for n, check in checks.items() if check["pass"] is False}
