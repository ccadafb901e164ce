"""What a planted bug is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Plant = tuple[Any, str, Any]  # of which object which attribute is replaced by what


@dataclass(frozen=True)
class Bug:
    """``plants`` are made on every rank for the time of a proof; without any, the strategy itself
    is wrong. ``check`` is the one of the proof that must fail: of its own five, or ``axes`` (what
    the ranks that cut a model send) or ``refused`` (before a step is made)."""

    strategy: str
    message: str  # what must be said of it
    check: str = "equal"
    plants: Sequence[Plant] = ()
    workload: str = "stack"
    world: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the config, by their full keys

    @property
    def is_located(self) -> bool:
        """Whether the proof must look for the module, which takes another run."""
        return "differs first" in self.message or self.workload == "planted:layers"
