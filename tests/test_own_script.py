"""A strategy in a script of the user's own: the example beside the plain one, and checkpoints."""

from __future__ import annotations

import difflib
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commands
import shardlab
from commands import ROOT
from conftest import GetRanks
from shardlab.errors import UsageError
from shardlab.ledger import LEDGER
from shardlab.world import World

PLAIN, PARALLEL = (ROOT / "examples" / f"{name}_script.py" for name in ("plain", "parallel"))
PAGE = (ROOT / "docs" / "own-script.md").read_text()

# ------------------------------------------------------------------ the example


def body(path: Path) -> list[str]:
    """The script without its docstrings."""
    return re.sub(r'^ *""".*?"""\n', "", path.read_text(), flags=re.S | re.M).splitlines()


def changed() -> list[str]:
    lines = difflib.unified_diff(body(PLAIN), body(PARALLEL), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def test_the_page_shows_the_difference() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.S)
    assert [line for line in shown.splitlines() if line[:1] in "+-"] == [
        line for line in changed() if line.strip("+- ")
    ]
    come, go = (sum(line[0] == sign for line in shown.splitlines()) for sign in "+-")
    assert come < go
    assert f"{come} lines come in, {go} go out" in " ".join(PAGE.split())


def in_double(path: Path, target: Path, strategy: str = "zero2") -> Path:
    """The script in float64, where another order of sums shows in the last digits alone."""
    first = "def main():\n"
    text = path.read_text().replace(first, f"{first}    torch.set_default_dtype(torch.float64)\n")
    target.write_text(text.replace('"zero2"', f'"{strategy}"'))
    return target


def averages(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "average.pt")
    return state


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_script_equals_the_plain_one_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = in_double(PLAIN, tmp_path / "plain.py")
    monkeypatch.setattr(sys, "argv", ["plain.py", str(tmp_path / "alone")])
    try:
        runpy.run_path(str(plain), run_name="__main__")
    finally:
        torch.set_default_dtype(torch.float32)
    expected = averages(tmp_path / "alone")
    assert all(tensor.dtype == torch.float64 for tensor in expected.values())
    run = tmp_path / "run"

    def ran(strategy: str, ranks: int) -> tuple[str, dict[str, Tensor]]:
        script = in_double(PARALLEL, tmp_path / "parallel.py", strategy)
        starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = commands.run(
            sys.executable, *(starter if ranks > 1 else []), str(script), str(run), cwd=tmp_path,
            OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        return done.stdout, averages(run)

    printed, whole = ran("zero2", 2)
    assert re.findall(r"step (\d+)", printed) == ["20", "40", "60"]
    assert largest_difference(whole, expected) < 1e-10
    # Killed after step 40, it goes on: here in another strategy and world, without torchrun.
    shutil.rmtree(run / "checkpoints" / "step-000060")
    printed, other = ran("pytorch_ddp", 1)
    assert re.findall(r"step (\d+)", printed) == ["60"]
    assert 0 < largest_difference(other, whole) < 1e-10


# ------------------------------------------------------------------ checkpoints of one's own loop


def made(world: World, name: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout)) for _ in range(3)]
    strategy = shardlab.strategy(
        name, nn.Sequential(*layers).double(), lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda m, b: (m(b.inputs) - b.targets).square().sum(), clip_norm=1.0,
        mesh=world.mesh, ema_decay=0.5, schedule=lambda step: 0.9**step,
        **({"bucket_mb": 0.0001} if name == "zero2" else {}),
    )  # fmt: skip
    torch.manual_seed(world.rank)
    return strategy


def advance(strategy: Any, steps: range, world: World) -> None:
    """With two micro-batches in each step."""
    for step in steps:
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        halves = x[world.rank :: world.size].chunk(2)
        strategy.gradients([shardlab.Batch(h, h.flip(1), h.numel(), len(h)) for h in halves])
        strategy.step()
    assert not LEDGER.entries, "every collective is kept for ever"


