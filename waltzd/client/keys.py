"""Doing it once: what an idempotency key stands for, and how a client finds the transaction that has it.

A key becomes two WRITE locks of its transaction, so the owner itself refuses a second one, whoever sends it. It does so
for locks that were marked behind the position that a transaction names, and its table of locks may have forgotten: then it
refuses everything in front of its floor. So a client must know what is in front of the position that it names. That is what
`Keys` is for: it has looked at the log from `begin` up to `covered`, and remembers the keys that it met there, by their
locks, which the log keeps. A position up to `covered` may be named; what is behind it, the owner knows.

    begin ─── what was looked at ─── covered ─── what the owner answers for ─── end
              a key that is here is found         a key that is here is refused, with an id not below its own

A refusal names an id, and a key that stood in the way is not behind that id. So looking at the log up to there finds it, or
shows that something else stood in the way. Two locks of 48 bits each, because one of them could be met by chance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
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
"""By so much the clocks of applications and servers may differ."""
READ_MAX = 2000
_SPACE = namespace_of(PREFIX)
Hashes: TypeAlias = frozenset[int]


def now_us() -> int:
    """In microseconds since 1970, as the times of transactions are."""
    return time.time_ns() // 1000


def key_locks(key: str) -> tuple[Lock, Lock]:
    """The locks that stand for a key."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_MAX:
        raise BadArgument(f"an idempotency key is a text of 1 to {KEY_MAX} characters, not {key!r}")
    return write_lock(f"{PREFIX}.1.{key}"), write_lock(f"{PREFIX}.2.{key}")


def hashes_of(locks: Sequence[Lock]) -> Hashes:
    return frozenset(lock.hash for lock in locks)


def _key_of(transaction: Transaction) -> Hashes:
    return frozenset(lock.hash for lock in transaction.locks or () if lock.hash >> 64 - NAMESPACE_BITS == _SPACE)


class Keys:
    """Of one partition."""

    def __init__(self, partition: int, reader: Reader, *, seconds: float) -> None:
        """`seconds`: for how long a key must hold."""
        self._partition = partition
        self._reader = reader
        self._window_us = int((seconds + SKEW_SECONDS) * 1e6)
        self._has_begun = False
        self._covered = EMPTY
        self._found: dict[Hashes, tuple[int, int]] = {}
        """Key → id and time, in the order of ids."""
        self._turn = asyncio.Lock()
        self.timeline: UUID | None = None
        """Identity of the timeline of the log that was looked at; None before the first look."""

    def committed(self, id: int, count: int) -> Committed:
        """The outcome of what was done before."""
        return Committed(id, count, self._partition, timeline=self.timeline or FIRST)

    async def covered(self, timeout: float | None) -> Position:
        """A position that a transaction may name: the keys in front of it are known, as far as they still hold."""
        if not self._has_begun:
            async with self._turn:
                if not self._has_begun:
                    oldest = max(0, now_us() - self._window_us)
                    found = await self._reader.position_at(self._partition, oldest, timeout=timeout)
                    self._covered, self.timeline, self._has_begun = int(found), found.timeline, True
        return Position(self._covered, self.timeline)

    async def find(self, key: Hashes, through: int, timeout: float | None) -> int | None:
        """The id of the transaction with this key, if it stands in the log up to `through`. Raises `BeyondLog` if that is
        not committed."""
        if await self.covered(timeout) < through:
            async with self._turn:
                while self._covered < through:
                    await self._look(through, timeout)
        return self._found.get(key, (None, 0))[0]

    async def _look(self, through: int, timeout: float | None) -> None:
        last = min(through, self._covered + READ_MAX)
        found = await self._read(self._covered + 1, last, timeout)
        for transaction in found:
            if key := _key_of(transaction):
                self._found.setdefault(key, (transaction.id, transaction.time_us or 0))
        self._covered = found[-1].id
        expired = (found[-1].time_us or 0) - self._window_us
        for key in list(takewhile(lambda key: self._found[key][1] < expired, self._found)):
            del self._found[key]

    async def _read(self, first_id: int, last_id: int, timeout: float | None) -> list[Transaction]:
        return await self._reader.some(
            self._partition, first_id, last_id, with_locks=True, timeline=self.timeline, timeout=timeout
        )

    async def explain(self, key: Hashes, rejected: Rejected, timeout: float | None) -> int | None:
        """The id of the transaction with this key, if it was in the way. Raises `BeyondLog` where that is not decided."""
        if rejected.reason in (Reason.CONFLICT, Reason.IN_FLIGHT):  # most often by the key itself
            (there,) = await self._read(rejected.conflict_id, rejected.conflict_id, timeout)
            if _key_of(there) == key:
                return there.id
        return await self.find(key, rejected.conflict_id, timeout)

    async def append(
        self,
        key: Hashes,
        position: int | None,
        count: int,
        send: Callable[[int], Awaitable[AppendOutcome]],
        deadline: float,
    ) -> AppendOutcome:
        """`send(position)` until it is in the log, or a transaction with this key is known to be. `position`: that of its
        own checked locks, if it has some."""
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
                return Unknown()  # something stood in the way, and may be what has the key
            if not isinstance(outcome, Rejected) or outcome.reason is Reason.NOT_IN_LOG:
                return outcome
            try:
                id_ = await self.explain(key, outcome, deadline - clock())
            except CannotConnect:
                return Unknown()
            except BeyondLog:
                if clock() >= deadline:
                    return Unknown()
                await asyncio.sleep(pause_seconds(attempt, self._partition))
                continue
            if id_ is not None:
                return self.committed(id_, count)
            if position is not None:
                return outcome
            behind = Position(self._covered, self.timeline)  # all keys up to there are known, and this is none of them
        raise AssertionError("it counts for ever")
