"""Whether the nodes reach each other where Gloo will listen, and how far apart their clocks are.

Gloo listens on the address of one interface. Where that is the wrong one (loopback, a container's
bridge), the ranks would wait for each other until their time is over. So before they join, the
first rank of each node listens there, and the first rank of another node connects to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab import output
from shardlab.run.place import LOOPBACK

CONNECT_S = 3.0  # for a node to answer another
SLACK_S = 2.0  # then for it to say so
APART_S = 1.0  # clocks that differ by more are told


@dataclass(frozen=True)
class Address:
    host: str
    origin: str  # who has chosen it; empty where nothing depends on it


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface of this host (Linux); None if it has none."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_interface_address = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with asking, contextlib.suppress(OSError):
        answer = fcntl.ioctl(
            asking.fileno(), get_interface_address, interface.encode().ljust(32, b"\0")
        )
        return socket.inet_ntoa(answer[20:24])
    return None


def gloos_address() -> Address | None:
    """Where Gloo listens on this host, found as Gloo finds it; None if that is not known."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = named.partition(",")[0]
        host = address_of(name)
        return None if host is None else Address(host, f"interface {name}")
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket() as trying:
            trying.bind((found[0][4][0], 0))
        return Address(str(found[0][4][0]), f"what its name {name} means")
    except OSError:
        return Address(LOOPBACK, f"its name {name} is not an address of its own")


def towards(address: str) -> Address | None:
    """The address from which this host speaks to another; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        return Address(asking.getsockname()[0], "")
    return None


# ------------------------------------------------------------------ asking each other


def refusal(
    store: Any, rank: int, nodes: Mapping[int, tuple[str, int | None]], address: Address | None
) -> str:
    """Why the nodes cannot talk to each other, on all ranks; empty if they can.

    ``nodes``: host and node of each rank. ``address``: where this rank would listen.
    """
    firsts = sorted({node: r for r, node in sorted(nodes.items(), reverse=True)}.values())
    if len(firsts) == 1:
        return ""
    if rank in firsts:
        _ask_others(store, rank, firsts, address)
    keys = {r: f"asked {r}" for r in firsts}
    wait_until(lambda: bool(store.check(list(keys.values()))), 2 * CONNECT_S + SLACK_S)
    found = {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
    names = {r: f"rank {r} on {host}" for r, (host, _) in nodes.items()}
    verdict = store.compare_set("reached", "", unreached(found, names) or "all").decode()
    if rank == 0 and verdict == "all":
        for text in clocks_apart(found, names):
            output.note("warning", f"warning: {text}")
    return "" if verdict == "all" else str(verdict)


def _ask_others(store: Any, rank: int, firsts: Sequence[int], address: Address | None) -> None:
    """Each node asks the next one, so that each is asked, and rank 0's, whose clock is compared."""
    after = firsts[(firsts.index(rank) + 1) % len(firsts)]
    with _Answering(address) as answering:
        store.set(f"answers {rank}", json.dumps(answering.at))
        found: list[Any] = []
        for other in sorted({after, 0} - {rank}):
            if (at := _told(store, f"answers {other}")) is not None:
                host, port, token, origin = at
                found.append([other, host, port, origin, *ask(host, port, token)])
        store.set(f"asked {rank}", json.dumps(found))
        # Others may be asking still.
        wait_until(lambda: bool(store.check([f"asked {r}" for r in firsts])), CONNECT_S + SLACK_S)


def _told(store: Any, key: str) -> Any:
    is_there = wait_until(lambda: bool(store.check([key])), SLACK_S)
    return json.loads(store.get(key)) if is_there else None


def ask(host: str, port: int, token: str) -> tuple[str, float, float]:
    """Why a node does not answer there (empty: it does), how far its clock is ahead of ours in
    seconds, and how wrong that may be."""
    before = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            began, sent = time.time(), time.monotonic()
            connection.sendall(b"?")
            answer = connection.makefile("rb").readline(200)
            took = time.monotonic() - sent
            found, theirs = json.loads(answer)
            if found != token:
                raise ValueError
        return "", theirs - (began + took / 2), took / 2
    except ValueError:
        return "another process answers there", 0.0, 0.0
    except TimeoutError:
        return f"no answer within {time.monotonic() - before:.0f} s", 0.0, 0.0
    except OSError as error:
        return error.strerror or str(error), 0.0, 0.0


class _Answering:
    """Listens on an address, and answers each question with its token and this host's time."""

    def __init__(self, address: Address | None) -> None:
        self.at: tuple[str, int, str, str] | None = None
        self._listening: socket.socket | None = None
        if address is not None:
            with contextlib.suppress(OSError):
                self._listening = socket.create_server((address.host, 0))
                port = self._listening.getsockname()[1]
                self.at = address.host, port, secrets.token_hex(8), address.origin
                self._listening.settimeout(0.2)

    def __enter__(self) -> _Answering:
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._is_open = True
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_open = False
        self._thread.join()
        if self._listening is not None:
            self._listening.close()

    def _answer(self) -> None:
        while self._is_open and self._listening is not None:
            with contextlib.suppress(OSError):
                connection, _ = self._listening.accept()
                with connection:
                    connection.settimeout(1.0)
                    connection.recv(1)
                    assert self.at is not None
                    connection.sendall(json.dumps([self.at[2], time.time()]).encode() + b"\n")


def unreached(found: Mapping[int, Sequence[Any]], names: Mapping[int, str]) -> str:
    """The first of what the nodes found that keeps Gloo from working, in words."""
    for asker, answers in sorted(found.items()):
        for asked, host, port, origin, why, _, _ in answers:
            if why and origin:
                return (
                    f"{names[asker]} does not reach {names[asked]} at {host}, port {port}, where "
                    f"Gloo would listen ({origin}): {why}; name the interface that the nodes share "
                    "with --set launch.interface=NAME"
                )
    return ""


def clocks_apart(found: Mapping[int, Sequence[Any]], names: Mapping[int, str]) -> list[str]:
    texts = []
    for asker, answers in sorted(found.items()):
        for asked, *_, why, ahead_s, error_s in answers:
            if asked == 0 and not why and abs(ahead_s) - error_s > APART_S:
                how = "behind" if ahead_s > 0 else "ahead of"
                texts.append(
                    f"the clock of {names[asker]} is {abs(ahead_s):.1f} s {how} that of "
                    f"{names[asked]}: times in logs and traces will not fit; NTP keeps clocks alike"
                )
    return texts


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    limit, pause = time.monotonic() + seconds, 0.01
    while not (found := is_so()) and time.monotonic() < limit:
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
    return found
