"""Inbox of a consumer group: the deliveries that were handled in a SQL database, so that none is handled twice there.

A delivery is handled in one database transaction, whose first statement inserts its partition and id. So exactly the
handled deliveries have a row, and one that is delivered again finds its id: after a crash, a lost acknowledgement, a
timeout or a change of owner.

`prune` deletes rows up to the floor of the group, except those of parked transactions, and stores the ranges of ids
that it deleted. An id in such a range is never handled: the inbox raises `InboxPruned`, because it cannot tell whether
it was handled. So a floor read too early, an incomplete list of parked ids or a reset into the pruned range is an
error. It never handles a transaction twice and never skips one silently.

An id belongs to one timeline of the log (`waltzd.protocol.timelines`), which its row names. If an id was handled in
another timeline above the fork, the inbox raises `OtherTimeline`, because it was handled for a transaction that is
gone. `forget` clears such rows.

A transaction inserts its row first and then reads the pruned ranges. Rows are deleted only together with an insert of
their range, and an insert waits for the deletion of its row, so it finds one of the two. That requires reads as new as
writes: PostgreSQL engines that read an older snapshot (REPEATABLE READ) are rejected.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from typing import Any, Protocol, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, NoSuchTableError, SQLAlchemyError

from waltzd.errors import ApplyFailed, BadArgument, DatabaseUnavailable, ForeignCluster, InboxPruned, OtherInbox, WaltzError
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.sql.guard import (
    ONLY_READ_AND_WRITE,
    Guard,
    check_function,
    checked_engine,
    is_of_the_database,
    prove_alive,
    refuse_what_came,
)
from waltzd.sql.positions import NAME_MAX, add_columns, claim, create, key_columns, limit_waiting, prove_transactions

R = TypeVar("R")
OLD_PAGE = 8192
"""Ids in one bitmap of the table `waltz_inbox_pages` of earlier versions."""
LOCK_SECONDS = 10
PATIENCE_SECONDS = 60.0
PAUSE_MIN, PAUSE_MAX = 0.1, 5.0
"""Shortest and longest pause in seconds before a database is tried again."""
THREADS = 8
FORGET = (1 << 63) - 1
NEW_ENOUGH = ("READ COMMITTED", "SERIALIZABLE")
_log = logging.getLogger("waltz.sql")


class Delivered(Protocol):
    """The part of a delivery that an inbox uses."""

    @property
    def cluster(self) -> UUID: ...
    @property
    def group(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def lineage(self) -> Lineage | None:
        """Return the timelines of the log; None if it never forked."""
        ...


class Acknowledged(Delivered, Protocol):
    async def ack(self) -> None: ...


D = TypeVar("D", bound=Delivered)


class SqlInbox:
    """The deliveries that members of one consumer group have handled in a SQL database: each is handled there exactly
    once, however often it is delivered. All members of the group have to use the same database; they share the inbox.

    Example:
        ```python
        def send(connection, delivery):
            connection.execute(sa.insert(mails).values(body=delivery.payload.decode()))

        inbox = SqlInbox(sqlite("mails.db"), "mailer", tables=metadata)
        await client.handle("mailer", inbox.handler(send))
        await inbox.close()
        ```
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        *,
        name: str | None = None,
        tables: sa.MetaData | None = None,
        lock_seconds: int = LOCK_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        threads: int | None = None,
    ) -> None:
        """Configure an inbox. The first delivery is the first access to the database.

        Args:
            engine: The database: `sqlite(path)`, or an engine of SQLAlchemy for PostgreSQL or MySQL.
            group: The group whose deliveries are done here.
            name: Name of the inbox in the database; by default that of the group. Under a new name nothing was handled yet.
            tables: The application's own tables, created if they are missing.
            lock_seconds: Seconds to wait on PostgreSQL for another member that handles the same transaction. Other
                databases have a setting of the engine for that.
            patience_seconds: Seconds that a handler waits for a database that does not answer before the delivery fails.
            threads: Number of deliveries handled at once in this process. By default one for SQLite, which has one writer,
                else eight.

        Raises:
            BadArgument: `engine` is no engine, a name is empty or too long, or a number is below 1.
        """
        self._engine = checked_engine(engine)
        self.group = group
        self.name = group if name is None else name
        if not 0 < len(self.name) <= NAME_MAX:
            raise BadArgument(f"the name of an inbox has 1 to {NAME_MAX} characters, not {len(self.name)}")
        for number, value in {"lock_seconds": lock_seconds, "threads": threads}.items():
            if value is not None and value < 1:
                raise BadArgument(f"{number} must be at least 1, not {value}")
        self._tables = tables
        self._lock_seconds = lock_seconds
        self._patience = patience_seconds
        self._done = _Done(self._engine, self.name)
        self._cluster: UUID | None = None
        self._preparing = threading.Lock()
        count = threads or (1 if engine.dialect.name == "sqlite" else THREADS)
        self._threads = ThreadPoolExecutor(count, "waltz-inbox")
        self._slots = asyncio.Semaphore(count)
        """Semaphore of as many slots as there are threads: a holder finds a free thread for each step."""

    # -- for asyncio

    @asynccontextmanager
    async def once(self, delivery: Acknowledged) -> AsyncIterator[Connection | None]:
        """Handle a delivery in one database transaction, and acknowledge it after the commit.

        The block gets the connection, or None if the delivery was handled before and nothing is left to do. If the block
        raises, the database transaction is rolled back, and the caller decides about the delivery.

        The block runs on the event loop, and its statements block the loop; `handler` runs a function on a thread.

        Example:
            ```python
            async for delivery in client.subscribe("mailer"):
                async with inbox.once(delivery) as connection:
                    if connection is not None:
                        connection.execute(sa.insert(mails).values(body=delivery.payload.decode()))
            ```

        Raises:
            ApplyFailed: The block tried to end the database transaction, or went on after a statement that failed.
            DatabaseUnavailable: The database does not answer, or refuses.
            ForeignCluster: The inbox is filled from another cluster.
            InboxPruned: The id was pruned, so the inbox cannot tell whether it was handled.
            OtherInbox: The inbox belongs to another group.
            OtherTimeline: The id was handled for a transaction that is no longer in the log.
        """
        async with self._slots:
            work = _Work(self, delivery)
            connection = await self._begun(work)
            try:
                yield connection
            except BaseException:
                await self._on_thread(work.give_back)
                raise
            await self._on_thread(work.finish)
        try:
            await delivery.ack()
        except WaltzError as error:
            _log.info("inbox %s: handled, but not acknowledged: %s; a new delivery is skipped", self.name, error.message)

    async def _begun(self, work: _Work) -> Connection | None:
        beginning = self._threads.submit(work.begin)
        try:
            return await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            if not beginning.cancel():  # it is running, and its result has no receiver any more
                beginning.add_done_callback(lambda _: work.give_back())
            raise

    def handler(self, function: Callable[[Connection, D], object]) -> Callable[[D], Awaitable[None]]:
        """Return a handler for `client.handle` that calls a function once for each delivery.

        Args:
            function: `function(connection, delivery)` writes what the transaction means, through this connection only: it
                is called again if the database rolled the first try back. It is a plain function and runs on a thread of
                the inbox. If it raises, its changes are rolled back and the delivery has failed; `Reject` parks the
                transaction. An unavailable database counts as a failure only after `patience_seconds`.

        Raises:
            BadArgument: `function` is a coroutine function, a generator function, or not callable.
        """
        check_function(function)

        async def handle(delivery: D) -> None:
            loop, pause = asyncio.get_running_loop(), PAUSE_MIN
            deadline = loop.time() + self._patience
            async with self._slots:
                while True:
                    try:
                        return await self._on_thread(self._do, function, delivery)
                    except DatabaseUnavailable as error:
                        if loop.time() + pause > deadline:
                            raise
                        _log.warning("inbox %s: %s; trying again", self.name, error.message)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSE_MAX)

        return handle

    async def close(self) -> None:
        """Wait for running handlers, and end the threads. The engine stays open, because it belongs to the application."""
        await asyncio.to_thread(self.close_blocking)

    async def _on_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.wrap_future(self._threads.submit(function, *arguments))

    # -- for plain code; each call blocks

    @contextmanager
    def once_blocking(self, delivery: Delivered) -> Iterator[Connection | None]:
        """Handle a delivery as `once` does, for blocking code. The caller acknowledges the delivery after the block."""
        work = _Work(self, delivery)
        connection = work.begin()
        try:
            yield connection
        except BaseException:
            work.give_back()
            raise
        work.finish()

    def handler_blocking(self, function: Callable[[Connection, D], object]) -> Callable[[D], None]:
        """Return a handler as `handler` does, for `BlockingClient.handle`."""
        check_function(function)
        return functools.partial(self._do, function)

    def _do(self, function: Callable[[Connection, D], object], delivery: D) -> None:
        with self.once_blocking(delivery) as connection:
            if connection is not None:
                with _translated("do what was delivered", partition=delivery.partition, id=delivery.id):
                    refuse_what_came(function(connection, delivery))

    def is_done(self, partition: int, id: int) -> bool:
        """Return whether a transaction was handled here.

        Raises:
            DatabaseUnavailable: The database does not answer, or refuses.
            InboxPruned: The id was pruned, so the inbox cannot tell whether it was handled.
        """
        with _translated("read the inbox"), self._engine.connect() as connection:
            return self._done.has(connection, partition, id)

    def forget(self, partition: int, *, after: int, through: int = FORGET, timeline: UUID | None = None) -> None:
        """Delete the record that these ids were handled, so that they are handled again when they are delivered. Use it
        before a group is reset to repeat its work, and for the ids above the fork after a rescue or a restore.

        Args:
            partition: Number of the partition.
            after: Id before the first one to forget; -1 for all.
            through: Last id to forget; all above `after` by default.
            timeline: If given, only ids that were handled in this timeline of the log, which `OtherTimeline` names. Pruned
                ids stay pruned then.

        Raises:
            BadArgument: `after` is below -1, or `through` is not above it.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        if not -1 <= after < through:
            raise BadArgument(f"there are no ids after {after} through {through}", not_done="nothing was forgotten")
        with _translated("forget what was done"), self._exclusive() as connection:
            self._done.forget(connection, partition, after + 1, through, timeline)

    def prune(self, partition: int, floor: int, *, parked: Collection[int] = ()) -> int:
        """Delete the rows of ids up to the floor of the group; return how many. These ids are refused from then on.

        Args:
            partition: Number of the partition.
            floor: Id up to which everything is acknowledged or parked, as `waltzctl group describe` shows. Use one that is
                some minutes old, because recent acknowledgements can be lost at a change of owner.
            parked: Parked ids, as `waltzctl group parked list` shows. Their rows stay, so that a replay handles each of
                them once.

        Raises:
            DatabaseUnavailable: The database does not answer, refuses, or another process prunes.
        """
        with _translated("prune the inbox"), self._exclusive() as connection:
            return self._done.prune(connection, partition, floor, parked)

    def close_blocking(self) -> None:
        """Close the inbox as `close` does, for blocking code."""
        self._threads.shutdown()

    # -- below

    def prepare(self, cluster: UUID) -> None:
        """Create the missing tables, prove that the database can roll back, and claim the name of the inbox for a
        cluster and group. Raise if another one has it. The first delivery calls this."""
        with self._preparing:
            if self._cluster is None:
                with _translated("prepare the inbox"):
                    self._refuse_old_snapshots()
                    self._done.prepare(cluster, self.group)
                    if self._tables is not None:
                        create(self._engine, self._tables)
                self._cluster = cluster
        if self._cluster != cluster:
            raise _foreign(self.name, str(self._cluster), cluster)

    def _refuse_old_snapshots(self) -> None:
        if self._engine.dialect.name != "postgresql":
            return
        with self._engine.connect() as connection:
            level = str(connection.get_isolation_level())
        if level not in (*NEW_ENOUGH, "READ UNCOMMITTED", "AUTOCOMMIT"):  # `prove_transactions` rejects AUTOCOMMIT
            raise BadArgument(
                f"an inbox in PostgreSQL needs one of {', '.join(NEW_ENOUGH)}, and this engine works with {level}",
                next_step='give the engine another one: `sqlalchemy.create_engine(URL, isolation_level="SERIALIZABLE")`',
            )

    @contextmanager
    def _exclusive(self) -> Iterator[Connection]:
        """Begin the one database transaction that may prune. Members that handle deliveries do not wait for it."""
        engine = self._engine
        if engine.dialect.name == "postgresql":  # members may use it, and it protects only among transactions that do
            engine = engine.execution_options(isolation_level="SERIALIZABLE")
        with engine.begin() as connection:
            limit_waiting(connection, self._lock_seconds)
            self._done.lock(connection)
            yield connection


class _Work:
    """One delivery in work. Its steps run one at a time, and may run on several threads."""

    def __init__(self, inbox: SqlInbox, delivery: Delivered) -> None:
        if delivery.group != inbox.group:
            raise BadArgument(f"the inbox of group {inbox.group!r} cannot handle a delivery of group {delivery.group!r}")
        self._inbox = inbox
        self._delivery = delivery
        self._what = f"do transaction {delivery.id} of partition {delivery.partition}"
        self._facts: dict[str, Any] = {"partition": delivery.partition, "id": delivery.id}
        self._connection: Connection | None = None
        self._guard: Guard | None = None

    def begin(self) -> Connection | None:
        """Return the connection of a new database transaction; None if the delivery was handled before."""
        inbox, delivery = self._inbox, self._delivery
        inbox.prepare(delivery.cluster)
        with _translated(self._what, **self._facts):
            connection = self._connection = inbox._engine.connect()
            try:
                connection.begin()
                limit_waiting(connection, inbox._lock_seconds)
                lineage = delivery.lineage or NEVER_FORKED
                is_new = inbox._done.add(connection, delivery.partition, delivery.id, lineage)
            except BaseException:
                self.give_back()
                raise
        if not is_new:
            self.give_back()
            return None
        self._guard = Guard(connection)
        self._guard.__enter__()
        return connection

    def finish(self) -> None:
        connection, guard = self._connection, self._guard
        if connection is None or guard is None:  # the delivery was handled before
            return
        guard.__exit__()
        try:
            if guard.refused:  # also if the application swallowed the error
                raise ApplyFailed(f"{guard.refused}, to {self._what}", next_step=ONLY_READ_AND_WRITE, **self._facts)
            with _translated(self._what, **self._facts):
                if guard.took_a_failure():
                    prove_alive(connection, f"trying to {self._what}", **self._facts)
                connection.commit()
        except BaseException:
            self.give_back()
            raise
        self._close()

    def give_back(self) -> None:
        """Roll back. It raises nothing: the database rolls back by itself if the connection is lost."""
        if self._connection is None:
            return
        if self._guard is not None:
            self._guard.__exit__()
        # On the driver's connection: SQLAlchemy takes a transaction whose commit failed for ended, and would return the
        # connection to the pool as it is.
        with suppress(Exception):
            self._connection.connection.rollback()
        self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()


class _Done:
    """The tables of an inbox and the ids in them. Nothing here ends a database transaction that it did not begin."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._metadata = sa.MetaData()
        self._inboxes = sa.Table(
            "waltz_inboxes",
            self._metadata,
            sa.Column("inbox_name", sa.String(NAME_MAX), primary_key=True),
            sa.Column("cluster", sa.String(36), nullable=False),
            sa.Column("group_name", sa.String(NAME_MAX), nullable=False),
        )
        self._rows = sa.Table(
            "waltz_inbox_done",
            self._metadata,
            *key_columns("inbox_name"),
            sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("timeline", sa.String(36), nullable=True),  # NULL for the first one, as earlier versions wrote
        )
        self._pruned = sa.Table(
            "waltz_inbox_pruned",
            self._metadata,
            *key_columns("inbox_name"),
            sa.Column("first_id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("last_id", sa.BigInteger, nullable=False),
        )
        self._insert = _insert_new(engine, self._rows)

    def prepare(self, cluster: UUID, group: str) -> None:
        create(self._engine, self._metadata)
        add_columns(self._engine, self._rows)
        self._unfold_old_pages()
        columns = self._rows.c
        row = {"inbox_name": self._name, "partition_id": -1, "id": secrets.randbelow(1 << 60)}
        this = tuple(columns[name] == value for name, value in row.items())
        prove_transactions(self._engine, self._rows, sa.insert(self._rows).values(row), this)
        claimed = claim(
            self._engine, self._inboxes, {"inbox_name": self._name, "cluster": str(cluster), "group_name": group}
        )
        if claimed["cluster"] != str(cluster):
            raise _foreign(self._name, claimed["cluster"], cluster)
        if claimed["group_name"] != group:
            raise OtherInbox(
                f"the inbox {self._name!r} in this database belongs to group {claimed['group_name']!r}, not {group!r}"
            )

    # -- one id

    def add(self, connection: Connection, partition: int, id: int, lineage: Lineage) -> bool:
        """Insert an id; return False if it is there already. The insert comes first, because a prune could run before
        it otherwise.

        Raise `InboxPruned` if the id was pruned, and `OtherTimeline` if it was handled in a timeline where the id is
        another transaction.
        """
        timeline = None if lineage.current == FIRST else str(lineage.current)
        row = {"inbox_name": self._name, "partition_id": partition, "id": id, "timeline": timeline}
        count = connection.execute(self._insert, row, execution_options={"preserve_rowcount": True}).rowcount
        if count not in (0, 1):  # a guess would skip a transaction or handle it twice
            raise BadArgument(f"the driver {self._engine.driver} does not report how many rows a statement has inserted")
        if count == 0:
            columns = self._rows.c
            here = (*self._at(self._rows, partition), columns.id == id)
            self._check(partition, id, connection.scalar(sa.select(columns.timeline).where(*here)), lineage)
            return False
        self._refuse_pruned(connection, partition, id)
        return True

    def _check(self, partition: int, id: int, timeline: str | None, lineage: Lineage) -> None:
        done = FIRST if timeline is None else UUID(timeline)
        shared = lineage.shared_to(done)
        lineage.check(
            done, id, what=f"the inbox {self._name!r}", partition=partition,
            next_step="undo the work for the transactions that are gone, and let the inbox forget them: "
            f"`inbox.forget({partition}, after={-1 if shared is None else shared}, timeline=UUID({str(done)!r}))`",
        )  # fmt: skip

    def has(self, connection: Connection, partition: int, id: int) -> bool:
        here = (*self._at(self._rows, partition), self._rows.c.id == id)
        if connection.execute(sa.select(self._rows.c.id).where(*here)).first() is not None:
            return True
        self._refuse_pruned(connection, partition, id)
        return False

    def _refuse_pruned(self, connection: Connection, partition: int, id: int) -> None:
        columns = self._pruned.c
        here = (*self._at(self._pruned, partition), columns.first_id <= id, columns.last_id >= id)
        last = connection.scalar(sa.select(columns.last_id).where(*here))
        if last is not None:
            raise InboxPruned(
                f"the inbox {self._name!r} was pruned up to id {last} of partition {partition}: "
                f"the inbox cannot tell whether transaction {id} was handled",
                next_step=f"to handle it, call `inbox.forget({partition}, after={id - 1}, through={id})` and replay it; "
                "else discard it",
                partition=partition,
                id=id,
            )

    # -- many; the caller holds the lock

    def lock(self, connection: Connection) -> None:
        """Take the lock. It is the first statement and writes, so that SQLite takes its own lock at once."""
        ours = self._inboxes.c.inbox_name == self._name
        connection.execute(sa.update(self._inboxes).where(ours).values(inbox_name=self._name))

    def prune(self, connection: Connection, partition: int, floor: int, parked: Collection[int]) -> int:
        new = _ranges_between(sorted({id for id in parked if 0 <= id <= floor}), floor)
        rows = self._rows.c
        count = sum(
            connection.execute(
                sa.delete(self._rows).where(*self._at(self._rows, partition), rows.id.between(first, last))
            ).rowcount
            for first, last in new
        )
        self._replace_ranges(connection, partition, _merged([*self._ranges(connection, partition), *new]))
        return count

    def forget(self, connection: Connection, partition: int, first: int, last: int, timeline: UUID | None) -> None:
        rows = self._rows.c
        here: tuple[sa.ColumnElement[bool], ...] = (*self._at(self._rows, partition), rows.id.between(first, last))
        if timeline is not None:
            is_of_it = rows.timeline.is_(None) if timeline == FIRST else rows.timeline == str(timeline)
            connection.execute(sa.delete(self._rows).where(*here, is_of_it))
            return
        connection.execute(sa.delete(self._rows).where(*here))
        found = self._ranges(connection, partition)
        left = [(low, min(high, first - 1)) for low, high in found] + [(max(low, last + 1), high) for low, high in found]
        self._replace_ranges(connection, partition, _merged([(low, high) for low, high in left if low <= high]))

    def _ranges(self, connection: Connection, partition: int) -> list[tuple[int, int]]:
        columns = self._pruned.c
        found = connection.execute(sa.select(columns.first_id, columns.last_id).where(*self._at(self._pruned, partition)))
        return [(first, last) for first, last in found.all()]

    def _replace_ranges(self, connection: Connection, partition: int, ranges: Sequence[tuple[int, int]]) -> None:
        connection.execute(sa.delete(self._pruned).where(*self._at(self._pruned, partition)))
        place = {"inbox_name": self._name, "partition_id": partition}
        if rows := [{**place, "first_id": first, "last_id": last} for first, last in ranges]:
            connection.execute(sa.insert(self._pruned), rows)

    # -- the table of an earlier version

    def _unfold_old_pages(self) -> None:
        """Convert the bitmaps of earlier versions to rows, for all inboxes, and drop their table.

        Members that run an earlier version fail from then on, because they would not find the rows.
        """
        metadata = sa.MetaData()
        try:
            pages = sa.Table("waltz_inbox_pages", metadata, autoload_with=self._engine)
        except NoSuchTableError:
            return
        try:
            with self._engine.begin() as connection:
                if self._engine.dialect.name == "postgresql":
                    connection.exec_driver_sql("LOCK TABLE waltz_inbox_pages IN ACCESS EXCLUSIVE MODE")
                else:  # a statement that writes, so that SQLite takes its lock at once
                    connection.execute(sa.update(pages).values(page=pages.c.page))
                key = [pages.c.inbox_name, pages.c.partition_id, pages.c.page]
                for place in connection.execute(sa.select(*key)).all():
                    here = [column == value for column, value in zip(key, place, strict=True)]
                    page = connection.execute(sa.select(pages).where(*here)).mappings().one()
                    bits = page["bits"] or b"\xff" * (OLD_PAGE // 8)  # empty: all of its ids were handled
                    rows = [
                        {"inbox_name": place.inbox_name, "partition_id": place.partition_id,
                         "id": place.page * OLD_PAGE + slot, "timeline": page.get("timeline")}
                        for slot in range(8 * len(bits)) if bits[slot >> 3] >> (slot & 7) & 1
                    ]  # fmt: skip
                    if rows:
                        connection.execute(self._insert, rows)
                pages.drop(connection)
        except DBAPIError:
            if sa.inspect(self._engine).has_table("waltz_inbox_pages"):
                raise
            # another process did it at the same time

    def _at(self, table: sa.Table, partition: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        return table.c.inbox_name == self._name, table.c.partition_id == partition


def _ranges_between(ids: Sequence[int], floor: int) -> list[tuple[int, int]]:
    """Return the ranges of all other ids from 0 to `floor`."""
    edges = [-1, *ids, floor + 1]
    return [(before + 1, after - 1) for before, after in pairwise(edges) if before + 1 < after]


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap or touch, in order."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _insert_new(engine: Engine, table: sa.Table) -> sa.Insert:
    """Return an insert that changes nothing if the row exists. It waits for another transaction that inserts the same
    row."""
    if engine.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if engine.dialect.name == "sqlite":
        return sqlite_dialect.insert(table).on_conflict_do_nothing()
    return sa.insert(table).prefix_with("IGNORE", dialect="mysql").prefix_with("IGNORE", dialect="mariadb")


def _foreign(name: str, had: str, cluster: UUID) -> ForeignCluster:
    return ForeignCluster(
        f"the inbox {name!r} in this database belongs to cluster {had}, and the client to {cluster}",
        not_done="the delivery was not handled",
        next_step="give the client servers of that cluster, or this inbox another name and tables of its own",
    )


@contextmanager
def _translated(what: str, **facts: Any) -> Iterator[None]:
    """Raise failures of the database as `DatabaseUnavailable`; errors of the application pass unchanged."""
    try:
        yield
    except SQLAlchemyError as error:
        if not is_of_the_database(error):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatabaseUnavailable(f"could not {what}: {first}", **facts) from error
