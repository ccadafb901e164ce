"""``shardlab trace analyze``: what it prints and writes, what it takes, what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chrome
import commands
from chrome import GLOO, document, event, kernel, operator, span, step, write
from shardlab import trace as traces
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


def analyze(*args: Any, ok: bool = True) -> str:
    result = CliRunner().invoke(app, ["trace", "analyze", *map(str, args)])
    if ok and result.exception:
        raise result.exception
    return result.output if ok else str(result.exception)


def refused(*args: Any) -> str:
    result = CliRunner().invoke(app, ["trace", "analyze", *map(str, args)])
    assert isinstance(result.exception, UsageError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


# ------------------------------------------------------------------ what it gives


def test_the_command_prints_tables_and_writes_files(folder: Path) -> None:
    """As a user runs it; and exit code 2 with one line for what is wrong."""
    done = commands.shardlab("trace", "analyze", str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    for words in ("wait for", "collectives", "who made others wait", "what if", "summary.json"):
        assert words in done.stdout
    for name in ("summary.json", "summary.csv", "summary.html"):
        assert (folder / name).stat().st_size > 0
    empty = folder / "empty"
    empty.mkdir()
    wrong = commands.here("trace", "analyze", str(empty), cwd=folder)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: no traces in ")
    assert wrong.stderr.count("\n") == 1
    again = commands.here("trace", "analyze", str(folder), "--quiet", cwd=folder)
    assert again.returncode == 0  # its own summary.json is not taken for a trace
    assert len(again.stdout.splitlines()) == 3


def test_summary_json_is_schema_1(folder: Path) -> None:
    analyze(folder, "--out", folder / "out")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["schema"] == 1
    assert [row["rank"] for row in summary["ranks"]] == [0, 1]
    for row in summary["ranks"]:
        assert set(row) == RANK_KEYS
        assert set(row["hta"]) == HTA_KEYS
        assert row["steps"] == 2
        assert sum(row[part] for part in PARTS) == pytest.approx(row["wall_us"])
        assert row["comm_us"] == row["hidden_comm_us"] + row["exposed_comm_us"] + row["wait_us"]
    [collective] = summary["collectives"]
    assert collective["wait_us"] == 30
    [straggler] = summary["stragglers"]
    assert (straggler["rank"], straggler["others_waited_us"]) == (1, 30)


def test_summary_csv_has_every_step_and_the_sums(folder: Path) -> None:
    analyze(folder, "--out", folder / "out")
    with (folder / "out" / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"]) for row in rows] == [
        ("0", "1"), ("0", "2"), ("1", "1"), ("1", "2"), ("0", "all"), ("1", "all")
    ]  # fmt: skip
    assert float(rows[0]["wait_us"]) == 30


def test_json_on_stdout_is_the_file(folder: Path) -> None:
    printed = json.loads(analyze(folder, "--json"))
    assert printed == json.loads((folder / "summary.json").read_text())


def test_hta_compat_gives_htas_numbers(tmp_path: Path) -> None:
    """What the command writes, for a real trace that HTA rounds."""
    out = {}
    for flag in ("--hta-compat", "--quiet"):
        analyze(chrome.RECORDED / "h200_gloo", "--out", tmp_path / flag, flag)
        rows = json.loads((tmp_path / flag / "summary.json").read_text())["ranks"]
        out[flag] = rows[0]["hta"]
    assert out["--hta-compat"]["idle_time_us"] == 36_448
    assert out["--hta-compat"]["comm_comp_overlap_pctg"] is None  # HTA knows NCCL alone
    assert out["--quiet"]["idle_time_us"] == pytest.approx(36_323.654, abs=0.01)


def test_names_from_a_file_are_only_names(tmp_path: Path) -> None:
    events = [step(1, 0, 50), *kernel("[red]k[/red] [link=x]", 1, 2, launched=0, id=1)]
    path = write(tmp_path / "[bold]rank0.json", document(events))
    assert "[red]k[/red]" in analyze(path)


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


def test_files_go_beside_the_traces(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "traces" / f"rank{rank}" / "t.json.gz", rank_trace(rank))
    analyze(tmp_path)
    assert (tmp_path / "traces" / "summary.json").is_file()


def test_other_files_in_the_folder_are_left_out_and_said(folder: Path) -> None:
    write(folder / "hyperparameters.json", {"lr": 1})
    found = traces.load(folder)
    assert found.ranks == (0, 1)
    assert any("hyperparameters.json is not a trace" in note for note in found.warnings)


def test_traces_that_do_not_say_their_rank_are_numbered(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", document([step(1, 0, 50)], rank=None))
    found = traces.load(tmp_path)
    assert found.ranks == (0, 1)
    assert any("do not say their rank" in note for note in found.warnings)


def test_processes_give_the_same(folder: Path) -> None:
    one, two = traces.load(folder, jobs=1), traces.load(folder, jobs=2)
    assert one.summary() == two.summary()


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
    done = commands.here(
        "trace", "analyze", str(chrome.RECORDED / "gloo_unmarked"), "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks · the whole trace · ms of the CPU")
    assert "note: no step markers (ProfilerStep#) in the traces: the whole of such" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["marked"], summary["window"]) == (False, None)
    assert [row["steps"] for row in summary["ranks"]] == [1, 1]
    for row in summary["ranks"]:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["wall_us"])
    reduces = [c for c in summary["collectives"] if c["kind"] == "all_reduce"]
    # The two updates tell the phases: the second forward is not a part of the first backward.
    assert [(c["phase"], c["matched_by"]) for c in reduces] == [("backward", "order")] * 2
    page = (tmp_path / "out" / "summary.html").read_text()
    assert "where the whole trace on 2 ranks went" in page
    assert "The whole trace is" in page


def test_every_window_has_a_report(tmp_path: Path) -> None:
    source = chrome.RECORDED / "gloo_windows"
    done = commands.here(
        "trace", "analyze", str(source), "--select", "all", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 2, window 1 of 2\n")
    assert "\nstep 5, window 2 of 2\n" in done.stdout
    for name, number in (("steps2-2", 2), ("steps5-5", 5)):
        folder = tmp_path / "out" / name
        assert {path.name for path in folder.iterdir()} == {
            "summary.json", "summary.csv", "summary.html"
        }  # fmt: skip
        summary = json.loads((folder / "summary.json").read_text())
        assert {row["step"] for row in summary["steps"]} == {number}
        assert f"step {number}, window" in (folder / "summary.html").read_text()
    printed = json.loads(analyze(source, "--select", "all", "--out", tmp_path / "json", "--json"))
    assert printed["schema"] == 1
    assert [report["window"] for report in printed["reports"]] == [
        "step 2, window 1 of 2", "step 5, window 2 of 2"
    ]  # fmt: skip
    latest = json.loads(analyze(source, "--out", tmp_path / "latest", "--json"))
    assert latest["ranks"] == printed["reports"][1]["ranks"]


def test_an_operator_is_listed_once(tmp_path: Path) -> None:
    """Over several windows, and with the span that the autograd engine puts around it."""
    found = traces.load(chrome.RECORDED / "gloo_windows", select="all").kernels(top=10_000)
    first, second = traces.load(chrome.RECORDED / "gloo_windows", select="all").windows().values()
    names = [(row.rank, row.name) for row in found]
    assert len(names) == len(set(names)) > 100
    [addmm] = [row for row in found if (row.rank, row.name) == (0, "aten::addmm")]
    parts = [r for w in (first, second) for r in w.kernels(10_000) if (r.rank, r.name) == names[0]]
    assert addmm.count == 8
    assert found[0].sum_us == pytest.approx(sum(row.sum_us for row in parts))
    engine = "autograd::engine::evaluate_function: "
    events = [
        step(1, 0, 500),
        operator(f"{engine}MmBackward0", 10, 100), operator("MmBackward0", 20, 80),
        operator("aten::mm", 30, 60), operator(f"{engine}Other", 200, 50),
    ]  # fmt: skip
    rows = traces.load(write(tmp_path / "t.json", document(events))).kernels()
    assert [(row.name, row.count, row.sum_us) for row in rows] == [
        ("aten::mm", 1, 60), ("Other", 1, 50), ("MmBackward0", 1, 40)
    ]  # fmt: skip
    assert sum(row.sum_us for row in rows) == 150  # all time is there, once


def test_glooes_reduce_scatter_is_called_what_it_is() -> None:
    """An all-reduce and a copy: on CPU ranks, and on ranks whose tensors are on a GPU."""
    for name in ("gloo_fsdp", "h200_gloo"):
        found = traces.load(chrome.RECORDED / name)
        rows = {row.name: row for row in found.collective_summary()}
        assert set(rows) == {"all_gather", "all_reduce", "reduce_scatter (all_reduce + copy)"}
        assert rows["reduce_scatter (all_reduce + copy)"].count == 2
        assert rows["all_reduce"].count == 3
        emulated = [c for c in found.collectives() if c.emulates]
        assert {(c.kind, c.emulates) for c in emulated} == {("all_reduce", "reduce_scatter")}
    assert rows["reduce_scatter (all_reduce + copy)"].bytes == 4 * (49_984 + 20_608)


def test_a_sum_with_unknown_bytes_is_not_a_sum(tmp_path: Path) -> None:
    """Two all-reduces, of which the trace knows one's size: at least that much."""
    shapes = {"Input Dims": [[250]], "Input type": ["float"]}
    events = [step(1, 0, 500)]
    for at, args in ((100, shapes), (200, {})):
        events += [
            operator("c10d::allreduce_", at, 5),
            span("gloo:all_reduce", at, 50, GLOO, **args),
        ]
    write(tmp_path / "rank0.json", document(events))
    [row] = traces.load(tmp_path).collective_summary()
    assert (row.bytes, row.bytes_at_least) == (None, 1000)
    assert "≥ 1,000 B" in analyze(tmp_path)
    assert "≥ 1,000 B" in (tmp_path / "summary.html").read_text()
    unknown = analyze(chrome.RECORDED / "gloo_unmarked", "--out", tmp_path / "out")
    assert re.search(r"^all_reduce +2 +– ", unknown, re.MULTILINE)


