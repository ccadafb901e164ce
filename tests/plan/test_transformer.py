"""Step time and memory of a transformer from its dimensions."""

from __future__ import annotations

import math
import time

import pytest

from shardlab.errors import UsageError
from shardlab.plan.devices import machine
from shardlab.plan.transformer import Layout, Transformer, interval, judge, layouts, predict

LLAMA_8B = Transformer(32, 4096, 32, 8192, 128256, ffn=14336, kv_heads=8, gated=True, tied=False)

# Published tokens per second and GPU: llm-foundry's MPT models with FSDP, 6 of its 13 runs on 64
# GPUs. None was used in the calibration. The worst of the 13 (70B on A100s with 40 GB, 28% off) is
# not among these six; test_published.py counts all.
FOUNDRY = [
    # layers, hidden, heads, device, micro-batch, global batch, checkpointing, state, measured
    (24, 2048, 16, "h100", 20, 1280, "none", "mixed", 44402),
    (40, 5120, 40, "h100", 2, 128, "none", "mixed", 4800),
    (80, 8192, 64, "h100", 8, 2048, "full", "mixed", 1039),
    (12, 768, 12, "a100-40", 26, 1664, "none", "pure", 125234),
    (32, 4096, 32, "a100-40", 18, 1152, "full", "pure", 3665),
    (80, 8192, 64, "a100-80", 8, 2048, "full", "pure", 410),
]


@pytest.mark.parametrize("run", FOUNDRY, ids=lambda run: f"{run[1]} on {run[3]}")
def test_published_runs_on_64_gpus(
    run: tuple[int, int, int, str, int, int, str, str, float],
) -> None:
    layers, hidden, heads, device, micro, whole, checkpointing, state, measured = run
    model = Transformer(layers, hidden, heads, 2048, 50368)
    layout = Layout(64, 1, 1, micro, whole, 3, checkpointing, state=state)
    nodes = machine(device, "8x200gbit" if device.startswith("a100") else "ndr")
    found = predict(model, layout, nodes)
    assert found.tokens_per_s_per_gpu == pytest.approx(measured, rel=0.06)


def test_the_dimensions_give_the_parameters() -> None:
    assert LLAMA_8B.params == pytest.approx(8_030_261_248, rel=1e-3)


def test_parts_make_the_step() -> None:
    nodes = machine("h100")
    for layout in (Layout(8, zero=3), Layout(2, 2, 2, global_batch=16, zero=1), Layout()):
        found = predict(LLAMA_8B, layout, nodes)
        parts = found.compute_s + found.exposed_s + found.bubble_s
        assert found.step_s == pytest.approx(parts)
        assert found.exposed_s > -1e-9
        assert 0 < found.mfu < 1
        tokens = layout.sequences * LLAMA_8B.seq
        assert found.tokens_per_s_per_gpu == pytest.approx(tokens / found.step_s / layout.gpus)
    assert predict(LLAMA_8B, Layout(), nodes).exposed_s == pytest.approx(0)


def test_slower_links_never_help() -> None:
    steps = [
        predict(LLAMA_8B, Layout(64, zero=3), machine("h100", link)).step_s
        for link in ("xdr", "ndr", "100gbe", "1gbe", "1kbit,10s")
    ]
    assert steps == sorted(steps)
    assert math.isfinite(steps[-1])


def test_memory_follows_the_layout() -> None:
    nodes = machine("h100")
    sizes = [
        predict(LLAMA_8B, layout, nodes).memory
        for layout in (Layout(8), Layout(8, zero=1), Layout(8, zero=3))
    ]
    assert sizes == sorted(sizes, reverse=True)
    held = [predict(LLAMA_8B, Layout(8, zero=3, checkpointing=kind), nodes).memory
            for kind in ("none", "selective", "full")]  # fmt: skip
    assert held == sorted(held, reverse=True)
    assert not judge(LLAMA_8B, Layout(), machine("l4")).fits


@pytest.mark.parametrize("gpus", [1, 7, 64, 1024, 16384])
def test_layouts_of_any_number_of_gpus(gpus: int) -> None:
    begun = time.process_time()
    found = layouts(LLAMA_8B, gpus, machine("h100"), global_batch=max(gpus, 1024) // gpus * gpus)
    assert time.process_time() - begun < 5
    assert all(choice.layout.gpus == gpus for choice in found)
    fitting = [choice for choice in found if choice.fits]
    assert found[: len(fitting)] == fitting
    assert fitting == sorted(fitting, key=lambda choice: -choice.rank)
    assert bool(fitting) == (gpus > 7)  # 8 billion parameters, nothing checkpointed


def test_an_interval_is_wider_where_less_is_known() -> None:
    low, high = interval(Layout(8, zero=3), machine("h100"))
    assert low < 1 < high
    for layout, name in ((Layout(4, 2), "h100"), (Layout(8, zero=3), "mi300x")):
        wider = interval(layout, machine(name))
        assert wider[0] < low
        assert wider[1] > high


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Transformer(2, 100, 3, 8, 8), "hidden 100 cannot be divided into 3 heads"),
        (lambda: Transformer(2, 96, 3, 8, 8, kv_heads=2), "3 heads cannot share 2 kv heads"),
        (lambda: Transformer(0, 96, 3, 8, 8), "layers of 1 or more"),
        (lambda: Layout(3, micro_batch=2, global_batch=8), "cannot be divided by 3 replicas"),
        (lambda: Layout(dp=0), "dp of 1 or more"),
        (lambda: Layout(zero=4), "no ZeRO stage 4"),
        (lambda: Layout(dtype="bf61"), "did you mean 'bf16'"),
        (lambda: Layout(checkpointing="ful"), "did you mean 'full'"),
        (lambda: predict(LLAMA_8B, Layout(tp=3), machine("h100")), "32 heads cannot be divided"),
        (lambda: predict(LLAMA_8B, Layout(pp=64), machine("h100")), "cannot fill pp=64"),
        (lambda: predict(LLAMA_8B, Layout(dtype="fp8"), machine("a100")), "has no fp8"),
        (lambda: predict(LLAMA_8B, Layout(), machine("v100")), "v100-16 has no bf16"),
        (lambda: layouts(LLAMA_8B, 61, machine("h100"), 60), "cannot share a global batch of 60"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(wrong: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong()  # type: ignore[operator]
