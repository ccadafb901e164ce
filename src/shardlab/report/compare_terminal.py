"""A comparison in the terminal: a table that fits 80 columns, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.measure import fields
from shardlab.measure.fields import Cell, Result
from shardlab.measure.gate import BAD
from shardlab.report import terminal

NOT_PROVED = {False: "is wrong", None: "was not proved"}


def compare_table(result: Result) -> Table:
    """One row per strategy; below it, over the full width, why a row has no numbers."""
    table = terminal.table(
        "<strategy", "world", ">step\nms p10–p90", "speed", fields.rate_name(result),
        "peak\nmemory", "loss to\nsingle", *(["|ok"] if _was_proved(result) else []),
        title=f"{result['workload']} · {fmt.compact(result['parameters'])} parameters · "
        f"global batch {result['global_batch']} · speed against {fields.baselines(result)}",
        caption=_reasons(result),
        least=12,
    )  # fmt: skip
    fastest = fields.fastest(result)
    for cell in result["cells"]:
        style = "bold" if fields.is_baseline(result, cell) else ""
        table.add_row(*_row(cell, result, cell is fastest), style=style)
    return table


PROFILE_HEADS = ["com-\npute", "exposed\ncomm", "waits", "idle,\ncopies", "over-\nlap", "sent"]
SPARE = ("skew\nms", "over-\nlap", "idle,\ncopies")  # what is left out first, if it is too wide
BUBBLE_AT = 3  # behind the waits, where a pipeline is compared


def explained_table(result: Result) -> Table | None:
    """How sure a speed is, and where a profiled step went; None if there is nothing to say."""
    cells = fields.measured(result)
    has_profile = any(cell.get("profile") for cell in cells)
    bubble = [*PROFILE_HEADS[:BUBBLE_AT], "bubble", *PROFILE_HEADS[BUBBLE_AT:]]
    heads = bubble if fields.has_bubble(result) else PROFILE_HEADS
    has_mfu = any(cell.get("mfu") for cell in cells)
    is_sure = any(fmt.interval(cell["speed_interval"]) for cell in cells)
    if not (has_profile or has_mfu or (is_sure and len(cells) > 1)):
        return None
    titles = ["where a profiled step goes, ms · what a rank sends"] * has_profile
    titles += ["how sure the speed is (95%)"] * is_sure
    table = terminal.table(
        "<strategy", *(heads * has_profile), "skew\nms", *(["speed\n95%"] * is_sure),
        *(["MFU"] * has_mfu),
        title=" · ".join(titles) or "how far the ranks are apart",
        least=12,
    )  # fmt: skip
    for cell in cells:
        table.add_row(
            Text(cell["label"]),
            *(_profile(cell, fields.has_bubble(result)) * has_profile),
            f"{cell['skew_ms']:.1f}" if cell["skew_ms"] else "0",
            *([fmt.interval(cell["speed_interval"]) or fmt.NOTHING] * is_sure),
            *([fmt.percent(fields.percent_of_peak(cell))] * has_mfu),
        )
    return table


def _profile(cell: Cell, has_bubble: bool) -> list[str]:
    """Where a profiled step of the cell went, and what it sent."""
    profile = cell.get("profile")
    if not profile:
        return [fmt.NOTHING] * (len(PROFILE_HEADS) + has_bubble)
    shown = [profile["compute_ms"], profile["exposed_comm_ms"], profile["wait_ms"]]
    shown += [fields.bubble_ms(profile)] * has_bubble
    return [
        *(fmt.part_of_step(value) for value in (*shown, fields.idle_ms(profile))),
        fmt.percent(profile["overlap_pct"]),
        fmt.size(fields.sent(cell)),
    ]


def gate_table(gate: Mapping[str, Any]) -> Table:
    """Each cell against the earlier one: the ratio of step times with its interval, of memory."""
    table = terminal.table(
        "<strategy", "before\nms", "now\nms", "time", "95%", "memory", "<verdict",
        title=f"against the comparison of {gate['measured']}",
        least=12,
    )  # fmt: skip
    for row in gate["cells"]:
        verdict = f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"]
        table.add_row(
            Text(row["label"]),
            fmt.number(row["step_ms_before"]),
            fmt.number(row["step_ms"]),
            fmt.speed(row["time_ratio"]),
            fmt.interval(row["time_interval"]) or fmt.NOTHING,
            fmt.speed(row["memory_ratio"]),
            Text(verdict, "red" if row["verdict"] in BAD else ""),
        )
    return table


def gate_verdict(gate: Mapping[str, Any]) -> str:
    bad = [row["label"] for row in gate["cells"] if row["verdict"] in BAD]
    if bad:
        return f"failed: {fmt.names(bad)}"
    if not gate["limits"]:
        return "no limit was given (--fail-if slower=5%)"
    limits = " and ".join(f"{name} {100 * value:g}%" for name, value in gate["limits"].items())
    return f"passed: nothing is surely beyond {limits}"


def _was_proved(result: Result) -> bool:
    return any(cell.get("proof") for cell in result["cells"])


def _row(cell: Cell, result: Result, is_fastest: bool) -> list[Text]:
    label, world = Text(cell["label"]), Text(str(cell["world"]))
    step_ms = cell["step_ms"]
    if step_ms is None:
        style = "red" if cell["status"] == "failed" else "yellow"
        return [label, world, Text(cell["status"], style)]
    differs = fields.agrees(cell, result) is False
    return [
        label,
        world,
        Text.assemble(fmt.number(step_ms["median"]), " ", (fmt.p10_p90(step_ms), "dim not bold")),
        Text(fmt.speed(cell["speed_to_baseline"]), "green" if is_fastest else ""),
        Text(fmt.compact(cell[fields.rate_key(result)])),
        Text(fmt.size(fields.peak(cell))),
        Text(
            ("≠ " if differs else "") + fmt.difference(cell["loss_difference"]),
            "red" if differs else "",
        ),
        *([_proof(cell)] if _was_proved(result) else []),
    ]


def _proof(cell: Cell) -> Text:
    passed = fields.proved(cell)
    return Text(fmt.mark(passed), {True: "green", False: "red", None: ""}[passed])


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
    missing = _missing(result)
    if not fields.measured(result):
        return f"No strategy finished: {missing}."
    memory_and_loss = "; ".join(filter(None, (_memory(result), _agreement(result))))
    if memory_and_loss.startswith(("the ", "every ")):  # no name stands first
        memory_and_loss = memory_and_loss[0].upper() + memory_and_loss[1:]
    stopped = "The comparison was interrupted" if result.get("interrupted") else ""
    sentences = (_speed(result), memory_and_loss, missing, stopped)
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def verdict_lines(result: Result) -> list[str]:
    """The verdict, what to choose and why, what would change that, and which proofs are older; a
    line each."""
    kept = [said] if (said := fields.kept_proofs(result)) else []
    answer = result.get("answer")
    if not answer:
        return [verdict(result), *kept]
    why = answer["why"] if answer["choice"] is None else f"Choose {answer['why']}"
    return [verdict(result), why, *(f"  {o}" for o in answer["otherwise"]), *kept]


def _speed(result: Result) -> str:
    cells = fields.measured(result)
    first = fields.shortest(cells)
    assert first is not None
    time = f"{fmt.number(first['step_ms']['median'])} ms a step"
    if len(cells) == 1:
        return f"{first['label']} took {time}"
    reference = fields.baseline(result, first)
    name = f"{first['label']}, the baseline," if first is reference else first["label"]
    # A tie is told by the answer, in its reason.
    is_tied = fields.fastest(result) is None
    text = f"{name} took the least time, {time}" if is_tied else f"{name} was fastest at {time}"
    if first is not reference and first["speed_to_baseline"] is not None:
        text += f", {fmt.speed(first['speed_to_baseline'])} as fast as {reference['label']}"
    return text


def _memory(result: Result) -> str:
    lean = fields.leanest(result)
    if not lean:
        return ""
    least = fmt.size(fields.peak(lean[0]))
    if len(lean) == len(fields.measured(result)):
        return f"{'Each' if len(lean) > 1 else 'It'} held {least} of memory at its peak"
    labels = fmt.names([cell["label"] for cell in lean])
    return f"{labels} needed the least memory, {least} on the fullest rank"


def _agreement(result: Result) -> str:
    others = [cell for cell in fields.measured(result) if not fields.is_baseline(result, cell)]
    workers = [cell["label"] for cell in others if cell.get("every")]
    rest = _agreement_of(result, [cell for cell in others if not cell.get("every")])
    if not workers:
        return rest
    verb = "trains" if len(workers) == 1 else "train"
    apart = f"{fmt.names(workers)} {verb} otherwise than one process, to another loss"
    rest = rest.replace("every final loss", "every other final loss")
    return f"{rest}; {apart}" if rest else apart


def _agreement_of(result: Result, others: Sequence[Cell]) -> str:
    reference = fields.baseline(result)
    if not others:
        return ""
    if reference["loss_difference"] is None:
        return "the losses were not checked, as single was not measured"
    if result.get("loss_not_compared"):
        is_proved = all(fields.proved(cell) is not None for cell in others)
        decides = "the proof decides" if is_proved else "only a proof can decide"
        return f"the losses were not compared, as {result['loss_not_compared']}: {decides}"
    if not math.isfinite(reference["loss"]):
        return f"the losses were not checked, as that of single is {reference['loss']}"
    checked = [cell for cell in others if cell["loss_difference"] is not None]
    apart = [cell for cell in checked if not fields.agrees(cell, result)]
    if not apart:
        if result.get("couples_samples"):
            return f"every final loss agrees with that of single{_beside(result, others)}"
        some = "" if len(checked) == len(others) else (
            ", where the micro-batches are single's (BatchNorm sees them apart)")  # fmt: skip
        return f"every final loss agrees with that of single{some}"
    largest = fmt.difference(max(cell["loss_difference"] for cell in apart))
    if len(apart) == 1:
        return f"the final loss of {apart[0]['label']} differs from that of single by {largest}"
    labels = fmt.names([cell["label"] for cell in apart])
    return f"the final losses of {labels} differ from that of single, by up to {largest}"


def _beside(result: Result, others: Sequence[Cell]) -> str:
    """That ``single`` had the ranks' micro-batches, where the loss looks at one as a whole."""
    batch = result["global_batch"]
    here = fmt.beside(batch, fields.baseline(result)["accumulate"])
    alone = fmt.beside(batch, min(cell["accumulate"] for cell in others))
    return (
        f" on the same micro-batches, in which the loss sees each sample beside {here} others "
        f"(negatives); in one process `train` would show it {alone}, and the loss would be another"
    )


def _missing(result: Result) -> str:
    """``a and b failed, c was skipped``"""
    parts = []
    for status, verb in (("failed", " failed"), ("skipped", " was skipped")):
        labels = [cell["label"] for cell in result["cells"] if cell["status"] == status]
        if labels:
            verb = verb.replace("was", "were") if len(labels) > 1 else verb
            parts.append(fmt.names(labels) + verb)
    return ", ".join(parts)
