"""What every page is made with: our templates, styles and scripts. And CSV."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import shardlab
from shardlab import text as fmt
from shardlab.files import write_json, write_text


@functools.cache  # a template takes longer to compile than to fill
def templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("shardlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"fmt": fmt, "version": shardlab.__version__}
    return made


def render(template: str, **values: Any) -> str:
    return templates().get_template(template).render(values)


def write(
    folder: Path, result: Mapping[str, Any], text: str, names: tuple[str, str]
) -> dict[str, Path]:
    """A result as JSON, and its page, by the names of the two files. The page is made before: if it
    cannot be, nothing is written."""
    files = {"json": folder / names[0], "html": folder / names[1]}
    write_json(files["json"], result)
    write_text(files["html"], text)
    return files


def asset(name: str) -> Markup:
    """A style or script of ours. It does not come from a trace, so it is not escaped."""
    text = resources.files("shardlab.report").joinpath("templates", name).read_text("utf-8")
    return Markup(text)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
