"""A run whose nodes share no folder: what the other nodes wrote is brought to rank 0's node.

Each node writes its part of the run folder to its own disk, under the same path. Rank 0 listens on
the address where the other nodes reach it. At the end of the run one rank of each part sends its
files there. After a failure too, as far as the nodes still answer: this does not use the process
group, which is broken then. ``collected.json`` says which parts came, and which are missing.

A sender proves that it knows a key, which the ranks were given through their process group. It may
write files of its own ranks and, if its node knows better why the run failed, files that say so.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardlab.errors import LOST_PEER, UsageError
from shardlab.files import replacing, write_json
from shardlab.guard import watchdog
from shardlab.guard.side import side_store
from shardlab.run import reach
from shardlab.runfolder import mark
from shardlab.runlock import table_in

if TYPE_CHECKING:
    from shardlab.world import World

NAME = "collected.json"
PART = "run.part"  # in the folder of a part: which rank was the first there
CHUNK = 1 << 20
MOST_BYTES = 8 << 30  # of a file
MOST_FILES = 10_000  # of a part
SILENT_S = 30.0  # after which a sender or rank 0 is given up
FAILED_S = 5.0  # how long rank 0 waits after a failure for a part that does not come
POLL_S = 0.5
HEARD_S = 2.0  # two ticks of the watchdog
# Files that say why a run ended; the rest of a part belongs to its ranks.
REASONS = re.compile(r"status\.json|crash\.txt|(hang|out-of-step|drifted|not-finite)\.(json|txt)")


@dataclass
class Part:
    """What the ranks of one disk have written."""

    host: str
    ranks: list[int]
    came: bool = False
    failed: bool = False  # it came after a failure
    sizes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {
            "host": self.host, "ranks": self.ranks, "collected": self.came,
            "files": len(self.sizes), "bytes": sum(self.sizes.values()), "left_out": self.left_out,
        }  # fmt: skip


# ------------------------------------------------------------------ what a part holds


def files_of(folder: Path) -> list[tuple[str, int]]:
    """The files of a part: path in the folder, and size. Half-written ones and links stay."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != ".part":
            found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
    return found[:MOST_FILES]


def is_of(name: str, ranks: list[int]) -> bool:
    """Whether a file is one of these ranks', by its path: ``rank1.jsonl``, ``traces/rank1/x``."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or not name.isprintable() or "\\" in name:
        return False
    if any(part in ("..", ".") or len(part) > 255 for part in name.split("/")):
        return False
    numbers = re.findall(r"(?:^|[./])rank(\d+)(?=[./]|$)", name)
    return bool(numbers) and all(int(number) in ranks for number in numbers)


def knows_better(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether another node's status explains the end of the run, where this node's does not."""

    def explains(status: Mapping[str, Any]) -> bool:
        is_over = status.get("state") not in (None, "running", "finished")
        reason = str(status.get("reason", "")).lower()
        return is_over and not any(words in reason for words in LOST_PEER)

    return explains(there) and not explains(here)


# ------------------------------------------------------------------ rank 0


