"""What a workload takes when nobody says: the data and the weights that are on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import commands
import language_models
from shardlab import config as configs
from shardlab.checkpoint import resume as resumes
from shardlab.checkpoint.manifest import Manifest
from shardlab.config import DATA_SETS, Config
from shardlab.data import catalog, fetching, images, reviews
from shardlab.data.tokens import write_shard
from shardlab.errors import UsageError
from shardlab.guard.guards import refuse_unequal_data
from shardlab.measure import gate
from shardlab.training import builders
from shardlab.workloads import causal_lm
from shardlab.workloads.base import Workload

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"  # where nobody listens


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our cache is empty."""
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))


def build(workload: str, **overrides: Any) -> Workload:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return builders.build_workload(configs.load(None, {"model.workload": workload, **given}))


def put_fineweb(folder: Path) -> None:
    """Shards in FineWeb's format, taken as `shardlab data fetch fineweb --from` does."""
    folder.mkdir()
    write_shard(folder / "fineweb_val_000000.bin", np.full(300, 7))
    write_shard(folder / "fineweb_train_000001.bin", np.full(2000, 50256))
    fetching.fetch(catalog.entry("fineweb"), source=str(folder))


def put_yelp(folder: Path) -> None:
    folder.mkdir()
    lines = [f'"{1 + i % 2}","review {i}"' for i in range(20)]
    for split in reviews.SPLITS:
        (folder / f"{split}.csv").write_text("\n".join(lines))
    fetching.fetch(catalog.entry("yelp"), source=str(folder))


# ------------------------------------------------------------------ data


def test_every_data_set_is_a_word() -> None:
    assert {*DATA_SETS, "gpt2_vocab"} == {*catalog.ENTRIES, "digits"}


def test_auto_takes_fineweb_once_it_is_there(tmp_path: Path) -> None:
    wide = {"model__size": "tiny", "model__options": {"vocab": 50257}}
    before = build("gpt2", **wide)
    assert before.chosen == {"data.source": "stdlib"}
    assert before.data.startswith("stdlib: the text of Python's library, a byte is a token")
    assert "fineweb has not been downloaded: shardlab data fetch fineweb" in before.data
    put_fineweb(tmp_path / "shards")
    found = build("gpt2", **wide)
    assert found.chosen == {"data.source": "fineweb"}
    assert found.data == "fineweb: 2 token shards, tokenizer gpt2"
    assert set(found.dataset.batch([0]).inputs.flatten().tolist()) == {50256}
    assert found.held_out is not None
    assert set(found.held_out.batch([0]).inputs.flatten().tolist()) == {7}
    # Its tokens do not fit into the vocabulary of the small sizes.
    small = build("gpt2", model__size="tiny")
    assert small.chosen == {"data.source": "stdlib"}
    assert "fineweb's 50,257 tokens do not fit this model's 256" in small.data
    with pytest.raises(UsageError, match="larger than the model's of 256"):
        build("gpt2", model__size="tiny", data__source="fineweb")


def test_auto_takes_the_reviews_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny = {"model__size": "tiny", "data__seq_len": 48}
    nothing = build("causal_lm", **tiny)
    assert nothing.chosen == {"data.source": "synthetic"}
    assert nothing.data.startswith("synthetic reviews: 2,048 reviews of 5 ratings, 512 held out")
    assert "yelp has not been downloaded: shardlab data fetch yelp" in nothing.data
    put_yelp(tmp_path / "yelps")
    yelp = build("causal_lm", **tiny)
    assert yelp.chosen == {"data.source": "yelp"}
    assert yelp.data.startswith("yelp: 20 reviews of 5 ratings, 20 held out")
    assert "downloaded" not in yelp.data
    path = tmp_path / "films.csv"
    path.write_text("text,label,source\n" + "a film,1,imdb\n" * 20)
    own = build("causal_lm", **tiny, data__source=str(path))
    assert (len(own.dataset), own.chosen) == (18, {})
    assert own.data.startswith(f"{path}: 18 reviews of 2 ratings, 2 held out")


