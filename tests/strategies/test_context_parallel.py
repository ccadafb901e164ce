"""A sequence that is cut between ranks trains as in one process: loss, gradients, two updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import conformance
from conftest import GetRanks
from shardlab import naming
from shardlab.axes import Axes
from shardlab.errors import RankFailure, UsageError
from shardlab.measure import memory
from shardlab.naming import STRATEGIES
from shardlab.strategies import context_parallel, ring_attention
from shardlab.strategies.base import Setup
from shardlab.strategies.context_parallel import ContextParallel
from shardlab.strategies.ring_attention import Zigzag
from shardlab.workloads import causal_lm, context, gpt2
from shardlab.workloads.base import Batch, ContextSplit, LossFn
from shardlab.workloads.samples import IGNORED
from shardlab.world import World

TOLERANCE = 1e-10
VOCAB = 31
STEPS = 2


# ------------------------------------------------------------------ models and their batches


def gpt2_tiny() -> nn.Module:
    return gpt2.GPT2(gpt2.Shape(layers=2, heads=2, dim=8, context=32, vocab=VOCAB))


def llama_tiny(attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Rotary positions, and two heads of queries for each of keys."""
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**sizes, **changes}, attn_implementation=attention)
    config.use_cache = False
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def theirs_gpt2() -> nn.Module:
    """transformers' own: learnt positions, and projections that are not nn.Linear."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=8, n_layer=2, n_head=2, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


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
    return Batch(stream[:, :-1], stream[:, 1:], rows * length, rows)


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
        gpt2_tiny, gpt2.next_token_loss, plain_batch, gpt2.CONTEXT, ("blocks.0", "blocks.1")
    ),
    "llama": Kind(llama_tiny, causal_lm.answer_loss, padded_batch, None, LAYERS),
    "llama-labels": Kind(llama_tiny, labelled_loss, labelled_batch, None, LAYERS),
    "their-gpt2": Kind(
        theirs_gpt2, labelled_loss, labelled_batch, None, ("transformer.h.0", "transformer.h.1")
    ),
    "encoder": Kind(
        Encoder,
        encoder_loss,
        plain_batch,
        ContextSplit(lambda batch: batch.inputs.shape[1], gpt2.take_positions, ("mix",)),
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


class Found(NamedTuple):
    losses: list[float]
    grads: list[conformance.Arrays]
    params: list[conformance.Arrays]
    evaluated: float


def built(kind: Kind, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind.make().double()


@functools.cache
def reference(case: Case, shares: int) -> Found:
    kind = KINDS[case.kind]
    model = built(kind, 0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = conformance.make_optimizer("adamw")(trained)
    found = Found([], [], [], 0.0)
    for step in range(STEPS):
        every = [batch for share in range(shares) for batch in batches(case, step, share)]
        count = sum(batch.count for batch in every)
        total = 0.0
        for batch in every:
            loss = kind.loss(model, batch)
            (loss / count).backward()
            total += float(loss.detach())
        found.losses.append(total / count)
        found.grads.append(conformance.arrays({n: p.grad for n, p in trained.items()}))
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        found.params.append(conformance.arrays(dict(tensors)))
    with torch.no_grad():
        evaluated = float(kind.loss(model, batches(case, 0, 0)[0]))
    return found._replace(evaluated=evaluated)


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
    return ContextParallel(setup, axes, naming.resolve(case.inner, STRATEGIES, "strategy"))


def on_rank(
    world: World, cases: Sequence[Case], plant: Callable[[pytest.MonkeyPatch], None] | None = None
) -> list[Found]:
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        for case in cases:
            strategy = strategy_of(world, case)
            share = strategy.axes.data_share(world.rank)[0]
            found = Found([], [], [], 0.0)
            for step in range(STEPS):
                found.losses.append(float(strategy.gradients(batches(case, step, share))))
                found.grads.append(conformance.arrays(strategy.full_grads()))
                strategy.step()
                found.params.append(conformance.arrays(strategy.full_params()))
            value = strategy.infer(KINDS[case.kind].loss, batches(case, 0, 0)[0])
            results.append(found._replace(evaluated=float(value)))
    return results


def difference(got: Found, wanted: Found) -> str | None:
    for step in range(STEPS):
        if not abs(got.losses[step] - wanted.losses[step]) < TOLERANCE:
            return f"step {step}: the loss is {got.losses[step]}, not {wanted.losses[step]}"
        for what in ("grads", "params"):
            mine, theirs = getattr(got, what)[step], getattr(wanted, what)[step]
            if mine.keys() != theirs.keys():
                return f"step {step}: {what} has other names"
            for name, a in mine.items():
                b = theirs[name]
                if (a is None) != (b is None):
                    return f"step {step}: {what} {name} is {a}, not {b}"
                if a is not None and not np.allclose(a, b, rtol=0, atol=TOLERANCE):
                    return f"step {step}: {what} {name} is off by {np.abs(a - b).max():.1e}"
    if not abs(got.evaluated - wanted.evaluated) < 1e-8:
        return f"evaluated as {got.evaluated}, not {wanted.evaluated}"
    return None


def complaints(ranks: Any, cases: Sequence[Case], plant: Any = None) -> list[str]:
    found = []
    for rank, results in enumerate(ranks.run(on_rank, list(cases), plant, deadline_s=100)):
        for case, got in zip(cases, results, strict=True):
            shares = ranks.size // (case.context or ranks.size)
            complaint = difference(got, reference(case, shares))
            found += [f"{case} rank {rank}: {complaint}"] if complaint else []
    return found


# ------------------------------------------------------------------ equal to one process

WORLDS = {
    2: [
        *(Case(kind) for kind in KINDS),
        Case("gpt2", lengths=(1, 2, 3)),  # shorter than the pieces are many: a rank has nothing
        Case("llama", lengths=(1, 2, 3)),
        *(Case("gpt2", inner=inner) for inner in ("zero1", "zero3", "pytorch_zero3")),
        Case("llama", inner="zero3", checkpoints=True),
        Case("gpt2", checkpoints=True),
    ],
    3: [Case("gpt2"), Case("encoder", lengths=(2, 7, 17))],
    4: [
        Case("gpt2", inner="simple_ddp"),
        Case("gpt2", inner="zero3", context=2),  # two shares of the data, cut in two each
        Case("gpt2", inner="pytorch_zero2", context=2),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_it_trains_as_one_process_does(world: int, ranks: GetRanks) -> None:
    assert complaints(ranks(world), WORLDS[world]) == []


def changes_its_layout(world: World, cases: Sequence[Case]) -> Found:
    """A step under each layout, begun with the state that the one before has left."""
    state, found = None, Found([], [], [], 0.0)
    for step, case in enumerate(cases):
        strategy = strategy_of(world, case)
        if state is not None:
            strategy.load_state_dict(state)
        share = strategy.axes.data_share(world.rank)[0]
        found.losses.append(float(strategy.gradients(batches(case, step, share))))
        found.grads.append(conformance.arrays(strategy.full_grads()))
        strategy.step()
        found.params.append(conformance.arrays(strategy.full_params()))
        state = strategy.state_dict()
    value = strategy.infer(KINDS[case.kind].loss, batches(case, 0, 0)[0])
    return found._replace(evaluated=float(value))


def test_another_layout_continues(ranks: GetRanks) -> None:
    cases = [Case("gpt2", inner="zero3"), Case("gpt2", inner="simple_ddp")]
    for got in ranks(2).run(changes_its_layout, cases):
        assert difference(got, reference(cases[0], 1)) is None


def narrow(world: World, dtype: torch.dtype) -> tuple[float, float]:
    """The loss and the norm of the gradient in autocast, by all ranks."""
    kind = KINDS["gpt2"]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            return kind.loss(model, batch)

    torch.manual_seed(0)
    model = kind.make()
    setup = Setup(model, conformance.make_optimizer("sgd"), loss, world.mesh, context=kind.context)
    strategy: Any = naming.resolve("simple_ddp", STRATEGIES, "strategy")
    if world.size > 1:
        made = ContextParallel(setup, Axes(data=1, context=world.size), strategy)
    else:
        made = strategy(setup)
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
    setup = Setup(
        gpt2.GPT2(shape), conformance.make_optimizer("sgd"), gpt2.next_token_loss, world.mesh,
        context=gpt2.CONTEXT,
    )  # fmt: skip
    strategy: Any = naming.resolve("simple_ddp", STRATEGIES, "strategy")
    if world.size > 1:
        made = ContextParallel(setup, Axes(data=1, context=world.size), strategy)
    else:
        made = strategy(setup)
    batch = plain_batch(1, length, 0)
    made.gradients([batch])
    return memory.peak_bytes(world.device, lambda: made.gradients([batch]))[1]


@pytest.mark.long
def test_activations_shrink_with_the_ranks(ranks: GetRanks) -> None:
    (alone,) = ranks(1).run(peak, 1024)
    for world in (2, 4):
        assert max(ranks(world).run(peak, 1024)) < 1.15 * alone / world


# ------------------------------------------------------------------ planted bugs


def positions_of_a_plain_cut(patch: pytest.MonkeyPatch) -> None:
    """The model is told that its tokens are neighbours, from the rank's first position on."""
    right = gpt2.take_positions

    def take(batch: Batch, positions: Tensor) -> Batch:
        part = right(batch, positions)
        neighbours = positions[:1] + torch.arange(len(positions))
        return replace(part, inputs=(part.inputs[0], neighbours % 16))

    _cut_by(patch, take)


