"""The axes of the mesh: how many ranks hold one model together, and how many share the data.

A rank has a place on each axis. The data axis is outermost, then pipeline, context and tensor:
the model-parallel ranks of one model are neighbours. ``zero3:tensor=2:pipeline=2`` on eight ranks
is two copies of a model that four ranks hold together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlab.errors import UsageError

CUTS = ("pipeline", "context", "tensor")  # the axes that cut the model, outermost first
# Options of every strategy, with their defaults.
OPTIONS: dict[str, Any] = {
    "pipeline": 1, "context": 1, "tensor": 1,
    "sequence": False, "schedule": "1f1b", "chunks": 0, "balance": "parameters",
}  # fmt: skip
# What a value of each type must be.
KINDS = {int: "a number of ranks, 1 or more", bool: "true or false", str: "a name"}
# These options do nothing without an axis.
NEEDS = {
    "sequence": "tensor", "schedule": "pipeline", "chunks": "pipeline", "balance": "pipeline",
}  # fmt: skip
# Strategies that are an axis themselves: all ranks are on it unless its option says otherwise.
NAMED: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"tensor": 0},
    "sequence_parallel": {"tensor": 0, "sequence": True},
    "context_parallel": {"context": 0},
    "pipeline_gpipe": {"pipeline": 0, "schedule": "gpipe"},
    "pipeline_1f1b": {"pipeline": 0, "schedule": "1f1b"},
    "pipeline_interleaved": {"pipeline": 0, "schedule": "interleaved"},
    "pipeline_zero_bubble": {"pipeline": 0, "schedule": "zero_bubble"},
    "pytorch_tensor_parallel": {"tensor": 0},
    "pytorch_pipeline": {"pipeline": 0},
}
# PyTorch's twins have this axis and data: no other, and no ``sequence``.
ALONE = {"pytorch_tensor_parallel": "tensor", "pytorch_pipeline": "pipeline"}


@dataclass(frozen=True)
class Axes:
    """The number of ranks on each axis, and how the axes are used."""

    data: int
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    sequence: bool = False  # tensor parallelism cuts norms and residuals along the sequence
    schedule: str = "1f1b"  # of the pipeline
    chunks: int = 0  # stages on each rank; 0: as many as the schedule needs
    balance: str = "parameters"  # by what the stages are made equal; or "time"

    @property
    def model_ranks(self) -> int:
        """The model-parallel ranks of one model, which share a batch."""
        return self.pipeline * self.context * self.tensor

    @property
    def representatives(self) -> range:
        """One representative rank of each place in a pipeline. The first of those that share a
        stage has the longest part of each tensor, and of a sequence, but for a token."""
        return range(0, self.model_ranks, self.context * self.tensor)

    @property
    def gradient_ranks(self) -> int:
        """The ranks whose gradients are summed: a part of a sequence counts as another sample."""
        return self.data * self.context

    def place(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on each axis."""
        found = {}
        for axis in reversed(CUTS):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {"data": rank, **found}

    def peers(self, rank: int, *along: str) -> list[int]:
        """The ranks whose coordinates are this rank's but for those on the named axes."""
        mine = self.place(rank)
        return [
            other
            for other in range(self.data * self.model_ranks)
            if all(at == mine[axis] for axis, at in self.place(other).items() if axis not in along)
        ]

    def data_share(self, rank: int) -> tuple[int, int]:
        """Which share of each batch a rank gets, and of how many."""
        return rank // self.model_ranks, self.data


def axes_of(
    name: str, options: Mapping[str, Any], ranks: int
) -> tuple[Axes | None, dict[str, Any]]:
    """The axes that a strategy and its options ask for, and the options that are left.

    None: every rank has the whole model, as without axes.
    """
    asked = {key: value for key, value in options.items() if key in OPTIONS}
    rest = {key: value for key, value in options.items() if key not in OPTIONS}
    if name not in NAMED and not asked:
        return None, rest
    for key, value in asked.items():
        wanted = type(OPTIONS[key])
        if type(value) is not wanted or (wanted is int and value < (key != "chunks")):
            raise UsageError(
                f"strategy {name}: its option {key} must be {KINDS[wanted]}, got {value!r}"
            )
    for key, meant in NAMED.get(name, {}).items():
        if key in asked and meant not in (0, asked[key]):
            raise UsageError(
                f"strategy {name}: its name says {key} {meant}, and its option {key} "
                f"{asked[key]}; leave one of them out"
            )
    sizes = {**OPTIONS, **NAMED.get(name, {}), **asked}
    for own in CUTS:
        if sizes[own] == 0:  # all ranks that the other axes leave
            sizes[own] = max(1, ranks // math.prod(sizes[axis] for axis in CUTS if axis != own))
    axes = Axes(1, **sizes)
    for key, axis in NEEDS.items():
        if key in asked and getattr(axes, axis) == 1 and name not in NAMED:
            raise UsageError(f"strategy {name}: its option {key} needs {axis}=2 or more")
    others = [axis for axis in CUTS if getattr(axes, axis) > 1] + ["sequence"] * axes.sequence
    if name in ALONE and (others := [axis for axis in others if axis != ALONE[name]]):
        raise UsageError(
            f"strategy {name} has no axes but {ALONE[name]} and data, and {others[0]} was asked "
            "for; use tensor_parallel or pipeline_1f1b with several axes"
        )
    if ranks % axes.model_ranks:
        cut = " x ".join(f"{a} {getattr(axes, a)}" for a in CUTS if getattr(axes, a) > 1)
        raise UsageError(
            f"strategy {name}: {ranks} ranks cannot be {cut}: one model takes "
            f"{axes.model_ranks} ranks, and the world must be a multiple of that"
        )
    axes = replace(axes, data=ranks // axes.model_ranks)
    if axes.model_ranks == 1 and name not in NAMED:
        return None, rest
    return axes, rest


def inner_of(name: str) -> str:
    """The strategy that shares the data beneath a named axis, if ranks are left for that."""
    # PyTorch combines its tensor parallelism with FSDP.
    return "pytorch_zero3" if name == "pytorch_tensor_parallel" else "bucket_ddp_async"


def shares_data(name: str, options: Mapping[str, Any], ranks: int) -> str:
    """The name of the strategy that shares the data: the same, or that beneath a named axis."""
    if name not in NAMED:
        return name
    axes, _ = axes_of(name, options, ranks)
    return inner_of(name) if axes is not None and axes.gradient_ranks > 1 else "single"


def cut_evenly(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names in their order, cut into runs of about the same size: each goes where its middle lies.
    A run may be empty."""
    total, before = max(1, sum(sizes.values())), 0
    runs: list[list[str]] = [[] for _ in range(parts)]
    for name, size in sizes.items():
        middle = min(before + size / 2, total * (1 - 1e-9))
        runs[int(parts * middle / total)].append(name)
        before += size
    return runs


def cut_range(length: int, parts: int) -> list[range]:
    """The numbers below ``length`` in so many runs. The first are longer by one, if any are."""
    low = [length // parts * i + min(i, length % parts) for i in range(parts + 1)]
    return [range(low[i], low[i + 1]) for i in range(parts)]
