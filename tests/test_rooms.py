"""The rooms that look at results import each other in one direction only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "shardlab"
# A room may import those before it, and everything that is not named here.
ORDER = ("numbers", "specs", "rankset", "preflight", "plan", "trace", "proof", "measure", "report")
ABOVE = ("cli", "learn", "__main__")  # they may import every room
PART_OF = {"prove": "proof"}  # a file that belongs to a room
CAPTURE = "shardlab.trace.capture"  # of trace, what runs in the ranks' loop


def room_of(module: str) -> str:
    name = module.split(".")[1] if "." in module else module
    return PART_OF.get(name, name)


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports when it runs, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:  # only mypy reads these
                for child in ast.walk(inner):
                    child.__dict__["skipped"] = True
        if isinstance(node, ast.ImportFrom) and not node.__dict__.get("skipped"):
            for name in node.names:
                if node.module == "shardlab":
                    yield f"shardlab.{name.name}"
                elif (node.module or "").startswith("shardlab."):
                    yield f"{node.module}.{name.name}"


def against(order: tuple[str, ...]) -> list[str]:
    """The imports that go against an order of rooms."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        room = room_of(".".join(("shardlab", *parts)))
        if room in ABOVE:
            continue
        place = order.index(room) if room in order else 0  # other rooms are below all of these
        for module in imported(path):
            target = room_of(module)
            if target in order and not module.startswith(CAPTURE) and order.index(target) > place:
                found.append(f"{path.name} imports {module}")
    return found


def test_imports_go_one_way() -> None:
    assert against(ORDER) == []
    assert "compare.py imports shardlab.measure.readings" in against(ORDER[::-1])  # it does look
