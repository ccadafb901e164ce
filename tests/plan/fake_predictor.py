"""A predictor for tests: a few formulas instead of a simulation, so that answers are known."""

from __future__ import annotations

from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.plan.predict import Prediction, WhatIf
from shardlab.plan.replay import Span

PSI = 500e6  # bytes of parameters
SPEED = {"this": 1e12, "h100": 400e12, "a100-80": 150e12}
MEMORY = {"this": None, "h100": 80 * 10**9, "a100-80": 80 * 10**9}
FLOPS = 8e12  # of a sample
# Bytes of the link that a strategy sends, in Ψ, and the share of backward that hides them.
SENDS = {
    "pytorch_ddp": (2.0, 0.8), "pytorch_zero1": (2.0, 0.8), "zero1": (2.0, 0.5),
    "zero3": (3.0, 0.9), "single": (0.0, 0.0),
}  # fmt: skip
HOLDS = {"pytorch_ddp": 1.0, "pytorch_zero1": 0.5, "zero1": 0.5, "zero3": 0.1, "single": 1.0}


class FakePredictor:
    """It also notes what it was asked."""

    def __init__(self, rate: float = 50e9, state: float = 60e9, tokens: int = 1024) -> None:
        self.rate, self.state, self.tokens = rate, state, tokens
        self.asked: list[tuple[str, int, str, str | None, WhatIf]] = []

    def __enter__(self) -> FakePredictor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def predict(
        self,
        config: Config,
        device: str = "this",
        link: str | None = None,
        change: WhatIf = WhatIf(),
    ) -> Prediction:
        name, world = config.strategy.name, config.launch.world or 1
        self.asked.append((config.strategy.label, world, device, link, change))
        if name not in SENDS:
            raise UsageError(f"{name} cannot be predicted")
        batch = config.training.global_batch / world
        work = change.slow_rank * FLOPS * batch / SPEED[device]
        sends, hides = SENDS[name]
        comm = sends * PSI * (world - 1) / world / (self.rate * change.bandwidth)
        if size := config.strategy.options.get("bucket_mb"):
            # A message more costs 1 ms, and the last of them is hidden by nothing.
            comm += 1e-3 * PSI / (size * 1e6) + size * 1e6 / self.rate
        wait = max(0.0, comm - (hides * work if change.overlap else 0.0))
        step, half = work + wait, 0.04 if device == "this" else 0.2
        spans = [
            Span("work", "forward", 0.0, work / 3),
            Span("work", "backward", work / 3, work * 0.9),
            Span("comm", "bucket 0", work * 0.5, work * 0.5 + comm / 2),
            Span("comm", "bucket 1", work * 0.5, work * 0.5 + comm),
            Span("wait", "bucket 1", work * 0.9, work * 0.9 + wait),
            Span("work", "update", work * 0.9 + wait, step),
        ]
        held = self.state * HOLDS[name] + 1e9 * batch
        if config.training.activation_checkpointing:
            held -= 0.5e9 * batch
        return Prediction(
            step_s=step,
            low_s=step * (1 - half),
            high_s=step * (1 + half),
            work_s=work,
            wait_s=wait,
            comm_s=comm,
            naive_s=FLOPS * batch / SPEED[device] * 1.2,
            flops=FLOPS * batch,
            samples=config.training.global_batch,
            tokens=self.tokens * config.training.global_batch,
            memory_bytes=int(held),
            memory_limit=MEMORY[device],
            is_measured=device == "this",
            spans=tuple(spans),
            peak_flops_per_s=2.5 * SPEED[device],
            notes=(),
        )
