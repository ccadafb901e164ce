"""Stop and go on: bit for bit under the same strategy and world, to rounding under any other."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import commands
import toys
from conformance import AS_ONE, REFUSED, arrays
from conftest import GetRanks, deep_unless, long_unless
from resuming import batches, build, losses_of, run, settings, state_at, train
from shardlab import config as configs
from shardlab import runfolder
from shardlab.checkpoint import files, load, rng
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint import resume as resumes
from shardlab.checkpoint.manifest import Manifest
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import CheckpointConfig, Config
from shardlab.errors import UsageError
from shardlab.files import append_jsonl, read_jsonl, write_text
from shardlab.naming import STRATEGIES
from shardlab.runlock import RunLock
from shardlab.training import housekeeping
from shardlab.world import World

DISTRIBUTED = [name for name in AS_ONE if name != "single"]
SAVED, STEPS = 2, 4


# ------------------------------------------------------------------ nasty models, on the ranks


def save_and_go_on(
    world: World, strategy: str, toy: str, optimizer: str, folder: str, of_world: int
) -> tuple[list[float], Any]:
    instance = build(world, strategy, toy, world.rank, optimizer)
    run(instance, world, range(SAVED), of_world)
    settings = CheckpointConfig(every=1)
    about = About({}, strategy, None)
    checkpoints = Checkpoints(Path(folder), settings, world, instance, about)
    checkpoints.save(SAVED, rng.get(world.device))
    assert checkpoints.last is not None
    assert checkpoints.last.error is None
    losses = run(instance, world, range(SAVED, STEPS), of_world)
    return losses, arrays(instance.full_tensors())


def load_and_go_on(
    world: World, strategy: str, toy: str, optimizer: str, folder: str, of_world: int
) -> tuple[list[float], Any]:
    instance = build(world, strategy, toy, 100 + world.rank, optimizer)
    path = Path(folder) / "checkpoints" / "step-000002"
    if getattr(instance, "LEARNS_LAYOUT", False):
        instance.gradients(batches(world, SAVED, of_world))
        for parameter in instance.params.values():
            parameter.grad = None
    start = Start(None, path, manifests.read(path))
    load.put_back(start, instance, world, configs.load(None, {"strategy.name": strategy}))
    losses = run(instance, world, range(SAVED, STEPS), of_world)
    return losses, arrays(instance.full_tensors())


def toys_of(strategy: str) -> list[str]:
    return [toy for toy in toys.TOYS if toy not in REFUSED.get(strategy, ())]


def all_toys(world: World, what: str, strategy: str, folder: str, of_world: int) -> dict[str, Any]:
    function = {"save": save_and_go_on, "load": load_and_go_on}[what]
    return {
        f"{toy} {optimizer}": function(
            world, strategy, toy, optimizer, f"{folder}/{toy}-{optimizer}", of_world
        )
        for toy in toys_of(strategy)
        for optimizer in ("adamw", *(["sgd"] if toy in ("odd", "unused") else []))
    }


# One of each way to hold parameters and optimizer state, and to lay out what is sent.
MECHANISMS = (
    "bucket_ddp_async", "pytorch_ddp", "zero1", "zero3", "pytorch_zero3", "streaming_diloco",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("strategy", deep_unless(lambda name: name in MECHANISMS, STRATEGIES))
def test_the_same_again_bit_for_bit(strategy: str, ranks: GetRanks, tmp_path: Path) -> None:
    """On models with tied, frozen, unused, odd and scalar tensors, and buffers."""
    world = ranks(1 if strategy == "single" else 2)
    whole = world.run(all_toys, "save", strategy, str(tmp_path), 2, deadline_s=60)
    again = world.run(all_toys, "load", strategy, str(tmp_path), 2, deadline_s=60)
    for rank, cases in enumerate(whole):
        for case, (losses, params) in cases.items():
            assert again[rank][case][0] == losses, case
            for name, value in params.items():
                assert np.array_equal(again[rank][case][1][name], value), (case, name)


@pytest.mark.long
@pytest.mark.parametrize("strategy", deep_unless(lambda name: name in MECHANISMS, DISTRIBUTED))
def test_on_as_one_process(strategy: str, ranks: GetRanks, tmp_path: Path) -> None:
    """Every strategy's checkpoint is read by a plain process, and the other way round."""
    toy_names = [t for t in toys_of(strategy) if t != "buffers"]  # whose meaning the world changes
    for toy in toy_names:
        there, back = str(tmp_path / "there" / toy), str(tmp_path / "back" / toy)
        many = ranks(2).run(save_and_go_on, strategy, toy, "adamw", there, 2, deadline_s=60)
        one = ranks(1).run(load_and_go_on, "single", toy, "adamw", there, 2, deadline_s=60)
        assert_close(many[0], one[0], f"{strategy} to single, {toy}")
        one = ranks(1).run(save_and_go_on, "single", toy, "adamw", back, 2, deadline_s=60)
        many = ranks(2).run(load_and_go_on, strategy, toy, "adamw", back, 2, deadline_s=60)
        assert_close(many[1], one[0], f"single to {strategy}, {toy}")


