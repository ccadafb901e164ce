"""`shardlab compare`: strategies side by side, timed, weighed, proved and explained."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from msgspec import structs

from shardlab import output
from shardlab.cli import flags
from shardlab.errors import UsageError
from shardlab.runlock import RunLock

# Unless somebody sets it: a short window for each strategy, whose first step is thrown away anyway.
WINDOW = {"profile": {"wait": 0, "active": 2}}


@flags.configured(
    "workload", "size", "global_batch", "device",
)  # fmt: skip
def compare(
    asked: flags.Asked,
    ctx: typer.Context,
    strategies: str | None = flags.STRATEGIES,
    world: str | None = typer.Option(
        None, "--world", "-w", help="Numbers of ranks: 2, or 1,2,4.  (default: 2)",
        rich_help_panel=flags.PARALLELISM,
    ),
    micro_batch: str | None = typer.Option(
        None, help="Most samples that a rank takes at a time: 4, or 1,4.  (default: its share)",
        rich_help_panel=flags.BATCH,
    ),
    precision: str | None = typer.Option(
        None, help="fp32, bf16, fp16 or fp64; or several: fp32,bf16.  (default: fp32)",
        rich_help_panel=flags.MODEL,
    ),
    repeats: int = typer.Option(4, help="Interleaved visits to each strategy."),
    warmup: int = typer.Option(1, help="Steps before the clock counts, per visit."),
    steps: int = typer.Option(
        2,
        help="Timed steps per visit; with --to-loss the most steps of a run.  (default there: 500)",
    ),
    to_loss: float | None = typer.Option(
        None,
        help="Train each strategy until this held-out loss instead, and compare time, bytes and "
        "steps: for what changes the mathematics, such as local_sgd and diloco.",
        metavar="LOSS",
    ),
    tokens: int | None = typer.Option(
        None, help="Train each strategy on this many tokens instead, and compare the held-out loss."
    ),
    seeds: int | None = typer.Option(
        None, help="Runs of each strategy with --to-loss or --tokens.  (default: 3)"
    ),
    prove: bool = typer.Option(
        True,
        help="After the timing, prove each strategy on your model (of ours, on the smallest size) "
        "and on a stack of layers, in float64, against one process. For each strategy that takes "
        "some 3 s and 20 steps of your model on 4 samples a rank. A strategy that is found wrong "
        "makes the exit code 1.",
    ),
    fresh: bool = typer.Option(
        False,
        "--fresh",
        help="Prove and estimate anew, also where a proof or an estimate of memory by the same "
        "source, versions and options is kept.",
    ),
    time_limit: float = typer.Option(
        600.0,
        help="Seconds that one visit, weighing, estimate, proof or profile of a strategy may take; "
        "what takes longer is a row that says so.",
    ),
    profile: bool | None = typer.Option(
        None,
        help="Traces of each strategy, in <strategy>/traces/rank<r>/, taken after everything was "
        "timed and weighed, so that no number is of a profiled step. Options as in train.  "
        "(default: profile)",
    ),
    against: Path | None = typer.Option(
        None, help="An earlier compare.json to hold this one against.", metavar="FILE"
    ),
    fail_if: list[str] | None = typer.Option(
        None, help="Exit 1: slower=5% or memory=10%, beyond that share more than --against; wrong, "
        "if one that ran is not proved right, for whatever reason (repeatable).",
        metavar="LIMIT",
    ),
) -> None:  # fmt: skip
    """Measure strategies side by side: same model, data, seed and global batch.

    \b
    Examples:
      shardlab compare --size tiny --strategies single,simple_ddp,pytorch_ddp
      shardlab compare --strategies diloco,zero2 --to-loss 4.5 --seeds 3
    """
    from shardlab.launch import launch
    from shardlab.measure import compare as comparison
    from shardlab.measure import gate
    from shardlab.measure.cells import Plan, axes_of, cells_of
    from shardlab.plan import buckets
    from shardlab.report import compare as report
    from shardlab.report import console

    if to_loss is not None or tokens is not None:
        _reach(asked, ctx, to_loss, tokens)
        return
    if seeds is not None:
        raise UsageError("--seeds is for --to-loss and --tokens; --repeats sets visits to time")
    if profile:
        asked.flags["profile.enabled"] = True
    first = asked.config(WINDOW)
    launch.lead(first.launch)
    if fresh and not prove:
        raise UsageError("--fresh makes proofs anew, and --no-prove makes none; leave out one")
    limits = gate.limits_of(fail_if or [])
    must_be_right = limits.pop(gate.WRONG, None) is not None
    if against is None and limits:
        raise UsageError(
            f"--fail-if {min(limits)} is for a comparison with an earlier one; add --against FILE"
        )
    earlier = None if against is None else gate.read(against)
    plan = Plan(
        repeats=repeats,
        warmup=warmup,
        steps=steps,
        prove=prove,
        fresh=fresh,
        time_limit_s=time_limit,
        profile=None if profile is False else structs.replace(first.profile, enabled=True),
    )
    axes = axes_of(first, world, precision, micro_batch, launch.default_ranks())
    cells = cells_of(first, flags.specs_of(strategies), axes, plan)
    for cell, config in zip(cells, buckets.settled([c.config for c in cells]), strict=True):
        cell.config = config
    if must_be_right and not plan.prove:
        raise UsageError("--fail-if wrong looks at the proofs; leave out --no-prove")
    if earlier is not None:
        gate.refuse_others(earlier, cells)
        gate.refuse_unsure(earlier, plan.repeats, limits)

    lock = ctx.with_resource(RunLock(keeps=False))  # while it measures, nobody else may write there

    @functools.cache  # created when there is something to write: a refusal leaves nothing behind
    def folder() -> Path:
        made = first.new_folder("compare")
        lock.take(made)
        return made

    def write_partial(result: dict[str, Any]) -> None:
        page = report.write(folder(), result)["html"]
        print(f"what was measured so far: {page}", file=sys.stderr)

    with (
        console.comparison_progress(enabled=asked.tells) as on_progress,
        _interrupted_by_terminate(),
    ):
        result = comparison.compare(
            cells, plan, flags.command(), on_progress, folder, True, write_partial
        )
    try:
        if earlier is not None:
            result["gate"] = gate.check(result, earlier, limits)
    finally:  # what was measured is not lost to a record that cannot be compared with it
        files = report.write(folder(), result)
    asked.print(result, folder(), lambda: console.print_comparison(result, files))
    if earlier is not None and asked.shows:
        console.print_gate(result["gate"])
    unproved = gate.not_right(result) if must_be_right else []
    for reason in unproved:
        output.note("error", f"--fail-if wrong: not proved right: {reason}")
    failed = (
        bool(unproved)
        or all(cell["status"] != "ok" for cell in result["cells"])
        or any((cell.get("proof") or {}).get("pass") is False for cell in result["cells"])
        or (earlier is not None and not result["gate"]["pass"])
    )
    if failed:
        raise SystemExit(1)


# What times steps, and what looks at them afterwards.
OF_STEPS = ("repeats", "prove", "fresh", "profile", "against", "fail_if")


def _reach(asked: flags.Asked, ctx: typer.Context, loss: float | None, tokens: int | None) -> None:
    """Strategies by what they reach, and when: ``--to-loss`` and ``--tokens``."""
    from shardlab.launch import launch
    from shardlab.measure import to_loss
    from shardlab.measure.cells import Plan, axes_of, cells_of
    from shardlab.report import console
    from shardlab.report import to_loss as report

    given = ctx.params
    sources = {name: ctx.get_parameter_source(name) for name in given}
    is_given = {n: source is not None and source.name != "DEFAULT" for n, source in sources.items()}
    flag = "--to-loss" if tokens is None else "--tokens"
    for name in OF_STEPS:
        if is_given[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} is for comparing steps, and {flag} trains to a goal; "
                "leave out one of them"
            )
    if given["strategies"] is None:
        raise UsageError(
            f"{flag} trains each strategy several times; say which: --strategies pytorch_ddp,zero2"
        )
    if tokens is not None and is_given["steps"]:
        raise UsageError("--tokens says how many steps there are; leave out --steps")
    base = asked.config()
    goal = to_loss.Goal(
        loss=loss,
        tokens=tokens,
        max_steps=given["steps"] if is_given["steps"] else to_loss.MAX_STEPS,
        seeds=to_loss.Goal.seeds if given["seeds"] is None else given["seeds"],
        warmup=given["warmup"],
        time_limit_s=given["time_limit"],
    )
    launch.lead(base.launch)
    axes = axes_of(
        base, given["world"], given["precision"], given["micro_batch"],
        launch.default_ranks(),
    )  # fmt: skip
    plan = Plan(repeats=1, warmup=0, steps=goal.max_steps)
    cells = cells_of(base, flags.specs_of(given["strategies"]), axes, plan)
    with (
        console.comparison_progress(enabled=asked.tells) as on_progress,
        _interrupted_by_terminate(),
    ):
        result = to_loss.run(cells, goal, base, flags.command(), on_progress)
    folder = base.new_folder("to-loss")
    files = report.write(folder, result)
    asked.print(result, folder, lambda: report.show(result, files))
    if not any(cell["ranked"] for cell in result["cells"]):
        output.note("error", report.nothing_reached(result))
        raise SystemExit(1)


@contextlib.contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """``kill`` ends a comparison as Ctrl-C does: the ranks end, and the report is written."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
