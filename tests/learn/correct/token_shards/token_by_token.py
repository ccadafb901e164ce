"""Token by token, out of bytes; remembers rows, which do not depend on the world."""

import numpy as np
import torch

HEADER_BYTES = 4 * 256


def tokens_of(path):
    data = path.read_bytes()
    header = np.frombuffer(data[:HEADER_BYTES], dtype=np.int32)
    if len(header) != 256 or header[0] != 20240520 or len(data) != HEADER_BYTES + 2 * header[2]:
        raise ValueError(f"{path}: not a shard, or damaged")
    return data[HEADER_BYTES:]


class TokenLoader:
    def __init__(self, paths, batch, seq_len, rank, world):
        self.stream = b"".join(tokens_of(path) for path in paths)
        self.rank, self.world, self.batch, self.seq_len = rank, world, batch, seq_len
        self.row = 0

    def token(self, place):
        return int.from_bytes(self.stream[2 * place : 2 * place + 2], "little")

    def next(self):
        rows = self.batch * self.world
        if 2 * (self.row + rows) * self.seq_len >= len(self.stream):
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
