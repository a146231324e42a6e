"""A bell that several tasks listen for: `ring` wakes all that wait, and nobody who looks before waiting misses one."""

from __future__ import annotations

import asyncio


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
