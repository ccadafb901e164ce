"""What a file says, checked against types."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest

from shardlab.shapes import Meta, Mismatch, convert

Count = Annotated[int, Meta(ge=0)]


class Pair(NamedTuple):
    name: str
    count: Count


@dataclass(frozen=True)
class Inner:
    sizes: tuple[Count, ...] = ()
    pairs: list[Pair] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_name: dict[str, Inner | None]
    share: float
    note: str | None = None
    anything: Any = None


@dataclass(frozen=True)
class Even:
    count: int

    def __post_init__(self) -> None:
        if self.count % 2:
            raise ValueError("the count is odd")


class Partly(TypedDict, total=False):
    tokens: int


def test_what_was_written_is_read() -> None:
    inner = Inner((0, 7), [Pair("", 0), Pair("x", 3)], "b")
    for value in (
        Outer(inner, {"": None, "y": inner, "z": Inner()}, -0.5, "text"),
        Outer(Inner(), {}, 3.0, None, [1, {"any": "thing"}]),
    ):
        assert convert(asdict(value), Outer) == value


RIGHT: dict[str, Any] = {"inner": {}, "by_name": {}, "share": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, r"\$.inner is not an object: 3"),
        ({"inner": {"sizes": [1, -1]}}, r"\$.inner.sizes\[1\] is below 0: -1"),
        ({"inner": {"sizes": [True]}}, r"\$.inner.sizes\[0\] is not a whole number: True"),
        ({"inner": {"pairs": [["x"]]}}, r"\$.inner.pairs\[0\] has no 'count'"),
        ({"inner": {"kind": "c"}}, r"\$.inner.kind is 'c', which is unknown"),
        ({"by_name": {"x": {"sizes": 1}}}, r"\$.by_name.x.sizes is not a list: 1"),
        *(
            ({"share": value}, r"\$.share is (1000.*|nan|-inf), which is no finite number")
            for value in (10**400, math.nan, -math.inf)
        ),
        ({"share": "1"}, r"\$.share is not a number: '1'"),
        ({"note": 1}, r"\$.note is not text: 1"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    assert convert(RIGHT, Outer) == Outer(Inner(), {}, 1.0)
    with pytest.raises(Mismatch, match=message):
        convert({**RIGHT, **change}, Outer)


def test_what_is_missing_or_not_known() -> None:
    with pytest.raises(Mismatch, match=r"\$ has no 'share'"):
        convert({"inner": {}, "by_name": {}}, Outer)
    assert convert({**RIGHT, "more": 1}, Outer) == Outer(Inner(), {}, 1.0)
    assert convert({"more": 1}, Partly) == {}
    with pytest.raises(Mismatch, match=r"\$.tokens is not a whole number: 'x'"):
        convert({"tokens": "x"}, Partly)


def test_what_a_class_itself_refuses_is_placed() -> None:
    with pytest.raises(Mismatch, match=r"\$\[1\]: the count is odd"):
        convert([{"count": 2}, {"count": 3}], list[Even])
