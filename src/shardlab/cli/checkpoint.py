"""`shardlab checkpoint`: what is inside, and to and from other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardlab import output
from shardlab.cli.common import App
from shardlab.cli.flags import JSON
from shardlab.errors import UsageError

app = App(
    no_args_is_help=True,
    help="Look into checkpoints, and turn them into safetensors or Hugging Face's GPT-2 and back.",
)
PATH = typer.Argument(help="A checkpoint, or a run folder that has some.", metavar="PATH")
FORMAT = typer.Option(
    "--format", help="safetensors: a file, our names. hf-gpt2: a folder that transformers reads."
)


@app.command()
def show(path: Annotated[Path, PATH], as_json: Annotated[bool, JSON] = False) -> None:
    """What is inside: steps, strategies, tensors, sizes; and whether every file is whole."""
    from shardlab.checkpoint import files
    from shardlab.report import checkpoint as report

    found = files.find(str(path))
    rows = files.overview(found)
    is_one = files.is_checkpoint(found) and "step" in rows[0]
    tensors = files.tensors(found) if is_one else []
    if as_json:
        output.say_json({"schema": 1, "checkpoints": rows, "tensors": tensors})
    else:
        report.show(rows, tensors)
    if any(row["damage"] is not None for row in rows):
        raise SystemExit(1)


@app.command()
def export(
    path: Annotated[Path, PATH],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file or folder to write; new.")],
    form: Annotated[str, FORMAT] = "safetensors",
    average: Annotated[
        bool,
        typer.Option(
            "--average", help="The moving average of the parameters (training.ema_decay)."
        ),
    ] = False,
) -> None:
    """The model's weights, whole; of a run folder, those of its newest checkpoint."""
    from shardlab.checkpoint import convert

    checkpoint = _one(path)
    count, has_average = convert.export(checkpoint, out, form, average)
    which = ""
    if has_average:
        which = ": the moving average" if average else ": as trained; --average writes the average"
    output.say(f"{count} tensors of {checkpoint} written to {out}{which}")


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a GPT-2 folder.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The checkpoint to write; a new folder.")
    ],
    form: Annotated[str, FORMAT] = "safetensors",
) -> None:
    """A checkpoint of step 0 with these weights: `shardlab train --resume` begins from it."""
    from shardlab.checkpoint import convert

    count = convert.import_(source, out, form)
    output.say(
        f"{count} tensors written to {out}; to train from them: shardlab train --resume {out}"
    )


def _one(path: Path) -> Path:
    """The checkpoint that is meant: of a run folder its newest."""
    from shardlab.checkpoint import files

    found = files.find(str(path))
    if files.is_checkpoint(found):
        return found
    steps = files.steps_in(found)
    if not steps:
        raise UsageError(f"{found} has no checkpoint")
    return next(iter(steps.values()))
