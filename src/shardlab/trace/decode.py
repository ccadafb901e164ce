"""Turns the text of events into columns: only what is needed, with as little Python as possible.

Most events belong to one of a few categories, and msgspec picks the class by the category: arrows
and call stacks become empty objects, a kernel's arguments become three numbers and the description
of a collective. Text that does not fit (no category, an unknown one, a number written as a string,
a begin without its end) is first put into that form, event by event, which is slower.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from operator import attrgetter
from typing import Any, Union

import msgspec
import numpy as np
from msgspec import DecodeError, Raw, Struct

from shardlab.trace.intervals import to_ns
from shardlab.trace.model import (
    ANNOTATION,
    CPU_OP,
    GPU_ANNOTATION,
    KERNEL,
    MEMCPY,
    MEMSET,
    RUNTIME,
    SYNC,
    CommArgs,
    Events,
    Floats,
    Ints,
    MemoryEvents,
)  # fmt: skip

GPU = {
    "kernel": KERNEL, "Kernel": KERNEL, "collective_comm": KERNEL, "mtia_ccp_events": KERNEL,
    "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY, "gpu_memset": MEMSET, "Memset": MEMSET,
    "cuda_sync": SYNC,
}  # fmt: skip
HOST = {
    "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "Runtime": RUNTIME, "hip_runtime": RUNTIME,
    "xpu_runtime": RUNTIME, "xpu_driver": RUNTIME, "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME, "privateuse1_driver": RUNTIME, "glow_runtime": RUNTIME,
}  # fmt: skip
NAMED = {"user_annotation": ANNOTATION, "gpu_user_annotation": GPU_ANNOTATION}
OPERATORS = {"cpu_op": CPU_OP, "Operator": CPU_OP}
IGNORED = (
    "ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "forward_backward", "python_function",
    "Trace", "overhead", "cuda_profiler_range", "gpu_pm_counter",
)  # fmt: skip
INSTANT = "cpu_instant_event"  # an allocation or a release
MEMORY = -1  # its kind: it is no row of Events
_KINDS = GPU | HOST | NAMED | OPERATORS | {INSTANT: MEMORY}
# Categories of our own: events without one, and operators on the host that name a stream.
NO_CATEGORY, WITH_STREAM = "M", "operator with a stream"

# Below it, a float holds a nanosecond in a number of microseconds; above it the digits are read.
EXACT_US = float(2**43)
LONGEST_US = float(2**52)  # as nanoseconds it must fit 64 bits, twice
_TIME = re.compile(rb'"ts"\s*:\s*(\d+)(\.)?')
BATCH = 4096  # events

# The arguments that are numbers and become columns.
_NUMBERS = {"stream": np.int32, "device": np.int16, "correlation": np.int64}
# What the file calls the others, by our names.
_COMM = {
    "collective": "Collective name", "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems", "group_size": "Group size", "group": "Process Group Name",
    "group_ranks": "Process Group Ranks", "seq": "Seq", "number": "seq", "dims": "Input Dims",
    "types": "Input type",
}  # fmt: skip
_ALLOCATION = {
    "bytes": "Bytes", "total_allocated": "Total Allocated", "device_type": "Device Type",
    "device_id": "Device Id",
}  # fmt: skip
_MUST_BE_NUMBERS = {*_NUMBERS, *_ALLOCATION.values()}


class _CommArgs(Struct, gc=False, frozen=True, rename=_COMM):
    """The description of a collective, as the file has it."""

    collective: Any = None
    in_elements: Any = -1
    out_elements: Any = -1
    group_size: Any = -1
    dtype: Any = ""
    group: Any = ""
    group_ranks: Any = ""
    seq: Any = None
    number: Any = None
    dims: Any = None
    types: Any = None


class _GpuArgs(_CommArgs, gc=False, frozen=True):
    stream: float = -1.0  # floats: see ``_column``
    device: float = -1.0
    correlation: float = -1.0


class _HostArgs(Struct, gc=False, frozen=True):
    correlation: float = -1.0


class _Allocation(Struct, gc=False, frozen=True, rename=_ALLOCATION):
    bytes: float = 0.0
    total_allocated: float = -1.0
    device_type: float = -1.0
    device_id: float = -1.0


class _Anything(Struct, gc=False):
    """An event that may be damaged."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = Raw(b"null")
    dur: Raw = Raw(b"null")
    args: Raw = Raw(b"null")


