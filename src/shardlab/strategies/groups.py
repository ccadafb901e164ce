"""Groups of neighbouring ranks, as those of a node are, and of ranks with one place in each."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlab.comm import Group
from shardlab.errors import UsageError
from shardlab.strategies import refusals

# The meshes of each world. A process group lives as long as its world, with threads and sockets of
# its own: a second strategy in the same process uses the groups of the first.
_meshes: WeakKeyDictionary[Group, dict[tuple[str, int], DeviceMesh]] = WeakKeyDictionary()


def grid(mesh: DeviceMesh, size: int, who: str, option: str = "shards") -> DeviceMesh:
    """(groups, size): neighbours are a row, "shard"; ranks of one place a column, "replicate"."""
    if size < 1 or mesh.size() % size:
        raise UsageError(
            f"{who}: {mesh.size()} ranks cannot form groups of {size}; "
            f"set its option {option} to a divisor"
        )
    if mesh.size() != dist.get_world_size():
        raise UsageError(f"{who} makes process groups of its own: it needs every rank")
    assert dist.group.WORLD is not None
    made = _meshes.setdefault(dist.group.WORLD, {})
    key = (mesh.device_type, size)
    if key not in made:
        shape, names = (mesh.size() // size, size), ("replicate", "shard")
        made[key] = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
    return made[key]


def inside_and_between(
    mesh: DeviceMesh, size: int | None, who: str, option: str = "shards"
) -> tuple[Group, Group | None]:
    """This rank's neighbours, and those who have its place in the other groups; None: no others.

    ``size``: of a group; None stands for all ranks.
    """
    if size is None or size == mesh.size():
        return refusals.dp_group(mesh), None
    rows = grid(mesh, size, who, option)
    return rows.get_group("shard"), rows.get_group("replicate")
