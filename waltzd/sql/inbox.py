"""What the members of a consumer group have done in a SQL database, so that nothing is done there twice.

A delivery is done in one database transaction, and the first statement of that writes down its partition and id. So what is
done is written there, what is written there is done, and a transaction that comes again meets its id: after a crash, a lost
acknowledgement, a time that was over, or a change of owner.

There is one row for each delivery that was done. `prune` removes rows up to the floor of the group, except those of parked
transactions, and writes down the ranges of ids that it removed. An id in such a range is never done: the inbox refuses it
(`InboxPruned`), because nothing says any more whether it was done. So a floor that was read too early, a list of parked ids
that was too short, or a reset into the pruned past is an error with a name; it never does a transaction twice, and never
leaves one out silently.

An id is an id of one timeline of the log (`waltzd.protocol.timelines`), so a row says which. An id that was done in another
timeline, above where an operator ended the log, is not taken for done: the inbox refuses (`OtherTimeline`), because what
was done there belongs to a transaction that is gone. `forget` mends it.

A transaction inserts its row first and looks at the pruned ranges then. Rows leave only together with the range that
replaces them, and an insert waits for whoever deletes the same row, so it meets one of the two. For that, what is read has
to be as new as what was written; so an engine of PostgreSQL whose transactions read an older snapshot (REPEATABLE READ) is
refused."""

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
from waltzd.sql.engine import checked_engine
from waltzd.sql.guard import (
    ONLY_READ_AND_WRITE,
    Guard,
    check_function,
    is_of_the_database,
    prove_alive,
    refuse_what_came,
)
from waltzd.sql.positions import NAME_MAX, add_columns, claim, create, key_columns, limit_waiting, prove_transactions

R = TypeVar("R")
OLD_PAGE = 8192
"""Ids in one bitmap of the table `waltz_inbox_pages`, which earlier versions wrote."""
LOCK_SECONDS = 10
PATIENCE_SECONDS = 60.0
PAUSE_MIN, PAUSE_MAX = 0.1, 5.0
"""Seconds before a database is asked again."""
THREADS = 8
FORGET = (1 << 63) - 1
NEW_ENOUGH = ("READ COMMITTED", "SERIALIZABLE")
_log = logging.getLogger("waltz.sql")


class Delivered(Protocol):
    """What an inbox looks at of a delivery."""

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
        """The timelines of the log; None: it never forked."""
        ...


class Acknowledged(Delivered, Protocol):
    async def ack(self) -> None: ...


D = TypeVar("D", bound=Delivered)


