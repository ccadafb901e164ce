"""What a stranger broke who had seen the docs alone. Each of these trained on without a word."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import commands
import toys
from conftest import GetRanks
from shardlab import naming
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import optimizers
from shardlab.strategies import model_checks
from shardlab.strategies.base import Setup
from shardlab.strategies.sharded.zero3 import Zero3
from shardlab.workloads import first_calls
from shardlab.workloads.base import Batch
from shardlab.workloads.first_calls import watch_first_calls
from shardlab.world import World


class GrowsALayer(nn.Module):
    """Its adapter is made in the first forward: every rank has its own, and no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "adapter"):
            self.adapter = nn.Linear(3, 1)
        return self.adapter(self.layer(x))


class GrowsABuffer(GrowsALayer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.std())
        return self.layer(x) * self.scale


BATCH = Batch(torch.ones(4, 3), None, count=4, samples=4)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.inputs).sum()


def never(note: str) -> None:
    raise AssertionError(note)


@pytest.mark.parametrize(
    ("make", "name"), [(GrowsALayer, "adapter.weight"), (GrowsABuffer, "scale")]
)
def test_tensors_that_are_made_in_the_first_forward(make: type[nn.Module], name: str) -> None:
    with pytest.raises(UsageError, match=f"makes '{name}' in its first forward"):
        watch_first_calls(loss, never)(make(), BATCH)
    checked, plain = watch_first_calls(loss, never), nn.Linear(3, 1)
    assert [checked(plain, BATCH).requires_grad for _ in range(3)] == [True, True, True]


class ReplacesItsWeight(GrowsALayer):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight.detach().clone())
        return self.layer(x)


def test_a_parameter_that_forward_replaces_would_never_train() -> None:
    with pytest.raises(UsageError, match=r"a new parameter in the place of 'layer\.weight'"):
        watch_first_calls(loss, never)(ReplacesItsWeight(), BATCH)


class Counts(GrowsALayer):
    """Beside a counter it has a cache, of which nothing need be said."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.calls = 0
        self.cached_length = 0

    def forward(self, x: Tensor) -> Tensor:
        self.layer.calls += 1
        self.cached_length = len(x)
        self.last = x.detach().mean(0)
        return self.layer(x) * self.layer.calls


def test_state_in_plain_attributes_is_noted_once() -> None:
    notes: list[str] = []
    watched, model = watch_first_calls(loss, notes.append), Counts()
    for _ in range(4):
        watched(model, BATCH)
    assert len(notes) == 1
    assert "changes 'last', 'layer.calls' in every forward" in notes[0]


def test_a_forward_that_is_ended_is_not_looked_at_for_ever() -> None:
    """A pipeline ends the forward of every stage but the last: each look costs as much as one."""

    def ended(_model: nn.Module, _batch: Batch) -> Tensor:
        raise KeyboardInterrupt

    watched, model = watch_first_calls(ended, never), nn.Linear(3, 1)
    with mock.patch.object(first_calls, "registered", wraps=first_calls.registered) as look:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                watched(model, BATCH)
    assert look.call_count == 2


def notes_of(world: World) -> dict[str, list[str]]:
    """What is noted of a plain model under each strategy."""
    found: dict[str, list[str]] = {}
    for name in STRATEGIES:
        if name == "single" and world.size > 1:
            continue
        make = naming.resolve(name, STRATEGIES, "strategy")
        watched = watch_first_calls(toys.loss, found.setdefault(name, []).append)
        optimizer = optimizers.of_class(torch.optim.SGD, lr=0.1)
        setup = Setup(toys.build("mlp", seed=0), optimizer, watched, world.mesh)
        instance = make(setup)
        for step in range(3):
            instance.gradients([toys.batch(step, world.rank, 0)])
            instance.step()
        instance.settle()
    return found


@pytest.mark.long
def test_what_a_strategy_counts_is_not_the_models(ranks: GetRanks) -> None:
    for found in ranks(2).run(notes_of, deadline_s=60):
        assert len(found) == len(STRATEGIES) - 1
        assert {name: notes for name, notes in found.items() if notes} == {}


def test_a_hook_after_accumulation_sees_a_part_only() -> None:
    model = nn.Linear(3, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    model_checks.refuse_unsupported(model, ranks=1)
    with pytest.raises(UsageError, match="parameter 'weight' has a hook of the model's own"):
        model_checks.refuse_unsupported(model, ranks=2)


def scripted(world: World) -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 1)))
    make = optimizers.of_class(torch.optim.SGD, lr=0.1)
    Zero3(Setup(model, make, lambda m, b: m(b.inputs).sum(), world.mesh, blocks=["1"]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_zero3_does_not_see_what_scripted_code_reads(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="zero3: module '1' is compiled by the model itself"):
        ranks(2).run(scripted)


UNJUDGEABLE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.first.weight.register_hook(lambda g: g.sign() * g.abs().sqrt())

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

def workload():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Model(), list(zip(x, x[:, :2], strict=True)), nn.MSELoss(reduction="sum")
"""


@pytest.mark.long
def test_a_proof_that_would_pass_any_mistake_is_not_made(tmp_path: Path) -> None:
    """A hook that is not linear differs from itself by a fifth when the loss is scaled."""
    (tmp_path / "hooked.py").write_text(UNJUDGEABLE)
    done = commands.here(
        "prove", "--workload", "hooked.py:workload", "--strategies", "simple_ddp",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nothing can be proved on hooked" in done.stderr
