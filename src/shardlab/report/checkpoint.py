"""Checkpoints as terminal tables. Draws, never computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardlab.report import format as fmt


def show(rows: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, Any]]) -> None:
    out = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in (
        "step",
        "strategy",
        "world",
        "tensors",
        "parameters",
        "optimizer",
        "files",
        "size",
    ):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    table.add_column("checksums")
    for row in rows:
        if "step" not in row:
            table.add_row(*("–" for _ in range(8)), "[red]damaged[/]")
            continue
        table.add_row(
            str(row["step"]),
            escape(row["strategy"]),
            str(row["world"]),
            str(row["model_tensors"]),
            f"{row['parameters']:,}",
            f"{row['optimizer_tensors']} tensors",
            str(row["files"]),
            fmt.size(row["bytes"]),
            "[green]ok[/]" if row["damage"] is None else "[red]damaged[/]",
        )
    out.print(table)
    for row in rows:
        if row["damage"] is not None:
            out.print(row["damage"], markup=False, soft_wrap=True)
    if tensors:
        out.print()
        out.print(_tensor_table(tensors))


def _tensor_table(tensors: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", no_wrap=True)
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("parts", justify="right")
    table.add_column("the optimizer keeps")
    for row in tensors:
        shape = " x ".join(map(str, row["shape"])) or "a number"
        keeps = ", ".join(row["optimizer"]) or "–"
        table.add_row(escape(row["name"]), shape, row["dtype"], str(row["chunks"]), escape(keeps))
    return table
