"""Weights in Hugging Face's format, without its libraries: safetensors files, GPT-2's names.

A safetensors file is 8 bytes of length, a JSON table (name → dtype, shape, place), then the
tensors. Reading one executes nothing, unlike a pickle.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, convert
from torch import Tensor

from shardlab.errors import UsageError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
COMPLEX128 = "shardlab.complex128"  # in the metadata: which tensors are, as pairs of float64
LONGEST_TABLE = 100_000_000  # bytes; the format's own limit
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}

# The modules of a GPT-2's block: theirs, ours, and whether theirs is a Conv1D, whose weight is
# (in, out).
_GPT2_BLOCK = (
    ("ln_1", "ln_1", False),
    ("attn.c_attn", "attention.qkv", True),
    ("attn.c_proj", "attention.proj", True),
    ("ln_2", "ln_2", False),
    ("mlp.c_fc", "up", True),
    ("mlp.c_proj", "down", True),
)
_HEAD = "head.weight"  # tied: it is wte.weight, and saved once


# ------------------------------------------------------------------ GPT-2's names


def _names(layers: int) -> dict[str, tuple[str, bool]]:
    """For transformers' name of a tensor: our name, and whether it has to be transposed."""
    outside = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
    names = {name: (name, False) for name in outside}
    for i in range(layers):
        for theirs, ours, is_conv in _GPT2_BLOCK:
            names[f"h.{i}.{theirs}.weight"] = f"blocks.{i}.{ours}.weight", is_conv
            names[f"h.{i}.{theirs}.bias"] = f"blocks.{i}.{ours}.bias", False
    return names


def from_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of transformers' GPT2LMHeadModel (or GPT2Model) as our GPT-2's."""
    names = _names(len(state))  # there are fewer layers than tensors
    result: dict[str, Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix("transformer.")
        # The head is tied, and what old files carry as a bias of attn is the causal mask.
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if name not in names:
            raise UsageError(f"'{full_name}' is not a tensor of a GPT-2")
        ours, is_transposed = names[name]
        result[ours] = tensor.t().contiguous() if is_transposed else tensor
    if "wte.weight" in result:
        result[_HEAD] = result["wte.weight"]
    return result


def to_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our GPT-2's state under transformers' names, as GPT2LMHeadModel loads it."""
    result = {
        f"transformer.{theirs}": state[ours].t().contiguous() if is_transposed else state[ours]
        for theirs, (ours, is_transposed) in _names(len(state)).items()
        if ours in state
    }
    return {**result, "lm_head.weight": state["wte.weight"]}


# ------------------------------------------------------------------ files


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UsageError(f"cannot read {path}: {reason}") from None
    if not isinstance(config, dict):
        raise UsageError(f"cannot read {path}: it is not a table of settings")
    return config


def load_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model's folder: ``model.safetensors``, or its parts."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        also = " (a pickle can run code: it is not read; convert it to safetensors)"
        raise UsageError(f"{folder} holds no *.safetensors file{also if pickles else ''}")
    return {name: tensor for file in files for name, tensor in load_safetensors(file).items()}


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped: they are copied when used.

    A file that does not follow the format is refused in a line, as the format's own library does:
    every byte of the data belongs to exactly one tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, LONGEST_TABLE):
                raise ValueError(f"it is cut off: {size:,} bytes, with a table of {length:,}")
            table = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_once)
        start = 8 + length
        entries, of_complex = _checked(table, size - start)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a safetensors file, or is damaged: {error}") from None
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        dtype = _DTYPES[entry.dtype]
        # A copy where the place is odd: elements of 4 bytes must begin at a multiple of 4.
        size = dtype.itemsize * (2 if name in of_complex else 1)
        part = data[begin:end] if (start + begin) % size == 0 else data[begin:end].clone()
        tensor = part.view(dtype).view(entry.shape)
        tensors[name] = torch.view_as_complex(tensor) if name in of_complex else tensor
    return tensors


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class _Entry:
    """What a file's table says about a tensor."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]  # begin and end in the data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise ValueError(f"'{twice[0]}' is in its table twice")
    return dict(pairs)


def _checked(table: Any, size: int) -> tuple[dict[str, _Entry], list[str]]:
    """The entries of a table over ``size`` bytes of data, and which of them are complex128."""
    table = convert(table, dict[str, Any])
    metadata = convert(table.pop("__metadata__", {}), dict[str, str])
    entries = {name: _entry(name, value) for name, value in table.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position:
            how = "overlaps another" if begin < position else "leaves a gap before it"
            raise ValueError(f"'{name}' {how}")
        position = end
    if position != size:
        raise ValueError(f"its tensors have {position:,} bytes, and it has {size:,} of data")
    of_complex = convert(json.loads(metadata.get(COMPLEX128, "[]")), list[str])
    for name in of_complex:
        if name not in entries or entries[name].dtype != "F64" or entries[name].shape[-1:] != [2]:
            raise ValueError(f"'{name}', which {COMPLEX128} names, does not hold pairs of float64")
    return entries, of_complex


def _entry(name: str, value: Any) -> _Entry:
    try:
        entry: _Entry = convert(value, _Entry)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from None
    if entry.dtype not in _DTYPES:
        raise ValueError(f"'{name}' is of the dtype {entry.dtype!r}, which is unknown")
    begin, end = entry.data_offsets
    if end - begin != _bytes(_DTYPES[entry.dtype], entry.shape):
        raise ValueError(f"'{name}' of shape {entry.shape} has not the bytes that its place has")
    return entry


def save_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb") as file:
        file.write(table_of(((n, t.dtype, t.shape) for n, t in tensors.items()), format="pt"))
        for tensor in tensors.values():
            file.write(raw(tensor))


def table_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], **metadata: str) -> bytes:
    """What a file begins with: the length of its table, and the table.

    The format has no complex128: such a tensor is written as pairs of float64, and its name is
    noted in the metadata. Our reader makes it complex again.
    """
    table: dict[str, Any] = {}
    position, of_complex = 0, []
    for name, dtype, shape in tensors:
        end = position + _bytes(dtype, shape)
        if dtype == torch.complex128:
            of_complex.append(name)
            dtype, shape = torch.float64, (*shape, 2)
        if dtype not in _WORDS:
            raise UsageError(f"'{name}' is of the dtype {dtype}, which safetensors does not have")
        table[name] = {
            "dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    if of_complex:
        metadata[COMPLEX128] = json.dumps(of_complex)
    if metadata:
        table = {"__metadata__": metadata, **table}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its elements."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape, start=dtype.itemsize)
