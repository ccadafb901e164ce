"""What must be alike on every node of a run: versions, code, settings. No rank is needed for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardlab
from shardlab.config import LaunchConfig

# Settings that belong to a node, or that rank 0 decides for all.
MAY_DIFFER = frozenset((
    "launch.world", "launch.address", "launch.port", "launch.interface", "launch.threads_per_rank",
    "data.source", "data.prefetch", "output.dir", "output.root",
    "begun",  # when the process of a rank was started, from which a time limit counts
))  # fmt: skip
CODE = "the code of shardlab/"


def table(config: LaunchConfig, args: Sequence[Any]) -> dict[str, str]:
    """This process's values. ``args`` are those of a rank's function; a config is among them."""
    import torch

    found = {"torch": str(torch.__version__), "shardlab": shardlab.__version__}
    source = Path(shardlab.__file__).parent
    for path in sorted(source.rglob("*.py")):
        found[CODE + path.relative_to(source).as_posix()] = digest(path.read_bytes())
    for given in ({"launch": dataclasses.asdict(config)}, *args):
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            given = dataclasses.asdict(given)
        if isinstance(given, Mapping):
            found |= {k: v for k, v in _flat(given) if k not in MAY_DIFFER}
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``{"training": {"steps": 3}}`` as ``training.steps``, ``3``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _flat(value, f"{key}.")
        else:
            yield f"{prefix}{key}", _own_code(value) or json.dumps(value, default=str)


def _own_code(value: Any) -> str:
    """The user's own code, which may lie elsewhere on each node: its name and its content."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        return ""
    return f"{path.name}:{name} (content {digest(path.read_bytes())})"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def difference(one: str, other: str, ones: Mapping[str, str], others: Mapping[str, str]) -> str:
    """The first thing that differs between two ranks, in words."""
    for key in (*ones, *others):
        mine, theirs = ones.get(key, "not there"), others.get(key, "not there")
        if mine == theirs:
            continue
        if key.startswith(CODE):
            return f"{key} is not the same for {one} and {other}: install one version on all nodes"
        is_installed = key in ("torch", "shardlab")
        remedy = "install one version on all nodes" if is_installed else "give all nodes the same"
        return f"{key} is {mine} for {one}, and {theirs} for {other}: {remedy}"
    return ""
