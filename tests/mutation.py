"""How much the tests see: small changes of the source, each against the tests of its room.

    python tests/mutation.py list                            the changes, chosen once and for all
    python tests/mutation.py run --jobs 16 --out FILE.json   what each test sees of them
    python tests/mutation.py run --rooms comm,optim --resume FILE.json --out FILE.json
    python tests/mutation.py table                           what the record says, for the docs

A change is *killed* if a test fails or hangs. First the tests of the fast tier (`make test`) run,
the cheapest first, until two of them have failed. Changes that survive them meet the deep tier's.
A test of another strategy, one that never imports the changed file, does not run. Tests that fail
without any change on this machine are left out, and named in the record.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardlab"
RECORD = ROOT / "benchmarks" / "records" / "mutation.json"
sys.path.insert(0, str(Path(__file__).parent / "support"))

import mutants  # noqa: E402
from shardlab.naming import EVERY_STRATEGY  # noqa: E402
from test_rooms import imported  # noqa: E402

CONFORMANCE = "tests/strategies/test_conformance.py"
SAMPLER = ("tests/data/test_sampler.py", "tests/data/test_loader.py")


class Room(NamedTuple):
    number: int  # of changes in the sample
    source: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "strategies": Room(90, ("strategies",), ("tests/strategies", "tests/bugs")),
    "comm": Room(
        14,
        ("comm.py", "ledger.py"),
        ("tests/test_comm.py", "tests/guard", "tests/faults", CONFORMANCE),
    ),
    "optim": Room(16, ("optim",), ("tests/optim", CONFORMANCE)),
    "checkpoint": Room(30, ("checkpoint",), ("tests/checkpoint",)),
    "proof": Room(36, ("proof",), ("tests/proof", "tests/bugs")),
    "guard": Room(26, ("guard",), ("tests/guard",)),
    "sampler": Room(8, ("data/sampler.py",), SAMPLER),
}
# The files of tests/strategies that are about some strategies only.
PIPELINES = tuple(name for name in EVERY_STRATEGY if "pipeline" in name)
TENSOR = ("tensor_parallel", "sequence_parallel")
ABOUT = {
    "pipeline": PIPELINES,
    "schedules": PIPELINES,
    "tensor_parallel": TENSOR,
    "context_parallel": ("context_parallel",),
    "ring_attention": ("context_parallel",),
    "workers": ("local_sgd", "diloco", "streaming_diloco"),
    "pytorch_mesh": ("pytorch_tensor_parallel", "pytorch_pipeline"),
    "bucket_size": ("bucket_ddp_async",),
}
FAST = "not deep and not alone and not cluster"
DEEP = "deep and not alone and not cluster"
# Imported once, before processes are forked; nothing of ours may be among them.
SLOW = ("torch._dynamo", "torch.distributed.fsdp", "torch.optim")
DEADLINE_S = 40  # of one test
START_S = 60  # of pytest and of ranks, on a busy machine
BASELINE_S = 3600  # of all tests of the rooms, without a change


class Mutant(NamedTuple):
    room: str
    path: str  # below src/shardlab
    change: mutants.Change

    @property
    def key(self) -> str:
        return self.change.key(self.path)


def sample(room: str) -> list[Mutant]:
    """The changes of a room with the smallest draws: code that stays as it is keeps its changes."""
    found = []
    for name in ROOMS[room].source:
        place = SOURCE / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            path = str(file.relative_to(SOURCE))
            text = file.read_text(encoding="utf-8")
            found += [Mutant(room, path, change) for change in mutants.changes(text)]
    found.sort(key=lambda mutant: mutant.change.draw(mutant.path))
    return found[: ROOMS[room].number]


# ------------------------------------------------------------------ running tests


class Outcome(NamedTuple):
    seconds: dict[str, float]  # of each test that ran
    failed: list[str]
    is_hung: bool


def run_tests(
    source: Path, tests: list[str], marks: str, order: list[str] | None, limit_s: float, *more: str
) -> Outcome:
    """``order``: only these tests, in this order; None: all of ``tests``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.xml"
        environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        inserted = [str(source), str(ROOT / "tests")]
        environment["PYTHONPATH"] = ":".join([*inserted, os.environ.get("PYTHONPATH", "")])
        if order is not None:
            (folder / "order.json").write_text(json.dumps(order))
            environment["ORDER"] = str(folder / "order.json")
        options = [
            "-q", "-p", "mutation_order", "-p", "no:cacheprovider", "-p", "no:benchmark",
            "-m", marks, f"--timeout={DEADLINE_S}", f"--junitxml={report}",
            f"--basetemp={folder / 'tmp'}", *more, *tests,
        ]  # fmt: skip
        pid = os.fork()
        if pid == 0:
            _be_pytest(options, environment, inserted, folder / "output")
        is_hung = not _ended(pid, limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # ranks that a test has left behind, too
        if is_hung:
            os.waitpid(pid, 0)
            return Outcome({}, [], is_hung=True)
        if not report.exists():
            output = (folder / "output").read_text()
            if order is None or "ImportError while loading conftest" not in output:
                raise RuntimeError(output[-3000:])
            return Outcome({}, ["the import of conftest.py"], is_hung=False)
        return _read(report)


def _be_pytest(
    options: list[str], environment: dict[str, str], inserted: list[str], output: Path
) -> NoReturn:
    """In a process that was forked: what is slow to import is there, and nothing of ours."""
    os.setsid()
    written = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.path[:0] = inserted
    for module in [name for name in sys.modules if name.partition(".")[0] == "shardlab"]:
        del sys.modules[module]
    try:
        code = int(pytest.main(options))
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _ended(pid: int, limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def file_of(test: str) -> str:
    """Of a test as a JUnit report names it: no test of ours is in a class."""
    return test.partition("::")[0].replace(".", "/") + ".py"


def _read(report: Path) -> Outcome:
    seconds: dict[str, float] = {}
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}"
        seconds[name] = float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
    return Outcome(seconds, failed, is_hung=False)


@functools.cache
def closure(strategy: str) -> frozenset[str]:
    """The files that a strategy imports, itself included, below src/shardlab/strategies."""
    seen: set[str] = set()
    left = [EVERY_STRATEGY[strategy].partition(":")[0]]
    while left:
        path = SOURCE.parent / (left.pop().replace(".", "/") + ".py")
        name = os.path.relpath(path, SOURCE)
        if name not in seen and path.exists() and name.startswith("strategies/"):
            seen.add(name)
            left += [
                part for module in imported(path) for part in (module, module.rpartition(".")[0])
            ]
    return frozenset(seen)


def is_about(test: str, path: str) -> bool:
    """False: the test runs only strategies that never import the file."""
    if not path.startswith("strategies/"):
        return True
    file, _, case = test.partition("::")
    named = {word for word in re.findall(r"[a-z0-9_]+", case) if word in EVERY_STRATEGY}
    named |= set(ABOUT.get(file.rpartition(".test_")[2], ()))
    return not named or any(path in closure(name) for name in named)


def present(tests: tuple[str, ...]) -> list[str]:
    return [test for test in tests if list((ROOT / test).parent.glob(Path(test).name))]


class Plan(NamedTuple):
    """What to run for a room, and how long it takes, the cheapest tests first."""

    fast: dict[str, float]
    deep: dict[str, float]


def plan_of(rooms: list[str], jobs: int, is_deep: bool) -> tuple[dict[str, Plan], dict[str, Any]]:
    """Run all tests of the rooms without a change: what passes, and how long each takes."""
    tests = sorted({test for room in rooms for test in present(ROOMS[room].tests)})
    spread = ("-n", str(jobs), "--dist", "worksteal")
    found = {}
    record: dict[str, Any] = {"left out": []}
    for tier, marks in (("fast", FAST), ("deep", DEEP)):
        begin = time.monotonic()
        if tier == "deep" and not is_deep:
            found[tier] = Outcome({}, [], False)
            continue
        found[tier] = run_tests(ROOT / "src", tests, marks, None, BASELINE_S, *spread)
        if found[tier].is_hung:
            raise RuntimeError(f"without a change the {tier} tests take over {BASELINE_S} s")
        record[f"{tier}_s"] = round(sum(found[tier].seconds.values()), 1)
        record[f"{tier}_tests"] = len(found[tier].seconds)
        record["left out"] += sorted(found[tier].failed)
        took = f"{time.monotonic() - begin:.0f} s"
        failed = f"{len(found[tier].failed)} fail without a change"
        print(f"{tier}: {len(found[tier].seconds)} tests in {took}, {failed}", flush=True)
    plans = {}
    for room in rooms:
        prefixes = tuple(
            test.removesuffix(".py").replace("/", ".") for test in present(ROOMS[room].tests)
        )
        plans[room] = Plan(
            *(
                {
                    test: found[tier].seconds[test]
                    for test in sorted(found[tier].seconds, key=found[tier].seconds.__getitem__)
                    if test.startswith(prefixes) and test not in found[tier].failed
                }
                for tier in ("fast", "deep")
            )
        )  # fmt: skip
    return plans, record


def known_plan(
    file: Path | None, rooms: list[str], jobs: int, is_deep: bool
) -> tuple[dict[str, Plan], dict[str, Any]]:
    """That, kept in a file: without changes the tests run once for several runs of this script."""
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        return {room: Plan(**plan) for room, plan in kept["plans"].items()}, kept["tests"]
    plans, tests = plan_of(rooms, jobs, is_deep)
    if file is not None:
        kept = {room: plan._asdict() for room, plan in plans.items()}
        file.write_text(json.dumps({"plans": kept, "tests": tests}))
    return plans, tests


def within(seconds: dict[str, float], path: str, most_s: float) -> list[str]:
    """The tests that the changed file concerns, the cheapest first, for so many seconds."""
    chosen, total = [], 0.0
    for test in seconds:
        if is_about(test, path) and total + seconds[test] <= most_s:
            chosen.append(test)
            total += seconds[test]
    return chosen


def try_out(mutant: Mutant, plan: Plan, end: float, most_s: float) -> dict[str, Any] | None:
    """None: it is too late to begin."""
    if time.monotonic() > end:
        return None
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / "shardlab" / mutant.path).write_text(mutant.change.source, encoding="utf-8")
        row: dict[str, Any] = {"room": mutant.room, "mutant": mutant.key}
        begin = time.monotonic()
        for tier, marks, seconds in (("fast", FAST, plan.fast), ("deep", DEEP, plan.deep)):
            order = within(seconds, mutant.path, most_s)
            if not order:
                continue
            files = sorted({file_of(test) for test in order})
            limit_s = START_S + 3 * sum(seconds[test] for test in order)
            outcome = run_tests(source, files, marks, order, limit_s, "--maxfail=2")
            if outcome.is_hung or outcome.failed:
                row["killed_in"] = tier
                row["by"] = outcome.failed or ["a hang"]
                row["test_s"] = [outcome.seconds.get(test, 0.0) for test in outcome.failed]
                break
        row["seconds"] = round(time.monotonic() - begin, 1)
        return row


