"""`shardlab train`: one strategy, from start to end, or on from a checkpoint."""

from __future__ import annotations

import shlex
import sys

from shardlab.cli import flags
from shardlab.errors import Interrupted, RankFailure, UsageError


@flags.configured(
    "strategy", "world", "workload", "size", "data", "seq_len", "steps", "global_batch",
    "accumulate", "batch_split", "epoch", "audit_data", "optimizer", "learning_rate", "precision",
    "evaluate_every", "seed", "device", "backend", "port", "profile", "checkpoint_every",
    "checkpoint_async", "resume", "max_restarts", "min_world", "hang_after", "inject",
)  # fmt: skip
def train(asked: flags.Asked) -> None:
    """Train with one strategy; the run folder keeps every step and every collective."""
    from shardlab.checkpoint import start as starts
    from shardlab.report import console
    from shardlab.run import launch, restart

    environment = launch.torchrun_environment()
    given = asked.flags
    named = starts.named_by(asked.file, given.get("model.workload"), given.get("strategy.name"))
    base = starts.settings_of(given.get("checkpoint.resume"), named, keep_world=environment is None)
    if starts.is_restarted(environment):
        given["checkpoint.resume"] = starts.AUTO
    resolved = asked.config(base)
    if environment is not None and resolved.launch.max_restarts:
        raise UsageError("under torchrun its agent restarts the ranks: torchrun --max-restarts")
    if environment is None and resolved.launch.world is None:
        resolved = resolved.with_overrides({"launch.world": launch.default_world(resolved)})
    is_first = environment is None or environment["rank"] == 0
    try:
        with console.training_progress(enabled=is_first and asked.shows) as on_event:
            result = restart.train(resolved, flags.command(), on_event)
    except (RankFailure, Interrupted) as failure:
        if (folder := getattr(failure, "folder", None)) is not None and is_first:
            again = f"shardlab train --resume {shlex.quote(str(folder))}"
            if ":" in resolved.model.workload:  # a run folder alone never runs code of its own
                again += f" --workload {shlex.quote(resolved.model.workload)}"
            print(f"to continue from its last checkpoint: {again}", file=sys.stderr)
        raise
    if result is None:  # this is a rank of torchrun's other than the first
        return
    asked.print(result, result["folder"], lambda: console.print_training(result))
    if (result["checkpoint"] or {}).get("error"):
        raise SystemExit(1)  # what was trained is not on the disk
