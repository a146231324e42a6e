"""Views in a SQL database: each transaction of the log is applied together with the position that records it.

The first statement of the database transaction that applies n raises the position from n - 1 to n, and it succeeds for
one process only. So after a crash at any moment, a commit whose answer was lost, or with several processes on one
database, a process that finds the position raised skips what it covers. The order matters, because the row of the
position is the lock for other processes. A group is applied in one database transaction, so no reader sees a part of
it. A dead letter and its position are also written together or not at all.

The position is stored with the timelines of the log. If an operator ended the log, a position up to the fork is moved
to the new timeline before it is raised. Above the fork the view raises `OtherTimeline`, because its tables hold
transactions that are no longer in the log.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from waltzd.client.view import Decision, E_contra, Transaction, end_of_part
from waltzd.errors import (
    ApplyFailed,
    BadArgument,
    DatabaseUnavailable,
    EventUnknown,
    NotApplied,
    OtherTimeline,
    ViewBehind,
    WaltzError,
)
from waltzd.protocol.locks import Committed, Token, token_of
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.sql.guard import (
    ONLY_READ_AND_WRITE,
    Guard,
    check_function,
    checked_engine,
    is_of_the_database,
    name_of,
    prove_alive,
    refuse_what_came,
)
from waltzd.sql.positions import Kept, Positions, create, limit_waiting

R = TypeVar("R")
Part: TypeAlias = Sequence[Transaction[Any]]
"""Transactions of one partition with consecutive ids."""
BATCH_MAX = 500
LOCK_SECONDS = 10
TRIES = 10
"""Number of tries of a failing transaction: about half a minute with the pauses of a client."""
STALLS_MAX = 3
"""Number of failures in a row to raise a position that is the expected one."""
LOOK_MIN, LOOK_MAX = 0.005, 0.1
"""Shortest and longest pause in seconds between two reads of a position that is waited for."""
_log = logging.getLogger("waltz.sql")


@dataclass(frozen=True, kw_only=True)
class Poison:
    """Transaction, or group of them, that a view has given up; the argument of `on_poison`."""

    view: str
    """Name of the view."""
    partition: int
    """Partition of the transaction."""
    id: int
    """Id of the first transaction."""
    count: int
    """Number of transactions: 1, or the size of the group."""
    is_put_aside: bool
    """True if it was written as a dead letter and the view continues. False if the partition is stopped in front of it."""
    error: ApplyFailed
    """Error of the last try; its `__cause__` is what the function raised."""


class SqlView(Generic[E_contra]):
    """View in a SQL database, for the parameter `view` of a client. Each transaction is applied exactly once, with its
    position. A `SqlView[E]` takes transactions whose values have the type E.

    Example:
        ```python
        def apply(connection, transaction):
            connection.execute(sa.insert(events).values(body=transaction.payload.decode()))

        view = SqlView(sqlite("view.db"), apply, name="events", tables=metadata)
        async with Client(servers, view=view) as client:
            ...
        await view.close()
        ```
    """

    takes_foreign = True
    """True: the position covers foreign transactions, too, which are not applied."""

    def __init__(
        self,
        engine: Engine,
        apply: Callable[[Connection, Transaction[E_contra]], None] | None = None,
        *,
        apply_many: Callable[[Connection, Sequence[Transaction[E_contra]]], None] | None = None,
        name: str = "view",
        tables: sa.MetaData | None = None,
        tries: int = TRIES,
        then: Literal["stop", "park"] = "stop",
        on_poison: Callable[[Poison], object] | None = None,
        accept_rename: bool = False,
        batch_max: int = BATCH_MAX,
        lock_seconds: int = LOCK_SECONDS,
        threads: int | None = None,
    ) -> None:
        """Configure a view. `opened`, which a client calls, is the first access to the database.

        Args:
            engine: The database: `sqlite(path)`, or an engine of SQLAlchemy for PostgreSQL or MySQL.
            apply: `apply(connection, transaction)` writes what the transaction means, through this connection only: it is
                called again if the database rolled the first try back. It must not end the database
                transaction; savepoints are allowed. It is a plain function and runs on a thread of this view, for one
                transaction of a partition at a time, in the order of their ids.
            apply_many: Alternative to `apply` that is several times as fast: `apply_many(connection, transactions)` writes
                what several transactions of one partition mean, in their order.
            name: Name of the view, which is part of the key of its positions. Each view of a database needs another name,
                and keeps it.
            tables: The application's own tables, created if they are missing.
            tries: Number of tries of a transaction that the function fails on.
            then: What happens after the last try. `"stop"`: the partition stops in front of the transaction
                (`ViewStopped`). `"park"`: the transaction, with its whole group, is written to the table
                `waltz_dead_letters`, and the view continues; an event of a newer program (`EventUnknown`) is tried
                without limit.
            on_poison: `on_poison(poison)` is called in both cases, on a thread of this view. Its errors are logged.
            accept_rename: Accept a function with another name than the one that made the view before.
            batch_max: Largest number of transactions of the log in one of the database.
            lock_seconds: Seconds to wait on PostgreSQL for another process that applies the same partition. Other
                databases have a setting of the engine for that.
            threads: Number of partitions applied at once. By default one for SQLite, which has one writer, else four.

        Raises:
            BadArgument: `engine` is no engine, not exactly one of `apply` and `apply_many` is given, it is a coroutine or
                generator function, or a number is below 1.
        """
        self._engine = checked_engine(engine)
        if (apply is None) == (apply_many is None):
            raise BadArgument("a view has one function: give either `apply` or `apply_many`")
        function: Any = apply if apply is not None else apply_many
        check_function(function)
        numbers = {"batch_max": batch_max, "lock_seconds": lock_seconds, "threads": threads, "tries": tries}
        if then not in ("stop", "park"):
            raise BadArgument(f'then must be "stop" or "park", not {then!r}')
        for number, value in numbers.items():
            if value is not None and value < 1:
                raise BadArgument(f"{number} must be at least 1, not {value}")
        self.name = name
        self._function = function
        self._is_for_many = apply_many is not None
        self._positions = Positions(self._engine, name, has_dead_letters=then == "park")
        self._tables = tables
        self._tries_max = tries
        self._has_dead_letters = then == "park"
        self._on_poison = on_poison
        self._accept_rename = accept_rename
        self._batch_max = batch_max
        self._lock_seconds = lock_seconds
        self._cluster: UUID | None = None
        """Cluster that the view belongs to; None before `opened`."""
        self._failing: dict[int, _Failing] = {}
        """Transaction that the function fails on, by partition."""
        self._preparing = asyncio.Lock()
        self._looking: asyncio.Task[dict[int, Kept]] | None = None
        self._lineages: dict[int, Lineage] = {}
        """Newest timelines that the database has named, by partition."""
        self._threads = ThreadPoolExecutor(threads or (1 if engine.dialect.name == "sqlite" else 4), "waltz-sql")

    # -- as a client calls it

    async def opened(self, cluster: UUID) -> None:
        """Create the missing tables and claim the view for a cluster. A client calls this with the key of its cluster.

        Raises:
            ForeignCluster: The view comes from another cluster.
            OtherView: Another function made the view, or an earlier version its tables.
            BadArgument: The engine commits every statement, or the table cannot roll back.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        async with self._preparing:
            if self._cluster != cluster:
                await self._on_thread(self._prepare, cluster)

    async def position(self, partition: int) -> Position:
        """Return the position as `read_position` does."""
        return await self._on_thread(self.read_position, partition)

    async def apply(self, transaction: Transaction[E_contra]) -> None:
        """Apply one transaction as `apply_all` does."""
        await self._on_thread(self.apply_all, [transaction])

    async def apply_batch(self, transactions: Sequence[Transaction[E_contra]]) -> None:
        """Apply transactions as `apply_all` does."""
        await self._on_thread(self.apply_all, transactions)

    async def failed(self, transaction: Transaction[E_contra], error: Exception) -> Decision:
        """Return `STOP` if the function has failed `tries` times, the database went back in time (`ViewBehind`), or the
        view is on another timeline of the log (`OtherTimeline`). Else return `RETRY`, also for a transaction that
        was fed before a fork which only another process knows: the owner ends that feed. With `then="park"` the last
        try writes a dead letter and does not fail."""
        known = self._lineages.get(transaction.partition, NEVER_FORKED)
        is_fed_before = known.current not in (transaction.lineage or NEVER_FORKED)
        if isinstance(error, ViewBehind) or (isinstance(error, OtherTimeline) and not is_fed_before):
            return Decision.STOP
        failing = self._failing.get(transaction.partition)
        is_enough = failing is not None and failing.tries >= self._tries_max and not self._has_dead_letters
        if failing is None or not isinstance(error, ApplyFailed) or not is_enough:
            return Decision.RETRY
        del self._failing[transaction.partition]  # a partition that is taken out and in begins to count anew
        await self._on_thread(self._tell, failing, error)
        return Decision.STOP

    async def wait(self, token: Token | Committed | int, *, partition: int | None = None, timeout: float = 10.0) -> None:
        """Wait until this view contains a transaction, whichever process applies it, by reading the position in the
        database.

        The program that waits needs no client, and need not apply anything itself.

        Args:
            token: `outcome.token`, here or in another process (`Token.parse`), or the outcome itself, or an id.
            partition: Partition of the id; only needed with an id.
            timeout: Seconds to wait.

        Raises:
            NotApplied: The timeout is over.
            OtherTimeline: An operator ended the log below the transaction: the view will never contain it.
            DatabaseUnavailable: The database did not answer until the timeout was over.
            BadArgument: `token` is not a token, a `Committed`, or an id with its partition.
        """
        wait = _Wait(self.name, *place_of(token, partition), timeout)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        wait.saw(await self._look())
                    except DatabaseUnavailable as error:
                        wait.missed(error)
                    if wait.is_over:
                        return
                    await asyncio.sleep(wait.pause())
        except TimeoutError:
            raise wait.error() from None

    async def _look(self) -> dict[int, Kept]:
        """Read all positions, once for all that wait at the same time: a position that was raised stays raised."""
        looking = self._looking
        if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
            looking = self._looking = asyncio.create_task(self._on_thread(self._read_all), name="waltz look at positions")
        return await asyncio.shield(looking)

    async def reset(self, partition: int, id: int, *, undo: Callable[[Connection], object] | None = None) -> None:
        """Set the view back as `reset_blocking` does."""
        await self._on_thread(functools.partial(self.reset_blocking, partition, id, undo=undo))

    async def close(self) -> None:
        """Wait for running calls, and end the threads. The engine stays open, because it belongs to the application."""
        await asyncio.to_thread(self.close_blocking)

    async def _on_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments))

    # -- the same for plain code; each call blocks

    def _prepare(self, cluster: UUID) -> None:
        """Create the missing tables, prove that the database can roll back, and claim the name of the view for this
        cluster and function."""
        with self._translated("prepare the view"):
            self._positions.prepare(cluster, name_of(self._function), accept_rename=self._accept_rename)
            if self._tables is not None:
                create(self._engine, self._tables)
        self._cluster = cluster

    def read_position(self, partition: int) -> Position:
        """Return the position of the last transaction that the view contains, -1 for none.

        Raises:
            BadArgument: The cluster is not known, because `opened` was not called.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        return self._read(partition).position

    def _read(self, partition: int) -> Kept:
        self._checked_cluster()
        with self._translated(f"read the position of partition {partition}", partition=partition):
            kept = self._positions.read(partition)
            if kept is None:
                self._positions.insert(partition)
                kept = self._positions.read(partition)
        if kept is None:
            raise DatabaseUnavailable(f"the position of partition {partition} was deleted while it was written")
        return kept

    def read_positions(self) -> dict[int, Position]:
        """Return the current positions of this view by partition. A partition that was never activated is left out.

        Raises:
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        return {partition: kept.position for partition, kept in self._read_all().items()}

    def _read_all(self) -> dict[int, Kept]:
        with self._translated("read the positions"):
            return self._positions.read_all()

    def reset_blocking(self, partition: int, id: int, *, undo: Callable[[Connection], object] | None = None) -> None:
        """Set the view back to an id while no client applies the partition: after a rescue or a restore, to the fork
        that `OtherTimeline` names. Transactions after the id are applied again; dead letters above it are deleted.

        Args:
            partition: Number of the partition.
            id: Last id that the view contains from now on; -1 for none.
            undo: `undo(connection)` removes from the view what transactions above the id wrote, in the same database
                transaction.

        Raises:
            BadArgument: The position of the view is below this id, or `opened` was not called.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        found = self._read(partition)
        with self._translated(f"set the position of partition {partition} back"), self._engine.begin() as connection:
            limit_waiting(connection, self._lock_seconds)
            if id < EMPTY or not self._positions.lower(connection, partition, id):
                raise BadArgument(
                    f"the view {self.name!r} is at id {found.id} of partition {partition}: it cannot be set back to {id}",
                    not_done="the view stays as it is",
                )
            if undo is not None:
                undo(connection)

    def wait_blocking(self, token: Token | Committed | int, *, partition: int | None = None, timeout: float = 10.0) -> None:
        """Wait as `wait` does, on a thread without an event loop."""
        wait = _Wait(self.name, *place_of(token, partition), timeout)
        while not wait.is_over:
            try:
                wait.saw(self._threads.submit(self._read_all).result())
            except DatabaseUnavailable as error:
                wait.missed(error)
            if not wait.is_over:
                if wait.is_late:
                    raise wait.error()
                time.sleep(wait.pause())

    def close_blocking(self) -> None:
        """Close the view as `close` does, on a thread without an event loop, after its `BlockingClient` was closed."""
        self._threads.shutdown()

    def apply_all(self, transactions: Sequence[Transaction[E_contra]]) -> None:
        """Apply transactions of one partition with consecutive ids. Those that the view contains already are skipped.

        A group is applied in one database transaction. If a transaction fails, all before it are applied, and nothing of
        its group. One that has failed `tries` times becomes a dead letter if the view has `then="park"`.

        Raises:
            ApplyFailed: The application's function raised, tried to end the database transaction, or a constraint failed.
            ViewBehind: The position is lower than before: the database went back in time.
            OtherTimeline: The view contains transactions that are no longer in the log: an operator ended it below.
            BadArgument: `opened` was not called.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        self._checked_cluster()
        at, stalls = 0, 0
        while at < len(transactions):
            part = transactions[at : end_of_part(transactions, at, self._batch_max)]
            try:
                reached = self._apply_or_find_the_bad_one(part)
            except ApplyFailed as error:
                reached = self._put_aside(_group_of(part, error), error)
            stalls = stalls + 1 if reached < part[0].id else 0
            if stalls == STALLS_MAX:
                raise DatabaseUnavailable(
                    f"the position of partition {part[0].partition} is {reached} and cannot be raised from there",
                    partition=part[0].partition,
                )
            # Not behind the part, also if another process is further: what follows may be above a fork.
            at += max(0, min(reached, part[-1].id) - part[0].id + 1)

    def _checked_cluster(self) -> UUID:
        if self._cluster is None:
            raise BadArgument(
                f"the cluster of the view {self.name!r} is not known, because `opened` was not called",
                next_step="give the view itself to the client; a view around it passes `opened(cluster)` on, and a program "
                "without a client awaits it",
            )
        return self._cluster

    # -- applying

    def _apply_or_find_the_bad_one(self, part: Part) -> int:
        try:
            return self._apply_part(part)
        except ApplyFailed:
            if end_of_part(part, 0, 1) == len(part):
                raise
        reached, start = part[0].id - 1, 0
        while start < len(part) and reached >= part[start].id - 1:  # else another process has moved the position
            stop = end_of_part(part, start, 1)
            reached, start = max(reached, self._apply_part(part[start:stop])), stop
        return reached

    def _apply_part(self, part: Part) -> int:
        """Apply all in one database transaction, or none if the position is not the expected one; return the position."""
        return self._with_position(part, f"apply {_name(part[0])}", self._call_application)

    def _with_position(self, part: Part, what: str, work: Callable[[Connection, Part], None]) -> int:
        """Raise the position over a part and call `work`, in one database transaction; do nothing if the position is
        not the expected one. Return the position."""
        partition, first, last = part[0].partition, part[0].id, part[-1].id
        assert last - first + 1 == len(part)
        lineage = self._lineage_of(part)
        with self._translated(what, partition=partition, id=first), self._engine.connect() as connection:
            transaction = connection.begin()
            below = connection.connection
            try:
                # The first statement writes: SQLite then takes the write lock at once, and honours its busy timeout.
                limit_waiting(connection, self._lock_seconds)
                if self._positions.raise_from(connection, partition, Kept(first - 1, lineage), last):
                    work(connection, part)
                    transaction.commit()  # raises if the application has committed or rolled back
                    return last
                transaction.rollback()
            except Exception:
                # SQLAlchemy takes a transaction whose commit failed for ended, and would return the connection to the pool
                # as it is: its next user would commit half a transaction.
                with suppress(Exception):
                    below.rollback()
                raise
        return self._explain_position(part, lineage)

    def _explain_position(self, part: Part, lineage: Lineage) -> int:
        """Return the position after it was not the expected one. Move it to the timelines of the part if it is the same
        transaction there."""
        partition, first = part[0].partition, part[0].id
        kept = self._read(partition)
        found = kept.id
        if found < first - 1:
            raise ViewBehind(
                f"the database has position {found} for partition {partition}; this client had applied {first - 1} there",
                partition=partition,
                position=found,
            )
        if kept.lineage == lineage:
            return found
        if lineage.current in kept.lineage:  # another process is further
            self._lineages[partition] = kept.lineage
            self._lineage_of(part)
            return found
        lineage.check(
            kept.lineage.current, found, what=f"the view {self.name!r}", partition=partition,
            next_step=f"stop its programs, and call `view.reset({partition}, {lineage.shared_to(kept.lineage.current)}, "
            "undo=…)` with a function that removes what the transactions above wrote; or rebuild the view from the log",
        )  # fmt: skip
        self._positions.go_over(partition, kept, lineage)
        return found

    def _lineage_of(self, part: Part) -> Lineage:
        """Return the timelines that the position must name before the part is applied: those of the feed, or newer ones
        in the database. Raise `OtherTimeline` if the part is no longer in the log."""
        fed, known = part[-1].lineage, self._lineages.get(part[0].partition, NEVER_FORKED)
        if fed is not None and known.current in fed:
            return fed
        known.check(part[-1].timeline, part[-1].id, what="a transaction that was fed", partition=part[0].partition)
        return known

    def _call_application(self, connection: Connection, part: Part) -> None:
        guard = Guard(connection)
        wanted = [transaction for transaction in part if not transaction.is_foreign]
        if self._is_for_many and wanted:
            self._call_once(connection, wanted, wanted[0], guard)
        elif not self._is_for_many:
            for transaction in wanted:
                self._call_once(connection, transaction, transaction, guard)

    def _call_once(
        self, connection: Connection, given: Transaction[Any] | Part, first: Transaction[Any], guard: Guard
    ) -> None:
        with guard:
            self._call_guarded(connection, given, first, guard)
        if guard.took_a_failure():
            prove_alive(connection, f"applying {_name(first)}", partition=first.partition, id=first.id)

    def _call_guarded(
        self, connection: Connection, given: Transaction[Any] | Part, first: Transaction[Any], guard: Guard
    ) -> None:
        facts: dict[str, Any] = {"partition": first.partition, "id": first.id}
        cause: Exception | None = None
        try:
            refuse_what_came(self._function(connection, given))
        except Exception as error:
            if not guard.refused and is_of_the_database(error):
                raise
            cause = error
        if guard.refused:  # also if the application swallowed the error
            what = f"{guard.refused} while applying {_name(first)}"
            raise ApplyFailed(what, next_step=ONLY_READ_AND_WRITE, **facts) from cause
        if cause is not None:
            what = f"{type(cause).__name__}: {_first_line(cause)}"
            raise ApplyFailed(f"applying {_name(first)} failed: {what}", **facts) from cause

    # -- giving up

    def _put_aside(self, group: Part, error: ApplyFailed) -> int:
        """Write a dead letter and raise the position, if the function has failed often enough; else raise the error
        again."""
        if isinstance(error.__cause__, EventUnknown):  # a newer program knows it, and may be at work beside this one
            raise error
        partition, first = group[0].partition, group[0].id
        failing = self._failing.get(partition)
        if failing is None or failing.first != first:
            failing = _Failing(partition, first, len(group))
        self._failing[partition] = failing = replace(failing, tries=failing.tries + 1)
        if not self._has_dead_letters or failing.tries < self._tries_max:
            raise error
        cluster = self._checked_cluster()
        letters = [(transaction.id, transaction.kind) for transaction in group]

        is_put_aside = False

        def bury(connection: Connection, _: Part) -> None:
            nonlocal is_put_aside
            self._positions.bury(connection, cluster, partition, letters, error.message)
            is_put_aside = True

        reached = self._with_position(group, f"put {_name(group[0])} aside", bury)
        del self._failing[partition]
        if is_put_aside:  # else another process wrote the dead letter or applied the transaction
            self._tell(failing, error, is_put_aside=True)
        return reached

    def _tell(self, failing: _Failing, error: ApplyFailed, is_put_aside: bool = False) -> None:
        poison = Poison(
            view=self.name,
            partition=failing.partition,
            id=failing.first,
            count=failing.count,
            is_put_aside=is_put_aside,
            error=error,
        )
        what = "written as a dead letter" if is_put_aside else "given up: its partition is stopped in front of it"
        _log.error(
            "view %s: transaction %d of partition %d was %s after %d tries: %s",
            *(self.name, failing.first, failing.partition, what, failing.tries, error.message),
            exc_info=error.__cause__,
        )
        if self._on_poison is None:
            return
        try:
            self._on_poison(poison)
        except Exception:  # noqa: BLE001  # the application's code
            _log.exception("on_poison of the view %s failed", self.name)

    # -- errors

    @contextmanager
    def _translated(self, what: str, **facts: Any) -> Iterator[None]:
        """Raise errors of the database as errors of Waltz. Errors of the application's function were converted before."""
        try:
            yield
        except DBAPIError as error:
            if isinstance(error, IntegrityError):  # of a constraint that is checked at the commit
                raise ApplyFailed(f"could not {what}: {_first_line(error)}", **facts) from error
            raise DatabaseUnavailable(f"could not {what}: {_first_line(error)}", **facts) from error
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(f"could not {what}: {_first_line(error)}", **facts) from error


