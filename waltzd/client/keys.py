"""Idempotency keys: how a key is kept in the log, and how a client finds the transaction that has it.

A key becomes two WRITE locks of its transaction, so the owner refuses a second transaction with the same key from any
client. The owner checks locks that were marked above the position of a transaction. Its lock table may have forgotten
older locks; then it refuses every position below its floor. So a client must know which keys are at or below the position
that it names. `Keys` has read the log from `begin` up to `covered`, and remembers the keys that it found, by their locks,
which the log keeps. A position up to `covered` may be named; the owner checks what is above.

    begin ──── read by the client ──── covered ──── checked by the owner ──── end
              a key here is found              a key here is refused, with an id not below its own

A refusal names the failed lock of the highest mark. So reading the log up to that mark finds the key, or shows that another
lock was the cause. Then the log is read to its end: an owner that has forgotten the locks of the key names the lock that it
knows, and the key may be above its mark. A key has two locks of 48 bits, because one alone could collide by chance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count as numbers
from itertools import takewhile
from typing import TypeAlias
from uuid import UUID

from waltzd.client.reader import Reader
from waltzd.client.routes import pause_seconds
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument, BeyondLog, CannotConnect, NotSent
from waltzd.protocol.locks import (
    NAMESPACE_BITS,
    AppendOutcome,
    Committed,
    Lock,
    Reason,
    Rejected,
    Unknown,
    namespace_of,
    write_lock,
)
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

PREFIX = "waltz-key"
KEY_MAX = 1000
SKEW_SECONDS = 60.0
"""Seconds by which the clocks of applications and servers may differ."""
READ_MAX = 2000
_SPACE = namespace_of(PREFIX)
Hashes: TypeAlias = frozenset[int]


def now_us() -> int:
    """Return the time in microseconds since 1970, the unit of the times of transactions."""
    return time.time_ns() // 1000


def key_locks(key: str) -> tuple[Lock, Lock]:
    """Return the two locks of an idempotency key."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_MAX:
        raise BadArgument(f"an idempotency key is a text of 1 to {KEY_MAX} characters, not {key!r}")
    return write_lock(f"{PREFIX}.1.{key}"), write_lock(f"{PREFIX}.2.{key}")


def hashes_of(locks: Sequence[Lock]) -> Hashes:
    return frozenset(lock.hash for lock in locks)


def _key_of(transaction: Transaction) -> Hashes:
    return frozenset(lock.hash for lock in transaction.locks or () if lock.hash >> 64 - NAMESPACE_BITS == _SPACE)


