"""A trace file as pieces of JSON text, each some whole events, so that none is ever held whole.

Where an event ends is found without parsing: a piece is cut where one looks to end, and if the
decoder then refuses the piece the cut was wrong (it lay in a string, or in a nested list) and an
earlier one is tried. A wrong cut can never be decoded, since its brackets are not balanced.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import DecodeError

from shardlab.errors import UsageError

_inflate: Any = zlib
with contextlib.suppress(ImportError):  # of the extra "trace": three times as fast
    _inflate = importlib.import_module("isal.isal_zlib")

# Small pieces stay in the processor's cache: 8 MB would take twice the time, and 80 MB more.
READ = 256 << 10
READ_COMPRESSED = 16 << 10  # a trace's JSON compresses to about a fifteenth
LONGEST_HEAD = 64 << 20
UNREADABLE = 4 << 20  # so much without a place to cut: look at the events one by one

_KEYS = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s|tts|tdur)"'
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEYS + rb")")
_END = re.compile(rb"\}\s*\]\s*(?=[,}]|$)")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')

Decode = Callable[[bytes], None]  # takes an array of events; raises DecodeError


class NotATrace(UsageError):
    """A file that holds something else."""


class _Cut(Exception):
    """The file ended, or became unreadable, in the middle."""


class EventText:
    """The events of one file, handed to a decoder piece by piece; then what was around them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = b""  # the text before the events, and after them
        self.tail = b""
        self.cut = ""  # why the file ended early; empty: it did not
        self.unreadable = 0  # events that no decoder would take
        self._blocks = _blocks(path)
        self._rest = self._find_events()

    def _find_events(self) -> bytes:
        text = b""
        while (found := _EVENTS.search(text, max(0, len(text) - 2 * READ))) is None:
            start = text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":  # Chrome's other form: nothing but the events
                return text[text.index(b"[") + 1 :]
            block = b"" if start and start[:1] != b"{" else self._next()
            if not block or len(text) > LONGEST_HEAD:
                if self.cut:
                    raise UsageError(f"{self.path}: {self.cut}, before the first event")
                raise NotATrace(f"{self.path} is not a profiler trace: it has no traceEvents")
            text += block
        self.head = text[: found.start()]
        return text[found.end() :]

    def _next(self) -> bytes:
        try:
            return next(self._blocks, b"")
        except _Cut as cut:
            self.cut = str(cut)
            return b""

    def decode(self, decode: Decode) -> None:
        """Hand every event to ``decode``."""
        rest = self._rest
        ended = rest.lstrip()[:1] == b"]"
        while not ended and (block := self._next()):
            rest += block
            if len(rest) < READ:
                continue
            rest, ended, taken = _take(rest, decode)
            if not taken and len(rest) > UNREADABLE:
                rest = self._one_by_one(rest, decode)
        if not ended:
            rest, ended = self._last(rest, decode)
        if ended:
            while len(rest) < LONGEST_HEAD and (block := self._next()):
                rest += block
            self.tail = rest.lstrip().removeprefix(b"]")

    def _last(self, rest: bytes, decode: Decode) -> tuple[bytes, bool]:
        """The end of the file. Without the end of the list, the last event is not whole."""
        if rest.lstrip()[:1] == b"]":
            return rest, True
        if (after := _finish(rest, decode)) is not None:
            return after, True
        rest, ended, taken = _take(rest, decode)
        if not taken:
            rest = self._one_by_one(rest, decode)
            if (after := _finish(rest, decode)) is not None:
                return after, True
        if not ended:
            self.cut = self.cut or "the JSON ends in the middle"
        return rest, ended

    def _one_by_one(self, rest: bytes, decode: Decode) -> bytes:
        """Save what can be read of a text in which something is broken."""
        start = 0
        for boundary in _BOUNDARY.finditer(rest):
            try:
                decode(b"[" + rest[start : boundary.start() + 1] + b"]")
            except DecodeError:
                self.unreadable += 1
            start = boundary.end()
        return rest[start:]


def _take(rest: bytes, decode: Decode) -> tuple[bytes, bool, bool]:
    """Decode as much of the text as is whole: what is left, whether the list ended, success."""
    at = len(rest)
    for attempt in range(8):
        at = rest.rfind(b"}", 0, at)
        while at >= 0 and not (boundary := _BOUNDARY.match(rest, at)):
            at = rest.rfind(b"}", 0, at)
        if at < 0:
            break
        assert boundary is not None
        try:
            decode(b"[" + rest[: at + 1] + b"]")
        except DecodeError:
            if attempt == 0 and (after := _finish(rest, decode)) is not None:
                return after, True, True
            continue
        return rest[boundary.end() :], False, True
    return rest, False, False


def _finish(rest: bytes, decode: Decode) -> bytes | None:
    """Decode up to the end of the list, if it is in this text; what follows it."""
    for end in _END.finditer(rest):
        try:
            decode(b"[" + rest[: end.start() + 1] + b"]")
        except DecodeError:
            continue
        return rest[end.end() :]
    return None


def _blocks(path: Path) -> Iterator[bytes]:
    """The file's text, inflated if it is compressed, whatever the file is called."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
            file.seek(0)
            if start == b"\x1f\x8b":
                yield from _inflated(file)
            else:
                while block := file.read(READ):
                    yield block
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _inflated(file: Any) -> Iterator[bytes]:
    state = _inflate.decompressobj(wbits=31)
    begun = False  # whether the member under way has any data
    try:
        while data := file.read(READ_COMPRESSED):
            while data:
                if text := state.decompress(data):
                    yield text
                begun, data = True, b""
                if state.eof:  # another member may follow, or padding
                    data, begun = state.unused_data.lstrip(b"\0"), False
                    state = _inflate.decompressobj(wbits=31)
    except (zlib.error, _inflate.error):
        raise _Cut("the compressed data is damaged") from None
    if begun:
        raise _Cut("the compressed data ends in the middle")
