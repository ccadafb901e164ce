"""PowerSGD: gradients as two thin matrices, and what is lost sent later."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies.compress import Compressor, Parts, Then, Waitable


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

    A skipped step leaves no trace: ``unsent`` and Q are again what they were before it, or a NaN
    would stay in them for ever. With ``may_skip`` the old ones are kept until the update is made,
    which costs a second buffer of the gradient's size.
    """

    def __init__(self, rank: int, may_skip: bool = False) -> None:
        self.rank = rank
        self.may_skip = may_skip
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # unsent and Q before this step
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

        return Then(pending, finish)

    def _add_to_unsent(self, name: str, gradient: Tensor) -> None:
        matrix = gradient.reshape(len(gradient), -1)
        if name not in self.unsent:
            self.unsent[name] = torch.zeros_like(matrix)
            self.start[name] = self.q[name] = self._first(name, matrix)
        if not self.may_skip:
            self.unsent[name] += matrix
            return
        self.before.setdefault(name, (self.unsent[name], self.q[name]))
        self.unsent[name] = self.unsent[name] + matrix

    def after_step(self, was_made: bool) -> None:
        if not was_made:
            for name, (unsent, q) in self.before.items():
                self.unsent[name], self.q[name] = unsent, q
        self.before.clear()

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


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns of length 1 at right angles that span the matrix's, even where those are zero."""
    q: Tensor = torch.linalg.qr(matrix).Q
    return q


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was concatenated, in parts and in the shapes that they had."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
