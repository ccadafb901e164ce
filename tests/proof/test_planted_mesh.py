"""A proof of ranks that cut a model: what is wrong is found, and what is right is called right."""

from __future__ import annotations

from typing import Any

import pytest

import judging
from conftest import GetRanks, long_unless
from planted_mesh import BUGS, examine
from shardlab import config as configs
from shardlab.proof.prove import cases_of, small

Case = tuple[str, str, int, tuple[tuple[str, Any], ...]]  # workload, strategy, ranks, settings


def checks_of(ranks: GetRanks, case: Case, bug: str | None = None) -> dict[str, dict[str, Any]]:
    workload, strategy, world, settings = case
    changes = {key.replace("__", "."): value for key, value in settings}
    # Counts that no number of ranks divides, unless the case says otherwise.
    wanted = {"model.workload": f"planted_mesh:{workload}", "training.global_batch": 7, **changes}
    (config,) = cases_of(small(configs.load(None, wanted), steps=2), [strategy], [world])
    found = ranks(world).run(examine, config.to_dict(), bug, deadline_s=60)
    return {name: check(found) for name, check in judging.CHECKS.items()}


# Every way to cut that a bug is planted in, and combinations.
RIGHT: list[Case] = [
    *dict.fromkeys(bug.case for bug in BUGS.values()),
    ("nasty", "zero2:pipeline=2:schedule=zbv", 2, ()),
    ("nasty", "zero3:tensor=2:sequence=true", 4, ()),
    ("words", "zero1:tensor=2:sequence=true:pipeline=2", 4, ()),
    ("words", "simple_ddp:tensor=2:context=2", 4, ()),
    ("words", "zero1:context=2:pipeline=2", 4, ()),
    ("tied", "pipeline_zbv", 4, ()),
]
QUICK = ("tensor_parallel", "pipeline_1f1b")


@pytest.mark.parametrize(
    "case", long_unless(lambda c: c[:2] == ("words", QUICK[1]), [(c,) for c in RIGHT]), ids=str
)
def test_what_is_right_is_called_right(case: Case, ranks: GetRanks) -> None:
    checks = checks_of(ranks, case)
    assert judging.failures(checks) == {}
    if not case[1].startswith("pytorch"):
        assert "exactly as claimed" in checks["bytes"]["message"]


@pytest.mark.parametrize("bug", long_unless(lambda bug: bug.startswith("public: tied"), BUGS))
def test_a_planted_bug_is_found(bug: str, ranks: GetRanks) -> None:
    found = judging.failures(checks_of(ranks, BUGS[bug].case, bug))
    assert BUGS[bug].check in found, found
    if BUGS[bug].check != "equal":
        assert "equal" not in found
