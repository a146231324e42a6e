"""Transactions that wait until the log has answered which transaction marked their locks last.

The lock table of an owner forgets, and a new owner begins without one. A transaction that would be refused only because
the table does not know a lock is set aside before it gets an id, and the key indexes of the log are asked. The table takes
the answer, and the transaction is decided again by the same rule as every other one (`waltzd.server.core.locks`).

What a mount sent after such a transaction waits behind it, so the order of a mount is kept: the sequence number below which
everything is decided stays true. Other mounts pass. Nothing waits without an end or a bound: a look-up has
`LOOKUP_SECONDS`, look-ups are limited in number and waiting batches in bytes, and a mount that waits takes nothing more
from its client. Over a limit, or without an answer, the transaction is decided with what the table knows, which refuses it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from waltzd.errors import WaltzError
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.locks import LockTable, Lookup
from waltzd.server.core.step import QueuedBatch, Sender, cut

LOOKUPS_MAX = 64
"""Look-ups of one partition under way."""
LOOKUP_SECONDS = 2.0
"""Time for one look-up. Refused transactions are tried again by their clients."""
AHEAD_MAX = 16
"""Look-ups for one batch, unless its first transaction needs more: later rows are looked up together with the first."""


class WaitingMount(Sender, Protocol):
    """Mount whose batches can wait."""

    waiting: Waiting[Any] | None
    """Batches that wait; None if none do."""


M = TypeVar("M", bound=WaitingMount)


@dataclass(eq=False)
class Waiting(Generic[M]):
    """Batches of one mount that wait, in order. Only the first one needs look-ups."""

    items: deque[QueuedBatch[M]]
    locks: dict[int, None]
    """Locks of the first batch whose look-ups are under way."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class LogReader(Protocol):
    """The log, as far as a look-up needs it."""

    async def find_marks(self, query: LockQuery, turns: asyncio.Semaphore) -> LockMarks: ...


class LockLookups(Generic[M]):
    """Look-ups of one pipeline, which end with it."""

    def __init__(
        self,
        table: LockTable,
        log: LogReader,
        turns: asyncio.Semaphore,
        *,
        lookups_max: int,
        bytes_max: int,
        seconds: float,
        on_ready: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Create the look-ups of a pipeline. `turns`: turns of readers of replicas. `bytes_max`: bytes that may wait.
        `seconds`: time for one look-up. `on_ready`: called when batches are ready. `on_fatal`: gets an internal error."""
        self.ready: deque[QueuedBatch[M]] = deque()
        """Batches that have waited, and go in front of the queue."""
        self._table = table
        self._log = log
        self._turns = turns
        self._max = lookups_max
        self._bytes_max = bytes_max
        self._seconds = seconds
        self._on_ready = on_ready
        self._on_fatal = on_fatal
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Look-up of each lock that is under way."""
        self._waiting: dict[M, Waiting[M]] = {}
        self._bytes = 0
        """Bytes of batches that wait, or are ready."""

    def take_ready(self) -> QueuedBatch[M]:
        item = self.ready.popleft()
        self._bytes -= item.cost
        return item

    def decidable(self, item: QueuedBatch[M], committed: int) -> QueuedBatch[M] | None:
        """Return the part of a batch that can be decided now, or None; the rest of it waits."""
        mount = item.mount
        if mount.waiting is not None:
            self._wait(mount.waiting, item)
            return None
        room = self._max - len(self._tasks)
        if room <= 0 or self._bytes + item.cost > self._bytes_max:
            return item
        found = self._table.look_up(item.batch, committed, decided=item.looked_up, most=room, ahead=AHEAD_MAX)
        if found is None:
            return item
        row, lookups, locks = found
        head, rest = self._split(item, row)
        rest.looked_up = int(len(lookups) >= len(locks))  # a look-up of another batch may not reach far enough back
        waiting = mount.waiting = self._waiting[mount] = Waiting(deque(), dict.fromkeys(locks))
        self._wait(waiting, rest)
        for lookup in lookups:
            self._begin(lookup)
        return head

    def _wait(self, waiting: Waiting[M], item: QueuedBatch[M]) -> None:
        waiting.items.append(item)
        self._bytes += item.cost

    @staticmethod
    def _split(item: QueuedBatch[M], row: int) -> tuple[QueuedBatch[M] | None, QueuedBatch[M]]:
        if row == 0:
            return None, item
        first, second = cut(item.batch, row)
        cost = min(first.bytes, item.cost)
        return (
            QueuedBatch(item.mount, first, cost, item.arrived),
            QueuedBatch(item.mount, second, item.cost - cost, item.arrived),
        )

    def _begin(self, lookup: Lookup) -> None:
        task = asyncio.create_task(self._find(lookup), name=f"look-up of lock {lookup.lock:#018x}")
        self._tasks[lookup.lock] = task

        def done(ended: asyncio.Task[None]) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                self._on_fatal(error)

        task.add_done_callback(done)

    async def _find(self, lookup: Lookup) -> None:
        mark: int | None = None
        try:
            async with asyncio.timeout(self._seconds):
                mark = await self._last_mark(lookup)
        except (TimeoutError, WaltzError):
            mark = None  # the table refuses what it does not know
        self._table.learn(lookup, mark)
        del self._tasks[lookup.lock]
        self._answered(lookup.lock, has_failed=mark is None)

    async def _last_mark(self, lookup: Lookup) -> int:
        query = LockQuery(lock=lookup.lock, first_id=lookup.first_id, last_id=lookup.last_id, limit=1, newest_first=True)
        while not query.is_done:
            part = await self._log.find_marks(query, self._turns)
            if part.ids:
                return part.ids[0]
            query = query.after(part)
        return EMPTY

    def _answered(self, lock: int, *, has_failed: bool) -> None:
        for mount, waiting in list(self._waiting.items()):
            if lock not in waiting.locks:
                continue
            del waiting.locks[lock]
            first = waiting.items[0]
            if has_failed:  # ask no more for this batch
                first.looked_up = len(first.batch)
            if not waiting.locks:
                del self._waiting[mount]
                mount.waiting = None
                self.ready += waiting.items
                waiting.over.set()
                self._on_ready()

    def close(self) -> None:
        """Cancel all look-ups, and drop what waits."""
        for task in self._tasks.values():
            task.cancel()
        for mount, waiting in self._waiting.items():
            mount.waiting = None
            waiting.over.set()
        self._waiting.clear()
        self.ready.clear()
        self._bytes = 0

    def check(self) -> None:
        """Assert that what waits is bounded, and that each waiting batch has a look-up under way."""
        assert len(self._tasks) <= self._max
        assert self._bytes == sum(item.cost for waiting in self._waiting.values() for item in waiting.items) + sum(
            item.cost for item in self.ready
        )
        for mount, waiting in self._waiting.items():
            assert mount.waiting is waiting
            assert waiting.items
            assert waiting.locks
            assert waiting.locks.keys() <= self._tasks.keys()
