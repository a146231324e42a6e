"""A view in a SQL database applies each transaction together with the position that remembers it.

Raising the position from n - 1 to n is the first statement of the database transaction that applies n, and it succeeds for
one process only. So a crash at any moment, a commit whose answer was lost, and several processes on one database all come
to the same: a process that finds the position already raised skips what it covers. The order matters: that row is the lock
that makes the others wait. A group is applied in one database transaction, so nobody sees a part of it. What is
put aside as a dead letter goes the same way: the letter and the position together, or neither.

The position keeps the timelines of the log beside the id. Where an operator ended the log, a position up to the fork is
written over to the new timeline before it is raised; above it the view refuses (`OtherTimeline`), because its tables hold
what the log does not have any more."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar
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
from waltzd.protocol.batches import PROBE_HEADER
from waltzd.protocol.locks import Committed, Token, token_of
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.sql.engine import checked_engine
from waltzd.sql.guard import (
    ONLY_READ_AND_WRITE,
    Guard,
    check_function,
    is_of_the_database,
    name_of,
    prove_alive,
    refuse_what_came,
)
from waltzd.sql.positions import Kept, Positions, create, limit_waiting

R = TypeVar("R")
Part: TypeAlias = Sequence[Transaction[Any]]
"""Of one partition, with consecutive ids."""
BATCH_MAX = 500
LOCK_SECONDS = 10
TRIES = 10
"""With a client's pauses about half a minute."""
STALLS_MAX = 3
"""How often in a row raising a position may fail although the position is where it should be."""
LOOK_MIN, LOOK_MAX = 0.005, 0.1
"""Seconds between two looks at a position that somebody waits for."""
_log = logging.getLogger("waltz.sql")


@dataclass(frozen=True, kw_only=True)
class Poison:
    """A transaction that a view has given up, or a group of them: what `SqlView` tells `on_poison`."""

    view: str
    """The name of the view."""
    partition: int
    """The partition that holds it."""
    id: int
    """Of the first one."""
    count: int
    """Of how many: 1, or all those of a group."""
    is_put_aside: bool
    """It is a dead letter, and the view goes on behind it; else the partition stands still in front of it."""
    error: ApplyFailed
    """Why the last try failed; its `__cause__` is what the function raised."""


