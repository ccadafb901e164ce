"""A plan in the terminal, and as a page: scaling curves, a simulated timeline, what to choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.files import write_json
from shardlab.plan.advice import chosen_by
from shardlab.report import charts, page, terminal, timeline

Result = Mapping[str, Any]  # the content of plan.json, or of plan-check.json
Row = Mapping[str, Any]
HELD = {unit: fmt.BYTES[unit] for unit in ("GiB", "MiB", "KiB")}
PARTS = {
    "k-compute": "work", "k-comm": "exposed communication",
    "k-wait": "bubble: other stages were not there yet",
}  # fmt: skip
PHASES = {
    "forward": "forward", "backward": "backward", "update": "update", "other": "other work",
    "exposed": "exposed communication", "bubble": "bubble",
}  # fmt: skip
COLOURS = 8  # in the style sheet; a ninth curve has the first one again
MAX_COLLECTIVES = 12
SPARE = ("naive", "MFU")  # columns that a narrow terminal goes without


def is_check(result: Result) -> bool:
    return "coverage" in result


def write(folder: Path, result: Result) -> dict[str, Path]:
    """``plan.json`` and the page ``plan.html``; of a check ``plan-check.json`` alone."""
    if is_check(result):
        files = {"json": folder / "plan-check.json"}
        write_json(files["json"], result)
        return files
    return page.write(folder, result, html(result), ("plan.json", "plan.html"))


# ------------------------------------------------------------------ the terminal


def show(result: Result, files: Mapping[str, Path], explain: bool = False) -> None:
    out = terminal.out()
    shown = [check_table(result)] if is_check(result) else list(tables(result, explain))
    for made in shown:
        terminal.show(out, terminal.fit(made, out.width, SPARE, "; plan.json has all"))
        out.print()
    terminal.say(out, *sentences(result), wraps=True)
    terminal.say_paths(out, files.values())


def tables(result: Result, explain: bool) -> Iterator[Table]:
    for place in places(result):
        yield table(result, place)
    for row in pipelines(result):
        yield ranks_table(row)
    if result["tokens"] is not None:
        yield budget_table(result)
    if result["what_if"]:
        yield what_if_table(result)
    if explain:
        for one in result["explained"]:
            yield explained_table(result, one)


def sentences(result: Result) -> Iterator[str]:
    if is_check(result):
        yield from check_sentences(result)
        return
    yield from result["answer"]["why"]
    yield from result["answer"]["otherwise"]
    yield from cut_sentences(result)
    yield from what_if_sentences(result)
    yield from refusals(result)
    yield from (f"note: {note}" for note in result["notes"])


def refusals(result: Result) -> Iterator[str]:
    """Why some rows have no numbers; what is said of several is said once."""
    for reason in dict.fromkeys(row["reason"] for row in result["rows"] if row["reason"]):
        who = dict.fromkeys(
            f"{row['label']} on {fmt.count(row['world'], 'rank')}"
            for row in result["rows"]
            if row["reason"] == reason
        )
        yield f"{fmt.names(list(who))}: {reason}"


def places(result: Result) -> list[str]:
    return list(dict.fromkeys(row["place"] for row in result["rows"]))


def subject(result: Result) -> str:
    model = result["config"]["model"]
    return f"{model['workload']} {model['size'] or ''}".rstrip()


def title(result: Result) -> str:
    config = result["config"]
    words = [subject(result), result["batch"], config["precision"]["compute"]]
    if config["training"]["activation_checkpointing"]:
        words.append("checkpointing")
    if config["training"]["compile"] != "none":
        words.append("compiled")
    return " · ".join(words)


def source(rows: Sequence[Row]) -> str:
    """Where the numbers come from; every table says it."""
    known = [row["is_measured"] for row in rows if row["is_measured"] is not None]
    if not known:
        return "no prediction"
    return "calibrated here" if all(known) else "never measured: from datasheets"


def unit_for(rows: Sequence[Row]) -> tuple[str, float]:
    """The unit of the longest step."""
    return fmt.unit_of(max((row["step_s"] or 0 for row in rows), default=0), fmt.SECONDS)


def memory_unit(rows: Sequence[Row]) -> tuple[str, float]:
    """The unit of the largest memory of a rank."""
    return fmt.unit_of(max((row["memory_bytes"] or 0 for row in rows), default=0), HELD)


def spread(row: Row) -> str:
    """The two ends of the interval, as parts of the step: one number where they are as far."""
    low, high = (f"{100 * abs(row[end] / row['step_s'] - 1):.0f}" for end in ("low_s", "high_s"))
    return f"±{low}%" if low == high else f"-{low} +{high}%"


def table(result: Result, place: str) -> Table:
    """One row for each strategy and number of ranks on one kind of machine."""
    rows = [row for row in result["rows"] if row["place"] == place]
    unit, one = unit_for(rows)
    held, size = memory_unit(rows)
    has_tokens, has_bubble = any(row["tokens_per_s"] for row in rows), bubbles(rows)
    made = terminal.table(
        "<strategy", "ranks", f"step\n{unit}", "90%", "naive",
        f"{'tokens' if has_tokens else 'samples'}\nper s", "MFU", "exposed\ncomm.",
        *(["bubble"] * has_bubble), f"{held} per\nrank",
        title=f"{title(result)}\n{place}, {source(rows)}",
        least=10,
    )  # fmt: skip
    chosen = result["answer"]["by_place"].get(place)
    for row in rows:
        style = "bold" if chosen is not None and result["rows"][chosen] is row else ""
        cells = [Text(row["label"], style), Text(f"{row['world']:,}")]
        if row["step_s"] is None:
            made.add_row(*cells, Text(row["status"], "yellow"))
            continue
        naive = fmt.NOTHING if row["naive_s"] is None else fmt.part_of_step(row["naive_s"] / one)
        made.add_row(
            *cells,
            Text(fmt.number(row["step_s"] / one), style),
            Text(spread(row), "dim"),
            Text(naive, "dim"),
            fmt.compact(row["tokens_per_s"] or row["samples_per_s"]),
            fmt.share(row["mfu"]),
            fmt.share(row["exposed_s"], row["step_s"]),
            *([fmt.share(row["bubble_s"], row["step_s"])] * has_bubble),
            memory_cell(row, size),
        )
    return made


def bubbles(rows: Sequence[Row]) -> bool:
    """Whether some row is a pipeline."""
    return any(row["bubble_s"] for row in rows)


def pipelines(result: Result) -> list[Row]:
    """The fastest pipeline at each place, and what is chosen if it is one."""
    rows = [result["rows"][one["row"]] for one in result["explained"]]
    return [row for row in rows if len(row["ranks"]) > 1]


def ranks_table(row: Row) -> Table:
    """The ranks of a pipeline that differ: how long each works, and what it stands still for."""
    unit, one = unit_for([row])
    made = terminal.table(
        "rank", "|stages", "work", "exposed\ncomm.", "bubble",
        title=f"{row['label']}, {fmt.count(row['world'], 'rank')} on {row['place']}: the step of "
        f"each stage, {unit}",
    )  # fmt: skip
    for rank in row["ranks"]:
        parts = (rank[part] / one for part in ("work_s", "exposed_s", "bubble_s"))
        stages = ", ".join(map(str, rank["stages"]))
        made.add_row(str(rank["rank"]), stages, *map(fmt.number, parts))
    return made


def cut_sentences(result: Result) -> Iterator[str]:
    """Why a bubble is larger than the formula's, and what an axis costs."""
    for row in pipelines(result):
        even, share = row["even_bubble"], row["bubble_s"] / row["step_s"]
        mean = row["work_s"]
        most = max(row["ranks"], key=lambda rank: float(rank["work_s"]))
        if even is None or share < even + 0.02 or most["work_s"] < 1.02 * mean:
            continue
        last = max(stage for rank in row["ranks"] for stage in rank["stages"])
        has = ["the head and the loss"] * (last in most["stages"])
        has += ["the embedding"] * (0 in most["stages"])
        yield (
            f"{row['label']} on {fmt.count(row['world'], 'rank')}: a bubble of "
            f"{fmt.share(share)}; with stages of equal work it would be {fmt.share(even)}. "
            f"Rank {most['rank']} works {fmt.time(most['work_s'])}, the mean is {fmt.time(mean)}"
            + (f": it has {' and '.join(has)}." if has else ".")
        )
    largest = max((row["world"] for row in result["rows"] if row["against"]), default=0)
    for row in result["rows"]:
        if row["against"] and row["world"] == largest:
            yield _cost_of_cut(row, result["rows"][row["against"]["row"]])


