"""A sequence that is cut between ranks trains as in one process: loss, gradients, two updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import conformance
import meshed
import planted_mesh
import resuming
from conformance import Trajectory, first_difference
from conftest import GetRanks, long_unless
from shardlab import naming
from shardlab.axes import Axes
from shardlab.errors import RankFailure, UsageError
from shardlab.measure import memory
from shardlab.naming import STRATEGIES
from shardlab.strategies.base import Setup, Strategy
from shardlab.strategies.context import context_parallel
from shardlab.strategies.context.context_parallel import ContextParallel
from shardlab.workloads import causal_lm, context, gpt2
from shardlab.workloads.base import Batch, ContextSplit, LossFn
from shardlab.workloads.samples import IGNORED
from shardlab.world import World

VOCAB = meshed.VOCAB
CONTEXT = planted_mesh.words().context  # gpt2's, of targets of which some do not count
STEPS = 2


# ------------------------------------------------------------------ models and their batches


def gpt2_tiny() -> nn.Module:
    return gpt2.GPT2(gpt2.Shape(layers=2, heads=2, dim=8, context=32, vocab=VOCAB))


def llama_tiny(**changes: Any) -> nn.Module:
    """Rotary positions, and two heads of queries for each of keys."""
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    return meshed.theirs("llama", **{**sizes, **changes}).train()


class Encoder(nn.Module):
    """A user's own: attention in both directions, positions as sines, one module for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = Mix(8)
        self.unused = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB)
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.embed(tokens) + torch.sin(at[:, None] * torch.arange(1, 9) / 7)
        for _ in range(2):
            x = x + self.mix(self.norm(x))
        out: Tensor = self.head(x)
        return out


