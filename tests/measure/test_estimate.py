"""Memory without running: the estimate is what is measured, for every strategy, ours or not."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
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
from conftest import GetRanks, long_unless
from shardlab import config as configs
from shardlab.errors import Late, RankFailure, UsageError
from shardlab.measure import estimate, simulate
from shardlab.measure.estimate import Simulator, largest_batch
from shardlab.measure.simulate import Tracker, backend_of
from shardlab.naming import STRATEGIES
from shardlab.numbers import parse_bytes
from shardlab.report import memory as report
from shardlab.report import terminal
from shardlab.strategies.base import Setup
from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.workloads.base import Workload, classification_loss

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
    (row,) = estimate.rows_of(configs.load(None, values), [strategy], world, batch)
    return row.config


def step(simulator: Simulator, config: configs.Config, device: str = "cpu") -> dict[str, int]:
    found: dict[str, int] = simulator.run(config, device)["weights"]["step"]
    return found


# ------------------------------------------------------------------ against what is measured


@pytest.mark.timeout(100)
@pytest.mark.parametrize("strategy", long_unless(lambda name: name == "zero3", STRATEGIES))
def test_within_5_percent_of_the_measured_peak(
    strategy: str, simulator: Simulator, ranks: GetRanks
) -> None:
    world = 1 if strategy == "single" else 2
    config = config_of(strategy, world, 4, GPT)
    found = simulator.run(config, "cpu")["weights"]
    # A release on a thread of Gloo's may go unseen, and the measured is then too high: look again.
    for _ in range(3):
        measured = ranks(world).run(WEIGH, config.to_dict(), deadline_s=60)[0]
        if found["step"]["total"] > 0.95 * measured["step"]["total"]:
            break
    assert found["step"]["total"] == pytest.approx(measured["step"]["total"], rel=0.05)
    assert found["building"]["total"] <= 1.05 * measured["building"]["total"]
    error = estimate.errors(found["step"], measured["step"])
    assert error is not None
    assert sum(e for term, e in error.items() if term != "total") == pytest.approx(error["total"])
    for term in ("parameters", "optimizer"):
        assert abs(error[term]) < 0.01, term
    for moment in ("update", "between"):
        assert 0 < found[moment]["total"] <= 1.05 * measured[moment]["total"]


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


@pytest.mark.long
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("strategy", "world", "values"),
    [
        ("zero3", 2, RESNET),
        ("pytorch_zero3", 2, RESNET),
        ("zero1", 3, {**GPT, "training.optimizer": "muon"}),
        ("zero2", 2, {**GPT, "training.optimizer": "muon"}),
    ],
)
def test_with_convolutions_and_with_owners(
    strategy: str, world: int, values: dict[str, Any], simulator: Simulator, ranks: GetRanks
) -> None:
    config = config_of(strategy, world, 8, values)
    measured = ranks(world).run(WEIGH, config.to_dict(), deadline_s=60)[0]["step"]
    assert step(simulator, config)["total"] == pytest.approx(measured["total"], rel=0.05)


# ------------------------------------------------------------------ ranks that cut the model

FOUR_BLOCKS = {**GPT, "model.options.layers": 4, "training.accumulate": 3}
TURNED = {"model.workload": f"{__file__}:turned", "training.accumulate": 2}


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


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("strategy", "world", "values"),
    [
        ("pipeline_gpipe", 2, GPT),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("pipeline_interleaved", 2, FOUR_BLOCKS),
                ("pytorch_pipeline:schedule=zero_bubble", 2, FOUR_BLOCKS),
                ("context_parallel", 2, GPT),
                ("pytorch_tensor_parallel", 2, GPT),
                ("zero1:tensor=2:pipeline=2", 4, GPT),
                ("pipeline_zero_bubble", 2, TURNED),
            )
        ),
    ],
)
def test_each_stage_holds_what_is_estimated(
    strategy: str, world: int, values: dict[str, Any], simulator: Simulator, ranks: GetRanks
) -> None:
    config = config_of(strategy, world, 4, values)
    found = simulator.run(config, "cpu")
    for _ in range(3):  # as above
        measured = ranks(world).run(WEIGH, config.to_dict(), deadline_s=60)[0]
        if found["weights"]["step"]["total"] > 0.95 * measured["step"]["total"]:
            break
    assert found["weights"]["step"]["total"] == pytest.approx(measured["step"]["total"], rel=0.05)
    for rank in found["ranks"]:
        assert rank["step_bytes"]["total"] == pytest.approx(
            measured["ranks"][rank["rank"]], rel=0.05
        )
    if "pipeline" in strategy:
        assert len(found["ranks"]) == 2
        assert sorted(s for rank in found["ranks"] for s in rank["stages"])[0] == 0


def test_the_last_stage_of_a_gpipe_holds_most(simulator: Simulator) -> None:
    """It has the logits; rank 0 alone would be too little."""
    several = {**GPT, "training.accumulate": 4}
    first, last = simulator.run(config_of("pipeline_gpipe", 2, 4, several), "cpu")["ranks"]
    assert (first["stages"], last["stages"]) == ([0], [1])
    assert last["step_bytes"]["total"] > 1.05 * first["step_bytes"]["total"]


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
    half = step(simulator, config_of("simple_ddp", 2, 4, GPT))
    assert half["activations"] == pytest.approx(adam["activations"] / 2, rel=0.02)
    again = config_of("simple_ddp", 2, 8, {**GPT, "training.activation_checkpointing": True})
    assert step(simulator, again)["activations"] < 0.5 * adam["activations"]
    several = config_of("simple_ddp", 2, 8, {**GPT, "training.accumulate": 3})
    assert step(simulator, several)["activations"] == pytest.approx(adam["activations"], rel=0.02)


def test_many_ranks_are_no_more_work(simulator: Simulator) -> None:
    few = step(simulator, config_of("zero3", 2, 1, GPT))
    many = step(simulator, config_of("zero3", 64, 1, GPT))
    assert many["optimizer"] == pytest.approx(few["optimizer"] / 32, rel=0.05)
    assert many["total"] < few["total"]


def test_groups_of_ranks_hold_more(simulator: Simulator) -> None:
    """Shards of a group of two, not of all eight."""
    whole, groups = (
        step(simulator, config_of(strategy, 8, 1, GPT)) for strategy in ("zero3", "zero3:shards=2")
    )
    assert groups["optimizer"] == pytest.approx(4 * whole["optimizer"], rel=0.05)
    nodes = "bucket_ddp_async:hierarchical=true:ranks_per_node=2"
    flat, by_nodes = (
        step(simulator, config_of(name, 8, 1, GPT)) for name in ("bucket_ddp_async", nodes)
    )
    assert by_nodes["total"] >= flat["total"]


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

PEOPLE = Path(__file__).parents[1] / "people.py"


def of_people(name: str, strategy: str = "simple_ddp", batch: int = 2) -> configs.Config:
    return config_of(strategy, 2, batch, {"model.workload": f"{PEOPLE}:{name}"})


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
@pytest.mark.parametrize("name", people.EVERYONE)
def test_peoples_models_are_estimated(name: str, simulator: Simulator) -> None:
    """Each within seconds. ViT's initialisation used to loop for ever."""
    for strategy in ("single", "zero3", "pytorch_ddp"):
        config = of_people(name, strategy)
        found = simulator.run(config, "cpu", limit_s=60)
        assert found["weights"]["step"]["total"] > 0
        assert bool(found["assumed"]) is (name == "stochastic_depth")


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit", "bert", "unet", "weight_norm", "cache"])
def test_peoples_models_are_estimated_right(
    name: str, simulator: Simulator, ranks: GetRanks
) -> None:
    config = of_people(name)
    estimated = step(simulator, config)["total"]
    measured = ranks(2).run("shardlab.measure.estimate:weigh", config.to_dict())[0]
    assert estimated == pytest.approx(measured["step"]["total"], rel=0.06)


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
        with pytest.raises(Late, match=r"no answer within 8 s; it stood at odd.py:10"):
            opened.run(sleeps, "cpu", limit_s=8)
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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("memory --fits lots", "--fits lots: not a size"),
        ("memory --micro-batch 0", "a batch has at least one sample"),
        ("memory --strategy zero4", "did you mean 'zero"),
        ("memory --strategy zero1 --snapshot --size tiny --data synthetic", "CUDA allocator"),
    ],
)
def test_refusals(command: str, words: str, tmp_path: Path) -> None:
    done = commands.here(*command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()[-1:]) == 1
    assert "Traceback" not in done.stderr


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
    rows[2].status, rows[2].reason = "failed", "it broke"
    result = estimate.summarize(rows, 999, "command")
    assert result["rows"][1]["error"]["other"] == pytest.approx(-100 / 1100)
    assert result["rows"][0]["fits"] is False
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(report.table(result))
    console.print(report.kept_table(result))
    console.print(report.error_table(result))
    for line in report.sentences(result):
        console.print(line)
    text = console.export_text()
    for words in (
        "gpt2 tiny · 2 ranks · batch 4 per rank",
        "what it holds after backward, and between steps, KiB",
        "simple_ddp 0.59 0.05 0.29 0.01 0.94 0.88",
        "simple_ddp: PyTorch's allocator reserved 5.00 MiB of the GPU for the 1,000 B that tensors",
        "-9.1%",
        "zero1: failed: it broke",
        "more than in a step is held while the model is built",
        "not counted: ",
    ):
        assert words in " ".join(text.split()), text
    assert max(map(len, text.splitlines())) <= 80


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


def test_what_no_strategy_can_take_is_refused_once(tmp_path: Path) -> None:
    done = commands.here("memory", "--size", "tinny", "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: unknown gpt2 size 'tinny'; did you mean 'tiny'?\n"
    assert not list(tmp_path.iterdir())
