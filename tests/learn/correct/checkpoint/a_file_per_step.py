"""A file for each step, each rank's random state in a file of its own, a pointer to the newest."""

import json

import torch
import torch.distributed as dist


def _written(path, write):
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.rename(path)


def save(folder, step, model, optimizer, loader):
    rank = dist.get_rank()
    random = torch.get_rng_state()
    _written(folder / f"{step}.rng{rank}", lambda path: torch.save(random, path))
    if rank == 0:
        everything = (model.state_dict(), optimizer.state_dict(), loader.state_dict())
        _written(folder / f"{step}.pt", lambda path: torch.save(everything, path))
    dist.barrier()
    if rank == 0:
        text = json.dumps({"step": step})
        _written(folder / "latest.json", lambda path: path.write_text(text))
    dist.barrier()


def load(folder, model, optimizer, loader):
    step = json.loads((folder / "latest.json").read_text())["step"]
    parts = torch.load(folder / f"{step}.pt")
    for target, state in zip((model, optimizer, loader), parts):
        target.load_state_dict(state)
    mine = folder / f"{step}.rng{dist.get_rank()}"
    if mine.exists():
        torch.set_rng_state(torch.load(mine))
    return step
