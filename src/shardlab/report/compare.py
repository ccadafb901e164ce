"""A comparison as files: JSON, CSV, a Markdown table, and a page that needs nothing else.

The page is put together here, laid out by ``compare_charts`` and drawn by the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardlab import text as fmt
from shardlab import trace
from shardlab.errors import UsageError
from shardlab.files import write_json, write_text
from shardlab.measure import fields
from shardlab.measure.fields import Cell, Result
from shardlab.proof.judge import CHECKS
from shardlab.report import compare_charts as charts
from shardlab.report import page
from shardlab.report.compare_terminal import verdict, verdict_lines
from shardlab.report.timeline import timeline

CSV_COLUMNS = (
    "workload", "parameters", "global_batch", "strategy", "label", "options", "world", "accumulate",
    "status", "reason", "step_ms_median", "step_ms_p10", "step_ms_p90", "step_ms_n",
    "speed_to_baseline", "skew_ms", "samples_per_s", "tokens_per_s", "peak_bytes_total", "loss",
    "loss_difference", "precision", "baseline", "speed_low", "speed_high", "mfu", "proof",
    "exposed_comm_ms", "wait_ms", "bubble_ms", "overlap_pct", "sent_bytes",
    "estimated_bytes_total",
    *(f"peak_bytes_{cause}" for cause in fields.CAUSES),
)  # fmt: skip
PAGE_BYTES = 1_900_000
TIMELINE_SPANS = 60_000  # on all timelines together: 0.8 MB
MAX_TIMELINES = 24


def write(folder: Path, result: dict[str, Any]) -> dict[str, Path]:
    """The files of a comparison, each whole or not there at all; by kind."""
    files = {kind: folder / f"compare.{kind}" for kind in ("json", "csv", "md")}
    files["html"] = folder / "report.html"
    write_json(files["json"], result)
    write_text(files["csv"], csv_text(result))
    write_text(files["md"], markdown(result))
    write_text(files["html"], html(result))
    return files


def csv_text(result: Result) -> str:
    """One line per cell; what is the same for all is repeated, so that files can be joined."""
    return page.csv_text(CSV_COLUMNS, (_csv_row(result, cell) for cell in result["cells"]))


def _csv_row(result: Result, cell: Cell) -> dict[str, Any]:
    row = {**result, **cell, "options": json.dumps(cell["options"])}
    for name in ("step_ms", "peak_bytes", "estimated_bytes"):
        row |= {f"{name}_{key}": value for key, value in (cell.get(name) or {}).items()}
    row["speed_low"], row["speed_high"] = cell.get("speed_interval") or (None, None)
    row |= {"proof": fields.proved(cell), "sent_bytes": fields.sent(cell)}
    profile = cell.get("profile") or {}
    names = ("exposed_comm_ms", "wait_ms", "bubble_ms", "overlap_pct")
    return row | {name: profile.get(name) for name in names}


def markdown(result: Result) -> str:
    """A table for an issue, a pull request or a wiki; then the answer."""
    rate, has_bubble = fields.rate_name(result), fields.has_bubble(result)
    heads = ("strategy", "world", "step ms (p10–p90)", "speed (95%)", rate, "peak memory",
             "exposed comm ms", *(["bubble ms"] * has_bubble), "overlap", "sent per step",
             "loss Δ", "right")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for cell in result["cells"]:
        values = [_pipeless(cell["label"]), str(cell["world"])]
        if cell["step_ms"] is None:
            values += [_pipeless(f"{cell['status']}: {cell['reason']}")]
            values += [""] * (len(heads) - len(values))
        else:
            profile, sure = cell.get("profile") or {}, fmt.interval(cell.get("speed_interval"))
            values += [
                f"{fmt.number(cell['step_ms']['median'])} ({fmt.p10_p90(cell['step_ms'])})",
                fmt.speed(cell["speed_to_baseline"]) + (f" ({sure})" if sure else ""),
                fmt.compact(cell[fields.rate_key(result)]),
                fmt.size(fields.peak(cell)),
                fmt.number(profile.get("exposed_comm_ms")),
                *([fmt.number(profile.get("bubble_ms"))] * has_bubble),
                fmt.percent(profile.get("overlap_pct")),
                fmt.size(fields.sent(cell)),
                fmt.difference(cell["loss_difference"]),
                fmt.mark(fields.proved(cell)),
            ]
        lines.append("| " + " | ".join(values) + " |")
    title = (
        f"**{result['workload']}**, {fmt.compact(result['parameters'])} parameters, global batch "
        f"{result['global_batch']}, speed against {fields.baselines(result)}"
    )
    answer = [_pipeless(line.strip()) for line in verdict_lines(result)]
    paragraphs = [title, "\n".join(lines), *answer, f"`{_pipeless(result['command'])}`"]
    return "\n\n".join(paragraphs) + "\n"


def _pipeless(text: str) -> str:
    """A text that fits into a cell of a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").split())


