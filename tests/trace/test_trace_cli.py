"""``shardlab trace analyze``: what it prints and writes, what it takes, what it refuses."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chrome_trace
import commands
from chrome_trace import GLOO, document, event, kernel, operator, span, step, write
from shardlab import trace as traces
from shardlab.checkpoint import manifest
from shardlab.cli import app
from shardlab.errors import UsageError

PARTS = (
    "compute_us", "exposed_comm_us", "wait_us", "bubble_us", "memory_us", "idle_host_us", "idle_us",
)  # fmt: skip
RANK_KEYS = {
    "rank", "steps", "wall_us", *PARTS, "hidden_comm_us", "comm_us", "overlap_pct", "hta",
}  # fmt: skip
HTA_KEYS = {
    "idle_time_us", "compute_time_us", "non_compute_time_us", "kernel_time_us",
    "comm_comp_overlap_pctg",
}  # fmt: skip


def rank_trace(rank: int, at: float = 0, pid: int = 7, **metadata: Any) -> dict[str, Any]:
    late = 30 * rank
    events = [
        step(1, at, 500), step(2, at + 500, 500),
        operator("aten::mm", at + 10, 100),
        operator("c10d::allreduce_", at + 120 + late, 5),
        span("gloo:all_reduce", at + 130 + late, 100 - late, GLOO),
    ]  # fmt: skip
    content = document(events, rank, host_name="h", **metadata)
    for item in content["traceEvents"]:
        item["pid"] = pid
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json.gz", rank_trace(rank))
    return tmp_path


def analyze(*args: Any) -> str:
    result = CliRunner().invoke(app, ["trace", "analyze", *map(str, args)])
    if result.exception:
        raise result.exception
    return result.output


def refused(*args: Any) -> str:
    result = CliRunner().invoke(app, ["trace", "analyze", *map(str, args)])
    assert isinstance(result.exception, UsageError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


# ------------------------------------------------------------------ what it gives


ESCAPES = "\x1b]0;owned\x07 \x1b[2J \u202e mm"


def test_names_do_not_speak_to_the_terminal(tmp_path: Path) -> None:
    """A trace or a manifest is somebody else's: an escape in it could rewrite what was printed."""
    trace = rank_trace(0)
    for item in trace["traceEvents"]:
        if item["name"] in ("aten::mm", "gloo:all_reduce"):
            item["name"] += ESCAPES
    write(tmp_path / "rank0.json", trace)
    tensor = manifest.Tensor((1,), "float32", (manifest.Chunk(0, 1, "rank0.safetensors"),))
    sealed = manifest.Manifest(
        step=1, strategy=ESCAPES, world=1, config={}, samples=None, update={}, numbers={},
        tensors={f"model/{ESCAPES}": tensor},
        files={"rank0.safetensors": manifest.File(0, "")},
    )  # fmt: skip
    (tmp_path / manifest.NAME).write_text(sealed.to_json())
    for command in (("trace", "analyze"), ("checkpoint", "show")):
        done = commands.here(*command, ".", cwd=tmp_path)
        assert "owned" in done.stdout
        assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr)
    events = [step(1, 0, 50), *kernel("[red]k[/red] [link=x]", 1, 2, launched=0, id=1)]
    path = write(tmp_path / "[bold]rank0.json", document(events))
    assert "[red]k[/red]" in analyze(path)  # and markup is only text


def test_what_the_command_prints_and_writes(folder: Path) -> None:
    said = analyze(folder)
    for words in ("wait for", "collectives", "who made others wait", "what if", "summary.json"):
        assert words in said
    assert (folder / "summary.html").stat().st_size > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["schema"] == 1
    assert [row["rank"] for row in summary["ranks"]] == [0, 1]
    for row in summary["ranks"]:
        assert set(row) == RANK_KEYS
        assert set(row["hta"]) == HTA_KEYS
        assert row["steps"] == 2
    [collective] = summary["collectives"]
    assert collective["wait_us"] == 30
    [straggler] = summary["stragglers"]
    assert (straggler["rank"], straggler["others_waited_us"]) == (1, 30)
    with (folder / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"]) for row in rows] == [
        ("0", "1"), ("0", "2"), ("1", "1"), ("1", "2"), ("0", "all"), ("1", "all")
    ]  # fmt: skip
    assert float(rows[0]["wait_us"]) == 30
    assert json.loads(analyze(folder, "--json")) == summary
    assert len(analyze(folder, "--quiet").splitlines()) == 3  # its own files are no traces
    # Many files are read by several processes.
    assert traces.load(folder, jobs=1).summary() == traces.load(folder, jobs=2).summary()


