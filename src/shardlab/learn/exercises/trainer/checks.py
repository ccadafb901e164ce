"""A complete trainer: what each rank read, sent, updated with and logged, step by step."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from shardlab import wire
from shardlab.launch.cluster import listening_store
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rejected, Row, Rows, Stage, judging, say

# samples, batch (of all ranks), micro: as in the contract. fails: the step in which loss_fn raises.
EVEN = {"samples": 16, "batch": 8, "micro": 2, "max_norm": 1e9, "epochs": 2}
CASES = (
    Case("two ranks", 2, EVEN),
    Case("batches of unequal size", 2, EVEN | {"samples": 19, "batch": 7, "micro": 3}),
    Case("three ranks, clipped", 3, EVEN | {"samples": 10, "batch": 6, "max_norm": 0.05}),
    Case("a rank without samples", 2, EVEN | {"samples": 9, "batch": 4, "epochs": 1}),
    Case("an error in loss_fn", 2, EVEN | {"fails": 1}),
)
RUN_SEED = 5  # of the run: what the learner is given
WIDTH, TARGETS = 6, 3
# Kept for as long as the process lives: the store, because other ranks may end later; the learner's
# process group, because torch can hang if DistributedDataParallel was the last to hold it.
STORES: list[dist.TCPStore] = []
GROUPS: list[dist.ProcessGroup | None] = []


class Planned(Exception):
    """Raised by loss_fn, to see what is left behind."""


class Model(nn.Module):
    """With a buffer that counts in forward, and a layer that does not train."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(WIDTH, 7), nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, TARGETS)
        self.register_buffer("scale", torch.rand(7) + 0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH)
        hidden = torch.tanh(self.frozen(torch.tanh(self.body(x)) * self.scale))
        out: Tensor = self.head(hidden)
        return out


def samples(count: int) -> tuple[Tensor, Tensor]:
    """x, and y with NaN for the targets that do not count: of some samples all of them."""
    generator = torch.Generator().manual_seed(toys.SEED)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(count, TARGETS, generator=generator, dtype=torch.float64)
    ignored = torch.rand(count, TARGETS, generator=generator) < torch.arange(count)[:, None] / count
    ignored[0] = False
    return x, torch.where(ignored, torch.nan, y)


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    counts = ~y.isnan()
    return (model(x) - y)[counts].square().sum(), int(counts.sum())


# ------------------------------------------------------------------ on a rank


class Watched:
    """What the learner's trainer is given, and what it did with it."""

    def __init__(self, at: Stage) -> None:
        self.at = at
        self.x, self.y = samples(at.options["samples"])
        self.model: nn.Module | None = None
        self.steps: list[dict[str, Any]] = []
        self.logs: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._read: list[list[int]] = []
        self._first_call = len(self.at.spy.calls)

    def make_model(self) -> nn.Module:
        GROUPS.append(dist.group.WORLD)
        self.model = Model()
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor += 0.1 * self.at.rank  # as if it were read from a file that is out of date
        self.at.spy.watch(self.model)
        return self.model

    def make_optimizer(self, parameters: Iterable[Tensor]) -> SGD:
        optimizer = SGD(parameters, lr=toys.RATE)
        optimizer.register_step_pre_hook(lambda *_: self._note())
        return optimizer

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        if len(self.steps) == self.at.options.get("fails"):
            raise Planned
        found = (x[:, None] == self.x).all(-1)  # (rows, samples)
        self._read.append(found.long().argmax(1).tolist())
        if not self.steps and len(self._read) == 1:
            self._first_call = len(self.at.spy.calls)  # setting up is not counted
        return loss_sum(model, x, y)

    def log(self, step: Any, loss: Any) -> None:
        self.logs.append([step, loss])

    def _note(self) -> None:
        """Just before an update."""
        assert self.model is not None
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        row = {
            "read": self._read,
            "grads": toys.gradients(self.model),
            "calls": self.at.spy.calls[self._first_call :],
        }
        if not self.steps:
            row["initial"] = {name: tensor.detach().clone() for name, tensor in tensors}
        self.steps.append(row)
        self._begin()


