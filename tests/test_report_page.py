"""The page of a comparison, in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import browser
from shardlab.report import compare
from test_report import cell, result_of, without_numbers

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    cells = [cell("single", 200), cell("simple_ddp", 150), cell("pytorch_ddp", 120)]
    failed = without_numbers("zero3", "failed", EVIL)
    path.write_text(compare.html(result_of(*cells, failed)))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_opens_from_disk_without_a_complaint(
    chromium: browser.Browser, page_file: Path, dark: bool, tmp_path: Path
) -> None:
    with chromium.page(page_file, dark=dark) as page:
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 150) == dark
        assert page.run("document.images.length") == 0  # a reason from a file stays text
        assert page.screenshot(tmp_path / "report.png").stat().st_size > 20_000
        assert page.problems == []


def test_its_table_sorts(chromium: browser.Browser, page_file: Path) -> None:
    with chromium.page(page_file) as page:
        first = "document.querySelector('#results tbody th').dataset.value"
        assert page.run(first) == "single"
        page.click("#results thead th:nth-child(3) button")  # by step time
        assert page.run(first) == "pytorch_ddp"
        assert page.problems == []
