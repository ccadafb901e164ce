"""Exercise: what does a rank hold? An estimate, with a pencil's arithmetic.

The contract. A model is a list of blocks, in the order of forward. ``strategy`` is "ddp", "zero1",
"zero2" or "zero3", on ``world`` ranks. All results are bytes of one rank; fractions are fine.

``held(...)`` is the table of every paper: what a rank holds of each when all gradients are there,
just before the update. {"parameters": …, "gradients": …, "optimizer": …}

- precision "fp32": everything has 4 bytes. "bf16": parameters and gradients have 2 bytes, and the
  optimizer keeps a copy of the parameters in 4 bytes (the master weights), which it updates. The
  copy belongs to the optimizer, and so do its moments, which have 4 bytes in both.
- optimizer "sgd" has no moments, "momentum" has one for each parameter, "adamw" two.
- zero1 shares the optimizer's part out over the ranks; zero2 the gradients, too; zero3 the
  parameters, too. (No padding, no buckets.)

``peak(...)`` is the most that a rank holds at any moment of a step, activations included: one
number. A step goes like this:

- Between steps there are no gradients.
- Forward keeps each block's ``activations`` (bytes, of this rank, in any precision) for backward.
- Backward goes from the last block to the first. When it comes to a block, zero3 gathers that
  block's parameters whole, beside its share, in the precision's bytes; after it they are freed.
- At the end of a block's backward, its gradients are there, whole, and its activations still are.
  Then the activations go. With zero2 and zero3 each rank keeps its share of the block's gradients,
  and the whole ones go. (Whether the share is there before they go: both are accepted.)
- Then the next block. After the first block comes the update, which needs nothing more.

``choose(...)`` is the strategy for a device with ``memory`` bytes: the first of "ddp", "zero1",
"zero2" and "zero3" that fits at its peak, or None if none fits. Each of them sends as much as the
one before, or more.

Check with:  shardlab learn check memory_estimate
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    parameters: int  # elements
    activations: int  # bytes


def held(
    blocks: Sequence[Block], world: int, strategy: str, precision: str, optimizer: str
) -> dict[str, float]:
    # TODO 1: bytes of an element of each of the three, and which of them are shared out.
    raise NotImplementedError("TODO 1: held()")


def peak(
    blocks: Sequence[Block], world: int, strategy: str, precision: str, optimizer: str
) -> float:
    # TODO 2: walk through backward, block by block; what is there at each moment?
    raise NotImplementedError("TODO 2: peak()")


def choose(
    blocks: Sequence[Block], world: int, precision: str, optimizer: str, memory: float
) -> str | None:
    # TODO 3: the first that fits.
    raise NotImplementedError("TODO 3: choose()")
