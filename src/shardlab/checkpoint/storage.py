"""The safetensors files of a checkpoint: a rank writes its share, and reads what it will hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from shardlab.checkpoint.manifest import Damaged, File, Manifest, inside
from shardlab.checkpoint.parts import Parts, between, bounds, part
from shardlab.strategies.shards import take
from shardlab.workloads import huggingface

BLOCK = 1 << 24  # bytes that are brought to the host, hashed and written at a time
Piece = tuple[str, int, Tensor]  # a tensor's name, the first element's place in it, elements: (n,)


def key_of(name: str, start: int) -> str:
    """A piece's name inside a file: ``model/wte.weight@0``."""
    return f"{name}@{start}"


def write(path: Path, pieces: Sequence[Piece]) -> File:
    """Write a file, hashed as it is written. When this returns, it is on the disk."""
    table = huggingface.table_of((key_of(n, start), v.dtype, v.shape) for n, start, v in pieces)
    blocks = (block for _, _, v in pieces for block in v.split(BLOCK // v.dtype.itemsize))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        data: Iterable[bytes | memoryview] = chain([table], map(huggingface.raw, blocks))
        for block in data:
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), digest.hexdigest())


def fill(folder: Path, manifest: Manifest, parts: Parts) -> None:
    """Fill the parts from the files, which are memory-mapped: only what is needed is read."""
    opened: dict[str, dict[str, Tensor]] = {}
    for name, wanted in parts.items():
        entry = manifest.tensors[name]
        if len(wanted.runs) > 1:  # the whole of it, and from that what is here
            assert wanted.value is not None
            values = whole(folder, manifest, [name])[name].reshape(-1)
            wanted.value.copy_(take(values, wanted.runs))
            continue
        begin, end = bounds(wanted)
        for start, length, file in entry.chunks:
            low, high = max(start, begin), min(start + length, end)
            if low >= high:
                continue
            path, key = folder / file, key_of(name, start)
            if file not in opened:
                opened[file] = huggingface.load_safetensors(path)
            stored = opened[file].get(key)
            expected = getattr(torch, entry.dtype), (length,)
            if stored is None or (stored.dtype, stored.shape) != expected:
                raise Damaged(f"{path} is damaged: it has no {key} as it should be")
            between(wanted, low, high).copy_(stored[low - start : high - start])


def whole_tensors(folder: Path, manifest: Manifest, prefix: str) -> dict[str, Tensor]:
    """Tensors in their shapes, by name without the prefix. In one process, without a group."""
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    return inside(whole(folder, manifest, names), prefix)


def whole(folder: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    entries = {name: manifest.tensors[name] for name in names}
    made = {n: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for n, e in entries.items()}
    fill(folder, manifest, {name: part(name, tensor) for name, tensor in made.items()})
    return made
