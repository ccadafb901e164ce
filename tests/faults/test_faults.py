"""Faults on purpose: how they are named, refused, told, and what they do to a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import commands
import resuming
from conftest import GetRanks
from shardlab import config as configs
from shardlab import files
from shardlab.errors import Halt, RankFailure, UsageError
from shardlab.faults import spec
from shardlab.files import read_jsonl

# ------------------------------------------------------------------ naming them


def test_a_fault_is_read() -> None:
    assert spec.parse("kill:rank=1,step=5") == spec.Fault(
        "kill:rank=1,step=5", "kill", rank=1, step=5
    )
    slow = spec.parse("slow:rank=2,ms=50")
    assert (slow.ms, slow.step, slow.is_once) == (50.0, None, False)
    assert spec.parse("slow:rank=2,ms=50,step=3").is_once
    assert spec.parse("hang:rank=0,step=2,where=collective").where == "collective"
    assert spec.parse("corrupt-checkpoint").told() == (
        "rank 0 damages the checkpoint just written (flip)"
    )
    assert spec.parse("disk-full:step=3,bytes=4096").told() == (
        "rank 0 can write no more to files beyond 4096 bytes each at step 3"
    )
    assert spec.parse("nan:rank=1,step=2,layer=blocks.0").layer == "blocks.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil:rank=1,step=5", "unknown fault 'kil'; did you mean 'kill'?"),
        ("", "unknown fault ''; known: kill, hang, slow"),
        ("kill", "which rank and step? For example kill:rank=1,step=1"),
        ("kill:step=5", "which rank?"),
        ("slow:rank=1", "which ms? For example slow:rank=1,ms=50"),
        ("kill:rank=1,step=5,ms=3", "unknown key of the fault kill 'ms'"),
        ("kill:rank=-1,step=5", "rank=-1 is not a whole number from 0 on"),
        ("kill:rank=1,step=five", "step=five is not a whole number"),
        ("kill:rank=1,rank=2,step=1", "'rank=2' is not rank=VALUE, once"),
        ("kill:rank,step=1", "'rank' is not rank=VALUE"),
        ("hang:rank=1,step=1,where=bed", "unknown where of a fault 'bed'; known: data, forward"),
        ("slow:rank=1,ms=0", "ms=0 is not a time in milliseconds above 0"),
        ("slow:rank=1,ms=nan", "ms=nan is not a time"),
        ("kill:rank=1,step=" + "9" * 4000, "is not a whole number"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r".") as refused:
        spec.parse(text)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 200


def config(**values: object) -> configs.Config:
    return configs.from_dict({"training": {"steps": 10}, **values})


def test_a_config_holds_faults_and_refuses_those_that_never_strike() -> None:
    held = config(faults=["kill:rank=1,step=9"])
    assert configs.from_dict(held.to_dict()) == held
    assert config(faults=None).faults == []
    with pytest.raises(UsageError, match=r"would never strike: the run has 10 steps, 0 to 9"):
        config(faults=["kill:rank=1,step=10"])
    for fault in ("corrupt-checkpoint", "kill:rank=0,step=1,where=checkpoint"):
        assert config(faults=[fault], checkpoint={"every": 2}).faults == [fault]
        with pytest.raises(UsageError, match=r"writes no checkpoints; add --checkpoint-every"):
            config(faults=[fault])
    with pytest.raises(UsageError, match=r"named twice"):
        config(faults=["kill:rank=1,step=9"] * 2)
    with pytest.raises(UsageError, match=r"faults must be a list, got text"):
        config(faults="kill:rank=1,step=9")
    with pytest.raises(UsageError, match=r"faults\[0\] must be a text, got whole number: 3"):
        config(faults=[3])


def test_a_rank_must_be_there_and_a_collective_ours() -> None:
    kill, drop = spec.parse("kill:rank=2,step=1"), spec.parse("drop-collective:rank=0,step=1")
    spec.check_world([kill, drop], 3, "zero3")
    with pytest.raises(UsageError, match=r"names rank 2, and the world has 2: ranks 0 to 1"):
        spec.check_world([kill], 2, "zero3")
    with pytest.raises(UsageError, match=r"pytorch_ddp calls its collectives from inside PyTorch"):
        spec.check_world([drop], 2, "pytorch_ddp")
    with pytest.raises(UsageError, match=r"needs a second rank"):
        spec.check_world([drop], 1, "zero3")


# ------------------------------------------------------------------ what they do


def run_of(root: Path, *faults: str, **more: Any) -> dict[str, Any]:
    few = {"checkpoint.every": 2, "training.global_batch": 4, "output.dir": str(root)}
    plain = {"training.evaluate_every": None, "training.evaluate_samples": None}
    asked = {"strategy.name": "bucket_ddp_async", "faults": list(faults), **more}
    return resuming.settings(root, **few, **plain, **asked)


def trained(ranks: GetRanks, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Rank 0's rows. (What the launcher does when a run has failed is not done here.)"""
    ranks(2).run(
        "shardlab.training.run:train_rank", configs.from_dict(values), "test", deadline_s=60
    )
    return read_jsonl(Path(values["output"]["dir"]) / "rank0.jsonl")


