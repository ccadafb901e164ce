"""Reading a large trace and its temporal breakdown and overlap: shardlab against HTA.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install traceinsight   # HTA, as published
    python benchmarks/trace_speed.py --us TRACE --ns TRACE --hta-python /tmp/hta/bin/python

TRACE is any trace of a GPU run with NCCL kernels, with whole (--us) or fractional (--ns)
microseconds. Each is repeated in time until it has --mb of JSON, and read by both tools in turn,
each time in a new process of one thread: CPU time after the imports, and the process's peak
memory. The numbers must be equal (by HTA's rules) or the run fails. HTA's time grows with the
number of steps, too, and a long real trace may have fewer of them than a repeated short one: so
all is done a second time with the markers stretched to --few-steps. Then, for shardlab alone: time
against size, and several ranks with --jobs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PEAK = """
def peak_mb():
    # Not ru_maxrss: that begins with the parent's.
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
"""
HTA = (
    PEAK
    + """
import json, logging, sys, time, warnings
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
begin, start = time.process_time(), time.perf_counter()
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
times = found.get_temporal_breakdown(visualize=False).iloc[0]
overlap = found.get_comm_comp_overlap(visualize=False).iloc[0]
print(json.dumps({
    "cpu_s": time.process_time() - begin, "wall_s": time.perf_counter() - start,
    "peak_mb": peak_mb(),
    "numbers": [float(times["idle_time_pctg"]), float(times["compute_time_pctg"]),
                float(times["non_compute_time_pctg"]), float(overlap["comp_comm_overlap_pctg"])],
}))
"""
)
OURS = (
    PEAK
    + """
