"""Each workload on real samples and 2 ranks: it learns, and evaluates as one process does."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import language_models
from conformance import Trajectory, first_difference, one_process
from conftest import GetRanks, deep_unless
from shardlab import config as configs
from shardlab import naming
from shardlab.config import Config, DataConfig
from shardlab.data.images import ImageSet
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES, WORKLOADS
from shardlab.optim import optimizers
from shardlab.strategies.base import Setup
from shardlab.training import builders
from shardlab.training import run as running
from shardlab.workloads import batchnorm, causal_lm, images
from shardlab.workloads.base import Batch, Part, cast_model, classification_loss, hold_out
from shardlab.workloads.batchnorm import SyncBatchNorm2d
from shardlab.workloads.cnn import CNN, cnn_mnist
from shardlab.workloads.resnet import ResNet, resnet_cifar10
from shardlab.workloads.synthetic import Tokens
from shardlab.world import World
from training import train

ROOT = Path(__file__).parents[2]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------ each learns, on 2 ranks


def learn(world: World, overrides: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """On a rank: train, and evaluate under the strategy."""
    config, workload, strategy, losses = train(world, {"training.evaluate_every": 0, **overrides})
    evaluated = running.make_evaluation(config, workload, world, strategy)()
    assert workload.held_out is not None
    assert evaluated["samples"] == (config.training.evaluate_samples or len(workload.held_out))
    return losses, evaluated


def check_learning(
    ranks: GetRanks, overrides: dict[str, Any], *, fall: float, accuracy: float | None = None
) -> None:
    """The loss falls to this part of the first; of the samples held out, all are evaluated. (That
    the evaluation is that of one process is tested in test_evaluate.py.)"""
    (losses, evaluated), _ = ranks(2).run(learn, overrides)
    assert np.mean(losses[-3:]) < fall * losses[0]
    if accuracy is not None:
        assert evaluated["accuracy"] > accuracy


TINY = {"size": "tiny"}
RESNET = {**TINY, "dataset": "digits", "sync_batchnorm": True}


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "options", "strategy", "steps", "rate", "fall", "accuracy"),
    [
        ("cnn_mnist", {"dataset": "digits"}, "zero2", 15, 1e-3, 0.6, 0.5),
        # In the shape of CIFAR-10, 3 x 32 x 32. So early, BatchNorm's running statistics are not
        # the data's yet: no accuracy to ask for.
        ("resnet_cifar10", RESNET, "pytorch_zero3", 12, 1e-2, 0.8, -1),
        ("gpt2", TINY, "zero3", 20, 1e-3, 0.8, None),
        ("cnn_mnist", {}, "simple_ddp", 25, 3e-3, 0.8, None),
        ("resnet_cifar10", TINY, "simple_ddp", 25, 3e-3, 0.8, None),
        ("gpt2", TINY, "simple_ddp", 25, 3e-3, 0.8, None),
        ("causal_lm", TINY, "simple_ddp", 25, 3e-3, 0.8, None),
    ],
)
def test_it_learns(
    workload: str,
    options: dict[str, Any],
    strategy: str,
    steps: int,
    rate: float,
    fall: float,
    accuracy: float | None,
    ranks: GetRanks,
) -> None:
    """Real digits and text; and the synthetic data that stand in for them, under simple_ddp."""
    is_synthetic = strategy == "simple_ddp"
    if "dataset" in options:
        pytest.importorskip("sklearn")
    if workload == "causal_lm":
        pytest.importorskip("transformers")
    overrides = {
        "model.workload": workload,
        "model.options": options,
        "data.source": "synthetic" if is_synthetic else "auto",
        "strategy.name": strategy,
        "training.steps": steps,
        "training.global_batch": 16 if is_synthetic else 32,
        "training.learning_rate": rate,
        "training.evaluate_samples": 51,
    }
    check_learning(ranks, overrides, fall=fall, accuracy=accuracy)


REVIEWS = [
    ("I sent the soup back twice and it was still cold. Never again.", 0),
    ("Waited fifty minutes for a table we had booked. The waiter laughed at us.", 0),
    ("The room smelled of smoke and the shower did not work at all.", 0),
    ("Overpriced, and the bread was stale. The view could not save it.", 1),
    ("The staff tried, but half of the menu was gone by eight o'clock.", 1),
    ("Not good. Dry cake, weak coffee, and a long queue for both.", 1),
    ("It was fine. Nothing to complain about, nothing to remember.", 2),
    ("Average burgers at an average price; quick service though.", 2),
    ("Some dishes were nice and some were bland, so three stars it is.", 2),
    ("Good pizza and a friendly crew. Parking is a little hard to find.", 3),
    ("We enjoyed it. The noodles were fresh, the dessert too sweet.", 3),
    ("Nice little shop with a good choice of books, would visit again.", 3),
    ("Best ramen I have had outside of Japan! We came back the next day.", 4),
    ("A wonderful evening from the first glass to the last bite.", 4),
    ("They fixed my bike in an hour and would not take a tip. Amazing people.", 4),
]


@pytest.fixture(scope="session")
def reviews_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    for split, rows in (("train", REVIEWS * 2), ("test", REVIEWS[1::2])):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    return folder


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def language_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    return language_models.save(folder, request.param, [text for text, _ in REVIEWS])


@pytest.mark.long
def test_causal_lm_learns_to_rate_reviews(
    language_model: str, reviews_folder: Path, ranks: GetRanks
) -> None:
    overrides = {
        "model.workload": "causal_lm",
        "model.options": {"model": language_model},
        "data.source": str(reviews_folder),
        "strategy.name": "zero3" if "llama" in language_model else "pytorch_zero3",
        "training.steps": 30,
        "training.global_batch": 6,
        "training.learning_rate": 5e-3,
    }
    check_learning(ranks, overrides, fall=0.5, accuracy=-1)


def test_reviews_as_tokens(language_model: str, reviews_folder: Path) -> None:
    """The loss is on the answer alone; padding changes nothing; the blocks are the layers."""
    data = DataConfig(source=str(reviews_folder), seq_len=40)
    workload = causal_lm.causal_lm(data, model=language_model)
    model = workload.make_model().eval()
    for name in workload.blocks:
        model.get_submodule(name)
    assert len(workload.blocks) in (2, 3)
    both = workload.dataset.batch([0, 6])
    lengths = both.inputs["attention_mask"].sum(1)
    assert both.inputs["input_ids"].shape == (2, max(lengths)) <= (2, 40)
    answers = workload.dataset.answers  # type: ignore[attr-defined]
    assert both.count == len(answers[0]) + len(answers[2])
    for row, label in ((0, 0), (1, 2)):
        targets = both.targets[row][both.targets[row] != causal_lm.IGNORED]
        assert targets.tolist() == answers[label]
    with torch.no_grad():
        whole = workload.loss(model, both)
        parts = [workload.loss(model, workload.dataset.batch([i])) for i in (0, 6)]
        assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-5)
        nothing = workload.dataset.batch([])
        assert (nothing.count, nothing.samples) == (0, 0)
        assert float(workload.loss(model, nothing)) == 0
    assert workload.flops_per_sample is not None
    assert workload.flops_per_sample > 6 * 20 * 400 * 48  # the head alone, over a few tokens


def test_the_rating_is_the_likeliest_of_the_ratings() -> None:
    """Not of all tokens; and at the place where the answers differ."""
    made = [[7, 1], [7, 2], [7, 3]]
    assert causal_lm.deciding(made) == 1
    assert causal_lm.deciding([[1], [2]]) == 0

    logits = torch.zeros(2, 4, 9)
    logits[:, :, 5] = 9.0  # no rating
    logits[0, 2, 2] = 1.0
    logits[1, 3, 1] = 1.0
    model = mock.Mock(return_value=SimpleNamespace(logits=logits))
    targets = torch.tensor([[-100, 7, 2, -100], [-100, -100, 7, 3]])
    batch = Batch({"input_ids": targets}, targets, count=4, samples=2)
    assert int(causal_lm.rate(made)(model, batch)["correct"]) == 1


def test_a_tokenizer_that_merges_the_ratings_is_refused() -> None:
    with pytest.raises(UsageError, match="does not tell the ratings apart"):
        causal_lm.answers(lambda _text: [1, 2], 5)


def test_a_prompt_without_room_is_refused(reviews_folder: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"data.seq_len 10 leaves none for the review"):
        causal_lm.causal_lm(DataConfig(source=str(reviews_folder), seq_len=10), size="tiny")


# ------------------------------------------------------------------ synthetic twins


def test_synthetic_tokens_of_the_splits_differ() -> None:
    train, test = Tokens(16, 256, "train"), Tokens(16, 256, "test")
    assert torch.equal(train.batch([3, 5]).inputs[1], train.batch([5]).inputs[0])
    seen, held_out = (
        {tuple(row) for row in d.batch(range(len(d))).inputs.tolist()} for d in (train, test)
    )
    assert len(seen) > 1000
    assert not seen & held_out
    assert train.batch([]).inputs.shape == (0, 16)


# ------------------------------------------------------------------ image models


def test_the_published_sizes() -> None:
    with torch.device("meta"):
        assert count(ResNet()) == 11_173_962  # ResNet-18 for CIFAR-10
        published = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032}  # torchvision's
        for depth, parameters in published.items():
            assert count(ResNet(depth, classes=1000, stem="imagenet")) == parameters
        assert count(CNN()) == 1_199_882  # of PyTorch's MNIST example


def test_flops_of_the_image_models() -> None:
    """ResNet-18 on 32 x 32 is published as 0.56 G multiply-adds: twice that, three times over."""
    resnet = resnet_cifar10(DataConfig(source="synthetic"))
    assert resnet.flops_per_sample == pytest.approx(6 * 0.556e9, rel=0.01)
    cnn = cnn_mnist(DataConfig(source="synthetic"))
    forward = 2 * (26 * 26 * 32 * 9 + 24 * 24 * 64 * 32 * 9 + 9216 * 128 + 1280)
    first = 2 * 26 * 26 * 32 * 9  # no gradient of the image is needed
    assert cnn.flops_per_sample == pytest.approx(3 * forward - first, rel=0.01)


def test_images_are_brought_into_shape() -> None:
    pixels = np.arange(2 * 64, dtype=np.uint8).reshape(2, 1, 8, 8)
    small = ImageSet(pixels, np.zeros(2, dtype=np.int64), ("a",), (0.5,), (0.25,))
    fitted = images.fit(small, (3, 28, 28))
    assert fitted.images.shape == (2, 3, 28, 28)
    assert (fitted.images[:, 0] == fitted.images[:, 2]).all()
    assert (fitted.images[0, 0, 2:5, 2:5] == 0).all()
    assert (fitted.images[0, 0, 2:5, 5:8] == 1).all()
    assert not fitted.images[:, :, :2].any()  # the frame
    assert fitted.mean == (0.5, 0.5, 0.5)
    with pytest.raises(UsageError, match="do not fit into a model"):
        images.fit(fitted, (1, 28, 28))


@pytest.mark.parametrize(
    ("workload", "options", "message"),
    [
        ("resnet_cifar10", {"depth": 19}, "depth is 18, 34 or 50, got 19"),
        ("resnet_cifar10", {"width": 0}, "width must be at least 1"),
        ("resnet_cifar10", {"stem": "imagnet"}, "did you mean 'imagenet'?"),
        ("resnet_cifar10", {"size": "tny"}, "did you mean 'tiny'?"),
        ("resnet_cifar10", {"dataset": "cifar"}, "did you mean 'cifar10'?"),
        ("cnn_mnist", {"dataset": "mnst"}, "did you mean 'mnist'?"),
        ("cnn_mnist", {"dataset": "cifar10"}, "do not fit into a model"),
        ("cnn_mnist", {"dropuot": True}, "did you mean 'dropout'?"),
        ("causal_lm", {"size": "smollm2-360"}, "did you mean 'smollm2-360m'?"),
        ("resnet_cifar10", {"data.seq_len": 5}, "seq_len is for tokens"),
        ("cnn_mnist", {"data.seq_len": 5}, "seq_len is for tokens"),
        ("gpt2", {"held_out": 0.9}, "held_out is a fraction of the data"),
        ("gpt2", {"size": "smal"}, "did you mean 'small'?"),
        ("gpt2", {"layers": 0}, "layers must be a whole number of at least 1"),
        ("gpt2", {"dim": "big"}, "dim must be a whole number"),
        ("gpt2", {"heads": 5}, "cannot be divided over 5 heads"),
        ("gpt2", {"size": "tiny", "head": "float16"}, "unknown gpt2 head 'float16'"),
        ("gpt2", {"context": 16, "data.seq_len": 32}, "seq_len 32 is longer"),
        ("causal_lm", {"model": "./nowhere"}, "nowhere with a model"),
    ],
)
def test_refuses(workload: str, options: dict[str, Any], message: str) -> None:
    overrides = {
        key if "." in key else f"model.options.{key}": value for key, value in options.items()
    }
    named = {"model.workload": workload, "data.source": "synthetic"}
    with pytest.raises(UsageError) as caught:
        builders.build_workload(configs.load(None, {**named, **overrides}))
    assert message in str(caught.value)


def test_holding_out() -> None:
    whole = Tokens(8, 64, "train")
    train, test = hold_out(whole, 0.1)
    assert test is not None
    assert (len(train), len(test)) == (2048 - 205 - 1, 205)
    assert torch.equal(test.batch([0]).inputs, whole.batch([2048 - 205]).inputs)
    assert hold_out(Part(whole, 0, 2), 0.5)[1] is None


# ------------------------------------------------------------------ BatchNorm over all ranks


class Normed(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3)
        self.bn1 = norm(4)
        self.conv2 = nn.Conv2d(4, 3, 3, bias=False)
        self.bn2 = norm(3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 2, 7, 7)
        x = torch.tanh(self.bn1(self.conv1(x)))
        out: Tensor = self.head(self.bn2(self.conv2(x)).mean((2, 3)))
        return out


SPLITS = ((4, 3), (7, 0), (0, 7), (1, 6))  # rows of each rank, in each step


def rows(step: int, first: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = 3 + torch.randn(7, 2, 7, 7, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (7,), generator=generator)
    part = slice(first, first + number)
    return Batch(x[part], y[part], count=number, samples=number)


NORMED_SGD = optimizers.of_class(torch.optim.SGD, lr=0.1, momentum=0.9)


def normalised(world: World, name: str) -> Trajectory:

    torch.manual_seed(0)
    model = Normed(SyncBatchNorm2d).double()
    batchnorm.join(model, world.group)
    make = naming.resolve(name, STRATEGIES, "strategy")
    blocks = ("bn1", "conv2", "bn2") if "zero3" in name else ()
    strategy = make(Setup(model, NORMED_SGD, classification_loss, world.mesh, blocks=blocks))
    found = Trajectory()
    for step, split in enumerate(SPLITS):
        found.take_step(strategy, [rows(step, sum(split[: world.rank]), split[world.rank])])
    return found


@pytest.mark.parametrize(
    "name", ["simple_ddp", "bucket_ddp_async", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"]
)
def test_synchronised_batchnorm_equals_one_process(name: str, ranks: GetRanks) -> None:
    """For any split of the batch, a rank without rows too: to 1e-10, running statistics as well."""
    torch.manual_seed(0)
    model = Normed(nn.BatchNorm2d).double()
    whole = one_process(
        model, NORMED_SGD, classification_loss, lambda step: [[rows(step, 0, 7)]], len(SPLITS)
    )
    for found in ranks(2).run(normalised, name):
        assert first_difference(found, whole) is None


def test_alone_it_is_plain_batchnorm() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 5)
    assert torch.equal(SyncBatchNorm2d(4)(x), nn.BatchNorm2d(4)(x))


SYNCHRONISED = {
    "model.workload": "resnet_cifar10",
    "model.size": "tiny",
    "model.options": {"sync_batchnorm": True},
    "data.source": "synthetic",
    "training.global_batch": 6,
    "training.steps": 2,
    "precision.compute": "fp64",
}


def losses_of(world: World, overrides: dict[str, Any]) -> list[float]:
    return train(world, {**SYNCHRONISED, **overrides}).losses


@pytest.mark.long
def test_a_resnet_with_it_trains_as_one_process(ranks: GetRanks) -> None:
    (alone,) = ranks(1).run(losses_of, {"strategy.name": "single"})
    for losses in ranks(2).run(losses_of, {"strategy.name": "simple_ddp_ga"}):
        assert losses == pytest.approx(alone, abs=1e-10)


def test_what_cannot_be_compared_or_proved_is_said(ranks: GetRanks) -> None:
    single = {"strategy.name": "single", "launch.world": 1, "precision.compute": "fp32"}
    values = configs.load(None, {**SYNCHRONISED, **single})
    with pytest.raises(UsageError, match="single would run each rank's samples by themselves"):
        ranks(2).run("shardlab.training.preflight:check", values)
    with pytest.raises(UsageError, match="leave out sync_batchnorm"):
        ranks(2).run("shardlab.proof.subjects:check", values)


# ------------------------------------------------------------------ complex numbers


class Rotary(nn.Module):
    """Rotary embeddings as Llama's first code keeps them, and the filter of a Fourier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.arange(1.0, 4.0)))
        self.filter = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
        self.head = nn.Linear(3, 2)


