"""The memory estimate in the terminal: where a step's peak goes, what fits, how far off it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.measure.fields import CAUSES
from shardlab.report import terminal

Result = Mapping[str, Any]  # the content of memory.json
Row = Mapping[str, Any]
_SHOWN = ("total", *CAUSES)
_KEPT = ("parameters", "gradients", "optimizer")
_SHORT = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim.", "activations": "activ.",
}  # fmt: skip


def show(result: Result, path: Path) -> None:
    out = terminal.out()
    for made in tables(result):
        terminal.show(out, terminal.fit(made, out.width, longest=terminal.STRATEGY))
        out.print()
    terminal.say(out, *sentences(result), *terminal.about(result), wraps=True)
    snapshots = result.get("snapshots") or []
    if snapshots:
        terminal.say(out, "drop a snapshot on https://pytorch.org/memory_viz to see it", wraps=True)
    terminal.say_paths(out, (path, *snapshots))


def tables(result: Result) -> Iterator[Table]:
    rows = result["rows"]
    yield table(result)
    if any(map(_differ, rows)):
        yield ranks_table(result)
    if any(row["step_bytes"] for row in rows):
        yield kept_table(result)
    if any(row["error"] is not None for row in rows):
        yield error_table(result)


def _columns(*before: str) -> list[str]:
    return ["<strategy", *before, *(_SHORT.get(cause, cause) for cause in _SHOWN)]


def table(result: Result) -> Table:
    """One row per strategy: bytes of one rank at the peak of a step, in one unit for all."""
    rows = result["rows"]
    unit, divisor = _unit(rows, "step_bytes")
    config, limit = result["config"], result["limit_bytes"]
    size = config["model"]["size"]
    name = config["model"]["workload"] + (f" {size}" if size else "")
    ranks = fmt.count(max(row["world"] for row in rows), "rank")
    least = any(row["uncounted"] for row in rows) * "; ≥: a lower bound, see below"
    shown = terminal.table(
        *_columns(),
        *([] if limit is None else ["fits", "up to"]),
        title=f"{name} · {ranks} · batch {rows[0]['batch']:,} per rank · "
        f"{config['precision']['compute']} · {config['training']['optimizer']}\n"
        f"what a rank holds at the peak of a step, {unit}{least}",
        least=10,
    )
    for row in rows:
        cells = [Text(row["label"])]
        if row["step_bytes"] is None:
            shown.add_row(*cells, Text(row["status"], "yellow"))
            continue
        cells += [Text(amount(row["step_bytes"][cause] / divisor)) for cause in _SHOWN]
        if row["uncounted"]:
            cells[1] = Text(f"≥ {cells[1]}")
        if limit is not None:
            cells += [
                Text("yes", "green") if row["fits"] else Text("no", "red"),
                Text(f"{row['largest_batch']:,}"),
            ]
        shown.add_row(*cells)
    return shown


def _unit(rows: Sequence[Row], key: str) -> tuple[str, float]:
    totals = [row[key]["total"] for row in rows if row[key]]
    units = {unit: fmt.BYTES[unit] for unit in ("GiB", "MiB", "KiB")}
    return fmt.unit_of(max(totals, default=0), units)


def _differ(row: Row) -> bool:
    """Whether its ranks hold more and less, because they are model-parallel."""
    return len({rank["step_bytes"]["total"] for rank in row["ranks"]}) > 1


_OF_RANKS = ("total", "parameters", "optimizer", "activations")


def ranks_table(result: Result) -> Table:
    """Where ranks differ: what each of them holds at the peak of a step."""
    rows = [row for row in result["rows"] if _differ(row)]
    unit, divisor = _unit(rows, "step_bytes")
    is_measured = any(row["measured_rank_bytes"] for row in rows)
    shown = terminal.table(
        "<strategy", "rank", "|stages", *(_SHORT.get(cause, cause) for cause in _OF_RANKS), "rest",
        *(["measured"] * is_measured),
        title=f"what each of the ranks that differ holds at its peak, {unit}",
    )  # fmt: skip
    for row in rows:
        measured = row["measured_rank_bytes"]
        most = max(rank["step_bytes"]["total"] for rank in row["ranks"])
        for i, rank in enumerate(row["ranks"]):
            sizes = [rank["step_bytes"][cause] for cause in _OF_RANKS]
            sizes.append(sizes[0] - sum(sizes[1:]))
            if measured:
                sizes.append(measured[rank["rank"]])
            shown.add_row(
                Text(row["label"] if i == 0 else ""),
                str(rank["rank"]),
                ", ".join(map(str, rank["stages"])) or fmt.NOTHING,
                *(amount(size / divisor) for size in sizes),
                style="bold" if sizes[0] == most else "",
            )
    return shown


def _most(row: Row) -> str:
    """Which rank holds most, in words."""
    rank = max(row["ranks"], key=lambda rank: rank["step_bytes"]["total"])
    text = f"{row['label']}: rank {rank['rank']}"
    if rank["stages"]:
        word = "stage" if len(rank["stages"]) == 1 else "stages"
        last = max(stage for other in row["ranks"] for stage in other["stages"])
        text += f", with {word} {fmt.names(list(map(str, rank['stages'])))} (the last is {last}),"
    return f"{text} holds most: {fmt.size(rank['step_bytes']['total'])}"


def kept_table(result: Result) -> Table:
    """What is held when the activations are gone: before the update, and after it."""
    unit, divisor = _unit(result["rows"], "update_bytes")
    shown = terminal.table(
        "<strategy", *(_SHORT[cause] for cause in _KEPT), "rest", "total", "between\nsteps",
        title=f"what it holds after backward, and between steps, {unit}",
        least=10,
    )  # fmt: skip
    for row in result["rows"]:
        if row["step_bytes"] is None:
            continue
        held, between = row["update_bytes"], row["between_bytes"]["total"]
        kept = [held[cause] for cause in _KEPT]
        values = (*kept, held["total"] - sum(kept), held["total"], between)
        shown.add_row(Text(row["label"]), *(Text(amount(value / divisor)) for value in values))
    return shown


def amount(value: float) -> str:
    """A number in the table's unit; what would round to nothing is shown as 0."""
    decimals = 0 if value >= 1000 else 1 if value >= 100 else 2
    return "0" if value < 0.005 else f"{value:,.{decimals}f}"


