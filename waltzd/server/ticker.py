"""One clock for all that wants to be looked at now and then: a server with many partitions wakes once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Ticker:
    """Runs while somebody listens. Listeners are called in the order in which they came, and must not wait or fail."""

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
