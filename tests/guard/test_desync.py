"""Ranks out of step, replicas that drift, data of different lengths: found, and named."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commands
from conftest import GetRanks, deep_unless
from faulty_workload import FILE, config_of, line_of, run
from shardlab import comm
from shardlab import config as configs
from shardlab.checkpoint import files, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.errors import Halt, RankFailure, UsageError
from shardlab.guard import drift, sequence
from shardlab.ledger import LEDGER
from shardlab.naming import STRATEGIES
from shardlab.training import restart
from shardlab.world import World


@pytest.mark.long
def test_a_skipped_all_reduce_of_the_same_shape_is_caught_before_it_is_made(tmp_path: Path) -> None:
    """Gloo alone computes a wrong gradient and says nothing: see the next test."""
    config = config_of(tmp_path, f"{FILE}:SkippingFirst")
    with pytest.raises(Halt) as caught:
        run(config)
    halt, site = caught.value, line_of('comm.all_reduce(grad, self.group, label=f"grad {name}")')
    assert halt.state == "out of step"
    assert "rank 1 skipped all_reduce #" in str(halt)
    assert f"'grad second.weight' at {site}, step 1" in str(halt)
    assert f"is all_reduce (6, 6) float32 'grad third.weight' at {site}" in str(halt)
    assert "no result was computed from it" in str(halt)


UNCHECKED = {"guard.check_steps": 0, "guard.check_every": 0}


def losses_of(root: Path) -> list[float]:
    (rows,) = root.glob("*/rank0.jsonl")
    return [json.loads(line)["loss"] for line in rows.read_text().splitlines()]


@pytest.mark.long
def test_unchecked_it_is_silently_wrong(tmp_path: Path) -> None:
    """The reason for the check: two gradients of one shape are added to each other's, and the run
    ends well."""
    for name in ("InOrder", "Swapping"):
        run(config_of(tmp_path / name, f"{FILE}:{name}", **UNCHECKED))
    right, wrong = losses_of(tmp_path / "InOrder"), losses_of(tmp_path / "Swapping")
    assert len(right) == len(wrong) == 12
    assert wrong[:5] == right[:5]
    assert wrong[5:] != right[5:]


@pytest.mark.long
def test_later_the_fingerprint_finds_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{FILE}:Swapping", **{"guard.check_every": 5})
    with pytest.raises(Halt) as caught:
        run(config)
    assert caught.value.rank == 1
    assert "is all_reduce (6, 6) float32 'grad third.weight' at faulty_workload.py:" in str(
        caught.value
    )
    assert "'grad second.weight'" in str(caught.value)
    assert str(caught.value).endswith("(results since then are wrong)")
    assert len(losses_of(tmp_path)) == 5


@pytest.mark.long
def test_sizes_that_differ_unchecked_kill_a_rank(tmp_path: Path) -> None:
    """Gloo aborts the process; all that can be said afterwards is what to try."""
    with pytest.raises(RankFailure, match=r"SIGABRT.*guard\.check_steps"):
        run(config_of(tmp_path, f"{FILE}:Skipping", **UNCHECKED))


# ------------------------------------------------------------------ each way to differ


def differ(world: World, how: str) -> str:
    """Two collectives, of which rank 1's second is another."""
    LEDGER.reset()
    LEDGER.check = sequence.Sequence(world).check
    odd = world.rank == 1
    comm.all_reduce(torch.ones(4), world.group, label="first")
    try:
        if how == "shape" and odd:
            comm.all_reduce(torch.ones(5), world.group, label="second")
        elif how == "dtype" and odd:
            comm.all_reduce(torch.ones(4, dtype=torch.float64), world.group, label="second")
        elif how == "reduction" and odd:
            comm.all_reduce(torch.ones(4), world.group, op="max", label="second")
        elif how == "op" and odd:
            comm.broadcast(torch.ones(4), world.group, label="second")
        elif how == "label" and odd:
            comm.all_reduce(torch.ones(4), world.group, label="third")
        else:
            comm.all_reduce(torch.ones(4), world.group, label="second")
    except Halt as halt:
        return str(halt)
    finally:
        LEDGER.check = None
    return "nothing"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", "all_reduce (5,) float32 'second'"),
        ("dtype", "all_reduce (4,) float64 'second'"),
        ("reduction", "all_reduce(max) (4,) float32 'second'"),
        ("op", "broadcast (4,) float32 'second'"),
        ("label", "all_reduce (4,) float32 'third'"),
        ("nothing", None),
    ],
)
def test_every_way_to_differ(ranks: GetRanks, how: str, said: str | None) -> None:
    """All ranks say the same, and none has been killed: nothing was launched."""
    answers = ranks(3).run(differ, how, deadline_s=20)
    assert len(set(answers)) == 1
    if said is None:
        assert answers[0] == "nothing"
    else:
        assert answers[0].startswith(
            f"rank 1 is out of step at #1: its #1 is {said} at test_desync"
        )
        assert "and the others' is all_reduce (4,) float32 'second' at test_desync" in answers[0]


