"""Ranks shared by all tests: started once per world size, replaced when a test took them down."""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import browser
from shardlab.config import LaunchConfig
from shardlab.launch.ranks import Ranks

# Commands that tests start must not inherit what a launcher around pytest may have set. A rank that
# imports this file, because a test's function is sent to it, keeps what it was given.
if multiprocessing.parent_process() is None:
    launched = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    for name in list(os.environ):
        if name in launched or name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_")):
            del os.environ[name]
    # A shell's background job ignores Ctrl-C, and so would every command that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from hypothesis import HealthCheck, settings

    # Other tests run at the same time: how long an example takes says nothing about the code.
    settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared")

torch.set_num_threads(1)

GetRanks = Callable[[int], Ranks]


def long_unless(is_quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of ``parametrize``, the long ones marked: `make check` runs the quick ones alone."""
    return _marked(pytest.mark.long, is_quick, cases)


def deep_unless(is_fast: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of ``parametrize``: `make test` runs the fast ones, `make test-deep` the others."""
    return _marked(pytest.mark.deep, is_fast, cases)


def _marked(
    mark: pytest.MarkDecorator, is_free: Callable[..., bool], cases: Iterable[Any]
) -> list[Any]:
    """``parametrize`` takes marks beside marks: cases of one of these may go through the other."""
    marked = []
    for case in cases:
        values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
        values = values if type(values) is tuple else (values,)  # a named one is one value
        extra = () if is_free(*values) else (mark,)
        marked.append(pytest.param(*values, marks=[*marks, *extra]))
    return marked


# A file is run by one worker: those that take longest come first, so that none waits for the last.
# `--record-durations` writes the seconds of each file to this one.
DURATIONS = Path(__file__).with_name("durations.json")
seconds_of: dict[str, float] = collections.defaultdict(float)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quarter = config.getoption("quarter")
    if quarter is not None:
        chosen = [zlib.crc32(item.nodeid.encode()) % 4 == quarter for item in items]
        left_out = [item for item, is_in in zip(items, chosen, strict=True) if not is_in]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, is_in in zip(items, chosen, strict=True) if is_in]
    if hasattr(config, "workerinput"):
        recorded = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: -recorded.get(_file_of(item.nodeid), 0.0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds_of[_file_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_spread = session.config.getoption("numprocesses", None)  # in the process that has workers
    if session.config.getoption("record_durations") and is_spread:
        measured = {name: round(seconds, 1) for name, seconds in seconds_of.items() if seconds >= 1}
        known = json.loads(DURATIONS.read_text()) | measured
        longest = dict(sorted(known.items(), key=lambda item: -item[1]))
        DURATIONS.write_text(json.dumps(longest, indent=1) + "\n")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, choices=range(4), help="a quarter of the tests chosen")
    parser.addoption(
        "--record-durations", action="store_true", help="write the seconds of each file"
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="every case of the zoo and of the conformance suite, not a part",
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[GetRanks]:
    """``ranks(2)`` is a world of two Gloo ranks on the CPU."""
    worlds: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = Ranks(LaunchConfig(device="cpu", timeout_s=60), size)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    """A browser without a network, for the pages that we write; skipped where there is none."""
    program, reason = browser.find()
    if program is None:
        pytest.skip(f"no browser: {reason}")
    opened = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
