"""Where the book's numbers come from: records, numbers.json, and the formulas for one model."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab.plan import claims

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "docs" / "book"
NUMBERS = BOOK / "numbers.json"
RECORDS = ROOT / "benchmarks" / "records"

Numbers = Mapping[str, Any]


class Missing(Exception):
    """What a chapter names is not there."""


@functools.cache
def record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers, and stand to the right."""
    ruler = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


@functools.cache
def gpt2_small(ranks: int, micro: int) -> claims.Job:
    """GPT-2 small in float32 with Adam, on PyTorch's meta device: shapes, no memory."""
    import torch

    from shardlab.workloads import gpt2

    with torch.device("meta"):
        model = gpt2.GPT2(gpt2.SIZES["small"])
    blocks = [f"blocks.{i}." for i in range(gpt2.SIZES["small"].layers)]
    params = [
        claims.Parameter(
            name, tuple(p.shape), 4, True, next((b for b in blocks if name.startswith(b)), "")
        )
        for name, p in model.named_parameters()
    ]
    return claims.Job(tuple(params), 0, ranks, micro)


def part(numbers: Numbers, key: str) -> Any:
    if key not in numbers:
        raise Missing(f"numbers.json has no '{key}': python benchmarks/book.py measure {key}")
    return numbers[key]["data"]