def targets_shifted_in_the_part(patch: pytest.MonkeyPatch) -> None:
    """The target of a piece's last token is the first of the piece that is next on this rank."""
    right = gpt2.take_positions

    def take(batch: Batch, positions: Tensor) -> Batch:
        part = right(batch, positions)
        shifted = torch.cat([part.inputs[0][:, 1:], part.targets[:, -1:]], 1)
        return replace(part, targets=shifted)

    _cut_by(patch, take)


def count_of_the_whole(patch: pytest.MonkeyPatch) -> None:
    right = gpt2.take_positions
    _cut_by(patch, lambda batch, at: replace(right(batch, at), count=batch.count))


def _cut_by(patch: pytest.MonkeyPatch, take: Callable[[Batch, Tensor], Batch]) -> None:
    kind = KINDS["gpt2"]._replace(context=replace(gpt2.CONTEXT, take=take))
    patch.setitem(KINDS, "gpt2", kind)


def without_a_zigzag_in_the_ring(patch: pytest.MonkeyPatch) -> None:
    """The ring takes the parts for neighbours' pieces, one after another."""

    def view(split: Zigzag, rank: int, source: int, _is_causal: bool) -> ring_attention.View:
        end = split.tokens(source) if source <= rank else 0
        return ring_attention.View(0, end, is_masked=source == rank)

    patch.setattr(ring_attention, "view", view)


