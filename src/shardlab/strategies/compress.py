"""Gradients in fewer bytes: rounded to 16 bits, or as two thin matrices (PowerSGD).

A compressor stands where ``comm.all_reduce`` of the gradients would. What each costs in loss is
measured by ``benchmarks/compression.py``, not assumed. PowerSGD's state belongs to this rank and
this run: it is in no ``state_dict``, and a run that is resumed begins without.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.update import Rule

Parts = Mapping[str, Tensor]
RANK = 2  # PowerSGD's, when nobody says


class Waitable(Protocol):
    """An all-reduce under way. After ``wait()`` the gradients hold the sums."""

    def wait(self) -> None: ...


class Compressor:
    """None: gradients travel as they are. The others replace ``launch``."""

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

    def memory(self) -> dict[str, Tensor]:
        """What this rank remembers from step to step, for a checkpoint."""
        return {}

    def remember(self, memory: dict[str, Tensor]) -> None:
        """As it was when the checkpoint was taken."""


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
        return _Then(pending, lambda: flat.copy_(rounded))


class PowerSGD(Compressor):
    """Each matrix as P Qᵀ of rank r, with error feedback (Vogels et al. 2019).

    For a gradient M (rows, columns), on every rank:

        M ← gradient + unsent   what earlier steps left
        P ← M Q                 all_reduce: (rows, r); then orthonormal, the same on all ranks
        Q ← Mᵀ P                all_reduce: (columns, r); the next step starts from it
        unsent ← M - P Qᵀ       with this rank's own Q
        gradient ← P Qᵀ         with the sum of all ranks' Q

    All that was sent and all that is unsent add up to the true gradients: nothing is lost, it
    only comes late. Cost: r (rows + columns) elements instead of rows · columns, in two messages,
    one after the other, and a buffer of the gradient's size. What would not shrink (vectors, thin
    matrices) goes along with P as it is.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.unsent: dict[str, Tensor] = {}  # (rows, columns); while under way: M
        self.start: dict[str, Tensor] = {}  # the first Q: (columns, r)
        self.q: dict[str, Tensor] = {}

    def shrinks(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or tensor.numel() == 0:
            return False
        rows = len(tensor)
        return self.rank * (rows + tensor.numel() // rows) < tensor.numel()

    def launch(self, parts: Parts, flat: Tensor, group: comm.Group, label: str) -> Waitable:
        matrices = {name: g for name, g in parts.items() if self.shrinks(g)}
        others = [g for name, g in parts.items() if name not in matrices]
        if not matrices:
            return super().launch(parts, flat, group, label)
        for name, gradient in matrices.items():
            self._add_to_unsent(name, gradient)
        ps = [self.unsent[name] @ self.q[name] for name in matrices]
        first = torch.cat([t.flatten() for t in (*ps, *others)])
        pending = comm.all_reduce(first, group, label=f"{label} P", async_op=True)

        def finish() -> None:
            sums = _split(first, [*ps, *others])
            for gradient, total in zip(others, sums[len(ps) :], strict=True):
                gradient.copy_(total)
            bases = dict(zip(matrices, map(_orthonormal, sums), strict=False))
            qs = [self.unsent[name].T @ p for name, p in bases.items()]
            for (name, p), q in zip(bases.items(), qs, strict=True):
                self.unsent[name].addmm_(p, q.T, alpha=-1)
            second = torch.cat([q.flatten() for q in qs])
            comm.all_reduce(second, group, label=f"{label} Q")
            for (name, p), q in zip(bases.items(), _split(second, qs), strict=True):
                matrices[name].copy_((p @ q.T).view_as(matrices[name]))
                # A column of zeros (no gradient at all) would find nothing ever after.
                is_dead = q.norm(dim=0) == 0  # (r,)
                self.q[name] = _orthonormal(torch.where(is_dead, self.start[name], q))

        return _Then(pending, finish)

    def _add_to_unsent(self, name: str, gradient: Tensor) -> None:
        matrix = gradient.reshape(len(gradient), -1)
        if name not in self.unsent:
            self.unsent[name] = torch.zeros_like(matrix)
            self.start[name] = self.q[name] = self._first(name, matrix)
        self.unsent[name] += matrix

    def _first(self, name: str, like: Tensor) -> Tensor:
        """The first Q, from the name alone, so that all ranks have the same: (columns, r)."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(like.shape[1], self.rank, generator=generator)
        return _orthonormal(noise.to(like))

    def memory(self) -> dict[str, Tensor]:
        unsent = {f"unsent/{name}": tensor for name, tensor in self.unsent.items()}
        # As rows: a product's last bit depends on how its factor lies in memory.
        return unsent | {f"q/{name}": tensor.T for name, tensor in self.q.items()}

    def remember(self, memory: dict[str, Tensor]) -> None:
        for key, tensor in memory.items():
            kind, _, name = key.partition("/")
            if kind == "unsent":
                self.unsent[name] = tensor
                self.start[name] = self._first(name, tensor)
            else:
                self.q[name] = tensor.T


class _Then:
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


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns of length 1 at right angles that span the matrix's, even where those are zero."""
    q: Tensor = torch.linalg.qr(matrix).Q
    return q


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was concatenated, in parts and in the shapes that they had."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def compressor(compress: str, powersgd_rank: int | None, rule: Rule) -> Compressor:
    """What a strategy's options ask for, or why it cannot be had."""
    known: dict[str, Callable[[], Compressor]] = {
        "none": Compressor,
        "fp16": lambda: Half(torch.float16),
        "bf16": lambda: Half(torch.bfloat16),
        "powersgd": lambda: PowerSGD(powersgd_rank or RANK),
    }
    make = base.option("compress", compress, known)
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
