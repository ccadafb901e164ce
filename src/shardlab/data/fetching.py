"""Puts a data set where runs find it: from the Hugging Face Hub, or from files that a user has.

Both end as the same files in a folder, which is complete when its ``dataset.json`` is there.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlab.data import hub, sources
from shardlab.data.catalog import Entry
from shardlab.errors import UsageError
from shardlab.files import replacing, write_json

FROM_HUB = "hub"
NEEDED = {"images": ("pyarrow", "PIL"), "reviews": ("pyarrow",)}  # to read the hub's files

Facts = dict[str, dict[str, Any]]  # by a file's name: its bytes and sha256


def fetch(
    wanted: Entry,
    folder: Path | None = None,
    source: str = FROM_HUB,
    *,
    is_quiet: bool = True,
    on_message: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Put a data set into ``folder`` (default: where "auto" looks) and return what is there.

    ``source`` is FROM_HUB or a path. What is there already is left alone.
    """
    target = folder or sources.cached(wanted.name)
    with _alone(wanted.name, on_message):
        there = sources.described(target) or {}
        known: Facts = there.get("files", {})
        if _is_complete(wanted, target, known):
            return {**there, "folder": str(target), "new": False}
        if source == FROM_HUB:
            given = _from_hub(wanted, is_quiet, on_message)
        else:
            given = _from_path(wanted, sources.located(source))
        record = _fill(wanted, target, given, known, source)
    return {**record, "folder": str(target), "new": True}


@contextmanager
def _alone(name: str, on_message: Callable[[str], None]) -> Iterator[None]:
    """Inside, no other process of this machine fetches this data set."""
    with (sources.cache_folder() / f"fetch-{name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_message("waiting for another process …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(
    wanted: Entry, target: Path, given: list[Path], known: Facts, source: str
) -> dict[str, Any]:
    """Place the files and describe them; of what is not the data set, nothing stays."""
    placed: list[Path] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in given:
            placed += _place(wanted, file, target, may_link=source == FROM_HUB)
        counts = _counts(wanted, target)  # the data is read once
        files = {path.name: _facts(path) for path in placed}
        about = {"name": wanted.name, "about": wanted.about, "source": source, "files": files}
        record = {**about, "kind": wanted.kind, **counts}
        write_json(target / sources.DESCRIPTION, record)
    except (UsageError, OSError) as error:
        for path in placed:
            if path.name not in known:
                path.unlink(missing_ok=True)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        if isinstance(error, OSError):
            raise UsageError(f"cannot write to {target}: {error}") from None
        raise
    return record


def _is_complete(wanted: Entry, folder: Path, files: Facts) -> bool:
    if wanted.kind == "tokens" and not set(wanted.files) <= set(files):
        return False  # more shards are asked for than last time
    return bool(files) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == facts.get("bytes")
        for name, facts in files.items()
    )


# ------------------------------------------------------------------ the two sources


def _from_hub(wanted: Entry, is_quiet: bool, on_message: Callable[[str], None]) -> list[Path]:
    needed = ("huggingface_hub", *NEEDED.get(wanted.kind, ()))
    if missing := [package for package in needed if find_spec(package) is None]:
        raise UsageError(
            f"fetching {wanted.name} needs {missing[0]}: pip install 'shardlab[hub]'; or name "
            "files that you have with --from PATH"
        )
    try:
        return [
            hub.download(
                wanted.repo, file, wanted.repo_type, is_quiet=is_quiet, on_message=on_message
            )
            for file in wanted.files
        ]
    except hub.Unreachable as reason:
        options = [wanted.instead] if wanted.instead else []
        options.append(
            f"get {wanted.repo} elsewhere, then: shardlab data fetch {wanted.name} --from PATH"
        )
        raise UsageError(
            f"{wanted.name} cannot be had now ({reason}); instead: {'; or '.join(options)}"
        ) from None


def _from_path(wanted: Entry, path: Path) -> list[Path]:
    """The data set's files in a folder, at any depth; or the file itself."""
    if not path.exists():
        raise UsageError(f"--from is {FROM_HUB} or a path, and there is no such path: {path}")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = {
        file.name: file
        for file in files
        if file.is_file() and any(fnmatch.fnmatch(file.name, p) for p in wanted.wanted)
    }
    if not found:
        raise UsageError(f"{path} holds none of {', '.join(wanted.wanted)}")
    return list(found.values())


def _place(wanted: Entry, file: Path, folder: Path, may_link: bool) -> list[Path]:
    """The file in the folder, as runs read it; returns the paths of what was written."""
    if wanted.kind == "images" and file.suffix == ".parquet":
        from shardlab.data import image_files, images

        return image_files.unpack_parquet(file, folder, images.KINDS[wanted.name].shape)
    to = folder / file.name
    with replacing(to) as part:
        part.unlink(missing_ok=True)
        try:
            if not may_link:
                raise OSError
            os.link(file.resolve(), part)  # the hub's cache keeps the file as well
        except OSError:
            shutil.copyfile(file, part)
    return [to]


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


# ------------------------------------------------------------------ what is in a folder


def _counts(wanted: Entry, folder: Path) -> dict[str, Any]:
    """What a data set holds, by reading it."""
    if wanted.kind == "tokens":
        return {"tokenizer": "gpt2", "vocab": 50257, **_shards(folder)}
    if wanted.kind == "vocabulary":
        from shardlab.data import bpe

        return {"vocab": bpe.read_vocabulary(folder).size}
    if wanted.kind == "reviews":
        from shardlab.data import reviews

        rated = {split: reviews.load(str(folder), split) for split in reviews.SPLITS}
        sizes = {split: len(found.texts) for split, found in rated.items()}
        return {"classes": rated["train"].classes, "samples": sizes}
    from shardlab.data import images

    kind = images.KINDS[wanted.name]
    sizes = {s: len(images.load(wanted.name, str(folder), s).labels) for s in images.SPLITS}
    return {"shape": kind.shape, "classes": len(kind.classes), "samples": sizes}


def _shards(folder: Path) -> dict[str, Any]:
    from shardlab.data import tokens

    shards = sources.find_shards(str(folder))
    counts = {path.name: len(tokens.open_shard(path)) for path in shards}
    return {"tokens": sum(counts.values()), "shards": counts}


# What the description of a folder must have, by its kind; others need samples and classes.
_DESCRIBED = {"tokens": (), "vocabulary": ("vocab",)}


def show(folder: Path) -> dict[str, Any]:
    """What a folder holds: its own description, or what its shards say."""
    if not folder.is_dir():
        raise UsageError(f"no folder {folder}")
    there = sources.described(folder)
    if there is None and not any(folder.glob("*.bin")):
        raise UsageError(
            f"{folder} holds no data that shardlab made or downloaded: neither "
            f"{sources.DESCRIPTION} nor *.bin shards"
        )
    found: dict[str, Any] = there or {"name": folder.name, "kind": "tokens"}
    kind = found.get("kind", "")
    if kind == "tokens":
        found |= _shards(folder)
    needed = ["name", "kind", *_DESCRIBED.get(kind, ("samples", "classes"))]
    if "tokenizer" in found:
        needed.append("vocab")
    if missing := [key for key in needed if key not in found]:
        raise UsageError(f"{folder / sources.DESCRIPTION} is damaged: '{missing[0]}' is missing")
    return {**found, "folder": str(folder)}
