"""Run one tier of the tests, and what failed once more.

    python tests/tier.py test            every test but the deep, the timed and the cluster's
    python tests/tier.py deep --quarter 2

A busy machine can miss a deadline, so a test that fails beside others runs once more, by itself. If
it passes then, it is flaky: its name goes to ``tests/flaky.txt`` and is printed. A test that is in
that file already fails the run: it is to be repaired.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAKY = Path(__file__).with_name("flaky.txt")
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
BESIDE = "not alone and not cluster"
# Each tier is some runs of pytest: what may run beside other tests, then what measures time.
TIERS = {
    "check": [f"{BESIDE} and not deep and not long"],
    "test": [f"{BESIDE} and not deep", "alone and not deep"],
    "deep": [f"{BESIDE} and deep", "alone and deep"],
    "cluster": ["cluster"],
}
SERIAL = ("alone", "cluster")
NO_TESTS = 5  # pytest's exit code: a quarter may have no test that measures time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--workers", default="2")
    given, others = parser.parse_known_args()
    codes, flaky = [], set()
    for marks in TIERS[given.tier]:
        spread = ["-n", given.workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        options = [] if marks.startswith(SERIAL) else spread
        code, passed_again = _once_or_twice([*options, "-m", marks, "--durations=15", *others])
        codes.append(code)
        flaky |= passed_again
    known = set(FLAKY.read_text().split()) if FLAKY.exists() else set()
    if flaky:
        FLAKY.write_text("\n".join(sorted(known | flaky)) + "\n")
        print(f"failed once, and passed when run again (now in {FLAKY.relative_to(ROOT)}):")
        print("\n".join(f"  {test}{' (for the second time)' * (test in known)}" for test in flaky))
    ran = [code for code in codes if code != NO_TESTS] or [NO_TESTS]
    return max(ran) or int(bool(flaky & known))


def _once_or_twice(options: list[str]) -> tuple[int, set[str]]:
    """The exit code, and the tests that failed at first and passed when they ran once more."""
    code = _pytest(*options, "--cache-clear")
    if code != 1:  # 0: all passed; others: interrupted, or wrong usage
        return code, set()
    failed = _failed()
    print("these failed; they run once more, one after another:", flush=True)
    alone = options[options.index("-m") :]
    code = _pytest(*alone, "--last-failed", "--last-failed-no-failures", "none")
    return code, failed - _failed()


def _pytest(*options: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False
    ).returncode


def _failed() -> set[str]:
    return set(json.loads(FAILED.read_text())) if FAILED.exists() else set()


if __name__ == "__main__":
    sys.exit(main())
