"""What every page is made with: our templates, and the styles and scripts beside them. And CSV."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup


@functools.cache  # a template takes longer to compile than to fill
def templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("shardlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(name: str) -> Markup:
    """A file of ours beside the template. Not from a trace, so not escaped."""
    text = resources.files("shardlab.report").joinpath("templates", name).read_text("utf-8")
    return Markup(text)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
