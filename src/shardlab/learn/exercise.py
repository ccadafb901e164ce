"""What an exercise is made of, and what the learner has done so far. No torch here.

An exercise is a folder of ``exercises/``. Its ``checks.py`` has three names:

    CASES: tuple[Case, ...]                      plain data
    def run(at: Stage) -> dict                   on every rank, in the learner's process
    def judge(evidence) -> list[Finding]         pure: evidence[case.name][rank] is what run
                                                 returned, and the case's options; empty: passed

``judge`` sees the cases that ran to their end on every rank. What goes wrong before that (an
exception, a deadlock, a process that left …) is found and explained by the grader. All messages
are in ``messages.yaml``.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from shardlab.errors import UsageError, unknown
from shardlab.files import write_json
from shardlab.learn import ORDER

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

FOLDER = Path(__file__).parent / "exercises"
# Ends every file that ``start`` writes: run as a script, it would do nothing, without a word.
RUN_AS_A_SCRIPT = """

if __name__ == "__main__":
    print("An exercise runs on several ranks, so Python alone does nothing with it. Check it with:")
    print(f"  shardlab learn check {__file__!r}")
"""

Row = Mapping[str, Any]
Rows = Sequence[Row]  # by rank
Evidence = Mapping[str, Rows]  # by case


@dataclass(frozen=True)
class Case:
    """One situation that the learner's code is put into, on ``world`` ranks."""

    name: str
    world: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One rank of a case: what ``run`` is given."""

    case: Case
    rank: int
    submission: ModuleType  # the learner's file
    spy: Spy

    @property
    def world(self) -> int:
        return self.case.world

    @property
    def options(self) -> Mapping[str, Any]:
        return self.case.options


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, in the words of a teacher who shows the evidence."""

    cause: str  # a slug: "not-averaged", "deadlock"
    message: str
    case: str = ""  # where it was seen; empty: everywhere, or before any


class Rejected(Exception):
    """``run`` raises it, with a Finding, where what the learner's code returned is of no use."""


@functools.cache
def messages() -> dict[str, str]:
    import yaml

    text = (FOLDER.parent / "messages.yaml").read_text(encoding="utf-8")
    return cast(dict[str, str], yaml.safe_load(text))


def say(key: str, /, **values: Any) -> Finding:
    """A finding in the words of ``messages.yaml``. Its cause is the key, up to a slash."""
    return Finding(key.partition("/")[0], messages()[key].format(**values))


Look = Callable[[Rows], Finding | None]  # at one case


def judging(*looks: Look, only_first: bool = False) -> Callable[[Evidence], list[Finding]]:
    """A ``judge`` that reports, for each case, what the first of the looks finds.

    ``only_first`` is for cases that become harder: the learner gets one thing at a time.
    """

    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for case, ranks in evidence.items():
            finding = next(filter(None, (look(ranks) for look in looks)), None)
            if finding is not None:
                found.append(replace(finding, case=case))
        return found[:1] if only_first else found

    return judge


def each_step(look: Callable[[Rows, int], Finding | None]) -> Look:
    """Looks at the ranks' rows of one step after the other, up to the first finding. It finds
    nothing in a case that has no steps."""

    @functools.wraps(look)
    def steps(ranks: Rows) -> Finding | None:
        every = enumerate(zip(*(rank.get("steps", ()) for rank in ranks), strict=True))
        return next(filter(None, (look(rows, step) for step, rows in every)), None)

    return steps


class Checks(Protocol):
    """The module ``checks.py`` of an exercise."""

    CASES: tuple[Case, ...]
    run: Callable[[Stage], dict[str, Any]]
    judge: Callable[[Evidence], list[Finding]]


def checks_of(name: str) -> Checks:
    return cast(Checks, importlib.import_module(f"shardlab.learn.exercises.{name}.checks"))


class Exercise:
    """The texts of one folder of ``exercises/``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = FOLDER / name
        files = ("README.md", "template.py", "solution.py", "hints.md")
        self.readme, self.template, self.solution, hints = (
            (self.folder / file).read_text(encoding="utf-8") for file in files
        )
        self.title = self.readme.partition("\n")[0].removeprefix("#").strip()
        self.picture = self.folder / "picture.svg"
        self.hints = [hint.strip() for hint in re.split(r"^---+$", hints, flags=re.M)]
        # The solution's docstring begins with the file of the package that does the same.
        found = re.search(r"[\w/]+\.py", self.solution)
        self.corresponds_to = found.group() if found else ""


def find(name: str) -> Exercise:
    if name not in ORDER:
        raise unknown("exercise", name, ORDER)
    return Exercise(name)


# ------------------------------------------------------------------ what the learner has done

PROGRESS = "progress.json"  # beside the learner's files, so that it can be seen and carried along
UNTOUCHED: dict[str, Any] = {"started": None, "passed": None, "checks": 0, "hints": 0}


def progress(folder: Path) -> dict[str, dict[str, Any]]:
    """For each exercise when it was started and passed, and how many checks and hints it took."""
    path = folder / PROGRESS
    rows = dict.fromkeys(ORDER, UNTOUCHED)
    try:
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))["exercises"]
            rows |= {name: UNTOUCHED | row for name, row in kept.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path} is not a progress file; move it away to begin a new one"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return rows


def keep(folder: Path, name: str, **changes: Any) -> None:
    """Write what changed for one exercise."""
    rows = progress(folder)
    rows[name] = rows[name] | changes
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PROGRESS, {"exercises": rows})


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Reports in one line that a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write into the folder {folder}: {error.strerror}; name another with --dir"
        ) from None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def note(name: str, path: Path, passed: bool, folder: Path) -> None:
    """Keep that a file of the learner's folder was checked; checks of other files are not kept."""
    if path.resolve().parent != folder.resolve():
        return
    row = progress(folder)[name]
    when = row["passed"] or (now() if passed else None)
    keep(folder, name, checks=row["checks"] + 1, passed=when)


def start(exercise: Exercise, folder: Path) -> Path:
    """Write the template; never over a file that is there."""
    path = folder / f"{exercise.name}.py"
    if path.exists():
        raise UsageError(
            f"{path} exists, and is yours: check it with `shardlab learn check {path}`, or move it "
            "away to begin again"
        )
    keep(folder, exercise.name, started=now())
    with writable(folder):
        path.write_text(exercise.template + RUN_AS_A_SCRIPT, encoding="utf-8")
    return path
