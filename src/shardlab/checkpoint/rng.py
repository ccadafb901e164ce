"""The random states that a run may draw from, as tensors: torch's, its GPU's, Python's, numpy's."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def get(device: torch.device) -> dict[str, Tensor]:
    version, internal, gauss = random.getstate()
    assert version == 3
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal, dtype=torch.int64),  # (625,)
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),  # (626,)
        # What a generator of normal numbers has in hand: it makes them in pairs.
        "in_hand": torch.tensor(
            [math.nan if gauss is None else gauss, cached], dtype=torch.float64
        ),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def put(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    gauss, cached = states["in_hand"].tolist()
    internal = tuple(states["python"].tolist())
    random.setstate((3, internal, None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = states["numpy"].tolist()
    if not 0 <= position <= len(keys):  # numpy would read what lies behind its state
        raise ValueError(f"numpy's state has the position {position}")
    legacy: tuple[Any, ...] = (
        "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached
    )  # fmt: skip
    np.random.set_state(legacy)
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
