"""What strategies share that send gradients while backward computes: buckets, and one order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.errors import UsageError, option
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.strategies.steps import backward
from shardlab.workloads.base import Batch, LossFn

LARGEST_BUCKET_MB = 25.0  # DDP's size
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def comm_dtype(strategy: str, value: str, params: Mapping[str, Tensor]) -> torch.dtype | None:
    """What gradients (ZeRO-3: parameters) travel in; None: their own type."""
    dtype = option(f"{strategy}'s comm_dtype", value, DTYPES)
    for name, p in params.items():
        if dtype is not None and p.is_complex():
            raise UsageError(
                f"{strategy}'s comm_dtype {value}: '{name}' is complex, and its imaginary part "
                "would be lost; leave comm_dtype out"
            )
    return dtype


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


def on_gradient(
    params: Mapping[str, nn.Parameter], arrived: Callable[[str, nn.Parameter], None]
) -> None:
    """Call ``arrived`` whenever backward has added a gradient to the ``.grad`` of a parameter."""

    def hook(name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # None: frozen after its use, and autograd calls it anyway
            arrived(name, parameter)

    for name, p in params.items():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(hook, name))


class Buckets:
    """Calls ``launch(i)`` for buckets 0, 1, 2 … as backward fills them, never out of order.

    Ranks pair their collectives by order alone. A gradient may come earlier on one rank, or
    not at all (a parameter that its data did not use). So bucket i waits for all before it, and
    the end of ``sending`` launches what backward left.

    Gradients come once in a backward. Re-entrant checkpointing of a layer that is used twice gives
    its gradient in two parts; the second may come when the first was sent, so it is refused.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        names: Iterable[Iterable[str]],
        launch: Callable[[int], None],
        take: Callable[[str, Tensor], Tensor | None] = lambda _name, gradient: gradient,
    ) -> None:
        """``names`` are those in each bucket. ``take`` is given each gradient before its bucket is
        launched, and returns what ``.grad`` is from then on."""
        self.launch, self.take = launch, take
        self.used: dict[str, None] = {}  # what got a gradient in this step, in that order
        self.is_sending = False
        self.lay_out(names)
        on_gradient(params, self._arrived)

    def lay_out(self, names: Iterable[Iterable[str]]) -> None:
        self.names = [list(bucket) for bucket in names]
        self.bucket_of = {name: i for i, bucket in enumerate(self.names) for name in bucket}

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around a micro-batch whose gradients are sent."""
        self.came: set[str] = set()  # in this backward
        self.missing = [set(bucket) for bucket in self.names]
        self.next, self.is_sending = 0, True
        yield
        self.is_sending = False
        while self.next < len(self.names):
            self._launch_next()

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = self.take(name, parameter.grad)
        self.used[name] = None
        if not self.is_sending:
            return
        if name in self.came:
            raise UsageError(
                f"the gradient of '{name}' came twice in one backward (re-entrant checkpointing); "
                "use checkpoint(..., use_reentrant=False)"
            )
        self.came.add(name)
        if name in self.bucket_of:
            self.missing[self.bucket_of[name]].discard(name)
        while self.next < len(self.names) and not self.missing[self.next]:
            self._launch_next()

    def _launch_next(self) -> None:
        self.next += 1  # first: launching may run hooks
        self.launch(self.next - 1)


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
        self, names: Iterable[str], used: Collection[str], device: torch.device, group: comm.Group
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
