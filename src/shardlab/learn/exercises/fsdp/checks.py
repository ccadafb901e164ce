"""FSDP by PyTorch's API: one process's update, from units, options and calls that are right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # slow to import, so once, before the forks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardlab.learn import mistakes, mistakes_sharded, toys
from shardlab.learn.exercise import Case, Finding, Rejected, Row, Rows, Stage, judging, say
from shardlab.world import data_mesh

# micros: micro-batches of each step, one after the other.
SGD = {"kind": "sgd", "strategy": "FULL_SHARD", "micros": [1]}
CASES = (
    Case("SGD", 2, SGD),
    Case("steps of 3 and 2 micro-batches", 2, SGD | {"micros": [3, 2]}),
    Case("clipped", 2, SGD | {"micros": [2], "max_norm": 0.1}),
    Case("SHARD_GRAD_OP", 2, SGD | {"strategy": "SHARD_GRAD_OP", "micros": [2]}),
    Case("bf16", 2, SGD | {"bf16": True}),
    Case("AdamW, three ranks, with a checkpoint", 3, SGD | {"kind": "adamw", "micros": [2, 1, 1]}),
)
GATHERS = ("all_gather_into_tensor", "all_gather")
REDUCES = ("reduce_scatter_tensor", "reduce_scatter")
PADDED = 1.5  # times a unit's size: rows are padded to a multiple of the number of ranks
ROUNDED = 0.1  # how far bfloat16 may lead from float32, of the update


# ------------------------------------------------------------------ on a rank


def run(at: Stage) -> dict[str, Any]:
    kind, bf16 = at.options["kind"], at.options.get("bf16", False)
    model = toys.build(toys.TOYS["odd"])
    max_norm = at.options.get("max_norm")
    one, factory = toys.OneProcess(model, kind, max_norm), toys.Factory(kind)
    model = model.float() if bf16 else model  # the one process stays in float64
    blocks: Any = list(model.layers)  # type: ignore[arg-type]
    units = _unit_bytes(model, 2 if bf16 else 8)
    group = dist.group.WORLD
    assert group is not None
    try:
        fsdp = at.submission.FSDP(
            model, factory, data_mesh(group, torch.device("cpu")), strategy=at.options["strategy"],
            bf16=bf16, max_norm=max_norm,
        )  # fmt: skip
    except Exception:
        if not isinstance(model, FSDPModule) or all(isinstance(b, FSDPModule) for b in blocks):
            raise
        raise Rejected(say("root-first")) from None  # torch's own words differ by version
    whole_after: list[int] = []  # blocks that were whole after each forward
    seen = 0

    def loss(module: nn.Module, batch: toys.Batch) -> Tensor:
        """The loss function that the learner calls; it looks at the blocks after forward."""
        nonlocal seen
        seen += 1
        at.spy.mark(f"micro {seen}")
        x, y = (t.float() if bf16 else t for t in batch)
        out = module(x)
        whole_after.append(sum(not isinstance(b.weight, DTensor) for b in blocks))
        return F.mse_loss(out.to(y.dtype), y)

    def work(batches: list[toys.Batch]) -> dict[str, Any]:
        nonlocal seen
        seen = 0
        fsdp.step(batches, loss)
        at.spy.mark(toys.LOOKING)
        return {"got": {n: _whole(p) for n, p in model.named_parameters() if p.requires_grad}}

    built = {
        "unsharded": [n for n, p in model.named_parameters() if not isinstance(p, DTensor)],
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "stale": _is_stale(model, factory),
    }
    rows = toys.rows_of(at, one, at.options["micros"], work)
    return {
        **built, "steps": rows, "made": len(factory.made), "units": units,
        "whole_after": whole_after, "blocks": len(blocks),
        # Last, so that nothing of ours meets a gather that only one rank has begun.
        "state": _state(at.rank, fsdp.full_state(), one) if kind == "adamw" else {},
    }  # fmt: skip


def _unit_bytes(model: nn.Module, item: int) -> dict[str, int]:
    """The largest block, what lies outside of the blocks, and everything."""
    layers: Any = model.layers
    blocks = [sum(p.numel() for p in block.parameters()) for block in layers]
    every = sum(p.numel() for p in model.parameters())
    return {
        "block": item * max(blocks), "rest": item * (every - sum(blocks)), "all": item * every
    }  # fmt: skip


def _is_stale(model: nn.Module, factory: toys.Factory) -> bool:
    """The optimizer holds tensors that are no parameters of the model (any more)."""
    held = [p for made in factory.made[-1:] for g in made.param_groups for p in g["params"]]
    now = {id(p) for p in model.parameters()}
    return any(id(p) not in now for p in held)


def _whole(tensor: Tensor) -> Tensor:
    """A collective, if it is sharded."""
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def _state(rank: int, got: Any, one: toys.OneProcess) -> dict[str, str]:
    """What full_state() gave on rank 0, each tensor compared with one process's."""
    if rank != 0:
        return {}
    if not isinstance(got, dict) or not all(
        isinstance(got.get(part), dict) for part in ("model", "optimizer")
    ):
        raise Rejected(say("wrong-type/fsdp", type=type(got).__name__))
    found = {
        f"model/{name}": _compared(got["model"].get(name), want)
        for name, want in one.model.state_dict().items()
    }
    for name, p in one.model.named_parameters():
        given = got["optimizer"].get(name)
        for key in ("exp_avg", "exp_avg_sq"):
            if p.requires_grad:
                value = given.get(key) if isinstance(given, dict) else None
                found[f"optimizer/{name}/{key}"] = _compared(value, one.optimizer.state[p][key])
    return found


