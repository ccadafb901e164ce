"""Ranks shared by all tests: started once per world size, replaced when a test took them down."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import browser
from shardlab.config import LaunchConfig
from shardlab.run.ranks import Ranks

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
    from hypothesis import HealthCheck, settings

    # Other tests run at the same time: how long an example takes says nothing about the code.
    settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared")

torch.set_num_threads(1)

GetRanks = Callable[[int], Ranks]


def long_unless(is_quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of ``parametrize``, the long ones marked: `make check` runs the quick ones alone."""
    every = [case if type(case) is tuple else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.long) for case in every
    ]


# A file is run by one worker: those that take longest come first, so that none waits for the last.
LONGEST = (
    "test_zoo", "test_learn", "test_people_prove", "test_docs", "test_prove", "test_judge",
    "test_resume", "test_estimate", "test_people_compare", "test_conformance", "test_options",
    "test_run_faults", "test_compare", "test_site", "test_where", "test_workloads", "test_twins",
    "test_desync", "test_pipeline", "test_planted_mesh", "test_context_parallel", "test_workers",
    "test_watchdog", "test_node_faults",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {stem: place for place, stem in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
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
