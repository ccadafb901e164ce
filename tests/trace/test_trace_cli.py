"""``shardlab trace analyze``: what it prints and writes, what it takes, what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import os
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

PARTS = ("compute_us", "exposed_comm_us", "wait_us", "memory_us", "idle_host_us", "idle_us")
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


@chrome.needs_real
def test_hta_compat_gives_htas_numbers(tmp_path: Path) -> None:
    """What the command writes, for a real trace that HTA rounds."""
    source = chrome.REAL / "nccl_parser_config"
    out = {}
    for flag in ("--hta-compat", "--quiet"):
        analyze(source, "--out", tmp_path / flag, flag)
        [row] = json.loads((tmp_path / flag / "summary.json").read_text())["ranks"]
        out[flag] = row["hta"]
    assert out["--hta-compat"]["idle_time_us"] == 338_781
    assert out["--hta-compat"]["comm_comp_overlap_pctg"] == pytest.approx(14.31, abs=0.005)
    assert out["--quiet"]["idle_time_us"] == pytest.approx(336_419.715, abs=0.01)


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


def test_whole_takes_a_trace_without_steps_as_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", document([operator("aten::mm", 10, 30)]))
    [row] = traces.load(path, whole=True).breakdown()
    assert (row.wall_us, row.compute_us) == (30, 30)


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


def test_no_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", document([operator("aten::mm", 10, 30)]))
    message = refused(path)
    assert "has no steps" in message
    assert "--whole" in message


def test_two_ranks_with_the_same_number(folder: Path) -> None:
    shutil.copy(folder / "rank0.json.gz", folder / "copy.json.gz")
    message = refused(folder)
    assert "two ranks with the same number" in message
    assert "copy.json.gz and rank0.json.gz" in message


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
