"""What the rehearsal of one sample compares, and when it has nothing to compare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardlab.errors import UsageError
from shardlab.strategies.rehearsal import LOW_PRECISION, TOLERANCE, Rehearsal
from shardlab.workloads.base import Batch

SAMPLE = Batch(torch.ones(1, 4, dtype=torch.float64), torch.zeros(1), 1, 1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(batch.inputs).square().sum()
    return value


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.rand(())


def made(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *layers).double()


def test_a_model_that_draws_is_evaluated_and_one_that_always_draws_is_left_alone() -> None:
    plain = Rehearsal.of(made(), loss, SAMPLE)
    assert plain is not None
    assert plain.trains
    assert plain.tolerance == TOLERANCE[torch.float64]
    drops = Rehearsal.of(made(nn.Dropout(0.5)), loss, SAMPLE)
    assert drops is not None
    assert not drops.trains
    assert Rehearsal.of(made(Noisy(4, 4)), loss, SAMPLE) is None


def test_a_model_that_cannot_take_one_sample_is_left_alone() -> None:
    class Pairs(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) - super().forward(input[1][None])

    assert Rehearsal.of(made(Pairs(4, 4)), loss, SAMPLE) is None


def test_what_is_not_finite_is_left_alone() -> None:
    model = made()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert Rehearsal.of(model, loss, SAMPLE) is None


def test_low_precision_may_differ_more() -> None:
    def in_bf16(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    found = Rehearsal.of(made(), in_bf16, SAMPLE)
    assert found is not None
    assert found.tolerance == LOW_PRECISION


def test_another_loss_and_a_forward_that_fails_are_refused() -> None:
    model = made()
    found = Rehearsal.of(model, loss, SAMPLE)
    assert found is not None
    found.hold(lambda: found.again(model, loss, SAMPLE), "here", "why?")
    with pytest.raises(UsageError, match=r"here: for one sample the ranks together.*\(why\?\)"):
        found.hold(lambda: found.expected + 1e-3, "here", "why?")
    with pytest.raises(UsageError, match="the forward of one sample fails"):
        found.hold(lambda: found.again(model, loss, Batch(torch.ones(1, 3), None, 1, 1)), "a", "b")
