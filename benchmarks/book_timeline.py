"""One step of each rank as a small static picture: taken from a trace, then drawn as SVG.

``take`` computes and ``draw`` draws. What lies between them is plain data that is kept in
``docs/book/numbers.json``, so that a picture can be drawn anew without measuring anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, LEFT, RIGHT, LANE, GAP, TOP = 760, 72, 12, 20, 5, 26
PIXEL = 1 / (WIDTH - LEFT - RIGHT)  # of the step: what is shorter cannot be seen

Spans = Sequence[Sequence[Any]]  # [start ms, end ms, class]

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333a40 }
  .quiet { fill: #6b737b }
  .axis { stroke: #b9bfc4 }
  .track { fill: #eef0ee }
  .forward { fill: #7fb3b8 } .backward { fill: #1b7f88 } .optimizer { fill: #7f62ad }
  .other { fill: #a8adb2 }
  .reduce { fill: #d98f16 } .gather { fill: #4f86c6 } .wait { fill: #c2452f }
  @media (prefers-color-scheme: dark) {
    text { fill: #d5d9dc } .quiet { fill: #98a0a8 }
    .axis { stroke: #4a5157 } .track { fill: #23282c }
    .forward { fill: #2f6f76 } .backward { fill: #46aab3 } .optimizer { fill: #a38bd0 }
    .other { fill: #6a727a }
    .reduce { fill: #d8a03c } .gather { fill: #6ea0da } .wait { fill: #e0745e }
  }"""

KEY = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "other work",
    "reduce": "gradients travel",
    "gather": "parameters travel",
    "wait": "waiting for the other rank",
}


# ------------------------------------------------------------------ from a trace


