"""A copy within a bound that is set, and lifted, while it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from tests.unit import timeless
from tests.unit.mounting import piece_of
from waltzd.errors import CannotConnect
from waltzd.format.batch import Batch, Piece, parse_batches
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run, encode_payloads, walk
from waltzd.protocol.peers import Content, runs_of
from waltzd.server.core.log_cache import LogCache
from waltzd.server.session.copier import Copier, SourceFailed

RECORDS, RECORD_BYTES = 4, 1_000_000
STORAGE_SECONDS = 10.0


class Source:
    async def segments(self, *_: Any, **__: Any) -> list[tuple[int, int, int]]:
        return []

    async def read_whole(self, *_: Any, **__: Any) -> AsyncIterator[Piece]:
        for id_ in range(RECORDS):
            yield encode_payloads(id_, [bytes(RECORD_BYTES)])


class Target:
    """Acknowledges what it gets at once."""

    def __init__(self) -> None:
        self.marks: asyncio.Queue[int] = asyncio.Queue()

    def append(self, *_: Any) -> Target:
        return self

    async def send(self, content: Content, _mark: int) -> None:
        self.marks.put_nowait(runs_of(content)[-1].last_id)

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

    async def read_whole(self, _partition: int, first_id: int, last_id: int, **_: Any) -> AsyncIterator[Piece]:
        for id_ in range(first_id, last_id + 1):
            yield encode_payloads(id_, [b"x"])


class Installing(Target):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.appended: list[int] = []
        self.contents: list[Content] = []
        self.files: list[tuple[int, bytes]] = []
        """The size that was told of each file, and what came."""

    async def segments(self, *_: Any, **__: Any) -> list[tuple[int, int, int]]:
        return []

    async def install_segment(self, _p: int, _s: int, first_id: int, size: int, pieces: AsyncIterator[bytes]) -> None:
        found = [bytes(piece) async for piece in pieces]
        self.taken += [first_id] * len(found)
        self.files.append((size, b"".join(found)))

    async def send(self, content: Content, mark: int) -> None:
        self.appended.append(runs_of(content)[-1].last_id)
        self.contents.append(content)
        await super().send(content, mark)


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


# -- format 1 ----------------------------------------------------------------------------------------------------------


def log_of(*payloads: Sequence[bytes], older: int = 0) -> list[Piece]:
    """Batches; the first pieces may be older than batches."""
    tail = LogCache(0, 1 << 30)
    found: list[Piece] = []
    for number, mine in enumerate(payloads):
        found.append(piece_of(tail, mine, time=None if number < older else 5_000_000 + number, segment_bytes_max=600))
        tail.append(found[-1])
    return found


class Whole(Source):
    """A source with these pieces, and these sealed segments."""

    def __init__(self, pieces: list[Piece], *sealed: tuple[int, int, int]) -> None:
        self.pieces = pieces
        self.sealed = list(sealed)

    async def segments(self, *_: Any, **__: Any) -> list[tuple[int, int, int]]:
        return self.sealed

    async def fetch_segment(self, _partition: int, first_id: int, **_: Any) -> AsyncIterator[bytes]:
        yield b"segment %d" % first_id

    async def read_whole(self, _partition: int, first_id: int, last_id: int, **_: Any) -> AsyncIterator[Piece]:
        for piece in self.pieces:
            if first_id <= piece.first_id and piece.last_id <= last_id:
                yield piece


def copying(source: Any, target: Any) -> Copier:
    return Copier(
        target, partition=3, session=1, source=lambda _: source, committed=lambda: 14, copied=lambda mark: None,
        key=UUID(int=1), seconds=STORAGE_SECONDS, bytes_per_second=lambda: 0,
    )  # fmt: skip


def test_batches_are_copied_whole_and_many_in_one_frame() -> None:
    small, large = [[b"x"] * 3] * 4, [[b"x" * 700_000]] * 3
    pieces = log_of([b"old"], *small, *large, [b"x"], older=1)

    async def work() -> None:
        target = Installing()
        await copying(Whole(pieces), target).copy(0, pieces[-1].last_id, "s1")
        sent = [[content] if isinstance(content, Run) else list(content) for content in target.contents]
        assert [piece for frame in sent for piece in frame] == pieces
        assert [len(frame) for frame in sent] == [1, 5, 1, 2]

    timeless.run(work())


def test_a_source_that_gives_less_than_it_was_asked_for_has_failed() -> None:
    async def work() -> None:
        with pytest.raises(SourceFailed, match="where those up to 9"):
            async with asyncio.timeout(100 * STORAGE_SECONDS):
                await copying(Whole(log_of([b"x"] * 3)), Installing()).copy(0, 9, "s1")

    timeless.run(work())


def test_a_damaged_segment_of_batches_is_replaced_by_the_file_of_another_storage() -> None:
    async def work() -> None:
        target = Installing()
        await copying(Whole(log_of([b"x"] * 3, [b"y"]), (0, 2, 77)), target).heal(0, 3, ("s1",))
        assert target.files == [(77, b"segment 0")]

    timeless.run(work())


def test_a_damaged_segment_that_no_other_storage_has_sealed_is_made_anew_from_batches() -> None:
    pieces = log_of([b"old"], [b"x"] * 3, [b"y"], [b"z"], older=1)

    async def work() -> None:
        target = Installing()
        await copying(Whole(pieces, (1, 6, 77)), target).heal(1, 4, ("s1",))
        ((size, raw),) = target.files
        assert size == 0
        header = FileHeader.decode(raw[:HEADER_BYTES], "it")
        assert (header.version, header.first_id, header.partition, header.created_ms) == (1, 1, 3, 5_000)
        batches = [piece for piece in pieces[1:3] if isinstance(piece, Batch)]
        assert [batch.head for batch in parse_batches(raw[HEADER_BYTES:])] == [batch.head for batch in batches]

    timeless.run(work())


def test_a_damaged_segment_of_records_ends_where_batches_begin() -> None:
    async def work() -> None:
        target = Installing()
        source = Whole(log_of([b"old"], [b"older"], [b"x"] * 3, older=2), (0, 1, 77))
        await copying(source, target).heal(0, 4, ("s1",))
        ((size, raw),) = target.files
        assert (size, FileHeader.decode(raw[:HEADER_BYTES], "it").version) == (0, 0)
        assert len(walk(raw[HEADER_BYTES:])) == 3

    timeless.run(work())


def test_a_source_that_gives_nothing_of_a_damaged_segment_is_not_the_last_one() -> None:
    async def work() -> None:
        sources: dict[str, Any] = {"s1": Whole([]), "s2": Whole(log_of([b"x"]), (0, 0, 77))}
        target: Any = Installing()
        it = Copier(
            target, partition=3, session=1, source=lambda name: sources[name], committed=lambda: 0,
            copied=lambda mark: None, key=UUID(int=1), seconds=STORAGE_SECONDS, bytes_per_second=lambda: 0,
        )  # fmt: skip
        await it.heal(0, 0, ("s1", "s2"))
        assert target.files == [(77, b"segment 0")]
        with pytest.raises(CannotConnect):
            await it.heal(0, 0, ("s1",))

    timeless.run(work())
