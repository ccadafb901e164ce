"""Workers that are late or lost: the others continue, and hold what the law says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
import saboteurs
from conftest import GetRanks
from shardlab import config as configs
from shardlab.checkpoint import convert, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.proof import judge
from shardlab.proof import reference as plain
from shardlab.proof.prove import cases_of, small
from shardlab.proof.subjects import Subject
from shardlab.run import assemble, loop
from shardlab.strategies.base import Rounds
from shardlab.world import World

STEPS, EVERY = 10, 2
TRAIN = [
    "train", "--strategy", "diloco", "--size", "tiny", "--seq-len", "16", "--global-batch", "6",
    "--set", f"strategy.options.every={EVERY}", "--steps", str(STEPS), "--precision", "fp64",
    "--device", "cpu", "--checkpoint-every", str(STEPS), "--out", "run",
]  # fmt: skip


def trained(tmp_path: Path, *more: str) -> tuple[Any, list[list[int]]]:
    """What the command said, and who took part in each exchange."""
    said = commands.here(*TRAIN, *more, cwd=tmp_path)
    path = tmp_path / "run" / "rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return said, [row["took_part"] for row in rows]


def played(tmp_path: Path, workers: int, absent: list[tuple[int, int, bool]]) -> Any:
    """One process that plays the workers with the same samples, and these absences."""
    config = configs.load(tmp_path / "run" / "config.yaml", {"output.dir": None})
    workload = assemble.build_workload(config)
    cpu = torch.device("cpu")
    feeds = [
        loop.Batches(workload, config, World(rank, workers, rank, cpu, "gloo", None))  # type: ignore[arg-type]
        for rank in range(workers)
    ]
    steps = [[next(feed) for feed in feeds] for _ in range(STEPS)]
    for feed in feeds:
        feed.close()
    rounds = Rounds(EVERY, 0.7, 0.9, min_workers=1, absent=tuple(absent))
    subject = Subject(workload, config.training.seed, steps)
    return plain.run(subject, config, rounds=rounds).tensors[-1]


def agrees(tmp_path: Path, expected: Any) -> bool:
    """Whether the run's last checkpoint has these parameters."""
    path = tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}"
    found = storage.whole_tensors(path, manifests.read(path), convert.MODEL)
    return all(torch.allclose(found[n], t, rtol=0, atol=1e-10) for n, t in expected.items())


@pytest.mark.long
def test_the_others_go_on_without_a_worker_that_is_killed(tmp_path: Path) -> None:
    quick = ["--world", "3", "--min-workers", "2", "--set", "strategy.options.patience_s=3"]
    said, took_part = trained(tmp_path, *quick, "--inject", "kill:rank=1,step=3")
    assert said.returncode == 0, said.stderr
    assert took_part == [[0, 1, 2]] + 4 * [[0, 2]]
    told = said.stderr + said.stdout
    assert "worker 1 is lost (the process was killed by SIGKILL); the others continue" in told
    assert "the exchange after 4 steps was made without worker 1" in told
    assert "worker 1 took part in 1 of 5 exchanges" in told
    lost = [(1, 1, True), *((number, 1, False) for number in (2, 3, 4))]
    assert agrees(tmp_path, played(tmp_path, 3, lost))
    assert not agrees(tmp_path, played(tmp_path, 3, []))


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])  # worker 0's process decides, also while it is late
def test_a_late_worker_is_left_out_and_takes_part_again(tmp_path: Path, worker: int) -> None:
    """It comes while the next round is under way, in which one of the others is slow."""
    delays = [f"slow:rank={worker},ms=4500,step=1", "slow:rank=2,ms=7000,step=3"]
    faults = [word for delay in delays for word in ("--inject", delay)]
    patience = ["--min-workers", "2", "--set", "strategy.options.patience_s=2"]
    said, took_part = trained(tmp_path, "--world", "3", *patience, *faults)
    assert said.returncode == 0, said.stderr
    assert worker not in took_part[0]
    # On a busy machine others may be late as well: what happened is what is played.
    assert any(worker in who for who in took_part[2:])
    assert f"worker {worker} again" in said.stderr + said.stdout
    resting = {w: rests(tmp_path, w) for w in range(3)}
    assert EVERY in resting[worker]
    absent = [
        (number, w, number * EVERY not in resting[w])
        for number, who in enumerate(took_part)
        for w in range(3)
        if w not in who
    ]
    assert agrees(tmp_path, played(tmp_path, 3, absent))


def rests(tmp_path: Path, worker: int) -> list[int]:
    """The steps that a worker did not make."""
    lines = (tmp_path / "run" / f"rank{worker}.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row.get("rests")]


@pytest.mark.long
def test_nobody_waits_for_a_worker_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardlab.run.ranks.LATE_S", 1.0)
    quick = ["--min-workers", "1", "--set", "strategy.options.patience_s=1"]
    more = ["--evaluate-every", str(STEPS), "--set", "training.evaluate_samples=4"]
    fault = ["--inject", "hang:rank=1,step=3"]
    said, took_part = trained(tmp_path, "--world", "2", *quick, *more, *fault)
    assert said.returncode == 0, said.stderr
    assert took_part == [[0, 1]] + 4 * [[0]]
    told = said.stderr + said.stdout
    assert "worker 1 is lost (it had not finished); the others continue" in told
    assert "held out" in told
    lost = [(1, 1, True), *((number, 1, False) for number in (2, 3, 4))]
    assert agrees(tmp_path, played(tmp_path, 2, lost))


@pytest.mark.long
@pytest.mark.parametrize(("rank", "least"), [(1, 2), (0, 1)])
def test_too_few_workers_end_the_run(tmp_path: Path, rank: int, least: int) -> None:
    """Fewer than were asked for; or the one whose process holds the store."""
    fault = f"kill:rank={rank},step=3"
    said, _ = trained(tmp_path, "--world", "2", "--min-workers", str(least), "--inject", fault)
    assert said.returncode == 1
    assert f"rank {rank}: the process was killed by SIGKILL" in said.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--min-workers", "3"], "min_workers is 3, and there are 2 workers"),
        (["--min-workers", "0"], "min_workers must be 1 or more, got 0"),
        (["--min-workers", "1", "--steps", "9"], "training.steps must be a multiple of every (2)"),
        (["--min-workers", "1", "--evaluate-every", "5"], "training.evaluate_every must be a mul"),
        (["--min-workers", "1", "--audit-data"], "data.audit counts the samples of all workers"),
        (["--set", "strategy.options.patience_s=3"], "patience_s is for min_workers"),
        (["--min-workers", "1", "--strategy", "streaming_diloco"], "'min_workers'"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: list[str], message: str) -> None:
    said, _ = trained(tmp_path, "--world", "2", *more)
    assert said.returncode == 2
    assert message in " ".join(said.stderr.split())


@pytest.mark.long
@pytest.mark.parametrize("name", [s.__name__ for s in saboteurs.ABSENCE_SABOTEURS])
def test_a_proof_catches(name: str, ranks: GetRanks) -> None:
    config = configs.load(None, {"data.seq_len": 16, "training.steps": 3})
    (case,) = cases_of(small(config), [f"saboteurs:{name}"], [2])
    equal = judge.equal(ranks(2).run("judging:examine_equal", case.to_dict()))
    assert equal["pass"] == (name == "MayBeAbsent")