class Mix(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim)
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 1, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def encoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    logits = model(*inputs)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def labelled_loss(model: nn.Module, batch: Batch) -> Tensor:
    """transformers' own loss, which shifts the labels by one, as the sum that it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # theirs computes it in float32
        out = model(**batch.inputs)
    loss: Tensor = out.loss * batch.count if batch.count else out.logits.sum() * 0.0
    return loss


def tokens_of(rows: int, length: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (rows, length + 1), generator=random)


def plain_batch(rows: int, length: int, seed: int) -> Batch:
    stream = tokens_of(rows, length, seed)
    targets = torch.where(stream[:, 1:] % 5 == 0, IGNORED, stream[:, 1:])
    return Batch(stream[:, :-1], targets, int((targets != IGNORED).sum()), rows)


def padded_batch(rows: int, length: int, seed: int) -> Batch:
    """Rows of many lengths, padded at the end; most targets do not count."""
    stream = tokens_of(rows, length, seed)
    targets = stream[:, 1:].clone()
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        end = max(1, length - 3 * row)
        targets[row, end:] = IGNORED
        targets[row, : end // 2] = IGNORED
        mask[row, end:] = 0
    count = int((targets != IGNORED).sum())
    return Batch({"input_ids": stream[:, :-1], "attention_mask": mask}, targets, count, rows)


def labelled_batch(rows: int, length: int, seed: int) -> Batch:
    stream = tokens_of(rows, length, seed)[:, 1:]
    labels = stream.clone()
    labels[:, : length // 3] = IGNORED
    count = int((labels[:, 1:] != IGNORED).sum())
    return Batch({"input_ids": stream, "labels": labels}, labels, count, rows)


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    loss: LossFn
    batch: Callable[[int, int, int], Batch]
    context: ContextSplit | None  # None: transformers'
    blocks: tuple[str, ...]


LAYERS = ("model.layers.0", "model.layers.1")
KINDS = {
    "gpt2": Kind(
        gpt2_tiny,
        gpt2.next_token_loss,
        plain_batch,
        CONTEXT,
        ("blocks.0", "blocks.1"),
    ),
    "llama": Kind(llama_tiny, causal_lm.answer_loss, padded_batch, None, LAYERS),
    "llama-labels": Kind(llama_tiny, labelled_loss, labelled_batch, None, LAYERS),
    "their-gpt2": Kind(  # learnt positions, and projections that are not nn.Linear
        partial(meshed.theirs, "gpt2"),
        labelled_loss,
        labelled_batch,
        None,
        ("transformer.h.0", "transformer.h.1"),
    ),
    "encoder": Kind(
        Encoder,
        encoder_loss,
        plain_batch,
        ContextSplit(lambda batch: batch.inputs.shape[1], CONTEXT.take, ("mix",)),
        (),
    ),
}


class Case(NamedTuple):
    kind: str
    lengths: tuple[int, ...] = (16, 13)  # of the micro-batches
    inner: str = "bucket_ddp_async"
    context: int = 0  # 0: all ranks
    checkpoints: bool = False  # activation checkpointing


def batches(case: Case, step: int, share: int) -> list[Batch]:
    make = KINDS[case.kind].batch
    return [
        make(2 + (i + share) % 2, length, 100 * step + 10 * share + i)
        for i, length in enumerate(case.lengths)
    ]


def built(kind: Kind, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind.make().double()


@functools.cache
def reference(case: Case, shares: int) -> Trajectory:
    kind = KINDS[case.kind]
    model = built(kind, 0)

    def everything(step: int) -> list[list[Batch]]:
        return [[batch for share in range(shares) for batch in batches(case, step, share)]]

    make = conformance.make_optimizer("adamw")
    seen = conformance.one_process(model, make, kind.loss, everything, STEPS)
    with torch.no_grad():
        seen.evaluated = [float(kind.loss(model, batches(case, 0, 0)[0]))]
    return seen


def strategy_of(world: World, case: Case) -> ContextParallel:
    kind = KINDS[case.kind]
    model = built(kind, world.rank)  # rank 0's counts
    split = context.of_transformers(model) if kind.context is None else kind.context
    if case.checkpoints:
        for name in kind.blocks:
            block = model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    setup = Setup(
        model, conformance.make_optimizer("adamw"), kind.loss, world.mesh, blocks=kind.blocks,
        context=split,
    )  # fmt: skip
    ranks = case.context or world.size
    axes = Axes(data=world.size // ranks, context=ranks)
    inner = naming.resolve(case.inner, STRATEGIES, "strategy")
    return ContextParallel(setup, axes, inner, [context_parallel.cut])


def take_steps(world: World, cases: Sequence[Case]) -> Trajectory:
    """Each step under a layout of its own, begun with the state that the one before has left."""
    before, found = None, Trajectory()
    for step, case in enumerate(cases):
        if before is None or case != cases[step - 1]:
            strategy = strategy_of(world, case)
            if before is not None:
                resuming.hand_over(world, before, strategy)
        share = strategy.axes.data_share(world.rank)[0]
        found.take_step(strategy, batches(case, step, share))
        before = strategy
    found.evaluated = [float(strategy.infer(KINDS[case.kind].loss, batches(case, 0, 0)[0]))]
    return found


def on_rank(world: World, cases: Sequence[Case], bug: str = "") -> list[Trajectory]:
    with ExitStack() as planted:
        for plant in BUGS[bug][1] if bug else ():
            planted.enter_context(mock.patch.object(*plant))
        return [take_steps(world, [case] * STEPS) for case in cases]


def complaints(ranks: Any, cases: Sequence[Case], bug: str = "") -> list[str]:
    found = []
    for rank, results in enumerate(ranks.run(on_rank, list(cases), bug, deadline_s=100)):
        for case, got in zip(cases, results, strict=True):
            shares = ranks.size // (case.context or ranks.size)
            complaint = first_difference(got, reference(case, shares))
            found += [f"{case} rank {rank}: {complaint}"] if complaint else []
    return found


# ------------------------------------------------------------------ equal to one process

WAYS = {
    "2": (2, [Case("gpt2")]),
    "kinds": (2, [Case(kind) for kind in KINDS if kind != "gpt2"]),
    # Shorter than the pieces are many: a rank has nothing.
    "short": (2, [Case("gpt2", lengths=(1, 2, 3)), Case("llama", lengths=(1, 2, 3))]),
    "inner": (2, [Case("gpt2", inner=inner) for inner in ("zero1", "zero3", "pytorch_zero3")]),
    "checkpoints": (
        2,
        [Case("llama", inner="zero3", checkpoints=True), Case("gpt2", checkpoints=True)],
    ),
    "3": (3, [Case("gpt2"), Case("encoder", lengths=(2, 7, 17))]),
    "4": (4, [Case("gpt2", inner="simple_ddp")]),
    # Two shares of the data, cut in two each.
    "2 of 4": (4, [Case("gpt2", inner=n, context=2) for n in ("zero3", "pytorch_zero2")]),
}


@pytest.mark.parametrize("way", long_unless(lambda way: way == "2", WAYS))
def test_it_trains_as_one_process_does(way: str, ranks: GetRanks) -> None:
    world, cases = WAYS[way]
    assert complaints(ranks(world), cases) == []


def test_another_layout_continues(ranks: GetRanks) -> None:
    cases = [Case("gpt2", inner="zero3"), Case("gpt2", inner="simple_ddp")]
    for got in ranks(2).run(take_steps, cases):
        assert first_difference(got, reference(cases[0], 1)) is None


def on_replicas(world: World, model: nn.Module, loss: LossFn = gpt2.next_token_loss) -> Strategy:
    """simple_ddp, of a sequence that is cut where there are several ranks."""
    sgd = conformance.make_optimizer("sgd")
    setup = Setup(model, sgd, loss, world.mesh, context=CONTEXT)
    kind: Any = naming.resolve("simple_ddp", STRATEGIES, "strategy")
    if world.size == 1:
        alone: Strategy = kind(setup)
        return alone
    axes = Axes(data=1, context=world.size)
    return ContextParallel(setup, axes, kind, [context_parallel.cut])


def narrow(world: World, dtype: torch.dtype) -> tuple[float, float]:
    """The loss and the norm of the gradient in autocast, by all ranks."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            return gpt2.next_token_loss(model, batch)

    torch.manual_seed(0)
    made = on_replicas(world, gpt2_tiny(), loss)
    value = float(made.gradients([plain_batch(4, 32, 0)]))
    grads = [g.float().norm() for g in made.full_grads().values() if g is not None]
    return value, float(torch.stack(grads).norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, ranks: GetRanks) -> None:
    ((loss, norm),) = ranks(1).run(narrow, dtype)
    for found in ranks(2).run(narrow, dtype):
        assert found == pytest.approx((loss, norm), rel=5e-3)


