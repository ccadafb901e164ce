"""How good the grader is: planted bugs caught and named, correct solutions passed.

    python tests/learn/kill_rate.py [EXERCISE …]
    python tests/learn/kill_rate.py --any-change [EXERCISE …]

With --any-change a machine makes every small change of our solutions, and those are listed that
pass: such a change alters nothing that the contract asks for, or it shows a gap in the checks.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
BUG = re.compile(r"^([a-z0-9-]+): .*\n((?:  .*\n)+)", flags=re.M)
HUNK = re.compile(r"^  ~.*\n|(?:^  [- ].*\n)+(?:^  \+.*\n)*", flags=re.M)
sys.path.insert(0, str(HERE.parent / "support"))

import mutants as small_changes  # noqa: E402
from shardlab.learn import ORDER, grade  # noqa: E402
from shardlab.learn import exercise as exercises  # noqa: E402


class Submission(NamedTuple):
    exercise: str
    kind: str  # "template", "solution", "correct", "mutant", "change"
    name: str
    source: str
    cause: str = ""  # of a mutant: what the grader must name first

    def __str__(self) -> str:
        return f"{self.exercise}-{self.kind}-{self.name}"


def submissions(names: list[str] | None = None) -> Iterator[Submission]:
    planted = list(mutants())
    for name in names or ORDER:
        exercise = exercises.find(name)
        yield Submission(name, "template", "template", exercise.template)
        yield Submission(name, "solution", "solution", exercise.solution)
        for path in sorted((HERE / "correct" / name).glob("*.py")):
            yield Submission(name, "correct", path.stem, path.read_text())
        yield from (mutant for mutant in planted if mutant.exercise == name)


def changes(names: list[str]) -> Iterator[Submission]:
    for name in names or ORDER:
        for c in small_changes.changes(exercises.find(name).solution):
            yield Submission(name, "change", f"line {c.line}: {c.before} -> {c.after}", c.source)


def mutants() -> Iterator[Submission]:
    """The planted bugs of mutants.diff, each a patch on our solution. The file's rows:

        === EXERCISE          the bugs below are in its solution
        CAUSE: what is wrong  and the rows of the patch, indented
          ~OLD => NEW         a part of a line
          -OLD, ' KEPT', +NEW whole lines, those that are added last; "-..." is all up to the next
          @@                  ends such a group where nothing is added

    What a patch replaces must be in the solution exactly once. The first bug with a cause has its
    name, the others have a number as well.
    """
    for part in re.split(r"^=== ", (HERE / "mutants.diff").read_text(), flags=re.M)[1:]:
        exercise, _, bugs = part.partition("\n")
        assert not BUG.sub("", bugs).strip()
        seen: Counter[str] = Counter()
        for cause, patch in BUG.findall(bugs):
            seen[cause] += 1
            name = cause if seen[cause] == 1 else f"{cause}-{seen[cause]}"
            source = patched(exercises.find(exercise).solution, patch)
            yield Submission(exercise, "mutant", name, source, cause)


def patched(source: str, patch: str) -> str:
    """Every hunk is found in the unpatched text, so that none depends on another."""
    assert not HUNK.sub("", patch).replace("  @@\n", "")
    places = []
    for hunk in HUNK.findall(patch):
        rows = [row[2:] for row in hunk.splitlines()]
        if rows[0][0] == "~":
            old, _, new = rows[0][1:].partition(" => ")
            old = re.escape(old)
        else:
            kept = (r"(?:.*\n)*?" if r == "-..." else f"^{re.escape(r[1:])}\n" for r in rows
                    if r[0] != "+")  # fmt: skip
            old, new = "".join(kept), "".join(f"{row[1:]}\n" for row in rows if row[0] != "-")
        found = list(re.finditer(old, source, flags=re.M))
        assert len(found) == 1, f"{len(found)} places for\n{hunk}"
        places.append((*found[0].span(), new))
    for start, end, new in sorted(places, reverse=True):
        source = source[:start] + new + source[end:]
    return source


def graded(one: Submission) -> grade.Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{one.exercise}.py"
        path.write_text(one.source)
        return grade.grade(exercises.find(one.exercise), path)


def checked(every: Iterable[Submission]) -> Iterator[tuple[Submission, grade.Verdict]]:
    """Three at a time, in order: a check waits more than it computes."""
    every = list(every)
    with ThreadPoolExecutor(3) as pool:
        yield from zip(every, pool.map(graded, every), strict=True)


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of this parameter in the chosen tests of a file, once each."""
    specs = (getattr(i, "callspec", None) for i in request.session.items if i.path == request.path)
    return list(dict.fromkeys(s.params[name] for s in specs if s and name in s.params))


def main(names: list[str]) -> None:
    total = {"mutants": 0, "caught": 0, "named": 0, "correct": 0, "alarms": 0}
    rows = []
    for name in names or ORDER:
        row = dict.fromkeys(total, 0)
        for one, verdict in checked(submissions([name])):
            causes = [finding.cause for finding in verdict.findings]
            if one.kind == "mutant":
                row["mutants"] += 1
                row["caught"] += not verdict.passed
                row["named"] += causes[:1] == [one.cause]
                wrong = causes[:1] != [one.cause]
            elif one.kind == "template":
                wrong = verdict.passed
            else:
                row["correct"] += 1
                row["alarms"] += not verdict.passed
                wrong = not verdict.passed
            said = verdict.findings[0].message if verdict.findings else "passed"
            mark = "WRONG " * wrong
            print(f"{mark}{one} {verdict.seconds:.1f} s: {causes[:1]} {said}", flush=True)
        rows.append((name, row))
        total = {key: total[key] + row[key] for key in total}
    heads = ["exercise", "planted bugs", "caught", "named", "correct solutions", "false alarms"]
    print(f"\n| {' | '.join(heads)} |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, row in [*rows, ("all", total)]:
        print(f"| {name} | " + " | ".join(str(value) for value in row.values()) + " |")


def main_any_change(names: list[str]) -> None:
    caught: Counter[bool] = Counter()
    for change, verdict in checked(changes(names)):
        caught[not verdict.passed] += 1
        if verdict.passed:
            print(change, flush=True)
    print(f"{caught[True]} of {caught.total()} caught")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--any-change"]:
        main_any_change(sys.argv[2:])
    else:
        main(sys.argv[1:])