@pytest.mark.long
def test_a_slow_rank_is_slow_and_computes_the_same(ranks: GetRanks, tmp_path: Path) -> None:
    plain = trained(ranks, run_of(tmp_path / "plain"))
    slow = trained(ranks, run_of(tmp_path / "slow", "slow:rank=1,ms=80"))
    assert [row["loss"] for row in slow] == [row["loss"] for row in plain]
    assert min(row["step_ms"] for row in slow) > 70  # rank 0 waits for rank 1, in every step
    once = trained(ranks, run_of(tmp_path / "once", "slow:rank=0,ms=300,step=3,where=data"))
    assert once[3]["data_ms"] > 250
    assert min(row["data_ms"] for row in once) < 250
    (struck,) = read_jsonl(tmp_path / "once" / "faults.rank0.jsonl")
    assert (struck["fault"], struck["step"]) == ("slow:rank=0,ms=300,step=3,where=data", 3)
    assert "slow:rank=1,ms=80" in (tmp_path / "slow" / "config.yaml").read_text()
    # And nothing is left of it for the next run in the same processes.
    again = trained(ranks, run_of(tmp_path / "again"))
    assert min(row["step_ms"] for row in again) < 70
    assert not list((tmp_path / "again").glob("faults*"))


@pytest.mark.long
def test_what_guards_are_for_is_found(ranks: GetRanks, tmp_path: Path) -> None:
    with pytest.raises(Halt, match="all_reduce") as left_out:
        trained(ranks, run_of(tmp_path / "drop", "drop-collective:rank=1,step=1"))
    assert left_out.value.state == "out of step"
    with pytest.raises(Halt, match="step 2") as spoilt:
        trained(ranks, run_of(tmp_path / "nan", "nan:rank=1,step=2,layer=blocks.0"))
    assert "blocks.0" in str(spoilt.value)
    assert spoilt.value.state == "not finite"
    hang = run_of(tmp_path / "hang", "hang:rank=0,step=1,where=data", **{"guard.hang_s": 3})
    with pytest.raises(Halt, match=r"rank 0 .*data loading"):
        trained(ranks, hang)


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(ranks: GetRanks, tmp_path: Path) -> None:
    plain = trained(ranks, run_of(tmp_path / "plain"))
    faults = ("corrupt-checkpoint:step=2,how=truncate", "kill:rank=0,step=5")
    with pytest.raises(RankFailure):
        trained(ranks, run_of(tmp_path / "run", *faults))
    rows = trained(ranks, run_of(tmp_path / "run", *faults, **{"checkpoint.resume": "auto"}))
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    (resumed,) = read_jsonl(tmp_path / "run" / "resumes.jsonl")
    assert resumed["step"] == 2
    assert "step-000004" in resumed["passed_over"][0]


@pytest.mark.long
def test_a_full_disk_loses_nothing(ranks: GetRanks, tmp_path: Path) -> None:
    plain = trained(ranks, run_of(tmp_path / "plain"))
    ranks(2).kill()  # the limit is also of the file in which ranks meet: new ones have a short one
    # Records are small and can be written, checkpoints cannot: the run goes on without them.
    small = {"profile.ledger_steps": 0}
    some = trained(ranks, run_of(tmp_path / "some", "disk-full:step=3,bytes=30000", **small))
    assert [row["loss"] for row in some] == [row["loss"] for row in plain]
    written = read_jsonl(tmp_path / "some" / "checkpoints.jsonl")
    assert [row["error"] is None for row in written] == [True, False, False]
    assert [p.name for p in (tmp_path / "some" / "checkpoints").iterdir()] == ["step-000002"]
    status = json.loads((tmp_path / "some" / "status.json").read_text())
    assert status["state"] == "not saved"
    assert status["reason"] == written[-1]["error"]
    ranks(2).kill()  # the limit is of the process, for good
    with pytest.raises(Halt, match="cannot write the run's files") as full:
        trained(ranks, run_of(tmp_path / "none", "disk-full:step=3"))
    assert "Traceback" not in (full.value.traceback or "")
    again = run_of(tmp_path / "none", **{"checkpoint.resume": "auto"})
    assert [row["loss"] for row in trained(ranks, again)] == [row["loss"] for row in plain]
    assert not list((tmp_path / "none").rglob("*.part"))


@pytest.mark.long
def test_the_command_says_what_is_injected_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    run = ["train", "--size", "tiny", "--data", "synthetic", "--steps", "2", "--json"]
    beyond = commands.here(*run, "--inject", "kill:rank=2,step=1", cwd=tmp_path)
    assert beyond.returncode == 2
    assert beyond.stderr.strip().splitlines()[-1].endswith("the world has 2: ranks 0 to 1")
    assert not (tmp_path / "runs").exists()
    slow = commands.here(*run, "--inject", "slow:rank=1,ms=5", cwd=tmp_path)
    assert slow.returncode == 0, slow.stderr
    assert "FAULT INJECTION IS ON: rank 1 is late by 5 ms in forward" in slow.stderr
    assert "injected fault: rank 1 is late" in slow.stderr
    json.loads(slow.stdout)


# ------------------------------------------------------------------ files that cannot be written


def test_folders_that_cannot_be_used(ranks: GetRanks, tmp_path: Path) -> None:
    """Rank 0 cannot make it, and all ranks are refused."""
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(UsageError, match="cannot write the run folder"):
            trained(ranks, run_of(out))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_is_full_ends_a_run_in_a_sentence() -> None:
    """The injected fault is a limit of each file, which is another error of the system."""
    with pytest.raises(Halt, match="run's files: No space left on device"), files.room_needed(1):
        Path("/dev/full").write_text("a row")


def test_the_page_names_faults_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    named = re.findall(r"--inject (\S+)", page)
    assert len(named) >= 8
    kinds = {spec.parse(text).kind for text in named if text != "FAULT`"}
    assert kinds == set(spec.KINDS)
