"""Which elements of a tensor a part of it is: runs of the flattened whole."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.strategies import layout
from shardlab.strategies.flat import new_flat

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
    held = layout.rows(shape, ranges, dim)
    assert layout.take(whole.reshape(-1), held.runs).tolist() == wanted.reshape(-1).tolist()
    back = torch.zeros(math.prod(shape), dtype=torch.long)
    layout.put(back, held.runs, wanted.reshape(-1) + 1)
    kept = {value + 1 for value in wanted.reshape(-1).tolist()}
    assert set(back.tolist()) - {0} == kept


@given(parts(), st.data())
def test_a_part_of_a_part(part: tuple[list[int], int, list[range]], data: st.DataObject) -> None:
    """A ZeRO shard of a layer's rows: the runs of the runs."""
    shape, dim, ranges = part
    outer = layout.rows(shape, ranges, dim)
    size = sum(length for _, length in outer.runs)
    start = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - start))
    whole = torch.arange(math.prod(shape))
    wanted = layout.take(whole, outer.runs)[start : start + length]
    assert layout.take(whole, outer.between(start, length)).tolist() == wanted.tolist()
    inner = layout.Held(torch.Size([size]), ((start, length),))
    assert layout.inside(outer, inner).runs == outer.between(start, length)
    assert layout.inside(outer, inner).shape == torch.Size(shape)


def test_neighbouring_runs_are_one() -> None:
    assert layout.rows([4, 3], [range(1, 2), range(2, 4)]).runs == ((3, 9),)
    assert layout.rows([2, 4], [range(2)], dim=1).runs == ((0, 2), (4, 2))
    assert layout.whole(torch.zeros(())).runs == ((0, 1),)


def flags_of(address: int) -> list[str]:
    """What Linux notes of the mapping that an address lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_flat_buffers_ask_for_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no large pages")
    size = 40 * 2**20  # beyond malloc's heap: a mapping of its own
    plain = torch.empty(size, dtype=torch.uint8)
    assert "hg" not in flags_of(plain.data_ptr() + size // 2)
    flat = new_flat(size // 4, torch.float32, torch.device("cpu"))
    assert "hg" in flags_of(flat.data_ptr() + size // 2)
    small = new_flat(7, torch.float64, torch.device("cpu"))
    assert (small.shape, small.dtype) == ((7,), torch.float64)
