"""A comparison in the terminal: a table that fits 80 columns, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shardlab.report import format as fmt
from shardlab.report.format import Cell, Result

NOT_PROVED = {False: "is wrong", None: "was not proved"}


def compare_table(result: Result) -> Table:
    """One row per strategy; why a row has no numbers is said below, over the full width."""
    table = _table(
        f"{result['workload']} · {fmt.compact(result['parameters'])} parameters · "
        f"global batch {result['global_batch']} · speed against {fmt.baselines(result)}",
        _reasons(result),
    )
    table.add_column("strategy", overflow="fold", min_width=12)
    table.add_column("world", justify="right", no_wrap=True)
    table.add_column("step\nms p10–p90", justify="right")  # wraps if the numbers are very long
    rate = fmt.rate_name(result)
    for header in ("speed", rate, "peak\nmemory", "loss to\nsingle"):
        table.add_column(header, justify="right", no_wrap=True)
    if _was_proved(result):
        table.add_column("ok", no_wrap=True)
    for cell in result["cells"]:
        is_baseline = fmt.is_baseline(result, cell)
        table.add_row(*_row(cell, result), style="bold" if is_baseline else "")
    return table


def _table(title: str, caption: Text | None = None) -> Table:
    return Table(
        title=Text(title),  # not str: rich would read brackets in a name as markup
        title_style="bold",
        title_justify="left",
        caption=caption,
        caption_style=Style.null(),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # columns lie closer than rich would have them, for 80 columns
        pad_edge=False,
        show_edge=False,
    )


def explained_table(result: Result) -> Table | None:
    """How sure a speed is, and where a profiled step went; none if there is nothing to say."""
    cells = fmt.measured(result)
    has_profile = any(cell.get("profile") for cell in cells)
    has_mfu = any(cell.get("mfu") for cell in cells)
    is_sure = any(fmt.interval(cell["speed_interval"]) for cell in cells)
    if not (has_profile or has_mfu or is_sure):
        return None
    titles = ["where a profiled step goes, ms · what a rank sends"] * has_profile
    titles += ["how sure the speed is (95%)"] * is_sure
    table = _table(" · ".join(titles) or "how far the ranks are apart")
    table.add_column("strategy", overflow="fold", min_width=12)
    heads = ("com-\npute", "exposed\ncomm", "waits", "idle", "over-\nlap", "sent")
    sure = ["speed\n95%"] * is_sure
    for header in (*(heads if has_profile else ()), "skew\nms", *sure):
        table.add_column(header, justify="right", no_wrap=True)
    if has_mfu:
        table.add_column("MFU", justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(
            Text(cell["label"]),
            *(_profile(cell) if has_profile else ()),
            fmt.number(cell["skew_ms"]),
            *([fmt.interval(cell["speed_interval"]) or fmt.NOTHING] * is_sure),
            *([fmt.mfu(cell)] if has_mfu else []),
        )
    return table


def _profile(cell: fmt.Cell) -> list[str]:
    """Where a profiled step of the cell went, and what it sent."""
    profile, sent = cell.get("profile"), cell.get("sent") or {}
    if not profile:
        return [fmt.NOTHING] * 6
    idle = profile["memory_ms"] + profile["idle_host_ms"] + profile["idle_ms"]
    shown = (profile["compute_ms"], profile["exposed_comm_ms"], profile["wait_ms"], idle)
    return [
        *(fmt.number(value) for value in shown),
        fmt.percent(profile["overlap_pct"]),
        fmt.size(sent.get("bytes")),
    ]


def gate_table(gate: Mapping[str, Any]) -> Table:
    """Each cell against the earlier one: the ratio of step times with its interval, of memory."""
    table = _table(f"against the comparison of {gate['measured']}")
    table.add_column("strategy", overflow="fold", min_width=12)
    for header in ("before\nms", "now\nms", "time", "95%", "memory"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in gate["cells"]:
        bad = row["verdict"] in ("slower", "memory", "broken")
        said = f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"]
        table.add_row(
            Text(row["label"]),
            fmt.number(row["step_ms_before"]),
            fmt.number(row["step_ms"]),
            fmt.speed(row["time_ratio"]),
            fmt.interval(row["time_interval"]) or fmt.NOTHING,
            fmt.speed(row["memory_ratio"]),
            Text(said, "red" if bad else ""),
        )
    return table


def gate_verdict(gate: Mapping[str, Any]) -> str:
    bad = [r["label"] for r in gate["cells"] if r["verdict"] in ("slower", "memory", "broken")]
    if bad:
        return f"failed: {fmt.names(bad)}"
    if not gate["limits"]:
        return "no limit was given (--fail-if slower=5%)"
    limits = " and ".join(f"{name} {100 * value:g}%" for name, value in gate["limits"].items())
    return f"passed: nothing is surely beyond {limits}"


def _was_proved(result: Result) -> bool:
    return any(cell.get("proof") for cell in result["cells"])


def _row(cell: Cell, result: Result) -> list[Text]:
    label, world = Text(cell["label"]), Text(str(cell["world"]))
    step_ms = cell["step_ms"]
    if step_ms is None:
        style = "red" if cell["status"] == "failed" else "yellow"
        return [label, world, Text(cell["status"], style)]
    differs = fmt.agrees(cell, result) is False
    return [
        label,
        world,
        Text.assemble(fmt.number(step_ms["median"]), " ", (fmt.spread(step_ms), "dim not bold")),
        Text(fmt.speed(cell["speed_to_baseline"]), "green" if cell is fmt.fastest(result) else ""),
        Text(fmt.compact(cell[fmt.rate_key(result)])),
        Text(fmt.size(fmt.peak(cell))),
        Text(
            ("≠ " if differs else "") + fmt.difference(cell["loss_difference"]),
            "red" if differs else "",
        ),
        *([_proof(cell)] if _was_proved(result) else []),
    ]


def _proof(cell: Cell) -> Text:
    passed = (cell.get("proof") or {}).get("pass")
    return Text(fmt.proof_mark(cell), {True: "green", False: "red", None: ""}[passed])


def _reasons(result: Result) -> Text | None:
    lines = [
        Text.assemble(
            (f"{cell['label']} {cell['status']}: ", "bold"), cell["reason"] or "no reason"
        )
        for cell in result["cells"]
        if cell["step_ms"] is None
    ]
    lines += [
        Text.assemble((f"{cell['label']} {word}: ", "bold"), proof["message"])
        for cell in result["cells"]
        if (proof := cell.get("proof")) and (word := NOT_PROVED.get(proof["pass"]))
    ]
    return Text("\n").join([Text(), *lines]) if lines else None


def verdict(result: Result) -> str:
    """The answer in a few plain sentences: speed, memory, agreement, and what has no numbers."""
    cells = fmt.measured(result)
    missing = _missing(result)
    if not cells:
        return f"No strategy finished: {missing}."
    sentences = [_speed(result), _memory_and_loss(result), missing]
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def verdict_lines(result: Result) -> list[str]:
    """The verdict, what to choose and why, and what would change that; a line each."""
    answer = result.get("answer")
    if not answer:
        return [verdict(result)]
    why = answer["why"] if answer["choice"] is None else f"Choose {answer['why']}"
    return [verdict(result), why, *(f"  {o}" for o in answer["otherwise"])]


def _speed(result: Result) -> str:
    cells, first = fmt.measured(result), fmt.fastest(result)
    assert first is not None
    time = f"{fmt.number(first['step_ms']['median'])} ms a step"
    if len(cells) == 1:
        return f"{first['label']} took {time}"
    reference = fmt.baseline(result, first)
    if first is reference:
        text = f"{first['label']}, the baseline, was fastest at {time}"
    else:
        text = f"{first['label']} was fastest at {time}"
        if first["speed_to_baseline"] is not None:
            text += f", {fmt.speed(first['speed_to_baseline'])} as fast as {reference['label']}"
    rivals = [
        cell["label"]
        for cell in cells
        if cell is not first and cell["step_ms"]["p10"] <= first["step_ms"]["p90"]
    ]
    if rivals:
        text += f", though its spread overlaps that of {fmt.names(rivals)}"
    return text


def _memory_and_loss(result: Result) -> str:
    return "; ".join(part for part in (_memory(result), _agreement(result)) if part)


def _memory(result: Result) -> str:
    lean = fmt.leanest(result)
    if not lean:
        return ""
    least = fmt.size(fmt.peak(lean[0]))
    if len(lean) == len(fmt.measured(result)):
        return f"{'Each' if len(lean) > 1 else 'It'} held {least} of memory at its peak"
    labels = fmt.names([cell["label"] for cell in lean])
    return f"{labels} needed the least memory, {least} on the fullest rank"


def _agreement(result: Result) -> str:
    reference = fmt.baseline(result)
    others = [cell for cell in fmt.measured(result) if not fmt.is_baseline(result, cell)]
    if not others:
        return ""
    if reference["loss_difference"] is None:
        return "the losses were not checked, as single was not measured"
    if result.get("loss_not_compared"):
        proofs = [(cell.get("proof") or {}).get("pass") for cell in others]
        decides = "the proof decides" if None not in proofs else "only a proof can decide"
        return f"the losses were not compared, as {result['loss_not_compared']}: {decides}"
    if not math.isfinite(reference["loss"]):
        return f"the losses were not checked, as that of single is {reference['loss']}"
    checked = [cell for cell in others if cell["loss_difference"] is not None]
    apart = [cell for cell in checked if not fmt.agrees(cell, result)]
    if not apart:
        some = "" if len(checked) == len(others) else (
            ", where the micro-batches are single's (BatchNorm sees them apart)")  # fmt: skip
        return f"every final loss agrees with that of single{some}"
    largest = fmt.difference(max(cell["loss_difference"] for cell in apart))
    if len(apart) == 1:
        return f"the final loss of {apart[0]['label']} differs from that of single by {largest}"
    labels = fmt.names([cell["label"] for cell in apart])
    return f"the final losses of {labels} differ from that of single, by up to {largest}"


def _missing(result: Result) -> str:
    """``a and b failed, c was skipped``"""
    parts = []
    for status, verb in (("failed", " failed"), ("skipped", " was skipped")):
        labels = [cell["label"] for cell in result["cells"] if cell["status"] == status]
        if labels:
            verb = verb.replace("was", "were") if len(labels) > 1 else verb
            parts.append(fmt.names(labels) + verb)
    return ", ".join(parts)