class Receiver:
    """Takes the parts into the run folder, in threads of its own, whatever the rank is doing."""

    def __init__(self, folder: Path, parts: list[Part], address: str, key: str) -> None:
        self.folder = folder.resolve()
        self.parts = parts
        self.key = key
        self._locks = [threading.Lock() for _ in parts]
        receiver = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = SILENT_S

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
                    receiver._take(self.rfile, self.wfile)  # what is cut off is not taken

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server((address, 0), Handler)
        self.at: tuple[str, int] = address, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        self.write()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write(self) -> None:
        parts = [part.record() for part in self.parts]
        with contextlib.suppress(OSError):
            write_json(self.folder / NAME, {"host": socket.gethostname(), "parts": parts})

    def missing(self) -> list[str]:
        return [_named(part) for part in self.parts if not part.came]

    def _take(self, reading: BufferedIOBase, writing: BufferedIOBase) -> None:
        nonce = secrets.token_hex(16)
        _say(writing, nonce)
        if not hmac.compare_digest(_proof(self.key, nonce), _hear(reading)):
            return
        header = _hear(reading)
        number = header["part"]
        part, files = self.parts[number], header["files"][:MOST_FILES]
        with self._locks[number]:
            is_better = knows_better(table_in(self.folder / "status.json"), header["status"])
            wanted = [
                place
                for place, (name, size) in enumerate(files)
                if (is_of(name, part.ranks) and size <= MOST_BYTES and part.sizes.get(name) != size)
                or (is_better and REASONS.fullmatch(name) and size <= CHUNK)
            ]
            _say(writing, wanted)
            for place in wanted:
                self._write_file(reading, *files[place])
                part.sizes[files[place][0]] = files[place][1]
            part.left_out = [
                name for name, size in files if is_of(name, part.ranks) and size > MOST_BYTES
            ]
            part.came, part.failed = True, part.failed or header["failed"]
        self.write()
        _say(writing, "taken")

    def _write_file(self, reading: BufferedIOBase, name: str, size: int) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self.folder):
            raise ValueError(f"{name} leaves the folder")
        with replacing(path) as part, part.open("wb") as out:
            for chunk in _chunks(reading, size):
                out.write(chunk)

    def finish(self, world: World) -> None:
        """After each part was sent."""
        self.close()
        if missing := self.missing():
            world.tell({"warning": f"not collected: {'; '.join(missing)}; {NAME} says what came"})

    def after_failure(self) -> None:
        with contextlib.suppress(Exception):  # the store may be gone
            side_store("collect").set("now", "1")
        limit = time.monotonic() + FAILED_S
        while not all(part.failed for part in self.parts):
            if time.monotonic() > limit and not any(lock.locked() for lock in self._locks):
                break  # nothing comes, and nothing is coming
            time.sleep(0.05)
        self.close()
        self.write()


def _named(part: Part) -> str:
    return f"rank {', '.join(map(str, part.ranks))} on {part.host}"


# ------------------------------------------------------------------ the other ranks


