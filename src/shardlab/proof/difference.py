"""A run of a strategy beside one process: how far apart, and what the difference looks like."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardlab.proof.reference import Reference, wide
from shardlab.proof.subjects import sample

Tensors = Mapping[str, Tensor | None]


@dataclass
class ComparedRun:
    """A run as seen from outside."""

    reference: Reference | None
    digests: dict[str, str] = field(default_factory=dict)  # of every tensor of every step
    first: dict[str, Any] | None = None  # difference from one process
    worst: dict[str, Any] = field(default_factory=lambda: {"ulp": 0.0, "where": None})
    looked: set[int] = field(default_factory=set)  # steps whose gradients were compared
    unwaited: list[str] = field(default_factory=list)  # collectives still under way after step()

    def start(self, tensors: Tensors) -> None:
        """Before the first step."""
        self._note(None, "parameter", tensors)
        if self.reference is not None:
            self._compare(None, "parameter", tensors, self.reference.start)

    def gradients(self, step: int, loss: Tensor, gradients: Tensors | None) -> None:
        """After ``gradients()``; ``gradients`` is None where they were not looked at."""
        self._note(step, "loss", {"": loss})
        self._note(step, "gradient", gradients or {})
        if self.reference is None:
            return
        want, is_new = self.reference, self.first is None
        if gradients is not None:
            self.looked.add(step)
            self._compare(step, "gradient", gradients, want.gradients[step])
            if is_new and self.first is not None:  # says more about the cause than the loss
                mixture = mixture_of(gradients, want.parts[step], self.first["tensor"])
                self.first["mixture"] = mixture
        self._compare(step, "loss", {"": loss}, {"": want.losses[step]})

    def tensors(self, step: int, tensors: Tensors) -> None:
        """Parameters and buffers after the step."""
        self._note(step, "parameter", tensors)
        if self.reference is not None:
            want, is_new = self.reference, self.first is None
            before = want.tensors[step - 1] if step else want.start
            self._compare(step, "parameter", tensors, want.tensors[step], before)
            if is_new and self.first is not None:
                self.first["gradients_equal"] = step in self.looked

    def _note(self, step: int | None, kind: str, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            content = b"none" if tensor is None else tensor.detach().cpu().numpy().tobytes()
            digest = hashlib.blake2b(content, digest_size=8).hexdigest()
            self.digests[_place(step, kind, name)] = digest

    def _compare(
        self,
        step: int | None,
        kind: str,
        got: Tensors,
        want: Tensors,
        before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep the largest error, and the first that is too large."""
        reference = self.reference
        assert reference is not None
        tolerance = reference.scale.tolerance
        for name in (*want, *(name for name in got if name not in want)):
            unit = reference.unit(step, kind, name)
            if name not in got or name not in want:
                error, looks = math.inf, {"missing": name not in got}
            else:
                error, looks = ulps(got[name], want[name], unit), {}
            if not error <= self.worst["ulp"]:
                self.worst = {"ulp": error, "where": _place(step, kind, name)}
            if self.first is None and not error <= tolerance:
                old = None if before is None else before.get(name)
                looks = looks or compare(got[name], want[name], tolerance * unit, old)
                where = {"step": step, "kind": kind, "tensor": name}
                self.first = {**where, "ulp": error, **looks}


def _place(step: int | None, kind: str, name: str) -> str:
    when = "start" if step is None else f"step {step}"
    return f"{when}: {kind} {name}".rstrip()


def ulps(got: Tensor | None, want: Tensor | None, unit: Tensor) -> float:
    """The largest error in units, of which there is one for all elements or one for each."""
    if got is None or want is None:
        return 0.0 if got is want else math.inf
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    away = (wide(got) - wide(want)).abs().masked_fill(got == want, 0.0)  # also where both are inf
    error = (away / unit.to(want.device)).max().item()
    return error if math.isfinite(error) else math.inf


