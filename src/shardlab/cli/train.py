"""`shardlab train`: one strategy, from start to end, or on from a checkpoint."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli import flags
from shardlab.errors import Interrupted, RankFailure, UsageError

WORLD = typer.Option("--world", "-w", help="Number of ranks.  (default: 2)", show_default=False)
LEARNING_RATE = typer.Option("--learning-rate", "--lr")
EVALUATE = typer.Option(
    "--evaluate-every", help="Steps between evaluations on the held-out samples; 0: at the end."
)
PROFILE = typer.Option(
    "--profile",
    help="Traces of some steps of each rank, in traces/rank<r>/: 1 step left alone, 1 warm-up, 3 "
    "kept (--set profile.active=5). A recorded step takes about 2 µs more per operator. --set "
    "profile.shapes=true or profile.memory=true: files 1.4 times as large; profile.stacks=true: "
    "2 times or more.",
)
CHECKPOINT_EVERY = typer.Option(
    "--checkpoint-every",
    help="Steps between checkpoints, in checkpoints/step-<n>/; the last step has one too. The "
    "newest 2 stay (--set checkpoint.keep_last=5, checkpoint.keep_every=1000).",
)
CHECKPOINT_ASYNC = typer.Option(
    "--checkpoint-async", help="Checkpoints are written by a thread while the run goes on."
)
RESUME = typer.Option(
    "--resume",
    help="A run folder: on in it, from its newest whole checkpoint. A checkpoint: from it, in a "
    "new folder. Settings are its own unless given. auto: the newest run of this config that did "
    "not finish (or the one in --out), else a new one.",
    metavar="auto|PATH",
)
MAX_RESTARTS = typer.Option(
    "--max-restarts", help="Start the ranks again when one dies, from the last checkpoint."
)
MIN_WORLD = typer.Option(
    "--min-world", help="A restart may have fewer ranks, one less each time, down to this."
)
HANG_AFTER = typer.Option(
    "--hang-after",
    help="End a run in which no rank has moved for so many seconds, and say who is missing; 0: "
    "never.  (default: 60, or ten times the longest pause)",
    metavar="SECONDS",
    show_default=False,
)
INJECT = typer.Option(
    "--inject",
    help="Break it on purpose: kill:rank=1,step=5; hang, slow:rank=1,ms=50, drop-collective, nan, "
    "corrupt-checkpoint, disk-full (repeatable; docs/reliability.md).",
    metavar="FAULT",
)


def train(
    config: Annotated[Path | None, flags.CONFIG] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="A name from `shardlab strategies`.")
    ] = None,
    world: Annotated[int | None, WORLD] = None,
    workload: Annotated[str | None, flags.WORKLOAD] = None,
    size: Annotated[str | None, flags.SIZE] = None,
    data: Annotated[str | None, flags.DATA] = None,
    seq_len: Annotated[int | None, flags.SEQ_LEN] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None,
    global_batch: Annotated[int | None, flags.GLOBAL_BATCH] = None,
    accumulate: Annotated[int | None, flags.ACCUMULATE] = None,
    batch_split: Annotated[str | None, flags.BATCH_SPLIT] = None,
    epoch: Annotated[
        str | None,
        typer.Option(help="How an epoch ends: continuous, padded, dropped or exact."),
    ] = None,
    audit_data: Annotated[
        bool, typer.Option("--audit-data", help="Say which samples were repeated or missed.")
    ] = False,
    optimizer: Annotated[str | None, flags.OPTIMIZER] = None,
    learning_rate: Annotated[float | None, LEARNING_RATE] = None,
    precision: Annotated[str | None, flags.PRECISION] = None,
    evaluate_every: Annotated[int | None, EVALUATE] = None,
    seed: Annotated[int | None, flags.SEED] = None,
    device: Annotated[str | None, flags.DEVICE] = None,
    backend: Annotated[str | None, flags.BACKEND] = None,
    port: Annotated[int | None, flags.PORT] = None,
    profile: Annotated[bool, PROFILE] = False,
    checkpoint_every: Annotated[int | None, CHECKPOINT_EVERY] = None,
    checkpoint_async: Annotated[bool, CHECKPOINT_ASYNC] = False,
    resume: Annotated[str | None, RESUME] = None,
    max_restarts: Annotated[int | None, MAX_RESTARTS] = None,
    min_world: Annotated[int | None, MIN_WORLD] = None,
    hang_after: Annotated[float | None, HANG_AFTER] = None,
    inject: Annotated[list[str] | None, INJECT] = None,
    settings: Annotated[list[str] | None, flags.SET] = None,
    out: Annotated[str | None, flags.OUT] = None,
    quiet: Annotated[bool, flags.QUIET] = False,
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:
    """Train with one strategy; the run folder keeps every step and every collective."""
    from shardlab import launch, record, restart
    from shardlab.checkpoint import start as starts
    from shardlab.report import console

    environment = launch.torchrun_environment()
    named = starts.named_by(config, workload, strategy)
    base = starts.settings_of(resume, named, keep_world=environment is None)
    if starts.is_restarted(environment):
        resume = starts.AUTO
    resolved = flags.config_of(
        config,
        settings,
        {
            "strategy.name": strategy,
            "launch.world": world,
            "model.workload": workload,
            "model.size": size,
            "data.source": data,
            "data.seq_len": seq_len,
            "training.steps": steps,
            "training.global_batch": global_batch,
            "training.accumulate": accumulate,
            "training.batch_split": batch_split,
            "data.epoch": epoch,
            "data.audit": audit_data or None,
            "training.optimizer": optimizer,
            "training.learning_rate": learning_rate,
            "precision.compute": precision,
            "training.evaluate_every": evaluate_every,
            "training.seed": seed,
            "launch.device": device,
            "launch.backend": backend,
            "launch.port": port,
            "profile.enabled": profile or None,
            "checkpoint.every": checkpoint_every,
            "checkpoint.asynchronous": checkpoint_async or None,
            "checkpoint.resume": resume,
            "launch.max_restarts": max_restarts,
            "launch.min_world": min_world,
            "guard.hang_s": hang_after,
            "faults": inject,
            "output.dir": out,
        },
        base,
    )
    if environment is not None and resolved.launch.max_restarts:
        raise UsageError("under torchrun its agent restarts the ranks: torchrun --max-restarts")
    if environment is None and resolved.launch.world is None:
        resolved = resolved.with_overrides({"launch.world": launch.default_world(resolved)})
    speaks = (environment is None or environment["rank"] == 0) and not (quiet or as_json)
    try:
        with console.training_progress(enabled=speaks) as on_event:
            result = restart.train(resolved, flags.command(), on_event)
    except (RankFailure, Interrupted) as failure:
        is_first = environment is None or environment["rank"] == 0
        if (folder := getattr(failure, "folder", None)) is not None and is_first:
            again = f"shardlab train --resume {shlex.quote(str(folder))}"
            if ":" in resolved.model.workload:  # a run folder alone never runs code of its own
                again += f" --workload {shlex.quote(resolved.model.workload)}"
            print(f"to go on from its last checkpoint: {again}", file=sys.stderr)
        raise
    if result is None:  # a rank of torchrun's, but not the first
        return
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(result["folder"])
    else:
        console.print_training(result)
    if (result["checkpoint"] or {}).get("error"):
        raise SystemExit(1)  # what was trained is not on the disk