def assert_close(first: Any, second: Any, what: str) -> None:
    np.testing.assert_allclose(first[0], second[0], rtol=0, atol=1e-10, err_msg=what)
    for name, value in first[1].items():
        np.testing.assert_allclose(value, second[1][name], rtol=0, atol=1e-10, err_msg=what)


# ------------------------------------------------------------------ whole runs

NOT_EVALUATED = {"training.evaluate_every": None, "training.evaluate_samples": None}
# What a run may keep of its own, each under one strategy. The order of a sum matters, and with it
# how buckets are laid out: that shows on three ranks.
VARIED: list[tuple[str, int, dict[str, Any]]] = [
    ("simple_ddp", 2, {"training.micro_batch": 2, "training.global_batch": 8, "data.prefetch": 0}),
    ("zero3", 2, {"checkpoint.asynchronous": True}),
    ("zero3", 2, {"precision.compute": "fp16"}),
    ("pytorch_zero3", 2, {"precision.compute": "bf16"}),
    ("bucket_ddp_async", 2, {"strategy.options": {"comm_dtype": "bf16"}}),
    ("zero1", 2, {"model.workload": "cnn_mnist", "model.options": {"dropout": True},
                  **NOT_EVALUATED}),
    ("bucket_ddp_async", 3, {}),
    ("pytorch_ddp", 3, {}),
]  # fmt: skip
PLAIN = [(name, 2, {}) for name in STRATEGIES if name != "single"]


@pytest.mark.parametrize(
    ("strategy", "size", "changes"),
    [
        *long_unless(lambda strategy, *_: strategy == "simple_ddp", VARIED),
        *deep_unless(lambda *_: False, [("single", 1, {}), *PLAIN]),
        *deep_unless(lambda *_: False, [(n, 3, {}) for n in ("zero3", "pytorch_zero3")]),
    ],
)
def test_a_run_goes_on_exactly(
    strategy: str, size: int, changes: dict[str, Any], ranks: GetRanks, tmp_path: Path
) -> None:
    values = settings(tmp_path, **{"strategy.name": strategy}, **changes)
    _, whole = train(ranks, size, values)
    middle = whole / "checkpoints" / "step-000003"
    values["checkpoint"]["resume"] = str(middle)
    _, resumed = train(ranks, size, values)
    assert resumed != whole
    expected = {step: loss for step, loss in losses_of(whole).items() if step >= 3}
    assert losses_of(resumed) == expected
    assert sorted(expected) == [3, 4, 5]
    want, got = state_at(whole, 6), state_at(resumed, 6)
    assert want.keys() == got.keys()
    different = [name for name, value in want.items() if not torch.equal(value, got[name])]
    assert different == []
    if "training.evaluate_every" not in changes:
        held_out = [read_jsonl(f / "evaluation.jsonl")[-1]["loss"] for f in (whole, resumed)]
        assert held_out[0] == held_out[1]


