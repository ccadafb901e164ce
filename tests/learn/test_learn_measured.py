"""The exercises whose right answers are measured: the trace to read, the budgets to choose for."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

import shardlab.trace
from shardlab.learn.exercise import Case, messages
from shardlab.learn.exercises.choose_strategy import checks as choosing
from shardlab.learn.exercises.read_trace import TRACE
from shardlab.learn.exercises.read_trace import __main__ as copying
from shardlab.learn.exercises.read_trace import checks as reading
from shardlab.measure.estimate import Simulator


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


def estimated_mib(simulator: Simulator, case: Case, choice: dict[str, Any]) -> float:
    weights = simulator.run(choosing.config_of(choice, case), "cpu")["weights"]
    return max(peak["total"] for peak in weights.values()) / choosing.MIB


@pytest.mark.long
@pytest.mark.parametrize(
    ("budget", "too_large"),
    [
        ("tight", {"strategy": "simple_ddp_async", "activation_checkpointing": True}),
        ("tiny", {"strategy": "zero2", "activation_checkpointing": True}),
    ],
)
def test_a_budget_has_room_for_ours_and_not_for_less(
    budget: str, too_large: dict[str, Any]
) -> None:
    """By the estimate, which needs no ranks: 3% to either side, lest the next torch tips it."""
    case = next(c for c in choosing.CASES if c.name == budget)
    with Simulator() as simulator:
        ours = estimated_mib(simulator, case, case.options["ours"])
        more = estimated_mib(simulator, case, too_large)
    assert ours < 0.97 * case.options["memory_mib"]
    assert more > 1.03 * case.options["memory_mib"]


def evidence(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Of the roomy case, as good as ours."""
    sent = {"sent": 100.0, "messages": 8, "early": 1.0, "passes": 1.0}
    steps = [[1.0, 0.5], [1.1, 0.6]]  # by the wall's clock, by the processor's
    row = {
        "label": "mine",
        "peak": {"total": 40 * choosing.MIB, "optimizer": 40 * choosing.MIB},
        "choice": sent | {k: v for k, v in changes.items() if k in sent},
        "ours": sent,
        "times": {"choice": changes.get("times", steps), "ours": steps},
    }
    return {"roomy": [row, row]}


@pytest.mark.parametrize(
    ("changes", "causes"),
    [
        ({}, []),
        ({"sent": 109.0}, []),
        ({"sent": 150.0}, ["sends-more"]),
        ({"passes": 2.0}, ["computes-twice"]),
        ({"early": 0.0}, ["not-overlapped"]),
        ({"times": [[5.0, 0.5], [9.0, 0.5]]}, []),  # a busy machine
        ({"times": [[5.0, 2.5], [9.0, 2.6]]}, ["slower"]),
    ],
)
def test_what_is_wasted_is_said(changes: dict[str, Any], causes: list[str]) -> None:
    assert [f.cause for f in choosing.judge(evidence(**changes))] == causes


@pytest.mark.parametrize(
    ("peak", "passes", "advice"),
    [
        ({"optimizer": 24, "activations": 12, "gradients": 12}, 1.0, "zero1"),
        ({"gradients": 12, "optimizer": 12, "parameters": 6, "activations": 30}, 2.0, "zero2"),
        ({"parameters": 12, "optimizer": 12, "activations": 1, "gradients": 6}, 2.0, "zero3"),
        ({"optimizer": 12, "activations": 11, "parameters": 6}, 1.0, "checkpointing"),
    ],
)
def test_what_to_do_about_the_peak_is_what_is_not_done_yet(
    peak: dict[str, int], passes: float, advice: str
) -> None:
    mib = choosing.MIB
    held = {name: size * mib for name, size in peak.items()} | {"total": 99 * mib}
    row = {"label": "mine", "peak": held, "psi": 12 * mib, "passes": passes}
    (finding,) = choosing.judge({"tight": [row, row]})
    assert finding.cause == "over-memory"
    assert "52.0 more than the budget of 47" in finding.message
    assert advice in finding.message.rpartition(". ")[2]
