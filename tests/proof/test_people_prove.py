"""``shardlab prove`` on the models of ``people.py``: right strategies are called right."""

from __future__ import annotations

import pytest

import people
from conftest import GetRanks
from judging import checks_of, failures
from shardlab.errors import UsageError

TRANSFORMERS = ("gpt2", "bert", "t5", "vit", "llama")
STRATEGIES = (
    "single", "simple_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_ddp",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", people.EVERYONE)
def test_the_verdict_is_right(model: str, strategy: str, ranks: GetRanks) -> None:
    if model in TRANSFORMERS:
        pytest.importorskip("transformers")
    if (model, strategy) == ("stochastic_depth", "pytorch_ddp"):  # it would wait for ever
        with pytest.raises(UsageError, match="set the strategy's option find_unused_parameters"):
            checks_of(ranks, f"people:{model}", strategy)
        return
    checks = checks_of(ranks, f"people:{model}", strategy)
    assert failures(checks) == {}
    random = checks["equal"]["measured"]["random"]
    assert random == ("seeded alike" if model in people.RANDOM else "none")
