"""A transformer from its dimensions, and a layout of GPUs, to its speed and its memory.

Nothing runs. ``plan_published.py`` fits the constants to published runs. ``shardlab plan`` has the
constants of ``devices.FITTED`` and the width of its intervals from there.

The operators of a layer are priced by ``devices.price`` and the collectives by
``nccl.cost``. Data-parallel communication runs beside compute, that of tensor parallelism in its
way, and a pipeline (1F1B) waits while it fills and drains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardlab.plan.devices import Machine, Shares, price, shares
from shardlab.plan.graph import Group, Work
from shardlab.plan.nccl import cost

TIGHT = 1.3
BUCKET = 25 * 2**20  # bytes of gradients that PyTorch's DDP sums at once


@dataclass(frozen=True)
class Transformer:
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int = 0  # 0: four times hidden
    kv_heads: int = 0  # 0: as many as heads
    gated: bool = False  # the MLP has a third matrix, as in Llama
    tied: bool = True  # embedding and head are one matrix

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def of_layer(self) -> int:
        """Parameters of a layer's matrices."""
        qkv = self.hidden * (self.hidden + 2 * self.kv * (self.hidden // self.heads))
        return qkv + self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def of_head(self) -> int:
        return self.vocab * self.hidden

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, as MFU is counted: all scores of the attention, nothing twice."""
        products = self.layers * self.of_layer + self.of_head
        return 6.0 * products + 12.0 * self.layers * self.hidden * self.seq


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch: int = 1  # sequences of one rank at a time
    global_batch: int = 0  # sequences of a step; 0: one micro-batch for each replica
    zero: int = 0  # 3 is FSDP
    checkpointing: str = "none"  # or "selective" or "full"
    dtype: str = "bf16"  # of the matrix products
    # What is kept: "mixed" has master weights in fp32, "pure" has all in the dtype; "accumulated"
    # has master weights and gradients in fp32 beside weights in the dtype, as nanotron does.
    state: str = "mixed"
    compiled: bool = False  # elementwise operators are fused
    overlapped_tp: bool = False  # tensor-parallel communication runs beside the products

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def micros(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def sequences(self) -> int:
        return self.micros * self.dp * self.micro_batch


@dataclass(frozen=True)
class Calibration:
    """The few numbers that published runs decide, beside those of ``devices.FITTED``."""

    # From the 8-GPU runs of llm-foundry.
    traffic: float = 0.894  # of elementwise operators, compared with our count of their tensors
    beside: float = 0.857  # of the shorter one of compute and sharded communication: not hidden
    # From nanotron's runs.
    summed_beside: float = 0.48  # likewise, where gradients are summed during backward
    tp_host_s: float = 4.4e-3  # of the CPU for a layer with tensor parallelism, there and back
    hand_s: float = 12e-3  # to hand a micro-batch to the next stage, and its gradient back
    hand_grows: float = 2.1  # the power with which that grows with the nodes, beyond 16 of them
    # Assumed: no run tells it apart.
    fused: float = 0.5  # what is left of the traffic when elementwise operators are compiled


def forward(model: Transformer, layout: Layout, fit: Calibration) -> Iterator[Work]:
    """The operators of one layer for one micro-batch, on one rank."""
    tokens, tp, wide = layout.micro_batch * model.seq, layout.tp, 2
    h, inner = model.hidden, model.inner
    qkv = h + 2 * model.kv * (h // model.heads)
    for name, rows, columns in (
        ("qkv", h, qkv / tp), ("projection", h / tp, h),
        ("up", h, inner * (2 if model.gated else 1) / tp), ("down", inner / tp, h),
    ):  # fmt: skip
        moved = wide * (tokens * (rows + columns) + rows * columns)
        yield Work(f"mm {name}", 2.0 * tokens * rows * columns, moved)
    yield Work("attention", 4.0 * tokens * model.seq * h / tp, wide * tokens * (qkv + h) / tp)
    # Norms (read, write), residuals (two reads, a write), on a rank's part of the sequence; what is
    # done to queries, keys and values; and the activation function.
    left = fit.traffic * (fit.fused if layout.compiled else 1.0) * wide * tokens / tp
    yield Work("norms", 0.0, left * 10 * h)
    yield Work("heads", 0.0, left * 3 * qkv)
    yield Work("activation", 0.0, left * (5 if model.gated else 2) * inner)


def head(model: Transformer, layout: Layout, fit: Calibration) -> Iterator[Work]:
    """Logits and loss, forward."""
    tokens = layout.micro_batch * model.seq
    columns = model.vocab / layout.tp
    moved = 2.0 * (tokens * (model.hidden + columns) + model.hidden * columns)
    yield Work("mm head", 2.0 * tokens * model.hidden * columns, moved)
    fused = fit.fused if layout.compiled else 1.0
    yield Work("loss", 0.0, fit.traffic * fused * 12.0 * tokens * columns)


def _passes(works: list[Work], layout: Layout, machine: Machine, by: Shares) -> tuple[float, float]:
    """Seconds of forward, and of backward, in which each product is made twice."""
    there = back = 0.0
    for work in works:
        once = price(work, machine.device, _dtype(work, layout), by)
        there += once
        back += once * (2.5 if work.name == "attention" else 2.0)
    return there, back


def _dtype(work: Work, layout: Layout) -> str:
    """With fp8 only the products of linear layers are in fp8."""
    is_linear = work.name.startswith("mm") and work.name != "mm head"
    return layout.dtype if is_linear or layout.dtype != "fp8" else "bf16"


def _beside(compute: float, sent: float, part: float) -> float:
    """Two lanes that share a device: the longer one, and a part of the other."""
    return max(compute, sent) + part * min(compute, sent)


def tokens_per_s_per_gpu(
    model: Transformer,
    layout: Layout,
    machine: Machine,
    fit: Calibration | None = None,
    by: Shares | None = None,
) -> float:
    """The speed of a model that is laid out so, on nodes that need not be here."""
    fit, by = fit or CALIBRATION, by or shares(machine.device)
    nodes = math.ceil(layout.gpus / machine.per_node)
    there, back = _passes(list(forward(model, layout, fit)), layout, machine, by)
    head_there, head_back = _passes(list(head(model, layout, fit)), layout, machine, by)
    again = {"none": 0.0, "selective": 0.3, "full": 1.0}[layout.checkpointing] * there
    back += again

    def takes(op: str, size: float, group: Group) -> float:
        found = cost(op, size, group, machine)
        return found.latency_s + found.wire_s

    # Tensor parallelism: two gathers and two scatters of the activations in each pass of a layer.
    crossing = 2.0 * layout.micro_batch * model.seq * model.hidden
    across = Group(layout.tp)
    once = 2 * (takes("all_gather", crossing, across) + takes("reduce_scatter", crossing, across))
    replicas = Group(layout.dp, layout.tp)
    unit = model.of_layer / layout.tp
    width = 2  # of a weight in bf16
    # A plain sum goes over the wire in the type of the weights; shards are summed as they are kept.
    gradient = 2 if layout.state == "pure" or layout.zero == 0 else 4
    layers = model.layers / layout.pp
    twice = once * (2 if layout.checkpointing == "full" else 1)
    if layout.overlapped_tp:
        fwd, bwd = _beside(there, once, fit.beside), _beside(back, twice, fit.beside)
    else:
        fwd, bwd = there + once, back + twice
    if layout.tp > 1 and not layout.compiled:
        waits = max(1.0, fit.tp_host_s / (fwd + bwd))
        fwd, bwd = fwd * waits, bwd * waits
    if layout.zero == 3:
        gather = takes("all_gather", width * unit, replicas)
        scatter = takes("reduce_scatter", width * unit, replicas)
        fwd = _beside(fwd, gather, fit.beside)
        bwd = _beside(bwd, gather + scatter, fit.beside)
    stage = layers * (fwd + bwd) + (head_there + head_back) / layout.pp
    step = layout.micros * stage
    # Filling and draining the pipeline; each stage hands its activations on.
    bubble = (layout.pp - 1) * stage
    if layout.pp > 1:
        hand = takes("send", crossing / layout.tp, Group(2, layout.tp * layout.dp))
        handed = fit.hand_s * math.pow(max(1.0, nodes / 16), fit.hand_grows)
        step += (2 * hand + handed) * layout.micros
    local = (model.of_layer * layers + model.of_head * (1 if layout.pp == 1 else 0.5)) / layout.tp
    if layout.zero in (0, 1, 2) and layout.dp > 1:
        # Gradients are summed beside the last backward; updated weights are gathered after it.
        size = gradient * local
        if layout.zero:
            calls = math.ceil(layers)  # layer by layer: long rings pay their hops each time
            summed = calls * takes("reduce_scatter", size / calls, replicas)
            step += calls * takes("all_gather", width * local / calls, replicas)
        else:
            calls = math.ceil(size / BUCKET)
            summed = calls * takes("all_reduce", size / calls, replicas)
        last = layers * bwd if layout.pp == 1 else 0.0
        step += _beside(last, summed, fit.summed_beside) - last
    held = local / (layout.dp if layout.zero else 1)
    updated = held * (16 if layout.state == "pure" else 32)
    step += updated / (machine.device.bandwidth * by.memory) + bubble
    return layout.sequences * model.seq / step / layout.gpus


@dataclass(frozen=True)
class Held:
    """What a rank holds, fitted to the peaks that nanotron's runs printed."""

    weights: float = 7.1  # bytes of a parameter that every rank holds: bf16, and a gradient in fp32
    optimizer: float = 13.1  # of one in master weights and Adam's moments
    working: float = 8.5  # layers' activations that backward needs beside those that were kept
    logits: float = 4.5  # bytes of one
    base: float = 0.35e9  # before the model is there
    usable: float = 0.92  # of a device's memory; fuller runs ended
    easy: float = 0.86  # of it; fuller runs were slow


HELD = Held()


def memory(model: Transformer, layout: Layout, held: Held = HELD) -> float:
    """Bytes that the fullest rank holds at its fullest moment."""
    layers = math.ceil(model.layers / layout.pp)
    tokens = layout.micro_batch * model.seq / layout.tp
    ends = model.of_head * (1 if layout.pp > 1 or model.tied else 2)
    local = (model.of_layer * layers + ends) / layout.tp
    parts = layout.dp if layout.zero else 1
    kept = {"mixed": 8.0, "pure": 4.0, "accumulated": held.weights}[layout.state]
    moments = {"mixed": 8.0, "pure": 4.0, "accumulated": held.optimizer}[layout.state]
    state = local * (kept / (parts if layout.zero == 3 else 1) + moments / parts)
    if layout.zero == 3:  # two gathered units, and a gradient that is on its way
        state += 8.0 * max(model.of_layer, model.of_head) / layout.tp
    whole = tokens * (20.0 * model.hidden + 8.0 * model.inner)
    entry = 2.0 * tokens * model.hidden  # all that full checkpointing keeps of a layer
    # Selective checkpointing keeps the matrix products, about two fifths of all.
    one = {"none": whole, "selective": 0.4 * whole, "full": entry}[layout.checkpointing]
    # A layer whose forward is repeated is alone with its activations.
    working = whole * (held.working if layout.checkpointing == "none" else 1.0)
    logits = held.logits * tokens * model.vocab
    first = state + min(layout.pp, layout.micros) * layers * one + working
    last = state + layers * one + working + logits
    return held.base + (last if layout.pp == 1 else max(first, last))


CALIBRATION = Calibration()
# How far published runs lie from their prediction, as logarithms of the step time: all but about a
# tenth of those that the constants were not fitted to. docs/plan_published.md says of which.
MARGINS = {"sharded": (-0.17, 0.17), "parallel": (-0.35, 0.45)}


def rank(
    model: Transformer, layout: Layout, machine: Machine, fit: Calibration, held: Held
) -> float:
    """Tokens per second and GPU by which layouts are chosen. Runs with little memory left took 1.2
    to 2.7 times as long as others, so they count as if they took TIGHT times as long."""
    rate = tokens_per_s_per_gpu(model, layout, machine, fit)
    is_tight = memory(model, layout, held) > held.easy * machine.device.memory
    return rate / TIGHT if is_tight else rate
