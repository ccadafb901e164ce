"""Turns the text of events into columns: only what is needed, with as little Python as possible.

Most events belong to one of a few categories, and msgspec picks the class by the category: arrows
and call stacks become empty objects, a kernel's arguments become three numbers and the description
of a collective. Where an event does not fit (an unknown category, a number written as a string),
they are read one by one, which is slower, and what cannot be read is left out.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
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
# Categories of our own: events without one, operators on the host that name a stream, and those
# that send and receive: with shapes, they name the other rank.
NO_CATEGORY, WITH_STREAM, MESSAGE = "M", "operator with a stream", "message"

# Below it, a float holds a nanosecond in a number of microseconds; above it the digits are read.
EXACT_US = float(2**43)
LONGEST_US = float(2**52)  # as nanoseconds it must fit 64 bits, twice
_TIME = re.compile(rb'"ts"\s*:\s*(\d+)(\.)?')
_STREAM = re.compile(rb'"stream"\s*:\s*\d')
_OPERATOR = re.compile(rb'"cat"\s*:\s*"(?:cpu_op|Operator)"')
_MESSAGE = re.compile(rb'"cat"\s*:\s*"cpu_op"(?=\s*,\s*"name"\s*:\s*"c10d::(?:send|recv_)")')
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


class _MessageArgs(Struct, gc=False, frozen=True, rename={"inputs": "Concrete Inputs"}):
    inputs: Any = None  # tensors, group, the other rank, tag


class _Allocation(Struct, gc=False, frozen=True, rename=_ALLOCATION):
    bytes: float = 0.0
    total_allocated: float = -1.0
    device_type: float = -1.0
    device_id: float = -1.0


@functools.cache
def _classes(
    operators: bool, digits: bool
) -> tuple[Callable[[Any], list[Any]], Callable[[Any], Any], dict[type, int]]:
    """The decoder of a file's events, that of one event, and the kind of those classes that are
    kept.

    ``operators``: those on the host are kept. ``digits``: times are kept as text.
    """
    when = ("ts", Raw, Raw(b"-1")) if digits else ("ts", float, -1.0)
    timed = [("name", str), when, ("dur", float, -1.0)]
    thread = [*timed, ("tid", int | str, -1)]
    on_gpu = ("args", _GpuArgs, _GpuArgs())
    groups: tuple[tuple[dict[str, int], list[Any]], ...] = (
        (GPU, [*timed, on_gpu]),
        (HOST, [*thread, ("args", _HostArgs, _HostArgs())]),
        (NAMED, [*thread, ("pid", int | str, -1), ("args", Raw, Raw(b"null"))]),
        (OPERATORS if operators else {}, thread),
        ({WITH_STREAM: CPU_OP}, [*thread, on_gpu]),
        ({MESSAGE: CPU_OP}, [*thread, ("args", _MessageArgs, _MessageArgs())]),
        ({INSTANT: MEMORY}, [when, ("dur", float, 0.0), ("args", _Allocation, _Allocation())]),
    )
    kinds = {
        _tagged(category, fields): kind
        for categories, fields in groups
        for category, kind in categories.items()
    }
    unused = (*IGNORED, NO_CATEGORY, *(() if operators else OPERATORS))
    every = (*kinds, *(_tagged(category, []) for category in unused))
    event: Any = Union[every]  # noqa: UP007
    of_one = msgspec.json.Decoder(event, strict=False)  # which takes "5" for 5
    return msgspec.json.Decoder(list[event]).decode, of_one.decode, kinds


def _tagged(category: str, fields: list[Any]) -> type:
    return msgspec.defstruct(f"_{category}", fields, tag_field="cat", tag=category, gc=False)


_events_text = msgspec.json.Decoder(list[Raw]).decode
_comm_args = msgspec.json.Decoder(_CommArgs | None).decode
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
        self._decode, self._decode_one, self._kinds = _classes(mode.operators, mode.digits)
        self._waiting: list[Any] = []
        # Events of one class each, and what some of them say of a collective, by row.
        self._parts: list[tuple[Events, dict[int, CommArgs]]] = [(_NO_EVENTS, {})]
        self._memory = [_NO_MEMORY]

    def decode(self, text: bytes | bytearray) -> None:
        """Take an array of events. Raises DecodeError if it is not one."""
        first = _TIME.search(text)
        if first is not None and first[2]:
            self.float_times = True
            if int(first[1]) >= EXACT_US and not self.mode.digits:
                raise ReadAgain(replace(self.mode, digits=True))
        try:
            events = self._events(text)
        except UnicodeDecodeError:  # a name that is not UTF-8: readable but for a letter or two
            events = self._events(text.decode("utf-8", "replace").encode())
        kinds = self._kinds
        self._waiting += [event for event in events if type(event) in kinds]
        if len(self._waiting) > BATCH:
            self.flush()

    def _events(self, text: bytes | bytearray) -> list[Any]:
        if self.mode.operators and b'"c10d::' in text:
            text = _MESSAGE.sub(b'"cat":"' + MESSAGE.encode() + b'"', text)
        # A kernel by Triton is also an operator that has a stream: HTA counts both.
        if b'"kernel_backend"' in text:
            return self._one_by_one(text)
        try:
            return self._decode(text)
        except msgspec.ValidationError:
            try:
                return self._decode(_with_category(text))
            except DecodeError:
                return self._one_by_one(text)

    def _one_by_one(self, text: bytes | bytearray) -> list[Any]:
        """The events that can be read."""
        found = []
        for event in _events_text(text):
            one = bytes(event)
            if _STREAM.search(one):
                one = _OPERATOR.sub(b'"cat":"' + WITH_STREAM.encode() + b'"', one)
            try:
                found.append(self._decode_one(one))
            except msgspec.ValidationError:
                continue
        return found

    def flush(self) -> None:
        """Turn the waiting events into columns."""
        grouped: dict[type, list[Any]] = defaultdict(list)
        for event in self._waiting:
            grouped[type(event)].append(event)
        self._waiting = []
        for cls, group in grouped.items():
            events = group
            try:
                start, dur = self._times(events)
            except (ValueError, OverflowError):
                events = [event for event in group if self._is_timed(event)]
                if not events:
                    continue
                start, dur = self._times(events)
            if self._kinds[cls] == MEMORY:
                columns = ([getattr(e.args, name) for e in events] for name in _ALLOCATION)
                sizes = (_within(column, np.int64) for column in columns)
                self._memory.append(MemoryEvents(start, *sizes))
                continue
            self._add(self._kinds[cls], events, start, dur)

    def _times(self, events: list[Any]) -> tuple[Ints, Ints]:
        """When events start, and how long they take. Raises ValueError or OverflowError where that
        is missing, or nonsense."""
        dur = _column([e.dur for e in events])
        if not (dur.min() >= 0 and dur.max() <= LONGEST_US):  # NaN is neither
            raise ValueError
        if self.mode.digits:
            start = digits_to_ns([bytes(e.ts) for e in events])
        else:
            us = _column([e.ts for e in events])
            if np.isnan(us).any():
                raise ValueError
            if us.max() >= EXACT_US and (us != np.floor(us)).any():
                raise ReadAgain(replace(self.mode, digits=True))
            start = to_ns(np.clip(us, -2 * LONGEST_US, 2 * LONGEST_US))
        if abs(start).max() > 1000 * LONGEST_US:
            raise ValueError
        return start, to_ns(dur)

    def _is_timed(self, event: Any) -> bool:
        try:
            self._times([event])
        except (ValueError, OverflowError):
            return False
        return True

    def _add(self, kind: int, events: list[Any], start: Ints, dur: Ints) -> None:
        count, first = len(events), events[0]
        args = [e.args for e in events] if hasattr(first, "args") else []
        given = getattr(args[0], "__struct_fields__", ()) if args else ()
        described: dict[int, CommArgs] = {}
        if "stream" in given:
            described = {i: _describe(a) for i, a in enumerate(args) if a.collective is not None}
        elif "inputs" in given:
            inputs = ((i, a.inputs) for i, a in enumerate(args) if isinstance(a.inputs, list))
            described = {i: CommArgs(peer=_number(p)) for i, given in inputs for p in given[2:3]}
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


def _within(values: Any, kind: Any) -> Any:
    """Whole numbers of a type; what is too large for it (damage) is the largest, NaN is -1."""
    limits = np.iinfo(kind)
    most = float(min(limits.max, 1 << 53))
    numbers = np.nan_to_num(np.asarray(values, np.float64), nan=-1)
    return np.clip(numbers, float(limits.min), most).astype(kind)


def _written_ns(us: bytes) -> int:
    """Microseconds as they are written, perhaps in quotes, to nanoseconds."""
    text = us.strip(b'"')
    whole, _, part = text.partition(b".")
    if part and not part.isdigit():
        return round(float(text) * 1000)
    sign = -1 if whole.startswith(b"-") else 1
    return int(whole) * 1000 + sign * round(float(b"0." + (part or b"0")) * 1000)


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