def test_imaginary_parts_are_kept() -> None:
    """``model.to(dtype)`` would cut them off."""
    for dtype, wide in ((torch.float32, torch.complex64), (torch.float64, torch.complex128)):
        found = cast_model(Rotary(), torch.device("cpu"), dtype).state_dict()
        assert found["filter"].tolist() == [1 + 2j, 3 - 4j]
        assert found["filter"].dtype == wide
        assert found["head.weight"].dtype == dtype
        assert torch.equal(found["freqs_cis"], Rotary().freqs_cis.to(wide))


# ------------------------------------------------------------------ the examples


EXPERIMENTS = sorted((ROOT / "examples").glob("experiments/*.yaml"))
CONFIGS = [*sorted((ROOT / "examples").glob("*.yaml")), *EXPERIMENTS]


def test_every_config_can_be_read() -> None:
    for path in CONFIGS:
        config = configs.load(path)
        assert config.model.workload in WORKLOADS
        assert path.name in path.read_text()  # each tells its own command


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model.size": "tiny", "data.seq_len": 16},
    "causal_lm": {"model.size": "tiny", "data.seq_len": 64},
    "resnet_cifar10": {"model.size": "tiny"},
    "cnn_mnist": {},
}


def train_offline(world: World, config: Config, env: dict[str, str]) -> dict[str, Any]:
    """As ``shardlab train`` runs on each rank, with an empty cache, where nobody can be reached."""
    with mock.patch.dict(os.environ, env):
        return running.train_rank(world, config, "a test")


