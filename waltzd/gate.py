"""Who may bring in another transaction: first come, first served, up to a limit of rows and bytes.

A place is reserved before the transaction exists, so that it is built when its turn has come, against the newest view.
Bytes are known only afterwards: the limit on bytes lets through the one that exceeds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy


class Gate:
    def __init__(self, *, rows_max: int, bytes_max: int, used: Callable[[], tuple[int, int]]) -> None:
        """`used`: rows and bytes that are inside, without the reserved places."""
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._used = used
        self._reserved = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, rows: int, seconds: float) -> None:
        """Reserve so many places; TimeoutError when they do not become free in time. `leave` gives them back, when the
        transactions are inside or will not come."""
        if not self._queue and self._fits(rows):
            self._reserved += rows
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((rows, turn))
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException:
            is_given = turn.done() and not turn.cancelled() and turn.exception() is None
            if is_given:  # it was our turn, and we are not there to take it
                self._reserved -= rows
            else:
                turn.cancel()
            self.open()
            raise

    def leave(self, rows: int) -> None:
        self._reserved -= rows
        self.open()

    def open(self) -> None:
        """Let in whoever fits now."""
        while self._queue:
            rows, turn = self._queue[0]
            if not turn.done():
                if not self._fits(rows):
                    return
                self._reserved += rows
                turn.set_result(None)
            self._queue.popleft()

    def close(self, error: Exception) -> None:
        """Nobody is let in any more."""
        queue, self._queue = self._queue, deque()
        for _, turn in queue:
            if not turn.done():
                turn.set_exception(copy(error))

    def _fits(self, rows: int) -> bool:
        used_rows, used_bytes = self._used()
        inside = used_rows + self._reserved
        return inside == 0 or (inside + rows <= self._rows_max and used_bytes < self._bytes_max)
