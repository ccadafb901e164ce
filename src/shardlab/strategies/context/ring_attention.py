"""Attention over a sequence of which each rank of a ring has a part: exact, and balanced.

The sequence is cut into 2C pieces for C ranks, and rank c has the pieces c and 2C-1-c (a zigzag).
Under a causal mask the first tokens see little and the last see much: with an early piece and a
late one each rank has as much to compute as any other. Queries stay where they are. Keys and values
travel round the ring, and a rank attends to each block of them as it comes by.

Schedule of a layer, for K bytes of a rank's keys and values and C ranks:

    forward    C-1 times    send keys and values on, while those that came are attended to  K
    backward   C-1 times    send keys and values on, while those that came are worked on    K
               C times      send their gradients on, which each rank adds its part to       K

Cost: (3C-2)K sent by each rank for each layer and micro-batch, where K is 2 · batch · tokens / C ·
heads of keys · head size · bytes of an element. (In 16 bits a sum would be rounded at each hop:
gradients travel as float32 then, and count twice.) So each rank sends about 3 times the keys and
values of the whole sequence, however many ranks there are. Activation checkpointing computes the
forward again and sends (C-1)K more. The time of attention grows with the square of the length and
that of sending with the length, so that a longer sequence hides it better.

Memory: a rank keeps its own queries, keys, values, outputs and a number per query and head for
backward, which is one C-th of what one process keeps. On their way are two blocks of keys and
values, and in backward three of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab import comm

_ops = torch.ops.aten


@dataclass(frozen=True)
class Zigzag:
    """Which positions of a sequence each rank has. Pieces differ by one token at the most, and in
    a sequence of fewer than 2C tokens some are empty."""

    length: int
    ranks: int

    def pieces(self, rank: int) -> tuple[range, range]:
        """The early piece and the late one."""
        return self._piece(rank), self._piece(2 * self.ranks - 1 - rank)

    def _piece(self, i: int) -> range:
        cuts = 2 * self.ranks
        return range(i * self.length // cuts, (i + 1) * self.length // cuts)

    def tokens(self, rank: int) -> int:
        return sum(map(len, self.pieces(rank)))

    @property
    def most(self) -> int:
        """The tokens of the rank that has most."""
        return max(map(self.tokens, range(self.ranks)))

    def positions(self, rank: int, device: torch.device) -> Tensor:  # (tokens,)
        parts = [torch.arange(p.start, p.stop, device=device) for p in self.pieces(rank)]
        return torch.cat(parts)


class View(NamedTuple):
    """What a rank's queries see of another's keys: the queries from ``first`` on, the keys before
    ``end``. Of its own keys, each query sees those up to its own position (``is_masked``)."""

    first: int
    end: int
    is_masked: bool


def view(split: Zigzag, rank: int, source: int, is_causal: bool) -> View:
    """What of a block has to be computed at all. The rest is masked out entirely, and skipped.

    A rank's positions are in rising order, so that among its own tokens the mask is the usual
    triangle. The early piece of a rank before this one is seen by all queries here, and its late
    piece by none. Of a rank behind this one the late queries see both pieces, and the early none.
    """
    if not is_causal:
        return View(0, split.tokens(source), is_masked=False)
    if source == rank:
        return View(0, split.tokens(rank), is_masked=True)
    if source < rank:
        return View(0, len(split.pieces(source)[0]), is_masked=False)
    return View(len(split.pieces(rank)[0]), split.tokens(source), is_masked=False)


class Blocks:
    """Keys and values of any rank as one flat tensor, which is one message."""

    def __init__(self, k: Tensor, v: Tensor, split: Zigzag, group: comm.Group) -> None:
        self.batch, self.heads, _, self.k_size = k.shape
        self.v_size = v.shape[-1]
        self.split, self.group = split, group
        self.rank, self.ranks = group.rank(), group.size()

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A block of zeros: of the same size on every rank, as large as the largest needs."""
        numbers = self.batch * self.heads * self.split.most * (self.k_size + self.v_size)
        return torch.zeros(numbers, dtype=dtype, device=like.device)

    def parts(self, block: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Keys (batch, heads, tokens, size) and values in a block, as views."""
        tokens = self.split.tokens(source)
        sizes = [self.batch * self.heads * tokens * size for size in (self.k_size, self.v_size)]
        k, v = block[: sum(sizes)].split(sizes)
        shape = self.batch, self.heads, tokens
        return k.view(*shape, self.k_size), v.view(*shape, self.v_size)

    def pass_on(self, block: Tensor, what: str) -> tuple[Tensor, comm.Pending]:
        """Send a block to the next rank. What comes from the one before is there after a wait."""
        came = torch.empty_like(block)
        to, source = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        pending = comm.exchange(
            block, came, self.group, to=to, source=source, label=what, async_op=True
        )
        return came, pending

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every rank's keys and values with its number, beginning with this rank's own. While the
        caller works on a block, it is sent on and the next one is on its way."""
        mine = self.room(k, k.dtype)
        for part, given in zip(self.parts(mine, self.rank), (k, v), strict=True):
            part.copy_(given)
        block = mine
        for hop in range(self.ranks):
            source = (self.rank - hop) % self.ranks
            is_last = hop + 1 == self.ranks
            onward = None if is_last or not block.numel() else self.pass_on(block, "keys, values")
            yield source, *self.parts(block, source)
            if onward is not None:
                block, pending = onward
                pending.wait()


class RingAttention(torch.autograd.Function):
    """softmax(q kᵀ · scale) v over the whole sequence, of this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (batch, heads, tokens, size), as k; k and v may have fewer heads
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float,
        split: Zigzag,
        group: comm.Group,
    ) -> Tensor:
        blocks = Blocks(k, v, split, group)
        wide = _wide(q.dtype)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)  # (batch, heads, tokens, size)
        log_sum = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)  # (batch, heads, tokens)
        with torch.autocast(q.device.type, enabled=False):
            for source, keys, values in blocks.travel(k, v):
                first, end, is_masked = view(split, blocks.rank, source, is_causal)
                if first == q.shape[2] or not end or not q.numel():
                    continue
                part, its_sum = attend(
                    q[:, :, first:], keys[:, :, :end], values[:, :, :end], is_masked, scale
                )
                merge(out[:, :, first:], log_sum[:, :, first:], part, its_sum)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, log_sum)
        ctx.how = is_causal, scale, blocks
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        is_causal, scale, blocks = ctx.how
        wide = _wide(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        onward: tuple[Tensor, comm.Pending] | None = None  # of the block that was here before
        with torch.autocast(q.device.type, enabled=False):
            for source, keys, values in blocks.travel(k, v):
                sums = blocks.room(k, wide)  # the gradients of the block that is here
                first, end, is_masked = view(blocks.split, blocks.rank, source, is_causal)
                if first < q.shape[2] and end and q.numel():
                    of_q, of_k, of_v = attend_backward(
                        grad[:, :, first:], q[:, :, first:], keys[:, :, :end], values[:, :, :end],
                        out[:, :, first:], log_sum[:, :, first:], is_masked, scale,
                    )  # fmt: skip
                    grad_q[:, :, first:] += of_q
                    grad_k, grad_v = blocks.parts(sums, source)
                    grad_k[:, :, :end] += of_k
                    grad_v[:, :, :end] += of_v
                if onward is not None:  # what the ranks before this one have added up
                    came, pending = onward
                    pending.wait()
                    sums += came
                if blocks.ranks > 1 and sums.numel():
                    onward = blocks.pass_on(sums, "gradients of keys, values")
            if onward is not None:  # the last hop brings this rank's own block home
                sums, pending = onward
                pending.wait()
        grad_k, grad_v = blocks.parts(sums, blocks.rank)
        grads = grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return *grads, None, None, None, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: Zigzag,
    group: comm.Group,
    *,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries (batch, heads, tokens, size) to the keys and values of all
    ranks. Every rank of the group calls it, with its own positions' q, k and v."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = RingAttention.apply(q, k, v, is_causal, scale, split, group)  # type: ignore[no-untyped-call]
    return out


# ------------------------------------------------------------------ one block


def merge(out: Tensor, log_sum: Tensor, part: Tensor, its_sum: Tensor) -> None:
    """Add a block to ``out``, in place. Each is normalised by its own sum of exponentials, whose
    logarithm is known: the two are weighed by their shares of the sum of both."""
    total = torch.logaddexp(log_sum, its_sum)  # (batch, heads, tokens)
    out.mul_((log_sum - total).exp().unsqueeze(-1))
    out.add_(part * (its_sum - total).exp().unsqueeze(-1))
    log_sum.copy_(total)


def attend(q: Tensor, k: Tensor, v: Tensor, is_masked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to one block, and the logarithm of each row's sum of exponentials."""
    q, k, v = _dense(q), _dense(_repeated(k, q)), _dense(_repeated(v, q))
    if _is_fused(q, v):
        out, log_sum = _ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_masked, scale=scale
        )
        return out, log_sum
    wide = _wide(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), is_masked, scale)  # (batch, heads, queries, keys)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum.unsqueeze(-1)).exp_() @ v.to(wide), log_sum


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    is_masked: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v through one block. ``out`` and ``log_sum`` are those of the whole
    sequence: with them each block's weights are as in the whole softmax."""
    heads = k.shape[1]
    grad, q = _dense(grad), _dense(q)
    k, v = _dense(_repeated(k, q)), _dense(_repeated(v, q))
    if _is_fused(q, v):
        grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, is_masked, scale=scale
        )
        return grads[0], _summed(grads[1], heads), _summed(grads[2], heads)
    grad, q, k, v, out = (t.to(log_sum.dtype) for t in (grad, q, k, v, out))
    weights = (_scores(q, k, is_masked, scale) - log_sum.unsqueeze(-1)).exp_()
    grad_v = weights.transpose(-1, -2) @ grad
    row = (grad * out).sum(-1, keepdim=True)  # (batch, heads, queries, 1)
    of_scores = weights * (grad @ v.transpose(-1, -2) - row) * scale
    grad_q, grad_k = of_scores @ k, of_scores.transpose(-1, -2) @ q
    return grad_q, _summed(grad_k, heads), _summed(grad_v, heads)


def _scores(q: Tensor, k: Tensor, is_masked: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if is_masked:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(is_later, -torch.inf)
    return scores


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _is_fused(q: Tensor, v: Tensor) -> bool:
    """Whether PyTorch has a kernel that tells the sums and never has all scores in memory. Those of
    a GPU take 16 bits alone, and are not used here: a block's scores are in memory for a moment."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _dense(tensor: Tensor) -> Tensor:
    """The kernels read the numbers of a head one after another."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _repeated(kv: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of the queries, of which several share one."""
    times = q.shape[1] // kv.shape[1]
    return kv if times == 1 else kv.repeat_interleave(times, 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of a head of keys is the sum over the heads of queries that share it."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
