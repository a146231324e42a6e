"""Reads of committed transactions by id or by time, from their owner. They need no mount."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar
from uuid import UUID

from waltzd.client.mount import SeenTime
from waltzd.client.routes import Routes, SharedQuestion
from waltzd.client.view import E, Serializer, Transaction, checked_id, checked_position, checked_time, transactions_of
from waltzd.errors import BadArgument, CannotConnect, ClientClosed
from waltzd.errors.operations import BadFrame, WrongPeer
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, Run, id_and_length
from waltzd.protocol.locks import HISTORY_IDS_MAX, History, HistoryPart, Lock, MarkedPage, MarkedQuery
from waltzd.protocol.peers import ServerPort
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

T = TypeVar("T")
READS_MAX = 16
"""Reads of a call of `read_ids` that are under way at once."""
READ_IDS_MAX, READ_BYTES = 10_000, 4 << 20
"""Limits of transactions and bytes of one read."""


class Reader:
    def __init__(self, routes: Routes, serializer: Serializer[Any] | None, seen: SeenTime, *, seconds: float) -> None:
        """Create a reader; `seconds` is the default timeout of a question to an owner, through a fail-over."""
        self._routes = routes
        self._serializer = serializer
        self._seen = seen
        self._seconds = seconds
        self._questions: dict[object, SharedQuestion[MarkedPage]] = {}
        """Questions by lock that are under way."""

    async def end_position(
        self, partition: int, *, confirmed: bool = True, since: Position | None = None, timeout: float | None = None
    ) -> Position:
        """Return the highest committed id. Raise `OtherTimeline` if `since` is not on the log."""
        return await self._ask(
            partition,
            "HighWaterMark",
            lambda port: port.high_water_mark(partition, confirmed=confirmed, since=since),
            timeout,
        )

    async def position_at(self, partition: int, time: datetime | int, *, timeout: float | None = None) -> Position:
        us = checked_time(time)
        return await self._ask(partition, "FindTime", lambda port: port.find_time(partition, us), timeout)

    async def _ask(self, partition: int, what: str, call: Callable[[ServerPort], Awaitable[T]], timeout: float | None) -> T:
        return await self._routes.ask(partition, what, call, self._seconds if timeout is None else timeout)

    async def history(
        self, partition: int, lock: int, *, after: int, through: int | None, limit: int, newest_first: bool,
        confirmed: bool, timeout: float | None,
    ) -> History:  # fmt: skip
        """Return committed transactions that marked a lock."""
        if not 0 < limit <= HISTORY_IDS_MAX:
            raise BadArgument(f"a history lists 1 to {HISTORY_IDS_MAX} ids, not {limit}")
        after, before = checked_position(after), None if through is None else checked_position(through) + 1

        async def ask(port: ServerPort) -> HistoryPart:
            most = max(1, limit - len(ids))
            part = await port.history(
                partition, lock, after=low, before=high, limit=most, newest_first=newest_first,
                confirmed=confirmed and end is None,
            )  # fmt: skip
            if high is not None and end is not None and part.history.end < high - 1:
                raise CannotConnect(f"an owner before answered: it had committed up to id {part.history.end}")
            return part

        while True:  # an owner answers a long history in parts
            ids, high = list[int](), before
            low: int = after
            end: Position | None = None
            while True:
                part = await self._ask(partition, "History", ask, timeout)
                if end is None:
                    end = part.history.end
                    high = end + 1
                elif part.history.end.timeline != end.timeline:
                    break  # what was found may be above the fork
                ids += part.history.ids
                if part.through is None or len(ids) > limit:
                    has_more = part.history.has_more or len(ids) > limit
                    return History(partition=partition, ids=tuple(ids[:limit]), end=end, has_more=has_more)
                low, high = (low, part.through) if newest_first else (part.through, high)

    async def marked(
        self, partition: int, groups: Sequence[tuple[int, ...]], *, after: int, limit: int, newest_first: bool = False,
        reach: int = EMPTY, since: Position | None = None, timeout: float | None,
    ) -> AsyncGenerator[tuple[list[tuple[int, bytes]], Position], None]:  # fmt: skip
        """Iterate over the committed transactions that marked all locks of one of the groups, in pages of ids and
        payloads; each comes with the high-water mark up to which the whole is complete, and at least one page comes.

        The first page is confirmed by a majority, as `end_position` is. `reach`: an id to wait for a moment until it is
        committed. `limit`: transactions of a page. Raise `OtherTimeline` if `since` is not on the log, or if an operator
        ends the log below the high-water mark meanwhile."""
        query = MarkedQuery(groups=tuple(groups), first_id=after + 1, limit=limit, newest_first=newest_first)
        page = await self._first_page(partition, query, reach, since, timeout)
        end = page.end
        while True:
            yield [(id_and_length(one)[0], bytes(one[HEAD_BYTES:-TRAILER_BYTES])) for one in page.records], end
            if page.through is None:
                return
            if newest_first:
                query = replace(query, last_id=page.through - 1)
            else:
                query = replace(query, first_id=page.through + 1, last_id=int(end))
            page = await self._page(partition, query, end=end, since=end, timeout=timeout)

    async def _first_page(
        self, partition: int, query: MarkedQuery, reach: int, since: Position | None, timeout: float | None
    ) -> MarkedPage:
        """Ask once for all callers with an equal question, such as tasks that race for one boundary."""
        key = (partition, query, reach, since, since and since.timeline)
        ask = partial(self._page, partition, query, reach=reach, since=since, timeout=None)
        question = self._questions.setdefault(key, SharedQuestion(ask))
        try:
            if timeout is None:  # the question ends by itself
                return await question.ask()
            async with asyncio.timeout(timeout):
                return await question.ask()
        except TimeoutError:
            raise CannotConnect(f"partition {partition} did not answer FetchMarked in {timeout:g} seconds") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ClientClosed("the client was closed during the call") from None
        finally:
            if question.is_idle and self._questions.get(key) is question:
                del self._questions[key]

    async def _page(
        self, partition: int, query: MarkedQuery, *, end: Position | None = None, reach: int = EMPTY,
        since: Position | None, timeout: float | None,
    ) -> MarkedPage:  # fmt: skip
        """Return one page. `end`: the high-water mark that came with the first page; None for the first page, which a
        majority confirms."""

        async def ask(port: ServerPort) -> MarkedPage:
            try:
                page = await port.fetch_marked(partition, query, confirmed=end is None, reach=reach, since=since)
            except WrongPeer:
                page = await _marked_by_history(port, partition, query, confirmed=end is None, since=since)
            if end is not None and page.end < min(end, query.last_id):
                raise CannotConnect(f"an owner before answered: it had committed up to id {page.end}")
            return page

        return await self._ask(partition, "FetchMarked", ask, timeout)

    def close(self) -> None:
        """Cancel the questions that are under way."""
        for question in self._questions.values():
            question.cancel()
        self._questions.clear()

    async def each(
        self, partition: int, ids: Sequence[int], *, with_locks: bool, timeout: float | None
    ) -> list[Transaction[Any]]:
        """Return the transactions with these ids, in this order. Ids in a row are read together."""
        wanted = sorted(dict.fromkeys(map(checked_id, ids)))
        starts = [at for at, id_ in enumerate(wanted) if at == 0 or wanted[at - 1] != id_ - 1]
        turns = asyncio.Semaphore(READS_MAX)

        async def read(first_id: int, last_id: int) -> list[Transaction[Any]]:
            found: list[Transaction[Any]] = []
            async with turns:
                while first_id <= last_id:
                    found += await self.some(
                        partition, after=first_id - 1, through=last_id, with_locks=with_locks, timeout=timeout
                    )
                    first_id = found[-1].id + 1
            return found

        ends = [*starts[1:], len(wanted)][: len(starts)]
        runs = await asyncio.gather(
            *[read(wanted[start], wanted[end - 1]) for start, end in zip(starts, ends, strict=True)]
        )
        by_id = {found.id: found for run in runs for found in run}
        return [by_id[id_] for id_ in dict.fromkeys(map(int, ids))]

    async def some(
        self,
        partition: int,
        *,
        after: int | None = None,
        through: int | None = None,
        since: datetime | int | None = None,
        before: datetime | int | None = None,
        with_locks: bool = False,
        timeline: UUID | None = None,
        timeout: float | None = None,
    ) -> list[Transaction[Any]]:
        """Return transactions of a range of ids in the timeline with this identity; None for the current log."""
        if (after is not None and since is not None) or (through is not None and before is not None):
            raise BadArgument("give one of `after` and `since`, and one of `through` and `before`")
        asked: Position | None = None
        if since is not None:
            after = asked = await self.position_at(partition, since, timeout=timeout)
        if before is not None:
            through = asked = await self.position_at(partition, before, timeout=timeout)
        elif through is None:
            through = asked = await self.end_position(partition, timeout=timeout)
        if timeline is None and asked is not None:
            timeline = asked.timeline
        first_id = checked_position(EMPTY if after is None else after) + 1
        last_id = min(checked_position(through), first_id + READ_IDS_MAX - 1)
        if last_id < first_id:
            return []
        runs = await self._runs(partition, first_id, last_id, with_locks, timeline, timeout)
        for run in runs:
            self._seen.note(run.times)
        timeline = timeline or FIRST
        return [found for run in runs for found in transactions_of(run, partition, self._serializer, timeline=timeline)]

    async def _runs(
        self,
        partition: int,
        first_id: int,
        last_id: int,
        with_locks: bool,
        timeline: UUID | None,
        timeout: float | None,
    ) -> list[Run]:
        async def ask(port: ServerPort) -> list[Run]:
            runs: list[Run] = []
            next_id = first_id
            async with aclosing(
                port.fetch(partition, first_id, last_id, with_locks=with_locks, timeline=timeline)
            ) as found:
                async for run in found:
                    if run.first_id != next_id or run.last_id > last_id:
                        break
                    runs.append(run)
                    next_id = run.last_id + 1
                    if sum(len(run.data) for run in runs) >= READ_BYTES:
                        return runs
            if next_id <= last_id:
                raise BadFrame(f"the owner of partition {partition} did not answer with transaction {next_id}")
            return runs

        return await self._ask(partition, "Fetch", ask, timeout)


async def _marked_by_history(
    port: ServerPort, partition: int, query: MarkedQuery, *, confirmed: bool, since: Position | None
) -> MarkedPage:
    """Answer a question by the calls that servers of older versions have, by one lock of each group."""
    end = await port.high_water_mark(partition, confirmed=confirmed, since=since)
    end = Position(min(end, query.last_id), end.timeline)
    first_id, ids, through = query.first_id, dict[int, None](), query.first_id if query.newest_first else int(end)
    if first_id > end:
        return MarkedPage(records=(), end=end)
    for lock in dict.fromkeys(group[0] for group in query.groups):
        part = await port.history(
            partition, lock, after=first_id - 1, before=end + 1, limit=query.limit, newest_first=query.newest_first,
            confirmed=False,
        )  # fmt: skip
        found, last = part.history, part.through
        if found.end < end:
            raise CannotConnect(f"an owner before answered: it had committed up to id {found.end}")
        last = found.ids[-1] if found.has_more else last
        if last is not None:
            through = max(through, last) if query.newest_first else min(through, last)
        ids |= dict.fromkeys(found.ids)
    wanted = sorted(id_ for id_ in ids if (id_ >= through if query.newest_first else id_ <= through))
    wanted = wanted[::-1] if query.newest_first else wanted
    records: list[memoryview] = []
    for id_ in wanted[: query.limit]:
        async with aclosing(port.fetch(partition, id_, id_, timeline=end.timeline)) as runs:
            records += [run.data async for run in runs]
    if len(records) < len(wanted):
        through = wanted[len(records) - 1]
    is_whole = through == (first_id if query.newest_first else end)
    return MarkedPage(records=tuple(records), end=end, through=None if is_whole else through)


class ReadMethods(Generic[E]):
    """Methods of a client that read the log; `Client` inherits them."""

    _reader: Reader

    def _check_reading(self, partition: int) -> None:
        raise AssertionError("the client class checks this")

    def _partition_of_lock(self, lock: Lock) -> int:
        raise AssertionError("the client class decides this")

    async def history(
        self,
        lock: Lock | int,
        *,
        partition: int | None = None,
        after: int = EMPTY,
        through: int | None = None,
        limit: int = 1000,
        newest_first: bool = False,
        confirmed: bool = True,
        timeout: float | None = None,
    ) -> History:
        """Return the committed transactions that marked a lock, by a WRITE or an APPEND lock. It needs no partitions of
        the client.

        The log is asked by its key indexes, so a lock with few transactions is found quickly in a log of any length.
        `read_ids` reads the transactions themselves.

        Args:
            lock: The lock; its mode does not matter. Or its 64 bits (`Lock.hash`), together with `partition`.
            partition: Partition of the lock; without it, the partition of the lock's name, as for `append`.
            after: Only ids above this one.
            through: Highest id, inclusive; None for no bound.
            limit: Largest number of ids in the answer, up to 10,000.
            newest_first: Whether to list the newest transactions, and list them backwards.
            confirmed: Whether the owner asks a majority of the storages before it answers; see `end_position`.
            timeout: Seconds without progress, through a fail-over. An owner answers a long history in parts, and each
                part has this time; `submit_seconds` if it is not given.

        Raises:
            NeedsBatches: The partition writes format 0, or the range contains transactions of format 0, which keeps no
                locks.
            ArchiveAway, OnlyInArchive: The range goes below the trim floor, and the archive cannot be read.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: An argument is wrong, there is no such partition, or the client is not open.

        Example:
            ```python
            history = await client.history(write_lock("account", 17), newest_first=True, limit=10)
            for transaction in await client.read_ids(history.partition, history.ids):
                print(transaction.id, transaction.payload)
            ```
        """
        if partition is None:
            if not isinstance(lock, Lock):
                raise BadArgument("the 64 bits of a lock do not tell its partition; give `partition`, or a `Lock`")
            partition = self._partition_of_lock(lock)
        self._check_reading(partition)
        bits = lock.hash if isinstance(lock, Lock) else lock
        if not isinstance(bits, int) or not 0 <= bits < 1 << 64:
            raise BadArgument(f"a lock is a `Lock` or an integer of 64 bits, not {lock!r}")
        return await self._reader.history(
            partition, bits, after=after, through=through, limit=limit, newest_first=newest_first, confirmed=confirmed,
            timeout=timeout,
        )  # fmt: skip

    async def last(
        self,
        lock: Lock | int,
        *,
        partition: int | None = None,
        through: int | None = None,
        confirmed: bool = True,
        timeout: float | None = None,
    ) -> int | None:
        """Return the id of the last committed transaction that marked a lock; None if there is none. Arguments and
        errors are those of `history`."""
        found = await self.history(
            lock, partition=partition, through=through, limit=1, newest_first=True, confirmed=confirmed, timeout=timeout
        )
        return found.ids[0] if found.ids else None

    async def read_ids(
        self, partition: int, ids: Sequence[int], *, with_locks: bool = False, timeout: float | None = None
    ) -> list[Transaction[E]]:
        """Read committed transactions by their ids, each once, in the order of `ids`: for instance those of a `history`.

        Args:
            partition: Partition to read.
            ids: Ids of the transactions.
            with_locks: See `read`.
            timeout: See `end_position`; for each question that is asked.

        Raises:
            BeyondLog: No transaction with one of the ids is committed yet.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.each(partition, ids, with_locks=with_locks, timeout=timeout)

    async def end_position(self, partition: int, *, confirmed: bool = True, timeout: float | None = None) -> Position:
        """Ask the owner for the highest committed id of a partition, -1 if it is empty. It needs no partitions of the
        client.

        The result is not below any id that was acknowledged before this call: the owner asks a majority of the storages
        whether it was replaced. With `confirmed=False` the owner answers at once, and an owner that was paused and
        replaced answers with an old id.

        Args:
            partition: Partition to ask for.
            confirmed: Whether the owner asks a majority before it answers.
            timeout: Seconds to ask the owner, through a fail-over; `submit_seconds` if it is not given.

        Raises:
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.end_position(partition, confirmed=confirmed, timeout=timeout)

    async def position_at(self, partition: int, time: datetime | int, *, timeout: float | None = None) -> Position:
        """Ask the owner for the position before the first transaction of a time or later.

        A view that starts at a time returns it from `position`. Transactions of format 0 have no time, and count as
        earlier than any time. It needs no partitions of the client.

        Args:
            partition: Partition to ask for.
            time: A datetime with a time zone, or microseconds since 1970.
            timeout: See `end_position`.

        Raises:
            NeedsBatches: The partition writes format 0, which has no times.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: The time has no time zone, there is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.position_at(partition, time, timeout=timeout)

    async def read(
        self, partition: int, id: int, *, with_locks: bool = False, timeout: float | None = None
    ) -> Transaction[E]:
        """Read one committed transaction by its id. It needs no view and no partitions of the client.

        Args:
            partition: Partition of the transaction.
            id: Id of the transaction.
            with_locks: Whether to read its `locks` too; format 0 keeps none.
            timeout: See `end_position`.

        Raises:
            BeyondLog: No transaction with this id is committed yet.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        return (
            await self.read_some(partition, after=checked_id(id) - 1, through=id, with_locks=with_locks, timeout=timeout)
        )[0]

    async def read_some(
        self,
        partition: int,
        *,
        after: int | None = None,
        through: int | None = None,
        since: datetime | int | None = None,
        before: datetime | int | None = None,
        with_locks: bool = False,
        timeout: float | None = None,
    ) -> list[Transaction[E]]:
        """Read committed transactions of a range of ids or of times.

        A call returns at most 10,000 transactions and about 4 MiB, and at least one unless the range is empty. To read
        on, call it again after the last id. The result may begin or end inside an atomic append.

        Args:
            partition: Partition to read.
            after: Id before the first transaction, or give `since`. With neither, the range begins with the log.
            through: Id of the last transaction, or give `before`. With neither, the range ends with the highest
                committed id.
            since: Time of the first transaction, or a time before it; see `position_at`.
            before: Time after the last transaction: transactions of this time or later are left out.
            with_locks: See `read`.
            timeout: See `end_position`; for each question that is asked.

        Raises:
            BeyondLog: An id of the range is not committed yet.
            NeedsBatches: See `position_at`.
            OtherTimeline: An operator ended the log below the range during the call.
            CannotConnect: The owner did not answer in time.
            BadArgument, ClientClosed: Ids or times are wrong, there is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.some(
            partition,
            after=after,
            through=through,
            since=since,
            before=before,
            with_locks=with_locks,
            timeout=timeout,
        )
