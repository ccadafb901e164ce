"""A proof of the user's model alone, on the tests' own ranks: the stack takes most of the time."""

from __future__ import annotations

from typing import Any

from conftest import GetRanks
from shardlab import config as configs
from shardlab import pulse
from shardlab.guard import watchdog
from shardlab.proof import evidence, judge, watch
from shardlab.proof.difference import Trail
from shardlab.proof.prove import cases_of, small
from shardlab.world import World

CHECKS = {
    "equal": judge.equal,
    "state": judge.state,
    "bytes": judge.sent,
    "reproducible": judge.reproducible,
}
# What the stack would say if it had nothing to hold.
NO_STACK = {
    "stack": {"params": 0, "buffers": 0, "tensors": 0, "resident": 0, "peak": 0, "forward_peak": 0},
    "claimed_of_stack": {"params": 0, "optimizer": 0, "kept": 0, "peak": None},
}


def examine_users(world: World, values: dict[str, Any]) -> dict[str, Any] | None:
    """On a rank: what ``evidence.examine`` finds out, less what it does with the stack."""
    config = configs.from_dict(values)
    member = world.first(config.launch.world or 1)
    if member is None:
        return None
    config, rounds = evidence._telling(config, member)
    users = evidence._prepare("users", member, config, rounds)
    alive = watch.Alive()
    with watchdog.watching(member, None, 60):
        pulse.PULSE.enter(pulse.PROOF)
        claim, own = evidence.claim_of(config), evidence._in_dtype(config, users)
        found = evidence._examine_users(users, own, member, claim, alive)
    return {"ranks": member.size, **found, **NO_STACK, "models": [found["model"]]}


def examine_equal(world: World, values: dict[str, Any]) -> dict[str, Any]:
    """On a rank: of what ``evidence.examine`` finds out on the stack, only what is not equal."""
    config, rounds = evidence._telling(configs.from_dict(values), world)
    stack = evidence._prepare("stack", world, config, rounds)
    config = evidence._with_small_buckets(config, stack.subject.job(config).held)
    with watchdog.watching(world, None, 60):
        pulse.PULSE.enter(pulse.PROOF)
        strategy, _ = evidence._build(stack.subject, config, world)
        trail = evidence._run(strategy, stack.subject, world.rank, Trail(stack.reference))
        del strategy
        return {"models": [evidence._model(stack, trail, Trail(None), config, world)]}


def checks_of(
    ranks: GetRanks, workload: str, strategy: str, world: int = 2, **settings: Any
) -> dict[str, dict[str, Any]]:
    """The checks of ``shardlab prove --workload``, less the overlap, which is the stack's."""
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    config = configs.load(None, {"model.workload": workload, **changes})
    (case,) = cases_of(small(config), [strategy], [world])
    return checks_of_case(ranks, case)


def checks_of_case(ranks: GetRanks, case: configs.Config) -> dict[str, dict[str, Any]]:
    world = case.launch.world or 1
    found = ranks(world).run("judging:examine_users", case.to_dict(), deadline_s=100)
    evidence = [e for e in found if e is not None]
    return {name: check(evidence) for name, check in CHECKS.items()}


def failures(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["message"] for name, check in checks.items() if not check["pass"]}
