"""Handler for the deliveries of a consumer group: a delivery is acknowledged when the handler returns, and tried again
when it raises.

A delivery is extended until its handler has ended. Acknowledgements are sent while the next delivery is processed. A
failure is sent before that, because in an ordered group it decides what comes next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic

from waltzd.client.delivery import Delivery, Reject
from waltzd.client.follower import Call, shielded
from waltzd.client.partition_consumer import PartitionConsumer
from waltzd.client.subscription import Subscription
from waltzd.client.view import E
from waltzd.errors import BadArgument, InboxPruned, OtherTimeline, WaltzError

_log = logging.getLogger("waltz.client")


class Handling(Generic[E]):
    """A handler that processes a consumer group: await it, and end it with `stop`. `Client.handle` makes it.

    Example:
        ```python
        handling = client.handle("mailer", send, concurrency=8)
        loop.add_signal_handler(signal.SIGTERM, handling.stop)
        await handling
        ```
    """

    def __init__(
        self,
        subscription: Subscription[E],
        handler: Callable[[Delivery[E]], Any],
        call: Call,
        *,
        concurrency: int,
        timeout: float | None,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise BadArgument(f"concurrency must be at least 1, not {concurrency!r}")
        if timeout is not None and not timeout > 0:
            raise BadArgument(f"timeout must be a number of seconds above 0, not {timeout!r}")
        self.subscription = subscription
        """Subscription that the deliveries come from."""
        subscription.is_handled = True
        self._handler = handler
        self._call = shielded(call)
        self._concurrency = concurrency
        self._timeout = timeout
        self._acknowledging: dict[asyncio.Task[None], None] = {}
        self._is_stopped = False

    def __await__(self) -> Generator[Any, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Process deliveries until `stop` is called or the client is closed.

        If the caller is cancelled, the running calls of the handler are cancelled; their deliveries go to other members
        at once.

        Raises:
            NoSuchGroup, NotGranted, CannotConnect, BadArgument, ClientClosed: See `Subscription.open`; also while it
                runs.
            OtherTimeline: The inbox of the handler holds transactions that are not in the log any more.
        """
        if self._is_stopped:
            return
        async with self.subscription:
            workers = [asyncio.create_task(self._work(), name="waltz handler") for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
                await asyncio.gather(*list(self._acknowledging))
            finally:
                for worker in [*workers, *self._acknowledging]:
                    worker.cancel()
                await asyncio.gather(*workers, *list(self._acknowledging), return_exceptions=True)

    def stop(self) -> None:
        """Take no more deliveries. Running calls are finished and settled, then `run` returns. Call it on the event
        loop."""
        self._is_stopped = True
        self.subscription.stop_taking()

    async def _work(self) -> None:
        while not self._is_stopped:
            found = await self.subscription.take(1)
            if not found:
                return
            await self._handle(found[0])

    async def _handle(self, one: Delivery[E]) -> None:
        source = one._source
        assert isinstance(source, PartitionConsumer)
        source.in_progress[one] = None
        try:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    await self._call(self._handler, one)
            except (Reject, InboxPruned) as error:
                await self._settle(one.reject(str(error)))
            except OtherTimeline:  # the inbox belongs to another timeline: a retry does not help
                raise
            except Exception as error:  # noqa: BLE001  # the application's code
                if isinstance(error, TimeoutError) and limit.expired():
                    error = TimeoutError(f"the handler took longer than {self._timeout:g} seconds")
                _log.warning("the handler of group %s failed for %r", one.group, one, exc_info=error)
                await self._settle(one.nack(reason=f"{type(error).__name__}: {error}"))
            else:
                task = asyncio.create_task(self._settle(one.ack()))
                self._acknowledging[task] = None
                task.add_done_callback(lambda _: self._acknowledging.pop(task))
        finally:
            self.subscription.finished(one)

    async def _settle(self, ack: Awaitable[None]) -> None:
        """Wait for the answer, at most `submit_seconds`: an acknowledgement is sent to the next owner in any case."""
        seconds = self.subscription._host.settings.submit_seconds
        try:
            async with asyncio.timeout(seconds):
                await ack
        except TimeoutError:
            _log.warning("group %s: no owner has answered in %g seconds", self.subscription.group, seconds)
        except WaltzError as error:
            _log.warning("%s %s", error.code, error.message)
