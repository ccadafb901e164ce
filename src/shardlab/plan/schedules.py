"""What pipeline schedules cost: a step's time, its bubble, what is kept and sent. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.errors import UsageError, unknown
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.strategies.pipeline.schedule_analysis import FORMULAS, Times
from shardlab.strategies.pipeline.schedules import SCHEDULES

MOST = 50_000  # stages times micro-batches: what is simulated and drawn in about a second

LONGEST = 1_000_000  # milliseconds: sums of more would soon be inexact or infinite


@dataclass(frozen=True)
class Pipeline:
    """A model on some ranks, whose layers are shared out evenly."""

    ranks: int
    micro: int
    times: Times  # of all the layers of a rank together; a send is one message

    def describe(self, name: str, chunks: int | None = None) -> dict[str, Any]:
        """What a schedule makes of it: the numbers, and each rank's actions with their times."""
        chunks = schedules.chunks_of(name, chunks)
        stages = self.ranks * chunks
        if stages * self.micro > MOST:
            most = MOST // stages
            hint = f"at most {most:,} of them" if most else "take fewer stages"
            raise UsageError(
                f"{name} with {stages:,} stages and {self.micro:,} micro-batches is too much to "
                f"draw; {hint}"
            )
        lists = schedules.schedule(name, self.ranks, self.micro, chunks)
        times = Times(
            self.times.forward / chunks,
            self.times.input / chunks,
            self.times.weight / chunks,
            self.times.send,
        )
        played = schedule_analysis.timeline(lists, times)
        claim = schedule_analysis.claim(name, self.ranks, self.micro, times, chunks)
        work = self.micro * (self.times.forward + self.times.input + self.times.weight)
        return {
            "name": name,
            "chunks": chunks,
            "stages": stages,
            "step_ms": schedule_analysis.end(played),
            "work_ms": work,
            "bubble": schedule_analysis.end(played) / work - 1,
            "idle_formula": FORMULAS[name].text,
            "formula_for": FORMULAS[name].known_for,
            "bubble_by_formula": claim.bubble,
            "live": schedule_analysis.live(lists),
            "messages": schedule_analysis.messages(lists),
            "ranks": [
                [
                    {**action._asdict(), "start_ms": span.start, "end_ms": span.end}
                    for action, span in zip(actions, spans, strict=True)
                ]
                for actions, spans in zip(lists, played, strict=True)
            ],
        }


def names_of(words: Sequence[str]) -> list[str]:
    """The schedules that are meant: names, also with commas between them, or ``all``."""
    asked = [name for word in words for name in word.split(",")]
    known = dict.fromkeys(
        name for word in asked for name in (SCHEDULES if word == "all" else [word])
    )
    for name in known:
        if name not in SCHEDULES:
            raise unknown("schedule", name, [*SCHEDULES, "all"])
    return list(known)


def compare(
    names: Sequence[str], pipeline: Pipeline, chunks: int | None, command: str
) -> dict[str, Any]:
    """One or several schedules of the same pipeline. Among several, those that can have this many
    ``chunks`` have them, and the others what they always have."""
    # Python looks for None in a range by going through all of it.
    fits = [chunks is not None and chunks in SCHEDULES[name].chunks for name in names]
    if chunks is not None and not any(fits):
        schedules.chunks_of(names[0], chunks)
    times = pipeline.times
    return {
        "command": command,
        "ranks": pipeline.ranks,
        "microbatches": pipeline.micro,
        "forward_ms": times.forward,
        "backward_ms": times.input + times.weight,
        "weight_ms": times.weight,
        "send_ms": times.send,
        "schedules": [
            pipeline.describe(name, chunks if can else None)
            for name, can in zip(names, fits, strict=True)
        ],
    }


def times_of(
    names: Sequence[str], forward: float, backward: float, weight: float | None, send: float
) -> Times:
    """The times that were asked for, or why they cannot be."""
    given = {"forward": forward, "backward": backward, "weight": weight, "send": send}
    for name, value in given.items():
        if value is not None and not 0 <= value <= LONGEST:
            raise UsageError(f"--{name}-ms {value:g}: a time is 0 to {LONGEST:,} ms")
    if forward + backward == 0:
        raise UsageError("--forward-ms 0 with --backward-ms 0: one of them takes some time")
    if weight is None:
        weight = backward / 2
    elif "zero_bubble" not in names:
        raise UsageError(
            f"--weight-ms {weight:g}: {names[0]} does not split the backward, as zero_bubble does"
        )
    if weight > backward:
        raise UsageError(
            f"--weight-ms {weight:g}: it is a part of the backward, so at most --backward-ms "
            f"{backward:g}"
        )
    return Times(forward, backward - weight, weight, send)