@functools.cache
def _classes(operators: bool, digits: bool) -> tuple[Callable[[Any], list[Any]], dict[type, int]]:
    """The decoder of a file's events, and the kind of those classes that are kept.

    ``operators``: those on the host are kept. ``digits``: times are kept as text.
    """
    when = ("ts", Raw, Raw(b"-1")) if digits else ("ts", float, -1.0)
    timed = [("name", str, ""), when, ("dur", float, -1.0)]
    thread = [*timed, ("tid", int | str, -1)]
    on_gpu = ("args", _GpuArgs, _GpuArgs())
    groups: tuple[tuple[dict[str, int], list[Any]], ...] = (
        (GPU, [*timed, on_gpu]),
        (HOST, [*thread, ("args", _HostArgs, _HostArgs())]),
        (NAMED, [*thread, ("pid", int | str, -1), ("args", Raw, Raw(b"null"))]),
        (OPERATORS if operators else {}, thread),
        ({WITH_STREAM: CPU_OP}, [*thread, on_gpu]),
        ({INSTANT: MEMORY}, [when, ("args", _Allocation, _Allocation())]),
    )
    kinds = {
        _tagged(category, fields): kind
        for categories, fields in groups
        for category, kind in categories.items()
    }
    unused = (*IGNORED, NO_CATEGORY, *(() if operators else OPERATORS))
    every = (*kinds, *(_tagged(category, []) for category in unused))
    return msgspec.json.Decoder(list[Union[every]]).decode, kinds  # type: ignore[valid-type]  # noqa: UP007


def _tagged(category: str, fields: list[Any]) -> type:
    return msgspec.defstruct(f"_{category}", fields, tag_field="cat", tag=category, gc=False)


_anything = msgspec.json.Decoder(list[_Anything]).decode
_comm_args = msgspec.json.Decoder(_CommArgs | None).decode
_args_text = msgspec.json.Decoder(dict[str, Raw]).decode
_to_text = msgspec.json.Encoder(decimal_format="number").encode
_pack = msgspec.msgpack.Encoder().encode
_PACKED = np.dtype([("type", "u1"), ("value", ">f8")])


def _column(values: list[float]) -> Floats:
    """A list of floats as an array, by way of msgpack: a sixth of the time of ``np.array``."""
    count = len(values)
    header = 1 if count < 16 else 3 if count < 65536 else 5
    packed: Floats = np.frombuffer(_pack(values), _PACKED, offset=header)["value"]
    return packed.astype(np.float64)


def digits_to_ns(texts: Sequence[bytes]) -> Ints:
    """``1712195495519689.047`` to nanoseconds without a float, which would keep a quarter of a
    microsecond."""
    size = len(texts[0])
    if {len(text) for text in texts} == {size} and 5 < size <= 20:  # as a profiler writes them
        table = np.frombuffer(b"".join(texts), np.uint8).reshape(-1, size).astype(np.int64) - 48
        point = table[:, -4] == ord(".") - 48
        table = np.delete(table, size - 4, axis=1)
        if point.all() and ((table >= 0) & (table <= 9)).all():
            powers: Ints = 10 ** np.arange(size - 2, -1, -1, dtype=np.int64)
            whole_table: Ints = table @ powers
            return whole_table
    return np.array([_written_ns(text) for text in texts], np.int64)


