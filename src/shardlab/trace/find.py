"""Which files are the traces of a run: in a run folder, in a folder of runs, in anybody's folder.

A process writes a trace per window, so one rank may have several files: they come from one
process, one after the other. Anything else that shares a rank is two runs, or a mistake, and
refused: to mix them would give numbers that look right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from shardlab.errors import UsageError, unknown
from shardlab.trace.model import Trace

SUFFIXES = (".json", ".json.gz", ".trace", ".trace.gz")
OURS = (
    "summary.json", "diff.json", "compare.json", "prove.json", "env.json", "config.json",
    "clocks.json",
)  # fmt: skip
SELECT = ("latest", "all")


def runs(paths: Sequence[str | Path], select: str) -> list[list[Path]]:
    """The trace files of each run: ``latest`` is the newest run of a folder of runs.

    Files that are given one by one are one run; each folder is one, or holds several.
    """
    if select not in SELECT:
        raise unknown("selection", select, SELECT)
    if not paths:
        raise UsageError("no traces: give a run folder, a folder of traces or trace files")
    files: list[Path] = []
    found: list[list[Path]] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            in_here = _in_folder(path)
            if not in_here:
                raise UsageError(
                    f"no traces in {path}: no .json or .json.gz file of a profiler there, nor in "
                    "traces/ (record some with `shardlab train --profile`)"
                )
            newest = max(in_here, key=lambda run: max(f.stat().st_mtime for f in run))
            found += in_here if select == "all" else [newest]
        else:
            raise UsageError(f"no traces: {path} does not exist")
    return ([files] if files else []) + found


def _in_folder(folder: Path) -> list[list[Path]]:
    is_run = (folder / "status.json").is_file() and (folder / "config.yaml").is_file()
    for inside in (folder / "traces",) if is_run else (folder / "traces", folder):
        if traces := _traces(inside):
            return [traces]
    if is_run:
        return []
    below = [path for path in sorted(folder.rglob("traces")) if path.is_dir()]
    if found := [traces for path in below if (traces := _traces(path))]:
        return found
    return [traces for path in sorted(folder.iterdir()) if (traces := _traces(path))]


def _traces(folder: Path) -> list[Path]:
    """Here, or in the folders of the ranks."""
    if not folder.is_dir():
        return []
    places = [folder, *(p for p in sorted(folder.iterdir()) if p.is_dir() and _of_a_rank(p.name))]
    return [
        path
        for place in places
        for path in sorted(place.iterdir())
        if path.is_file() and path.name.endswith(SUFFIXES) and path.name not in OURS
    ]


def _of_a_rank(name: str) -> bool:
    return name.lower().removeprefix("rank").strip("-_ ").isdigit()


# ------------------------------------------------------------------ after parsing


def numbered(traces: Iterable[Trace]) -> tuple[list[Trace], list[str]]:
    """A rank for those that do not say theirs: the only one is 0, several go by file name."""
    traces = sorted(traces, key=lambda trace: str(trace.path))
    nameless = [trace for trace in traces if trace.rank < 0]
    taken = {trace.rank for trace in traces}
    free = iter(n for n in range(len(traces) * 2) if n not in taken)
    result = [replace(t, rank=next(free)) if t.rank < 0 else t for t in traces]
    if not nameless or len(traces) == 1:
        return result, []
    note = f"{len(nameless)} traces do not say their rank: numbered in the order of their names"
    return result, [note]


def one_run(traces: Sequence[Trace]) -> dict[int, list[Trace]]:
    """Rank to its windows in order of time; refuses what cannot be one run."""
    by_rank: dict[int, list[Trace]] = defaultdict(list)
    for trace in sorted(traces, key=_begin):
        by_rank[trace.rank].append(trace)
    _one_value(traces, "world", lambda t: t.world)
    _one_value(traces, "run", lambda t: t.shardlab.get("run"))
    _one_value(traces, "strategy", lambda t: t.shardlab.get("strategy"))
    for rank, windows in by_rank.items():
        for first, second in pairwise(windows):
            both = f"{first.path.name} and {second.path.name}"
            if _begin(second) < _end(first):
                raise UsageError(
                    f"two ranks with the same number: {both} are both of rank {rank} and overlap "
                    "in time"
                )
            if first.pid != second.pid:
                raise UsageError(
                    f"mixed runs in one folder: {both} are both of rank {rank}, from different "
                    "processes; put each run's traces into a folder of its own"
                )
    _same_time(by_rank)
    return dict(by_rank)


def _one_value(traces: Sequence[Trace], what: str, value: Callable[[Trace], object]) -> None:
    seen: dict[object, Trace] = {}
    for trace in traces:
        if (found := value(trace)) is not None:  # a damaged stamp may hold anything
            seen.setdefault(found if isinstance(found, int | str) else repr(found), trace)
    if len(seen) > 1:
        (a, first), (b, second) = list(seen.items())[:2]
        raise UsageError(
            f"mixed runs in one folder: {first.path.name} is of {what} {a}, {second.path.name} of "
            f"{what} {b}; put each run's traces into a folder of its own"
        )


def _same_time(by_rank: dict[int, list[Trace]]) -> None:
    """Ranks of one run record the same steps, or at least in the same minutes."""
    ranks = list(by_rank.values())
    for windows in ranks[1:]:
        shared = _numbers(windows) & _numbers(ranks[0])
        apart = max(
            _begin(windows[0]) - _end(ranks[0][-1]), _begin(ranks[0][0]) - _end(windows[-1])
        )
        if apart > (60 if not shared else 600) * 1e9:
            raise UsageError(
                f"mixed runs in one folder: {ranks[0][0].path.name} and {windows[0].path.name} "
                f"were recorded {apart / 6e10:,.0f} minutes apart"
            )


def _numbers(windows: Sequence[Trace]) -> set[int]:
    """The numbers of the steps that are marked. (A trace without markers is one step, number 0.)"""
    return {step.number for trace in windows if trace.marked for step in trace.steps}


def _begin(trace: Trace) -> int:
    return trace.steps[0].start_ns + trace.base_ns


def _end(trace: Trace) -> int:
    return trace.steps[-1].end_ns + trace.base_ns
