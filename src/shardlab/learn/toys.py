"""The exercises from gradient averaging to ZeRO-3: small models in float64, one process that sees
every rank's batches, the loop that the learner's code runs in, and scales for what a rank holds.

Batches have the same size on every rank and the loss is a mean, so the gradient of one process that
sees every rank's batch is the mean of the ranks' gradients.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from shardlab.learn.exercise import Rejected, Stage, say
from shardlab.proof.watch import Memory

Batch = tuple[Tensor, Tensor]  # (rows, width), (rows, out)
Tensors = dict[str, Tensor | None]
SEED = 0  # of all batches and models; any other number must work, too
LOOKING = "looking"  # the spy's mark for calls that are made only because we look
RATE = 0.5  # of SGD: what an update used is (before - after) / RATE


# ------------------------------------------------------------------ models


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def plain() -> nn.Module:
    return chain(body=nn.Linear(6, 11), tanh=nn.Tanh(), head=nn.Linear(11, 3))


def frozen() -> nn.Module:
    """The layer in the middle does not train."""
    body, fixed = nn.Linear(6, 7), nn.Linear(7, 7).requires_grad_(False)
    return chain(body=body, tanh=nn.Tanh(), frozen=fixed, tanh2=nn.Tanh(), head=nn.Linear(7, 3))


def tied() -> nn.Module:
    """One weight, used twice."""
    encode, decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
    decode.weight = encode.weight
    return chain(
        encode=encode, tanh=nn.Tanh(), decode=decode, tanh2=nn.Tanh(), head=nn.Linear(6, 3)
    )


def deep(depth: int = 4) -> nn.Module:
    """Layers enough for something to happen before backward ends."""
    layers = [m for _ in range(depth) for m in (nn.Linear(6, 6), nn.Tanh())]
    return chain(layers=nn.Sequential(*layers, nn.Linear(6, 3)))


class Skipping(nn.Module):
    """``extra`` is used only by rank 0's batches, ``never`` by nobody's.

    The layers have one size, so that ranks that send in different orders mix them up without any
    error, as they do in real models, which have many layers of one size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = torch.tanh(self.first(x))
        if x[0, 0] > 0:
            hidden = hidden + self.extra(hidden)
        out: Tensor = self.last(torch.tanh(self.middle(hidden)))[:, :3]
        return out


class Odd(nn.Module):
    """A layer in the middle does not train. 299 elements do, which nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x) * self.scale[0])))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        out: Tensor = self.head(hidden * self.scale[1])
        return out


def blocks() -> nn.Module:
    """Blocks of odd sizes, one of them without parameters."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.Tanh()),
        nn.Sequential(nn.Linear(7, 9, bias=False), nn.Tanh(), nn.Linear(9, 7)),
        nn.Tanh(),
        nn.Linear(7, 7),
        nn.Linear(7, 3),
    )


def wide(depth: int, width: int = 48) -> nn.Module:
    """Blocks of one size, with many more parameters than activations: those are weighed."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth))
    )


class Buffers(nn.Module):
    """BatchNorm (one of its buffers is an integer), and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean = torch.randn(5)
        self.norm.num_batches_tracked = torch.randint(100, ())
        self.register_buffer("drift", torch.randn(7), persistent=False)


TOYS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "frozen": frozen,
    "tied": tied,
    "deep": deep,
    "many": lambda: deep(24),  # enough to tell a full bucket from one per parameter
    "skipping": Skipping,
    "odd": Odd,
    "blocks": blocks,
    "buffers": Buffers,
}


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same on every rank for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + seed)
        return make().double()


def batch(rank: int, step: int, micro: int, rows: int = 4, width: int = 6, out: int = 3) -> Batch:
    """A batch in float64. Only those of rank 0 make ``Skipping`` use its extra layer."""
    generator = torch.Generator().manual_seed(SEED + 10_000 * step + 1000 * micro + rank)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    x[0, 0] = x[0, 0].abs() + 0.1 if rank == 0 else -x[0, 0].abs() - 0.1
    return x, torch.randn(rows, out, generator=generator, dtype=torch.float64)


