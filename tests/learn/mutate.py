"""Bugs that nobody thought of: each small change of our solutions, made by a machine and graded.

Run it:  python tests/learn/mutate.py [EXERCISE …]

What survives is listed to be looked at: a change that alters nothing that the contract asks for, or
a gap in the checks. Planted bugs (kill_rate.py) are what the grader was written for; these are not.
"""

from __future__ import annotations

import ast
import copy
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardlab.learn import ORDER, grade
from shardlab.learn import exercise as exercises

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}
DEADLINE_S = 30.0


class Change(NamedTuple):
    what: str
    line: int
    source: str


def changes(source: str) -> Iterator[Change]:
    """Every small change of a file's functions, one at a time."""
    nodes = list(ast.walk(ast.parse(source)))
    for i, node in enumerate(nodes):
        for what in _possible(node):
            tree = ast.parse(source)
            target = list(ast.walk(tree))[i]
            before = ast.unparse(target).partition("\n")[0]
            _apply(what, target, tree)
            changed = ast.unparse(ast.fix_missing_locations(tree))
            if changed != ast.unparse(ast.parse(source)):
                yield Change(f"{what}: {before}", getattr(node, "lineno", 0), changed)


def _possible(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []  # a docstring
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return | ast.Continue):
        kinds = ["delete"]
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            kinds.append("operator")
        return kinds
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return ["negate"]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ["operator"]
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return ["constant"]
    if isinstance(node, ast.Call) and node.keywords:
        return ["keyword"]
    return []


def _apply(what: str, node: ast.AST, tree: ast.Module) -> None:
    if what == "operator":
        assert isinstance(node, ast.BinOp | ast.AugAssign)
        node.op = OPERATORS[type(node.op)]()
    elif what == "negate":
        assert isinstance(node, ast.If | ast.IfExp | ast.While)
        node.test = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
    elif what == "constant":
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int)
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif what == "keyword":
        assert isinstance(node, ast.Call)
        node.keywords.pop()
    else:
        for parent in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                body = getattr(parent, name, None)
                if isinstance(body, list) and node in body:
                    body[body.index(node)] = ast.Pass()


def main(names: list[str]) -> None:
    total, caught = 0, 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        for name in names or ORDER:
            exercise = exercises.find(name)
            found = list(changes(exercise.solution))

            def check(
                job: tuple[int, Change], exercise: exercises.Exercise = exercise
            ) -> grade.Verdict:
                path = Path(folder) / f"{exercise.name}_{job[0]}.py"
                path.write_text(job[1].source)
                return grade.grade(exercise, path, DEADLINE_S)

            verdicts = list(pool.map(check, enumerate(found)))
            survivors = [c for c, v in zip(found, verdicts, strict=True) if v.passed]
            total, caught = total + len(found), caught + len(found) - len(survivors)
            print(f"{name}: {len(found) - len(survivors)} of {len(found)} caught", flush=True)
            for change in survivors:
                print(f"  line {change.line}, {change.what}", flush=True)
    print(f"all: {caught} of {total} caught")


if __name__ == "__main__":
    main(sys.argv[1:])