class Sender:
    """Sends the files of this rank's disk. One rank of each disk, the first, does so when asked."""

    def __init__(self, folder: Path, part: int, at: tuple[str, int], key: str, first: bool) -> None:
        self.folder, self.part, self.at, self.key = folder.resolve(), part, at, key
        self.is_first = first
        if first:
            threading.Thread(target=self._listen, name="shardlab-collect", daemon=True).start()

    def _listen(self) -> None:
        """Rank 0 asks after a failure; this rank may stand in a collective meanwhile."""
        with contextlib.suppress(Exception):  # the store is gone, and with it rank 0
            store = side_store("collect")
            while CURRENT is self or CURRENT is None:
                if store.check(["now"]):
                    self.send(failed=True)
                    return
                time.sleep(POLL_S)

    def send(self, failed: bool) -> None:
        """Raises OSError if rank 0 does not take it."""
        files = files_of(self.folder)
        with socket.create_connection(self.at, timeout=FAILED_S) as connection:
            connection.settimeout(SILENT_S)
            reading, writing = connection.makefile("rb"), connection.makefile("wb")
            _say(writing, _proof(self.key, _hear(reading)))
            status = table_in(self.folder / "status.json")
            _say(writing, {"part": self.part, "failed": failed, "files": files, "status": status})
            for place in _hear(reading):
                name, size = files[place]
                with (self.folder / name).open("rb") as file:
                    for chunk in _chunks(file, size):
                        writing.write(chunk)
                writing.flush()
            _hear(reading)

    def send_at_the_end(self) -> None:
        if self.is_first:
            with contextlib.suppress(OSError, ValueError):  # the record says that it is missing
                self.send(failed=False)
                mark(self.folder, "finished", host=socket.gethostname(), part=True)

    def after_failure(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.send(failed=True)


def _proof(key: str, nonce: str) -> str:
    return hmac.new(key.encode(), nonce.encode(), "sha256").hexdigest()


def _say(writing: BufferedIOBase, value: Any) -> None:
    writing.write(json.dumps(value).encode() + b"\n")
    writing.flush()


def _hear(reading: BufferedIOBase) -> Any:
    line = reading.readline(4 * CHUNK)
    if not line.endswith(b"\n"):
        raise OSError("the connection ended")
    return json.loads(line)


def _chunks(reading: BufferedIOBase, size: int) -> Iterator[bytes]:
    while size > 0:
        chunk = reading.read(min(size, CHUNK))
        if not chunk:
            raise OSError("the file or the connection ended early")
        size -= len(chunk)
        yield chunk


# ------------------------------------------------------------------ a run

CURRENT: Receiver | Sender | None = None  # of the run in this process, if its nodes share no folder
_is_on = False  # on every rank of such a run
_ending = threading.Lock()


def begin(world: World, folder: Path, is_seen: bool) -> list[str]:
    """Every rank takes its part. A collective; returns the parts in words.

    ``is_seen``: whether this rank sees the folder that rank 0 has made.
    """
    global CURRENT, _is_on
    if _before_exit not in watchdog.BEFORE_EXIT:
        watchdog.BEFORE_EXIT.append(_before_exit)
    token = world.share(secrets.token_hex(8))
    mine: Any = None if is_seen else _make_part(folder, world.rank, token)
    found = world.gather((mine, socket.gethostname()))
    for rank, (first, host) in enumerate(found):
        if isinstance(first, str):
            if mine == world.rank:
                shutil.rmtree(folder, ignore_errors=True)
            raise UsageError(f"rank {rank} on {host} cannot write its part of the run: {first}")
    firsts = sorted({first for first, _ in found if first is not None})
    parts = [
        Part(found[first][1], [r for r, (f, _) in enumerate(found) if f == first])
        for first in firsts
    ]
    key = secrets.token_hex(16)
    at = None
    if world.rank == 0:
        assert reach.own_address is not None
        CURRENT = Receiver(folder, parts, reach.own_address, key)
        at = CURRENT.at
    at, key = world.share((at, key))
    _is_on = True
    if mine is not None:
        CURRENT = Sender(folder, firsts.index(mine), at, key, first=mine == world.rank)
    return [_named(part) for part in parts]


def _make_part(folder: Path, rank: int, token: str) -> int | str:
    """Which rank was the first to make this folder on its disk, or why it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PART
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"token": token, "rank": rank}, file)
        except FileExistsError:
            reach.wait_until(lambda: table_in(path).get("token") == token, 5.0)
            about = table_in(path)
            if about.get("token") != token:
                return f"{folder} is the folder of another run"
            return int(about["rank"])
        mark(folder, "running", host=socket.gethostname(), part=True)
        return rank
    except OSError as error:
        return str(error)


def finish(world: World) -> None:
    """At the end of a run, when every rank has written its files. A collective, if there are parts
    to bring."""
    global CURRENT, _is_on
    if not _is_on:
        return
    if isinstance(CURRENT, Sender):
        CURRENT.send_at_the_end()
    world.gather(None)  # all parts have come
    if isinstance(CURRENT, Receiver):
        CURRENT.finish(world)
    CURRENT, _is_on = None, False


def after_failure() -> None:
    """What can still be brought, by any thread; the second call finds nothing to do."""
    global CURRENT
    with _ending:
        current, CURRENT = CURRENT, None
        if current is not None:
            current.after_failure()


def _before_exit() -> None:
    """After a hang. Rank 0 may hold the store, in which the other ranks have yet to read of it."""
    is_first = isinstance(CURRENT, Receiver)
    after_failure()
    if is_first:
        time.sleep(HEARD_S)