def compare(
    got: Tensor | None, want: Tensor | None, allowed: Tensor, before: Tensor | None = None
) -> dict[str, Any]:
    """Two tensors that differ, side by side; ``before``: what they were a step ago."""
    if got is None or want is None:
        return {"none": "one process" if want is None else "the strategy"}
    if got.shape != want.shape:
        return {"shapes": [list(got.shape), list(want.shape)]}
    a, b = wide(got).reshape(-1), wide(want).reshape(-1)
    old = torch.zeros_like(b) if before is None else wide(before).reshape(-1)
    limit = allowed.to(b.device).expand(want.shape).reshape(-1)
    differs = ~((a - b).abs() <= limit)
    where = differs.nonzero().reshape(-1)

    def is_shifted(by: int) -> bool:
        """The values, or what the step has added to them."""
        pairs = ((a.roll(-by), b), ((a - old).roll(-by), b - old))
        close = [((x - y).abs() <= limit)[differs] for x, y in pairs]
        return max(c.double().mean().item() for c in close) > 0.9

    return {
        "error": (a - b).abs().max().item(),
        "ratio": ratio_of(a, b, _exact(want)),
        "elements": len(where),
        "of": len(a),
        "first": int(where[0]),
        "last": int(where[-1]),
        "shift": next((s for s in (1, -1) if len(where) > 2 and is_shifted(s)), 0),
        "stale": before is not None and bool((a == old)[differs].all()),
        "finite": bool(a.isfinite().all()),
    }


def _exact(tensor: Tensor) -> float:
    """A part of the whole that is rounding."""
    return 1e-7 if tensor.dtype in (torch.float64, torch.complex128) else 1e-4


def ratio_of(a: Tensor, b: Tensor, exact: float = 1e-7) -> float | None:
    """What ``b`` was multiplied with to give ``a``, if with one number."""
    if not (a.isfinite().all() and b.norm() > 0):
        return None
    if a.is_complex():
        a, b = torch.view_as_real(a).reshape(-1), torch.view_as_real(b).reshape(-1)
    ratio = float(a @ b / (b @ b))
    return ratio if (a - ratio * b).norm() <= exact * a.norm() else None


def mixture_of(
    got: Tensors, parts: Sequence[Mapping[str, Tensor]], tensor: str
) -> list[float | None] | None:
    """How often each micro-batch of each rank is in the gradients: all once, if they are right.

    By least squares over sampled elements, of all gradients or, if that explains nothing, of
    ``tensor`` alone. A micro-batch without a gradient has no number.
    """
    known = [n for n, gradient in got.items() if gradient is not None and not gradient.is_complex()]
    # One small tensor that is wrong does not show in the fit of them all, nor one element in that
    # of its tensor: what was sampled is right.
    fits = (_fit(got, parts, names) for names in (known, [n for n in known if n == tensor]))
    return next((f for f in fits if f is not None and not _all_once(f)), None)


def _all_once(mixture: Sequence[float | None]) -> bool:
    return all(times is None or abs(times - 1) < 1e-6 for times in mixture)


def _fit(
    got: Tensors, parts: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> list[float | None] | None:
    samples = {n: sample(gradient) for n in names if (gradient := got[n]) is not None}
    if not samples:
        return None
    target = torch.cat(list(samples.values())).cpu()  # (elements,)
    exact, target = _exact(target), target.double()
    columns = [
        torch.cat([part.get(n, torch.zeros_like(s)) for n, s in samples.items()]).cpu().double()
        for part in parts
    ]
    real = [i for i, column in enumerate(columns) if column.abs().max() > 0]
    if not real or len(target) <= len(real) or not target.isfinite().all():
        return None
    matrix = torch.stack([columns[i] for i in real], dim=1)  # (elements, micro-batches)
    answer = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution
    if (matrix @ answer - target[:, None]).norm() > exact * target.norm():
        return None
    found: list[float | None] = [None] * len(parts)
    for i, value in zip(real, answer.flatten().tolist(), strict=True):
        found[i] = value
    return found
