"""Faults on purpose: a rank killed, hung, slow or wrong, a checkpoint damaged, a disk full.

``--inject kill:rank=1,step=5`` (or ``faults: [...]`` in a config) makes a run fail where one wants
to see what happens. This file reads and checks them; ``inject.py`` lets them strike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardlab.errors import UsageError, unknown

PLACES = ("data", "forward", "collective", "checkpoint")
DAMAGES = ("flip", "truncate", "delete")


@dataclass(frozen=True)
class Kind:
    """A fault's name: what it does, which keys it must have and which it may."""

    does: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()


KINDS = {
    "kill": Kind("kills itself (SIGKILL)", ("rank", "step"), ("where",)),
    "hang": Kind("stops for ever", ("rank", "step"), ("where",)),
    "slow": Kind("is late", ("rank", "ms"), ("step", "where")),
    "drop-collective": Kind("leaves out a collective", ("rank", "step")),
    "nan": Kind("computes NaN", ("rank", "step"), ("layer",)),
    "drift": Kind("changes a weight of its own copy by 0.01", ("rank", "step")),
    "corrupt-checkpoint": Kind("damages the checkpoint just written", (), ("step", "rank", "how")),
    "disk-full": Kind("can write no more to files", ("step",), ("rank", "bytes")),
}
WORDS = {"where": PLACES, "how": DAMAGES}
# Numbers: what their text must match, their type, and what they must be, in words.
WHOLE = (r"\d{1,15}", int, "a whole number from 0 on")
TIME = (r"(?=.*[1-9])\d{1,7}(\.\d*)?", float, "a time in milliseconds above 0")


@dataclass(frozen=True)
class Fault:
    """One fault, as parsed. ``rank`` is the one that is struck; ``step`` counts from 0."""

    text: str  # as it was named
    kind: str
    rank: int = 0
    step: int | None = None  # None: slow in every step; damage of the first checkpoint
    where: str = "forward"
    ms: float = 0.0
    layer: str | None = None  # nan: the module whose output is spoilt; None: the loss
    how: str = "flip"
    bytes: int = 0  # disk-full: what a file may still hold

    @property
    def is_once(self) -> bool:
        """False for a rank that is slow in every step."""
        return not (self.kind == "slow" and self.step is None)

    def told(self) -> str:
        """What it does, as a sentence."""
        when = "" if self.step is None else f" at step {self.step}"
        more = {
            "slow": f" by {self.ms:g} ms in {self.where}" + ("" if when else ", in every step"),
            "hang": f" in {self.where}",
            "kill": f" in {self.where}",
            "nan": f" in {self.layer or 'the loss'}",
            "corrupt-checkpoint": f" ({self.how})",
            "disk-full": f" beyond {self.bytes} bytes each" if self.bytes else "",
        }.get(self.kind, "")
        return f"rank {self.rank} {KINDS[self.kind].does}{more}{when}"


def parse(text: str) -> Fault:
    """Read a fault from ``kind:key=value,key=value``, or refuse it with the reason."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("fault", kind, KINDS)
    known = KINDS[kind]
    keys = (*known.needs, *known.may)
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = part.partition("=")
        if key not in keys:
            raise unknown(f"key of the fault {kind}", key, keys)
        if not equals or not value or key in values:
            raise UsageError(f"--inject {text}: '{part}' is not {key}=VALUE, once")
        values[key] = _value(text, key, value)
    missing = [key for key in known.needs if key not in values]
    if missing:
        example = ",".join(f"{key}={'50' if key == 'ms' else '1'}" for key in known.needs)
        raise UsageError(
            f"--inject {text}: which {' and '.join(missing)}? For example {kind}:{example}"
        )
    return Fault(text=text, kind=kind, **values)


def _value(text: str, key: str, value: str) -> Any:
    if key == "layer":
        return value
    if key in WORDS:
        if value not in WORDS[key]:
            raise unknown(f"{key} of a fault", value, WORDS[key])
        return value
    pattern, kind, meaning = TIME if key == "ms" else WHOLE
    if not re.fullmatch(pattern, value):
        raise UsageError(f"--inject {text[:60]}: {key}={value[:20]} is not {meaning}")
    return kind(value)


def check_steps(texts: Iterable[str], steps: float, has_checkpoints: bool = True) -> None:
    """Refuse what is no fault, a fault that would never strike, and one that is named twice."""
    seen = set()
    for text in texts:
        fault, never = parse(text), None
        if fault.step is not None and fault.step >= steps:
            never = f"the run has {steps} steps, 0 to {steps - 1}"
        elif not has_checkpoints and "checkpoint" in (fault.kind.partition("-")[2], fault.where):
            never = "the run writes no checkpoints; add --checkpoint-every"
        if never is not None:
            raise UsageError(f"the fault {text} would never strike: {never}")
        if text in seen:
            raise UsageError(f"the fault {text} is named twice")
        seen.add(text)


def check_world(faults: Iterable[Fault], ranks: int, strategy: str) -> None:
    """Refuse a rank that is not there, and a fault that cannot happen under the strategy."""
    for fault in faults:
        if fault.rank >= ranks:
            raise UsageError(
                f"the fault {fault.text} names rank {fault.rank}, and the world has {ranks}: "
                f"ranks 0 to {ranks - 1}"
            )
        if fault.kind == "drop-collective" and strategy.startswith("pytorch_"):
            raise UsageError(
                f"{strategy} calls its collectives from inside PyTorch, where none can be left "
                "out; use a strategy of ours, for example bucket_ddp_async"
            )
        if fault.kind == "drift" and "ddp" not in strategy and ":" not in strategy:
            raise UsageError(
                f"{strategy} has no copies of the weights that could drift: it shards them, or "
                "gathers them anew after each update; use one with whole copies, such as simple_ddp"
            )
        if fault.kind in ("drop-collective", "drift") and ranks == 1:
            needs = "be missed by" if fault.kind == "drop-collective" else "differ from"
            raise UsageError(f"{fault.kind} needs a second rank to {needs}")
