"""Faults on purpose: how they are named, refused, told, and what they do to a run."""

from __future__ import annotations

import pytest

from shardlab import config as configs
from shardlab import faults
from shardlab.errors import UsageError

# ------------------------------------------------------------------ naming them


def test_a_fault_is_read() -> None:
    assert faults.parse("kill:rank=1,step=5") == faults.Fault(
        "kill:rank=1,step=5", "kill", rank=1, step=5
    )
    slow = faults.parse("slow:rank=2,ms=50")
    assert (slow.ms, slow.step, slow.is_once) == (50.0, None, False)
    assert faults.parse("slow:rank=2,ms=50,step=3").is_once
    assert faults.parse("hang:rank=0,step=2,where=collective").where == "collective"
    assert faults.parse("corrupt-checkpoint").told() == (
        "rank 0 damages the checkpoint just written (flip)"
    )
    assert faults.parse("disk-full:step=3,bytes=4096").told() == (
        "rank 0 can write no more to files beyond 4096 bytes each at step 3"
    )
    assert faults.parse("nan:rank=1,step=2,layer=blocks.0").layer == "blocks.0"


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
        faults.parse(text)
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
    with pytest.raises(UsageError, match=r"named twice"):
        config(faults=["kill:rank=1,step=9"] * 2)
    with pytest.raises(UsageError, match=r"faults must be a list, got text"):
        config(faults="kill:rank=1,step=9")
    with pytest.raises(UsageError, match=r"faults\[0\] must be a text, got whole number: 3"):
        config(faults=[3])


def test_a_rank_must_be_there_and_a_collective_ours() -> None:
    kill, drop = faults.parse("kill:rank=2,step=1"), faults.parse("drop-collective:rank=0,step=1")
    faults.check_world([kill, drop], 3, "zero3")
    with pytest.raises(UsageError, match=r"names rank 2, and the world has 2: ranks 0 to 1"):
        faults.check_world([kill], 2, "zero3")
    with pytest.raises(UsageError, match=r"pytorch_ddp calls its collectives from inside PyTorch"):
        faults.check_world([drop], 2, "pytorch_ddp")
    with pytest.raises(UsageError, match=r"needs a second rank"):
        faults.check_world([drop], 1, "zero3")
