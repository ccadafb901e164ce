"""`shardlab learn`: exercises for the rungs of the ladder, checked on real ranks."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from shardlab import output
from shardlab.cli.common import App
from shardlab.cli.flags import JSON
from shardlab.errors import UsageError
from shardlab.learn import ORDER
from shardlab.learn import exercise as exercises
from shardlab.learn.exercise import Exercise

DIR = typer.Option("--dir", help="Folder of your files.", metavar="PATH")
NAME = typer.Argument(help="An exercise; `shardlab learn` lists them.")
DEFAULT_DIR = Path("learn")

app = App(
    help="Exercises for the rungs of the ladder: write a strategy's heart yourself, have it "
    "checked on real ranks, and read what is wrong.",
)


@app.callback(invoke_without_command=True)
def overview(
    ctx: typer.Context,
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the exercises in the order of the ladder, with your progress."""
    if ctx.invoked_subcommand is not None:
        if folder != DEFAULT_DIR or as_json:
            raise UsageError(f"put the options after the command: learn {ctx.invoked_subcommand} …")
        return
    from shardlab.report import learn as report

    done = exercises.progress(folder)
    rows = [{"name": name, "title": Exercise(name).title, **done[name]} for name in ORDER]
    if as_json:
        output.say_json({"schema": 1, "exercises": rows})
    else:
        report.print_overview(rows, folder)


@app.command()
def start(
    name: Annotated[str, NAME],
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
) -> None:
    """Write an exercise's template into your folder; what is there is never overwritten."""
    from shardlab.report import learn as report

    exercise = exercises.find(name)
    path = exercises.start(exercise, folder)
    report.print_started(exercise, path, _dir_flag(folder))


@app.command()
def show(
    name: Annotated[str, NAME],
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
    pitfalls: bool = typer.Option(False, "--pitfalls", help="Also before your first check."),
) -> None:
    """Show an exercise: why it matters, the task, how it is checked, what it costs.

    Pitfalls are shown after your first check.
    """
    from shardlab.report import learn as report

    exercise = exercises.find(name)
    report.print_readme(exercise, pitfalls or exercises.progress(folder)[name]["checks"] > 0)


@app.command()
def check(
    name: str | None = typer.Argument(
        None,
        metavar="[NAME|FILE]",
        help="An exercise, or a file of yours; without it, every file that you have started.",
    ),
    exercise_name: str | None = typer.Option(
        None, "--exercise", help="What FILE solves, if its name does not say.", metavar="NAME"
    ),
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
    time_limit: float | None = typer.Option(
        None, help="Seconds that a check may take before it is stopped.  (default: 30)",
    ),
    as_json: Annotated[bool, JSON] = False,
) -> None:  # fmt: skip
    """Run your code on real ranks and say what is right or wrong with it, and why.

    Exit code 0: passed; 1: not passed; 2: there is nothing to check.
    """
    from shardlab.learn import grade as grading
    from shardlab.report import learn as report

    if time_limit is not None and time_limit <= 0:
        raise UsageError(f"--time-limit {time_limit:g}: a check needs time")
    verdicts = []
    for exercise, path in _asked(name, exercise_name, folder):
        with nullcontext() if as_json else report.checking(exercise):
            verdict = grading.grade(exercise, path, time_limit or grading.DEADLINE_S)
        verdicts.append(verdict)
        try:
            exercises.note(verdict.exercise, path, verdict.passed, folder)
        except UsageError as error:  # the verdict is what was asked for
            output.note("warning", f"your progress is not kept: {error}")
        if not as_json:
            report.print_verdict(verdict, _dir_flag(folder))
    passed = all(verdict.passed for verdict in verdicts)
    if as_json:
        rows = [verdict.to_dict() for verdict in verdicts]
        output.say_json({"schema": 1, "pass": passed, "verdicts": rows})
    if not passed:
        raise SystemExit(1)


@app.command()
def hint(
    name: Annotated[str, NAME],
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
) -> None:
    """Give a hint; each time one more."""
    from shardlab.report import learn as report

    exercise = exercises.find(name)
    seen = min(exercises.progress(folder)[name]["hints"] + 1, len(exercise.hints))
    exercises.keep(folder, name, hints=seen)
    report.print_hints(exercise, seen)


@app.command()
def solution(name: Annotated[str, NAME]) -> None:
    """Show our solution, and which file of the package it corresponds to."""
    from shardlab.report import learn as report

    report.print_solution(exercises.find(name))


def _asked(
    name: str | None, exercise_name: str | None, folder: Path
) -> list[tuple[Exercise, Path]]:
    """What to check: a file, an exercise's file in the folder, or all that were started."""
    if name is None:
        if exercise_name is not None:
            raise UsageError("--exercise says what a file solves; name the file, too")
        paths = {each: folder / f"{each}.py" for each in ORDER}
        found = [(Exercise(each), path) for each, path in paths.items() if path.exists()]
        if not found:
            raise UsageError(
                f"no exercise was started in {folder}; begin with `shardlab learn start {ORDER[0]}`"
            )
        return found
    if name.endswith(".py") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"no file {path}")
        return [(exercises.find(exercise_name or path.stem), path)]
    if exercise_name is not None:
        raise UsageError(f"--exercise is for a file, and {name} is an exercise's name")
    exercise, path = exercises.find(name), folder / f"{name}.py"
    if not path.is_file():
        raise UsageError(
            f"there is no {path} to check; begin with `shardlab learn start {name}"
            f"{_dir_flag(folder)}`"
        )
    return [(exercise, path)]


def _dir_flag(folder: Path) -> str:
    """What to add to a command that we propose."""
    return "" if folder == DEFAULT_DIR else f" --dir {shlex.quote(str(folder))}"
