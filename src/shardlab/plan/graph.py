"""One step of one rank, as the events that its own thread makes, in their order.

The thread works, starts collectives, and waits for them. ``replay`` turns the events of a step and
the prices of a machine into times. All ranks of a data-parallel world make the same events, so one
rank stands for all of them. The stages of a pipeline differ: there is a ``Step`` of one rank of
each, and they send messages to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """The rank computes: one operator, or a stretch of many that was run and timed as one."""

    name: str  # the operator, as in "aten.mm"; "measured" for a stretch
    flops: float  # of matrix products and convolutions, as PyTorch's flop counter counts them
    bytes: float  # that it reads and writes
    shapes: str = ""  # of its tensors with their types, as in "f32[8,128] f32[128,512]"
    seconds: float | None = None  # as it was measured on this machine; None: it needs a price
    phase: str = ""  # "forward", "backward" or "update"; "" between them
    host_s: float | None = None  # seconds that the host took for it, if a GPU's were measured


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take part: ``size`` of them, each ``stride`` after the one before."""

    size: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """A collective begins, and the thread goes on."""

    call: int  # the number of the collective in the step
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier, send, recv
    bytes: int  # of the whole tensor, as in the ledger: of all ranks' shards together
    group: Group
    label: str = ""
    # What the backend is given for it: our reduce_scatter over Gloo is an all_to_all, our
    # all_gather there a broadcast by each rank.
    sent: str = ""
    # The ranks of several stages that take part, of those that are played back: the sender and the
    # receiver of a message. Empty: only ranks that act alike do.
    among: tuple[int, ...] = ()

    @property
    def is_message(self) -> bool:
        return bool(self.among) and self.op in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Wait:
    """The thread stops until a collective is done.

    If it stands before the Start of this number, it waits for that call of the step before: a
    strategy may leave a gather under way, and wait for it in the next forward.
    """

    call: int


@dataclass(frozen=True, slots=True)
class Mark:
    """In a pipeline, what follows belongs to this action; to none if the name is empty."""

    name: str  # "forward", "backward", "input gradient" or "weight gradient"
    stage: int = 0
    micro: int = 0


Event = Work | Start | Wait | Mark


@dataclass(frozen=True)
class Step:
    """A step of one rank in a world that need not exist."""

    world: int
    events: Sequence[Event]
    samples: int = 0  # of the whole global batch
    tokens: int = 0  # likewise; 0 if the data has no tokens
    peak_bytes: int = 0  # what the rank holds at the fullest moment
    totals_s: tuple[float, ...] = ()  # the rank's own work in each step that was timed
    notes: tuple[str, ...] = field(default=())
    rank: int = 0  # whose step it is

    @property
    def flops(self) -> float:
        return sum(work.flops for work in self.works())

    @property
    def pointwise_bytes(self) -> float:
        """That operators without FLOPs (norms, residuals, activations) read and write."""
        passes = "forward", "backward"
        return sum(w.bytes for w in self.works() if not w.flops and w.phase in passes)

    def works(self) -> Iterator[Work]:
        return (event for event in self.events if isinstance(event, Work))

    def starts(self) -> Iterator[Start]:
        return (event for event in self.events if isinstance(event, Start))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collective takes, apart from what it has to share with others."""

    latency_s: float  # passes whatever else happens, and keeps nobody busy
    host_s: float = 0.0  # seconds of one core, of each rank: Gloo's threads copy and add
    wire_s: float = 0.0  # seconds in which the link is taken, at its full rate
    channels: int = 1  # that it needs at the same time
