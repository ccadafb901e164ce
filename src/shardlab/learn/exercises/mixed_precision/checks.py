"""Loss scaling: which step was the first to go wrong, and by which mistake.

The toy's loss is linear in its output, with a weight for each: the weight alone decides whether a
gradient vanishes in fp16, is ordinary or overflows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from shardlab.learn.exercise import Case, Finding, Row, Rows, Stage, each_step, judging, say
from shardlab.learn.toys import clipped

SAMPLES, INPUTS, HIDDEN, OUTPUTS = 4, 6, 8, 4
MOMENTUM = 0.9
FP16_MAX = 65504.0
TOLERANCE = 1e-5  # of a step's update: in fp32, and the scale is a power of two
OVERFLOW = 0.0  # in place of a gradient's size: see ``batch``

# steps: the size of each rank's gradients in each step.
CASES = (
    Case("large gradients", 2, {"scale": 1024.0, "growth_interval": 100, "clip_norm": 0.1,
                                "lr": 1.0, "steps": [[8.0, 0.5], [1.0, 6.0]]}),
    # Gradients of 1e-8 are 0 in fp16. The learning rate makes their update visible in fp32.
    Case("tiny gradients", 2, {"scale": 65536.0, "growth_interval": 100, "clip_norm": 1.0,
                               "lr": 1e6, "steps": [[2e-7, 1e-7]]}),
    Case("overflow on one rank", 2, {"scale": 65536.0, "growth_interval": 100, "clip_norm": 10.0,
                                     "lr": 0.1, "steps": [[0.5, 0.3], [0.4, OVERFLOW], [0.3, 0.4],
                                                          [OVERFLOW, 0.4], [0.2, 0.1]]}),
    Case("the scale's course", 2, {"scale": 1024.0, "growth_interval": 3, "clip_norm": 10.0,
                                   "lr": 0.1, "steps": [[0.5, 0.3], [0.3, 0.4], [0.4, OVERFLOW],
                                                        [0.3, 0.4], [0.2, 0.1], [0.3, 0.1],
                                                        [0.1, 0.3], [0.2, 0.3], [0.3, 0.2],
                                                        [0.1, 0.2]]}),
)  # fmt: skip


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


def batch(size: float, scale: float, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Samples, and the weights of the outputs: their mean absolute value is ``size``.

    ``OVERFLOW``: at this scale the bias' gradient is 1.5 times the largest fp16 number, at half of
    it it fits. No single sample's gradient is too large: it is their sum.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = 0.2 * torch.rand(SAMPLES, INPUTS, generator=generator)
    if size == OVERFLOW:
        return x, torch.full((SAMPLES, OUTPUTS), 1.5 * FP16_MAX * OUTPUTS / scale)
    return x, size * (0.5 + torch.rand(SAMPLES, OUTPUTS, generator=generator))


def loss_of(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        y = model(x)  # (samples, outputs), float16
    loss: Tensor = (y.float() * weights).mean()
    return loss


def used(model: Toy) -> list[nn.Parameter]:
    return [*model.inner.parameters(), *model.out.parameters()]


def vector(tensors: Iterable[Tensor]) -> Tensor:
    """All their values: (elements,)."""
    return torch.cat([t.detach().float().reshape(-1) for t in tensors])


# ------------------------------------------------------------------ one process


class OneProcess:
    """One process with every rank's samples: SGD with momentum on flat vectors."""

    def __init__(self, options: Mapping[str, Any], model: Toy) -> None:
        self.options = options
        self.model = copy.deepcopy(model)
        self.scale = float(options["scale"])
        self.good = 0
        self.skipped = False  # the step before
        self.momentum = torch.zeros(())
        self.last: Tensor | None = None  # the gradient of the step before, if it updated

    def step(self, data: Sequence[tuple[Tensor, Tensor]], own: int) -> dict[str, Any]:
        """What is right after the step, and what each known mistake would lead rank ``own`` to."""
        scale = self.scale
        scaled = torch.stack([self._gradient(d, scale) for d in data])  # (ranks, elements)
        wrong = self._mistakes(scaled, data, own)
        row = {
            "scale_before": scale,
            "after_skip": self.skipped,
            "before": vector(used(self.model)),
            "overflows": [r for r, g in enumerate(scaled) if not g.isfinite().all()],
            "mistakes": {name: self._after(g) for name, g in wrong.items()},
            "moved_by_zeros": self._after(torch.zeros(())),
        }
        self.skipped = bool(row["overflows"])
        if self.skipped:
            self.scale, self.good, self.last = scale / 2, 0, None
        else:
            g = clipped(scaled.mean(0) / scale, self.options["clip_norm"])
            vector_to_parameters(self._after(g), used(self.model))
            self.momentum, self.last, self.good = MOMENTUM * self.momentum + g, g, self.good + 1
            if self.good == self.options["growth_interval"]:
                self.scale, self.good = scale * 2, 0
        return row | {"right": vector(used(self.model)), "right_scale": self.scale}

    def _gradient(self, data: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """The gradient of one rank's loss times ``scale``, in fp16 where autocast uses it."""
        return vector(torch.autograd.grad(loss_of(self.model, *data) * scale, used(self.model)))

    def _after(self, g: Tensor) -> Tensor:
        """The parameters if ``g`` is what the optimizer is given."""
        rate: float = self.options["lr"]
        return vector(used(self.model)) - rate * (MOMENTUM * self.momentum + g)

    def _mistakes(
        self, scaled: Tensor, data: Sequence[tuple[Tensor, Tensor]], own: int
    ) -> dict[str, Tensor]:
        """The gradient that would reach the optimizer by each known mistake."""
        scale, clip, mean = self.scale, self.options["clip_norm"], scaled.mean(0)
        unscaled = torch.stack([self._gradient(d, 1.0) for d in data]).mean(0)
        found = {
            "not-averaged/scaled": clipped(scaled.sum(0) / scale, clip),
            "not-communicated/scaled": clipped(scaled[own] / scale, clip),
            "not-unscaled": clipped(mean, clip),
            "clipped-before-unscaling": clipped(mean, clip) / scale,
            "clipped-locally": torch.stack([clipped(g / scale, clip) for g in scaled]).mean(0),
            "not-clipped/scaled": mean / scale,
            "unscaled-twice": clipped(mean / scale**2, clip),
            "not-scaled": clipped(unscaled, clip),
            "not-scaled-but-unscaled": clipped(unscaled / scale, clip),
        }
        if self.last is not None:
            found["gradients-kept/scaled"] = clipped((mean + self.last) / scale, clip)
        return found


# ------------------------------------------------------------------ on a rank


def run(at: Stage) -> dict[str, Any]:
    options = dict(at.options)
    lr, steps = options.pop("lr"), options.pop("steps")
    torch.manual_seed(7)  # the same on every rank: this exercise is not about the broadcast
    model = Toy()
    one = OneProcess(at.options, model)
    optimizer = torch.optim.SGD(used(model), lr=lr, momentum=MOMENTUM)
    update = at.submission.ScaledUpdate(model, optimizer, **options)
    others = [model.gain, *model.unused.parameters()]  # no gradient reaches them
    rows, untouched = [], vector(others)
    for i, sizes in enumerate(steps):
        data = [batch(size, one.scale, r, i) for r, size in enumerate(sizes)]
        row, start = one.step(data, at.rank), vector(used(model))
        returned = update.step(loss_of(model, *data[at.rank]))
        rows.append(
            row
            | {
                "start": start,
                "returned": returned if isinstance(returned, bool) else repr(returned),
                "scale": _number(update),
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}),
                "params": vector(used(model)),
                "others_moved": not torch.equal(vector(others), untouched),
            }
        )
    return {"steps": rows}


