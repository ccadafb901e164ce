"""`shardlab runs`: what is listed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import commands
from shardlab import runfolder
from shardlab.runlock import RunLock


def train_folder(root: Path, name: str, age_s: float = 0, **status: Any) -> Path:
    """A run folder as `shardlab train` leaves it."""
    folder = root / name
    (folder / "traces" / "rank0").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {workload: gpt2, size: tiny}\nstrategy: {name: zero1}\ntraining: {steps: 4}\n"
    )
    (folder / "env.json").write_text(json.dumps({"command": "shardlab train"}))
    (folder / "rank0.jsonl").write_text('{"step": 0, "loss": 2.5, "step_ms": 7.0}\n' * 2)
    (folder / "run.lock").write_text("{}")
    path = folder / "status.json"
    path.write_text(json.dumps({"state": "finished", **status}))
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return folder


def runs(*args: str, cwd: Path) -> Any:
    done = commands.here("runs", *args, "--json", cwd=cwd, SHARDLAB_CACHE=str(cwd / "cache"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_list(tmp_path: Path) -> None:
    train_folder(tmp_path / "runs", "old", age_s=7200)
    train_folder(tmp_path / "runs", "dead", age_s=60, state="running", pids=[2**22 + 1])
    train_folder(tmp_path / "runs", "new", state="crashed", reason="RuntimeError: planted")
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "prove").mkdir()
    proof = {"schema": 1, "verdicts": [{"strategy": "zero1", "pass": False}]}
    (tmp_path / "runs" / "prove" / "prove.json").write_text(json.dumps(proof))
    found = {Path(run["folder"]).name: run for run in runs(cwd=tmp_path)["runs"]}
    assert list(found) == ["new", "prove", "dead", "old"] or list(found)[2:] == ["dead", "old"]
    assert found["old"]["state"] == "finished"
    assert found["dead"]["state"] == "gone"  # it says that it runs, and does not
    assert found["prove"]["state"] == "failed"
    new = found["new"]
    assert (new["strategy"], new["workload"], new["steps"], new["steps_asked"]) == (
        "zero1", "gpt2 tiny", 2, 4,
    )  # fmt: skip
    text = commands.here("runs", cwd=tmp_path, COLUMNS="80", SHARDLAB_CACHE=str(tmp_path)).stdout
    assert "crashed" in text
    assert "2/4" in text
    assert max(map(len, text.splitlines())) <= 80
    shown = commands.here("runs", "show", "runs/new", cwd=tmp_path).stdout
    assert "reason: RuntimeError: planted" in shown
    assert "loss 2.5000 → 2.5000" in shown


@pytest.mark.parametrize("kind", runfolder.KINDS)
def test_folders_of_every_command_are_known(kind: str, tmp_path: Path) -> None:
    """A plan has no workload of its own: its config names it."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    rows = [{"label": "zero1", "strategy": "zero1", "pass": True}]
    record = {"schema": 1, "rows": rows, "config": {"model": {"workload": "gpt2"}}}
    (folder / runfolder.KINDS[kind]).write_text(json.dumps(record))
    (found,) = runs(cwd=tmp_path)["runs"]
    assert (found["command"], found["strategy"], found["workload"]) == (kind, "zero1", "gpt2")


def test_a_run_whose_strategy_has_chosen_is_known(tmp_path: Path) -> None:
    folder = train_folder(tmp_path / "runs", "one")
    (folder / "chosen.json").write_text('{"bucket_mb": 4.0}')
    assert runs("show", "runs/one", cwd=tmp_path)["command"] == "train"


def test_the_page_has_every_file_of_a_run() -> None:
    page = (commands.ROOT / "docs" / "run-folder.md").read_text()
    assert [name for name, _, _ in runfolder.FILES if f"`{name}`" not in page] == []


def test_a_run_in_use(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    used = train_folder(root, "used", state="running")
    far = train_folder(root, "far", state="running", host="another")
    (far / "run.lock").unlink()  # a file system without locks
    with RunLock() as lock:
        lock.take(used)
        found = runs(cwd=tmp_path)["runs"]
    assert [run["state"] for run in found] == ["running", "running"]


@pytest.mark.parametrize(("path", "message"), [
    ("runs", "runs is not a run folder; it holds 1 of them: --dir runs"),
    ("no", "no folder no"),
])  # fmt: skip
def test_what_is_no_run_cannot_be_shown(path: str, message: str, tmp_path: Path) -> None:
    train_folder(tmp_path / "runs", "one")
    done = commands.here("runs", "show", path, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_cache(tmp_path: Path) -> None:
    """Only what we fetched and made is counted."""
    cache = tmp_path / "cache"
    for name in ("mnist", "yelp", "mine"):
        (cache / "data" / name).mkdir(parents=True)
        (cache / "data" / name / "file.bin").write_bytes(b"x" * 100)
    (cache / "stdlib-3.11.0-bytes.bin").write_bytes(b"x" * 50)
    (cache / "proofs").mkdir()
    (cache / "proofs" / "kept.json").write_bytes(b"x" * 10)
    (cache / "model.pt").write_bytes(b"x")
    assert runs(cwd=tmp_path)["cache_bytes"] == 260
