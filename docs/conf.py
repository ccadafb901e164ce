"""The site: these pages and the book, built by Sphinx from the Markdown that is here.

    make site

The Markdown is also meant to be read as it is, so it has no directives of Sphinx's. What they
would say is said here: the order of the pages, and where links to the source lead.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "shardlab"
author = "the shardlab authors"
copyright = "the shardlab authors, MIT licence"
extensions = ["myst_parser"]
exclude_patterns = ["_static"]
html_theme = "furo"
html_title = "shardlab"
html_static_path = ["_static"]
html_css_files = ["shardlab.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}
highlight_language = "text"
pygments_style = "default"
pygments_dark_style = "github-dark"
myst_heading_anchors = 4
# Links out of docs/ are made by ``link_to_sources``; the scheme keeps MyST from looking for them.
myst_url_schemes = {"http": None, "https": None, "source": "{{path}}"}
nitpicky = True

PARTS = {
    "The ladder": "book/0*",
    "Beyond the ladder": "book/[12]*",
}
FIRST = ["learn", "tutorial", "teaching"]  # of the other pages, if they are there
CLUSTERS = [
    "clusters",
    *(f"clusters/{name}" for name in ("torchrun", "slurm", "mpi", "ray", "kubernetes")),
]
DECISIONS = "decisions/*"


# ------------------------------------------------------------------ the order of the pages


def pages(pattern: str) -> list[str]:
    return sorted(p.relative_to(DOCS).as_posix()[:-3] for p in DOCS.glob(f"{pattern}.md"))


def parts() -> dict[str, list[str]]:
    """Every page of docs/, by the part of the site that it belongs to."""
    named = {"The book": ["book/index"]} | {title: pages(glob) for title, glob in PARTS.items()}
    rest = [page for page in pages("*") if page != "index"]
    learning = [page for page in FIRST if page in rest]
    return {
        **named,
        "Learning and teaching": learning,
        "Reference": [page for page in rest if page not in (*learning, *CLUSTERS)],
        "Clusters": CLUSTERS,
        "Decisions": pages(DECISIONS),
    }


def toctree(caption: str, names: list[str]) -> str:
    lines = "\n".join(f"/{name}" for name in names)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


# ------------------------------------------------------------------ links to the source

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
linked: set[str] = set()  # files and folders of the project that some page links to


def page_of(path: str) -> str:
    """Where a file of the project is shown."""
    return f"source/{path.rstrip('/')}"


def prepare(_app: Any, docname: str, content: list[str]) -> None:
    """Markdown as it is read on its own, made ready for Sphinx."""
    folder = posixpath.dirname(docname)
    here = DOCS / folder

    def lead(match: re.Match[str]) -> str:
        target = (here / match[1]).resolve()
        is_page = target.is_relative_to(DOCS) and target.suffix in (".md", ".svg", ".png")
        is_picture = target.suffix in (".svg", ".png")
        if is_page or is_picture or not target.exists() or not target.is_relative_to(ROOT):
            return match[0]  # Sphinx finds it, or says that it is not there
        path = target.relative_to(ROOT).as_posix()
        if target.is_relative_to(DOCS) and target.is_dir():
            return match[0]
        linked.add(path)
        return f"](source:{posixpath.relpath(page_of(path), folder or '.')}.html)"

    content[0] = LINK.sub(lead, content[0])
    if docname == "index":
        content[0] += "".join(toctree(c, names) for c, names in parts().items() if names)


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that is linked to, and for each folder a list of its files."""
    from markupsafe import escape

    todo, done = sorted(linked), set()
    while todo:
        path = todo.pop(0)
        if path in done:
            continue
        done.add(path)
        target = ROOT / path
        title = f"<h1>{escape(path)}</h1>"
        if target.is_dir():
            files = [f for f in sorted(target.iterdir()) if f.is_file() and f.name[0] != "."]
            todo += [f.relative_to(ROOT).as_posix() for f in files]
            name = target.name
            items = [f'<li><a href="{name}/{f.name}.html">{escape(f.name)}</a></li>' for f in files]
            body = f"{title}<ul>{''.join(items)}</ul>"
        elif target.suffix == ".md":  # it has a heading of its own
            body = rendered(target, todo, Path(app.outdir))
        else:
            body = title + highlighted(target.name, text_of(target))
        yield page_of(path), {"title": path, "body": body}, "page.html"


