"""What strategies share that send gradients while backward computes: buckets, and one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies.steps import backward
from shardlab.workloads.base import Batch, LossFn

LARGEST_BUCKET_MB = 25.0  # DDP's size


def default_mb(params: Mapping[str, nn.Parameter], parts: int = 2) -> float:
    """An equal part of all gradients in MB, up to DDP's size."""
    total = sum(p.numel() * p.element_size() for p in params.values())
    return min(LARGEST_BUCKET_MB, total / parts / 2**20)


def buckets_of(
    params: Mapping[str, nn.Parameter],
    order: Iterable[str],
    bucket_mb: float | None,
    first_bucket_mb: float,
    parts: int = 2,
) -> list[dict[str, nn.Parameter]]:
    """Parameters in the given order, cut into buckets of about ``bucket_mb``: full when that much
    is in, as in DDP, so that a small parameter is not sent alone because the next is large.

    By default one of ``parts`` of them all, so that a small model too has some to overlap. The
    first is smaller: it is full sooner, so communication starts sooner. Dtypes do not mix.
    """
    if bucket_mb is None:
        bucket_mb = default_mb(params, parts)
    elif not bucket_mb > 0:
        raise UsageError(f"bucket_mb must be above 0, got {bucket_mb}")
    if not first_bucket_mb > 0:
        raise UsageError(f"first_bucket_mb must be above 0, got {first_bucket_mb}")
    cap_bytes, limit = bucket_mb * 2**20, min(first_bucket_mb, bucket_mb) * 2**20
    buckets: list[dict[str, nn.Parameter]] = []
    held, dtype = 0, None
    for name in order:
        p = params[name]
        if not buckets or held >= limit or p.dtype != dtype:
            if buckets:
                limit = cap_bytes
            buckets.append({})
            held, dtype = 0, p.dtype
        buckets[-1][name] = p
        held += p.numel() * p.element_size()
    return buckets


class InOrder:
    """Calls ``launch(i)`` for 0, 1, 2 … as the parts become ready, never out of order.

    Ranks pair their collectives by order alone. A gradient may come earlier on one rank, or
    not at all (a parameter that its data did not use), so part i waits for all before it, and
    ``flush`` launches what backward left.

    ``needs`` says of each part how often each of its gradients comes in one backward. That is
    once, but re-entrant checkpointing gives the gradient of a layer that is used twice in two
    parts: the second is added to ``p.grad`` and its hook runs again.
    """

    def __init__(self, needs: Sequence[Mapping[str, int]], launch: Callable[[int], None]) -> None:
        self.needs = [dict(need) for need in needs]
        self.launch = launch
        self.start()

    def start(self) -> None:
        """A new backward begins."""
        self.missing = [{name: n for name, n in need.items() if n} for need in self.needs]
        self.next = 0

    def arrived(self, part: int, name: str) -> bool:
        """One more gradient of ``part`` is in. False: it has come too late, the part was sent."""
        if part < self.next:
            return False
        left = self.missing[part].get(name, 0) - 1
        if left > 0:
            self.missing[part][name] = left
        else:
            self.missing[part].pop(name, None)
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._launch_next()
        return True

    def flush(self) -> None:
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.next += 1  # first: launching may run hooks
        self.launch(self.next - 1)


class Chain:
    """Collectives one after the other, each begun when somebody has waited for the one before.

    Ranks must go on with their chains in the same order: that is when the next is launched.
    """

    def __init__(self, parts: Iterator[comm.Pending]) -> None:
        self.parts = parts
        self.pending: comm.Pending | None = next(parts)

    def go_on(self) -> None:
        """Wait for what is under way, and begin what comes next."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = next(self.parts, None)

    def wait(self) -> None:
        while self.pending is not None:
            self.go_on()


def last_of_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    divisor: Tensor,
    loss_sum: Tensor,
    group: comm.Group,
) -> comm.Pending:
    """Forward and backward of a step's last micro-batch, whose loss is added to ``loss_sum``: ().

    The sum is known before backward: it is all-reduced in place while that computes.
    """
    with phase(FORWARD):
        loss = loss_fn(model, batch)  # ()
    loss_sum += loss.detach()
    pending = comm.all_reduce(loss_sum, group, label="loss", async_op=True)
    with phase(BACKWARD):
        backward(loss, divisor)
    return pending


class Used:
    """Which parameters got a gradient, on any rank: a small message under way.

    A rank that used them all knows that none is unused, and need not wait for the answer (to read
    it would synchronize a GPU). It must wait some time before the next step.
    """

    def __init__(
        self, names: Iterable[str], used: set[str], device: torch.device, group: comm.Group
    ) -> None:
        self.names = list(names)
        self.all_here = len(used) == len(self.names)
        self.mask = torch.ones(len(self.names), dtype=torch.uint8, device=device)
        if not self.all_here:
            self.mask.copy_(torch.tensor([name in used for name in self.names]))
        self.pending = comm.all_reduce(
            self.mask, group, op="max", label="used parameters", async_op=True
        )

    def unused(self) -> list[str]:
        """What got a gradient on no rank."""
        if self.all_here:
            return []
        self.pending.wait()
        return [n for n, is_used in zip(self.names, self.mask.tolist(), strict=True) if not is_used]
