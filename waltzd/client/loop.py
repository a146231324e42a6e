"""A loop for programs that have none of their own, such as tools."""

from __future__ import annotations

import asyncio
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


async def _alone(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
