"""Launching communication from backward's hooks, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class InOrder:
    """Calls ``launch(i)`` for 0, 1, 2 … as the parts become ready, never out of order.

    Ranks pair their collectives by order alone. A gradient may come earlier on one rank, or
    not at all (a parameter that its data did not use), so part i waits for all before it, and
    ``flush`` launches what backward left.
    """

    def __init__(self, needs: Sequence[int], launch: Callable[[int], None]) -> None:
        self.needs = list(needs)  # how many gradients each part waits for
        self.launch = launch
        self.start()

    def start(self) -> None:
        """A new backward begins."""
        self.missing = list(self.needs)
        self.next = 0

    def arrived(self, part: int) -> None:
        """One more gradient of ``part`` is in."""
        self.missing[part] -= 1
        while self.next < len(self.missing) and self.missing[self.next] <= 0:
            self._launch_next()

    def flush(self) -> None:
        while self.next < len(self.missing):
            self._launch_next()

    def _launch_next(self) -> None:
        self.next += 1  # first: launching may run hooks
        self.launch(self.next - 1)
