"""Memory without running: the estimate is what is measured, for every strategy, ours or not."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import commands
import people
from conftest import GetRanks, deep_unless
from results import drawn_table
from shardlab import config as configs
from shardlab.errors import Late, RankFailure, UsageError
from shardlab.measure import estimate, kernels, simulate
from shardlab.measure.estimate import Simulator, largest_batch
from shardlab.measure.kernels import Kernels
from shardlab.measure.longest import Found, Longest, look
from shardlab.measure.simulate import Tracker, backend_of
from shardlab.naming import STRATEGIES
from shardlab.report import memory as report
from shardlab.report import terminal
from shardlab.strategies.base import Setup
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP
from shardlab.text import parse_bytes
from shardlab.workloads.base import Batch, Workload, classification_loss
from shardlab.workloads.samples import Stream

WEIGH = "shardlab.measure.estimate:weigh"
GPT = {"model.size": "tiny", "data.source": "synthetic"}
RESNET = {
    "model.workload": "resnet_cifar10",
    "model.options.width": 8,
    "data.source": "synthetic",
}


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as opened:
        yield opened


def config_of(strategy: str, world: int, batch: int, values: dict[str, Any]) -> configs.Config:
    values = dict(values)
    parts = values.pop("parts", 1)
    (row,) = estimate.rows_of(configs.load(None, values), [strategy], world, batch * parts)
    return row.config.in_parts(parts)


def step(simulator: Simulator, config: configs.Config, device: str = "cpu") -> dict[str, int]:
    found: dict[str, int] = simulator.run(config, device)["weights"]["step"]
    return found


# ------------------------------------------------------------------ against what is measured


class Turn(nn.Module):
    """A block whose outputs do not begin with the samples, and of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:  # (64, samples)
        return torch.relu(self.layer(x.t())).t(), steps + 1


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64).requires_grad_(False)
        self.blocks = nn.ModuleList(Turn() for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(64, 500)

    def forward(self, x: Tensor) -> Tensor:
        y, steps = self.embed(x).t(), torch.zeros(7, dtype=torch.int64)
        for block in self.blocks:
            y, steps = block(y, steps)
        out: Tensor = self.head(y.t())
        return out


def turned() -> Workload:
    draw = torch.Generator().manual_seed(0)
    data = people.Samples(torch.randn(99, 16, generator=draw), torch.arange(99))
    blocks = tuple(f"blocks.{i}" for i in range(4))
    return Workload("turned", Turned, classification_loss, data, blocks=blocks)


PEOPLE = Path(__file__).parents[1] / "models" / "people.py"
KERNELS = Path(__file__).parents[2] / "benchmarks" / "kernel_models.py"
MUON = {**GPT, "training.optimizer": "muon"}  # its parameters have owners
FOUR_BLOCKS = {**GPT, "model.options.layers": 4, "parts": 3}
TURNED = {"model.workload": f"{__file__}:turned", "parts": 2}


def workload(file: Path, name: str) -> dict[str, Any]:
    return {"model.workload": f"{file}:{name}"}


MECHANISMS = ("bucket_ddp_async", "zero1", "zero3", "pytorch_ddp", "pytorch_zero3", "local_sgd")
OTHERS = [name for name in STRATEGIES if name not in (*MECHANISMS, "single")]
FAST: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, 2, 4, GPT) for name in (*MECHANISMS, "pipeline_gpipe", "context_parallel")),
    ("zero1:tensor=2:pipeline=2", 4, 4, GPT),
    ("pipeline_zero_bubble", 2, 4, TURNED),
    ("zero3", 2, 4, RESNET),
    ("zero1", 3, 4, MUON),
    *(("single", 1, 8, workload(KERNELS, n)) for n in ("lstm", "conv2d_strided", "fourier")),
    *(("simple_ddp", 2, 2, workload(PEOPLE, name)) for name in ("unet", "cache")),
]
DEEP: list[tuple[str, int, int, dict[str, Any]]] = [
    *((name, 2, 4, GPT) for name in (*OTHERS, "pytorch_tensor_parallel")),
    ("single", 1, 4, GPT),
    ("pipeline_interleaved", 2, 4, FOUR_BLOCKS),
    ("pytorch_pipeline:schedule=zero_bubble", 2, 4, FOUR_BLOCKS),
    ("pytorch_zero3", 2, 4, RESNET),
    ("zero2", 2, 4, MUON),
    *(("simple_ddp", 2, 2, workload(PEOPLE, name)) for name in ("vit", "bert", "weight_norm")),
]