class SqlInbox:
    """What the members of one consumer group have done in a SQL database: each transaction is done there exactly once,
    however often it is delivered. All members of the group have to use the same database; they share the inbox.

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
        """Nothing is read or written before the first delivery.

        Args:
            engine: The database: `sqlite(path)`, or an engine of SQLAlchemy for PostgreSQL or MySQL.
            group: The group whose deliveries are done here.
            name: Of the inbox in the database; the group's, if it is not given. Under a new name nothing was done yet.
            tables: The application's own tables, made when they are missing.
            lock_seconds: How long to wait on PostgreSQL for another member that does the same transaction. Other databases
                wait as long as the engine says.
            patience_seconds: How long a handler waits for a database that does not answer before the delivery has failed.
            threads: How many deliveries are done at once in this process: one for SQLite, which has one writer, else eight.

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
        """As many as there are threads: who holds one finds a thread for each of its steps."""

    # -- for asyncio

    @asynccontextmanager
    async def once(self, delivery: Acknowledged) -> AsyncIterator[Connection | None]:
        """A database transaction in which a delivery is done; it is acknowledged behind the commit.

        The block is given the connection, or None for what was done before: there is nothing to do then. When the block
        raises, the database transaction is rolled back, and nothing is said of the delivery: that is for who has it.

        The block runs where it is written. Its statements hold up the loop as long as they take; `handler` runs a function
        on a thread.

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
            InboxPruned: Whether this id was done is not known any more.
            OtherInbox: The inbox is another group's.
            OtherTimeline: This id was done for a transaction that is not in the log any more.
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
            _log.info("inbox %s: %s; it is done, and not again when it comes again", self.name, error.message)

    async def _begun(self, work: _Work) -> Connection | None:
        beginning = self._threads.submit(work.begin)
        try:
            return await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            if not beginning.cancel():  # it runs: nobody waits for what it has begun
                beginning.add_done_callback(lambda _: work.give_back())
            raise

    def handler(self, function: Callable[[Connection, D], object]) -> Callable[[D], Awaitable[None]]:
        """A handler for `client.handle`: it does each delivery by a function, once.

        Args:
            function: `function(connection, delivery)` does what the transaction means, through this connection and nothing
                else: it is called again when the database took the first try back. It is a plain function and runs on a
                thread of the inbox. What it raises takes back what it did, and counts as a failure of the delivery;
                `Reject` puts the transaction aside. A database that is away is no failure for `patience_seconds`.

        Raises:
            BadArgument: It is a coroutine or generator function, or none at all.
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
                        _log.warning("inbox %s: %s; it is tried again", self.name, error.message)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, PAUSE_MAX)

        return handle

    async def close(self) -> None:
        """Wait for what is under way, and end the threads. The engine stays open: it is the application's."""
        await asyncio.to_thread(self.close_blocking)

    async def _on_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.wrap_future(self._threads.submit(function, *arguments))

    # -- for plain code; each call blocks

    @contextmanager
    def once_blocking(self, delivery: Delivered) -> Iterator[Connection | None]:
        """As `once`, for plain code: the delivery is acknowledged by who has it, behind this block."""
        work = _Work(self, delivery)
        connection = work.begin()
        try:
            yield connection
        except BaseException:
            work.give_back()
            raise
        work.finish()

    def handler_blocking(self, function: Callable[[Connection, D], object]) -> Callable[[D], None]:
        """As `handler`, for `BlockingClient.handle`."""
        check_function(function)
        return functools.partial(self._do, function)

    def _do(self, function: Callable[[Connection, D], object], delivery: D) -> None:
        with self.once_blocking(delivery) as connection:
            if connection is not None:
                with _translated("do what was delivered", partition=delivery.partition, id=delivery.id):
                    refuse_what_came(function(connection, delivery))

    def is_done(self, partition: int, id: int) -> bool:
        """Whether a transaction was done here.

        Raises:
            DatabaseUnavailable: The database does not answer, or refuses.
            InboxPruned: That is not known any more.
        """
        with _translated("read the inbox"), self._engine.connect() as connection:
            return self._done.has(connection, partition, id)

    def forget(self, partition: int, first: int, last: int = FORGET, *, timeline: UUID | None = None) -> None:
        """These ids count as not done, and are done again when they are delivered again: before a group is reset to do its
        work once more, and after a rescue or a restore those above the fork.

        Args:
            partition: Which partition.
            first: The first of these ids.
            last: The last one.
            timeline: Only ids that were done in this timeline of the log, as `OtherTimeline` says. Pruned ids stay pruned.

        Raises:
            BadArgument: The ids are no stretch.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        if not 0 <= first <= last:
            raise BadArgument(f"ids {first} to {last} are no stretch of ids")
        with _translated("forget what was done"), self._exclusive() as connection:
            self._done.forget(connection, partition, first, last, timeline)

    def prune(self, partition: int, floor: int, *, parked: Collection[int] = ()) -> int:
        """Remove the rows of ids up to the floor of the group; return how many. These ids are refused from then on.

        Args:
            partition: Which partition.
            floor: Everything up to it is acknowledged or parked, as `waltzctl group describe` shows. Take one that is some
                minutes old: acknowledgements of the last moment can come again after a change of owner.
            parked: Ids that are parked, as `waltzctl group parked list` shows. Their rows stay, so that a replay does each
                of them once.

        Raises:
            DatabaseUnavailable: The database does not answer, refuses, or another process prunes.
        """
        with _translated("prune the inbox"), self._exclusive() as connection:
            return self._done.prune(connection, partition, floor, parked)

    def close_blocking(self) -> None:
        """As `close`."""
        self._threads.shutdown()

    # -- below

    def prepare(self, cluster: UUID) -> None:
        """Make the tables that are missing, prove that the database can roll back, and take the name of the inbox for this
        cluster and group, or see that both have it. It happens by itself with the first delivery."""
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
        if level not in (*NEW_ENOUGH, "READ UNCOMMITTED", "AUTOCOMMIT"):  # the last of them is refused for what it does
            raise BadArgument(
                f"an inbox in PostgreSQL needs one of {', '.join(NEW_ENOUGH)}, and this engine works with {level}",
                next_step='give the engine another one: `sqlalchemy.create_engine(URL, isolation_level="SERIALIZABLE")`',
            )

    @contextmanager
    def _exclusive(self) -> Iterator[Connection]:
        """A database transaction that is the only one to prune. Members that are at work do not wait for it."""
        engine = self._engine
        if engine.dialect.name == "postgresql":  # members may work with it, and it protects only among those that do
            engine = engine.execution_options(isolation_level="SERIALIZABLE")
        with engine.begin() as connection:
            limit_waiting(connection, self._lock_seconds)
            self._done.lock(connection)
            yield connection


class _Work:
    """One delivery that is being done. Its steps may be taken on several threads, one after the other."""

    def __init__(self, inbox: SqlInbox, delivery: Delivered) -> None:
        if delivery.group != inbox.group:
            raise BadArgument(f"a delivery of the group {delivery.group!r} was given to the inbox of {inbox.group!r}")
        self._inbox = inbox
        self._delivery = delivery
        self._what = f"do transaction {delivery.id} of partition {delivery.partition}"
        self._facts: dict[str, Any] = {"partition": delivery.partition, "id": delivery.id}
        self._connection: Connection | None = None
        self._guard: Guard | None = None

    def begin(self) -> Connection | None:
        """None for what was done before."""
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
        if connection is None or guard is None:  # it was done before
            return
        guard.__exit__()
        try:
            if guard.refused:  # also when the application swallowed what it was told
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
        """Take back what was done. Nothing here fails: a connection that is lost has taken it back itself."""
        if self._connection is None:
            return
        if self._guard is not None:
            self._guard.__exit__()
        # Below SQLAlchemy's own: that takes a transaction for ended whose commit was refused, and would give the connection
        # back as it is.
        with suppress(Exception):
            self._connection.connection.rollback()
        self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()


class _Done:
    """The tables, and the ids in them. Nothing here ends a database transaction that it did not begin."""

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
            sa.Column("timeline", sa.String(36), nullable=True),
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
                f"the inbox {self._name!r} in this database is that of the group {claimed['group_name']!r}, not {group!r}"
            )

    # -- one id

    def add(self, connection: Connection, partition: int, id: int, lineage: Lineage) -> bool:
        """Write an id down; return whether it was not there. The insert is first: else a prune could come between the two.

        Raises `InboxPruned` if the id was pruned, `OtherTimeline` if it was done in a timeline whose id is another
        transaction."""
        row = {"inbox_name": self._name, "partition_id": partition, "id": id, "timeline": _named(lineage.current)}
        count = connection.execute(self._insert, row, execution_options={"preserve_rowcount": True}).rowcount
        if count not in (0, 1):  # to guess would skip a transaction, or do one twice
            raise BadArgument(f"the driver {self._engine.driver} does not say how many rows a statement has inserted")
        if count == 0:
            columns = self._rows.c
            here = (*self._at(self._rows, partition), columns.id == id)
            self._check(partition, id, connection.scalar(sa.select(columns.timeline).where(*here)), lineage)
            return False
        self._refuse_pruned(connection, partition, id)
        return True

    def _check(self, partition: int, id: int, timeline: str | None, lineage: Lineage) -> None:
        done = _identity(timeline)
        shared = lineage.shared_to(done)
        lineage.check(
            done, id, what=f"the inbox {self._name!r}", partition=partition,
            next_step="undo what was done for the transactions that are gone, and let the inbox forget them: "
            f"`inbox.forget({partition}, {0 if shared is None else shared + 1}, timeline=UUID({str(done)!r}))`",
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
                f"nothing says whether transaction {id} was done",
                next_step=f"to have it done, call `inbox.forget({partition}, {id}, {id})` and replay it; else discard it",
                partition=partition,
                id=id,
            )

    # -- many; the caller holds the lock

    def lock(self, connection: Connection) -> None:
        """Take the lock. It is the first statement, and writes: SQLite then takes its lock at once."""
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
            connection.execute(sa.delete(self._rows).where(*here, _is(rows.timeline, timeline)))
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
        """Make rows of the bitmaps that earlier versions wrote, for all inboxes, and drop their table.

        A member that still runs an earlier version fails from then on: it would not see rows that it has to see."""
        metadata = sa.MetaData()
        try:
            pages = sa.Table("waltz_inbox_pages", metadata, autoload_with=self._engine)
        except NoSuchTableError:
            return
        try:
            with self._engine.begin() as connection:
                if self._engine.dialect.name == "postgresql":
                    connection.exec_driver_sql("LOCK TABLE waltz_inbox_pages IN ACCESS EXCLUSIVE MODE")
                else:  # a statement that writes: SQLite then takes its lock at once
                    connection.execute(sa.update(pages).values(page=pages.c.page))
                key = [pages.c.inbox_name, pages.c.partition_id, pages.c.page]
                for place in connection.execute(sa.select(*key)).all():
                    here = [column == value for column, value in zip(key, place, strict=True)]
                    page = connection.execute(sa.select(pages).where(*here)).mappings().one()
                    bits = page["bits"] or b"\xff" * (OLD_PAGE // 8)  # empty: all of its ids are done
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

    # -- places

    def _at(self, table: sa.Table, partition: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        return table.c.inbox_name == self._name, table.c.partition_id == partition


def _ranges_between(ids: Sequence[int], floor: int) -> list[tuple[int, int]]:
    """Ranges of all other ids from 0 to `floor`."""
    edges = [-1, *ids, floor + 1]
    return [(before + 1, after - 1) for before, after in pairwise(edges) if before + 1 < after]


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of the same ids that neither overlap nor touch, in order."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _named(timeline: UUID) -> str | None:
    return None if timeline == FIRST else str(timeline)


def _identity(named: str | None) -> UUID:
    return FIRST if named is None else UUID(named)


def _is(column: sa.Column[Any], timeline: UUID) -> sa.ColumnElement[bool]:
    return column.is_(None) if timeline == FIRST else column == str(timeline)


def _insert_new(engine: Engine, table: sa.Table) -> sa.Insert:
    """What writes a row that is not there, and changes nothing when it is. It waits for another that writes the same."""
    if engine.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if engine.dialect.name == "sqlite":
        return sqlite_dialect.insert(table).on_conflict_do_nothing()
    return sa.insert(table).prefix_with("IGNORE", dialect="mysql").prefix_with("IGNORE", dialect="mariadb")


def _foreign(name: str, had: str, cluster: UUID) -> ForeignCluster:
    return ForeignCluster(
        f"the inbox {name!r} in this database is filled from cluster {had}, and the client is one of {cluster}",
        not_done="nothing was done",
        next_step="give the client servers of that cluster, or this inbox another name and tables of its own",
    )


@contextmanager
def _translated(what: str, **facts: Any) -> Iterator[None]:
    """What the database could not, as an error of Waltz; what the application did wrong stays as it is."""
    try:
        yield
    except SQLAlchemyError as error:
        if not is_of_the_database(error):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatabaseUnavailable(f"could not {what}: {first}", **facts) from error
