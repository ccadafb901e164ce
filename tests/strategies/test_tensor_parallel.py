"""Tensor and sequence parallelism against one process: results, what is sent, what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import commands
import meshed
import resuming
from conformance import STEPS, Trajectory, first_difference, make_optimizer
from conftest import GetRanks, deep_unless, long_unless
from meshed import ARCHITECTURES, SUBJECTS, Subject
from planted_tensor import BUGS, planted
from schedule_docstring import kind_of, told
from shardlab.axes import Axes
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.ledger import LEDGER
from shardlab.naming import MESH_STRATEGIES, resolve
from shardlab.strategies.base import Setup
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.data_parallel.single import Single
from shardlab.strategies.sharded.zero3 import Zero3
from shardlab.strategies.tensor import tensor_parallel
from shardlab.strategies.tensor.vocabulary import Vocabulary, cross_entropy
from shardlab.training.builders import build_strategy, build_workload
from shardlab.workloads.base import Batch, LossFn
from shardlab.workloads.token_loss import token_loss
from shardlab.world import World

# ------------------------------------------------------------------ equal to one process


def course(world: World, name: str, options: Mapping[str, Any], inner: Any = None) -> Trajectory:
    """On a rank. Two layouts: a step under the first, whose state goes to the second."""
    first, *rest = options.get("then", [options])
    strategy, subject, found = meshed.strategy_of(world, name, first, inner)
    share, _ = found.data_share(world.rank)
    result = Trajectory()
    for step in range(STEPS):
        if step == 1 and rest:
            before = strategy
            strategy, *_ = meshed.strategy_of(world, name, rest[0], inner, seed=9)
            resuming.hand_over(world, before, strategy)
        result.take_step(strategy, [subject.batch(step, share, m) for m in (0, 1)])
    return result


def run_all(
    world: World, names: Sequence[str], options: Mapping[str, Any], inner: Any, bug: str | None
) -> list[Trajectory]:
    runs = [functools.partial(course, world, name, options, inner) for name in names]
    return [planted(bug, run) if bug else run() for run in runs]


def complaints(
    ranks: GetRanks,
    names: Sequence[str],
    size: int,
    options: Mapping[str, Any],
    inner: Any = None,
    bug: str | None = None,
) -> list[str]:
    expected = [meshed.plain(name, size // options.get("tensor", size), 2) for name in names]
    by_rank = ranks(size).run(run_all, names, options, inner, bug, deadline_s=100)
    return [
        f"{name} on rank {rank}: {complaint}"
        for rank, found in enumerate(by_rank)
        for name, result, wanted in zip(names, found, expected, strict=True)
        if (complaint := first_difference(result, wanted))
    ]


WAYS = {
    "2": (["gpt2", "nasty", "gathered"], 2, {}),
    "sequence on 2": (["gpt2", "nasty", "odd length"], 2, {"sequence": True}),
    "4": (["gpt2", "nasty", "llama"], 4, {}),
    "sequence on 4": (["gpt2", "odd length", "llama"], 4, {"sequence": True}),
    "2 of 4": (["gpt2", "nasty"], 4, {"tensor": 2}),
    "sequence on 2 of 4": (["nasty"], 4, {"tensor": 2, "sequence": True}),
    "2 of 4, zero3": (["nasty"], 4, {"tensor": 2}, Zero3),
    "sequence on 2 of 4, zero3": (["nasty"], 4, {"tensor": 2, "sequence": True}, Zero3),
    "2, then sequence on 2": (["nasty"], 2, {"then": [{}, {"sequence": True}]}),
    # Every architecture whose splits are built in; a wrong count of heads would show.
    "theirs": ([*ARCHITECTURES, "llama", "their gpt2"], 2, {}),
    "sequence of theirs": (["llama", "qwen3", "their gpt2"], 2, {"sequence": True}),
}
# The other ways over two and two of four ranks stay: with sequences, and with zero3.
FAST = deep_unless(lambda way: way not in ("sequence on 2 of 4", "2 of 4, zero3"), WAYS)


@pytest.mark.parametrize("way", long_unless(lambda way: way == "2", FAST))
def test_they_equal_one_process(way: str, ranks: GetRanks) -> None:
    assert complaints(ranks, *WAYS[way]) == []


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, ranks: GetRanks) -> None:
    options = {"sequence": True} if bug.startswith("sequence") else {}
    name = "gathered" if bug.startswith("gathered") else "nasty"
    assert complaints(ranks, [name], 2, options, bug=bug) != []


# ------------------------------------------------------------------ what is sent and held


def calls(world: World, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    strategy, subject, _ = meshed.strategy_of(world, name, options)
    LEDGER.reset()
    strategy.gradients([subject.batch(0, 0, 2)])
    strategy.step()
    return LEDGER.take()


AXES = {"tensor_parallel": {}, "sequence_parallel": {"sequence": True}}


@pytest.mark.parametrize("name", AXES)
def test_the_docstring_names_the_calls_in_their_order(name: str, ranks: GetRanks) -> None:
    docstring = resolve(name, MESH_STRATEGIES, "strategy").__doc__
    for rows in ranks(2).run(calls, "gpt2", AXES[name]):
        kinds = [(row["op"], kind_of(row["label"])) for row in rows]
        assert list(dict.fromkeys(kinds)) == told(docstring)


@pytest.mark.parametrize("name", AXES)
def test_bytes_are_those_of_the_docstring(name: str, ranks: GetRanks) -> None:
    """A is the residual stream, of the float64 model: (4L + 2)A, and three numbers per target."""
    batch, shape = SUBJECTS["gpt2"].batch(0, 0, 2), meshed.SHAPE
    targets = batch.targets.numel()
    stream, layers = targets * shape.dim * 8, shape.layers
    for rows in ranks(2).run(calls, "gpt2", AXES[name]):
        sent: dict[str, int] = {}
        for row in rows:
            key = f"{row['op']} {kind_of(row['label'])}"
            sent[key] = sent.get(key, 0) + row["bytes"]
        ends = 2 * stream  # the embedding, and the head
        loss = 3 * 8 * targets
        if name == "tensor_parallel":
            wanted = {"all_reduce activations": ends + 4 * layers * stream}
        else:
            summed = layers * (2 * 2 + 2) * shape.dim * 8  # two norms, two biases of rows
            wanted = {
                "all_reduce activations": ends,
                "all_gather activations": (4 * layers + 2) * stream,
                "reduce_scatter activations": 4 * layers * stream,
                "all_reduce gradients": summed,
            }
        assert sent == {**wanted, "all_reduce loss": loss}


def cut(
    world: World, model: nn.Module, loss: LossFn, said: Mapping[str, str], sequence: bool = False
) -> None:
    """Keep this rank's part of a model."""
    setup = Setup(model, make_optimizer("sgd"), loss, world.mesh, splits=said)
    mesh = Axes(1, tensor=world.size, sequence=sequence)
    CutModel(setup, mesh, Single, [tensor_parallel.cut])