def _number(update: Any) -> float | str:
    try:
        return float(update.scale)
    except (AttributeError, TypeError, ValueError):
        return repr(getattr(update, "scale", "missing"))


# ------------------------------------------------------------------ what went wrong


@each_step
def look(rows: Rows, step: int) -> Finding | None:
    """Up to the first wrong step: what comes after follows from it."""
    over = rows[0]["overflows"]
    found = _others(rows) or (_skip(rows, over[0]) if over else _update(rows))
    return found and Finding(found.cause, f"step {step + 1}: {found.message}")


judge = judging(look)


def _others(rows: Rows) -> Finding | None:
    for rank, row in enumerate(rows):
        if row["dtypes"] != ["float32"]:
            return say("weights-not-fp32", dtypes=", ".join(row["dtypes"]))
        if row["others_moved"]:
            return say("changed-others", rank=rank)
    return None


def _skip(rows: Rows, over: int) -> Finding | None:
    """The gradients of rank ``over`` overflow: everybody must skip the step."""
    scale = rows[0]["scale_before"]
    if broken := [r for r, row in enumerate(rows) if not _finite(row["params"])]:
        return say("not-skipped/broken", over=over, ranks=_ranks(broken))
    moved = [r for r, row in enumerate(rows) if row["params"] != row["start"]]
    if moved and all(_near(rows[r], rows[r]["moved_by_zeros"]) for r in moved):
        return say("moved-on-skip", over=over)
    if moved and len(moved) < len(rows):
        stayed = _ranks(r for r in range(len(rows)) if r not in moved)
        return say("ranks-disagree/skip", over=over, stayed=stayed, moved=_ranks(moved))
    if moved:
        return say("not-skipped", over=over)
    scales = [row["scale"] for row in rows]
    if len(set(scales)) > 1:
        return say("ranks-disagree/scale", over=over, scales=_by_rank(scales))
    for row in rows:
        if row["returned"] is not False:
            return say("wrong-return/skipped", over=over, returned=row["returned"])
    if scales[0] == scale / 2:
        return None
    key = "scale-not-reduced" if scales[0] == scale else "scale-wrong/skipped"
    return say(key, over=over, scale=scale, half=scale / 2, is_now=scales[0])


