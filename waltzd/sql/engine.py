"""SQLite engines that several processes may share, and validation of the engine that an application gives.

With SQLite the driver must not decide when a transaction begins, and its first statement must honour the busy timeout.
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

from waltzd.errors import BadArgument


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
