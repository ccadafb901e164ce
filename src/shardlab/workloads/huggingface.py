"""Weights in Hugging Face's format, without its libraries: safetensors files, GPT-2's names.

A safetensors file is 8 bytes of length, a JSON table (name → dtype, shape, place), then the
tensors. Reading one executes nothing, unlike a pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab.errors import UsageError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}

# GPT-2's modules: theirs, ours, and whether theirs is a Conv1D, whose weight is (in, out).
_GPT2_BLOCK = (
    ("ln_1", "ln_1", False),
    ("attn.c_attn", "attention.qkv", True),
    ("attn.c_proj", "attention.proj", True),
    ("ln_2", "ln_2", False),
    ("mlp.c_fc", "up", True),
    ("mlp.c_proj", "down", True),
)
_THEIRS = {theirs: (ours, is_conv) for theirs, ours, is_conv in _GPT2_BLOCK}
_OURS = {ours: (theirs, is_conv) for theirs, ours, is_conv in _GPT2_BLOCK}
_HEAD = "head.weight"  # tied: it is wte.weight, and saved once


# ------------------------------------------------------------------ GPT-2's names


def from_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of transformers' GPT2LMHeadModel (or GPT2Model) as our GPT-2's."""
    result: dict[str, Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix("transformer.")
        block = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
        if block is None:
            if name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"):
                result[name] = tensor
            elif not name.endswith(("attn.bias", "attn.masked_bias")) and name != "lm_head.weight":
                raise UsageError(f"'{full_name}' is no tensor of a GPT-2")
            continue  # old files carry the causal mask: not a weight
        number, module, kind = block.groups()
        if module == "attn" and kind == "bias":  # the same, under this form of the name
            continue
        if module not in _THEIRS:
            raise UsageError(f"'{full_name}' is no tensor of a GPT-2")
        ours, is_conv = _THEIRS[module]
        if is_conv and kind == "weight":
            tensor = tensor.t().contiguous()
        result[f"blocks.{number}.{ours}.{kind}"] = tensor
    if "wte.weight" in result:
        result[_HEAD] = result["wte.weight"]
    return result


def to_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our GPT-2's state under transformers' names, as GPT2LMHeadModel loads it."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if block is not None:
            number, module, kind = block.groups()
            theirs, is_conv = _OURS[module]
            if is_conv and kind == "weight":
                tensor = tensor.t().contiguous()
            result[f"transformer.h.{number}.{theirs}.{kind}"] = tensor
        elif name != _HEAD:
            result[f"transformer.{name}"] = tensor
    result["lm_head.weight"] = result["transformer.wte.weight"]
    return result


# ------------------------------------------------------------------ files


def save_gpt2(folder: Path, state: Mapping[str, Tensor], **config: int) -> None:
    """``config.json`` and ``model.safetensors``: what ``GPT2LMHeadModel.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tensors = to_huggingface(state)
    del tensors["lm_head.weight"]  # tied: loaders take it from wte
    save_safetensors(folder / "model.safetensors", tensors)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UsageError(f"cannot read {path}: {reason}") from None
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
    """The tensors of a file, memory-mapped: they are copied when used."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise UsageError(f"{path} is not a safetensors file, or is cut off")
        try:
            table = json.loads(file.read(length))
        except ValueError:
            raise UsageError(f"{path} is not a safetensors file") from None
    table.pop("__metadata__", None)
    start = 8 + length
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
    tensors = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise UsageError(f"{path}: '{name}' is of the dtype {entry['dtype']}, which is unknown")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not 0 <= begin <= end <= len(data) or end - begin != _bytes(dtype, shape):
            raise UsageError(f"{path} is damaged: '{name}' does not fit into it")
        # A copy where the place is odd: tensors of 4 bytes must begin at a multiple of 4.
        part = data[begin:end] if (start + begin) % dtype.itemsize == 0 else data[begin:end].clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def word_of(dtype: torch.dtype) -> str:
    """What a safetensors file calls it: F32."""
    return _WORDS[dtype]


def save_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())


def _bytes(dtype: torch.dtype, shape: list[int]) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size