@pytest.mark.long
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("strategy", "world", "batch", "values"), [*FAST, *deep_unless(lambda *_: False, DEEP)]
)
def test_the_estimate_is_what_is_measured(
    strategy: str,
    world: int,
    batch: int,
    values: dict[str, Any],
    simulator: Simulator,
    ranks: GetRanks,
) -> None:
    """Of the fullest rank and of each stage; what kernels take for themselves is counted."""
    config = config_of(strategy, world, batch, values)
    answer = simulator.run(config, "cpu")
    found = answer["weights"]
    # A release on a thread of Gloo's may go unseen, and the measured is then too high: look again.
    for _ in range(3):
        measured = ranks(world).run(WEIGH, config, deadline_s=60)[0]
        if found["step"]["total"] > 0.95 * measured["step"]["total"]:
            break
    within = 0.02 if world == 1 else 0.05
    assert found["step"]["total"] == pytest.approx(measured["step"]["total"], rel=within)
    assert found["building"]["total"] <= 1.05 * measured["building"]["total"]
    error = estimate.errors(found["step"], measured["step"])
    assert error is not None
    assert sum(e for term, e in error.items() if term != "total") == pytest.approx(error["total"])
    for term in ("parameters", "optimizer"):
        assert abs(error[term]) < 0.01, term
    for moment in ("update", "between"):
        assert 0 < found[moment]["total"] <= 1.05 * measured[moment]["total"]
    assert answer["uncounted"] == []
    for rank in answer["ranks"]:
        of_rank = measured["ranks"][rank["rank"]]
        assert rank["step_bytes"]["total"] == pytest.approx(of_rank, rel=0.05)
    assert len(answer["ranks"]) == (2 if "pipeline" in strategy else 1)
    if "pipeline" in strategy:
        assert min(stage for rank in answer["ranks"] for stage in rank["stages"]) == 0


@pytest.mark.parametrize(
    ("strategy", "world", "shares"),
    [("single", 1, (1, 1, 2)), ("zero2", 2, (1, 0.5, 1)), ("zero3", 2, (0.5, 0.5, 1))],
)
def test_what_is_held_before_the_update_and_between_steps(
    strategy: str, world: int, shares: tuple[float, ...], simulator: Simulator
) -> None:
    """The table of parameters, gradients and optimizer state that courses let one compute."""
    found = simulator.run(config_of(strategy, world, 1, GPT), "cpu")["weights"]
    psi = 4 * 120_576  # bytes of all parameters
    terms = ("parameters", "gradients", "optimizer")
    held = [found["update"][term] / psi for term in terms]
    assert held == pytest.approx(shares, rel=0.02)  # with norms, padding and Adam's counters
    assert found["between"]["gradients"] < 0.01 * psi  # a batch is still there, among the rest
    assert found["between"]["total"] == pytest.approx(psi * (shares[0] + shares[2]), rel=0.03)


