"""The site builds without a warning, its links lead somewhere, and what the book shows is so."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import test_docs

import browser
import commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BOOK = DOCS / "book"
sys.path.insert(0, str(ROOT / "benchmarks"))

import book  # noqa: E402
import book_blocks as blocks  # noqa: E402
import book_timeline as timeline  # noqa: E402

CHAPTERS = blocks.chapters()
LADDER = [path for path in CHAPTERS if path.name[0] == "0"]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


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


def test_a_code_block_is_the_source() -> None:
    place = "src/shardlab/strategies/overlap.py:InOrder.flush"
    filled = blocks.fill(f"<!-- code: {place} -->\n<!-- end -->", {})
    (block,) = FENCE.findall(filled)
    assert block[0] == "python"
    source = text_of(ROOT / place.partition(":")[0])
    assert "\n".join(f"    {line}" for line in block[1].splitlines()) in source


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_every_python_block_is_the_sources_or_is_run(chapter: Path) -> None:
    """What is not marked as the source's is run below."""
    unmarked = FENCE.findall(blocks.BLOCK.sub("", text_of(chapter)))
    languages = {language for language, _ in unmarked}
    assert languages <= {"bash", "python", "text"}, "directives belong into docs/conf.py"


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
    assert len(set(named)) >= 16


@pytest.mark.long
def test_messages_of_a_rank_that_is_alone() -> None:
    """Chapter 20 quotes what PyTorch says when the other rank does not come."""
    chapter = " ".join(text_of(BOOK / "20-process-groups.md").split())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    quoted = {
        "0": "waiting for clients. 1/2 clients joined",
        "1": "while trying to connect to (127.0.0.1, ",
    }
    for rank, words in quoted.items():
        assert words in chapter
        done = commands.run(
            sys.executable, "examples/process_group.py", cwd=ROOT, **env, RANK=rank, TIMEOUT_S="1"
        )
        assert done.returncode == 1
        assert words in done.stderr


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


def test_spans_merge_only_within_a_kind() -> None:
    spans = [
        [0.0, 1.0, "forward"],
        [1.005, 2.0, "forward"],
        [2.0, 3.0, "backward"],
        [4, 5, "forward"],
    ]
    assert timeline.merged(spans, 0.01) == [
        [0.0, 2.0, "forward"], [2.0, 3.0, "backward"], [4, 5, "forward"],
    ]  # fmt: skip


def test_ticks_are_round() -> None:
    assert timeline.ticks(100) == [0, 20, 40, 60, 80, 100]
    assert timeline.ticks(7.5)[-1] <= 7.5


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
def test_every_page_is_in_the_site(site: Path) -> None:
    for path in DOCS.rglob("*.md"):
        assert (site / path.relative_to(DOCS)).with_suffix(".html").exists(), path


@pytest.mark.long
def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken, external = [], set()
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                external.add(link)
                continue
            assert not parts.scheme, f"{path}: {link}"
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
    # Not fetched: listed, for whoever wants to look.
    listed = set(text_of(site / "external-links.txt").split())
    assert {link for link in external if "pradyunsg" not in link} <= listed


@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for source in page.loaded:
            assert not urlsplit(source).netloc, f"{path}: {source}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text_of(sheet)), sheet


@pytest.mark.long
def test_source_pages_show_the_source(site: Path) -> None:
    page = text_of(site / "source" / "src" / "shardlab" / "comm.py.html")
    assert "wire_bytes" in page
    assert 'class="highlight"' in page


@pytest.mark.long
def test_the_readme_is_rendered(site: Path, pages: dict[Path, Page]) -> None:
    path = site / "source" / "README.md.html"
    page = text_of(path)
    assert 'id="two-commands"' in page
    assert "<td><code" in page  # the table of strategies
    assert "](" not in re.sub(r"<[^>]*>", "", page)
    pictures = [p for p in pages[path].loaded if p.endswith(".png")]
    assert len(pictures) == 2
    assert all((path.parent / picture).exists() for picture in pictures)