class SqlView(Generic[E_contra]):
    """A view in a SQL database: the `view` of a client. Each transaction is applied exactly once, with its position. A
    `SqlView[E]` takes transactions whose values have the type E.

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

    takes_probes = True
    """The position goes up by one for each id: a probe is passed, and not applied."""

    def __init__(
        self,
        engine: Engine,
        apply: Callable[[Connection, Transaction[E_contra]], None] | None = None,
        *,
        apply_many: Callable[[Connection, Sequence[Transaction[E_contra]]], None] | None = None,
        name: str = "view",
        tables: sa.MetaData | None = None,
        tries: int = TRIES,
        dead_letters: bool = False,
        on_poison: Callable[[Poison], object] | None = None,
        accept_rename: bool = False,
        batch_max: int = BATCH_MAX,
        lock_seconds: int = LOCK_SECONDS,
        threads: int | None = None,
    ) -> None:
        """Nothing is read or written before `opened`, which a client calls.

        Args:
            engine: The database: `sqlite(path)`, or an engine of SQLAlchemy for PostgreSQL or MySQL.
            apply: `apply(connection, transaction)` writes what the transaction means, through this connection and nothing
                else: it is called again when the database took the first try back. It must not end the database
                transaction; savepoints are allowed. It is a plain function and runs on a thread of this view, for one
                transaction of a partition at a time, in the order of their ids.
            apply_many: In the place of `apply`, and several times as fast: `apply_many(connection, transactions)` writes
                what several transactions of one partition mean, in their order.
            name: Of the view, in the key of its positions: each view of a database has another one. It stays with the view.
            tables: The application's own tables, made when they are missing.
            tries: How often a transaction is tried on which the function fails.
            dead_letters: What comes then. False: the partition stops in front of it (`ViewStopped`). True: the
                transaction, with its whole group, is written down in the table `waltz_dead_letters`, and the view goes on.
                Neither comes of an event that a newer program wrote (`EventUnknown`): it is tried until it is known.
            on_poison: `on_poison(poison)` is told of both, on a thread of this view. What it raises is logged.
            accept_rename: The function may have another name than the one that made the view so far.
            batch_max: How many transactions of the log go into one of the database.
            lock_seconds: How long to wait on PostgreSQL for another process that applies the same partition. Other
                databases wait as long as the engine says.
            threads: How many partitions are applied at once: one for SQLite, which has one writer, else four.

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
        for number, value in numbers.items():
            if value is not None and value < 1:
                raise BadArgument(f"{number} must be at least 1, not {value}")
        self.name = name
        self._function = function
        self._is_for_many = apply_many is not None
        self._positions = Positions(self._engine, name, has_dead_letters=dead_letters)
        self._tables = tables
        self._tries_max = tries
        self._has_dead_letters = dead_letters
        self._on_poison = on_poison
        self._accept_rename = accept_rename
        self._batch_max = batch_max
        self._lock_seconds = lock_seconds
        self._cluster: UUID | None = None
        """From which everything comes, once the database has agreed."""
        self._failing: dict[int, _Failing] = {}
        """By partition."""
        self._preparing = asyncio.Lock()
        self._looking: asyncio.Task[dict[int, Kept]] | None = None
        self._lineages: dict[int, Lineage] = {}
        """By partition, the newest timelines that the database has named."""
        self._threads = ThreadPoolExecutor(threads or (1 if engine.dialect.name == "sqlite" else 4), "waltz-sql")

    # -- as a client calls it

    async def opened(self, cluster: UUID) -> None:
        """Make the tables that are missing, and see whose view it is: by the key of the cluster, which a client gives.

        Raises:
            ForeignCluster: The view comes from another cluster.
            OtherView: Another function made the view, or an earlier version its tables.
            NotTransactional: The engine commits every statement, or the table cannot roll back.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        async with self._preparing:
            if self._cluster != cluster:
                await self._on_thread(self._prepare, cluster)

    async def position(self, partition: int) -> Position:
        """As `read_position`."""
        return await self._on_thread(self.read_position, partition)

    async def apply(self, transaction: Transaction[E_contra]) -> None:
        """As `apply_all`, for one transaction."""
        await self._on_thread(self.apply_all, [transaction])

    async def apply_batch(self, transactions: Sequence[Transaction[E_contra]]) -> None:
        """As `apply_all`."""
        await self._on_thread(self.apply_all, transactions)

    async def failed(self, transaction: Transaction[E_contra], error: Exception) -> Decision:
        """`PARK` when the function has failed `tries` times, the database went back (`ViewBehind`), or the view stands on
        another timeline of the log (`OtherTimeline`); else `RETRY`: databases come back. With `dead_letters` the last try
        puts the transaction aside, and does not fail."""
        if isinstance(error, ViewBehind | OtherTimeline):
            return Decision.PARK
        failing = self._failing.get(transaction.partition)
        is_enough = failing is not None and failing.tries >= self._tries_max and not self._has_dead_letters
        if failing is None or not isinstance(error, ApplyFailed) or not is_enough:
            return Decision.RETRY
        del self._failing[transaction.partition]  # a partition that is taken out and in begins to count anew
        await self._on_thread(self._tell, failing, error)
        return Decision.PARK

    async def wait(self, token: Token | Committed | int, *, partition: int | None = None, timeout: float = 10.0) -> None:
        """Until this view contains a transaction, whichever process applies it: the position in the database tells.

        The program that waits needs no client, and need not apply anything itself.

        Args:
            token: `outcome.token`, here or in another process (`Token.parse`), or the outcome itself, or an id.
            partition: Of an id, the partition that holds it.
            timeout: How many seconds to wait.

        Raises:
            NotApplied: The time is over.
            OtherTimeline: An operator ended the log below the transaction: the view will never have it.
            DatabaseUnavailable: The database did not answer until the time was over.
            BadArgument: It is no token, no `Committed`, and no id with its partition.
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
        """Those who wait at the same time share one look: a position that was raised stays raised."""
        looking = self._looking
        if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
            looking = self._looking = asyncio.create_task(self._on_thread(self._read_all), name="waltz look at positions")
        return await asyncio.shield(looking)

    async def reset(self, partition: int, id: int, *, undo: Callable[[Connection], object] | None = None) -> None:
        """As `reset_blocking`."""
        await self._on_thread(functools.partial(self.reset_blocking, partition, id, undo=undo))

    async def close(self) -> None:
        """Wait for what is under way, and end the threads. The engine stays open: it is the application's."""
        await asyncio.to_thread(self.close_blocking)

    async def _on_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments))

    # -- the same for plain code; each call blocks

    def _prepare(self, cluster: UUID) -> None:
        """Make the tables that are missing, prove that the database can roll back, and see that what is under this name
        comes from this cluster and from this function."""
        with self._translated("prepare the view"):
            self._positions.prepare(cluster, name_of(self._function), accept_rename=self._accept_rename)
            if self._tables is not None:
                create(self._engine, self._tables)
        self._cluster = cluster

    def read_position(self, partition: int) -> Position:
        """The position of the last transaction that the view contains, -1 for none.

        Raises:
            BadArgument: Nothing said which cluster it is: `opened` was not called.
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
            raise DatabaseUnavailable(f"the position of partition {partition} went away while it was being written")
        return kept

    def read_positions(self) -> dict[int, Position]:
        """All positions of this view by partition, as they are now; a partition that was never activated is left out.

        Raises:
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        return {partition: kept.position for partition, kept in self._read_all().items()}

    def _read_all(self) -> dict[int, Kept]:
        with self._translated("read the positions"):
            return self._positions.read_all()

    def reset_blocking(self, partition: int, id: int, *, undo: Callable[[Connection], object] | None = None) -> None:
        """Set the view back to an id, while no client applies the partition: after a rescue or a restore, to the fork that
        `OtherTimeline` names. What comes behind the id is applied again; dead letters above it are forgotten.

        Args:
            partition: Which partition.
            id: The last id that the view contains from now on; -1 for none.
            undo: `undo(connection)` takes back what the view has from the transactions above, in the same database
                transaction.

        Raises:
            BadArgument: The view stands below this id, or is not told its cluster.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        found = self._read(partition)
        with self._translated(f"set the position of partition {partition} back"), self._engine.begin() as connection:
            limit_waiting(connection, self._lock_seconds)
            if id < EMPTY or not self._positions.lower(connection, partition, id):
                raise BadArgument(
                    f"the view {self.name!r} stands at id {found.id} of partition {partition}: it cannot be set to {id}",
                    not_done="the view stays as it is",
                )
            if undo is not None:
                undo(connection)

    def wait_blocking(self, token: Token | Committed | int, *, partition: int | None = None, timeout: float = 10.0) -> None:
        """As `wait`, for a thread without a loop."""
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
        """As `close`, for a thread without a loop: after the `BlockingClient` that the view belongs to was closed."""
        self._threads.shutdown()

    def apply_all(self, transactions: Sequence[Transaction[E_contra]]) -> None:
        """Apply transactions of one partition, with consecutive ids. What the view contains already is skipped.

        A group is applied in one database transaction. When a transaction fails, all before it are applied, and of its
        group nothing. One that has failed `tries` times is put aside, where the view has `dead_letters`.

        Raises:
            ApplyFailed: The application's function raised, tried to end the database transaction, or a constraint failed.
            ViewBehind: The position is below what was applied before: the database went back.
            OtherTimeline: The view holds transactions that are not in the log any more: an operator ended it below.
            BadArgument: As of `read_position`.
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
            at += max(0, reached - part[0].id + 1)

    def _checked_cluster(self) -> UUID:
        if self._cluster is None:
            raise BadArgument(
                f"nothing said from which cluster the view {self.name!r} comes",
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
        while start < len(part):
            stop = end_of_part(part, start, 1)
            reached, start = max(reached, self._apply_part(part[start:stop])), stop
        return reached

    def _apply_part(self, part: Part) -> int:
        """Apply all in one database transaction, or none because the position is elsewhere; returns the position."""
        return self._with_position(part, f"apply {_name(part[0])}", self._call_application)

    def _with_position(self, part: Part, what: str, work: Callable[[Connection, Part], None]) -> int:
        """In one database transaction: raise the position over the part, and do the work; or nothing, if it is
        elsewhere. Returns the position."""
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
                    transaction.commit()  # raises when the application has ended it all the same
                    return last
                transaction.rollback()
            except Exception:
                # SQLAlchemy takes a transaction for ended whose commit was refused, and would give the connection back as
                # it is: whoever gets it next would commit the half.
                with suppress(Exception):
                    below.rollback()
                raise
        return self._explain_position(part, lineage)

    def _explain_position(self, part: Part, lineage: Lineage) -> int:
        """Where the position is. It goes over to the timelines of the part where it may."""
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
        if found != EMPTY and lineage.current in kept.lineage:  # another process is further
            self._lineages[partition] = kept.lineage
            self._lineage_of(part)
            return found
        lineage.check(
            kept.lineage.current, found, what=f"the view {self.name!r}", partition=partition,
            next_step=f"stop its programs, and call `view.reset({partition}, {lineage.shared_to(kept.lineage.current)}, "
            "undo=…)` with a function that takes back what came from the transactions above; or let it be built anew",
        )  # fmt: skip
        self._positions.go_over(partition, kept, lineage)
        return found

    def _lineage_of(self, part: Part) -> Lineage:
        """The timelines that the position has to name before the part is applied: those with which it was fed, or newer
        ones that the database names. Raises `OtherTimeline` where the part is not in the log any more."""
        fed, known = part[-1].lineage, self._lineages.get(part[0].partition, NEVER_FORKED)
        if fed is not None and known.current in fed:
            return fed
        known.check(part[-1].timeline, part[-1].id, what="a transaction that was fed", partition=part[0].partition)
        return known

    def _call_application(self, connection: Connection, part: Part) -> None:
        guard = Guard(connection)
        wanted = [transaction for transaction in part if transaction.kind != PROBE_HEADER]
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
        if guard.refused:  # also when the application swallowed what it was told
            what = f"{guard.refused} while applying {_name(first)}"
            raise ApplyFailed(what, next_step=ONLY_READ_AND_WRITE, **facts) from cause
        if cause is not None:
            what = f"{type(cause).__name__}: {_first_line(cause)}"
            raise ApplyFailed(f"applying {_name(first)} failed: {what}", **facts) from cause

    # -- giving up

    def _put_aside(self, group: Part, error: ApplyFailed) -> int:
        """What has failed often enough becomes a dead letter, and the position goes over it; else it is raised again."""
        if isinstance(error.__cause__, EventUnknown):  # a newer program knows it, and may be at work beside this one
            raise error
        partition, first = group[0].partition, group[0].id
        failing = self._failing.get(partition)
        if failing is None or failing.first != first:
            failing = _Failing(partition, first, len(group))
        self._failing[partition] = failing = failing.again()
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
        if is_put_aside:  # else another process was faster, with this or with the transaction itself
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
        what = "put aside as a dead letter" if is_put_aside else "given up: its partition stands still in front of it"
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
        """Errors of the database as those of Waltz; the application's function has raised those already."""
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
    """What a function fails on: a transaction, or a group."""

    partition: int
    first: int
    count: int
    tries: int = 0

    def again(self) -> _Failing:
        return replace(self, tries=self.tries + 1)


class _Wait:
    """For one transaction to be in a view, from look to look."""

    def __init__(self, view: str, partition: int, id: int, timeline: UUID | None, timeout: float) -> None:
        """`timeline`: in which it has the id; None: in that of the view."""
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
            return DatabaseUnavailable(f"the database did not say within {self._timeout:g} seconds where the view stands")
        return NotApplied(
            f"after {self._timeout:g} seconds the view {self._view!r} has the position {self._position} for partition "
            f"{self._partition}, and not {self._id} yet",
            partition=self._partition,
            position=self._position,
        )


def place_of(given: Token | Committed | int, partition: int | None) -> tuple[int, int, UUID | None]:
    """The partition and the id that somebody waits for, and the timeline; None for an id without one."""
    if isinstance(given, int) and not isinstance(given, bool) and partition is not None:
        return partition, given, given.timeline if isinstance(given, Position) else None
    if isinstance(given, Committed) and given.partition is None:
        given = replace(given, partition=partition)
    token = token_of(given)  # type: ignore[arg-type]  # it refuses an id without a partition
    if partition not in (None, token.partition):
        raise BadArgument(f"the token {token} is of partition {token.partition}, not of {partition}")
    return token.partition, token.id, token.timeline


def _group_of(part: Part, error: ApplyFailed) -> Part:
    """The transaction on which the function failed, with its group."""
    start = (error.number("id") or 0) - part[0].id
    while start > 0 and part[start].follows:
        start -= 1
    return part[start : end_of_part(part, start, 1)]


def _name(transaction: Transaction[Any]) -> str:
    return f"transaction {transaction.id} of partition {transaction.partition}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
