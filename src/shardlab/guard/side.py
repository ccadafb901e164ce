"""A second connection to the store, for what ranks tell each other beside their collectives."""

from __future__ import annotations

import torch.distributed as dist


def side_store(purpose: str) -> dist.Store:
    """Own connection, own keys. A store serves one question at a time: a rank that waits in the
    shared one would keep its watchdog waiting too."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"guard/{purpose}", store.clone())  # type: ignore[attr-defined]
