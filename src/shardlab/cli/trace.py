"""`shardlab trace`: where the time of a step went, from profiler traces. Needs no process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlab import output, runfolder
from shardlab.cli.common import App
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

app = App(
    no_args_is_help=True,
    help="Where the time of each step went: any PyTorch profiler trace, of GPUs or of CPU ranks.",
)

SELECT = typer.Option(
    "--select", metavar="WHICH",
    help="latest: the newest run and its last window; all: every one (analyze: a report for each).",
)  # fmt: skip
JOBS = typer.Option(
    "--jobs", "-j", help="Processes that read files.  (default: one per core)", show_default=False
)
QUIET = typer.Option("--quiet", "-q", help="No tables: only where the files are.")
JSON = typer.Option("--json", help="Print summary.json (of several: a list), and nothing else.")


@app.command()
def analyze(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, folders of traces, or trace files of one run (.json, .json.gz).",
            metavar="RUN_OR_DIR...",
            show_default=False,
        ),
    ],
    select: Annotated[str, SELECT] = "latest",
    jobs: Annotated[int | None, JOBS] = None,
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Folder for the files.  (default: beside the traces)",
        metavar="DIR",
    ),
    hta_compat: bool = typer.Option(
        False, "--hta-compat", help="HTA's numbers by HTA's own rules, its errors included."
    ),
    top: int = typer.Option(5, "--top", help="Kernels or operators to list."),
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:  # fmt: skip
    """Split each step into compute, communication, waiting and idle time; name the stragglers."""
    from shardlab import trace
    from shardlab.report import terminal
    from shardlab.report import trace_terminal as report

    if top < 0:
        raise UsageError(f"--top {top}: how many to list cannot be negative")
    runs = trace.load_runs(paths, select, jobs)
    found: list[tuple[TraceSet, Path]] = []
    for run in runs:
        folder, windows = _folder(run, out, several=len(runs) > 1), run.windows()
        found += [(own, folder / name if own.window else folder) for name, own in windows.items()]
    for _, folder in found:
        runfolder.refuse_led_away(folder, [*paths, *([] if out is None else [out])])
    failures, summaries = [], []
    for i, (traces, folder) in enumerate(found):
        summary = traces.summary(hta_compat)
        summaries.append(summary)
        if not as_json and not quiet:
            report.show(traces, hta_compat=hta_compat, top=top, first=i == 0)
        try:
            files = report.write(folder, traces, summary)
        except OSError as error:
            failures.append(f"cannot write to {folder} ({error.strerror}); give --out DIR")
            continue
        if not as_json:
            terminal.say_paths(terminal.out(), files)
    if as_json:
        several_reports = {"schema": 1, "reports": summaries}
        output.say_json(summaries[0] if len(summaries) == 1 else several_reports)
    if failures:  # the exit code tells a script that the output is incomplete
        raise UsageError(failures[0])


@app.command()
def diff(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders of traces: two, or more side by side.",
            metavar="A B...",
            show_default=False,
        ),
    ],
    select: Annotated[str, SELECT] = "latest",
    jobs: Annotated[int | None, JOBS] = None,
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Folder for diff.json.  (default: none is written)",
        metavar="DIR",
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print diff.json, and nothing else, on stdout."
    ),
) -> None:  # fmt: skip
    """Say what became faster or slower from A to B: by part, phase, collective and operator.

    With three runs or more: where a step goes in each of them, in one table.
    """
    from shardlab import trace
    from shardlab.files import write_json
    from shardlab.report import trace_diff as report
    from shardlab.trace import diff as diffs

    if len(paths) < 2:
        raise UsageError(f"trace diff {paths[0]}: with what? Give two runs, or more")
    runs = [trace.load(path, select, jobs) for path in paths]
    found = diffs.diff(*runs, names=diffs.names_of(runs, paths))
    file = None
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = out / "diff.json"
            write_json(file, found.to_dict())
        except OSError as error:
            raise UsageError(f"cannot write to {out} ({error.strerror})") from None
    if as_json:
        output.say_json(found.to_dict())
    else:
        report.show(found, file)


def _folder(traces: TraceSet, out: Path | None, several: bool) -> Path:
    """Beside the traces (above the folders of the ranks), or where the user says."""
    folders = {trace.path.parent for trace in traces.traces}
    above = traces.traces[0].path.parent
    if len(folders) > 1 or (above.name.startswith("rank") and above.parent.name == "traces"):
        above = above.parent
    if out is None:
        return above
    run = above.parent if above.name == "traces" else above
    return out / run.name if several else out
