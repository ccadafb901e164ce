"""``shardlab prove`` on the models of ``people.py``: right strategies are called right."""

from __future__ import annotations

import itertools

import pytest

import people
from conftest import GetRanks, deep_unless
from judging import checks_of, failures
from shardlab.errors import UsageError

TRANSFORMERS = ("gpt2", "bert", "t5", "vit", "llama")
STRATEGIES = (
    "single", "simple_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_ddp",
)  # fmt: skip
FAST = (  # each model once, where it was wrong or may be; and one refusal
    ("gpt2", "bucket_ddp_async"), ("bert", "zero1"), ("t5", "zero3"), ("vit", "zero1"),
    ("llama", "zero2"), ("diffusion", "zero1"), ("functional_dropout", "zero2"),
    ("stochastic_depth", "zero2"), ("stochastic_depth", "pytorch_ddp"), ("layer_drop", "zero3"),
    ("unet", "zero3"), ("dino", "zero2"), ("weight_norm", "zero3"),
    ("weight_norm_old", "bucket_ddp_async"), ("batch_norm", "pytorch_ddp"), ("cache", "zero2"),
    ("memory_order", "zero1"), ("relative", "zero3"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "strategy"),
    deep_unless(lambda *case: case in FAST, itertools.product(people.EVERYONE, STRATEGIES)),
)
def test_the_verdict_is_right(model: str, strategy: str, ranks: GetRanks) -> None:
    if model in TRANSFORMERS:
        pytest.importorskip("transformers")
    if model in people.SKIPPING and strategy == "pytorch_ddp":  # it would wait for ever
        with pytest.raises(UsageError, match="set the strategy's option find_unused_parameters"):
            checks_of(ranks, f"people:{model}", strategy)
        return
    checks = checks_of(ranks, f"people:{model}", strategy)
    assert failures(checks) == {}
    random = checks["equal"]["measured"]["random"]
    assert random == ("seeded alike" if model in people.RANDOM else "none")
