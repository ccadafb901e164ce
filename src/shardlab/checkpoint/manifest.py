"""``checkpoint.json``: what a checkpoint holds and where. Read and checked without torch.

The file is ``{"sha256": …, "checkpoint": {…}}``: the sum covers the rest, which has the sum of
every other file. So a flipped bit anywhere is found, and named by its file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardlab.errors import UsageError

SCHEMA = 1
NAME = "checkpoint.json"
# What the names of tensors begin with. Own are a rank's alone: own/<rank>/rng/torch.
MODEL, OPTIMIZER, OWN = "model/", "optimizer/", "own/"
_FILE = re.compile(r"rank\d+\.safetensors")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
           "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
           "complex64", "complex128")  # fmt: skip


class Damaged(UsageError):
    """A checkpoint that cannot be trusted; the message names the file."""


@dataclass(frozen=True)
class Chunk:
    """A run of a tensor's elements, in the order of the flattened whole, and where it is."""

    start: int
    length: int
    file: str


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str  # as torch calls it: float32
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class File:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int  # finished: the run goes on with this number
    strategy: str
    world: int
    config: dict[str, Any]
    samples: int | None  # of the data set; none: not known (imported)
    update: dict[str, Any]  # steps taken, loss scale
    numbers: dict[str, float]  # of the optimizer: optimizer/<parameter>/<key>
    tensors: dict[str, Tensor]
    files: dict[str, File]
    created: str = ""
    # Other names of a tied tensor, each with the name that it is under here; and buffers that are
    # no part of the model's state_dict (persistent=False). An export needs both.
    tied: dict[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()

    def model(self) -> dict[str, Tensor]:
        return {
            name.removeprefix(MODEL): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(MODEL)
        }

    def own(self, rank: int) -> dict[str, Tensor]:
        """What was a rank's alone: its random states, its notes of the data, its strategy's."""
        prefix = f"{OWN}{rank}/"
        return {n: t for n, t in self.tensors.items() if n.startswith(prefix)}

    def optimizer_keys(self) -> dict[str, dict[str, float | None]]:
        """The optimizer's state of each parameter by key: a number, or None for a tensor."""
        found: dict[str, dict[str, float | None]] = {}
        for name in self.tensors:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
                found.setdefault(parameter, {})[key] = None
        for name, value in self.numbers.items():
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            found.setdefault(parameter, {})[key] = value
        return found

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> str:
        body = {
            "schema": SCHEMA,
            "step": self.step,
            "created": self.created,
            "strategy": self.strategy,
            "world": self.world,
            "config": self.config,
            "samples": self.samples,
            "update": self.update,
            "numbers": self.numbers,
            "tensors": {
                name: {
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "chunks": [[c.start, c.length, c.file] for c in t.chunks],
                }
                for name, t in self.tensors.items()
            },
            "tied": self.tied,
            "unsaved": list(self.unsaved),
            "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in self.files.items()},
        }
        return json.dumps({"sha256": _sum_of(body), "checkpoint": body}, indent=1) + "\n"


def _sum_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Its own sum is checked, the files' are not yet."""
    path = folder / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Damaged(f"{path} is damaged: it is not text") from None
    try:
        content = json.loads(text)
        body = content["checkpoint"]
        if body["schema"] != SCHEMA:
            raise UsageError(f"{path} has the schema {body['schema']!r}; this is for {SCHEMA}")
        if _sum_of(body) != content["sha256"]:
            raise Damaged(f"{path} is damaged: its checksum does not match")
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "it is not whole JSON"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error)


def _parse(body: Mapping[str, Any]) -> Manifest:
    files = {
        _typed(name, str): File(_count(f["size"]), _typed(f["sha256"], str))
        for name, f in body["files"].items()
    }
    for name in files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"'{name}' is no name of a file in a checkpoint")
    samples = body["samples"]
    tensors = {name: _tensor(name, t, files) for name, t in body["tensors"].items()}
    tied = _typed(body.get("tied", {}), dict)  # older checkpoints do not say
    unsaved = _typed(body.get("unsaved", []), list)
    for name in (*tied.values(), *unsaved):
        if MODEL + _typed(name, str) not in tensors:
            raise ValueError(f"there is no '{name}' in it")
    return Manifest(
        step=_count(body["step"]),
        strategy=_typed(body["strategy"], str),
        world=_count(body["world"]),
        config=_typed(body["config"], dict),
        samples=None if samples is None else _count(samples),
        update=_typed(body["update"], dict),
        numbers={name: float(value) for name, value in body["numbers"].items()},
        tensors=tensors,
        files=files,
        created=_typed(body["created"], str),
        tied=tied,
        unsaved=tuple(unsaved),
    )


def _tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, File]) -> Tensor:
    chunks = []
    for start, length, file in entry["chunks"]:
        if file not in files:
            raise ValueError(f"'{name}' is in '{file}', which is not of this checkpoint")
        chunks.append(Chunk(_count(start), _count(length), file))
    tensor = Tensor(tuple(_count(n) for n in entry["shape"]), entry["dtype"], tuple(chunks))
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"'{name}' is of the dtype {tensor.dtype!r}, which is unknown")
    position = 0
    for chunk in sorted(chunks, key=lambda c: c.start):
        if chunk.start != position:
            raise ValueError(f"of '{name}' the elements from {position} on are not there, or twice")
        position += chunk.length
    if position != tensor.size:
        raise ValueError(f"of '{name}' there are {position} elements, not {tensor.size}")
    return tensor


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def verify(folder: Path, files: Mapping[str, File]) -> None:
    """Read these files through and compare their sums; the first that differs is named."""
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                raise Damaged(
                    f"{path} is damaged: it has {size:,} bytes, {expected.size:,} were written"
                )
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Damaged(f"cannot read {path}: {error.strerror}") from None
        if actual != expected.sha256:
            raise Damaged(f"{path} is damaged: its checksum does not match")
