"""Asynchronous streams for synchronous code, such as a Spark task: one event loop for the process, on its own thread.

The thread lives as long as the process and its loop is never closed, because a thread of gRPC may call it after the last
call has ended. The next item of a stream is fetched while its reader processes the current one, and no further ahead, so
memory is bounded.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from waltzd.client.loop import LoopThread

T = TypeVar("T")
AHEAD_MAX = 2
"""Items of one stream that are fetched ahead at most."""

END_SECONDS = 5.0
"""Seconds that the end of the process waits for its streams."""

_lock = threading.Lock()
_threads: dict[int, LoopThread] = {}
"""Thread of each process id: a forked process needs a new one."""


def _thread() -> LoopThread:
    with _lock:
        process = os.getpid()
        if process not in _threads:
            _threads[process] = LoopThread("waltz reading")
            atexit.register(_end, process)
        return _threads[process]


def _end(process: int) -> None:
    """Close streams that were not read to their end, before the thread ends with the process."""
    if process == os.getpid():
        wait_for(_cancel_all())


async def _cancel_all() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await asyncio.gather(*rest, return_exceptions=True)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    return _thread().wait_for(work)


def items(stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of an asynchronous stream; close it at its end, or when this generator is closed."""
    pump = wait_for(_start(stream))
    try:
        while True:
            found = wait_for(pump.next())
            if not found:
                return
            yield found[0]
    finally:
        if not sys.is_finalizing():  # else the thread has ended, and the call would not return
            wait_for(pump.stop())


async def _start(stream: AsyncGenerator[T, None]) -> _Pump[T]:
    return _Pump(stream)


class _Pump(Generic[T]):
    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._waiting: asyncio.Queue[tuple[T, ...]] = asyncio.Queue(AHEAD_MAX)
        self._task = asyncio.create_task(self._run(), name="waltz reading")

    async def _run(self) -> None:
        try:
            async with aclosing(self._stream) as stream:
                async for item in stream:
                    await self._waiting.put((item,))
        finally:
            if not self._is_cancelled():
                await self._waiting.put(())

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def next(self) -> tuple[T, ...]:
        """Return the next item in a tuple, or an empty one at the end; raise an error of the stream after its last item."""
        found = await self._waiting.get()
        if not found:
            await self._task
        return found

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
