"""The line of a client to one partition: finds the owner, mounts, sends, receives, and begins again when the link is lost.

`waltzd.client.mount` and `waltzd.client.outbox` decide; here are the tasks around them, from `activate` to `deactivate`:

  _live ─┬─ _keep          one mount after the other, with growing pauses
         │   └─ Conversation ─┬─ _read     outcomes and feed, also while the application takes none of it
         │   beside it:       └─ _write    what may go, as soon as what went before has left
         │   Routes.replaced  another server says that the partition has moved
         └─ Follower.run     the feed, to the application

**A link that ends is no end.** `_keep` turns every error into the next attempt, except those that the next attempt would
meet again (`FINAL`). What came and cannot be right counts as a broken link (`CannotConnect`): it may have been damaged on
the way. The same code in the server's own words means that it refuses what we sent, and that is final.

**The last word is waited for.** A server that takes no more says why, and what it has not taken (`Refused.untaken`). So
`_go_on` waits for `_read` when `_write` fails, and `_unless_replaced` for an owner that was replaced: requests that are
known to be untaken go out again, all others have to be asked for.

**A waiter is always told.** Whatever ends a line (a final error, an application that parks, `deactivate`, a loop that ends)
closes the budget, refuses what was not sent, gives what was sent `close_seconds` to be decided while the link is sound, and
settles the rest as unknown. Until then one timer, for the oldest deadline, tells those who have waited too long.

**First come, first served.** `enter` reserves a place before a transaction exists, so that it is built when its turn has
come, against the newest view. Its bytes are known only afterwards: the limit on bytes lets the one through that exceeds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from waltzd.client.follower import Call, Follower, ask_position
from waltzd.client.mount import FINAL, Mount, Seen, State
from waltzd.client.outbox import Outbox
from waltzd.client.pending import Submission
from waltzd.client.routes import Routes, pause_seconds
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Serializer, Transaction, View, transactions_of, transactions_of_heads
from waltzd.errors import (
    BadArgument,
    BadFrame,
    CannotConnect,
    ClientClosed,
    ClockAhead,
    NotMounted,
    NotOwner,
    NotSent,
    WaltzError,
)
from waltzd.format.record import Run, first_bad
from waltzd.protocol.batches import (
    ClientFrame,
    Committals,
    Feed,
    FeedMode,
    HeadFeed,
    Mounted,
    Place,
    Refusals,
    Refused,
    Registration,
    ServerFrame,
)
from waltzd.protocol.peers import MountPort
from waltzd.wire.budget import Budget

LAST_WORD_SECONDS = 2.0
REPLACED_SECONDS = 1.0
"""How long an owner that was replaced has for its last word; one that hangs has none."""
GOING_ON = (State.READY, State.ASKING)
Fetch: TypeAlias = Callable[[Transaction], Awaitable[bytes]]
T = TypeVar("T")
_log = logging.getLogger("waltz.client")


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition of a client, for people and for monitoring: what `Client.status` returns."""

    partition: int
    sentence: str
    """What the client does there, and what it waits for."""
    is_ready: bool
    """It is mounted, and transactions leave at once."""
    applied: int
    """The highest id that the view has applied; without a view, the highest that is known to be committed."""
    received: int
    """The highest id that was fed."""
    pending: int
    """Transactions without an outcome yet."""
    pending_bytes: int
    mounts: int
    """How often it was mounted."""
    stopped: WaltzError | None
    """Why it takes nothing any more, or None."""


