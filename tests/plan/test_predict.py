"""From measured and simulated steps to worlds and batches that nobody ran."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest

from shardlab import config as configs
from shardlab.plan import extrapolate, gloo, predict
from shardlab.plan.graph import Event, Group, Start, Step, Wait, Work
from shardlab.strategies.data_parallel import bucket_size
from test_gloo import NEAR


def in_world(ranks: int) -> Step:
    """A sharded step: whole tensors in forward, a shard in the update."""
    events: list[Event] = [
        Work("aten.mm", 600.0, 100.0, phase="forward"),
        Start(0, "all_reduce", 4096, Group(ranks)),
        Wait(0),
        Work("aten.add_", 0.0, 64.0 / ranks, phase="update"),
    ]
    return Step(ranks, events, samples=4 * ranks, peak_bytes=round(100 + 6400 / ranks))


def test_a_world_follows_from_two_smaller_ones() -> None:
    found = extrapolate.at_world(in_world(8), in_world(16), 1024)
    expected = in_world(1024)
    assert found is not None
    for event, other in zip(found.events, expected.events, strict=True):
        if isinstance(event, Work):
            assert isinstance(other, Work)
            assert event.bytes == pytest.approx(other.bytes)
        else:
            assert event == other
    assert found.samples == 4096
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, abs=2)


def test_a_group_inside_a_node_stays_as_it_is() -> None:
    small, large = (
        dataclasses.replace(in_world(n), events=[Start(0, "all_gather", 64, Group(4)), Wait(0)])
        for n in (8, 16)
    )
    found = extrapolate.at_world(small, large, 64)
    assert found is not None
    assert next(found.starts()).group == Group(4)


def test_steps_that_do_different_things_have_nothing_in_between() -> None:
    other = dataclasses.replace(in_world(16), events=in_world(16).events[1:])
    assert extrapolate.at_world(in_world(8), other, 64) is None


def tiny(**more: object) -> configs.Config:
    return configs.load(
        None,
        {
            "model.size": "tiny",
            "strategy.name": "zero1",
            "launch.world": 2,
            "training.global_batch": 8,
            "training.steps": 3,
            **{key.replace("__", "."): value for key, value in more.items()},
        },
    )


def timed(*totals: float, world: int = 2) -> Step:
    """A stretch of work, and a collective that is waited for."""
    work = Work("measured", 0, 0, seconds=statistics.median(totals))
    events = [work, Start(0, "all_reduce", 4, Group(world)), Wait(0)]
    return Step(world, events, samples=4, totals_s=totals)


def test_emulations_of_one_step_are_as_long_as_their_mean() -> None:
    found = predict.mean_of([timed(1.0, 1.0, 1.0), timed(3.0, 3.0, 3.0)])
    assert [work.seconds for work in found.works()] == [2.0]
    assert found.totals_s == (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)


def test_the_last_of_many_ranks_is_later_and_none_where_all_steps_take_the_same() -> None:
    here = predict.MeasuredMachine(gloo.Gloo(NEAR, NEAR), cores=1.0)
    alike = here.play([timed(1.0, 1.0, 1.0)])
    assert alike.wait_s == pytest.approx(1e-3 + predict.MEETING_S, rel=0.01)
    two = here.play([timed(0.9, 1.1, 0.9, 1.1, 1.0)])
    many = here.play([timed(0.9, 1.1, 0.9, 1.1, 1.0, world=8)])
    assert alike.step_s < two.step_s < many.step_s
    # Slower for a while, and then steady: all ranks are, so none is later than the others.
    steady = here.play([timed(*[0.9] * 5, *[1.1] * 5, 1.0, 1.0)])
    assert steady.wait_s == pytest.approx(alike.wait_s)


def test_a_link_is_seen_as_ranks_would_measure_it() -> None:
    assert predict.SAMPLE_BYTES == bucket_size.SAMPLE_BYTES
    rows = [
        {"op": op, "bytes": size, "wall_s": 1e-3 + 8e-9 * sent, "host_s": 1e-3 + 1e-9 * sent,
         "queued_wall_s": 1e-3 + 8e-9 * sent, "queued_host_s": 1e-3 + 1e-9 * sent}
        for op in gloo.OPS for size in (256, 2**24) for sent in (gloo.sent_by(op, size, 2),)
    ]  # fmt: skip
    far = gloo.measured(rows, rate=125e6)
    for rate in (125e6, 500e6):
        link = bucket_size.Link(*predict.MeasuredMachine(gloo.Gloo(far, far), 2.0, rate).link(2))
        assert link.latency_s == pytest.approx(1e-3, rel=0.02)
        assert link.s_per_byte == pytest.approx(1 / rate, rel=0.02)
        assert link.taken == 0.0  # there is a core for each rank's messages


@pytest.mark.long
def test_this_machine_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is measured, its links are those of its datasheet. (Here a CPU stands for it.)"""
    monkeypatch.setattr(predict, "gpu_here", lambda: "NVIDIA H200")
    with predict.Predictor() as predictor:
        found = predictor.predict(tiny(launch__world=8, training__global_batch=32))
    assert found.is_measured
    assert found.memory_limit == 141e9
    assert found.wait_s < 0.01 * found.step_s  # 120,000 parameters over NVLink
    assert "work measured on NVIDIA H200; links as h200 usually has them" in found.notes


CUSTOM = """
import torch
from torch import nn

@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, grad: 2 * grad)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = twice(self.layer(x))
        return -y if (x > 1e9).any() else y

def workload():
    return Model(), (torch.randn(64, 8), torch.randint(0, 4, (64,))), nn.CrossEntropyLoss()
"""


@pytest.mark.long
def test_an_operator_without_a_price_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CUSTOM)
    with predict.Predictor() as predictor:
        config = tiny(model__workload=f"{tmp_path / 'own.py'}:workload", model__size=None)
        found = predictor.predict(config, "h100")
        assert any(note.startswith("no price of mine.twice") for note in found.notes)
        assert any("own.py:19: the answer was guessed" in note for note in found.notes)
        assert not any("no price" in note for note in predictor.predict(tiny(), "h100").notes)
        sharded = tiny(strategy__name="pytorch_zero3")
        assert not any("no price" in note for note in predictor.predict(sharded, "h100").notes)
