"""The network: lines fitted to times, slow links named, shaped links between hosts recovered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commands
import hosts
from conftest import GetRanks, deep_unless
from shardlab import comm, wire
from shardlab.config import LaunchConfig
from shardlab.launch import environment, same_setup
from shardlab.ledger import LEDGER
from shardlab.measure import network
from shardlab.measure.network import Place, Plan
from shardlab.report import network as report
from shardlab.world import World

ON_RANK = f"{network.__name__}:on_rank"
SIZES = np.array([float(1024 * 4**i) for i in range(10)])


# ------------------------------------------------------------------ lines


@given(
    alpha=st.floats(1e-4, 1e-2),
    beta=st.floats(1e-10, 1e-8),
    wild=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_line_is_found_in_noise(alpha: float, beta: float, wild: int, seed: int) -> None:
    """Also where one size was three times slower than all others say."""
    draw = np.random.default_rng(seed)
    exact = alpha + beta * SIZES
    assert network.line_through(SIZES, exact) == pytest.approx((alpha, beta), rel=1e-6)
    noisy = exact * np.exp(draw.normal(0, 0.03, len(exact)))
    assert network.line_through(SIZES, noisy) == pytest.approx((alpha, beta), rel=0.2)
    noisy[wild] *= 3
    assert network.line_through(SIZES, noisy) == pytest.approx((alpha, beta), rel=0.4)


def test_intervals_hold_the_truth() -> None:
    """In at least 95 of 100 cases, with noise of rounds and of sizes and a stall here and there;
    and they are not so wide that they say nothing."""
    draw = np.random.default_rng(0)
    held, widths = np.zeros(2), []
    for _ in range(100):
        truth = 10 ** draw.uniform(-4, -2), 10 ** draw.uniform(-10, -8)
        noise = draw.normal(0, 0.03, (1, 5)) + draw.normal(0, 0.05, (10, 5))
        noise += np.where(draw.random((10, 5)) < 0.05, 1.0, 0.0)
        times = (truth[0] + truth[1] * SIZES)[:, None] * np.exp(noise)
        for i, (low, high) in enumerate(network.intervals(SIZES, times)):
            held[i] += low <= truth[i] <= high
            widths.append((high - low) / truth[i])
    assert min(held) >= 95, held
    assert np.median(widths) < 0.3


def test_neither_part_of_a_line_is_negative() -> None:
    steep = 1e-9 * (SIZES - 500)  # would begin below zero
    alpha, beta = network.line_through(SIZES, steep)
    assert alpha == 0
    assert beta == pytest.approx(1e-9, rel=0.1)
    falling = 1e-3 - 1e-13 * SIZES
    alpha, beta = network.line_through(SIZES, falling)
    assert (float(alpha), float(beta)) == (pytest.approx(1e-3, rel=0.05), 0)


# ------------------------------------------------------------------ links


def places(*ranks_of_node: int) -> list[Place]:
    nodes = [node for node, count in enumerate(ranks_of_node) for _ in range(count)]
    return [Place(rank=i, node=node, host=f"host{node}") for i, node in enumerate(nodes)]


def links(between: Sequence[Place], slow: dict[tuple[int, int], tuple[float, float]]) -> Any:
    """Links of 1 GB/s and 50 µs, but for some."""
    made = []
    for pair in network.pairs_of(between):
        rate, latency = slow.get(pair, (1e9, 50e-6))
        rates, latencies = (
            [value * noise for noise in (0.9, 1.0, 1.1)] for value in (rate, latency)
        )
        both = {"there_bytes_per_s": rates, "back_bytes_per_s": rates}
        made.append({"ranks": list(pair), "latency_s": latencies, **both})
    return made


def test_which_ranks_are_measured_with_each_other() -> None:
    assert network.pairs_of(places(3)) == [(0, 1), (0, 2), (1, 2)]
    assert network.pairs_of(places(2, 1, 2)) == [(0, 2), (0, 3), (2, 3), (0, 1), (3, 4)]
    many = network.pairs_of(places(*[1] * 20))
    assert len(many) == 20
    assert {rank for pair in many for rank in pair} == set(range(20))
    assert environment.grouped([("a", "x"), ("b", "y"), ("a", "x")]) == [
        {"host": "x", "ranks": [0, 2]},
        {"host": "y", "ranks": [1]},
    ]


@pytest.mark.parametrize(("slow", "words"), [
    ({}, None),
    ({(0, 1): (0.9e9, 60e-6)}, None),  # noise
    ({(0, 1): (2e8, 50e-6)}, "the link node 0 – node 1 is slow: 1.60 Gbit/s, the best 8.00 Gbit/s"),
    ({(0, 1): (2e8, 50e-6), (1, 2): (2e8, 50e-6)}, "node 1 (host1) is slow: every link to it is"),
    ({(0, 2): (1e9, 3e-3)}, "the link node 0 – node 2 is slow: 3.00 ms one way, the best 50.0 µs"),
    ({(0, 2): (1e9, 3e-3), (1, 2): (1e9, 2e-3)}, "node 2 (host2) is slow: every link to it is"),
])  # fmt: skip
def test_what_is_slow_is_named(
    slow: dict[tuple[int, int], tuple[float, float]], words: str | None
) -> None:
    said = list(network.verdict(result(slow)))
    if words is None:
        assert "no link between nodes is clearly slower than the others" in said
    else:
        assert any(line.startswith(words) for line in said), said


def result(
    slow: dict[tuple[int, int], tuple[float, float]] | None = None, beta: float = 2e-9
) -> dict[str, Any]:
    """That of three nodes with one rank each, made up."""
    where = places(1, 1, 1)
    points = [
        {"op": op, "bytes": int(size), "calls": 3, "seconds": [1e-4 + beta * size] * 3}
        for op in network.COLLECTIVES
        for size in SIZES
    ]
    barrier = {"op": "barrier", "bytes": 0, "calls": 3, "seconds": [1e-4] * 3}
    raw = {
        "world": 3,
        "backend": "gloo",
        "device": "cpu",
        "env": {"shardlab": "0", "torch": "2", "time": "now"},
        "places": where,
        "points": [*points, barrier],
        "skipped": [{"op": "broadcast", "bytes": 2**28}],
        "links": links(where, slow or {}),
    }
    return network.result_of(raw, Plan(), "shardlab network")


# ------------------------------------------------------------------ what is shown


def test_what_is_shown_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = result({(0, 1): (2e8, 50e-6)})
    report.show(found, report.write(Path(tmp_path), found))
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    assert "…" not in shown  # nothing was cut off
    assert "an all-reduce takes 100 µs even if it is empty" in " ".join(shown.split())
    assert "1 point left out" in shown
    assert json.loads((tmp_path / "network.json").read_text())["schema"] == 1


def test_a_rate_that_cannot_be_seen_is_not_told() -> None:
    found = result(beta=0.0)
    assert report.fit_texts(found["fits"][0])[2:] == ("–", "–", "–")
    assert "even if it is empty" not in " ".join(found["verdict"])
    assert report.html(found)
    almost = {**found["fits"][0], "beta_s_per_byte": 1e-9, "beta_95": (0.0, 8e-9)}
    assert report.fit_texts(almost)[2:4] == ("8.00", "≥ 1.00")


def test_the_page_stands_alone() -> None:
    page = report.html(result())
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    for op in network.COLLECTIVES:
        assert f"{op}, 1.00 KiB: 0.102 ms" in page
    assert page.count('class="curve') == 4
    down = re.findall(r'<circle class="c0" cx="([\d.]+)%" cy="([\d.]+)%"', page)
    assert len(down) == 10
    assert [float(x) for x, _ in down] == sorted(float(x) for x, _ in down)
    assert [float(y) for _, y in down] == sorted((float(y) for _, y in down), reverse=True)


# ------------------------------------------------------------------ on ranks


def kept(_world: World) -> int:
    return len(LEDGER.entries) + LEDGER.calls


@pytest.mark.long
@pytest.mark.parametrize("size", deep_unless(lambda size: size == 2, [2, 3]))
def test_ranks_measure_every_collective_and_link(ranks: GetRanks, size: int) -> None:
    plan = Plan(max_size=16384, rounds=2)
    raw, *others = ranks(size).run(ON_RANK, plan, deadline_s=60)
    assert len(others) == size - 1
    assert {p["op"] for p in raw["points"]} == {*network.COLLECTIVES, "barrier"}
    assert all(s > 0 for p in raw["points"] for s in p["seconds"])
    assert [len(p["seconds"]) for p in raw["points"]] == [2] * 13
    assert [link["ranks"] for link in raw["links"]] == [
        list(p) for p in network.pairs_of(places(size))
    ]
    for link in network.result_of(raw, plan, "")["links"]:
        assert 0 < link["latency"]["median"] < 0.1
        assert 1e7 < link["bandwidth"]["median"] < 1e12
    assert ranks(size).run(kept) == [0] * size  # the next run's ledger begins with nothing


@pytest.mark.parametrize("limit_s", [2.0, 8.0, 40.0])
def test_the_time_limit_is_that_of_everything(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own: 1 MiB takes a second, so five rounds take 27 s, and trials 11 s."""
    now = 0.0

    def timed(_world: World, call: tuple[str, int], calls: int) -> list[float]:
        nonlocal now
        now += calls * (1e-3 + call[1] / 2**20)
        return [1e-3 + call[1] / 2**20] * calls

    clock = SimpleNamespace(time=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr(network, "time", clock)
    monkeypatch.setattr(network, "_timed", timed)
    monkeypatch.setattr(network, "_slowest", lambda _world, seconds: list(seconds))
    monkeypatch.setattr(network, "_call_of", lambda op, tensor, *_: (op, 4 * tensor.numel()))
    monkeypatch.setattr(comm, "barrier", lambda _group: None)
    cpu = torch.device("cpu")
    world: Any = SimpleNamespace(rank=1, size=2, device=cpu, group=None)
    plan = Plan(max_size=2**20, time_limit_s=limit_s, begun=-1.0)  # the ranks' start took 1 s
    points, skipped = network._measure_collectives(world, plan)
    assert 0.4 * limit_s < now + 1 <= limit_s
    largest = {op: max(p["bytes"] for p in points if p["op"] == op) for op in network.COLLECTIVES}
    assert max(largest.values()) <= 4 * min(largest.values())  # no collective takes all the time
    assert len(points) + len(skipped) == 4 * 6 + 1
    assert (skipped == []) == (limit_s == 40)
    assert max(p["calls"] for p in points) == 20  # of the small ones


def test_a_time_limit_that_is_over_leaves_two_rounds(ranks: GetRanks) -> None:
    plan = Plan(max_size=16384, time_limit_s=5.0, begun=time.time() - 6)
    raw = ranks(2).run(ON_RANK, plan, deadline_s=60)[0]
    assert {len(point["seconds"]) for point in raw["points"]} == {2}
    assert [len(link["latency_s"]) for link in raw["links"]] == [2]
    found = network.result_of(raw, plan, "")
    assert (found["rounds"], found["rounds_asked"]) == (2, 5)
    assert "2 of 5 rounds: no time for more within 5 s (--total-time)" in found["verdict"]


def test_bandwidth_is_counted_as_nccl_tests_count_it() -> None:
    """Their factors, from doc/PERFORMANCE.md; and a link of 4 Gbit/s is one for each of ours."""
    n = 3
    part = (n - 1) / n
    factors = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part,
               "all_to_all": part, "broadcast": 1, "reduce": 1, "send": 1}  # fmt: skip
    for op, factor in factors.items():
        assert wire.bus_bytes(op, 600, n) == pytest.approx(600 * factor)
    for found in result(beta=2e-9)["fits"]:  # of the tensor's bytes
        bus = factors[found["op"]] / 2e-9
        assert 1 / found["beta_s_per_byte"] == pytest.approx(bus, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "line", deep_unless(lambda line: "--json" in line, commands.bash_lines("docs/network.md"))
)
def test_the_pages_commands_run(line: str, tmp_path: Path) -> None:
    """Shorter than they are printed."""
    words = line.removeprefix("shardlab ").split()
    few = ["--max-size", "64KiB", "--rounds", "2", "--out", "out"]
    done = commands.here(*words, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "network.json").read_text())
    assert len(written["fits"]) == 4
    assert (tmp_path / "out" / "network.html").exists()
    if "--json" in words:
        assert json.loads(done.stdout) == written
    else:
        assert "one way" in done.stdout


