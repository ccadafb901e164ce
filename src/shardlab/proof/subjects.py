"""The two models of a proof, in float64, and what one plain process makes of them.

The *stack* is ours: nearly all parameters and hardly an activation, with what goes wrong in
practice: ragged and empty batches, a buffer that forward changes, frozen and odd-sized
parameters. The other is the user's workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import config as configs
from shardlab import train
from shardlab import world as worlds
from shardlab.config import Config
from shardlab.data import sampler
from shardlab.errors import UsageError
from shardlab.plan import claims
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

SAMPLES = 64  # elements of each gradient that a diagnosis looks at


@dataclass
class Reference:
    """What one process did: its tensors at the start, then of each step."""

    start: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    parts: list[list[dict[str, Tensor]]] = field(default_factory=list)  # [step][rank, micro]


@dataclass
class Subject:
    """A model and its data: ``steps[step][rank]`` is a list of micro-batches."""

    workload: Workload
    seed: int
    steps: list[list[list[Batch]]]
    reference: Reference | None = None

    def job(self, config: Config) -> claims.Job:
        """What the formulas need to know."""
        model = self.workload.make_model()
        blocks = self.workload.blocks_of(model)
        inside: dict[nn.Parameter, set[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            block = next((b for b in blocks if name.startswith(f"{b}.")), "")
            inside.setdefault(p, set()).add(block)
        params = []
        for name, p in model.named_parameters():
            block = inside[p].pop() if len(inside[p]) == 1 else ""  # tied across blocks: of none
            params.append(claims.Parameter(name, tuple(p.shape), 8, p.requires_grad, block))
        buffers = sum(b.numel() * (8 if b.is_floating_point() else b.element_size())
                      for b in model.buffers())  # fmt: skip
        ranks, micro = len(self.steps[0]), len(self.steps[0][0])
        training, options = config.training, config.strategy.options
        sizes = {p.name: p.bytes for p in params if p.trains}
        plan = train.make_optimizer(training, self.workload, model)
        state = plan.state_per_parameter(sizes)
        return claims.Job(tuple(params), buffers, ranks, micro, state, options)


# ------------------------------------------------------------------ the stack


class Stack(nn.Module):
    BLOCKS, WIDTH = 16, 224
    drift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, self.WIDTH)
        self.offset = nn.Parameter(torch.rand(self.WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.BLOCKS))
        self.outlet = nn.Linear(self.WIDTH, 3)
        self.register_buffer("drift", torch.rand(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 5)
        y = self.inlet(x) + self.offset
        if len(y):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * y.mean(0))
        y = y * (1 + self.drift)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
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


def stack(ranks: int, seed: int, device: torch.device) -> Subject:
    """Even in step 0, where a wrong factor shows plainly; then ragged; then one rank has none."""
    data = _StackData()
    micro = 3 if ranks == 2 else 2  # not the number of ranks, so that a factor says which it is

    def share(step: int, rank: int, part: int) -> Batch:
        rows = 2 if step == 0 else 1 + rank % 2 + (part == 0)
        if step == 2 and ranks > 1 and rank == ranks - 1:
            rows = 0
        first = ((step * ranks + rank) * micro + part) * 4
        return data.batch(range(first, first + rows)).to(device)

    batches = [[[share(s, r, m) for m in range(micro)] for r in range(ranks)] for s in range(3)]
    blocks = tuple(f"blocks.{i}" for i in range(Stack.BLOCKS))
    return Subject(Workload("stack", Stack, _squares, data, blocks=blocks), seed, batches)


# ------------------------------------------------------------------ the user's


def check(_world: World, values: dict[str, Any]) -> None:
    """Refuse a model for which one process at a time is no reference."""
    workload = train.build_workload(configs.from_dict(values))
    if workload.couples_ranks:
        raise UsageError(
            f"the reference of a proof runs each rank's samples by themselves, but {workload.name} "
            f"looks at all ranks' together: leave out {workload.couples_ranks}"
        )


def users(config: Config, ranks: int, device: torch.device) -> Subject:
    workload = train.build_workload(config)
    training, dataset = config.training, workload.dataset
    steps = []
    for step in range(training.steps):
        ids = sampler.global_batch_ids(
            step,
            training.global_batch,
            len(dataset),
            training.seed,
            config.data.shuffle,
            config.data.epoch,
        )
        shares = [sampler.rank_share(ids, ranks, r, training.accumulate) for r in range(ranks)]
        steps.append([[_double(dataset.batch(i.tolist())).to(device) for i in s] for s in shares])
    make = partial(_without_dropout, workload.make_model)
    return Subject(replace(workload, make_model=make), training.seed, steps)


def _without_dropout(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Ranks would drop other elements than one process does, and rightly so."""
    model = make_model()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _double(batch: Batch) -> Batch:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        if isinstance(value, dict):
            return {k: cast(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(cast(v) for v in value)
        return value

    return replace(batch, inputs=cast(batch.inputs), targets=cast(batch.targets))


# ------------------------------------------------------------------ one process


def refer(subject: Subject, config: Config, device: torch.device) -> Reference:
    """A plain loop over every rank's micro-batches. Buffers follow rank 0's, as in DDP."""
    worlds.seed(subject.seed)
    model = subject.workload.make_model().to(device, torch.float64)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = train.make_optimizer(config.training, subject.workload, model)(trained)
    result = Reference(_tensors(model))
    for shares in subject.steps:
        count = max(1, sum(batch.count for share in shares for batch in share))
        start = buffers = {n: b.clone() for n, b in model.named_buffers()}
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        gradients: dict[str, Tensor | None] = dict.fromkeys(trained)
        parts = []
        for rank, share in enumerate(shares):
            _set_buffers(model, start)
            for batch in share:
                loss = subject.workload.loss(model, batch)
                (loss / count).backward()
                loss_sum += loss.detach()
                parts.append({n: sample(p.grad) for n, p in trained.items() if p.grad is not None})
                for name, p in trained.items():
                    if p.grad is not None:
                        so_far = gradients[name]
                        gradients[name] = p.grad if so_far is None else so_far + p.grad
                        p.grad = None
            if rank == 0:
                buffers = {n: b.clone() for n, b in model.named_buffers()}
        _set_buffers(model, buffers)
        for name, p in trained.items():
            p.grad = gradients[name]
        optimizer.step()
        model.zero_grad()  # of all, also those that the optimizer leaves out
        result.losses.append(loss_sum / count)
        result.gradients.append(gradients)
        result.tensors.append(_tensors(model))
        result.parts.append(parts)
    return result


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


@torch.no_grad()
def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def sample(tensor: Tensor) -> Tensor:
    """Some elements, evenly spread: (SAMPLES,), or all there are."""
    flat = tensor.detach().reshape(-1)
    if len(flat) <= SAMPLES:
        return flat.clone()
    return flat[torch.linspace(0, len(flat) - 1, SAMPLES, device=flat.device).long()]
