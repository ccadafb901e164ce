"""Runs that stop and are resumed: what the tests of checkpoints and of faults share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import toys
from conformance import OPTIONS, WORKERS, make_optimizer
from conftest import GetRanks
from shardlab import config as configs
from shardlab import naming
from shardlab.checkpoint import load as loading
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint import storage
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import CheckpointConfig, Config
from shardlab.files import read_jsonl
from shardlab.naming import STRATEGIES
from shardlab.strategies.base import Setup
from shardlab.strategies.update import Rule
from shardlab.world import World

TRAIN_RANK = "shardlab.training.run:train_rank"


def build(world: World, strategy: str, toy: str, seed: int, optimizer: str) -> Any:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    if strategy in WORKERS:
        options["every"] = 3  # so that the checkpoint of step 2 lies between two exchanges
    if strategy == "pytorch_hsdp":
        options["shards"] = 2 if world.size % 2 == 0 else 1
    rule = Rule(clip_norm=0.5, schedule=lambda step: 1 / (1 + step))
    model = toys.build(toy, seed=seed)
    blocks = toys.BLOCKS[toy]
    setup = Setup(model, make_optimizer(optimizer, model), toys.loss, world.mesh, rule, blocks)
    return make(setup, **options)


@contextmanager
def checkpoint_of(world: World, strategy: Any, config: Config) -> Iterator[Start]:
    """A checkpoint of what a strategy holds, in a folder that goes afterwards. A collective."""
    folder = Path(world.gather(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    about = About(config.to_dict(), "another", None)
    checkpoints = Checkpoints(folder, CheckpointConfig(every=1), world, strategy, about)
    checkpoints.save(1, {})
    assert checkpoints.last is not None
    assert checkpoints.last.error is None
    path = folder / "checkpoints" / "step-000001"
    yield Start(None, path, manifests.read(path))
    world.gather(None)  # all have read it
    if world.rank == 0:
        shutil.rmtree(folder)


def hand_over(world: World, giver: Any, taker: Any, config: Config | None = None) -> None:
    """Model, optimizer, schedule and loss scale of one strategy go to another. A collective."""
    config = config or Config()
    with checkpoint_of(world, giver, config) as start:
        loading.load(start, taker, world, config)


def whole_state(world: World, strategy: Any) -> dict[str, torch.Tensor]:
    """The whole tensors of the optimizer's state, by parameter and key. A collective."""
    with checkpoint_of(world, strategy, Config()) as start:
        assert start.checkpoint is not None
        assert start.manifest is not None
        return storage.whole_tensors(start.checkpoint, start.manifest, manifests.OPTIMIZER)


def batches(world: World, step: int, of_world: int) -> list[Any]:
    """What ``of_world`` ranks would read in a step, shared by the ranks that there are."""
    whole = [toys.batch(step, rank, micro) for rank in range(of_world) for micro in range(2)]
    mine = whole[world.rank :: world.size]
    return mine or [whole[0]]


def run(instance: Any, world: World, steps: range, of_world: int) -> list[float]:
    found = []
    for step in steps:
        found.append(float(instance.gradients(batches(world, step, of_world))))
        instance.step()
    return found


def settings(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A small GPT whose vocabulary nothing divides."""

    options = {"layers": 2, "heads": 2, "dim": 16, "context": 16, "vocab": 257}
    values: dict[str, Any] = {
        "model.options": options,
        "data.source": "synthetic",
        "training.global_batch": 8,
        "training.steps": 6,
        "training.clip_norm": 0.1,
        "training.schedule": "cosine",
        "training.warmup_steps": 2,
        "training.weight_decay": 0.1,
        "training.evaluate_every": 3,
        "training.evaluate_samples": 8,
        "checkpoint.every": 3,
        "checkpoint.keep_last": 5,
        "launch.device": "cpu",
        "output.root": str(tmp_path),
    }
    return configs.load(None, values | changes).to_dict()


def train(ranks: GetRanks, size: int, values: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    result = ranks(size).run(TRAIN_RANK, configs.from_dict(values), "a test", deadline_s=60)[0]
    return result, Path(result["folder"])


def state_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"step-{step:06d}"
    manifest = manifests.read(path)
    tensors = {
        name: tensor
        for prefix in ("model/", "optimizer/")
        for name, tensor in storage.whole_tensors(path, manifest, prefix).items()
    }
    numbers = {n: torch.tensor(v) for n, v in manifest.numbers.items()}
    update = {f"update {k}": torch.tensor(float(v)) for k, v in manifest.update.items()}
    return tensors | numbers | update


def losses_of(folder: Path, rank: int = 0) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_jsonl(folder / f"rank{rank}.jsonl")}