def peak(world: World, length: int) -> int:
    """What a step takes at its peak, beyond what was there before it."""
    torch.manual_seed(0)
    shape = gpt2.Shape(layers=4, heads=2, dim=16, context=length, vocab=VOCAB)
    made = on_replicas(world, gpt2.GPT2(shape))
    batch = plain_batch(1, length, 0)
    made.gradients([batch])
    return memory.peak_bytes(world.device, lambda: made.gradients([batch]))[1]


@pytest.mark.long
def test_activations_shrink_with_the_ranks(ranks: GetRanks) -> None:
    (alone,) = ranks(1).run(peak, 1024)
    for world in (2, 4):
        assert max(ranks(world).run(peak, 1024)) < 1.15 * alone / world


# ------------------------------------------------------------------ planted bugs


# Those of the proofs, each with the case in which it shows.
BUGS = {
    name: (Case("llama-labels" if bug.workload == "labelled" else "gpt2"), bug.plants)
    for name, bug in planted_mesh.BUGS.items()
    if (bug.strategy, bug.check) == ("context_parallel", "equal")
}
AGAIN = "checkpointing computes the forward again without the ring"
BUGS[AGAIN] = Case("gpt2", checkpoints=True), [(context_parallel, "in_backward", lambda: False)]


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug: str, ranks: GetRanks) -> None:
    if bug == AGAIN:
        with pytest.raises(RankFailure, match="checkpoint"):  # which compares what was saved
            complaints(ranks(2), [BUGS[bug][0]], bug)
    else:
        assert complaints(ranks(2), [BUGS[bug][0]], bug) != []


# ------------------------------------------------------------------ refusals


class Odd(Encoder):
    """The user's model, with something in its attention that cannot be cut."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix


class Attends(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim)
        how = dict(self.how)
        if how.pop("masks", False):
            how["attn_mask"] = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        q = self.layer(x).unsqueeze(1)
        k = q[:, :, ::2] if how.pop("crosses", False) else q
        return F.scaled_dot_product_attention(q, k, k, **how).squeeze(1)


class ByHand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y @ y.transpose(-1, -2)).softmax(-1) @ y


class Torchs(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Outside(Encoder):
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(tokens, positions)
        return F.scaled_dot_product_attention(x, x, x)


class LeavesOut(Encoder):
    """LayerDrop: each rank leaves out another layer, as if by chance. As many are left."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(Mix(8) for _ in range(2))  # type: ignore[assignment]

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:  # noqa: ARG002
        x = self.embed(tokens)
        for i, mix in enumerate(self.mix):  # type: ignore[arg-type]
            x = x if i == dist.get_rank() else x + mix(x)
        out: Tensor = self.head(x)
        return out


