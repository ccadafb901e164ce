"""How the ranks that a launcher has started come together, before they join.

They find each other in a store: torchrun's, or one that rank 0 holds. Each says there who it is and
what must be alike on all ranks: versions, code, settings. A rank that waits for another says so
after a few seconds. What is wrong is told in one line, the same on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from shardlab import output
from shardlab.config import LaunchConfig
from shardlab.errors import UsageError
from shardlab.run import alike as alikes
from shardlab.run import child, reach
from shardlab.run import place as places
from shardlab.run.place import Place
from shardlab.run.ranks import STOP_S
from shardlab.run.reach import Address, wait_until

NOTICE_S = 4.0  # then a rank that waits says for whom
GATHER_S = 2.0  # after something wrong was seen, how long other ranks have to come and hear it
TELL_S = 20.0  # how long rank 0 then keeps the store, for a rank that comes later
TRY_S = 3.0  # for one attempt to reach the store
LOOK_S = 0.5  # how often a rank looks who has come, while some have not
LIMIT = "launch.timeout_s"
FINE = "fine"

came_together = False  # all ranks of a launcher have told each other whether they can begin
_stays_s = STOP_S


@dataclass(frozen=True)
class Facts:
    """What a rank tells the others before it joins them."""

    host: str
    node: int | None
    local_rank: int
    size: int
    refusal: str = ""  # why it cannot begin
    alike: str = ""  # a digest of what must be alike; empty where that is not known

    @property
    def where(self) -> str:
        return f"{self.host} (node {self.node}), local rank {self.local_rank}"


# ------------------------------------------------------------------ the store


def has_agent() -> bool:
    """Whether torchrun's agent holds the store. Where it does not, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of(place: Place, config: LaunchConfig) -> Any:
    """The store in which the ranks of a launcher find each other: torchrun's, or rank 0's own."""
    from torch.distributed import PrefixStore

    global came_together
    address, port = config.address or place.address, config.port or place.port
    if place.is_torchruns:
        address, port = place.address, place.port
    else:
        places.refuse_loopback(place.launcher, address, place.nodes, "launch.address")
    if not address:
        raise UsageError(
            f"{place.launcher} has started ranks on {place.nodes} nodes and does not say where the "
            "first is: add --set launch.address=HOST, or set MASTER_ADDR"
        )
    change = (
        "MASTER_ADDR and MASTER_PORT say where"
        if place.is_torchruns
        else "--set launch.address=HOST and --port choose others"
    )
    here = f"rank {place.rank} on {socket.gethostname()}"
    try:
        if place.rank == 0 and not has_agent():
            listens_on = own_address(address, place, config.interface)
            store = child.listening_store(*listens_on, port)
        else:
            store = _reached(place, address, port, config.timeout_s)
    except (OSError, RuntimeError) as error:
        came_together = True  # as far as they can: nobody would hear a refusal
        if place.rank == 0 and not has_agent():
            what = f"{here} cannot listen on {address}, port {port}: {_reason(error)}"
        else:
            what = (
                f"{here} did not reach rank 0 at {address}, port {port}, within "
                f"{config.timeout_s:g} s ({LIMIT}): {_reason(error)}"
            )
        raise UsageError(f"{what}; {change}") from None
    if not has_agent():
        atexit.register(_leave_together, store, place)
        return PrefixStore("shardlab", store)
    # After a restart the old world's addresses are still in torchrun's store: a new name space.
    # (A store that rank 0 opens is new, and a node that came later counts fewer restarts.)
    return PrefixStore(f"shardlab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _reached(place: Place, address: str, port: int, wait_s: float) -> Any:
    """A connection to the store, as soon as there is one. Rank 0 may start later than this rank."""
    from torch.distributed import TCPStore

    began, is_told = time.monotonic(), False
    made: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            made.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=wait_s)))

    while True:
        try:
            # First a plain connection, which fails for the system's own reasons, and in time.
            left = wait_s - (time.monotonic() - began)
            socket.create_connection((address, port), timeout=min(TRY_S, max(left, 0.1))).close()
            # A store answers at once. What is no store may never answer, nor does TCPStore end.
            trying = threading.Thread(target=connect, daemon=True)
            trying.start()
            trying.join(TRY_S)
            if made:
                return made[0]
            why = OSError(0, "what answers there is no store of PyTorch's")
        except OSError as error:
            why = error
        waited = time.monotonic() - began
        if waited > wait_s:
            raise why
        if not is_told and waited > NOTICE_S - TRY_S and (is_told := place.local_rank == 0):
            _notice(
                f"rank {place.rank} on {socket.gethostname()} does not reach rank 0 at {address}, "
                f"port {port}: {_reason(why)}; it tries for {wait_s:g} s ({LIMIT})"
            )
        time.sleep(min(0.2, 0.01 + waited / 10))