def run(at: Stage) -> dict[str, Any]:
    _as_launched(at)
    watched = Watched(at)
    options = {key: at.options[key] for key in ("epochs", "batch", "micro", "max_norm")}
    raised = False
    model = None
    try:
        model = at.submission.train(
            watched.make_model, watched.make_optimizer, watched.loss, (watched.x, watched.y),
            **options, seed=RUN_SEED, log=watched.log,
        )  # fmt: skip
    except Planned:
        raised = True
    found = {
        "steps": watched.steps,
        "logs": watched.logs,
        "raised": raised,
        "left": dist.is_initialized(),
        "returned": type(model).__name__,
        "buffers": [name for name, _ in Model().named_buffers()],
        "sizes": sum(p.numel() * p.element_size() for p in Model().parameters() if p.requires_grad),
        "right": list(_one_process(at, watched)) if at.rank == 0 else None,
    }
    if not raised and model is not watched.model and not isinstance(model, nn.Module):
        raise Rejected(say("wrong-type/trainer", type=type(model).__name__))
    return found


def _as_launched(at: Stage) -> None:
    """No process group, and the environment of torchrun, which keeps the ranks' store itself."""
    ours = dist.distributed_c10d._get_default_store()
    if at.rank == 0:
        STORES.append(listening_store(socket.AF_INET, "127.0.0.1", port=0))
        ours.set("port", str(STORES[-1].port))
    ours.set(f"joined {at.rank}", "")
    ours.wait(["port", *(f"joined {rank}" for rank in range(at.world))])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=ours.get("port").decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",  # else rank 0 would try to open that port
    )
    dist.destroy_process_group()
    torch.manual_seed(1000 + at.rank)  # a trainer that does not seed gets another model


# ------------------------------------------------------------------ one process


def _parts(at: Stage) -> Iterator[list[list[Tensor]]]:
    """The micro-batches of each step, by rank."""
    options = at.options
    for epoch in range(options["epochs"]):
        generator = torch.Generator().manual_seed(RUN_SEED + epoch)
        order = torch.randperm(options["samples"], generator=generator)
        for chosen in order.split(options["batch"]):
            shares = [chosen[rank :: at.world] for rank in range(at.world)]
            yield [[p for p in share.split(options["micro"]) if len(p)] for share in shares]


def _one_process(at: Stage, watched: Watched) -> Iterator[dict[str, Any]]:
    """For each step its samples, the right gradient and loss, and what mistakes give instead."""
    torch.manual_seed(RUN_SEED)
    model = Model()
    limit = at.options["max_norm"]
    tensors = (*model.named_parameters(), *model.named_buffers())
    initial = {name: tensor.detach().clone() for name, tensor in tensors}
    for parts in _parts(at):
        found = [[_summed(model, watched, part) for part in share] for share in parts]
        sums = [_total(share, model) for share in found]  # (gradient, loss, targets) of each rank
        gradient, loss, count = _total(sums, model)
        rank_means = [g / max(1, c) for g, _, c in sums]
        micro_means = [
            torch.stack([g / max(1, c) for g, _, c in share]).mean(0) if share else 0 * gradient
            for share in found
        ]
        number = sum(len(part) for share in parts for part in share)
        right = toys.clipped(gradient / count, limit)
        wrong = {
            "not-clipped": gradient / count,
            "not-divided/gradient": gradient,
            "samples-not-targets": gradient / number,
            "samples-not-targets/nominal": gradient / at.options["batch"],
            "mean-of-means/ranks": torch.stack(rank_means).mean(0),
            "mean-of-means/micros": torch.stack(micro_means).mean(0),
            "mean-of-means/summed": torch.stack(rank_means).sum(0),
            "averaged-twice/trainer": gradient / count / at.world,
            "not-averaged/trainer": gradient / count * at.world,
            "only-the-last/trainer": sum(s[-1][0] for s in found if s) / count,
        }
        clipped = {key: toys.clipped(g, limit) for key, g in wrong.items() if key != "not-clipped"}
        early = [toys.clipped(g / count, limit) for g, _, _ in sums]
        early_means = [toys.clipped(mean, limit) for mean in rank_means]
        yield {
            "samples": [i for share in parts for part in share for i in part.tolist()],
            "initial": initial,
            "right": right,
            "wrong": [
                *wrong.items(), *clipped.items(),
                ("clipped-before-averaging/trainer", torch.stack(early).sum(0)),
                ("clipped-before-averaging/trainer", torch.stack(early).mean(0)),
                ("clipped-before-averaging/trainer", torch.stack(early_means).mean(0)),
                ("clipped-before-dividing", toys.clipped(gradient, limit) / count),
            ],
            "own": [
                one
                for (g, _, _), *means in zip(sums, rank_means, micro_means, strict=True)
                for each in (g, g / count, *means)
                for one in (each, toys.clipped(each, limit))
            ],
            "loss": loss / count,
            "losses": {
                "local-loss": sums[0][1] / max(1, sums[0][2]),
                "mean-of-means/loss": sum(s / max(1, c) for _, s, c in sums) / at.world,
                "not-divided/loss": loss,
                "samples-not-targets/loss": loss / number,
            },
        }  # fmt: skip
        _update(model, right)


Sums = tuple[Tensor, float, int]  # the gradient of a sum of losses, the sum, its targets


def _summed(model: nn.Module, watched: Watched, part: Tensor) -> Sums:
    model.zero_grad()
    loss, count = loss_sum(model, watched.x[part], watched.y[part])
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in toys.parameters(model) if p.grad is not None])
    return gradient, loss.item(), count


def _total(every: Iterable[Sums], model: nn.Module) -> Sums:
    gradient = torch.zeros(sum(p.numel() for p in toys.parameters(model)), dtype=torch.float64)
    loss, count = 0.0, 0
    for g, s, c in every:
        gradient, loss, count = gradient + g, loss + s, count + c
    return gradient, loss, count


@torch.no_grad()
def _update(model: nn.Module, gradient: Tensor) -> None:
    params = toys.parameters(model)
    for p, g in zip(params, gradient.split([p.numel() for p in params]), strict=True):
        p.sub_(toys.RATE * g.view_as(p))


# ------------------------------------------------------------------ what is wrong


def tidy(ranks: Rows) -> Finding | None:
    fails = "fails" in ranks[0]
    if fails and not all(rank["raised"] for rank in ranks):
        return say("error-hidden/trainer")
    if left := [r for r, rank in enumerate(ranks) if rank["left"]]:
        where = mistakes.ranks_text(left, len(ranks))
        return say("group-left/error" if fails else "group-left", where=where)
    return None


def begun(ranks: Rows) -> Finding | None:
    """The model that the first step began with: rank 0's, from the seed, on every rank."""
    if not all(rank["steps"] for rank in ranks):
        return say("no-steps") if "fails" not in ranks[0] else None
    first = [rank["steps"][0]["initial"] for rank in ranks]
    buffers, want = ranks[0]["buffers"], ranks[0]["right"][0]["initial"]
    for rank, tensors in enumerate(first):
        off = [name for name in tensors if not mistakes.close(tensors[name], first[0][name])]
        if off and set(off) <= set(buffers):
            return say("buffers-forgotten", names=mistakes.listed(off), rank=rank)
        if off:
            names = mistakes.listed(off)
            return say("not-communicated/broadcast", rank=rank, names=names, src=0)
    if not all(mistakes.close(first[0][name], want[name]) for name in want):
        return say("not-seeded")
    return None


def read(ranks: Rows) -> Finding | None:
    """Each step's samples, by the ranks together."""
    right = [row["samples"] for row in ranks[0]["right"]]
    # By rank and step.
    every = [[[i for m in row["read"] for i in m] for row in rank["steps"]] for rank in ranks]
    steps, made = ranks[0].get("fails", len(right)), min(map(len, every))
    missing = say("step-missing", steps=steps, made=made, last=min(map(len, right)))
    for step, want in enumerate(right[: min(steps, made)]):
        shares = [rank[step] for rank in every]
        facts = {"step": step, "read": [sorted(share) for share in shares], "want": sorted(want)}
        if finding := _shares(shares, want, facts, right):
            # A step that is left out shifts all that come after it.
            return missing if made < steps and step > 0 else finding
        largest = max((len(m) for rank in ranks for m in rank["steps"][step]["read"]), default=0)
        if largest > ranks[0]["micro"]:
            return say("micro-batch-too-large", step=step, size=largest, micro=ranks[0]["micro"])
    if made < steps:
        return missing
    if max(map(len, every)) > steps:
        return say("too-many-steps", steps=steps, made=max(map(len, every)))
    return None


