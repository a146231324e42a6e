"""A loop for programs that have none of their own, such as tools, and one on a thread for those that cannot wait in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_runners: dict[bool, asyncio.Runner] = {}


def run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """For a program without a loop of its own. Unlike `asyncio.run` it keeps the loop: a thread of gRPC may still have
    something to tell it after the last call, and would print a traceback if it were closed. `fast`: on the loop that the
    daemons use, which takes longer to start."""
    if fast not in _runners:
        _runners[fast] = asyncio.Runner(loop_factory=_fast_loop if fast else None)
    return _runners[fast].run(_alone(work))


def _fast_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class LoopThread:
    """A loop that runs on a thread of its own for as long as the process lives, and is never closed: a thread of gRPC may
    still have something to tell it after the last call. The thread does not survive a fork."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. Work whose waiter is interrupted is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _alone(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