def test_hta_compat_gives_htas_numbers(tmp_path: Path) -> None:
    """What the command writes, for a real trace that HTA rounds."""
    source = chrome_trace.RECORDED / "h200_gloo"
    exact = json.loads(analyze(source, "--out", tmp_path, "--json"))["ranks"][0]["hta"]
    assert exact["idle_time_us"] == pytest.approx(36_323.654, abs=0.01)
    analyze(source, "--out", tmp_path, "--hta-compat")
    theirs = json.loads((tmp_path / "summary.json").read_text())["ranks"][0]["hta"]
    assert theirs["idle_time_us"] == 36_448
    assert theirs["comm_comp_overlap_pctg"] is None  # HTA knows NCCL alone


# ------------------------------------------------------------------ what it takes


def test_runs_windows_and_files(tmp_path: Path) -> None:
    """A run folder, a folder of runs, several windows of a rank, files one by one."""
    for name, when in (("old", 100), ("new", 200)):
        for rank in (0, 1):
            for window in (0, 1):
                path = tmp_path / name / "traces" / f"rank{rank}" / f"w{window}.json.gz"
                write(path, rank_trace(rank, at=2000 * window))
                os.utime(path, (when, when))
    assert len(traces.load(tmp_path / "old").traces) == 2
    latest = traces.load(tmp_path / "old")
    assert {t.path.name for t in latest.traces} == {"w1.json.gz"}
    assert any("2 windows" in note for note in latest.warnings)
    every = traces.load(tmp_path / "old", select="all")
    assert len(every.traces) == 4
    assert [row.steps for row in every.breakdown(per="rank")] == [4, 4]
    assert len(every.collectives()) == 2
    assert "new" in str(traces.load(tmp_path).traces[0].path)  # the newest of several runs
    assert len(traces.load_runs(tmp_path, select="all")) == 2
    files = sorted((tmp_path / "old").glob("traces/*/w0.json.gz"))
    assert traces.load(files).ranks == (0, 1)
    output = analyze(tmp_path, "--select", "all", "--out", tmp_path / "out", "--quiet")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"old", "new"}
    assert "old" in output


