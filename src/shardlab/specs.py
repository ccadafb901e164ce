"""How strategies and lists are written in a command: options after colons, values after commas."""

from __future__ import annotations

from typing import Any

from shardlab.config import parse_value
from shardlab.errors import UsageError
from shardlab.naming import strategy_named

BASELINE = "single"  # one plain process, in a world of any size


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``pytorch_ddp:bucket_mb=4`` as a name and options. Import paths keep their own colon."""
    name, *parts = spec.split(":")
    if "" in parts:
        raise UsageError(f"a colon in '{spec}' has no option=value behind it")
    while parts and "=" not in parts[0]:
        name += ":" + parts.pop(0)
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"'{part}' in '{spec}' is not option=value")
        if not value:
            raise UsageError(f"'{part}' in '{spec}' has no value")
        if key in options:
            raise UsageError(f"{key} is given twice in '{spec}'")
        options[key] = parse_value(value)
    return strategy_named(name), options


def parse_list(text: str | None) -> list[str]:
    """``1, 2,1`` as its different parts; empty without a text."""
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text else []


def whole_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """``1,2,4`` as numbers of at least 1; empty without a text."""
    values = tuple(parse_value(part) for part in parse_list(text))
    for value in values:
        if type(value) is not int:
            raise UsageError(f"{flag} {text}: not whole numbers, as in 2 or 1,2,4")
        if value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    return values
