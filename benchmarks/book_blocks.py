"""The parts of the book that nobody types: code, tables and outputs, from their sources.

A chapter names such a part in a comment, and ``fill`` puts what the source says now after it:

    <!-- code: src/shardlab/strategies/sharded/zero1.py:Zero1.launch -->
    ...
    <!-- end -->

Numbers inside a sentence stand between ``<!--=name-->`` and ``<!--/-->``. Nothing is measured here:
numbers come from ``docs/book/numbers.json`` and ``benchmarks/records``.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from book_parts import BOOK, ROOT, Missing, Numbers, gpt2_small, part, record, table
from book_tables import ladder, named_table, value_of

from shardlab import text as fmt
from shardlab.plan import claims

BLOCK = re.compile(r"<!-- (\w+): ([^\n]+?) -->\n.*?<!-- end -->", re.S)
VALUE = re.compile(r"<!--=([\w.-]+)-->.*?<!--/-->", re.S)


def chapters() -> list[Path]:
    return sorted(BOOK.glob("*.md"))


def pages() -> list[Path]:
    """Everything that has parts from sources: the chapters, and pages that show code."""
    docs = ROOT / "docs"
    clusters = sorted(docs.glob("clusters/*.md"))
    return [*chapters(), ROOT / "README.md", docs / "your-strategy.md", *clusters]


def fill(text: str, numbers: Numbers) -> str:
    """The chapter with every named part as its source has it now."""

    def block(match: re.Match[str]) -> str:
        kind, argument = match[1], match[2]
        if kind not in KINDS:
            raise Missing(
                f"no such part: <!-- {kind}: {argument} -->; there are {', '.join(KINDS)}"
            )
        body = KINDS[kind](argument, numbers)
        return f"<!-- {kind}: {argument} -->\n\n{body}\n\n<!-- end -->"

    def value(match: re.Match[str]) -> str:
        return f"<!--={match[1]}-->{value_of(match[1], numbers)}<!--/-->"

    return VALUE.sub(value, BLOCK.sub(block, text))


# ------------------------------------------------------------------ from the source


def find(place: str) -> tuple[ast.AST, str]:
    """A class or function by ``path/to/file.py:Class.method``, and the text of its file."""
    path, _, qualified = place.partition(":")
    if not (ROOT / path).is_file():
        raise Missing(f"{place}: there is no file {path}")
    text = (ROOT / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in qualified.split("."):
        children: list[ast.AST] = getattr(node, "body", [])
        found = [child for child in children if getattr(child, "name", None) == name]
        if not found:
            raise Missing(f"{place}: there is no {name} in {path}")
        node = found[0]
    return node, text


LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml"}


def file(path: str, _numbers: Numbers) -> str:
    """A whole file. A shell script is no ```bash: those blocks hold commands to type."""
    if not (ROOT / path).is_file():
        raise Missing(f"there is no file {path}")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    return f"```{LANGUAGES[Path(path).suffix]}\n{text}\n```"


def code(place: str, _numbers: Numbers) -> str:
    """One or several definitions, as they stand in the file."""
    path, _, names = place.partition(":")
    parts = []
    for name in names.split(" + "):
        node, text = find(f"{path}:{name}")
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # type: ignore[attr-defined]
        lines = text.splitlines()[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
        parts.append(textwrap.dedent("\n".join(lines)))
    return "```python\n" + "\n\n".join(parts) + "\n```"


def schedule(place: str, _numbers: Numbers) -> str:
    """The table of a strategy's docstring: what is sent when."""
    node, _ = find(place)
    lines = (ast.get_docstring(node) or "").splitlines()  # type: ignore[arg-type]
    begin = next((i for i, line in enumerate(lines) if line.startswith(("Schedule", "(*"))), None)
    if begin is None:
        raise Missing(f"{place}: its docstring tells no schedule")
    inside = [i for i in range(begin, len(lines)) if lines[i].startswith("    ")]
    last = next((i for i in range(inside[0], len(lines)) if lines[i] and lines[i][0] != " "), None)
    body = textwrap.dedent("\n".join(lines[inside[0] : last])).strip("\n")
    return f"```text\n{body}\n```"


# ------------------------------------------------------------------ from the formulas

RANKS = (2, 8, 64)


def cost(names: str, _numbers: Numbers) -> str:
    """What each strategy claims to send and to hold, for GPT-2 small."""
    rows = []
    for name in names.split(", "):
        for ranks in RANKS if name != "single" else (1,):
            one, four = (claims.CLAIMS[name].of(gpt2_small(ranks, k)) for k in (1, 4))
            held = [one[part] for part in ("params", "gradients", "optimizer")]
            rows.append(
                [
                    f"`{name}`",
                    str(ranks),
                    *(fmt.size(sum(claim["moved"].values())) for claim in (one, four)),
                    *map(fmt.size, held),
                    fmt.size(sum(held)),
                ]
            )
    header = ["", "ranks", "sends", "with 4 micro-batches", "holds of parameters", "gradients",
              "Adam's state", "together"]  # fmt: skip
    return table(header, rows)


# ------------------------------------------------------------------ from what was measured


def proved(name: str, _numbers: Numbers) -> str:
    """What ``prove`` said of a strategy, in its own words."""
    found = [v for v in record("prove-w2-w4")["verdicts"] if v["strategy"] == name]
    rows = [
        [check, *(v["checks"][check]["message"] for v in found)] for check in found[0]["checks"]
    ]
    header = ["", *(f"on {fmt.count(v['world'], 'rank')}" for v in found)]
    lines = table(header, rows).splitlines()
    lines[1] = "|" + "---|" * len(header)  # sentences stand to the left
    return "\n".join(lines)


def planted(names: str, numbers: Numbers) -> str:
    """Planted bugs: what each does, and what ``prove`` says of it."""
    found = part(numbers, "planted")
    lines = []
    for name in names.split(", "):
        node, _ = find(f"tests/bugs/saboteurs.py:{name}")
        what = " ".join((ast.get_docstring(node) or "").split())  # type: ignore[arg-type]
        lines.append(f"- `{name}`: {what}")
        lines += [f"  - *{check}*: {message}" for check, message in found[name].items()]
    return "\n".join(lines)


def trace(name: str, numbers: Numbers) -> str:
    """The picture of one step, and where its time went."""
    found = part(numbers, "traces")[name]
    shares = found["shares"]
    said = [
        f"{shares['compute']:.0%} of the ranks' time computes",
        f"{shares['exposed_comm']:.0%} is exposed communication",
        f"{shares['wait']:.0%} is waiting for the other rank",
        f"{shares['idle'] + shares['idle_host'] + shares['memory']:.0%} is idle",
    ]
    text = ", ".join(said)
    if found["hidden"] is not None:
        text += f". Of the communication {found['hidden']:.0%} was hidden behind computation"
    return f"![One step of {name}, drawn from its trace](figures/trace-{name}.svg)\n\n{text}."


def output(key: str, numbers: Numbers) -> str:
    """A command, and what it printed."""
    found = part(numbers, "outputs")[key]
    return f"```console\n$ {found['command']}\n{found['text'].rstrip()}\n```"


KINDS: dict[str, Callable[[str, Numbers], str]] = {
    "code": code,
    "file": file,
    "schedule": schedule,
    "cost": cost,
    "proved": proved,
    "planted": planted,
    "trace": trace,
    "ladder": ladder,
    "output": output,
    "table": named_table,
}