def refused(world: World) -> dict[str, str]:
    """What a strategy says to each model, at construction or in its first step."""
    said = {}
    for words, (make, kind, batch) in REFUSED.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KINDS, "refused", kind._replace(make=make))
            try:
                strategy_of(world, Case("refused")).gradients([batch])
                said[words] = "nothing"
            except UsageError as error:
                said[words] = str(error)
    return said


def no_context() -> ContextSplit:
    return ContextSplit(lambda batch: batch.inputs.shape[1], gpt2.take_positions, ("blocks.*.x",))


ENCODER = KINDS["encoder"]
TOKENS = plain_batch(2, 8, 0)
LATE = padded_batch(2, 8, 0)
LATE.inputs["attention_mask"] = LATE.inputs["attention_mask"].flip(1)
LLAMA = KINDS["llama"]
ODD = {  # in the place of the encoder's attention
    "module 'mix' gives an attn_mask (4, 4)": Attends(masks=True),
    "module 'mix' drops out 0.1 of its attention weights": Attends(dropout_p=0.1),
    "this rank has 4 of 8 tokens": Attends(crosses=True),
    "module 'mix' computes its attention without F.scaled": ByHand(8, 8),
    "call that (in place of nn.MultiheadAttention": Torchs(8, 2, batch_first=True),
    "module 'mix' (BatchNorm1d) looks at several tokens": nn.BatchNorm1d(8),
}
REFUSED: dict[str, tuple[Any, Kind, Batch]] = {
    **{words: (partial(Odd, module), ENCODER, TOKENS) for words, module in ODD.items()},
    "does not say how its sequences are cut": (Encoder, ENCODER._replace(context=None), TOKENS),
    "was called outside of the modules": (Outside, ENCODER, TOKENS),
    "names 'blocks.*.x' as its attention, and the model has no such module": (
        Encoder, ENCODER._replace(context=no_context()), TOKENS),
    "came to 'attention mix.": (
        LeavesOut, ENCODER._replace(context=replace(ENCODER.context, attention=("mix.?",))), TOKENS
    ),
    "'model.layers.0.self_attn' computes its attention without": (
        partial(llama_tiny, attn_implementation="eager"), LLAMA, padded_batch(2, 8, 0)),
    "drops out 0.1": (partial(llama_tiny, attention_dropout=0.1), LLAMA, padded_batch(2, 8, 0)),
    "hides tokens before others": (llama_tiny, LLAMA, LATE),
    "how to cut the input 'weights'": (
        llama_tiny, LLAMA,
        replace(LATE, inputs={"input_ids": LATE.inputs["input_ids"], "weights": LATE.targets})),
    "is cut by its 'input_ids', and the batch's inputs are Tensor": (llama_tiny, LLAMA, TOKENS),
}  # fmt: skip


@pytest.mark.long
def test_what_it_refuses(ranks: GetRanks) -> None:
    for said in ranks(2).run(refused):
        assert {words: got for words, got in said.items() if words not in got} == {}
        assert all(got.startswith("context_parallel: ") for got in said.values())


class Theirs(Encoder):
    """With what transformers' models say of themselves."""

    class SelfAttention(nn.Module):
        is_causal = True

    def __init__(self, is_causal: bool = True, window: int | None = None) -> None:
        super().__init__()
        self.attention = self.SelfAttention()
        self.attention.is_causal = is_causal
        self.config = type("Config", (), {"sliding_window": window})

    def forward(self, *, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        return position_ids


def part_of(model: nn.Module, rows: int, length: int) -> int:
    split = context.of_transformers(model)
    assert split is not None
    return split.take(padded_batch(rows, length, 0), torch.arange(length // 2)).samples


def test_a_window_that_is_shorter_than_the_sequences_is_refused() -> None:
    with pytest.raises(UsageError, match="a window of 4 tokens, and the sequences have 8"):
        part_of(Theirs(window=4), 2, 8)
    assert part_of(Theirs(window=4), 2, 4) == 2


def test_padding_that_later_tokens_do_not_hide_is_refused() -> None:
    """A causal model's tokens never see what is behind them; those of one like BERT do."""
    assert part_of(Theirs(), 2, 8) == 2
    assert part_of(Theirs(is_causal=False), 1, 8) == 1  # nothing is padded
    with pytest.raises(UsageError, match="'attention' attends in both directions"):
        part_of(Theirs(is_causal=False), 2, 8)
