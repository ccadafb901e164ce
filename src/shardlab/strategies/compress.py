"""Gradients in fewer bytes: rounded to 16 bits, or as two thin matrices (``powersgd.py``).

A compressor stands where ``comm.all_reduce`` of the gradients would. What each costs in loss is
measured by ``benchmarks/compression.py``, not assumed. What one remembers belongs to this rank and
this world: a checkpoint has it, ``state_dict``, which any world can load, has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies import base, refusals, steps
from shardlab.strategies.update import Rule

Parts = Mapping[str, Tensor]
RANK = 2  # PowerSGD's, when nobody says


class Waitable(Protocol):
    """An all-reduce under way. After ``wait()`` the gradients hold the sums."""

    def wait(self) -> None: ...


class Compressor:
    """This one sends gradients as they are. The others replace ``launch``."""

    def all_reduce(
        self, name: str, tensor: Tensor, group: comm.Group, *, label: str, async_op: bool = False
    ) -> Waitable:
        """``tensor``, the gradient of parameter ``name``, becomes its sum over the ranks."""
        return self.all_reduce_bucket({name: tensor}, tensor, group, label=label, async_op=async_op)

    def all_reduce_bucket(
        self, parts: Parts, flat: Tensor, group: comm.Group, *, label: str, async_op: bool = False
    ) -> Waitable:
        """The same for many: ``parts`` are the gradients, by name, whose memory is ``flat``.

        With ``async_op`` ranks must wait in the same order too: waiting may communicate again.
        """
        with torch.no_grad():
            under_way = self.launch(parts, flat, group, label)
        if not async_op:
            under_way.wait()
        return under_way

    def launch(self, parts: Parts, flat: Tensor, group: comm.Group, label: str) -> Waitable:  # noqa: ARG002
        return comm.all_reduce(flat, group, label=label, async_op=True)

    def after_step(self, was_made: bool) -> None:
        """The step's update was made, or skipped for gradients that are not finite."""

    def memory(self) -> dict[str, Tensor]:
        """What this rank remembers from step to step, for a checkpoint."""
        return {}

    def remember(self, memory: dict[str, Tensor]) -> None:
        """Restore what ``memory()`` gave when the checkpoint was taken."""


class Compressing(base.Strategy):
    """A strategy with whole replicas, whose gradients may travel through a compressor."""

    def __init__(
        self, setup: base.Setup, *, compress: str = "none", powersgd_rank: int | None = None
    ) -> None:
        super().__init__(setup)
        self.compressor = compressor(compress, powersgd_rank, setup.rule)  # None: as they are
        self.update.after = self._after_step
        steps.broadcast_model(self.model, self.group)

    def _after_step(self, was_made: bool) -> None:
        if self.compressor is not None:
            self.compressor.after_step(was_made)

    def own_state(self) -> dict[str, Tensor]:
        return {} if self.compressor is None else self.compressor.memory()

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        if self.compressor is not None:
            self.compressor.remember({name: t.to(self.device) for name, t in state.items()})


class Half(Compressor):
    """The sum of 16-bit roundings, itself in 16 bits: half the bytes of fp32.

    bf16 keeps fp32's range and 8 bits. fp16 keeps 11 bits, but gradients below 6e-8 vanish, and
    sums above 65504 are infinite: under fp16's loss scaling such a step is skipped.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def launch(self, parts: Parts, flat: Tensor, group: comm.Group, label: str) -> Waitable:  # noqa: ARG002
        rounded = flat.to(self.dtype)
        pending = comm.all_reduce(rounded, group, label=label, async_op=True)
        return Then(pending, lambda: flat.copy_(rounded))


class Then:
    """A collective under way, and what is left to do when its result is there."""

    def __init__(self, pending: Waitable, finish: Callable[[], object]) -> None:
        self._pending = pending
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        self._pending.wait()
        with torch.no_grad():
            finish()


def compressor(compress: str, powersgd_rank: int | None, rule: Rule) -> Compressor | None:
    """What a strategy's options ask for, or why it cannot be had. None: gradients as they are."""
    from shardlab.strategies.powersgd import PowerSGD  # which is a Compressor itself

    known: dict[str, Callable[[], Compressor | None]] = {
        "none": lambda: None,
        "fp16": lambda: Half(torch.float16),
        "bf16": lambda: Half(torch.bfloat16),
        "powersgd": lambda: PowerSGD(powersgd_rank or RANK, rule.on_nonfinite == "skip"),
    }
    make = refusals.option("compress", compress, known)
    if powersgd_rank is not None and compress != "powersgd":
        raise UsageError(f"powersgd_rank is for compress: powersgd, not for compress: {compress}")
    if powersgd_rank is not None and powersgd_rank < 1:
        raise UsageError(f"powersgd_rank must be at least 1, got {powersgd_rank}")
    if compress == "powersgd" and rule.loss_scale is not None:
        raise UsageError(
            "compress: powersgd keeps what it has not sent, and one overflow of fp16 would stay in "
            "it for ever; use precision.compute: bf16"
        )
    return make()
