"""Tensor and sequence parallelism against one process: results, what is sent, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import meshed
from conformance import first_difference
from conftest import GetRanks


def compare(ranks: GetRanks, name: str, size: int, options: dict[str, Any]) -> list[str]:
    shares = size // options.get("tensor", size)
    expected = meshed.plain(name, shares, 2)
    found = ranks(size).run(meshed.meshed, name, options, deadline_s=60)
    return [
        f"rank {rank}: {complaint}"
        for rank, result in enumerate(found)
        if (complaint := first_difference(result, expected))
    ]


WAYS = {
    "2": (2, {}),
    "4": (4, {}),
    "2 of 4": (4, {"tensor": 2}),
    "sequence on 2": (2, {"sequence": True}),
    "sequence on 4": (4, {"sequence": True}),
    "sequence on 2 of 4": (4, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", meshed.SUBJECTS)
def test_it_equals_one_process(name: str, way: str, ranks: GetRanks) -> None:
    assert compare(ranks, name, *WAYS[way]) == []
