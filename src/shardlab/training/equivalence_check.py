"""Before the first step: do ranks that cut one model between them get its loss and its gradients?

What a workload says of its model may be wrong, such as a norm that mixes positions of which a rank
has some. And a model may add something to its loss that no rank can compute from its part, as does
the router of a mixture of experts. The loss then hardly moves: the gradients show it.

One sample goes through the whole model, on every rank, and then through the ranks' parts of it, in
float64, in which roundings hide nothing. A second pass, with the last bit of each parameter moved,
measures the roundings: a difference counts if it is far above them.

It costs three steps of one sample, or of one for each micro-batch in a pipeline. Its model is freed
before the run's own is made. At the peak a rank has the whole model in float64 and its gradients,
16 bytes for each parameter, and once more where ranks put the whole together. In float32, at half
of that, are models whose sample has more than ``DEAR`` elements times parameters (float64 is slow
on most GPUs), and those with an operator that has no float64. A note says what that hides.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from msgspec import structs
from torch import Tensor, nn

from shardlab import axes
from shardlab import world as worlds
from shardlab.axes import Axes
from shardlab.config import Config
from shardlab.errors import LOST_PEER, UsageError
from shardlab.optim import optimizers
from shardlab.strategies.base import Setup
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.model_checks import refuse_unsupported
from shardlab.strategies.probing import probing
from shardlab.training import builders
from shardlab.workloads import loss_additivity
from shardlab.workloads.base import Batch, Workload, cast_model, tensors_of
from shardlab.workloads.context import context_of
from shardlab.workloads.custom import DEAR
from shardlab.world import World

# What may differ: so many times what the last bit moves (sums are made in another order), a part of
# the gradient's largest element, and one of the largest of all. (Some models compute in float32
# here and there, whatever they are kept in.)
ROUNDINGS = 100
TOLERANCE = {torch.float64: (1e-5, 1e-8), torch.float32: (1e-4, 1e-7)}
# What to look at, by the axis that cuts the model.
CHECKS = {
    "pipeline": "that the loss is made of what the last block returns",
    "context": (
        "that the workload's context cuts all that lies along the sequence, positions too, "
        "that only attention looks at several tokens, and that it calls "
        "F.scaled_dot_product_attention (transformers: attn_implementation='sdpa')"
    ),
    "tensor": (
        "that the workload's splits fit its model, with each number of heads and channels as a "
        "'number', and that the loss reads no weight by itself (use weight_decay for a penalty)"
    ),
    "sequence": (
        "that each module of a block looks at one position at a time or is a 'branch', and that "
        "'norm' is said of those in blocks, 'whole' of the others"
    ),
}
FEW = 1 << 16  # elements of a gradient that are looked at, evenly spread: all of a router's
LOSS = "the loss"

Values = dict[str, Tensor]  # of gradients, by the parameters' names, and of the loss


@dataclass(frozen=True)
class Expected:
    """What one process computes, and by how much the ranks' may differ from it."""

    values: Values
    allowed: Mapping[str, float]
    hidden: float  # a difference that may not be seen, as a part of a gradient's largest element


def check(config: Config, workload: Workload, world: World) -> None:
    """Refuse a model that has other gradients where ranks cut it. A collective."""
    found, _ = builders.axes_of(config, world)
    if found is None or found.model_ranks == 1:
        return
    if workload.refuse is not None:
        workload.refuse(config, found, world.device)
    complaint = _complaint(config, workload, world, found)
    gc.collect()  # a model and its hooks are a ring
    if complaints := [text for text in world.gather(complaint) if text]:
        raise UsageError(complaints[0])


def _complaint(config: Config, workload: Workload, world: World, found: Axes) -> str:
    for dtype in TOLERANCE:
        worlds.seed(config.training.seed)
        model = workload.make_model()
        refuse_unsupported(model, world.size)
        sample = builders.sample(config, workload, world, dtype)
        assert sample is not None
        elements = sum(t.numel() for t in tensors_of(sample.inputs))
        is_dear = elements * sum(p.numel() for p in model.parameters()) > DEAR
        if is_dear and dtype == torch.float64:
            continue
        model = cast_model(model, world.device, dtype)
        training = structs.replace(config.training, compile="none")
        builders.prepare_blocks(model, workload, training)
        # Some schedules of pipelines need several micro-batches.
        batches = [sample] * (config.accumulate if found.pipeline > 1 else 1)
        expected = _expected(model, workload, batches, dtype, world)
        if expected is not None:
            with _refused(found):
                values = _of_ranks(model, config, workload, world, batches)
            note = (
                "the gradients of the ranks' parts were compared with the whole model's in "
                f"float32: an error of {expected.hidden:.0e} of a gradient's largest element "
                "could not be told from rounding"
            )
            if dtype != torch.float64 and world.rank == 0:
                world.tell({"note": note})
            return _worst(expected, values, found)
    note = (
        "whether the ranks' parts have the whole model's gradients was not checked: one "
        "process could not compute those of a single sample, or two passes differed"
    )
    if world.rank == 0:
        world.tell({"note": note})
    return ""


# ------------------------------------------------------------------ one process


