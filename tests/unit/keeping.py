"""The calls of a storage on a simulated disk, whose threads are turns on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.sample import ROOT, open_directory
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.storage.calls import StorageCalls

CONFIG = StorageConfig(directory=ROOT, flush_threads=2)


def with_calls(
    disk: SimDisk, test: Callable[[StorageCalls, list[str]], Coroutine[Any, Any, None]]
) -> tuple[list[str], list[BaseException]]:
    """Runs the test; what ran on the threads that write comes back, and what was called fatal."""
    turns: list[str] = []
    fatal: list[BaseException] = []

    async def finish(function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        turns.append(getattr(function, "__qualname__", "?"))
        return function(*arguments)

    async def in_turn(function: Callable[..., Any], *arguments: Any) -> Any:
        """A thread finishes what it began, also when nobody waits for it any more."""
        return await asyncio.shield(asyncio.ensure_future(finish(function, *arguments)))

    async def run() -> None:
        calls = StorageCalls(
            disk, open_directory(disk), CONFIG, run_writing=in_turn, run_reading=in_turn, on_fatal=fatal.append
        )
        calls.start()
        await test(calls, turns)
        if not fatal:
            await calls.close()

    asyncio.run(run())
    return turns, fatal
