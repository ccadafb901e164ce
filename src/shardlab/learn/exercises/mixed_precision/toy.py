"""What the learner's ``ScaledUpdate`` is put through, and what one process makes of the same.

The loss is linear in the model's output, with a weight for each: the weight alone decides whether a
gradient vanishes in fp16, is ordinary or overflows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn.exercise import Case, Rejected

SAMPLES, INPUTS, HIDDEN, OUTPUTS = 4, 6, 8, 4
MOMENTUM = 0.9
FP16_MAX = 65504.0


class Toy(nn.Module):
    """A frozen parameter in the middle, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, HIDDEN)
        self.gain = nn.Parameter(torch.full((HIDDEN,), 0.5), requires_grad=False)
        self.out = nn.Linear(HIDDEN, OUTPUTS)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:  # (samples, inputs)
        result: Tensor = self.out(torch.relu(self.inner(x)) * self.gain)
        return result


def make_toy() -> Toy:
    """The same on every rank: this exercise is not about the broadcast."""
    torch.manual_seed(7)
    return Toy()


def batch(size: float, scale: float, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Samples, and the weights of the outputs: their mean absolute value is ``size``.

    A ``size`` of 0 stands for an overflow: at this scale the bias' gradient is 1.5 times the
    largest fp16 number, at half of it it fits. No single sample's gradient is too large: it is
    their sum.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = 0.2 * torch.rand(SAMPLES, INPUTS, generator=generator)
    if size == 0:
        return x, torch.full((SAMPLES, OUTPUTS), 1.5 * FP16_MAX * OUTPUTS / scale)
    return x, size * (0.5 + torch.rand(SAMPLES, OUTPUTS, generator=generator))


def loss_of(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        y = model(x)  # (samples, outputs), float16
    loss: Tensor = (y.float() * weights).mean()
    return loss


def trained(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if name.startswith(("inner", "out"))]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in trained(model)])


def untouched(model: nn.Module) -> list[float]:
    return [float(v) for n, p in model.named_parameters() if n.startswith(("gain", "unused"))
            for v in p.detach().float().reshape(-1)]  # fmt: skip


# ------------------------------------------------------------------ one process


def gradient(model: nn.Module, data: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Of one rank's loss times ``scale``, in fp16 where autocast has it so."""
    grads = torch.autograd.grad(loss_of(model, *data) * scale, trained(model))
    return torch.cat([g.reshape(-1) for g in grads])


def clipped(g: Tensor, norm: float) -> Tensor:
    return g * min(1.0, norm / (float(g.double().norm()) + 1e-6))


def mistakes(scaled: Sequence[Tensor], unscaled: Sequence[Tensor], own: int, scale: float,
             clip: float, last: Tensor | None) -> dict[str, Tensor]:  # fmt: skip
    """The gradient that would reach the optimizer by each known mistake."""
    n = len(scaled)
    total = torch.stack(list(scaled)).sum(0)
    found = {
        "not-averaged": clipped(total / scale, clip),
        "not-communicated": clipped(scaled[own] / scale, clip),
        "not-unscaled": clipped(total / n, clip),
        "clipped-before-unscaling": clipped(total / n, clip) / scale,
        "clipped-locally": sum((clipped(g / scale, clip) for g in scaled), torch.zeros(())) / n,
        "not-clipped": total / n / scale,
        "unscaled-twice": clipped(total / n / scale**2, clip),
        "not-scaled": clipped(torch.stack(list(unscaled)).mean(0), clip),
        "not-scaled-but-unscaled": clipped(torch.stack(list(unscaled)).mean(0) / scale, clip),
    }
    if last is not None:
        found["gradients-kept"] = clipped((total / n + last) / scale, clip)
    return found


class Reference:
    """One process with every rank's samples: SGD with momentum on flat vectors."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.options = case.options
        self.model = copy.deepcopy(model)
        self.scale = float(case.options["scale"])
        self.good = 0
        self.momentum: Tensor | None = None
        self.last: Tensor | None = None  # the gradient of the step before, if it updated

    def after(self, g: Tensor) -> Tensor:
        """The parameters if ``g`` is what the optimizer is given."""
        held = g if self.momentum is None else MOMENTUM * self.momentum + g
        rate: float = self.options["lr"]
        return flat(self.model) - rate * held

    def step(self, data: Sequence[tuple[Tensor, Tensor]], own: int) -> dict[str, Any]:
        scale, clip = self.scale, self.options["clip_norm"]
        scaled = [gradient(self.model, d, scale) for d in data]
        unscaled = [gradient(self.model, d, 1.0) for d in data]
        mean = torch.stack(scaled).sum(0) / (len(scaled) * scale)
        before = flat(self.model)
        wrong = mistakes(scaled, unscaled, own, scale, clip, self.last)
        row = {
            "before": before.tolist(),
            "overflows": [r for r, g in enumerate(scaled) if not bool(g.isfinite().all())],
            "mistakes": {name: self.after(g).tolist() for name, g in wrong.items()},
            "moved_by_zeros": self.after(torch.zeros_like(mean)).tolist(),
        }
        if row["overflows"]:
            self.scale, self.good, self.last = scale / 2, 0, None
        else:
            g = clipped(mean, clip)
            new = self.after(g)
            self.momentum = g if self.momentum is None else MOMENTUM * self.momentum + g
            self._set(new)
            self.last, self.good = g, self.good + 1
            if self.good == self.options["growth_interval"]:
                self.scale, self.good = scale * 2, 0
        return row | {"params": flat(self.model).tolist(), "scale": self.scale}

    def _set(self, values: Tensor) -> None:
        params = trained(self.model)
        with torch.no_grad():
            for p, piece in zip(params, values.split([p.numel() for p in params]), strict=True):
                p.copy_(piece.view_as(p))


# ------------------------------------------------------------------ on a rank


def run(case: Case, rank: int, submission: ModuleType) -> dict[str, Any]:
    make = getattr(submission, "ScaledUpdate", None)
    if make is None:
        raise Rejected("missing", "your file has no class ScaledUpdate")
    options = case.options
    model = make_toy()
    reference = Reference(case, model)
    optimizer = torch.optim.SGD(trained(model), lr=options["lr"], momentum=MOMENTUM)
    update = make(
        model,
        optimizer,
        scale=options["scale"],
        growth_interval=options["growth_interval"],
        clip_norm=options["clip_norm"],
    )
    rows = []
    others = untouched(model)
    for i, sizes in enumerate(options["steps"]):
        data = [batch(size, reference.scale, r, i) for r, size in enumerate(sizes)]
        expected = reference.step(data, rank)
        start = flat(model).tolist()
        returned = update.step(loss_of(model, *data[rank]))
        rows.append(
            {
                "expected": expected,
                "start": start,
                "returned": returned if isinstance(returned, bool) else repr(returned),
                "scale": _number(update),
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
                "params": flat(model).tolist(),
                "others_moved": untouched(model) != others,
            }
        )
    return {"steps": rows}


def _number(update: Any) -> float | str:
    try:
        return float(update.scale)
    except (AttributeError, TypeError, ValueError):
        return repr(getattr(update, "scale", "missing"))
