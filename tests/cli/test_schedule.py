"""`shardlab schedule`: the drawing, the table, the picture, and refusals in a line."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import browser
import commands
from shardlab.strategies.schedules import SCHEDULES

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


def as_json(tmp_path: Path, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(tmp_path, *args, "--json"))
    return found


def ranks_of(text: str) -> list[str]:
    return [line.partition(" ")[2].split()[-1] for line in text.splitlines() if line[:5] == "rank "]


def test_a_schedule_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    text = said(tmp_path, "1f1b", "--stages", "4", "--microbatches", "8")
    assert DRAWN in text
    for words in (
        "33 ms: each rank works 24 ms and is idle 9 ms",
        "bubble   37.5% of the work",
        "= 9 ms, a bubble of",
        "at most 4 activations; by rank 4 3 2 1",
        "48 messages; by rank 8 16 16 8",
    ):
        assert words in text
    assert "\x1b" not in text  # a pipe gets letters alone


def test_a_terminal_gets_colours(tmp_path: Path) -> None:
    done = commands.here("schedule", "zbv", cwd=tmp_path, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in done.stdout


@pytest.mark.parametrize("name", [*SCHEDULES, "all"])
@pytest.mark.parametrize("numbers", [(4, 8), (1, 1), (12, 40)])
@pytest.mark.parametrize("width", [80, 60])
def test_lines_fit(name: str, numbers: tuple[int, int], width: int, tmp_path: Path) -> None:
    stages, micro = map(str, numbers)
    asked = [name, "--stages", stages, "--microbatches", micro, "--send-ms", "0.3"]
    text = said(tmp_path, *asked, width=width)
    # Headings of the table never fold: below 75 columns they are the terminal's to wrap.
    if name != "all" or width == 80:
        assert [line for line in text.splitlines() if cell_len(line.rstrip()) > width] == []
    if name != "all":
        lengths = {len(line) for line in ranks_of(text)}
        assert len(lengths) == 1
        assert len(ranks_of(text)) == numbers[0]


def test_too_wide_is_scaled_and_says_so(tmp_path: Path) -> None:
    """Of a rank that works without a pause, no character is idle."""
    text = said(tmp_path, "gpipe", "--stages", "2", "--microbatches", "500")
    assert "a character is 20.6 ms, and shows what took most of it" in text
    first, second = ranks_of(text)
    assert set(first[1:]) == {"F", "B"}
    assert len(first) == len(second) == 73
    assert "number:" not in text


def test_a_second_stage_has_small_letters(tmp_path: Path) -> None:
    text = said(tmp_path, "zbv", "--stages", "2", "--microbatches", "3", width=120)
    assert ranks_of(text)[0].startswith("F0--F1--F2--f0--i0--w0--")
    assert "small letters: a rank's second stage" in text
    assert "every second stage" in said(tmp_path, "interleaved", "--chunks", "3")


def test_a_comparison(tmp_path: Path) -> None:
    text = said(tmp_path, "all")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["1f1b"][1:] == ["1", "33.0", "37.5%", "37.5%", "4", "4", "48"]
    assert rows["interleaved"][1:] == ["2", "28.5", "18.8%", "18.8%", "11", "5.5", "112"]
    assert rows["zbv"][3] == "6.2%"
    some = said(tmp_path, "zbv,gpipe", "zbv", "--send-ms", "1")
    assert [line.split()[0] for line in some.splitlines() if line[:3] in ("zbv", "gpi")] == [
        "zbv",
        "gpipe",
    ]
    assert "no formula is known" in some


def test_chunks_go_to_those_that_can_have_them(tmp_path: Path) -> None:
    rows = as_json(tmp_path, "all", "--chunks", "3")["schedules"]
    assert {row["name"]: row["chunks"] for row in rows} == {
        "gpipe": 1, "1f1b": 1, "interleaved": 3, "zero_bubble": 1, "zbv": 2,
    }  # fmt: skip


def test_json_says_all(tmp_path: Path) -> None:
    found = as_json(tmp_path, "zero_bubble", "--stages", "2", "--microbatches", "2")
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
        ("gpipe --stages 0", "gpipe needs at least 1 rank, not 0"),
        ("zbv --microbatches -3", "zbv needs at least 1 micro-batch, not -3"),
        ("1f1b --chunks 2", "1f1b has 1 stage per rank, not 2; interleaved can have that"),
        ("gpipe zbv --chunks 3", "gpipe has 1 stage per rank, not 3; interleaved can have that"),
        ("all --chunks 0", "gpipe has 1 stage per rank, not 0"),
        ("interleaved --chunks 1", "with 1 it is 1f1b"),
        ("gpipe --send-ms -1", "--send-ms -1: a time is 0 to 1,000,000 ms"),
        ("gpipe --forward-ms nan", "--forward-ms nan: a time is 0 to 1,000,000 ms"),
        ("gpipe --backward-ms inf", "--backward-ms inf: a time is 0 to 1,000,000 ms"),
        ("gpipe --forward-ms 0 --backward-ms 0", "one of them takes some time"),
        ("zbv --weight-ms 3", "so at most --backward-ms 2"),
        ("1f1b --weight-ms 1", "--weight-ms 1: 1f1b does not split the backward, as zero_bubble"),
        (
            "gpipe --microbatches 100000",
            "too much to draw; at most 12,500 of them",
        ),
        (
            "gpipe --stages 60000",
            "gpipe with 60,000 stages and 8 micro-batches is too much to draw",
        ),
        ("ALL", "unknown schedule 'ALL'; did you mean 'all'?"),
        ("gpipe,,", "unknown schedule ''; known: gpipe, 1f1b, interleaved, zero_bubble, zbv, all"),
        ("gpipe --svg no/such/x.svg", "--svg no/such/x.svg: cannot be written: No such file"),
        ("gpipe --svg .", "--svg .: this is not a plain file; name one"),
    ],
)
def test_refusals(args: str, message: str, tmp_path: Path) -> None:
    done = commands.here("schedule", *args.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_picture_does_not_take_the_place_of_a_pipe(tmp_path: Path) -> None:
    """Files are renamed into place: done to a device, the device would be gone."""
    os.mkfifo(tmp_path / "pipe")
    done = commands.here("schedule", "gpipe", "--svg", "pipe", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --svg pipe: this is not a plain file; name one")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_odd_times_are_drawn(tmp_path: Path) -> None:
    for times in ("0 2", "1 0", "0.000000001 1000000", "1e-300 0", "0.1 0.3"):
        forward, backward = times.split()
        asked = ("--forward-ms", forward, "--backward-ms", backward)
        for name in ("zbv", "1f1b", "all"):
            text = said(tmp_path, name, *asked)
            assert "nan" not in text
            assert all(cell_len(line.rstrip()) <= 80 for line in text.splitlines()), text


def test_the_help_names_every_schedule(tmp_path: Path) -> None:
    text = " ".join(commands.here("schedule", "--help", cwd=tmp_path).stdout.split())
    assert all(name in text for name in SCHEDULES)


def test_every_action_is_in_the_picture(tmp_path: Path) -> None:
    text = said(tmp_path, "all", "--svg", "é picture.svg")
    assert text.endswith("  é picture.svg\n")
    picture = ET.parse(tmp_path / "é picture.svg").getroot()
    titles = [found.text or "" for found in picture.iter("{http://www.w3.org/2000/svg}title")]
    actions = [
        action
        for row in as_json(tmp_path, "all")["schedules"]
        for actions in row["ranks"]
        for action in actions
    ]
    assert len(titles) == len(actions)
    assert "backward, micro-batch 7, stage 0: 31.0 to 33.0 ms" in titles
    right = [
        float(box.get("x", "")) + float(box.get("width", ""))
        for box in picture.iter("{http://www.w3.org/2000/svg}rect")
        if "box" in (box.get("class") or "")
    ]
    assert max(right) == pytest.approx(980, abs=0.02)


@pytest.mark.long
def test_the_picture_in_a_browser(tmp_path: Path) -> None:
    """It opens without a problem, asks for nothing, and has other colours in the dark."""
    program, why = browser.find()
    if program is None:
        pytest.skip(why)
    said(tmp_path, "zbv", "--svg", "x.svg")
    opened = browser.Browser(program, tmp_path / "profile")
    seen = []
    try:
        for dark in (False, True):
            with opened.page(tmp_path / "x.svg", dark=dark) as page:
                seen.append(page.run("getComputedStyle(document.querySelector('.F')).fill"))
                assert page.run("document.querySelectorAll('.box').length") == 4 * 8 * 2 * 3
                assert page.problems == []
    finally:
        opened.close()
    assert len(set(seen)) == 2


@pytest.mark.parametrize(
    "line",
    [c for c in commands.bash_lines("docs/parallel.md") if c.startswith("shardlab schedule ")],
)
def test_the_page_runs_as_printed(line: str, tmp_path: Path) -> None:
    text = said(tmp_path, *line.split()[2:])
    page = (commands.ROOT / "docs" / "parallel.md").read_text()
    if "1f1b" in line:
        assert "".join(DRAWN.splitlines(keepends=True)[:4]) in page
    assert text


def test_the_page_has_the_formulas_of_the_code() -> None:
    page = (commands.ROOT / "docs" / "parallel.md").read_text()
    for name, kind in SCHEDULES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert kind.idle in row
        assert kind.known_for == "all times" or f", for {kind.known_for} |" in row
