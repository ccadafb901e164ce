"""The axes of the mesh: who is where, who meets whom, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab import config as configs
from shardlab.axes import CUTS, Axes, axes_of
from shardlab.errors import UsageError
from shardlab.strategies.cut_model import CutModel
from shardlab.training import builders

AXES = ("data", *CUTS)
sizes = st.integers(1, 4)


@given(st.builds(Axes, sizes, sizes, sizes, sizes), st.data())
def test_groups_along_an_axis_share_out_the_ranks(axes: Axes, data: st.DataObject) -> None:
    ranks = axes.data * axes.model_ranks
    along = data.draw(st.sets(st.sampled_from(AXES)))
    seen = {tuple(axes.peers(rank, *along)) for rank in range(ranks)}
    assert sorted(rank for group in seen for rank in group) == list(range(ranks))
    size = 1
    for axis in along:
        size *= getattr(axes, axis)
    assert {len(group) for group in seen} == {size}
    for rank in range(ranks):
        assert axes.place(rank)["data"] == axes.data_share(rank)[0]
        assert rank in axes.peers(rank, *along)


def test_ranks_of_one_model_are_neighbours() -> None:
    axes = Axes(data=2, pipeline=2, tensor=2)
    assert axes.place(5) == {"data": 1, "pipeline": 0, "context": 0, "tensor": 1}
    assert axes.peers(5, *CUTS) == [4, 5, 6, 7]
    assert axes.peers(5, "data") == [1, 5]
    assert axes.peers(5, "tensor") == [4, 5]


@pytest.mark.parametrize(
    ("name", "options", "ranks", "expected"),
    [
        ("zero3", {}, 4, None),
        ("zero3", {"tensor": 1}, 4, None),
        ("zero3", {"tensor": 2, "bucket_mb": 1}, 8, Axes(4, tensor=2)),
        ("tensor_parallel", {}, 4, Axes(1, tensor=4)),
        ("tensor_parallel", {"tensor": 2}, 4, Axes(2, tensor=2)),
        ("tensor_parallel", {"pipeline": 2}, 4, Axes(1, pipeline=2, tensor=2)),
        ("sequence_parallel", {}, 2, Axes(1, tensor=2, sequence=True)),
        ("context_parallel", {}, 1, Axes(1, context=1)),
        ("pipeline_gpipe", {"tensor": 2}, 8, Axes(1, pipeline=4, tensor=2, schedule="gpipe")),
    ],
)
def test_what_is_asked_for(
    name: str, options: dict[str, Any], ranks: int, expected: Axes | None
) -> None:
    found, rest = axes_of(name, options, ranks)
    assert found == expected
    assert rest == {key: value for key, value in options.items() if key == "bucket_mb"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pipeline_interleaved", {"schedule": "gpipe"}, "its name says schedule interleaved"),
        ("zero3", {"tensor": 3}, "4 ranks cannot be tensor 3: one model takes 3 ranks"),
        ("zero3", {"tensor": 0}, "its option tensor must be a number of ranks, 1 or more, got 0"),
        ("zero3", {"tensor": "two"}, "1 or more, got 'two'"),
        ("zero3", {"tensor": True}, "1 or more, got True"),
        ("zero3", {"sequence": True}, "its option sequence needs tensor=2 or more"),
        ("zero1", {"schedule": "gpipe"}, "its option schedule needs pipeline=2 or more"),
        ("zero1", {"tensor": 8}, "4 ranks cannot be tensor 8"),
        ("tensor_parallel", {"tensor": 2, "sequence": 1}, "must be true or false, got 1"),
        (
            "pytorch_tensor_parallel",
            {"sequence": True},
            "no axes but tensor and data, and seq",
        ),
        ("pytorch_tensor_parallel", {"tensor": 1, "context": 2}, "and context was asked"),
        ("pytorch_pipeline", {"tensor": 2, "pipeline": 1}, "no axes but pipeline and data"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        axes_of(name, options, 4)


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_ranks_that_meet_inside_of_blocks_do_not_compile_them(name: str) -> None:
    config = configs.load(None, {"strategy.name": name, "training.compile": "blocks"})
    world, setup = SimpleNamespace(size=2), None
    with pytest.raises(UsageError, match="that cannot be compiled"):
        builders.on_axes(config, CutModel, setup, world)


def test_a_batch_is_shared_among_the_ranks_of_the_data_axis() -> None:
    """Four ranks that hold two models share a batch of three; four models could not."""
    given = {"launch.world": 4, "training.global_batch": 3}
    with pytest.raises(UsageError, match=r"training\.global_batch 3 is too small for 4 ranks"):
        configs.load(None, {**given, "strategy.name": "zero1"})
    asked = {**given, "strategy.name": "zero1", "strategy.options.tensor": 2}
    assert configs.load(None, asked).data_ranks == 2
    micro = {"launch.world": 4, "training.micro_batch": 3}
    asked = {**micro, "strategy.name": "zero1", "strategy.options.tensor": 2}
    assert configs.load(None, asked).training.global_batch == 6


def test_a_misspelt_axis_is_guessed() -> None:
    config = configs.load(None, {"strategy.name": "zero1", "strategy.options": {"pipline": 2}})
    with pytest.raises(UsageError, match="did you mean 'pipeline'"):
        builders.resolve_strategy(config)
