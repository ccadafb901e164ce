"""A hang is ended in time, and the verdict names the rank, the collective and the line."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import commands
from faulty_workload import FILE, LAUNCH, config_of, line_of
from shardlab import comm, pulse
from shardlab import config as configs
from shardlab.errors import Halt, UsageError
from shardlab.guard import stacks, verdict, watchdog
from shardlab.guard.stacks import Frame
from shardlab.guard.verdict import Seen
from shardlab.launch.ranks import Ranks
from shardlab.ledger import LEDGER
from shardlab.pulse import Call
from shardlab.world import World

LIMIT_S = 3.0  # a busy machine must not look like a hung run
# ------------------------------------------------------------------ the verdict, without ranks


def call(seq: int, label: str = "bucket 3", site: str = "ddp.py:9") -> Call:
    return Call(seq, 42, f"all_reduce (8,) float32 '{label}'", site)


def seen(rank: int, phase: str = "backward", **more: Any) -> Seen:
    recent = tuple(call(i) for i in range(14, more.get("calls", 18)))
    return Seen(**{"rank": rank, "phase": phase, "recent": recent, "calls": 18, **more})


def test_the_one_that_never_entered_is_named() -> None:
    library = Frame(f"{sysconfig.get_path('stdlib')}/x.py", 1, "wait")
    late = {"main thread": [library, Frame("mine.py", 12, "batch")]}
    ranks = [
        seen(r, waits_for=call(17)) if r != 1 else seen(1, pulse.DATA, calls=17, threads=late)
        for r in range(4)
    ]
    halt = verdict.judge(ranks, 60)
    assert halt.details["verdict"] == (
        "rank 1 never entered all_reduce #17 (bucket 3, step 42): it is in data loading, "
        "at mine.py:12; ranks 0, 2, 3 wait for it"
    )
    assert (halt.state, halt.rank, halt.details["causes"]) == ("hung", 1, [1])
    assert "mine.py:12 in batch" in (halt.traceback or "")


def test_several_that_are_missing() -> None:
    ranks = [seen(0, waits_for=call(17)), *(seen(r, "forward", calls=17) for r in (1, 2))]
    halt = verdict.judge(ranks, 60)
    assert "rank 2 never entered all_reduce #17" in str(halt)
    assert str(halt).endswith("rank 0 waits for them")


def test_all_in_one_collective_is_not_blamed_on_a_rank() -> None:
    halt = verdict.judge([seen(r, waits_for=call(17)) for r in range(2)], 60)
    assert halt.details["causes"] == []
    assert "every rank has entered all_reduce #17" in str(halt)


def test_a_skipped_collective_is_recognised_by_what_came_next() -> None:
    labels = ["a", "b", "c", "d"]
    right = tuple(call(i, label, f"s.py:{i}") for i, label in enumerate(labels))
    wrong = tuple(call(i, label, "s.py:0") for i, label in enumerate("acd"))
    found = verdict.first_difference({0: right, 1: wrong})
    assert found is not None
    assert (found.rank, found.skipped) == (1, True)
    assert found.sentence.startswith(
        "rank 1 skipped all_reduce #1 'b' at s.py:1, step 42: its #1 is"
    )
    # The other way round: rank 0 left one out.
    found = verdict.first_difference({0: wrong, 1: right})
    assert found is not None
    assert (found.rank, found.theirs.label, found.skipped) == (0, "b", True)


def test_one_collective_may_be_called_from_two_lines_if_it_has_a_label() -> None:
    labelled = {r: [call(0, "x", f"s.py:{r}")] for r in (0, 1)}
    assert verdict.first_difference(labelled) is None
    unlabelled = {r: [call(0, "", f"s.py:{r}")] for r in (0, 1)}
    assert verdict.first_difference(unlabelled) is not None


def test_a_majority_is_right() -> None:
    found = verdict.first_difference({0: [call(3, "x")], 1: [call(3, "y")], 2: [call(3, "y")]})
    assert found is not None
    assert found.rank == 0


def message_call(link: str, op: str, micro: int, seq: int, turn: int) -> Call:
    label = f"activation of micro-batch {micro} from stage 0 for stage 1"
    return Call(seq, 7, f"{op} (4,) float32 '{label}'", "pipeline.py:9", f"{link} activation", turn)


def test_a_stage_that_waits_says_for_which_micro_batch_from_which_rank() -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which has not sent; numbers differ."""
    first = message_call("0>1", "recv", 3, 40, 5)
    second = message_call("1>2", "recv", 3, 17, 5)
    sent = {"0>1 activation": 5, "1>2 activation": 5}
    entered = {"0>1 activation": 6, "1>2 activation": 5}
    ranks = [
        Seen(0, "forward", calls=33, turns=sent),
        Seen(1, "forward", calls=41, turns=entered, waits_for=first),
        Seen(2, "forward", calls=18, turns={"1>2 activation": 6}, waits_for=second),
    ]
    halt = verdict.judge(ranks, 60)
    assert halt.details["verdict"] == (
        "rank 0 never sent what rank 1 waits for in recv #40 (activation of micro-batch 3 from "
        "stage 0 for stage 1, step 7): it is in forward; ranks 1, 2 wait for it"
    )


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    there, back = message_call("0>1", "recv", 0, 4, 0), message_call("1>0", "recv", 1, 9, 0)
    ranks = [
        Seen(0, "backward", calls=10, turns={"1>0 activation": 1}, waits_for=back),
        Seen(1, "backward", calls=5, turns={"0>1 activation": 1}, waits_for=there),
    ]
    halt = verdict.judge(ranks, 60)
    assert "the ranks wait for each other: rank 0 waits for rank 1 in recv #9" in str(halt)
    assert halt.details["causes"] == []


