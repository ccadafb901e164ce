"""Throughput in the terminal: a row for each batch size, and the extrapolation in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.files import write_json, write_text
from shardlab.measure import fields
from shardlab.report import page, terminal

Result = Mapping[str, Any]  # the content of throughput.json
Row = Mapping[str, Any]
COLUMNS = (
    "batch", "global_batch", "status", "step_ms", "p10", "p90", "steps_per_s", "samples_per_s",
    "tokens_per_s", "flops_per_s", "mfu", "peak_bytes", "reason",
)  # fmt: skip


def write(folder: Path, result: Result) -> dict[str, Path]:
    """``throughput.json``, and its rows as ``throughput.csv``."""
    files = {"json": folder / "throughput.json", "csv": folder / "throughput.csv"}
    write_json(files["json"], result)
    write_text(files["csv"], csv_text(result))
    return files


def csv_text(result: Result) -> str:
    return page.csv_text(COLUMNS, ({**row, **_times(row)} for row in result["rows"]))


def _times(row: Row) -> dict[str, float | None]:
    times = row["step_ms"] or {}
    return {"step_ms": times.get("median"), "p10": times.get("p10"), "p90": times.get("p90")}


def show(result: Result, files: Mapping[str, Path]) -> None:
    out = terminal.out()
    out.print(table(result))
    out.print()
    terminal.say(out, *sentences(result), *terminal.about(result["env"]), wraps=True)
    terminal.say_paths(out, files.values())


def table(result: Result) -> Table:
    """One row per size, in the order of size; below it, why one has no numbers."""
    rate = fields.rate_key(result)
    shown = terminal.table(
        "batch\nper rank", ">step\nms p10–p90", "steps/s", fields.rate_name(result), "MFU",
        "peak\nmemory",
        title=f"{result['workload']} · {fmt.compact(result['parameters'])} parameters · "
        f"{result['strategy']} · {fmt.count(result['world'], 'rank')} · {result['precision']}",
    )  # fmt: skip
    best = max((r[rate] for r in result["rows"] if r[rate] is not None), default=None)
    for row in sorted(result["rows"], key=lambda row: row["batch"]):
        shown.add_row(*_row(row, rate), style="bold" if best and row[rate] == best else "")
    return shown


def _row(row: Row, rate: str) -> list[Text]:
    batch = Text(f"{row['batch']:,}")
    if row["step_ms"] is None:
        words = {"oom": "out of memory", "failed": "failed"}
        return [batch, Text(words[row["status"]], "red" if row["status"] == "failed" else "yellow")]
    median = fmt.number(row["step_ms"]["median"])
    return [
        batch,
        Text.assemble(median, " ", (fmt.p10_p90(row["step_ms"]), "dim not bold")),
        Text(fmt.number(row["steps_per_s"])),
        Text(fmt.compact(row[rate])),
        Text(fmt.NOTHING if row["mfu"] is None else f"{row['mfu']:.1%}"),
        Text(fmt.size(row["peak_bytes"])),
    ]


def sentences(result: Result) -> Iterator[str]:
    peak, limit = result["peak"], result["limit"]
    how = "" if peak["threads"] is None else f", {fmt.count(peak['threads'], 'thread')}"
    yield (
        f"MFU is of {flops(peak['flops_per_s'])}, the best that a rank's device reached here on "
        f"{peak['size']} x {peak['size']} matrices in {peak['dtype']}{how}"
    )
    if result["flops_per_sample"] is None:
        yield "no MFU: how many FLOPs a sample takes is not known for this workload"
    if limit["bytes"] is not None:
        yield f"memory limit of a rank: {fmt.size(limit['bytes'])} ({limit['source']})"
    if result["sweep"]:
        yield from _sweep(result)
    for row in result["rows"]:
        if row["status"] == "failed":
            yield f"batch {row['batch']:,} failed: {row['reason']}"
    if result["extrapolation"] is not None:
        yield from _extrapolation(result["extrapolation"])


def _sweep(result: Result) -> Iterator[str]:
    largest = result["largest_batch"]
    if largest is None:
        yield "not even the first batch fits"
    elif result["largest_is_exact"]:
        yield f"the largest batch that fits: {largest:,} per rank"
    else:
        why = {"time": "the time was up (--sweep-time)", "most": "--max-micro-batch was reached"}
        reason = why.get(result["stopped"], "a larger one failed for another reason")
        yield f"batch {largest:,} per rank fits; whether more does is open: {reason}"


def _extrapolation(row: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"a model of {scale(row['params'])} parameters on {scale(row['tokens'])} tokens: "
        f"{fmt.number(row['days'])} days ({fmt.number(row['years'])} years) on one such device "
        f"at {flops(row['flops_per_s'])} (MFU {row['mfu']:.1%}), which is "
        f"{rate(row['tokens_per_s'])}; for {row['target_days']:g} days {row['devices']:,} of them"
    )
    if row["cost"] is not None:
        yield f"  at {row['price_per_hour']:g} per device and hour that costs {row['cost']:,.0f}"
    yield f"  assumed: {row['assumption']}"


def rate(tokens_per_s: float) -> str:
    """``4.06 tokens/s``; ``0.000021 tokens/s``."""
    return f"{fmt.number(tokens_per_s) if tokens_per_s >= 1 else f'{tokens_per_s:.2g}'} tokens/s"


def flops(rate: float) -> str:
    return fmt.in_unit(rate, {"PFLOP/s": 1e15, "TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6})


def scale(value: float) -> str:
    """1T, 10T, 124M."""
    unit, one = fmt.unit_of(value, {"T": 1e12, "B": 1e9, "M": 1e6, "": 1})
    return f"{value / one:g}{unit}"
