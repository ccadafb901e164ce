"""Runs side by side: what became faster or slower, by part, phase, collective and operator.

All times are per step and per rank, so that runs of different length and size can be compared.
The noise of a time is by how much its mean may be off, as far as the steps of one run tell: another
run of the same may differ by more.
Pure: ``TraceSet``s in, plain rows out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import stats
from shardlab import text as fmt
from shardlab.trace.breakdown import mean_step
from shardlab.trace.collectives import together_us
from shardlab.trace.model import ANNOTATION, PARTS, PHASES, Breakdown, Participant

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
    noise_us: float | None = None  # half of the mean's 95% interval; None: not known by steps


@dataclass(frozen=True)
class Row:
    """One thing in all runs; zero time where a run does not have it."""

    group: str  # part, rank, phase, collective, label, operator or step
    name: str
    values: tuple[Value, ...]  # one for each run

    @property
    def a(self) -> Value:
        return self.values[0]

    @property
    def b(self) -> Value:
        return self.values[-1]

    @property
    def change_us(self) -> float:
        """The change from the first run to the last."""
        return self.b.us - self.a.us

    @property
    def noise_us(self) -> float | None:
        """Of the change."""
        if self.a.noise_us is None or self.b.noise_us is None:
            return None
        return math.hypot(self.a.noise_us, self.b.noise_us)

    @property
    def is_noise(self) -> bool:
        return self.noise_us is not None and 0 < self.noise_us >= abs(self.change_us)

    @property
    def spread_us(self) -> float:
        return max(value.us for value in self.values) - min(value.us for value in self.values)

    @property
    def ratio(self) -> float | None:
        return self.b.us / self.a.us if self.a.us else None


@dataclass(frozen=True)
class Diff:
    runs: tuple[str, ...]  # what they are called
    step: Row
    rows: tuple[Row, ...]  # in each group the largest change first
    overlaps: tuple[float | None, ...]  # for each run, how much communication was hidden, percent
    notes: tuple[str, ...]  # what makes the comparison unequal
    steps_overlap: bool  # a step of the slower run was shorter than one of the faster (of two runs)

    def of(self, group: str) -> list[Row]:
        return [row for row in self.rows if row.group == group]

    def to_dict(self) -> dict[str, Any]:
        """The content of diff.json: of two runs as a and b, of more as a list of values."""
        two = len(self.runs) == 2
        return {
            "schema": SCHEMA,
            **(dict(zip("ab", self.runs, strict=True)) if two else {}),
            "runs": list(self.runs),
            "sentence": sentence(self),
            "notes": list(self.notes),
            **({"steps_overlap": self.steps_overlap} if two else {}),
            "overlap_pct": list(self.overlaps),
            "step": _plain(self.step),
            "rows": [_plain(row) for row in self.rows],
        }


def _plain(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"group": row.group, "name": row.name}
    values = [asdict(value) for value in row.values]
    if len(values) == 2:
        change = {"change_us": row.change_us, "ratio": row.ratio, "noise_us": row.noise_us}
        return {**found, "a": values[0], "b": values[1], **change}
    return {**found, "values": values}


def diff(*runs: TraceSet, names: Sequence[str]) -> Diff:
    """What differs between runs. Of two: what changed from the first to the second."""
    groups: dict[str, Callable[[TraceSet], Mapping[str, Value]]] = {
        "part": lambda traces: {name: _mean(traces, part) for part, name in PARTS.items()},
        "phase": _phases,
        "collective": lambda traces: _collectives(traces, "kind"),
        "label": lambda traces: _collectives(traces, "label"),
        "operator": _operators,
    }
    rows: list[Row] = []
    for group, values_of in groups.items():
        sides = [values_of(traces) for traces in runs]
        every = [
            Row(group, name, tuple(side.get(name, Value()) for side in sides))
            for name in {name: None for side in sides for name in side}
        ]
        rows += sorted(every, key=lambda row: row.spread_us, reverse=True)
    step = Row("step", "step", tuple(_mean(traces, "wall_us") for traces in runs))
    if len(runs) == 2:
        rows += sorted(_by_rank(runs, step), key=lambda row: row.spread_us, reverse=True)
    *_, faster, slower = sorted((_by_step(own, "wall_us") for own in runs), key=statistics.mean)
    overlaps = tuple(mean_step(traces.breakdown(per="rank"))["overlap_pct"] for traces in runs)
    notes = _notes(runs, rows)
    for name, traces in zip(names, runs, strict=True):
        notes += [f"{name}: {warning}" for warning in traces.warnings]
    overlap = max(faster) > min(slower)
    return Diff(tuple(names), step, tuple(rows), overlaps, tuple(notes), overlap)


def names_of(runs: Sequence[TraceSet], paths: Sequence[Path]) -> tuple[str, ...]:
    """What to call runs: by strategy if that sets them apart, else by as much of the path."""
    strategies = [str(traces.traces[0].shardlab.get("strategy") or "") for traces in runs]
    if all(strategies) and len(set(strategies)) == len(runs):
        return tuple(strategies)
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*own[-length:])) for own in parts]
        if len(set(ends)) == len(ends):
            return tuple(ends)
    return tuple(f"{path.name} ({chr(ord('A') + i)})" for i, path in enumerate(paths))


def sentence(diff: Diff) -> str:
    """The answer in words: how much, and what most of it is."""
    if len(diff.runs) > 2:
        return _ranking(diff)
    change, was = diff.step.change_us, diff.step.a.us
    a, b = diff.runs
    both = f"{diff.step.b.us / 1000:.3g} ms a step against {was / 1000:.3g} ms"
    if diff.step.is_noise and (noise := diff.step.noise_us or 0.0) > NOISE * was:
        first = (
            f"{b} and {a} differ by less than the noise between steps: {both}, and the difference "
            f"is known to ± {noise / 1000:.3g} ms."
        )
        parts = [text for _, text in _changed(diff, NOISE * was)]
        above = f" Above its noise is {fmt.names(parts, len(parts))}." if parts else ""
        return first + above
    if not was or abs(change) < NOISE * was:
        return f"{b} and {a} take the same time: {both}."
    word = "less" if change < 0 else "more"
    first = f"{b} takes {100 * abs(change) / was:.0f}% {word} time than {a}: {both}"
    first += ", though single steps of the two overlap." if diff.steps_overlap else "."
    reasons: list[str] = []  # parts that changed the same way as the step
    against: list[str] = []
    for row, text in _changed(diff, 0.1 * abs(change)):
        (reasons if row.change_us * change > 0 else against).append(text)
    second = f" It has {fmt.names(reasons, len(reasons))}" if reasons else ""
    if second and against:
        second += f", but {fmt.names(against, len(against))}"
    return first + (second + "." if second else "")


def _changed(diff: Diff, least_us: float) -> Iterator[tuple[Row, str]]:
    """Parts that changed by more than this and than their noise, on one rank at the least."""
    for row in diff.of("part"):
        of_ranks = [own for own in diff.of("rank") if own.name.endswith(f": {row.name}")]
        worst = max(of_ranks, key=lambda own: (not own.is_noise, abs(own.change_us)), default=row)
        if abs(worst.change_us) > least_us and not worst.is_noise:
            where = "" if worst is row else f" ({worst.name.partition(':')[0]}: {_more(worst)})"
            yield row, f"{_more(row)} {row.name}{where}"


def _more(row: Row) -> str:
    return f"{abs(row.change_us) / 1000:.3g} ms {'less' if row.change_us < 0 else 'more'}"


def _ranking(diff: Diff) -> str:
    """The fastest of three or more runs, and how much more time the others take."""
    took = sorted(zip(diff.step.values, diff.runs, strict=True), key=lambda run: run[0].us)
    (first, best), others = took[0], took[1:]
    more = []
    for value, name in others:
        row = Row("step", name, (first, value))
        if row.is_noise and (row.noise_us or 0.0) > NOISE * first.us:
            more.append(f"{name} more, but within the noise")
        elif not first.us or row.change_us < NOISE * first.us:
            more.append(f"{name} as long")
        else:
            more.append(f"{name} {100 * row.change_us / first.us:.0f}% more")
    rest = fmt.names(more, len(more))
    return f"{best} takes the least time, {first.us / 1000:.3g} ms a step; {rest}."


# ------------------------------------------------------------------ one side


def _mean(traces: TraceSet, column: str) -> Value:
    rows = traces.breakdown(per="rank")
    mean = statistics.mean(row.per_step(column) for row in rows)
    return Value(mean, noise_us=_noise(_by_step(traces, column)))


def _by_step(traces: TraceSet, column: str) -> list[float]:
    """For each step, the mean over the ranks."""
    times: dict[int | None, list[float]] = defaultdict(list)
    for row in traces.breakdown(per="step"):
        times[row.step].append(getattr(row, column))
    return [statistics.mean(of_ranks) for of_ranks in times.values()]


def _noise(times: Sequence[float]) -> float | None:
    interval = stats.mean_interval(times)
    return None if interval is None else (interval[1] - interval[0]) / 2


def _by_rank(runs: Sequence[TraceSet], step: Row) -> list[Row]:
    """Each rank's parts, as far as they changed by more on one rank than on another: the mean over
    ranks mixes the rank that became slow with those that wait for it."""
    sides: list[dict[int, list[Breakdown]]] = []
    for traces in runs:
        sides.append(defaultdict(list))
        for found in traces.breakdown(per="step"):
            sides[-1][found.rank].append(found)
    if len({frozenset(side) for side in sides}) > 1:
        return []  # a note says so
    result: list[Row] = []
    for part, name in PARTS.items():
        rows = []
        for rank in sides[0]:
            times = [[getattr(own, part) for own in side[rank]] for side in sides]
            values = (Value(statistics.mean(own), noise_us=_noise(own)) for own in times)
            rows.append(Row("rank", f"rank {rank}: {name}", tuple(values)))
        least, most = min(rows, key=_change), max(rows, key=_change)
        noise = math.hypot(least.noise_us or 0.0, most.noise_us or 0.0)
        if most.change_us - least.change_us > max(noise, NOISE * step.a.us):
            result += rows
    return result


def _change(row: Row) -> float:
    return row.change_us


def _phases(traces: TraceSet) -> dict[str, Value]:
    """The phases' time on the host: for a GPU, the time to launch a phase, not to run it."""
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
    """The time that a rank spent in them, waiting for others included. A moment in several of them
    counts once, so that it is never more than the step."""
    found: list[tuple[str, float, int, int | None]] = []
    parts: dict[tuple[str, int], list[Participant]] = defaultdict(list)
    for collective in traces.collectives():
        name = collective.called if by == "kind" else collective.label
        if name and collective.step is not None:
            for part in collective.participants:
                found.append((name, 0.0, 1, collective.bytes))
                parts[name, part.rank].append(part)
    found += [(name, together_us(own), 0, 0) for (name, _), own in parts.items()]
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


def _notes(runs: Sequence[TraceSet], rows: list[Row]) -> list[str]:
    """What a reader must know before believing the numbers."""
    facts: dict[str, list[Any]] = {
        "ranks": [len({t.rank for t in traces.traces}) for traces in runs],
        "device": [traces.traces[0].device for traces in runs],
    }
    notes = [
        f"the runs differ in {what}: {fmt.names(list(map(str, found)), len(found))}"
        for what, found in facts.items()
        if len(set(found)) > 1
    ]
    operators = [row for row in rows if row.group == "operator"]
    if operators and not any(all(value.us for value in row.values) for row in operators):
        notes.append("the runs have no operator in common: are they the same model?")
    few = min(row.steps for traces in runs for row in traces.breakdown(per="rank"))
    if few < 3:
        only = fmt.count(few, "step")
        notes.append(f"a rank has {only} only: small differences are chance")
    return notes
