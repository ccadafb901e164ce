"""Rooms import in one direction only: a room may import those before it in this order."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shardlab"
# A single module stands before its room where the config or the loop needs it.
ORDER = (
    "errors", "text", "stats", "wire", "files", "output", "runlock", "runfolder",
    "naming", "axes", "batch", "pulse", "phases", "seal", "ledger", "comm", "optim.schedule",
    "faults.spec", "config", "specs", "world", "data", "workloads", "optim", "strategies",
    "strategies.data_parallel", "strategies.sharded", "strategies.local", "strategies.tensor",
    "strategies.context", "strategies.pipeline",
    "guard", "faults", "checkpoint", "trace.clocks", "trace.capture", "launch", "training",
    "plan.claims", "plan.graph", "trace", "proof", "measure", "plan", "report", "api", "learn",
    "cli", "__init__", "__main__",
)  # fmt: skip


def place(module: str) -> int:
    """The place of the module's room: the longest name in ORDER that it begins with."""
    parts = module.split(".")[1:] or ["__init__"]
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(ORDER.index(name) for name in names if name in ORDER)


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports when it runs, wherever in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            for name in node.names:
                if node.module == "shardlab" and not name.name.startswith("__"):
                    yield f"shardlab.{name.name}"
                elif (node.module or "").startswith("shardlab."):
                    yield f"{node.module}.{name.name}"


@functools.cache
def edges() -> list[tuple[str, str]]:
    """Every module of ours, with each that it imports."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(("shardlab", *parts)).removesuffix(".__init__")
        found += [(module, name) for name in imported(path)]
    return found


def back_edges() -> list[str]:
    return [f"{one} imports {other}" for one, other in edges() if place(other) > place(one)]


def circles(room: str) -> list[set[str]]:
    """Files of a room that import each other: what is left when those that can be read are read."""
    files = {module for module, _ in edges() if module.startswith(f"shardlab.{room}")}
    needs: dict[str, set[str]] = {module: set() for module in files}
    for module, name in edges():
        target = name if name in files else name.rpartition(".")[0]
        if module in files and target in files:
            needs[module].add(target)
    while free := {module for module, needed in needs.items() if not needed}:
        needs = {m: needed - free for m, needed in needs.items() if m not in free}
    return [{module, *needed} for module, needed in needs.items()]


def test_imports_go_one_way() -> None:
    assert back_edges() == []


def test_strategies_import_in_no_circle() -> None:
    assert circles("strategies") == []


def test_a_circle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = "shardlab.strategies.base", "shardlab.strategies.steps"
    monkeypatch.setattr("test_rooms.edges", lambda: [(one, f"{other}.wait"), (other, one)])
    assert circles("strategies") == [{one, other}, {one, other}]


def test_the_test_sees_an_import_that_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_rooms.ORDER", ORDER[::-1])
    assert "shardlab.training.loop imports shardlab.config.Config" in back_edges()
