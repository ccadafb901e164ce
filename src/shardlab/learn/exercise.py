"""What an exercise is made of, and what the learner has done so far. No torch here.

An exercise is a folder of ``exercises/``. Its ``checks.py`` has three names:

    CASES: tuple[Case, ...]                                 plain data
    def run(case, rank, submission, spy) -> dict            on every rank, in the learner's process
    def judge(evidence) -> list[Finding]                    pure: evidence[case.name][rank] is what
                                                            run returned; empty: passed

``judge`` sees the cases that ran to their end on every rank. What goes wrong before that (an
exception, a deadlock, a process that left …) is found and explained by the grader. What either
says is in ``messages.yaml``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from shardlab.errors import UsageError, unknown
from shardlab.learn import ORDER

if TYPE_CHECKING:
    from shardlab.learn.spy import Spy

FOLDER = Path(__file__).parent / "exercises"
PROGRESS = "progress.json"

Evidence = Mapping[str, list[dict[str, Any]]]  # by case, then by rank


@dataclass(frozen=True)
class Case:
    """One situation that the learner's code is put into, on ``world`` ranks."""

    name: str
    world: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, in the words of a teacher who shows the evidence."""

    cause: str  # a slug: "not-averaged", "deadlock"
    message: str
    case: str = ""  # where it was seen; empty: everywhere, or before any


class Rejected(Exception):
    """``run`` raises it where what the learner's code returned cannot be used at all."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@functools.cache
def messages() -> dict[str, str]:
    import yaml

    text = (FOLDER.parent / "messages.yaml").read_text(encoding="utf-8")
    return cast(dict[str, str], yaml.safe_load(text))


def say(key: str, /, **values: Any) -> Finding:
    """A finding in the words of ``messages.yaml``. Its cause is the key, up to a slash."""
    return Finding(key.partition("/")[0], messages()[key].format(**values))


Look = Callable[[str, list[dict[str, Any]]], Finding | None]  # of a case's name and ranks


def judging(look: Look, *, only_first: bool = False) -> Callable[[Evidence], list[Finding]]:
    """A ``judge`` that looks at each case, or up to the first finding: where the cases become
    harder, one thing at a time."""

    def judge(evidence: Evidence) -> list[Finding]:
        found = (
            replace(finding, case=case)
            for case, ranks in evidence.items()
            if (finding := look(case, ranks)) is not None
        )
        return list(itertools.islice(found, 1 if only_first else None))

    return judge


class Checks(Protocol):
    """The module ``checks.py`` of an exercise."""

    CASES: tuple[Case, ...]
    run: Callable[[Case, int, ModuleType, Spy], dict[str, Any]]
    judge: Callable[[Evidence], list[Finding]]


@dataclass(frozen=True)
class Exercise:
    """One folder of ``exercises/``; its files are read when asked for."""

    name: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def read(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    @property
    def readme(self) -> str:
        return self.read("README.md")

    @property
    def title(self) -> str:
        """The README's heading."""
        return self.readme.partition("\n")[0].removeprefix("#").strip()

    @property
    def template(self) -> str:
        return self.read("template.py")

    @property
    def solution(self) -> str:
        return self.read("solution.py")

    @property
    def corresponds_to(self) -> str:
        """The file of the package that does the same, from the solution's docstring."""
        text = ast.get_docstring(ast.parse(self.solution)) or ""
        found = re.search(r"[\w/]+\.py", text)
        return found.group() if found else ""

    @property
    def hints(self) -> list[str]:
        return [hint.strip() for hint in re.split(r"^---+$", self.read("hints.md"), flags=re.M)]

    def checks(self) -> Checks:
        module = importlib.import_module(f"shardlab.learn.exercises.{self.name}.checks")
        return cast(Checks, module)


def names() -> list[str]:
    """The exercises, in the order of the ladder."""
    return list(ORDER)


def find(name: str) -> Exercise:
    if name not in ORDER:
        raise unknown("exercise", name, ORDER)
    return Exercise(name)


# ------------------------------------------------------------------ what the learner has done


@dataclass(frozen=True)
class Progress:
    """``progress.json``, beside the learner's files so that it can be seen and carried along."""

    folder: Path
    rows: dict[str, dict[str, Any]]  # by exercise: started, passed (when), checks, hints

    @classmethod
    def read(cls, folder: Path) -> Progress:
        path = folder / PROGRESS
        try:
            if not path.exists():
                return cls(folder, {})
            rows = json.loads(path.read_text(encoding="utf-8"))["exercises"]
            if not all(isinstance(row, dict) for row in rows.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{path} is not a progress file; move it away to begin a new one"
            ) from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        return cls(folder, rows)

    def of(self, name: str) -> dict[str, Any]:
        return {"started": None, "passed": None, "checks": 0, "hints": 0} | self.rows.get(name, {})

    def write(self, name: str, **changes: Any) -> None:
        """Set what changed of one exercise. Written aside first, so that no half file is left."""
        self.rows[name] = self.of(name) | changes
        partial = self.folder / f"{PROGRESS}.partial"
        with writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"schema": 1, "exercises": self.rows}, indent=2) + "\n")
            partial.replace(self.folder / PROGRESS)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """A folder that cannot be written is told in a line."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write into the folder {folder}: {error.strerror}; name another with --dir"
        ) from None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def note(name: str, path: Path, passed: bool, folder: Path) -> None:
    """Keep that a file of the learner's folder was checked; of other files nothing is kept."""
    if path.resolve().parent != folder.resolve():
        return
    progress = Progress.read(folder)
    row = progress.of(name)
    when = row["passed"] or now() if passed else row["passed"]
    progress.write(name, checks=row["checks"] + 1, passed=when)


def start(exercise: Exercise, folder: Path) -> Path:
    """Write the template; never over a file that is there."""
    path = folder / f"{exercise.name}.py"
    if path.exists():
        raise UsageError(
            f"{path} exists, and is yours: check it with `shardlab learn check {path}`, or move it "
            "away to begin again"
        )
    progress = Progress.read(folder)
    progress.write(exercise.name, started=now())
    with writable(folder):
        path.write_text(exercise.template, encoding="utf-8")
    return path
