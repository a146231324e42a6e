"""The line of a client to one partition: finds the owner, mounts, sends, receives, and begins again when the link is lost.

The decisions are made in `waltzd.mount` and `waltzd.outbox`, the talking is `waltzd.conversation`'s. A line lives from one
activation to the next deactivation, as two tasks: one keeps the link, the other hands the feed to the application. Either
may end it: a refusal that would come again, or an application that parks. Then what was never sent is refused with the
reason, and what was sent and not answered is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from waltzd.client_settings import ClientSettings
from waltzd.conversation import Conversation
from waltzd.errors import BadArgument, ClientClosed, NotMounted, NotOwner, NotSent, WaltzError
from waltzd.follower import Call, Follower, ask_mark
from waltzd.frame import FeedMode, Place, Registration
from waltzd.gate import Gate
from waltzd.mount import FINAL, Mount, State
from waltzd.outbox import Outbox
from waltzd.record import HeadArray, Run
from waltzd.submission import Submission
from waltzd.transaction import Handler, Serializer, Transaction, transactions_of, transactions_of_heads
from waltzd.whereabouts import Whereabouts, pause_seconds

_log = logging.getLogger("waltz.client")
REPLACED_SECONDS = 1.0
"""How long an owner that was replaced has for its last word: it says what it has not taken, unless it hangs."""
Fetch: TypeAlias = Callable[[Transaction], Awaitable[bytes]]


@dataclass(frozen=True, kw_only=True)
class PartitionState:
    """One partition of a client, for people and for monitoring."""

    partition: int
    sentence: str
    """What it is doing, and what it waits for."""
    is_ready: bool
    applied: int
    """The handler has applied everything up to here; without a handler, what is known to be committed."""
    received: int
    pending: int
    pending_bytes: int
    mounts: int
    """How often it was mounted."""
    stopped: WaltzError | None


class Line:
    def __init__(
        self,
        partition: int,
        *,
        whereabouts: Whereabouts,
        settings: ClientSettings,
        feed: FeedMode,
        handler: Handler | None,
        serializer: Serializer | None,
        call: Call,
        fetch: Fetch,
    ) -> None:
        self.partition = partition
        self.outbox = Outbox(messages_max=settings.messages_in_flight_max, bytes_max=settings.bytes_in_flight_max)
        self.mount = Mount(partition, feed, feed_bytes_max=settings.feed_bytes_max, outbox=self.outbox)
        self.stopped: WaltzError | None = ClientClosed(f"partition {partition} is not activated yet")
        """Why nothing is taken any more."""
        self._where = whereabouts
        self._settings = settings
        self._handler = handler
        self._serializer = serializer
        self._call = call
        self._fetch = fetch
        self._follower: Follower | None = None
        self._gate = Gate(rows_max=settings.pending_max, bytes_max=settings.pending_bytes_max, used=self._used)
        self._work = asyncio.Event()
        self._is_ready = asyncio.Event()
        """Ready, or stopped."""
        self._supervisor: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the last activation."""
        self._alarm: asyncio.TimerHandle | None = None
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._trouble: WaltzError | None = None
        """Why the last link was lost, until the next one is ready."""

    # -- life

    async def activate(self, registration: Registration) -> None:
        """Ask the application where it stands, and begin. What the handler raises comes out here."""
        if self._supervisor is not None:  # left by a deactivation that was given up
            await asyncio.wait((self._supervisor,))
            self._supervisor = None
        mark = None
        if self._handler is not None:
            mark = await ask_mark(self._handler, self._call, self.partition)
            follower = Follower(
                self.partition,
                self._handler,
                call=self._call,
                batch_max=self._settings.apply_batch_max,
                consumed=self._consumed,
            )
            if self._follower is not None:
                follower.inherit(self._follower)
            self._follower = follower
        if self.mount.client is None:
            self.mount.registered(registration)
        self.stopped = None
        self._loop = asyncio.get_running_loop()
        self._is_ready.clear()
        self._trouble = None
        self._supervisor = asyncio.create_task(self._live(mark), name=f"waltz line {self.partition}")

    async def deactivate(self, reason: WaltzError) -> None:
        """Take nothing more, wait for what is under way, and end. After this, `activate` may be called again."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        try:
            if self.stopped is None:
                self.stopped = reason
                self._gate.close(reason)
                await self._drain()
        finally:
            supervisor.cancel()
        await asyncio.wait((supervisor,))  # whoever gives up waiting must not disturb what is ending in order
        self._supervisor = None
        self.stopped = reason

    async def _live(self, mark: int | None) -> None:
        """Until either task ends, which is always a failure, or this one is cancelled."""
        keep = asyncio.create_task(self._keep(mark), name=f"waltz link {self.partition}")
        tasks = [keep]
        if self._follower is not None:
            assert mark is not None
            follow = asyncio.create_task(self._follower.run(mark), name=f"waltz follower {self.partition}")
            tasks.append(follow)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next(task.exception() for task in tasks if task.done())
            assert error is not None
            self.stopped = self._reason(error)
            self._gate.close(self.stopped)
            self.outbox.withdraw(self.stopped)
            if not keep.done():  # the application parked, and the link is sound: what was sent still gets its answer
                await self._drain()
                keep.cancel()
                await asyncio.gather(keep, return_exceptions=True)
            self._stop()
        finally:
            if self._follower is not None:
                self._follower.stop()
                await asyncio.wait(tasks[1:], timeout=self._settings.close_seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.stopped is None:  # somebody cancelled all tasks of the loop, as `asyncio.run` does at its end
                self.stopped = ClientClosed("the loop of the client ended before the client was closed")
            self._stop()

    def _reason(self, error: BaseException) -> WaltzError:
        if isinstance(error, WaltzError):
            _log.error("partition %d is stopped: %s", self.partition, " ".join(error.lines()))
            return error
        _log.critical("partition %d is stopped by a mistake in Waltz", self.partition, exc_info=error)
        return NotMounted(f"partition {self.partition} was stopped by a mistake in Waltz: {error!r}")

    def _stop(self) -> None:
        """Whoever still waits is told what is known."""
        assert self.stopped is not None
        self._gate.close(self.stopped)
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

    # -- from the application

    @property
    def mark(self) -> int:
        """What a transaction that is built now may rely on."""
        return self.mount.known if self._follower is None else self._follower.applied

    @property
    def has_view(self) -> bool:
        return self._follower is not None

    async def ready_epoch(self) -> int:
        """Wait until it is ready; which time that is."""
        try:
            async with asyncio.timeout(self._settings.submit_seconds):
                await self._is_ready.wait()
        except TimeoutError:
            raise self._not_sent() from self._trouble
        self._check()
        return self.mount.epochs

    async def enter(self, rows: int) -> None:
        """A place for so many transactions. `leave` must follow."""
        self._check()
        try:
            await self._gate.enter(rows, self._settings.submit_seconds)
        except TimeoutError:
            raise self._not_sent() from self._trouble

    def leave(self, rows: int) -> None:
        self._gate.leave(rows)

    def add(self, submission: Submission) -> None:
        """Send it as soon as it can be. Its waiter is settled, if by nothing else then by its deadline."""
        self._check()
        self.outbox.add(submission)
        self._work.set()
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_at(submission.deadline, self._expire)

    def _check(self) -> None:
        if self.stopped is not None:
            raise copy(self.stopped)
        if asyncio.get_running_loop() is not self._loop:
            raise BadArgument(
                "this client belongs to another event loop: use it there (`asyncio.run_coroutine_threadsafe`), or take a "
                "BlockingClient, which any thread may call"
            )

    async def drained(self) -> None:
        """Until all that is here by now is settled and decided."""
        ticket = self.outbox.next_ticket
        if self.outbox.oldest_ticket < ticket:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append((ticket, done))
            await done

    async def caught_up(self, id: int, epoch: int) -> None:
        """Until the view has applied `id`; or the partition was mounted anew, because then the id may never come. Raises
        TimeoutError when that takes too long."""
        assert self._follower is not None
        if self.mount.epochs == epoch:
            async with asyncio.timeout(self._settings.submit_seconds):
                await self._follower.reached(id)

    def announce(self, id: int, listener: Callable[[int], Any]) -> None:
        """Call `listener` when the view has applied `id`."""
        if self._follower is not None:
            self._follower.announce(id, listener)

    def _used(self) -> tuple[int, int]:
        announcements = self._follower.announcements if self._follower else 0
        return self.outbox.rows + announcements, self.outbox.bytes

    def _consumed(self, size: int) -> None:
        self.mount.consumed(size)
        self._gate.open()
        self._work.set()

    async def _drain(self) -> None:
        """What is under way has this long to be decided."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.close_seconds):
                await self.drained()

    def _expire(self) -> None:
        """Tell those who have waited too long. Once in a while is enough: nobody is told early."""
        loop = asyncio.get_running_loop()
        self.outbox.expire(loop.time(), self._not_sent())
        self.settled()
        deadline = self.outbox.next_deadline()
        self._alarm = None
        if deadline is not None:
            late = self._settings.submit_seconds / 100
            self._alarm = loop.call_at(max(deadline, loop.time() + late), self._expire)

    def _not_sent(self) -> NotSent:
        why = f"; the last attempt failed: {self._trouble.message}" if self._trouble is not None else ""
        return NotSent(
            f"partition {self.partition} took no transaction for {self._settings.submit_seconds:g} seconds: "
            f"{self.mount.sentence()}{why}",
            partition=self.partition,
        )

    # -- the link

    async def _keep(self, mark: int | None) -> None:
        """Mount, again and again; raises only what would come again."""
        unanswered = 0
        """So often in a row nobody said what is committed: the mount does not count that."""
        while True:
            try:
                if mark is None:  # it has no view: it stands on what is committed now
                    mark = await self._where.ask_once(
                        self.partition, "HighWaterMark", lambda port: port.high_water_mark(self.partition)
                    )
                if self.mount.state is State.IDLE:
                    self.mount.activated(mark)
                await self._mount_once()
                self._is_ready.clear()
            except WaltzError as error:
                if isinstance(error, FINAL):
                    raise
                self._is_ready.clear()
                self._note(error)
                unanswered = unanswered + 1 if mark is None else 0
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
                mount.registered(await self._where.register_once())
            place = await self._where.find(self.partition)
            assert place.address is not None
            mount.located(place)
            async with self._where.at(place.address) as port:
                while mount.state is State.MOUNTING:  # first to ask, if something is undecided, then to go on
                    talk = Conversation(port.mount(), mount, self, work=self._work, seconds=self._settings.call_seconds)
                    await self._unless_replaced(place, talk.run(self._where.topology.cluster_key))
        except WaltzError as error:
            mount.link_lost()
            if place is not None:
                self._where.failed(self.partition, place, error)
            raise

    async def _unless_replaced(self, place: Place, talk: Coroutine[Any, Any, None]) -> None:
        """Talk to this owner, until another server says that it is the owner no more: one that hangs would not."""
        talking = asyncio.create_task(talk)
        moving = asyncio.create_task(self._where.replaced(self.partition, place))
        try:
            await asyncio.wait((talking, moving), return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():
                await asyncio.wait((talking,), timeout=REPLACED_SECONDS)
            if talking.done():
                talking.result()
            else:
                raise NotOwner(f"partition {self.partition} has moved to {moving.result().address}")
        finally:
            talking.cancel()
            moving.cancel()
            await asyncio.gather(talking, moving, return_exceptions=True)

    # -- told by the conversation

    def ready(self) -> None:
        self._trouble = None
        self._is_ready.set()
        if self._follower is not None:
            self._follower.release()

    def settled(self) -> None:
        """Something was decided: who waited for that goes on."""
        oldest = self.outbox.oldest_ticket
        for ticket, done in self._flushes:
            if ticket <= oldest and not done.done():
                done.set_result(None)
        self._flushes = [(ticket, done) for ticket, done in self._flushes if not done.done()]
        self._gate.open()
        self._work.set()

    def fed(self, size: int, content: Run | HeadArray) -> None:
        assert self._follower is not None
        if isinstance(content, Run):
            self._follower.put(size, partial(transactions_of, content, self.partition, self._serializer))
        else:
            load = partial(transactions_of_heads, content, self.partition, self._serializer, self._fetch)
            self._follower.put(size, load)

    # -- for people

    def state(self) -> PartitionState:
        if self.stopped is not None:
            sentence = f"stopped: {self.stopped}"
        else:
            trouble = f"; last trouble: {self._trouble.message}" if self._trouble is not None else ""
            sentence = self.mount.sentence() + trouble
        return PartitionState(
            partition=self.partition,
            sentence=sentence,
            is_ready=self.stopped is None and self.mount.state is State.READY,
            applied=self.mark,
            received=self.mount.received,
            pending=self.outbox.rows,
            pending_bytes=self.outbox.bytes,
            mounts=self.mount.number,
            stopped=self.stopped,
        )