class Line:
    def __init__(
        self,
        partition: int,
        *,
        routes: Routes,
        settings: ClientSettings,
        feed: FeedMode,
        view: View | None,
        serializer: Serializer | None,
        call: Call,
        fetch: Fetch,
        seen: Seen,
    ) -> None:
        self.partition = partition
        self.outbox = Outbox(messages_max=settings.messages_in_flight_max, bytes_max=settings.bytes_in_flight_max)
        self.mount = Mount(
            partition,
            feed,
            feed_bytes_max=settings.feed_bytes_max,
            outbox=self.outbox,
            seen=seen,
            introduction=routes.introduction,
        )
        self.stopped: WaltzError | None = ClientClosed(f"partition {partition} is not activated yet")
        """Why it takes nothing; None while it runs."""
        self._routes = routes
        self._settings = settings
        self._view = view
        self._serializer = serializer
        self._call = call
        self._fetch = fetch
        self._follower: Follower | None = None
        self._budget = Budget(settings.pending_max, beside=self._pending)
        self._talk: Conversation | None = None
        """The mount that stands."""
        self._turn: asyncio.Handle | None = None
        """The next look for something to send, if one is due."""
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
        """Ask the view for its position, and begin. What the view raises is raised here."""
        if self._supervisor is not None:  # left by a deactivation that was given up
            await asyncio.wait((self._supervisor,))
            self._supervisor = None
        position = None
        if self._view is not None:
            position = await ask_position(self._view, self._call, self.partition)
            follower = Follower(
                self.partition,
                self._view,
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
        self._supervisor = asyncio.create_task(self._live(position), name=f"waltz line {self.partition}")

    async def deactivate(self, reason: WaltzError) -> None:
        """Take nothing more, wait for what is under way, and end. `activate` begins again."""
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

    async def _live(self, position: int | None) -> None:
        """Until one of the tasks fails (neither ends by itself), or this one is cancelled."""
        keep = asyncio.create_task(self._keep(position), name=f"waltz link {self.partition}")
        tasks = [keep]
        if self._follower is not None:
            assert position is not None
            follow = asyncio.create_task(self._follower.run(position), name=f"waltz follower {self.partition}")
            tasks.append(follow)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next(task.exception() for task in tasks if task.done())
            assert error is not None
            self.stopped = self._reason(error)
            self._budget.close(self.stopped)
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
            if self.stopped is None:  # all tasks of the loop were cancelled, as `asyncio.run` does at its end
                self.stopped = ClientClosed("the loop of the client ended before the client was closed")
            self._stop()

    def _reason(self, error: BaseException) -> WaltzError:
        if isinstance(error, WaltzError):
            _log.error("partition %d is stopped: %s", self.partition, " ".join(error.lines()))
            return error
        _log.critical("partition %d is stopped by a mistake in Waltz", self.partition, exc_info=error)
        return NotMounted(f"partition {self.partition} was stopped by a mistake in Waltz: {error!r}")

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

    # -- from the application

    @property
    def position(self) -> int:
        """What a transaction that is built now may rely on: where the view stands, or without one the log."""
        return self.mount.known if self._follower is None else self._follower.applied

    @property
    def has_view(self) -> bool:
        return self._follower is not None

    async def ready_epoch(self) -> int:
        """Wait until it is ready; returns which time that is."""
        try:
            async with asyncio.timeout(self._settings.submit_seconds):
                await self._is_ready.wait()
        except TimeoutError:
            raise self._not_sent() from self._trouble
        self._check()
        return self.mount.epochs

    async def enter(self, rows: int) -> None:
        """Wait for a place for so many transactions. `leave` must follow."""
        self._check()
        try:
            await self._budget.take(rows, self._settings.submit_seconds)
        except TimeoutError:
            raise self._not_sent() from self._trouble

    def leave(self, rows: int) -> None:
        self._budget.give(rows)

    def add(self, make: Callable[[asyncio.Future[T], float], Submission]) -> asyncio.Future[T]:
        """Hand in what `make` makes of a waiter and its deadline; returns the waiter."""
        self._check()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        submission = make(waiter, loop.time() + self._settings.submit_seconds)
        self.outbox.add(submission)
        self._go_on()
        if self._alarm is None:
            self._alarm = loop.call_at(submission.deadline, self._expire)
        return waiter

    async def send(self, rows: int, make: Callable[[asyncio.Future[T], float], Submission]) -> T:
        """Hand it in when there is a place for it; returns what became of it."""
        await self.enter(rows)
        try:
            waiter = self.add(make)
        finally:
            self.leave(rows)
        return await waiter

    def _check(self) -> None:
        if self.stopped is not None:
            raise copy(self.stopped)
        if asyncio.get_running_loop() is not self._loop:
            raise BadArgument(
                "this client belongs to another event loop: use it there (`asyncio.run_coroutine_threadsafe`), or take a "
                "BlockingClient, which any thread may call"
            )

    async def drained(self) -> None:
        """Until everything that was handed in by now has an outcome."""
        ticket = self.outbox.next_ticket
        if self.outbox.oldest_ticket < ticket:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._flushes.append((ticket, done))
            await done

    async def caught_up(self, id: int, epoch: int) -> None:
        """Until the view has applied `id`, or the partition was mounted anew: then the id may never come. Raises
        TimeoutError when that takes too long."""
        assert self._follower is not None
        if self.mount.epochs == epoch:
            async with asyncio.timeout(self._settings.submit_seconds):
                await self._follower.reached(id)

    def announce(self, id: int, listener: Callable[[int], Any]) -> None:
        """Call `listener` when the view has applied `id`."""
        if self._follower is not None:
            self._follower.announce(id, listener)

    def _pending(self) -> tuple[int, bool]:
        announcements = self._follower.announcements if self._follower else 0
        return self.outbox.rows + announcements, self.outbox.bytes < self._settings.pending_bytes_max

    def _consumed(self, size: int) -> None:
        self.mount.consumed(size)
        self._budget.admit()
        self._go_on()

    def _go_on(self) -> None:
        """Look for something to send when the loop has served the others: what they hand in travels with it."""
        if self._turn is None and self._talk is not None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._talk is not None:
            self._talk.go_on()

    async def _drain(self) -> None:
        """Wait for outcomes, `close_seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.close_seconds):
                await self.drained()

    def _expire(self) -> None:
        """At the oldest deadline, and then as rarely as is punctual enough: a waiter is never told early."""
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

    async def _keep(self, position: int | None) -> None:
        """Mount, again and again; raises only what the next attempt would meet again."""
        unanswered = 0
        """Failures in a row to learn the high-water mark, which `mount.attempts` does not count."""
        while True:
            try:
                if position is None:  # without a view it stands on what is committed now
                    position = await self._routes.ask_once(
                        self.partition, "HighWaterMark", lambda port: port.high_water_mark(self.partition)
                    )
                if self.mount.state is State.IDLE:
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
                while mount.state is State.MOUNTING:  # first to ask, if something is undecided, then to go on
                    talk = self._talk = Conversation(self, port.mount())
                    key = self._routes.topology.cluster_key
                    await self._unless_replaced(place, talk.run(key, self._settings.call_seconds))
        except WaltzError as error:
            if isinstance(error, ClockAhead):
                mount.refused_time()
                _log.warning("partition %d: %s", self.partition, " ".join(error.lines()))
            mount.link_lost()
            if place is not None:
                self._routes.failed(self.partition, place, error)
            raise

    async def _unless_replaced(self, place: Place, talk: Coroutine[Any, Any, None]) -> None:
        """Talk to this owner until another server says that it was replaced: an owner that hangs would not say so."""
        talking = asyncio.create_task(talk)
        moving = asyncio.create_task(self._routes.replaced(self.partition, place))
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
        """Something may have been decided."""
        oldest = self.outbox.oldest_ticket
        for ticket, done in self._flushes:
            if ticket <= oldest and not done.done():
                done.set_result(None)
        self._flushes = [(ticket, done) for ticket, done in self._flushes if not done.done()]
        self._budget.admit()
        self._go_on()

    def fed(self, size: int, content: Run | HeadFeed) -> None:
        """Records or heads came, checked, and exactly those that are next."""
        assert self._follower is not None
        if isinstance(content, Run):
            load = partial(transactions_of, content, self.partition, self._serializer)
        else:
            load = partial(transactions_of_heads, content, self.partition, self._serializer, self._fetch)
        self._follower.put(size, load, content.goes_on)

    # -- for people

    def check(self) -> None:
        """What is true of it after every event."""
        self.mount.check()
        if self._follower is not None and self.stopped is None:
            assert self._follower.applied <= self.mount.received

    def status(self) -> PartitionStatus:
        if self.stopped is not None:
            sentence = f"stopped: {self.stopped}"
        else:
            trouble = f"; last trouble: {self._trouble.message}" if self._trouble is not None else ""
            sentence = self.mount.sentence() + trouble
        return PartitionStatus(
            partition=self.partition,
            sentence=sentence,
            is_ready=self.stopped is None and self.mount.state is State.READY,
            applied=self.position,
            received=self.mount.received,
            pending=self.outbox.rows,
            pending_bytes=self.outbox.bytes,
            mounts=self.mount.number,
            stopped=self.stopped,
        )


# -- one mount ---------------------------------------------------------------------------------------------------------


class _Over(Exception):
    """What was heard has ended a conversation."""


class Conversation:
    """One mount of a line: from the request to the error that ends it, or until `mount` wants another one.

    Two tasks read and write. Where the link allows it, what comes is taken as it comes, and what may go leaves without
    waiting; then the tasks only see the end."""

    def __init__(self, line: Line, link: MountPort) -> None:
        self._line = line
        self._mount = line.mount
        self._link = link
        self._work = asyncio.Event()
        """There may be something to send."""
        self._waits = False
        """Whether everything was sent that may be: what is new may leave at once."""
        self._failed: Exception | None = None
        """Why it is over, where that did not come up in one of its tasks."""

    async def run(self, key: UUID, seconds: float) -> None:
        """`seconds`: how long the answer to the request may take."""
        try:
            await self._begin(key, seconds)
            if self._mount.state in GOING_ON:
                await self._go_on()
        finally:
            self._link.cancel()

    async def _begin(self, key: UUID, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._link.send([self._mount.request(key)])
                first, *rest = await self._receive()
        except TimeoutError:
            raise CannotConnect(f"{self._address} did not answer a mount in {seconds:g} seconds") from None
        if isinstance(first, Refused):
            raise first.error
        if not isinstance(first, Mounted):
            raise CannotConnect(f"{self._address} began a mount with {type(first).__name__}")
        self._mount.answered(first)
        if self._mount.state is State.READY:
            self._line.ready()
        self._take_all(rest)

    async def _go_on(self) -> None:
        reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and writing.exception() is not None:
                await asyncio.wait([reading], timeout=LAST_WORD_SECONDS)
        finally:
            self._link.cancel()
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        for task in (reading, writing):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _read(self) -> None:
        self._link.hear(self._hear)
        while self._mount.state in GOING_ON:
            try:
                frames = await self._receive()
            except _Over:
                if self._failed is not None:
                    raise self._failed from None
                return
            self._take_all(frames)

    def _hear(self, frames: Sequence[ServerFrame]) -> None:
        try:
            self._take_all(frames)
        except Exception as error:
            self._failed = error
            raise _Over from error
        if self._mount.state not in GOING_ON:
            raise _Over

    async def _write(self) -> None:
        while self._mount.state in GOING_ON:
            self._work.clear()
            if self._failed is not None:
                raise self._failed
            if frames := self._next():
                await self._link.send(frames)
            elif self._mount.state in GOING_ON:
                self._waits = True
                try:
                    await self._work.wait()
                finally:
                    self._waits = False

    def go_on(self) -> None:
        """There may be something to send: send it at once, where that needs no waiting."""
        while self._waits and not self._work.is_set() and self._link.may_post and self._mount.state in GOING_ON:
            try:
                frames = self._next()
                if frames:
                    self._link.post(frames)
            except Exception as error:  # noqa: BLE001  the task raises it
                self._failed = error
                break
            if not frames and self._mount.state in GOING_ON:
                return
        self._work.set()

    def _next(self) -> list[ClientFrame]:
        """What may go now."""
        frames: list[ClientFrame] = [*self._mount.take()]
        credit = self._mount.credit()
        if credit is not None:
            frames.append(credit)
        return frames

    async def _receive(self) -> Sequence[ServerFrame]:
        with _damage_is_no_refusal():
            frames = await self._link.receive()
        if not frames:
            raise CannotConnect(f"{self._address} ended the mount without a word")
        return frames

    def _take_all(self, frames: Sequence[ServerFrame]) -> None:
        refused: WaltzError | None = None
        try:
            with _damage_is_no_refusal():
                for frame in frames:
                    if isinstance(frame, Refused):
                        refused = frame.error
                        self._mount.ends(frame.untaken)
                        break
                    if self._mount.state in GOING_ON:  # else the question is answered, and the rest is not needed
                        self._take(frame)
        finally:
            self._line.settled()
        if refused is not None:
            raise refused

    def _take(self, frame: ServerFrame) -> None:
        match frame:
            case Committals():
                self._mount.committed(frame)
            case Refusals():
                self._mount.refused(frame)
            case Feed(run):
                bad = first_bad(run)
                if bad is not None:
                    raise BadFrame(f"record {run.first_id + bad} was damaged on the way")
                self._mount.fed(run.first_id, run.last_id, len(run.data))
                self._mount.seen.note(run.times)
                self._line.fed(len(run.data), run)
            case HeadFeed(heads) if self._mount.state is State.ASKING:
                self._mount.told(heads)
            case HeadFeed(heads):
                self._mount.fed_heads(heads)
                self._mount.seen.note(frame.times)
                self._line.fed(heads.nbytes, frame)
            case _:
                raise BadFrame(f"a {type(frame).__name__} frame was not asked for")

    @property
    def _address(self) -> str | None:
        assert self._mount.place is not None
        return self._mount.place.address


@contextmanager
def _damage_is_no_refusal() -> Iterator[None]:
    try:
        yield
    except BadFrame as error:
        raise CannotConnect(f"what the server sent cannot be right: {error.message}") from error
