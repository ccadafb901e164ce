"""What one trace says about changes that were not made. Each answer with its assumption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from shardlab.trace.model import Breakdown, WhatIf


def what_if(rows: Sequence[Breakdown]) -> tuple[WhatIf, ...]:
    """``rows``: per rank and step. A step takes as long as its slowest rank; answers are means."""
    steps: dict[int | None, list[Breakdown]] = defaultdict(list)
    for row in rows:
        steps[row.step].append(row)
    if not any(row.comm_us for row in rows):
        return ()  # all questions are about communication

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
    return min(max(row.wall_us - row.wait_us for row in own), max(r.wall_us for r in ranks))
