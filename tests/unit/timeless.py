"""A loop whose clock moves only when everybody waits: an hour of patience takes no time, and a deadlock is an error."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
SECONDS_MAX = 24 * 3600
"""Virtual seconds after which a test that waits for something has waited in vain."""


class _Selector(selectors.DefaultSelector):
    loop: TimelessLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.loop.now += max(0.0, timeout)
        if self.loop.now > SECONDS_MAX:
            raise AssertionError("what a task waits for does not come within a day")
        return super().select(0)


class TimelessLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it, and insist that it leaves nothing behind."""
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:

        async def alone() -> T:
            result = await work
            left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == [], "tasks are left"
            return result

        return runner.run(alone())
