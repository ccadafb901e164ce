"""Before the first step: ranks that cut one model have its gradients, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshed
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.training import equivalence_check
from shardlab.workloads.base import Batch, ContextSplit, Workload
from shardlab.world import World

VOCAB, WIDTH, LENGTH = 7, 4, 8


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]


class Experts(nn.Module):
    """Attention, then two experts between which a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, routed: list[Tensor]) -> Tensor:
        x = x + 0.1 * self.attention(x)
        shares = self.gate(x).softmax(-1)  # (batch, tokens, 2)
        routed.append(shares)
        both = torch.stack([expert(x) for expert in self.experts], -1)
        return x + 0.1 * (both * shares[:, :, None]).sum(-1)


class Mixture(nn.Module):
    """``kind``: "balanced" adds the router's loss, "narrow" too, and it cannot compute in float64;
    "plain" adds none, and "noisy" draws random numbers in evaluation too. "convolved" and
    "recurrent" look at several tokens without attention, and "uncut" counts positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        if kind == "convolved":
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if kind == "recurrent":
            self.mix = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, routed = self.embed(tokens), list[Tensor]()
        if self.kind.startswith("narrow") and x.dtype == torch.float64:
            raise RuntimeError("there is no kernel for float64")
        if self.kind == "noisy":
            x = x + torch.rand(())
        if self.kind == "convolved":
            x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "recurrent":
            x = x + self.mix(x)[0]
        if self.kind == "uncut":
            x = x + torch.arange(x.shape[1])[:, None] / 10
        for block in self.blocks:
            x = block(x, routed)
        shares = torch.cat([layer.flatten(0, 1) for layer in routed])  # (layers x tokens, 2)
        chosen = (shares > 0.5).to(x.dtype).mean(0)
        balance = (chosen * shares.mean(0)).sum() * self.kind.endswith("balanced")
        return self.head(x), balance


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, balance = model(batch.inputs)
    right = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return right + 1e-3 * batch.count * balance


class Tokens:
    def __len__(self) -> int:
        return 16

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [(torch.arange(LENGTH + 1) * (int(i) + 1)) % VOCAB for i in ids]
        rows = torch.stack(rows) if rows else torch.zeros(0, LENGTH + 1).long()  # type: ignore[assignment]
        return Batch(rows[:, :-1], rows[:, 1:], LENGTH * len(rows), len(rows))  # type: ignore[call-overload]


def take(batch: Batch, positions: Tensor) -> Batch:
    inputs, targets = batch.inputs[:, positions], batch.targets[:, positions]
    return replace(batch, inputs=inputs, targets=targets, count=targets.numel())


class NastyTokens(Tokens):
    def batch(self, ids: Sequence[int]) -> Batch:
        return meshed.tokens(0, 0, 2 if ids else 1)


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Of a split weight a rank would penalise its part."""
    return meshed.nasty_loss(model, batch) + 1e-3 * sum(
        (p.square().sum() for p in model.parameters()), torch.zeros(())
    )


def norm_penalised(model: nn.Module, batch: Batch) -> Tensor:
    """A norm is whole, but where positions are split its gradients are summands."""
    norm: Any = model.get_submodule("blocks.1.norm_1")
    value: Tensor = meshed.nasty_loss(model, batch) + norm.weight.square().sum()
    return value


def nasty(kind: str) -> Workload:
    """``meshed.Nasty``, of which ``kind`` says what is wrong."""

    def make() -> nn.Module:
        model = meshed.Nasty()
        if "frozen" in kind:  # as under LoRA
            model.requires_grad_(False)
            model.scale.requires_grad_()
        if "mixes" in kind:  # where positions are split, each rank takes the mean of its own
            model.blocks[1].register_forward_pre_hook(
                lambda _, args: (args[0] - args[0].mean(1)[:, None],)
            )
        return model

    losses = {"penalised": penalised, "norm penalised": norm_penalised}
    loss = losses.get(kind.removeprefix("frozen "), meshed.nasty_loss)
    splits = dict(meshed.NASTY)
    if kind == "no number":
        del splits["blocks.*.attention.heads"]
    if kind.startswith("heads"):
        splits["blocks.*.attention.qkv"] = kind
    if kind == "norms are whole":
        splits["blocks.*.norm_*"] = "whole"
    if kind == "scale is a norm":
        splits["scale"] = "norm"
    if kind == "no branch":
        del splits["blocks.*.attention"]
    return Workload(
        "nasty", make, loss, NastyTokens(), blocks=("blocks.0", "blocks.1"), splits=splits,
        couples_samples=True,
    )  # fmt: skip


