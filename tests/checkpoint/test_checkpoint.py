"""Checkpoints as files: written evenly, whole or not at all, damage found, nothing executed."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import commands
from conftest import GetRanks
from resuming import build, run, settings, train
from shardlab import config as configs
from shardlab.checkpoint import convert, files, load, parts, rng, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.strategies.shards import ModelSpec
from shardlab.workloads import gpt2, huggingface
from shardlab.world import World

# ------------------------------------------------------------------ who writes what


def test_every_element_is_written_once_and_evenly() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks = draw.randint(1, 5)
        held: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks)]
        sizes = {f"t{i}": draw.randint(0, 40) for i in range(draw.randint(1, 6))}
        for name, size in sizes.items():
            cuts = sorted(draw.randint(0, size) for _ in range(ranks - 1))
            edges = [0, *cuts, size]
            for rank in range(ranks):  # sharded, replicated, or shards that overlap
                kind = draw.choice(["whole", "shard"])
                held[rank][name] = (0, size) if kind == "whole" else (edges[rank], edges[rank + 1])
        written = {name: np.zeros(size, dtype=int) for name, size in sizes.items()}
        for rank, spans in enumerate(parts.share_out(held)):
            for name, start, end in spans:
                low, high = held[rank][name]
                assert low <= start < end <= high
                written[name][start:end] += 1
        assert all((times == 1).all() for times in written.values())


def test_replicas_write_one_nth_each() -> None:
    held = [{"a": (0, 100), "b": (0, 7), "c": (0, 13)}] * 4
    shares = parts.share_out(held)
    assert [sum(end - start for _, start, end in share) for share in shares] == [30, 30, 30, 30]
    assert sum(len(share) for share in shares) <= 3 + 3  # tensors are cut as seldom as can be


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(2, None, [8, 10]), (1, 4, [4, 8, 10]), (9, None, [2, 4, 6, 8, 10])],
)
def test_retention(keep_last: int, keep_every: int | None, left: list[int]) -> None:
    steps = [2, 4, 6, 8, 10]
    removed = files.to_remove(steps, keep_last, keep_every)
    assert [step for step in steps if step not in removed] == left


def test_random_states_come_back() -> None:
    device = torch.device("cpu")
    random.gauss(0, 1)  # leaves a second number in hand
    np.random.standard_normal()
    saved = rng.get(device)

    def draws() -> list[float]:
        return [random.gauss(0, 1), random.random(), float(np.random.standard_normal()),
                float(np.random.rand()), float(torch.rand(()))]  # fmt: skip

    first = draws()
    rng.put(saved, device)
    assert draws() == first


# ------------------------------------------------------------------ on the ranks


def write(world: World, strategy: str, folder: str, asynchronous: bool = False) -> list[Any]:
    """Two steps and a checkpoint, twice."""
    instance = build(world, strategy, "tied_frozen", 0, "adamw")
    settings = CheckpointConfig(every=1, keep_last=1, keep_every=3, asynchronous=asynchronous)
    outcomes: list[Any] = []
    about = About({}, strategy, None)
    saver = Checkpoints(Path(folder), settings, world, instance, about, outcomes.append)
    for step in range(1, 5):
        run(instance, world, range(step - 1, step), 2)
        saver.save(step, {})
    saver.wait()
    return [outcome.row() for outcome in outcomes]


@pytest.mark.parametrize(
    ("strategy", "asynchronous"), [("simple_ddp", False), ("zero3", True), ("pytorch_zero3", True)]
)
def test_all_ranks_write_and_old_ones_go(
    strategy: str, asynchronous: bool, ranks: GetRanks, tmp_path: Path
) -> None:
    later = tmp_path / "checkpoints" / "step-000009"  # damaged, and passed over by a resume
    later.mkdir(parents=True)
    outcomes = ranks(2).run(write, strategy, str(tmp_path), asynchronous, deadline_s=60)
    assert [row["step"] for row in outcomes[0]] == [1, 2, 3, 4]
    assert all(row["error"] is None for row in outcomes[0])
    later.rmdir()
    assert list(files.steps_in(tmp_path)) == [4, 3]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-000003", "step-000004"}
    newest = files.steps_in(tmp_path)[4]
    assert {p.name for p in newest.iterdir()} == {
        "checkpoint.json", "rank0.safetensors", "rank1.safetensors",
    }  # fmt: skip
    sizes = [(newest / f"rank{r}.safetensors").stat().st_size for r in (0, 1)]
    assert max(sizes) < 0.65 * sum(sizes)
    manifest = manifests.read(newest)
    manifests.verify(newest, manifest.files)
    of_model = sum(t.size for t in manifest.model().values()) * 8
    assert sum(sizes) < 5 * of_model + 8000  # parameters and twice as much state: not two copies


def fail_on(world: World, rank: int, folder: str, asynchronous: bool) -> list[Any]:
    """A checkpoint that is well, then one for which a rank's disk is full."""
    instance = build(world, "zero2", "mlp", 0, "adamw")
    settings = CheckpointConfig(every=1, keep_last=1, asynchronous=asynchronous)
    outcomes: list[Any] = []
    saver = Checkpoints(
        Path(folder), settings, world, instance, About({}, "zero2", None), outcomes.append
    )
    run(instance, world, range(1), 2)
    saver.save(1, {})
    saver.wait()
    whole = storage.write

    def full(path: Path, *_: Any) -> Any:
        (path.parent / "rank9.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", "the file")

    try:
        if world.rank == rank:
            storage.write = full
        saver.save(2, {})
        saver.wait()
    finally:
        storage.write = whole
    run(instance, world, range(1, 2), 2)  # the run goes on
    saver.save(3, {})
    saver.wait()
    return [outcome.row() for outcome in outcomes]