# ------------------------------------------------------------------ the command line


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def score(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        fast = sum(row.get("killed_in") == "fast" for row in chosen)
        both = sum("killed_in" in row for row in chosen)
        return {"mutants": len(chosen), "killed by make test": fast, "killed by all": both}

    rooms = sorted({row["room"] for row in rows})
    return {**{room: score([r for r in rows if r["room"] == room]) for room in rooms},
            "all": score(rows)}  # fmt: skip


def table() -> str:
    """The record's summary in Markdown: decision 14 shows it."""
    lines = ["| changes in | number | `make test` kills | all tests kill |", "|---|--:|--:|--:|"]
    for room, counts in json.loads(RECORD.read_text())["summary"].items():
        number, fast, both = counts.values()
        lines.append(
            f"| {room} | {number} | {fast} ({fast / number:.0%}) | {both} ({both / number:.0%}) |"
        )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__,
            "cores": os.cpu_count()}  # fmt: skip


def jobs_of(rooms: list[str], done: set[str]) -> Iterator[Mutant]:
    """Rooms take turns, so that a run that is cut short has seen some of each."""
    left = {room: sample(room) for room in rooms}
    while any(left.values()):
        for room in rooms:
            share = max(1, len(left[room]) // 8)
            chosen, left[room] = left[room][:share], left[room][share:]
            yield from (mutant for mutant in chosen if mutant.key not in done)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("list", "run", "table"))
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no change after this")
    parser.add_argument("--most-s", type=float, default=1e9, help="of tests of one change and tier")
    parser.add_argument("--no-deep", action="store_true")
    parser.add_argument(
        "--resume", type=Path, help="a record: its changes are not tried again in the same tier"
    )
    parser.add_argument("--plan", type=Path, help="seconds of the tests; measured if it is missing")
    parser.add_argument("--out", type=Path, default=Path("mutation.json"))
    given = parser.parse_args()
    rooms = given.rooms.split(",")
    if given.what == "list":
        for mutant in (mutant for room in rooms for mutant in sample(room)):
            print(f"{mutant.room}: {mutant.key}")
        return 0
    if given.what == "table":
        print(table())
        return 0
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    survivors: set[str] = set()  # of the fast tier: only the deep tier's tests are left
    if given.resume is not None and given.resume.exists():
        rows = json.loads(given.resume.read_text())["rows"]
        if not given.no_deep:
            survivors = {row["mutant"] for row in rows if "killed_in" not in row}
            rows = [row for row in rows if "killed_in" in row]
    plans, tests = known_plan(given.plan, rooms, given.jobs, not given.no_deep)
    for module in SLOW:
        importlib.import_module(module)
    end = begin + given.minutes * 60
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as pool:
        left = jobs_of(rooms, {row["mutant"] for row in rows})
        under_way = []
        for mutant in left:
            plan = plans[mutant.room]
            plan = plan._replace(fast={}) if mutant.key in survivors else plan
            under_way.append(pool.submit(try_out, mutant, plan, end, given.most_s))
        for done in as_completed(under_way):
            if done.exception() is not None:
                pool.shutdown(cancel_futures=True)
            if (row := done.result()) is None:
                continue
            rows.append(row)
            print(f"{row.get('killed_in', 'ALIVE'):6} {row['seconds']:6.1f} s {row['room']}: "
                  f"{row['mutant']}", flush=True)  # fmt: skip
            record = {"command": "python tests/mutation.py " + " ".join(sys.argv[1:]),
                      "environment": environment(), "tests": tests, "summary": summary(rows),
                      "rows": sorted(rows, key=lambda r: (r["room"], r["mutant"]))}  # fmt: skip
            given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
