"""What is saved and what is read, as DCP's planners: every tensor flat, in runs of its elements.

DCP's own planner cuts tensors into boxes, of which ZeRO's flat shards are none; so every tensor is
planned as ``(elements,)``, and its real shape is in the manifest.
"""
# ruff: noqa: ARG002 - the methods and their arguments are DCP's

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint import planner_helpers

from shardlab.checkpoint import parts as parting
from shardlab.checkpoint.manifest import Chunk
from shardlab.checkpoint.manifest import Tensor as Entry
from shardlab.checkpoint.parts import Numbers, Part, Parts


def _item(name: str, part: Part, start: int, end: int) -> plans.WriteItem:
    chunk = dcp.ChunkStorageMetadata(torch.Size([start]), torch.Size([end - start]))
    return plans.WriteItem(
        index=dcp.MetadataIndex(name, [start]),
        type=plans.WriteItemType.SHARD,
        tensor_data=plans.TensorWriteData(
            chunk=chunk,
            properties=dcp.TensorProperties(dtype=part.values.dtype),
            size=torch.Size([part.shape.numel()]),
        ),
    )


class Saving(plans.SavePlanner):
    """Each rank offers all that it holds; the first rank decides who writes which of it."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.parts: Parts = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.parts = state_dict

    def create_local_plan(self) -> plans.SavePlan:
        items = [
            _item(name, part, part.start, part.start + len(part.values))
            for name, part in self.parts.items()
        ]
        shapes = {name: tuple(part.shape) for name, part in self.parts.items()}
        return plans.SavePlan(items, planner_data=(shapes, self.numbers))

    def create_global_plan(
        self, all_plans: list[plans.SavePlan]
    ) -> tuple[list[plans.SavePlan], dcp.Metadata]:
        offers = [{item.index.fqn: item for item in plan.items} for plan in all_plans]
        shares = parting.share_out([{n: span_of(i) for n, i in offer.items()} for offer in offers])
        shapes: dict[str, tuple[int, ...]] = {}
        numbers: Numbers = {}
        entries: dict[str, Entry] = {}
        planned = []
        for rank, (plan, offer, share) in enumerate(zip(all_plans, offers, shares, strict=True)):
            shapes |= plan.planner_data[0]
            numbers |= plan.planner_data[1]
            for name, item in offer.items():
                assert item.tensor_data is not None
                dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
                entries.setdefault(name, Entry(shapes[name], dtype, ()))
            for name, start, end in share:
                chunks = (*entries[name].chunks, Chunk(start, end - start, file_of(rank)))
                entries[name] = replace(entries[name], chunks=chunks)
            items = [_cut(offer[name], start, end) for name, start, end in share]
            planned.append(plans.SavePlan(items, planner_data=file_of(rank)))
        _refuse_gaps(entries)
        return planned, dcp.Metadata({}, planner_data=(entries, numbers))

    def finish_plan(self, new_plan: plans.SavePlan) -> plans.SavePlan:
        return new_plan

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor:
        part = self.parts[write_item.index.fqn]
        start, end = span_of(write_item)
        return part.values[start - part.start : end - part.start]


def file_of(rank: int) -> str:
    return f"rank{rank}.safetensors"


def span_of(item: plans.WriteItem) -> tuple[int, int]:
    assert item.tensor_data is not None
    start = item.tensor_data.chunk.offsets[0]
    return start, start + item.tensor_data.chunk.sizes[0]


def _cut(item: plans.WriteItem, start: int, end: int) -> plans.WriteItem:
    assert item.tensor_data is not None
    chunk = dcp.ChunkStorageMetadata(torch.Size([start]), torch.Size([end - start]))
    return replace(
        item,
        index=dcp.MetadataIndex(item.index.fqn, [start]),
        tensor_data=replace(item.tensor_data, chunk=chunk),
    )


def _refuse_gaps(entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        if sum(chunk.length for chunk in entry.chunks) != entry.size:
            raise RuntimeError(f"no rank holds all of '{name}': the strategy's slots() are wrong")


class Loading(plans.LoadPlanner):
    """Each rank asks for the elements that its parts lack."""

    def set_up_planner(
        self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.parts: Parts = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> plans.LoadPlan:
        items: list[plans.ReadItem] = []
        for name, part in self.parts.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, dcp.TensorStorageMetadata)
            wanted = dcp.ChunkStorageMetadata(
                torch.Size([part.start]), torch.Size([len(part.values)])
            )
            if len(part.values):
                items += planner_helpers.create_read_items_for_chunk_list(name, stored, [wanted])
        return plans.LoadPlan(items)

    def create_global_plan(self, global_plan: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: plans.LoadPlan) -> plans.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: plans.ReadItem, value: io.BytesIO) -> NoReturn:
        raise NotImplementedError("a checkpoint of shardlab's holds tensors and JSON only")

    def resolve_tensor(self, read_item: plans.ReadItem) -> Tensor:
        values = self.parts[read_item.dest_index.fqn].values
        return values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: plans.ReadItem, tensor: Tensor) -> None:
        pass
