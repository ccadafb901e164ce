"""What a workload's forward is like: may losses of different worlds be compared at all?

Each rank draws its own random numbers and sees its own micro-batches. Where the loss depends on
either, two strategies that are both right have different losses, and only a proof can tell.
"""

from __future__ import annotations

import torch

from shardlab import world as worlds
from shardlab.config import Config
from shardlab.proof.chance import generators
from shardlab.run import assemble
from shardlab.workloads.base import Workload

RANDOM = (
    "forward draws random numbers (dropout, noise), and ranks draw others than one process does"
)
STATE = (
    "forward changes what its next loss depends on (a buffer, a cache), and a rank sees other "
    "micro-batches than one process does"
)
SAME = 1e-5  # share of the loss that a GPU's order of summation may change between two calls


def why_losses_differ(config: Config, workload: Workload, device: torch.device) -> str | None:
    """Why the losses of two worlds cannot agree, whatever the strategy; None if they should.

    The loss of one micro-batch is run twice from the same random state: does it move that state,
    and is it the same again? A model that cannot run like this will say so when it is timed.
    """
    training = config.training
    parts = (config.launch.world or 1) * training.accumulate
    rows = min(len(workload.dataset), max(2, -(-training.global_batch // parts)))
    try:
        model = workload.make_model()
        model.to(device, torch.float64 if config.precision.compute == "fp64" else torch.float32)
        batch = workload.dataset.batch(list(range(rows))).to(device)
        loss = assemble.in_precision(workload.loss, config.precision.compute)
        losses = []
        for _ in range(2):
            worlds.seed(training.seed)
            before = generators()
            losses.append(float(loss(model, batch).detach()))
            moved = generators() != before
    except Exception:
        return None
    if moved:
        return RANDOM
    return STATE if abs(losses[1] - losses[0]) > SAME * abs(losses[0]) else None
