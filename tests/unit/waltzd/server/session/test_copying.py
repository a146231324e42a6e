"""A copy within a bound that is set, and lifted, while it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from tests.unit import timeless
from waltzd.format.record import Run, encode_payloads
from waltzd.server.session.copying import Copier

RECORDS, RECORD_BYTES = 4, 1_000_000
STORAGE_SECONDS = 10.0


class Source:
    async def segments(self, *_: Any, **__: Any) -> list[tuple[int, int, int]]:
        return []

    async def read_whole(self, *_: Any, **__: Any) -> AsyncIterator[Run]:
        for id_ in range(RECORDS):
            yield encode_payloads(id_, [bytes(RECORD_BYTES)])


class Target:
    """Acknowledges what it gets at once."""

    def __init__(self) -> None:
        self.marks: asyncio.Queue[int] = asyncio.Queue()

    def append(self, *_: Any) -> Target:
        return self

    async def send(self, run: Run, _mark: int) -> None:
        self.marks.put_nowait(run.last_id)

    async def receive(self) -> int:
        return await self.marks.get()

    def cancel(self) -> None:
        return


def copier(bound: list[int], copied: list[int]) -> Copier:
    target: Any = Target()
    source: Any = Source()
    return Copier(
        target, partition=0, session=1, source=lambda _: source, committed=lambda: RECORDS, copied=copied.append,
        key=UUID(int=1), seconds=STORAGE_SECONDS, bytes_per_second=lambda: bound[0],
    )  # fmt: skip


def test_a_long_pause_is_no_lateness_of_the_target_and_ends_with_the_bound() -> None:
    async def work() -> None:
        clock, bound, copied = asyncio.get_running_loop().time, [1000], list[int]()
        began = clock()
        copying = asyncio.create_task(copier(bound, copied).copy(0, RECORDS - 1, "s1"))
        await asyncio.sleep(5 * STORAGE_SECONDS)
        assert (copying.done(), copied) == (False, [0]), "a record is worth a quarter of an hour"
        bound[0] = 0
        await copying
        assert copied[-1] == RECORDS - 1
        assert clock() - began < 6 * STORAGE_SECONDS

    timeless.run(work())


def test_the_bound_is_kept() -> None:
    async def work() -> None:
        began = asyncio.get_running_loop().time()
        await copier([RECORD_BYTES], []).copy(0, RECORDS - 1, "s1")
        assert asyncio.get_running_loop().time() - began > RECORDS - 2

    timeless.run(work())


class Segments(Source):
    """Holds twenty ids; those up to 9 and up to 19 are sealed segments."""

    async def segments(self, *_: Any, **__: Any) -> list[tuple[int, int, int]]:
        return [(0, 9, 100), (10, 19, 100)]

    async def fetch_segment(self, _partition: int, first_id: int, **_: Any) -> AsyncIterator[bytes]:
        yield b"segment %d" % first_id

    async def read_whole(self, _partition: int, first_id: int, last_id: int, **_: Any) -> AsyncIterator[Run]:
        for id_ in range(first_id, last_id + 1):
            yield encode_payloads(id_, [b"x"])


class Installing(Target):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.appended: list[int] = []

    async def install_segment(self, _p: int, _s: int, first_id: int, _size: int, pieces: AsyncIterator[bytes]) -> None:
        self.taken += [first_id async for _ in pieces]

    async def send(self, run: Run, mark: int) -> None:
        self.appended.append(run.last_id)
        await super().send(run, mark)


def test_a_segment_beyond_the_mark_is_not_taken_as_a_file() -> None:
    """What stands above the mark may be another session's, or cut a moment later."""

    async def work() -> None:
        target, copied = Installing(), list[int]()
        source: Any = Segments()
        any_target: Any = target
        it = Copier(
            any_target, partition=0, session=1, source=lambda _: source, committed=lambda: 14, copied=copied.append,
            key=UUID(int=1), seconds=STORAGE_SECONDS, bytes_per_second=lambda: 0,
        )  # fmt: skip
        await it.copy(0, 14, "s1")
        assert (target.taken, target.appended) == ([0], [10, 11, 12, 13, 14])
        assert copied[-1] == 14
        assert copied == sorted(copied)

    timeless.run(work())


def test_a_copy_ends_when_all_of_it_was_acknowledged() -> None:
    async def work() -> None:
        target, copied = Installing(), list[int]()
        source: Any = Segments()
        any_target: Any = target
        it = Copier(
            any_target, partition=0, session=1, source=lambda _: source, committed=lambda: 14, copied=copied.append,
            key=UUID(int=1), seconds=STORAGE_SECONDS, bytes_per_second=lambda: 0,
        )  # fmt: skip
        await it.copy(3, 8, "s1")
        assert target.marks.empty(), "a mark that nobody waited for"
        assert copied == [3, 4, 5, 6, 7, 8, 8]

    timeless.run(work())
