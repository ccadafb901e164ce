"""Runs side by side: the numbers, the sentence, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_capture import captured

import chrome
import commands
from conftest import GetRanks
from handmade import HandMade
from shardlab.report import trace_diff as report
from shardlab.trace import model
from shardlab.trace.diff import Diff, diff, names_of, sentence


class Slower(HandMade):
    """The same steps, each with 5 ms more of compute and without the wait."""

    def breakdown(self, per: str = "step") -> list[model.Breakdown]:
        rows = []
        for row in super().breakdown(per):
            more, wait = 5000.0 * row.steps, row.wait_us
            rows.append(
                replace(
                    row,
                    wall_us=row.wall_us + more - wait,
                    compute_us=row.compute_us + more,
                    wait_us=0.0,
                    comm_us=row.comm_us - wait,
                )
            )
        return rows

    def kernels(self, top: int = 10) -> list[model.Kernel]:
        rows = [replace(k, sum_us=2 * k.sum_us) for k in super().kernels(top)]
        return [*rows, replace(rows[0], name="aten::new", count=3, sum_us=30.0)]


def of(a: HandMade, b: HandMade) -> Diff:
    return diff(a, b, names=("before", "after"))  # type: ignore[arg-type]


def test_what_changed_is_per_step_and_rank() -> None:
    found = of(HandMade(steps=3), Slower(steps=6))  # runs of unequal length
    assert found.step.a.us == 10_000
    assert found.step.b.us == 14_000  # rank 0: 10 + 5 - 2, rank 1: 10 + 5
    parts = {row.name: row.change_us for row in found.of("part")}
    assert parts["compute"] == 5000
    assert parts["waiting for a slower rank"] == -1000  # rank 0's 2 ms, over two ranks
    assert sum(parts.values()) == pytest.approx(found.step.change_us)
    assert next(iter(parts)) == "compute"  # the largest change first
    (collective,) = found.of("collective")
    assert (collective.name, collective.a.count, collective.b.count) == ("all_reduce", 1, 1)
    assert collective.a.us == collective.b.us == 2000  # 3 ms on rank 0, 1 ms on rank 1
    operators = {row.name: row for row in found.of("operator")}
    assert operators["aten::new"].a.us == 0
    assert operators["aten::new"].ratio is None


def test_the_sentence_says_how_much_and_why() -> None:
    said = sentence(of(HandMade(), Slower()))
    assert said == (
        "after takes 40% more time than before: 14 ms a step against 10 ms. "
        "It has 5 ms more compute, but 1 ms less waiting for a slower rank."
    )
    assert sentence(of(Slower(), HandMade())).startswith("after takes 29% less time than before")
    assert "overlap" not in said
    same = sentence(of(HandMade(), HandMade()))
    assert same == "after and before take the same time: 10 ms a step against 10 ms."


class Uneven(Slower):
    """Its first step is as short as those of the others."""

    def breakdown(self, per: str = "step") -> list[model.Breakdown]:
        rows = super().breakdown(per)
        if per == "step":
            return [replace(r, wall_us=9000.0) if r.step == 0 else r for r in rows]
        return rows


def test_a_difference_that_single_steps_do_not_bear_out_is_said_to_be_one() -> None:
    assert "though single steps of the two overlap." in sentence(of(HandMade(), Uneven()))


def test_unequal_runs_are_said_to_be() -> None:
    assert of(HandMade(), HandMade()).notes == ()
    assert "differ in ranks: 2 and 1" in of(HandMade(), HandMade(ranks=1)).notes[0]
    assert "no operator in common" in of(HandMade(), HandMade(kernel="other")).notes[0]
    assert of(HandMade(warnings=("cut",)), HandMade()).notes == ("before: cut",)
    assert "2 steps only" in of(HandMade(steps=2), HandMade(steps=3)).notes[0]


def test_a_name_with_markup_is_only_a_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report.show(of(HandMade(kernel="[red]k[/]"), Slower(kernel="[red]k[/]")), tmp_path / "d.json")
    assert "[red]k[/]" in capsys.readouterr().out


def test_the_command_compares_two_real_runs(ranks: GetRanks, tmp_path: Path) -> None:
    for name in ("simple_ddp", "bucket_ddp_async"):
        captured(ranks, tmp_path / name, strategy__name=name)
    done = commands.here(
        "trace", "diff", "simple_ddp", "bucket_ddp_async", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bucket_ddp_async ")
    assert "where the step went" in done.stdout
    result = json.loads((tmp_path / "out" / "diff.json").read_text())
    assert (result["schema"], result["a"], result["b"]) == (1, "simple_ddp", "bucket_ddp_async")
    rows = {(row["group"], row["name"]): row for row in result["rows"]}
    reduces = rows["collective", "all_reduce"]
    assert reduces["a"]["count"] > reduces["b"]["count"] > 1  # buckets are fewer than gradients
    parts = [row["change_us"] for (group, _), row in rows.items() if group == "part"]
    assert sum(parts) == pytest.approx(result["step"]["change_us"], rel=1e-3, abs=1)
    assert rows["phase", "forward"]["a"]["count"] == 1


def test_the_command_refuses_what_is_no_trace(tmp_path: Path) -> None:
    done = commands.here("trace", "diff", "nowhere", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------ three runs and more


def test_three_runs_are_ranked_and_stand_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    runs = (HandMade(), Slower(), HandMade(kernel="aten::other"))
    found = diff(*runs, names=("first", "slow", "third"))  # type: ignore[arg-type]
    assert sentence(found) == (
        "first takes the least time, 10 ms a step; third as long and slow 40% more."
    )
    result = found.to_dict()
    assert result["runs"] == ["first", "slow", "third"]
    assert "a" not in result
    [compute] = [row for row in result["rows"] if row["name"] == "compute"]
    assert [value["us"] for value in compute["values"]] == [6000, 11000, 6000]
    report.show(found)
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines if line[:5].strip()}
    assert table["slow"][:3] == ["14.0", "1.40×", "11.0"]
    assert table["third"][:3] == ["10.0", "1.00×", "6.00"]
    assert table["aten::addmm"] == ["5.00", "10.0", "–"]


def test_runs_without_any_time_are_compared_too(tmp_path: Path) -> None:
    """A trace of one event of no length, twice and three times."""
    chrome.write(tmp_path / "t.json", chrome.document([chrome.operator("aten::mm", 5, 0)]))
    for times in (2, 3):
        done = commands.here("trace", "diff", *["t.json"] * times, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "0 ms a step" in done.stdout


def test_the_command_takes_three_runs(tmp_path: Path) -> None:
    paths = [str(chrome.RECORDED / name) for name in ("gloo_windows", "gloo_fsdp", "gloo_unmarked")]
    done = commands.here("trace", "diff", *paths, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "diff.json").read_text())
    assert result["runs"] == ["gloo_windows", "gloo_fsdp", "gloo_unmarked"]
    printed = commands.here("trace", "diff", *paths, "--json", cwd=tmp_path)
    assert json.loads(printed.stdout) == result
    one = commands.here("trace", "diff", paths[0], cwd=tmp_path)
    assert one.returncode == 2
    assert "Give two runs, or more" in one.stderr


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
