"""Rot in the sealed segments of a running cluster is found by the scrub of the storage, and healed by the owner.

The period is twenty seconds in place of a week, on a clock that moves only when all tasks wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.simulation.cell import Appender, Cell, SimStorage, cell, inline, story
from waltzd.disk.simulated import Fault
from waltzd.format.layout import HEADER_BYTES
from waltzd.storage.append_queue import AppendQueue
from waltzd.storage.scrub import Scrub

PERIOD = 20.0


def scrub_of(storage: SimStorage) -> Scrub:
    assert storage.calls is not None
    loop = asyncio.get_running_loop()
    return Scrub(
        storage.calls, storage.disk, inline, period_seconds=PERIOD, clock=lambda: int(1000 * loop.time()) + 1_000_000
    )


@asynccontextmanager
async def scrubbed(storage: SimStorage) -> AsyncIterator[Scrub]:
    scrub = scrub_of(storage)
    task = asyncio.create_task(scrub.run())
    try:
        yield scrub
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def filled(c: Cell) -> Appender:
    pipeline = await c.opened(await c.own(1))
    for _ in range(10):
        await pipeline.committed(pipeline.append(50))
    await c.all_hold(499)
    assert len(sealed(c.storages["s1"])) >= 5
    return pipeline


def sealed(storage: SimStorage) -> list[str]:
    """Data files of sealed segments, the oldest first."""
    return [f"storage/0/{name}" for name in storage.disk.names("storage/0") if name.endswith(".seg")][:-1]


def rot(storage: SimStorage, path: str) -> None:
    at = storage.disk.size(path) // 2
    storage.disk.corrupt(path, at, bytes([storage.disk.content(path)[at] ^ 0x10]))


@pytest.mark.parametrize("which", [0, 2, -1])
def test_a_flipped_byte_in_a_sealed_segment_is_found_within_a_period_and_healed(which: int) -> None:
    @story
    async def test() -> None:
        async with cell() as c:
            pipeline = await filled(c)
            storage = c.storages["s1"]
            path = sealed(storage)[which]
            sound = bytes(storage.disk.content(path)[HEADER_BYTES:])
            async with scrubbed(storage) as scrub:
                await asyncio.sleep(PERIOD / 50)  # the first segment was read
                rot(storage, path)
                await c.until(lambda: scrub.status().damaged_segments, seconds=2 * PERIOD)
                await c.until(lambda: c.is_sound("s1") and bytes(storage.disk.content(path)[HEADER_BYTES:]) == sound)
                assert f"{path}" in scrub.status().last_finding
            assert pipeline.ended is None, "the session went on"
            c.check_equal(*c.storages)

    test()


@story
async def test_the_scrub_reads_all_segments_evenly_beside_appends_and_takes_no_turn_of_a_queue() -> None:
    async with cell() as c:
        pipeline = await filled(c)
        storage = c.storages["s1"]
        assert storage.calls is not None
        queue = storage.calls.queue_of(0)
        assert isinstance(queue, AppendQueue)
        turns: list[object] = []
        call: Any = queue.call

        def counted(work: Any) -> Any:
            turns.append(work)
            return call(work)

        queue.call = counted  # type: ignore[assignment, method-assign]
        loop = asyncio.get_running_loop()
        start, count = loop.time(), len(sealed(storage))
        async with scrubbed(storage) as scrub:
            shares: list[float] = []
            while loop.time() < start + PERIOD:
                await pipeline.committed(pipeline.append(1))
                status = scrub.status()
                shares.append(status.done_bytes / max(1, status.total_bytes) - (loop.time() - start) / PERIOD)
                await asyncio.sleep(PERIOD / 40)
            assert max(map(abs, shares)) < 2.5 / count, "as much is read as time has passed"
            await c.until(lambda: scrub.status().age_ms is not None, seconds=PERIOD)
            status = scrub.status()
            assert status.age_ms is not None
            assert status.age_ms <= 2 * 1000 * PERIOD
            assert status.bytes_per_second == int(status.total_bytes / PERIOD)
            assert (status.damaged_segments, status.last_finding) == (0, "")
        assert turns == [], "a scrub that finds nothing takes no turn"


@story
async def test_a_storage_that_starts_again_goes_on_where_the_round_was() -> None:
    async with cell() as c:
        await filled(c)
        storage = c.storages["s1"]
        async with scrubbed(storage) as scrub:
            await asyncio.sleep(PERIOD / 2)
            before = scrub.round
        assert before.first_id > 0
        await c.restart("s1")
        async with scrubbed(storage) as scrub:
            await c.until(lambda: scrub.status().done_bytes)
            assert scrub.round.began_ms == before.began_ms
            assert scrub.round.first_id > before.first_id


@story
async def test_a_sealed_segment_on_a_sector_that_cannot_be_read_is_replaced() -> None:
    async with cell() as c:
        await filled(c)
        storage = c.storages["s1"]
        disk, path = storage.disk, sealed(storage)[1]
        bad = disk.inode(path)

        def watch(kind: str, where: str) -> None:
            if kind == "read" and where == path and disk.inode(path) == bad:
                disk.faults[disk.steps] = Fault.IO_ERROR

        disk.observer = watch
        async with scrubbed(storage) as scrub:
            await c.until(lambda: scrub.status().damaged_segments, seconds=2 * PERIOD)
            await c.until(lambda: c.is_sound("s1") and disk.inode(path) != bad)
        c.check_equal(*c.storages)


@story
async def test_a_scrub_that_is_turned_off_reads_nothing() -> None:
    async with cell() as c:
        await filled(c)
        storage = c.storages["s1"]
        assert storage.calls is not None
        scrub = Scrub(storage.calls, storage.disk, inline, period_seconds=0, clock=lambda: 1)
        await scrub.run()
        assert (scrub.status().period_seconds, scrub.status().age_ms) == (0, None)
