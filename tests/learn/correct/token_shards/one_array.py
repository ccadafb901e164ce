"""The whole stream in memory, and rows dealt out in turn: rank r has rows r, r + world …"""

import struct

import numpy as np
import torch


class TokenLoader:
    def __init__(self, paths, batch, seq_len, rank, world):
        parts = []
        for path in paths:
            data = path.read_bytes()
            if len(data) < 1024:
                raise ValueError(f"{path} is too short")
            magic, _version, count = struct.unpack("<3i", data[:12])
            if magic != 20240520 or len(data) != 1024 + 2 * count:
                raise ValueError(f"{path} is no shard")
            parts.append(np.frombuffer(data, dtype=np.uint16, offset=1024))
        self.tokens = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        self.batch, self.seq_len, self.rank, self.world = batch, seq_len, rank, world
        self.used = 0

    def next(self):
        rows = self.world * self.batch
        if len(self.tokens) - self.used <= rows * self.seq_len:
            self.used = 0
        windows = self.tokens[self.used :].unfold(0, self.seq_len + 1, self.seq_len)  # (rows, T+1)
        mine = windows[self.rank : rows : self.world]
        self.used += rows * self.seq_len
        return mine[:, :-1].clone(), mine[:, 1:].clone()

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.used = state["used"]