def _cost_of_cut(row: Row, base: Row) -> str:
    parts = {"work_s": "work", "exposed_s": "exposed communication",
             "bubble_s": "bubble"}  # fmt: skip
    text = ", ".join(
        f"{name} {fmt.time(base[key])} → {fmt.time(row[key])}"
        for key, name in parts.items()
        if row[key] or base[key]
    )
    before, now = (max(rank["collectives"] for rank in r["ranks"]) for r in (base, row))
    text = (
        f"{row['label']} on {fmt.count(row['world'], 'rank')} of {row['place']}, beside "
        f"{base['label']}: step {fmt.time(base['step_s'])} → {fmt.time(row['step_s'])}: {text}; "
        f"{before:,} → {fmt.count(now, 'collective')}."
    )
    less = row["against"]
    flops, size = less["flops"], less["pointwise_bytes"]
    if flops and size:
        text += (
            f" A rank computes {flops:.2f} times the FLOPs; norms, residuals and other operators "
            f"without FLOPs touch {size:.2f} times the bytes"
        )
        if max(flops, size) > 1.05:
            text += ": ranks that share a model repeat work"
        elif less["work_s"] > 0.02 * base["work_s"]:
            text += ": the same work, in smaller kernels"
        text += "."
    return text


def memory_cell(row: Row, unit: float) -> Text:
    mark = {True: (" ✓", "green"), False: (" ✗", "red"), None: ("  ", "")}[row["fits"]]
    return Text.assemble(fmt.number(row["memory_bytes"] / unit), mark)