@pytest.mark.long
def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_limit_s: float) -> Any:
        raise KeyboardInterrupt

    small, large = (config_of("single", 1, batch, GPT) for batch in (1, 16))
    expected = step(simulator, small)
    with monkeypatch.context() as patch:
        patch.setattr(simulator, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(simulator, large)
    assert step(simulator, small) == expected


def test_a_large_batch_follows_from_two_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a kernel that cannot run is named."""
    x, weight = torch.ones(64, 16, 32, 32), torch.ones(64, 16, 3, 3)
    asked = [x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    convolution = torch.ops.aten.convolution.default
    few = Kernels("cpu").taken(convolution, asked)
    monkeypatch.setattr(kernels, "ENOUGH", 2**20)
    assert Kernels("cpu").taken(convolution, asked) == few
    asked[1] = torch.ones(64, 15, 3, 3)
    broken = Kernels("cpu")
    assert broken.taken(convolution, asked) is None
    assert list(broken.uncounted) == ["convolution"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kernels"), [("lstm", ["lstm"]), ("conv2d", ["convolution"]), ("linear", [])]
)
def test_on_a_gpu_what_cudnn_takes_is_not_known(
    name: str, kernels: list[str], simulator: Simulator
) -> None:
    config = config_of("single", 1, 1, workload(KERNELS, name))
    assert simulator.run(config, "cuda")["uncounted"] == kernels


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("pipeline_1f1b:balance=time", "balance=time: an estimate runs nothing that takes time"),
        ("pipeline_interleaved", "4 stages need as many blocks"),
        ("zero3:pipeline=2", "zero3"),
    ],
)
def test_layouts_that_cannot_be_estimated(strategy: str, words: str, simulator: Simulator) -> None:
    with pytest.raises(UsageError, match=words):
        simulator.run(config_of(strategy, 2, 1, GPT), "cpu")


# ------------------------------------------------------------------ what changes it, and how


class Hoarder(SimpleDDP):
    """A strategy of a user's, that keeps a copy of all parameters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.hoard = [p.detach().clone() for p in self.params.values()]


@pytest.mark.long
def test_a_users_strategy_is_weighed_by_its_own_code(simulator: Simulator) -> None:
    plain = step(simulator, config_of("simple_ddp", 2, 2, GPT))
    hoarding = step(simulator, config_of(f"{__file__}:Hoarder", 2, 2, GPT))
    assert hoarding["total"] - plain["total"] == plain["parameters"]


@pytest.mark.long
def test_what_is_asked_for_shows(simulator: Simulator) -> None:
    adam = step(simulator, config_of("simple_ddp", 2, 8, GPT))
    assert adam["optimizer"] == pytest.approx(2 * adam["parameters"], rel=0.01)
    sgd = step(simulator, config_of("simple_ddp", 2, 8, {**GPT, "training.optimizer": "sgd"}))
    assert sgd["optimizer"] == 0
    begun = {**GPT, "training.optimizer": "adagrad"}  # it has state before the first step
    for strategy, share in (("simple_ddp", 1.0), ("zero1", 0.5), ("pytorch_zero3", 0.5)):
        adagrad = step(simulator, config_of(strategy, 2, 8, begun))
        assert adagrad["optimizer"] == pytest.approx(share * adam["parameters"], rel=0.05)
    half = step(simulator, config_of("simple_ddp", 2, 4, GPT))
    assert half["activations"] == pytest.approx(adam["activations"] / 2, rel=0.02)
    again = config_of("simple_ddp", 2, 8, {**GPT, "training.activation_checkpointing": True})
    assert step(simulator, again)["activations"] < 0.5 * adam["activations"]
    several = config_of("simple_ddp", 2, 8, {**GPT, "parts": 3})
    assert step(simulator, several)["activations"] == pytest.approx(adam["activations"], rel=0.02)


@pytest.mark.long
def test_many_ranks_are_no_more_work(simulator: Simulator) -> None:
    few = step(simulator, config_of("zero3", 2, 1, GPT))
    many = step(simulator, config_of("zero3", 64, 1, GPT))
    assert many["optimizer"] == pytest.approx(few["optimizer"] / 32, rel=0.05)
    assert many["total"] < few["total"]


@pytest.mark.long
def test_groups_of_ranks_hold_more(simulator: Simulator) -> None:
    """Shards of a group of two, not of all eight."""
    names = "pytorch_zero3", "pytorch_hsdp:shards=2"
    whole, groups = (step(simulator, config_of(name, 8, 1, GPT)) for name in names)
    assert groups["optimizer"] == pytest.approx(4 * whole["optimizer"], rel=0.05)


def test_a_gpu_gives_out_blocks(simulator: Simulator) -> None:
    found = step(simulator, config_of("zero3", 2, 1, GPT), "cuda")
    assert all(size % 512 == 0 for size in found.values())
    assert found["total"] > 0


@pytest.mark.long
def test_over_nccl_ddps_first_buckets_stay_beside_the_new_ones(simulator: Simulator) -> None:
    """Measured on a GPU (docs/memory.md): one more copy of the gradients in the second step."""
    ours = step(simulator, config_of("bucket_ddp_async", 1, 1, GPT), "cuda")
    ddp = step(simulator, config_of("pytorch_ddp", 1, 1, GPT), "cuda")
    unknown = config_of("pytorch_ddp:find_unused_parameters=true", 1, 1, GPT)
    gloo = step(simulator, config_of("pytorch_ddp", 1, 1, GPT), "cpu")
    one_copy = ddp["parameters"]
    assert ddp["total"] - ours["total"] == pytest.approx(one_copy, rel=0.02)
    assert ddp["gradients"] == pytest.approx(2 * one_copy, rel=0.02)
    assert gloo["gradients"] == pytest.approx(one_copy, rel=0.02)
    assert step(simulator, unknown, "cuda")["gradients"] == pytest.approx(one_copy, rel=0.02)


def test_ranks_that_share_a_gpu_are_estimated_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are measured here; 64 ranks elsewhere have 64 GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    ranks = {world: configs.LaunchConfig(world=world, device="cuda") for world in (1, 2, 64)}
    assert backend_of(ranks[2], "cuda", here=True) == "gloo"
    assert backend_of(ranks[1], "cuda", here=True) == "nccl"
    assert backend_of(ranks[64], "cuda", here=False) == "nccl"
    assert backend_of(configs.LaunchConfig(world=2), "cpu", here=True) == "gloo"


@pytest.mark.long
def test_wrong_input_and_a_crash_are_told_apart(simulator: Simulator) -> None:
    with pytest.raises(UsageError, match="cannot form groups of 3"):
        simulator.run(config_of("pytorch_hsdp:shards=3", 4, 1, GPT), "cpu")
    with pytest.raises(RankFailure, match="the estimate failed: ZeroDivisionError"):
        simulator.run(config_of(f"{__file__}:Broken", 2, 1, GPT), "cpu")
    assert step(simulator, config_of("single", 1, 1, GPT))["total"] > 0  # it goes on


class Broken(SimpleDDP):
    def step(self) -> None:
        raise ZeroDivisionError


# ------------------------------------------------------------------ people's models


def test_a_model_that_converts_itself_keeps_its_ties() -> None:
    """PyTorch cannot convert a parameter without content in its place."""

    def tied() -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        model.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        return model

    real = tied()
    before = [*real.parameters()]
    with mock.patch.object(nn.Module, "_apply", simulate._replacing()):
        with FakeTensorMode():
            fake = tied().double()
        real.double()
    for model in (fake, real):
        assert model[0].weight is model[2].weight
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model.counts.dtype == torch.int64
    assert all(isinstance(t, FakeTensor) for t in (*fake.parameters(), *fake.buffers()))
    assert all(now is then for now, then in zip(real.parameters(), before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", deep_unless("zero3".__eq__, ("single", "zero3", "pytorch_ddp"))
)
@pytest.mark.parametrize("name", people.EVERYONE)
def test_peoples_models_are_estimated(name: str, strategy: str, simulator: Simulator) -> None:
    """Each within seconds. ViT's initialisation used to loop for ever."""
    found = simulator.run(config_of(strategy, 2, 2, workload(PEOPLE, name)), "cpu", limit_s=60)
    assert found["weights"]["step"]["total"] > 0
    assert bool(found["assumed"]) is (name in people.SKIPPING)


ODD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        {line}
        return self.layer(x)

def workload():
    data = [(torch.randn(4), i % 3) for i in range(20)]
    return Model(), data, nn.CrossEntropyLoss(reduction="sum")
"""


def odd(folder: Path, line: str) -> configs.Config:
    path = folder / "odd.py"
    path.write_text(ODD.format(line=line))
    return config_of("simple_ddp", 2, 2, {"model.workload": f"{path}:workload"})


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = x[x[:, 0] > 1e9] if (x > 1e9).any() else x", None),
        ("n = int(x.abs().sum() * 0) + 4; x = x[:, :n]", None),
        ("x = x * (len(torch.unique(x)) > 0)", "needs the values of its tensors"),
        ("x = x[x[:, 0] > -1e9]", "needs the values of its tensors"),
        ("while (x > 1e9).any(): x = x / 2", None),
        ("n = int((x == x).sum() / len(x)); x = x[:, :n]", "asks a tensor for its value, and"),
        ("while (x == x).sum().item() != x.numel(): x = x / 2", "a loop waits for the value"),
    ],
)
def test_models_that_ask_for_values(
    line: str, words: str | None, simulator: Simulator, tmp_path: Path
) -> None:
    """Both answers are tried; what cannot go on without values is refused, with its line."""
    config = odd(tmp_path, line)
    if words is None:
        assert simulator.run(config, "cpu")["assumed"][0].endswith("odd.py:10")
    else:
        with pytest.raises(UsageError, match=rf"odd.py:10\b.*{words}"):
            simulator.run(config, "cpu")


@pytest.mark.long
def test_an_estimate_has_a_time_limit(tmp_path: Path) -> None:
    sleeps = odd(tmp_path, "import time; time.sleep(60 * (type(x) is not torch.Tensor))")
    with Simulator() as opened:
        opened.run(config_of("single", 1, 1, GPT), "cpu")  # its process has begun
        with pytest.raises(Late, match=r"no answer within 4 s; it stood at odd.py:10"):
            opened.run(sleeps, "cpu", limit_s=4)
        assert step(opened, config_of("single", 1, 1, GPT))["total"] > 0  # with a new one


@pytest.mark.long
def test_one_that_fails_is_a_row() -> None:
    specs = [f"{__file__}:Broken", "simple_ddp"]
    rows = estimate.rows_of(configs.load(None, GPT), specs, 2, 1)
    result = estimate.estimate(rows, "cpu", 10**6, "command")
    assert [row["status"] for row in result["rows"]] == ["failed", "ok"]
    assert "ZeroDivisionError" in result["rows"][0]["reason"]
    assert result["rows"][1]["fits"] is False
    assert result["rows"][1]["largest_batch"] == 0


def test_storages_are_followed_through_views_and_new_sizes() -> None:
    tracker = Tracker("cpu", block=1)

    def held() -> list[int]:
        return [a.size for a in tracker.allocations() if a.end is None]

    with FakeTensorMode(), tracker.tracking():
        whole = torch.empty(100)
        part = whole[:10]
        assert held() == [400]
        del whole
        assert held() == [400]  # the view keeps it
        part.untyped_storage().resize_(0)
        assert not held()
        part.untyped_storage().resize_(40)
        assert held() == [40]
        del part
    assert not held()
    assert sorted(a.size for a in tracker.allocations()) == [40, 400]


# ------------------------------------------------------------------ the largest batch


@given(
    fixed=st.integers(0, 1000),
    slopes=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    limit=st.integers(1, 20_000),
    start=st.integers(1, 40),
)
def test_the_largest_batch_is_tried_and_one_more_is_not(
    fixed: int, slopes: list[int], limit: int, start: int
) -> None:
    """A peak is the highest of several moments, each of which grows in its own line."""

    def peak(batch: int) -> int:
        return max(fixed // (i + 1) + slope * batch for i, slope in enumerate(slopes))

    found = largest_batch(peak, limit, start)
    assert found == 0 or peak(found) <= limit
    assert peak(found + 1) > limit


def _counted(peak: Callable[[int], int]) -> tuple[Callable[[int], int], list[int]]:
    asked: list[int] = []

    def ask(batch: int) -> int:
        asked.append(batch)
        return peak(batch)

    return ask, asked


def test_the_largest_batch_takes_few_tries() -> None:
    peak, asked = _counted(lambda batch: 1_000_000 + 37_003 * batch)
    assert largest_batch(peak, 24_000_000) == (24_000_000 - 1_000_000) // 37_003 == 621
    assert len(asked) < 12
    peak, asked = _counted(lambda _batch: 5)  # it does not grow at all
    assert largest_batch(peak, 10, most=1000) == 1000
    peak, asked = _counted(lambda batch: 4096 * (batch // 100 + 1))  # in stairs
    assert largest_batch(peak, 4096 * 3) == 299


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("500 mb", 5 * 10**8), ("1e9", 10**9),
     ("1.5kB", 1500)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--fits") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "24 gigs", "1.2.3GB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size, as in 24GB"):
        parse_bytes(text, "--fits")


# ------------------------------------------------------------------ samples of different lengths

LENGTHS = [400 if i % 50 == 49 else 8 for i in range(200)]  # 2% are long


class Sentences:
    """Ragged, and padded to the longest of the batch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, ids: Sequence[int]) -> Batch:
        longest = max(self.lengths[i] for i in ids)
        return Batch(
            torch.zeros(len(ids), longest, 8), torch.zeros(len(ids)).long(), len(ids), len(ids)
        )


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, 8)
        out: Tensor = self.head(torch.tanh(self.wide(x)).mean(1))
        return out


