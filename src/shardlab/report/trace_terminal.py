"""An analysis of traces in the terminal and in files: tables from rows; draws, never computes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.record import write_json
from shardlab.report import format as fmt
from shardlab.trace.model import PARTS, Breakdown, row

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

_NAMES = {
    "compute_us": "compute", "exposed_comm_us": "exposed\ncomm", "wait_us": "wait for\nslower",
    "memory_us": "copies", "idle_host_us": "host\nidle", "idle_us": "other\nidle",
}  # fmt: skip

MOST = 12  # rows of a table that may be long


def write(folder: Path, traces: TraceSet, summary: Mapping[str, Any]) -> list[Path]:
    """summary.json, summary.csv and summary.html."""
    from shardlab.report import trace as page

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", summary)
    _write_csv(folder / "summary.csv", traces)
    page.write_html(folder / "summary.html", traces)
    return [folder / f"summary.{kind}" for kind in ("json", "csv", "html")]


def _write_csv(path: Path, traces: TraceSet) -> None:
    """A line per rank and step, and one (step ``all``) for each rank's sum."""
    rows = [row(item) for item in (*traces.breakdown(), *traces.breakdown(per="rank"))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for item in rows:
            writer.writerow({**item, "step": "all" if item["step"] is None else item["step"]})


# ------------------------------------------------------------------ the terminal


def show(traces: TraceSet, *, hta_compat: bool, top: int, first: bool = True) -> None:
    out = Console(highlight=False)
    if not first:
        out.print()
    for table in (
        _breakdown(traces),
        _hta(traces, hta_compat),
        _collectives(traces, "kind"),
        _collectives(traces, "label") if _labelled(traces) else None,
        _stragglers(traces),
        _memory(traces),
        _kernels(traces, top),
        _what_if(traces),
    ):
        if table is not None and table.row_count:
            out.print(table)
            out.print()
    for note in traces.warnings:
        out.print(f"note: {note}", markup=False, soft_wrap=True)


def show_files(files: Sequence[Path]) -> None:
    out = Console(highlight=False)
    for path in files:
        out.print(f"  {path}", soft_wrap=True, markup=False)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(
        title=Text(title), title_style="bold", title_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
    )  # fmt: skip
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold"
        )
    return table


def _ms(us: float | None) -> str:
    return fmt.number(None if us is None else us / 1000)


def _percent(value: float | None) -> str:
    return fmt.NOTHING if value is None else f"{value:.1f}%"


def _breakdown(traces: TraceSet) -> Table:
    strategy = traces.traces[0].shardlab.get("strategy")
    rows = traces.breakdown(per="rank")
    where = "GPU" if traces.device == "gpu" else "CPU"
    table = _table(
        " · ".join(filter(None, [
            strategy, fmt.count(len(rows), "rank"), fmt.count(rows[0].steps, "step"),
            f"milliseconds per step of the {where} and its share",
        ])),
        "rank", "wall", *_NAMES.values(), "hidden\ncomm", "overlap",
    )  # fmt: skip
    for item in rows:
        table.add_row(
            str(item.rank),
            _ms(item.wall_us / item.steps),
            *(_part(item, name) for name in PARTS),
            _ms(item.hidden_comm_us / item.steps) if item.comm_us else fmt.NOTHING,
            _percent(item.overlap_pct),
        )
    return table


def _part(item: Breakdown, name: str) -> str:
    value: float = getattr(item, name)
    share = 100 * value / item.wall_us if item.wall_us else 0.0
    return f"{_ms(value / item.steps)} {share:.0f}%" if value else "0"


def _hta(traces: TraceSet, compat: bool) -> Table | None:
    rows = [item for item in traces.hta(compat) if item.kernel_time_us is not None]
    how = "by its own rules" if compat else "exact"
    table = _table(
        f"as HTA counts ({how}): without the last of several steps, % of kernel time",
        "rank", "kernel\ntime ms", "idle", "compute", "non-\ncompute", "overlap",
        "HTA's rules\nthat differ",
    )  # fmt: skip
    for item in rows:
        whole = item.kernel_time_us or 1.0
        parts = (item.idle_time_us, item.compute_time_us, item.non_compute_time_us)
        overlap = item.comm_comp_overlap_pctg
        table.add_row(
            str(item.rank),
            _ms(item.kernel_time_us),
            *(f"{100 * (part or 0) / whole:.2f}%" for part in parts),
            fmt.NOTHING if overlap is None else f"{overlap:.2f}%",
            ", ".join(item.rules),
        )
    return table


def _labelled(traces: TraceSet) -> bool:
    return any(item.label for item in traces.collectives())


def _collectives(traces: TraceSet, by: str) -> Table:
    table = _table(
        "collectives" if by == "kind" else "collectives by label",
        "kind" if by == "kind" else "kind and label", "count", "bytes", "ms", "transfer\nms",
        "waited\nms, all ranks", "algorithm\nGB/s", "bus\nGB/s",
    )  # fmt: skip
    rows = traces.collective_summary(by)
    if len(rows) > MOST:
        table.caption = f"and {len(rows) - MOST} more in summary.json"
        table.caption_justify = "left"
    for item in rows[:MOST]:
        table.add_row(
            Text(item.name), f"{item.count:,}", fmt.size(item.bytes), _ms(item.time_us),
            _ms(item.transfer_us), _ms(item.wait_us), fmt.number(item.algorithm_gbps),
            fmt.number(item.bus_gbps),
        )  # fmt: skip
    return table


def _stragglers(traces: TraceSet) -> Table:
    table = _table(
        "who made others wait", "rank", "phase", "collectives", "others\nwaited ms",
        "of it not\nhidden ms", "worst ms", "in", left=2,
    )  # fmt: skip
    for item in traces.stragglers():
        table.add_row(
            str(item.rank), item.phase, f"{item.collectives:,}", _ms(item.others_waited_us),
            _ms(item.lost_us), _ms(item.worst_us), Text(item.worst_label),
        )  # fmt: skip
    return table


def _memory(traces: TraceSet) -> Table:
    table = _table(
        "memory", "rank", "device", "peak", "in step", "phase", "p50", "p95", "never less", left=2
    )
    for item in traces.memory():
        step = fmt.NOTHING if item.peak_step is None else str(item.peak_step)
        table.add_row(
            str(item.rank), item.device, fmt.size(item.peak_bytes), step, item.peak_phase,
            fmt.size(item.p50_bytes), fmt.size(item.p95_bytes), fmt.size(item.resident_bytes),
        )  # fmt: skip
    return table


def _kernels(traces: TraceSet, top: int) -> Table:
    """Of the first rank: the others' are in summary.json."""
    rank = traces.ranks[0]
    what = "kernels" if traces.device == "gpu" else "operators (time in them alone)"
    table = _table(f"longest {what} of rank {rank}", "name", "count", "sum ms", "mean µs", "max µs")
    for item in traces.kernels(top):
        if item.rank == rank:
            name = item.name if len(item.name) <= 72 else item.name[:71] + "…"
            table.add_row(
                Text(name), f"{item.count:,}", _ms(item.sum_us), fmt.number(item.mean_us),
                fmt.number(item.max_us),
            )  # fmt: skip
    return table


def _what_if(traces: TraceSet) -> Table:
    table = _table("what if …", "if", "a step would take ms", "faster", "assuming")
    table.columns[3].justify, table.columns[3].no_wrap = "left", False
    for item in traces.what_if():
        table.add_row(item.question, _ms(item.step_us), fmt.speed(item.speedup), item.assumption)
    return table
