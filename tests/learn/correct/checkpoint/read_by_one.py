"""Gathered to rank 0 alone; read by rank 0 alone, which then tells the others."""

import io
import pathlib
import tempfile

import torch
import torch.distributed as dist


def save(folder, step, model, optimizer, loader):
    writes = dist.get_rank() == 0
    states = [None] * dist.get_world_size() if writes else None
    dist.gather_object(torch.get_rng_state(), states, dst=0)
    if writes:
        buffer = io.BytesIO()
        torch.save(
            [step, model.state_dict(), optimizer.state_dict(), loader.state_dict(), states], buffer
        )
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(buffer.getvalue())
        pathlib.Path(file.name).replace(folder / "newest")
    done = [True]
    dist.broadcast_object_list(done, src=0)


def load(folder, model, optimizer, loader):
    content = [None]
    if dist.get_rank() == 0:
        content = [torch.load(folder / "newest", weights_only=False)]
    dist.broadcast_object_list(content, src=0)
    step, weights, moments, place, states = content[0]
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    loader.load_state_dict(place)
    for rank, state in enumerate(states):
        if rank == dist.get_rank():
            torch.set_rng_state(state)
    return step
