"""From gradients to new parameters: unscale, clip, schedule, step. The same for all strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.phases import OPTIMIZER, phase

SMALLEST_SCALE = 2.0**-8  # gradients that overflow below are wrong, not large


def constant(_step: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Rule:
    """What an update does besides the optimizer's step."""

    clip_norm: float | None = None  # the largest norm of the whole gradient, over all shards
    loss_scale: float | None = None  # fp16: the factor to start with; None disables it
    schedule: Callable[[int], float] = constant  # learning-rate factor of a step, from 0
    on_nonfinite: str = "ignore"  # of a NaN or infinite gradient: "stop", "skip" the update


class NotFinite(Exception):
    """A gradient is NaN or infinite: which of those given, by position."""

    def __init__(self, positions: list[int], given: int) -> None:
        super().__init__(f"{len(positions)} of {given} gradients are not finite")
        self.positions = positions
        self.given = given


class Update:
    """Owns the optimizer. Every decision is made from numbers that all ranks share.

    fp16 gradients vanish below 6e-8, so the loss is multiplied by ``scale`` before backward and
    the gradients are divided by it here. If the norm of the whole gradient is not finite the
    step is skipped and the scale halved; after ``GROW_AFTER`` good steps it doubles. The norm is
    that of the summed gradient, so ranks cannot disagree.
    """

    GROW_AFTER = 2000

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule) -> None:
        self.optimizer = optimizer
        self.rule = rule
        self.device = optimizer.param_groups[0]["params"][0].device
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.begun_with = [  # the optimizer's options, some of which its step() may count up
            {k: v for k, v in group.items() if k != "params"} for group in self.inner.param_groups
        ]
        self.calls = 0
        self.steps = 0  # taken; skipped ones do not count
        self.scale = rule.loss_scale or 1.0
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0  # steps, for gradients that were not finite
        # Where ranks hold different parts of the model: their group, and the share of each
        # gradient's square that this rank adds to the norm of the whole.
        self._parts: comm.Group | None = None
        self._shares: Callable[[], Sequence[float]] | None = None
        self.last_divisor: Tensor | None = None  # of the step that runs
        self.is_resumed = False  # the optimizer's state was loaded, and no step made since

    def across(self, group: comm.Group, shares: Callable[[], Sequence[float]]) -> None:
        """The gradient's norm is that of the parts of all these ranks. ``shares`` says for each
        gradient which share of its square is this rank's: a half, if two ranks hold it."""
        self._parts, self._shares = group, shares

    @property
    def learning_rate(self) -> float:
        """The rate of the last update: that of the first group, if there are several."""
        return float(self.optimizer.param_groups[0]["lr"])

    def divisor(self, total: Tensor) -> Tensor:
        """Losses are divided by this before backward: the global count over the loss scale."""
        self.last_divisor = total / self.scale
        return self.last_divisor

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor], sharded_over: comm.Group | None = None) -> bool:
        """Update from these gradients: all of them, or this rank's part. False: it was skipped."""
        self.calls += 1
        with phase(OPTIMIZER):
            if self._is_by_norm or self._stops:
                norm = self._norm(gradients, sharded_over)  # ()
                if not self._is_usable(norm, gradients):
                    return False
                self._unscale_and_clip(gradients, norm)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * self.rule.schedule(self.steps)
            self._step()
        self.steps += 1
        self.good_steps += 1
        if self.rule.loss_scale is not None and self.good_steps >= self.GROW_AFTER:
            self.scale, self.good_steps = self.scale * 2, 0
        return True

    @property
    def _is_by_norm(self) -> bool:
        """Whether the update depends on the norm of the whole gradient."""
        rule = self.rule
        is_scaled = rule.clip_norm is not None or rule.loss_scale is not None
        return is_scaled or rule.on_nonfinite == "skip"

    @property
    def _stops(self) -> bool:
        """Whether a gradient that is not finite stops the run. To look at it would synchronize a
        GPU; there the next loss reveals it."""
        is_asked = self.rule.on_nonfinite == "stop" and self.rule.loss_scale is None
        return is_asked and self.device.type != "cuda"

    def _norm(self, gradients: Sequence[Tensor], sharded_over: comm.Group | None) -> Tensor:
        """The norm of the whole gradient if the update depends on it, else of what is here: ()."""
        if not self._is_by_norm:
            return global_norm(gradients, self.device)
        shares = None if self._shares is None else self._shares()
        among = [group for group in (sharded_over, self._parts) if group is not None]
        return global_norm(gradients, self.device, among, shares) / self.scale

    def _is_usable(self, norm: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Whether the norm is finite; if not, the rule stops the run or skips the step. Where it
        does neither, nothing is read: that would synchronize a GPU."""
        rule = self.rule
        reads = self._stops or rule.loss_scale is not None or rule.on_nonfinite == "skip"
        if not reads or math.isfinite(float(norm)):
            return True
        if rule.loss_scale is not None:
            self.scale, self.good_steps = self.scale / 2, 0
            if self.scale < SMALLEST_SCALE:
                raise FloatingPointError(
                    "fp16 gradients are not finite even with a loss scale of "
                    f"{self.scale * 2}: the loss itself overflows; try precision bf16"
                )
        elif self._stops:
            bad = [i for i, g in enumerate(gradients) if not g.isfinite().all()]
            raise NotFinite(bad, len(gradients))
        else:
            self.skipped += 1
        return False

    def _unscale_and_clip(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        """Divide them by the loss scale, and clip them by the norm of the whole gradient."""
        if not gradients:  # a rank may have none: all its parameters unused, or no shard
            return
        factor = torch.ones_like(norm) / self.scale
        if self.rule.clip_norm is not None:
            factor *= (self.rule.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as in PyTorch
        if self.rule.clip_norm is not None or self.scale != 1.0:
            torch._foreach_mul_(list(gradients), factor.to(gradients[0].dtype))

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except (KeyError, TypeError) as error:
            if not self.is_resumed:
                raise
            raise UsageError(
                "the optimizer cannot continue with the state that the checkpoint holds: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.is_resumed = False

    @property
    def inner(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner  # PyTorch's ZeRO-1 wraps the real one


def global_norm(
    gradients: Sequence[Tensor],
    device: torch.device,
    sharded_over: Sequence[comm.Group] = (),
    shares: Sequence[float] | None = None,
) -> Tensor:
    """The 2-norm of the whole gradient: (), float64 where the device has it.

    Shards hold disjoint parts of it, so their squares add up over the ranks; replicas hold all.
    ``shares``: by what each gradient's square counts, where ranks of a group hold the same.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm([g.float() if g.dtype.itemsize < 4 else g for g in gradients])
        found = torch.stack([n.double() for n in norms]).square()
        if shares is not None:
            found = found * found.new_tensor(shares)
        squares += found.sum()
    for group in sharded_over:
        comm.all_reduce(squares, group, label="gradient norm")
    return squares.sqrt()
