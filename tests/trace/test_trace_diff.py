"""Runs side by side: the numbers, the sentence, the command."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import chrome_trace
import commands
from chrome_trace import a_run
from shardlab import trace as traces
from shardlab.report import trace_diff as report
from shardlab.trace.diff import Diff, diff, names_of, sentence

# Runs of ``chrome_trace.a_run``: one as it is, and one with 5 ms more of compute in each step, in
# which nobody waits.
SLOWER: dict[str, Any] = {"more": (5000,) * 6, "late": 0}
NAMES = ("before", "after")


def of(folder: Path, *made: dict[str, Any], names: tuple[str, ...] = NAMES) -> Diff:
    runs = [a_run(folder / f"run{i}", **how) for i, how in enumerate(made)]
    return diff(*runs, names=names)


def test_what_changed_is_per_step_and_rank(tmp_path: Path) -> None:
    found = of(tmp_path, {}, SLOWER | {"kernel": "aten::new"})  # runs of unequal length
    assert (found.step.a.us, found.step.b.us) == (10_000, 13_000)
    parts = {row.name: row.change_us for row in found.of("part")}
    assert parts["compute"] == pytest.approx(5000)
    assert parts["waiting for a slower rank"] == -1000  # rank 0's 2 ms, over two ranks
    assert sum(parts.values()) == pytest.approx(found.step.change_us)
    assert next(iter(parts)) == "compute"  # the largest change first
    [collective] = found.of("collective")
    assert (collective.name, collective.a.count, collective.b.count) == ("all_reduce", 2, 2)
    assert collective.a.us == 3500  # 1.5 ms, and 3 ms on rank 0, 1 ms on rank 1
    operators = {row.name: row for row in found.of("operator")}
    assert operators["aten::new"].a.us == 0
    assert operators["aten::new"].b.us == pytest.approx(11_000)
    assert operators["aten::new"].ratio is None


def test_the_sentence_says_how_much_and_why(tmp_path: Path) -> None:
    said = sentence(of(tmp_path / "slower", {}, SLOWER))
    assert said == (
        "after takes 30% more time than before: 13 ms a step against 10 ms. It has 5 ms more "
        "compute, but 1 ms less waiting for a slower rank (rank 0: 2 ms less) and 1 ms less "
        "host-bound idle (rank 1: 2 ms less)."
    )
    assert sentence(of(tmp_path / "faster", SLOWER, {})).startswith(
        "after takes 23% less time than before"
    )
    same = sentence(of(tmp_path / "same", {}, {}))
    assert same == "after and before take the same time: 10 ms a step against 10 ms."
    # Its first step is shorter than those of the other.
    many = of(tmp_path / "many", {"more": (0,) * 20}, {"more": (1000, *[5000] * 19), "late": 0})
    assert "though single steps of the two overlap." in sentence(many)
    few = of(tmp_path / "few", {}, {"more": (1000, 5000, 5000), "late": 0})
    assert few.step.is_noise
    assert sentence(few).startswith("after and before differ by less than the noise between steps")


def test_a_rank_that_sleeps_stands_apart_from_the_one_that_waits(tmp_path: Path) -> None:
    """Known: rank 1 sleeps 20 ms more, rank 0 waits as long; both times vary by 2 ms."""
    late = (0, 2_000, 0, 2_000)
    found = of(
        tmp_path,
        {"more": (0,) * 4, "late": late},
        {"more": (0,) * 4, "late": [more + 20_000 for more in late]},
    )
    changes = {row.name: row.change_us for row in found.of("part")}
    assert changes["host-bound idle"] == pytest.approx(10_000)  # the mean: of nobody
    of_ranks = {row.name: row for row in found.of("rank")}
    expected = {"0: waiting for a slower rank": 20, "0: host-bound idle": 0,
                "1: waiting for a slower rank": 0, "1: host-bound idle": 20}  # fmt: skip
    assert {name: row.change_us for name, row in of_ranks.items()} == pytest.approx(
        {f"rank {name}": 1000 * ms for name, ms in expected.items()}, abs=5
    )
    # Student's, of 4 steps: 3.182. The noise of a difference is that of both runs.
    half = 3.182 * statistics.stdev(late) / 4**0.5
    idle = of_ranks["rank 1: host-bound idle"]
    assert idle.noise_us == pytest.approx(2**0.5 * half, rel=0.01)
    assert not idle.is_noise
    said = sentence(found)
    assert "10 ms more host-bound idle (rank 1: 20 ms more)" in said
    assert "10 ms more waiting for a slower rank (rank 0: 20 ms more)" in said


def test_a_difference_below_the_noise_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        {"more": more, "late": 0}
        for more in ((0, 6_000, 0, 6_000), (3_000, 6_000, 0, 6_000), [12_000] * 4)
    ]
    found = of(tmp_path / "two", *made[:2])  # 0.75 ms more of 11
    assert sentence(found).startswith(
        "after and before differ by less than the noise between steps: 11.8 ms a step against 11 ms"
    )
    assert found.of("rank") == []  # both ranks alike
    report.show(found)
    [line] = [text for text in capsys.readouterr().out.splitlines() if "compute" in text]
    assert "+0.750  in the noise  ±" in line
    three = of(tmp_path / "three", *made, names=("a", "b", "c"))
    assert "b more, but within the noise and c 82% more" in sentence(three)


def test_collectives_at_once_count_once() -> None:
    """Every microsecond in which a rank was in any of them, one by one."""
    run = traces.load(chrome_trace.RECORDED / "gloo_windows")
    found = diff(run, run, names=("a", "b"))
    moments = {
        (part.rank, us)
        for collective in run.collectives()
        for part in collective.participants
        for us in range(part.start_ns // 1000, part.end_ns // 1000)
    }
    [reduces] = found.of("collective")
    assert reduces.a.us == pytest.approx(len(moments) / 2, abs=10)  # of two ranks, in one step
    assert reduces.a.count == 5


def test_unequal_runs_are_said_to_be(tmp_path: Path) -> None:
    chrome_trace.write(tmp_path / "other" / "run0" / "lr.json", {"lr": 1})
    for name, made, note in (
        ("same", ({}, {}), None),
        ("alone", ({}, {"ranks": 1}), "differ in ranks: 2 and 1"),
        ("other", ({}, {}), "before: lr.json is not a trace"),
        ("short", ({"more": (0, 0)}, {}), "2 steps only"),
    ):
        notes = of(tmp_path / name, *made).notes
        assert note in notes[0] if note else notes == ()
    runs = [
        chrome_trace.load(tmp_path / name, [chrome_trace.operator(name, 0, 9)]) for name in "ab"
    ]
    assert "no operator in common" in diff(*runs, names=NAMES).notes[0]


def test_three_runs_are_ranked_and_stand_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    markup = "[red]other[/]"  # a name that is only a name
    found = of(tmp_path, {}, SLOWER, {"kernel": markup}, names=("first", "slow", "third"))
    assert sentence(found) == (
        "first takes the least time, 10 ms a step; third as long and slow 30% more."
    )
    result = found.to_dict()
    assert result["runs"] == ["first", "slow", "third"]
    assert "a" not in result
    [compute] = [row for row in result["rows"] if row["name"] == "compute"]
    assert [value["us"] for value in compute["values"]] == pytest.approx([6000, 11000, 6000])
    report.show(found)
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines if line[:5].strip()}
    assert table["slow"][:3] == ["13.0", "1.30×", "11.0"]
    assert table["third"][:3] == ["10.0", "1.00×", "6.00"]
    assert table["aten::addmm"] == ["6.00", "11.0", "–"]
    assert table[markup] == ["–", "–", "6.00"]


# ------------------------------------------------------------------ the command


def test_the_command_compares_two_runs_or_more(tmp_path: Path) -> None:
    paths = [
        str(chrome_trace.RECORDED / name) for name in ("gloo_fsdp", "gloo_windows", "gloo_unmarked")
    ]
    done = commands.here("trace", "diff", *paths[:2], "--out", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bucket_ddp_async ")
    assert "where the step went" in done.stdout
    result = json.loads((tmp_path / "two" / "diff.json").read_text())
    assert (result["schema"], result["a"], result["b"]) == (1, "pytorch_zero3", "bucket_ddp_async")
    rows = {(row["group"], row["name"]): row for row in result["rows"]}
    reduces = rows["collective", "all_reduce"]
    assert (reduces["a"]["count"], reduces["b"]["count"]) == (3, 5)
    assert rows["phase", "forward"]["a"]["count"] == 1
    printed = commands.here("trace", "diff", *paths, "--json", cwd=tmp_path)
    assert json.loads(printed.stdout)["runs"] == [Path(path).name for path in paths]
    chrome_trace.load(tmp_path / "t", [chrome_trace.operator("aten::mm", 5, 0)])
    for times in (2, 3):  # without any time
        done = commands.here("trace", "diff", *["t"] * times, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "0 ms a step" in done.stdout
    for refused, why in (((paths[0],), "Give two runs, or more"), (("nowhere", "x"), "error: ")):
        done = commands.here("trace", "diff", *refused, cwd=tmp_path)
        assert done.returncode == 2
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_runs_are_called_by_what_sets_them_apart(tmp_path: Path) -> None:
    def names(*paths: str, strategies: tuple[str, ...]) -> tuple[str, ...]:
        runs: Any = [
            SimpleNamespace(traces=[SimpleNamespace(shardlab={"strategy": s})]) for s in strategies
        ]
        return names_of(runs, [tmp_path / path for path in paths])

    assert names("x", "y", "z", strategies=("a", "b", "c")) == ("a", "b", "c")
    assert names("x", "y", "z", strategies=("a", "b", "a")) == ("x", "y", "z")
    assert names("1/x", "2/x", "1/y", strategies=("", "", "")) == ("1/x", "2/x", "1/y")
    assert names("x", "x", "y", strategies=("", "", "")) == ("x (A)", "x (B)", "y (C)")
