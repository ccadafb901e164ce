"""Exercise: a loader of token shards, by rank.

Contract: ``TokenLoader(paths, batch, seq_len, rank, world)`` reads the shards as one stream of
tokens, one after the other. ``next()`` returns this rank's (inputs, targets) of the next step, both
int64 of (batch, seq_len).

- A shard has a header of 256 int32 (MAGIC, a version, the number of tokens, zeros), then its tokens
  as uint16. A file with another MAGIC, or with another number of tokens than its header says, is
  refused by ``__init__`` with a ValueError.
- A row of inputs is seq_len tokens in a row; its targets are the same, one token further on.
- In a step the ranks' inputs together are the next world * batch * seq_len tokens of the stream,
  each of them once, whichever rank has which row. Rows continue from one shard into the next.
- If the stream does not have enough tokens left for the inputs of all ranks and the target of the
  last, the step begins again at its start, and the rest is left out.
- ``state_dict()`` returns plain numbers, the same on every rank. A loader with another ``rank`` and
  ``world`` that is given them by ``load_state_dict(state)`` continues where this one would have.

Check with:  shardlab learn check token_shards
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAGIC = 20240520
HEADER = 256  # int32 values


class TokenLoader:
    def __init__(
        self, paths: Sequence[Path], batch: int, seq_len: int, rank: int, world: int
    ) -> None:
        # TODO 1: look at each header, and open the tokens (np.memmap reads nothing before it must).
        raise NotImplementedError("TODO: open the shards")

    def next(self) -> tuple[Tensor, Tensor]:
        # TODO 2: this rank's part of the step's tokens, and the one that comes after it.
        raise NotImplementedError("TODO: this rank's inputs and targets")

    def state_dict(self) -> dict[str, int]:
        # TODO 3: where the stream continues.
        raise NotImplementedError("TODO: the position")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError("TODO: continue from the position")