def kept_bytes(world: World, options: dict[str, Any] | None) -> tuple[int, int]:
    """Bytes of parameters, and of what forward keeps for backward beside them."""
    subject = SUBJECTS["gpt2"]
    model = meshed.built(subject, 0)
    if options is not None:
        cut(world, model, subject.loss, subject.splits or {}, **options)
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in params:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = meshed.tokens(0, 0, 2, length=8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = subject.loss(model, batch)  # alive, so that no storage is used twice
    assert loss.requires_grad
    return sum(p.numel() * 8 for p in model.parameters()), sum(kept.values())


def test_a_rank_holds_its_share(ranks: GetRanks) -> None:
    """Of split layers each has a half. Of what forward keeps for backward, sequence parallelism has
    also half of what norms keep: their inputs, and two numbers of each position."""
    ((whole, most),) = ranks(1).run(kept_bytes, None)
    shape, positions = meshed.SHAPE, meshed.tokens(0, 0, 2, length=8).inputs.numel()
    split = shape.vocab * shape.dim + shape.layers * (12 * shape.dim**2 + (3 + 4) * shape.dim)
    for rank, (plain, along) in enumerate(
        zip(*(ranks(2).run(kept_bytes, {"sequence": s}) for s in (False, True)), strict=True)
    ):
        odd = (-1) ** rank * shape.dim * 8 // 2  # 23 tokens: 12 and 11
        assert plain[0] == along[0] == whole - split * 8 // 2 + odd
        assert plain[1] < 0.8 * most
        norms = 2 * shape.layers * positions * (shape.dim + 2) * 8
        assert along[1] == plain[1] - norms // 2


# ------------------------------------------------------------------ the loss over a vocabulary


def loss_of_columns(world: World) -> list[tuple[float, float]]:
    """Of logits that lie far apart, whose exponentials would overflow; of none; of none that
    count. Beside each what F.cross_entropy says of all columns."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows, scale, ignores in ((5, 1e4, False), (0, 1.0, False), (3, 1.0, True)):
        logits = scale * torch.randn(rows, 7, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, 7, (rows,), generator=generator)
        if ignores:
            targets[:] = -100
        words = Vocabulary([range(3), range(3, 7)], world.group)
        mine = logits[:, words.own.start : words.own.stop].clone().requires_grad_()
        loss = cross_entropy(mine, targets, words)
        loss.backward()
        whole = logits.requires_grad_()
        wanted = token_loss(lambda whole=whole: whole * 1.0, targets)
        wanted.backward()
        assert mine.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[:, words.own.start : words.own.stop])
        found.append((float(loss.detach()), float(wanted.detach())))
    return found


def test_the_loss_of_columns(ranks: GetRanks) -> None:
    for found in ranks(2).run(loss_of_columns):
        for loss, wanted in found:
            assert loss == pytest.approx(wanted, rel=1e-12)


def unknown_token(world: World, where: str) -> None:
    """In one process this is an IndexError; here it must not become a vector of zeros."""
    strategy, _, _ = meshed.strategy_of(world, "nasty", {})
    x, y = torch.zeros(2, 1, 4, dtype=torch.long)
    (x if where == "tokens" else y)[0, 1] = meshed.VOCAB
    with pytest.raises((IndexError, RuntimeError)):
        strategy.gradients([Batch(x, y, 4, 1)])
    raise UsageError("it was noticed")


@pytest.mark.long
@pytest.mark.parametrize("where", ["tokens", "targets"])
def test_a_token_outside_of_the_vocabulary_is_noticed(where: str, ranks: GetRanks) -> None:
    with pytest.raises(Exception, match=r"noticed|out of range|out of bounds"):
        ranks(2).run(unknown_token, where, deadline_s=10)


# ------------------------------------------------------------------ what is refused


def refusal(world: World, changes: Mapping[str, str | None], how: str, sequence: bool) -> str:
    model = meshed.Nasty()
    if how == "weight_norm":
        weight_norm(model.blocks[0].up)
    if how == "hook":
        model.blocks[0].up.register_forward_hook(lambda *_: None)
    if how == "dropout":
        model.dropout = nn.Dropout(0.1)
    if how == "subclass":
        model.blocks[0].up = meshed.Scaled(8, 13)
    said = {k: v for k, v in {**meshed.NASTY, **changes}.items() if v is not None}
    try:
        cut(world, model, meshed.nasty_loss, said, sequence)
    except UsageError as error:
        return str(error)
    return ""


REFUSALS: list[tuple[dict[str, str | None], str, str]] = [
    ({"blocks.*.down": None}, "", r"module 'blocks.0.down' \(Linear\) has no place"),
    ({"scale": None}, "", "'scale' has no place in the workload's splits"),
    ({"blocks.*.upp": "columns"}, "", "upp"),
    ({"blocks.*.up": "colums"}, "", "colums.*columns"),
    ({"blocks.0.up": "rows"}, "", r"'blocks.0.up' is split twice"),
    ({"blocks.*.attention.qkv": "heads"}, "", "of heads how many they are"),
    ({"blocks.*.up": "columns 8"}, "", "is 'columns 8': say 'columns'"),
    ({"blocks.*.attention.qkv": "heads 14 1 1"}, "", "1 heads, which 2 ranks cannot share"),
    ({"head": "columns"}, "", "'embed.weight' and 'head.weight' are one parameter"),
    ({"head": "whole"}, "", "are one parameter"),
    ({"blocks.*.norm_*": "columns"}, "", r"'blocks.0.norm_1' \(LayerNorm\) cannot be split"),
    ({}, "weight_norm", r"'blocks.0.up.parametrizations.weight' .* has no place"),
    ({}, "hook", r"'blocks.0.up' \(Linear\) cannot be split as columns"),
    ({}, "subclass", r"\(Scaled\) cannot be split"),
    ({}, "dropout", "'dropout' would draw different numbers"),
]
OF_SEQUENCES: list[tuple[dict[str, str | None], str, str]] = [
    ({"blocks.*": None}, "", "name no 'block'"),
    ({"blocks.*.norm_*": "whole"}, "", "'blocks.0.norm_1' cannot be 'whole' .* say 'norm'"),
    ({"sometimes": "norm"}, "", "'sometimes' cannot be 'norm' .* say 'whole'"),
]


def test_refusals_by_name(ranks: GetRanks) -> None:
    for sequence, cases in ((False, REFUSALS), (True, OF_SEQUENCES)):
        assert ranks(2).run(refusal, {}, "", sequence) == ["", ""]
        for changes, how, pattern in cases:
            for message in ranks(2).run(refusal, changes, how, sequence):
                assert message
                assert re.search(pattern, message), (changes, how, message)


def odd_positions(world: World) -> None:
    model = meshed.Nasty()
    for block in model.blocks:
        block.up, block.down = nn.Linear(8, 12), nn.Linear(12, 8)
    model.blocks[0].attention.drop = nn.Dropout(0.1)
    cut(world, model, meshed.nasty_loss, meshed.NASTY, True)
    meshed.nasty_loss(model, meshed.tokens(0, 0, 0, length=7))


def test_positions_that_do_not_divide_and_dropout(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="7 positions cannot be divided over 2 ranks"):
        ranks(2).run(odd_positions)


# ------------------------------------------------------------------ chance


def seed_of(world: World) -> int:
    """What a rank's dropout would draw from, after the lab has built its strategy."""
    config = Config().with_overrides(
        {"strategy.name": "tensor_parallel", "model.size": "tiny", "data.source": "synthetic"}
    )
    build_strategy(config, build_workload(config), world)
    return torch.initial_seed()


def test_ranks_that_share_a_layer_draw_the_same(ranks: GetRanks) -> None:
    """Else each would drop other elements of the residual stream, which they all must have."""
    first, second = ranks(2).run(seed_of)
    assert first == second


def with_dropout(world: World, own_seed: bool) -> dict[str, Any]:
    model = meshed.built(Subject(meshed.Dropping, meshed.tokens, meshed.nasty_loss, None), 0)
    torch.manual_seed(world.rank if own_seed else 0)
    said = {
        f"{name}.0" if kind == "columns" or name.endswith("down") else name: kind
        for name, kind in meshed.NASTY.items()
    }
    cut(world, model, meshed.nasty_loss, said)
    meshed.nasty_loss(model, meshed.tokens(0, 0, 1)).backward()
    return {n: p.grad.numpy() for n, p in model.named_parameters() if "norm" in n}


def test_dropout_leaves_ranks_equal(ranks: GetRanks) -> None:
    first, second = ranks(2).run(with_dropout, False)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    first, second = ranks(2).run(with_dropout, True)  # the bug: it must be seen
    assert not all(np.allclose(first[name], second[name]) for name in first)


# ------------------------------------------------------------------ a user's own model

OWN = """
import torch
from torch import nn
from shardlab import Batch, Workload
from shardlab.workloads.token_loss import token_loss

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Data:
    def __len__(self):
        return 64

    def batch(self, ids):
        x = torch.arange(64 * 8.0).sin().view(64, 8)[list(ids)]
        y = (x.sum(1).abs() * 10).long() % 5
        return Batch(x, y, len(y), len(y))

def loss(model, batch):
    return token_loss(lambda: model(batch.inputs), batch.targets)

split = Workload("own", Model, loss, Data(), splits={"up": "columns", "down": "rows"})
silent = Workload("own", Model, loss, Data())
"""


@pytest.mark.long
def test_a_users_model_says_how_it_is_split(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    asked = ["prove", "--strategies", "tensor_parallel", "--world", "2"]
    done = commands.here(*asked, "--workload", "own.py:split", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = ["train", "--strategy", "tensor_parallel", "--steps", "1"]
    done = commands.here(*trained, "--workload", "own.py:silent", cwd=tmp_path)
    assert done.returncode == 2
    assert "does not say how its model, a Model, is split" in " ".join(done.stderr.split())
