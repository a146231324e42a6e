"""What the application's function may be and do: a plain function that reads and writes, and ends no database transaction.

A function that does something else when it is called than to apply is refused where the view is made, as far as that can
be seen there. While it runs, a guard stands at its connection. The connection of the driver below SQLAlchemy's is out of
reach here."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from waltzd.errors import ApplyFailed, BadArgument

ONLY_READ_AND_WRITE = "let the function only read and write; raise an error to refuse, use a savepoint to take back a part"


def check_function(function: object) -> None:
    """Raises BadArgument for what does nothing, or not yet, when it is called on a thread."""
    if not callable(function):
        raise BadArgument(f"what applies transactions is a function, not {type(function).__name__}")
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
    """Without `partial`; of an object that can be called, what is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def name_of(function: Any) -> str:
    """By which a view knows its function again: module and qualified name, the same in each process that has it.

    The module that was started as a program goes by the name under which others import it."""
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
    """A result that would still have to be awaited or iterated: nothing was applied yet."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isasyncgen(result)):
        return
    raise TypeError(f"the function returned a {type(result).__name__} and applied nothing: give a plain function")


_WORDS = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/|;)*(\w+)(?:\s+(\w+))?", re.DOTALL)
_ENDING = {"BEGIN", "START", "COMMIT", "END", "ROLLBACK", "ABORT", "XA"}
_ENDING_IN_MYSQL = {"ALTER", "CREATE", "DROP", "LOCK", "RENAME", "TRUNCATE", "UNLOCK"}


class Guard:
    """While the application's function runs, its connection refuses to end the view's database transaction. Savepoints are
    allowed."""

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
            raise ApplyFailed(self.refused, next_step=ONLY_READ_AND_WRITE)


def prove_alive(connection: Connection, doing: str, **facts: Any) -> None:
    """For a function that went on after a statement that failed: PostgreSQL would answer the commit with a rollback and
    call it a success."""
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
    """The database could not, rather than the application was wrong."""
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated
