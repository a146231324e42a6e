"""What tasks wait for. A `Bell` wakes all that wait for it; a task that looks at `rings`, then at the state, and then
waits, misses none. A `Ticker` is one timer for all partitions of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    def __init__(self) -> None:
        self.rings = 0
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        self.rings += 1
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seen: int) -> None:
        """Until it has rung more often than `seen`."""
        while self.rings == seen:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


class Ticker:
    """Runs while it has listeners. They are called in the order in which they came, and must not wait or fail."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._listeners: dict[Callable[[float], None], None] = {}
        self._handle: asyncio.TimerHandle | None = None

    def add(self, listener: Callable[[float], None]) -> None:
        self._listeners[listener] = None
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def remove(self, listener: Callable[[float], None]) -> None:
        self._listeners.pop(listener, None)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._seconds, self._tick) if self._listeners else None
        now = loop.time()
        for listener in list(self._listeners):
            listener(now)
