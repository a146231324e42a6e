"""A bound in bytes on what is in flight; a taker that would exceed it waits for its turn.

It provides back pressure: a receiver takes from the budget before it keeps anything, and receives nothing while it
waits. A size larger than the whole budget passes once nothing else is in flight, so no taker waits for ever. A budget
may be part of another one: it takes at most its own size and leaves the rest to other parts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy


class Budget:
    def __init__(
        self,
        most: int,
        *,
        within: Budget | None = None,
        beside: Callable[[], tuple[int, bool]] = lambda: (0, True),
    ) -> None:
        """Make a budget of `most` bytes. `beside` returns the bytes in flight that were not taken here, and whether
        more may be taken; call `admit` after it changed."""
        self.most = most
        self.used = 0
        self._within = within
        self._beside = beside
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._parts: dict[Budget, None] = {}
        """Parts of this budget that have waiting takers."""

    @property
    def waiting(self) -> int:
        """Return the number of waiting takers."""
        return len(self._queue)

    async def take(self, size: int, seconds: float | None = None) -> None:
        """Take bytes; wait until they fit. Raise TimeoutError if that takes longer than `seconds`."""
        if self.take_now(size):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        if self._within is not None:
            self._within._parts[self] = None
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give(size)  # it was admitted in the moment in which it gave up
            else:
                turn.cancel()
                if (size, turn) in self._queue:
                    self._queue.remove((size, turn))
                self.admit()
            raise

    def take_now(self, size: int) -> bool:
        """Take bytes if they fit and no taker waits; return whether they were taken."""
        if self._queue or not self.fits(size):
            return False
        self._add(size)
        return True

    def give(self, size: int) -> None:
        assert size <= self.used
        self._add(-size)
        self.admit()
        if self._within is not None:
            self._within.admit_parts()

    def admit(self) -> None:
        """Admit the waiting takers that fit now, in the order of their arrival."""
        while self._queue:
            size, turn = self._queue[0]
            if not turn.done():  # else it was given up, and its task has not run since
                if not self.fits(size):
                    return
                self._add(size)
                turn.set_result(None)
            self._queue.popleft()
        if self._within is not None:
            self._within._parts.pop(self, None)

    def admit_parts(self) -> None:
        """Admit waiting takers of all parts, after bytes were returned."""
        for part in list(self._parts):
            part.admit()

    def close(self, error: Exception) -> None:
        """Raise an error in all waiting takers."""
        queue, self._queue = self._queue, deque()
        for _, turn in queue:
            if not turn.done():
                turn.set_exception(copy(error))

    def fits(self, size: int) -> bool:
        beside, may_come = self._beside()
        used, whole = self.used + beside, self._within
        if used == 0:
            return True
        return may_come and used + size <= self.most and (whole is None or whole.used + size <= whole.most)

    def _add(self, size: int) -> None:
        self.used += size
        if self._within is not None:
            self._within.used += size
