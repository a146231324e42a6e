"""Reads from the archive, apart from all other work: whatever the store does, only readers of archived records wait for
it.

Two kinds of work have threads of their own: fetching a segment from the store, which takes as long as the store does, and
reading from a segment in the cache. So a store that hangs does not delay readers whose segment is cached, and neither
kind delays the event loop, the replicas, or readers of the replicas. One segment of a partition is fetched at a time,
because readers that follow each other through a log need the same one. When a reader has read half of a segment and
continues, the next segment is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from waltzd.archive.manifest import Entry
from waltzd.archive.reader import ATTEMPTS, ArchiveReader, CachedObject, CachedSegment, CachedSegmentDamaged
from waltzd.errors import ArchiveAway, WaltzError
from waltzd.errors.operations import CacheFailed, StoreRefused, StoreUnavailable
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.record import Run
from waltzd.protocol.descriptions import Archived

T = TypeVar("T")
RunBlocking: TypeAlias = Callable[..., Awaitable[Any]]
"""A function that runs another one on a thread."""


class ArchiveFetcher:
    """Reads of one server from the archive, for all its partitions."""

    def __init__(self, reader: ArchiveReader, *, bring: RunBlocking, read: RunBlocking) -> None:
        self.reader = reader
        self._bring = bring
        self._read = read
        self._bringing: dict[int, asyncio.Task[Any]] = {}
        """Running fetch of each partition."""

    async def read(
        self, partition: int, known: Archived, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False
    ) -> Run:
        """Return records from `first_id` on, up to `last_id` and about `bytes_max`, at least one. `known` has to reach
        `first_id`. Raise `ArchiveAway` for a fault that may pass."""
        with self._counted():
            for _ in range(ATTEMPTS):
                piece = await self._cached(self.reader.at_hand, self._find, partition, known, first_id)
                try:
                    run: Run = await self._read(_records, piece, first_id, last_id, bytes_max, with_locks)
                except CachedSegmentDamaged:
                    self.reader.cache.drop(piece)
                    continue
                if last_id > piece.entry.last:
                    self._look_ahead(partition, known, piece.entry, run.last_id)
                return run
            raise self.reader.rotten(partition, piece.entry)

    async def find_marks(self, partition: int, known: Archived, query: LockQuery) -> LockMarks:
        """Return an answer to the start of a query, for one segment. `known` has to reach `query.last_id`."""
        with self._counted():
            for _ in range(ATTEMPTS):
                piece = await self._cached(self.reader.marks_at_hand, self._find_marks, partition, known, query.next_id)
                try:
                    found: LockMarks = await self._read(piece.find_marks, query)
                except CachedSegmentDamaged:
                    self.reader.cache.drop(piece)
                    continue
                return found
            raise self.reader.rotten(partition, piece.entry)

    async def find_time(self, partition: int, known: Archived, time: int, last_id: int) -> int:
        """Return the highest id before the first transaction at or after `time`, among those up to `last_id`."""
        with self._counted():
            mark: int = await self._bring(self.reader.find_time, partition, known, time, last_id)
            return mark

    async def close(self) -> None:
        """Cancel all fetches. A call of the store that is running ends with the process."""
        tasks = list(self._bringing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cached(
        self,
        at_hand: Callable[[int, Archived, int], T | None],
        find: Callable[[int, Archived, int], T],
        partition: int,
        known: Archived,
        id_: int,
    ) -> T:
        """Return an object from the cache by `at_hand`, or else from the store by `find`, which is called on a thread."""
        while True:
            found = at_hand(partition, known, id_)
            if found is not None:
                self.reader.counters.hits += 1
                return found
            under_way = self._bringing.get(partition)
            if under_way is not None:
                await asyncio.wait((under_way,))
                continue
            # A reader that goes away leaves the fetch to other readers.
            return await asyncio.shield(self._begin(find, partition, known, id_))

    def _begin(self, find: Callable[[int, Archived, int], T], partition: int, known: Archived, id_: int) -> asyncio.Task[T]:
        def done(task: asyncio.Task[T]) -> None:
            del self._bringing[partition]
            if not task.cancelled():
                task.exception()  # nobody may be waiting for it any more

        async def brought() -> T:
            found: T = await self._bring(find, partition, known, id_)
            return found

        task = asyncio.create_task(brought(), name=f"archive of partition {partition}")
        task.add_done_callback(done)
        self._bringing[partition] = task
        return task

    def _look_ahead(self, partition: int, known: Archived, entry: Entry, last_id: int) -> None:
        is_late = 2 * last_id >= entry.first + entry.last
        if not is_late or entry.last >= known.last_id or partition in self._bringing:
            return
        if self.reader.cache.holds(3 * entry.size) and self.reader.at_hand(partition, known, entry.last + 1) is None:
            self._begin(self._find, partition, known, entry.last + 1)

    def _find(self, partition: int, known: Archived, id_: int) -> CachedSegment:
        return self.reader.piece(partition, self.reader.entry(partition, known, id_))

    def _find_marks(self, partition: int, known: Archived, id_: int) -> CachedObject:
        return self.reader.marks(partition, self.reader.entry(partition, known, id_))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except (StoreUnavailable, StoreRefused, CacheFailed) as error:
            self.reader.counters.failures += 1
            raise ArchiveAway(f"{error.code} {error.message}", next_step=error.detail_next_step) from error
        except WaltzError:
            self.reader.counters.failures += 1
            raise


def _records(piece: CachedSegment, first_id: int, last_id: int, bytes_max: int, with_locks: bool) -> Run:
    return piece.read(first_id, last_id, bytes_max, with_locks=with_locks)
