"""What a workload's forward is like: may losses of different worlds be compared at all?

Each rank draws its own random numbers and sees its own micro-batches. Where the loss depends on
either, two strategies that are both right have different losses, and only a proof can tell.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch
from torch import Tensor, nn

from shardlab import train
from shardlab import world as worlds
from shardlab.config import Config
from shardlab.workloads.base import Workload

RANDOM = (
    "forward draws random numbers (dropout, noise), and ranks draw others than one process does"
)
STATE = (
    "forward changes what its next loss depends on (a buffer, a cache), and a rank sees other "
    "micro-batches than one process does"
)
SAME = 1e-5  # of the loss: what a GPU's order of summation may do between two calls


def why_losses_differ(config: Config, workload: Workload, device: torch.device) -> str | None:
    """Why the losses of two worlds cannot agree, whatever the strategy; none if they should.

    Looked for by running the loss of one micro-batch twice from the same random state: does it move
    that state, and is it the same again? A model that cannot run like this will say so when it is
    timed.
    """
    training = config.training
    parts = (config.launch.world or 1) * training.accumulate
    rows = min(len(workload.dataset), max(2, -(-training.global_batch // parts)))
    try:
        model = workload.make_model()
        model.to(device, torch.float64 if config.precision.compute == "fp64" else torch.float32)
        batch = workload.dataset.batch(list(range(rows))).to(device)
        loss = train.in_precision(workload.loss, config.precision.compute)
        losses = []
        for _ in range(2):
            worlds.seed(training.seed)
            before = _random_state(device)
            losses.append(_value(loss(model, batch)))
            moved = _random_state(device) != before
    except Exception:
        return None
    if moved:
        return RANDOM
    return STATE if abs(losses[1] - losses[0]) > SAME * abs(losses[0]) else None


def normalizes_batches(model: nn.Module) -> bool:
    """Whether a sample's loss depends on the others in its micro-batch."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _value(loss: Tensor) -> float:
    return float(loss.detach())


def _random_state(device: torch.device) -> tuple[bytes, ...]:
    """The state of every global random generator that a model may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    others = pickle.dumps((random.getstate(), np.random.get_state()))
    return others, *(state.numpy().tobytes() for state in states)