def _update(rows: Rows) -> Finding | None:
    if any(not _finite(row["params"]) for row in rows):
        return say("not-finite/scaled")
    if wrong := [row for row in rows if not _near(row, row["right"])]:
        return _wrong_update(rows, wrong)
    for row in rows:
        if row["returned"] is not True:
            return say("wrong-return", returned=row["returned"])
    before, scales = rows[0]["scale_before"], [row["scale"] for row in rows]
    right = rows[0]["right_scale"]
    if set(scales) == {right}:
        return None
    if right > before and scales[0] == before:
        return say("scale-not-grown", before=before, right=right)
    if right == before and scales[0] == 2 * before:
        return say("skip-not-counted", scale=scales[0])
    return say("scale-wrong", right=right, scales=_by_rank(scales))


def _wrong_update(rows: Rows, wrong: Rows) -> Finding:
    row = wrong[0]
    if row["params"] == row["start"] and row["returned"] is False:
        key = "gradients-kept/skipped" if row["after_skip"] else "skipped-needlessly"
        return say(key)
    for cause in row["mistakes"]:
        if all(_near(each, each["mistakes"][cause]) for each in wrong):
            return say(cause, n=len(rows), scale=row["scale_before"])
    if len({tuple(each["params"]) for each in rows}) > 1:
        return say("ranks-disagree")
    off = math.dist(row["params"], row["right"]) / math.dist(row["right"], row["before"])
    return say("wrong-update/scaled", off=off)


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(v) for v in values)


def _near(row: Row, wanted: Sequence[float]) -> bool:
    """Within the tolerance of the step's length, and of what float32 can tell."""
    length = math.dist(wanted, row["before"])
    rounding = 1e-7 * math.hypot(*wanted)
    return _finite(wanted) and math.dist(row["params"], wanted) <= TOLERANCE * length + rounding


def _ranks(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers))


def _by_rank(values: Sequence[Any]) -> str:
    shown = (f"{v:g}" if isinstance(v, float) else v for v in values)
    return ", ".join(f"{value} on rank {r}" for r, value in enumerate(shown))