def rendered(path: Path, todo: list[str], site: Path) -> str:
    """Markdown from outside of docs/, such as the README, as HTML. The files of the project that it
    links to are added to ``todo``, and its pictures are copied into the site."""
    from markdown_it import MarkdownIt
    from markupsafe import escape
    from mdit_py_plugins.anchors import anchors_plugin

    page = page_of(path.relative_to(ROOT).as_posix())

    def lead(match: re.Match[str]) -> str:
        target, anchor = (path.parent / match[1]).resolve(), match[2] or ""
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]  # the test of links will name it
        name = target.relative_to(ROOT).as_posix()
        if target.suffix in (".svg", ".png"):
            there = f"source/{name}"
            (site / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, site / there)
        elif target.is_relative_to(DOCS) and target.suffix == ".md":
            there = f"{target.relative_to(DOCS).as_posix()[:-3]}.html"
        else:
            todo.append(name)
            there = f"{page_of(name)}.html"
        return f"]({posixpath.relpath(there, posixpath.dirname(page))}{anchor})"

    def fence(_self: Any, tokens: Any, i: int, *_more: Any) -> str:
        language = tokens[i].info.strip() or "text"
        return f'<div class="highlight-{language}">{highlighted(language, tokens[i].content)}</div>'

    def code(_self: Any, tokens: Any, i: int, *_more: Any) -> str:
        return f'<code class="docutils literal notranslate">{escape(tokens[i].content)}</code>'

    text = LINK.sub(lead, text_of(path))
    external.update(re.findall(r"\]\((https?:[^)\s]+)\)", text))
    reader = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=4)
    reader.add_render_rule("fence", fence)
    reader.add_render_rule("code_inline", code)
    # The classes by which the theme knows code and tables.
    opened = '<div class="table-wrapper docutils container"><table class="docutils">'
    html: str = reader.render(text)
    return html.replace("<table>", opened).replace("</table>", "</table></div>")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def highlighted(name: str, text: str) -> str:
    """Source text in colours. ``name`` is that of a file or of a language."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_for_filename(name) if "." in name else get_lexer_by_name(name)
    except ClassNotFound:
        lexer = TextLexer()
    html: str = highlight(text, lexer, HtmlFormatter(cssclass="highlight", wrapcode=True))
    return html


# ------------------------------------------------------------------ pictures

PICTURE = re.compile(r'<img [^>]*src="([^"]+\.(?:svg|png))"[^>]*>')


def link_pictures(_app: Any, _page: str, _template: str, context: dict[str, Any], *_: Any) -> None:
    """A picture is shown as wide as the page, and opens alone, for a reader with a small screen."""
    if "body" in context:
        context["body"] = PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', context["body"])


# ------------------------------------------------------------------ links to elsewhere

external: set[str] = set()


def note_links(_app: Any, doctree: Any) -> None:
    from docutils import nodes

    targets = (node.get("refuri", "") for node in doctree.findall(nodes.reference))
    external.update(target for target in targets if target.startswith(("http:", "https:")))


def list_links(app: Any, error: Exception | None) -> None:
    """Links that leave the site are not fetched, but listed, for whoever wants to try them."""
    if error is None:
        text = "".join(f"{link}\n" for link in sorted(external))
        (Path(app.outdir) / "external-links.txt").write_text(text, encoding="utf-8")


def read_all(_app: Any, env: Any, *_changes: Any) -> list[str]:
    """Every page in every build: what they link to is not kept between builds."""
    return sorted(env.found_docs)


def setup(app: Any) -> None:
    app.connect("env-get-outdated", read_all)
    app.connect("source-read", prepare)
    app.connect("doctree-read", note_links)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", link_pictures)
    app.connect("build-finished", list_links)
