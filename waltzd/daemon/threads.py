"""Threads for calls that wait for the disk.

A call goes to any free thread, and its result returns to the event loop of the caller. An executor of the standard library
does the same for twice the processor time, and there is such a call for every flush.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias

_Call: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    def __init__(self, count: int, name: str, *, is_waited_for: bool = True) -> None:
        """`is_waited_for`: `close` waits for running calls; otherwise the process may end during one."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_waited_for = is_waited_for
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=not is_waited_for)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Call a function on a thread. It continues if the caller stops waiting."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put((answer, function, arguments))
        return answer

    def close(self) -> None:
        """End the threads; with `is_waited_for`, after all calls are done."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if self._is_waited_for else ():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function, arguments = call
            loop = answer.get_loop()
            result, failure = None, None
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  # it belongs to the caller
                failure = error
            with suppress(RuntimeError):  # the loop has ended, without waiting for this call
                loop.call_soon_threadsafe(_settle, answer, result, failure)
            del call, answer, function, arguments, result, failure  # keep no reference until the next call


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():  # given up meanwhile
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