def _compared(got: Any, want: Tensor) -> str:
    """ "right", or what is wrong with one tensor of the state."""
    if not isinstance(got, Tensor):
        return "missing"
    if isinstance(got, DTensor) or got.shape != want.shape:
        return "shard"
    return "right" if torch.allclose(got.to(want), want) else "wrong"


# ------------------------------------------------------------------ what is wrong


def sharded(ranks: Rows) -> Finding | None:
    row = ranks[0]
    if len(row["unsharded"]) == 0:
        return None
    names = mistakes.listed(row["unsharded"])
    if any(n.startswith("layers.") for n in row["unsharded"]):
        return say("not-sharded/fsdp", names=names)
    return say("root-forgotten", names=names)


def precise(ranks: Rows) -> Finding | None:
    """The parameters that are updated keep their dtype."""
    right = "torch.float32" if ranks[0].get("bf16") else "torch.float64"
    if ranks[0]["dtypes"] == [right]:
        return None
    return say("weights-not-fp32/fsdp", dtypes=", ".join(ranks[0]["dtypes"]), right=right)


def optimizer(ranks: Rows) -> Finding | None:
    if not all(rank["made"] for rank in ranks):
        return say("own-optimizer")
    return say("optimizer-too-early") if any(rank["stale"] for rank in ranks) else None


def gathers(ranks: Rows) -> Finding | None:
    """No message gathers more than a unit; and none less than 16 bits, or more, where asked."""
    units = ranks[0]["units"]
    calls = [c for c in mistakes.all_calls(ranks)[0] if c["op"] in GATHERS]
    largest = max((c["bytes"] for c in calls), default=0)
    dtypes = {c["dtype"] for c in calls}
    if ranks[0].get("bf16") and "bfloat16" not in dtypes:
        return say("computes-in-fp32", dtypes=", ".join(sorted(dtypes)))
    if largest > PADDED * max(units["block"], units["rest"]):
        return say(
            "gathered-at-once/fsdp", largest=largest, block=units["block"], all=units["all"],
            messages=len([c for c in calls if c["mark"] == "micro 1" and not c["in_backward"]]),
        )  # fmt: skip
    return None


