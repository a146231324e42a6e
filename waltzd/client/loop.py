"""An event loop for programs without one, such as tools, and one on a thread for programs that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_runners: dict[bool, asyncio.Runner] = {}


def run(work: Coroutine[Any, Any, T], *, fast: bool = False) -> T:
    """As `asyncio.run`, but the loop stays open: a thread of gRPC may still call back after the last call, and would print
    a traceback. `fast`: on the loop of the daemons, which takes longer to start."""
    if fast not in _runners:
        _runners[fast] = asyncio.Runner(loop_factory=_fast_loop if fast else None)
    return _runners[fast].run(_alone(work))


def _fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:  # an application has it when it wants it
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """A loop on a thread of its own, for as long as the process lives (see `run`); uvloop's, where that is installed. The
    thread does not survive a fork."""

    def __init__(self, name: str) -> None:
        self.loop = _fast_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. It is cancelled when the waiting is interrupted."""
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
