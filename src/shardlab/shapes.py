"""Values from a JSON file, checked against types and made into objects. Pure, no torch."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


class Mismatch(ValueError):
    """A value is not of its type; the message names its place, as in ``$.cells[0].world``."""


@dataclass(frozen=True)
class Meta:
    """Limits of an annotated type: ``Annotated[int, Meta(ge=0)]``."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int = 0
    pattern: str | None = None

    def wrong(self, value: Any) -> str | None:
        """Why the value is outside of the limits, or None."""
        if self.ge is not None and not value >= self.ge:
            return f"is below {self.ge}"
        if self.gt is not None and not value > self.gt:
            return f"is not above {self.gt}"
        if self.le is not None and not value <= self.le:
            return f"is above {self.le}"
        if self.min_length and len(value) < self.min_length:
            return f"has fewer than {self.min_length} elements"
        if self.pattern is not None and not re.search(self.pattern, value):
            return f"does not match {self.pattern}"
        return None


def convert(value: Any, hint: Any, place: str = "$") -> Any:
    """The value as ``hint`` says. A whole number is a float too; unknown keys are left out."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        found = convert(value, args[0], place)
        for meta in args[1:]:
            if reason := meta.wrong(found):
                raise Mismatch(f"{place} {reason}: {_shown(found)}")
        return found
    if origin in (Union, types.UnionType):
        return _one_of(value, args, place)
    if origin is Literal:
        if value not in args:
            raise Mismatch(f"{place} is {_shown(value)}, which is unknown")
        return value
    if hint is None or hint is types.NoneType:
        return _typed(value, types.NoneType, "null", place)
    if hint is float and type(value) in (int, float):
        if not abs(value) <= sys.float_info.max:
            raise Mismatch(f"{place} is {_shown(value)}, which is no finite number")
        return float(value)
    if hint in (bool, int, float, str):
        return _typed(value, hint, hint.__name__, place)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _typed(value, dict, "object", place).items()
        key, of = args
        return {convert(k, key, f"{place}.{k}"): convert(v, of, f"{place}.{k}") for k, v in items}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _sequence(value, origin, args, place)
    return _object(value, hint, place)


def _one_of(value: Any, hints: Sequence[Any], place: str) -> Any:
    """The first of the types that the value fits; else what is wrong with it as the last."""
    failure = Mismatch(place)
    for hint in hints:
        try:
            return convert(value, hint, place)
        except Mismatch as error:
            if hint is not types.NoneType:
                failure = error
    raise failure


def _sequence(value: Any, origin: type, args: Sequence[Any], place: str) -> Any:
    values = _typed(value, (list, tuple), "list", place)
    if issubclass(origin, tuple) and args[-1] is not ...:
        if len(values) != len(args):
            raise Mismatch(f"{place} has {len(values)} elements, not {len(args)}")
        hints = args
    else:
        hints = [args[0]] * len(values)
    pairs = enumerate(zip(values, hints, strict=True))
    found = [convert(v, hint, f"{place}[{i}]") for i, (v, hint) in pairs]
    return tuple(found) if issubclass(origin, tuple) else found


def _object(value: Any, kind: Any, place: str) -> Any:
    """A dataclass or a TypedDict from an object, a NamedTuple from a list."""
    hints = _hints(kind)
    if is_typeddict(kind):
        given = _typed(value, dict, "object", place)
        return {n: convert(given[n], h, f"{place}.{n}") for n, h in hints.items() if n in given}
    if dataclasses.is_dataclass(kind):
        given = _typed(value, dict, "object", place)
        needed = [
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
    else:
        values = _typed(value, (list, tuple), "list", place)
        given, needed = dict(zip(hints, values, strict=False)), list(hints)
    if missing := [name for name in needed if name not in given]:
        raise Mismatch(f"{place} has no '{missing[0]}'")
    fields = {n: convert(given[n], h, f"{place}.{n}") for n, h in hints.items() if n in given}
    try:
        return kind(**fields)
    except ValueError as error:  # what the class itself refuses
        raise Mismatch(f"{place}: {error}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _typed(value: Any, kind: type | tuple[type, ...], name: str, place: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Mismatch(f"{place} is not {_article(name)}: {_shown(value)}")
    return value


def _article(name: str) -> str:
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    return words.get(name, name if name == "null" else f"a {name}".replace("a o", "an o"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