def reduces(ranks: Rows) -> Finding | None:
    """Gradients are sent in the last micro-batch of a step, in the right dtype."""
    for step, row in enumerate(ranks[0]["steps"]):
        calls = [c for c in row["calls"] if c["op"] in REDUCES]
        early = sum(c["mark"] != f"micro {row['micros']}" for c in calls)
        if not calls:
            return say("never-synced", step=step)
        if early:
            return say(
                "communicates-each-micro-batch/fsdp", early=early, calls=len(calls),
                micros=row["micros"],
            )  # fmt: skip
        if ranks[0].get("bf16") and any(c["dtype"] != "float32" for c in calls):
            return say("reduced-in-16-bits", dtype=calls[0]["dtype"])
    return None


def resharded(ranks: Rows) -> Finding | None:
    """Which blocks are whole after forward; the last may stay, since backward begins with it."""
    row = ranks[0]
    most, least = max(row["whole_after"]), min(row["whole_after"])
    if row["strategy"] == "FULL_SHARD" and most > 1:
        return say("not-freed/fsdp", whole=most, blocks=row["blocks"])
    if row["strategy"] == "SHARD_GRAD_OP" and least < row["blocks"]:
        return say("gathered-twice", sharded=row["blocks"] - least, blocks=row["blocks"])
    return None


def update(ranks: Rows) -> Finding | None:
    """The parameters after each step against one process."""
    if ranks[0].get("bf16"):
        return _roughly(ranks)
    for step, rows in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True)):
        micros = rows[0]["micros"]
        if micros > 1 and ranks[0]["kind"] == "sgd" and ranks[0].get("max_norm") is None:
            factor = _factor(rows[0])
            if factor is not None and math.isclose(factor, micros, rel_tol=1e-5):
                return say("micro-batches-summed", micros=micros)
            if factor is not None and step > 0 and not math.isclose(factor, 1, rel_tol=1e-5):
                return say("nominal-count", number=step + 1, micros=micros, ratio=factor)
    return mistakes_sharded.update(ranks)


def _factor(row: Row) -> float | None:
    """The one number by which a step of SGD multiplied the mean gradient, if there is one."""
    names = list(row["want"])
    used, mean = (
        [mistakes.flat(row["before"][n]) - mistakes.flat(row[key][n]) for n in names]
        for key in ("got", "want")
    )
    return mistakes.ratio(used, mean)


def _roughly(ranks: Rows) -> Finding | None:
    """bfloat16 has 8 bits: near the update that one process makes."""
    for step, rows in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True)):
        row = rows[0]
        got, want, before = (
            mistakes.flat([row[key][n] for n in row["want"]]) for key in ("got", "want", "before")
        )
        off = float(((got - want) ** 2).sum() ** 0.5 / ((want - before) ** 2).sum() ** 0.5)
        if not off < ROUNDED:
            return say("wrong-update/bf16", step=step, off=off)
    return None


def checkpoint(ranks: Rows) -> Finding | None:
    """What full_state() gave on rank 0."""
    state: dict[str, str] = ranks[0]["state"]

    def those(what: str, part: str = "") -> Iterator[str]:
        return (
            key.partition("/")[2] for key in state if state[key] == what and key.startswith(part)
        )

    moments = [key for key in state if key.startswith("optimizer/")]
    if shards := list(those("shard")):
        return say("shards-saved", names=mistakes.listed(shards))
    if missing := list(those("missing", "model/")):
        return say("missing-parameter/fsdp", names=mistakes.listed(missing))
    if moments and len(list(those("missing", "optimizer/"))) == len(moments):
        return say("forgot-optimizer/fsdp")
    if missing := list(those("missing")):
        return say("missing-parameter/moments", names=mistakes.listed(missing))
    if wrong := list(those("wrong")):
        return say("wrong-values/state", names=mistakes.listed(wrong))
    return None


judge = judging(
    precise, sharded, optimizer, reduces, gathers, update, resharded, checkpoint, only_first=True
)