def test_groups_are_compared_each_by_itself() -> None:
    """Ranks 0 and 1 call three times where 2 and 3 call once: only rank 3 is out of step."""

    def of(channel: str, *labels: str) -> list[Call]:
        what = "all_reduce (8,) float32 '{}'"
        return [Call(i, 0, what.format(x), "s.py:1", channel, i) for i, x in enumerate(labels)]

    world = [Call(9, 0, "all_reduce () float64 'loss'", "s.py:2", "0 1 2 3", 0)]
    calls = {0: of("0 1", "a", "b", "c"), 1: of("0 1", "a", "b", "c"), 2: of("2 3", "x")}
    right = {rank: [*found, *world] for rank, found in {**calls, 3: of("2 3", "x")}.items()}
    assert verdict.first_difference(right) is None
    found = verdict.first_difference({**right, 3: [*of("2 3", "y"), *world]})
    assert found is not None
    assert (found.rank, found.theirs.label, found.its.label) == (3, "x", "y")


# ------------------------------------------------------------------ when it is time


def message(rank: int, tick: int, beats: int, steps_done: int = 5) -> dict[str, Any]:
    where = {"phase": "forward", "step": 5, "steps_done": steps_done, "calls": 9}
    return {"seen": Seen(rank, tick=tick, beats=beats, pid=1, host="elsewhere", **where)}


def test_a_slow_run_is_not_a_hung_one() -> None:
    """Without a limit of the user's, ten times the longest pause so far; more for a first step."""
    now = 0.0
    monitor = watchdog.Monitor(None, timeout_s=1000, clock=lambda: now)
    for tick, beats in enumerate((0, 0, 1)):
        monitor.hear(message(0, tick, beats, steps_done=0))
        now += 20
    assert monitor.limit == 900
    monitor.hear(message(0, 9, 2))
    assert monitor.limit == pytest.approx(10 * 40)
    now += 399
    assert monitor.hang() is None
    now += 2
    assert monitor.hang() is not None


def test_one_rank_that_moves_is_enough() -> None:
    now = 0.0
    monitor = watchdog.Monitor(5, timeout_s=1000, clock=lambda: now)
    for tick in range(10):
        now += 1
        monitor.hear(message(0, tick, beats=0))
        monitor.hear(message(1, tick, beats=tick))
    assert monitor.hang() is None
    now += 5
    assert monitor.hang() is not None


def test_ranks_that_are_done_cannot_hang() -> None:
    now = 0.0
    monitor = watchdog.Monitor(5, timeout_s=1000, clock=lambda: now)
    monitor.hear(message(0, 1, 0))
    monitor.hear({"rank": 0, "end": True})
    now += 100
    assert monitor.hang() is None
    # But another rank can, though the store still says that the first one is done.
    monitor.hear(message(1, 1, 0))
    for _ in range(3):
        now += 2
        monitor.hear({"rank": 0, "end": True})
    halt = monitor.hang()
    assert halt is not None
    assert "rank 0: has left the loop" in str(halt.traceback)


def test_a_report_survives_the_store() -> None:
    frames = [Frame("mine.py", 12, "batch")]
    told = seen(1, waits_for=call(17), threads={"MainThread": frames}, own={"entered": 3})
    decoder = msgspec.json.Decoder(Seen | None)
    assert decoder.decode(msgspec.json.encode(told)) == told
    assert decoder.decode(msgspec.json.encode(None)) is None


