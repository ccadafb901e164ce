"""Opens, seeks and reads, token by token; remembers rows, which do not depend on the world."""

import bisect
import itertools

import numpy as np
import torch

HEADER_BYTES = 4 * 256


class TokenLoader:
    def __init__(self, paths, batch, seq_len, rank, world):
        self.paths = list(paths)
        counts = []
        for path in self.paths:
            with path.open("rb") as file:
                header = np.frombuffer(file.read(HEADER_BYTES), dtype=np.int32)
            held, odd = divmod(path.stat().st_size - HEADER_BYTES, 2)
            if len(header) != 256 or header[0] != 20240520 or odd or held != header[2]:
                raise ValueError(f"{path}: not a shard, or damaged")
            counts.append(held)
        self.ends = list(itertools.accumulate(counts))
        self.rank, self.world, self.batch, self.seq_len = rank, world, batch, seq_len
        self.row = 0

    def token(self, place):
        shard = bisect.bisect_right(self.ends, place)
        begin = self.ends[shard - 1] if shard else 0
        with self.paths[shard].open("rb") as file:
            file.seek(HEADER_BYTES + 2 * (place - begin))
            return int.from_bytes(file.read(2), "little")

    def next(self):
        rows = self.batch * self.world
        if (self.row + rows) * self.seq_len >= self.ends[-1]:
            self.row = 0
        first = self.row + self.rank * self.batch
        self.row += rows
        lines = [
            [self.token(row * self.seq_len + i) for i in range(self.seq_len + 1)]
            for row in range(first, first + self.batch)
        ]
        both = torch.tensor(lines)  # (batch, seq_len + 1)
        return both[:, :-1], both[:, 1:]

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]
