"""Who this process is among the ranks: rank, device, backend, mesh, seeds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab import comm, seal, wire
from shardlab.config import LaunchConfig
from shardlab.errors import UsageError


def _silent(_event: Mapping[str, Any]) -> None:
    """Ignore the event."""


_first_groups: dict[int, dist.ProcessGroup] = {}  # by size: a group is made once per process


@dataclass(frozen=True)
class World:
    """One rank's view. ``mesh`` has one axis, "dp"; its coordinate is the data rank."""

    rank: int  # among all ranks of all hosts: the data rank
    size: int
    local_rank: int  # on this host: the device
    device: torch.device
    backend: str
    mesh: DeviceMesh
    tell: Callable[[Mapping[str, Any]], None] = field(default=_silent, compare=False)  # progress
    # Reports to the parent that watches the ranks. None under torchrun: they watch each other.
    pulse: Callable[[Mapping[str, Any]], None] | None = field(default=None, compare=False)
    # Those of a node are neighbours: rank // ranks_per_node is the node. 0: there is one node, or
    # the nodes are not like that.
    ranks_per_node: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("dp")

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. For plain objects before and after the loop."""
        return comm.broadcast_object(value, self.group, 0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, size: int) -> World | None:
        """A world of the first ``size`` ranks, or None on the others. All ranks must call this."""
        if size == self.size:
            return self
        if size not in _first_groups:
            _first_groups[size] = dist.new_group(list(range(size)))
        group = _first_groups[size]
        if self.rank >= size:
            return None
        fits = size > self.ranks_per_node > 0 and size % self.ranks_per_node == 0
        per_node = self.ranks_per_node if fits else 0
        return replace(self, size=size, mesh=data_mesh(group, self.device), ranks_per_node=per_node)


def join(
    launch: LaunchConfig,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    store: dist.Store | None = None,
    tell: Callable[[Mapping[str, Any]], None] = _silent,
    pulse: Callable[[Mapping[str, Any]], None] | None = None,
) -> World:
    """Make this process a rank. Without a store, environment variables name it (env://)."""
    # Torch 2.11 says so of every profile. (To keep them, as it advises, makes the profiler read all
    # events when it stops: a comparison of all strategies took 48 s longer.)
    warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
    device, backend = choose(launch, local_rank, local_size)
    prepare(launch, device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=launch.timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    seal.use(dist.distributed_c10d._get_default_store())
    per_node = ranks_per_node(group, local_rank, local_size)
    mesh = data_mesh(group, device)
    return World(rank, size, local_rank, device, backend, mesh, tell, pulse, per_node)


def prepare(launch: LaunchConfig, device: torch.device) -> None:
    """Set the device, or the number of threads, of this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(launch.threads_per_rank)


def ranks_per_node(group: dist.ProcessGroup, local_rank: int, local_size: int) -> int:
    """How many ranks each node has; 0 if there is one node, or they differ. A collective."""
    places: list[tuple[int, int]] = [(0, 0)] * group.size()
    dist.all_gather_object(places, (local_rank, local_size), group=group)
    return wire.ranks_per_node(places)


def leave() -> None:
    if dist.is_initialized():
        _first_groups.clear()
        seal.leave()
        dist.destroy_process_group()


def data_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """The mesh that a strategy gets: one axis, over the data-parallel ranks."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))


def choose(launch: LaunchConfig, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """Device and backend of a rank. Refuses a choice that this machine cannot offer."""
    gpus = torch.cuda.device_count()
    kind = launch.device
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"
    if kind == "cpu":
        if launch.backend == "nccl":
            raise UsageError("the nccl backend needs GPUs, and this machine has none; use gloo")
        return torch.device("cpu"), "gloo"
    if not gpus:
        raise UsageError("launch.device is cuda, but PyTorch sees no GPU here; use cpu")
    backend = launch.backend
    if backend == "auto":
        backend = "nccl" if local_size <= gpus and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and local_size > gpus:
        raise UsageError(
            f"{local_size} ranks with nccl need {local_size} GPUs, this machine has {gpus}; "
            f"use --world {gpus}, or --set launch.backend=gloo to let ranks share a GPU"
        )
    return torch.device("cuda", local_rank % gpus), backend


def seed(value: int) -> None:
    """Use the same seed on every rank, for the model's initialisation."""
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # it would note where it was called from, for the GPU that there is not
        torch.default_generator.manual_seed(value)


def seed_rank(value: int, rank: int, step: int = 0) -> None:
    """Seed this rank unlike the others, for dropout and noise in training.

    Ranks with equal random numbers would drop the same units for all their samples, and the
    gradient would be noisier than one process's. Rank 0 keeps the seed of ``seed``, so one process
    draws as if there were no ranks. ``step``: the first step of a rank that joins later.
    """
    if rank:
        seed(int(np.random.SeedSequence([value, rank, step]).generate_state(1, np.uint64)[0] >> 1))


def sent_to_host(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on its way to the host, and the event after which it is there."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value.detach(), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived
