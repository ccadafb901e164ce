"""One file from a URL: resumed where it was cut, checked, and there whole or not at all.

Also the lock that lets one process of a machine do it while the others wait. Nothing here
needs torch or numpy.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from shardlab import output
from shardlab.errors import UsageError

MIRROR = "SHARDLAB_MIRROR"  # https://host/path is read from $SHARDLAB_MIRROR/host/path
HUB = "HF_ENDPOINT"  # stands for https://huggingface.co, as in Hugging Face's own tools
ATTEMPTS = 4  # each continues where the last connection broke
CONNECT_S = 5.0  # for a connection, through a proxy if there is one
TIMEOUT_S = 10.0  # for the answer, and for each part of it
BLOCK = 1 << 20

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known


class Unreachable(Exception):
    """This source cannot be reached now; another may."""


def silent(_name: str, _done: int, _total: int | None) -> None:
    """Shows no progress."""


def resolve(url: str) -> str:
    """The URL to ask instead, if the environment names a mirror."""
    parts = urllib.parse.urlsplit(url)
    if mirror := os.environ.get(MIRROR):
        return f"{mirror.rstrip('/')}/{parts.netloc}{parts.path}"
    if parts.netloc == "huggingface.co" and (hub := os.environ.get(HUB)):
        return f"{hub.rstrip('/')}{parts.path}"
    return url


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(
    url: str, path: Path, *, sha256: str | None = None, on_progress: Progress = silent
) -> str:
    """Download ``url`` to ``path`` and return its sha256. A wrong one is refused and removed.

    What has come before a connection breaks stays beside it as ``.part`` for the next attempt.
    """
    part = path.with_name(path.name + ".part")
    address = resolve(url)
    problem, is_whole = "it broke off", False
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(0.1 * 4**attempt)
        before = _size(part)
        output.debug(f"asks {address}, from byte {before} on")
        try:
            is_whole = _receive(address, part, path.name, on_progress)
        except (http.client.HTTPException, OSError) as error:
            problem = _reason(error)
            is_final = isinstance(error, urllib.error.HTTPError) and error.code < 500
            # Whoever says nothing at all will not do so a second time.
            is_silent = before == _size(part) == 0 and (attempt or _is_timeout(error))
            if is_final or is_silent:
                break
        if is_whole:
            break
    if not is_whole:
        kept = f"; {_size(part):,} bytes are kept, run it again to continue" if _size(part) else ""
        if not kept:
            _forget(part)
        raise Unreachable(f"{address}: {problem}{kept}")
    found = sha256_of(part)
    if sha256 is not None and found != sha256:
        _forget(part)
        raise UsageError(
            f"{address} is not what was expected: sha256 {found}, not {sha256}; it was thrown away"
        )
    part.replace(path)
    _forget(part)
    return found


def refuse_unreachable(url: str) -> None:
    """Raise ``Unreachable`` in seconds if nobody answers there, or at the proxy on the way."""
    try:
        _open(urllib.request.Request(resolve(url), method="HEAD")).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (http.client.HTTPException, OSError) as error:
        raise Unreachable(f"{resolve(url)}: {_reason(error)}") from None


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        _soon(self, super().connect)


class _Https(http.client.HTTPSConnection):
    def connect(self) -> None:
        _soon(self, super().connect)


def _soon(line: http.client.HTTPConnection, connect: Callable[[], None]) -> None:
    """Give up soon if nobody answers: urllib has one limit for connecting and for reading."""
    line.timeout = CONNECT_S
    connect()
    line.sock.settimeout(TIMEOUT_S)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


def _open(request: urllib.request.Request) -> Any:
    opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)
    return opener.open(request, timeout=TIMEOUT_S)


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or isinstance(
        getattr(error, "reason", None), TimeoutError
    )


def _receive(address: str, part: Path, name: str, on_progress: Progress) -> bool:
    """Receive the file, or what is missing of it. False if it ended before it was complete."""
    have = _size(part)
    tag = _tag_file(part)
    headers = {"User-Agent": "shardlab"}
    if have and tag.exists():
        # If the file has changed since, the server sends it all.
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text(encoding="ascii")}
    request = urllib.request.Request(address, headers=headers)
    try:
        response = _open(request)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # what we have is as long as the file, or longer: from the start
            raise
        _forget(part)
        response = _open(urllib.request.Request(address))
    with response:
        # It begins where our part ends only if the server says so.
        content_range = response.headers.get("Content-Range", "")
        is_rest = response.status == 206 and content_range.startswith(f"bytes {have}-")
        start = have if is_rest else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        part.parent.mkdir(parents=True, exist_ok=True)
        mark = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if mark and not mark.startswith("W/"):
            tag.write_text(mark, encoding="ascii")
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            done = start
            on_progress(name, done, total)
            while block := response.read(BLOCK):
                file.write(block)
                done += len(block)
                on_progress(name, done, total)
            file.truncate()
    return total is None or done == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag_file(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_file(part).unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if _is_timeout(error):
        return "no answer in time"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached ({error.reason})"
    return f"the connection broke ({type(error).__name__}: {error})"


# ------------------------------------------------------------------ one process per machine


@contextmanager
def only_one(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, this process is the only one of the machine that fills ``folder``."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(folder.parent / f".{folder.name}.lock", on_wait)
    except OSError as error:
        raise UsageError(f"cannot write to {folder.parent}: {error.strerror}") from None
    with file:
        try:
            yield
        finally:
            Path(file.name).unlink(missing_ok=True)


def _locked(path: Path, on_wait: Callable[[], None]) -> IO[bytes]:
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        # The process that held the lock has removed its file, so no other sees the lock on it.
        try:
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except FileNotFoundError:
            pass
        file.close()
