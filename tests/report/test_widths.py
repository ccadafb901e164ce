"""Tables on narrow terminals: nothing is cut, the ranks are always there, the lines fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

import chrome_trace
from shardlab import trace as traces
from shardlab.report import checkpoint, terminal, trace_diff, trace_terminal
from shardlab.trace import diff

WIDTHS = (80, 60)
MESSAGES = ("note:", "left out for")  # text that may be as long as it is
SENTENCE = re.compile(r"[A-Z](?!.*  ).*\.")  # so may a verdict

Drawn = Callable[..., list[str]]


@pytest.fixture
def drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What a view prints at a width; each line fits."""

    def draw(width: int, show: Callable[[], None]) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        show()
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        tables = [line for line in lines if not line.startswith(MESSAGES)]
        assert [t for t in tables if cell_len(t) > width and not SENTENCE.fullmatch(t)] == []
        return lines

    return draw


@chrome_trace.every_real
def test_an_analysis_fits_and_cuts_nothing(folder: Path, drawn: Drawn) -> None:
    found = traces.load(folder)
    for width in WIDTHS:
        lines = drawn(width, lambda: trace_terminal.show(found, hta_compat=False, top=5))
        ranks = len(re.findall(r"^\d+ +[\d.,]+ ", "\n".join(lines), re.MULTILINE))
        assert ranks >= 1
        titles = [i for i, line in enumerate(lines) if line.startswith("rank ")]
        assert titles
        for i in titles:  # below each heading of ranks there is a rank
            assert re.match(r"\d+ +\S", lines[i + 2]), lines[i + 2]
        # A name may end with an ellipsis; a number and a heading never do.
        assert not re.search(r"[\d%]…|\b\w{1,6}…(  |$)", "\n".join(lines[:12]))


def test_runs_side_by_side_fit(drawn: Drawn) -> None:
    folders = [own for own in chrome_trace.FOLDERS if own.parent == chrome_trace.RECORDED]
    runs = [traces.load(own) for own in folders]
    names = [own.name for own in folders]
    for count in (2, 3, len(runs)):
        found = diff.diff(*runs[:count], names=names[:count])
        for width in WIDTHS:
            lines = drawn(width, lambda found=found: trace_diff.show(found))  # type: ignore[misc]
            assert not [line for line in lines if re.search(r"\d…", line)]
            if count > 2:
                table = lines[lines.index("where the step went, in each run") :]
                folded = "".join(line.split()[0] for line in table if line)  # or on two lines
                assert re.search(".*".join(names[:count]), folded)


def test_checkpoints_fit(drawn: Drawn) -> None:
    whole = {
        "step": 100_000, "strategy": "pytorch_zero3", "world": 16, "model_tensors": 580,
        "parameters": 1_557_611_200, "optimizer_tensors": 1160, "files": 32, "bytes": 18 << 30,
        "damage": None,
    }  # fmt: skip
    tensors = [
        {"name": "transformer.blocks.47.attention.projection.weight", "shape": (1600, 1600),
         "dtype": "float32", "chunks": 16, "optimizer": ["exp_avg", "exp_avg_sq", "step"]},
    ]  # fmt: skip
    said = ("100000", "1,557,611,200", "18.0 GiB", "damaged", "1600 x 1600", "exp_avg_sq")
    for width in WIDTHS:
        text = "\n".join(drawn(width, lambda: checkpoint.show([whole, {"damage": "cut"}], tensors)))
        assert [words for words in said if words not in text] == []
        assert "…" not in text


def test_what_does_not_fit_is_said_and_the_rest_is_whole() -> None:
    made = terminal.table("|rank", "one", "two\nlines", "<words", title="t")
    made.add_row("0", "123,456", "99.9 100%", "some words")
    fitted = terminal.fit(made, 30, ("two\nlines",), "; a file has all")
    assert [column.header for column in fitted.columns] == ["rank", "one", "words"]
    assert "left out, as the terminal is narrow: two lines; a file has all" in str(fitted.caption)
    same = terminal.fit(fitted, 80, ("one",))
    assert [column.header for column in same.columns] == ["rank", "one", "words"]


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("all_reduce used parameters", 12, "all_reduce used parameters"),
        ("reduce_scatter", 8, "reduce_\nscatter"),
        ("RegisterPostBackwardFunctionBackward", 20, "RegisterPostBackward\nFunctionBackward"),
        ("at::native::reduce_kernel<128, 4>", 14, "at::native::\nreduce_kernel<\n128, 4>"),
        ("x" * 30, 10, "x" * 30),  # it has no parts
        ("", 10, ""),
    ],
)
def test_long_names_fold_where_their_parts_end(name: str, width: int, lines: str) -> None:
    assert terminal.folded(name, width) == lines


def test_long_names_are_cut_where_their_parts_end() -> None:
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
