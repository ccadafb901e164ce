"""Architectures that were not written here, under every way to share work: right, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

import outsiders
from conftest import GetRanks
from judging import checks_of_case, failures
from shardlab import config as configs
from shardlab.errors import RankFailure, UsageError
from shardlab.proof.prove import cases_of, small
from shardlab.training import builders, equivalence_check
from shardlab.world import World

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

SHARING = ("bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3")
CUTTING = (
    "tensor_parallel", "sequence_parallel", "context_parallel", "pipeline_gpipe", "pipeline_1f1b",
    "pipeline_interleaved", "pipeline_zero_bubble", "pytorch_tensor_parallel", "pytorch_pipeline",
    "local_sgd", "diloco", "streaming_diloco",
)  # fmt: skip
RIGHT = "right"


def outcome(ranks: GetRanks, name: str, strategy: str) -> str:
    """What a proof comes to: ``RIGHT``, the words of a refusal, or what is wrong. Before it, what
    ``train`` does before its first step."""
    config = configs.load(None, {"model.workload": f"outsiders:{name}"})
    (case,) = cases_of(small(config), [strategy], [2])
    try:
        ranks(2).run(try_out, case, deadline_s=100)
        wrong = failures(checks_of_case(ranks, case))
    except UsageError as refusal:
        return f"refused: {refusal}"
    except RankFailure as failure:
        return f"FAILED: {failure}"
    return f"WRONG: {wrong}" if wrong else RIGHT


def try_out(world: World, config: configs.Config) -> None:
    equivalence_check.check(config, builders.build_workload(config), world)


def complaints(
    ranks: GetRanks, name: str, strategies: Sequence[str], refused: Mapping[str, str]
) -> dict[str, str]:
    """What does not end as it is stated, by strategy."""
    pytest.importorskip(outsiders.OUTSIDERS[name].package)
    found = {strategy: outcome(ranks, name, strategy) for strategy in strategies}
    return {s: text for s, text in found.items() if refused.get(s, RIGHT) not in text}


@pytest.mark.parametrize("name", outsiders.OUTSIDERS)
def test_sharing_the_data(name: str, ranks: GetRanks) -> None:
    assert complaints(ranks, name, SHARING, outsiders.REFUSED.get(name, {})) == {}


@pytest.mark.parametrize("name", outsiders.CUT)
def test_cutting_the_model(name: str, ranks: GetRanks) -> None:
    assert complaints(ranks, name, CUTTING, outsiders.CUT[name]) == {}
