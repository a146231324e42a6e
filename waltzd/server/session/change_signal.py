"""Waiting for a change of state, without losing a change that comes between looking and waiting.

A task reads `ChangeSignal.version`, then looks at the state, and then waits for a newer version. A `PeriodicTimer` is one
timer for all partitions of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeSignal:
    def __init__(self) -> None:
        self.version = 0
        """Number of changes."""
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        self.version += 1
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seen: int) -> None:
        """Wait until `version` is no longer `seen`."""
        while self.version == seen:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


class PeriodicTimer:
    """A timer that runs while it has listeners. It calls them in the order in which they were added; they must not block
    or raise."""

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
