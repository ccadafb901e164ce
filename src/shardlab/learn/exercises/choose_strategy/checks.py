"""Choosing a strategy: is it within the budget, and is anything paid for that need not be?

A choice is measured on real ranks: what it holds, what it sends and when, what it computes twice,
how long it takes beside ours. All but the time is the same on every run and every machine. Both
take their steps in turn, so that a machine that slows down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from shardlab import comm
from shardlab.config import Config, from_dict
from shardlab.errors import UsageError, unknown
from shardlab.learn.exercise import Case, Evidence, Finding, Rejected, Row, Rows, Stage, say
from shardlab.measure import estimate, memory
from shardlab.naming import ALIASES, STRATEGIES, strategy_named
from shardlab.proof import watch
from shardlab.run import assemble, loop
from shardlab.workloads import gpt2
from shardlab.world import World, _mesh

KEYS = ("strategy", "options", "accumulate", "activation_checkpointing")
WARM_UP, TIMED = 1, 2  # steps
RUN = {
    "model": {"workload": "gpt2", "size": "mini", "options": {"layers": 10, "dim": 160}},
    "data": {"source": "synthetic", "seq_len": 32, "prefetch": 0},
    "training": {"global_batch": 8, "steps": 2, "optimizer": "adamw"},
}
MIB = 2**20
CASES = (
    Case("roomy", 2, {"run": RUN, "memory_mib": 72, "ours": {"strategy": "bucket_ddp_async"}}),
    Case("tight", 2, {"run": RUN, "memory_mib": 47, "ours": {"strategy": "zero1"}}),
    Case("tiny", 2, {"run": RUN, "memory_mib": 31,
                     "ours": {"strategy": "zero3", "activation_checkpointing": True}}),
)  # fmt: skip
# How much more than the best that fits is still good. Bytes are exact; time is the machine's, too:
# FSDP2, a good choice, takes little longer than ZeRO-1 on some and twice as long on others.
MORE_BYTES, SLOWER = 1.1, 3.0
OVERLAPPED = 0.5  # of the gradients, launched before backward has ended
NAMES = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
    "activations": "activations", "buckets": "buckets and gathered blocks", "other": "other",
}  # fmt: skip
ADVICE = {
    "optimizer": "The optimizer's state is whole on every rank: zero1 shards it",
    "gradients": "The gradients are whole on every rank: zero2 shards them",
    "parameters": "The parameters are whole on every rank: zero3 shards them",
    "activations": "Activations are kept: checkpointing keeps the blocks' inputs alone",
}
# What each part of the peak is, in Ψ, on a rank that does not shard it.
WHOLE = {"optimizer": 2.0, "gradients": 1.0, "parameters": 1.0}


def run(at: Stage) -> dict[str, Any]:
    config = config_of(choice_of(at.submission, at.case.name), at.case)
    ours = config_of(at.options["ours"], at.case)
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    world = World(at.rank, at.world, at.rank, cpu, "gloo", _mesh(group, cpu))
    # The strategies' calls are not the learner's. Counted from here: a strategy may keep forward.
    with at.spy.paused(), counted_blocks() as count:
        try:
            found = {"label": config.strategy.label, **weighed(config, world, count)}
        except UsageError as refusal:
            raise Rejected(Finding("refused", str(refusal))) from None
        if found["peak"]["total"] > at.options["memory_mib"] * MIB:
            return found
        choice = Built(config, world)
        found["choice"] = choice.watched(count)
        if config == ours:
            return {**found, "ours": found["choice"], "times": None}
        reference = Built(ours, world)
        found["ours"] = reference.watched(count)
        return {**found, "times": in_turn(choice, reference)}


def choice_of(submission: ModuleType, budget: str) -> Mapping[str, Any]:
    choices = getattr(submission, "CHOICES", None)
    if not isinstance(choices, Mapping) or not isinstance(choices.get(budget), Mapping):
        raise Rejected(say("missing/choice", budget=budget))
    choice: Mapping[str, Any] = choices[budget]
    if choice.get("strategy") is None:
        raise Rejected(say("not-done/choice", budget=budget))
    return choice


def config_of(choice: Mapping[str, Any], case: Case) -> Config:
    """The run that the choice stands for; refused as ``shardlab train`` would refuse it."""
    name = choice["strategy"]
    try:
        for key in choice:
            if key not in KEYS:
                raise unknown("key of a choice", key, KEYS)
        if strategy_named(str(name)) not in STRATEGIES:
            raise unknown("strategy", name, [*STRATEGIES, *ALIASES])
        config = from_dict(case.options["run"]).with_overrides(
            {
                "launch.world": case.world,
                "strategy.name": name,
                "strategy.options": choice.get("options", {}),
                "training.accumulate": choice.get("accumulate", 1),
                "training.activation_checkpointing": choice.get("activation_checkpointing", False),
            }
        )
        assemble.resolve_strategy(config)
    except UsageError as refusal:
        raise Rejected(say("refused", budget=case.name, refusal=refusal)) from None
    return config


def weighed(config: Config, world: World, count: list[int]) -> dict[str, Any]:
    """What a rank holds at the peak, by what it is for; Ψ; how often a block computes in a step."""
    workload = assemble.build_workload(config)
    causes = memory.Causes()
    before = count[0]
    _, allocations = memory.trace(
        world.device, lambda: memory.run_steps(workload, config, world, causes, loop.Batches)
    )
    peak = estimate.fullest(world.gather(causes.of(memory.at_peak(allocations))))
    psi = sum(p.numel() * p.element_size() for p in workload.make_model().parameters())
    passes = (count[0] - before) / config.training.steps / _blocks(config)
    return {"peak": peak, "psi": psi, "passes": passes}


def _blocks(config: Config) -> int:
    """How often the blocks of the model run forward in a step that does not recompute them."""
    blocks: int = config.model.options["layers"]
    return blocks * config.training.accumulate


class Built:
    """A strategy that takes its steps when asked to: watched, or timed."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        workload = assemble.build_workload(config)
        self.strategy = assemble.build_strategy(config, workload, world)
        self.microbatches = next(loop.Batches(workload, config, world))
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        self.strategy.gradients(self.microbatches)
        self.strategy.step()
        self.strategy.settle()

    def watched(self, count: list[int]) -> dict[str, float]:
        """What a step sends, which part of the gradients before backward has ended, and how often
        a block computes its forward for a micro-batch."""
        before = count[0]

        def settle() -> None:
            # A collective that ends after the profiler has crashes the process (torch 2.13).
            self.strategy.full_params()
            time.sleep(0.02)

        found = watch.sent_by(self.step, settle)
        ended = found.backward_ns[1] if found.backward_ns else 0
        sent = early = gradients = 0.0
        for message in found.messages:
            op = "reduce_scatter" if message.op == "all_to_all" else message.op
            size = comm.wire_bytes(op, message.bytes, message.ranks or self.world.size)
            sent += size
            if op in ("all_reduce", "reduce_scatter"):
                gradients += size
                early += size if message.launched_ns < ended else 0.0
        return {
            "sent": sent,
            "messages": len(found.messages),
            "early": early / gradients if gradients else 0.0,
            "passes": (count[0] - before) / _blocks(self.config),
        }