def budget_table(result: Result) -> Table:
    """Days to the tokens asked for, and what they cost: what is chosen at each number of ranks. The
    page has all."""
    has_price = any(row["cost"] is not None for row in result["rows"])
    made = terminal.table(
        "<strategy", "ranks", "<on", "days", "90%", "naive", *(["cost"] if has_price else []),
        title=f"to train on {fmt.compact(result['tokens'])} tokens",
        least=10,
    )  # fmt: skip
    for row in (result["rows"][i] for i in chosen_by(result["rows"], "place", "world")):
        cells = [row["label"], f"{row['world']:,}", row["place"], fmt.number(row["days"]),
                 spread(row), fmt.number(row["naive_days"])]  # fmt: skip
        made.add_row(*map(Text, cells), *([Text(money(row["cost"]))] if has_price else []))
    return made


def money(cost: float | None) -> str:
    return fmt.NOTHING if cost is None else f"{cost:,.0f}" if cost >= 100 else f"{cost:,.2f}"


def what_if_table(result: Result) -> Table:
    """The step of what is chosen, as it is and after each change."""
    unit, one = unit_for([result["rows"][i] for i in result["answer"]["by_place"].values()])
    made = terminal.table(
        "<if …", "<on", "<strategy", "ranks", f"step\n{unit}", "then", "times",
        title="what if", least=10,
    )  # fmt: skip
    for what, row, seconds in changes(result):
        then = None if seconds is None else seconds / one
        made.add_row(
            *map(Text, (what, row["place"], row["label"], f"{row['world']:,}")),
            fmt.number(row["step_s"] / one),
            fmt.number(then),
            fmt.speed(None if seconds is None else seconds / row["step_s"]),
        )
    return made


