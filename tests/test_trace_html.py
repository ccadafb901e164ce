"""The page of a trace analysis: what it says, that it is harmless, that it works in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import browser
from shardlab.report import trace as report
from shardlab.trace import model

EVIL = "</script><img src=x onerror=alert(1)>"


@dataclass
class HandMade:
    """A TraceSet of known numbers: two ranks, three steps of 10 ms; rank 1 is 2 ms late in each."""

    steps: int = 3
    kernel: str = "aten::addmm"
    label: str = "bucket 0"
    warnings: tuple[str, ...] = ()
    ranks: int = 2
    operators: int = 20  # per step
    traces: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traces = [self._trace(rank) for rank in range(self.ranks)]

    def _trace(self, rank: int) -> Any:
        n = self.steps * self.operators
        starts = np.concatenate(
            [10_000_000 * s + 6_000_000 // self.operators * np.arange(self.operators)
             for s in range(self.steps)]
        )  # fmt: skip
        return SimpleNamespace(
            path=Path("run") / f"rank{rank}.json.gz",
            rank=rank,
            world=self.ranks,
            device="cpu",
            shardlab={"strategy": "simple_ddp", "run": "a run"},
            names=(self.kernel, "forward", "ProfilerStep#0"),
            steps=[model.Step(s, 10_000_000 * s, 10_000_000 * (s + 1)) for s in range(self.steps)],
            events=model.Events(
                name=np.zeros(n, np.int32),
                kind=np.full(n, model.CPU_OP, np.int8),
                start_ns=starts,
                dur_ns=np.full(n, 5_000_000 // self.operators),
                tid=np.zeros(n, np.int32),
                stream=np.full(n, -1, np.int32),
                device=np.full(n, -1, np.int16),
                correlation=np.full(n, -1),
            ),
        )

    def breakdown(self, per: str = "step") -> list[model.Breakdown]:
        rows = []
        for rank in range(self.ranks):
            wait = 2000.0 if rank == 0 and self.ranks > 1 else 0.0
            row = model.Breakdown(
                rank, 0, 1, 10000.0, 6000.0, 1000.0, wait, 0.0, 0.0, 3000.0 - wait, 1500.0,
                2500.0 + wait,
            )  # fmt: skip
            if per == "step":
                rows += [replace(row, step=s) for s in range(self.steps)]
            else:
                many = {
                    f.name: getattr(row, f.name) * self.steps
                    for f in row.__dataclass_fields__.values()
                    if f.name.endswith("_us")
                }
                rows.append(replace(row, step=None, steps=self.steps, **many))
        return rows

    def collectives(self) -> list[model.Collective]:
        made = []
        for s in range(self.steps):
            at = 10_000_000 * s + 6_000_000
            parts = tuple(
                model.Participant(r, at - 500_000, at + 2_000_000 * r, at + 3_000_000,
                                  2000.0 if r == 0 else 0.0)
                for r in range(self.ranks)
            )  # fmt: skip
            made.append(
                model.Collective(f"0:{s}", "ledger", "all_reduce", self.label, "0", s, "backward",
                                 1 << 20, "float32", 2, parts, 1, 2000.0, 1000.0, 2000.0, 1.0, 1.0)
            )  # fmt: skip
        return made

    def collective_summary(self, by: str = "kind") -> list[model.CollectiveSummary]:
        name = "all_reduce" if by == "kind" else self.label
        return [
            model.CollectiveSummary(name, self.steps, 3 << 20, 9000.0, 3000.0, 6000.0, 1.0, 1.0),
            model.CollectiveSummary("broadcast", 30, None, 90.0, 90.0, 0.0, None, None),
        ]

    def stragglers(self) -> list[model.Straggler]:
        if self.ranks == 1:
            return []
        return [model.Straggler(1, "backward", self.steps, 2000.0 * self.steps, 2000.0, "0:1")]

    def memory(self) -> list[model.Memory]:
        at = np.arange(0, 30_000_000, 10_000)
        held = (1 << 20) * (1 + (at // 100_000) % 7)
        return [
            model.Memory(r, "cpu", int(held.max()), 600_000, 0, "backward", 4 << 20, 7 << 20,
                         1 << 20, at, held)
            for r in range(self.ranks)
        ]  # fmt: skip

    def what_if(self) -> list[model.WhatIf]:
        return [model.WhatIf("communication were free", 7000.0, 10000.0, "nothing else changes")]

    def kernels(self, top: int = 10) -> list[model.Kernel]:  # noqa: ARG002
        return [
            model.Kernel(r, self.kernel, "compute", 60, 15000.0, 250.0, 250.0, 250.0, 0.0)
            for r in range(self.ranks)
        ]

    def lanes(self) -> list[model.Lane]:
        made = []
        for rank in range(self.ranks):
            begin = 10_000_000 * np.arange(self.steps)
            marks = tuple(f"ProfilerStep#{s}" for s in range(self.steps))
            made.append(model.Lane(rank, "steps", begin, begin + 10_000_000, marks))
            made.append(model.Lane(rank, "compute", begin, begin + 6_000_000, ()))
            made.append(model.Lane(rank, "comm", begin + 8_000_000, begin + 9_000_000,
                                   (self.label,) * self.steps))  # fmt: skip
            if rank == 0:
                names = ("waiting",) * self.steps
                made.append(model.Lane(rank, "wait", begin + 6_000_000, begin + 8_000_000, names))
        return made


def page_of(traces: Any) -> str:
    return report.html(traces)


# ------------------------------------------------------------------ what it says


def test_the_answer_comes_first_and_names_the_slow_rank() -> None:
    said = report.verdict(HandMade())  # type: ignore[arg-type]
    assert said.startswith("A step took 10.0 ms on average: 60% compute")
    assert "10% exposed communication" in said
    assert "Rank 1 is the slow one: each other rank waited 2.00 ms a step for it" in said
    assert "mostly in backward" in said
    assert "43% of the communication was hidden" in said  # 2 x 1.5 of 2.5 + 4.5


def test_one_rank_cannot_tell_waiting() -> None:
    said = report.verdict(HandMade(ranks=1))  # type: ignore[arg-type]
    assert "cannot be told" in said
    assert "slow one" not in said


def test_the_parts_of_a_bar_add_up_to_the_step() -> None:
    traces = HandMade()
    stacks = report._stacks(traces.breakdown("rank"), traces.breakdown("step"))
    assert len(stacks.rows) == 6
    for row in stacks.rows:
        assert sum(s.width for s in row.segments) == pytest.approx(100)
        x, width = row.hidden
        assert x + width == pytest.approx(60)  # inside compute, at its end
    many = HandMade(steps=100)
    stacks = report._stacks(many.breakdown("rank"), many.breakdown("step"))
    assert not stacks.per_step
    assert len(stacks.rows) == 2


def test_what_is_left_out_of_the_timeline_is_said() -> None:
    small = page_of(HandMade())
    assert "were left out" not in small
    large = HandMade(steps=50, operators=2000)  # 200,000 operators
    page = page_of(large)
    assert len(page.encode()) < 2_000_000
    left_out = re.search(r"([\d,]+) spans shorter than", page)
    assert left_out is not None
    assert int(left_out[1].replace(",", "")) >= 200_000 - report.MAX_SPANS


def test_text_from_files_is_harmless() -> None:
    page = page_of(HandMade(kernel=EVIL, label=EVIL, warnings=(EVIL,)))
    assert "<img" not in page
    data = re.search(r'id="timeline-data">(.*?)</script>', page, flags=re.S)
    assert data is not None
    assert EVIL in json.loads(data[1])["names"]
    assert page.count("</script>") == 2


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(HandMade())
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "url(" not in page.replace("url(#hatch)", "")
    assert "@import" not in page


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program, reason = browser.find()
    if program is None:
        pytest.skip(f"no browser: {reason}")
    opened = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "summary.html"
    report.write_html(path, HandMade(kernel=EVIL, label=EVIL))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_opens_from_disk_without_a_complaint(
    chromium: browser.Browser, page_file: Path, dark: bool, tmp_path: Path
) -> None:
    with chromium.page(page_file, dark=dark) as page:
        assert "where 3 steps on 2 ranks went" in page.run("document.title")
        red, green, blue = map(
            int, re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))
        )
        assert (red + green + blue < 150) == dark
        assert page.run("document.images.length") == 0  # the evil name has made none
        # Something is drawn on the canvas, in more than one colour.
        colours = page.run(
            "(() => { const c = document.getElementById('timeline'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const s = new Set(); "
            "for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i+1] << 8 | d[i+2]); "
            "return s.size; })()"
        )
        assert colours > 10
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 20_000
        assert page.problems == []


def test_a_narrow_window_does_not_scroll_sideways(
    chromium: browser.Browser, page_file: Path
) -> None:
    with chromium.page(page_file, width=400) as page:
        assert page.run("document.documentElement.scrollWidth") <= 400
        assert page.problems == []


def view(page: browser.Page) -> tuple[float, float]:
    page.settle()
    start, end = page.run("['from', 'to'].map(k => Number(timeline.dataset[k]))")
    return start, end


def test_the_timeline_zooms_moves_and_finds(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        whole = view(page)
        left, top, width, height = page.box("#timeline")
        x, y = left + width / 2, top + height / 2

        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)  # without focus: the page scrolls
        assert view(page) == whole
        left, top, width, height = page.box("#timeline")
        x, y = left + width / 2, top + height / 2
        page.click_at(x, y)
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
        zoomed = view(page)
        assert zoomed[1] - zoomed[0] < 0.9 * (whole[1] - whole[0])

        page.mouse("mousePressed", x, y, button="left", clickCount=1)
        page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
        page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
        dragged = view(page)
        assert dragged[0] > zoomed[0]
        assert dragged[1] - dragged[0] == pytest.approx(zoomed[1] - zoomed[0])

        page.press("+")
        assert view(page)[1] - view(page)[0] < dragged[1] - dragged[0]
        page.press("ArrowLeft")
        assert view(page)[0] < dragged[0] + (dragged[1] - dragged[0])
        page.press("0")
        assert view(page) == whole
        page.press(".")
        assert "rank 0" in page.run("details.textContent")

        page.press("/")
        assert page.run("document.activeElement.id") == "search"
        page.type("onerror")
        # Both ranks: 60 operators and 3 collectives each, all of that name.
        assert page.run("found.textContent").startswith("126 spans")
        page.press("Enter", windowsVirtualKeyCode=13)
        assert EVIL in page.run("details.textContent")
        assert view(page) != whole
        assert page.problems == []


def test_a_span_says_what_it_is(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        left, top, width, _ = page.box("#timeline")
        page.mouse("mouseMoved", left + 118 + (width - 126) * 0.5, top + 34)  # the middle step
        page.settle()
        assert page.run("tip.hidden") is False
        assert page.run("tip.textContent").startswith("ProfilerStep#1 · 10.0 ms")
        page.run("jump.value = '2', jump.dispatchEvent(new Event('change'))")
        start, end = view(page)
        assert start > 0.6 * 30_000_000
        assert end <= 30_000_000


def test_a_table_sorts_by_a_click_on_its_head(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        cells = (
            "[...document.querySelectorAll('#breakdown tbody tr')].map(r => r.cells[4].innerText)"
        )
        assert page.run(cells) == ["2.00", "0"]
        page.click("#breakdown thead th:nth-child(5) button")
        assert page.run(cells) == ["0", "2.00"]
        head = "document.querySelector('#breakdown thead th:nth-child(5)').ariaSort"
        assert page.run(head) == "ascending"
        page.press("Enter", windowsVirtualKeyCode=13, text="\r")  # by keyboard, the other way
        assert page.run(cells) == ["2.00", "0"]
        assert page.problems == []


def test_a_hundred_thousand_spans_stay_smooth(chromium: browser.Browser, tmp_path: Path) -> None:
    path = tmp_path / "summary.html"
    report.write_html(path, HandMade(steps=50, operators=1000))  # type: ignore[arg-type]
    with chromium.page(path) as page:
        times = page.run("Array.from({length: 15}, () => timeline.paintNow())")
        assert sorted(times)[len(times) // 2] < 100, times  # 16 on an idle machine; CI is not
        assert page.problems == []


def test_it_prints(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        assert page.pdf().startswith(b"%PDF")
