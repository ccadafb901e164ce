"""The order in which all ranks gather and scatter: learnt by running, then followed.

Ranks pair their collectives by order alone, so all must start the same ones in the same order,
whatever their data makes them compute. In the first micro-batch nothing is known: whenever a rank
needs an operation, the ranks tell each other what they need and start all of it, in the order of
the units. What was started becomes the *plan*. From then on no question is asked until the end of
the micro-batch: each rank starts the planned operations in the planned order, some of them ahead
of time. A rank that needs a later one starts those before it too.

A rank that needs something that is not left in the plan starts the rest of the plan and asks. The
others answer at their end. Then the ranks tell each other how it went. If a rank left the plan
in that way, or no rank needed a part of it, the next micro-batch learns the order again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

GATHER, SCATTER = "gather", "scatter"


class Op(NamedTuple):
    kind: str  # GATHER: a unit's parameters are put together; SCATTER: its gradients are summed
    unit: int
    in_backward: bool
    keeps: bool = False  # of a gather: the unit stays whole, because it is needed next again


class CollectiveOrder:
    """This rank's place in the common order.

    ``blocks`` says which block each unit is of: the units of one block are needed together.
    ``start`` starts an operation and tells whether this rank had something to contribute.
    ``agree`` takes some flags and returns, for each, whether it is set on any rank.
    """

    def __init__(
        self,
        blocks: Sequence[object],
        start: Callable[[Op], bool],
        agree: Callable[[Sequence[bool]], list[bool]],
    ) -> None:
        self.blocks = blocks
        self.units = len(blocks)
        self.start = start
        self.agree = agree
        self.plans: dict[str, list[Op]] = {}  # by what is run: training, inference

    def begin(self, kind: str, extras: int) -> None:
        """A micro-batch begins. At its end the ranks also agree on this many ``extras``."""
        self.kind = kind
        self.extras = extras
        self.is_learning = kind not in self.plans
        self.plan = self.plans.get(kind, [])
        self.next = 0  # the first operation of the plan that was not started yet
        self.needed = [False] * len(self.plan)  # by this rank
        self.has_strayed = False
        self.gathered_by: dict[int, int] = {}  # unit: the operation of the plan
        self.started: list[Op] = []

    # ------------------------------------------------------------ during the micro-batch

    def reach(self, kind: str, unit: int, in_backward: bool) -> None:
        """Start this operation, and all that are planned before it."""
        i = self._planned(kind, unit)
        self._start_before(len(self.plan) if i is None else i + 1)
        if i is not None:
            self.needed[i] = True
            return
        self.has_strayed = True
        wish = (kind, unit)
        while wish not in self._start_wishes(self._exchange(wish), in_backward):
            pass

    def offer(self, unit: int) -> None:
        """The unit's gradients are all there. Scatter them, unless others' turn is first: a unit
        must not be gathered long before it is needed only to keep the order."""
        if self.is_learning:
            self.reach(SCATTER, unit, in_backward=True)
            return
        i = self._planned(SCATTER, unit)
        if i is not None:
            left = self.plan[self.next : i]
            if len({self.blocks[op.unit] for op in left if op.kind == GATHER}) <= 1:
                self._start_before(i + 1)

    def ahead(self, in_backward: bool) -> None:
        """Start the next operations early if they gather a block in this half of a micro-batch."""
        end = self.next
        while end < len(self.plan):
            op = self.plan[end]
            is_other = self.blocks[op.unit] != self.blocks[self.plan[self.next].unit]
            if op.kind != GATHER or op.in_backward != in_backward or is_other:
                break
            end += 1
        self._start_before(end)

    def use(self, unit: int) -> None:
        """This rank uses the unit: whatever gathered it was needed."""
        if unit in self.gathered_by:
            self.needed[self.gathered_by[unit]] = True

    def keeps(self, unit: int) -> bool:
        """Whether the unit stays whole after forward, for backward begins with it."""
        return unit in self.gathered_by and self.plan[self.gathered_by[unit]].keeps

    def _planned(self, kind: str, unit: int) -> int | None:
        for i in range(self.next, len(self.plan)):
            if self.plan[i].kind == kind and self.plan[i].unit == unit:
                return i
        return None

    def _start_before(self, end: int) -> None:
        while self.next < end:
            i, op = self.next, self.plan[self.next]
            self.next += 1  # first: starting may run hooks
            if op.kind == GATHER:
                self.gathered_by[op.unit] = i
            self.needed[i] |= self.start(op)

    # ------------------------------------------------------------ what the ranks tell each other

    def finish(self, unsent: Sequence[bool], extras: Sequence[bool]) -> list[bool]:
        """This rank is through with the micro-batch. Serve the others until they are, too; then
        scatter the units of which any rank has gradients left. Returns the extras of any rank."""
        self._start_before(len(self.plan))
        while any((found := self._exchange(None, unsent, extras))[: 2 * self.units]):
            self._start_wishes(found, in_backward=True)
        flags = iter(found[2 * self.units :])
        late = [unit for unit in range(self.units) if next(flags)]
        was_needed = [next(flags) for _ in self.plan]
        any_strayed = next(flags)
        for unit in late:
            self._start_now(Op(SCATTER, unit, in_backward=True))
        if self.is_learning:
            self.plans[self.kind] = improved(self.started, self.blocks)
        elif any_strayed or late or not all(was_needed):
            del self.plans[self.kind]
        return list(flags)

    def _exchange(
        self,
        wish: tuple[str, int] | None,
        unsent: Sequence[bool] | None = None,
        extras: Sequence[bool] | None = None,
    ) -> list[bool]:
        """Wishes for gathers and scatters by unit, unsent gradients by unit, needed operations of
        the plan, whether this rank strayed, extras: all but the wishes count at the end only."""
        wishes = [wish == (kind, unit) for kind in (GATHER, SCATTER) for unit in range(self.units)]
        return self.agree(
            [
                *wishes,
                *(unsent or [False] * self.units),
                *self.needed,
                self.has_strayed,
                *(extras or [False] * self.extras),
            ]
        )

    def _start_wishes(self, found: Sequence[bool], in_backward: bool) -> list[tuple[str, int]]:
        """Start what any rank wishes, gathers first, in the order of the units."""
        kinds = [(kind, unit) for kind in (GATHER, SCATTER) for unit in range(self.units)]
        wishes = [wish for wish, is_wished in zip(kinds, found, strict=False) if is_wished]
        for kind, unit in wishes:
            self._start_now(Op(kind, unit, in_backward))
        return wishes

    def _start_now(self, op: Op) -> None:
        self.started.append(op)
        self.start(op)


def improved(ops: Sequence[Op], blocks: Sequence[object]) -> list[Op]:
    """A plan from what was started: it sends less, and gathers earlier in backward.

    Two gathers of a unit, with none of another block between them, become one that keeps it whole
    (the last block of forward is the first of backward). A gather that follows another unit's
    scatter comes before it: there is compute to hide it behind, and nothing to hide the scatter
    from.
    """
    plan: list[Op] = []
    for op in ops:
        earlier = _gathered_just_before(op, plan, blocks) if op.kind == GATHER else None
        if earlier is None:
            plan.append(op)
        else:
            plan[earlier] = plan[earlier]._replace(keeps=True)
    for i in range(1, len(plan)):
        before, op = plan[i - 1], plan[i]
        if op.kind == GATHER and before.kind == SCATTER and op.unit != before.unit:
            plan[i - 1], plan[i] = op, before
    return plan


def _gathered_just_before(op: Op, plan: Sequence[Op], blocks: Sequence[object]) -> int | None:
    """Where the plan has gathered the unit already, if only its block was gathered since."""
    for i in reversed(range(len(plan))):
        if plan[i].kind != GATHER or blocks[plan[i].unit] != blocks[op.unit]:
            return None
        if plan[i].unit == op.unit:
            return i
    return None
