"""The network in the terminal, and as a page: times by size, fitted lines, links, a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from shardlab import stats
from shardlab import text as fmt
from shardlab.measure.network import COLLECTIVES, Fit, name_of, rate
from shardlab.report import charts, page, terminal

Result = Mapping[str, Any]  # the content of network.json


def write(folder: Path, result: Result) -> dict[str, Path]:
    """``network.json``, and the page ``network.html``."""
    return page.write(folder, result, html(result), ("network.json", "network.html"))


# ------------------------------------------------------------------ the terminal


def show(result: Result, files: Mapping[str, Path]) -> None:
    out = terminal.out()
    for shown in (times_table(result), fits_table(result), links_table(result)):
        if shown.row_count:
            out.print(shown)
            out.print()
    terminal.say(out, *result["verdict"], wraps=True)
    terminal.say_paths(out, files.values())


def title(result: Result) -> str:
    nodes = len({place["node"] for place in result["places"]})
    where = fmt.count(nodes, "node")
    return f"{fmt.count(result['world'], 'rank')} on {where} · {result['backend']}"


def times_table(result: Result) -> Table:
    """Median milliseconds of each collective, and how far the rounds differ."""
    shown = terminal.table(
        "|tensor", *COLLECTIVES, title=f"{title(result)} · ms, and ± half of p10–p90"
    )
    for size, row in by_size(result).items():
        cells = [_cell(row[op]["ms"]) if op in row else Text(fmt.NOTHING) for op in COLLECTIVES]
        shown.add_row(fmt.size(size), *cells)
    barrier = next(point for point in result["points"] if point["op"] == "barrier")
    shown.add_row("barrier", _cell(barrier["ms"]))
    return shown


def by_size(result: Result) -> dict[int, dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for point in result["points"]:
        if point["op"] != "barrier":
            rows.setdefault(point["bytes"], {})[point["op"]] = point
    return dict(sorted(rows.items()))


def _cell(ms: stats.Spread) -> Text:
    half = (ms["p90"] - ms["p10"]) / 2 / ms["median"]
    return Text.assemble(fmt.number(ms["median"]), (f" ±{100 * half:.0f}%".rjust(6), "dim"))


def fits_table(result: Result) -> Table:
    shown = terminal.table(
        "|time = α + β·bytes", "α ms", "95%", "1/β Gbit/s", "95%", "α is half at",
        title="fitted lines",
    )  # fmt: skip
    for found in result["fits"]:
        shown.add_row(found["op"], *fit_texts(found))
    return shown


def fit_texts(found: Fit) -> tuple[str, ...]:
    """α and 1/β, each with its interval, and the tensor for which α is half of the time."""
    alpha, beta = found["alpha_s"], found["beta_s_per_byte"]
    return (
        fmt.number(1e3 * alpha),
        _between(*(1e3 * value for value in found["alpha_95"])),
        fmt.number(_gbit(beta) if beta > 0 else None),
        _between(*(_gbit(value) for value in reversed(found["beta_95"]))),
        fmt.size(found["half_bytes"]),
    )


def _between(low: float, high: float) -> str:
    if not math.isfinite(high):  # β may be 0: these sizes are too small to see it
        return f"≥ {fmt.number(low)}" if math.isfinite(low) else fmt.NOTHING
    return f"{fmt.number(low, like=high)}–{fmt.number(high)}"


def _gbit(beta: float) -> float:
    """Seconds per byte as a rate in Gbit/s."""
    return 8e-9 / beta if beta > 0 else math.inf


def links_table(result: Result) -> Table:
    shown = terminal.table(
        "|link", "one way", ">p10–p90", "Gbit/s there", "back", ">p10–p90", title="links"
    )
    for link in result["links"]:
        latency, narrow = link["latency"], link["bandwidth"]
        shown.add_row(
            name_of(result, link),
            fmt.time(latency["median"]),
            f"{fmt.time(latency['p10'])}–{fmt.time(latency['p90'])}",
            *(fmt.number(8e-9 * link[way]["median"]) for way in ("there", "back")),
            fmt.p10_p90({key: 8e-9 * narrow[key] for key in ("p10", "p90")}),
        )
    return shown


# ------------------------------------------------------------------ the page


class Curve(NamedTuple):
    op: str
    dots: list[tuple[float, float, str]]  # percent across and down, and what it is
    whiskers: list[tuple[float, float, float]]  # across, from, to
    line: str  # the fitted one, as an SVG path


class Chart(NamedTuple):
    curves: list[Curve]
    across: list[charts.Tick]
    down: list[charts.Tick]


def chart(result: Result) -> Chart:
    """Times over sizes on logarithmic axes, with the fitted lines."""
    points = [point for point in result["points"] if point["op"] != "barrier"]
    sizes = [point["bytes"] for point in points]
    times = [point["ms"][key] for point in points for key in ("p10", "p90")]
    wide = charts.Log(min(sizes), max(sizes))
    high = charts.Log(min(times) / 1.3, max(times) * 1.3)
    fits = {found["op"]: found for found in result["fits"]}
    curves = []
    for op in COLLECTIVES:
        mine = [point for point in points if point["op"] == op]
        dots = [
            (
                wide.at(point["bytes"]),
                100 - high.at(point["ms"]["median"]),
                f"{op}, {fmt.size(point['bytes'])}: {fmt.number(point['ms']['median'])} ms",
            )
            for point in mine
        ]
        whiskers = [
            (wide.at(p["bytes"]), 100 - high.at(p["ms"]["p10"]), 100 - high.at(p["ms"]["p90"]))
            for p in mine
        ]
        curves.append(Curve(op, dots, whiskers, _fitted(mine, fits.get(op), wide, high)))
    return Chart(curves, wide.ticks(fmt.size, 1024, 4), high.ticks(lambda ms: f"{ms:g} ms", 1, 10))


def _fitted(mine: list[Any], found: Fit | None, wide: charts.Log, high: charts.Log) -> str:
    if found is None:
        return ""
    first, last = mine[0], mine[-1]
    factor = last["bus_bytes"] / last["bytes"]
    steps = [first["bytes"] * (last["bytes"] / first["bytes"]) ** (i / 40) for i in range(41)]
    model = [1e3 * (found["alpha_s"] + found["beta_s_per_byte"] * factor * size) for size in steps]
    return charts.line(
        (wide.at(size), 100 - high.at(ms)) for size, ms in zip(steps, model, strict=True) if ms > 0
    )


def html(result: Result) -> str:
    first, *others = result["verdict"]
    facts = [
        ("Ranks", f"{result['world']:,}"),
        ("Nodes", f"{len({place['node'] for place in result['places']}):,}"),
        ("Backend", result["backend"]),
        ("Device", result["device"]),
        ("Rounds", f"{result['rounds']:,}"),
        ("PyTorch", result["env"]["torch"]),
        ("Time", result["env"]["time"]),
    ]
    return page.render(
        "network.html.j2",
        result=result,
        title=title(result),
        css=page.asset("trace.css"),
        verdict=first,
        sentences=others,
        facts=facts,
        chart=chart(result),
        rows=by_size(result),
        collectives=COLLECTIVES,
        fit_texts=fit_texts,
        name_of=name_of,
        rate=rate,
    )  # fmt: skip
