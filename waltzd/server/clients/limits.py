"""So many bytes may be under way; who wants more waits its turn.

This is how back pressure is made: whoever receives takes from a budget before it keeps anything, and does not receive more
while it waits. One thing that is larger than the whole budget passes when nothing else is under way, so that nobody waits
for ever.

What all partitions of one server share: how many callers it serves, and how many of them read from storages at once.
"""

from __future__ import annotations

import asyncio
from collections import deque

from waltzd.errors import TooManyCallers


class Budget:
    def __init__(self, bytes_max: int) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def take(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self.used += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # whoever gave something back in the same moment may have passed over it already
                if (size, turn) in self._waiting:
                    self._waiting.remove((size, turn))
                self._admit()
            else:  # it was admitted in the same moment
                self.give(size)
            raise

    def give(self, size: int) -> None:
        assert size <= self.used
        self.used -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return self.used == 0 or self.used + size <= self._bytes_max

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():  # else it was given up, and does not know it yet
                if not self._fits(size):
                    return
                self.used += size
                turn.set_result(None)
            self._waiting.popleft()


class Capacity:
    def __init__(self, callers_max: int, *, cold_reads_max: int = 8) -> None:
        self.callers = 0
        """Mounts, and reads by id that are under way."""
        self.cold_turns = asyncio.Semaphore(cold_reads_max)
        """One turn is one chunk from a storage, so many readers share few reads."""
        self._callers_max = callers_max

    def enter(self) -> None:
        if self.callers >= self._callers_max:
            raise TooManyCallers(f"this server has {self.callers} mounts and readers; no more are allowed")
        self.callers += 1

    def leave(self) -> None:
        assert self.callers > 0
        self.callers -= 1
