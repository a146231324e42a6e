"""A replica on a simulated disk; and the calls of its storage, whose threads are turns on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.sample import ROOT, SEGMENT_BYTES, blank_disk, open_directory, run_for
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition

CONFIG = StorageConfig(directory=ROOT, flush_threads=2)


def begun(
    records: int = 0, *, committed: int = -1, session: int = 3, seed: int = 0, segment_bytes: int = SEGMENT_BYTES
) -> tuple[SimDisk, Directory, Partition]:
    """Partition 0 in a session that has begun."""
    disk = blank_disk(seed)
    directory = open_directory(disk, segment_bytes=segment_bytes)
    partition = directory.create_partition(0)
    partition.open_session(session)
    partition.set_low_mark(session, -1)
    if records:
        partition.append(session, [run_for(0, 0, records)], committed)
    return disk, directory, partition


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
