"""A trace file as pieces of JSON text, each some whole events, so that a file is never held whole.

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
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import DecodeError

from shardlab.errors import UsageError

_inflate: Any = zlib
with contextlib.suppress(ImportError):  # in the extra "trace": three times as fast
    _inflate = importlib.import_module("isal.isal_zlib")

# Small pieces stay in the processor's cache: 8 MB would take twice the time, and 80 MB more.
READ = 256 << 10
READ_COMPRESSED = 16 << 10  # a trace's JSON compresses to about a fifteenth
LONGEST_HEAD = 64 << 20
LONGEST_EVENT = 16 << 20

_KEYS = rb'"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s|tts|tdur)"'
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*" + _KEYS + rb")")
_END = re.compile(rb"\}\s*\]\s*(?=[,}]|$)")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')

Decode = Callable[[bytearray], None]  # takes an array of events; raises DecodeError


class NotATrace(UsageError):
    """A file that holds something else."""


class EventText:
    """The events of one file, handed to a decoder piece by piece; then what was around them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = b""  # the text before the events, and after them
        self.tail = b""
        self._blocks = _blocks(path)
        self._rest = self._find_events()

    def _find_events(self) -> bytes:
        text = b""
        while (found := _EVENTS.search(text, max(0, len(text) - 2 * READ))) is None:
            start = text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":  # Chrome's other form: nothing but the events
                return text[text.index(b"[") + 1 :]
            block = b"" if start and start[:1] != b"{" else next(self._blocks, b"")
            if not block or len(text) > LONGEST_HEAD:
                raise NotATrace(f"{self.path} is not a profiler trace: it has no traceEvents")
            text += block
        self.head = text[: found.start()]
        return text[found.end() :]

    def decode(self, decode: Decode) -> None:
        """Hand every event to ``decode``. A file that is cut or damaged is refused.

        ``text`` always begins with ``[`` and is turned into an array where it lies: text of this
        size should be copied as rarely as possible.
        """
        text = bytearray(b"[") + self._rest
        ended, block = False, b"["
        while block and not ended:
            block = next(self._blocks, b"")
            text += block
            if block and len(text) < READ:
                continue
            try:
                text, ended = _decoded(text, decode)
            except RecursionError:
                raise UsageError(f"{self.path} has an event that is nested too deeply") from None
            if not ended and (not block or len(text) > LONGEST_EVENT):
                raise UsageError(f"{self.path} is cut or damaged: its events are not valid JSON")
        while len(text) < LONGEST_HEAD and (block := next(self._blocks, b"")):
            text += block
        self.tail = bytes(text[1:]).lstrip().removeprefix(b"]")


def _decoded(text: bytearray, decode: Decode) -> tuple[bytearray, bool]:
    """Decode the events that are whole: the text that is left, and whether the list ended."""
    if text[1:64].lstrip()[:1] == b"]":
        return text, True
    for end, begin, is_last in _cuts(text):
        rest = text[end:]
        text[end:] = b"]"
        try:
            decode(text)
        except DecodeError:
            text[end:] = rest
            continue
        left = bytearray(b"[") + rest[begin - end :]
        return (left, True) if is_last else _decoded(left, decode)
    return text, False


def _cuts(text: bytearray) -> Iterator[tuple[int, int, bool]]:
    """Where the last event may end, where the text after it begins, and whether the list ends."""
    boundaries = _boundaries(text)
    yield from islice(boundaries, 1)
    yield from [(found.start() + 1, found.end(), True) for found in _END.finditer(bytes(text))]
    yield from islice(boundaries, 7)


def _boundaries(text: bytearray) -> Iterator[tuple[int, int, bool]]:
    """The places between two events, the last first."""
    at = len(text)
    while (at := text.rfind(b"}", 0, at)) >= 0:
        if found := _BOUNDARY.match(text, at):
            begin = found.end()
            del found  # it holds the text, which could not be changed
            yield at + 1, begin, False


def _blocks(path: Path) -> Iterator[bytes]:
    """The file's text, inflated if it is compressed, whatever the file is called."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
            file.seek(0)
            if start == b"\x1f\x8b":
                yield from _inflated(path, file)
            else:
                while block := file.read(READ):
                    yield block
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _inflated(path: Path, file: Any) -> Iterator[bytes]:
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
        raise UsageError(f"{path} is damaged: it cannot be decompressed") from None
    if begun:
        raise UsageError(f"{path} is cut: its compressed data ends in the middle")
