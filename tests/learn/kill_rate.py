"""How good the grader is: planted bugs caught and named, correct solutions passed.

Run it:  python tests/learn/kill_rate.py [EXERCISE …]
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardlab.learn import ORDER, grade
from shardlab.learn import exercise as exercises

HERE = Path(__file__).parent


class Submission(NamedTuple):
    exercise: str
    kind: str  # "template", "solution", "correct", "mutant"
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


def mutants() -> Iterator[Submission]:
    """The planted bugs of mutants.diff, each a patch on our solution.

    An entry is ``=== EXERCISE/NAME: CAUSE``, a line with the reason, and hunks as diff writes them,
    with @@ between two. What a hunk replaces must be in the solution exactly once.
    """
    for entry in re.split(r"^=== ", (HERE / "mutants.diff").read_text(), flags=re.M)[1:]:
        head, _reason, *lines = entry.rstrip("\n").split("\n")
        found = re.fullmatch(r"(\w+)/(\w+): ([a-z0-9-]+)", head)
        assert found, head
        exercise, name, cause = found.groups()
        solution = exercises.find(exercise).solution
        yield Submission(exercise, "mutant", name, patched(solution, lines), cause)


def patched(source: str, patch: list[str]) -> str:
    """Every hunk is found in the unpatched text, so that none depends on another."""
    lines = source.splitlines()
    places = []
    for hunk in "\n".join(patch).split("\n@@\n"):
        rows = hunk.split("\n")
        old = [row[1:] for row in rows if not row.startswith("+")]
        new = [row[1:] for row in rows if not row.startswith("-")]
        starts = [i for i in range(len(lines)) if lines[i : i + len(old)] == old]
        assert len(starts) == 1, f"{len(starts)} places for\n{hunk}"
        places.append((starts[0], len(old), new))
    for start, length, new in sorted(places, reverse=True):
        lines[start : start + length] = new
    return "\n".join(lines) + "\n"


def graded(one: Submission) -> grade.Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{one.name}.py"
        path.write_text(one.source)
        return grade.grade(exercises.find(one.exercise), path)


def checked(every: Iterable[Submission]) -> Iterator[tuple[Submission, grade.Verdict]]:
    """Three at a time, in order: a check waits more than it computes."""
    every = list(every)
    with ThreadPoolExecutor(3) as pool:
        yield from zip(every, pool.map(graded, every), strict=True)


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


if __name__ == "__main__":
    main(sys.argv[1:])
