"""Any profiler trace is read: every form, every unit; what is cut is refused."""

from __future__ import annotations

import gzip
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import chrome_trace
from chrome_trace import allocation, document, event, kernel, operator, span, step, write
from shardlab.errors import UsageError
from shardlab.trace import stream
from shardlab.trace.model import CPU_OP, KERNEL, KINDS, MEMCPY, RUNTIME, Trace
from shardlab.trace.parse import parse

KEPT = {
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "cuda_sync": "sync",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "cpu_op": "cpu_op",
    "user_annotation": "annotation", "gpu_user_annotation": "gpu_annotation",
}  # fmt: skip


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    e = trace.events
    return sorted(
        (
            KINDS[kind], trace.names[name], start, dur, stream_, correlation
        )
        for kind, name, start, dur, stream_, correlation in zip(
            e.kind.tolist(), e.name.tolist(), e.start_ns.tolist(), e.dur_ns.tolist(),
            e.stream.tolist(), e.correlation.tolist(), strict=True,
        )
    )  # fmt: skip


def expected(content: dict[str, Any], operators: bool) -> list[tuple[Any, ...]]:
    """The same with json, slowly."""
    found = []
    for e in content["traceEvents"]:
        if e["ph"] != "X" or e.get("cat") not in KEPT:
            continue
        args = e.get("args", {})
        if e["cat"] == "cpu_op" and not operators and "stream" not in args:
            continue
        found.append(
            (
                KEPT[e["cat"]], e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000),
                args.get("stream", -1), args.get("correlation", -1),
            )
        )  # fmt: skip
    return sorted(found)