def _expected(
    model: nn.Module,
    workload: Workload,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    world: World,
) -> Expected | None:
    """None: it cannot be run like this, or draws random numbers in evaluation too."""
    for quieten in (loss_additivity.still, nn.Module.eval):
        quieten(model)
        expected = None
        try:
            before = _gradients(model, workload, batches, chance=1)
            _nudge(model)
            after = _gradients(model, workload, batches, chance=2)
            expected = _compared(before, after, dtype)
        except UsageError:
            raise
        except Exception:  # an operator without float64, or too little memory for one
            model.zero_grad()
        if all(world.gather(expected is not None)):
            return expected
    return None


def _gradients(
    model: nn.Module, workload: Workload, batches: Sequence[Batch], chance: int
) -> Values:
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    count = max(1, sum(batch.count for batch in batches))
    total = 0.0
    with probing(model):
        torch.manual_seed(chance)
        for batch in batches:
            loss = workload.loss(model, batch)
            (loss / count).backward()
            total += float(loss.detach()) / count
    found: Values = {LOSS: torch.tensor(total, dtype=torch.float64)}
    for name, p in model.named_parameters():
        if p.grad is not None and name in trained:
            found[name] = _few(p.grad)
        p.grad = None
    return found


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    """Move each parameter by its last bit, up or down, alike on every rank."""
    torch.manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point() or p.is_complex():
            up_or_down = torch.rand(p.shape, dtype=torch.float64, device=p.device).sub_(0.5).sign_()
            p.mul_(1 + torch.finfo(p.dtype).eps * up_or_down)


def _compared(before: Values, after: Values, dtype: torch.dtype) -> Expected | None:
    of_itself, of_all = TOLERANCE[dtype]
    sizes = {name: _largest(value) for name, value in after.items()}
    top = max(size for name, size in sizes.items() if name != LOSS)
    allowed = {
        name: ROUNDINGS * _apart(before.get(name), after[name]) + of_itself * size + of_all * top
        for name, size in sizes.items()
    }
    hidden = max(allowed[n] / size for n, size in sizes.items() if size > 1e-3 * top)
    is_finite = all(map(math.isfinite, allowed.values()))
    is_steady = before.keys() == after.keys() and is_finite and hidden < 0.1
    return Expected(after, allowed, hidden) if is_steady else None


def _few(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[:: 1 + gradient.numel() // FEW].clone()


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference between two gradients; None is one of zeros."""
    if one is None or other is None:
        return max((_largest(t) for t in (one, other) if t is not None), default=0.0)
    return _largest(one - other)


# ------------------------------------------------------------------ the ranks


def _of_ranks(
    model: nn.Module,
    config: Config,
    workload: Workload,
    world: World,
    batches: Sequence[Batch],
) -> Values:
    """By the run's axes; replicas share their gradients in the plainest way."""
    make = builders.resolve_strategy(config)
    options = {k: v for k, v in config.strategy.options.items() if k in axes.OPTIONS}
    undivided = structs.replace(config.strategy, options=options)
    plain = structs.replace(config, strategy=undivided)
    setup = Setup(
        model,
        optimizers.of_class(torch.optim.SGD, lr=0.0),
        workload.loss,
        world.mesh,
        blocks=workload.blocks_of(model),
        ranks_per_node=world.ranks_per_node,
        sample=batches[0],
        splits=workload.splits_of(model),
        context=context_of(workload, model),
    )
    strategy = builders.on_axes(
        plain, make if issubclass(make, CutModel) else CutModel, setup, world
    )
    loss = strategy.gradients(batches)
    found = {LOSS: loss}
    found |= {name: _few(g) for name, g in strategy.full_grads().items() if g is not None}
    strategy.settle()
    return found


@contextmanager
def _refused(cut: Axes) -> Iterator[None]:
    """An error of the ranks' parts is a refusal. It is raised at once, on the rank that meets it:
    the others may be waiting for this one."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if any(words in str(error).lower() for words in LOST_PEER):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        problem = f"one sample fails in the ranks' parts of the model, and not in the whole: {said}"
        raise UsageError(_refusal(cut, problem)) from error


def _worst(expected: Expected, found: Values, cut: Axes) -> str:
    """What is furthest from what one process has, in words; empty if nothing is too far."""
    apart = {
        name: _apart(found.get(name), expected.values.get(name))
        for name in {**found, **expected.values}
    }
    smallest = min(expected.allowed.values())  # of what has no gradient in one process
    excess = {n: far / expected.allowed.get(n, smallest) for n, far in apart.items()}
    wrong = [name for name, times in excess.items() if not times <= 1]
    if not wrong:
        return ""
    name = max(wrong, key=lambda name: excess[name])
    largest = _largest(expected.values[name]) if name in expected.values else 0.0
    what = name if name == LOSS else f"the gradient of '{name}'"
    several = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    return _refusal(
        cut,
        f"{what} differs by {apart[name]:.2g} from that of one process, whose largest element is "
        f"{largest:.2g}{several}, for one sample",
    )


def _refusal(cut: Axes, problem: str) -> str:
    sizes = {axis: size for axis in axes.CUTS if (size := getattr(cut, axis)) > 1}
    axes_cut = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    looked_at = [*sizes, "sequence"] if cut.sequence else [*sizes]
    checks = "; ".join(words for axis, words in CHECKS.items() if axis in looked_at)
    return (
        f"{axes_cut}: {problem}. Check {checks}. Leave out auxiliary losses, such as that of a "
        "mixture of experts' router (output_router_logits=False), or use a strategy that keeps the "
        "model whole, such as zero3"
    )