def changes(result: Result) -> Iterator[tuple[str, Row, float | None]]:
    """Each change, what is chosen without it, and its step then."""
    for change in result["what_if"]:
        for i in result["answer"]["by_place"].values():
            yield change["change"], result["rows"][i], change["step_s"][i]


def what_if_sentences(result: Result) -> Iterator[str]:
    for change in result["what_if"]:
        for size, row in zip(change["bucket_mb"], result["rows"], strict=True):
            if size is not None:
                ranks = fmt.count(row["world"], "rank")
                yield (
                    f"The best bucket size of {row['label']} on {ranks} of {row['place']} is "
                    f"{size:g} MB."
                )
        for place, before in result["answer"]["by_place"].items():
            after = change["by_place"].get(place)
            if after is None:
                yield f"With {change['change']} nothing fits on {place}."
            elif after != before:
                row = result["rows"][after]
                ranks = fmt.count(row["world"], "rank")
                yield f"With {change['change']} on {place}: {row['label']} on {ranks}."


def explained_table(result: Result, one: Mapping[str, Any]) -> Table:
    """Where the predicted step goes: by phase, then the longest collectives."""
    row = result["rows"][one["row"]]
    unit, size = fmt.unit_of(row["step_s"], fmt.SECONDS)
    made = terminal.table(
        "<part", "times", unit, "share", f"exposed\n{unit}",
        title=f"{row['label']}, {fmt.count(row['world'], 'rank')} on {row['place']}: a step of "
        f"{fmt.number(row['step_s'] / size)} {unit}",
        least=10,
    )  # fmt: skip
    for part, name in PHASES.items():
        seconds = row["parts_s"][part]
        if seconds > 1e-9 * row["step_s"]:
            of_step = fmt.share(seconds, row["step_s"])
            made.add_row(Text(name, "bold"), "", fmt.number(seconds / size), of_step)
    for found in one["collectives"][:MAX_COLLECTIVES]:
        made.add_row(
            Text(found["name"]),
            f"{found['count']:,}",
            fmt.number(found["comm_s"] / size),
            fmt.share(found["comm_s"], row["step_s"]),
            fmt.number(found["exposed_s"] / size),
        )
    left = one["collectives"][MAX_COLLECTIVES:]
    if left:
        sums = (sum(found[key] for found in left) for key in ("count", "comm_s", "exposed_s"))
        count, comm, exposed = sums
        made.add_row(
            Text(f"{len(left)} more, shorter"),
            f"{count:,}",
            fmt.number(comm / size),
            fmt.share(comm, row["step_s"]),
            fmt.number(exposed / size),
        )
    return made


# ------------------------------------------------------------------ a check


def check_table(result: Result) -> Table:
    longest = max((row["predicted_s"] or 0 for row in result["rows"]), default=0)
    unit, one = fmt.unit_of(longest, fmt.SECONDS)
    made = terminal.table(
        "<strategy", "ranks", f"predicted\n{unit}", "90% interval", f"measured\n{unit}", "error",
        "inside", "naive\nerror",
        title=f"{subject(result)}: predicted, then measured here",
        least=10,
    )  # fmt: skip
    for row in result["rows"]:
        cells = [Text(row["label"]), Text(f"{row['world']:,}")]
        if row["predicted_s"] is None:
            made.add_row(*cells, Text("refused", "yellow"))
            continue
        low, high = row["low_s"] / one, row["high_s"] / one
        inside = {True: Text("yes", "green"), False: Text("no", "red"), None: Text(fmt.NOTHING)}
        made.add_row(
            *cells,
            fmt.number(row["predicted_s"] / one),
            f"{fmt.number(low, like=high)}–{fmt.number(high)}",
            fmt.number(None if row["measured_s"] is None else row["measured_s"] / one),
            signed(row["error"]),
            inside[row["inside"]],
            Text(signed(row["naive_error"]), "dim"),
        )
    return made


def signed(value: float | None) -> str:
    return fmt.NOTHING if value is None else f"{100 * value:+.1f}%"