def gpu_trace(count: int = 40) -> dict[str, Any]:
    events = [
        step(3, 0, 500 * count),
        {"ph": "s", "id": 1, "pid": 7, "tid": 1, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    ]
    for i in range(count):
        events += kernel("gemm", 100 * i + 10, 50, launched=100 * i, id=i)
        events.append(operator("aten::mm", 100 * i, 40))
        events.append(event("python_function", 'f(): "}, {\\"ph\\": ', 100 * i, 60))
    return document(events, deviceProperties=[{"id": 0, "name": "a GPU"}])


def test_a_gpu_trace_keeps_kernels_and_launches_not_operators(tmp_path: Path) -> None:
    content = gpu_trace()
    trace = parse(write(tmp_path / "t.json", content))
    assert rows(trace) == expected(content, operators=False)
    assert (trace.rank, trace.world, trace.device) == (0, 2, "gpu")
    assert [s.number for s in trace.steps] == [3]
    assert trace.metadata["traceName"] == "made by hand"
    assert not (trace.events.kind == CPU_OP).any()
    # A GPU in the machine, but the run was on the CPU.
    events = [step(0, 0, 100), operator("aten::mm", 10, 20)]
    trace = parse(write(tmp_path / "t.json", document(events, deviceProperties=[{"id": 0}])))
    assert trace.device == "cpu"
    assert (trace.events.kind == CPU_OP).sum() == 1


@pytest.mark.parametrize("read", [80, 300, 1000, 5000])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_pieces_are_cut_between_events_wherever_the_blocks_end(
    read: int, suffix: str, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strings and nested lists that look like the end of an event do not mislead."""
    monkeypatch.setattr(stream, "READ", read)
    monkeypatch.setattr(stream, "READ_COMPRESSED", max(16, read // 10))
    content = gpu_trace(12)
    nasty = [
        operator('"}, {"ph": "X"', 10, 5, list=[{"name": 1}, {"ph": 2}, {"name": [{"ph": 3}]}]),
        span("}]}", 20, 5, text='}, {"name": "', deep=[{"a": [{"b": {}}, {"ph": 0}]}]),
        span('grüße \\ \u2028 "quoted"', 30, 5),
    ]
    content["traceEvents"] = nasty + content["traceEvents"] + nasty
    content["after"] = [{"name": "no event"}, {"ph": "nor this"}]
    text = json.dumps(content, indent=indent).encode()
    trace = parse(write(tmp_path / f"t{suffix}", text))
    assert rows(trace) == expected(content, operators=False)
    assert trace.metadata["after"] == content["after"]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**43) | st.integers(0, 4 * 10**18), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
@example([(1_712_195_495_519_689_047, 3)], False)  # a float would say .000
@example([(8_796_093_022_207_999, 3), (12_500, 1)], True)
def test_every_time_is_kept_to_the_nanosecond(times: list[tuple[int, int]], is_odd: bool) -> None:
    """Microseconds, whole or with up to three places, of this morning and since 1970."""
    texts = [f"{ns // 1000}" + f".{ns % 1000:03d}"[: places and places + 1] for ns, places in times]
    events = ", ".join(
        f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": {text}, '
        '"dur": 1.001, "args": {"stream": 7, "correlation": 1}}'
        for text in texts
    )
    odd = '{"ph": "?"}, ' if is_odd else ""  # events are read one by one
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "t.json", f'{{"traceEvents": [{odd}{events}]}}'.encode())
        found = parse(path).events
    assert found.start_ns.tolist() == [int(Decimal(text) * 1000) for text in texts]
    assert (found.dur_ns == 1001).all()


def test_odd_events_are_taken_too(tmp_path: Path) -> None:
    """Numbers as strings, no arguments, no name, unknown kinds: no error."""
    odd = [
        step(1, 0, 100),
        {"ph": "X", "cat": "kernel", "name": "k", "pid": "GPU", "tid": "stream 7", "ts": "40",
         "dur": 5, "args": {"stream": "7", "correlation": "12", "device": 0}},
        {"ph": "X", "cat": "kernel", "name": "bare", "pid": 0, "tid": 7, "ts": 50, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "pid": 0, "tid": 7, "ts": 60, "dur": 2},
        {"ph": "X", "cat": "new in 2031", "name": "?", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "endless", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "never", "ts": "nan", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "immeasurable", "ts": 1, "dur": "nan"},
        allocation(2, 8, "nan", device=0),  # type: ignore[arg-type]
        {"ph": "C", "name": "counter", "ts": 5, "args": {"value": 1}},
        {},
    ]  # fmt: skip
    trace = parse(write(tmp_path / "t.json", document(odd)))
    found = {name: (kind, start, dur) for kind, name, start, dur, _, _ in rows(trace)}
    assert found["k"] == ("kernel", 40_000, 5000)
    assert found["bare"] == ("kernel", 50_000, 2000)
    assert found["Memcpy"] == ("memcpy", 60_000, 2000)
    assert set(found) == {"k", "bare", "Memcpy", "ProfilerStep#1"}
    events = trace.events
    assert events.stream[events.kind == KERNEL].tolist() == [7, -1]


def test_older_names_and_rocm(tmp_path: Path) -> None:
    events = [
        event("Kernel", "k", 10, 5, stream=7, correlation=1),
        event("Memcpy", "Memcpy HtoD", 20, 5, stream=7, correlation=2),
        event("Runtime", "hipLaunchKernel", 5, 2, correlation=1),
        event("Operator", "aten::mm", 1, 2),
    ]
    trace = parse(write(tmp_path / "t.json", {"traceEvents": [*events, step(0, 0, 50)]}))
    assert {kind for kind, *_ in rows(trace)} == {"kernel", "memcpy", "runtime", "annotation"}
    assert set(trace.events.kind.tolist()) >= {KERNEL, MEMCPY, RUNTIME}


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    content = gpu_trace(5)["traceEvents"]
    trace = parse(write(tmp_path / "rank-34.json", content))
    assert rows(trace) == expected({"traceEvents": content}, operators=False)
    assert trace.rank == 34  # from the name of the file


@pytest.mark.parametrize("part", [0.05, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_cut_file_is_refused(part: float, compressed: bool, tmp_path: Path) -> None:
    """Before, among and behind the events."""
    text = json.dumps({"a": "b" * 9999, **gpu_trace(400)}).encode()
    whole = gzip.compress(text) if compressed else text
    path = tmp_path / "t.json"
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(UsageError, match=r"t\.json is (cut|not a profiler trace)"):
        parse(path)


@pytest.mark.parametrize("metadata", [b'{"a": 1, "b"', b"[" * 10**5, b"]"])
def test_damage_behind_the_events_is_refused(metadata: bytes, tmp_path: Path) -> None:
    text = json.dumps(gpu_trace(5)).encode().removesuffix(b"}") + b", " + metadata
    with pytest.raises(UsageError, match=r"t\.json is cut or damaged: what is around its events"):
        parse(write(tmp_path / "t.json", text))


@pytest.mark.parametrize("limit", [1000, 10**6])
def test_an_event_that_is_not_json_is_refused(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "READ", 500)
    monkeypatch.setattr(stream, "LONGEST_EVENT", limit)
    text = json.dumps(gpu_trace(50)).encode().replace(b'"name": "gemm"', b'"name": "ge\\mm"', 1)
    with pytest.raises(UsageError, match=r"t\.json is cut or damaged: its events are not valid"):
        parse(write(tmp_path / "t.json", text))


@pytest.mark.parametrize("args", [5, "text", [1]])
def test_an_annotation_with_odd_arguments_is_kept(args: Any, tmp_path: Path) -> None:
    content = gpu_trace(5)
    content["traceEvents"].append(span("gloo:all_reduce", 10, 5) | {"args": args})
    trace = parse(write(tmp_path / "t.json", content))
    before = expected({"traceEvents": content["traceEvents"][:-1]}, operators=True)
    assert len(trace.events) == len(before) + 1  # with Gloo, operators are kept on a GPU run too
    assert "gloo:all_reduce" in trace.names


def test_a_name_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    content = gpu_trace(50)
    text = json.dumps(content).encode().replace(b'"name": "gemm"', b'"name": "ge\xffmm"', 1)
    trace = parse(write(tmp_path / "t.json", text))
    assert len(trace.events) == len(expected(content, operators=False))
    assert "ge\ufffdmm" in trace.names


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1"])
def test_deep_arguments_are_refused(value: str, tmp_path: Path) -> None:
    text = json.dumps(gpu_trace(5)).replace('"args": {', f'"args": {{"deep": {value}, ', 1)
    with pytest.raises(
        UsageError, match=r"t\.json (has an event that is nested|is cut or damaged)"
    ):
        parse(write(tmp_path / "t.json", text.encode()))


def test_damaged_compression_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps(gpu_trace(4000)).encode()))
    data[len(data) // 2 : len(data) // 2 + 40] = b"\0" * 40
    path = tmp_path / "t.json.gz"
    path.write_bytes(bytes(data))
    with pytest.raises(UsageError, match=r"t\.json\.gz is (cut|damaged)"):
        parse(path)


@pytest.mark.parametrize(
    "text", [b"", b"hello", b'{"a": 1}', b"\x80\x04pickle", b"<html>", b'{"events": [1, 2]}']
)
def test_what_is_no_trace_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a profiler trace"):
        parse(write(tmp_path / "t.json", text))


def test_memory_events(tmp_path: Path) -> None:
    held = [step(0, 0, 50), allocation(30.5, 40_000, 4000)]
    trace = parse(write(tmp_path / "t.json", document(held)))
    assert trace.memory.at_ns.tolist() == [30_500]
    assert trace.memory.total_allocated.tolist() == [40_000]
    assert trace.memory.bytes.tolist() == [4000]


def test_steps_are_made_contiguous(tmp_path: Path) -> None:
    """A step ends where the next begins; the last, when the GPU has done what it launched."""
    events = [step(1, 0, 90), step(2, 100, 90), step(3, 1000, 100)]
    events += kernel("k", 1200, 50, launched=1050, id=1) + kernel(
        "later", 1500, 5, launched=1400, id=2
    )
    trace = parse(write(tmp_path / "t.json", document(events)))
    assert [(s.number, s.start_ns, s.end_ns) for s in trace.steps] == [
        (1, 0, 100_000),
        (2, 100_000, 190_000),  # then the profiler paused
        (3, 1_000_000, 1_250_000),
    ]


@chrome_trace.every_real
def test_real_traces_as_json_reads_them(folder: Path) -> None:
    for path in sorted(folder.rglob("*.json.gz")):
        content = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
        trace = parse(path)
        by_gloo = any(name.startswith("gloo:") for name in trace.names)
        assert rows(trace) == expected(content, operators=trace.device == "cpu" or by_gloo), path