@pytest.mark.long
def test_through_strategies_and_worlds(ranks: GetRanks, tmp_path: Path) -> None:
    """zero3 on 4 ranks, then DDP on 2, then one process: one run, each sample once."""
    common = {
        "training.steps": 9, "data.epoch": "exact", "training.global_batch": 8,
        "precision.compute": "fp64",
    }  # fmt: skip
    common |= {"training.schedule": "constant", "training.warmup_steps": 0}
    whole_settings = settings(tmp_path / "whole", **common, **{"strategy.name": "single"})
    _, whole = train(ranks, 1, whole_settings)
    values = settings(tmp_path / "parts", **common, **{"strategy.name": "zero3"})
    values["training"]["steps"] = 3
    _, folder = train(ranks, 4, values)
    for size, strategy, steps in ((2, "pytorch_ddp", 6), (1, "single", 9)):
        values["strategy"]["name"] = strategy
        values["training"]["steps"] = steps
        values["checkpoint"]["resume"] = str(folder)
        _, again = train(ranks, size, values)
        assert again == folder
    want, got = losses_of(whole), losses_of(folder)
    assert list(got) == list(range(9))  # no gap, nothing twice
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=0, atol=1e-9)
    expected, reached = state_at(whole, 9), state_at(folder, 9)
    for name, value in expected.items():
        np.testing.assert_allclose(value, reached[name], rtol=0, atol=1e-8, err_msg=name)
    resumes = read_jsonl(folder / "resumes.jsonl")
    assert [row["step"] for row in resumes] == [3, 6]
    assert "strategy.name was 'zero3', is 'pytorch_ddp'" in resumes[0]["changed"]
    assert "launch.world was 4, is 2" in resumes[0]["changed"]


@pytest.mark.long
def test_records_go_on_without_gap_or_repetition(ranks: GetRanks, tmp_path: Path) -> None:
    """A run that was killed after its checkpoint has rows of steps that will be done again."""
    values = settings(tmp_path, **{"strategy.name": "simple_ddp", "training.steps": 6})
    _, folder = train(ranks, 2, values)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    (folder / "status.json").write_text('{"state": "crashed"}')
    half = folder / "checkpoints" / ".step-000006.part"
    half.mkdir()
    before = losses_of(folder)
    values["checkpoint"]["resume"] = "auto"
    result, again = train(ranks, 2, values)
    assert again == folder
    for rank in (0, 1):
        assert [row["step"] for row in read_jsonl(folder / f"rank{rank}.jsonl")] == list(range(6))
        ledger = read_jsonl(folder / f"ledger.rank{rank}.jsonl")
        steps = [entry["step"] for entry in ledger if entry["step"] is not None]
        assert steps == sorted(steps)
        per_step = [steps.count(step) for step in range(6)]
        assert len(set(per_step)) == 1
    assert losses_of(folder) == before
    assert [row["steps"] for row in read_jsonl(folder / "evaluation.jsonl")] == [3, 6]
    assert [row["step"] for row in read_jsonl(folder / "checkpoints.jsonl")] == [3, 6]
    assert not half.exists()
    assert result["steps"] == 6
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_epochs_and_a_micro_batch_go_on(ranks: GetRanks, tmp_path: Path) -> None:
    """Steps follow from the data, accumulation from the ranks; a resumed run is asked for more."""
    base = settings(tmp_path)
    del base["faults"]  # no section
    samples = 2048  # of the synthetic data
    given = {"training.epochs": 3 * 8 / samples, "training.micro_batch": 2}
    values = configs.load(None, given, base).to_dict()
    result, folder = train(ranks, 2, values)
    assert result["steps"] == 3
    saved = configs.load(folder / "config.yaml")
    assert (saved.training.steps, saved.accumulate) == (3, 2)
    with pytest.raises(UsageError, match=r"training\.steps is 4; leave out one of them"):
        train(ranks, 2, saved.with_overrides({"training.steps": 4, **given}).to_dict())

    again = resumes.settings_of(str(folder))
    more = {"checkpoint.resume": str(folder), "launch.world": 1, "training.epochs": 5 * 8 / samples}
    train(ranks, 1, configs.load(None, more, again).to_dict())
    assert [row["step"] for row in read_jsonl(folder / "rank0.jsonl")] == list(range(5))
    saved = configs.load(folder / "config.yaml")
    assert (saved.training.steps, saved.accumulate) == (5, 4)


# ------------------------------------------------------------------ which run "auto" means


def fake_run(root: Path, name: str, status: dict[str, Any], when: int, **changes: Any) -> Path:
    run = root / name
    run.mkdir(parents=True)
    config = Config().with_overrides({"training.seed": 7, **changes})
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "status.json").write_text(json.dumps(status))
    os.utime(run / "status.json", (when, when))
    return run


def test_auto_takes_the_newest_that_did_not_finish(tmp_path: Path) -> None:
    config = Config().with_overrides(
        {"training.seed": 7, "output.root": str(tmp_path), "strategy.name": "zero3"}
    )
    assert resumes.find_run(config) is None
    host = socket.gethostname()
    older = fake_run(tmp_path, "z-older", {"state": "crashed"}, 1000)
    newer = fake_run(tmp_path, "a-newer", {"state": "interrupted"}, 2000)
    fake_run(tmp_path, "finished", {"state": "finished"}, 3000)
    alive = {"state": "running", "host": host, "pids": [os.getppid()]}
    fake_run(tmp_path, "alive", alive, 4000)
    fake_run(tmp_path, "another", {"state": "crashed"}, 5000, **{"training.seed": 8})
    assert resumes.find_run(config) == newer
    shutil.rmtree(newer)
    assert resumes.find_run(config) == older
    dead = {"state": "running", "host": host, "pids": [2**22 + 1]}
    killed = fake_run(tmp_path, "killed", dead, 6000)
    assert resumes.find_run(config) == killed
    with pytest.raises(UsageError, match="alive is running"):
        resumes.taken(tmp_path / "alive", RunLock())


@pytest.mark.parametrize("name", ["run.lock", "resumes.jsonl", "traces/rank0", "status.json.part"])
def test_a_run_folder_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    """A run that continues would write through the link, into somebody's file."""
    run = fake_run(tmp_path, "run", {"state": "crashed"}, 1)
    (run / "checkpoints" / files.name_of(1)).mkdir(parents=True)
    (tmp_path / "precious").write_text("mine")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "precious")
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")  # its own business
    with pytest.raises(UsageError, match=rf"cannot continue in .*{name} is a link"):
        resumes.taken(run, RunLock())
    assert (tmp_path / "precious").read_text() == "mine"
    (run / name).unlink()
    with RunLock() as lock:
        assert resumes.taken(run, lock) == run


def test_no_link_is_written_through(tmp_path: Path) -> None:
    """Nor where a link comes after the folder was looked at."""
    (tmp_path / "precious").write_text("mine")
    for name in ("run.lock", "rows.jsonl", "text.part"):
        (tmp_path / name).symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock().take(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        append_jsonl(tmp_path / "rows.jsonl", {})
    write_text(tmp_path / "text", "ours")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "text").read_text() == "ours"


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """``--resume auto`` and ``runs`` read the files of every folder under their root."""
    run = fake_run(tmp_path, "run", {"state": "crashed"}, 1)
    for name in ("status.json", "config.yaml"):
        (run / name).unlink()
        os.mkfifo(run / name)
    assert runfolder.state_of(run) == {}
    assert files.settings_in(run / "config.yaml") is None
    assert housekeeping.runs_in(tmp_path) == []
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        resumes.taken(run, RunLock())
    saved = run / "checkpoints" / files.name_of(1)
    saved.mkdir(parents=True)
    os.mkfifo(saved / manifests.NAME)
    with pytest.raises(UsageError, match="not a regular file"):
        manifests.read(saved)
    os.mkfifo(saved / "rank0.safetensors")
    with pytest.raises(UsageError, match="not a regular file"):
        manifests.verify(saved, {"rank0.safetensors": manifests.File(0, "")})


def test_deep_json_is_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[" * 100_000)
    assert runfolder.state_of(tmp_path) == {}


def test_keys_of_an_older_version_are_passed_over_if_they_were_off(tmp_path: Path) -> None:
    run = fake_run(tmp_path, "run", {"state": "crashed"}, 1)
    (run / "checkpoints" / files.name_of(1)).mkdir(parents=True)
    config = (run / "config.yaml").read_text()
    for value, is_refused in (("false", False), ("true", True)):
        (run / "config.yaml").write_text(config.replace("data:\n", f"data:\n  audit: {value}\n"))
        base = resumes.settings_of(str(run))
        if is_refused:
            with pytest.raises(UsageError, match="unknown key in data 'audit'"):
                configs.load(None, {}, base)
        else:
            assert configs.load(None, {}, base).data == Config().data


CODE = "payload.py:Thing"
# Every setting that names code, by itself: a key that CODE lacks is not looked for.
NAMES_CODE = ("model.workload", "strategy.name", "training.optimizer", "training.schedule")


@pytest.mark.parametrize("key", NAMES_CODE)
def test_code_is_run_only_if_it_is_named(key: str, tmp_path: Path) -> None:
    """A checkpoint or run folder cannot make us import a file, nor say where to write."""
    settings = {key: CODE, "output.root": "/elsewhere"}
    run = fake_run(tmp_path, "run", {"state": "crashed"}, 1, **settings)
    (run / "checkpoints" / files.name_of(1)).mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"only if you name it: {resumes.CODE[key]}payload\.py"):
        resumes.settings_of(str(run))
    base = resumes.settings_of(str(run), {key: "mine"})
    assert "root" not in base["output"]
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{section}: {{{name}: '{CODE}'}}")
    named = resumes.named_by(configs.settings_in(tmp_path / "mine.yaml"), {})
    assert named == {**dict.fromkeys(resumes.CODE), key: CODE}
    assert named == resumes.named_by({}, {key: CODE})
    base = resumes.settings_of(str(run), named)
    assert base[section][name] == CODE


@pytest.mark.parametrize("key", NAMES_CODE)
def test_the_command_refuses_before_it_imports(key: str, tmp_path: Path) -> None:
    """The checkpoint's checksum is right, and the file that it names lies beside it."""
    (tmp_path / "payload.py").write_text("open('ran', 'w')\nclass Thing: pass\n")
    config = configs.load(None, {key: CODE}).to_dict()
    sealed = Manifest(
        step=1, strategy="zero1", world=1, config=config, samples=None, update={}, numbers={},
        tensors={}, files={},
    )  # fmt: skip
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    (checkpoint / manifests.NAME).write_text(sealed.to_json())
    said = commands.here("train", "--resume", "step-000001", "--world", "1", cwd=tmp_path)
    assert said.returncode == 2
    assert f"only if you name it: {resumes.CODE[key]}{CODE}" in said.stderr
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------ what an older version wrote

OLDER = {
    "accumulate": 2, "batch_split": "exact", "global_batch": 8, "micro_batch": None,
    "momentum": 0.9, "betas": None, "eps": 1e-6, "clip_value": None, "optimizer": "sgd",
}  # fmt: skip


def test_the_settings_of_an_older_run_are_read_in_todays_keys(tmp_path: Path) -> None:
    def resumed(**changes: Any) -> Config:
        (tmp_path / "run" / "checkpoints" / files.name_of(1)).mkdir(parents=True, exist_ok=True)
        older = {"training": {**OLDER, **changes}, "launch": {"world": 2}}
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(older))
        return configs.load(None, {}, resumes.settings_of(str(tmp_path / "run")))

    config = resumed()
    assert (config.training.global_batch, config.accumulate) == (8, 2)
    assert config.training.optimizer_options == {"momentum": 0.9, "eps": 1e-6}
    assert resumed(accumulate=1).training.micro_batch is None
    assert resumed(accumulate=4, micro_batch=1).accumulate == 4
    with pytest.raises(UsageError, match=r"'clip_value'; did you mean 'training\.clip_norm'\?"):
        resumed(clip_value=1.0)
