"""`shardlab plan`: which strategy, on how many ranks of what, how long, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from shardlab.cli import flags
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.plan.plan import Question


@flags.configured(
    "workload", "size", "data", "seq_len", "global_batch", "micro_batch", "optimizer",
    "precision", "activation_checkpointing", "compile",
    global_batch="Samples per step, over all ranks: they stay the same when there are more ranks.  "
    "(default: the samples of a rank stay the same)",
)  # fmt: skip
def plan(
    asked: flags.Asked,
    strategies: str | None = typer.Option(
        None, "--strategies", "--strategy",
        help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  (default: "
        "those that overlap or shard)",
    ),
    world: str | None = typer.Option(
        None, "--world", "-w", help="Numbers of ranks: 8,64,512. They are not started.  "
        "(default: those of the config, else 2)",
    ),
    machine: str | None = typer.Option(
        None, help="What the ranks have: this (as here, measured), or h100, a100, h200, b200, "
        "mi300x …; several with commas.  (default: this)",
    ),
    link: list[str] | None = typer.Option(
        None, help="Between nodes: ndr, hdr, 100gbe, 25gbit, '25gbit,50us' or 8x200gbit "
        "(repeatable).  (default: what such nodes usually have)",
    ),
    tokens: str | None = typer.Option(
        None, help="Days to train on this many tokens: 300B, 1T."
    ),
    price_per_hour: str | None = typer.Option(
        None, help="Of one device, in any currency: what --tokens cost. 2.5, or "
        "h100=2.5,a100=1.3.",
    ),
    fits: bool = typer.Option(
        False, "--only-fitting", help="Only what fits the memory of the device."
    ),
    what_if: list[str] | None = typer.Option(
        None, help="The same after a change: bandwidth=2, slow-rank=1.3, overlap=off, "
        "checkpointing=on, bucket-mb=4 or best; several at once with commas (repeatable).",
        metavar="CHANGE",
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Where the predicted step goes, for what is chosen."
    ),
    check: bool = typer.Option(
        False, "--check", help="Predict, then measure on this machine, and say how far off it was."
    ),
) -> None:  # fmt: skip
    """Predict the step on machines that you do not have: time, memory, days and cost.

    Each number comes with its 90% interval and with a naive guess, in which nothing is sent.

    \b
    Examples:
      shardlab plan --size xl --world 8,64 --machine h100 --strategies zero1,zero3
      shardlab plan --size small --world 2 --what-if bandwidth=2 --explain
    """
    from shardlab.plan import check as checking
    from shardlab.plan import plan as planning
    from shardlab.plan.predict import Predictor
    from shardlab.report import console
    from shardlab.report import plan as report
    from shardlab.specs import whole_numbers

    config = asked.config()
    names = planning.devices_of(machine)
    numbers = whole_numbers("--world", world)
    if world is not None and not numbers:
        raise UsageError("--world names no number of ranks; write 8, or 8,64,512")
    question = planning.Question(
        config,
        tuple(flags.specs_of(strategies)) if strategies else planning.DEFAULT,
        numbers or (config.launch.world or 2,),
        names,
        planning.links_of(link or []),
        planning.keeps_global_batch(config, "training.global_batch" in asked.keys),
        planning.tokens_of(tokens),
        planning.prices_of(price_per_hour, names),
        tuple(planning.change_of(text) for text in what_if or []),
        fits,
    )
    if check:
        _refuse_beside_check(question, explain)
    with (
        Predictor() as predictor,
        console.comparison_progress(enabled=asked.tells) as on_progress,
    ):
        make = checking.check if check else planning.plan
        result = make(question, predictor, flags.command(), on_progress)
    folder = config.new_folder("plan-check" if check else "plan")
    files = report.write(folder, result)
    asked.print(result, folder, lambda: report.show(result, files, explain))
    if all(row["reason"] is not None for row in result["rows"]):
        raise SystemExit(1)


def _refuse_beside_check(question: Question, explain: bool) -> None:
    given: dict[str, Any] = {
        "--machine": question.devices != ("this",),
        "--link": question.links != (None,),
        "--tokens": question.tokens is not None,
        "--what-if": bool(question.changes),
        "--only-fitting": question.fits_only,
        "--explain": explain,
    }
    wrong = next((flag for flag, is_given in given.items() if is_given), None)
    if wrong is not None:
        raise UsageError(f"--check measures what runs here, as it is; leave out {wrong}")