def test_a_limit_beyond_the_timeout_is_refused() -> None:
    with pytest.raises(UsageError, match=r"guard.hang_s 400.0 is not below launch.timeout_s 300"):
        configs.load(None, {"guard.hang_s": 400})


# ------------------------------------------------------------------ real ranks that hang


def caught(world: Ranks, target: Any, *args: Any) -> Halt:
    """The verdict on a run, which must come in time and leave no process."""
    pids = world.pids
    with pytest.raises(Halt) as error:
        world.run(target, *args, deadline_s=60)
    assert commands.wait_until_gone(pids) == []
    assert error.value.details["stood_s"] < LIMIT_S + 5
    return error.value


def trained(strategy: str, root: Path, world: int = 2, **options: Any) -> Halt:
    """The verdict on a run of the troubled workload."""
    more = {"training.steps": 100_000, "guard.hang_s": LIMIT_S, "guard.check_steps": 1}
    config = config_of(root, strategy, **more, **{"model.options": options})
    with Ranks(LAUNCH, world) as ranks:
        return caught(ranks, "shardlab.training.run:train_rank", config, "test")


def loop(world: World, kind: str) -> None:
    """A loop of its own under the watchdog, in which rank 1 does something else."""
    LEDGER.reset()
    odd = world.rank == 1

    with watchdog.watching(world, LIMIT_S, 60):
        pulse.PULSE.begin_loop()
        for step in range(2 if kind == "leave" and odd else 5):
            pulse.PULSE.begin_step(step)
            LEDGER.step = step
            a, b = torch.ones(8), torch.ones(3)
            if step == 3 and odd and kind == "order":
                comm.broadcast(b, world.group, label="b")
                comm.all_reduce(a, world.group, label="a")
            else:
                comm.all_reduce(a, world.group, label="a")
                comm.broadcast(b, world.group, label="b")
            pulse.PULSE.end_step()
        pulse.PULSE.enter(pulse.LEFT)
        time.sleep(60 if kind == "leave" else 0)


def looped(kind: str, _root: Path) -> Halt:
    with Ranks(LAUNCH, 2) as ranks:
        return caught(ranks, loop, kind)


TRAIN = [
    "train", "--workload", f"{FILE}:make", "--steps", "1000", "-b", "4", "--set", "guard.hang_s=3",
    "--set", "data.shuffle=false", "--device", "cpu",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
IN_DATA = ["--set", "model.options.kind=data"]
STOPPED = ["--set", "model.options.kind=forward", "--set", "model.options.how=stop"]


def commanded(command: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    return commands.run(*command, cwd=root, OMP_NUM_THREADS="1", timeout=100)


PROVED = [
    "prove", "--strategies", f"{FILE}:Waiting", "--workload", f"{FILE}:make", "--set",
    "launch.timeout_s=6", "--json", "--device", "cpu",
]  # fmt: skip
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "torchrun": partial(commanded, [*TORCHRUN, "-m", "shardlab", *TRAIN, *STOPPED]),
    "command": partial(commanded, [*commands.SHARDLAB, *TRAIN, *IN_DATA]),
    "prove": partial(commanded, [*commands.SHARDLAB, *PROVED]),
}
ASLEEP = line_of("time.sleep(600)")
# Runs, and what is said of rank 1, which all others wait for.
RUNS: dict[str, tuple[Callable[[Path], Halt], tuple[str, ...]]] = {
    "data": (
        partial(trained, "simple_ddp", world=3, kind="data"),
        (
            "rank 1 never entered all_reduce #",
            "(target count, step 4): it is in data loading",
            f"at {ASLEEP}; ranks 0, 2 wait for it",
        ),
    ),
    "forward": (
        partial(trained, "bucket_ddp_async", kind="forward", how="sleep"),
        (f"it is in forward, at {ASLEEP}", "rank 0 waits for it"),
    ),
    "loop": (
        partial(trained, "simple_ddp", kind="forward", how="loop"),
        (f"it is in forward, at {FILE.name}:", "rank 0 waits for it"),
    ),
    "backward, zero3": (
        partial(trained, "zero3", kind="backward", how="sleep"),
        (f"it is in backward, at {ASLEEP}", "rank 0 waits for it"),
    ),
    "backward, pytorch_zero3": (
        partial(trained, "pytorch_zero3", kind="backward", how="sleep"),
        ("never entered all_gather #", "(params root, step 4): it is in backward", "rank 0 waits"),
    ),
    "backward, pytorch_ddp": (
        partial(trained, "pytorch_ddp", kind="backward", how="sleep"),
        (f"it is in backward, at {ASLEEP}", "rank 0 waits for it", "of PyTorch's own collectives"),
    ),
    "stopped": (
        partial(trained, "simple_ddp", kind="forward", how="stop"),
        ("rank 1 does not answer: it is stopped (SIGSTOP)", "last seen in"),
    ),
    # No thread of it can run Python; faulthandler answers from the signal's handler.
    "holds Python's lock": (
        partial(trained, "simple_ddp", kind="forward", how="hold"),
        ("rank 1 does not answer: Python cannot run there", line_of("ctypes.PyDLL(None)")),
    ),
    "left the loop early": (
        partial(looped, "leave"),
        (
            "rank 1 never entered all_reduce #4 (a, step 2)",
            "it has left the loop after 2 steps; rank 0 waits for it",
        ),
    ),
    # Whatever Gloo makes of it, what the ranks called under one number tells.
    "another order": (
        partial(looped, "order"),
        ("#6", "broadcast (3,) float32 'b'", "all_reduce (8,) float32 'a'"),
    ),
}


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Any, Path]]]:
    """Each case's verdict and folder. They wait most of their time, so they hang side by side."""
    cases = COMMANDS | {name: run for name, (run, _) in RUNS.items()}
    roots = {name: tmp_path_factory.mktemp("hang") for name in cases}
    with ThreadPoolExecutor(max_workers=5) as pool:
        found: dict[str, Future[Any]] = {n: pool.submit(c, roots[n]) for n, c in cases.items()}
        yield lambda name: (found[name].result(timeout=110), roots[name])