MECHANISMS = ("bucket_ddp_async", "zero1", "zero3", "pytorch_zero3", "streaming_diloco")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", deep_unless(lambda name: name in MECHANISMS, [n for n in STRATEGIES if n != "single"])
)
def test_no_false_alarm(ranks: GetRanks, tmp_path: Path, name: str) -> None:
    """Every strategy, with every guard at its keenest."""
    config = config_of(
        tmp_path, name,
        **{
            "training.steps": 4, "training.micro_batch": 2, "training.global_batch": 8,
            "guard.check_steps": 2, "guard.check_every": 1, "guard.drift_every": 1,
        },
    )  # fmt: skip
    size = 4 if name == "pytorch_hsdp" else 2
    results = ranks(size).run("shardlab.training.run:train_rank", config, "test")
    assert results[0]["steps"] == 4


# ------------------------------------------------------------------ drift


@pytest.mark.long
def test_a_replica_that_drifts_is_found_by_its_tensor(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{FILE}:Drifting", **{"guard.drift_every": 4})
    with pytest.raises(Halt) as caught:
        run(config, size=3)
    assert str(caught.value) == (
        "replicas have drifted apart: 'second.weight' of rank 1 differs from that of ranks 0, 2 "
        "after step 3"
    )
    assert caught.value.state == "drifted"


def state_after(config: configs.Config) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The last checkpoint of a run that may start again, and why it did."""
    reasons: list[str] = []

    def listen(event: Any) -> None:
        if "restart" in event:
            reasons.append(event["reason"])

    folder = restart.train(config, "test", listen)["folder"]
    newest = next(iter(files.steps_in(Path(folder)).values()))
    assert newest.name == "step-000012"
    manifest = manifests.read(newest)
    return storage.whole_tensors(newest, manifest, ""), reasons


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "plain", "more", "reason"),
    [
        # On the code before, the checkpoint of step 4 was made of drifted replicas and was taken.
        ("Drifting", "simple_ddp", {}, "replicas have drifted apart"),
        ("OptimizerDrifting", "simple_ddp", {}, "'second.weight/exp_avg' of rank 1 differs"),
        ("Swapping", "InOrder", {"guard.drift_every": 0}, "results since then are"),
        *(
            pytest.param(
                name, name, {"faults": [fault]}, "replicas have drifted apart",
                marks=pytest.mark.deep,
            )
            for name, fault in (
                ("bucket_ddp_async", "drift:rank=1,step=3"), ("pytorch_ddp", "drift:rank=0,step=2")
            )
        ),
    ],
)  # fmt: skip
def test_no_checkpoint_is_made_of_replicas_that_differ(
    strategy: str, plain: str, more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Drifted or out of step, saved, found later, started again: as if nothing had happened."""
    base = {
        "training.steps": 12, "checkpoint.every": 2, "launch.max_restarts": 1, "launch.world": 2,
        "launch.device": "cpu", "guard.drift_every": 7, "guard.check_steps": 0,
        "guard.check_every": 7, "data.shuffle": True,
    }  # fmt: skip
    if strategy != plain:
        more = more | {"strategy.options": {"marker": str(tmp_path / "marker")}}
    right, wrong = (n if n in STRATEGIES else f"{FILE}:{n}" for n in (plain, strategy))
    undisturbed, none = state_after(config_of(tmp_path / "plain", right, **base))
    got, reasons = state_after(config_of(tmp_path / "disturbed", wrong, **base | more))
    assert none == []
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert undisturbed.keys() == got.keys()
    for key, value in undisturbed.items():  # (a random state has NaN for "nothing in hand")
        assert torch.equal(got[key].nan_to_num(), value.nan_to_num()), key


def sums(model: nn.Module) -> list[drift.Held]:
    return drift.sums_of((name, "whole", p) for name, p in model.named_parameters())


def test_checksums_see_one_bit() -> None:
    model = nn.Linear(50, 40)
    before = sums(model)
    with torch.no_grad():
        model.weight[3, 4] = torch.nextafter(model.weight[3, 4], torch.tensor(9.0))
    after = sums(model)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
    assert drift.first_difference([before, after, before]) == ("weight", [1], [0, 2])
    assert drift.first_difference([before, before]) is None


def test_numbers_that_are_nan_on_all_ranks_have_not_drifted() -> None:
    """NaN differs from itself: the verdict named all ranks, and nobody that they differ from."""

    def check(others: float) -> None:
        def gather(mine: Any) -> list[Any]:
            return [mine, [(short, name, repr(others)) for short, name, _ in mine]]

        world: Any = SimpleNamespace(gather=gather, size=2)
        drift.check_saved({}, {"optimizer/w/step": math.nan}, world, 3)

    check(math.nan)
    with pytest.raises(Halt, match="'w/step' of rank 1 differs from that of rank 0 after step 3"):
        check(4.0)


WIDTHS = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.int64,
          torch.complex64, torch.complex128]  # fmt: skip