# ------------------------------------------------------------------ what it refuses


def test_no_traces(tmp_path: Path) -> None:
    assert "no traces in" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "nowhere")


def test_not_a_trace(tmp_path: Path) -> None:
    assert "is not a profiler trace" in refused(write(tmp_path / "t.json", {"a": 1}))
    write(tmp_path / "u.json", b"\x89PNG")
    assert "not traces" in refused(tmp_path)


def test_cut_in_the_middle(tmp_path: Path) -> None:
    """What is left is analysed, and said to be that; with no step left nothing can be."""
    text = json.dumps(rank_trace(0)).encode()
    path = tmp_path / "rank0.json"
    path.write_bytes(text[:-300])
    assert "is cut" in refused(path)
    assert json.loads((tmp_path / "summary.json").read_text())["ranks"][0]["steps"] == 2
    path.write_bytes(text[:60] + b'"traceEvents": [{"ph": "X", "name": "Prof')
    assert "has no steps" in refused(path)
    assert "ends in the middle" in refused(path)
    path.write_bytes(gzip.compress(text)[:40])
    assert "ends in the middle" in refused(path)


def test_two_ranks_with_the_same_number(folder: Path) -> None:
    shutil.copy(folder / "rank0.json.gz", folder / "copy.json.gz")
    message = refused(folder)
    assert "two ranks with the same number" in message
    assert "copy.json.gz and rank0.json.gz" in message


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--select", "last"], "did you mean 'latest'?"),
        (["--jobs", "0"], "at least one process"),
        (["--top", "-1"], "cannot be negative"),
    ],
)
def test_wrong_flags(args: list[str], message: str, folder: Path) -> None:
    assert message in refused(folder, *args)


def test_a_folder_that_cannot_be_written_to(folder: Path) -> None:
    target = folder / "file"
    target.write_text("in the way")
    assert "give --out DIR" in refused(folder, "--out", target / "sub")


def test_a_missing_reader_is_said(tmp_path: Path) -> None:
    code = "import sys; sys.modules['msgspec'] = None; from shardlab.trace import load"
    done = commands.run(sys.executable, "-c", code, cwd=tmp_path)
    assert "UsageError: reading traces needs msgspec: pip install msgspec" in done.stderr


def test_reading_traces_does_not_import_torch(folder: Path) -> None:
    code = (
        f"import sys, shardlab.trace as t; t.load({str(folder)!r}).summary(); "
        "print('torch' in sys.modules)"
    )
    done = commands.run(sys.executable, "-c", code, cwd=folder)
    assert done.stdout == "False\n", done.stderr


def test_events_of_a_stream_without_a_gpu(tmp_path: Path) -> None:
    """Nothing but synchronization: no kernel, and no crash."""
    events = [step(1, 0, 50), event("cuda_sync", "Stream Sync", 1, 2, 7, stream=7)]
    assert "1 rank" in analyze(write(tmp_path / "rank0.json", document(events)))