# One of each workload is fast.
ONE_OF_EACH = ("gpt2_ddp", "yelp_sharding", "resnet_cifar10_fsdp", "cnn_mnist")


@pytest.mark.long
@pytest.mark.parametrize(
    "path", deep_unless(lambda path: path.stem in ONE_OF_EACH, EXPERIMENTS), ids=lambda p: p.stem
)
def test_the_experiments_run_in_small_and_offline(
    path: Path, tmp_path: Path, ranks: GetRanks
) -> None:
    """Each with what is on this machine, which it says."""
    workload = configs.load(path).model.workload
    if workload == "causal_lm":
        pytest.importorskip("transformers")
    world = 1 if path.stem == "gpt2_baseline" else 2
    overrides = {
        **SMALL[workload],
        "training.steps": 2,
        "training.global_batch": 8,
        "training.evaluate_every": 0,
        "training.evaluate_samples": 9,
        "launch.world": world,
        "launch.device": "cpu",
        "output.dir": str(tmp_path / "run"),
    }
    values = configs.load(path, overrides)
    nobody = "http://127.0.0.1:9"
    env = {"SHARDLAB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": nobody, "HTTPS_PROXY": nobody}
    results = ranks(world).run(train_offline, values, env)
    assert results[0]["steps"] == 2
    assert results[0]["evaluations"][0]["samples"] == 9
    assert (tmp_path / "run" / "evaluation.jsonl").exists()
    saved = configs.load(tmp_path / "run" / "config.yaml")
    assert saved.data.source in results[0]["data"]
    if workload != "gpt2":
        assert "has not been downloaded: shardlab data" in results[0]["data"]
    env_json = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env_json["data"] == results[0]["data"]
