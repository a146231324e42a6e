"""Client of one partition: finds the owner, mounts, sends, receives, and starts again when the link is lost.

`waltzd.client.mount` and `waltzd.client.outbox` decide; this module runs the tasks, from `activate` to `deactivate`:

  _live ─┬─ _keep          mounts in sequence, with growing pauses
         │   └─ MountConnection ─┬─ _read     outcomes and feed, also while the application takes none of it
         │                       └─ _write    what may be sent, as soon as the message before has left
         │   Routes.replaced  another server reports that the partition has moved
         └─ Follower.run     the feed, to the application

**A lost link is retried.** `_keep` turns every error into the next attempt, except errors that the next attempt would meet
again (`FINAL`). Damaged frames count as a broken link (`CannotConnect`). The same error code as an answer of the server
means that the server refuses what was sent, and is final.

**The last frame of a server is read.** A server that takes no more transactions reports why, and which ones it has not
taken (`Refused.untaken`). So `_read` gets time to finish when `_write` fails, and when the owner was replaced
(`Routes.unless_replaced`). Requests that are known to be untaken are sent again. For all others the log is read.

**Every waiter is settled.** Whatever stops the client (a final error, a view that stops, `deactivate`, an event loop that
ends) closes the budget, refuses what was not sent, gives what was sent `close_seconds` to be decided while the link works,
and settles the rest as unknown. Until then one timer, for the oldest deadline, settles requests that waited too long.

**Forks.** If an operator ended the log below the position of the client, the server refuses the mount (`OtherTimeline`).
Then transactions that were fed and not applied are dropped, and the view is asked for its position again. Up to the fork,
and on the current timeline, the client goes on; above it the partition is stopped. Transactions above the fork are lost,
whatever their outcome was.

**First come, first served.** `enter` reserves a place before a transaction exists, so that it is built when its turn comes,
against the newest view. Its size is known only afterwards, so the transaction that exceeds the limit on bytes still passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

from waltzd.client.follower import Call, Follower, ask_position, is_in_view
from waltzd.client.instrument import Instruments
from waltzd.client.mount import FINAL, Mount, MountState, SeenTime
from waltzd.client.mount_connection import MountConnection
from waltzd.client.outbox import Outbox
from waltzd.client.pending import AnyRequest, Late
from waltzd.client.routes import Routes, SharedQuestion, pause_seconds
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Serializer, Transaction, View, transactions_of, transactions_of_heads
from waltzd.errors import (
    BadArgument,
    BeyondLog,
    CannotConnect,
    ClientClosed,
    NotApplied,
    NotMounted,
    NotSent,
    OtherTimeline,
    WaltzError,
)
from waltzd.errors.operations import ClockAhead
from waltzd.format.layout import ID_MAX
from waltzd.format.record import Run
from waltzd.protocol.batches import FeedMode, HeadFeed, Registration
from waltzd.protocol.positions import Position, timeline_of
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST, Lineage
from waltzd.wire.flow_control import Budget


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """State of one partition of a client; `Client.status` returns one for each."""

    partition: int
    """Number of the partition."""
    sentence: str
    """What the client does in the partition, and what it waits for."""
    is_ready: bool
    """Whether the partition is mounted, takes transactions at once, and its view does not fail."""
    applied: int
    """Highest id that the view has applied; without a view, the highest id known to be committed."""
    received: int
    """Highest id that was fed."""
    lag: int
    """Transactions between the view and the end of the log, as far as this client knows: while the view is behind, the
    owner is asked every few seconds. 0 without a view."""
    failing: str | None
    """Reason why the view cannot apply the next transaction; None while it can."""
    since: datetime | None
    """Time of the first failure of that transaction."""
    pending: int
    """Number of transactions without an outcome."""
    pending_bytes: int
    """Bytes of transactions without an outcome."""
    mounts: int
    """Number of times that the partition was mounted."""
    stopped: WaltzError | None
    """Error that stopped the partition; None if it is not stopped."""


class ClientStatus(tuple[PartitionStatus, ...]):
    """State of a client: the states of its partitions, for people and for monitoring.

    Example:
        ```python
        @app.get("/readyz")
        async def readyz():
            status = client.status()
            return Response(status_code=200 if status.ready else 503)
        ```
    """

    is_open: bool
    """Whether the client is open; a closed client has no partitions."""

    def __new__(cls, states: Iterable[PartitionStatus], *, is_open: bool) -> Self:
        found = super().__new__(cls, states)
        found.is_open = is_open
        return found

    @property
    def ready(self) -> bool:
        """True if the client is open and every partition is ready: none is stopped or waits for its owner, and no view
        fails."""
        return self.is_open and all(state.is_ready for state in self)

    @property
    def lag(self) -> int:
        """Lag of the partition whose view is furthest behind."""
        return max((state.lag for state in self), default=0)


LOOK_SECONDS = 5.0
"""Seconds between two questions to the owner for the end of the log, while the view is behind."""
LATE_SECONDS = 0.05
"""Seconds after its deadline within which a caller is told."""
Fetch: TypeAlias = Callable[[Transaction], Awaitable[bytes]]
T = TypeVar("T")
_log = logging.getLogger("waltz.client")


class PartitionClient:
    def __init__(
        self,
        partition: int,
        *,
        routes: Routes,
        settings: ClientSettings,
        feed: FeedMode,
        view: View[Any] | None,
        serializer: Serializer[Any] | None,
        call: Call,
        fetch: Fetch,
        seen: SeenTime,
        instruments: Instruments = (),
    ) -> None:
        self.partition = partition
        self.outbox = Outbox(
            messages_max=settings.messages_in_flight_max, bytes_max=settings.bytes_in_flight_max, partition=partition
        )
        self.mount = Mount(
            partition,
            feed,
            feed_bytes_max=settings.feed_bytes_max,
            outbox=self.outbox,
            seen=seen,
            introduction=routes.introduction,
        )
        self.stopped: WaltzError | None = ClientClosed(f"partition {partition} is not activated yet")
        """Error that stopped the partition; None while it runs."""
        self._routes = routes
        self._settings = settings
        self._view = view
        self._serializer = serializer
        self._call = call
        self._fetch = fetch
        self._instruments = instruments
        self._follower: Follower | None = None
        self._budget = Budget(settings.pending_max, beside=self._pending)
        self._connection: MountConnection | None = None
        """Connection of the current mount."""
        self._turn: asyncio.Handle | None = None
        """Handle of the next check for something to send, if one is scheduled."""
        self._is_ready = asyncio.Event()
        """Set when the partition is ready or stopped."""
        self._supervisor: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the last activation."""
        self._alarm: asyncio.TimerHandle | None = None
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._entering: dict[asyncio.Future[None], None] = {}
        """Calls that wait for a place, or for proof of their position."""
        self._trouble: WaltzError | None = None
        """Error that lost the last link; None once the next link is ready."""
        self._end = SharedQuestion(self._ask_end)
        self._known: int = EMPTY
        """Position of the end of the log, as the owner reported it when asked."""
        self._timeline = FIRST
        """Identity of the timeline of the log at the last mount."""
        self._is_warm = False
        """Whether the view has caught up once since the activation."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called when an error has stopped the partition."""

    # -- life

    async def activate(self, registration: Registration) -> None:
        """Ask the view for its position, and start. Raise what the view raises."""
        if self._supervisor is not None:  # left by a deactivation that was cancelled
            await asyncio.wait((self._supervisor,))
            self._supervisor = None
        position = None
        if self._view is not None:
            position = await self._ask_view()
            self._follower = self._new_follower()
        else:
            self.mount.forget()
        if self.mount.client is None:
            self.mount.registered(registration)
        self.stopped = None
        self._is_warm = False
        self._loop = asyncio.get_running_loop()
        self._is_ready.clear()
        self._trouble = None
        self._supervisor = asyncio.create_task(self._live(position), name=f"waltz partition {self.partition}")

    async def _ask_view(self) -> Position:
        """Return the position of the view. A view that keeps no timelines is on the timeline in which this client fed
        it, if it is still where the client left it; else on the first timeline."""
        assert self._view is not None
        position = await ask_position(self._view, self._call, self.partition)
        if not isinstance(position, Position) and self._follower is not None and self._follower.has_left(position):
            return Position(position, self.mount.timeline)
        return Position(position)

    def _new_follower(self) -> Follower:
        assert self._view is not None
        call = self._call
        for instrument in self._instruments:
            call = instrument.calling(self.partition, call)
        follower = Follower(
            self.partition, self._view, call=call, batch_max=self._settings.apply_batch_max, consumed=self._consumed
        )
        if self._follower is not None:
            follower.inherit(self._follower)
        return follower

    async def deactivate(self, reason: WaltzError) -> None:
        """Take no more transactions, wait for those in progress, and stop. `activate` starts again."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        try:
            if self.stopped is None:
                self.stopped = reason
                self._budget.close(reason)
                await self._drain()
        finally:
            supervisor.cancel()
        await asyncio.wait((supervisor,))  # not `await supervisor`: a cancelled caller must not cancel the end
        self._supervisor = None
        self.stopped = reason

    async def _live(self, position: Position | None) -> None:
        """Run until one of the tasks fails (none ends by itself) or this task is cancelled. After a fork of the log
        below what was fed, start again if the position of the view is not above the fork."""
        try:
            while (again := await self._live_once(position)) is not None:
                position = again
        finally:
            if self.stopped is None:  # all tasks of the loop were cancelled, as `asyncio.run` does at its end
                self.stopped = ClientClosed("the loop of the client ended before the client was closed")
            self._stop()

    async def _live_once(self, position: Position | None) -> Position | None:
        """Run once; return the position to start again from, or None if the partition is stopped."""
        again: Position | None = None
        keep = asyncio.create_task(self._keep(position), name=f"waltz link {self.partition}")
        tasks, looks = [keep], list[asyncio.Task[None]]()
        if self._follower is not None:
            assert position is not None
            follow = asyncio.create_task(self._follower.run(position), name=f"waltz follower {self.partition}")
            tasks.append(follow)
            looks.append(asyncio.create_task(self._look_at_end(), name=f"waltz lag {self.partition}"))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next(task.exception() for task in tasks if task.done())
            assert error is not None
            if isinstance(error, OtherTimeline) and keep.done():
                again = await self._below(error, tasks[1:])
                if again is not None:
                    return again
            self.stopped = self._reason(error)
            self._budget.close(self.stopped)
            self.outbox.withdraw(self.stopped)
            if not keep.done():  # the view stopped and the link works: wait for the outcomes of what was sent
                await self._drain()
                keep.cancel()
                await asyncio.gather(keep, return_exceptions=True)
            self._stop()
            return None
        finally:
            for look in looks:
                look.cancel()  # before the first await: closing the client cancels this task as well
            self._end.cancel()
            if self._follower is not None:
                self._follower.stop()
                await asyncio.wait(tasks[1:], timeout=self._settings.close_seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *looks, return_exceptions=True)
            if again is not None:
                assert self._follower is not None
                self.mount.ended()
                followed, self._follower = self._follower, self._new_follower()
                followed.release()

    async def _below(self, error: OtherTimeline, following: Sequence[asyncio.Task[None]]) -> Position | None:
        """Return the position of the view if it is on the log, else None. Transactions that were fed above the fork and
        not applied are dropped. The running call of the view ends first, however long it takes."""
        fork = error.number("fork")
        if fork is None or self._follower is None:
            return None
        self._follower.stop()
        await asyncio.wait(following)
        try:
            position = await self._ask_view()
        except Exception:  # noqa: BLE001  # the application's code; the partition is stopped for the first reason
            _log.exception("the view raised when asked for its position in partition %d", self.partition)
            return None
        lineage = self.mount.lineage or Lineage()
        is_ours = position.timeline == self.mount.timeline or lineage.covers(position.timeline, position)
        # Another process may have taken the view to the current timeline.
        is_on_log = str(position.timeline) == error.facts.get("timeline") or (is_ours and position <= fork)
        if not is_on_log:
            return None
        _log.warning("partition %d continues after id %d: %s", self.partition, position, error.message)
        self._follower.forget_above(fork)  # the view may be above the fork, with other transactions
        return position

    def _reason(self, error: BaseException) -> WaltzError:
        if isinstance(error, WaltzError):
            _log.error("partition %d is stopped: %s", self.partition, " ".join(error.lines()))
            return error
        _log.critical("partition %d is stopped by a bug in Waltz", self.partition, exc_info=error)
        return NotMounted(f"partition {self.partition} was stopped by a bug in Waltz: {error!r}")

    def _stop(self) -> None:
        """Settle every waiter that is left."""
        assert self.stopped is not None
        self._budget.close(self.stopped)
        self.mount.ended()
        self.outbox.withdraw(self.stopped)
        self.outbox.abandon()
        self.settled()
        self._is_ready.set()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._follower is not None:
            self._follower.release()
        self.on_stop()

    # -- from the application

    @property
    def position(self) -> Position:
        """Position that a transaction built now may rely on: that of the view, or without a view the end of the log as
        far as it is known."""
        return Position(self.mount.known if self._follower is None else self._follower.applied, self.mount.timeline)

    @property
    def has_view(self) -> bool:
        return self._follower is not None

    def _left(self, deadline: float | None) -> float:
        """Return the seconds until a deadline; `submit_seconds` if there is none."""
        if deadline is None:
            return self._settings.submit_seconds
        return max(0.0, deadline - asyncio.get_running_loop().time())

    async def ready_epoch(self, deadline: float | None = None) -> int:
        """Wait until the partition is ready; return how often it became ready."""
        try:
            async with asyncio.timeout(self._left(deadline)):
                await self._is_ready.wait()
        except TimeoutError:
            raise self._not_sent() from None
        self._check()
        return self.mount.epochs

    async def enter(self, rows: int, deadline: float | None = None) -> None:
        """Wait until `rows` transactions may be added. `leave` must follow. A call of a view does not wait: the places may
        be those of commands that wait for the view."""
        self._check()
        if is_in_view():
            self._budget.take_always(rows)
            return
        try:
            await self._budget.take(rows, self._left(deadline))
        except TimeoutError:
            raise self._not_sent() from None

    def leave(self, rows: int) -> None:
        self._budget.give(rows)

    def add(
        self,
        make: Callable[[asyncio.Future[T], float], AnyRequest],
        position: int,
        late: Late | None = None,
        deadline: float | None = None,
    ) -> asyncio.Future[T]:
        """Add the request that `make` makes of a waiter and a deadline; return the waiter. `position` is the highest
        one that the request relies on."""
        self._check()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        request = make(waiter, loop.time() + self._left(deadline))
        request.late = late
        request.timeline = position.timeline if isinstance(position, Position) else self.mount.timeline
        self.outbox.add(request)
        if self.outbox.is_alone and self._connection is not None:
            self._connection.send_now()
        else:
            self._schedule_send()
        if self._alarm is not None and request.deadline < self._alarm.when():
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = loop.call_at(request.deadline, self._expire)
        for instrument in self._instruments:
            instrument.sent(self.partition, request, waiter)
        return waiter

    async def send(
        self,
        rows: int,
        position: int,
        make: Callable[[asyncio.Future[T], float], AnyRequest],
        deadline: float | None = None,
    ) -> T:
        """Wait for a place, add the request that `make` makes, and return its outcome."""
        if position > self.mount.known or not self._budget.take_now(rows):
            await self._wait_for_place(rows, position, deadline)
        try:
            self.check_timeline(position)
            waiter = self.add(make, position, deadline=deadline)
        finally:
            self.leave(rows)
        return await waiter

    async def _wait_for_place(self, rows: int, position: int, deadline: float | None) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entering[done] = None
        try:
            if position > self.mount.known:
                await self.prove(position, deadline)
            await self.enter(rows, deadline)
        finally:
            del self._entering[done]
            done.set_result(None)

    def check_timeline(self, position: int, what: str = "the position of a transaction") -> None:
        """Raise `OtherTimeline` if a position is on another timeline than the log. A plain integer is an id of the
        current log."""
        lineage = self.mount.lineage
        if isinstance(position, Position) and lineage is not None and position.timeline != lineage.current:
            lineage.check(
                position.timeline, position, what=what, partition=self.partition,
                next_step="decide anew from what the log holds now: read the position again, before the view is read",
            )  # fmt: skip

    def _check(self) -> None:
        if self.stopped is not None:
            raise copy(self.stopped)
        if asyncio.get_running_loop() is not self._loop:
            raise BadArgument(
                "this client belongs to another event loop: use it there (`asyncio.run_coroutine_threadsafe`), or use a "
                "BlockingClient, which any thread may call"
            )

    @property
    def has_pending(self) -> bool:
        """Return whether something that was submitted has no outcome."""
        return bool(self.outbox.rows or self._entering)

    async def flushed(self) -> None:
        """Wait until everything that was submitted before this call has an outcome."""
        if self._entering:
            await asyncio.wait(list(self._entering))
        await self.drained()

    async def drained(self) -> None:
        """Wait until everything that was added before this call has an outcome."""
        ticket = self.outbox.next_ticket
        if self.outbox.oldest_ticket < ticket:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append((ticket, done))
            await done

    # -- waiting for the view

    @property
    def is_cold(self) -> bool:
        """Return whether the view may be far behind and the caller may wait for it."""
        return not self._is_warm and self.may_wait_for_view

    @property
    def may_wait_for_view(self) -> bool:
        """Return whether there is a view, and the caller is not a call of the view, which would wait for itself."""
        return self._follower is not None and not self._follower.is_called_from_here

    def check_view(self) -> None:
        self._check()
        if self._follower is None:
            raise BadArgument("this client has no view; open it with a view, or wait in the process that has the view")

    async def seen(self, id: int, epoch: int, deadline: float | None = None) -> None:
        """Wait until the view has applied `id`, or the partition was mounted again: then the id may never come. Raise
        TimeoutError at the deadline."""
        assert self._follower is not None
        if self.mount.epochs == epoch:
            async with asyncio.timeout(self._left(deadline)):
                await self._follower.reached(id)

    async def wait_applied(self, id: Position, seconds: float) -> None:
        """Wait until the view has applied a transaction that is committed or will be. Raise `OtherTimeline` if it is
        not in the log any more."""
        self.check_view()
        if self.position >= id and id.timeline == self.mount.timeline:
            return
        deadline = asyncio.get_running_loop().time() + seconds
        await self._check_id(id, seconds)
        try:
            async with asyncio.timeout_at(deadline):
                await self._is_ready.wait()
                self._check()
                while (is_later := self._is_later(id)) or self.position < id:
                    if not is_later:
                        self.check_timeline(id, "the transaction that is waited for")
                    assert self._follower is not None
                    # Returns also when the partition is mounted again.
                    await self._follower.reached(ID_MAX if is_later else id)
                    self._check()
                self.check_timeline(id, "the transaction that is waited for")
        except TimeoutError:
            raise self._not_applied(id, seconds) from None

    async def wait_caught_up(self, seconds: float) -> None:
        """Wait until the view has applied everything that is committed now."""
        self.check_view()
        deadline = asyncio.get_running_loop().time() + seconds
        end = await self.confirmed_end(seconds)
        await self.wait_applied(Position(end), max(0.0, deadline - asyncio.get_running_loop().time()))
        self._is_warm = True

    def _not_applied(self, id: int, seconds: float) -> NotApplied:
        failing = self._follower.failing if self._follower is not None else None
        why = f"; the view fails: {failing.error!r}" if failing is not None else ""
        return NotApplied(
            f"after {round(seconds, 2):g} seconds the view has applied partition {self.partition} up to {self.position}, "
            f"and not {id} yet{why}",
            partition=self.partition,
            position=self.position,
        )

    # -- the end of the log

    async def prove(self, position: int, deadline: float | None = None) -> None:
        """Refuse a position above the end of the log: the owner would end the mount, with all its transactions."""
        await self.ready_epoch(deadline)  # the answer to a mount has the end of the log
        if position <= self.mount.known:
            return
        try:
            end = self._end_known if position <= self._end_known else await self.confirmed_end(self._left(deadline))
        except CannotConnect:
            raise self._not_sent() from None
        if position > end:
            raise BadArgument(
                f"the position {position} is above the end of partition {self.partition}, whose highest committed id is "
                f"{end}",
                next_step="give a position that was read from this partition of this cluster, before the view was read",
            )

    async def _check_id(self, id: int, seconds: float) -> None:
        """Raise `BeyondLog` if no transaction has this id: the token is made up, or of another cluster."""
        lineage = self.mount.lineage
        is_known = id <= max(self.mount.known, self._end_known) and (lineage is None or timeline_of(id) in lineage)
        if not is_known and id > (end := await self.confirmed_end(seconds)):
            raise BeyondLog(
                f"there is no transaction {id} in partition {self.partition}, whose highest committed id is {end}",
                next_step="wait for what this cluster has committed: is the token from another one?",
            )

    def _is_later(self, id: Position) -> bool:
        """Return whether the id is of a timeline that the owner named when it was asked, and that the mount does not know
        yet."""
        lineage = self.mount.lineage
        return lineage is not None and id.timeline not in lineage and id.timeline == timeline_of(self._known)

    @property
    def _end_known(self) -> int:
        """Highest committed id that the owner reported, in the timeline of the mount."""
        return self._known if timeline_of(self._known) == self.mount.timeline else EMPTY

    async def confirmed_end(self, seconds: float | None = None) -> int:
        """Return the highest committed id at this moment or later."""
        limit = self._settings.submit_seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                while (end := await self._ask_shared()) is None:
                    pass
                return end
        except TimeoutError:
            raise CannotConnect(
                f"the owner of partition {self.partition} did not report within {limit:g} seconds what is committed: "
                f"{self.mount.sentence()}"
            ) from None

    async def _ask_shared(self) -> int | None:
        """Ask the question that callers share; return None if the client has given it up and goes on after a fork."""
        try:
            return await self._end.ask()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._check()
            return None

    async def _ask_end(self) -> int:
        self._known = await self._routes.ask(
            self.partition,
            "HighWaterMark",
            lambda port: port.high_water_mark(self.partition, confirmed=True),
            self._settings.submit_seconds,
        )
        return self._known

    async def _look_at_end(self) -> None:
        """Ask the owner now and then for the end of the log: a feed that stands still does not show how far the view is
        behind."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.position < self.mount.known:
                with suppress(WaltzError):
                    self._known = await self._routes.ask_once(
                        self.partition, "HighWaterMark", lambda port: port.high_water_mark(self.partition)
                    )

    def announce(self, id: int, listener: Callable[[int], Any]) -> None:
        """Call `listener` when the view has applied `id`."""
        if self._follower is not None:
            self._follower.announce(id, listener)

    def _pending(self) -> tuple[int, bool]:
        announcements = self._follower.announcements if self._follower else 0
        return self.outbox.rows + announcements, self.outbox.bytes < self._settings.pending_bytes_max

    def again(self) -> None:
        """Report to the instruments that a submit builds its transaction again."""
        for instrument in self._instruments:
            instrument.again(self.partition)

    def _consumed(self, size: int) -> None:
        self.mount.consumed(size)
        self._budget.admit()
        self._schedule_send()

    def _schedule_send(self) -> None:
        """Check for something to send when the event loop has served its ready tasks, so that their requests travel
        together."""
        if self._turn is None and self._connection is not None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._connection is not None:
            self._connection.send_now()

    async def _drain(self) -> None:
        """Wait for outcomes, at most `close_seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.close_seconds):
                await self.drained()

    def _expire(self) -> None:
        """Settle the requests whose deadline has passed. Run at the first deadline, then no more often than needed; a
        waiter is never settled early."""
        loop = asyncio.get_running_loop()
        self.outbox.expire(loop.time(), self._not_sent())
        self.settled()
        deadline = self.outbox.next_deadline()
        self._alarm = None
        if deadline is not None:
            late = min(self._settings.submit_seconds / 100, LATE_SECONDS)
            self._alarm = loop.call_at(max(deadline, loop.time() + late), self._expire)

    def _not_sent(self) -> NotSent:
        why = f"; the last attempt failed: {self._trouble.message}" if self._trouble is not None else ""
        return NotSent(
            f"partition {self.partition} took no transaction in time: {self.mount.sentence()}{why}",
            partition=self.partition,
        )

    # -- the link

    async def _keep(self, position: Position | None) -> None:
        """Mount again and again; raise only errors that the next attempt would meet again."""
        unanswered = 0
        """Consecutive failures to learn the high-water mark, which `mount.attempts` does not count."""
        while True:
            try:
                if position is None:  # without a view, start at the end of the log
                    position = await self._routes.ask_once(
                        self.partition, "HighWaterMark", lambda port: port.high_water_mark(self.partition)
                    )
                    position = Position(position)
                if self.mount.state is MountState.IDLE:
                    self.mount.activated(position)
                await self._mount_once()
                self._is_ready.clear()
            except WaltzError as error:
                if isinstance(error, FINAL):
                    raise
                self._is_ready.clear()
                self._note(error)
                unanswered = unanswered + 1 if position is None else 0
                await asyncio.sleep(
                    pause_seconds(max(self.mount.attempts, unanswered), self.mount.client or 0, self.partition)
                )

    def _note(self, error: WaltzError) -> None:
        if self._trouble is None or (type(error), error.message) != (type(self._trouble), self._trouble.message):
            _log.info("partition %d: %s: %s %s", self.partition, self.mount.sentence(), error.code, error.message)
        self._trouble = error

    async def _mount_once(self) -> None:
        mount = self.mount
        place = None
        try:
            if mount.client is None:
                mount.registered(await self._routes.register_once())
            place = await self._routes.find(self.partition)
            assert place.address is not None
            mount.located(place)
            async with self._routes.at(place.address) as port:
                while mount.state is MountState.MOUNTING:  # first to ask if something is undecided, then to send
                    talk = self._connection = MountConnection(self, port.mount())
                    key = self._routes.topology.cluster_key
                    await self._routes.unless_replaced(self.partition, place, talk.run(key, self._settings.call_seconds))
        except WaltzError as error:
            if isinstance(error, ClockAhead):
                mount.refused_time()
                _log.warning("partition %d: %s", self.partition, " ".join(error.lines()))
            mount.link_lost()
            if place is not None:
                self._routes.failed(self.partition, place, error)
            raise

    # -- called by the connection

    def ready(self) -> None:
        self._trouble = None
        self._is_ready.set()
        lineage = self.mount.lineage
        assert lineage is not None
        shared, self._timeline = lineage.shared_to(self._timeline), lineage.current
        if self._follower is not None:
            if shared is not None:
                self._follower.forget_above(shared)
            self._follower.release()

    def settled(self) -> None:
        """Wake the tasks that wait for outcomes: some request may have been decided."""
        oldest = self.outbox.oldest_ticket
        for ticket, done in self._flushes:
            if ticket <= oldest and not done.done():
                done.set_result(None)
        self._flushes = [(ticket, done) for ticket, done in self._flushes if not done.done()]
        self._budget.admit()
        if self.outbox.waiting or self.mount.state is MountState.ASKING:  # else there is nothing to send
            self._schedule_send()

    def fed(self, size: int, content: Run | HeadFeed) -> None:
        """Take records or heads that were fed, checked, and follow exactly what was fed before."""
        assert self._follower is not None
        if isinstance(content, Run):
            load = partial(transactions_of, content, self.partition, self._serializer, self.mount.lineage)
        else:
            load = partial(
                transactions_of_heads, content, self.partition, self._serializer, self._fetch, self.mount.lineage
            )
        self._follower.put(size, load, content.goes_on)

    # -- status

    def check(self) -> None:
        """Assert the invariants of the client."""
        self.mount.check()
        if self._follower is not None and self.stopped is None:
            assert self._follower.applied <= self.mount.received

    def status(self) -> PartitionStatus:
        if self.stopped is not None:
            sentence = f"stopped: {self.stopped}"
        else:
            trouble = f"; last trouble: {self._trouble.message}" if self._trouble is not None else ""
            sentence = self.mount.sentence() + trouble
        failing = self._follower.failing if self._follower is not None else None
        if failing is not None:
            sentence += f"; the view has failed {failing.tries} times on transaction {failing.id}"
        return PartitionStatus(
            partition=self.partition,
            sentence=sentence,
            is_ready=self.stopped is None and self.mount.state is MountState.READY and failing is None,
            applied=self.position,
            received=self.mount.received,
            lag=self._lag,
            failing=None if failing is None else f"transaction {failing.id}: {failing.error!r}",
            since=None if failing is None else failing.since,
            pending=self.outbox.rows,
            pending_bytes=self.outbox.bytes,
            mounts=self.mount.number,
            stopped=self.stopped,
        )

    @property
    def _lag(self) -> int:
        if self._follower is None:
            return 0
        mount = self.mount
        barrier = mount.mounted.barrier if mount.mounted is not None and mount.state is MountState.READY else EMPTY
        return max(0, max(mount.known, barrier, self._end_known) - self.position)
