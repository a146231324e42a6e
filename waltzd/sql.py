"""Views in a SQL database: each transaction of the log is applied exactly once, together with the mark that remembers it.

A table holds one mark for each partition: the last transaction that the view contains. Raising the mark from n - 1 to n is
the first statement of the database transaction that applies n, and it succeeds for one process only. So a crash at any
moment, a commit whose answer was lost, and several processes on one database all come to the same: a process that finds
the mark already raised skips what it covers. The order matters: the row of the mark is the lock that makes the others
wait. A group is applied in one database transaction, so nobody sees a part of it. Needs the extra `waltzd[sql]`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from waltzd.client.view import Decision, end_of_part
from waltzd.errors import ApplyFailed, BadArgument, DatabaseUnavailable, NotTransactional, ViewBehind
from waltzd.protocol.quorum import EMPTY

R = TypeVar("R")
BATCH_MAX = 500
LOCK_SECONDS = 10
STALLS_MAX = 3
"""How often in a row raising a mark may fail although the mark is where it should be."""
_ONLY_READ_AND_WRITE = "let the function only read and write; raise an error to refuse, use a savepoint to take back a part"


class Numbered(Protocol):
    """What a `SqlView` needs of a transaction; `waltzd.Transaction` has it."""

    @property
    def partition(self) -> int:
        """The partition that holds it."""
        ...

    @property
    def id(self) -> int:
        """Its place there."""
        ...

    @property
    def follows(self) -> bool:
        """Whether it goes on with the group of the one before it."""
        ...


T = TypeVar("T", bound=Numbered)


def sqlite(path: str, *, busy_seconds: int = 30) -> Engine:
    """An engine for a SQLite file that several processes may share: readers see a snapshot and never wait for writers.

    A power failure may take the last commits back (`synchronous = NORMAL`), but always mark and rows together: the log
    still has them, and feeds them again.

    Args:
        path: The file; it is created when it is missing.
        busy_seconds: How long a writer waits for another one.

    Returns:
        An engine of SQLAlchemy, for `SqlView` and for the application.
    """
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": busy_seconds})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # else the driver decides when a transaction begins
        _use_wal(connection, busy_seconds)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _use_wal(connection: Any, seconds: int) -> None:
    """Once in the life of a file. The only statement of SQLite for which its own busy timeout does not count."""
    deadline = time.monotonic() + seconds
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except connection.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class SqlView(Generic[T]):
    """A view in a SQL database: the `handler` of a client. Each transaction is applied exactly once, with its mark.

    Example:
        ```python
        def apply(connection, transaction):
            connection.execute(sa.insert(events).values(body=transaction.payload.decode()))

        view = SqlView(sqlite("view.db"), apply, tables=metadata)
        async with Client(servers, handler=view) as client:
            ...
        await view.close()
        ```
    """

    def __init__(
        self,
        engine: Engine,
        apply: Callable[[Connection, T], None],
        *,
        table: str = "waltz_marks",
        tables: sa.MetaData | None = None,
        batch_max: int = BATCH_MAX,
        lock_seconds: int = LOCK_SECONDS,
        threads: int | None = None,
    ) -> None:
        """Nothing is read or written before a client asks for a mark, or `prepare` is called.

        Args:
            engine: The database: `sqlite(path)`, or an engine of SQLAlchemy for PostgreSQL or MySQL.
            apply: `apply(connection, transaction)` writes what the transaction means, through this connection and nothing
                else: it is called again when the database took the first try back. It must not end the database
                transaction; savepoints are allowed. It is a plain function and runs on a thread of this view, for one
                transaction of a partition at a time, in the order of their ids.
            table: The name of the table of marks.
            tables: The application's own tables, made when they are missing.
            batch_max: How many transactions of the log go into one of the database.
            lock_seconds: How long to wait on PostgreSQL for another process that applies the same partition. Other
                databases wait as long as the engine says.
            threads: How many partitions are applied at once: one for SQLite, which has one writer, else four.

        Raises:
            BadArgument: `apply` is a coroutine function, or a number is below 1.
        """
        if inspect.iscoroutinefunction(apply):
            raise BadArgument(
                "the function that applies transactions runs on a thread: give a plain function, not an async one"
            )
        for name, value in (("batch_max", batch_max), ("lock_seconds", lock_seconds), ("threads", threads)):
            if value is not None and value < 1:
                raise BadArgument(f"{name} must be at least 1, not {value}")
        self._engine = engine
        self._apply = apply
        self._batch_max = batch_max
        self._lock_seconds = lock_seconds
        self._tables = tables
        self._marks = sa.Table(
            table,
            sa.MetaData(),
            sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("mark", sa.BigInteger, nullable=False),
        )
        self._is_prepared = False
        self._preparing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(threads or (1 if engine.dialect.name == "sqlite" else 4), "waltz-sql")

    # -- as a client calls it

    async def mark(self, partition: int) -> int:
        """As `read_mark`, with `prepare` the first time."""
        async with self._preparing:
            if not self._is_prepared:
                await self._on_thread(self.prepare)
        return await self._on_thread(self.read_mark, partition)

    async def apply(self, transaction: T) -> None:
        """As `apply_all`, for one transaction."""
        await self._on_thread(self.apply_all, [transaction])

    async def apply_batch(self, transactions: Sequence[T]) -> None:
        """As `apply_all`."""
        await self._on_thread(self.apply_all, transactions)

    def failed(self, transaction: T, error: Exception) -> Decision:
        """`RETRY`, because the database and the program can be mended and the log cannot be changed; `PARK` when the
        database went back (`ViewBehind`). Override it to give up sooner."""
        return Decision.PARK if isinstance(error, ViewBehind) else Decision.RETRY

    async def close(self) -> None:
        """Wait for what is under way, and end the threads. The engine stays open: it is the application's."""
        await asyncio.to_thread(self._threads.shutdown)

    async def _on_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments))

    # -- the same for plain code; each call blocks

    def prepare(self) -> None:
        """Make the tables that are missing, and prove that the database can roll back.

        Raises:
            NotTransactional: The engine commits every statement, or the table cannot roll back.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        with self._translated("prepare the view"):
            for metadata in (self._tables, self._marks.metadata):
                if metadata is not None:
                    self._create(metadata)
            self._prove_transactions()
        self._is_prepared = True

    def read_mark(self, partition: int) -> int:
        """The id of the last transaction that the view contains, -1 for none.

        Raises:
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        with self._translated(f"read the mark of partition {partition}", partition=partition):
            mark = self._stored_mark(partition)
            if mark is None:
                self._insert_mark(partition)
                mark = self._stored_mark(partition)
        if mark is None:
            raise DatabaseUnavailable(f"the mark of partition {partition} went away while it was being written")
        return mark

    def apply_all(self, transactions: Sequence[T]) -> None:
        """Apply transactions of one partition, with consecutive ids. What the view contains already is skipped.

        A group is applied in one database transaction. When a transaction fails, all before it are applied, and of its
        group nothing.

        Raises:
            ApplyFailed: The application's function raised, tried to end the database transaction, or a constraint failed.
            ViewBehind: The mark is below what was applied before: the database went back.
            DatabaseUnavailable: The database does not answer, or refuses.
        """
        at, stalls = 0, 0
        while at < len(transactions):
            part = transactions[at : end_of_part(transactions, at, self._batch_max)]
            reached = self._apply_or_find_the_bad_one(part)
            stalls = stalls + 1 if reached < part[0].id else 0
            if stalls == STALLS_MAX:
                raise DatabaseUnavailable(
                    f"the mark of partition {part[0].partition} is {reached} and cannot be raised from there",
                    partition=part[0].partition,
                )
            at += max(0, reached - part[0].id + 1)

    # -- applying

    def _apply_or_find_the_bad_one(self, part: Sequence[T]) -> int:
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

    def _apply_part(self, part: Sequence[T]) -> int:
        """Apply all in one database transaction, or none because the mark is elsewhere; returns the mark."""
        partition, first, last = part[0].partition, part[0].id, part[-1].id
        assert last - first + 1 == len(part)
        what = f"apply {_name(part[0])}"
        with self._translated(what, partition=partition, id=first), self._engine.connect() as connection:
            transaction = connection.begin()
            # The first statement writes: SQLite then takes the write lock at once, and honours its busy timeout.
            self._limit_waiting(connection)
            if self._raise_mark(connection, partition, first - 1, last):
                self._call_application(connection, part)
                transaction.commit()  # raises when the application has ended it all the same
                return last
            transaction.rollback()
        return self._explain_mark(partition, first)

    def _explain_mark(self, partition: int, first: int) -> int:
        found = self.read_mark(partition)
        if found < first - 1:
            raise ViewBehind(
                f"the database has the mark {found} for partition {partition}; this client had applied {first - 1} there",
                partition=partition,
                mark=found,
            )
        return found

    def _call_application(self, connection: Connection, part: Sequence[T]) -> None:
        guard = _Guard(connection)
        for transaction in part:
            with guard:
                self._call_once(connection, transaction, guard)
            if guard.took_a_failure():
                self._prove_alive(connection, transaction)

    def _call_once(self, connection: Connection, transaction: T, guard: _Guard) -> None:
        facts: dict[str, Any] = {"partition": transaction.partition, "id": transaction.id}
        cause: Exception | None = None
        try:
            self._apply(connection, transaction)
        except Exception as error:
            if not guard.refused and _is_of_the_database(error):
                raise
            cause = error
        if guard.refused:  # also when the application swallowed what it was told
            what = f"{guard.refused} while applying {_name(transaction)}"
            raise ApplyFailed(what, next_step=_ONLY_READ_AND_WRITE, **facts) from cause
        if cause is not None:
            what = f"{type(cause).__name__}: {_first_line(cause)}"
            raise ApplyFailed(f"applying {_name(transaction)} failed: {what}", **facts) from cause

    def _prove_alive(self, connection: Connection, transaction: T) -> None:
        """The function went on after a statement that failed: PostgreSQL would answer the commit with a rollback and call
        it a success."""
        try:
            connection.execute(sa.select(sa.literal(1)))
        except DBAPIError as error:
            if _is_of_the_database(error):
                raise
            raise ApplyFailed(
                f"a statement failed while applying {_name(transaction)}, and the function went on: "
                "a savepoint around such a statement keeps the rest",
                partition=transaction.partition,
                id=transaction.id,
            ) from error

    # -- the table of marks

    def _limit_waiting(self, connection: Connection) -> None:
        if self._engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{self._lock_seconds}s'")

    def _raise_mark(self, connection: Connection, partition: int, expected: int, mark: int) -> bool:
        columns = self._marks.c
        statement = (
            sa.update(self._marks).where(columns.partition_id == partition, columns.mark == expected).values(mark=mark)
        )
        return connection.execute(statement).rowcount == 1

    def _stored_mark(self, partition: int) -> int | None:
        with self._engine.connect() as connection:
            found = connection.scalar(sa.select(self._marks.c.mark).where(self._marks.c.partition_id == partition))
        return None if found is None else int(found)

    def _insert_mark(self, partition: int) -> None:
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(self._marks).values(partition_id=partition, mark=EMPTY))
        except IntegrityError:
            return  # another process was faster

    def _create(self, metadata: sa.MetaData) -> None:
        if self._engine.dialect.name != "sqlite":
            self._create_together(metadata.sorted_tables, functools.partial(metadata.create_all, self._engine))
            return
        # Not `create_all`: it reads before it writes, and SQLite does not let two who have read wait for each other.
        for table in metadata.sorted_tables:
            if self._are_missing([table]):
                self._create_together([table], functools.partial(table.create, self._engine, checkfirst=False))

    def _create_together(self, tables: Sequence[sa.Table], create: Callable[[], None]) -> None:
        try:
            create()
        except DBAPIError:
            if self._are_missing(tables):
                raise
            # another process made them at the same time

    def _are_missing(self, tables: Sequence[sa.Table]) -> bool:
        inspector = sa.inspect(self._engine)
        return not all(inspector.has_table(table.name, schema=table.schema) for table in tables)

    def _prove_transactions(self) -> None:
        probe = -2 - secrets.randbelow(1 << 30)
        row = sa.select(self._marks.c.mark).where(self._marks.c.partition_id == probe)
        with self._engine.connect() as connection:
            connection.execute(sa.insert(self._marks).values(partition_id=probe, mark=EMPTY))
            connection.rollback()
        with self._engine.connect() as connection:
            if connection.execute(row).first() is None:
                return
        with self._engine.begin() as connection:
            connection.execute(sa.delete(self._marks).where(self._marks.c.partition_id == probe))
        raise NotTransactional(
            f"a row of {self._marks.name} that was rolled back is still there: this {self._engine.dialect.name} engine "
            "commits every statement, or the table knows no transactions"
        )

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


