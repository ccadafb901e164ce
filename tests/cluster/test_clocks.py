"""Traces of two hosts, one with a wrong clock: the waits are right to the error that is printed.

Network namespaces share the kernel's clock. So the second host's rank is given another one: a small
library, loaded before all others, moves what ``clock_gettime`` says of Unix time, for Python and
PyTorch's profiler alike. It also sees the name of another boot, by which clocks are told apart.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hosts
from shardlab import trace as traces
from shardlab.trace import clocks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]

AHEAD_S, DRIFT = -2.0, 1e-4  # of the second host's clock
LATE_S = 0.25  # its rank, in each step

CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (failed || clock != CLOCK_REALTIME)
        return failed;
    long long ns = now->tv_sec * 1000000000LL + now->tv_nsec, since = atoll(getenv("SINCE_NS"));
    ns += atof(getenv("AHEAD_S")) * 1e9 + atof(getenv("DRIFT")) * (ns - since);
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return 0;
}
"""

RANK = f"""
if [ "$GROUP_RANK" = 1 ]; then
    mount --bind boot_id /proc/sys/kernel/random/boot_id
    export LD_PRELOAD="$PWD/clock.so"
fi
exec "$PYTHON" -m shardlab train --strategy simple_ddp_ga --size tiny --data synthetic \\
    --steps 6 --profile --out run --inject slow:rank=1,ms={1000 * LATE_S:g}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run's folder, and the Unix time at which the second clock was exactly 2 s behind."""
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing: apt-get install gcc libc6-dev")
    folder = tmp_path_factory.mktemp("clocks")
    for name, text in {"clock.c": CLOCK, "rank.sh": RANK, "boot_id": "another boot\n"}.items():
        (folder / name).write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"], cwd=folder, check=True)
    since = time.time_ns()
    with hosts.made(2) as two:
        done = two.torchrun(
            "--no-python", "sh", "rank.sh", timeout=120, cwd=folder, PYTHON=sys.executable,
            AHEAD_S=str(AHEAD_S), DRIFT=str(DRIFT), SINCE_NS=str(since),
        )  # fmt: skip
    assert [d.returncode for d in done] == [0, 0], done
    return folder / "run", since


def ahead_ns(own_ns: int, since: int) -> int:
    """How far the second clock is ahead, when it says this."""
    true = since + round((own_ns - AHEAD_S * 1e9 - since) / (1 + DRIFT))
    return own_ns - true


def test_the_clock_is_measured_to_its_error(run: tuple[Path, int]) -> None:
    folder, since = run
    ours, theirs = clocks.load(folder).values()
    assert [r.when for r in theirs.readings] == ["start", "after step 4", "end"]
    assert {(r.ahead_ns, r.error_ns) for r in ours.readings} == {(0, 0)}
    for reading in theirs.readings:
        assert abs(reading.ahead_ns - ahead_ns(reading.unix_ns, since)) <= reading.error_ns
        assert reading.error_ns < 5e6


def waits(found: traces.TraceSet) -> list[tuple[float, float]]:
    """In microseconds, of rank 0 and of rank 1 in each collective."""
    pairs = [tuple(p.wait_us for p in c.participants) for c in found.collectives()]
    assert {len(pair) for pair in pairs} == {2}
    return [(pair[0], pair[1]) for pair in pairs]


def test_waits_are_right_to_the_printed_error(run: tuple[Path, int], tmp_path: Path) -> None:
    """The truth is the same traces on one clock: rank 1's corrected, and no file of clocks."""
    folder, since = run
    shutil.copytree(folder / "traces", tmp_path / "traces")
    [path] = (tmp_path / "traces" / "rank1").iterdir()
    document = json.loads(gzip.decompress(path.read_bytes()))
    base = document["baseTimeNanoseconds"]
    for event in document["traceEvents"]:
        if event.get("ph") == "X":
            event["ts"] -= ahead_ns(base + round(event["ts"] * 1000), since) / 1000
            event["dur"] /= 1 + DRIFT
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    found, truth = traces.load(folder), traces.load(tmp_path)
    error_us = found.clocks()[1].error_us
    for pair in zip(waits(found), waits(truth), strict=True):
        for got, want in zip(*pair, strict=True):
            # One that looks shorter than the error counts as none.
            assert abs(got - want) <= (error_us if got else 2 * error_us) + 1
    worst = found.stragglers()[0]
    assert worst.rank == 1
    assert 0.5 * LATE_S < worst.worst_us / 1e6 < 2 * LATE_S
    assert found.clocks()[1].ahead_us == pytest.approx(AHEAD_S * 1e6, abs=20_000)