def error_table(result: Result) -> Table:
    """Estimate less measured, for each cause, as a share of the measured peak."""
    title = "estimate less measured, as a share of the measured peak"
    shown = terminal.table(*_columns("measured"), title=title, least=10)
    for row in result["rows"]:
        if row["error"] is None:
            continue
        errors = [row["error"][cause] for cause in _SHOWN]
        far = abs(errors[0]) > 0.05
        shown.add_row(
            Text(row["label"]),
            fmt.size(row["measured_step_bytes"]["total"]),
            *(Text(share(e), "red" if far and i == 0 else "") for i, e in enumerate(errors)),
        )
    return shown


def share(value: float) -> str:
    return "0" if abs(value) < 0.0005 else f"{100 * value:+.1f}%"


def sentences(result: Result) -> Iterator[str]:
    rows = result["rows"]
    for row in rows:
        if row["reason"]:
            yield f"{row['label']}: {row['status']}: {row['reason']}"
        if row["unmeasured"]:
            yield f"{row['label']} was not measured: {row['unmeasured']}"
        if _differ(row):
            yield _most(row)
    together: dict[int, list[str]] = {}
    for row in rows:
        if row["samples"] != row["batch"]:
            together.setdefault(row["samples"], []).append(row["label"])
    for samples, labels in together.items():
        yield (
            f"model-parallel ranks share a micro-batch, of {fmt.count(samples, 'sample')}: "
            f"{fmt.names(labels)}"
        )
    if lines := dict.fromkeys(line for row in rows for line in row.get("assumed", ())):
        yield (
            f"the model asks tensors for their values at {fmt.names(list(lines))}, and an estimate "
            "knows none: this is the larger of what 1 (True) and 0 (False) lead to"
        )
    for row in rows:
        if row["uncounted"]:
            device = "GPU" if result["device"] == "cuda" else "CPU"
            yield (
                f"{row['label']}: a lower bound: what {fmt.names(row['uncounted'])} takes for "
                f"itself on a {device} is not known here"
            )
    builds = [
        row for row in rows
        if row["step_bytes"] and row["building_bytes"] > row["step_bytes"]["total"]
    ]  # fmt: skip
    if builds:
        most = max(row["building_bytes"] for row in builds)
        yield (
            f"more than in a step is held while the model is built, before it is sharded, by "
            f"{fmt.names([row['label'] for row in builds])}: {fmt.size(most)}"
        )
    for row in rows:
        if (size := row["measured_reserved_bytes"]) is not None:
            yield (
                f"{row['label']}: PyTorch's allocator reserved {fmt.size(size)} of the GPU for the "
                f"{fmt.size(row['measured_step_bytes']['total'])} that tensors held"
            )
    if result["limit_bytes"] is not None:
        yield (
            f"fits: into {fmt.size(result['limit_bytes'])} per rank at this batch; up to: the "
            "largest batch per rank that does"
        )
    yield f"not counted: {result['not_counted']}"
    if result["device"] == "cuda" and result["kernels"] == "cpu":
        yield "no GPU here: the CPU's operators stood in for the GPU's"
