"""A loop whose clock moves only when everybody waits: an hour of patience takes no time, and a deadlock is an error.

While a thread of an executor works for the loop, the loop waits in real time and its clock stands."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from waltzd.testing import LocalCluster

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
SECONDS_MAX = 24 * 3600
"""Virtual seconds after which a test that waits for something has waited in vain."""
TURN_SECONDS = 1e-9
"""Virtual seconds that pass at least in a turn of the loop, so that whoever looks again until a moment has come sees it."""


TURNS_MAX = 300_000
"""Turns in which tasks may be busy without waiting for a time: more of them never end."""


class _Selector(selectors.DefaultSelector):
    loop: TimelessLoop
    busy_turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop.at_work:
            return super().select(0 if timeout == 0 else None)
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self.busy_turns = self.busy_turns + 1 if timeout == 0 else 0
        if self.busy_turns > TURNS_MAX:
            raise AssertionError("tasks go on and on, and no time passes")
        self.loop.now += max(TURN_SECONDS, timeout)
        if self.loop.now > SECONDS_MAX:
            raise AssertionError("what a task waits for does not come within a day")
        return super().select(0)


class TimelessLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        self.at_work = 0
        """Calls that a thread makes for this loop: the clock stands until they return."""
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        made = super().run_in_executor(executor, func, *args)
        self.at_work += 1
        made.add_done_callback(self._returned)
        return made

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self.at_work += 1
        await super().shutdown_default_executor(*arguments)
        self.at_work -= 1

    def _returned(self, _: asyncio.Future[Any]) -> None:
        self.at_work -= 1


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it, and insist that it leaves nothing behind."""
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:

        async def alone() -> T:
            result = await work
            left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == [], "tasks are left"
            return result

        return runner.run(alone())


def run_cluster(cluster: LocalCluster, story: Callable[[LocalCluster], Coroutine[Any, Any, T]]) -> T:
    """Start the cluster, run a story, and close, as `LocalCluster.run` does in real time."""

    async def whole() -> T:
        async with cluster:
            return await story(cluster)

    return run(whole())
