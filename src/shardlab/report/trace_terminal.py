"""An analysis of traces in the terminal and in files: tables from rows; draws, never computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.files import write_json, write_text
from shardlab.report import terminal
from shardlab.report.page import csv_text
from shardlab.trace.model import PARTS, Breakdown, CollectiveSummary, row

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

SHORT = {
    "exposed_comm_us": "exposed\ncomm", "wait_us": "wait for\nslower", "bubble_us": "bubble",
    "memory_us": "copies",
    "idle_host_us": "host\nidle", "idle_us": "other\nidle",
}  # fmt: skip
# What a table leaves out first where the terminal is narrow.
SPARE = ("hidden", "copies", "overlap", "other\nidle", "host\nidle")
IN_CSV, IN_JSON = "; summary.csv has all", "; summary.json has all"
_COLLECTIVES = (("algorithm\nGB/s", "transfer\nms", "all ranks\nwaited ms"), IN_JSON)

MOST = 12  # rows of a table that may be long


def write(folder: Path, traces: TraceSet, summary: Mapping[str, Any]) -> list[Path]:
    """Writes summary.json, summary.csv and summary.html."""
    from shardlab.report import trace as page

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "summary.json", summary)
    write_text(folder / "summary.csv", _csv(traces))
    page.write_html(folder / "summary.html", traces)
    return [folder / f"summary.{kind}" for kind in ("json", "csv", "html")]


def _csv(traces: TraceSet) -> str:
    """A line per rank and step, and one (step ``all``) for each rank's sum."""
    rows = [row(item) for item in (*traces.breakdown(), *traces.breakdown(per="rank"))]
    rows = [item | {"step": "all" if item["step"] is None else item["step"]} for item in rows]
    return csv_text(list(rows[0]), rows)


# ------------------------------------------------------------------ the terminal


def show(traces: TraceSet, *, hta_compat: bool, top: int, first: bool = True) -> None:
    from shardlab.report import trace as page

    out = terminal.out()
    if not first:
        out.print()
    if traces.window:
        terminal.say(out, traces.window)
    is_labelled = any(item.label for item in traces.collectives())
    for table, *spare in (
        (_breakdown(traces), SPARE, IN_CSV),
        (_hta(traces, hta_compat), ("non-\ncompute", "compute"), IN_JSON),
        (_collectives(traces, "kind"), *_COLLECTIVES),
        (_collectives(traces, "label") if is_labelled else None, *_COLLECTIVES),
        (_stragglers(traces), ("collectives", "worst ms"), IN_JSON),
        (_memory(traces), ("p50", "p95", "phase"), IN_JSON),
        (_kernels(traces, top), ("max µs", "mean µs"), IN_JSON),
        (_what_if(traces), ()),
    ):
        if table is not None and table.row_count:
            terminal.show(out, terminal.fit(table, out.width, *spare))
            out.print()
    notes = (f"note: {note}" for note in traces.warnings)
    if len(traces.ranks) > 1 and (said := page.slow(traces)):
        terminal.say(out, said, wraps=out.is_terminal)
    terminal.say(out, *page.clocks(traces), *notes, wraps=out.is_terminal)


def _over(traces: TraceSet) -> str:
    """Of how many steps a table holds the sums, where the table of parts has a mean step."""
    steps = max(row.steps for row in traces.breakdown(per="rank"))
    return f" · {steps} steps together" if steps > 1 else ""


def _breakdown(traces: TraceSet) -> Table:
    rows = traces.breakdown(per="rank")
    where = "GPU" if traces.device == "gpu" else "CPU"
    steps = fmt.count(rows[0].steps, "step") if traces.marked else "the whole trace"
    title = (
        traces.traces[0].shardlab.get("strategy"), fmt.count(len(rows), "rank"), steps,
        f"ms {'per step ' if traces.marked else ''}of the {where}, and its share",
    )  # fmt: skip
    absent = {
        "memory_us": traces.device != "gpu",
        "bubble_us": not any(item.bubble_us for item in rows),
    }
    parts = [part for part in PARTS if not absent.get(part)]
    heads = (SHORT.get(part, PARTS[part]) for part in parts)
    table = terminal.table(
        "|rank", "wall", *heads, "hidden", "overlap", title=" · ".join(filter(None, title))
    )
    for item in rows:
        table.add_row(
            str(item.rank),
            fmt.ms(item.per_step()),
            *(_part(item, name) for name in parts),
            fmt.ms(item.per_step("hidden_comm_us")) if item.comm_us else fmt.NOTHING,
            fmt.percent(item.overlap_pct, 1),
        )
    return table


