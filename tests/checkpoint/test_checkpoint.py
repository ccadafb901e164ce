"""Checkpoints as files: written evenly, whole or not at all, damage found, nothing executed."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from conformance import make_optimizer
from conftest import GetRanks
from resuming import batches, build, run, settings, train
from shardlab import config as configs
from shardlab.checkpoint import convert, files, parts, rng, storage
from shardlab.checkpoint import load as loading
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint import show as showing
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.checkpoint.start import Start
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.files import read_jsonl
from shardlab.strategies import steps
from shardlab.strategies.base import Setup, Strategy
from shardlab.strategies.simple_ddp import all_reduce_gradients
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


def test_damaged_ones_push_out_no_good_ones() -> None:
    """Whatever is damaged, the newest ``keep_last`` whole ones stay."""
    draw = random.Random()
    for _ in range(300):
        steps = draw.sample(range(1, 40), draw.randint(0, 9))
        damaged = {step for step in steps if draw.random() < 0.4}
        keep_last, keep_every = draw.randint(1, 4), draw.choice([None, 3])
        removed = files.to_remove(steps, keep_last, keep_every, lambda s, d=damaged: s not in d)
        whole = sorted(set(steps) - damaged)
        assert set(whole[-keep_last:]).isdisjoint(removed)
        assert all(keep_every is None or step % keep_every for step in removed)
        if len(whole) >= keep_last:  # and nothing older is left that need not be
            old = [s for s in steps if s < whole[-keep_last] and (not keep_every or s % keep_every)]
            assert removed == sorted(old)


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


@pytest.mark.parametrize("strategy", ["simple_ddp", "zero3", "pytorch_zero3"])
@pytest.mark.parametrize("asynchronous", [False, True])
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


def with_damage(world: World, folder: str, asynchronous: bool, how: str) -> list[str]:
    """Four checkpoints, of which the second is damaged when the third is written: who is left."""
    instance = build(world, "zero2", "mlp", 0, "adamw")
    settings = CheckpointConfig(every=1, keep_last=2, asynchronous=asynchronous)
    saver = Checkpoints(Path(folder), settings, world, instance, About({}, "zero2", None))
    left = []
    for step in range(1, 5):
        run(instance, world, range(step - 1, step), 2)
        saver.save(step, {})
        saver.wait()
        if step == 2 and world.rank == 0:
            inject.damage(files.steps_in(Path(folder))[2], how)
        left.append(str(world.share(list(files.steps_in(Path(folder))))))
    return left


@pytest.mark.parametrize(("asynchronous", "how"), [(False, "flip"), (True, "delete")])
def test_a_damaged_one_does_not_count_among_keep_last(
    asynchronous: bool, how: str, ranks: GetRanks, tmp_path: Path
) -> None:
    left = ranks(2).run(with_damage, str(tmp_path), asynchronous, how, deadline_s=60)
    assert left[0] == ["[1]", "[2, 1]", "[3, 2, 1]", "[4, 3]"]


def last_one_damaged(world: World, folder: str, asynchronous: bool, times: int) -> list[Any]:
    """A run's last checkpoint, damaged so many times as soon as it is there."""
    instance = build(world, "simple_ddp", "mlp", 0, "adamw")
    settings = CheckpointConfig(every=1, asynchronous=asynchronous)
    outcomes: list[Any] = []

    def done(outcome: Any) -> None:
        outcomes.append(outcome.error)
        if world.rank == 0 and len(outcomes) <= times:
            inject.damage(
                files.steps_in(Path(folder))[1], ("flip", "truncate", "delete")[times - 1]
            )

    about = About({}, "simple_ddp", None)
    saver = Checkpoints(Path(folder), settings, world, instance, about, done)
    run(instance, world, range(1), 2)
    saver.save_last(1, {})
    return outcomes