class Keys:
    """Idempotency keys of one partition."""

    def __init__(self, partition: int, reader: Reader, *, seconds: float, wait_seconds: float) -> None:
        """Create an empty index of keys; `seconds` is how long a key must be found, `wait_seconds` how long a caller
        without a timeout waits for the reads of other callers."""
        self._partition = partition
        self._reader = reader
        self._window_us = int((seconds + SKEW_SECONDS) * 1e6)
        self._wait_seconds = wait_seconds
        self._read_at: float | None = None
        """Time of the event loop at which the log was read last; None before the first read."""
        self._covered = EMPTY
        self._found: dict[Hashes, tuple[int, int]] = {}
        """Id and time of each key, in the order of ids."""
        self._turn = asyncio.Lock()
        self.timeline: UUID | None = None
        """Identity of the timeline of the log that was read; None before the first read."""

    def committed(self, id: int, count: int) -> Committed:
        """Return the outcome of a transaction that was appended before."""
        return Committed(id, count, self._partition, timeline=self.timeline or FIRST)

    async def covered(self, timeout: float | None) -> Position:
        """Return a position that a transaction may name: all keys at or below it that are still valid are known."""
        if self._is_stale:
            async with self._in_turn(timeout) as left:
                if self._is_stale:
                    await self._begin(left())
        return Position(self._covered, self.timeline)

    @property
    def _is_stale(self) -> bool:
        """Return whether all keys that were found have expired. What follows `covered` may be days of the log then, or be
        trimmed. A clock that is set does not count."""
        return self._read_at is None or self._clock() - self._read_at > self._window_us / 1e6

    @property
    def _clock(self) -> Callable[[], float]:
        return asyncio.get_running_loop().time

    async def _begin(self, timeout: float | None) -> None:
        oldest, now = max(0, now_us() - self._window_us), self._clock()
        found = await self._reader.position_at(self._partition, oldest, timeout=timeout)
        if found.timeline != self.timeline:
            self._covered, self.timeline = EMPTY, found.timeline
            self._found.clear()
        self._covered, self._read_at = max(self._covered, int(found)), now

    @asynccontextmanager
    async def _in_turn(self, timeout: float | None) -> AsyncGenerator[Callable[[], float | None], None]:
        """Wait for the reads of other callers, and keep them waiting; give a function that returns what is left of the
        timeout."""
        until = self._clock() + (self._wait_seconds if timeout is None else timeout)
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            raise CannotConnect(
                f"other calls did not read the keys of partition {self._partition} in time; they are known up to id "
                f"{self._covered}"
            ) from None
        try:
            yield lambda: None if timeout is None else until - self._clock()
        finally:
            self._turn.release()

    async def find(self, key: Hashes, through: int, timeout: float | None) -> int | None:
        """Return the id of the transaction with this key, if the log has one up to `through`. Raise `BeyondLog` if
        `through` is not committed."""
        if self._is_stale or self._covered < through:
            async with self._in_turn(timeout) as left:
                if self._is_stale:
                    await self._begin(left())
                while self._covered < through:
                    await self._read_up_to(through, left())
        return self._found.get(key, (None, 0))[0]

    async def _read_up_to(self, through: int, timeout: float | None) -> None:
        last = min(through, self._covered + READ_MAX)
        found = await self._read(self._covered, last, timeout)
        for transaction in found:
            if key := _key_of(transaction):
                self._found.pop(key, None)  # it has expired, and was used again
                self._found[key] = transaction.id, transaction.time_us or 0
        self._covered, self._read_at = found[-1].id, self._clock()
        expired = (found[-1].time_us or 0) - self._window_us
        for key in list(takewhile(lambda key: self._found[key][1] < expired, self._found)):
            del self._found[key]

    async def _read(self, after: int, through: int, timeout: float | None) -> list[Transaction]:
        return await self._reader.some(
            self._partition,
            after=after,
            through=through,
            with_locks=True,
            timeline=self.timeline,
            timeout=timeout,
        )

    async def explain(self, key: Hashes, rejected: Rejected, timeout: float | None) -> int | None:
        """Return the id of the transaction with this key, if the log has one. Raise `BeyondLog` if that is not
        decided."""
        end = EMPTY
        if rejected.reason in (Reason.CONFLICT, Reason.IN_FLIGHT):  # usually the key itself caused it
            (there,) = await self._read(rejected.conflict_id - 1, rejected.conflict_id, timeout)
            if _key_of(there) == key:
                return there.id
            # An owner that has forgotten the key names a lock that it knows, and the key may be above that.
            end = await self._reader.end_position(self._partition, timeout=timeout)
        return await self.find(key, max(rejected.conflict_id, end), timeout)

    async def append(
        self,
        key: Hashes,
        position: int | None,
        count: int,
        send: Callable[[int], Awaitable[AppendOutcome]],
        deadline: float,
    ) -> AppendOutcome:
        """Call `send(position)` until the transaction is in the log, or a transaction with this key is found.
        `position` is that of the request's own checked locks; None if it has none."""
        clock = asyncio.get_running_loop().time
        behind: int = position if position is not None else await self.covered(deadline - clock())
        if (id_ := await self.find(key, behind, deadline - clock())) is not None:
            return self.committed(id_, count)
        for attempt in numbers():
            try:
                outcome = await send(behind)
            except NotSent:
                if attempt == 0:
                    raise
                return Unknown(self._partition)  # the cause is above what was read, and may have the key
            if not isinstance(outcome, Rejected) or outcome.reason is Reason.NOT_IN_LOG:
                return outcome
            try:
                id_ = await self.explain(key, outcome, deadline - clock())
            except CannotConnect:
                return Unknown(self._partition)
            except BeyondLog:
                if clock() >= deadline:
                    return Unknown(self._partition)
                await asyncio.sleep(pause_seconds(attempt, self._partition))
                continue
            if id_ is not None:
                return self.committed(id_, count)
            if position is not None:
                return outcome
            behind = Position(
                self._covered, self.timeline
            )  # all keys up to there are known, and this key is not among them
        raise AssertionError("the loop does not end")
