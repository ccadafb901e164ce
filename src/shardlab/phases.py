"""Which part of a step runs now: for the watchdog, and for a profiler's trace if there is one."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from shardlab.pulse import At

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class _Recorded(At):
    """A phase that is a span in the trace too: ten microseconds, so only where there is one."""

    __slots__ = ("span",)

    def __enter__(self) -> None:
        super().__enter__()
        self.span: Any = torch.profiler.record_function(self.phase)
        self.span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.span.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)


def phase(name: str) -> At:
    return _Recorded(name) if torch.autograd._profiler_enabled() else At(name)
