"""The exercise on memory: its reference against the lab's formulas, and mistakes told apart."""

from __future__ import annotations

import random
import runpy
from typing import Any

import pytest

from shardlab.learn.exercise import FOLDER, Evidence
from shardlab.learn.exercises.memory_estimate import checks
from shardlab.learn.exercises.memory_estimate.checks import Block, Question, estimate
from shardlab.plan.claims import CLAIMS, Job, Parameter

SOLUTION = runpy.run_path(str(FOLDER / "memory_estimate" / "solution.py"))


@pytest.mark.parametrize("ours", ["simple_ddp_ga", "zero1", "zero2", "zero3"])
def test_what_is_held_is_what_the_strategies_claim(ours: str) -> None:
    sizes = (3200, 6400, 640)  # that 8 ranks share without padding
    params = tuple(
        Parameter(f"p{i}", (size,), 4, True, "", state=2) for i, size in enumerate(sizes)
    )
    claimed = CLAIMS[ours].of(Job(params, buffers=0, ranks=8, micro=1))
    blocks = [Block(size, 0) for size in sizes]
    held = SOLUTION["held"](blocks, 8, ours.replace("simple_ddp_ga", "ddp"), "fp32", "adamw")
    for what, claim in (("parameters", "params"), ("gradients", "gradients")):
        assert held[what] == claimed[claim]
    assert held["optimizer"] == claimed["optimizer"]


@pytest.mark.parametrize("seed", range(20))
def test_the_solution_is_right_for_any_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    blocks = [
        Block(
            draw.randrange(10 ** draw.randrange(1, 9)), draw.randrange(10 ** draw.randrange(1, 9))
        )
        for _ in range(draw.randrange(1, 12))
    ]
    for name in checks.MODELS:
        monkeypatch.setitem(checks.MODELS, name, blocks)
    for case in checks.CASES:
        for asked in checks.questions(case):
            *arguments, part = asked[1:]
            got = SOLUTION["held" if part else "peak"](blocks, *arguments)
            assert checks._near(got[part] if part else got, estimate(asked)), asked
            least = sum(estimate(asked._replace(part=part)) for part in ("parameters", "optimizer"))
            assert all(value >= least for value in checks._accepted(asked)) or asked.part


def answered(answer: Any) -> Evidence:
    return {
        case.name: [{"answers": [answer(asked) for asked in checks.questions(case)]}]
        for case in checks.CASES
    }


def test_right_answers_pass() -> None:
    assert checks.judge(answered(estimate)) == []
    assert checks.judge(answered(lambda asked: checks._accepted(asked)[-1])) == []


@pytest.mark.parametrize("key", [*checks.HELD, *checks.PEAK])
def test_every_known_mistake_is_told_from_the_others(key: str) -> None:
    rules = (checks.HELD | checks.PEAK)[key]

    def answer(asked: Question) -> float:
        return estimate(asked, rules)

    (found,) = checks.judge(answered(answer))
    assert found.cause == key.partition("/")[0]
