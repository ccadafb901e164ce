"""Kill, hang, slow down, damage: every run must end as if nothing had happened.

    python benchmarks/soak.py [--cases 54] [--seeds 0] [--minutes 15] [--short] [--out DIR]

Each case trains a small GPT with one strategy on two or three ranks, disturbs it at random, and
lets it go on: by itself (``--max-restarts``) or by ``--resume``. It passes if

- the last checkpoint (parameters, optimizer state, random states) is bitwise that of the same run
  undisturbed, and every step has one row with the same loss;
- no run took longer than its deadline;
- no process and no half-written file is left.

A seed chooses the faults; ``--seeds 1,2,3`` or ``--seeds 1-10`` makes so many cases of each. With
``--out`` soak.json and soak.md are written after every case, and the same command goes on where it
was stopped. Every case ends in a row, whatever happened; those that did not end as the undisturbed
run are in a table of their own. Exit code 1 if there are any, or if cases are left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab import runfolder
from shardlab.checkpoint import files, manifest
from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.faults import spec
from shardlab.files import read_jsonl, write_json, write_text
from shardlab.naming import STRATEGIES
from shardlab.training import restart

STEPS, EVERY = 8, 2
# After which the watchdog ends a run that is made to hang, and the deadline of one start of a run;
# or as long as the undisturbed run takes, and thirty times as long, where the machine is busy.
HANG_S, DEADLINE_S = 4.0, 120.0
RESTARTS = 3
SHORT = ("zero3", "bucket_ddp_async", "pytorch_ddp", "pytorch_zero3")
BASE: dict[str, Any] = {
    "model": {
        "workload": "gpt2", "size": "tiny",
        # An odd vocabulary, so that no shard is cut where a row ends.
        "options": {"layers": 2, "dim": 32, "heads": 2, "context": 16, "vocab": 67},
    },
    "data": {"source": "synthetic"},
    "training": {
        "steps": STEPS, "global_batch": 12, "micro_batch": 3, "learning_rate": 3e-3,
        "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2, "clip_norm": 1.0,
    },
    "checkpoint": {"every": EVERY, "keep_last": 3},
    # Every step is compared, so that a collective that was left out is found in its step.
    "guard": {"check_steps": 1, "check_every": 1},
    "profile": {"ledger_steps": 0},  # small files, for the disk that is nearly full
    "launch": {"device": "cpu", "timeout_s": 100.0},
}  # fmt: skip


@dataclass
class Case:
    """What is done to which run, and how it went."""

    kind: str
    strategy: str
    world: int
    faults: list[str] = field(default_factory=list)
    goes_on: str = "restart"  # by itself, or "resume": started again by hand
    by: str = "library"  # "command": in a process of its own; "torchrun"
    outside: str = ""  # what is done from outside: a signal to a rank, damage to a checkpoint
    ended: list[str] = field(default_factory=list)  # how each start of the run ended
    seconds: float = 0.0  # all of it
    longest_s: float = 0.0  # the longest start
    wrong: list[str] = field(default_factory=list)
    seed: int = 0
    number: int = 0  # among those of its seed

    @property
    def passed(self) -> bool:
        return not self.wrong


# ------------------------------------------------------------------ which cases


def cases(count: int, rng: random.Random, short: bool) -> list[Case]:
    """``count`` cases: every kind in turn, and every strategy in turn."""
    makers = list(MAKERS.values())
    strategies = list(SHORT if short else STRATEGIES)
    rng.shuffle(strategies)
    made: list[Case] = []
    turn = 0
    while len(made) < count:
        maker = makers[len(made) % len(makers)]
        for attempt in range(len(strategies)):
            strategy = strategies[(turn + attempt) % len(strategies)]
            case = maker(strategy, 2 if short else _world(strategy, rng), rng)
            if case is not None:
                made.append(case)
                turn += attempt + 1
                break
    return made


def _world(strategy: str, rng: random.Random) -> int:
    if strategy == "single":
        return 1
    return 2 if strategy == "pytorch_hsdp" else rng.choice((2, 2, 3))


def _place(strategy: str, rng: random.Random) -> str:
    return rng.choice(
        ("data", "forward") if strategy == "single" else ("data", "forward", "collective")
    )


def _on(rng: random.Random) -> str:
    return rng.choice(("restart", "resume"))


def _kill(strategy: str, world: int, rng: random.Random) -> Case:
    where = _place(strategy, rng)
    fault = f"kill:rank={rng.randrange(world)},step={rng.randrange(STEPS)},where={where}"
    return Case(f"killed in {where}", strategy, world, [fault], "restart")


def _kill_by_hand(strategy: str, world: int, rng: random.Random) -> Case:
    case = _kill(strategy, world, rng)
    case.goes_on = "resume"
    return case


def _kill_in_checkpoint(strategy: str, world: int, rng: random.Random) -> Case:
    fault = f"kill:rank={rng.randrange(world)},step={rng.randrange(STEPS)},where=checkpoint"
    return Case("killed while it writes a checkpoint", strategy, world, [fault], _on(rng))


def _kill_twice(strategy: str, world: int, rng: random.Random) -> Case:
    steps = sorted(rng.sample(range(STEPS), 2))
    kills = [f"kill:rank={rng.randrange(world)},step={step}" for step in steps]
    return Case("killed twice", strategy, world, kills, "restart")


def _hang(strategy: str, world: int, rng: random.Random) -> Case:
    where = _place(strategy, rng)
    fault = f"hang:rank={rng.randrange(world)},step={rng.randrange(STEPS)},where={where}"
    return Case(f"hangs in {where}", strategy, world, [fault], _on(rng))


def _slow(strategy: str, world: int, rng: random.Random) -> Case:
    where, ms = _place(strategy, rng), rng.randrange(20, 200)
    step = rng.choice(("", f",step={rng.randrange(STEPS)}"))
    fault = f"slow:rank={rng.randrange(world)},ms={ms}{step},where={where}"
    return Case(f"slow in {where}", strategy, world, [fault])


def _drop(strategy: str, world: int, rng: random.Random) -> Case | None:
    if strategy == "single" or strategy.startswith("pytorch_"):
        return None
    fault = f"drop-collective:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("a collective left out", strategy, world, [fault], "restart")


def _nan(strategy: str, world: int, rng: random.Random) -> Case:
    fault = f"nan:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("NaN", strategy, world, [fault], "resume")


def _corrupt(strategy: str, world: int, rng: random.Random) -> Case:
    """Any of the checkpoints but the last: after it no step is left in which to be killed."""
    how = rng.choice(spec.DAMAGES)
    after = EVERY * rng.randrange(1, STEPS // EVERY)  # steps, when it was taken
    kill = f"kill:rank={rng.randrange(world)},step={rng.randrange(after, after + EVERY)}"
    damage = f"corrupt-checkpoint:step={after - 1},how={how}"
    kind = f"checkpoint damaged, then killed ({how})"
    return Case(kind, strategy, world, [damage, kill], _on(rng))


def _drift(strategy: str, world: int, rng: random.Random) -> Case | None:
    if "ddp" not in strategy:
        return None
    fault = f"drift:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("a copy of the weights drifts", strategy, world, [fault], _on(rng))


def _disk_full(strategy: str, world: int, rng: random.Random) -> Case:
    """Files may still be small: records can be written, a checkpoint cannot."""
    rank, step = rng.randrange(world), rng.randrange(EVERY, STEPS - EVERY)
    full = f"disk-full:rank={rank},step={step},bytes=50000"
    kill = f"kill:rank={rng.randrange(world)},step={STEPS - 1}"
    return Case("disk full in a checkpoint, then killed", strategy, world, [full, kill], _on(rng))


def _no_space(strategy: str, world: int, rng: random.Random) -> Case:
    full = f"disk-full:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("disk full", strategy, world, [full], _on(rng))


def _signal(name: str) -> Callable[[str, int, random.Random], Case]:
    def make(strategy: str, world: int, rng: random.Random) -> Case:
        outside = f"{name} rank {rng.randrange(world)} after {rng.randrange(1, STEPS - 2)} steps"
        # Slower, so that there is something left to be disturbed.
        slow = [f"slow:rank={rank},ms=60" for rank in range(world)]
        kind = "SIGKILL from outside" if name == "KILL" else "stopped (SIGSTOP) from outside"
        return Case(kind, strategy, world, slow, _on(rng), outside=outside)

    return make


def _bit_flip(strategy: str, world: int, rng: random.Random) -> Case:
    kill = f"kill:rank={rng.randrange(world)},step={rng.randrange(2 * EVERY, STEPS)}"
    outside = f"{rng.choice(('flip', 'truncate', 'delete'))} any file of the newest checkpoint"
    return Case("killed, newest checkpoint damaged", strategy, world, [kill], "resume",
                outside=outside)  # fmt: skip


def _command(strategy: str, world: int, rng: random.Random) -> Case:
    kill = f"kill:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("killed, by the command line", strategy, world, [kill], _on(rng), "command")


def _parent(strategy: str, world: int, rng: random.Random) -> Case:
    slow = [f"slow:rank={rank},ms=100" for rank in range(world)]
    outside = f"KILL parent after {rng.randrange(1, STEPS - 2)} steps"
    return Case("the launcher itself killed", strategy, world, slow, "resume", "command", outside)


def _torchrun(strategy: str, world: int, rng: random.Random) -> Case:
    kill = f"kill:rank={rng.randrange(world)},step={rng.randrange(STEPS)}"
    return Case("killed, under torchrun", strategy, world, [kill], "restart", "torchrun")


MAKERS: dict[str, Callable[[str, int, random.Random], Case | None]] = {
    "kill": _kill, "hang": _hang, "corrupt": _corrupt, "outside": _signal("KILL"), "nan": _nan,
    "drop": _drop, "disk-full": _disk_full, "slow": _slow, "no space": _no_space,
    "kill by hand": _kill_by_hand, "in checkpoint": _kill_in_checkpoint, "hang again": _hang,
    "flip": _bit_flip, "stop": _signal("STOP"), "twice": _kill_twice, "command": _command,
    "parent": _parent, "torchrun": _torchrun, "drift": _drift,
}  # fmt: skip


# ------------------------------------------------------------------ running one


class TookTooLong(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settings(strategy: str, world: int, folder: Path, **more: Any) -> Config:
    values = {**BASE, "strategy": {"name": strategy}, "output": {"dir": str(folder)}}
    values["launch"] = {**BASE["launch"], "world": world}
    return configs.from_dict(values).with_overrides(more)


def run(case: Case, folder: Path, undisturbed_s: float) -> None:
    """Start it, disturb it, and let it go on until it has finished or cannot."""
    rng = random.Random(f"{case.seed}/{case.number}")  # its own: cases may be run one by one
    limit_s = max(DEADLINE_S, 30 * undisturbed_s)
    restarts = RESTARTS if case.goes_on == "restart" and case.by != "torchrun" else 0
    # A collective that is left out is paired with another one: of other sizes, Gloo waits for ever.
    makes_hang = ("hang", "drop")
    hangs = any(f.startswith(makes_hang) for f in case.faults) or case.outside.startswith("STOP")
    config = settings(
        case.strategy, case.world, folder,
        **{"faults": case.faults, "launch.max_restarts": restarts,
           "guard.hang_s": max(HANG_S, undisturbed_s) if hangs else None},
    )  # fmt: skip
    start = {"library": _in_here, "command": _as_command, "torchrun": _under_torchrun}[case.by]
    began = time.monotonic()
    for attempt in range(1 + RESTARTS):
        if attempt:
            if case.goes_on != "resume":
                break
            config = config.with_overrides({"checkpoint.resume": "auto"})
        at = time.monotonic()
        disturber = _Disturber(case, folder) if not attempt else None
        try:
            with deadline(limit_s):
                ended = start(config, case, folder)
        except TookTooLong:
            ended = "hung"
            case.wrong.append(f"start {attempt + 1} took longer than {limit_s:g} s")
        finally:
            if disturber is not None:
                disturber.stop()
        case.longest_s = max(case.longest_s, time.monotonic() - at)
        case.ended.append(ended)
        if ended in ("finished", "hung"):
            break
        if not attempt and "newest checkpoint" in case.outside:
            _damage_newest(folder, case.outside.split()[0], rng)
    case.seconds = time.monotonic() - began


def disturbed(case: Case, folder: Path, reference: Path, undisturbed_s: float) -> None:
    """Run and judge it. What nobody thought of is a wrong result too, and not the soak's end."""
    try:
        run(case, folder, undisturbed_s)
        judge(case, folder, reference)
    except Exception as error:
        case.wrong.append(f"{type(error).__name__}: {error}"[:300])


