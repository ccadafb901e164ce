"""A comparison that was interrupted continues where it stopped: a file for each cell.

Repeats are interleaved, so cells become complete together, at the end. What is kept is therefore
every single visit: a cell's file is written anew, whole, after each thing that was measured of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.files import write_json
from shardlab.measure.cells import MEASURED, Cell, Plan
from shardlab.shapes import convert

SCHEMA = 1


class Store:
    """The folder ``cells`` of a comparison: ``plan.json``, and ``<number>.json`` for each cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cells"

    def begin(self, cells: Sequence[Cell], plan: Plan, command: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "plan.json", {"command": command, **settings(cells, plan)})

    def keep(self, number: int, cell: Cell) -> None:
        """What is known of a cell so far."""
        write_json(self.folder / f"{number}.json", {"label": cell.label, **cell.measured()})

    def planned(self) -> tuple[list[Cell], Plan, str]:
        """Cells and plan as they were begun, with what was measured since; and the command."""
        found = self._read("plan.json")
        if found.get("schema") != SCHEMA:
            raise UsageError(f"{self.folder} was written by another version of shardlab")
        try:
            return self._planned(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{self.folder} is damaged: {error!r}") from None

    def _planned(self, found: dict[str, Any]) -> tuple[list[Cell], Plan, str]:
        cells = [Cell(configs.from_dict(c["config"]), c["label"]) for c in found["cells"]]
        for number, cell in enumerate(cells):
            if (self.folder / f"{number}.json").exists():
                kept = self._read(f"{number}.json")
                kept.pop("schema", None)
                if kept.pop("label") != cell.label:
                    raise ValueError(f"{number}.json is of another strategy")
                # JSON has no NaN: a loss that was NaN is null there.
                kept["losses"] = [math.nan if loss is None else loss for loss in kept["losses"]]
                for name, value in kept.items():
                    setattr(cell, name, convert(value, MEASURED[name]))
        if not cells or not isinstance(found["command"], str):
            raise ValueError("plan.json has no cells, or no command")
        return cells, convert(found["plan"], Plan), found["command"]

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            raise UsageError(
                f"nothing to resume: {self.folder.parent} has no cells/{name}; --resume takes the "
                "folder of an interrupted `shardlab compare`"
            )
        try:
            found: dict[str, Any] = convert(json.loads(path.read_bytes()), dict[str, Any])
            return found
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None


def settings(cells: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    """What must be the same for measurements to belong together, as plain values."""
    return {
        "schema": SCHEMA,
        "plan": dataclasses.asdict(plan),
        "cells": [{"label": cell.label, "config": cell.config.to_dict()} for cell in cells],
    }


def refuse_others(
    asked: tuple[Sequence[Cell], Plan], begun: tuple[Sequence[Cell], Plan], folder: Path
) -> None:
    """Refuse to continue with other settings than a comparison was begun with; name them."""
    differences = _differences(settings(*begun), settings(*asked))
    if differences:
        first = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UsageError(
            f"{folder} was begun with other settings: {first}{more}. Repeat them, or give "
            "--resume alone to continue as it was begun"
        )


def _differences(begun: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    old, new = ([c["label"] for c in s["cells"]] for s in (begun, asked))
    if old != new:
        added, gone = [c for c in new if c not in old], [c for c in old if c not in new]
        changes = [f"{', '.join(names)} {word}" for names, word in
                   ((added, "added"), (gone, "missing")) if names]  # fmt: skip
        return [f"the strategies are others ({'; '.join(changes) or 'in another order'})"]
    found = _changed(begun["plan"], asked["plan"])
    for one, other in zip(begun["cells"], asked["cells"], strict=True):
        found += _changed(one["config"], other["config"])
    return list(dict.fromkeys(found))


def _changed(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            text
            for key in dict.fromkeys((*old, *new))
            for text in _changed(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{where} was {old}, now {new}"]
