"""Two runs side by side: what became faster or slower, by part, phase, collective and operator.

All times are per step and per rank, so that runs of different length and size can be compared.
Pure: two ``TraceSet``s in, plain rows out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import numbers
from shardlab.trace.model import ANNOTATION, PARTS, PHASES

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

SCHEMA = 1
NOISE = 0.02  # a difference of a smaller share of the step does not count


@dataclass(frozen=True)
class Value:
    """Per step and rank."""

    us: float = 0.0
    count: float | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class Row:
    """One thing in both runs; zero time where a run does not have it."""

    group: str  # part, phase, collective, label, operator or step
    name: str
    a: Value
    b: Value

    @property
    def change_us(self) -> float:
        return self.b.us - self.a.us

    @property
    def ratio(self) -> float | None:
        return self.b.us / self.a.us if self.a.us else None


@dataclass(frozen=True)
class Diff:
    a: str  # what the runs are called
    b: str
    step: Row
    rows: tuple[Row, ...]  # in each group the largest change first
    notes: tuple[str, ...]  # what makes the comparison unequal
    steps_overlap: bool  # a step of the slower run was shorter than one of the faster

    def of(self, group: str) -> list[Row]:
        return [row for row in self.rows if row.group == group]

    def to_dict(self) -> dict[str, Any]:
        """The content of diff.json."""
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "sentence": sentence(self),
            "notes": list(self.notes),
            "steps_overlap": self.steps_overlap,
            "step": _plain(self.step),
            "rows": [_plain(row) for row in self.rows],
        }


def _plain(row: Row) -> dict[str, Any]:
    return {**asdict(row), "change_us": row.change_us, "ratio": row.ratio}


def diff(a: TraceSet, b: TraceSet, names: tuple[str, str] = ("A", "B")) -> Diff:
    """What changed from ``a`` to ``b``."""
    sides: dict[str, Callable[[TraceSet], Mapping[str, Value]]] = {
        "part": lambda traces: {name: _mean(traces, part) for part, name in PARTS.items()},
        "phase": _phases,
        "collective": lambda traces: _collectives(traces, "kind"),
        "label": lambda traces: _collectives(traces, "label"),
        "operator": _operators,
    }
    rows: list[Row] = []
    for group, side in sides.items():
        left, right = side(a), side(b)
        both = [
            Row(group, name, left.get(name, Value()), right.get(name, Value()))
            for name in {**left, **right}
        ]
        rows += sorted(both, key=lambda row: abs(row.change_us), reverse=True)
    step = Row("step", "step", _mean(a, "wall_us"), _mean(b, "wall_us"))
    faster, slower = sorted((_walls(a), _walls(b)), key=statistics.mean)
    overlap = max(faster) > min(slower)
    notes = _notes(a, b, rows)
    for name, traces in zip(names, (a, b), strict=True):
        notes += [f"{name}: {warning}" for warning in traces.warnings]
    return Diff(*names, step, tuple(rows), tuple(notes), overlap)


def names_of(a: TraceSet, b: TraceSet, paths: tuple[Path, Path]) -> tuple[str, str]:
    """What to call two runs: by strategy if that sets them apart, else by as much of the path."""
    left, right = (str(side.traces[0].shardlab.get("strategy") or "") for side in (a, b))
    if left and right and left != right:
        return left, right
    first, second = (path.resolve().parts for path in paths)
    for length in range(1, max(len(first), len(second)) + 1):
        if first[-length:] != second[-length:]:
            return str(Path(*first[-length:])), str(Path(*second[-length:]))
    return f"{paths[0].name} (A)", f"{paths[1].name} (B)"


def sentence(diff: Diff) -> str:
    """The answer in words: how much, and what most of it is."""
    change, was = diff.step.change_us, diff.step.a.us
    both = f"{diff.step.b.us / 1000:.3g} ms a step against {was / 1000:.3g} ms"
    if abs(change) < NOISE * was:
        return f"{diff.b} and {diff.a} take the same time: {both}."
    word = "less" if change < 0 else "more"
    first = f"{diff.b} takes {100 * abs(change) / was:.0f}% {word} time than {diff.a}: {both}"
    first += ", though single steps of the two overlap." if diff.steps_overlap else "."
    reasons: list[str] = []  # parts that changed the same way as the step
    against: list[str] = []
    for row in diff.of("part"):
        if abs(row.change_us) > 0.1 * abs(change):
            how = "less" if row.change_us < 0 else "more"
            text = f"{abs(row.change_us) / 1000:.3g} ms {how} {row.name}"
            (reasons if row.change_us * change > 0 else against).append(text)
    second = f" It has {numbers.names(reasons, len(reasons))}" if reasons else ""
    if second and against:
        second += f", but {numbers.names(against, len(against))}"
    return first + (second + "." if second else "")


# ------------------------------------------------------------------ one side


def _mean(traces: TraceSet, column: str) -> Value:
    rows = traces.breakdown(per="rank")
    return Value(statistics.mean(row.per_step(column) for row in rows))


def _walls(traces: TraceSet) -> list[float]:
    """For each step, the mean over the ranks."""
    walls: dict[int | None, list[float]] = defaultdict(list)
    for row in traces.breakdown(per="step"):
        walls[row.step].append(row.wall_us)
    return [statistics.mean(times) for times in walls.values()]


def _phases(traces: TraceSet) -> dict[str, Value]:
    """On the host: on a GPU the time to launch a phase, not to run it."""
    found = []
    for trace in traces.traces:
        events = trace.events
        inside = events.start_ns >= trace.steps[0].start_ns
        inside &= events.start_ns < trace.steps[-1].end_ns
        inside &= events.kind == ANNOTATION
        for number, name in enumerate(trace.names):
            if name in PHASES:
                times = events.dur_ns[inside & (events.name == number)]
                found.append((name, float(times.sum()) / 1000, len(times), None))
    return _per_step(found, sum(len(trace.steps) for trace in traces.traces))


def _collectives(traces: TraceSet, by: str) -> dict[str, Value]:
    """The time that a rank spent in them, waiting for others included."""
    found = (
        (name, (part.end_ns - part.start_ns) / 1000, 1, collective.bytes)
        for collective in traces.collectives()
        if (name := getattr(collective, by))
        for part in collective.participants
    )
    return _per_step(found, _rank_steps(traces))


def _operators(traces: TraceSet) -> dict[str, Value]:
    found = ((k.name, k.sum_us, k.count, None) for k in traces.kernels(top=1_000_000))
    return _per_step(found, _rank_steps(traces))


def _rank_steps(traces: TraceSet) -> int:
    return sum(row.steps for row in traces.breakdown(per="rank"))


def _per_step(found: Iterable[tuple[str, float, int, int | None]], steps: int) -> dict[str, Value]:
    """Times (us), counts and bytes summed by name, per step. A sum of unknown bytes is unknown."""
    sums: dict[str, tuple[float, int, int | None]] = {}
    for name, us, count, size in found:
        known = sums.get(name, (0.0, 0, 0))
        total = None if known[2] is None or size is None else known[2] + size
        sums[name] = (known[0] + us, known[1] + count, total)
    steps = max(steps, 1)
    return {
        name: Value(us / steps, count / steps, None if size is None else size / steps)
        for name, (us, count, size) in sums.items()
    }


def _notes(a: TraceSet, b: TraceSet, rows: list[Row]) -> list[str]:
    """What a reader must know before believing the numbers."""
    sides = [(len({t.rank for t in x.traces}), x.traces[0].device) for x in (a, b)]
    notes = [
        f"the runs differ in {what}: {left} and {right}"
        for what, left, right in zip(("ranks", "device"), *sides, strict=True)
        if left != right
    ]
    if not set(_operators(a)) & set(_operators(b)) and any(r.group == "operator" for r in rows):
        notes.append("the runs have no operator in common: are they the same model?")
    few = min(row.steps for t in (a, b) for row in t.breakdown(per="rank"))
    if few < 3:
        notes.append(f"a rank has {few} steps only: small differences are chance")
    return notes
