"""What watchdog, ledger and checks cost: steps with all of them and with none, interleaved.

    python benchmarks/guard_overhead.py [--strategy NAME] [--blocks N] [--out FILE]

On the default comparison's workload (gpt2 mini, two ranks). "On" is what ``shardlab train`` does by
default after its first steps: the watchdog's thread reporting each second, ledger entries written
as rows, a fingerprint of the collectives every 10 steps, a checksum of the replicas every 100, a
look at loss and gradients in each step. "Off" has none of it: collectives go to torch.distributed
directly (the watchdog's thread, a few microseconds a second, runs beside both). Steps alternate,
and the order within each pair too, so that a machine that slows down slows both. Prints the ratio
of the medians of ten steps' means with its 95% interval, paired, by the clock and by processor
time (what other programs do disturbs that less); and what each part takes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab import stats
from shardlab.launch.ranks import Ranks

STEPS = 10  # of each kind in a block
WARMUP = 5


class _Done:
    def wait(self) -> None: ...


def measure(world: Any, values: dict[str, Any], blocks: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from shardlab import comm
    from shardlab.guard import drift, watchdog
    from shardlab.guard.guards import Guards
    from shardlab.guard.nonfinite import NumbersGuard
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER
    from shardlab.strategies.update import Rule
    from shardlab.training import builders, loop

    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    LEDGER.reset(full_steps=1_000_000)  # as in a run's first steps: every row is written
    guards = Guards(config, world)
    LEDGER.check = None  # the first steps are measured apart, below
    strategy: Any = builders.build_strategy(config, workload, world)
    numbers = NumbersGuard(strategy, world, config.training.on_nonfinite)
    steps = loop.Batches(workload, config, world)
    counted = comm.all_reduce
    reductions = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    rules: dict[bool, Rule] = {
        True: strategy.update.rule,
        False: Rule(schedule=strategy.update.rule.schedule),
    }

    def bare(tensor: torch.Tensor, group: Any, *, op: str = "sum", **_: Any) -> Any:
        dist.all_reduce(tensor, reductions[op], group, async_op=True).wait()
        return _Done()

    def step(guarded: bool, number: int) -> None:
        microbatches = next(steps)
        if not guarded:
            strategy.gradients(microbatches)
            strategy.step()
            return
        LEDGER.step = number
        loss = strategy.gradients(microbatches)
        numbers.check_loss(number, loss, microbatches)
        strategy.step()
        numbers.after_step(number, loss)
        LEDGER.step = None
        for row in LEDGER.take():
            json.dumps(row)

    def timed(guarded: bool, number: int) -> tuple[float, float]:
        """Milliseconds of a step, by the clock and by the processor, with what is due after it."""
        comm.all_reduce = counted if guarded else bare
        strategy.update.rule = rules[guarded]
        start, processor = time.perf_counter(), time.process_time()
        step(guarded, number)
        if guarded and number % 10 == 0:
            guards.sequence.compare()  # type: ignore[union-attr]
        if guarded and number % 100 == 0:
            drift.check(strategy, world, 0)
        return (time.perf_counter() - start) * 1e3, (time.process_time() - processor) * 1e3

    for i in range(WARMUP):
        step(True, i)
    repeats: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    with watchdog.watching(world, None, config.launch.timeout_s):
        for index in range(blocks):
            steps_of: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for i in range(STEPS):
                for guarded in (True, False) if i % 2 == 0 else (False, True):
                    steps_of[guarded].append(timed(guarded, index * STEPS + i))
            for guarded in (True, False):
                repeats[guarded].append(steps_of[guarded])
    comm.all_reduce, strategy.update.rule = counted, rules[True]

    def each_ms(work: Callable[[], Any], times: int = 20) -> float:
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            taken.append((time.perf_counter() - start) * 1e3)
        return min(taken)  # when nothing disturbs it

    small = torch.zeros(1)
    loss = torch.zeros((), dtype=torch.float64)
    entries = len(strategy.params) + 3

    def book() -> None:
        for _ in range(entries):
            entry = LEDGER.open("all_reduce", small, world.group, "grad")
            entry.wait_ns = entry.done_ns = entry.ready_ns = time.perf_counter_ns()
        for row in LEDGER.take():
            json.dumps(row)

    def check() -> None:
        LEDGER.check = guards.sequence.check  # type: ignore[union-attr]
        LEDGER.open("all_reduce", small, world.group, "grad")
        LEDGER.check = None
        LEDGER.entries.clear()

    def processor_ms(work: Callable[[], Any]) -> float:
        """Of one small collective, the least of 40 means."""
        taken = []
        for _ in range(40):
            world.gather(None)
            start = time.process_time()
            for _ in range(50):
                work()
            taken.append((time.process_time() - start) * 1e3 / 50)
            LEDGER.take()
        return min(taken)

    def ledgered() -> None:
        counted(small, world.group, label="x", async_op=True).wait()

    alone = processor_ms(lambda: bare(small, world.group))
    with_row = processor_ms(ledgered)
    LEDGER.full_steps = None  # as in a proof: a callback stamps when it ended
    with_stamp = processor_ms(ledgered)
    LEDGER.full_steps = 1_000_000
    gradients = [torch.ones_like(p) for p in strategy.params.values()]
    reporter = watchdog.Reporter(world, None, config.launch.timeout_s, None)
    parts = {
        "ledger, a step": each_ms(book),
        "loss and gradients, a step": each_ms(
            lambda: (float(loss), strategy.update._norm(gradients, None).item())
        ),
        "watchdog's thread, each second": each_ms(lambda: reporter.report(reporter.message())),
        "fingerprint, every 10 steps": each_ms(guards.sequence.compare),  # type: ignore[union-attr]
        "replicas' checksums, every 100 steps": each_ms(
            lambda: drift.check(strategy, world, 0), times=5
        ),
        "one collective checked before its launch": each_ms(check),
        "processor: one small collective": alone,
        "processor: the same with the ledger": with_row,
        "processor: the same with a stamp by callback": with_stamp,
    }
    reporter.report(None)
    return {
        "env": environment.describe(world.device, "python benchmarks/guard_overhead.py"),
        "strategy": config.strategy.name,
        "collectives_per_step": entries,
        "on": repeats[True],
        "off": repeats[False],
        "parts_ms": parts,
    }


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """By the clock a step is as slow as its slowest rank; by the processor, all ranks' together.

    Means of ten steps each, so that what is done every ten counts.
    """

    def means(kind: str, which: int, over: Callable[[Any], float]) -> list[list[float]]:
        groups = zip(*(rank[kind] for rank in ranks), strict=True)
        return [
            [statistics.fmean(over([s[which] for s in step]) for step in zip(*g, strict=True))]
            for g in groups
        ]

    on, off = means("on", 0, max), means("off", 0, max)
    cpu = [means("on", 1, sum), means("off", 1, sum)]
    median = stats.spread([b[0] for b in off])["median"]
    parts = ranks[0]["parts_ms"]
    per_step = {
        "ledger": parts["ledger, a step"],
        "numbers": parts["loss and gradients, a step"],
        "watchdog": parts["watchdog's thread, each second"] * median / 1000,
        "fingerprint": parts["fingerprint, every 10 steps"] / 10,
        "drift": parts["replicas' checksums, every 100 steps"] / 100,
    }
    return {
        "env": ranks[0]["env"],
        "strategy": ranks[0]["strategy"],
        "collectives_per_step": ranks[0]["collectives_per_step"],
        "blocks": len(on),
        "steps_per_block": STEPS,
        "step_ms": {
            "on": stats.spread([b[0] for b in on]),
            "off": stats.spread([b[0] for b in off]),
        },
        "ratio": stats.ratio(on, off),
        "ratio_95": list(stats.ratio_interval(on, off, paired=True)),
        "processor_ms": {
            "on": stats.spread([b[0] for b in cpu[0]]),
            "off": stats.spread([b[0] for b in cpu[1]]),
        },
        "processor_ratio": stats.ratio(*cpu),
        "processor_ratio_95": list(stats.ratio_interval(cpu[0], cpu[1], paired=True)),
        "load_average": os.getloadavg(),
        "parts_ms": parts,
        "parts_per_step_ms": per_step,
        "parts_share_of_step": sum(per_step.values()) / median,
        "checked_step_share": parts["one collective checked before its launch"]
        * ranks[0]["collectives_per_step"]
        / median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="simple_ddp")  # the most collectives a step
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = configs.load(
        None,
        {
            "training.steps": WARMUP + 2 * STEPS * arguments.blocks,
            "strategy.name": arguments.strategy,
            "launch.world": 2,
        },
    )
    with Ranks(config.launch, 2) as ranks:
        result = summary(ranks.run(measure, config.to_dict(), arguments.blocks))
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