def _shares(
    shares: list[list[int]], want: list[int], facts: Row, right: list[list[int]]
) -> Finding | None:
    n, got = len(shares), Counter(i for share in shares for i in share)
    if got == Counter(want):
        uneven = max(map(len, shares)) > math.ceil(len(want) / n)
        return say("uneven", **facts) if uneven else None
    if all(sorted(share) == sorted(shares[0]) for share in shares) and shares[0]:
        return say("not-shared-out", n=n, **facts)
    if facts["step"] and got == Counter(right[0]):
        return say("same-each-epoch/trainer", **facts)
    if len(set(got)) < sum(got.values()):
        return say("read-twice", **facts)
    if len(got) > len(want):
        return say("batch-per-rank", count=len(got), size=len(want), **facts)
    if set(got) < set(want):
        lost = mistakes.listed(str(i) for i in sorted(set(want) - set(got)))
        return say("dropped/trainer", lost=lost, **facts)
    return say("wrong-order", **facts)


def updates(ranks: Rows) -> Finding | None:
    """The gradients that reached the optimizer."""
    for step, right in enumerate(ranks[0]["right"]):
        rows = [rank["steps"][step] for rank in ranks if step < len(rank["steps"])]
        if len(rows) < len(ranks):
            return None
        for rank, row in enumerate(rows):
            if missing := [name for name, g in row["grads"].items() if g is None]:
                return say("no-gradient", name=missing[0], missing=f"rank {rank}")
        used = [mistakes.flat(list(row["grads"].values())) for row in rows]
        if all(mistakes.close(u, right["right"], 1e-6) for u in used):
            continue
        for key, value in right["wrong"]:
            if all(mistakes.close(u, value, 1e-6) for u in used):
                return say(key, step=step, n=len(ranks), **_counts(ranks, step))
        if all(any(mistakes.close(u, one, 1e-6) for one in right["own"]) for u in used):
            return say("not-communicated/trainer", step=step)
        if not all(mistakes.close(u, used[0], 1e-6) for u in used):
            return say("ranks-differ/trainer", step=step)
        if step > 0:
            return say("not-reset/trainer", step=step)
        off = mistakes.error(used[0], right["right"])
        return say("wrong-gradient/trainer", step=step, error=off)
    return None


def _counts(ranks: Rows, step: int) -> dict[str, str]:
    read = [[len(micro) for micro in rank["steps"][step]["read"]] for rank in ranks]
    return {"read": "; ".join(f"rank {r}: {sizes or 'none'}" for r, sizes in enumerate(read))}


def sent(ranks: Rows) -> Finding | None:
    """Gradients once per step; loss and count are a few bytes."""
    n = len(ranks)
    should = wire.wire_bytes("all_reduce", ranks[0]["sizes"], n)
    for row in ranks[0]["steps"]:
        if found := mistakes.too_many_bytes(row["calls"], n, should):
            return found
    return None


def logged(ranks: Rows) -> Finding | None:
    """Rank 0 must log, in each step, the loss of all ranks."""
    right = ranks[0]["right"]
    for rank, row in enumerate(ranks[1:], start=1):
        if row["logs"]:
            return say("logged-by-all", rank=rank, times=len(row["logs"]))
    logs = ranks[0]["logs"]
    wanted = ranks[0].get("fails", len(right))
    if [entry[0] for entry in logs] != list(range(wanted)):
        return say("wrong-log", steps=[entry[0] for entry in logs], wanted=wanted)
    for (step, loss), row in zip(logs, right, strict=False):
        if isinstance(loss, bool) or not isinstance(loss, float | int):
            return say("wrong-type/log", loss=loss)
        if mistakes.close(loss, row["loss"], 1e-5):
            continue
        known = (k for k, v in row["losses"].items() if mistakes.close(loss, v, 1e-5))
        return say(next(known, "wrong-loss/trainer"), step=step, loss=loss, right=row["loss"])
    return None


judge: Callable[[Any], list[Finding]] = judging(
    begun, read, updates, sent, logged, tidy, only_first=True
)
