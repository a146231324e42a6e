"""What becomes of a task that is not awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def tell_failure(task: asyncio.Task[Any], tell: Callable[[BaseException], object]) -> None:
    """`tell` hears what ended the task, unless it was cancelled: a mistake of ours must not leave callers unanswered."""

    def look(ended: asyncio.Task[Any]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            tell(error)

    task.add_done_callback(look)