def _is_of_the_database(error: Exception) -> bool:
    """The database could not, rather than the application was wrong."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _name(transaction: Numbered) -> str:
    return f"transaction {transaction.id} of partition {transaction.partition}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_WORDS = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/|;)*(\w+)(?:\s+(\w+))?", re.DOTALL)
_ENDING = {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "XA"}
_ENDING_IN_MYSQL = {"ALTER", "CREATE", "DROP", "LOCK", "RENAME", "TRUNCATE", "UNLOCK"}


class _Guard:
    """While the application's function runs, its connection refuses to end our database transaction. Savepoints are
    allowed. The connection of the driver below SQLAlchemy's is out of reach here."""

    def __init__(self, connection: Connection) -> None:
        self.refused = ""
        self._is_on = False
        self._begun = self._done = 0
        self._implicit = _ENDING_IN_MYSQL if connection.dialect.name in ("mysql", "mariadb") else set()
        event.listen(connection, "commit", lambda _: self._refuse("commit"))
        event.listen(connection, "rollback", lambda _: self._refuse("roll back or close"))
        event.listen(connection, "before_cursor_execute", self._look_at)
        event.listen(connection, "after_cursor_execute", self._count)

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def took_a_failure(self) -> bool:
        """Whether a statement failed since this was asked last."""
        has_failed, self._begun, self._done = self._begun != self._done, 0, 0
        return has_failed

    def _count(self, *_: object) -> None:
        self._done += 1

    def _look_at(self, _connection: Connection, _cursor: Any, statement: str, *_: object) -> None:
        self._begun += 1
        found = _WORDS.match(statement)
        if not self._is_on or found is None:
            return
        first, second = found[1].upper(), (found[2] or "").upper()
        is_savepoint = first == "ROLLBACK" and second in ("TO", "WORK") and "SAVEPOINT" in statement.upper()
        if (first in _ENDING or first in self._implicit or (first, second) == ("SET", "TRANSACTION")) and not is_savepoint:
            self._refuse(f"execute {first}")

    def _refuse(self, what: str) -> None:
        if self._is_on:
            self.refused = self.refused or f"the application's function tried to {what}"
            raise ApplyFailed(self.refused, next_step=_ONLY_READ_AND_WRITE)
