"""In the package this is data/tokens.py, with data/sampler.py, which also shuffles windows."""

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
        self.shards = [open_shard(path) for path in paths]
        self.total = sum(len(shard) for shard in self.shards)
        self.batch, self.seq_len, self.rank, self.world = batch, seq_len, rank, world
        self.position = 0  # tokens of the stream that all ranks together have used

    def next(self) -> tuple[Tensor, Tensor]:
        mine = self.batch * self.seq_len
        if self.position + self.world * mine + 1 > self.total:
            self.position = 0
        # One token more than the inputs: the last one's target.
        tokens = self.read(self.position + self.rank * mine, mine + 1)
        self.position += self.world * mine
        shape = (self.batch, self.seq_len)
        return tokens[:-1].view(shape), tokens[1:].view(shape)

    def read(self, start: int, count: int) -> Tensor:
        """Tokens of the stream, from as many shards as it takes: (count,)."""
        parts = []
        for shard in self.shards:
            if count and start < len(shard):
                parts.append(shard[start : start + count])
                count -= len(parts[-1])
                start += len(parts[-1])
            start -= len(shard)
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def open_shard(path: Path) -> np.ndarray:
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC:
        raise ValueError(f"{path} is not a token shard")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER)
    if len(tokens) != header[2]:
        raise ValueError(f"{path} should have {header[2]} tokens, it has {len(tokens)}")
    return tokens
