"""The site builds without a warning, its links lead somewhere, and what the book shows is so."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import browser
import commands
from commands import ROOT
from conftest import deep_unless

DOCS = ROOT / "docs"
BOOK = DOCS / "book"
sys.path.insert(0, str(ROOT / "benchmarks"))

import book  # noqa: E402
import book_blocks as blocks  # noqa: E402
import book_timeline as timeline  # noqa: E402

PAGES = ["README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHAPTERS = blocks.chapters()
LADDER = [path for path in CHAPTERS if path.name[0] == "0"]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ------------------------------------------------------------------ the pages as files


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: str | Path) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_the_tree_in_the_readme_is_the_tree() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^  ([a-z_]+(?:\.py|/)) ", text, flags=re.M))
    shown = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "src" / "shardlab").iterdir()}
    assert named
    assert named <= shown, named - shown


def test_no_path_of_this_machine_is_in_the_project() -> None:
    found = subprocess.run(
        ["git", "grep", "-lF", f"{ROOT}/"], cwd=ROOT, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (1, ""), found  # 1: in none


# ------------------------------------------------------------------ the book and its sources


def test_the_book_is_what_its_sources_say() -> None:
    """Code, tables, outputs and pictures; if not: python benchmarks/book.py write."""
    assert [path.name for path in book.differs()] == []


def test_a_changed_block_is_put_right() -> None:
    numbers = book.read()
    chapter = text_of(BOOK / "06-zero1.md")
    code = FENCE.search(chapter)
    row = re.search(r"^\| `zero1` .*$", chapter, flags=re.M)
    assert code is not None
    assert row is not None
    for old, new in ((code[2], "x = 1\n"), (row[0], "| `zero1` | 9 |")):
        broken = chapter.replace(old, new, 1)
        assert broken != chapter
        assert blocks.fill(broken, numbers) == chapter


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_no_line_begins_with_a_number_of_ours(chapter: Path) -> None:
    """A comment that begins a line ends the paragraph: the sentence would fall apart."""
    assert not re.search(r"^\s*<!--[=/]", text_of(chapter), flags=re.M)


def test_a_block_that_cannot_be_had_is_an_error() -> None:
    for marker in ("code: src/shardlab/comm.py:nothing", "table: nothing", "nothing: x"):
        with pytest.raises(blocks.Missing):
            blocks.fill(f"<!-- {marker} -->\n<!-- end -->", {})
    with pytest.raises(blocks.Missing, match="measure traces"):
        blocks.fill("<!-- trace: zero1 -->\n<!-- end -->", {})


@pytest.mark.parametrize("chapter", LADDER, ids=lambda p: p.stem)
def test_a_rungs_chapter_has_all_its_parts(chapter: Path) -> None:
    text = text_of(chapter)
    headings = re.findall(r"^## (.*)$", text, flags=re.M)
    wanted = ["The idea", "The picture", "The code", "What it costs", "What goes wrong",
              "A trace of it", "Measure it", "Do it"]  # fmt: skip
    assert [heading for heading in headings if heading in wanted] == wanted
    assert re.search(r"!\[.+\]\(.+\.svg\)", text)
    assert "<!-- cost: " in text
    assert "<!-- trace: " in text
    assert "shardlab learn start " in text


def test_the_ladder_is_complete() -> None:
    """Its rungs act as one process; workers that take steps of their own are no rungs."""
    from conformance import WORKERS
    from shardlab.naming import STRATEGIES

    text = "\n".join(text_of(path) for path in CHAPTERS)
    for name, place in STRATEGIES.items():
        if name in WORKERS:
            continue
        module = place.partition(":")[0].rpartition(".")[2]
        assert f"`{name}`" in text or f"strategies/{module}.py:" in text, name


def test_exercises_that_are_named_exist() -> None:
    from shardlab.learn import ORDER

    named = re.findall(r"learn start (\w+)", "\n".join(map(text_of, CHAPTERS)))
    assert set(named) <= set(ORDER)


# ------------------------------------------------------------------ pictures of traces

STEP = {
    "wall_ms": 10.0,
    "lanes": {"0": {"compute": [[0.0, 5.0, "forward"]], "comm": [[5.0, 10.0, "reduce"]]}},
}


def test_a_timeline_is_to_scale() -> None:
    boxes = re.findall(r'class="(\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)" height="20"',
                       timeline.draw(STEP, "a step"))  # fmt: skip
    width = timeline.WIDTH - timeline.LEFT - timeline.RIGHT
    found = {kind: (float(x), float(w)) for kind, x, w in boxes if kind != "track"}
    assert found["forward"] == pytest.approx((timeline.LEFT, width / 2), abs=0.1)
    assert found["reduce"] == pytest.approx((timeline.LEFT + width / 2, width / 2), abs=0.1)


# ------------------------------------------------------------------ the site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with warnings as errors."""
    target = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = commands.run(*build, str(DOCS), str(target), "-d", f"{target}-doctrees", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return target


class Page(HTMLParser):
    """The links, the anchors and what is loaded, of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text_of(path))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in ("img", "script", "iframe") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("rel") not in ("canonical",) and values.get("href"):
            self.loaded.append(str(values["href"]))


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.long
def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("http", "https"), f"{path}: {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                known = pages[target].ids if target in pages else set()
                if unquote(parts.fragment) not in known:
                    broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert broken == []


@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for source in page.loaded:
            assert not urlsplit(source).netloc, f"{path}: {source}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text_of(sheet)), sheet


# What sticks out to the right. Code and tables may be wider: they are scrolled by themselves.
STICKS_OUT = """[...document.querySelectorAll("article *")]
  .filter(e => !e.closest("pre, .table-wrapper"))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.tagName + " " + (e.src || e.textContent.slice(0, 60)))"""
BROKEN = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"


# Every page that a reader comes to; not those of the source, which are all alike.
LOOKED_AT = [p.relative_to(DOCS).as_posix()[:-3] for p in sorted(DOCS.rglob("*.md"))]
LOOKED_AT.append("source/README.md")
FEW = ("index", "tutorial", "where", "book/06-zero1", "source/README.md")


@pytest.mark.long
@pytest.mark.parametrize("name", deep_unless(FEW.__contains__, LOOKED_AT))
def test_a_page_in_a_browser(name: str, site: Path, chromium: browser.Browser) -> None:
    """On a phone and on a desk nothing sticks out, and pictures are there, whole. Nothing is asked
    of a network."""
    with chromium.page(site / f"{name}.html", width=420) as page:
        assert page.problems == []
        assert page.run(BROKEN) == []
        for width in (420, 1200):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                      deviceScaleFactor=1, mobile=False)  # fmt: skip
            page.settle()
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run(STICKS_OUT) == [], width


@pytest.mark.long
def test_what_sticks_out_is_noticed(tmp_path: Path, chromium: browser.Browser) -> None:
    wide = '<p style="width: 600px">far</p><pre style="overflow: auto">' + "code " * 90 + "</pre>"
    (tmp_path / "page.html").write_text(f"<article style='overflow: auto'>{wide}</article>")
    with chromium.page(tmp_path / "page.html", width=420) as page:
        assert page.run(STICKS_OUT) == ["P far"]
