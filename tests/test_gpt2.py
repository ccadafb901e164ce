"""GPT-2: the published sizes, and a model that learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from shardlab.config import DataConfig
from shardlab.errors import UsageError
from shardlab.workloads.gpt2 import GPT2, SIZES, Shape, gpt2, next_token_loss

PUBLISHED = {
    "small": 124_439_808,
    "medium": 354_823_168,
    "large": 774_030_080,
    "xl": 1_557_611_200,
}


@pytest.mark.parametrize(("size", "count"), PUBLISHED.items())
def test_published_sizes(size: str, count: int) -> None:
    with torch.device("meta"):
        model = GPT2(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.head.weight is model.wte.weight


def test_initialisation() -> None:
    torch.manual_seed(0)
    shape = Shape(layers=8, heads=4, dim=256, context=64, vocab=512)
    model = GPT2(shape).requires_grad_(False)
    block = model.blocks[3]
    assert float(block.up.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.wte.weight.std()) == pytest.approx(0.02, rel=0.05)
    scaled = 0.02 / math.sqrt(2 * shape.layers)
    assert float(block.down.weight.std()) == pytest.approx(scaled, rel=0.05)
    assert float(block.attention.proj.weight.std()) == pytest.approx(scaled, rel=0.05)
    assert not block.up.bias.any()
    assert (block.ln_1.weight == 1).all()


def test_attention_is_causal() -> None:
    """What comes later changes nothing before."""
    torch.manual_seed(0)
    model = GPT2(SIZES["tiny"]).eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])


def test_attention_equals_the_textbook() -> None:
    torch.manual_seed(0)
    layer = GPT2(SIZES["tiny"]).blocks[0].attention.double()
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    q, k, v = layer.qkv(x).split(64, dim=2)
    heads = [t.view(2, 9, 2, 32).transpose(1, 2) for t in (q, k, v)]
    scores = heads[0] @ heads[1].transpose(2, 3) / math.sqrt(32)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    y = (F.softmax(scores, dim=-1) @ heads[2]).transpose(1, 2).reshape(2, 9, 64)
    assert torch.allclose(layer(x), layer.proj(y), atol=1e-12)


def test_the_loss_is_a_sum_and_starts_at_chance() -> None:
    workload = gpt2(DataConfig(), size="tiny")
    torch.manual_seed(0)
    model = workload.make_model()
    both = workload.dataset.batch([5, 6])
    assert both.count == 2 * 64
    model.requires_grad_(False)
    whole = next_token_loss(model, both)
    parts = sum(next_token_loss(model, workload.dataset.batch([i])) for i in (5, 6))
    assert float(whole) == pytest.approx(float(parts), rel=1e-6)
    assert float(whole) / both.count == pytest.approx(math.log(256), rel=0.05)


def test_no_rows_no_loss() -> None:
    workload = gpt2(DataConfig(), size="tiny")
    model = workload.make_model()
    loss = next_token_loss(model, workload.dataset.batch([]))
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_blocks_are_modules() -> None:
    workload = gpt2(DataConfig(), size="tiny", layers=3)
    model = workload.make_model()
    assert len(workload.blocks) == 3
    for name in workload.blocks:
        model.get_submodule(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "smal"}, "did you mean 'small'?"),
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"dim": "big"}, "dim must be a whole number"),
        ({"heads": 3}, "cannot be divided over 3 heads"),
        ({"context": 16, "data": DataConfig(seq_len=32)}, "seq_len 32 is longer"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    data = options.pop("data", DataConfig())
    with pytest.raises(UsageError) as caught:
        gpt2(data, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)