@pytest.mark.long
def test_the_home_page_is_the_way_in(site: Path, pages: dict[Path, Page]) -> None:
    home = pages[site / "index.html"]
    assert bash_lines(DOCS / "index.md") == test_docs.README[:2]
    assert any(picture.endswith("report.png") for picture in home.loaded)
    assert {"book/index.html", "tutorial.html", "source/README.md.html"} <= set(home.links)


def test_make_site_is_what_is_tested() -> None:
    makefile = text_of(ROOT / "Makefile")
    (line,) = re.findall(r"^\t.*sphinx.*$", makefile, flags=re.M)
    assert "-W" in line
    assert line.split()[-2:] == ["docs", "site"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program, why = browser.find()
    if program is None:
        pytest.skip(why)
    opened = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


# What sticks out to the right. Code and tables may be wider: they are scrolled by themselves.
STICKS_OUT = """[...document.querySelectorAll("article *")]
  .filter(e => !e.closest("pre, .table-wrapper"))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.tagName + " " + (e.src || e.textContent.slice(0, 60)))"""
BROKEN = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"


def looked_at() -> list[str]:
    """Every page that a reader comes to; not those of the source, which are all alike."""
    return [p.relative_to(DOCS).as_posix()[:-3] for p in DOCS.rglob("*.md")] + ["source/README.md"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pages_in_a_browser(site: Path, chromium: browser.Browser) -> None:
    """On a phone and on a desk nothing sticks out, and pictures are there, whole. Nothing is asked
    of a network."""
    for name in looked_at():
        with chromium.page(site / f"{name}.html", width=420) as page:
            assert page.problems == [], name
            assert page.run(BROKEN) == [], name
            for width in (420, 1200):
                page.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                          deviceScaleFactor=1, mobile=False)  # fmt: skip
                page.settle()
                assert page.run("document.documentElement.scrollWidth") <= width, (name, width)
                assert page.run(STICKS_OUT) == [], (name, width)


@pytest.mark.long
def test_what_sticks_out_is_noticed(tmp_path: Path, chromium: browser.Browser) -> None:
    wide = '<p style="width: 600px">far</p><pre style="overflow: auto">' + "code " * 90 + "</pre>"
    (tmp_path / "page.html").write_text(f"<article style='overflow: auto'>{wide}</article>")
    with chromium.page(tmp_path / "page.html", width=420) as page:
        assert page.run(STICKS_OUT) == ["P far"]


PICTURES = sorted([*BOOK.glob("figures/*.svg"), *ROOT.glob("src/**/exercises/*/picture.svg")])
# The picture's own box, as drawn: it is centred in the window, in its own proportions.
CUT_OFF = """(() => {
  const view = document.documentElement.viewBox.baseVal;
  const inner = document.documentElement.getScreenCTM();
  const inside = (x, y) => x >= -1 && y >= -1 && x <= view.width + 1 && y <= view.height + 1;
  return [...document.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return !inside((box.left - inner.e) / inner.a, (box.top - inner.f) / inner.d)
      || !inside((box.right - inner.e) / inner.a, (box.bottom - inner.f) / inner.d);
  }).map(text => text.textContent);
})()"""


@pytest.mark.long
def test_no_word_of_a_picture_is_cut_off(tmp_path: Path, chromium: browser.Browser) -> None:
    for picture in PICTURES:
        with chromium.page(picture) as page:
            assert page.run(CUT_OFF) == [], picture
    long = '<text x="60" y="20">far too long</text><text x="5" y="20">in</text>'
    (tmp_path / "long.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 30">{long}</svg>'
    )
    with chromium.page(tmp_path / "long.svg") as page:
        assert page.run(CUT_OFF) == ["far too long"]


@pytest.mark.long
@pytest.mark.parametrize("is_dark", [False, True])
def test_light_and_dark(is_dark: bool, site: Path, chromium: browser.Browser) -> None:
    with chromium.page(site / "book" / "06-zero1.html", dark=is_dark) as page:
        colour = page.run("getComputedStyle(document.body).backgroundColor")
        channels = [int(n) for n in re.findall(r"\d+", colour)[:3]]
        assert (max(channels) < 80) == is_dark
        scheme = page.run("getComputedStyle(document.body).colorScheme")
        assert scheme == ("dark" if is_dark else "light")


# ------------------------------------------------------------------ what the book shows, run


def bash_lines(path: Path) -> list[str]:
    found = [block for language, block in FENCE.findall(text_of(path)) if language == "bash"]
    lines = [line for block in found for line in block.splitlines()]
    return [code for line in lines if (code := re.sub(r"(^|\s+)# .*", "", line).strip())]


LINES = list(dict.fromkeys((p.stem, line) for p in CHAPTERS for line in bash_lines(p)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the book's commands run: the project as a user has it, runs/ apart."""
    made = tmp_path_factory.mktemp("reader")
    for name in ("examples", "src"):
        (made / name).symlink_to(ROOT / name)
    return made


@pytest.mark.long
@pytest.mark.parametrize(("chapter", "line"), LINES, ids=[line for _, line in LINES])
def test_commands_run_as_printed(
    chapter: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chapter
    if line in (*test_docs.README, *test_docs.TUTORIAL):
        return  # run there
    monkeypatch.chdir(folder)
    if line.startswith("shardlab "):
        words = [*shlex.split(line)[1:], *test_docs.fewer(line)]
        done = commands.here(*words, cwd=folder, OMP_NUM_THREADS="1")
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    elif line.startswith("python benchmarks/book.py measure "):  # minutes; its results are kept
        assert set(line.split()[3:]) <= book.PARTS.keys()
        assert set(line.split()[3:]) <= book.read().keys()
    else:
        done = commands.run("bash", "-ec", line, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.long
def test_python_snippets_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commands, whose results they read."""
    monkeypatch.chdir(folder)
    if not Path("runs/bucket-trace").exists():  # this test alone was asked for
        train = "train --strategy bucket_ddp_async --size tiny --steps 8 --profile --out"
        commands.here(*train.split(), "runs/bucket-trace", cwd=folder)
    snippets = [
        code
        for path in CHAPTERS
        for language, code in FENCE.findall(blocks.BLOCK.sub("", text_of(path)))
        if language == "python"
    ]
    assert snippets
    for code in snippets:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, "snippet", "exec"), {})
        assert said.getvalue()


def docs_lines() -> list[tuple[str, str]]:
    """Commands of the pages around the book, with their chapters of reference."""
    others = [p for p in sorted(DOCS.rglob("*.md")) if p not in CHAPTERS]
    return [
        (p.name, line) for p in others for line in bash_lines(p) if line.startswith("shardlab ")
    ]


def parse(line: str) -> None:
    """Every command and option of the line exists; nothing is run."""
    for part in re.split(r" (?:\|\||&&|\||;) ", line):
        if part.startswith("shardlab "):
            parse_one(part)


def parse_one(line: str) -> None:
    import typer

    from shardlab import cli

    words = shlex.split(line.replace("...", "").partition(" > ")[0])[1:]
    context = typer.main.get_command(cli.app).make_context("shardlab", words)
    while hasattr(context.command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:  # a group that says something by itself
            return
        name, found, rest = context.command.resolve_command(context, rest)
        context = found.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("page", "line"), docs_lines(), ids=lambda value: value)
def test_commands_of_other_pages_can_be_parsed(page: str, line: str) -> None:
    """They may need data or hours, but that each command and option exists can be seen at once."""
    assert page
    parse(line)


@pytest.mark.parametrize(
    "line", ["shardlab trian", "shardlab train || shardlab train --stategy zero1"]
)
def test_what_cannot_be_parsed_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"trian|stategy"):
        parse(line)
