"""The soak's short form: eight runs, disturbed at random, end as the undisturbed ones."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

import commands

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.deep
@pytest.mark.timeout(300)  # half a minute on an idle machine
def test_disturbed_runs_end_as_undisturbed_ones(tmp_path: Path) -> None:
    # Other faults in each run: the claim is for all of them. SHARDLAB_SOAK_SEED=n repeats one.
    seed = os.environ.get("SHARDLAB_SOAK_SEED") or str(random.randrange(10**6))
    command = [sys.executable, str(SOAK), "--short", "--cases", "8", "--seed", seed]
    command += ["--out", "found"]
    done = commands.run(*command, cwd=tmp_path, timeout=290, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads((tmp_path / "found" / "soak.json").read_text())
    assert len(found["cases"]) == 8
    assert found["seeds"] == [int(seed)]
    assert all(case["passed"] and case["ended"][-1] == "finished" for case in found["cases"])
    # It is a test only if something happened: all but the slow run were ended and went on.
    assert sum(len(case["ended"]) > 1 for case in found["cases"]) >= 6
    assert "| **all** | 8 |" in (tmp_path / "found" / "soak.md").read_text()


def test_whatever_happens_ends_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last checkpoint that cannot be read was the end of the soak, at four seeds of five."""
    monkeypatch.syspath_prepend(str(SOAK.parent))
    import soak

    case = soak.Case("killed", "single", 1, seed=3, number=7)
    monkeypatch.setattr(soak, "run", lambda case, *_: case.ended.append("finished"))
    monkeypatch.setattr(soak, "leftovers", lambda _folder: [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "finished"}')
    soak.disturbed(case, tmp_path / "run", tmp_path / "nowhere", 1.0)
    assert "is no checkpoint" in case.wrong[0]
    assert "| 3 | 7 | killed | single:1 |" in soak.not_the_same([case])
    assert soak.seeds_in("1,4-6,4") == [1, 4, 5, 6]
