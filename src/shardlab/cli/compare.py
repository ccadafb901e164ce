"""`shardlab compare`: strategies side by side, timed, weighed, proved and explained."""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardlab.cli import flags
from shardlab.errors import Interrupted, UsageError

WORLDS = typer.Option(
    "--world", "-w", help="Numbers of ranks: 2, or 1,2,4.  (default: 2)", show_default=False
)
ACCUMULATES = typer.Option("--accumulate", help="Micro-batches per rank and step: 1, or 1,4.")
PRECISION_AXIS = typer.Option(
    "--precision", help="fp32, bf16, fp16 or fp64; or several: fp32,bf16."
)
BUCKET_MB = typer.Option(
    "--bucket-mb", help="Bucket sizes, for the strategies that have buckets: 4, or 1,4,25."
)
PROFILE_AFTER = typer.Option(
    "--profile/--no-profile",
    help="Traces of each strategy, in <strategy>/traces/rank<r>/, taken after everything was timed "
    "and weighed, so that no number is of a profiled step. Options as in train.  (default: "
    "profile)",
    show_default=False,
)


def compare(
    ctx: typer.Context,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  "
            "(default: all)",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, flags.CONFIG] = None,
    world: Annotated[str | None, WORLDS] = None,
    workload: Annotated[str | None, flags.WORKLOAD] = None,
    size: Annotated[str | None, flags.SIZE] = None,
    data: Annotated[str | None, flags.DATA] = None,
    seq_len: Annotated[int | None, flags.SEQ_LEN] = None,
    global_batch: Annotated[int | None, flags.GLOBAL_BATCH] = None,
    accumulate: Annotated[str | None, ACCUMULATES] = None,
    batch_split: Annotated[str | None, flags.BATCH_SPLIT] = None,
    precision: Annotated[str | None, PRECISION_AXIS] = None,
    bucket_mb: Annotated[str | None, BUCKET_MB] = None,
    seed: Annotated[int | None, flags.SEED] = None,
    device: Annotated[str | None, flags.DEVICE] = None,
    backend: Annotated[str | None, flags.BACKEND] = None,
    port: Annotated[int | None, flags.PORT] = None,
    repeats: Annotated[int, typer.Option(help="Interleaved visits to each strategy.")] = 4,
    warmup: Annotated[int, typer.Option(help="Steps before the clock counts, per visit.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps per visit.")] = 2,
    prove: Annotated[
        bool,
        typer.Option(
            help="After the timing, prove each strategy on your model (of ours, on the smallest "
            "size) and on a stack of layers, in float64, against one process. For each strategy "
            "that takes some 3 s and 20 steps of your model on 4 samples a rank. A strategy that "
            "is found wrong makes the exit code 1."
        ),
    ] = True,
    time_limit: Annotated[
        float,
        typer.Option(
            help="Seconds that one visit, weighing, estimate, proof or profile of a strategy may "
            "take; what takes longer is a row that says so."
        ),
    ] = 600.0,
    profile: Annotated[bool | None, PROFILE_AFTER] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with an interrupted comparison; what it has measured is kept.",
            metavar="DIR",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier compare.json to hold this one against.", metavar="FILE"),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="With --against, exit 1 beyond a limit: slower=5%, memory=10% (repeatable).",
            metavar="LIMIT",
        ),
    ] = None,
    settings: Annotated[list[str] | None, flags.SET] = None,
    out: Annotated[str | None, flags.OUT] = None,
    quiet: Annotated[bool, flags.QUIET] = False,
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:
    """Measure strategies side by side: same model, data, seed and global batch."""
    from shardlab import launch, record
    from shardlab.measure import compare as comparison
    from shardlab.measure import gate
    from shardlab.measure import resume as resuming
    from shardlab.measure.cells import Plan, axes_of, cells_of
    from shardlab.report import compare as report
    from shardlab.report import console
    from shardlab.strategies import STRATEGIES

    if launch.torchrun_environment() is not None:
        raise UsageError("compare starts its own ranks; run it without torchrun")
    if fail_if and against is None:
        raise UsageError("--fail-if is for a comparison with an earlier one; add --against FILE")
    if resume is not None and out is not None:
        raise UsageError("--resume goes on in its own folder; leave out --out")
    limits = gate.limits_of(fail_if or [])
    earlier = None if against is None else gate.read(against)
    store = None if resume is None else resuming.Store(resume)
    begun = None if store is None else store.planned()
    if begun is not None and _only_given(ctx, {"resume", "quiet", "as_json", "against", "fail_if"}):
        cells, plan, command = begun
        output = cells[0].config.output
    else:
        resolved = flags.config_of(
            config,
            settings,
            {
                "model.workload": workload,
                "model.size": size,
                "data.source": data,
                "data.seq_len": seq_len,
                "training.global_batch": global_batch,
                "training.batch_split": batch_split,
                "training.seed": seed,
                "launch.device": device,
                "launch.backend": backend,
                "launch.port": port,
                "profile.enabled": profile or None,
                "output.dir": out,
            },
        )
        output, command = resolved.output, flags.command()
        plan = Plan(
            repeats=repeats,
            warmup=warmup,
            steps=steps,
            prove=prove,
            time_limit_s=time_limit,
            profile=None if profile is False else replace(resolved.profile, enabled=True),
        )
        specs = [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
        axes = axes_of(resolved, world, precision, accumulate, bucket_mb, launch.DEFAULT_WORLD)
        cells = cells_of(resolved, specs, axes, plan)
        if begun is not None:
            assert resume is not None
            resuming.refuse_others((cells, plan), begun[:2], resume)
            cells, plan, command = begun
    if earlier is not None:
        gate.refuse_others(earlier, cells)
        gate.refuse_unsure(earlier, plan.repeats, limits)

    @functools.cache  # made when there is something to write, so a refusal leaves nothing behind
    def folder() -> Path:
        return resume or record.new_folder(Path(output.root), "compare", flags.path_of(output.dir))

    try:
        with (
            console.comparison_progress(enabled=not (quiet or as_json)) as on_progress,
            _interrupted_by_terminate(),
        ):
            result = comparison.compare(cells, plan, command, on_progress, folder)
    except (Interrupted, KeyboardInterrupt):
        if folder.cache_info().currsize:
            again = f"shardlab compare --resume {shlex.quote(str(folder()))}"
            print(f"to go on where it stopped: {again}", file=sys.stderr)
        raise Interrupted from None
    try:
        if earlier is not None:
            result["gate"] = gate.check(result, earlier, limits)
    finally:  # what was measured is not lost to a record that cannot be compared with it
        files = report.write(folder(), result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder())
    else:
        console.print_comparison(result, files)
    if earlier is not None and not quiet and not as_json:
        console.print_gate(result["gate"])
    if all(cell["status"] != "ok" for cell in result["cells"]):
        raise SystemExit(1)
    if any((cell.get("proof") or {}).get("pass") is False for cell in result["cells"]):
        raise SystemExit(1)
    if earlier is not None and not result["gate"]["pass"]:
        raise SystemExit(1)


def _only_given(ctx: typer.Context, names: set[str]) -> bool:
    """Whether no other flags were given than these."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name).name != "DEFAULT"}  # type: ignore[union-attr]
    return given <= names


@contextlib.contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """``kill`` ends a comparison as Ctrl-C does: every rank is ended, and how to go on is said."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
