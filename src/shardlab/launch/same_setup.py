"""What each rank of a launcher says of itself before it joins, and what does not fit. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import shardlab
from shardlab.config import LaunchConfig
from shardlab.launch.launcher_env import LOOPBACK, Place, is_loopback

# Settings that belong to a node, or that rank 0 decides for all.
MAY_DIFFER = frozenset((
    "launch.world", "launch.address", "launch.port", "launch.interface", "launch.threads_per_rank",
    "data.source", "data.prefetch", "output.dir", "output.root",
    "begun",  # when the process of a rank was started, from which a time limit counts
))  # fmt: skip
INSTALLED = ("torch", "shardlab", "the code of shardlab")


@dataclass(frozen=True)
class Facts:
    """One rank: where it is, and what must be the same on all ranks."""

    host: str
    node: int | None
    local_rank: int
    size: int  # of its world
    refusal: str = ""  # why it cannot begin
    listens: str = ""  # the address at which Gloo listens; empty where Gloo does not
    setup: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, place: Place, refusal: str, setup: Mapping[str, str] | None, listens: str = ""
    ) -> Facts:
        numbers = place.node, place.local_rank, place.size
        return cls(socket.gethostname(), *numbers, refusal, listens, setup or {})


def setup(config: LaunchConfig, args: Sequence[Any]) -> dict[str, str]:
    """Versions, code and settings. ``args`` are those of a rank's function, perhaps a config."""
    import torch

    source = Path(shardlab.__file__).parent
    files = sorted(source.rglob("*.py"))
    found = {
        "torch": str(torch.__version__),
        "shardlab": shardlab.__version__,
        "the code of shardlab": _digest(b"".join(path.read_bytes() for path in files)),
    }
    for given in ({"launch": msgspec.to_builtins(config)}, *args):
        if isinstance(given, msgspec.Struct):
            given = msgspec.to_builtins(given)
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            given = dataclasses.asdict(given)
        if isinstance(given, Mapping):
            found |= {k: v for k, v in _flat(given) if k not in MAY_DIFFER}
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``{"training": {"steps": 3}}`` as ``training.steps``, ``3``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _flat(value, f"{key}.")
        else:
            yield f"{prefix}{key}", _own_code(value) or json.dumps(value, default=str)


def _own_code(value: Any) -> str:
    """The user's own code, which may lie elsewhere on each node: its name and its content."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        return ""
    return f"{path.name}:{name} (content {_digest(path.read_bytes())})"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


# ------------------------------------------------------------------ what does not fit


def problem(said: Mapping[int, Facts]) -> str:
    """What does not fit in what the ranks have said so far; empty if it fits."""
    if not said:
        return ""
    first = min(said)
    name = {rank: f"rank {rank} on {facts.host}" for rank, facts in said.items()}
    refusals = {rank: facts.refusal for rank, facts in sorted(said.items()) if facts.refusal}
    if refusals:
        rank, text = next(iter(refusals.items()))
        is_everywhere = len(refusals) == said[rank].size and len(set(refusals.values())) == 1
        return text if is_everywhere else f"{name[rank]}: {text}"
    for rank, facts in sorted(said.items()):
        if facts.size != said[first].size:
            return (
                f"{name[first]} is in a world of {said[first].size} ranks, and {name[rank]} in one "
                f"of {facts.size}: start every node with the same number of nodes and ranks"
            )
        if found := _difference(name[first], name[rank], said[first].setup, facts.setup):
            return found
    return _one_seat(said) or _on_loopback(said, name)


def _difference(one: str, other: str, ones: Mapping[str, str], others: Mapping[str, str]) -> str:
    for key in (*ones, *others) if ones and others else ():
        mine, theirs = ones.get(key, "not there"), others.get(key, "not there")
        if mine != theirs:
            is_installed = key in INSTALLED
            remedy = (
                "install one version on all nodes" if is_installed else "give all nodes the same"
            )
            return f"{key} is {mine} for {one}, and {theirs} for {other}: {remedy}"
    return ""


def _one_seat(said: Mapping[int, Facts]) -> str:
    """Two ranks with one local rank would share a GPU, and NCCL would hang."""
    ranks_at: dict[str, list[int]] = {}
    for rank, facts in sorted(said.items()):
        where = f"{facts.host} (node {facts.node}), local rank {facts.local_rank}"
        ranks_at.setdefault(where, []).append(rank)
    for where, there in ranks_at.items():
        if len(there) > 1:
            return f"ranks {', '.join(map(str, there))} are all {where}; the launcher is set wrong"
    return ""


def _on_loopback(said: Mapping[int, Facts], name: Mapping[int, str]) -> str:
    """Other nodes would wait for a rank that listens there, until their time is over."""
    are_several = len({facts.host for facts in said.values()}) > 1
    for rank, facts in sorted(said.items()):
        if are_several and is_loopback(facts.listens):
            return (
                f"{name[rank]} would listen at {facts.listens}, where no other node reaches it: "
                "name the interface that the nodes share with --set launch.interface=NAME"
            )
    return ""


def gloos_address() -> str:
    """Where Gloo listens on this host, found as Gloo finds it; empty if that is not known."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return address_of(named.partition(",")[0]) or ""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket() as trying:
            trying.bind((found[0][4][0], 0))
        return str(found[0][4][0])
    except OSError:  # the host's name is no address of its own
        return LOOPBACK


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface of this host (Linux); None if it has none."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_interface_address = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            name = interface.encode().ljust(32, b"\0")
            answer = fcntl.ioctl(asking.fileno(), get_interface_address, name)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
