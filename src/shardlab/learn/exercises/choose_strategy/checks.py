"""Choosing a strategy: is it within the budget, and is anything paid for that need not be?"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardlab.learn.exercise import Case, Finding

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

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
SHARDED_BY = {
    "optimizer": "The optimizer's state is whole on every rank: zero1 shards it",
    "gradients": "The gradients are whole on every rank: zero2 shards them",
    "parameters": "The parameters are whole on every rank: zero3 shards them",
    "activations": "Activations are kept: checkpointing keeps the blocks' inputs alone",
}


def run(case: Case, _rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    from shardlab.learn.exercises.choose_strategy import measuring

    return measuring.run(case, submission, spy)


def judge(evidence: Mapping[str, list[dict[str, Any]]]) -> list[Finding]:
    findings = []
    for case in CASES:
        if case.name in evidence:
            found = _over_memory(case, evidence[case.name][0]) or _wasteful(
                case, evidence[case.name]
            )
            findings += [Finding(cause, text, case.name) for cause, text in found]
    return findings


def _over_memory(case: Case, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    peak, budget = row["peak"], case.options["memory_mib"] * MIB
    if peak["total"] <= budget:
        return []
    shown = ((b, name) for name, b in peak.items() if name in NAMES and b > 0.05 * MIB)
    parts = sorted(shown, reverse=True)
    listed = ", ".join(f"{NAMES[name]} {b / MIB:.1f}" for b, name in parts)
    advice = next((f". {SHARDED_BY[n]}" for _, n in parts if _is_whole(n, row)), "")
    return [
        (
            "over-memory",
            f"{row['label']} holds {peak['total'] / MIB:.1f} MiB at the peak of a step, "
            f"{(peak['total'] - budget) / MIB:.1f} more than the budget of {budget / MIB:.0f}: "
            f"{listed}{advice}",
        )
    ]


def _is_whole(name: str, row: Mapping[str, Any]) -> bool:
    """Whether this part of the peak could still be made smaller."""
    if name == "activations":
        return bool(row["passes"] < 1.5)
    wholes = {"optimizer": 2.0, "gradients": 1.0, "parameters": 1.0}
    return name in wholes and bool(row["peak"][name] > 0.9 * wholes[name] * row["psi"])


def _wasteful(case: Case, ranks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """It fits. Then it must not cost more time than what fits at the least cost."""
    row = ranks[0]
    label, choice, ours = row["label"], row["choice"], row["ours"]
    fits = f"{label} fits ({row['peak']['total'] / MIB:.1f} MiB of {case.options['memory_mib']})"
    found = []
    if choice["sent"] > MORE_BYTES * ours["sent"]:
        found.append(
            (
                "sends-more",
                f"{fits}, but each rank sends {choice['sent'] / MIB:.1f} MiB in a step, "
                f"{choice['sent'] / ours['sent']:.1f} times what is needed within this budget "
                f"({ours['sent'] / MIB:.1f} MiB): sharding more than you must, or sending for "
                "every micro-batch, costs communication",
            )
        )
    if choice["passes"] > ours["passes"] + 0.01:
        found.append(
            (
                "computes-twice",
                f"{fits}, but every block computes its forward {choice['passes']:.0f} times in a "
                "step: activation checkpointing costs a third more computing, and this budget can "
                "be met without it",
            )
        )
    if choice["early"] < OVERLAPPED <= ours["early"]:
        found.append(
            (
                "not-overlapped",
                f"{fits} and sends no more than needed, but {100 * choice['early']:.0f}% of the "
                "gradients leave before backward has ended: nothing hides the communication. On a "
                "slow link the step waits for all of it",
            )
        )
    if not found and (slower := _slower(ranks)) > SLOWER:
        found.append(
            (
                "slower",
                f"{fits}, but a step takes {slower:.1f} times as long as with "
                f"{case.options['ours']['strategy']}, measured in turn on the same ranks, in "
                f"{choice['messages']} messages (ours: {ours['messages']})",
            )
        )
    return found


def _slower(ranks: list[dict[str, Any]]) -> float:
    """How many times as long a step takes: by the wall's clock and by the processor's, the less.

    The fastest step of each, as slow as its slowest rank: noise only ever adds. A busy machine can
    still make either clock wrong; a choice that is really slow is so by both.
    """
    if ranks[0]["times"] is None:
        return 1.0  # it is ours

    def fastest(who: str, clock: str) -> float:
        steps = zip(*(r["times"][who][clock] for r in ranks), strict=True)
        return float(min(max(step) for step in steps))

    return min(fastest("choice", c) / fastest("ours", c) for c in ("wall", "processor"))