def mixture(kind: str = "balanced") -> Workload:
    context = ContextSplit(lambda batch: batch.inputs.shape[1], take, ("blocks.*.attention",))
    blocks = tuple(f"blocks.{i}" for i in range(4))
    return Workload(
        "mixture", lambda: Mixture(kind), loss, Tokens(), blocks=blocks, context=context,
        couples_samples=True,
    )  # fmt: skip


def checked(
    world: World, kind: str, strategy: str, make: Callable[[str], Workload] = mixture
) -> tuple[str, list[Any]]:
    """What a run is refused for, and the notes that it is given."""
    asked = {
        "strategy.name": strategy,
        "launch.device": "cpu",
        "training.global_batch": 8,
        "training.micro_batch": 2,
    }
    told: list[Any] = []
    config = configs.load(None, asked)
    dear = 0 if kind.startswith("dear") else equivalence_check.DEAR
    try:
        with mock.patch.object(equivalence_check, "DEAR", dear):
            equivalence_check.check(config, make(kind), replace(world, tell=told.append))
    except UsageError as error:
        return str(error), told
    return "nothing", told


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline_1f1b",
        pytest.param("context_parallel", marks=pytest.mark.long),
        pytest.param("pytorch_pipeline", marks=pytest.mark.deep),
    ],
)
def test_a_loss_of_what_several_ranks_have_is_refused_by_name(
    strategy: str, ranks: GetRanks
) -> None:
    """The router's loss is a thousandth of the loss, and moves the gradients of gates alone."""
    for kind in ("balanced", "narrow balanced", "dear balanced"):
        (said, told), other = ranks(2).run(checked, kind, strategy)
        assert said == other[0]
        assert "the gradient of 'blocks." in said
        assert ".gate." in said
        assert "differs by" in said
        in_float32 = ["in float32: an error of" in str(note) for note in told]
        assert in_float32 == ([] if kind == "balanced" else [True])
    assert [said for said, _ in ranks(2).run(checked, "plain", strategy)] == ["nothing"] * 2


@pytest.mark.parametrize("kind", ["convolved", "recurrent", "uncut"])
def test_what_looks_at_the_whole_sequence_is_refused(kind: str, ranks: GetRanks) -> None:
    for said, _ in ranks(2).run(checked, kind, "context_parallel"):
        assert "differs by" in said
        assert "that only attention looks at several tokens" in said


# What is wrong, under which strategy, and what is said.
OF_SPLITS = [
    ("plain", "tensor_parallel", "nothing"),
    ("plain", "sequence_parallel", "nothing"),
    ("penalised", "tensor_parallel", "differs by"),
    ("penalised", "sequence_parallel", "differs by"),
    ("frozen penalised", "tensor_parallel", "the loss differs by"),
    ("frozen", "tensor_parallel", "nothing"),
    ("norm penalised", "tensor_parallel", "nothing"),
    ("norm penalised", "sequence_parallel", "the gradient of 'blocks.1.norm_1.weight' differs by"),
    ("mixes", "tensor_parallel", "nothing"),
    ("mixes", "sequence_parallel", "differs by"),
    ("no number", "tensor_parallel", "tensor 2: one sample fails in the ranks' parts"),
    ("heads 10 4 2", "tensor_parallel", "differs by"),
    ("heads 12 4 4", "tensor_parallel", "one sample fails in the ranks' parts"),
    ("norms are whole", "tensor_parallel", "nothing"),
    ("norms are whole", "sequence_parallel", "cannot be 'whole' where it is"),
    ("scale is a norm", "sequence_parallel", "cannot be 'norm' where it is"),
    ("no branch", "tensor_parallel", "nothing"),
    ("no branch", "sequence_parallel", "nothing"),
]


@pytest.mark.long
def test_splits_that_do_not_fit_the_model_are_refused(ranks: GetRanks) -> None:
    for kind, strategy, wanted in OF_SPLITS:
        for said, told in ranks(2).run(checked, kind, strategy, nasty):
            assert wanted in said, (kind, strategy)
            assert told == []


def test_what_cannot_be_compared_is_said(ranks: GetRanks) -> None:
    (said, told), _ = ranks(2).run(checked, "noisy", "pipeline_1f1b")
    assert said == "nothing"
    assert ["was not checked" in str(note) for note in told] == [True]


def test_train_is_refused_before_its_first_step(ranks: GetRanks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = {
        "model.workload": f"{__file__}:mixture",
        "strategy.name": "context_parallel",
        "training.steps": 1,
        "training.global_batch": 2,
        "launch.device": "cpu",
        "output.dir": str(folder),
    }
    with pytest.raises(UsageError, match=r"context 2: the gradient of 'blocks\.\d\.gate"):
        ranks(2).run("shardlab.training.run:train_rank", configs.load(None, asked), "a test")
    assert not folder.exists()