def _reason(error: Exception) -> str:
    """The system's words; a timeout has none."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return "no answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _notice(text: str) -> None:
    output.note("info", f"waiting: {text}")


def own_address(address: str, place: Place, interface: str | None) -> tuple[int, str]:
    """What rank 0 listens on: the address by which the others know it.

    On Debian a host's own name may mean its loopback interface, where other nodes do not reach it:
    then rank 0 listens on the interface that is named, or on all.
    """
    family, _, _, _, found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    host = str(found[0])
    if place.nodes == 1 or not places.is_loopback(host):
        return family, host
    if interface is not None and (own := reach.address_of(interface)) is not None:
        return socket.AF_INET, own
    return family, ""


def _leave_together(store: Any, place: Place) -> None:
    """Wait for the other ranks at the end of the process: rank 0 holds the store that they use, and
    srun and mpirun may end a rank that still speaks when the first has left."""
    with contextlib.suppress(Exception):
        store.add("left", 1)
        seconds = _stays_s if place.rank == 0 else STOP_S
        wait_until(lambda: bool(store.add("left", 0) >= place.size), seconds)


# ------------------------------------------------------------------ what they tell each other


def refusal_of_any(
    store: Any,
    place: Place,
    refusal: str,
    wait_s: float,
    alike: Mapping[str, str] | None = None,
    address: Address | None = None,
) -> str:
    """What all ranks are told before they join: nothing, or why one of them cannot.

    ``refusal``: why this one cannot. ``alike``: what must be the same on every rank. ``address``:
    where it would listen for ranks of other nodes.
    """
    global came_together, _stays_s
    came_together = True
    own = Facts(
        socket.gethostname(), place.node, place.local_rank, place.size, refusal,
        _publish(store, alike),
    )  # fmt: skip
    me = f"process {os.getpid()} on {own.host}"
    other = store.compare_set(f"is rank {place.rank}", "", me).decode()
    problem = ""
    if other != me:
        problem = f"{other} and {me} are both rank {place.rank}; the launcher is set wrong"
    else:
        store.set(f"ready {place.rank}", json.dumps(asdict(own)))
    said, problem = _gathered(store, place, problem, wait_s)
    verdict = store.compare_set("verdict", "", problem or FINE).decode()
    store.add("heard", 1)
    if verdict == FINE:
        nodes = {rank: (facts.host, facts.node) for rank, facts in said.items()}
        return reach.refusal(store, place.rank, nodes, address)
    if len(said) < place.size:  # it may come yet
        _stays_s = TELL_S if LIMIT not in verdict else STOP_S
    # torchrun's agent takes the store with it when its ranks are gone: not before all have heard.
    awaited = place.size if has_agent() else len(said)
    wait_until(lambda: bool(store.add("heard", 0) >= awaited), STOP_S)
    return str(verdict)


def _publish(store: Any, alike: Mapping[str, str] | None) -> str:
    """Under its digest, so that ranks read it only where it differs."""
    if alike is None:
        return ""
    text = json.dumps(alike)
    digest = alikes.digest(text.encode())
    store.set(f"alike {digest}", text)
    return digest


def _gathered(store: Any, place: Place, own: str, wait_s: float) -> tuple[dict[int, Facts], str]:
    """What the ranks have said, and what is wrong: when all have come, or soon after it is seen.

    ``own``: what this rank knows to be wrong already.
    """
    keys = [f"ready {rank}" for rank in range(place.size)]
    began = time.monotonic()
    seen_at: float | None = None
    is_told = False
    while True:
        said = _said(store, place.size)
        if store.check(["verdict"]):
            return said, str(store.get("verdict").decode())
        problem = own or wrong(said, lambda digest: json.loads(store.get(f"alike {digest}")))
        now = time.monotonic()
        if problem and seen_at is None:
            seen_at = now
        if len(said) == place.size or (seen_at is not None and now - seen_at > GATHER_S):
            return said, problem
        missing = "rank " + ", ".join(str(r) for r in range(place.size) if r not in said)
        if now - began > wait_s:
            return said, problem or f"{missing} did not come within {wait_s:g} s ({LIMIT})"
        if not is_told and now - began > NOTICE_S and (is_told := place.local_rank == 0):
            _notice(
                f"rank {place.rank} on {socket.gethostname()} waits for {missing} of "
                f"{place.size}, for {wait_s:g} s ({LIMIT})"
            )
        # Mostly all come at once: one question for all, and only then one for each.
        wait_until(lambda: bool(store.check(keys) or store.check(["verdict"])), LOOK_S)


def _said(store: Any, size: int) -> dict[int, Facts]:
    keys = {rank: f"ready {rank}" for rank in range(size)}
    if not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    found = store.multi_get(list(keys.values())) if keys else []
    return {rank: Facts(**json.loads(text)) for rank, text in zip(keys, found, strict=True)}


def wrong(said: Mapping[int, Facts], table: Callable[[str], Mapping[str, str]]) -> str:
    """What does not fit in what the ranks have said so far; empty if it fits."""
    refusals = {r: facts for r, facts in sorted(said.items()) if facts.refusal}
    if refusals:
        first, facts = next(iter(refusals.items()))
        texts = {f.refusal for f in refusals.values()}
        is_alike = len(refusals) == facts.size and len(texts) == 1
        return facts.refusal if is_alike else f"rank {first} on {facts.host}: {facts.refusal}"
    if not said:
        return ""
    first = min(said)
    for rank, facts in sorted(said.items()):
        one, other = (f"rank {r} on {said[r].host}" for r in (first, rank))
        if facts.size != said[first].size:
            return (
                f"{one} is in a world of {said[first].size} ranks, and {other} in one of "
                f"{facts.size}: start every node with the same number of nodes and ranks"
            )
        if facts.alike and said[first].alike and facts.alike != said[first].alike:
            return alikes.difference(one, other, table(said[first].alike), table(facts.alike))
    ranks_at: dict[str, list[int]] = {}
    for rank, facts in sorted(said.items()):
        ranks_at.setdefault(facts.where, []).append(rank)
    for where, there in ranks_at.items():
        if len(there) > 1:  # they would share a GPU, and NCCL would hang
            return f"ranks {', '.join(map(str, there))} are all {where}; the launcher is set wrong"
    return ""
