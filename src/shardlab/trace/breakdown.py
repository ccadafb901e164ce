"""Where each step of each rank went; the parts add up to wall time, which is checked. And what that
says about changes that were not made: each answer with its assumption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from shardlab.trace.activity import Device
from shardlab.trace.intervals import NOTHING, Intervals
from shardlab.trace.model import PARTS, Breakdown, Ints, Trace, WhatIf

TOLERANCE = 1e-3  # of wall time


class BreakdownError(AssertionError):
    """The parts do not add up: an error of ours, never of the trace."""


def per_step(
    trace: Trace,
    devices: Sequence[Device],
    waits: Intervals = NOTHING,
    bubble: Intervals = NOTHING,
) -> list[Breakdown]:
    """One row for each step. ``waits``: when this rank was in a collective and others were not;
    ``bubble``: when it waited, between two actions of a pipeline, for what others had not made.

    Computation covers communication, which covers copies, which cover idle time: a moment counts
    once, for the first of these that it is.
    """
    parts = [_parts(device, waits, bubble, trace.edges) for device in devices]
    scale = 1000 * len(devices)  # ns to µs; several GPUs: their mean
    columns = {n: np.sum([part[n] for part in parts], axis=0) / scale for n in parts[0]}
    rows = [
        Breakdown(trace.rank, step.number, 1, **{n: float(us[i]) for n, us in columns.items()})
        for i, step in enumerate(trace.steps)
    ]
    for row in rows:
        check(row)
    return rows


def _parts(device: Device, waits: Intervals, bubble: Intervals, edges: Ints) -> dict[str, Ints]:
    """The columns of a breakdown, a row for each step; in ns."""
    exposed = device.comm - device.compute
    busy = device.compute | device.comm | device.memory
    spans = {
        "compute_us": device.compute,
        "exposed_comm_us": exposed - waits - bubble,
        "wait_us": exposed & waits - bubble,
        "bubble_us": exposed & bubble,
        "memory_us": device.memory - device.compute - device.comm,
        "idle_host_us": device.late - busy,
        "hidden_comm_us": device.comm & device.compute,
    }
    ns = {name: part.lengths(edges)[::2] for name, part in spans.items()}
    ns["wall_us"] = np.diff(edges)[::2]
    ns["idle_us"] = ns["wall_us"] - busy.lengths(edges)[::2] - ns["idle_host_us"]
    ns["comm_us"] = ns["hidden_comm_us"] + ns["exposed_comm_us"] + ns["wait_us"]
    return ns


def check(row: Breakdown) -> None:
    """Every analysis does this: parts sum to wall time, none is negative."""
    parts = [getattr(row, name) for name in PARTS]
    if abs(sum(parts) - row.wall_us) > TOLERANCE * row.wall_us + 1e-3 or min(parts) < -1e-6:
        raise BreakdownError(f"rank {row.rank}, step {row.step}: {parts} is not {row.wall_us}")


def per_rank(rows: Sequence[Breakdown]) -> list[Breakdown]:
    """The sum over each rank's steps."""
    ranks = sorted({row.rank for row in rows})
    result = []
    for rank in ranks:
        mine = [row for row in rows if row.rank == rank]
        times = {
            f.name: sum(getattr(row, f.name) for row in mine)
            for f in fields(Breakdown)
            if f.name.endswith("_us")
        }
        total = Breakdown(rank=rank, step=None, steps=len(mine), **times)
        check(total)
        result.append(total)
    return result


def mean_step(ranks: Sequence[Breakdown]) -> dict[str, Any]:
    """The mean step over ranks and steps: its parts in ms, and how much communication was hidden,
    in percent."""
    steps = sum(row.steps for row in ranks) or 1
    columns = ("wall_us", *PARTS, "hidden_comm_us", "comm_us")
    total = {name: sum(getattr(row, name) for row in ranks) for name in columns}
    comm = total["comm_us"]
    return {
        "steps": max((row.steps for row in ranks), default=0),
        **{f"{name.removesuffix('_us')}_ms": us / steps / 1000 for name, us in total.items()},
        "overlap_pct": 100 * total["hidden_comm_us"] / comm if comm else None,
    }


# ------------------------------------------------------------------ changes that were not made


def what_if(rows: Sequence[Breakdown]) -> tuple[WhatIf, ...]:
    """``rows``: per rank and step. A step takes as long as its slowest rank; answers are means."""
    steps: dict[int | None, list[Breakdown]] = defaultdict(list)
    for row in rows:
        steps[row.step].append(row)
    if not any(row.comm_us or row.bubble_us for row in rows):
        return ()  # all questions are about other ranks

    def mean(step_us: Callable[[list[Breakdown]], float]) -> float:
        return sum(step_us(ranks) for ranks in steps.values()) / len(steps)

    def slowest(rank_us: Callable[[Breakdown], float]) -> float:
        return mean(lambda ranks: max(rank_us(row) for row in ranks))

    now = slowest(lambda row: row.wall_us)
    answers = [
        WhatIf(
            "communication were free",
            slowest(lambda row: row.wall_us - row.exposed_comm_us),
            now,
            "transfers take no time; ranks still wait for a slower one as they do now",
        ),
        WhatIf(
            "communication were fully overlapped",
            slowest(_overlapped),
            now,
            "as much of the transfers as there is computation runs beside it, and neither slows",
        ),
        WhatIf(
            "the link were twice as fast",
            slowest(lambda row: row.wall_us - row.exposed_comm_us / 2),
            now,
            "transfers are bound by bandwidth, not latency; what is hidden stays hidden",
        ),
    ]
    if any(row.bubble_us for row in rows):
        answers.append(
            WhatIf(
                "there were no bubble",
                slowest(lambda row: row.wall_us - row.bubble_us),
                now,
                "no stage of the pipeline waits for another's result: the bound that more "
                "micro-batches or another schedule come close to",
            )
        )
    if any(len(ranks) > 1 for ranks in steps.values()):
        answers.append(
            WhatIf(
                "the straggler were gone",
                mean(_without_straggler),
                now,
                "in each step the rank that waited least works as long as the slowest of the "
                "others, and nobody waits",
            )
        )
    return tuple(answers)


def _overlapped(row: Breakdown) -> float:
    transfers = row.exposed_comm_us + row.hidden_comm_us
    return row.wall_us - row.exposed_comm_us + max(0.0, transfers - row.compute_us)


def _without_straggler(ranks: list[Breakdown]) -> float:
    if len(ranks) < 2:
        return ranks[0].wall_us
    own = sorted(ranks, key=lambda row: row.wait_us)[1:]  # the first waited least: all for it
    now, least = max(row.wall_us for row in ranks), max(row.wall_us - row.wait_us for row in own)
    # The steps of ranks do not end together: no more is won than somebody waited.
    return min(max(least, now - own[-1].wait_us), now)