def ragged(_data: configs.DataConfig, *, long_ones: bool = False) -> Workload:
    lengths = [400] * 200 if long_ones else LENGTHS
    return Workload("reader", Reader, classification_loss, Sentences(lengths), blocks=())


@pytest.mark.long
def test_the_largest_batch_that_fits_is_of_the_longest_samples(
    simulator: Simulator, ranks: GetRanks
) -> None:
    """Most steps meet short samples alone, and sooner or later one meets a long one."""

    def weigh(config: configs.Config, longest: Sequence[int]) -> dict[str, Any]:
        weighed: dict[str, Any] = ranks(2).run(WEIGH, config, longest)[0]
        return weighed

    values = {"model.workload": f"{__file__}:ragged"}
    rows = estimate.rows_of(configs.load(None, values), ["simple_ddp"], 2, 1)
    result = estimate.estimate(rows, "cpu", 10**6, "command", weigh)
    (row,) = result["rows"]
    all_long = values | {"model.options.long_ones": True}
    one, most, more = (step(simulator, config_of("simple_ddp", 2, n, all_long)) for n in (1, 3, 4))
    assert one == row["step_bytes"]
    assert row["largest_batch"] == 3
    assert most["total"] <= 10**6 < more["total"]
    assert row["measured_step_bytes"]["total"] > 0.95 * one["total"]
    parameters = 4 * (8 * 64 + 64 + 64 * 3 + 3)
    assert one["optimizer"] == pytest.approx(2 * parameters, rel=0.02)  # in the second step
    said = "the estimate is of batches of the longest samples: the largest of 200 is 48.5 times as"
    assert result["notes"][0].startswith(said)


