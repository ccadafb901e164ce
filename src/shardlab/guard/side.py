"""A second connection to the store, for what ranks exchange beside their collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def side_store(purpose: str) -> dist.Store:
    """It has its own connection and keys. A store answers one question at a time: a rank that waits
    in the shared one would keep its watchdog waiting too."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"guard/{purpose}", store.clone())  # type: ignore[attr-defined]


def endpoint(store: dist.Store) -> str:
    """Where a store listens: ``10.0.0.1, port 29500``."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}, port {store.port}" if isinstance(store, dist.TCPStore) else "its store"
