"""Every refusal, in one line that helps; and that what is written can be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardlab import config as configs
from shardlab.config import Config, check_batch
from shardlab.errors import UsageError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {steps: 7, seed: 3}")
    config = configs.load(path, {"training.seed": 5})
    assert (config.training.steps, config.training.seed) == (7, 5)
    assert config.training.global_batch == Config().training.global_batch


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4", "+1e-4"])
def test_scientific_notation_is_a_number(text: str, tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-4 as text."""
    config = configs.load(write(tmp_path, f"training: {{learning_rate: {text}}}"))
    assert config.training.learning_rate == 1e-4


def test_our_loader_leaves_others_alone() -> None:
    configs.parse_value("1e-4")
    assert yaml.safe_load("1e-4") == "1e-4"


def test_a_whole_number_will_do_for_a_number() -> None:
    rate = configs.load(None, {"training.learning_rate": 1}).training.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_the_resolved_config_can_be_run_again(tmp_path: Path) -> None:
    first = configs.load(
        None,
        {
            "training.learning_rate": 1e-4,
            "launch.world": 4,
            "strategy.name": "pytorch_ddp",
            "strategy.options.bucket_mb": 1e-3,
            "model.options.layers": 3,
        },
    )
    assert configs.load(write(tmp_path, first.to_yaml())) == first


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"strategy.name": "simple_dpp"},
            "unknown strategy 'simple_dpp'; did you mean 'simple_ddp'?",
        ),
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
        ({"training.learning_rate": -1}, "training.learning_rate must be 0 or more"),
        ({"training.learning_rate": float("nan")}, "training.learning_rate must be 0 or more"),
        ({"training.optimizer": "adaw"}, "did you mean 'ada"),
        ({"training.momentum": 0.9}, "training.momentum is for sgd; adamw has no such setting"),
        ({"data.shuffle": 1}, "data.shuffle must be a true or false, got whole number"),
        ({"data.seq_len": 0}, "data.seq_len must be at least 1"),
        ({"data.source": "/nope/*.bin"}, "no such data: /nope/*.bin"),
        ({"precision.compute": "fp8"}, "unknown precision.compute 'fp8'; did you mean 'fp"),
        ({"launch.world": 0}, "launch.world must be at least 1"),
        ({"launch.port": 70000}, "launch.port must be 0 to 65535"),
        ({"launch.backend": "nccl", "launch.device": "cpu"}, "the nccl backend needs GPUs"),
        ({"launch.world": 2, "strategy.name": "single"}, "strategy 'single' is one process"),
        (
            {"launch.world": 3, "training.global_batch": 8},
            "a global batch of 8 cannot be divided evenly over 3 ranks x 1 micro-batches; "
            "use 6 or 9, or training.batch_split: uneven",
        ),
        ({"launch.world": 16}, "use 16, or training.batch_split"),
        ({"profile.ledger_steps": -1}, "profile.ledger_steps must be 0 or more"),
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
        ("training: [", "line 1: "),
        ("- a\n- b", "a config is a mapping of sections, not a list"),
        ("training: 3", "training is a section, not a whole number"),
        ("model: {options: 3}", "model.options must be a mapping, got whole number"),
    ],
)
def test_refuses_a_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        configs.load(write(tmp_path, text))
    assert message in str(caught.value)


def test_refuses_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        configs.load(tmp_path / "nope.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        configs.load(tmp_path / "binary")


def test_an_empty_file_or_section_is_the_defaults(tmp_path: Path) -> None:
    assert configs.load(write(tmp_path, "")) == Config()
    assert configs.load(write(tmp_path, "training:\nmodel: {}")) == Config()


def test_refuses_a_used_output_folder(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(UsageError, match="exists and is not empty"):
        configs.load(None, {"output.dir": str(tmp_path)})


def test_uneven_is_allowed_when_asked() -> None:
    configs.load(None, {"launch.world": 3, "training.batch_split": "uneven"})


@given(batch=st.integers(1, 200), world=st.integers(1, 16), micro=st.integers(1, 8))
def test_the_batch_that_is_suggested_is_accepted(batch: int, world: int, micro: int) -> None:
    training = configs.TrainingConfig(global_batch=batch, accumulate=micro)
    try:
        check_batch(training, world)
    except UsageError as error:
        assert batch % (world * micro)
        suggested = str(error).partition("use ")[2].partition(",")[0].split(" or ")
        for number in suggested:
            check_batch(configs.TrainingConfig(global_batch=int(number), accumulate=micro), world)
    else:
        assert batch % (world * micro) == 0
