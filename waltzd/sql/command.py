"""Commands that read a view in a database.

A query blocks, and `Command.build` runs on the event loop. So a command that asks a database gets a connection on a thread
of asyncio, or from an async engine on the loop itself. It reads one snapshot and writes nothing: only `apply` of the view
writes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import Engine

from waltzd.client.view import Builder, Command, E_co
from waltzd.errors import BadArgument

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class SqlCommand(Command[E_co]):
    """A command whose decision reads a database: `decide` gets a connection, and the command has an `engine`.

    With a plain engine, `decide` is a plain function and runs on a thread of asyncio, so it does not block the event loop.
    With an async engine (`AsyncEngine`), it is a coroutine function and gets an `AsyncConnection`. In both cases one
    database transaction is open, and is rolled back when `decide` returns. Any client may submit it.

    Example:
        ```python
        class Withdraw(SqlCommand):
            def __init__(self, engine, account, amount):
                self.engine, self.account, self.amount = engine, account, amount
                self.locks = [write_lock("account", account)]

            def decide(self, builder, connection):
                balance = connection.scalar(sa.select(accounts.c.balance).where(accounts.c.number == self.account))
                if (balance or 0) < self.amount:
                    return builder.decline("not enough money")
                builder.payload = b"%d %d" % (self.account, self.amount)
                return True
        ```
    """

    engine: Engine | AsyncEngine
    """Engine of the database that the view is in, or of a replica of it."""

    @abstractmethod
    def decide(self, builder: Builder[E_co], connection: Any) -> bool | Awaitable[bool]:
        """Read the view through `connection`, and set payload, kind and locks, as `Command.build` does.

        Returns:
            True to send the transaction, False if there is nothing to do; see `Builder.decline`.
        """

    async def build(self, builder: Builder[E_co]) -> bool:
        """Call `decide` with a connection.

        Raises:
            BadArgument: `decide` is a coroutine function, and the engine is not async.
        """
        if not isinstance(self.engine, Engine):
            async with self.engine.connect() as connection:
                found = self.decide(builder, connection)
                return await found if isinstance(found, Awaitable) else found
        if iscoroutinefunction(self.decide):
            raise BadArgument(
                f"`decide` of {type(self).__name__} is a coroutine function, and its engine is not async",
                next_step="give the command an `AsyncEngine`, or make `decide` a plain function",
            )
        return await asyncio.to_thread(self._on_thread, self.engine, builder)

    def _on_thread(self, engine: Engine, builder: Builder[E_co]) -> bool:
        with engine.connect() as connection:
            found = self.decide(builder, connection)
        assert not isinstance(found, Awaitable), "a plain function returns True or False"
        return found