def test_files_go_beside_the_traces_and_not_where_a_link_leads(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    for rank in (0, 1):
        write(run / "traces" / f"rank{rank}" / "t.json.gz", rank_trace(rank))
    analyze(run)
    assert (run / "traces" / "summary.json").is_file()
    (run / "traces").rename(outside)
    (run / "traces").symlink_to(outside)
    (outside / "summary.json").unlink()
    assert f"{run / 'traces'} is a link; name a folder with --out" in refused(run)
    assert not (outside / "summary.json").exists()
    analyze(run, "--out", tmp_path / "out")
    analyze(run / "traces")  # the user named it


def test_traces_that_do_not_say_their_rank_are_numbered(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", document([step(1, 0, 50)], rank=None))
    found = traces.load(tmp_path)
    assert found.ranks == (0, 1)
    assert any("do not say their rank" in note for note in found.warnings)


def test_a_trace_without_step_markers_is_one_window(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", document([operator("aten::mm", 10, 30)]))
    found = traces.load(path)
    [row] = found.breakdown()
    assert (row.wall_us, row.compute_us) == (30, 30)
    assert not found.marked
    write(tmp_path / "u.json", rank_trace(1))
    both = traces.load(tmp_path)
    assert any("in 1 of 2 traces" in note for note in both.warnings)
    assert [row.steps for row in both.breakdown(per="rank")] == [1, 2]


def test_a_recorded_trace_without_step_markers(tmp_path: Path) -> None:
    """Two updates of two ranks under a plain profiler, as HTA's users have them."""
    said = analyze(chrome_trace.RECORDED / "gloo_unmarked", "--out", tmp_path)
    assert said.startswith("2 ranks · the whole trace · ms of the CPU")
    assert "note: no step markers (ProfilerStep#) in the traces: the whole of such" in said
    assert re.search(r"^all_reduce +2 +– ", said, re.MULTILINE)  # of unknown sizes
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["marked"], summary["window"]) == (False, None)
    assert [row["steps"] for row in summary["ranks"]] == [1, 1]
    reduces = [c for c in summary["collectives"] if c["kind"] == "all_reduce"]
    # The two updates tell the phases: the second forward is not a part of the first backward.
    assert [(c["phase"], c["matched_by"]) for c in reduces] == [("backward", "order")] * 2
    page = (tmp_path / "summary.html").read_text()
    assert "where the whole trace on 2 ranks went" in page
    assert "The whole trace is" in page


def test_every_window_has_a_report(tmp_path: Path) -> None:
    source = chrome_trace.RECORDED / "gloo_windows"
    said = analyze(source, "--select", "all", "--out", tmp_path)
    assert said.startswith("step 2, window 1 of 2\n")
    assert "\nstep 5, window 2 of 2\n" in said
    summaries = []
    for name, number in (("steps2-2", 2), ("steps5-5", 5)):
        assert {path.name for path in (tmp_path / name).iterdir()} == {
            "summary.json", "summary.csv", "summary.html"
        }  # fmt: skip
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
        assert {row["step"] for row in summaries[-1]["steps"]} == {number}
        assert f"step {number}, window" in (tmp_path / name / "summary.html").read_text()
    printed = json.loads(analyze(source, "--select", "all", "--out", tmp_path / "json", "--json"))
    assert printed == {"schema": 1, "reports": summaries}
    latest = json.loads(analyze(source, "--out", tmp_path / "latest", "--json"))
    assert latest["ranks"] == summaries[1]["ranks"]


def test_an_operator_is_listed_once_over_several_windows() -> None:
    every = traces.load(chrome_trace.RECORDED / "gloo_windows", select="all")
    found = every.kernels(top=10_000)
    names = [(row.rank, row.name) for row in found]
    assert len(names) == len(set(names)) > 100
    [addmm] = [row for row in found if (row.rank, row.name) == (0, "aten::addmm")]
    windows = every.windows().values()
    parts = [r for w in windows for r in w.kernels(10_000) if (r.rank, r.name) == names[0]]
    assert addmm.count == 8
    assert found[0].sum_us == pytest.approx(sum(row.sum_us for row in parts))


def test_glooes_reduce_scatter_is_called_what_it_is() -> None:
    """An all-reduce and a copy: on CPU ranks, and on ranks whose tensors are on a GPU."""
    for name in ("gloo_fsdp", "h200_gloo"):
        found = traces.load(chrome_trace.RECORDED / name)
        rows = {row.name: row for row in found.collective_summary()}
        assert set(rows) == {"all_gather", "all_reduce", "reduce_scatter (all_reduce + copy)"}
        assert rows["reduce_scatter (all_reduce + copy)"].count == 2
        assert rows["all_reduce"].count == 3
        emulated = [c for c in found.collectives() if c.emulates]
        assert {(c.kind, c.emulates) for c in emulated} == {("all_reduce", "reduce_scatter")}
    assert rows["reduce_scatter (all_reduce + copy)"].bytes == 4 * (49_984 + 20_608)


def test_sums_and_factors_say_what_they_are_of(tmp_path: Path) -> None:
    """From the file itself: collectives at once count once, and the step that the answers to "what
    if" are compared with is the slowest rank's."""
    folder = chrome_trace.RECORDED / "gloo_windows"
    walls, spans = [], []
    for rank in (0, 1):
        [path] = folder.glob(f"traces/rank{rank}/*steps5-5*")
        events = chrome_trace.events_of(path)
        walls += [e["dur"] for e in events if e["name"].startswith("ProfilerStep#")]
        if rank == 0:
            spans = [(e["ts"], e["dur"]) for e in events if e["name"].startswith("gloo:")]
    summed, together, end = sum(dur for _, dur in spans), 0.0, 0.0
    for start, dur in spans:
        together += max(0.0, start + dur - max(start, end))
        end = max(end, start + dur)
    assert summed > 1.4 * together
    said = " ".join(analyze(folder, "--out", tmp_path).split())
    page = (tmp_path / "summary.html").read_text()
    overlap = f"rank 0 take {summed / 1000:.1f} ms one by one, in {together / 1000:.1f} ms of time"
    for shown in (said, page):
        assert overlap in shown
        assert f"now {max(walls) / 1000:.1f} ms: the slowest rank of each step" in shown
    [row] = json.loads((tmp_path / "summary.json").read_text())["collective_summary"]["kind"]
    assert row["union_us"] < max(walls) < row["time_us"] + 5_000
    assert f"all_reduce 5 276 KiB {row['union_us'] / 1000:.1f} " in said


def test_a_sum_with_unknown_bytes_is_not_a_sum(tmp_path: Path) -> None:
    """Two all-reduces, of which the trace knows one's size: at least that much."""
    shapes = {"Input Dims": [[250]], "Input type": ["float"]}
    events = [step(1, 0, 500)]
    for at, args in ((100, shapes), (200, {})):
        events.append(operator("c10d::allreduce_", at, 5))
        events.append(span("gloo:all_reduce", at, 50, GLOO, **args))
    [row] = chrome_trace.load(tmp_path, events).collective_summary()
    assert (row.bytes, row.bytes_at_least) == (None, 1000)
    assert "≥ 1,000 B" in analyze(tmp_path)
    assert "≥ 1,000 B" in (tmp_path / "summary.html").read_text()


# ------------------------------------------------------------------ what it refuses


def test_no_traces(tmp_path: Path) -> None:
    assert "no traces in" in refused(tmp_path)
    for name in ("status.json", "config.yaml"):  # a run's own files are no traces
        (tmp_path / name).write_text("{}")
    assert "record some with `shardlab train --profile`" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "nowhere")
    other = tmp_path / "other"
    assert "is not a profiler trace" in refused(write(other / "t.json", {"a": 1}))
    write(other / "u.json", b"\x89PNG")
    assert "not traces" in refused(other)


def test_a_file_that_is_cut_or_of_the_same_rank(folder: Path) -> None:
    shutil.copy(folder / "rank0.json.gz", folder / "copy.json.gz")
    message = refused(folder)
    assert "two ranks with the same number" in message
    assert "copy.json.gz and rank0.json.gz" in message
    path = folder / "rank0.json.gz"
    path.write_bytes(path.read_bytes()[:-300])
    assert "rank0.json.gz is cut" in refused(folder)
    assert not (folder / "summary.json").exists()


def test_traces_without_markers_are_of_one_run_only_if_they_are_of_one_time(tmp_path: Path) -> None:
    """Their steps all have the number 0, which says nothing."""
    for rank, minutes in ((0, 0), (1, 5)):
        events = [operator("aten::mm", 60_000_000 * minutes, 30)]
        write(tmp_path / f"r{rank}.json", document(events, rank))
    assert "5 minutes apart" in refused(tmp_path)
    write(tmp_path / "r1.json", document([operator("aten::mm", 50, 30)], rank=0))
    found = traces.load(tmp_path, select="all")  # one rank that was recorded twice
    assert list(found.windows()) == ["window1", "window2"]
    assert [w.window for w in found.windows().values()] == ["window 1 of 2", "window 2 of 2"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (rank_trace(1) | {"distributedInfo": {"rank": 2, "world_size": 8}}, "world"),
        (rank_trace(0, at=90_000, pid=8), "different processes"),
        (rank_trace(2, at=7_200_000_000), "120 minutes apart"),
    ],
)
def test_mixed_runs_in_one_folder(other: dict[str, Any], why: str, folder: Path) -> None:
    write(folder / "z.json", other)
    message = refused(folder)
    assert "mixed runs in one folder" in message
    assert why in message


