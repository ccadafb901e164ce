"""Launching communication from backward's hooks, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


class InOrder:
    """Calls ``launch(i)`` for 0, 1, 2 … as the parts become ready, never out of order.

    Ranks pair their collectives by order alone. A gradient may come earlier on one rank, or
    not at all (a parameter that its data did not use), so part i waits for all before it, and
    ``flush`` launches what backward left.

    ``needs`` says of each part how often each of its gradients comes in one backward. That is
    once, but re-entrant checkpointing gives the gradient of a layer that is used twice in two
    parts: the second is added to ``p.grad`` and its hook runs again.
    """

    def __init__(self, needs: Sequence[Mapping[str, int]], launch: Callable[[int], None]) -> None:
        self.needs = [dict(need) for need in needs]
        self.launch = launch
        self.start()

    def start(self) -> None:
        """A new backward begins."""
        self.missing = [{name: n for name, n in need.items() if n} for need in self.needs]
        self.next = 0

    def arrived(self, part: int, name: str) -> bool:
        """One more gradient of ``part`` is in. False: it has come too late, the part was sent."""
        if part < self.next:
            return False
        left = self.missing[part].get(name, 0) - 1
        if left > 0:
            self.missing[part][name] = left
        else:
            self.missing[part].pop(name, None)
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._launch_next()
        return True

    def flush(self) -> None:
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.next += 1  # first: launching may run hooks
        self.launch(self.next - 1)
