"""Traces as one page that needs nothing else: the answer in words, charts, tables, a timeline.

The numbers come from the ``TraceSet``; here they are put into sentences, and into their places by
``trace_charts`` and ``timeline``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import numbers as fmt
from shardlab.files import write_text
from shardlab.guard import nodes
from shardlab.report import timeline
from shardlab.report import trace_charts as charts
from shardlab.report.page import asset, render
from shardlab.trace import kernels, model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_ROWS = 200  # in a table
MAX_KERNELS = 25
MAX_CLOCKS = 4
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
        buckets=charts.buckets(traces.collectives(), traces, steps),
        stragglers=traces.stragglers(),
        clocks=clocks(traces),
        several_ranks=len(ranks) > 1,
        n_steps=_steps(ranks),
        memory=memory,
        curves=charts.curves(memory, traces),
        what_if=traces.what_if(),
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
    ranks = traces.breakdown(per="rank")
    return " ".join(filter(None, (_went(traces, ranks), _slow(traces, ranks), _hidden(ranks))))


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
    took = f"{fmt.ms(statistics.mean(map(model.Breakdown.per_step, ranks)))} ms"
    if not traces.marked:
        return f"The whole trace is {took} long: {listed}."
    if len(ranks) == 1 and _steps(ranks) == 1:
        return f"The step took {took}: {listed}."
    return f"A step took {took} on average: {listed}."


def _slow(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    if not any(row.comm_us for row in ranks):
        return ""
    if len(ranks) == 1:
        return "The trace of one rank does not show how long it waited for others."
    waited = {row.rank: 0.0 for row in ranks}
    worst: dict[int, model.Straggler] = {}
    for straggler in traces.stragglers():
        rank = straggler.rank
        waited[rank] = waited.get(rank, 0.0) + straggler.lost_us
        if rank not in worst or straggler.lost_us > worst[rank].lost_us:
            worst[rank] = straggler
    own = {row.rank: row.wait_us for row in ranks}
    slow, name = _slowest(waited, own, _nodes(traces))
    total = sum(waited[rank] for rank in slow)
    others = max(len(ranks) - len(slow), 1)
    per_step = total / others / max(_steps(ranks), 1)
    if per_step < NOTABLE * statistics.mean(map(model.Breakdown.per_step, ranks)):
        return "No rank made the others wait for long."
    everyone, a_step = sum(waited.values()), " a step" if traces.marked else ""
    if total < 0.6 * everyone:
        each = fmt.ms(everyone / others / _steps(ranks))
        return f"The ranks waited for each other in turn, {each} ms{a_step}: none is the slow one."
    names = {"forward": "forward", "backward": "backward", "optimizer": "the optimizer"}
    worst_of = max((worst[r] for r in slow if r in worst), key=lambda w: w.lost_us)
    phase = names.get(worst_of.phase)
    where = f", mostly in {phase}" if phase else ""
    waits = f"each other rank waited {fmt.ms(per_step)} ms{a_step} for it{where}"
    return f"{name} is the slow one: {waits}."


def _slowest(
    waited: Mapping[int, float], own: Mapping[int, float], where: nodes.Nodes
) -> tuple[list[int], str]:
    """The rank that the others waited for longest, or its node if no rank of it waited as they did.

    ``waited``: what the others waited for a rank; ``own``: what it waited itself.
    """
    rank = max(waited, key=lambda r: waited[r])
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
