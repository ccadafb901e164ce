"""Tables on narrow terminals: nothing is cut, the ranks are always there, the lines fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import chrome
import commands
from shardlab.report import checkpoint, terminal

MESSAGES = ("note:", "left out for", "  /")  # text that may be as long as it is


def drawn(width: int, tmp_path: Path, *args: str) -> list[str]:
    done = commands.here(*args, cwd=tmp_path, COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.splitlines()]


def too_long(lines: list[str], width: int) -> list[str]:
    return [line for line in lines if cell_len(line) > width and not line.startswith(MESSAGES)]


@pytest.mark.parametrize("width", [80, 60])
@chrome.every_real
def test_an_analysis_fits_and_cuts_nothing(folder: Path, width: int, tmp_path: Path) -> None:
    lines = drawn(width, tmp_path, "trace", "analyze", str(folder), "--out", "out")
    assert not too_long(lines, width)
    ranks = len(re.findall(r"^\d+ +[\d.,]+ ", "\n".join(lines), re.MULTILINE))
    assert ranks >= 1
    titles = [i for i, line in enumerate(lines) if line.startswith("rank ")]
    assert titles
    for i in titles:  # below each heading of ranks there is a rank
        assert re.match(r"\d+ +\S", lines[i + 2]), lines[i + 2]
    # A name may end with an ellipsis; a number and a heading never do.
    assert not re.search(r"[\d%]…|\b\w{1,6}…(  |$)", "\n".join(lines[:12]))


@pytest.mark.parametrize("width", [80, 60])
def test_runs_side_by_side_fit(width: int, tmp_path: Path) -> None:
    runs = [str(folder) for folder in chrome.FOLDERS if folder.parent == chrome.RECORDED]
    for some in (runs[:2], runs[:3], runs):
        lines = drawn(width, tmp_path, "trace", "diff", *some)
        assert not too_long(lines, width)
        assert not [line for line in lines if re.search(r"\d…", line)]
    names = [Path(run).name for run in runs]
    table = lines[lines.index("where the step went, in each run") :]
    first_words = [line.split()[0] for line in table if line]
    assert [word for word in first_words if word in names][: len(names)] == names


@pytest.mark.parametrize("width", [80, 60])
def test_checkpoints_fit(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    whole = {
        "step": 100_000, "strategy": "pytorch_zero3", "world": 16, "model_tensors": 580,
        "parameters": 1_557_611_200, "optimizer_tensors": 1160, "files": 32, "bytes": 18 << 30,
        "damage": None,
    }  # fmt: skip
    tensors = [
        {"name": "transformer.blocks.47.attention.projection.weight", "shape": (1600, 1600),
         "dtype": "float32", "chunks": 16, "optimizer": ["exp_avg", "exp_avg_sq", "step"]},
    ]  # fmt: skip
    checkpoint.show([whole, {"damage": "cut"}], tensors)
    text = capsys.readouterr().out
    assert not too_long(text.splitlines(), width)
    for words in ("100000", "1,557,611,200", "18.0 GiB", "damaged", "1600 x 1600", "exp_avg_sq"):
        assert words in text
    assert "…" not in text


def test_what_does_not_fit_is_said_and_the_rest_is_whole() -> None:
    made = terminal.table("|rank", "one", "two\nlines", "<words", title="t")
    made.add_row("0", "123,456", "99.9 100%", "some words")
    fitted = terminal.fit(made, 30, ("two\nlines",), "; a file has all")
    assert [column.header for column in fitted.columns] == ["rank", "one", "words"]
    assert "left out, as the terminal is narrow: two lines; a file has all" in str(fitted.caption)
    same = terminal.fit(fitted, 80, ("one",))
    assert [column.header for column in same.columns] == ["rank", "one", "words"]


def test_long_names_fold_where_their_parts_end() -> None:
    assert terminal.folded("all_reduce used parameters", 12) == "all_reduce used parameters"
    assert terminal.folded("reduce_scatter", 8) == "reduce_\nscatter"
    assert terminal.folded("RegisterPostBackwardFunctionBackward", 20) == (
        "RegisterPostBackward\nFunctionBackward"
    )
    assert terminal.folded("at::native::reduce_kernel<128, 4>", 14) == (
        "at::native::\nreduce_kernel<\n128, 4>"
    )
    assert terminal.folded("x" * 30, 10) == "x" * 30  # it has no parts
    assert terminal.folded("", 10) == ""
    assert terminal.short("a_b", 10) == "a_b"
    assert terminal.short("alpha::beta::gamma<delta>", 16) == "alpha::beta…"
    assert terminal.short("x" * 30, 10) == "x" * 9 + "…"


def test_odd_tables_fit_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Empty, of one column, wider than any terminal, with wide letters, with markup in a cell."""
    console = terminal.out()
    empty = terminal.fit(terminal.table("<a", "b", title="none"), 10)
    assert empty.row_count == 0
    made = terminal.table("<name", "a number", title="odd")
    made.add_row("日本語の名前", "[red]1,234,567[/]")
    made.add_row("[bold]plain[/]", "2")
    for width in (60, 24, 5, 1):
        terminal.show(console, terminal.fit(made, width))
        text = capsys.readouterr().out
        assert "1,234,567" in text
        assert "[red]" not in text
