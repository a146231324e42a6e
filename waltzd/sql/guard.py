"""Checks of what an application gives to a view: its function, and its database engine. The function is a plain one
that reads and writes, and does not end its database transaction.

A function that does not apply anything when it is called is rejected when the view is made, as far as that can be
detected. While the function runs, a guard watches its connection. The driver's connection below that of SQLAlchemy
cannot be guarded.

`sqlite` makes an engine that several processes may share.

With SQLite the driver must not decide when a transaction begins, and its first statement must honour the busy timeout.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from waltzd.errors import ApplyFailed, BadArgument

ONLY_READ_AND_WRITE = "let the function only read and write; raise an error to refuse, use a savepoint to take back a part"


def check_function(function: object) -> None:
    """Raise `BadArgument` for a function that would apply nothing when it is called on a thread."""
    if not callable(function):
        raise BadArgument(f"the function that applies transactions is not callable: {type(function).__name__}")
    bare = _bare(function)
    if inspect.iscoroutinefunction(bare) or inspect.isasyncgenfunction(bare):
        raise BadArgument(
            "the function that applies transactions runs on a thread: give a plain function, not an async one"
        )
    if inspect.isgeneratorfunction(bare):
        raise BadArgument(
            "the function that applies transactions contains `yield`: calling it would apply nothing",
            next_step="execute the statements in the function itself, without `yield`",
        )


def _bare(function: Any) -> Any:
    """Return the function inside a `partial`, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def name_of(function: Any) -> str:
    """Return the name by which a view recognizes its function: module and qualified name, the same in every process.

    The module that was started as a program has the name under which others import it.
    """
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    module = named.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{named.__qualname__}"


def refuse_what_came(result: object) -> None:
    """Raise TypeError if the result has to be awaited or iterated, because nothing was applied yet."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    raise TypeError(f"the function returned a {type(result).__name__} and applied nothing: give a plain function")


_WORDS = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/|;)*(\w+)(?:\s+(\w+))?", re.DOTALL)
_ENDING = {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "XA"}
_ENDING_IN_MYSQL = {"ALTER", "CREATE", "DROP", "LOCK", "RENAME", "TRUNCATE", "UNLOCK"}


class Guard:
    """Guard of a connection: while the application's function runs, it refuses to end the database transaction.
    Savepoints are allowed."""

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
        """Return whether a statement has failed since the last call."""
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
            raise ApplyFailed(self.refused, next_step=ONLY_READ_AND_WRITE)


def prove_alive(connection: Connection, doing: str, **facts: Any) -> None:
    """Raise `ApplyFailed` if the database transaction is dead, because the function went on after a failed statement.
    PostgreSQL would answer the commit with a rollback and report success."""
    try:
        connection.execute(sa.select(sa.literal(1)))
    except DBAPIError as error:
        if is_of_the_database(error):
            raise
        raise ApplyFailed(
            f"a statement failed while {doing}, and the function went on: "
            "a savepoint around such a statement keeps the rest",
            **facts,
        ) from error


def is_of_the_database(error: Exception) -> bool:
    """Return whether the database failed, and not the application."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def sqlite(path: str, *, busy_seconds: int = 30) -> Engine:
    """Return an engine for a SQLite file that several processes may share: readers see a snapshot and never wait for
    writers.

    A power failure may undo the last commits (`synchronous = NORMAL`), but always position and rows together: their
    transactions are still in the log, and are fed again.

    Args:
        path: The file; it is created if it is missing.
        busy_seconds: Seconds that a writer waits for another one.

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
    """Switch a file to the write-ahead log, once in its life. It is the only statement of SQLite that ignores the busy
    timeout."""
    deadline = time.monotonic() + seconds
    while connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except connection.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def checked_engine(engine: object) -> Engine:
    """Return `engine` if it is an engine of SQLAlchemy; raise `BadArgument` otherwise."""
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, str | sa.URL):
        raise BadArgument(
            "`engine` is a URL, and an engine is needed",
            next_step='make one: `waltzd.sql.sqlite("view.db")`, or `sqlalchemy.create_engine(URL)`',
        )
    if isinstance(getattr(engine, "sync_engine", None), Engine):
        raise BadArgument(
            "`engine` is an async engine; a view works on threads of its own and needs a plain one",
            next_step="make a second engine for the view: `sqlalchemy.create_engine(URL)`, with a driver that is not async "
            "(postgresql+psycopg, sqlite); the application may keep its own",
        )
    raise BadArgument(
        f"`engine` is of type {type(engine).__name__}, and an engine of SQLAlchemy is needed",
        next_step='make one: `waltzd.sql.sqlite("view.db")`, or `sqlalchemy.create_engine(URL)`',
    )