def take(traces: Any) -> dict[str, Any]:
    """The step of median length, on every rank: when it computed, sent and waited."""
    from shardlab.trace import activity

    rows = traces.breakdown()
    numbers = sorted({row.step for row in rows})
    length = {n: max(r.wall_us for r in rows if r.step == n) for n in numbers}
    chosen = sorted(numbers, key=length.__getitem__)[len(numbers) // 2]
    steps = {t.rank: next(s for s in t.steps if s.number == chosen) for t in traces.traces}
    phases = {t.rank: activity.Phases(t) for t in traces.traces}
    # Ranks of one host share a clock; the step begins when the first of them begins it.
    origin = min(step.start_ns for step in steps.values())
    lanes: dict[str, Any] = {}
    for lane in traces.lanes():
        if lane.lane not in ("compute", "wait"):
            continue
        step, spans = steps[lane.rank], []
        for start, end in zip(lane.start_ns.tolist(), lane.end_ns.tolist(), strict=True):
            if end <= step.start_ns or start >= step.end_ns:
                continue
            kind = "wait" if lane.lane == "wait" else phases[lane.rank].at((start + end) // 2)
            spans.append([*_ms(start, end, step, origin), kind])
        lanes.setdefault(str(lane.rank), {})[lane.lane] = spans
    for row in traces.collectives():
        for part in row.participants:
            step = steps.get(part.rank)
            if step is None or part.end_ns <= step.start_ns or part.start_ns >= step.end_ns:
                continue
            kind = "gather" if row.kind in ("all_gather", "broadcast") else "reduce"
            span = [*_ms(part.start_ns, part.end_ns, step, origin), kind]
            lanes[str(part.rank)].setdefault("comm", []).append(span)
    here = [row for row in rows if row.step == chosen]
    wall = sum(row.wall_us for row in here)
    comm = sum(row.comm_us for row in here)
    for rank in lanes.values():
        for name, spans in rank.items():
            rank[name] = merged(spans, max(length.values()) / 1000 * PIXEL)
    return {
        "steps": len(numbers),
        "wall_ms": round(max((s.end_ns - origin) / 1e6 for s in steps.values()), 2),
        "shares": {
            part: round(sum(getattr(row, f"{part}_us") for row in here) / wall, 4)
            for part in ("compute", "exposed_comm", "wait", "memory", "idle_host", "idle")
        },
        "hidden": round(sum(row.hidden_comm_us for row in here) / comm, 4) if comm else None,
        "lanes": lanes,
    }


def _ms(start: int, end: int, step: Any, origin: int) -> list[float]:
    inside = max(start, step.start_ns), min(end, step.end_ns)
    return [round((moment - origin) / 1e6, 2) for moment in inside]


def merged(spans: Spans, closer_than: float) -> list[list[Any]]:
    """Spans of one kind with no visible gap between them, as one; in order of time."""
    result: list[list[Any]] = []
    last: dict[str, list[Any]] = {}
    for start, end, kind in sorted(map(list, spans)):
        before = last.get(kind)
        if before is not None and start - before[1] < closer_than:
            before[1] = max(before[1], end)
        else:
            last[kind] = [start, end, kind]
            result.append(last[kind])
    return result


# ------------------------------------------------------------------ to a picture


def draw(step: Mapping[str, Any], title: str) -> str:
    """SVG that follows the reader's light or dark theme."""
    wall = step["wall_ms"]
    scale = (WIDTH - LEFT - RIGHT) / wall
    ranks = sorted(step["lanes"], key=int)
    rows = [(rank, lane) for rank in ranks for lane in ("compute", "comm")]
    height_of_rank = 2 * LANE + GAP
    bottom = TOP + len(ranks) * (height_of_rank + 3 * GAP)
    height = bottom + 62  # the key may need two lines
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}\n</style>",
        f'<text x="{LEFT}" y="14">{title}</text>',
    ]
    for i, (rank, lane) in enumerate(rows):
        y = TOP + (i // 2) * (height_of_rank + 3 * GAP) + (i % 2) * (LANE + GAP // 2)
        name = f"rank {rank}" if lane == "compute" else "sends"
        style = "" if lane == "compute" else ' class="quiet"'
        out.append(f'<text x="4" y="{y + 15}"{style}>{name}</text>')
        out.append(_box(LEFT, y, WIDTH - LEFT - RIGHT, "track"))
        lanes = step["lanes"][rank]
        for start, end, kind in lanes.get(lane, []):
            out.append(_box(LEFT + start * scale, y, (end - start) * scale, kind))
        if lane == "comm":
            for start, end, kind in lanes.get("wait", []):
                out.append(_box(LEFT + start * scale, y + LANE - 5, (end - start) * scale, kind, 5))
    for tick in ticks(wall):
        x = LEFT + tick * scale
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(f'<text class="quiet" x="{x:.1f}" y="{bottom + 13}" '
                   f'text-anchor="middle">{tick:g} ms</text>')  # fmt: skip
    out += _key(step, bottom + 26)
    return "\n".join([*out, "</svg>", ""])


def _box(x: float, y: float, width: float, kind: str, height: int = LANE) -> str:
    shown = max(width, 0.5)
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{shown:.1f}" height="{height}"/>'


def _key(step: Mapping[str, Any], y: int) -> list[str]:
    spans = (s for lanes in step["lanes"].values() for lane in lanes.values() for s in lane)
    present = {kind for _, _, kind in spans}
    out, x = [], LEFT
    for kind, name in KEY.items():
        if kind not in present:
            continue
        width = 30 + round(6.4 * len(name))
        if x + width > WIDTH:
            x, y = LEFT, y + 18
        out.append(f'<rect class="{kind}" x="{x}" y="{y}" width="11" height="11"/>')
        out.append(f'<text class="quiet" x="{x + 15}" y="{y + 10}">{name}</text>')
        x += width
    return out


def ticks(wall: float) -> list[float]:
    """Four to nine round moments."""
    size = next(s for p in range(-2, 6) for s in (10**p, 2 * 10**p, 5 * 10**p) if wall / s < 9)
    return [i * size for i in range(int(wall / size) + 1)]
