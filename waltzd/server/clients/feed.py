"""Committed records for readers: a reader is a position in the log, and holds nothing else.

A reader that is nearly level reads from the log cache, without waiting. A reader further behind reads from a storage, one
chunk at a time and in turns with all other such readers, until its position is in the cache. The last chunk ends where
the cache begins, so no record is missed or comes twice. What storages have trimmed comes from the archive, outside these
turns, and such a chunk ends where a piece of the archive does. Between two chunks a reader costs a few numbers, however
long its client takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import numpy as np

from waltzd.errors import NotReady, Trimmed
from waltzd.format.record import HEAD, HeadArray, Run, heads
from waltzd.protocol.batches import Feed, FeedMode, HeadFeed
from waltzd.server.session.replicated_log import ReplicatedLog

FIRST_COUNT = 64
"""Number of ids that the first chunk asks for, while the size of the records is unknown."""


class ColdReader:
    """Reads records that have left the log cache, a chunk at a time."""

    def __init__(
        self, session: ReplicatedLog, turns: asyncio.Semaphore, chunk_bytes: int, *, with_locks: bool = False
    ) -> None:
        self._session = session
        self._with_locks = with_locks
        self._turns = turns
        self._chunk_bytes = chunk_bytes
        self._count = FIRST_COUNT

    async def read(self, first_id: int, last_id: int, chunk_bytes: int | None = None) -> Run:
        """Return about a chunk of records from `first_id` on, none above `last_id`. The read ends with its turn. The
        range is chosen about as large as a chunk, so that a storage seldom reads more than is used. `chunk_bytes`: size of
        the chunks from now on; None to keep it."""
        self._chunk_bytes = chunk_bytes or self._chunk_bytes
        run = None
        if not self._session.is_trimmed(first_id):  # else it would take a turn to find that out
            try:
                run = await self._from_replicas(first_id, min(last_id, first_id + self._count - 1))
            except Trimmed:
                run = None
        if run is None:
            run = await self._session.read_archived(first_id, last_id, self._chunk_bytes, with_locks=self._with_locks)
        if len(run) == 0 or run.first_id != first_id or run.last_id > last_id:
            raise _other(first_id, last_id, run)
        self._count = max(1, len(run) * self._chunk_bytes // len(run.data))
        return run

    async def _from_replicas(self, first_id: int, last_id: int) -> Run:
        async with self._turns:
            runs = self._session.read(first_id, last_id, self._chunk_bytes, with_locks=self._with_locks)
            try:
                run = await anext(runs, None)
            finally:
                if isinstance(runs, AsyncGenerator):
                    await runs.aclose()
        if run is None:
            raise _other(first_id, last_id, None)
        return run


def _other(first_id: int, last_id: int, run: Run | None) -> NotReady:
    got = "nothing" if run is None else f"{run.first_id} to {run.last_id}"
    return NotReady(f"ids from {first_id} to {last_id} were asked of a replica or the archive, and {got} came")


class Cursor:
    """Position of one mount in the feed, and its credit."""

    def __init__(
        self,
        session: ReplicatedLog,
        cold: ColdReader,
        *,
        next_id: int,
        mode: FeedMode,
        credit: int,
        frame_bytes: int,
        asks: int | None = None,
    ) -> None:
        """`asks`: the client that asks for the outcomes of its transactions. It gets heads up to `last_id`; of
        transactions of other clients it gets only the ids."""
        self.last_id: int | None = None
        """Id at which the feed ends; None for no end."""
        self.asks = asks
        self.next_id = next_id
        self.credit = credit
        self.mode = mode
        self._session = session
        self._cold = cold
        self._frame_bytes = frame_bytes
        self._chunk: Run | None = None

    def _bound(self, committed: int) -> int:
        return committed if self.last_id is None else min(committed, self.last_id)

    def take(self, committed: int) -> Feed | HeadFeed | None:
        """Return the next frame, or None if none may be sent at once. One frame may overdraw the credit, so that small
        credits do not make small frames."""
        committed = self._bound(committed)
        if not self._may_send(committed):
            return None
        run, self._chunk = self._chunk, None
        if run is None and not self._is_cold:
            run = self._session.cache.joined_from(self.next_id, committed, self._frame_bytes)
        if run is None:
            return None
        assert run.first_id == self.next_id
        assert run.last_id <= committed
        self.next_id = run.last_id + 1
        if self.mode is FeedMode.RECORDS:
            self.credit -= len(run.data)
            return Feed(run)
        if self.asks is not None:
            frame = HeadFeed(own_heads(run, self.asks))
        else:
            frame = HeadFeed(heads(run), run.times, run.follows, run.goes_on)
        self.credit -= frame.heads.nbytes
        return frame

    @property
    def has_room(self) -> bool:
        """Return whether the client accepts more as soon as there is more."""
        return self.mode is not FeedMode.NONE and self.credit > 0

    def needs_cold(self, committed: int) -> bool:
        """Return whether a chunk from a storage is needed, and the client accepts it."""
        return self._may_send(self._bound(committed)) and self._chunk is None and self._is_cold

    async def read_cold(self) -> None:
        """Read the chunk that `take` returns next."""
        self._chunk = await self._cold.read(self.next_id, self._bound(self._session.cache.first_id - 1))

    def _may_send(self, committed: int) -> bool:
        return self.has_room and self.next_id <= committed

    @property
    def _is_cold(self) -> bool:
        return self.next_id < self._session.cache.first_id


def own_heads(run: Run, client: int) -> HeadArray:
    """Return the heads of a run. Heads of other clients have only the id."""
    found = heads(run).copy()
    others = found["client"] != client
    ids = found["id"][others].copy()
    found[others] = np.zeros((), HEAD)
    found["id"][others] = ids
    return found


async def records(
    session: ReplicatedLog,
    cold: ColdReader,
    first_id: int,
    last_id: int,
    *,
    chunk_bytes: Callable[[], int],
    with_locks: bool = False,
) -> AsyncGenerator[Run, None]:
    """Yield committed records by id, in chunks. `chunk_bytes`: size of the next chunk."""
    while first_id <= last_id:
        oldest = session.cache.first_id
        if first_id < oldest:
            run: Run | None = await cold.read(first_id, min(last_id, oldest - 1), chunk_bytes())
        else:
            run = session.cache.joined_from(first_id, last_id, chunk_bytes(), with_locks=with_locks)
        assert run is not None
        yield run
        first_id = run.last_id + 1
