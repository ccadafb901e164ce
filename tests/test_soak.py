"""The soak's short form: eight runs, disturbed at random, end as the undisturbed ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import commands

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.timeout(300)  # half a minute on an idle machine
def test_disturbed_runs_end_as_undisturbed_ones(tmp_path: Path) -> None:
    # Another choice of faults in each version of Python, say, is to be had with SHARDLAB_SOAK_SEED.
    seed = os.environ.get("SHARDLAB_SOAK_SEED", "0")
    done = commands.run(
        sys.executable, str(SOAK), "--short", "--cases", "8", "--seed", seed, "--out", "found",
        cwd=tmp_path, timeout=290, TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads((tmp_path / "found" / "soak.json").read_text())
    assert len(found["cases"]) == 8
    assert all(case["passed"] and case["ended"][-1] == "finished" for case in found["cases"])
    # It is a test only if something happened: all but the slow run were ended and went on.
    assert sum(len(case["ended"]) > 1 for case in found["cases"]) >= 6
    assert "| **all** | 8 |" in (tmp_path / "found" / "soak.md").read_text()
