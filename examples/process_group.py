"""Two ranks find each other and add up a number. The book's chapter 19 tells what happens here.

    torchrun --standalone --nproc-per-node=2 examples/process_group.py

torchrun sets the environment that ``env://`` reads; the chapter shows how to set it by hand.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    # Returns when all ranks are here, and raises if one is still missing after the timeout.
    timeout = timedelta(seconds=float(os.environ.get("TIMEOUT_S", "60")))
    dist.init_process_group("gloo", init_method="env://", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()

    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)  # over all ranks: 1 + 2 + … + world

    # Every rank must make every group, in the same order, also those that it is not in.
    groups = [dist.new_group([member]) for member in range(world)]
    alone = torch.tensor([rank + 1.0])
    dist.all_reduce(alone, group=groups[rank])  # over this rank only: nothing is added

    print(f"rank {rank} of {world}: the sum is {number.item():g}, alone it is {alone.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
