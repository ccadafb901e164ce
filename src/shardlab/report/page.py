"""What every page is made with: our templates, and the styles and scripts beside them."""

from __future__ import annotations

import functools
from importlib import resources

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
