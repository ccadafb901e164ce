"""A TraceSet of known numbers, for what draws and compares: it needs no traces and no analysis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardlab.trace import model
from shardlab.trace.clocks import Clock


@dataclass
class HandMade:
    """A TraceSet of known numbers: two ranks, three steps of 10 ms; rank 1 is 2 ms late in each."""

    steps: int = 3
    kernel: str = "aten::addmm"
    label: str = "bucket 0"
    warnings: tuple[str, ...] = ()
    ranks: int = 2
    operators: int = 20  # per step
    window: str = ""
    marked: bool = True
    traces: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traces = [self._trace(rank) for rank in range(self.ranks)]

    def _trace(self, rank: int) -> Any:
        n = self.steps * self.operators
        starts = np.concatenate(
            [10_000_000 * s + 6_000_000 // self.operators * np.arange(self.operators)
             for s in range(self.steps)]
        )  # fmt: skip
        return SimpleNamespace(
            path=Path("run") / f"rank{rank}.json.gz",
            rank=rank,
            world=self.ranks,
            device="cpu",
            shardlab={"strategy": "simple_ddp", "run": "a run"},
            names=(self.kernel, "forward", "ProfilerStep#0"),
            steps=[model.Step(s, 10_000_000 * s, 10_000_000 * (s + 1)) for s in range(self.steps)],
            events=model.Events(
                name=np.zeros(n, np.int32),
                kind=np.full(n, model.CPU_OP, np.int8),
                start_ns=starts,
                dur_ns=np.full(n, 5_000_000 // self.operators),
                tid=np.zeros(n, np.int32),
                stream=np.full(n, -1, np.int32),
                device=np.full(n, -1, np.int16),
                correlation=np.full(n, -1),
            ),
        )

    def breakdown(self, per: str = "step") -> list[model.Breakdown]:
        rows = []
        for rank in range(self.ranks):
            wait = 2000.0 if rank == 0 and self.ranks > 1 else 0.0
            row = model.Breakdown(
                rank, 0, 1, 10000.0, 6000.0, 1000.0, wait, 0.0, 0.0, 3000.0 - wait, 1500.0,
                2500.0 + wait,
            )  # fmt: skip
            if per == "step":
                rows += [replace(row, step=s) for s in range(self.steps)]
            else:
                many = {
                    f.name: getattr(row, f.name) * self.steps
                    for f in row.__dataclass_fields__.values()
                    if f.name.endswith("_us")
                }
                rows.append(replace(row, step=None, steps=self.steps, **many))
        return rows

    def collectives(self) -> list[model.Collective]:
        made = []
        for s in range(self.steps):
            at = 10_000_000 * s + 6_000_000
            parts = tuple(
                model.Participant(r, at - 500_000, at + 2_000_000 * r, at + 3_000_000,
                                  2000.0 if r == 0 else 0.0)
                for r in range(self.ranks)
            )  # fmt: skip
            made.append(
                model.Collective(f"0:{s}", "ledger", "all_reduce", self.label, "0", s, "backward",
                                 1 << 20, "float32", 2, parts, 1, 2000.0, 1000.0, 2000.0, 1.0, 1.0)
            )  # fmt: skip
        return made

    def collective_summary(self, by: str = "kind") -> list[model.CollectiveSummary]:
        name = "all_reduce" if by == "kind" else self.label
        return [
            model.CollectiveSummary(name, self.steps, 3 << 20, 9000.0, 3000.0, 6000.0, 1.0, 1.0),
            model.CollectiveSummary("broadcast", 30, None, 90.0, 90.0, 0.0, None, None),
        ]

    def stragglers(self) -> list[model.Straggler]:
        if self.ranks == 1:
            return []
        return [
            model.Straggler(
                1,
                "backward",
                self.steps,
                2000.0 * self.steps,
                2000.0 * self.steps,
                2000.0,
                "0:1",
                self.label,
            )
        ]

    def memory(self) -> list[model.Memory]:
        at = np.arange(0, 30_000_000, 10_000)
        held = (1 << 20) * (1 + (at // 100_000) % 7)
        return [
            model.Memory(r, "cpu", int(held.max()), 600_000, 0, "backward", 4 << 20, 7 << 20,
                         1 << 20, at, held)
            for r in range(self.ranks)
        ]  # fmt: skip

    def what_if(self) -> list[model.WhatIf]:
        return [model.WhatIf("communication were free", 7000.0, 10000.0, "nothing else changes")]

    def kernels(self, top: int = 10) -> list[model.Kernel]:  # noqa: ARG002
        return [
            model.Kernel(r, self.kernel, "compute", 60, 15000.0, 250.0, 250.0, 250.0, 0.0)
            for r in range(self.ranks)
        ]

    def clocks(self) -> list[Clock]:
        return [Clock(r, f"host{r}", (r,), 2e6 * r, 90.0 * r, 10.0 * r) for r in range(self.ranks)]

    def shifts(self) -> dict[Path, int]:
        return {trace.path: 0 for trace in self.traces}

    def lanes(self) -> list[model.Lane]:
        made = []
        for rank in range(self.ranks):
            begin = 10_000_000 * np.arange(self.steps)
            marks = tuple(f"ProfilerStep#{s}" for s in range(self.steps))
            made.append(model.Lane(rank, "steps", begin, begin + 10_000_000, marks))
            made.append(model.Lane(rank, "compute", begin, begin + 6_000_000, ()))
            made.append(model.Lane(rank, "comm", begin + 8_000_000, begin + 9_000_000,
                                   (self.label,) * self.steps))  # fmt: skip
            if rank == 0:
                names = ("waiting",) * self.steps
                made.append(model.Lane(rank, "wait", begin + 6_000_000, begin + 8_000_000, names))
        return made