def loss(forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """The mean over the rows."""
    return F.mse_loss(forward(batch[0]), batch[1])


def gradients(model: nn.Module) -> Tensors:
    """Copies of the gradients of the parameters that train, by name; None where there is none."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that train."""
    return [p for p in model.parameters() if p.requires_grad]


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """A gradient, (elements,), scaled as ``clip_grad_norm_`` does."""
    return gradient * min(1.0, norm / (float(gradient.double().norm()) + 1e-6))


# ------------------------------------------------------------------ one process


class Factory:
    """What the learner calls ``make_optimizer``; it remembers what was asked of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: list[Optimizer] = []

    def __call__(self, tensors: Iterable[Tensor]) -> Optimizer:
        if self.kind == "sgd":
            made: Optimizer = SGD(list(tensors), lr=RATE)
        else:
            made = AdamW(list(tensors), lr=0.05, weight_decay=0.1)
        self.made.append(made)
        return made

    def evidence(self) -> dict[str, int]:
        """How often it was called; elements of the last optimizer's parameters and state."""
        held = state = 0
        for last in self.made[-1:]:
            held = sum(p.numel() for group in last.param_groups for p in group["params"])
            entries = (item for entry in last.state.values() for item in entry.items())
            state = sum(v.numel() for k, v in entries if isinstance(v, Tensor) and k != "step")
        return {"made": len(self.made), "held": held, "state": state}


class OneProcess:
    """It sees every rank's batches. Its model is a copy: the learner's may be in pieces."""

    def __init__(self, model: nn.Module, kind: str = "sgd", max_norm: float | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = Factory(kind)(parameters(self.model))
        self.max_norm = max_norm

    def step(self, batches: Sequence[Sequence[Batch]]) -> dict[str, Any]:
        """``batches`` by rank, then by micro-batch. What each rank has by itself (``own``), the
        mean of that, and the mean had only the last micro-batch counted (``last``)."""
        own = [self._gradients(each) for each in batches]
        last = _mean([self._gradients(each[-1:]) for each in batches])
        before, means = trained(self.model), _mean(own)
        for name, p in self.model.named_parameters():
            mean = means.get(name)
            p.grad = None if mean is None else mean.clone()  # clipping is in place
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        want = trained(self.model)
        return {"before": before, "own": own, "mean": means, "last": last, "want": want}

    def _gradients(self, batches: Sequence[Batch]) -> Tensors:
        """The mean over the micro-batches of one rank."""
        self.model.zero_grad()
        for one in batches:
            (loss(self.model, one) / len(batches)).backward()
        return gradients(self.model)


def _mean(parts: Sequence[Tensors]) -> Tensors:
    """None only where no rank has one; a rank without one counts as zeros."""
    means: Tensors = {}
    for name in parts[0]:
        given = [g for part in parts if (g := part[name]) is not None]
        means[name] = torch.stack(given).sum(0) / len(parts) if given else None
    return means


# ------------------------------------------------------------------ the learner's loop


def rows_of(
    at: Stage, one: OneProcess, micros: Sequence[int],
    work: Callable[[list[Batch]], dict[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """A row of evidence for each step, of ``micros[i]`` micro-batches.

    ``work`` takes a step with this rank's batches and returns what it left.
    """
    rows = []
    for step, count in enumerate(micros):
        batches = [[batch(r, step, m) for m in range(count)] for r in range(at.world)]
        row, first = one.step(batches), len(at.spy.calls)
        row |= work(batches[at.rank])
        calls = [c for c in at.spy.calls[first:] if c["mark"] != LOOKING]
        rows.append(row | {"micros": count, "calls": calls})
    return rows


def prepare(at: Stage) -> tuple[nn.Module, OneProcess]:
    """The case's toy, watched, and one process's copy of it: made before the learner's code, which
    may hang hooks on the model."""
    model = build(TOYS[at.options["toy"]])
    at.spy.watch(model)
    return model, OneProcess(model)


def train(
    at: Stage, model: nn.Module, one: OneProcess, micros: Sequence[int],
    work: Callable[[list[Batch]], None],
) -> dict[str, Any]:  # fmt: skip
    """Steps after which the gradients are looked at. The model is then updated by one process's, so
    that a mistake stays in its step."""

    def look(batches: list[Batch]) -> dict[str, Any]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        work(batches)
        moved = [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]
        found = {"got": gradients(model), "moved": moved}
        model.zero_grad()
        model.load_state_dict(one.model.state_dict())
        return found

    sizes = {name: t.numel() * t.element_size() for name, t in trained(model).items()}
    return {"steps": rows_of(at, one, micros, look), "sizes": sizes}


def train_sharded(
    at: Stage, toy: str, steps: int, make: Callable[[nn.Module, Factory], Any], *, drops: bool
) -> dict[str, Any]:
    """Steps after which the parameters are looked at. ``make`` builds the learner's ZeRO, ``drops``
    says whether p.grad must be None already after backward."""
    kind = at.options["kind"]
    model = build(TOYS[toy])
    one, factory = OneProcess(model, kind, at.options.get("max_norm")), Factory(kind)
    zero = make(model, factory)
    forward: Callable[[Tensor], Tensor] = getattr(zero, "forward", model)

    def work(batches: list[Batch]) -> dict[str, Any]:
        left = set()
        for i, batch in enumerate(batches):
            at.spy.mark(f"micro {i}")
            backward(loss(forward, batch) / len(batches))
            left |= _with_gradient(model) if drops else set()
        at.spy.mark("step")
        zero.step()
        at.spy.mark(LOOKING)
        got = gathered(zero) if hasattr(zero, "full_params") else trained(model)
        return {"left": sorted(left | _with_gradient(model)), "got": got}

    sizes = {name: t.numel() for name, t in trained(one.model).items()}
    rows = rows_of(at, one, [at.options.get("micros", 1)] * steps, work)
    return {"steps": rows, "sizes": sizes, **factory.evidence()}


def gathered(zero: Any) -> dict[str, Tensor]:
    """All parameters of a ZeRO that does not keep them whole."""
    params = zero.full_params()
    if not isinstance(params, dict) or not all(isinstance(v, Tensor) for v in params.values()):
        raise Rejected(say("wrong-type/zero3"))
    if any(v.numel() and not v.untyped_storage().nbytes() for v in params.values()):
        raise Rejected(say("freed-too-early"))  # to read them would end the process
    return {name: value.detach().clone() for name, value in params.items()}


def backward(loss: Tensor) -> None:
    """Say it in a learner's words if backward reads what was freed: torch's do not explain it."""
    try:
        loss.backward()
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise Rejected(say("freed-too-early/backward")) from None


def _with_gradient(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------ what a rank holds


# The frequent views of aten: they make no storage, so there is nothing new to weigh.
VIEWS = {"alias", "detach", "expand", "select", "slice", "split", "t", "transpose", "view"}


class Weigher(Memory):
    """Weighs at every operation, for a storage may also grow and shrink by resize_()."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # what is here already is of no interest, and makes gc.collect() slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name.removeprefix("aten::") not in VIEWS:
            self.peak = max(self.peak, self.count())
        return result


def weigh(at: Stage, depth: int, make: Callable[[nn.Module, Factory], Any]) -> dict[str, int]:
    """Bytes that a ZeRO holds of a deep model: after __init__, and in each phase of a micro-batch
    beyond those at its beginning (``backward`` and ``after``: at the beginning of the step)."""
    weigher = Weigher()
    with weigher:
        model = build(lambda: wide(depth))
        psi = sum(p.numel() * p.element_size() for p in model.parameters())
        zero = make(model, Factory("adamw"))
    forward: Callable[[Tensor], Tensor] = getattr(zero, "forward", model)
    held = weigher.count()

    def weigh_micro(step: int, micro: int, start: int) -> dict[str, int]:
        one = batch(at.rank, step, micro, rows=1, width=48, out=48)
        at.spy.mark(f"micro {micro}")
        before = weigher.count()
        value, first = weigher.phase(lambda: loss(forward, one) / 2)
        _, second = weigher.phase(functools.partial(backward, value))
        del value
        return {
            "forward": first.peak,
            "between": first.held - before,
            "backward": first.held - start + second.peak,
            "after": weigher.count() - start,
        }

    def weigh_step(step: int) -> dict[str, int]:
        start = weigher.count()
        micros = [weigh_micro(step, micro, start) for micro in range(2)]
        at.spy.mark("step")
        weigher.phase(zero.step)
        most = {phase: max(row[phase] for row in micros) for phase in micros[0]}
        return most | {"idle": weigher.count(), "params": _in_storages(model)}

    # Gloo's threads let go of a tensor a little after its message is done: the least is the truth.
    rows = [weigh_step(step) for step in range(4)]
    least = {key: min(row[key] for row in rows) for key in rows[0]}
    return least | {"psi": psi, "held": held, "block": psi // depth}


def _in_storages(model: nn.Module) -> int:
    """Bytes behind the parameters, each storage once."""
    storages = {s._cdata: s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    return sum(storages.values())
