"""The formulas of the package are in plan/claims.py. Its estimate (`shardlab memory`) has none: it
runs the strategy's own code on tensors without memory, and finds the same moments."""

from collections.abc import Sequence
from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2}  # of a parameter, and of its gradient
MASTER = {"fp32": 0, "bf16": 4}
MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}
SHARED = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "parameters"),
}


@dataclass(frozen=True)
class Block:
    parameters: int  # elements
    activations: int  # bytes


def held(
    blocks: Sequence[Block], world: int, strategy: str, precision: str, optimizer: str
) -> dict[str, float]:
    elements = sum(block.parameters for block in blocks)
    size = {
        "parameters": BYTES[precision],
        "gradients": BYTES[precision],
        "optimizer": MASTER[precision] + 4 * MOMENTS[optimizer],
    }
    ranks = {what: world if what in SHARED[strategy] else 1 for what in size}
    return {what: elements * size[what] / ranks[what] for what in size}


def peak(
    blocks: Sequence[Block], world: int, strategy: str, precision: str, optimizer: str
) -> float:
    between = held(blocks, world, strategy, precision, optimizer)
    always = between["parameters"] + between["optimizer"]
    activations = sum(block.activations for block in blocks)
    gradients = most = 0.0
    for block in reversed(blocks):
        whole = BYTES[precision] * block.parameters
        gathered = whole if "parameters" in SHARED[strategy] else 0
        kept = whole / world if "gradients" in SHARED[strategy] else whole
        most = max(most, always + activations + gathered + gradients + whole)
        activations -= block.activations
        gradients += kept
    return most


def choose(
    blocks: Sequence[Block], world: int, precision: str, optimizer: str, memory: float
) -> str | None:
    for strategy in SHARED:
        if peak(blocks, world, strategy, precision, optimizer) <= memory:
            return strategy
    return None
