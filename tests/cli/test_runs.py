"""`shardlab runs`: what is listed, and what must never be removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import commands
from shardlab.run import housekeeping
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


def test_nothing_is_removed_unasked(tmp_path: Path) -> None:
    folder = train_folder(tmp_path / "runs", "one")
    for args, message in (
        ([], "name run folders, or give --all"),
        (["--all"], "There is nobody to ask here: add --yes"),
        (["--all", "--older-than", "1d", "--yes"], "one of them"),
        (["--older-than", "soon", "--yes"], "not an age, as in 7d"),
        (["runs", "--yes"], "runs is not a run folder; it holds 1 of them"),
        (["no", "--yes"], "no folder no"),
    ):
        done = commands.here("runs", "clean", *args, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
        assert folder.is_dir()


def test_what_is_ours_goes_and_the_rest_stays(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old, new = train_folder(root, "old", age_s=7200), train_folder(root, "new")
    notes = train_folder(root, "notes", age_s=7200)
    (notes / "thesis.tex").write_text("months of work")
    used = train_folder(root, "used", age_s=7200, state="running")
    far = train_folder(root, "far", age_s=7200, state="running", host="another")
    (far / "run.lock").unlink()  # a file system without locks
    elsewhere = train_folder(tmp_path / "archive", "kept", age_s=7200)
    (root / "link").symlink_to(elsewhere)
    (root / "photos").mkdir()
    with RunLock() as lock:
        lock.take(used)
        size = housekeeping.size_of(old)
        done = runs("clean", "--older-than", "1h", "--yes", cwd=tmp_path)
        assert done["removed"] == ["runs/old"]
        assert done["freed_bytes"] == size
        assert {Path(row["path"]).name: row["reason"] for row in done["kept"]} == {
            "notes": "it holds what shardlab did not write: thesis.tex",
            "used": "it is in use",
            "far": "it is in use",
        }
        runs("clean", "--all", "--yes", cwd=tmp_path)
        for name, why in (("used", "in use"), ("notes", "thesis.tex"), ("link", "it is a link")):
            refused = commands.here("runs", "clean", f"runs/{name}", "--yes", cwd=tmp_path)
            assert refused.returncode == 2
            assert why in refused.stderr
    assert not new.exists()
    assert {path.name for path in root.iterdir()} == {"far", "link", "notes", "photos", "used"}
    assert (elsewhere / "status.json").is_file()


def test_a_run_that_begins_meanwhile_stays(tmp_path: Path) -> None:
    """Between the question and the answer, the run may have been resumed."""
    folder = train_folder(tmp_path, "one")
    found = housekeeping.find(folder)
    with RunLock() as lock:
        lock.take(folder)
        with pytest.raises(Exception, match="belongs to a run that is still active"):
            housekeeping.remove(found)
    assert (folder / "status.json").is_file()


def test_the_cache(tmp_path: Path) -> None:
    """What we fetched and made goes; a data set that is being fetched, and the rest, stays."""
    import fcntl

    cache = tmp_path / "cache"
    for name in ("mnist", "yelp", "mine"):
        (cache / "data" / name).mkdir(parents=True)
        (cache / "data" / name / "file.bin").write_bytes(b"x" * 100)
    (cache / "stdlib-3.11.0-bytes.bin").write_bytes(b"x" * 50)
    (cache / "proofs").mkdir()
    (cache / "proofs" / "kept.json").write_bytes(b"x" * 10)
    (cache / "model.pt").write_bytes(b"x")
    with (cache / "data" / ".yelp.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = runs("clean", "--cache", "--yes", cwd=tmp_path)
    assert done["freed_bytes"] == 160
    assert [row["reason"] for row in done["kept"]] == ["it is being filled"]
    left = {path.name for path in (*cache.iterdir(), *(cache / "data").iterdir())}
    assert left == {"data", "model.pt", ".yelp.lock", "yelp", "mine"}


@pytest.mark.long
def test_what_commands_write_is_known_as_theirs(tmp_path: Path) -> None:
    """A file that a command begins to write, and that is not listed, would never be removed."""
    tiny = ("--size", "tiny", "--world", "2")
    trained = commands.here(
        "train", *tiny, "--steps", "5", "--checkpoint-every", "5", "--audit-data", "--profile",
        "--evaluate-every", "0", "--out", "runs/train", "--inject", "slow:rank=1,ms=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    compared = commands.here(
        "compare", *tiny, "--strategies", "single,simple_ddp", "--repeats", "1", "--no-prove",
        "--out", "runs/compare", cwd=tmp_path,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    for run in housekeeping.runs_in(tmp_path / "runs"):
        assert housekeeping.why_not(run) == ""
        written = [*run.folder.glob("*.json"), *run.folder.glob("cells/*.json")]
        assert written
        assert all("schema" in json.loads(path.read_text()) for path in written)
    done = commands.here("runs", "clean", "--all", "--yes", cwd=tmp_path)
    assert "removed 2 runs" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []
