"""Every refusal, in one line that helps; and that what is written can be read again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commands import ROOT
from shardlab import config as configs
from shardlab import naming
from shardlab.checkpoint import files
from shardlab.config import Config
from shardlab.data import sampler
from shardlab.errors import UsageError
from shardlab.specs import parse_spec


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {steps: 7, seed: 3}")
    config = configs.load(path, {"training.seed": 5})
    assert (config.training.steps, config.training.seed) == (7, 5)
    assert config.training.global_batch == Config().training.global_batch


@pytest.mark.timeout(20)
def test_a_config_is_a_file_of_a_configs_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.truncate(write(tmp_path, ""), configs.MOST_BYTES + 1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "nope.yaml", "No such file"),
        (tmp_path / "binary", "not UTF-8 text"),
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "config.yaml", "more than 1 MiB"),
    ):
        with pytest.raises(UsageError, match=f"cannot read the config {path}: {reason}"):
            configs.load(path)
        assert files.settings_in(path) is None


def test_a_shells_pipe_is_a_config() -> None:
    """``--config <(…)``."""
    for steps in (7, 8):  # the second pipe may have the number of the first
        reading, writing = os.pipe()
        os.write(writing, f"training: {{steps: {steps}}}".encode())
        os.close(writing)
        path = Path(f"/dev/fd/{reading}")
        assert configs.load(path).training.steps == steps
        os.close(reading)


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text; our loader does not, and leaves others' alone."""
    for text in ("1e-4", "1E-4", "0.0001", "1.0e-4", "+1e-4"):
        config = configs.load(write(tmp_path, f"training: {{learning_rate: {text}}}"))
        assert config.training.learning_rate == 1e-4
    assert yaml.safe_load("1e-4") == "1e-4"
    rate = configs.load(None, {"training.learning_rate": 1}).training.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_a_merged_key_is_not_there_twice() -> None:
    text = "base: &b {steps: 1, seed: 2}\nrun: &r {<<: *b, steps: 3}\nagain: {<<: *r, seed: 4}"
    found = configs.parse_yaml(text)
    assert (found["run"], found["again"]) == ({"steps": 3, "seed": 2}, {"steps": 3, "seed": 4})


def test_the_resolved_config_can_be_run_again(tmp_path: Path) -> None:
    text = "training: {learning_rate: 1e-4}\nlaunch: {world: 4}\nmodel: {options: {layers: 3}}\n"
    text += "strategy: {name: pytorch_ddp, options: {bucket_mb: 1e-3}}"
    first = configs.load(write(tmp_path, text))
    assert configs.load(write(tmp_path, first.to_yaml())) == first


MICRO, BATCH = "training.micro_batch", "training.global_batch"
WORLD = "launch.world"
EVERY, PATIENCE = "training.evaluate_every", "training.patience"
RESTARTS = {"launch.max_restarts": 1, "checkpoint.every": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"strategy.name": "simple_dpp"}, "'simple_dpp'; did you mean 'simple_ddp'?"),
        ({"strategy.name": "xyz"}, "known: single, simple_ddp"),
        ({"model.workload": "gpt3"}, "unknown workload 'gpt3'; did you mean 'gpt2'?"),
        ({"training.stepz": 3}, "unknown key in training 'stepz'; did you mean 'steps'?"),
        ({"trainin.steps": 3}, "unknown section 'trainin'; did you mean 'training'?"),
        ({"steps": 3}, "'steps' is not section.key"),
        ({"training.steps": "ten"}, "training.steps must be a whole number, got text: 'ten'"),
        ({"training.steps": 2.5}, "training.steps must be a whole number, got number: 2.5"),
        ({"training.steps": True}, "training.steps must be a whole number, got true or false"),
        ({"training.learning_rate": "1e-4"}, "training.learning_rate must be a number, got text"),
        ({"training.steps": 0}, "training.steps must be at least 1, got 0"),
        ({"training.learning_rate": -1}, "training.learning_rate must be at least 0"),
        ({"training.learning_rate": float("nan")}, "training.learning_rate must be at least 0"),
        ({"training.optimizer": "adaw"}, "did you mean 'ada"),
        ({"training.momentum": 0.9}, "did you mean 'training.optimizer_options.momentum'?"),
        ({"training.betas": [0.9, 0.9]}, "did you mean 'training.optimizer_options.betas'?"),
        (
            {"training.accumulate": 2},
            "'accumulate'; did you mean 'training.micro_batch'?",
        ),
        ({"data.shuffle": 1}, "data.shuffle must be a true or false, got whole number: 1"),
        ({"data.seq_len": 0}, "data.seq_len must be at least 1"),
        ({"data.epoch": "exakt"}, "did you mean 'exact'"),
        ({"data.prefetch": -1}, "data.prefetch must be at least 0"),
        ({"precision.compute": "fp8"}, "unknown precision.compute 'fp8'; did you mean 'fp"),
        ({"launch.world": 0}, "launch.world must be at least 1"),
        ({"launch.port": 70000}, "launch.port must be at most 65,535, got 70000"),
        ({"launch.backend": "nccl", "launch.device": "cpu"}, "the nccl backend needs GPUs"),
        ({"launch.world": 2, "strategy.name": "single"}, "strategy 'single' is one process"),
        ({"launch.world": 16}, "training.global_batch 8 is too small for 16 ranks"),
        ({"launch.world": 16}, "use 16 or more"),
        ({"profile.ledger_steps": -1}, "profile.ledger_steps must be at least 0"),
        ({MICRO: 0}, "training.micro_batch must be at least 1, got 0"),
        ({MICRO: 2.5}, "training.micro_batch must be a whole number"),
        ({BATCH: 0}, "training.global_batch must be at least 1, got 0"),
        ({"training.epochs": 0}, "training.epochs must be above 0, got 0"),
        ({"training.epochs": float("nan")}, "training.epochs must be above 0, got nan"),
        ({"training.epochs": float("inf")}, "training.epochs must be at most 1e+308, got inf"),
        ({"training.epochs": "ten"}, "training.epochs must be a number, got text"),
        ({"training.epochs": True}, "training.epochs must be a number, got true or false"),
        ({"launch.address": "host:29500"}, "launch.address must be a host's name or address, with"),
        ({"launch.interface": "eth0,eth1"}, "launch.interface must be the name of one network"),
        ({"launch.max_restarts": 1}, "set checkpoint.every"),
        ({"launch.min_world": 1}, "set launch.max_restarts"),
        ({"launch.world": 2, "launch.min_world": 3, **RESTARTS}, "1 to launch.world"),
        ({EVERY: -1}, "evaluate_every must be at least 0"),
        ({EVERY: 1, "training.evaluate_samples": 0}, "must be at least 1"),
        ({"training.evaluate_samples": 5}, "set training.evaluate_every"),
        ({PATIENCE: 2}, "patience counts evaluations between steps; set training.eval"),
        ({PATIENCE: 2, EVERY: 0}, "evaluate_every to 1 or more"),
        ({PATIENCE: 0, EVERY: 1}, "patience must be at least 1"),
        ({EVERY: 2, "profile.enabled": True, "training.steps": 9}, "would be in the profile"),
    ],
)
def test_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        configs.load(None, overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {seed: 2001-13-45}", "line 1: '2001-13-45' is not a valid timestamp"),
        ("training: {steps: " + "9" * 6000 + "}", "999…' is not a valid int"),
        ("training: {steps: 0x" + "f" * 5000 + "}", "fff…' is not a valid int"),
        pytest.param("a: " + "[" * 3000 + "]" * 3000, "nested too deeply", marks=pytest.mark.long),
        ("a: !!int x", "line 1: 'x' is not a valid int"),
        ("a: !!float x", "line 1: 'x' is not a valid float"),
        ("a: !!timestamp x", "line 1: 'x' is not a valid timestamp"),
        ("a: !!bool x", "line 1: 'x' is not a valid bool"),
        ("a: !!set [1]", "line 1: expected a mapping"),
        ("training:\n  steps: 1\n  steps: 2", "line 3: the key 'steps' is there twice"),
        ("training: {steps: 1}\ntraining: {}", "line 2: the key 'training' is there twice"),
        ("training: {seed: 9223372036854775808}", "training.seed must be at most 92233"),
        ("launch: {timeout_s: 1e300}", "launch.timeout_s must be at most 100,000,000, got 1e+300"),
        ("training: [", "line 1: "),
        ("- a\n- b", "a config is a mapping of sections, not a list"),
        ("training: 3", "training is a section, not a whole number"),
        ("model: {options: 3}", "model.options must be a mapping, got whole number"),
        ("training: {world: 2}", "unknown key in training 'world'; did you mean 'launch.world'?"),
        ("learning_rate: 0.1", "did you mean 'training.learning_rate'?"),
        ("training: {batch_size: 3}", "unknown key in training 'batch_size'"),
        ("precision: fp16", "precision is a section, not a text; its keys: compute, loss_scale"),
        ("model: {num_layers: [1]}\ntraining: 3", "unknown key in model 'num_layers'"),
        ("3: {4: 5}", "unknown section '3'"),
        ("training: {4: 5}", "unknown key in training '4'"),
    ],
)
def test_refuses_a_file(text: str, message: str, tmp_path: Path) -> None:
    """PyYAML's constructors raise whatever Python raises, and it takes the last of two values. A
    word in the wrong place is answered with ours."""
    with pytest.raises(UsageError) as caught:
        configs.load(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_or_section_is_the_defaults(tmp_path: Path) -> None:
    assert configs.load(write(tmp_path, "")) == Config()
    assert configs.load(write(tmp_path, "training:\nmodel: {}")) == Config()


def test_paths_are_looked_at_once_and_not_while_building(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    used = configs.load(None, {"output.dir": str(tmp_path)})
    with pytest.raises(UsageError, match="exists and is not empty"):
        used.check_paths()
    nowhere = configs.load(None, {"data.source": "/nope/*.bin", "output.root": str(tmp_path)})
    with pytest.raises(UsageError, match=r"no such data: /nope/\*.bin; data.source is"):
        nowhere.check_paths()


@given(batch=st.integers(1, 200), world=st.integers(1, 16), micro=st.integers(1, 8))
def test_accumulation_follows_from_the_batch_the_ranks_and_the_micro_batch(
    batch: int, world: int, micro: int
) -> None:
    """No rank takes more than a micro-batch at a time, nor more micro-batches than it must."""
    asked = {BATCH: batch, MICRO: micro, WORLD: world}
    if batch < world:
        with pytest.raises(UsageError, match=f"use {world} or more"):
            configs.load(None, asked)
        return
    config = configs.load(None, asked)
    largest = -(-batch // world)
    assert config.accumulate == -(-largest // micro)
    parts = sampler.rank_share(np.arange(batch), world, 0, config.accumulate)
    assert max(map(len, parts)) <= micro
    again = config.in_parts(config.accumulate)
    assert again.accumulate == config.accumulate


# ------------------------------------------------------------------ numbers that follow from others


@pytest.mark.parametrize(
    ("given", "batch", "times"),
    [
        ({MICRO: 4, BATCH: 32, WORLD: 2}, 32, 4),
        ({MICRO: 4, WORLD: 2}, 8, 1),  # a batch of each GPU: the global one follows
        ({MICRO: 4, BATCH: 9, WORLD: 2}, 9, 2),  # at most 4
        ({MICRO: 9, BATCH: 8, WORLD: 1}, 8, 1),
        ({WORLD: 2}, 8, 1),
        ({WORLD: 3}, 8, 1),  # three, three and two
    ],
)
def test_what_follows_from_the_micro_batch(given: dict[str, Any], batch: int, times: int) -> None:
    for config in (
        configs.load(None, given),
        configs.load(None, {k: v for k, v in given.items() if k != WORLD}).at_world(given[WORLD]),
    ):
        assert (config.training.global_batch, config.accumulate) == (batch, times)
        assert configs.from_dict(config.to_dict()) == config


def test_a_later_word_replaces_what_follows_from_it(tmp_path: Path) -> None:
    """Flags stand above the file: --steps replaces its epochs, and the other way round."""
    path = write(tmp_path, "training: {epochs: 2, global_batch: 16, micro_batch: 4}")
    of_file = configs.load(path, {WORLD: 2})
    assert (of_file.training.epochs, of_file.training.steps, of_file.accumulate) == (2, 0, 2)
    by_steps = configs.load(path, {"training.steps": 5, WORLD: 2}).training
    assert (by_steps.epochs, by_steps.steps) == (None, 5)
    assert configs.load(path, {BATCH: 32, WORLD: 2}).accumulate == 4
    # A run that is resumed, with other ranks: the global batch stays, and accumulation follows.
    base = configs.load(path, {WORLD: 2}).to_dict()
    del base["faults"]  # no section
    assert configs.load(None, {WORLD: 4}, base).accumulate == 1
    assert configs.load(None, {"training.epochs": 3}, base).training.steps == 0
    path.write_text("training: {epochs: 3}")
    steps = {"training": {"steps": 7, "seed": 1}}
    assert configs.load(path, {}, steps).training == configs.TrainingConfig(
        epochs=3, steps=0, seed=1
    )


# ------------------------------------------------------------------ names, and misplaced words


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ddp", "pytorch_ddp"), ("DDP", "pytorch_ddp"), ("NO_SHARD", "pytorch_ddp"),
        ("fsdp", "pytorch_zero3"), ("full_shard", "pytorch_zero3"),
        ("FULL_SHARD", "pytorch_zero3"), ("full-shard", "pytorch_zero3"),
        ("fsdp_full_shard", "pytorch_zero3"), ("SHARD_GRAD_OP", "pytorch_zero2"),
        ("fsdp_shard_grad_op", "pytorch_zero2"), ("HYBRID_SHARD", "pytorch_hsdp"),
        ("baseline", "single"), ("simple_ddp_ga", "simple_ddp_ga"),
        ("my_file.py:DDP", "my_file.py:DDP"),
    ],
)  # fmt: skip
def test_other_names_of_strategies(theirs: str, ours: str) -> None:
    assert configs.load(None, {"strategy.name": theirs}).strategy.name == ours
    assert parse_spec(f"{theirs}:bucket_mb=4") == (ours, {"bucket_mb": 4})


def test_words_in_capitals() -> None:
    config = configs.load(None, {"precision.compute": "FP16", "launch.backend": "Gloo"})
    assert (config.precision.compute, config.launch.backend) == ("fp16", "gloo")


def test_the_page_has_every_name_that_is_understood() -> None:
    page = (ROOT / "docs" / "workloads.md").read_text()
    table = page.partition("## Names of strategies")[2].partition("\n## ")[0]
    assert set(naming.ALIASES) - set(re.findall(r"`([^`]+)`", table)) == set()


# ------------------------------------------------------------------ built once


@pytest.mark.long
def test_a_run_builds_its_config_once(tmp_path: Path) -> None:
    """It is passed on as an object: to the ranks, to checkpoints, and to a restarted world."""
    from shardlab import api

    build = configs.from_dict
    with mock.patch.object(configs, "from_dict", side_effect=build) as built:
        found = api.train(
            "gpt2", "simple_ddp", world=1, steps=1, out=tmp_path / "run",
            settings={"model.size": "tiny", "data.source": "synthetic", "launch.device": "cpu"},
        )  # fmt: skip
    assert found.passed
    assert built.call_count == 1
