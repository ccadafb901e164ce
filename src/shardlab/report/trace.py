"""Traces as one page that needs nothing else: the answer in words, charts, tables, a timeline.

The numbers come from the ``TraceSet``; here they are put into sentences, and into their places by
``trace_charts`` and ``timeline``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import text as fmt
from shardlab.files import write_text
from shardlab.guard import nodes
from shardlab.report import timeline
from shardlab.report import trace_charts as charts
from shardlab.report.page import asset, render
from shardlab.trace import collectives, kernels, model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_ROWS = 200  # in a table
MAX_KERNELS = 25
MAX_CLOCKS = 4
# Where a rank's own work took longer, in words.
ORIGINS = {
    "": " (the trace does not show in which phase)", "data loading": " in data loading",
    "forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer",
}  # fmt: skip
UNEQUAL = 1.1  # longest over shortest: a mean of such windows says little
IN_TURN = 0.75  # of all waiting: if more was for one rank, they did not come last in turn
NOTABLE = 0.03  # waiting for a smaller share of the step is not worth a name


def write_html(path: Path, traces: TraceSet) -> None:
    """The page, whole or not there at all."""
    write_text(path, html(traces))


def html(traces: TraceSet) -> str:
    ranks = traces.breakdown(per="rank")
    steps = traces.breakdown(per="step")
    spans = timeline.timeline(traces)
    by_kind = traces.collective_summary(by="kind")
    by_label = [row for row in traces.collective_summary(by="label") if row.name]
    if {row.name for row in by_label} <= {row.name for row in by_kind}:
        by_label = []  # nothing was labelled
    memory = traces.memory()
    return render(
        "trace.html.j2",
        ms=fmt.ms,
        css=asset("timeline.css") + asset("trace.css"),
        js=asset("tables.js") + asset("timeline.js"),
        title=title(traces, ranks),
        verdict=verdict(traces),
        facts=_facts(traces, ranks, spans),
        ranks=ranks,
        columns=_columns(ranks),
        stacks=charts.stacks(ranks, steps),
        timeline=spans,
        by_kind=by_kind[:MAX_ROWS],
        by_label=by_label[:MAX_ROWS],
        stragglers=traces.stragglers(),
        one_sided=traces.one_sided,
        clocks=clocks(traces),
        overlapping=overlapping(traces),
        several_ranks=len(ranks) > 1,
        n_steps=_steps(ranks),
        memory=memory,
        curves=charts.curves(memory, traces),
        what_if=traces.what_if(),
        baseline=baseline,
        kernels=kernels.together(traces.kernels(top=40), ranks)[:MAX_KERNELS],
        warnings=list(traces.warnings)[:MAX_ROWS],
        files=[str(trace.path) for trace in traces.traces],
    )


def _columns(ranks: Sequence[model.Breakdown]) -> dict[str, str]:
    """The parts in the table, with their heads. A bubble is there only in a pipeline's."""
    heads = {
        "wall_us": "Step", "compute_us": "Compute", "exposed_comm_us": "Exposed comm.",
        "wait_us": "Waiting", "bubble_us": "Bubble", "memory_us": "Copies",
        "idle_host_us": "Host-bound idle", "idle_us": "Other idle",
        "hidden_comm_us": "Hidden comm.",
    }  # fmt: skip
    if not any(row.bubble_us for row in ranks):
        del heads["bubble_us"]
    return heads


# ------------------------------------------------------------------ the answer