def test_runs_that_say_so_are_not_mixed(tmp_path: Path) -> None:
    for rank, run in ((0, "monday"), (1, "tuesday")):
        stamp = {"rank": rank, "world": 2, "run": run}
        write(tmp_path / f"r{rank}.json", rank_trace(rank, shardlab=stamp))
    assert "monday" in refused(tmp_path)


def test_wrong_flags_and_a_folder_that_cannot_be_written_to(folder: Path) -> None:
    assert "did you mean 'latest'?" in refused(folder, "--select", "last")
    assert "at least one process" in refused(folder, "--jobs", "0")
    assert "cannot be negative" in refused(folder, "--top", "-1")
    target = folder / "file"
    target.write_text("in the way")
    assert "give --out DIR" in refused(folder, "--out", target / "sub")


def test_reading_traces_needs_msgspec_and_not_torch(folder: Path) -> None:
    missing = "import sys; sys.modules['msgspec'] = None; from shardlab.trace import load"
    done = commands.run(sys.executable, "-c", missing, cwd=folder)
    assert "UsageError: reading traces needs msgspec: pip install msgspec" in done.stderr
    reading = (
        f"import sys, shardlab.trace as t; t.load({str(folder)!r}).summary(); "
        "print('torch' in sys.modules)"
    )
    done = commands.run(sys.executable, "-c", reading, cwd=folder)
    assert done.stdout == "False\n", done.stderr


def test_events_of_a_stream_without_a_gpu(tmp_path: Path) -> None:
    """Nothing but synchronization: no kernel, and no crash."""
    events = [step(1, 0, 50), event("cuda_sync", "Stream Sync", 1, 2, 7, stream=7)]
    assert "1 rank" in analyze(write(tmp_path / "rank0.json", document(events)))
