"""A second connection to the store, for what ranks exchange beside their collectives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist


def side_store(purpose: str) -> dist.Store:
    """It has its own connection and keys. A store answers one question at a time: a rank that waits
    in the shared one would keep its watchdog waiting too."""
    import torch.distributed as dist

    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(default.timeout)  # the clone of a FileStore has PyTorch's own
    return dist.PrefixStore(f"guard/{purpose}", store)


def await_all(store: Any, keys: list[str]) -> list[bytes]:
    """The values of these keys in a store, as soon as all are there."""
    if store.has_extended_api():
        found: list[bytes] = store.multi_get(keys)
        return found
    limit = time.monotonic() + store.timeout.total_seconds()
    while not store.check(keys) and time.monotonic() < limit:
        time.sleep(0.0005)  # a FileStore's own wait looks every 10 ms
    return [store.get(key) for key in keys]


def endpoint(store: dist.Store) -> str:
    """Where a store listens: ``10.0.0.1, port 29500``."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}, port {store.port}" if isinstance(store, dist.TCPStore) else "its store"