def check_sentences(result: Result) -> Iterator[str]:
    for row in result["rows"]:
        if row["reason"]:
            yield f"{row['label']} on {fmt.count(row['world'], 'rank')}: {row['reason']}"
    if not result["points"]:
        yield "Nothing could be compared."
        return
    mean, worst = 100 * result["mean_error"], 100 * result["worst_error"]
    yield (
        f"Mean error {mean:.1f}%, at most {worst:.1f}%, on {fmt.count(result['points'], 'point')}; "
        f"{100 * result['coverage']:.0f}% of them lie inside the 90% interval."
    )
    if result["naive_mean_error"] is not None:
        naive = 100 * result["naive_mean_error"]
        yield f"The naive guess (a rank's own work, nothing sent) is {naive:.1f}% off."


# ------------------------------------------------------------------ the page


class Curve(NamedTuple):
    name: str
    colour: int
    line: str  # an SVG path, as is the band
    band: str
    dots: list[tuple[float, float, str]]  # percent across and down, and what it is


class Plot(NamedTuple):
    title: str
    curves: list[Curve]
    across: list[charts.Tick]
    down: list[charts.Tick]


class Scaling(NamedTuple):
    place: str
    source: str
    plots: list[Plot]


def scaling(result: Result) -> list[Scaling]:
    """Step time and throughput over the ranks, for each kind of machine; all on the same axes."""
    rows = [row for row in result["rows"] if row["step_s"]]
    if len({row["world"] for row in rows}) < 2:
        return []
    has_tokens = all(row["tokens_per_s"] for row in rows)
    name, key = ("Tokens", "tokens_per_s") if has_tokens else ("Samples", "samples_per_s")
    found = []
    for place in dict.fromkeys(row["place"] for row in rows):
        own = [row for row in rows if row["place"] == place]
        steps = _plot("Step", rows, own, "step_s", _time)
        rates = _plot(f"{name} per second", rows, own, key, fmt.compact)
        found.append(Scaling(place, source(own), [steps, rates]))
    return found


def _time(seconds: float) -> str:
    unit, one = fmt.unit_of(seconds, fmt.SECONDS)
    return f"{seconds / one:.4g} {unit}"


def _band(row: Row, key: str) -> tuple[float, float]:
    """The interval of what is drawn: that of the step or, the other way round, of a rate."""
    if key == "step_s":
        return row["low_s"], row["high_s"]
    steps = row[key] * row["step_s"]
    return steps / row["high_s"], steps / row["low_s"]


def _plot(
    name: str, rows: Sequence[Row], own: Sequence[Row], key: str, text: Callable[[float], str]
) -> Plot:
    worlds = sorted({row["world"] for row in own})
    edges = [edge for row in own for edge in _band(row, key)]
    wide, high = charts.Log(worlds[0], worlds[-1]), charts.Log(min(edges) / 1.1, max(edges) * 1.1)
    labels = list(dict.fromkeys(row["label"] for row in rows))  # a colour for each, on all plots
    curves = []
    for number, label in enumerate(labels):
        mine = sorted((r for r in own if r["label"] == label), key=lambda row: row["world"])
        if not mine:
            continue
        at = [wide.at(row["world"]) for row in mine]
        low, top = zip(*(_band(row, key) for row in mine), strict=True)
        around = [*zip(at, low, strict=True), *reversed([*zip(at, top, strict=True)])]
        dots = [
            (x, 100 - high.at(row[key]), f"{label}, {fmt.count(row['world'], 'rank')}: "
             f"{fmt.time(row[key]) if key == 'step_s' else fmt.compact(row[key])} {spread(row)}")
            for x, row in zip(at, mine, strict=True)
        ]  # fmt: skip
        line = charts.line((x, y) for x, y, _ in dots)
        band = charts.line((x, 100 - high.at(value)) for x, value in around) + "Z"
        curves.append(Curve(label, number % COLOURS, line, band, dots))
    ticks = [charts.Tick(wide.at(world), f"{world:,}") for world in worlds]
    return Plot(name, curves, ticks, high.round_ticks(text))


