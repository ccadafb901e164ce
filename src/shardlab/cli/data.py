"""`shardlab data`: fetch data sets, make token shards of text, say what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

OUT = typer.Option("--out", "-o", help="Folder; by default where `--set data.source=auto` looks.",
                  metavar="DIR", show_default=False)  # fmt: skip
FROM = typer.Option(
    "--from", help="hub (or the authors' site), or a file or folder that you have.",
    metavar="SOURCE",
)  # fmt: skip
QUIET = typer.Option("--quiet", "-q", help="No progress: only where the data is.")
JSON = typer.Option("--json", help="Print the description as JSON, and nothing else, on stdout.")


def _obtain(
    name: str, out: Path | None, source: str, quiet: bool, as_json: bool, shards: int = 1
) -> None:
    from shardlab.data import obtaining

    with _progress(output.tells("info", quiet or as_json), in_bytes=True) as (draw, say):
        wanted = catalog.entry(name, shards)
        result = obtaining.obtain(wanted, out, source, on_progress=draw, on_message=say)
    _tell(result, quiet, as_json)


@app.command()
def fineweb(
    shards: Annotated[int, typer.Option(help="Training shards of 100 M tokens (200 MB).")] = 1,
    out: Annotated[Path | None, OUT] = None,
    source: Annotated[str, FROM] = "hub",
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """FineWeb as GPT-2 tokens: the first shards of 103, and the held-out one."""
    _obtain("fineweb", out, source, quiet, as_json, shards)


def _add(name: str) -> None:
    """A command for a data set that has no options of its own."""

    @app.command(name, help=f"{catalog.ENTRIES[name].about}.")
    def command(
        out: Annotated[Path | None, OUT] = None,
        source: Annotated[str, FROM] = "hub",
        quiet: Annotated[bool, QUIET] = False,
        as_json: Annotated[bool, JSON] = False,
    ) -> None:
        _obtain(name, out, source, quiet, as_json)


for _name in catalog.ENTRIES:
    if _name != "fineweb":
        _add(_name)


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
    from shardlab.data import text as texts

    with _progress(output.tells("info", quiet or as_json)) as (on_progress, _):
        result = texts.make_shards(
            paths,
            out,
            tokenizer=tokenizer,
            vocab=vocab,
            shard_tokens=shard_tokens,
            jobs=jobs,
            on_progress=lambda done, total: on_progress("files", done, total),
        )
    _tell(result, quiet, as_json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Say what a folder of data holds."""
    from shardlab.data import obtaining

    _tell(obtaining.show(folder), quiet=False, as_json=as_json)


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


Draw = Callable[[str, int, int | None], None]  # a name, how much is done, of how much


@contextmanager
def _progress(
    enabled: bool, in_bytes: bool = False
) -> Iterator[tuple[Draw, Callable[[str], None]]]:
    """A bar for each name on a terminal; in a log, a line for each file that is fetched."""
    from rich import progress as bars

    from shardlab.report.terminal import SafeConsole

    console = SafeConsole(stderr=True, highlight=False, quiet=not enabled)
    draws = enabled and console.is_terminal
    amount: list[bars.ProgressColumn] = [bars.MofNCompleteColumn()]
    if in_bytes:
        amount = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *amount)
    tasks: dict[str, bars.TaskID] = {}

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    with bars.Progress(
        *columns, bars.TimeRemainingColumn(), console=console, transient=True, disable=not draws
    ) as progress:

        def draw(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
                if in_bytes and not draws:
                    say(f"fetching {name}" + ("" if total is None else f" ({total:,} bytes)"))
            progress.update(tasks[name], completed=done, total=total)

        yield draw, say
