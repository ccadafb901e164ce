"""A plugin of pytest for ``mutation.py``: the tests that $ORDER lists, in that order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def name_of(item: pytest.Item) -> str:
    """As a JUnit report has it."""
    path, _, rest = item.nodeid.partition("::")
    inside = rest.split("::")
    return "::".join(
        (".".join((path.removesuffix(".py").replace("/", "."), *inside[:-1])), inside[-1])
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ORDER" not in os.environ:
        return
    place = {name: i for i, name in enumerate(json.loads(Path(os.environ["ORDER"]).read_text()))}
    left_out = [item for item in items if name_of(item) not in place]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        (item for item in items if name_of(item) in place), key=lambda item: place[name_of(item)]
    )
