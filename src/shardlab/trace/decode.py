"""From the text of events to columns: only what is needed, and as little Python as can be.

Most events are of one of a few categories, and msgspec picks the class by the category: arrows
and call stacks become empty objects, a kernel's arguments three numbers and the description of a
collective. Text that does not fit (no category, an unknown one, a number written as a string, a
begin without its end) is decoded again, event by event, by a slower decoder that takes anything.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import msgspec
import numpy as np
from msgspec import Raw, Struct, field

from shardlab.trace.model import (
    ANNOTATION,
    CPU_OP,
    GPU_ANNOTATION,
    KERNEL,
    MEMCPY,
    MEMSET,
    OTHER,
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
INSTANT = "cpu_instant_event"
NO_CATEGORY = "M"  # put in where it is missing: names of processes and threads, and marks

# Below it, a float holds a nanosecond in a number of microseconds; above it the digits are read.
EXACT_US = float(2**43)
LONGEST_US = float(2**52)  # as nanoseconds it must fit 64 bits, twice
_TIME = re.compile(rb'"ts"\s*:\s*(\d+)(\.)?')
BATCH = 4096  # events


# What a description of a collective, and an allocation, are called in a file, by our names.
_COMM = {
    "collective": "Collective name", "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems", "group_size": "Group size", "group": "Process Group Name",
    "group_ranks": "Process Group Ranks", "seq": "Seq", "number": "seq",
}  # fmt: skip
_MEMORY = {
    "bytes": "Bytes", "total_allocated": "Total Allocated", "total_reserved": "Total Reserved",
    "device_type": "Device Type", "device_id": "Device Id",
}  # fmt: skip
_GPU_NUMBERS = ("stream", "correlation", "device")


def _struct(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """A class for events' arguments; fields are called what the file calls them."""
    called = _COMM | _MEMORY | {"dims": "Input Dims", "types": "Input type"}
    made = [(f, kind, field(name=called.get(f, f), default=default)) for f, kind, default in fields]
    return msgspec.defstruct(name, made, gc=False, frozen=True)


# Numbers as floats: see ``_column``.
_Args = _struct(
    "_Args",
    [
        *((name, float, -1.0) for name in _GPU_NUMBERS),
        ("collective", str | None, None),
        *((name, int | str, -1) for name in ("in_elements", "out_elements", "group_size")),
        *((name, str, "") for name in ("dtype", "group", "group_ranks")),
        *((name, int | str | None, None) for name in ("seq", "number")),
    ],
)
_Launch = _struct("_Launch", [("correlation", float, -1.0)])
_MemoryArgs = _struct(
    "_MemoryArgs", [(name, float, 0.0 if name == "bytes" else -1.0) for name in _MEMORY]
)
# What any event may say, whatever the type.
_AnyArgs = _struct(
    "_AnyArgs",
    [(name, Any, None) for name in (*_GPU_NUMBERS, "dtype", *_COMM, "dims", "types", *_MEMORY)],
)


class _Event(Struct, gc=False):
    """Anything at all."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Raw = Raw(b"null")
    dur: Raw = Raw(b"null")
    args: Raw = Raw(b"null")


class _Classes:
    """The decoder of a file's events, by whether operators are kept and how times are read."""

    def __init__(self, operators: bool, digits: bool) -> None:
        number: Any = Raw if digits else float
        time = [("ts", number, Raw(b"-1") if digits else -1.0), ("dur", float, -1.0)]
        thread = [("name", str, ""), ("tid", int | str, -1)]
        self.kinds: dict[type, tuple[str, int]] = {}
        ignored = {**dict.fromkeys(IGNORED, OTHER), NO_CATEGORY: OTHER}
        ignored |= {} if operators else OPERATORS
        self._add(ignored, "ignored", [])
        self._add(GPU, "gpu", [("name", str, ""), *time, ("args", _Args, _Args())])
        self._add(HOST, "host", [*thread, *time, ("args", _Launch, _Launch())])
        self._add(
            NAMED, "named", [*thread, *time, ("pid", int | str, -1), ("args", Raw, Raw(b"null"))]
        )
        if operators:
            self._add(OPERATORS, "operator", [*thread, *time])
        self._add({INSTANT: OTHER}, "instant", [time[0], ("args", _MemoryArgs, _MemoryArgs())])
        self.ignored = frozenset(c for c, (group, _) in self.kinds.items() if group == "ignored")
        self.decode = msgspec.json.Decoder(list[Union[tuple(self.kinds)]]).decode  # type: ignore[misc]  # noqa: UP007

    def _add(self, categories: dict[str, int], group: str, fields: list[Any]) -> None:
        for category, kind in categories.items():
            cls = msgspec.defstruct(f"_{category}", fields, tag_field="cat", tag=category, gc=False)
            self.kinds[cls] = (group, kind)