Hangs = Callable[[str], tuple[Any, Path]]


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("case", RUNS)
def test_the_rank_and_where_it_stands_are_named(hangs: Hangs, case: str) -> None:
    halt, _ = hangs(case)
    for words in RUNS[case][1]:
        assert words in str(halt)
    assert (halt.rank, halt.details["causes"]) == (1, [1]), str(halt)
    if case == "data":
        assert "in strike" in halt.traceback


# ------------------------------------------------------------------ as a user sees it


def status_of(root: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = (root / "runs").glob("*/status.json")
    return path.parent, json.loads(path.read_text())


@pytest.mark.long
@pytest.mark.alone
def test_the_command_ends_and_the_folder_says_why(hangs: Hangs) -> None:
    done, root = hangs("command")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: hung for ")
    assert "rank 1 never entered all_reduce" in last
    assert "Traceback" not in done.stderr
    folder, status = status_of(root)
    assert (status["state"], status["rank"]) == ("hung", 1)
    hang = json.loads((folder / "hang.json").read_text())
    assert hang["causes"] == [1]
    assert hang["stood_s"] < LIMIT_S + 5
    assert any("in strike" in f for s in hang["ranks"][1]["stacks"].values() for f in s)
    assert "rank 0: is in the step" in (folder / "hang.txt").read_text()


@pytest.mark.long
@pytest.mark.alone
def test_a_strategy_that_hangs_in_its_proof(hangs: Hangs) -> None:
    done, _ = hangs("prove")
    assert done.returncode == 1, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert not verdict["pass"]
    assert "rank 1 never entered all_reduce #" in done.stdout
    assert f"at {ASLEEP}; rank 0 waits for it" in done.stdout


@pytest.mark.long
@pytest.mark.alone
def test_torchrun(hangs: Hangs) -> None:
    """Ranks that nobody of ours started watch over each other, through the store."""
    done, root = hangs("torchrun")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("error: hung for")]
    assert len(said) == 1, done.stderr
    assert "rank 1 does not answer: it is stopped (SIGSTOP)" in said[0]
    folder, status = status_of(root)
    assert status["state"] == "hung"
    assert json.loads((folder / "hang.json").read_text())["stood_s"] < LIMIT_S + 5


def test_stacks_of_this_process() -> None:
    found = stacks.of_threads()
    assert next(iter(found)) == "MainThread"
    place = stacks.place_of(found["MainThread"])
    assert place is not None
    assert place.startswith("test_watchdog.py:")


def test_a_frame_without_a_line_has_its_first() -> None:
    """Python 3.11 has such frames for a moment."""
    code = SimpleNamespace(co_filename="own.py", co_firstlineno=7, co_name="forward")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    assert stacks._walk(frame) == [stacks.Frame("own.py", 7, "forward")]