@pytest.mark.parametrize(("rank", "asynchronous"), [(0, False), (1, False), (1, True)])
def test_a_full_disk_loses_nothing(
    rank: int, asynchronous: bool, ranks: GetRanks, tmp_path: Path
) -> None:
    for rows in ranks(2).run(fail_on, rank, str(tmp_path), asynchronous, deadline_s=60):
        assert [row["error"] for row in rows] == [
            None, "No space left on device: the file", None,
        ]  # fmt: skip
    assert list(files.steps_in(tmp_path)) == [3]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: GetRanks) -> Path:
    """A run with two checkpoints."""
    values = settings(
        tmp_path_factory.mktemp("saved"),
        **{"strategy.name": "zero1", "training.steps": 4, "checkpoint.every": 2,
           "training.evaluate_every": None, "training.evaluate_samples": None},
    )  # fmt: skip
    return train(ranks, 2, values)[1]


def resume(ranks: GetRanks, run: Path, start: Path, **changes: Any) -> tuple[dict[str, Any], Path]:
    """The run again with its own settings, from a run or a checkpoint."""
    changes["checkpoint.resume"] = str(start)
    return train(ranks, 2, configs.load(run / "config.yaml", changes).to_dict())


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def copy_of(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank1.safetensors", "flip", "rank1.safetensors is damaged: its checksum"),
        ("rank0.safetensors", "cut", "rank0.safetensors is damaged: it has"),
        ("rank0.safetensors", "remove", "cannot read .*rank0.safetensors"),
        ("checkpoint.json", "flip", "checkpoint.json is damaged"),
        ("checkpoint.json", "cut", "checkpoint.json is damaged: it is not whole JSON"),
    ],
)
def test_damage_is_named_and_passed_over(
    name: str, damage: str, message: str, saved: Path, ranks: GetRanks, tmp_path: Path
) -> None:
    run = copy_of(saved, tmp_path)
    newest = run / "checkpoints" / "step-000004"
    file = newest / name
    if damage == "flip":
        flip(file, file.stat().st_size * 2 // 3)
    elif damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    with pytest.raises(UsageError, match=message):
        manifests.verify(newest, manifests.read(newest).files)
    rows = files.overview(run)
    assert rows[0]["damage"] is not None
    assert rows[1]["damage"] is None

    assert resume(ranks, run, run)[1] == run
    (resumed,) = read_jsonl(run / "resumes.jsonl")
    assert resumed["step"] == 2
    assert name in resumed["passed_over"][0]
    assert list(files.steps_in(run)) == [4, 2]
    manifests.verify(newest, manifests.read(newest).files)  # it is whole again


def test_damage_in_the_file_of_a_rank_that_is_gone(
    saved: Path, ranks: GetRanks, tmp_path: Path
) -> None:
    """Fewer ranks than wrote a checkpoint look at all of its files."""
    run = copy_of(saved, tmp_path)
    file = run / "checkpoints" / "step-000004" / "rank1.safetensors"
    flip(file, file.stat().st_size * 2 // 3)
    given = {"checkpoint.resume": str(run), "launch.world": 1, "strategy.name": "single"}
    train(ranks, 1, configs.load(run / "config.yaml", given).to_dict())
    (resumed,) = read_jsonl(run / "resumes.jsonl")
    assert resumed["step"] == 2
    assert "rank1.safetensors" in resumed["passed_over"][0]


def test_nothing_whole_left(saved: Path, ranks: GetRanks, tmp_path: Path) -> None:
    run = copy_of(saved, tmp_path)
    for path in run.glob("checkpoints/*/rank0.safetensors"):
        flip(path, 20)
    for named in (run, run / "checkpoints" / "step-000004"):
        with pytest.raises(UsageError, match="damaged"):
            resume(ranks, run, named)
    before = sorted(run.parent.iterdir())
    assert before == [run]  # no folder was made


def test_a_mutated_manifest_is_refused_in_a_line(saved: Path, tmp_path: Path) -> None:
    """Also where the sum was made to fit: no traceback, no file outside the folder."""
    text = (saved / "checkpoints" / "step-000004" / "checkpoint.json").read_text()
    body = json.loads(text)["checkpoint"]
    body["tensors"] = dict(list(body["tensors"].items())[:4])
    body["numbers"] = dict(list(body["numbers"].items())[:2])
    draw = random.Random(1)
    values: list[Any] = [None, -1, "x", [], {}, 1e300, True, "../../etc/passwd", 2**70]
    for case in range(1000):
        mutant = json.loads(json.dumps(body))
        node: Any = mutant
        for _ in range(draw.randint(1, 4)):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw.choice(keys)
            if draw.random() < 0.4 or not isinstance(node[key], dict | list) or not node[key]:
                break
            node = node[key]
        else:
            key = draw.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = draw.choice(values)
        content = {"sha256": manifests._sum_of(mutant), "checkpoint": mutant}
        raw = json.dumps(content) if case % 4 else text[: draw.randint(0, len(text))]
        (tmp_path / "checkpoint.json").write_text(raw)
        with pytest.raises(UsageError, match=r"^[^\n]*$"):  # there are no other files here
            _read_and_verify(tmp_path)


@pytest.mark.parametrize(("place", "value"), [(0, -1), (624, 2**20), (624, -1)])
def test_random_states_that_cannot_be_are_refused(place: int, value: int) -> None:
    """numpy takes any position, and reads what lies there."""
    states = rng.get(torch.device("cpu"))
    states["numpy"][place] = value
    with (
        pytest.raises(UsageError, match="the random states in it are wrong"),
        load.fits(Start(None), "the random states", RuntimeError),
    ):
        rng.put(states, torch.device("cpu"))


def test_another_name_of_a_tensor_is_no_tensor_of_its_own(saved: Path) -> None:
    """An export would write one tensor under both names, and lose the other."""
    manifest = manifests.read(saved / "checkpoints" / "step-000004")
    first, second = list(manifest.model())[:2]
    for tied in ({first: first}, {first: second}, {"more": first, first: second}):
        with pytest.raises(ValueError, match=f"'{first}' is a tensor of its own, and another"):
            replace(manifest, tied=tied)


def test_a_buffer_that_is_a_parameter_as_well_has_no_other_name() -> None:
    """A checkpoint has it as a tensor of its own."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("also", model.bias)
    assert {"bias", "also"} <= ModelSpec.of(model).tensors.keys()
    assert ModelSpec.of(model).tied == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_saved(value: float) -> None:
    """It would be refused when it is read."""
    with pytest.raises(UsageError, match=r"cannot hold '.*step', which is (nan|inf)"):
        parts._number("optimizer/a/step", value)


@pytest.mark.long
def test_wrong_content_under_right_sums_is_refused(
    saved: Path, ranks: GetRanks, tmp_path: Path
) -> None:
    """Whoever writes the content can make the sums fit; a run says what is wrong, in a line."""
    run = copy_of(saved, tmp_path)
    folder = run / "checkpoints" / "step-000002"
    body = json.loads((folder / "checkpoint.json").read_text())["checkpoint"]
    state = next(name for name in body["tensors"] if name.endswith("/exp_avg"))

    def without(part: str, name: str) -> dict[str, Any]:
        return {part: {key: value for key, value in body[part].items() if key != name}}

    cases = [
        ({"update": {**body["update"], "steps": "4"}}, r"got `str` - at `\$\.update\.steps`"),
        ({"update": {**body["update"], "scale": -(2**70)}}, r"at `\$\.update\.scale`"),
        ({"numbers": dict.fromkeys(body["numbers"], math.nan)}, r"- at `\$\.numbers"),
        ({"update": {**body["update"], "good_steps": {}}}, r"- at `\$\.update\.good_steps`"),
        (
            {"update": {**body["update"], "groups": [3]}},
            r"Expected `object`, .* - at `\$\.update\.groups\[",
        ),
        (without("tensors", state), "the optimizer cannot continue .* KeyError: 'exp_avg'"),
        (
            without("tensors", "own/0/rng/python"),
            "the random states in it are wrong: KeyError: 'python'",
        ),
    ]

    def resume_with(changes: dict[str, Any]) -> None:
        mutant = body | changes
        content = {"sha256": manifests._sum_of(mutant), "checkpoint": mutant}
        (folder / "checkpoint.json").write_text(json.dumps(content))
        resume(ranks, run, folder)

    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            resume_with(changes)
    # The config of a checkpoint is told, not used: what is no section of it has nothing to tell.
    resume_with({"config": {**body["config"], "launch": "here"}})


def test_an_optimizers_counts_stay_whole_numbers(tmp_path: Path) -> None:
    """It may index with them, and adds them up exactly."""
    numbers: dict[str, bool | int | float] = {"taken": 3, "rate": 0.5, "warm": True}
    update: manifests.Update = {"steps": 3, "scale": 1.0, "good_steps": 3, "groups": [numbers]}
    sealed = manifests.Manifest(
        step=3, strategy="zero1", world=1, config={}, samples=None, update=update, numbers={},
        tensors={}, files={},
    )  # fmt: skip
    (tmp_path / manifests.NAME).write_text(sealed.to_json())
    (found,) = manifests.read(tmp_path).update["groups"]
    assert {key: (value, type(value)) for key, value in found.items()} == {
        "taken": (3, int), "rate": (0.5, float), "warm": (True, bool),
    }  # fmt: skip


def _read_and_verify(folder: Path) -> None:
    manifest = manifests.read(folder)
    assert all("/" not in name for name in manifest.files)
    manifests.verify(folder, manifest.files)


# ------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.options": {"layers": 2, "heads": 2, "dim": 32, "context": 16, "vocab": 257}},
         "is of another run: model.options was"),
        ({"training.global_batch": 4, "training.seed": 5},
         "training.global_batch was 8, is 4, training.seed was 0, is 5"),
        ({"training.steps": 3}, "is of step 4 and training.steps is 3"),
    ],
)  # fmt: skip
def test_another_run_is_refused(
    changes: dict[str, Any], message: str, saved: Path, ranks: GetRanks, tmp_path: Path
) -> None:
    changes |= {"output.root": str(tmp_path), "training.clip_norm": 1.0}
    with pytest.raises(UsageError, match=message):
        resume(ranks, saved, saved / "checkpoints" / "step-000004", **changes)
    assert list(tmp_path.iterdir()) == []


def test_another_model_says_which_tensors(saved: Path, tmp_path: Path, ranks: GetRanks) -> None:
    weights = tmp_path / "weights.safetensors"
    checkpoint = saved / "checkpoints" / "step-000004"
    convert.export(checkpoint, weights, "safetensors")
    tensors = dict(huggingface.load_safetensors(weights))
    del tensors["ln_f.bias"]
    tensors["more"] = torch.zeros(2)
    tensors["wpe.weight"] = torch.zeros(8, 16)
    huggingface.save_safetensors(tmp_path / "other.safetensors", tensors)
    convert.import_(tmp_path / "other.safetensors", tmp_path / "other", "safetensors")
    with pytest.raises(UsageError) as refused:
        resume(ranks, saved, tmp_path / "other", **{"output.root": str(tmp_path / "runs")})
    assert str(refused.value).endswith(
        "is of another model: it lacks 'ln_f.bias'; it has 'more' besides; "
        "'wpe.weight' is 8x16 there and 16x16 here"
    )


# ------------------------------------------------------------------ other formats

SHAPE = gpt2.Shape(layers=2, heads=2, dim=16, context=16, vocab=257)  # of ``settings``


def test_weights_go_out_and_in(saved: Path, tmp_path: Path, ranks: GetRanks) -> None:
    """safetensors, read by its own library; and a run that begins from them."""
    from safetensors.torch import load_file

    checkpoint = saved / "checkpoints" / "step-000004"
    convert.export(checkpoint, tmp_path / "model.safetensors", "safetensors")
    state = storage.whole_tensors(checkpoint, manifests.read(checkpoint), "model/")
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == {*state, "head.weight"}  # tied: under both of its names
    assert all(torch.equal(read[name], state[name]) for name in state)
    model = gpt2.GPT2(SHAPE)
    model.load_state_dict(read, strict=True)  # as Hugging Face's models are loaded
    assert torch.equal(model.head.weight, state["wte.weight"])

    convert.import_(tmp_path / "model.safetensors", tmp_path / "start", "safetensors")
    again = storage.whole_tensors(tmp_path / "start", manifests.read(tmp_path / "start"), "model/")
    assert all(torch.equal(again[name], state[name]) for name in state)
    still = {"output.root": str(tmp_path / "runs"), "training.learning_rate": 0.0}
    result, run = resume(ranks, saved, tmp_path / "start", **still)
    assert result["steps"] == 4
    end = files.steps_in(run)[4]
    trained = storage.whole_tensors(end, manifests.read(end), "model/")
    for name in state:  # a rate of 0: the weights stay what they were
        torch.testing.assert_close(trained[name], state[name], rtol=0, atol=0)


@pytest.mark.long
def test_the_moving_average_is_exported_if_it_is_asked_for(
    saved: Path, tmp_path: Path, ranks: GetRanks
) -> None:
    """A run evaluates the average; the weights that were trained are others."""
    from safetensors.torch import load_file

    checkpoint = saved / "checkpoints" / "step-000004"
    with pytest.raises(UsageError, match=r"no moving average: training\.ema_decay keeps one"):
        convert.export(checkpoint, tmp_path / "none.safetensors", "safetensors", average=True)
    assert convert.export(checkpoint, tmp_path / "all.safetensors", "safetensors")[1] is False

    values = configs.load(
        saved / "config.yaml", {"output.root": str(tmp_path), "training.ema_decay": 0.5}
    ).to_dict()
    newest = train(ranks, 2, values)[1] / "checkpoints" / "step-000004"
    files = {}
    for average in (False, True):
        path = tmp_path / f"{average}.safetensors"
        assert convert.export(newest, path, "safetensors", average)[1]
        files[average] = load_file(path)
    assert files[True].keys() == files[False].keys()
    assert files[True]["head.weight"].equal(files[True]["wte.weight"])  # a tied one
    older = load_file(tmp_path / "all.safetensors")
    assert older["ln_f.weight"].equal(files[False]["ln_f.weight"])
    for name, trained in files[False].items():
        assert not files[True][name].equal(trained), name
        torch.testing.assert_close(files[True][name], trained, rtol=0, atol=0.05)


@pytest.mark.long
def test_hugging_faces_gpt2(saved: Path, tmp_path: Path) -> None:
    """The same logits from transformers, and the same weights back."""
    transformers = pytest.importorskip("transformers")
    checkpoint = saved / "checkpoints" / "step-000004"
    convert.export(checkpoint, tmp_path / "theirs", "hf-gpt2")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").eval()
    ours = gpt2.GPT2(SHAPE)
    state = storage.whole_tensors(checkpoint, manifests.read(checkpoint), "model/")
    ours.load_state_dict(state | {"head.weight": state["wte.weight"]})
    tokens = torch.randint(0, 257, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    written = huggingface.load_safetensors(tmp_path / "theirs" / "model.safetensors")
    theirs.load_state_dict(written, strict=True)  # with lm_head.weight, though it is tied
    assert torch.equal(theirs.lm_head.weight, state["wte.weight"])
    theirs.save_pretrained(tmp_path / "back")
    convert.import_(tmp_path / "back", tmp_path / "start", "hf-gpt2")
    manifest = manifests.read(tmp_path / "start")
    again = storage.whole_tensors(tmp_path / "start", manifest, "model/")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert manifest.config["model"]["options"]["heads"] == 2


def test_the_commands(saved: Path, tmp_path: Path) -> None:
    def shardlab(*args: str) -> tuple[int, str, str]:
        done = commands.here(*args, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = shardlab("checkpoint", "show", str(saved))
    assert code == 0
    assert "zero1" in out
    assert "damaged" not in out
    code, out, _ = shardlab("checkpoint", "show", str(saved / "checkpoints" / "step-000004"))
    assert "wte.weight" in out
    assert "257 x 16" in out
    export = ["checkpoint", "export", str(saved), "--out", "model.safetensors"]
    assert shardlab(*export)[0] == 0
    assert shardlab(*export) == (2, "", "error: model.safetensors exists; choose another name\n")
    assert shardlab(*export[:3], "--out", "x", "--format", "gguf")[0] == 2

    broken = copy_of(saved, tmp_path)
    flip(broken / "checkpoints" / "step-000004" / "rank0.safetensors", 900)
    code, out, _ = shardlab("checkpoint", "show", "run")
    assert code == 1
    assert "rank0.safetensors is damaged: its checksum does not match" in out
    code, _, err = shardlab("checkpoint", "export", "run", "--out", "x")
    assert code == 2
    assert err.startswith("error: run/checkpoints/step-000004/rank0.safetensors is damaged")
    assert not (tmp_path / "x").exists()
    missing = (2, "", "error: there is no folder nowhere: name a run's, or a checkpoint's\n")
    assert shardlab("train", "--resume", "nowhere") == missing


def test_files_that_lie_are_refused_in_a_line(saved: Path, tmp_path: Path) -> None:
    """Their sums fit, but not what the manifest says is in them."""
    run = copy_of(saved, tmp_path)
    checkpoint = run / "checkpoints" / "step-000004"
    manifest = manifests.read(checkpoint)
    path = checkpoint / "rank0.safetensors"
    whole = path.read_bytes()
    draw = random.Random(2)
    header = int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        data[draw.randrange(8 + header)] = draw.randrange(32, 127)
        path.write_bytes(data)
        try:
            storage.whole_tensors(checkpoint, manifest, "")
        except UsageError as error:
            refused += "\n" not in str(error)
    assert refused > 100  # a changed offset may still be a place in the file
