"""GPT-2: the published sizes, and a model that learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shardlab.config import DataConfig
from shardlab.data.tokens import write_shard
from shardlab.errors import UsageError
from shardlab.workloads import huggingface
from shardlab.workloads.base import count_flops
from shardlab.workloads.gpt2 import (
    GPT2,
    SIZES,
    Shape,
    flops_per_token,
    gpt2,
    load_model,
    next_token_loss,
    save_model,
)


def test_published_sizes() -> None:
    published = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080}
    for size, count in {**published, "xl": 1_557_611_200}.items():
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


def test_attention_equals_the_textbook() -> None:
    """It is causal."""
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
    model.requires_grad_()
    nothing = next_token_loss(model, workload.dataset.batch([]))
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    blocks = [model.get_submodule(name) for name in workload.blocks or ()]
    assert blocks == list(model.blocks)


# ------------------------------------------------------------------ FLOPs and the held-out part


@pytest.mark.parametrize("shape", [SIZES["tiny"], SIZES["small"], Shape(3, 4, 128, 96, 1000)])
def test_flops_are_those_that_pytorch_counts(shape: Shape) -> None:
    seq_len = shape.context // 2
    data = gpt2(DataConfig(source="synthetic", seq_len=seq_len), size="tiny", context=seq_len)
    counted = count_flops(lambda: GPT2(shape), next_token_loss, data.dataset.batch([0, 1]))
    assert flops_per_token(shape, seq_len) * seq_len == pytest.approx(counted, rel=0.01)


def test_the_held_out_tokens_are_not_trained_on(tmp_path: Path) -> None:
    for i in range(2):  # the split falls into the second shard
        write_shard(tmp_path / f"part_{i}.bin", np.arange(i * 5000, (i + 1) * 5000))
    options = {"layers": 1, "heads": 1, "dim": 8, "context": 16, "vocab": 10_000}
    workload = gpt2(DataConfig(source=str(tmp_path)), held_out=0.2, **options)  # type: ignore[arg-type]
    held_out = workload.held_out
    assert held_out is not None
    parts = [d.batch(range(len(d))) for d in (workload.dataset, held_out)]
    seen = [set(torch.cat([b.inputs, b.targets]).flatten().tolist()) for b in parts]
    assert len(held_out) == round(0.2 * (9_999 // 16))
    assert max(seen[0]) < min(seen[1])


def test_shards_called_val_are_the_held_out_ones(tmp_path: Path) -> None:
    write_shard(tmp_path / "fineweb_val_000000.bin", np.full(100, 7))
    write_shard(tmp_path / "fineweb_train_000001.bin", np.full(1000, 3))
    workload = gpt2(DataConfig(source=str(tmp_path)), size="tiny", context=16)
    assert workload.held_out is not None
    assert set(workload.held_out.batch([0, 1]).inputs.flatten().tolist()) == {7}
    ids = range(len(workload.dataset))
    assert set(workload.dataset.batch(ids).inputs.flatten().tolist()) == {3}


# ------------------------------------------------------------------ Hugging Face's format


def test_names_go_there_and_back() -> None:
    model = GPT2(SIZES["tiny"])
    state = model.state_dict()
    back = huggingface.from_huggingface(huggingface.to_huggingface(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    with pytest.raises(UsageError, match=r"'h.0.extra.weight' is not a tensor of a GPT-2"):
        huggingface.from_huggingface({"h.0.extra.weight": torch.zeros(1)})
    # The hub's own file has no prefix, and carries the causal mask.
    old = {"wte.weight": torch.zeros(2, 2), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    assert huggingface.from_huggingface(old).keys() == {"wte.weight", "head.weight"}


def test_training_starts_from_weights(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = GPT2(SIZES["tiny"])
    save_model(tmp_path / "start", model.state_dict(), SIZES["tiny"])
    data = DataConfig(source="synthetic")
    workload = gpt2(data, weights=str(tmp_path / "start"))
    assert workload.name == "gpt2-start"
    assert all(
        torch.equal(a, b)
        for a, b in zip(workload.make_model().parameters(), model.parameters(), strict=True)
    )
    with pytest.raises(UsageError, match=r"the weights in .* are of Shape"):
        gpt2(data, size="mini", weights=str(tmp_path / "start"))
    config = tmp_path / "start" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_layer": 3}))
    with pytest.raises(UsageError, match=r"'blocks.2.ln_1.weight' is missing"):
        gpt2(data, weights=str(tmp_path / "start")).make_model()
    path = tmp_path / "start" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(UsageError, match=r"no \*.safetensors file \(a pickle can run code"):
        load_model(tmp_path / "start")
    with pytest.raises(UsageError, match=r"cannot read .*nowhere.config.json"):
        gpt2(data, weights=str(tmp_path / "nowhere"))
