"""From simulated and measured steps to larger ones that nobody ran: more ranks, more
micro-batches."""

from __future__ import annotations

import dataclasses

from shardlab.axes import Axes
from shardlab.plan.graph import Event, Mark, Start, Step, Wait, Work
from shardlab.strategies.pipeline import schedule_analysis, schedules

AHEAD = 2  # messages that a rank of a pipeline begins to receive before it needs them


# ------------------------------------------------------------------ worlds of any size


def at_world(small: Step, large: Step, world: int) -> Step | None:
    """The step of a rank among ``world``, from the same step among fewer: every size is taken to be
    a + b / ranks, as whole tensors and shards are. None if the two do not do the same things."""
    if len(small.events) != len(large.events):
        return None

    def carried(one: float, other: float) -> float:
        part = (one - other) / (1 / small.world - 1 / large.world)
        return max(0.0, other + part * (1 / world - 1 / large.world))

    events: list[Event] = []
    for one, other in zip(small.events, large.events, strict=True):
        if isinstance(one, Work) and isinstance(other, Work) and one.name == other.name:
            sizes = carried(one.flops, other.flops), carried(one.bytes, other.bytes)
            events.append(dataclasses.replace(other, flops=sizes[0], bytes=sizes[1]))
        elif isinstance(one, Start) and isinstance(other, Start) and one.op == other.op:
            ranks = round(other.group.size * world / large.world)
            if other.group.size == one.group.size:  # a group of its own, as in a node
                ranks = other.group.size
            size = round(carried(one.bytes, other.bytes))
            group = dataclasses.replace(other.group, size=ranks)
            events.append(dataclasses.replace(other, bytes=size, group=group))
        elif isinstance(one, Wait | Mark) and one == other:
            events.append(other)
        else:
            return None
    return dataclasses.replace(
        large,
        world=world,
        events=tuple(events),
        samples=round(large.samples / large.world * world),
        tokens=round(large.tokens / large.world * world),
        peak_bytes=round(carried(small.peak_bytes, large.peak_bytes)),
    )


# ------------------------------------------------------------------ micro-batches of a pipeline


def fewest_micro(name: str, axes: Axes | None, micro: int) -> int:
    """The fewest micro-batches of a step from which one with ``micro`` follows: those with which
    every rank keeps as many activations as with all of them, and has as many messages on their way.
    PyTorch's own schedules are run as they are."""
    if axes is None or axes.pipeline == 1 or name == "pytorch_pipeline":
        return micro

    def live(number: int) -> list[int]:
        lists = schedules.schedule(axes.schedule, axes.pipeline, number, axes.chunks or None)
        return schedule_analysis.live(lists)

    most = min(micro, 4 * axes.pipeline)
    wanted = live(micro)
    return min(micro, AHEAD + next((n for n in range(1, most) if live(n) == wanted), micro))


def at_micro(step: Step, place: int, axes: Axes, micro: int) -> Step:
    """The step of the pipeline's rank ``place`` with more micro-batches, by its schedule. Each
    action does what it did for the second micro-batch; the first has no gradients to add to."""
    before: list[Event] = []
    after: list[Event] = []
    parts: dict[tuple[str, int, int], list[Event]] = {}
    now = before
    for event in step.events:
        if isinstance(event, Mark):
            key = event.name, event.stage, event.micro
            now = parts.setdefault(key, []) if event.name else after
        else:
            now.append(event)
    starts = {start.call: start for start in step.starts()}
    called = max(starts, default=0)
    lists = schedules.schedule(axes.schedule, axes.pipeline, micro, axes.chunks or None)
    events = before
    for kind, stage, number in lists[place]:
        name, like = schedules.NAMES[kind], min(number, 1)
        events.append(Mark(name, stage, number))
        new: dict[int, int] = {}  # the numbers of the calls
        for event in parts[name, stage, like]:
            if isinstance(event, Work):
                events.append(event)
                continue
            start = starts.get(event.call) if isinstance(event, Wait) else event
            assert not isinstance(start, Mark)
            is_received = start is not None and start.is_message and start.op == "recv"
            # A message is received where it is waited for; one that was sent need not be.
            if start is not None and is_received == isinstance(event, Wait):
                called += 1
                new[start.call] = called
                label = start.label.replace(f"micro-batch {like} ", f"micro-batch {number} ")
                events.append(dataclasses.replace(start, call=called, label=label))
            if isinstance(event, Wait) and event.call in new:
                events.append(Wait(new[event.call]))
    events += [Mark(""), *after]
    times = micro / len({number for _, _, number in parts})
    return dataclasses.replace(
        step,
        events=events,
        samples=round(step.samples * times),
        tokens=round(step.tokens * times),
    )
