"""Methods of a client that wait for outcomes, for the view, and for a partition to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy

from waltzd.client.partition import PartitionClient
from waltzd.client.routes import some
from waltzd.client.settings import ClientSettings
from waltzd.client.submits import Submits
from waltzd.errors import CannotConnect, ClientClosed
from waltzd.protocol.locks import Committed, Token, token_of
from waltzd.protocol.positions import Position


class WaitMethods:
    """Methods that wait; `Client` inherits them."""

    settings: ClientSettings
    _clients: dict[int, PartitionClient]
    _active: tuple[int, ...]
    _submits: Submits
    _closed: ClientClosed | None
    _stops: dict[asyncio.Future[None], None]
    """Futures of callers that wait for a partition to stop."""
    _check_open: Callable[[], None]
    _check_loop: Callable[[], None]
    _active_client: Callable[[int], PartitionClient]

    @property
    def has_pending(self) -> bool:
        """True while something that was submitted has no outcome."""
        return bool(self._submits.under_way) or any(self._clients[partition].outbox.rows for partition in self._active)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was submitted before this call has an outcome.

        Args:
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            CannotConnect: Something is still undecided at the timeout. It goes on, and its own caller gets the outcome.
        """
        self._check_loop()
        if not self.has_pending:
            return
        limit = self.settings.submit_seconds if timeout is None else timeout
        waits = [self._clients[partition].drained() for partition in self._active]
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*waits, *[asyncio.shield(done) for done in self._submits.under_way])
        except TimeoutError:
            undecided = [partition for partition in self._active if self._clients[partition].outbox.rows]
            raise CannotConnect(
                f"after {limit:g} seconds, transactions of partitions {some(undecided)} are undecided"
            ) from None

    async def wait_caught_up(self, partition: int | None = None, *, timeout: float | None = None) -> None:
        """Wait until the view has applied everything that any client had committed when this was called.

        Args:
            partition: Partition to wait for; all partitions of this client if it is not given.
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            NotApplied: The timeout passed before the view was there. The message says whether the view fails.
            CannotConnect: The owner did not report in time what is committed.
            BadArgument: This client has no view.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            ViewStopped, ClientAhead, Superseded: A partition was stopped; see `status`.
        """
        self._check_loop()
        self._check_open()
        clients = [self._active_client(each) for each in (self._active if partition is None else (partition,))]
        seconds = self.settings.submit_seconds if timeout is None else timeout
        waits = [asyncio.create_task(client.wait_caught_up(seconds)) for client in clients]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def wait_applied(self, token: Token | Committed, *, timeout: float | None = None) -> None:
        """Wait until this client's view has applied a transaction of any client: then a read of the view shows it.

        Args:
            token: Token of the transaction (`outcome.token`, `Token.parse`), or the outcome itself.
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            NotApplied: The timeout passed. The transaction is committed, and the view will apply it.
            BeyondLog: The log has no such transaction: the token is of another cluster, or made up.
            OtherTimeline: An operator ended the log below the transaction: it is not in the log any more.
            CannotConnect: The owner did not report in time whether there is such a transaction.
            BadArgument: `token` is no token, there is no such partition, or this client has no view.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            ViewStopped, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        self._check_loop()
        token = token_of(token)
        seconds = self.settings.submit_seconds if timeout is None else timeout
        await self._active_client(token.partition).wait_applied(Position(token.id, token.timeline), seconds)

    async def wait_stopped(self, *, timeout: float | None = None) -> None:
        """Wait until an error stops a partition, and raise the error. Return when the client is closed.

        A service that must not run without its view waits for this beside its work.

        Args:
            timeout: Seconds after which to return; none if it is not given.

        Raises:
            ViewStopped, ClientAhead, Superseded, WaltzError: The error that stopped a partition, also before this call.
            ClientClosed: The client is not open.

        Example:
            ```python
            async with asyncio.TaskGroup() as group:
                group.create_task(client.wait_stopped())
                group.create_task(serve())
            ```
        """
        self._check_loop()
        self._check_open()
        try:
            async with asyncio.timeout(timeout):
                while self._closed is None:
                    for partition in self._active:
                        if (stopped := self._clients[partition].stopped) is not None:
                            raise copy(stopped)
                    bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._stops[bell] = None
                    try:
                        await bell
                    finally:
                        self._stops.pop(bell, None)
        except TimeoutError:
            return

    def _tell_stops(self) -> None:
        bells, self._stops = self._stops, {}
        for bell in bells:
            if not bell.done():
                bell.set_result(None)
