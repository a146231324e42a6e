"""Asynchronous streams for synchronous code, such as a task of Spark: one loop for the process, on its own thread.

The thread lives as long as the process and its loop is never closed, because a thread of gRPC may still have something to
tell it after the last call. What a stream gives next is fetched while its reader works on what came before, and no further
ahead, so memory stays bounded.
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
"""Items of one stream that wait for its reader."""

END_SECONDS = 5.0
"""No process waits longer for its streams at its end."""

_lock = threading.Lock()
_threads: dict[int, LoopThread] = {}
"""By process."""


def _thread() -> LoopThread:
    with _lock:
        process = os.getpid()
        if process not in _threads:
            _threads[process] = LoopThread("waltz reading")
            atexit.register(_end, process)
        return _threads[process]


def _end(process: int) -> None:
    """Closes streams that were not read to their end, while there is still a thread that can do it."""
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
    """The stream is closed when this is, or has come to its end."""
    pump = wait_for(_start(stream))
    try:
        while True:
            found = wait_for(pump.next())
            if not found:
                return
            yield found[0]
    finally:
        if not sys.is_finalizing():  # then the thread does not run any more, and the call would not return
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
        """One item, or none at the end; raises what ended the stream, behind everything that it gave before."""
        found = await self._waiting.get()
        if not found:
            await self._task
        return found

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
