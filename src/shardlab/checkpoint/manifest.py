"""``checkpoint.json``: what a checkpoint holds and where. It is read and checked without torch.

The file is ``{"sha256": …, "checkpoint": {…}}``: the sum covers the rest, which has the sum of
every other file. So a flipped bit anywhere is found, and named by its file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar

from msgspec import Meta, convert

from shardlab.errors import UsageError
from shardlab.files import text_of

SCHEMA = 1
NAME = "checkpoint.json"
# The prefixes of tensor names. Own tensors belong to one rank: own/<rank>/rng/torch.
MODEL, OPTIMIZER, SHARED, OWN = "model/", "optimizer/", "shared/", "own/"
RANDOM, EXTRA = "rng/", "strategy/"  # among own tensors
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-1e308, le=1e308)]
FileName = Annotated[str, Meta(pattern=r"^rank\d+\.safetensors\Z")]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex64", "complex128",
]  # fmt: skip
T = TypeVar("T")


class Damaged(UsageError):
    """A checkpoint that cannot be trusted; the message names the file."""


class Chunk(NamedTuple):
    """Consecutive elements of a flattened tensor, and the file that has them."""

    start: Count
    length: Count
    file: str


@dataclass(frozen=True)
class Tensor:
    shape: tuple[Count, ...]
    dtype: Dtype  # as torch calls it
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    size: Count
    sha256: str


class Update(TypedDict, total=False):
    """The update's own numbers."""

    steps: Count  # taken; skipped ones do not count
    scale: Annotated[float, Meta(gt=0, le=1e38)]  # of the loss
    good_steps: Count
    # Numbers that the optimizer keeps in each of its groups; a count stays a whole number.
    groups: list[dict[str, bool | int | Finite]]


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` says; to make one checks that its parts fit together."""

    step: Count  # steps that are finished: the run continues with this number
    strategy: str
    world: Count
    config: dict[str, Any]
    samples: Count | None  # of the data set; None: not known (imported)
    update: Update
    numbers: dict[str, Finite]  # of the optimizer: optimizer/<parameter>/<key>
    tensors: dict[str, Tensor]
    files: dict[FileName, File]
    created: str = ""
    # Other names of a tied tensor, each with the name that it has here; and buffers that are no
    # part of the model's state_dict (persistent=False). An export needs both. Older checkpoints
    # have neither.
    tied: dict[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.tied.values(), *self.unsaved):
            if MODEL + name not in self.tensors:
                raise ValueError(f"there is no '{name}' in it")
        for name in self.tied:
            if MODEL + name in self.tensors:
                raise ValueError(f"'{name}' is a tensor of its own, and another name of one")
        for name, tensor in self.tensors.items():
            position = 0
            for chunk in sorted(tensor.chunks):
                if chunk.file not in self.files:
                    raise ValueError(f"'{name}' is in '{chunk.file}', which it does not list")
                if chunk.start != position:
                    raise ValueError(f"'{name}' from {position} on is missing, or is there twice")
                position += chunk.length
            if position != tensor.size:
                raise ValueError(f"'{name}' has {position} elements, not {tensor.size}")

    def model(self) -> dict[str, Tensor]:
        return inside(self.tensors, MODEL)

    def optimizer_keys(self) -> dict[str, dict[str, float | None]]:
        """The optimizer's state of each parameter by key: a number, or None for a tensor."""
        found: dict[str, dict[str, float | None]] = {}
        state = {**dict.fromkeys(self.tensors), **self.numbers}
        for name, value in inside(state, OPTIMIZER).items():
            parameter, _, key = name.rpartition("/")
            found.setdefault(parameter, {})[key] = value
        return found

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> str:
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({"sha256": _sum_of(body), "checkpoint": body}, indent=1) + "\n"


def inside(named: Mapping[str, T], prefix: str) -> dict[str, T]:
    """What has a name that begins with the prefix, by the rest of its name."""
    return {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}


def _sum_of(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Its own sum is checked, those of files are not."""
    path = folder / NAME
    try:
        content = json.loads(text_of(path))
        body = content["checkpoint"]
        if body["schema"] != SCHEMA:
            raise UsageError(f"{path} has the schema {body['schema']!r}; this is for {SCHEMA}")
        if _sum_of(body) != content["sha256"]:
            raise Damaged(f"{path} is damaged: its checksum does not match")
        found: Manifest = convert(body, Manifest)
        return found
    except FileNotFoundError:
        raise UsageError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Damaged(f"{path} is damaged: it is not text") from None
    except json.JSONDecodeError:
        raise Damaged(f"{path} is damaged: it is not whole JSON") from None
    except KeyError as error:
        raise Damaged(f"{path} is damaged: {error} is missing") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def verify(folder: Path, files: Mapping[str, File]) -> None:
    """Read these files through and compare their sums; the first that differs is named."""
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise Damaged(f"{path} is damaged: it is not a regular file")
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