import json, sys, time
from pathlib import Path
from shardlab.trace import hta, parse
begin, start = time.process_time(), time.perf_counter()
trace = parse.parse(Path(sys.argv[1]))
row = hta.temporal([trace], compat=True)
used = {"cpu_s": time.process_time() - begin, "wall_s": time.perf_counter() - start}
whole = row.kernel_time_us
print(json.dumps({
    **used, "peak_mb": peak_mb(),
    "numbers": [100 * row.idle_time_us / whole, 100 * row.compute_time_us / whole,
                100 * row.non_compute_time_us / whole, row.comm_comp_overlap_pctg],
    "events": len(trace.events),
}))
"""
)
JOBS = """
import json, sys, time
from shardlab.trace import load
start = time.perf_counter()
load(sys.argv[2:], jobs=int(sys.argv[1]))
print(json.dumps({"wall_s": time.perf_counter() - start}))
"""


def repeat(
    source: Path, target: Path, size: int, steps: int | None = None, rank: int = 0
) -> dict[str, Any]:
    """The same events again and again, each time later, with new correlations: no new text."""
    data = source.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    begin = re.search(rb'"traceEvents"\s*:\s*\[', text)
    assert begin is not None, f"{source} is no trace"
    events, length = json.JSONDecoder().raw_decode(text[begin.end() - 1 :].decode())
    end = begin.end() - 1 + len(text[begin.end() - 1 :].decode()[:length].encode())
    head, body, tail = text[: begin.end()], text[begin.end() : end - 1], text[end - 1 :]
    head = re.sub(rb'"rank": ?\d+', b'"rank": %d' % rank, head)
    timed = [e for e in events if "dur" in e and e.get("cat") != "Trace"]
    span = int(max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed)) + 1000
    numbers = [int(n) for n in re.findall(rb'"(?:correlation|id)": ?(\d+)', body)]
    copies = max(2, -(-size // len(body)))
    own = [int(n) for n in re.findall(rb"ProfilerStep#(\d+)", body)]
    apart = max(own) - min(own) + 1
    group = -(-copies // steps) if steps else 0
    with target.open("wb") as file:
        file.write(head)
        for i in range(copies):
            copy = _raised(rb'("(?:ts)": ?)(\d+)', i * span, body)
            shift = i * (max(numbers, default=0) + 1)
            copy = _raised(rb'("(?:correlation|id)": ?)(\d+)', shift, copy)
            if group:
                copy = _with_marker(copy, i, group, span)
            else:
                copy = _raised(rb"(ProfilerStep#)(\d+)", i * apart, copy)
            file.write(b"," * (i > 0) + copy)
        file.write(tail)
    return {
        "source": f"{source.parent.name}/{source.name}",
        "mb": round(target.stat().st_size / 1e6, 1),
        "events": len(events) * copies,
        "copies": copies,
        "steps": -(-copies // group) if group else len(set(own)) * copies,
    }


def _raised(pattern: bytes, by: int, text: bytes) -> bytes:
    """Every number that the pattern finds (its second group), raised."""
    return re.sub(pattern, lambda m: b"%s%d" % (m[1], int(m[2]) + by), text)


def _with_marker(copy: bytes, number: int, group: int, span: int) -> bytes:
    """One step marker in the first copy of each group, as long as the group; none in others."""
    names = re.findall(rb"ProfilerStep#\d+", copy)
    if number % group or not names:
        return re.sub(rb"ProfilerStep#", b"not a step ", copy)
    first = names[0]
    copy = copy.replace(first, b"KEPT", 1)
    copy = re.sub(rb"ProfilerStep#", b"not a step ", copy)
    at = copy.index(b"KEPT")
    dur = re.compile(rb'("dur": ?)(\d+)')
    stretched = dur.sub(
        lambda m: b"%s%d" % (m[1], span * group - 100), copy[at : at + 400], count=1
    )
    copy = copy[:at] + stretched + copy[at + 400 :]
    return copy.replace(b"KEPT", b"ProfilerStep#%d" % (number // group))


def measure(python: str, code: str, *args: str) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, *args], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


def compare(path: Path, hta_python: str, runs: int) -> dict[str, Any]:
    """Both tools in turn; the median of each."""
    rows: dict[str, list[dict[str, Any]]] = {"hta": [], "shardlab": []}
    for i in range(runs):
        rows["hta"].append(measure(hta_python, HTA, str(path)))
        for _ in range(3):  # short: measured more often
            rows["shardlab"].append(measure(sys.executable, OURS, str(path)))
        print(f"  {i + 1}/{runs}: HTA {rows['hta'][-1]['cpu_s']:.1f} s CPU, "
              f"shardlab {rows['shardlab'][-1]['cpu_s']:.2f} s", file=sys.stderr)  # fmt: skip
    theirs, ours = rows["hta"][0]["numbers"], rows["shardlab"][0]["numbers"]
    if any(abs(a - b) > 0.01 for a, b in zip(theirs, ours, strict=True)):
        raise SystemExit(f"the numbers differ: HTA {theirs}, shardlab {ours}")
    result: dict[str, Any] = {
        tool: {key: spread([r[key] for r in found]) for key in ("cpu_s", "wall_s", "peak_mb")}
        for tool, found in rows.items()
    }
    result["numbers"] = ours
    for key, name in (("cpu_s", "cpu_ratio"), ("peak_mb", "memory_ratio")):
        result[name] = round(result["hta"][key]["median"] / result["shardlab"][key]["median"], 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--us", type=Path, help="a trace with whole microseconds")
    parser.add_argument("--ns", type=Path, help="a trace with fractions of microseconds")
    parser.add_argument("--hta-python", help="an interpreter that has traceinsight")
    parser.add_argument("--mb", type=int, default=210)
    parser.add_argument("--few-steps", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if not (args.us or args.ns):
        parser.error("give --us TRACE or --ns TRACE, or both")
    result: dict[str, Any] = {
        "command": "python benchmarks/trace_speed.py --us … --ns … --hta-python …",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "traces": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for unit, source in (("us", args.us), ("ns", args.ns)):
            if source is None:
                continue
            path = Path(folder) / f"{unit}.json"
            size = args.mb * 1_000_000
            row = repeat(source, path, size)
            print(f"{unit}: {row['mb']} MB, {row['events']:,} events", file=sys.stderr)
            if args.hta_python:
                row |= compare(path, args.hta_python, args.runs)
                few = repeat(source, path, size, args.few_steps)
                print(f"{unit}: the same with {few['steps']} steps", file=sys.stderr)
                row["few_steps"] = few | compare(path, args.hta_python, args.runs)
            row["linear"] = []
            for part in (4, 2, 1):
                made = repeat(source, path, size // part)
                times = [measure(sys.executable, OURS, str(path))["cpu_s"] for _ in range(3)]
                row["linear"].append(
                    {"events": made["events"], "cpu_s": spread(times),
                     "ns_per_event": round(1e9 * statistics.median(times) / made["events"])}
                )  # fmt: skip
            result["traces"][unit] = row
            write(result, args.record)  # minutes of work: kept, whatever comes next
        result["jobs"] = jobs(Path(folder), args.ns or args.us, args.mb)
    print(json.dumps(result, indent=1))
    write(result, args.record)


def write(result: dict[str, Any], record: Path | None) -> None:
    if record is not None:
        record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def jobs(folder: Path, source: Path, mb: int) -> dict[str, Any]:
    """Four ranks' files, read by one process and by as many as there are cores."""
    files = []
    for rank in range(4):
        files.append(folder / f"rank{rank}.json")
        repeat(source, files[-1], mb * 1_000_000, rank=rank)
    result: dict[str, Any] = {"files": len(files), "mb_each": mb, "wall_s": {}}
    counts = sorted({1, 2, min(4, os.cpu_count() or 1)})
    rows: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(3):
        for count in counts:
            found = measure(sys.executable, JOBS, str(count), *map(str, files))
            rows[count].append(found["wall_s"])
    result["wall_s"] = {str(count): spread(times) for count, times in rows.items()}
    return result


if __name__ == "__main__":
    main()