_anything = msgspec.json.Decoder(list[_Event])
_any_args = msgspec.json.Decoder(_AnyArgs | None)
_pack = msgspec.msgpack.Encoder().encode
_PACKED = np.dtype([("type", "u1"), ("value", ">f8")])


def _column(values: list[float]) -> Floats:
    """A list of floats as an array, by way of msgpack: a sixth of the time of ``np.array``."""
    count = len(values)
    header = 1 if count < 16 else 3 if count < 65536 else 5
    packed: Floats = np.frombuffer(_pack(values), _PACKED, offset=header)["value"]
    return packed.astype(np.float64)


def to_ns(us: Floats) -> Ints:
    """Microseconds below ``EXACT_US``, or whole ones, to the exact nanosecond."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


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
        self.comm_args: list[CommArgs] = []
        self.pids: dict[int, int | str] = {}  # of annotations, by row
        self.float_times = False
        self.rows = 0
        self._classes = _Classes(mode.operators, mode.digits)
        self._waiting: list[Any] = []
        self._parts: list[tuple[Any, ...]] = []
        self._memory: list[tuple[Any, ...]] = []
        self._open: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)  # begun, not ended

    # ------------------------------------------------------------------ text in

    def decode(self, text: bytes | bytearray) -> None:
        """Take an array of events. Raises DecodeError if it is not one."""
        first = _TIME.search(text)
        if first is not None and first[2]:
            self.float_times = True
            if int(first[1]) >= EXACT_US and not self.mode.digits:
                raise ReadAgain(replace(self.mode, digits=True))
        # A kernel by Triton is also an operator that has a stream: HTA counts both.
        if self.mode.anything or b'"kernel_backend"' in text:
            self._decode_anything(text)
            return
        try:
            events = self._classes.decode(text)
        except UnicodeDecodeError:  # a name that is not UTF-8: readable but for a letter or two
            self.decode(text.decode("utf-8", "replace").encode())
            return
        except msgspec.ValidationError:
            try:
                events = self._classes.decode(_with_category(text))
            except msgspec.DecodeError:
                self._decode_anything(text)
                return
        ignored = self._classes.ignored
        self._waiting += [event for event in events if type(event) not in ignored]
        if len(self._waiting) > BATCH:
            self.flush()

    def flush(self) -> None:
        """Turn the waiting events into columns."""
        grouped: dict[type, list[Any]] = defaultdict(list)
        for event in self._waiting:
            grouped[type(event)].append(event)
        self._waiting = []
        for cls, group in grouped.items():
            name, kind = self._classes.kinds[cls]
            start = self._starts(group)
            if name == "instant":
                self._add_memory(start, [e.args for e in group])
                continue
            dur = _column([e.dur for e in group])
            if dur.min() < 0 or dur.max() > LONGEST_US:  # none, one in two halves, or nonsense
                raise ReadAgain(replace(self.mode, anything=True))
            self._add(name, kind, group, start, to_ns(dur))

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

    def _add(self, group: str, kind: int, events: list[Any], start: Ints, dur: Ints) -> None:
        count = len(events)
        stream = device = correlation = np.full(count, -1.0)
        thread = np.full(count, -1, np.int32)
        if group == "gpu":
            args = [e.args for e in events]
            stream = _column([a.stream for a in args])
            device = _column([a.device for a in args])
            correlation = _column([a.correlation for a in args])
            for i, a in enumerate(args):
                if a.collective is not None:
                    self.comm_args.append(_describe(self.rows + i, a))
        else:
            thread = _ids(self.threads, [e.tid for e in events])
        if group == "host":
            correlation = _column([e.args.correlation for e in events])
        if group == "named":
            self._add_annotations(events)
        self._append(
            _ids(self.names, [e.name for e in events]), kind, start, dur, thread,
            stream, device, correlation,
        )  # fmt: skip

    def _add_annotations(self, events: list[Any]) -> None:
        for i, event in enumerate(events):
            if event.name.startswith("ProfilerStep"):
                self.pids[self.rows + i] = event.pid
            elif event.name.startswith(("gloo:", "nccl:")):
                args = _any_args.decode(event.args)
                if args is not None and args.dims:
                    self.comm_args.append(_describe(self.rows + i, args))

    def _append(
        self, name: Any, kind: Any, start: Ints, dur: Ints, thread: Any, stream: Any,
        device: Any, correlation: Any,
    ) -> None:  # fmt: skip
        count = len(start)
        kinds = np.full(count, kind, np.int8) if np.isscalar(kind) else kind
        self._parts.append(
            (
                name, kinds, start, dur, thread, _within(stream, np.int32),
                _within(device, np.int16), _within(correlation, np.int64),
            )
        )  # fmt: skip
        self.rows += count

    def _add_memory(self, at_ns: Ints, args: list[Any]) -> None:
        """``args``: of ``_MemoryArgs``."""
        columns = (_within([getattr(a, name) for a in args], np.int64) for name in _MEMORY)
        self._memory.append((at_ns, *columns))

    # ------------------------------------------------------------------ anything at all

    def _decode_anything(self, text: bytes | bytearray) -> None:
        """The slow way, for what does not fit the classes."""
        rows: list[tuple[Any, ...]] = []
        memory: list[tuple[int, Any]] = []
        for event in _anything.decode(text):
            if event.ph in ("B", "E"):
                begun = self._open[(str(event.pid), str(event.tid))]
                if event.ph == "B":
                    begun.append(event)
                    continue
                if not begun:
                    continue
                end, event = event.ts, begun.pop()
                start, stop = _ns(event.ts), _ns(end)
            else:
                start = _ns(event.ts)
                dur = _ns(event.dur)
                stop = None if start is None or dur is None else start + dur
            if start is None:
                continue
            self.float_times = self.float_times or start % 1000 != 0
            if event.cat == INSTANT:
                if (args := _loose_args(event)) is not None and args.bytes is not None:
                    memory.append((start, args))
                continue
            kind = _KINDS.get(event.cat) if isinstance(event.cat, str) else None
            if kind is None or stop is None or stop < start or not isinstance(event.name, str):
                continue
            self._take_anything(rows, event, kind, start, stop)
        if memory:
            times = np.array([at for at, _ in memory], np.int64)
            self._add_memory(
                times, [_MemoryArgs(*(_number(getattr(a, n)) for n in _MEMORY)) for _, a in memory]
            )
        if rows:
            name, kinds, start_ns, dur_ns, thread, stream, device, correlation = zip(
                *rows, strict=True
            )
            self._append(
                _ids(self.names, list(name)), np.array(kinds, np.int8),
                np.array(start_ns, np.int64),
                np.array(dur_ns, np.int64), np.array(thread, np.int32), np.array(stream),
                np.array(device), np.array(correlation),
            )  # fmt: skip

    def _take_anything(
        self, rows: list[tuple[Any, ...]], event: _Event, kind: int, start: int, stop: int
    ) -> None:
        args = _loose_args(event) or _AnyArgs()
        stream = _number(args.stream)
        if kind == CPU_OP and stream < 0 and not self.mode.operators:
            return
        at = self.rows + len(rows)
        gpu = event.cat in GPU
        communicates = gpu and args.collective is not None
        if communicates or (event.name.startswith(("gloo:", "nccl:")) and args.dims):
            self.comm_args.append(_describe(at, args))
        if event.name.startswith("ProfilerStep"):
            self.pids[at] = event.pid
        known = isinstance(event.tid, int | str) and not gpu
        thread = self.threads.setdefault(event.tid, len(self.threads)) if known else -1
        rows.append(
            (
                event.name, kind, start, stop - start, thread, stream, _number(args.device),
                _number(args.correlation),
            )
        )  # fmt: skip

    # ------------------------------------------------------------------ columns out

    def events(self) -> Events:
        types = ("i4", "i1", "i8", "i8", "i4", "i4", "i2", "i8")
        if not self._parts:
            return Events(*(np.empty(0, kind) for kind in types))
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        self._parts.clear()
        return Events(*columns)

    def memory(self) -> MemoryEvents:
        if not self._memory:
            return MemoryEvents(*(np.empty(0, np.int64) for _ in range(6)))
        return MemoryEvents(*(np.concatenate(column) for column in zip(*self._memory, strict=True)))


_KINDS = GPU | HOST | NAMED | OPERATORS


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


def _loose_args(event: _Event) -> Any:
    """What the event says of itself, as ``_AnyArgs``; None if it cannot be read."""
    try:
        return _any_args.decode(event.args)
    except msgspec.DecodeError:
        return None


def _number(value: Any, default: int = -1) -> int:
    """A number, perhaps written as a string."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 1 << 53 else default


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


_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1, "long int": 8,
    "signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


def bytes_of(dtype: str) -> int | None:
    """Bytes of one element, by any of the names that profilers give to types."""
    return _BYTES.get(dtype.lower())


def _describe(row: int, args: Any) -> CommArgs:
    """A collective's arguments; from the shapes of its tensors where NCCL's are not there."""
    dims, types = getattr(args, "dims", None), getattr(args, "types", None)
    elements, dtype = _number(args.in_elements), args.dtype if isinstance(args.dtype, str) else ""
    if elements < 0 and isinstance(dims, list):
        elements = _number(sum(math.prod(d) for d in dims if isinstance(d, list) and _flat(d)))
    if not dtype and isinstance(types, list) and types and isinstance(types[0], str):
        dtype = types[0]
    return CommArgs(
        row,
        collective=args.collective if isinstance(args.collective, str) else "",
        dtype=dtype,
        in_elements=elements,
        out_elements=_number(args.out_elements),
        group_size=_number(args.group_size),
        group=str(args.group or ""),
        group_ranks=str(args.group_ranks or ""),
        seq=_number(args.seq if args.seq is not None else args.number),
    )


def _flat(dims: list[Any]) -> bool:
    return bool(dims) and all(isinstance(d, int) for d in dims)
