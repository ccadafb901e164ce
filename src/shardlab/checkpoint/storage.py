"""Where it is put and taken from, as DCP's storage: ``checkpoint.json`` and safetensors files.

DCP's own storage keeps its index in a pickle, and to read a pickle is to run what is in it.
"""
# ruff: noqa: ARG002, ARG003 - the methods and their arguments are DCP's

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardlab.checkpoint.manifest import Damaged, File, Manifest
from shardlab.checkpoint.manifest import Tensor as Entry
from shardlab.checkpoint.parts import Numbers, Parts
from shardlab.checkpoint.planning import Saving, span_of
from shardlab.workloads import huggingface

BLOCK = 1 << 24  # bytes that are brought to the host, hashed and written at a time


class Written(NamedTuple):
    """What a rank reports of each part: its file, whole."""

    file: str
    size: int
    sha256: str


class Writer(StorageWriter):
    """A safetensors file for each rank in ``folder``; ``commit`` gets what the manifest is made of.

    Each file is hashed as it is written, and on the disk before anyone hears of it.
    """

    def __init__(
        self,
        folder: Path,
        commit: Callable[[dict[str, Entry], Numbers, dict[str, File]], None],
    ) -> None:
        self.folder = folder
        self.commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        return plans

    def write_data(
        self, plan: plans.SavePlan, planner: plans.SavePlanner
    ) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        results = []
        if plan.items:
            written = self._write(plan, planner)
            results = [WriteResult(item.index, 0, written) for item in plan.items]
        done.set_result(results)
        return done

    def _write(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Written:
        inside = []
        for item in plan.items:
            start, end = span_of(item)
            assert item.tensor_data is not None
            dtype = item.tensor_data.properties.dtype
            inside.append((key_of(item.index.fqn, start), dtype, [end - start]))
        digest, size, name = hashlib.sha256(), 0, plan.planner_data
        with (self.folder / name).open("wb") as file:

            def put(data: Any) -> None:
                nonlocal size
                digest.update(data)
                file.write(data)
                size += len(data)

            put(huggingface.table_of(inside))
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                for block in tensor.split(BLOCK // tensor.dtype.itemsize):
                    put(huggingface.raw(block))
            file.flush()
            os.fsync(file.fileno())
        return Written(name, size, digest.hexdigest())

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        entries, numbers = metadata.planner_data
        written = {result.storage_data for of_rank in results for result in of_rank}
        files = {w.file: File(w.size, w.sha256) for w in sorted(written)}
        self.commit(entries, numbers, files)


def key_of(name: str, start: int) -> str:
    """A part's name inside a file: ``model/wte.weight@0``."""
    return f"{name}@{start}"


class Reader(StorageReader):
    """The files of a checkpoint, memory-mapped: only what is asked for is read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        stored: dict[str, dcp.STORAGE_TYPES] = {}
        for name, tensor in self.manifest.tensors.items():
            stored[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=getattr(torch, tensor.dtype)),
                torch.Size([tensor.size]),
                [
                    dcp.ChunkStorageMetadata(torch.Size([c.start]), torch.Size([c.length]))
                    for c in tensor.chunks
                ],
            )
        return dcp.Metadata(stored)

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        files = _Files(self.folder, self.manifest)
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            stored = files.chunk(item.storage_index.fqn, offset[0])
            first = item.storage_offsets[0]
            place = planner.resolve_tensor(item)
            place.copy_(stored[first : first + item.lengths[0]])
            planner.commit_tensor(item, place)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Files:
    """The files of a checkpoint, each opened when first asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._opened: dict[str, dict[str, Tensor]] = {}

    def chunk(self, name: str, start: int) -> Tensor:
        """A chunk of a tensor: (length,). What the manifest says of it must be so."""
        entry = self.manifest.tensors[name]
        chunk = next(c for c in entry.chunks if c.start == start)
        path = self.folder / chunk.file
        if chunk.file not in self._opened:
            try:
                self._opened[chunk.file] = huggingface.load_safetensors(path)
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
                raise Damaged(f"{path} is damaged: {error}") from None
        stored = self._opened[chunk.file].get(key_of(name, start))
        if stored is None or (str(stored.dtype), stored.shape) != (
            f"torch.{entry.dtype}", (chunk.length,)
        ):  # fmt: skip
            raise Damaged(f"{path} is damaged: it has no {key_of(name, start)} as it should be")
        return stored


def whole_tensors(folder: Path, manifest: Manifest, prefix: str) -> dict[str, Tensor]:
    """Tensors in their shapes, by name without the prefix. In one process, without a group."""
    files = _Files(folder, manifest)
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): _whole(files, name) for name in names}


def whole_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    return _whole(_Files(folder, manifest), name)


def _whole(files: _Files, name: str) -> Tensor:
    entry = files.manifest.tensors[name]
    flat = torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
    for chunk in entry.chunks:
        flat[chunk.start : chunk.start + chunk.length] = files.chunk(name, chunk.start)
    return flat.view(entry.shape)


def save_alone(parts: Parts, writer: Writer) -> None:
    """All of it by this process, without a group: for what was not trained here."""
    planner = Saving({})
    planner.set_up_planner(parts)
    planned, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    writer.finish(metadata, [writer.write_data(planned[0], planner).wait()])
