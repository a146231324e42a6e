"""Failures of tasks that are not awaited, and work that belongs to another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def tell_failure(task: asyncio.Task[Any], tell: Callable[[BaseException], object]) -> None:
    """Call `tell` with the error of a task unless it was cancelled, so that an internal error does not leave callers
    unanswered."""

    def look(ended: asyncio.Task[Any]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            tell(error)

    task.add_done_callback(look)


async def on_loop(loop: asyncio.AbstractEventLoop | None, work: Coroutine[Any, Any, T]) -> T:
    """Await work on its event loop; None stands for the loop of the caller."""
    if loop is None or loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def call_on(loop: asyncio.AbstractEventLoop | None, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function soon on its event loop; None calls it at once."""
    if loop is None:
        function(*arguments)
    else:
        loop.call_soon_threadsafe(function, *arguments)
