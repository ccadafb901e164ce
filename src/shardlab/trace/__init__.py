"""Where the time of a step went: profiler traces in, plain tables out. Needs files, not ranks.

    import shardlab.trace

    traces = shardlab.trace.load("runs/my-run")      # or a folder of anybody's traces
    traces.breakdown()                               # rank by rank and step by step

``load(paths, select="latest", jobs=None)`` returns a ``TraceSet`` with:
``.traces`` (one ``Trace`` per rank and window), ``.breakdown(per="step" | "rank")``,
``.collectives()``, ``.collective_summary(by="kind" | "label")``, ``.stragglers()``,
``.lateness()``, ``.slow_rank()``, ``.missing``, ``.clocks()``, ``.memory()``, ``.what_if()``,
``.kernels(top=10)``, ``.hta(compat=False)``, ``.lanes()``, ``.summary(hta_compat=False)`` (the
content of summary.json), ``.windows()`` (each window by itself) and ``.warnings``.
The rows are described in ``shardlab.trace.model``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.trace.traceset import TraceSet as TraceSet
    from shardlab.trace.traceset import load as load
    from shardlab.trace.traceset import load_once as load_once
    from shardlab.trace.traceset import load_runs as load_runs

__all__ = ["TraceSet", "load", "load_once", "load_runs"]


def __getattr__(name: str) -> Any:
    # Capture is part of this package and runs on every rank: it must not pay for the analysis.
    if name in __all__:
        try:
            from shardlab.trace import traceset
        except ModuleNotFoundError as error:
            if error.name != "msgspec":
                raise
            raise UsageError("reading traces needs msgspec: pip install msgspec") from None
        return getattr(traceset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