def both(strategy: Any) -> dict[str, Tensor]:
    """The parameters, and their moving average."""
    found = {f"now {name}": tensor for name, tensor in strategy.full_params().items()}
    strategy.exchange_averages()
    found |= {f"average {name}": tensor for name, tensor in strategy.full_params().items()}
    strategy.exchange_averages()
    return found


def save(world: World, name: str, folder: str, dropout: float) -> dict[str, Tensor]:
    """Five steps, with checkpoints after the second and the third; what it ends with."""
    strategy = made(world, name, dropout)
    assert shardlab.load_checkpoint(strategy, folder) == 0
    for steps in (range(2), range(2, 3)):
        advance(strategy, steps, world)
        shardlab.save_checkpoint(strategy, folder, steps.stop)
    advance(strategy, range(3, 5), world)
    return both(strategy)


def load(world: World, name: str, folder: str, dropout: float) -> tuple[int, dict[str, Tensor]]:
    strategy = made(world, name, dropout)
    first = shardlab.load_checkpoint(strategy, folder)
    advance(strategy, range(first, 5), world)
    return first, both(strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved_by", "ranks_then", "loaded_by", "ranks_now"),
    [
        ("zero3", 2, "zero3", 2),
        ("zero3", 2, "pytorch_ddp", 1),
        ("pytorch_zero3", 1, "zero2", 2),
        (f"{ROOT / 'examples' / 'my_strategy.py'}:OneMessage", 2, "pytorch_zero2", 2),
    ],
    ids=["the same", "fewer", "more", "your own"],
)
def test_a_checkpoint_is_read_by_any_strategy_and_world(
    saved_by: str, ranks_then: int, loaded_by: str, ranks_now: int, tmp_path: Path, ranks: GetRanks
) -> None:
    is_same = (saved_by, ranks_then) == (loaded_by, ranks_now)
    dropout = 0.2 if is_same else 0.0  # other ranks drop other units
    there = f"{__name__}:save"
    expected = ranks(ranks_then).run(there, saved_by, str(tmp_path), dropout)[0]
    # A damaged one is passed over; what a killed run left is removed.
    newest = tmp_path / "checkpoints" / "step-000003"
    (newest / "rank0.safetensors").write_bytes(b"torn")
    (tmp_path / "checkpoints" / ".step-000004.part").mkdir()
    results = ranks(ranks_now).run(f"{__name__}:load", loaded_by, str(tmp_path), dropout)
    assert not (tmp_path / "checkpoints" / ".step-000004.part").exists()
    for first, found in results:
        assert first == 2
        assert largest_difference(found, expected) <= (0 if is_same else 1e-10)
    assert any("average" in name and tensor.abs().sum() > 0 for name, tensor in expected.items())


def misuse(world: World, folder: str) -> tuple[str, str]:
    """What is said of a checkpoint that cannot be written, and of one of another model."""
    strategy = made(world, "zero1")
    with pytest.raises(OSError, match="checkpoint of step 1") as blocked:
        shardlab.save_checkpoint(strategy, Path(folder) / "file" / "run", 1)
    shardlab.save_checkpoint(strategy, folder, 1)
    other = shardlab.strategy(
        "zero1", nn.Linear(6, 2).double(), lambda params: torch.optim.SGD(params, lr=0.1),
        lambda m, b: m(b.inputs).sum(), mesh=world.mesh,
    )  # fmt: skip
    with pytest.raises(UsageError) as of_another:
        shardlab.load_checkpoint(other, folder)
    return str(blocked.value), str(of_another.value)


def test_what_cannot_be_done_is_said_on_every_rank(tmp_path: Path, ranks: GetRanks) -> None:
    (tmp_path / "file").write_text("")
    for blocked, other in ranks(2).run(f"{__name__}:misuse", str(tmp_path)):
        assert blocked.startswith("the checkpoint of step 1 is not written: Not a directory")
        assert "is of another model" in other