@pytest.mark.parametrize(("asynchronous", "times"), [(False, 1), (True, 2), (False, 3)])
def test_the_last_checkpoint_is_read_back_and_written_again(
    asynchronous: bool, times: int, ranks: GetRanks, tmp_path: Path
) -> None:
    for errors in ranks(2).run(last_one_damaged, str(tmp_path), asynchronous, times, deadline_s=60):
        assert errors[:times] == [None] * times
        if times < 3:
            assert errors[times:] == [None]
        else:
            assert "step-000001" in errors[-1]
            assert errors[-1].endswith(", 3 times")
    newest = files.steps_in(tmp_path)[1]
    damage = showing.overview(tmp_path)[0]["damage"]
    assert (damage is None) == (times < 3), newest


class Bare(Strategy):
    """A strategy by the contract alone: it writes gradients() and inherits the rest."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        steps.broadcast_model(self.model, self.group)

    def gradients(self, microbatches: Any) -> Any:
        total = steps.global_count(microbatches, self.device, self.group)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, total)
        all_reduce_gradients(self.params, self.group)
        return steps.global_mean(loss_sum, total, self.group)


def bare(world: World, folder: str) -> bool:
    def made(seed: int) -> Bare:
        return Bare(Setup(toys.build("odd", seed), make_optimizer("adamw"), toys.loss, world.mesh))

    first = made(0)
    first.gradients(batches(world, 0, 2))
    first.step()
    saver = Checkpoints(
        Path(folder), CheckpointConfig(every=1), world, first, About({}, "bare", None)
    )
    saver.save(1, {})
    path = files.steps_in(Path(folder))[1]
    second = made(1)
    loading.load(Start(None, path, manifests.read(path)), second, world, configs.Config())
    for strategy in (first, second):
        strategy.gradients(batches(world, 1, 2))
        strategy.step()
    before, after = first.full_params(), second.full_params()
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_strategy_of_the_contract_alone(ranks: GetRanks, tmp_path: Path) -> None:
    assert ranks(2).run(bare, str(tmp_path), deadline_s=60) == [True, True]


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: GetRanks) -> Path:
    """A run with two checkpoints."""
    values = settings(
        tmp_path_factory.mktemp("saved"),
        **{"strategy.name": "zero1", "training.steps": 4, "checkpoint.every": 2,
           "training.evaluate_every": None, "training.evaluate_samples": None,
           "data.audit": False},
    )  # fmt: skip
    return train(ranks, 2, values)[1]


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
    rows = showing.overview(run)
    assert rows[0]["damage"] is not None
    assert rows[1]["damage"] is None

    values = configs.load(run / "config.yaml").to_dict()
    values["checkpoint"]["resume"] = str(run)
    result = ranks(2).run("shardlab.run.rank:train_rank", values, "a test", deadline_s=60)[0]
    assert result["folder"] == str(run)
    (resumed,) = read_jsonl(run / "resumes.jsonl")
    assert resumed["step"] == 2
    assert name in resumed["passed_over"][0]
    assert list(files.steps_in(run)) == [4, 2]
    manifests.verify(newest, manifests.read(newest).files)  # it is whole again


def test_nothing_whole_left(saved: Path, ranks: GetRanks, tmp_path: Path) -> None:
    run = copy_of(saved, tmp_path)
    for path in run.glob("checkpoints/*/rank0.safetensors"):
        flip(path, 20)
    values = configs.load(run / "config.yaml").to_dict()
    for named in (run, run / "checkpoints" / "step-000004"):
        values["checkpoint"]["resume"] = str(named)
        with pytest.raises(UsageError, match="damaged"):
            ranks(2).run("shardlab.run.rank:train_rank", values, "a test", deadline_s=60)
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


def _read_and_verify(folder: Path) -> None:
    manifest = manifests.read(folder)
    assert all("/" not in name for name in manifest.files)
    manifests.verify(folder, manifest.files)


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    for path in (saved / "checkpoints").glob("*/*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert huggingface.load_safetensors(path)


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
    values = configs.load(saved / "config.yaml", {**changes, "output.root": str(tmp_path)})
    resumed = values.with_overrides(
        {"checkpoint.resume": str(saved / "checkpoints" / "step-000004"), "training.clip_norm": 1.0}
    )
    with pytest.raises(UsageError, match=message):
        ranks(2).run("shardlab.run.rank:train_rank", resumed.to_dict(), "a test", deadline_s=60)
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
    values = configs.load(saved / "config.yaml", {"output.root": str(tmp_path / "runs")}).to_dict()
    values["checkpoint"]["resume"] = str(tmp_path / "other")
    with pytest.raises(UsageError) as refused:
        ranks(2).run("shardlab.run.rank:train_rank", values, "a test", deadline_s=60)
    assert str(refused.value).endswith(
        "is of another model: it lacks 'ln_f.bias'; it has 'more' besides; "
        "'wpe.weight' is 8x16 there and 16x16 here"
    )


# ------------------------------------------------------------------ other formats


def test_weights_go_out_and_in(saved: Path, tmp_path: Path, ranks: GetRanks) -> None:
    """safetensors, read by its own library; and a run that begins from them."""
    from safetensors.torch import load_file

    checkpoint = saved / "checkpoints" / "step-000004"
    convert.export(checkpoint, tmp_path / "model.safetensors", "safetensors")
    state = storage.whole_tensors(checkpoint, manifests.read(checkpoint), "model/")
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == {*state, "head.weight"}  # tied: under both of its names
    assert all(torch.equal(read[name], state[name]) for name in state)

    convert.import_(tmp_path / "model.safetensors", tmp_path / "start", "safetensors")
    again = storage.whole_tensors(tmp_path / "start", manifests.read(tmp_path / "start"), "model/")
    assert all(torch.equal(again[name], state[name]) for name in state)
    values = configs.load(saved / "config.yaml", {"output.root": str(tmp_path / "runs")}).to_dict()
    values["checkpoint"]["resume"] = str(tmp_path / "start")
    values["training"]["learning_rate"] = 0.0
    result, run = train(ranks, 2, values)
    assert result["steps"] == 4
    end = files.steps_in(run)[4]
    trained = storage.whole_tensors(end, manifests.read(end), "model/")
    for name in state:  # a rate of 0: the weights stay what they were
        torch.testing.assert_close(trained[name], state[name], rtol=0, atol=0)


@pytest.mark.long
def test_hugging_faces_gpt2(saved: Path, tmp_path: Path) -> None:
    """The same logits from transformers, and the same weights back."""
    transformers = pytest.importorskip("transformers")
    checkpoint = saved / "checkpoints" / "step-000004"
    convert.export(checkpoint, tmp_path / "theirs", "hf-gpt2")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").eval()
    ours = gpt2.GPT2(gpt2.Shape(layers=2, heads=2, dim=16, context=16, vocab=257))
    state = storage.whole_tensors(checkpoint, manifests.read(checkpoint), "model/")
    ours.load_state_dict(state | {"head.weight": state["wte.weight"]})
    tokens = torch.randint(0, 257, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "back")
    convert.import_(tmp_path / "back", tmp_path / "start", "hf-gpt2")
    manifest = manifests.read(tmp_path / "start")
    again = storage.whole_tensors(tmp_path / "start", manifest, "model/")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert manifest.config["model"]["options"]["heads"] == 2


def test_the_commands(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardlab import cli

    monkeypatch.chdir(tmp_path)

    def shardlab(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["shardlab", *args])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return (int(left.value.code or 0), *capsys.readouterr())

    code, out, _ = shardlab("checkpoint", "show", str(saved))
    assert code == 0
    assert "zero1" in out
    assert "damaged" not in out
    code, out, _ = shardlab("checkpoint", "show", str(saved / "checkpoints" / "step-000004"))
    assert "wte.weight" in out
    assert "257 x 16" in out
    export = ["checkpoint", "export", str(saved), "--to", "model.safetensors"]
    assert shardlab(*export)[0] == 0
    assert shardlab(*export) == (2, "", "error: model.safetensors exists; choose another name\n")
    assert shardlab(*export[:3], "--to", "x", "--format", "gguf")[0] == 2

    broken = copy_of(saved, tmp_path)
    flip(broken / "checkpoints" / "step-000004" / "rank0.safetensors", 900)
    code, out, _ = shardlab("checkpoint", "show", "run")
    assert code == 1
    assert "rank0.safetensors is damaged: its checksum does not match" in out
    code, _, err = shardlab("checkpoint", "export", "run", "--to", "x")
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
