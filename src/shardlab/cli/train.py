"""`shardlab train`: one strategy, from start to end, or on from a checkpoint."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from shardlab.cli import flags
from shardlab.errors import Interrupted, RankFailure, UsageError

if TYPE_CHECKING:
    from shardlab.config import Config

RESTARTED_BY = {
    "torchrun": "under torchrun its agent restarts the ranks: torchrun --max-restarts",
    "srun": "under srun Slurm starts a job again: sbatch --requeue, and train --resume auto",
    "mpirun": "mpirun ends all ranks when one dies: start it again, with train --resume auto",
}


def config_of(asked: flags.Asked, keep_world: bool, is_restarted: bool) -> Config:
    """What was asked for, over the settings of the run that it resumes.

    Ranks that torchrun has started again resume the run that they began, asked or not.
    """
    from shardlab.checkpoint import resume as resumes

    given = asked.overrides()
    named = resumes.named_by(asked.of_file, given)
    base = resumes.settings_of(given.get("checkpoint.resume"), named, keep_world)
    if is_restarted:
        asked.flags["checkpoint.resume"] = resumes.AUTO
    return asked.config(base)


@flags.configured(
    "workload", "size", "data", "seq_len", "precision", "seed",
    "steps", "epochs", "global_batch", "micro_batch", "optimizer", "learning_rate",
    "strategy", "world", "device",
    "checkpoint_every", "resume", "max_restarts", "inject", "profile",
)  # fmt: skip
def train(asked: flags.Asked) -> None:
    """Train with one strategy; the run folder keeps every step and every collective.

    \b
    Examples:
      shardlab train --size tiny --steps 10
      shardlab train --strategy zero2 --world 4 --set training.schedule=cosine
    """
    from shardlab.checkpoint import files
    from shardlab.checkpoint import resume as resumes
    from shardlab.launch import launch, launcher_env
    from shardlab.plan import buckets
    from shardlab.report import console
    from shardlab.training import restart

    place = launcher_env.joined()
    is_restarted = place is not None and place.is_torchruns and resumes.is_restarted()
    resolved = config_of(asked, keep_world=place is None, is_restarted=is_restarted)
    if place is not None and resolved.launch.max_restarts:
        raise UsageError(RESTARTED_BY[place.launcher])
    if place is None and resolved.launch.world is None:
        resolved = resolved.at_world(launch.default_world(resolved))
    (resolved,) = buckets.settled([resolved])
    is_first = place is None or place.rank == 0
    try:
        with console.training_progress(enabled=is_first and asked.tells) as on_event:
            result = restart.train(resolved, flags.command(), on_event)
    except (RankFailure, Interrupted) as failure:
        folder = failure.folder
        if is_first and folder is not None and files.steps_in(folder):
            again = f"shardlab train --resume {shlex.quote(str(folder))}"
            for key, flag in resumes.CODE.items():  # a run folder alone runs no code of its user's
                section, _, name = key.partition(".")
                value = getattr(getattr(resolved, section), name)
                again += f" {flag}{shlex.quote(value)}" if ":" in value else ""
            print(f"to continue from its last checkpoint: {again}", file=sys.stderr)
        raise
    if result is None:  # this is a rank of a launcher's other than the first
        return
    asked.print(result, result["folder"], lambda: console.print_training(result))
    if (result["checkpoint"] or {}).get("error"):
        raise SystemExit(1)  # what was trained is not on the disk
