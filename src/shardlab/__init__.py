"""shardlab: a laboratory for distributed training in PyTorch.

These names are the whole Python interface (docs/python.md). Importing the package costs nothing:
no torch, no files, no command line. What a name stands for is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.api import (
        compare,
        load_checkpoint,
        memory,
        predict,
        prove,
        save_checkpoint,
        strategy,
        train,
    )
    from shardlab.batch import Batch
    from shardlab.strategies.base import Strategy
    from shardlab.trace.traceset import load as load_traces
    from shardlab.workloads.base import Workload

__version__ = "0.1.0"
__all__ = [
    "Batch", "Strategy", "Workload", "__version__", "compare", "load_checkpoint", "load_traces",
    "memory", "predict", "prove", "save_checkpoint", "strategy", "train",
]  # fmt: skip

_PLACES = {
    **dict.fromkeys(("compare", "memory", "predict", "prove", "strategy", "train"), "shardlab.api"),
    **dict.fromkeys(("load_checkpoint", "save_checkpoint"), "shardlab.api"),
    "Batch": "shardlab.batch",
    "Strategy": "shardlab.strategies.base",
    "Workload": "shardlab.workloads.base",
    "load_traces": "shardlab.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shardlab' has no attribute {name!r}")
    module = importlib.import_module(_PLACES[name])
    return getattr(module, "load" if name == "load_traces" else name)


def __dir__() -> list[str]:
    return __all__
