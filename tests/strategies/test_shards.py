"""Which elements of a tensor a part of it is, and the whole of several ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import GetRanks
from shardlab.strategies import layout, shards
from shardlab.strategies.shards import Runs, Shard
from shardlab.world import World

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], int, list[range]]:
    """A shape, one of its dimensions, and ranges along it that do not overlap, in any order."""
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=6)))
    ranges = [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return shape, dim, draw(st.permutations(ranges))


@given(parts())
def test_rows_are_what_indexing_gives(part: tuple[list[int], int, list[range]]) -> None:
    shape, dim, ranges = part
    whole = torch.arange(math.prod(shape)).view(shape)
    wanted = whole.index_select(dim, torch.tensor([i for r in ranges for i in r], dtype=torch.long))
    runs = layout.rows(shape, ranges, dim)
    assert shards.take(whole.reshape(-1), runs).tolist() == wanted.reshape(-1).tolist()
    back = torch.zeros(math.prod(shape), dtype=torch.long)
    shards.put(back, runs, wanted.reshape(-1) + 1)
    kept = {value + 1 for value in wanted.reshape(-1).tolist()}
    assert set(back.tolist()) - {0} == kept


@given(parts(), st.data())
def test_a_part_of_a_part(part: tuple[list[int], int, list[range]], data: st.DataObject) -> None:
    """A ZeRO shard of a layer's rows: the runs of the runs."""
    shape, dim, ranges = part
    outer = layout.rows(shape, ranges, dim)
    size = sum(length for _, length in outer)
    start = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - start))
    whole = torch.arange(math.prod(shape))
    wanted = shards.take(whole, outer)[start : start + length]
    inner = layout.inside(outer, ((start, length),))
    assert shards.take(whole, inner).tolist() == wanted.tolist()
    assert all(length for _, length in inner)


def test_neighbouring_runs_are_one() -> None:
    assert layout.rows([4, 3], [range(1, 2), range(2, 4)]) == ((3, 9),)
    assert layout.rows([2, 4], [range(2)], dim=1) == ((0, 2), (4, 2))
    assert shards.every(torch.Size([])) == ((0, 1),)


# ------------------------------------------------------------------ of all ranks together


def put_together(world: World, values: Any, held: Sequence[Runs | None]) -> Any:
    """The whole on each rank, of which this rank gives what it holds: None, if that is nothing."""
    runs = held[world.rank]
    mine = [] if runs is None else [Shard("x", values.shape, runs, shards.take(flat(values), runs))]
    mine += [Shard("else", torch.Size([3]), ())]
    found = dict(shards.whole(mine, lambda s: s.value, world.group, world.device))
    return found.get("x"), list(found)


def flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1)


ODD = [-0.0, math.nan, math.inf, -math.inf, 1e-40, 3.5]


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor(ODD, dtype=torch.float32).view(2, 3),
        torch.tensor(ODD, dtype=torch.bfloat16),
        torch.complex(torch.tensor(ODD), torch.tensor(ODD[::-1])),
        torch.tensor([True, False, True, True, False, True]),
        torch.tensor([-1, 2**62, -(2**63), 255, 256, 0]),
        torch.tensor([-1, 300, -300, 255, 256, 0], dtype=torch.int16),
    ],
    ids=lambda values: str(values.dtype),
)
@pytest.mark.parametrize(
    "held",
    [
        [((0, 4),), ((4, 2),)],
        [((4, 2),), ((0, 4),)],
        [((0, 1), (2, 1)), ((1, 1), (3, 3))],  # columns
        [((0, 6),), None],
        [None, ((0, 6),)],
        [((0, 4),), ((2, 4),)],  # a tied parameter, which two stages cut at other places
        [((0, 6),), ((0, 6),)],
    ],
    ids=str,
)
def test_the_whole_has_every_bit(
    values: torch.Tensor, held: Sequence[Runs | None], ranks: GetRanks
) -> None:
    for found, names in ranks(2).run(put_together, values, held):
        assert names == ["x"]
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        assert found.view(-1).view(torch.uint8).equal(values.view(-1).view(torch.uint8))


def one_of_each(world: World) -> Any:
    """Three ranks hold all or some of one tensor, each with values of its own."""
    runs = [((0, 2),), ((0, 4),), ((0, 2),)][world.rank]
    value = torch.full((sum(n for _, n in runs),), 1.0 + world.rank)
    mine = [Shard("x", torch.Size([4]), runs, value), shards.of("none", torch.zeros(0, 2))]
    found = dict(shards.whole(mine, lambda s: s.value, world.group, world.device))
    return found["x"].tolist(), found["none"].shape


def test_a_ranks_own_elements_are_its_own(ranks: GetRanks) -> None:
    """So a proof sees a replica that has gone astray; of what others hold, the first counts."""
    found = ranks(3).run(one_of_each)
    assert [x for x, _ in found] == [[1, 1, 2, 2], [2, 2, 2, 2], [3, 3, 2, 2]]
    assert {shape for _, shape in found} == {torch.Size([0, 2])}


def test_what_nobody_has_is_not_there(ranks: GetRanks) -> None:
    assert ranks(2).run(put_together, torch.zeros(3), [None, None]) == [(None, [])] * 2
