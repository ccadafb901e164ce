"""A data set put in place: from the hub, or out of a file at hand.

Both end as the same files in a folder, which is complete when its ``dataset.json`` is there.
"""

from __future__ import annotations

import fnmatch
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shardlab.data import download, sources
from shardlab.data.catalog import Entry
from shardlab.data.download import Progress, Unreachable, silent
from shardlab.errors import UsageError
from shardlab.files import write_json

FROM_HUB = "hub"  # or from the authors' site

Facts = dict[str, dict[str, Any]]  # by a file's name: its bytes, sha256, and url if it has one


def obtain(
    wanted: Entry,
    folder: Path | None = None,
    source: str = FROM_HUB,
    *,
    on_progress: Progress = silent,
    on_message: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Put a data set into ``folder`` (default: where "auto" looks) and return what is there.

    ``source`` is FROM_HUB or a path. What is there already is left alone.
    """
    target = folder or sources.cached(wanted.name)
    with download.only_one(target, lambda: on_message("waiting for another process …")):
        there = sources.described(target) or {}
        known: Facts = there.get("files", {})
        if _complete(wanted, target, known):
            return {**there, "folder": str(target), "new": False}
        files: Facts = {}
        try:
            if source == FROM_HUB:
                files = _from_hub(wanted, target, known, on_progress)
            else:
                path = sources.located(source)
                if not path.exists():
                    what = f"--from is {FROM_HUB} or a path, and there is no such path"
                    raise UsageError(f"{what}: {path}")
                files = _collect(path, target, wanted.wanted)
            # The data is read once, so that what is not the data set is refused now, and removed.
            counts = _counts(wanted, target)
        except UsageError:
            for name in files.keys() - known.keys():
                (target / name).unlink(missing_ok=True)
            raise
        finally:
            # A refusal leaves nothing but what a broken download can be resumed from.
            if target.exists() and not any(target.iterdir()):
                target.rmdir()
        for left in target.glob("*.part*"):  # of a download that broke off before
            left.unlink()
        about = {"name": wanted.name, "about": wanted.about, "source": source, "files": files}
        record = {**about, "kind": wanted.kind, **counts}
        write_json(target / sources.DESCRIPTION, record)
        return {**record, "folder": str(target), "new": True}


def _complete(wanted: Entry, folder: Path, files: Facts) -> bool:
    if wanted.name == "fineweb" and not all(f.name in files for f in wanted.files):
        return False  # more shards are asked for than last time
    return bool(files) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == facts.get("bytes")
        for name, facts in files.items()
    )


# ------------------------------------------------------------------ the two sources


def _from_hub(wanted: Entry, folder: Path, known: Facts, on_progress: Progress) -> Facts:
    if any(f.name.endswith(".parquet") for f in wanted.files) and not find_spec("pyarrow"):
        raise UsageError(
            f"{wanted.name} comes as parquet, which needs pyarrow: pip install 'shardlab[text]'"
        )
    files: Facts = {}
    for file in wanted.files:
        path = folder / file.name
        before = known.get(file.name, {})
        sha256 = before.get("sha256")
        # A file gets its name when it is whole. A run that broke off has left no record of it.
        if not path.is_file() or path.stat().st_size != before.get("bytes", path.stat().st_size):
            expected = file.sha256 or sha256
            try:
                sha256 = download.fetch(file.url, path, sha256=expected, on_progress=on_progress)
            except Unreachable as reason:
                raise _not_to_be_had(wanted, reason) from None
        if _is_archive(path):
            files |= _collect(path, folder, wanted.wanted)
            path.unlink()
        else:
            files[file.name] = {**_facts(path, sha256), "url": file.url}
    return files


def _not_to_be_had(wanted: Entry, reason: Unreachable) -> UsageError:
    options = [wanted.instead] if wanted.instead else []
    options.append(f"get it elsewhere, then: shardlab data {wanted.name} --from PATH")
    return UsageError(
        f"{wanted.name} cannot be had now ({reason}); instead: {'; or '.join(options)}"
    )


def _facts(path: Path, sha256: str | None = None) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256 or download.sha256_of(path)}


# ------------------------------------------------------------------ out of archives and folders


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in an archive or folder, by their last name. Nothing is unpacked by path."""
    if path.is_file() and _is_archive(path):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield PurePosixPath(member.name).name, content
    else:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.name, file.open("rb")


def _collect(path: Path, folder: Path, patterns: tuple[str, ...]) -> Facts:
    """Copy what the patterns name into the folder: all of it, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        taken = Path(place)
        try:
            for name, stream in _members(path):
                with stream:
                    if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                        with (taken / name).open("wb") as out:
                            shutil.copyfileobj(stream, out, download.BLOCK)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise UsageError(f"{path} cannot be read, or not copied to {folder}: {error}") from None
        if not any(taken.iterdir()):
            raise UsageError(f"{path} holds none of {', '.join(patterns)}")
        moved = [file.replace(folder / file.name) for file in sorted(taken.iterdir())]
    return {file.name: _facts(file) for file in moved}


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
_NEEDED = {"tokens": (), "vocabulary": ("vocab",)}


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
    needed = ["name", "kind", *_NEEDED.get(kind, ("samples", "classes"))]
    if "tokenizer" in found:
        needed.append("vocab")
    if missing := [key for key in needed if key not in found]:
        raise UsageError(f"{folder / sources.DESCRIPTION} is damaged: '{missing[0]}' is missing")
    return {**found, "folder": str(folder)}