class WithGaps(Sentences):
    def batch(self, ids: Sequence[int]) -> Batch:
        if -1 in [self.lengths[i] for i in ids]:
            raise OSError("no such file")
        return super().batch(ids)


def test_what_the_sizes_of_samples_have_shown() -> None:
    found = look(Sentences(LENGTHS))
    assert sorted(found.ids[:4]) == [49, 99, 149, 199]
    long_batch = Longest(Sentences(LENGTHS), found.ids[:2]).batch([0, 1, 2])
    assert long_batch.inputs.shape == (3, 400, 8)
    many = look(Sentences([3] * 10_000))
    assert not many.ids
    assert many.note == "the 4,096 samples that were looked at, of 10,000, are all of one size"
    assert look(Sentences([3] * 5)) == Found()
    some = look(WithGaps([3, -1, 4]))
    assert some.ids == [2, 0]
    assert "largest of 2 that were looked at, of 3, is 1.1 times as large" in str(some.note)
    none = look(WithGaps([-1]))
    assert none.note == (
        "the estimate is of batches of the first samples: the sizes of single samples are not "
        "known (sample 0: no such file)"
    )
    rows = Stream("rows", range(5), torch.tensor, keep_targets=False)
    first = look(rows)
    assert str(first.note).endswith(
        "first samples: the data is a stream, and longer ones may follow"
    )
    again = Longest(rows, first.ids)
    assert [again.batch([i, 7]).inputs.tolist() for i in range(3)] == 3 * [[0, 1]]


