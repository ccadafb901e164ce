"""Where workers meet that may be late or lost: an exchange through the store, without collectives.

A collective waits for all ranks, and over Gloo a dead one breaks those of the whole group. So each
worker puts its tensors on a table, which is the store that the ranks met in. A thread in rank 0's
process decides when a round is closed, averages what lies there, and puts the average and who took
part beside it. All workers take the same bytes, so they hold the same bits.

A round is closed when all who are expected have come, or when at least ``least`` have come and
``patience_s`` have passed since. Expected are those who took part in the round before and those who
have said that they begin this one; so whoever is lost is waited for once. What comes after a round
was closed is dropped. A worker that is late takes the averages of the rounds that it missed one
after another, makes no steps meanwhile, and begins again with the others: see ``Workers``.

The store's host receives and sends all of it: each worker sends Ψ and receives Ψ in a round. If the
process of rank 0 is lost, so is the store, and the run ends.
"""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import comm
from shardlab.pulse import PULSE

CHUNK = 4 << 20  # the store takes values of 8 MiB at most
KEPT = 4  # rounds whose averages stay, for who is late; each takes Ψ of the store's memory
POLL_S = 0.005
BUFFER = "buffer/"  # before a buffer's name: it is not averaged
_tables = itertools.count()  # ranks make them in the same order


@dataclass(frozen=True)
class Closed:
    """A round that is over: who took part, and the average of what they brought."""

    who: list[int]
    tensors: dict[str, Tensor]
    was_closed: bool  # before this worker came to it


@dataclass
class Table:
    """One worker's seat. Every rank of the group makes one, together."""

    rank: int
    size: int
    least: int
    patience_s: float
    timeout_s: float = 300.0
    # A proof's plan of who is absent, by round. With one nothing depends on who is quick: all
    # others are waited for. None: there is none.
    plan: Callable[[int], Sequence[int]] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)  # on rank 0: a row for each round

    def __post_init__(self) -> None:
        self.name = f"table {next(_tables)}"
        self._mine: dist.Store | None = None

    @property
    def store(self) -> dist.Store:
        """This worker's connection. With the first use on rank 0 the table is opened."""
        if self._mine is None:
            self._mine = _connection(self.name)
            if self.rank == 0:
                arguments = weakref.ref(self), _connection(self.name)
                threading.Thread(target=_keep, args=arguments, name=self.name, daemon=True).start()
        return self._mine

    def begin(self, number: int) -> None:
        """Say that this worker makes the steps of a round, so that it is waited for."""
        self.store.set(f"{number}/begun/{self.rank}", "1")

    def meet(
        self, number: int, mine: dict[str, Tensor] | None, weight: float, group: comm.Group
    ) -> Closed:
        """Bring this worker's tensors to a round (None: it has made no steps), and wait for the
        average. A worker that a proof plans to be late holds its own back until it is closed."""
        store = self.store
        was_closed = store.check([f"{number}/who"])
        is_late = self.plan is not None and self.rank in self.plan(number)
        if mine is not None and not was_closed and not is_late:
            _put(store, f"{number}/from/{self.rank}", mine | {"weight": torch.tensor(weight)})
        limit = time.monotonic() + self.timeout_s
        while not store.check([f"{number}/who"]):
            PULSE.beats += 1  # to wait here is no hang: it has a limit of its own
            if time.monotonic() > limit:
                raise RuntimeError(
                    f"round {number} was not closed within {self.timeout_s:g} s: fewer than "
                    f"{self.least} workers came to it"
                )
            time.sleep(POLL_S)
        who: list[int] = json.loads(store.get(f"{number}/who"))
        if not store.check([f"{number}/average"]):
            raise RuntimeError(
                f"worker {self.rank} is more than {KEPT} rounds late: what it missed is gone"
            )
        tensors = _take(store, f"{number}/average")
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        comm.LEDGER.note("exchange", size, group, f"round {number}")
        return Closed(who, tensors, was_closed)


def _connection(name: str) -> dist.Store:
    """A connection of its own: a store answers one question at a time."""
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store.clone())


def _keep(table: weakref.ref[Table], store: dist.Store) -> None:
    """Close one round after another, while the table is there."""
    expected: set[int] | None = None  # all
    for number in itertools.count():
        closes_at, began = None, time.monotonic()
        while True:
            here = table()
            if here is None:
                return
            everyone = set(range(here.size))
            came = {w for w in everyone if store.check([f"{number}/from/{w}"])}
            begun = {w for w in everyone if store.check([f"{number}/begun/{w}"])}
            if here.plan is not None:
                awaited = everyone - set(here.plan(number)) - came
            else:
                awaited = (everyone if expected is None else expected | begun) - came
            if len(came) >= here.least:
                now = time.monotonic()
                closes_at = now + here.patience_s if closes_at is None else closes_at
                if not awaited or (here.plan is None and now >= closes_at):
                    break
            del here
            time.sleep(POLL_S)
        expected = came
        row = {"round": number, "took_part": sorted(came), "seconds": time.monotonic() - began}
        here.history.append(row)
        del here
        _average(store, number, sorted(came))


def _average(store: dist.Store, number: int, who: list[int]) -> None:
    """The weighed average of what these workers brought, and the first one's buffers."""
    brought = [_take(store, f"{number}/from/{worker}") for worker in who]
    weights = [float(tensors.pop("weight")) for tensors in brought]
    total = sum(weights)
    shares = [w / total if total else 1 / len(who) for w in weights]
    average = {
        name: tensor if name.startswith(BUFFER) else tensor * shares[0]
        for name, tensor in brought[0].items()
    }
    for share, tensors in zip(shares[1:], brought[1:], strict=True):
        for name, tensor in tensors.items():
            if not name.startswith(BUFFER):
                average[name].add_(tensor * share)
    _put(store, f"{number}/average", average)
    brought.clear()
    average.clear()
    store.set(f"{number}/who", json.dumps(who))
    for worker in who:
        _drop(store, f"{number}/from/{worker}")
    if number >= KEPT:
        _drop(store, f"{number - KEPT}/average")


def _put(store: dist.Store, key: str, tensors: Mapping[str, Tensor]) -> None:
    """In pieces; under the key itself stands how many, which is written last."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, file)
    content = file.getbuffer()
    pieces = range(0, len(content), CHUNK)
    for i, start in enumerate(pieces):
        store.set(f"{key}/{i}", bytes(content[start : start + CHUNK]))  # type: ignore[arg-type]
    store.set(key, str(len(pieces)))


def _take(store: dist.Store, key: str) -> dict[str, Tensor]:
    pieces = [store.get(f"{key}/{i}") for i in range(int(store.get(key)))]
    found: dict[str, Tensor] = torch.load(io.BytesIO(b"".join(pieces)), weights_only=True)
    return found


def _drop(store: dist.Store, key: str) -> None:
    count = int(store.get(key))
    store.delete_key(key)
    for i in range(count):
        store.delete_key(f"{key}/{i}")