@pytest.mark.parametrize("workload", ["cnn_mnist", "resnet_cifar10"])
def test_auto_takes_the_images_that_are_there(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = workload.partition("_")[2]
    if images.is_here("digits"):
        digits = build(workload)
        assert digits.chosen == {"data.source": "digits"}
        assert digits.data.startswith("digits: 1,437 images, 360 held out, of 8 x 8, enlarged")
        assert f"({own} has not been downloaded: shardlab data fetch {own})" in digits.data
        assert digits.name.endswith("-digits")
        again = build(workload, data__source="digits")  # as config.yaml names it
        assert (again.name, again.chosen) == (digits.name, {})
    monkeypatch.setattr(images, "find_spec", lambda _name: None)  # without scikit-learn
    nothing = build(workload)
    assert nothing.chosen == {"data.source": "synthetic"}
    assert nothing.data.startswith(f"synthetic images in the shape of {own}: 2,048 images")
    for refused in ({"data__source": own}, {"model__options": {"dataset": own}}):
        with pytest.raises(UsageError, match=f"run `shardlab data fetch {own}`"):
            build(workload, **refused)
    with pytest.raises(UsageError, match=r"scikit-learn: pip install 'shardlab\[images\]'"):
        build(workload, data__source="digits")


@pytest.mark.parametrize(
    ("workload", "overrides", "message"),
    [
        ("gpt2", {"data__source": "yelp"}, "gpt2 does not read 'yelp'; its data.source is a file"),
        ("gpt2", {"data__source": "fineweb"}, "fineweb has not been downloaded: run `shardlab"),
        ("cnn_mnist", {"data__source": "stdlib"}, "cnn_mnist does not read 'stdlib'"),
        ("resnet_cifar10", {"data__source": "fineweb"}, "resnet_cifar10 does not read 'fineweb'"),
        ("causal_lm", {"data__source": "mnist"}, "or one of auto, synthetic, yelp"),
        ("causal_lm", {"data__source": "yelp"}, "yelp has not been downloaded"),
        (
            "cnn_mnist",
            {"data__source": "digits", "model__options": {"dataset": "mnist"}},
            "data.source is digits and model.options.dataset is mnist: set one of them",
        ),
    ],
)
def test_refuses(workload: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(workload, **overrides)
    assert message in str(caught.value)


def test_a_folder_with_a_data_sets_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word is the data set; the folder can be named too, and the refusal says how."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fineweb").mkdir()
    write_shard(tmp_path / "fineweb" / "a.bin", np.full(500, 3))
    with pytest.raises(UsageError, match=r"for the fineweb in this folder, write \./fineweb"):
        build("gpt2", model__size="tiny", data__source="fineweb")
    own = build("gpt2", model__size="tiny", data__source="./fineweb")
    assert own.data == "./fineweb: 1 token shard"
    assert own.chosen == {}


def test_ranks_that_chose_differently_are_refused() -> None:
    """As on two nodes of which one has the data set: they would train on different samples."""
    mine = build("gpt2", model__size="tiny")

    class Both:
        def gather(self, row: dict[str, Any]) -> list[dict[str, Any]]:
            return [row, {**row, "chosen": {"data.source": "fineweb"}}]

    with pytest.raises(UsageError) as caught:
        refuse_unequal_data(mine, Both())  # type: ignore[arg-type]
    assert "nobody set data.source" in str(caught.value)
    assert "stdlib on rank 0, fineweb on rank 1; set it" in str(caught.value)


# ------------------------------------------------------------------ the run that is continued


def manifest_of(config: Config) -> Manifest:
    return Manifest(1, "simple_ddp", 2, config.to_dict(), None, {}, {}, {}, {})


def test_a_resumed_run_keeps_its_data(tmp_path: Path) -> None:
    asked = Config()
    begun = asked.with_overrides({"data.source": "stdlib"})
    now = {"data.source": "fineweb"}
    start = resumes.Start(tmp_path, tmp_path, manifest_of(begun))
    with pytest.raises(UsageError, match=r"data.source was 'stdlib', is 'fineweb'"):
        resumes.refuse_unfit(start, asked.with_overrides(now), 10, now)
    resumes.refuse_unfit(start, begun, 10, {"data.source": "stdlib"})
    # A checkpoint of before this was recorded says "auto".
    old = resumes.Start(tmp_path, tmp_path, manifest_of(asked))
    resumes.refuse_unfit(old, begun, 10, {"data.source": "stdlib"})
    with pytest.raises(UsageError, match=r"data.source was 'auto', is 'synthetic'"):
        resumes.refuse_unfit(old, asked.with_overrides({"data.source": "synthetic"}), 10, {})


def test_resume_auto_finds_a_run_that_chose_otherwise(tmp_path: Path) -> None:
    """It is then refused with the two sources; a new run would begin unnoticed."""
    config = Config().with_overrides({"output.root": str(tmp_path)})
    run = tmp_path / "a-run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "config.yaml").write_text(config.with_overrides({"data.source": "stdlib"}).to_yaml())
    (run / "status.json").write_text(json.dumps({"state": "crashed"}))
    chosen = {"data.source": "fineweb"}
    assert resumes.find_run(config.with_overrides(chosen), chosen) == run
    assert resumes.find_run(config.with_overrides(chosen), {}) is None


def test_against_a_comparison_with_other_data() -> None:
    env = {"device": "cpu", "data": "fineweb: 2 token shards"}
    told = list(gate._other_machine(env, {"device": "cpu", "data": "stdlib: text"}))
    assert told == [
        "the data was stdlib: text, now fineweb: 2 token shards: times and losses may differ for "
        "that"
    ]
    assert list(gate._other_machine(env, {"device": "cpu"})) == []  # of an earlier version


# ------------------------------------------------------------------ SmolLM2 without a hub


def test_the_published_sizes() -> None:
    transformers = pytest.importorskip("transformers")
    for size, parameters in (("135m", 134_515_008), ("360m", 361_821_120), ("1.7b", 1_711_376_384)):
        with torch.device("meta"):
            config = causal_lm._built_in(f"smollm2-{size}")
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert model.lm_head.weight is model.model.embed_tokens.weight


def offline(monkeypatch: pytest.MonkeyPatch, hub: Path) -> None:
    """The hub's cache is in ``hub``, and the hub cannot be reached."""
    from huggingface_hub import constants, file_download

    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(file_download, "HF_HUB_CACHE", str(hub), raising=False)
    causal_lm._find.cache_clear()


def test_smollm2_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    offline(monkeypatch, tmp_path / "hub")
    found = build("causal_lm", model__size="smollm2-360m")
    assert found.name == "causal_lm-SmolLM2-360M-Instruct"
    assert found.blocks == tuple(f"model.layers.{i}" for i in range(32))
    assert found.chosen == {
        "data.source": "synthetic",
        "model.options.pretrained": False,
        "model.options.tokenizer": "bytes",
    }
    weights, tokens = found.notes
    assert "SmolLM2-360M-Instruct begins with random weights" in weights
    assert "hf download HuggingFaceTB/SmolLM2-360M-Instruct" in weights
    assert "a byte is a token, of SmolLM2-360M-Instruct's vocabulary of 49,152" in tokens
    assert int(found.dataset.batch([0, 1]).inputs["input_ids"].max()) < 256
    # As config.yaml has it: the same model, and nothing left to choose.
    again = Config().with_overrides(
        {"model.workload": "causal_lm", "model.size": "smollm2-360m", **found.chosen}
    )
    assert builders.build_workload(configs.from_dict(again.to_dict())).chosen == {}
    # With random weights the vocabulary's rows of no byte are there, and are trained as others are.
    with torch.device("meta"):
        assert found.make_model().get_input_embeddings().weight.shape == (49152, 960)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pretrained": True}, "cannot load HuggingFaceTB/SmolLM2-360M-Instruct from the hub: "),
        ({"tokenizer": "own"}, "cannot load HuggingFaceTB/SmolLM2-360M-Instruct from the hub: "),
        ({"tokenizer": "byte"}, "did you mean 'bytes'?"),
        ({"pretrained": True, "tokenizer": "bytes"}, "know its own tokens alone"),
        ({"pretrained": "no"}, "pretrained must be a true or false, got text"),
        ({"model": "nobody/nothing"}, f"cannot load nobody/nothing from the hub: {NOBODY}"),
        ({"model": "nobody/nothing", "pretrained": False}, "`hf download nobody/nothing --local-"),
        ({"model": "nobody/nothing", "pretrained": False}, "with model.options.model, or use --si"),
        ({"size": "tiny", "pretrained": True}, "size tiny has random weights"),
    ],
)
def test_what_was_asked_for_is_had_or_refused(
    overrides: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    offline(monkeypatch, tmp_path / "hub")
    with pytest.raises(UsageError) as caught:
        build("causal_lm", model__options=overrides, data__source="synthetic")
    assert message in str(caught.value)


def put_into_hub_cache(hub: Path, name: str) -> None:
    """In the layout of the hub's own cache."""
    repo, commit = hub / f"models--{name.replace('/', '--')}", "c" * 40
    language_models.save(repo / "snapshots" / commit, norm=0.125)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def test_real_weights_are_taken_when_they_are_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    offline(monkeypatch, tmp_path / "hub")
    put_into_hub_cache(tmp_path / "hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    found = build("causal_lm", model__size="smollm2-135m")
    assert found.chosen == {"data.source": "synthetic", "model.options.pretrained": True}
    assert found.notes == ()
    assert found.make_model().model.norm.weight.tolist()[0] == 0.125
    assert found.dataset.encode("Review: ") != list(b"Review: ")  # type: ignore[attr-defined]
    random = build(
        "causal_lm", model__size="smollm2-135m", model__options={"pretrained": False}
    )  # the architecture of the package, and the tokenizer that is there
    assert len(random.blocks or ()) == 30
    assert random.chosen["model.options.tokenizer"] == "own"
    assert random.notes == ("SmolLM2-135M-Instruct begins with random weights",)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    """Its weights are needed, unless random ones are asked for."""
    pytest.importorskip("transformers")
    there = language_models.save(tmp_path / "whole", norm=0.125)
    without = language_models.save(tmp_path / "bare", weights=False)
    given = {"data__source": "synthetic"}
    whole = build("causal_lm", **given, model__options={"model": there})
    assert whole.make_model().model.norm.weight.tolist()[0] == 0.125
    assert (whole.chosen, whole.notes) == ({}, ())
    bare = {"model": without, "pretrained": False}
    random = build("causal_lm", **given, model__options=bare)
    assert random.make_model().model.norm.weight.tolist()[0] == 1.0
    assert random.chosen == {"model.options.tokenizer": "own"}
    refused = build("causal_lm", **given, model__options={"model": without})
    with pytest.raises(UsageError, match=r"not a folder with a whole model"):
        refused.make_model()


# ------------------------------------------------------------------ as a person sees it


@pytest.mark.long
def test_train_says_what_it_reads(tmp_path: Path) -> None:
    """On the way, at the end, in config.yaml; and a run of that config.yaml reads the same."""
    command = ("--size", "tiny", "--seq-len", "32", "--steps", "2", "--world", "1")
    done = commands.shardlab(
        "train", "--config", str(ROOT / "examples/experiments/gpt2_baseline.yaml"),
        *command, "--out", "run", cwd=tmp_path, SHARDLAB_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = "data: stdlib: the text of Python's library, a byte is a token\n"
    assert line in done.stderr
    assert line in done.stdout
    assert "  source: stdlib\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    causal_lm._find.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'shardlab\[models\]'"):
        build("causal_lm", data__source="synthetic")
