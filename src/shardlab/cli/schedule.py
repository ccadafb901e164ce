"""`shardlab schedule`: a pipeline schedule as a picture, with its bubble and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardlab import output
from shardlab.cli import flags
from shardlab.errors import UsageError


def schedule(
    names: Annotated[
        list[str],
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zero_bubble, zbv; several, or all, are compared.",
            metavar="NAME...", show_default=False,
        ),
    ],
    stages: int = typer.Option(
        4, help="Ranks in the pipeline, each with one stage of the model, or with --chunks stages."
    ),
    microbatches: int = typer.Option(8, help="Micro-batches of a step."),
    chunks: int | None = typer.Option(
        None, help="Stages per rank: of interleaved 2 or more; zbv has 2, the others 1. Among "
        "several schedules, for those that can have them.", show_default=False,
    ),
    forward_ms: float = typer.Option(
        1.0, help="Forward of one micro-batch through a rank's layers, all its stages together."
    ),
    backward_ms: float = typer.Option(2.0, help="Backward of the same."),
    weight_ms: float | None = typer.Option(
        None, help="The part of the backward that computes the weights' gradients, which "
        "zero_bubble and zbv put off.  (default: half)", show_default=False,
    ),
    send_ms: float = typer.Option(0.0, help="A message from one rank to another."),
    svg: Path | None = typer.Option(
        None, help="Write the picture to this file.", metavar="FILE", show_default=False
    ),
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:  # fmt: skip
    """Draw pipeline schedules: who works on what when, the bubble, what is kept and sent.

    Nothing is run: this is a simulation.
    """
    from shardlab.files import write_text
    from shardlab.plan import schedules as planning
    from shardlab.report import schedule as report

    chosen = planning.names_of(names)
    times = planning.times_of(chosen, forward_ms, backward_ms, weight_ms, send_ms)
    pipeline = planning.Pipeline(stages, microbatches, times)
    result = planning.compare(chosen, pipeline, chunks, flags.command())
    if svg is not None:
        # A file is replaced as a whole, and a device or a pipe must not be.
        if svg.exists() and not svg.is_file():
            raise UsageError(f"--svg {svg}: this is not a plain file; name one, as schedule.svg")
        try:
            write_text(svg, report.svg(result))
        except OSError as error:
            raise UsageError(f"--svg {svg}: cannot be written: {error.strerror}") from None
    if as_json:
        output.say_json(result)
    else:
        report.show(result, svg)