def plain_when_computed_again(patch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing computes the forward again without the ring."""
    patch.setattr(context_parallel, "in_backward", lambda: False)


def ignored_targets_count(patch: pytest.MonkeyPatch) -> None:
    right = context.take_positions

    def take(batch: Batch, positions: Tensor) -> Batch:
        part = right(batch, positions)
        return replace(part, count=part.targets.numel())

    patch.setattr(context, "take_positions", take)


def labels_cut_before_they_are_shifted(patch: pytest.MonkeyPatch) -> None:
    right = context.take_positions

    def take(batch: Batch, positions: Tensor) -> Batch:
        part = right(batch, positions)
        labels = batch.inputs["labels"][:, positions]
        del part.inputs["shift_labels"]
        return replace(part, inputs={**part.inputs, "labels": labels})

    patch.setattr(context, "take_positions", take)


BUGS = {
    positions_of_a_plain_cut: Case("gpt2"),
    targets_shifted_in_the_part: Case("gpt2"),
    count_of_the_whole: Case("gpt2"),
    without_a_zigzag_in_the_ring: Case("gpt2"),
    ignored_targets_count: Case("llama"),
    labels_cut_before_they_are_shifted: Case("llama-labels"),
}


@pytest.mark.long
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_seen(plant: Any, ranks: GetRanks) -> None:
    assert complaints(ranks(2), [BUGS[plant]], plant) != []


@pytest.mark.long
def test_a_forward_that_is_computed_again_without_the_ring_is_seen(ranks: GetRanks) -> None:
    with pytest.raises(RankFailure, match="checkpoint"):  # which compares what was saved
        complaints(ranks(2), [Case("gpt2", checkpoints=True)], plain_when_computed_again)


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
REFUSED: dict[str, tuple[Any, Kind, Batch]] = {
    "module 'mix' gives an attn_mask (4, 4)": (
        partial(Odd, Attends(masks=True)), ENCODER, TOKENS),
    "module 'mix' drops out 0.1 of its attention weights": (
        partial(Odd, Attends(dropout_p=0.1)), ENCODER, TOKENS),
    "this rank has 4 of 8 tokens": (partial(Odd, Attends(crosses=True)), ENCODER, TOKENS),
    "module 'mix' computes its attention without F.scaled": (
        partial(Odd, ByHand(8, 8)), ENCODER, TOKENS),
    "module 'mix' is an nn.MultiheadAttention": (
        partial(Odd, Torchs(8, 2, batch_first=True)), ENCODER, TOKENS),
    "was called outside of the modules": (Outside, ENCODER, TOKENS),
    "module 'mix' (LSTM) looks at several tokens": (
        partial(Odd, nn.LSTM(8, 8, batch_first=True)), ENCODER, TOKENS),
    "module 'mix' (Conv1d) looks at several tokens": (
        partial(Odd, nn.Conv1d(8, 8, 3, padding=1)), ENCODER, TOKENS),
    "names 'blocks.*.x' as its attention, and the model has no such module": (
        Encoder, ENCODER._replace(context=no_context()), TOKENS),
    "'model.layers.0.self_attn' computes its attention without": (
        partial(llama_tiny, "eager"), KINDS["llama"], padded_batch(2, 8, 0)),
    "drops out 0.1": (
        partial(llama_tiny, attention_dropout=0.1), KINDS["llama"], padded_batch(2, 8, 0)),
    "hides tokens before others": (llama_tiny, KINDS["llama"], LATE),
    "how to cut the input 'weights'": (
        llama_tiny, KINDS["llama"],
        replace(LATE, inputs={"input_ids": LATE.inputs["input_ids"], "weights": LATE.targets})),
    "is cut by its 'input_ids', and the batch's inputs are Tensor": (
        llama_tiny, KINDS["llama"], TOKENS),
}  # fmt: skip


@pytest.mark.long
def test_what_it_refuses(ranks: GetRanks) -> None:
    for said in ranks(2).run(refused):
        assert {words: got for words, got in said.items() if words not in got} == {}
        assert all(got.startswith("context_parallel: ") for got in said.values())


def test_a_workload_that_says_nothing_is_refused(ranks: GetRanks) -> None:
    said = ranks(2).run(without_context)
    assert "does not say how its sequences are cut" in said[0]


def without_context(world: World) -> str:
    setup = Setup(Encoder(), conformance.make_optimizer("sgd"), encoder_loss, world.mesh)
    with pytest.raises(UsageError) as caught:
        ContextParallel(setup, Axes(data=1, context=2), naming.resolve("zero1", STRATEGIES, ""))
    return str(caught.value)


def test_a_window_that_is_shorter_than_the_sequences_is_refused() -> None:
    model = Encoder()
    model.config = type("Config", (), {"sliding_window": 4})  # type: ignore[assignment]
    model.forward = lambda *, position_ids: position_ids  # type: ignore[assignment]
    split = context.of_transformers(model)
    assert split is not None
    with pytest.raises(UsageError, match="a window of 4 tokens, and the sequences have 8"):
        split.take(padded_batch(2, 8, 0), torch.arange(4))
    assert split.take(padded_batch(2, 4, 0), torch.arange(2)).samples == 2
