"""The page of a comparison, in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import browser
import chrome_trace
from results import cell, explained, proof, result_of, without_numbers
from shardlab.measure import choice, fields
from shardlab.report import compare

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def opened(
    chromium: browser.Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[browser.Page]:
    """Three profiled strategies, one in two worlds, one that is wrong and one that failed."""
    folder = tmp_path_factory.mktemp("page")
    cells = [cell("single", 200), cell("simple_ddp", 150), cell("pytorch_ddp", 120)]
    for one in cells:
        own = folder / one["label"]
        profile = chrome_trace.a_run(own, ranks=one["world"]).mean_step()
        one |= {"traces": {"folder": str(own)}, "profile": profile, "proof": proof(True)}
        one["peak_bytes"] = {"total": 60 * 2**20, **dict.fromkeys(fields.CAUSES, 10 * 2**20)}
    cells[1] |= {"proof": proof(False, EVIL)}
    cells.append(cell("pytorch_ddp", 90, world=4, label="pytorch_ddp (world=4)"))
    result = result_of(*cells, without_numbers("zero3", "failed", EVIL))
    result["answer"] = choice.answer(result)
    (folder / "report.html").write_text(compare.html(result))
    with chromium.page(folder / "report.html") as page:
        yield page


@pytest.fixture
def page(opened: browser.Page) -> Iterator[browser.Page]:
    """The same page for all tests, without a complaint in any of them."""
    yield opened
    assert opened.problems == []


def test_every_chart_is_drawn(page: browser.Page) -> None:
    sections = page.run("[...document.querySelectorAll('h2')].map(h => h.id)")
    assert sections == [
        "numbers", "step-time", "throughput", "memory", "went", "when", "scaling", "proof",
        "loss", "method",
    ]  # fmt: skip
    for name, marks in {
        "step-time": "circle", "throughput": "rect", "memory": "rect", "went": "rect",
        "scaling": "path", "loss": "path",
    }.items():  # fmt: skip
        sizes = page.run(
            f"[...document.querySelector('[aria-labelledby={name}]').querySelectorAll('{marks}')]"
            ".map(m => m.getBoundingClientRect().width)"
        )
        assert len(sizes) >= 2, name
        assert max(sizes) > 2, name
    # Each picture says in words what it shows.
    unnamed = "[...document.querySelectorAll('svg[role=img]')].filter(s => !s.ariaLabel).length"
    assert page.run(unnamed) == 0
    assert len(page.colours("timeline")) > 10
    page.looks_well(1200)  # and a reason from a file stays text


def test_its_table_sorts_with_mouse_and_keys(page: browser.Page) -> None:
    first = "document.querySelector('#results tbody th').dataset.value"
    last = "document.querySelector('#results tbody tr:last-child th').dataset.value"
    assert page.run(first) == "single"
    page.click("#results thead th:nth-child(3) button")  # by step time
    assert (page.run(first), page.run(last)) == ("pytorch_ddp (world=4)", "zero3")
    page.run("document.querySelector('#results thead th:nth-child(3) button').focus()")
    page.press("Enter", text="\r")
    assert (page.run(first), page.run(last)) == ("single", "zero3")
    head = "document.querySelector('#results thead th:nth-child(3)').ariaSort"
    assert page.run(head) == "descending"


def test_the_timeline_changes_the_strategy_and_zooms(page: browser.Page) -> None:
    """Its keys and its mouse are tested on the page of traces."""
    span = "timeline.dataset.to - timeline.dataset.from"
    assert page.run("which.selectedOptions[0].text") == "pytorch_ddp"  # the best with traces
    heights = []
    for number in (0, 2):
        page.run(f"which.value = '{number}'; which.dispatchEvent(new Event('change'))")
        page.settle()
        heights.append(page.run("timeline.height"))
    assert page.run("document.querySelectorAll('canvas').length") == 1
    assert heights[1] > heights[0]  # two ranks
    whole = page.run(span)
    page.click("[data-zoom='0.5']")
    assert page.run(span) == pytest.approx(whole / 2, rel=0.01)


def test_a_page_of_many_cells_stays_small() -> None:
    cells = [
        cell("a", 100 + i, label=f"a{i}", profile=explained(100), traces={"folder": "gone"})
        for i in range(100)
    ]
    page = compare.html(result_of(cell("single", 200), *cells))
    assert len(page.encode()) < 2_000_000
