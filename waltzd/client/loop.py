"""Event loops for programs without one, such as tools, and on a thread for programs that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_runners: dict[bool, asyncio.Runner] = {}


def run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """Run a coroutine as `asyncio.run` does, and leave the loop open: a thread of gRPC may call back after the last
    call, and would print a traceback. `fast` uses the loop of the daemons, which takes longer to start."""
    if fast not in _runners:
        _runners[fast] = asyncio.Runner(loop_factory=_fast_loop if fast else None)
    return _runners[fast].run(_alone(work))


def _fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:  # optional for applications
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """Event loop on its own thread until the process ends (see `run`); that of uvloop, if it is installed. The thread
    does not survive a fork."""

    def __init__(self, name: str) -> None:
        self.loop = _fast_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. If the wait is interrupted, the coroutine is cancelled."""
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