def test_a_launchers_ranks_may_begin_apart() -> None:
    """Each makes the plan itself; nothing else of it may differ."""
    begun = [same_setup.setup(LaunchConfig(), [Plan(begun=seconds)]) for seconds in (1.0, 2.0)]
    assert same_setup._difference("rank 0", "rank 1", *begun) == ""
    other = same_setup.setup(LaunchConfig(), [Plan(rounds=2)])
    assert "rounds is 5 for rank 0" in same_setup._difference("rank 0", "rank 1", begun[0], other)


# ------------------------------------------------------------------ on hosts


def measured_on(these: hosts.Hosts, folder: Path) -> dict[str, Any]:
    command = "-m shardlab network --max-size 4MiB --rounds 3 --total-time 20 --out out --quiet"
    first, *others = these.torchrun(*command.split(), ranks=1, timeout=100, cwd=folder)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "out\n"
    assert [other.stdout for other in others] == [""] * len(others)
    found: dict[str, Any] = json.loads((folder / "out" / "network.json").read_text())
    return found


GBIT = 1e9 / 8


@pytest.mark.deep
@pytest.mark.alone
@pytest.mark.parametrize(
    ("gbit", "delay_ms"), [(0.5, 0), (1, 0), (4, 0), (None, 5), (0.5, 5), (1, 1)]
)
def test_a_shaped_link_is_recovered(gbit: float | None, delay_ms: float, tmp_path: Path) -> None:
    rate = None if gbit is None else f"{int(1000 * gbit)}mbit"
    with hosts.made(2, rate, delay_ms / 1e3) as two:
        found = measured_on(two, tmp_path)
    (link,) = found["links"]
    assert link["nodes"] == [0, 1]
    if gbit is not None:
        assert link["there"]["median"] == pytest.approx(gbit * GBIT, rel=0.1)
        assert link["back"]["median"] == pytest.approx(gbit * GBIT, rel=0.1)
    if delay_ms:
        # To carry a packet and to wake a process takes 0.05 to 0.2 ms of its own, by the machine.
        assert link["latency"]["median"] == pytest.approx(delay_ms / 1e3, rel=0.1, abs=0.4e-3)
        (line,) = (f for f in found["fits"] if f["op"] == "all_reduce")
        assert line["alpha_s"] > 2 * delay_ms / 1e3  # there and back at the least
    else:
        assert link["latency"]["median"] < 500e-6


@pytest.mark.deep
@pytest.mark.alone
def test_a_slow_host_is_named(tmp_path: Path) -> None:
    with hosts.made(3, rate="2gbit") as three:
        three.limit(1, "300mbit")
        found = measured_on(three, tmp_path)
    assert found["slow"]["node"] == 1
    assert found["slow"]["what"] == "bandwidth"
    assert any(line.startswith("node 1 (") for line in found["verdict"])


@pytest.mark.deep
@pytest.mark.alone
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    with hosts.made(3, "500mbit", 1e-3, delays={(0, 2): 4e-3}) as three:
        found = measured_on(three, tmp_path)
    assert found["slow"]["link"] == [0, 2]
    assert found["slow"]["what"] == "latency"
    assert any(line.startswith("the link node 0 – node 2 is slow") for line in found["verdict"])
