"""`shardlab schedule`: a pipeline schedule as a drawing, with its bubble and what it keeps."""

from __future__ import annotations

from typing import Annotated

import typer

from shardlab import output
from shardlab.cli import flags


def schedule(
    names: Annotated[
        list[str],
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zero_bubble; several, or all, are compared.",
            metavar="NAME...", show_default=False,
        ),
    ],
    world: int = typer.Option(
        4, "--world", "-w", help="Ranks in the pipeline, each with one stage of the model, or with "
        "--chunks stages.",
    ),
    microbatches: int = typer.Option(8, help="Micro-batches of a step."),
    chunks: int | None = typer.Option(
        None, help="Stages per rank: of interleaved 2 or more; the others have 1.",
        show_default=False,
    ),
    forward_ms: float = typer.Option(
        1.0, help="Forward of one micro-batch through a rank's layers, all its stages together."
    ),
    backward_ms: float = typer.Option(2.0, help="Backward of the same."),
    weight_ms: float | None = typer.Option(
        None, help="The part of the backward that computes the weights' gradients, which "
        "zero_bubble puts off.  (default: half)", show_default=False,
    ),
    send_ms: float = typer.Option(0.0, help="A message from one rank to another."),
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:  # fmt: skip
    """Draw pipeline schedules: who works on what when, the bubble, what is kept and sent.

    Nothing is run: this is a simulation.

    \b
    Examples:
      shardlab schedule 1f1b --world 4 --microbatches 8
      shardlab schedule all --json
    """
    from shardlab.plan import schedules as planning
    from shardlab.report import schedule as report

    chosen = planning.names_of(names)
    times = planning.times_of(chosen, forward_ms, backward_ms, weight_ms, send_ms)
    pipeline = planning.Pipeline(world, microbatches, times)
    result = planning.compare(chosen, pipeline, chunks, flags.command())
    if as_json:
        output.say_json(result)
    else:
        report.show(result)
