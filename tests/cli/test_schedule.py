"""`shardlab schedule`: the drawing, the table, and refusals in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

import commands
from shardlab.strategies.pipeline.schedule_analysis import FORMULAS
from shardlab.strategies.pipeline.schedules import SCHEDULES

DRAWN = """\
rank 0 F0F1F2F3············B0--F4B1--F5B2--F6B3--F7B4--··B5--··B6--··B7--
rank 1 ··F0F1F2········B0--F3B1--F4B2--F5B3--F6B4--F7B5--··B6--··B7--····
rank 2 ····F0F1····B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--··B7--········
rank 3 ······F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--············
       0 ms                10                  20                  30
"""


def said(tmp_path: Path, *args: str, width: int = 80) -> str:
    done = commands.here("schedule", *args, cwd=tmp_path, COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def ranks_of(text: str) -> list[str]:
    return [line.partition(" ")[2].split()[-1] for line in text.splitlines() if line[:5] == "rank "]


def test_a_schedule_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    text = said(tmp_path, "1f1b", "--world", "4", "--microbatches", "8")
    assert DRAWN in text
    for words in (
        "33 ms: each rank works 24 ms and is idle 9 ms",
        "bubble   37.5% of the work",
        "= 9 ms, a bubble of",
        "at most 4 activations; by rank 4 3 2 1",
        "48 messages; by rank 8 16 16 8",
    ):
        assert words in text
    assert "\x1b" not in text  # a pipe gets letters alone, and a terminal colours
    done = commands.here("schedule", "gpipe", cwd=tmp_path, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in done.stdout


@pytest.mark.parametrize("name", [*SCHEDULES, "all"])
@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize(
    ("stages", "micro", "times"),
    [
        (4, 8, "--send-ms 0.3"),
        (1, 1, "--forward-ms 0 --backward-ms 2"),
        (12, 40, "--forward-ms 1 --backward-ms 0"),
        (4, 8, "--forward-ms 0.000000001 --backward-ms 1000000"),
        (4, 8, "--forward-ms 1e-300 --backward-ms 0"),
    ],
)
def test_lines_fit(
    name: str, stages: int, micro: int, times: str, width: int, tmp_path: Path
) -> None:
    asked = [name, "--world", f"{stages}", "--microbatches", f"{micro}", *times.split()]
    text = said(tmp_path, *asked, width=width)
    assert "nan" not in text
    # Headings of the table never fold: below 75 columns they are the terminal's to wrap.
    if name != "all" or width == 80:
        assert [line for line in text.splitlines() if cell_len(line.rstrip()) > width] == []
    if name != "all":
        lengths = {len(line) for line in ranks_of(text)}
        assert len(lengths) == 1
        assert len(ranks_of(text)) == stages


def test_too_wide_is_scaled_and_says_so(tmp_path: Path) -> None:
    """Of a rank that works without a pause, no character is idle."""
    text = said(tmp_path, "gpipe", "--world", "2", "--microbatches", "500")
    assert "a character is 20.6 ms, and shows what took most of it" in text
    first, second = ranks_of(text)
    assert set(first[1:]) == {"F", "B"}
    assert len(first) == len(second) == 73
    assert "number:" not in text


def test_a_second_stage_has_small_letters(tmp_path: Path) -> None:
    text = said(tmp_path, "interleaved", "--world", "2", "--microbatches", "4", width=120)
    assert ranks_of(text)[0].startswith("F0--F1--f0--f1--F2--")
    assert "small letters: a rank's second stage" in text
    assert "every second stage" in said(tmp_path, "interleaved", "--chunks", "3")


def test_a_comparison(tmp_path: Path) -> None:
    text = said(tmp_path, "all")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["1f1b"][1:] == ["1", "33.0", "37.5%", "37.5%", "4", "4", "48"]
    assert rows["interleaved"][1:] == ["2", "28.5", "18.8%", "18.8%", "11", "5.5", "112"]
    assert rows["zero_bubble"][3] == "12.5%"
    some = said(tmp_path, "interleaved,gpipe", "interleaved", "--send-ms", "1")
    assert [line.split()[0] for line in some.splitlines() if line[:3] in ("int", "gpi")] == [
        "interleaved",
        "gpipe",
    ]
    assert "no formula is known" in some


def test_json_says_all(tmp_path: Path) -> None:
    text = said(tmp_path, "all", "--chunks", "3", "--json")
    chunks = {row["name"]: row["chunks"] for row in json.loads(text)["schedules"]}
    # They go to those that can have them.
    assert chunks == {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zero_bubble": 1}
    asked = ("zero_bubble", "--world", "2", "--microbatches", "2", "--json")
    found = json.loads(said(tmp_path, *asked))
    (row,) = found["schedules"]
    assert (found["ranks"], found["weight_ms"], row["stages"]) == (2, 1.0, 2)
    assert (row["step_ms"], row["live"], row["messages"]) == (7.0, [2, 2], [2, 2])
    assert row["bubble"] == pytest.approx(row["bubble_by_formula"])
    assert row["ranks"][1][1] == {
        "kind": "I", "stage": 1, "micro": 0, "start_ms": 2.0, "end_ms": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("1f1", "unknown schedule '1f1'; did you mean '1f1b'?"),
        ("all,gpip", "unknown schedule 'gpip'; did you mean 'gpipe'?"),
        ("gpipe 1f1b --chunks 3", "gpipe has 1 stage per rank, not 3; interleaved can have that"),
        ("gpipe --send-ms -1", "--send-ms -1: a time is 0 to 1,000,000 ms"),
        ("gpipe --forward-ms nan", "--forward-ms nan: a time is 0 to 1,000,000 ms"),
        ("gpipe --backward-ms inf", "--backward-ms inf: a time is 0 to 1,000,000 ms"),
        ("gpipe --forward-ms 0 --backward-ms 0", "one of them takes some time"),
        ("zero_bubble --weight-ms 3", "so at most --backward-ms 2"),
        ("1f1b --weight-ms 1", "--weight-ms 1: 1f1b does not split the backward, as zero_bubble"),
        ("gpipe --microbatches 100000", "too much to draw; at most 12,500 of them"),
        ("gpipe --world 60000", "gpipe with 60,000 stages and 8 micro-batches is too much to"),
        ("ALL", "unknown schedule 'ALL'; did you mean 'all'?"),
        ("gpipe,,", "unknown schedule ''; known: gpipe, 1f1b, interleaved, zero_bubble, all"),
    ],
)
def test_refusals(args: str, message: str, tmp_path: Path) -> None:
    done = commands.here("schedule", *args.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_the_drawing_and_the_formulas_of_the_code() -> None:
    page = (commands.ROOT / "docs" / "parallel.md").read_text()
    assert "".join(DRAWN.splitlines(keepends=True)[:4]) in page
    for name, formula in FORMULAS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert formula.text in row
        assert formula.known_for == "all times" or f", for {formula.known_for} |" in row
