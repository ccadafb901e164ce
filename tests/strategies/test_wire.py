"""On two hosts: what crosses between them is what the ledger says, and results are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hosts
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import between_hosts

RECORD = ROOT / "benchmarks" / "records" / "between-hosts.json"


@pytest.mark.deep
def test_interface_counters_agree_with_the_ledger(tmp_path: Path) -> None:
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts: {reason}")
    rows = between_hosts.measure(tmp_path)
    assert len(rows) == 2 * len(between_hosts.STRATEGIES)
    for row in rows:
        assert row["interface"] == pytest.approx(row["ledger"], rel=0.03), row
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4)
    psi = rows[0]["gradient_bytes"]
    told = {row["strategy"]: row["ledger"] for row in rows}
    assert told["pytorch_ddp"] == pytest.approx(1.5 * psi, rel=0.01)
    assert told["bucket_ddp_async"] == pytest.approx(1.5 * psi, rel=0.01)
    assert told["pytorch_hsdp"] == pytest.approx(psi, rel=0.01)


def test_the_record_is_of_these_strategies() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    measured = [row["strategy"] for row in rows if row["host"] == 0]
    assert measured == between_hosts.STRATEGIES
    assert all(abs(row["interface"] / row["ledger"] - 1) < 0.03 for row in rows)


@pytest.mark.deep
def test_groups_that_follow_the_hosts_are_proved(tmp_path: Path) -> None:
    """The launcher says what a node is: no option does."""
    options = ("--strategies", "pytorch_hsdp", "--out", str(tmp_path / "out"))
    with hosts.made(2) as two:
        command = ("-m", "shardlab", "prove", *options)
        done = two.torchrun(*command, ranks=2, timeout=300, cwd=tmp_path)
    assert [d.returncode for d in done] == [0, 0], done[0].stdout + done[0].stderr
    assert "It does what is claimed." in done[0].stdout
