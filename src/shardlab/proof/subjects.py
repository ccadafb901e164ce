"""The two models of a proof, with the micro-batches of every rank.

The *stack* is ours: nearly all parameters and hardly an activation, with what goes wrong in
practice: ragged and empty batches, a buffer that forward changes, frozen and odd-sized
parameters. The other is the user's workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardlab import world as worlds
from shardlab.config import Config
from shardlab.data import sampler
from shardlab.errors import UsageError
from shardlab.optim import optimizers, traits
from shardlab.plan import claims
from shardlab.proof.chance import Seeded
from shardlab.training import builders
from shardlab.workloads.base import Batch, Workload, cast_model
from shardlab.world import World

CPU = torch.device("cpu")
SAMPLES = 64  # elements of each gradient that a diagnosis looks at


@dataclass
class Subject:
    """A model and its data: ``steps[step][rank]`` is a list of micro-batches."""

    workload: Workload
    seed: int
    steps: list[list[list[Batch]]]
    dtype: torch.dtype = torch.float64
    device: torch.device = CPU
    why_dtype: str | None = None  # why it is not float64
    uses_rng: bool = False  # forward uses random numbers; they are seeded alike
    stateful: bool = False  # forward depends on what it has seen, beyond its buffers
    ranks_per_node: int = 0  # 0: there is one node, or it is not known

    def job(self, config: Config) -> claims.Job:
        """What the formulas need to know."""
        model = cast_model(self.workload.make_model(), CPU, self.dtype)
        blocks = self.workload.blocks_of(model)
        inside: dict[nn.Parameter, set[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            block = next((b for b in blocks if name.startswith(f"{b}.")), "")
            inside.setdefault(p, set()).add(block)
        made = builders.make_optimizer(config.training, self.workload, model)
        whole = traits.whole_names(made)
        state = optimizers.state_tensors(made, dict(model.named_parameters()))
        params = []
        for name, p in model.named_parameters():
            block = inside[p].pop() if len(inside[p]) == 1 else ""  # tied across blocks: of none
            params.append(
                claims.Parameter(
                    name, tuple(p.shape), p.element_size(), p.requires_grad, block,
                    state.get(name, 0.0), name in whole,
                )
            )  # fmt: skip
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        ranks, micro = len(self.steps[0]), len(self.steps[0][0])
        options, nodes = builders.options_of(config), self.ranks_per_node
        return claims.Job(tuple(params), buffers, ranks, micro, options, nodes)


# ------------------------------------------------------------------ the stack


class _Block(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input + torch.tanh(super().forward(input))


class _DriftingBlock(_Block):
    """It follows the mean of what it is given, as BatchNorm does. In a pipeline only blocks may."""

    drift: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("drift", torch.rand(width))

    def forward(self, input: Tensor) -> Tensor:  # (rows, width)
        if len(input):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * input.mean(0))
        return super().forward(input * (1 + self.drift))


class Stack(nn.Module):
    BLOCKS, WIDTH = 16, 224

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, self.WIDTH)
        self.offset = nn.Parameter(torch.rand(self.WIDTH), requires_grad=False)
        plain = (_Block(self.WIDTH, self.WIDTH) for _ in range(1, self.BLOCKS))
        self.blocks = nn.ModuleList((_DriftingBlock(self.WIDTH), *plain))
        self.outlet = nn.Linear(self.WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 5)
        y = self.inlet(x) + self.offset
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.outlet(y)  # (rows, 3)
        return out


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch.inputs) - batch.targets).square().sum()
    return loss


class _StackData:
    """Sample i, whatever batch it is in."""

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [
            torch.randn(5, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            for i in ids
        ]
        x = torch.stack(rows) if rows else torch.empty(0, 5, dtype=torch.float64)
        return Batch(inputs=x, targets=x[:, :3].cos(), count=len(rows), samples=len(rows))


def stack(ranks: int, seed: int, device: torch.device, steps: int = 3, even: int = 0) -> Subject:
    """Even in step 0, where a wrong factor shows plainly; then ragged; then one rank has none.
    ``even``: this many micro-batches in a step, always equal in shape."""
    data = _StackData()
    # Not the number of ranks, so that a factor says which it is.
    micro = even or (3 if ranks == 2 else 2)

    def share(step: int, rank: int, part: int) -> Batch:
        rows = 2 if step == 0 or even else 1 + rank % 2 + (part == 0)
        if step == 2 and not even and ranks > 1 and rank == ranks - 1:
            rows = 0
        first = ((step * ranks + rank) * micro + part) * 4
        return data.batch(range(first, first + rows)).to(device)

    batches = [[[share(s, r, m) for m in range(micro)] for r in range(ranks)] for s in range(steps)]
    blocks = tuple(f"blocks.{i}" for i in range(Stack.BLOCKS))
    workload = Workload("stack", Stack, _squares, data, blocks=blocks)
    return Subject(_seeded(workload, seed, batches), seed, batches, device=device)


# ------------------------------------------------------------------ the user's


def check(_world: World, config: Config) -> str:
    """Refuse a model for which one process at a time is no reference. Returns where its data comes
    from, also where the config says ``auto``."""
    workload = builders.build_workload(config)
    if workload.couples_ranks:
        raise UsageError(
            f"the reference of a proof runs each rank's samples by themselves, but {workload.name} "
            f"looks at all ranks' together: leave out {workload.couples_ranks}"
        )
    return str(workload.chosen.get("data.source", config.data.source))


def users(
    config: Config, ranks: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> Subject:
    """The workload that the config names, with the micro-batches of every rank in every step."""
    workload = builders.build_workload(config)
    training, dataset = config.training, workload.dataset
    steps = []
    for step in range(training.steps):
        ids, _ = sampler.draw(
            step, training.global_batch, len(dataset), training.seed, config.data.shuffle,
            config.data.epoch,
        )  # fmt: skip
        worlds.seed(training.seed + step)  # a data set that draws, draws the same on every rank
        shares = [sampler.rank_share(ids, ranks, r, config.accumulate) for r in range(ranks)]
        batches = [[dataset.batch(i.tolist()) for i in share] for share in shares]
        steps.append([[_cast(b, dtype).to(device) for b in share] for share in batches])
    return Subject(_seeded(workload, training.seed, steps), training.seed, steps, dtype, device)


def _seeded(workload: Workload, seed: int, steps: list[list[list[Batch]]]) -> Workload:
    return replace(workload, loss=Seeded(workload.loss, seed, steps))


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return batch.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def sample(tensor: Tensor) -> Tensor:
    """Some elements, evenly spread: (SAMPLES,), or all there are."""
    flat = tensor.detach().reshape(-1)
    if len(flat) <= SAMPLES:
        return flat.clone()
    return flat[torch.linspace(0, len(flat) - 1, SAMPLES, device=flat.device).long()]
