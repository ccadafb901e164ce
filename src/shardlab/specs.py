"""How a strategy is written in a command: its name, with options after colons."""

from __future__ import annotations

from typing import Any

from shardlab.config import parse_value
from shardlab.errors import UsageError

BASELINE = "single"  # one plain process, in a world of any size


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``pytorch_ddp:bucket_mb=4`` as a name and options. Import paths keep their own colon."""
    name, *parts = spec.split(":")
    while parts and "=" not in parts[0]:
        name += ":" + parts.pop(0)
    options = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"'{part}' in '{spec}' is not option=value")
        options[key] = parse_value(value)
    return name, options