def stacks(result: Result) -> list[tuple[str, charts.StackChart]]:
    """Where the step goes, at the number of ranks that is chosen, for each kind of machine."""
    found = []
    for place, chosen in result["answer"]["by_place"].items():
        world = result["rows"][chosen]["world"]
        bars = [
            charts.Amounts(
                row,
                {"k-compute": row["work_s"], "k-comm": row["exposed_s"], "k-wait": row["bubble_s"]},
                max(0.0, min(row["comm_s"] - row["exposed_s"], row["work_s"])),
            )
            for row in result["rows"]
            if row["step_s"] and row["place"] == place and row["world"] in (world, 1)
        ]
        name = f"{place}, {fmt.count(world, 'rank')}"
        unit = unit_for([bar.of for bar in bars])
        found.append((name, charts.stacked(bars, PARTS, fmt.time, unit)))
    return found


def timelines(result: Result) -> list[tuple[str, dict[str, Any]]]:
    """The simulated steps that are explained, for the viewer of traces: one rank stands for all, or
    one for each stage."""
    found = []
    for one in result["explained"]:
        row = result["rows"][one["row"]]
        titles = {"bubble": "bubble", "work": "compute", "comm": "comm", "wait": "wait"}
        spans: dict[tuple[int, str], list[tuple[int, int, str]]] = {
            (rank, title): []
            for rank in sorted({span[4] for span in one["spans"]})
            for title in titles.values()
        }
        for lane, name, begin, end, rank in one["spans"]:
            own = spans[rank, titles[lane]]
            own.append((round(1e9 * begin), round(1e9 * end), name or lane))
        lanes = [lane for key, mine in spans.items() for lane in timeline.side_by_side(*key, mine)]
        if lanes:
            name = f"{row['label']}, {fmt.count(row['world'], 'rank')} on {row['place']}"
            found.append((name, timeline.columns(lanes)))
    return found


def html(result: Result) -> str:
    rows = result["rows"]
    known = [row for row in rows if row["step_s"]]
    unit = unit_for(rows)
    facts = [
        ("Model", subject(result)),
        ("Batch", result["batch"]),
        ("Precision", result["config"]["precision"]["compute"]),
        ("Layouts", f"{len(known):,}"),
        ("Ranks", ", ".join(f"{world:,}" for world in sorted({row["world"] for row in rows}))),
    ]
    if result["tokens"] is not None:
        facts.append(("Tokens", fmt.compact(result["tokens"])))
    return page.render(
        "plan.html.j2",
        result=result,
        css=page.asset("timeline.css") + page.asset("trace.css"),
        js=page.asset("tables.js") + page.asset("timeline.js"),
        title=f"{subject(result)}: {_headline(result)}",
        why=result["answer"]["why"],
        otherwise=[*result["answer"]["otherwise"], *cut_sentences(result),
                   *what_if_sentences(result)],
        refused=list(refusals(result)),
        facts=facts,
        unmeasured=[place for place in places(result) if source(
            [row for row in known if row["place"] == place]).startswith("never")],
        scaling=scaling(result),
        rows=known,
        unit=unit,
        chosen=[rows[i] for i in result["answer"]["by_place"].values()],
        has_places=len(places(result)) > 1,
        has_bubble=bubbles(known),
        has_tokens=any(row["tokens_per_s"] for row in known),
        pipelines=pipelines(result),
        time_unit=lambda row: unit_for([row]),
        stacks=stacks(result),
        timelines=timelines(result),
        what_if=list(changes(result)),
        money=money,
        spread=spread,
        held=memory_unit(known),
    )  # fmt: skip


def _headline(result: Result) -> str:
    choice = result["answer"]["choice"]
    if choice is None:
        return "nothing fits"
    row = result["rows"][choice]
    return f"{row['label']} on {fmt.count(row['world'], 'rank')} of {row['place']}"
