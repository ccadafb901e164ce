"""The page of a comparison, in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import browser
from conftest import GetRanks
from results import cell, explained, proof, result_of, without_numbers
from shardlab import config as configs
from shardlab import trace
from shardlab.measure import choice, readings
from shardlab.measure import compare as comparison
from shardlab.report import compare

EVIL = "<img src=x onerror=alert(1)>"
CAUSES = dict.fromkeys(readings.CAUSES, 10 * 2**20)


@pytest.fixture(scope="module")
def page_file(ranks: GetRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers by hand, timelines from real traces."""
    folder = tmp_path_factory.mktemp("page")
    cells = [cell("single", 200), cell("simple_ddp", 150), cell("pytorch_ddp", 120)]
    profile = configs.ProfileConfig(enabled=True, wait=0, active=1)
    for one in cells:
        config = configs.load(
            None,
            {
                "strategy.name": one["strategy"],
                "launch.world": one["world"],
                "model.size": "tiny",
                "training.steps": profile.window,
            },
        )
        values = config.to_dict() | {"profile": vars(profile)}
        found = ranks(2).run(comparison.profile_cell, values, str(folder), one["label"])[0]
        one |= {"sent": found.pop("sent"), "traces": found, "proof": proof(True)}
        one["profile"] = trace.load_once(Path(found["folder"])).mean_step()
        one["peak_bytes"] = {"total": 60 * 2**20, **CAUSES}
    cells[1] |= {"proof": proof(False, EVIL)}
    cells.append(cell("pytorch_ddp", 90, world=4, label="pytorch_ddp (world=4)"))
    failed = without_numbers("zero3", "failed", EVIL)
    result = result_of(*cells, failed)
    result["answer"] = choice.answer(result)
    path = folder / "report.html"
    path.write_text(compare.html(result))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_opens_from_disk_without_a_complaint(
    chromium: browser.Browser, page_file: Path, dark: bool, tmp_path: Path
) -> None:
    assert page_file.stat().st_size < 2_000_000
    with chromium.page(page_file, dark=dark) as page:
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark
        assert page.run("document.images.length") == 0  # a reason from a file stays text
        assert page.screenshot(tmp_path / "report.png").stat().st_size > 20_000
        assert page.problems == []


def test_every_chart_is_drawn(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
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
        drawn = (
            "(() => { const c = document.getElementById('timeline'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; return new Set(d).size > 10; })()"
        )
        assert page.run(drawn)
        assert page.problems == []


def test_its_table_sorts_with_mouse_and_keys(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        first = "document.querySelector('#results tbody th').dataset.value"
        last = "document.querySelector('#results tbody tr:last-child th').dataset.value"
        assert page.run(first) == "single"
        page.click("#results thead th:nth-child(3) button")  # by step time
        assert (page.run(first), page.run(last)) == ("pytorch_ddp (world=4)", "zero3")
        page.run("document.querySelector('#results thead th:nth-child(3) button').focus()")
        page.press("Enter", text="\r")
        assert (page.run(first), page.run(last)) == ("single", "zero3")
        assert page.run("document.querySelector('#results thead th:nth-child(3)').ariaSort") == (
            "descending"
        )
        assert page.problems == []


def test_the_timeline_zooms_and_changes_the_strategy(
    chromium: browser.Browser, page_file: Path
) -> None:
    with chromium.page(page_file) as page:
        span = "timeline.dataset.to - timeline.dataset.from"
        assert page.run("which.selectedOptions[0].text") == "pytorch_ddp"  # the best with traces
        page.run("which.value = '0'; which.dispatchEvent(new Event('change'))")
        page.settle()
        whole, alone = page.run(span), page.run("timeline.height")
        page.click("[data-zoom='0.5']")
        assert page.run(span) == pytest.approx(whole / 2, rel=0.01)
        page.run("which.value = '2'; which.dispatchEvent(new Event('change'))")
        page.settle()
        assert page.run("document.querySelectorAll('canvas').length") == 1
        assert page.run("timeline.height") > alone  # two ranks
        whole = page.run(span)
        page.run("timeline.focus()")
        page.press("+")
        assert page.run(span) < whole
        assert page.problems == []


def test_it_prints(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        assert page.pdf().startswith(b"%PDF")
        assert page.problems == []


def test_a_page_of_many_cells_stays_small() -> None:
    cells = [
        cell("a", 100 + i, label=f"a{i}", profile=explained(100), traces={"folder": "gone"})
        for i in range(100)
    ]
    page = compare.html(result_of(cell("single", 200), *cells))
    assert len(page.encode()) < 2_000_000