@dataclass(frozen=True)
class _Failing:
    """A transaction or group that the function fails on."""

    partition: int
    first: int
    count: int
    tries: int = 0


class _Wait:
    """Wait for one transaction to appear in a view."""

    def __init__(self, view: str, partition: int, id: int, timeline: UUID | None, timeout: float) -> None:
        """Start to wait. `timeline` is the timeline of the id; None means that of the view."""
        if not timeout > 0:
            raise BadArgument(f"timeout is a number of seconds above 0, not {timeout!r}")
        self.is_over = False
        self._view, self._partition, self._id, self._timeout = view, partition, id, timeout
        self._timeline = timeline
        self._deadline = time.monotonic() + timeout
        self._pause = LOOK_MIN
        self._position: int | None = None
        self._trouble: DatabaseUnavailable | None = None

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def saw(self, positions: Mapping[int, Kept]) -> None:
        position, lineage = positions.get(self._partition, Kept(EMPTY, NEVER_FORKED))
        is_known = self._timeline is None or self._timeline in lineage
        if self._timeline is not None and is_known:
            lineage.check(self._timeline, self._id, what="the transaction that is waited for", partition=self._partition)
        self._position, self._trouble, self.is_over = position, None, is_known and position >= self._id

    def missed(self, error: DatabaseUnavailable) -> None:
        self._trouble = error

    def pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, LOOK_MAX)
        return max(0.0, min(pause, self._deadline - time.monotonic()))

    def error(self) -> WaltzError:
        if self._trouble is not None:
            return self._trouble
        if self._position is None:
            return DatabaseUnavailable(f"the position of the view could not be read within {self._timeout:g} seconds")
        return NotApplied(
            f"after {self._timeout:g} seconds the view {self._view!r} has the position {self._position} for partition "
            f"{self._partition}, and not {self._id} yet",
            partition=self._partition,
            position=self._position,
        )


def place_of(given: Token | Committed | int, partition: int | None) -> tuple[int, int, UUID | None]:
    """Return partition, id and timeline of what is waited for. The timeline is None for a plain id."""
    if isinstance(given, int) and not isinstance(given, bool) and partition is not None:
        return partition, given, given.timeline if isinstance(given, Position) else None
    if isinstance(given, Committed) and given.partition is None:
        given = replace(given, partition=partition)
    token = token_of(given)  # type: ignore[arg-type]  # it refuses an id without a partition
    if partition not in (None, token.partition):
        raise BadArgument(f"the token {token} is of partition {token.partition}, not of {partition}")
    return token.partition, token.id, token.timeline


def _group_of(part: Part, error: ApplyFailed) -> Part:
    """Return the transaction that the function failed on, with its group."""
    start = (error.number("id") or 0) - part[0].id
    while start > 0 and part[start].follows:
        start -= 1
    return part[start : end_of_part(part, start, 1)]


def _name(transaction: Transaction[Any]) -> str:
    return f"transaction {transaction.id} of partition {transaction.partition}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