# ------------------------------------------------------------------ as a user does


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    command = (
        "memory --strategies simple_ddp,zero3 --size tiny --data synthetic --world 64 "
        "--fits 4MB --out out --json"
    )
    done = commands.here(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "memory.json").read_text()) == result
    whole, sharded = result["rows"]
    assert (whole["world"], whole["batch"]) == (64, 1)
    assert sharded["step_bytes"]["total"] < whole["step_bytes"]["total"]
    assert sharded["largest_batch"] > whole["largest_batch"] > 1
    assert whole["fits"] is sharded["fits"] is True


# ------------------------------------------------------------------ as it is shown


def test_the_tables() -> None:
    rows = estimate.rows_of(configs.load(None, GPT), ["simple_ddp", "zero3", "zero1"], 2, 4)
    causes = {"parameters": 600, "optimizer": 300, "gradients": 50, "buckets": 0,
              "activations": 40, "other": 10}  # fmt: skip
    for row, more in zip(rows[:2], (0, 100), strict=True):
        step = {"total": 1000, **causes}
        held = {"update": {**step, "total": 960}, "between": {**step, "total": 900}}
        row.estimate = {"step": step, "building": {"total": 2000 * 2**10}, **held}
        row.measured = {"step": {**step, "total": 1000 + more, "other": 10 + more},
                        "building": {"total": 1}, "reserved": 5 * 2**20}  # fmt: skip
        row.largest_batch = 7
    rows[1].uncounted = ["lstm"]
    rows[2].status, rows[2].reason = "failed", "it broke"
    result = estimate.summarize(rows, 999, "command")
    assert result["rows"][1]["error"]["other"] == pytest.approx(-100 / 1100)
    assert result["rows"][0]["fits"] is False
    tables = [report.table(result), report.kept_table(result), report.error_table(result)]
    text = "\n".join(drawn_table(table) for table in tables)
    assert max(map(len, text.splitlines())) <= 80
    said = " ".join([text, *report.sentences(result)])
    for words in (
        "gpt2 tiny · 2 ranks · batch 4 per rank",
        "what it holds after backward, and between steps, KiB",
        "at the peak of a step, KiB; ≥: a lower bound, see below",
        "zero3 ≥ 0.98",
        "zero3: a lower bound: what lstm takes for itself on a CPU is not known here",
        "simple_ddp 0.59 0.05 0.29 0.01 0.94 0.88",
        "simple_ddp: PyTorch's allocator reserved 5.00 MiB of the GPU for the 1,000 B that tensors",
        "-9.1%",
        "zero1: failed: it broke",
        "more than in a step is held while the model is built",
        "not counted: ",
    ):
        assert words in " ".join(said.split()), said