def _part(item: Breakdown, name: str) -> str:
    value: float = getattr(item, name)
    share = 100 * value / item.wall_us if item.wall_us else 0.0
    text = fmt.ms(item.per_step(name)) if value else "0"
    return f"{text} {share:.0f}%" if share >= 0.5 else text


def _hta(traces: TraceSet, compat: bool) -> Table | None:
    rows = [item for item in traces.hta(compat) if item.kernel_time_us is not None]
    how = "by its own rules" if compat else "exact"
    table = terminal.table(
        "|rank", "kernel\ntime ms", "idle", "compute", "non-\ncompute", "overlap",
        "<HTA's rules\nthat differ",
        title=f"as HTA counts ({how}): without the last of several steps, % of kernel time",
    )  # fmt: skip
    for item in rows:
        whole = item.kernel_time_us or 1.0
        parts = (item.idle_time_us, item.compute_time_us, item.non_compute_time_us)
        table.add_row(
            str(item.rank),
            fmt.ms(item.kernel_time_us),
            *(fmt.percent(100 * (part or 0) / whole, 2) for part in parts),
            fmt.percent(item.comm_comp_overlap_pctg, 2),
            ", ".join(item.rules),
        )
    return table


def _collectives(traces: TraceSet, by: str) -> Table:
    from shardlab.report import trace as page

    rows = traces.collective_summary(by)
    more = [f"and {len(rows) - MOST} more in summary.json"] if len(rows) > MOST else []
    if by == "kind" and (note := page.overlapping(traces)):
        more.append(note)
    table = terminal.table(
        "<kind" if by == "kind" else "<kind and label", "count", "bytes", "ms", "transfer\nms",
        "all ranks\nwaited ms", "algorithm\nGB/s", "bus\nGB/s",
        title=("collectives" if by == "kind" else "collectives by label") + _over(traces),
        caption=Text("\n".join(more), "dim") if more else None,
    )  # fmt: skip
    for item in rows[:MOST]:
        table.add_row(
            Text(item.name), f"{item.count:,}", _bytes(item), fmt.ms(item.union_us),
            fmt.ms(item.transfer_us), fmt.ms(item.wait_us), fmt.gbps(item.algorithm_gbps),
            fmt.gbps(item.bus_gbps),
        )  # fmt: skip
    return table


def _bytes(item: CollectiveSummary) -> str:
    """The sum, with ``≥`` if the trace does not tell the size of all of them."""
    return fmt.at_least(item.bytes, item.bytes_at_least)


def _stragglers(traces: TraceSet) -> Table:
    table = terminal.table(
        "|rank", "|noticed\nin", "collectives", "others\nwaited ms", "of it not\nhidden ms",
        "worst ms", "<in", title="who made others wait" + _over(traces),
    )  # fmt: skip
    for item in traces.stragglers():
        table.add_row(
            str(item.rank), item.phase, f"{item.collectives:,}", fmt.ms(item.others_waited_us),
            fmt.ms(item.lost_us), fmt.ms(item.worst_us), Text(item.worst_label),
        )  # fmt: skip
    return table


def _memory(traces: TraceSet) -> Table:
    table = terminal.table(
        "|rank", "|device", "peak", "in step", "phase", "p50", "p95", "never less", title="memory"
    )
    for item in traces.memory():
        step = fmt.NOTHING if item.peak_step is None else str(item.peak_step)
        table.add_row(
            str(item.rank), item.device, fmt.size(item.peak_bytes), step, item.peak_phase,
            fmt.size(item.p50_bytes), fmt.size(item.p95_bytes), fmt.size(item.resident_bytes),
        )  # fmt: skip
    return table


def _kernels(traces: TraceSet, top: int) -> Table:
    """The first rank's: the others' are in summary.json."""
    rank = traces.ranks[0]
    what = "kernels" if traces.device == "gpu" else "operators (time in them alone)"
    title = f"longest {what} of rank {rank}" + _over(traces)
    table = terminal.table("<name", "count", "sum ms", "mean µs", "max µs", title=title)
    for item in traces.kernels(top):
        if item.rank == rank:
            table.add_row(
                Text(terminal.short(item.name)), f"{item.count:,}", fmt.ms(item.sum_us),
                fmt.number(item.mean_us), fmt.number(item.max_us),
            )  # fmt: skip
    return table


def _what_if(traces: TraceSet) -> Table:
    from shardlab.report import trace as page

    answers = traces.what_if()
    heads = ("<if", "a step would\ntake ms", "faster", "<assuming")
    table = terminal.table(*heads, title=f"what if … ({page.baseline(answers)})")
    for item in answers:
        table.add_row(item.question, fmt.ms(item.step_us), fmt.speed(item.speedup), item.assumption)
    return table
