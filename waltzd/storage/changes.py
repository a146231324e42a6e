"""Changes of what a storage has, one at a time, and each to its end, also when whoever asked gives up.

A thread goes on all the same when a caller is gone: a replica that it made and that nobody puts to work would be refused
until the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """For whoever wants no change meanwhile."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole(self, may_begin: Callable[[], None], change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`may_begin` raises when it is too late for one."""
        await self.turn.acquire()
        try:
            may_begin()
            task = asyncio.create_task(change())
        except BaseException:
            self.turn.release()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.turn.release()
        if not task.cancelled():
            task.exception()  # who asked may not be there to hear of it
