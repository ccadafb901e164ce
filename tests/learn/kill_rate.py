"""How good the grader is: planted bugs caught and named, correct solutions passed.

Run it:  python tests/learn/kill_rate.py [EXERCISE …]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardlab.learn import exercise as exercises
from shardlab.learn import grade

HERE = Path(__file__).parent


class Submission(NamedTuple):
    exercise: str
    kind: str  # "template", "solution", "correct", "mutant"
    path: Path

    @property
    def cause(self) -> str:
        """What a mutant's first line says is wrong with it."""
        return self.path.read_text().partition("\n")[0].removeprefix("# cause:").strip()

    def __str__(self) -> str:
        return f"{self.exercise}-{self.kind}-{self.path.stem}"


def submissions(names: list[str] | None = None) -> Iterator[Submission]:
    for name in names or exercises.names():
        folder = exercises.find(name).folder
        yield Submission(name, "template", folder / "template.py")
        yield Submission(name, "solution", folder / "solution.py")
        for path in sorted((HERE / "correct" / name).glob("*.py")):
            yield Submission(name, "correct", path)
        for path in sorted((HERE / "mutants" / name).glob("*.py")):
            yield Submission(name, "mutant", path)


def checked(every: Iterable[Submission]) -> Iterator[tuple[Submission, grade.Verdict]]:
    """Three at a time, in order: a check waits more than it computes."""
    every = list(every)
    with ThreadPoolExecutor(3) as pool:
        verdicts = pool.map(lambda one: grade.grade(exercises.find(one.exercise), one.path), every)
        yield from zip(every, verdicts, strict=True)


def main(names: list[str]) -> None:
    total = {"mutants": 0, "caught": 0, "named": 0, "correct": 0, "alarms": 0}
    rows = []
    for name in names or exercises.names():
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