@dataclass(frozen=True)
class Mode:
    """How a file is read. What it needs shows while it is read: see ``ReadAgain``."""

    operators: bool = True  # keep those on the host
    digits: bool = False  # read times as text: they are too long for a float
    anything: bool = False  # only the slow way


class ReadAgain(Exception):
    """The file must be read from the start, in another mode."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(str(mode))
        self.mode = mode


class Columns:
    """Collects events; ``events()`` at the end. One object reads one file.

    Events wait until there are some thousands: numpy's calls cost more than its work on a few.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.names: dict[str, int] = {}
        self.threads: dict[int | str, int] = {}
        self.pids: dict[str, int | str] = {}  # of the processes, by the steps that they marked
        self.float_times = False
        self._decode, self._kinds = _classes(mode.operators, mode.digits)
        self._waiting: list[Any] = []
        # Events of one class each, and what some of them say of a collective, by row.
        self._parts: list[tuple[Events, dict[int, CommArgs]]] = [(_NO_EVENTS, {})]
        self._memory = [_NO_MEMORY]
        self._open: dict[tuple[str, str], list[_Anything]] = defaultdict(list)  # begun, not ended

    def decode(self, text: bytes | bytearray) -> None:
        """Take an array of events. Raises DecodeError if it is not one."""
        first = _TIME.search(text)
        if first is not None and first[2]:
            self.float_times = True
            if int(first[1]) >= EXACT_US and not self.mode.digits:
                raise ReadAgain(replace(self.mode, digits=True))
        # A kernel by Triton is also an operator that has a stream: HTA counts both.
        slow = self.mode.anything or b'"kernel_backend"' in text
        try:
            events = self._decode(self._cleaned(text) if slow else text)
        except UnicodeDecodeError:  # a name that is not UTF-8: readable but for a letter or two
            self.decode(text.decode("utf-8", "replace").encode())
            return
        except msgspec.ValidationError:
            try:
                events = self._decode(_with_category(text))
            except DecodeError:
                events = self._decode(self._cleaned(text))
        kinds = self._kinds
        self._waiting += [event for event in events if type(event) in kinds]
        if len(self._waiting) > BATCH:
            self.flush()

    def flush(self) -> None:
        """Turn the waiting events into columns."""
        grouped: dict[type, list[Any]] = defaultdict(list)
        for event in self._waiting:
            grouped[type(event)].append(event)
        self._waiting = []
        for cls, events in grouped.items():
            start = self._starts(events)
            if self._kinds[cls] == MEMORY:
                columns = ([getattr(e.args, name) for e in events] for name in _ALLOCATION)
                sizes = (_within(column, np.int64) for column in columns)
                self._memory.append(MemoryEvents(start, *sizes))
                continue
            dur = _column([e.dur for e in events])
            if dur.min() < 0 or dur.max() > LONGEST_US:  # missing, in two halves, or nonsense
                raise ReadAgain(replace(self.mode, anything=True))
            self._add(self._kinds[cls], events, start, to_ns(dur))

    def _starts(self, events: list[Any]) -> Ints:
        if self.mode.digits:
            try:
                start = digits_to_ns([bytes(e.ts) for e in events])
                if abs(start).max() <= 1000 * LONGEST_US:
                    return start
            except (ValueError, OverflowError):
                pass
            raise ReadAgain(replace(self.mode, anything=True))  # one of them is no time
        us = _column([e.ts for e in events])
        if not abs(us).max() <= LONGEST_US:
            raise ReadAgain(replace(self.mode, anything=True))
        if us.max() >= EXACT_US and (us != np.floor(us)).any():
            raise ReadAgain(replace(self.mode, digits=True))
        return to_ns(us)

    def _add(self, kind: int, events: list[Any], start: Ints, dur: Ints) -> None:
        count, first = len(events), events[0]
        args = [e.args for e in events] if hasattr(first, "args") else []
        given = getattr(args[0], "__struct_fields__", ()) if args else ()
        described: dict[int, CommArgs] = {}
        if "stream" in given:
            described = {i: _describe(a) for i, a in enumerate(args) if a.collective is not None}
        elif kind in (ANNOTATION, GPU_ANNOTATION):
            for i, event in enumerate(events):
                if event.name.startswith("ProfilerStep"):
                    self.pids.setdefault(event.name, event.pid)
                elif event.name.startswith(("gloo:", "nccl:")) and (about := _shapes(event.args)):
                    described[i] = about
        thread = np.full(count, -1, np.int32)
        if hasattr(first, "tid"):
            thread = _ids(self.threads, [e.tid for e in events])
        numbers = (
            _within(_column(list(map(attrgetter(name), args))), size)
            if name in given
            else np.full(count, -1, size)
            for name, size in _NUMBERS.items()
        )
        names = _ids(self.names, [e.name for e in events])
        kinds = np.full(count, kind, np.int8)
        self._parts.append((Events(names, kinds, start, dur, thread, *numbers), described))

    # ------------------------------------------------------------------ anything at all

    def _cleaned(self, text: bytes | bytearray) -> bytes:
        """The events that can be used, in the form that the classes expect."""
        return _to_text([clean for event in _anything(text) if (clean := self._clean(event))])

    def _clean(self, event: _Anything) -> dict[str, Any] | None:
        end = None
        if event.ph == "B":
            self._open[str(event.pid), str(event.tid)].append(event)
            return None
        if event.ph == "E":
            begun = self._open[str(event.pid), str(event.tid)]
            if not begun:
                return None
            end, event = _ns(event.ts), begun.pop()
        kind = _KINDS.get(event.cat) if isinstance(event.cat, str) else None
        if kind is None or (start := _ns(event.ts)) is None:
            return None
        self.float_times = self.float_times or start % 1000 != 0
        clean = {"cat": event.cat, "ts": _us(start), "args": event.args}
        numbers: dict[str, int] = {}
        if kind not in (ANNOTATION, GPU_ANNOTATION):  # theirs are text until they are needed
            clean["args"], numbers = _clean_args(event.args)
        if kind == MEMORY:
            return clean if "Bytes" in numbers else None
        dur = _ns(event.dur) if event.ph != "B" else None if end is None else end - start
        if dur is None or not 0 <= dur <= 1000 * LONGEST_US or not isinstance(event.name, str):
            return None
        if kind == CPU_OP and numbers.get("stream", -1) >= 0:
            clean["cat"] = WITH_STREAM
        elif kind == CPU_OP:
            if not self.mode.operators:
                return None
            del clean["args"]
        clean |= {"name": event.name, "dur": _us(dur)}
        return clean | {"tid": _id(event.tid), "pid": _id(event.pid)}

    # ------------------------------------------------------------------ columns out

    @property
    def on_gpu(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(part.on_gpu.any() for part, _ in self._parts)

    @property
    def needs_operators(self) -> bool:
        """A CPU's are what it computed. A GPU run needs them only if Gloo sent its tensors: they
        say what was asked of Gloo."""
        return not self.on_gpu or any(name.startswith("gloo:") for name in self.names)

    def events(self) -> tuple[Events, dict[int, CommArgs]]:
        """The rows, and the descriptions of collectives, by row.

        Where they are not needed, operators on the host are not kept, but for those that name a
        stream.
        """
        parts, unneeded, rows = [], not self.needs_operators, 0
        described: dict[int, CommArgs] = {}
        for part, about in self._parts:
            if unneeded and len(part) and part.kind[0] == CPU_OP and part.stream[0] < 0:
                continue
            parts.append(part)
            described |= {rows + i: args for i, args in about.items()}
            rows += len(part)
        self._parts.clear()
        return _joined(parts), described

    def memory(self) -> MemoryEvents:
        found: MemoryEvents = _joined(self._memory)
        return found


_NO_EVENTS = Events(
    *(np.empty(0, size) for size in ("i4", "i1", "i8", "i8", "i4", "i4", "i2", "i8"))
)
_NO_MEMORY = MemoryEvents(*(np.empty(0, np.int64) for _ in range(5)))


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of all parts, one after the other."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(parts[0]))
    return type(parts[0])(*map(np.concatenate, columns))


def _with_category(text: bytes | bytearray) -> bytes | bytearray:
    """Add a category to events without one: names of processes and threads, and global marks."""
    mark = b'"cat":"' + NO_CATEGORY.encode() + b'"'
    for phase in (b'"ph": "M"', b'"ph":"M"', b'"ph": "i"', b'"ph":"i"'):
        text = text.replace(phase, mark)
    return text


def _ids(table: dict[Any, int], values: list[Any]) -> Any:
    """The number of each value; a new value gets the next. (Mostly all are known.)"""
    try:
        return np.array([table[value] for value in values], np.int32)
    except KeyError:
        return np.array([table.setdefault(value, len(table)) for value in values], np.int32)


def _number(value: Any) -> int:
    """A number, perhaps written as a string; -1 if it is not a number."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 1 << 53 else -1


def _clean_args(text: Raw) -> tuple[dict[str, Any], dict[str, int]]:
    """An event's arguments, and those of them that must be numbers."""
    try:
        args = _args_text(text)
    except DecodeError:
        args = {}
    numbers = {n: _number(msgspec.json.decode(args[n])) for n in args.keys() & _MUST_BE_NUMBERS}
    return args | numbers, numbers


def _us(ns: int) -> float | Decimal:
    return ns / 1000 if abs(ns) < 1000 * EXACT_US else Decimal(ns) / 1000


def _id(value: Any) -> int | str:
    return value if isinstance(value, str) else _number(value)


def _within(values: Any, kind: Any) -> Any:
    """Whole numbers of a type; what is too large for it (damage) is the largest."""
    limits = np.iinfo(kind)
    most = float(min(limits.max, 1 << 53))
    return np.clip(np.asarray(values, np.float64), float(limits.min), most).astype(kind)


def _written_ns(us: bytes) -> int:
    """Microseconds as they are written, perhaps in quotes, to nanoseconds."""
    text = us.strip(b'"')
    whole, _, part = text.partition(b".")
    if part and not part.isdigit():
        return round(float(text) * 1000)
    sign = -1 if whole.startswith(b"-") else 1
    return int(whole) * 1000 + sign * round(float(b"0." + (part or b"0")) * 1000)


def _ns(us: Raw) -> int | None:
    """The same; None if it is no time."""
    try:
        ns = _written_ns(bytes(us))
    except (ValueError, OverflowError):
        return None
    return ns if abs(ns) <= 1000 * LONGEST_US else None


def _shapes(args: Raw) -> CommArgs | None:
    """What an annotation says of its collective, if it has the shapes of the tensors."""
    try:
        found = _comm_args(args)
    except DecodeError:
        return None
    return _describe(found) if found is not None and found.dims else None


def _describe(args: _CommArgs) -> CommArgs:
    """A collective's arguments; from the shapes of its tensors where NCCL's are not there."""
    elements, dtype = _number(args.in_elements), args.dtype if isinstance(args.dtype, str) else ""
    if elements < 0 and isinstance(args.dims, list):
        flat = (d for d in args.dims if isinstance(d, list) and d)
        elements = _number(sum(math.prod(d) for d in flat if all(isinstance(n, int) for n in d)))
    if not dtype and isinstance(args.types, list) and args.types and isinstance(args.types[0], str):
        dtype = args.types[0]
    return CommArgs(
        collective=args.collective if isinstance(args.collective, str) else "",
        dtype=dtype,
        in_elements=elements,
        out_elements=_number(args.out_elements),
        group_size=_number(args.group_size),
        group=str(args.group or ""),
        group_ranks=str(args.group_ranks or ""),
        seq=_number(args.seq if args.seq is not None else args.number),
    )
