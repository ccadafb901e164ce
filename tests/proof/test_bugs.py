"""Every planted bug of the registry is found by a proof, which says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from conftest import GetRanks, deep_unless, long_unless
from judging import checks_of_case, failures
from registry import BUGS, IN_A_LAYER
from shardlab.config import Config, load
from shardlab.proof.prove import cases_of, small

Case = tuple[str, str, int, Mapping[str, Any]]  # workload, strategy, ranks, settings
SIMPLE = ("stack", "planted:layers", "planted:tied_layers")


def config_of(case: Case) -> Config:
    """The smallest that shows a bug. Models that are cut get counts that no number of ranks
    divides, unless the case says otherwise."""
    workload, strategy, world, settings = case
    if workload in SIMPLE:
        model = "planted:layers" if workload == "stack" else workload
        config = small(load(None, {"model.workload": model, **settings}))
    else:
        wanted = {"model.workload": f"planted_mesh:{workload}", "training.global_batch": 7}
        config = small(load(None, {**wanted, **settings}), steps=2)
    (found,) = cases_of(config, [strategy], [world])
    return found


def case_of(name: str) -> Case:
    bug = BUGS[name]
    return bug.workload, bug.strategy, bug.world, bug.settings


def part_of(name: str) -> str:
    """Of a proof, the part that shows a bug."""
    bug = BUGS[name]
    if bug.check in ("equal", "refused"):
        return "equal stack" if bug.workload == "stack" else "equal"
    return "whole" if bug.workload == "stack" else "users"


# One after another, those that one process runs alike: it is run once for all of them.
ORDER = sorted(BUGS, key=lambda n: (BUGS[n].world, BUGS[n].workload, str(BUGS[n].settings)))
QUICK = ("NoAveraging", "Zero2Factor", "public: tied embeddings are not summed")


@pytest.mark.parametrize("name", long_unless(lambda name: name in QUICK, ORDER))
def test_a_planted_bug_is_found_and_named(name: str, ranks: GetRanks) -> None:
    bug = BUGS[name]
    checks = checks_of_case(ranks, config_of(case_of(name)), part_of(name), name)
    found = failures(checks)
    assert bug.message in found.get(bug.check, ""), found
    assert "\n" not in found[bug.check]
    if bug.check not in ("equal", "refused") and name != "HookEachTime":  # its results are right
        assert "equal" not in found
    if name in IN_A_LAYER:
        assert checks["equal"]["measured"]["first_difference"]["module"] == "layers.2"


# ------------------------------------------------------------------ and without a bug

# Every way to cut a model that a bug is planted in, and combinations.
OF_BUGS = {str(case_of(n)): case_of(n) for n in ORDER if BUGS[n].workload not in SIMPLE}
OTHERS: list[Case] = [
    ("tied", "pipeline_zero_bubble", 4, {}),
    ("nasty", "zero2:pipeline=2:schedule=interleaved", 2, {}),
    ("nasty", "zero3:tensor=2:sequence=true", 4, {}),
    ("words", "zero1:tensor=2:sequence=true:pipeline=2", 4, {}),
    ("words", "simple_ddp:tensor=2:context=2", 4, {}),
    ("words", "zero1:context=2:pipeline=2", 4, {}),
    ("recomputed", "context_parallel", 2, {}),
    ("recomputed", "sequence_parallel", 2, {}),
    ("words", "tensor_parallel", 2, {"training.activation_checkpointing": True}),
]
FAST = (  # each way to cut, and two axes together
    ("nasty", "tensor_parallel", False),
    ("nasty", "sequence_parallel", False),
    ("words", "pipeline_1f1b", False),
    ("tied", "pipeline_interleaved", False),
    ("even_words", "pytorch_pipeline", True),
    ("words", "context_parallel", False),
    ("nasty", "zero1:tensor=2:pipeline=2", True),
)


def is_fast(case: Case) -> bool:
    workload, strategy, _, settings = case
    return (workload, strategy, bool(settings)) in FAST


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    deep_unless(is_fast, [(case,) for case in [*OF_BUGS.values(), *OTHERS]]),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}{'-'.join(['', *case[3]])}",
)
def test_what_is_right_is_called_right(case: Case, ranks: GetRanks) -> None:
    assert failures(checks_of_case(ranks, config_of(case))) == {}
