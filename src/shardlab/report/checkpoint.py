"""Checkpoints as terminal tables. Draws, never computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape

from shardlab import text as fmt
from shardlab.report import terminal

IN_JSON = "; --json has all"


def show(rows: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, Any]]) -> None:
    out = terminal.out()
    table = terminal.table(
        "step", "<strategy", "world", "model\ntensors", "parameters", "optimizer\ntensors", "files",
        "size", "<check-\nsums",
    )  # fmt: skip
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
            str(row["optimizer_tensors"]),
            str(row["files"]),
            fmt.size(row["bytes"]),
            "[green]ok[/]" if row["damage"] is None else "[red]damaged[/]",
        )
    spare = ("files", "model\ntensors", "optimizer\ntensors", "world")
    terminal.show(out, terminal.fit(table, out.width, spare, IN_JSON))
    terminal.say(out, *(row["damage"] for row in rows if row["damage"] is not None))
    if tensors:
        out.print()
        table = terminal.table("<tensor", "|shape", "<dtype", "parts", "<the optimizer keeps")
        for row in tensors:
            shape = " x ".join(map(str, row["shape"])) or "a number"
            keeps = escape(", ".join(row["optimizer"]) or "–")
            table.add_row(escape(row["name"]), shape, row["dtype"], str(row["chunks"]), keeps)
        terminal.show(out, terminal.fit(table, out.width, ("parts", "dtype"), IN_JSON))