def title(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    stamps = {str(t.shardlab.get("strategy", "")) for t in traces.traces} - {""}
    name = fmt.names(sorted(stamps)) if stamps else traces.traces[0].path.parent.name or "Traces"
    what = fmt.count(_steps(ranks), "step") if traces.marked else "the whole trace"
    window = f" ({traces.window})" if traces.window else ""
    return f"{name}: where {what} on {fmt.count(len(ranks), 'rank')} went{window}"


def verdict(traces: TraceSet) -> str:
    """Where a step's time went, who was slow, and what was hidden: the answer, in words."""
    ranks = traces.comparable()
    return " ".join(filter(None, (_went(traces, ranks), slow(traces), _hidden(ranks))))


def _steps(ranks: Sequence[model.Breakdown]) -> int:
    return max((row.steps for row in ranks), default=0)


def _went(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    wall = sum(row.wall_us for row in ranks)
    if not wall:
        return "The traces hold no time at all."
    shares = {part: sum(getattr(row, part) for row in ranks) / wall for part in model.PARTS}
    largest = sorted(((share, model.PARTS[part]) for part, share in shares.items()), reverse=True)
    texts = [f"{100 * share:.0f}% {name}" for share, name in largest if share >= 0.005]
    listed = fmt.names(texts, at_most=len(texts))
    steps = sorted(map(model.Breakdown.per_step, ranks))
    took = f"{fmt.ms(statistics.mean(steps))} ms"
    which = ""
    if steps[-1] > UNEQUAL * steps[0]:
        took, which = f"{fmt.ms(steps[0])} to {fmt.ms(steps[-1])} ms", ", depending on the rank"
    if not traces.marked:
        return f"The whole trace is {took} long{which}: {listed}."
    if _steps(ranks) == 1 and (len(ranks) == 1 or which):
        return f"The step took {took}{which}: {listed}."
    return f"A step took {took} on average{which}: {listed}."


def slow(traces: TraceSet) -> str:
    """Which rank is slow, and how that is known; or why none is called slow."""
    ranks = traces.comparable()
    if not any(row.comm_us for row in ranks):
        return ""
    if len(ranks) == 1:
        return "The trace of one rank does not show how long it waited for others."
    if traces.one_sided:
        return f"Which rank is slow is not known: {traces.one_sided}."
    waited = {row.rank: 0.0 for row in ranks}
    for straggler in traces.stragglers():
        waited[straggler.rank] = waited.get(straggler.rank, 0.0) + straggler.lost_us
    # A slow rank begins later too, by as much as in any step: that is no news.
    least = min(map(model.Breakdown.per_step, ranks)) / 2
    began = [
        row
        for row in traces.lateness()
        if row.began_late_us > max(least, 2 * row.late_us if row.steps_slow else 0.0)
    ]
    for row in began:  # they waited for that once, and not in each step
        waited[row.rank] = max(waited.get(row.rank, 0.0) - row.began_waits_us, 0.0)
    late = [row for row in traces.lateness() if row.steps_slow or row not in began]
    begins = " ".join(
        f"Rank {row.rank} began {fmt.ms(row.began_late_us)} ms later than the others, who waited "
        "for it at the beginning."
        for row in began
    )
    return f"{begins} {_slow(traces, late, waited, bool(began))}".strip()


def _slow(
    traces: TraceSet, late: Sequence[model.Lateness], waited: Mapping[int, float], began: bool
) -> str:
    """The same, of ranks that came late after the beginning. ``waited``: how long for each."""
    ranks = traces.comparable()
    own = {row.rank: row.wait_us for row in ranks}
    first = late[0].rank if late else max(waited, key=lambda rank: waited[rank])
    them, name = _slowest(first, own, _nodes(traces))
    total = sum(waited[rank] for rank in them)
    rows = (row for row in traces.collectives() if row.last_rank in them)
    waiting = {p.rank for row in rows for p in row.participants if p.wait_us} - set(them)
    others = max(len(waiting), 1)
    per_step = total / others / max(_steps(ranks), 1)
    if not late or per_step < NOTABLE * statistics.mean(map(model.Breakdown.per_step, ranks)):
        if any(row.bubble_us for row in ranks):
            return " ".join(filter(None, (_late_stage(traces, ranks), _pipeline(traces, ranks))))
        return f"{'Otherwise no' if began else 'No'} rank made the others wait for long."
    a_step = " a step" if traces.marked else ""
    everyone = sum(waited.values())
    several = late[0].steps_slow and sum(row.steps_slow > 0 for row in late) > 1
    if late[0].slow is False and several and waited[first] < IN_TURN * everyone:
        each = fmt.ms(everyone / others / _steps(ranks))
        return f"The ranks waited for each other in turn, {each} ms{a_step}: none is the slow one."
    if not late[0].slow:
        return f"No rank is called slow. {_evidence(late[0], traces)}"
    who = "each other rank" if len(waiting) == len(ranks) - len(them) else fmt.count(others, "rank")
    waits = f"{who} waited {fmt.ms(per_step)} ms{a_step} for it"
    return f"{name} is the slow one: {waits}. {_evidence(late[0], traces)}"


def _late_stage(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    """That a stage began a step or more later than all others: they waited for it once."""
    shifts = traces.shifts()
    first: dict[int, int] = {}
    for trace in traces.traces:
        first.setdefault(trace.rank, trace.steps[0].start_ns + shifts[trace.path])
    *others, last = sorted(first, key=lambda rank: first[rank])
    by = (first[last] - first[others[-1]]) / 1000
    if by < min(map(model.Breakdown.per_step, ranks)):
        return ""
    return f"Rank {last} began {fmt.ms(by)} ms later than the others."


def _pipeline(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    """Which stage computed longest. Its rank is not called slow: stages may have unequal work."""
    a_step = " a step" if traces.marked else ""
    text = "In a pipeline, waits do not show who is slow."
    compute = {row.rank: row.compute_us / row.steps for row in ranks}
    nothing = {row.rank: row.idle_host_us / row.steps for row in ranks}
    own = {rank: compute[rank] + nothing[rank] for rank in compute}  # neither bubble nor waiting
    slept, second = sorted(own, key=lambda rank: own[rank], reverse=True)[:2]
    if own[slept] > UNEQUAL * own[second] and nothing[slept] > compute[slept]:
        longest, most, times = "was busy with itself longest", slept, own
        end = f". In {fmt.ms(nothing[slept])} ms of it nothing ran (Python, the data, a sleep)."
    else:
        longest, most, times = "computed longest", max(compute, key=lambda r: compute[r]), compute
        end = "."
    *rest, last = (fmt.ms(took) for took in sorted(times.values()))
    if times[most] <= UNEQUAL * sorted(times.values())[-2]:
        return f"{text} None computed much longer: {rest[0]} to {last} ms{a_step}."
    others = f"the others {rest[0]} to {rest[-1]}" if len(rest) > 1 else f"the other {rest[0]}"
    return f"{text} Rank {most} {longest}: {last} ms{a_step}, {others} ms{end}"


def _evidence(late: model.Lateness, traces: TraceSet) -> str:
    """Why a rank is called slow, or why it is not."""
    unit, count = "step" if traces.marked else "update", late.steps_slow or late.steps_last
    seen = f"{count} of {fmt.count(late.steps, unit)}" if late.steps > 1 else f"the only {unit}"
    text = f"Rank {late.rank} came last in {seen}, by {fmt.ms(late.late_us)} ms"
    if not late.steps_slow:
        return f"{text}; {late.reason}."
    where = ORIGINS.get(late.arose or "", f", {late.arose}")
    if late.arose not in ORIGINS and late.arose and late.idle is not None:
        where += " (nothing ran)" if late.idle > 0.8 else " (computing)" if late.idle < 0.2 else ""
    text = f"{text}: its own work took {fmt.ms(late.own_us)} ms longer{where}."
    return text if late.slow else f"{text} But {late.reason}."


def _slowest(rank: int, own: Mapping[int, float], where: nodes.Nodes) -> tuple[list[int], str]:
    """The rank that made the others wait, or its node if no rank of it waited as they did.

    ``own``: what each rank waited itself.
    """
    if not where.are_several:
        return [rank], f"Rank {rank}"
    on_node = where.on(where.node_of[rank])
    elsewhere = [wait for r, wait in own.items() if r not in on_node]
    if len(on_node) == 1 or max(own[r] for r in on_node) > 0.6 * min(elsewhere):
        return [rank], f"Rank {rank} ({where.where(rank)})"
    name = where.named(where.node_of[rank])
    return on_node, name[0].upper() + name[1:]


def _nodes(traces: TraceSet) -> nodes.Nodes:
    """The nodes that the ranks ran on, if there were several and every rank has a trace."""
    stamps = {t.rank: (t.shardlab.get("node"), str(t.shardlab.get("host"))) for t in traces.traces}
    if set(stamps) != set(range(len(stamps))) or None in [node for node, _ in stamps.values()]:
        return nodes.Nodes()
    return nodes.of([stamps[rank] for rank in sorted(stamps)], 0)


def clocks(traces: TraceSet) -> list[str]:
    """How the nodes' clocks were corrected, and to what. Of many nodes, those farthest off."""
    others = sorted((c for c in traces.clocks() if c.node), key=lambda c: -abs(c.ahead_us))
    found = []
    for clock in others[:MAX_CLOCKS]:
        ranks = "rank" if len(clock.ranks) == 1 else "ranks"
        who = f"node {clock.node} ({clock.host}, {ranks} {fmt.names([*map(str, clock.ranks)])})"
        way = "ahead of" if clock.ahead_us >= 0 else "behind"
        drift = "" if clock.drift_ppm is None else f" (it drifts by {clock.drift_ppm:+.1f} µs/s)"
        found.append(
            f"The clock of {who} was {fmt.ms(abs(clock.ahead_us))} ms {way} rank 0's{drift}. It is "
            f"corrected to ± {fmt.ms(clock.error_us)} ms; a wait that is shorter counts as none."
        )
    if left := others[MAX_CLOCKS:]:
        worst = fmt.ms(max(clock.error_us for clock in left))
        found.append(f"Those of {fmt.count(len(left), 'more node')} are corrected to ± {worst} ms.")
    return found


def _hidden(ranks: Sequence[model.Breakdown]) -> str:
    comm = sum(row.comm_us for row in ranks)
    if not comm:
        return "There was no communication."
    hidden = sum(row.hidden_comm_us for row in ranks)
    if hidden < 0.005 * comm:
        if any(row.bubble_us for row in ranks):
            return ""  # messages that came in time leave no trace of when they travelled
        return "None of the communication was hidden behind compute."
    return f"{100 * hidden / comm:.0f}% of the communication was hidden behind compute."


def overlapping(traces: TraceSet) -> str:
    """That times of collectives are not to be added up, where several were under way at once."""
    of_ranks: dict[int, list[model.Participant]] = defaultdict(list)
    for row in traces.collectives():
        for part in row.participants:
            if row.step is not None:
                of_ranks[part.rank].append(part)
    sums = {
        rank: (sum(part.end_ns - part.start_ns for part in parts) / 1000,
               collectives.together_us(parts))
        for rank, parts in of_ranks.items()
    }  # fmt: skip
    rank = max(sums, key=lambda own: sums[own][0] - sums[own][1], default=None)
    if rank is None or sums[rank][0] <= 1.01 * sums[rank][1]:
        return ""
    summed, together = map(fmt.ms, sums[rank])
    return (
        f"collectives overlap each other: those of rank {rank} take {summed} ms one by one, in "
        f"{together} ms of time; a row's time counts a moment once, its other numbers go one by one"
    )


def baseline(answers: Sequence[model.WhatIf]) -> str:
    """What the answers are compared with."""
    now = fmt.ms(answers[0].now_us) if answers else ""
    return f"now {now} ms: the slowest rank of each step, the mean over steps"


def _facts(
    traces: TraceSet, ranks: Sequence[model.Breakdown], timeline: dict[str, Any]
) -> list[tuple[str, str]]:
    first = traces.traces[0]
    world = max(trace.world or 0 for trace in traces.traces)
    slowest = max(ranks, key=model.Breakdown.per_step)
    comm, hidden = (sum(getattr(row, n) for row in ranks) for n in ("comm_us", "hidden_comm_us"))
    facts = [
        ("step, slowest rank", f"{fmt.ms(slowest.per_step())} ms"),
        ("steps", str(_steps(ranks))),
        ("ranks", f"{len(ranks)} of {world}" if world > len(ranks) else str(len(ranks))),
        ("overlap", f"{100 * hidden / comm:.0f}%" if comm else fmt.NOTHING),
        ("device", first.device.upper()),
        ("spans drawn", f"{timeline['spans']:,}"),
    ]
    if run := first.shardlab.get("run"):
        facts.insert(0, ("run", str(run)))
    return facts
