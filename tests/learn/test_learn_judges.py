"""What the judges of the exercises make of evidence: mistakes told apart, without ranks."""

from __future__ import annotations

import gzip
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlab.trace
from shardlab.learn import mistakes, mistakes_sharded, overlapped, spy, toys
from shardlab.learn.exercise import FOLDER, Evidence, messages
from shardlab.learn.exercises.buckets import checks as buckets
from shardlab.learn.exercises.memory_estimate import checks as estimates
from shardlab.learn.exercises.memory_estimate.checks import Block, Question, estimate
from shardlab.learn.exercises.read_trace import TRACE
from shardlab.learn.exercises.read_trace import __main__ as copying
from shardlab.learn.exercises.read_trace import checks as reading
from shardlab.learn.exercises.ring_allreduce import checks as ring
from shardlab.learn.exercises.zero2 import checks as zero2
from shardlab.learn.exercises.zero3 import checks as zero3
from shardlab.plan.claims import CLAIMS, Job, Parameter

# ------------------------------------------------------------------ gradients and calls


def test_ratio_is_found_only_where_there_is_one() -> None:
    assert mistakes.ratio([2.0, 4.0], [1.0, 2.0]) == pytest.approx(2)
    assert mistakes.ratio([2.0, 5.0], [1.0, 2.0]) is None
    assert mistakes.ratio([0.0, 0.0], [1.0, 2.0]) is None
    assert mistakes.ratio([float("nan")], [1.0]) is None


def test_close_is_relative_and_refuses_nan() -> None:
    assert mistakes.close([[1e12], [1.0]], [[1e12 + 1], [1.0]])
    assert not mistakes.close([1.0], [1.0 + 1e-6])
    assert not mistakes.close([float("nan")], [float("nan")])
    assert not mistakes.close([1.0], [1.0, 1.0])


def test_a_message_in_between_is_not_a_gradient_that_is_missing() -> None:
    call = {"op": "all_reduce", "dtype": "float64", "shape": [3], "line": 1}
    loss = call | {"bytes": 8, "what": ""}
    weight, bias = (call | {"bytes": n, "what": f"grad:{n}"} for n in (24, 16))
    assert "no gradient" not in mistakes.difference([loss], [weight], 0, 1)
    skipped = mistakes.difference([weight, bias], [bias], 0, 1)
    assert "the parameter `24` has no gradient on rank 1" in skipped


RANKS, SIZE = 2, 20
random.seed(0)
OWN = [[random.uniform(-1, 1) for _ in range(SIZE)] for _ in range(RANKS)]
MEAN = [sum(values) / RANKS for values in zip(*OWN, strict=True)]
LAST = [random.uniform(-1, 1) for _ in range(SIZE)]
HALF = SIZE // 2


def cause(*used: list[float], step: int = 0, max_norm: float | None = None) -> str:
    """What is said of a step of SGD in which each rank used this gradient."""
    before = [0.3] * SIZE
    rows = [
        {
            "before": {"w": before},
            "got": {"w": [b - toys.RATE * g for b, g in zip(before, gradient, strict=True)]},
            "want": {"w": [b - toys.RATE * m for b, m in zip(before, MEAN, strict=True)]},
            "own": [{"w": own} for own in OWN],
            "mean": {"w": MEAN},
            "last": {"w": [2 * x for x in LAST]},
            "micros": 2,
        }
        for gradient in used
    ]
    return mistakes_sharded.explained(rows, step, max_norm).cause


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ([[2 * m for m in MEAN]] * 2, "not-averaged"),
        ([[m / 2 for m in MEAN]] * 2, "averaged-twice"),
        ([[3 * m for m in MEAN]] * 2, "scaled"),
        ([OWN[0][:HALF] + OWN[1][HALF:]] * 2, "not-communicated"),
        ([[0.0] * SIZE] * 2, "not-updated"),
        ([MEAN[:HALF] + [0.0] * HALF, [0.0] * HALF + MEAN[HALF:]], "not-gathered"),
        ([[*MEAN[:-1], 0.0]] * 2, "rest-forgotten"),
        ([LAST] * 2, "microbatches-lost"),
        ([MEAN[HALF:] + MEAN[:HALF]] * 2, "wrong-shard"),
        ([[m + 0.5 for m in MEAN]] * 2, "wrong-update"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_gradient_that_was_used_tells_the_mistake(used: list[list[float]], named: str) -> None:
    assert cause(*used) == named


def test_what_is_wrong_only_later_was_not_set_back() -> None:
    assert cause([2 * m for m in MEAN], [2 * m for m in MEAN], step=1) == "not-reset"


def test_clipping_by_shares_is_told_from_not_clipping() -> None:
    by_share = [m / 2 for m in MEAN[:HALF]] + [m / 3 for m in MEAN[HALF:]]
    assert cause(by_share, by_share, max_norm=1.0) == "local-norm"
    assert cause(MEAN, MEAN, max_norm=1.0) == "not-clipped"


def test_counts_of_the_ring() -> None:
    assert ring.counts(1_001_001.0, 3) == [1, 1, 1]
    assert ring.counts(2_000_001.0, 3) == [1, 0, 2]
    assert ring.counts(0.5, 3) is None
    assert ring.counts(float("nan"), 3) is None


def test_a_wait_in_finish_is_not_a_wait_in_backward() -> None:
    calls = [{"waited": mark} for mark in ("micro 0", spy.CHAINED, "finish", "", None)]
    assert overlapped.waited_in_backward(calls) == calls[:1]


def test_the_weigher_sees_storages_grow_and_go() -> None:
    weigher = toys.Weigher()
    with weigher:
        kept = torch.zeros(1000, dtype=torch.float64)
    assert weigher.count() == 8000

    def work() -> None:
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(16_000)
        kept.untyped_storage().fill_(0)
        torch.zeros(500, dtype=torch.float64).add_(1)
        kept.untyped_storage().resize_(8)

    _, phase = weigher.phase(work)
    assert (phase.peak, phase.held) == (16_000 + 4000 - 8000, 8)


def test_memory_limits_lie_between_right_and_wrong() -> None:
    """A rank that holds its share and a block or two passes, one that holds all does not."""
    psi, block = 16.0, 1.0
    right = {"psi": psi, "block": block, "held": 8, "between": 1, "forward": 2, "params": 0}
    right |= {"after": 8, "backward": 12, "idle": 24}
    assert zero3.memory([right, right]) is None
    for key, value, named in (
        ("held", 16, "not-sharded"),
        ("between", 16, "not-freed"),
        ("forward", 16, "gathered-at-once"),
        ("after", 16, "gradients-kept"),
        ("backward", 17, "gradients-kept"),
    ):
        wrong = right | {key: value}
        found = zero3.memory([right, wrong])
        assert found is not None
        assert found.cause == named
    share = {"psi": 14.0, "block": 1.0, "after": 7, "backward": 10, "idle": 35}
    assert zero2.memory([share, share]) is None
    for key, value in (("after", 14), ("backward", 14), ("idle", 49)):
        found = zero2.memory([share, share | {key: value}])
        assert found is not None
        assert found.cause == "gradients-kept"


def test_the_layers_that_are_skipped_have_one_size() -> None:
    """Else ranks that send in different orders would crash, and not mix them up."""
    model = toys.Skipping()
    sizes = {sum(p.numel() for p in layer.parameters()) for layer in model.children()}
    assert len(sizes) == 1
    assert sizes.pop() * 8 == buckets.LAYER


# ------------------------------------------------------------------ the trace to read


def test_the_trace_is_small_and_of_no_machine() -> None:
    files = sorted(TRACE.glob("traces/*/*.gz"))
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) < 200_000
    for path in files:
        text = gzip.decompress(path.read_bytes()).decode()
        assert '"host":"lab"' in text
        assert not re.search(r'"/[a-z]+/', text)  # no path