def test_long_names_and_ranks_that_differ_are_drawn_in_80_columns() -> None:
    specs = ["sequence_parallel", "pytorch_tensor_parallel", "zero1:tensor=2:pipeline=2"]
    rows = estimate.rows_of(configs.load(None, GPT), specs, 4, 4)
    causes = dict.fromkeys(("parameters", "optimizer", "gradients", "buckets", "activations",
                            "other"), 123 * 2**20)  # fmt: skip
    least, most = {"total": 738 * 2**20, **causes}, {"total": 900 * 2**20, **causes}
    for row in rows:
        row.estimate = dict.fromkeys(("step", "building", "update", "between"), most)
        row.ranks = [{"rank": 0, "stages": [], "step_bytes": most}]
        row.measured = {"step": most, "building": most, "ranks": [1, 2, 3, 4]}
        row.largest_batch = 12_345
    rows[2].ranks = [{"rank": rank, "stages": [stage], "step_bytes": held}
                     for rank, stage, held in ((0, 0, least), (2, 1, most))]  # fmt: skip
    result = estimate.summarize(rows, 10**9, "command")
    console = Console(width=80, file=io.StringIO(), record=True)
    for made in report.tables(result):
        terminal.show(console, terminal.fit(made, 80, longest=terminal.STRATEGY))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    names = re.split(r"[\s:=,()_]+", " ".join(row["label"] for row in result["rows"]))
    words = set(re.split(r"[\s:=,()_]+", text))
    assert set(names) <= words, set(names) - words
    said = [line for line in report.sentences(result) if "holds most" in line]
    rank = "zero1 (tensor=2, pipeline=2): rank 2, with stage 1 (the last is 1), "
    assert said == [rank + "holds most: 900 MiB"]