def html(result: Result) -> str:
    """The page: no scripts, styles, fonts or images from elsewhere; timelines as there is room."""
    for spans in (TIMELINE_SPANS, TIMELINE_SPANS // 4, TIMELINE_SPANS // 16):
        text = _page(result, list(_timelines(result, spans)))
        if len(text.encode()) <= PAGE_BYTES:
            break
    return text


def _page(result: Result, timelines: Sequence[Timeline]) -> str:
    ranks = fmt.names([str(w) for w in sorted({c["world"] for c in _spread_out(result)})], 8)
    noun = "rank" if ranks == "1" else "ranks"
    strategies = len({cell["strategy"] for cell in result["cells"]})
    side = fmt.count(strategies, "strategy", "strategies").replace(" ", "\u00a0")
    has_numbers = bool(fields.measured(result))
    return page.render(
        "compare.html.j2",
        result=result,
        read=fields,
        css=page.asset("timeline.css"),
        js=page.asset("tables.js") + (page.asset("timeline.js") if timelines else ""),
        title=f"{result['workload']} on {ranks} {noun}: {side} side by side",
        verdict=verdict(result),
        answer=result.get("answer"),
        fastest=fields.fastest(result),
        leanest=fields.leanest(result),
        step_chart=charts.step_chart(result) if has_numbers else None,
        bar_rows=charts.bar_rows(result) if has_numbers else None,
        memory=charts.memory_chart(result),
        stacks=charts.stack_chart(result),
        scaling=charts.scaling(result),
        timelines=timelines,
        best_timeline=_shown_first(result, timelines),
        checks=CHECKS,
        proofs=[cell for cell in result["cells"] if cell.get("proof")],
        loss_chart=charts.loss_chart(result) if has_numbers else None,
        environment_rows=list(environment_rows(result["env"])),
    )


def _spread_out(result: Result) -> Sequence[Cell]:
    """Those that run on several ranks; all of them if none does."""
    found = [cell for cell in result["cells"] if cell["strategy"] != "single"]
    return found or list(result["cells"])


class Timeline(NamedTuple):
    cell: Cell
    data: Mapping[str, Any]


def _timelines(result: Result, spans: int) -> Iterator[Timeline]:
    """What timeline.js draws, for each strategy whose traces can be read."""
    cells = [cell for cell in result["cells"] if cell.get("profile")][:MAX_TIMELINES]
    for cell in cells:
        try:
            found = trace.load_once(Path(cell["traces"]["folder"]))
        except UsageError:  # the files were moved away: the numbers are still there
            continue
        yield Timeline(cell, timeline(found, spans // len(cells)))


def _shown_first(result: Result, timelines: Sequence[Timeline]) -> Cell | None:
    """The strategy that is chosen, or else the fastest that has a timeline."""
    choice = (result.get("answer") or {}).get("choice")
    timed = [t.cell for t in timelines if t.cell["step_ms"] is not None]
    chosen = next((cell for cell in timed if cell["label"] == choice), None)
    return chosen or min(timed, key=lambda cell: cell["step_ms"]["median"], default=None)


ENVIRONMENT_NAMES = {
    "data": "data",
    "time": "measured at",
    "device": "device",
    "gpus": "GPUs",
    "cuda": "CUDA",
    "cpu": "CPU",
    "cores": "CPU cores",
    "threads_per_rank": "threads per rank",
    "memory_bytes": "memory",
    "backend": "communication",
    "nodes": "nodes",
    "torch": "PyTorch",
    "python": "Python",
    "shardlab": "shardlab",
    "git": "commit",
    "matmul": "measured matmul rate",
    "platform": "platform",
}
# Shown in other places, or nowhere.
ELSEWHERE = {"command", "workload", "parameters", "flops_per_sample", "chosen"}


def environment_rows(env: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text, in our order; then what a later version may have added."""
    for key in dict.fromkeys((*ENVIRONMENT_NAMES, *env)):
        value = env.get(key)
        if value is None or value == [] or key in ELSEWHERE:
            continue
        if key == "memory_bytes":
            text = fmt.size(value)
        elif key == "git":
            text = value["commit"][:12] + (", with uncommitted changes" if value["dirty"] else "")
        elif key == "matmul":
            text = ", ".join(f"{p} {v['flops_per_s'] / 1e12:.3g} TFLOP/s" for p, v in value.items())
        elif key == "nodes":
            text = fmt.nodes(value)
        elif key == "gpus":
            text = ", ".join(f"{value.count(gpu)} × {gpu}" for gpu in dict.fromkeys(value))
        else:
            text = str(value)
        yield ENVIRONMENT_NAMES.get(key, key), text