@contextmanager
def counted_blocks() -> Iterator[list[int]]:
    """How often a block of the model computes its forward: again in backward, if checkpointed."""
    count = [0]
    forward = gpt2.Block.forward

    def counted(self: gpt2.Block, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return forward(self, x)

    with mock.patch.object(gpt2.Block, "forward", counted):
        yield count


def in_turn(choice: Built, ours: Built) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each one's steps, by the clock on the wall and in the processor, one of each after
    the other. A busy machine lengthens the first, hardly the second."""
    times: dict[str, list[tuple[float, float]]] = {"choice": [], "ours": []}
    for _ in range(1 + TIMED):
        for name, built in (("choice", choice), ("ours", ours)):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            built.step()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {name: seconds[1:] for name, seconds in times.items()}  # the first is warm-up


# ------------------------------------------------------------------ what is wrong


def judge(evidence: Evidence) -> list[Finding]:
    return [
        replace(found, case=case.name)
        for case in CASES
        if case.name in evidence
        for found in _looks(evidence[case.name], case)
    ]


def _looks(ranks: Rows, case: Case) -> list[Finding]:
    row, budget = ranks[0], case.options["memory_mib"]
    total = row["peak"]["total"] / MIB
    if total > budget:
        return [_over_memory(row, total, budget)]
    # It fits. Then it must not cost more time than what fits at the least cost.
    choice, ours = row["choice"], row["ours"]
    facts = {"fits": f"{row['label']} fits ({total:.1f} MiB of {budget})"}
    found = []
    if choice["sent"] > MORE_BYTES * ours["sent"]:
        ratio = choice["sent"] / ours["sent"]
        sent, least = choice["sent"] / MIB, ours["sent"] / MIB
        found.append(say("sends-more", sent=sent, ratio=ratio, least=least, **facts))
    if choice["passes"] > ours["passes"] + 0.01:
        found.append(say("computes-twice", passes=choice["passes"], **facts))
    if choice["early"] < OVERLAPPED <= ours["early"]:
        found.append(say("not-overlapped", percent=100 * choice["early"], **facts))
    if not found and (slower := _slower(ranks)) > SLOWER:
        strategy = case.options["ours"]["strategy"]
        messages = choice["messages"], ours["messages"]
        found.append(say("slower", slower=slower, strategy=strategy, messages=messages, **facts))
    return found


def _over_memory(row: Row, total: float, budget: float) -> Finding:
    """Name the excess, and how to shrink the largest part that can still be made smaller."""
    shown = ((b, name) for name, b in row["peak"].items() if name in NAMES and b > 0.05 * MIB)
    parts = sorted(shown, reverse=True)
    advice = next((f". {ADVICE[name]}" for _, name in parts if _is_whole(name, row)), "")
    return say(
        "over-memory", label=row["label"], total=total, more=total - budget, budget=budget,
        parts=", ".join(f"{NAMES[name]} {b / MIB:.1f}" for b, name in parts), advice=advice,
    )  # fmt: skip


def _is_whole(name: str, row: Row) -> bool:
    if name == "activations":
        return bool(row["passes"] < 1.5)
    return name in WHOLE and bool(row["peak"][name] > 0.9 * WHOLE[name] * row["psi"])


def _slower(ranks: Rows) -> float:
    """How many times as long a step takes: by the wall's clock and by the processor's, the less.

    The fastest step of each, as slow as its slowest rank: noise only ever adds. A busy machine can
    still make either clock wrong; a choice that is really slow is so by both.
    """
    if ranks[0]["times"] is None:
        return 1.0  # it is ours
    choice, ours = (  # (clocks,), from (ranks, steps, clocks)
        np.array([rank["times"][who] for rank in ranks]).max(axis=0).min(axis=0)
        for who in ("choice", "ours")
    )
    return float((choice / ours).min())