def _in_here(config: Config, case: Case, _folder: Path) -> str:
    """As the command does, in this process: the ranks are its children."""
    restarted = []

    def listen(event: Mapping[str, Any]) -> None:
        if "restart" in event:
            restarted.append(event["reason"])

    try:
        restart.train(config, "soak", listen)
        ended = "finished"
    except (RankFailure, UsageError) as error:
        ended = f"{type(error).__name__}: {error}"[:300]
    case.ended += [f"restarted: {reason}"[:300] for reason in restarted]
    return ended


def _as_command(config: Config, _case: Case, folder: Path) -> str:
    return _spawn([sys.executable, "-m", "shardlab", "train"], config, folder)


def _under_torchrun(config: Config, case: Case, folder: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.world}"]
    torchrun += [f"--max-restarts={RESTARTS}", "--standalone", "-m", "shardlab", "train"]
    config = config.with_overrides({"launch.world": None})
    return _spawn(torchrun, config, folder)


def _spawn(command: list[str], config: Config, folder: Path) -> str:
    file = folder.with_suffix(".yaml")
    file.write_text(config.to_yaml(), encoding="utf-8")
    process = subprocess.Popen(
        [*command, "--config", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    folder.with_suffix(".pid").write_text(str(process.pid))
    try:
        output, _ = process.communicate()
    except BaseException:
        for pid in [*_descendants(process.pid), process.pid]:  # torchrun's ranks are no group of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode == 0:
        return "finished"
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    return f"exit code {process.returncode}: {(lines or ['no word'])[-1]}"[:300]


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found.append(int(path.parent.name))
    return [*found, *(below for child in found for below in _descendants(child))]


class _Disturber(threading.Thread):
    """Sends a signal to a rank, or to the launcher, once the run has made some steps."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.over = threading.Event()
        self.words = case.outside.split()
        self.sent: int | None = None
        if self.words and self.words[0] in ("KILL", "STOP"):
            self.start()

    def run(self) -> None:
        steps = int(self.words[-2])
        number = signal.SIGKILL if self.words[0] == "KILL" else signal.SIGSTOP
        while not self.over.wait(0.01):
            rows = self.folder / "rank0.jsonl"
            if not rows.exists() or len(read_jsonl(rows)) < steps:
                continue
            if self.words[1] == "parent":
                pid = int(self.folder.with_suffix(".pid").read_text())
            else:
                pid = runfolder.state_of(self.folder)["pids"][int(self.words[2])]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            self.sent = pid
            return

    def stop(self) -> None:
        self.over.set()
        if self.is_alive():
            self.join()


def _damage_newest(folder: Path, how: str, rng: random.Random) -> None:
    newest = next(iter(files.steps_in(folder).values()), None)
    if newest is None:
        return
    path = rng.choice(sorted(p for p in newest.iterdir() if p.is_file()))
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        at = rng.randrange(len(content))
        path.write_bytes(
            content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
        )


# ------------------------------------------------------------------ judging one


def judge(case: Case, folder: Path, reference: Path) -> None:
    """Everything that is not as in the undisturbed run."""
    if case.ended[-1] != "finished":
        case.wrong.append(f"did not finish: {case.ended[-1]}")
    struck = faults_struck(folder)
    case.wrong += [f"the fault {f} never struck" for f in case.faults if f not in struck
                   and spec.parse(f).is_once]  # fmt: skip
    case.wrong += leftovers(folder)
    if case.wrong:
        return
    if (state := runfolder.state_of(folder).get("state")) != "finished":
        case.wrong.append(f"status.json says {state}")
    case.wrong += different(folder, reference, case.world)


def faults_struck(folder: Path) -> set[str]:
    rows = [row for path in folder.glob("faults.rank*.jsonl") for row in read_jsonl(path)]
    return {row["fault"] for row in rows}


def different(folder: Path, reference: Path, world: int) -> list[str]:
    """In what the last checkpoints or the losses differ. Files are compared by their checksums."""
    found = []
    ours, theirs = (run / files.FOLDER / files.name_of(STEPS) for run in (folder, reference))
    b = manifest.read(theirs)
    try:
        a = manifest.read(ours)
        manifest.verify(ours, a.files)
    except UsageError as damaged:
        return [f"the last checkpoint cannot be read: {damaged}"]
    for name in ("files", "tensors", "numbers", "update", "step", "world", "strategy"):
        if getattr(a, name) != getattr(b, name):
            found.append(f"the last checkpoint differs in its {name}")
    for rank in range(world):
        rows, expected = (read_jsonl(run / f"rank{rank}.jsonl") for run in (folder, reference))
        if [row["step"] for row in rows] != list(range(STEPS)):
            found.append(f"rank {rank} has rows of the steps {[row['step'] for row in rows]}")
        elif [row["loss"] for row in rows] != [row["loss"] for row in expected]:
            found.append(f"rank {rank} has other losses")
    return found


def leftovers(folder: Path) -> list[str]:
    """Processes of the run that live, and files that are half-written."""
    found = []
    pids = runfolder.state_of(folder).get("pids", [])
    limit = time.monotonic() + 5
    alive = pids
    while alive and time.monotonic() < limit:
        alive = [pid for pid in alive if files._is_alive(pid)]
        time.sleep(0.01)
    found += [f"process {pid} is left" for pid in alive]
    for path in folder.rglob("*"):
        if ".part" in path.name or path.name.startswith(".") or path.suffix == ".tmp":
            found.append(f"{path.relative_to(folder)} is left")
    return found


# ------------------------------------------------------------------ all of them


def soak(
    planned: list[Case],
    done: list[Case],
    minutes: float,
    place: Path,
    tell: Callable[[str], None],
    on_done: Callable[[], None],
) -> None:
    """Run what is not done yet, and add it to ``done``."""
    references: dict[tuple[str, int], tuple[Path, float]] = {}
    limit = time.monotonic() + 60 * minutes
    finished = {(case.seed, case.number) for case in done}
    left = [case for case in planned if (case.seed, case.number) not in finished]
    for position, case in enumerate(left):
        if time.monotonic() > limit:
            tell(f"{minutes:g} minutes are over: {len(left) - position} cases were not run")
            break
        key = case.strategy, case.world
        if key not in references:
            path, began = place / f"undisturbed-{case.strategy}-{case.world}", time.monotonic()
            with deadline(10 * DEADLINE_S):
                restart.train(settings(*key, path), "soak", lambda _event: None)
            references[key] = path, time.monotonic() - began
        folder = place / f"seed-{case.seed}-case-{case.number:03d}"
        disturbed(case, folder, *references[key])
        done.append(case)
        on_done()
        verdict = "same" if case.passed else "; ".join(case.wrong)
        tell(f"{len(done):3d}/{len(planned)} seed {case.seed}, {case.kind}, {case.strategy} on "
             f"{case.world}: {verdict} ({case.seconds:.1f} s)")  # fmt: skip
        if case.passed:
            shutil.rmtree(folder)


def not_the_same(done: list[Case]) -> str:
    """Markdown: a line for each case that did not end as the undisturbed run, and why."""
    lost = [case for case in done if not case.passed]
    if not lost:
        return f"Not the same as the undisturbed run: none of {len(done)}.\n"
    lines = ["| seed | case | fault | strategy | not the same |", "|--:|--:|---|---|---|"]
    for case in lost:
        what = ", ".join([case.kind, *case.faults, *filter(None, [case.outside])])
        why = "; ".join(case.wrong).replace("|", "/")
        lines.append(
            f"| {case.seed} | {case.number} | {what} | {case.strategy}:{case.world} | {why} |"
        )
    return "\n".join(lines) + "\n"


def table(done: list[Case]) -> str:
    """Markdown: a line for each kind of fault."""
    lines = [
        "| fault | cases | strategies | went on by | same parameters | longest start |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for kind in dict.fromkeys(case.kind for case in done):
        of_kind = [case for case in done if case.kind == kind]
        strategies = len({c.strategy for c in of_kind})
        ways = ", ".join(sorted({c.goes_on for c in of_kind}))
        same = sum(c.passed for c in of_kind)
        longest = max(c.longest_s for c in of_kind)
        lines.append(
            f"| {kind} | {len(of_kind)} | {strategies} | {ways} | {same} | {longest:.1f} s |"
        )
    same = sum(c.passed for c in done)
    longest = max((c.longest_s for c in done), default=0.0)
    strategies = len({c.strategy for c in done})
    lines.append(f"| **all** | {len(done)} | {strategies} | | {same} | {longest:.1f} s |")
    return "\n".join(lines) + "\n"


class Record:
    """``soak.json`` and ``soak.md``: written after every case, and read when the soak goes on."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder = folder
        self.about = about
        self.done: list[Case] = []
        path = None if folder is None else folder / "soak.json"
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if {key: found.get(key) for key in about} != about:
                raise SystemExit(f"{path} is of another soak: {found.get('command')}")
            names = {f.name for f in fields(Case)}
            self.done = [
                Case(**{k: v for k, v in row.items() if k in names}) for row in found["cases"]
            ]

    def write(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [asdict(case) | {"passed": case.passed} for case in self.done]
        same = sum(case.passed for case in self.done)
        content = {**self.about, "done": len(rows), "same": same, "cases": rows}
        write_json(self.folder / "soak.json", content)
        text = f"{table(self.done)}\n{not_the_same(self.done)}"
        write_text(self.folder / "soak.md", text)


def seeds_in(text: str) -> list[int]:
    """``1,2,5-7``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=54, help="of each seed")
    parser.add_argument("--minutes", type=float, default=15.0, help="no new case after so many")
    parser.add_argument("--seeds", "--seed", type=seeds_in, default=[0], help="such as 1,2,5-7")
    parser.add_argument("--short", action="store_true", help="two ranks and four strategies")
    parser.add_argument("--out", type=Path, help="folder for soak.json and soak.md")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each lost peer is a page of C++ frames
    seeds = ",".join(map(str, arguments.seeds))
    short = " --short" if arguments.short else ""
    command = f"python benchmarks/soak.py --cases {arguments.cases} --seeds {seeds}{short}"
    kept = Record(
        arguments.out,
        {"schema": 1, "command": command, "seeds": arguments.seeds, "each": arguments.cases},
    )
    planned: list[Case] = []
    for seed in arguments.seeds:
        of_seed = cases(arguments.cases, random.Random(seed), arguments.short)
        for number, case in enumerate(of_seed):
            case.seed, case.number = seed, number
        planned += of_seed
    began, before = time.monotonic(), len(kept.done)
    with tempfile.TemporaryDirectory(prefix="shardlab-soak-") as place:
        try:
            soak(
                planned, kept.done, arguments.minutes, Path(place),
                lambda line: print(line, flush=True), kept.write,
            )  # fmt: skip
        finally:
            if not all(case.passed for case in kept.done[before:]):  # to be looked at
                failed = Path(tempfile.mkdtemp(prefix="shardlab-soak-failed-"))
                shutil.copytree(place, failed, dirs_exist_ok=True)
                print(f"the folders of what failed: {failed}")
    print(table(kept.done))
    print(not_the_same(kept.done))
    print(
        f"{len(kept.done) - before} cases in {(time.monotonic() - began) / 60:.1f} minutes, "
        f"seeds {seeds}; {len(kept.done)} of {len(planned)} are done"
    )
    is_well = len(kept.done) == len(planned) and all(case.passed for case in kept.done)
    raise SystemExit(0 if is_well else 1)


if __name__ == "__main__":
    main()
