"""Whether a loss adds up: the loss of a batch, compared with the losses of its parts.

Ranks share a batch, so its loss must be made of theirs. A sum is; a mean is, times its count. A
loss that looks at the samples together (dice, contrastive) is not, and no strategy can make it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardlab.data.loader import cast
from shardlab.workloads.base import Batch, LossFn, map_tensors, tensors_of

SAMPLES = 6  # that are looked at
DRAWS = 24  # times that a random loss is computed
# By the loss's dtype: some models compute in float32 or in half precision in any case.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF = 3e-2
ALIKE = 0.03  # rules that are off by less than this part of the tolerance look the same
STANDARD_ERRORS = 6.0

SUM, MEAN, NEITHER, PENALTY = "sum", "mean", "neither", "sum and a constant"
Count = Callable[[Batch], int]


@dataclass(frozen=True)
class Finding:
    kind: str
    counts: tuple[str, ...] = ()  # of a mean, the rules that may count its targets; likelier first
    note: str = ""  # why it could not be measured to the end, if it could not
    evidence: str = ""


@dataclass
class Bench:
    """A model and its loss, to be measured; the model's mode is the caller's to choose."""

    model: nn.Module
    loss: LossFn
    make: Callable[[Sequence[int]], Batch]
    device: torch.device
    dtype: torch.dtype
    most_draws: int = DRAWS  # if the loss is random
    draws: int = 1
    seed: int = 0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        self.tolerance = TOLERANCE[self.dtype]

    def batch(self, ids: Sequence[int]) -> Batch:
        return cast(self.make(ids), self.dtype).to(self.device)

    def values(self, batch: Batch) -> Any:
        """The loss of a batch, as often as it must be drawn: (draws,)."""
        found = []
        for _ in range(self.draws):
            self.seed += 1
            torch.manual_seed(self.seed)
            # Not under no_grad: a gradient penalty asks for gradients.
            loss = self.loss(self.model, batch)
            self.tolerance = max(self.tolerance, TOLERANCE.get(loss.dtype, HALF))
            found.append(float(loss.detach()))
        return np.array(found)

    def changes(self, batch: Batch, value: float) -> bool:
        """Whether the loss of a batch, which was ``value``, is another now."""
        again = self.values(batch)
        allowed = 1e-2 * self.tolerance * (np.abs(again) + abs(value))
        return bool((np.abs(again - value) > allowed).any())


def splits(ids: Sequence[int]) -> list[list[Sequence[int]]]:
    """Ways to share the samples out; parts of one sample only if there are few."""
    if len(ids) < 4:
        return [[ids[:1], ids[1:]]]
    half = len(ids) // 2
    found = [[ids[:half], ids[half:]], [ids[::2], ids[1::2]]]
    if len(ids) >= 6:
        found += [[ids[:2], ids[2:]], [ids[:2], ids[2:4], ids[4:]]]
    return found


def measure(bench: Bench, ids: Sequence[int], rules: Mapping[str, Count]) -> Finding:
    """Whether the loss is a sum, a mean by one of the rules, or neither; if random, most likely."""
    whole = bench.batch(ids)
    if bench.changes(whole, float(bench.values(whole)[0])):
        bench.draws = bench.most_draws
    total = bench.values(whole)
    if not np.isfinite(total).all():
        note = f"the loss of samples {list(ids)} is {total[0]}, so whether it adds up"
        return Finding(SUM, note=f"{note} could not be measured")
    parts_of = [[bench.batch(part) for part in split] for split in splits(ids)]
    values_of = [[bench.values(part) for part in parts] for parts in parts_of]
    tolerance = bench.tolerance

    # How far each explanation is off, in units of what is allowed: at most 1 fits.
    off = {SUM: max(_off(total, values, tolerance) for values in values_of)}
    for name, rule in rules.items():
        off[name] = max(
            _off_mean(rule, whole, total, parts, values, tolerance)
            for parts, values in zip(parts_of, values_of, strict=True)
        )
    evidence = (
        f"of {len(ids)} samples together it is {total.mean():.6g}, of "
        f"{' and '.join(str(p.samples) for p in parts_of[0])} of them "
        f"{' and '.join(f'{v.mean():.6g}' for v in values_of[0])}"
    )
    if not any(v.any() for values in values_of for v in values):
        note = "the loss of the samples that were tried is 0, so a sum and a mean look alike"
        return Finding(SUM, note=note)
    nearest = min(off, key=lambda name: off[name])
    # At the start a loss may be nearly the same for all targets, so that every rule fits: the best.
    best = max(ALIKE, 10 * min((off[name] for name in rules), default=math.inf))
    fitting = tuple(name for name in rules if off[name] <= min(1, best))
    likely = Finding(SUM) if nearest == SUM else Finding(MEAN, (nearest,))
    if bench.draws > 1 and (off[SUM] <= 1) == bool(fitting):
        note = "the loss is random, and whether it adds up could not be seen through the noise"
        return replace(likely, note=note)
    if off[SUM] <= 1:
        return Finding(SUM, evidence=evidence)
    if fitting:
        return Finding(MEAN, fitting, evidence=evidence)
    if _is_penalty(total, values_of, tolerance):
        return Finding(PENALTY, evidence=evidence)
    if _depends_on_calls(bench, [whole, *chain(*parts_of)], [total, *chain(*values_of)]):
        note = (
            "the loss of the same samples is not the same each time (does forward count its calls, "
            "or draw random numbers now and then?), so whether it adds up could not be measured"
        )
        return replace(likely, note=note)
    if model_couples(bench, ids, splits(ids)[0][0]):
        note = (
            "a sample's output depends on the samples beside it, also in eval mode (padding "
            "without a mask? statistics of the batch?), so the losses of different worlds differ"
        )
        return replace(likely, note=note)
    return Finding(NEITHER, evidence=evidence)


def _off(total: Any, values: Sequence[Any], tolerance: float) -> float:
    """|total - the sum of the values| over what rounding and chance explain."""
    size = np.abs(total).mean() + sum(np.abs(v).mean() for v in values)
    chance = math.sqrt(sum(np.var(v) / len(v) for v in (total, *values)))
    allowed = tolerance * size + STANDARD_ERRORS * chance
    distance = abs(float(total.mean()) - sum(float(v.mean()) for v in values))
    return distance / allowed if allowed else 0.0


def _off_mean(
    rule: Count,
    whole: Batch,
    total: Any,
    parts: Sequence[Batch],
    values: Sequence[Any],
    tolerance: float,
) -> float:
    counts = [rule(part) for part in parts]
    if rule(whole) < 0 or sum(counts) != rule(whole):  # not such targets, or padding is counted
        return math.inf
    # A mean over no targets is NaN, and stands for nothing.
    weighted = [v * n for v, n in zip(values, counts, strict=True) if n]
    if not all(np.isfinite(v).all() for v in weighted):
        return math.inf
    return _off(total * rule(whole), weighted, tolerance)


def _is_penalty(total: Any, values_of: Sequence[Sequence[Any]], tolerance: float) -> bool:
    """Each part has the same amount too much: a term that does not depend on the samples."""
    if len(values_of) < 2 or not all(np.isfinite(v).all() for values in values_of for v in values):
        return False
    size = abs(total[0]) + sum(abs(v[0]) for v in values_of[0])
    extra = [(sum(v[0] for v in vs) - total[0]) / (len(vs) - 1) for vs in values_of]
    return bool(max(extra) - min(extra) <= 2 * tolerance * size)


def _depends_on_calls(bench: Bench, batches: Sequence[Batch], values: Sequence[Any]) -> bool:
    """Whether some loss is another when it is computed again. Twice in a row, so that what happens
    in every n-th call does not happen in both."""
    bench.draws = 2
    return any(bench.changes(b, float(v[0])) for b, v in zip(batches, values, strict=True))


def model_couples(bench: Bench, ids: Sequence[int], part: Sequence[int]) -> bool:
    """Whether the model's own output for some samples changes when others are beside them.

    ``part`` must be the first of ``ids``. Outputs are compared where they overlap, as a longer
    sample beside them makes them longer by padding.
    """
    found = []
    for numbers in (ids, part):
        outputs: list[Any] = []
        handle = bench.model.register_forward_hook(
            lambda _m, _a, out, kept=outputs: kept.append(out)
        )
        try:
            bench.values(bench.batch(numbers))
        finally:
            handle.remove()
        found.append([t.detach() for t in tensors_of(outputs[:1])])
    for a, b in zip(*found, strict=False):
        is_rows = a.dim() == b.dim() > 0 and len(a) == len(ids) and len(b) == len(part)
        if is_rows and a.is_floating_point():
            shared = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
            x, y = a[shared].double(), b[shared].double()
            if not torch.allclose(x, y, rtol=1e-3, atol=float(1e-4 * x.abs().max())):
                return True
    return False


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Add noise to the parameters: a layer that begins with zeros makes all outputs the same."""
    for p in model.parameters():
        if p.is_floating_point() and p.numel():
            spread = float(p.std()) if p.numel() > 1 else 0.0
            p.add_(torch.randn_like(p) * (spread or 0.02))


def still(model: nn.Module) -> nn.Module:
    """The model in train mode, except for dropout and BatchNorm: its loss may fail in eval mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    model.train()
    for module in model.modules():
        if isinstance(module, kinds):
            module.eval()
    return model


def plant(batch: Batch, ids: Sequence[int], first: int, ignored: int) -> Batch | None:
    """The batch with some targets of the sample ``first`` ignored: whether the loss leaves them
    out of its mean shows then. None: its targets are not of a kind that can be ignored."""
    targets = batch.targets
    is_labels = isinstance(targets, Tensor) and targets.dim() and len(targets) == len(ids)
    if not is_labels or targets.is_floating_point() or targets.dtype == torch.bool:
        return None
    if first not in ids:
        return batch
    planted = targets.clone()
    row = list(ids).index(first)
    if planted.dim() == 1:
        planted[row] = ignored
    else:
        planted[row].view(-1)[:1] = ignored  # the first: no next token is predicted there
        if planted[row].numel() > 3:
            planted[row].view(-1)[2] = ignored
    inputs = map_tensors(batch.inputs, lambda t: planted if t is targets else t)
    return replace(batch, inputs=inputs, targets=planted)