@pytest.mark.parametrize("dtype", WIDTHS)
def test_checksums_see_every_change_and_every_swap(dtype: torch.dtype) -> None:
    """Values whose bits cancel easily (powers of two, opposite signs), in odd layouts."""
    seed = random.randrange(2**32)  # another in each run: the claim is for all of them
    draw = torch.Generator().manual_seed(seed)
    parts = torch.randint(-8, 9, (2, 37, 29), generator=draw).double()
    parts = parts.sign() * 2 ** parts.abs()
    values = torch.complex(*parts) if dtype.is_complex else parts[0] > 2 if dtype == torch.bool \
        else parts[0]  # fmt: skip
    if dtype == torch.int64:
        values = values.long() << torch.randint(0, 50, (37, 29), generator=draw)
    tensor = values.to(dtype).t()  # (29, 37), not contiguous
    before = drift.checksum(tensor).tolist()
    assert drift.checksum(tensor.contiguous()).tolist() == before
    swaps = 0
    for _ in range(200):
        i, j = torch.randint(0, tensor.numel(), (2,), generator=draw).tolist()
        other = tensor.contiguous().view(-1).clone()
        if other[i] == other[j]:
            continue
        swaps += 1
        other[[i, j]] = other[[j, i]]
        assert drift.checksum(other).tolist() != before, (seed, i, j)
        other = tensor.contiguous().view(-1).clone()
        other[i] = other[j]
        assert drift.checksum(other).tolist() != before, (seed, i, j)
    assert swaps > 20


def test_checksums_see_swaps_between_blocks_and_between_tensors() -> None:
    seed = random.randrange(2**32)
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randint(-3, 4, (3 * drift.BLOCK + 5,), generator=draw).to(torch.float64)
    before = drift.checksum(wide).tolist()
    for i, j in [(0, drift.BLOCK), (drift.BLOCK - 1, 3 * drift.BLOCK + 4), (7, 2 * drift.BLOCK)]:
        wide[i], wide[j] = 2.0, 1.0  # their bits differ by 2**52
        first = drift.checksum(wide).tolist()
        wide[i], wide[j] = 1.0, 2.0
        assert drift.checksum(wide).tolist() != first, (seed, i, j)
    assert drift.checksum(wide).tolist() != before
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = sums(model)
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    assert drift.first_difference([found, sums(model)]) == ("0.weight", [1], [0])


def test_checksums_of_nothing_and_of_expanded_tensors() -> None:
    assert drift.checksum(torch.zeros(0, 3)).tolist() == [0]
    expanded = torch.ones(1).expand(7)
    assert drift.checksum(expanded).tolist() == drift.checksum(torch.ones(7)).tolist()
    assert drift.checksum(torch.tensor(3.0)).tolist() != drift.checksum(torch.tensor(4.0)).tolist()


# ------------------------------------------------------------------ unequal data


@pytest.mark.long
def test_data_of_different_lengths_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, "simple_ddp", **{"model.options": {"kind": "length"}})
    with pytest.raises(UsageError) as caught:
        run(config, size=3)
    assert str(caught.value).startswith(
        "the ranks' data sets have different lengths (ranks 0, 2: 4000, rank 1: 3999 samples)"
    )
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ in prove


@pytest.mark.long
def test_prove_catches_a_skipped_collective(tmp_path: Path) -> None:
    done = commands.here(
        "prove", "--strategies", f"{FILE}:SkippingFirst", "--workload", f"{FILE}:make", "--json",
        "--steps", "2", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "rank 1 skipped all_reduce" in done.stdout or "rank 1 is out of step" in done.stdout
