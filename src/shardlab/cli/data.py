"""`shardlab data`: fetch data sets, make token shards of text, say what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab import output
from shardlab.cli.common import App
from shardlab.data import catalog

app = App(
    no_args_is_help=True,
    help="Fetch data sets, make token shards of your own text, and see what is there.",
)

QUIET = typer.Option("--quiet", "-q", help="No progress: only where the data is.")
JSON = typer.Option("--json", help="Print the description as JSON, and nothing else, on stdout.")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"{', '.join(catalog.ENTRIES)}.", metavar="NAME")],
    shards: Annotated[
        int, typer.Option(help="fineweb: training shards of 100 M tokens (200 MB).")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder; by default where `--set data.source=auto` looks.",
                     metavar="DIR", show_default=False),
    ] = None,
    source: Annotated[
        str,
        typer.Option("--from", help="hub, or a file or folder that you have.", metavar="SOURCE"),
    ] = "hub",
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:  # fmt: skip
    """Fetch a data set from the Hugging Face Hub, or take it from files that you have."""
    from shardlab.data import fetching

    wanted = catalog.entry(name, shards)
    is_quiet = not output.tells("info", quiet or as_json)

    def say(message: str) -> None:
        if not is_quiet:
            output.note("info", message)

    result = fetching.fetch(wanted, out, source, is_quiet=is_quiet, on_message=say)
    _tell(result, quiet, as_json)


@app.command()
def text(
    paths: Annotated[
        list[Path], typer.Argument(help="Text files, or folders of them; .gz, .jsonl with 'text'.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A new folder for the shards.", metavar="DIR"),
    ],
    tokenizer: str = typer.Option(
        "auto", help="gpt2, bytes, or auto: gpt2 if its vocabulary is at hand."
    ),
    vocab: Path | None = typer.Option(
        None, help="GPT-2's vocabulary: encoder.json or a .tiktoken file.", metavar="FILE"
    ),
    shard_tokens: int = typer.Option(100_000_000, help="Tokens in a shard."),
    jobs: int | None = typer.Option(None, help="Threads.  (default: one per core)"),
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Make token shards of local text: what --data of train, compare and prove reads."""
    from rich.progress import Progress

    from shardlab.data import text as texts
    from shardlab.report.terminal import SafeConsole

    console = SafeConsole(stderr=True, highlight=False)
    draws = console.is_terminal and output.tells("info", quiet or as_json)
    with Progress(console=console, transient=True, disable=not draws) as progress:
        task = progress.add_task("files")
        result = texts.make_shards(
            paths,
            out,
            tokenizer=tokenizer,
            vocab=vocab,
            shard_tokens=shard_tokens,
            jobs=jobs,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    _tell(result, quiet, as_json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Say what a folder of data holds."""
    from shardlab.data import fetching

    _tell(fetching.show(folder), quiet=False, as_json=as_json)


# ------------------------------------------------------------------ what a person sees


def _tell(result: dict[str, Any], quiet: bool, as_json: bool) -> None:
    if as_json:
        output.say_json(result)
    elif quiet:
        output.say(result["folder"])
    else:
        for line in _lines(result):
            output.say(line)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    """The description in words."""
    kind = result["kind"]
    if kind == "tokens":
        words = f"{result['tokens']:,} tokens in {len(result['shards'])} shard(s)"
        if "tokenizer" in result:
            words += f", tokenizer {result['tokenizer']} (vocabulary {result['vocab']:,})"
        if "documents" in result:
            words += f", {result['documents']:,} documents"
        if result.get("skipped_files"):
            words += f"; {result['skipped_files']:,} files were skipped: not UTF-8 text"
    elif kind == "vocabulary":
        words = f"{result['vocab']:,} tokens"
    else:
        words = " and ".join(f"{n:,} {split}" for split, n in result["samples"].items())
        words += f" {kind}, {result['classes']} classes"
    yield f"{result['name']}: {words}"
    if kind == "tokens" and "documents" not in result:
        yield from (f"  {name}: {count:,}" for name, count in result["shards"].items())
    if result.get("new") is False:
        yield "it was there already; nothing was fetched"
    elif "source" in result and "new" in result:
        yield f"from: {result['source']}"
    yield f"files: {result['folder']}"
