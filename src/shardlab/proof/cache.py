"""Proofs that passed and estimates of memory, kept in the user's cache: the same source finds the
same again.

One is found again only if nothing that could change it has changed: its config, every file of
shardlab, the versions of PyTorch, NumPy and Python, the machine and its devices. That can be said
of our own strategies on our own workloads and data alone. What runs code or reads files of a user's
is never kept, and neither is a proof that found something wrong or was refused.
No torch is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shardlab
from shardlab.config import STDLIB, SYNTHETIC, Config
from shardlab.data import sources
from shardlab.files import write_json
from shardlab.naming import EVERY_STRATEGY
from shardlab.proof.judge import CHECKS

# These need PyTorch and NumPy alone. causal_lm also needs transformers, and what that has fetched.
WORKLOADS = ("gpt2", "resnet_cifar10", "cnn_mnist")
DATA = (STDLIB, SYNTHETIC)
# What the ranks said about where they are. Times, paths and commits do not matter.
PLACE = ("python", "torch", "platform", "cpu", "device", "gpus", "cuda", "backend",
         "threads_per_rank")  # fmt: skip
MOST = 500  # files: a proof is 2 KB


class ProofCache:
    """The folder ``proofs`` of the user's cache, for one comparison.

    The source is read when this is made, which must be before any rank is started, and again
    before a proof is written: what ranks ran while somebody edited it is not kept.
    """

    def __init__(self, env: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.place = {name: env.get(name) for name in PLACE}
        self.place["numpy"] = importlib.metadata.version("numpy")
        self.has_one_node = len(env.get("nodes") or [0]) == 1

    def find(self, config: Config, data: str) -> dict[str, Any] | None:
        """The proof of this config, with ``kept``: when it was made. None: it must be made."""
        found = self._read(self._about(config, data, "proof"))
        if found is None:
            return None
        proof, when = found
        try:
            is_whole = (
                proof["pass"] is True
                and proof["checks"].keys() == CHECKS.keys()
                and all(c["pass"] in (True, None) for c in proof["checks"].values())
                and all(isinstance(c["message"], str) for c in proof["checks"].values())
                and isinstance(proof["message"], str)
            )
        except (KeyError, TypeError, AttributeError):
            return None
        return {**proof, "kept": when} if is_whole else None

    def find_estimate(self, config: Config, data: str) -> dict[str, int] | None:
        """What a rank of this config holds, by cause. None: it must be estimated."""
        found = self._read(self._about(config, data, "estimate"))
        if found is None or not isinstance(found[0], dict) or "total" not in found[0]:
            return None
        return found[0] if all(type(size) is int for size in found[0].values()) else None

    def keep(self, config: Config, data: str, proof: Mapping[str, Any]) -> None:
        """Write a proof that passed, and remove those of other sources. One that failed removes the
        same that passed before: something has changed that we cannot see. A full disk is no error.
        """
        about = self._about(config, data, "proof")
        if proof["pass"] is True:
            self._write(about, {name: proof[name] for name in ("pass", "message", "checks")})
        elif about is not None and source_digest() == self.source:
            with contextlib.suppress(OSError):
                self._path(about).unlink(missing_ok=True)

    def keep_estimate(self, config: Config, data: str, sizes: Mapping[str, int]) -> None:
        self._write(self._about(config, data, "estimate"), sizes)

    def _read(self, about: Mapping[str, Any] | None) -> tuple[Any, str] | None:
        """What was found, and when; None if it is not there, half of it is, or something else."""
        if about is None:
            return None
        path = self._path(about)
        try:
            if path.stat().st_uid != os.getuid():  # somebody else's word
                return None
            content = json.loads(path.read_bytes())
            datetime.fromisoformat(content["time"])
            found = content["found"], content["time"]
            return found if content["about"] == about else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _write(self, about: Mapping[str, Any] | None, found: Mapping[str, Any]) -> None:
        if about is None or source_digest() != self.source:
            return
        path = self._path(about)
        own = path.with_name(f"{path.name}.{os.getpid()}")  # two comparisons may find the same
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_json(own, {"about": about, "time": now, "found": found})
            own.replace(path)
            self._prune(path.parent)

    def _about(self, config: Config, data: str, what: str) -> dict[str, Any] | None:
        """Everything that it depends on, as plain values; None: nobody can say."""
        is_ours = (
            config.model.workload in WORKLOADS
            and config.strategy.name in EVERY_STRATEGY
            and data in DATA
            and self.has_one_node
            and not any(_names_a_place(text) for text in _texts(config.to_dict()))
        )
        if not is_ours:
            return None
        values = {"what": what, "config": config.to_dict(), "data": data} | self.place
        values["source"] = self.source
        about: dict[str, Any] = json.loads(json.dumps(values))  # as it will be read
        return about

    def _path(self, about: Mapping[str, Any]) -> Path:
        name = _digest(json.dumps(about, sort_keys=True).encode())
        return sources.kept_proofs() / f"{self.source}-{name}.json"

    def _prune(self, folder: Path) -> None:
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        mine = [path for path in files if path.name.startswith(f"{self.source}-")]
        for path in {*files} - {*mine[:MOST]}:
            path.unlink(missing_ok=True)


def source_digest() -> str:
    """A digest of every file of this package: names and bytes."""
    root = Path(shardlab.__file__).parent
    files = sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    content = hashlib.blake2b(digest_size=16)
    for path in files:
        name = str(path.relative_to(root)).encode()
        text = path.read_bytes()
        content.update(b"%d %d " % (len(name), len(text)) + name + text)
    return content.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """Every text in a config's values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _names_a_place(text: str) -> bool:
    """Whether it may name code or files: ``module:name``, ``file.py:name`` or a path."""
    return any(sign in text for sign in (":", "/", os.sep))
