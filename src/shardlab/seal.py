"""Pickles that ranks send each other, each with a proof that a rank of this run has made it.

To read a pickle is to run what is in it, and a port of Gloo's takes whoever comes first. So ranks
sign what they pickle with a key that lies in their store, and read nothing else. That holds for
PyTorch's object collectives too: its two names for reading and writing pickles are replaced.
torch is imported where it is needed, because the launchers' leader imports this file.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

KEY = "seal"
SIZE = 32  # bytes of a proof

_key = secrets.token_bytes(SIZE)  # until there is a store, this process reads only its own


def dumps(value: Any) -> bytes:
    data = pickle.dumps(value)
    return _proof(data) + data


def loads(sealed: bytes) -> Any:
    proof, data = sealed[:SIZE], sealed[SIZE:]
    if not hmac.compare_digest(proof, _proof(data)):
        raise RuntimeError(
            "a rank has received an object that no rank of this run has sent, and did not read it: "
            "another program has connected to its port"
        )
    return pickle.loads(data)


def _proof(data: bytes) -> bytes:
    return hashlib.blake2b(data, key=_key, digest_size=SIZE).digest()


class Pickler:
    """What PyTorch's collectives use of ``pickle.Pickler``."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def dump(self, value: Any) -> None:
        self.file.write(dumps(value))


class Unpickler:
    """What they use of ``pickle.Unpickler``."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file

    def load(self) -> Any:
        return loads(self.file.read())


def use(store: dist.Store) -> None:
    """From now on the ranks of this store read only each other's pickles. All ranks call it."""
    from torch.distributed import distributed_c10d as c10d

    global _key
    _key = bytes(store.compare_set(KEY, "", secrets.token_hex(SIZE)))
    c10d._pickler, c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]


def leave() -> None:
    from torch.distributed import distributed_c10d as c10d

    c10d._pickler, c10d._unpickler = pickle.Pickler, pickle.Unpickler