def test_a_copy_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    assert copying.main(copy) == 0
    assert len(shardlab.trace.load(copy).ranks) == 2
    (copy / "mine").touch()
    assert copying.main(copy) == 2
    assert "exists" in capsys.readouterr().err
    assert (copy / "mine").exists()


def test_no_known_mistake_passes_for_right() -> None:
    for name, cause, value in reading.mistakes():
        assert cause in messages()
        if (name, cause) == ("COMM_MS", "counted-warm-up"):
            continue  # step 0 sends as long as the others: no harm
        if name in ("STEP_MS", "COMM_MS", "OVERLAP_PERCENT", "BYTES_PER_STEP"):
            assert not reading.matches(name, value, reading.right(name)), (name, cause)
    assert {name for name, _, _ in reading.mistakes()} == set(reading.QUESTIONS)
    assert reading.right("LATE_RANK") == reading.LATE
    assert reading.right("LATE_BECAUSE") == "host"  # the script makes its data late


def test_an_answer_of_a_wrong_kind_is_wrong_not_an_error() -> None:
    for value in (True, [1], {"a": 1}, "about 100", float("nan")):
        findings = reading.judge(
            {"questions": [{"answers": dict.fromkeys(reading.QUESTIONS, value)}]}
        )
        assert len(findings) >= len(reading.QUESTIONS) - 1, value


# ------------------------------------------------------------------ the estimate of memory

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
    for name in estimates.MODELS:
        monkeypatch.setitem(estimates.MODELS, name, blocks)
    for case in estimates.ESTIMATES:
        for asked in estimates.questions(case):
            *arguments, part = asked[1:]
            got = SOLUTION["held" if part else "peak"](blocks, *arguments)
            assert estimates._near(got[part] if part else got, estimate(asked)), asked
            least = sum(estimate(asked._replace(part=part)) for part in ("parameters", "optimizer"))
            assert all(value >= least for value in estimates._accepted(asked)) or asked.part
    for budget in estimates.budgets():
        _, world, precision, memory = budget
        chosen = SOLUTION["choose"](blocks, world, precision, "adamw", memory)
        assert chosen in estimates._fitting(budget), budget


def answered(answer: Any) -> Evidence:
    return {
        case.name: [{"answers": [answer(asked) for asked in estimates.questions(case)]}]
        for case in estimates.ESTIMATES
    }


def test_right_answers_pass() -> None:
    assert estimates.judge(answered(estimate)) == []
    assert estimates.judge(answered(lambda asked: estimates._accepted(asked)[-1])) == []


@pytest.mark.parametrize("key", [*estimates.HELD, *estimates.PEAK])
def test_every_known_mistake_is_told_from_the_others(key: str) -> None:
    rules = (estimates.HELD | estimates.PEAK)[key]

    def answer(asked: Question) -> float:
        return estimate(asked, rules)

    (found,) = estimates.judge(answered(answer))
    assert found.cause == key.partition("/")[0]
