"""Member of a consumer group in one partition: finds the owner, joins, receives deliveries, and sends acknowledgements.

When the stream is lost, the member joins again under the same name. The owner delivers again what it delivered on the
lost stream, so what no caller has taken yet is dropped here. Unanswered acknowledgements are sent again if the epoch has
not changed, because the owner then knows which ones it has received. In another epoch all of them are void.

An answer has the number of ids that were too late, not the ids. So if some were too late, each id is asked for by
itself, which is safe for acknowledgements that may be repeated. Those that may not are sent for one delivery at a time.

Foreign transactions are acknowledged when they arrive, and the application does not get them. In an ordered group
nothing is settled before everything in front of it, so they are acknowledged with the delivery in front of them.

In an ordered group a failure brings back everything after it, or nothing if it was the last try. So after a failure the
queue waits until the owner has answered whether its deliveries are still valid."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import UUID

from waltzd.client.delivery import Delivery, GroupEpoch, PendingAck
from waltzd.client.routes import Routes, pause_seconds
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Serializer, Transaction
from waltzd.cluster.groups import MadeGroup
from waltzd.errors import CannotConnect, DeliveryLate, NoSuchGroup, Retry, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.checksum import crc32
from waltzd.format.record import NO_TIME
from waltzd.protocol.groups import (
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
    Mode,
    Paused,
)
from waltzd.protocol.peers import AttendPort
from waltzd.protocol.timelines import Lineage

TOGETHER_MAX = 4096
"""Limit of deliveries in one acknowledgement."""
ACKS_MAX = 32
"""Limit of acknowledgements in one message."""
SETTLED_SECONDS = 1.0
"""Seconds after which a lost stream is replaced without a pause."""
OTHER_EPOCH = (
    "the group is in another epoch there: the partition had a change of owner, or the group a reset or other settings"
)
"""Reason why a delivery of an earlier join is too late."""
NO_REQUEST = (-1, -1, -1)
_log = logging.getLogger("waltz.client")


class ConsumerListener(Protocol):
    """Subscription that a consumer reports to."""

    def arrived(self, consumer: PartitionConsumer, count: int) -> None: ...
    def is_taking(self, consumer: PartitionConsumer) -> bool: ...
    def told(self, consumer: PartitionConsumer, verb: AckKind, count: int) -> None: ...


class PartitionConsumer:
    def __init__(
        self,
        partition: int,
        made: MadeGroup,
        member: str,
        room: int | None,
        *,
        routes: Routes,
        settings: ClientSettings,
        serializer: Serializer[Any] | None,
        listener: ConsumerListener,
    ) -> None:
        self.partition = partition
        self.group = made.meta.name
        self.is_ordered = made.meta.mode is Mode.ORDERED
        """Whether the group delivers in order, one transaction at a time."""
        self.queue: deque[Delivery[Any]] = deque()
        """Deliveries that no caller has taken yet."""
        self.in_progress: dict[Delivery[Any], None] = {}
        """Deliveries that handlers are processing; they are extended until the handlers have ended."""
        self.holds = 0
        """Number of reasons to take nothing from the queue; 0 if it may be taken from."""
        self.paused = ""
        """Reason why the owner delivers nothing; empty if it delivers."""
        self.joined: Joined | None = None
        self.trouble: WaltzError | None = None
        """Error that ended the last stream; None while the member is joined."""
        self._lineage = Lineage()
        """Timelines of the log, as the owner reported them."""
        self._made_at = made.made_at
        self._member = member
        self._room = room
        self._routes = routes
        self._settings = settings
        self._serializer = serializer
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._group_epoch: GroupEpoch | None = None
        """Epoch of the current or the last stream."""
        self._last: Delivery[Any] | None = None
        """Newest delivery for the application; None before the first."""
        self._newest: dict[int, int] = {}
        """Tag of the newest delivery of each id that this member has."""
        self._unsent: deque[PendingAck] = deque()
        self._unanswered: dict[int, PendingAck] = {}
        self._unkept: deque[PendingAck] = deque()
        """Acknowledgements that are answered, and whose callers wait until they are durable."""
        self._number = self._kept = 0
        """Number of the last acknowledgement on this stream, and of the last one that is durable."""
        self._joined_at = 0.0
        self._is_leaving = self._has_left = False
        self._is_closed = False
        self._changed = asyncio.Event()
        """Set when there may be something to send."""
        self._is_over = asyncio.Event()
        """Set while there is no stream. An owner ends the stream of a member that left, after the last answer."""
        self._is_over.set()
        self._beat: asyncio.TimerHandle | None = None

    @property
    def cluster(self) -> UUID:
        """Key of the cluster."""
        return self._routes.topology.cluster_key

    # -- the stream ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run one stream after the other until the member has left. Raise only errors that the next stream would meet
        again."""
        attempt = 0
        while True:
            place = None
            try:
                place = await self._routes.find(self.partition)
                assert place.address is not None
                async with self._routes.at(place.address) as port:
                    talk = self._consume(port.attend(), place.generation)
                    await self._routes.unless_replaced(self.partition, place, talk)
                return
            except WaltzError as error:
                if self.joined is not None and self._loop.time() - self._joined_at > SETTLED_SECONDS:
                    attempt = 0
                self._lost(error)
                if place is not None:
                    self._routes.failed(self.partition, place, error)
                if error.retry is Retry.NEVER:
                    raise
            await asyncio.sleep(pause_seconds(attempt, self.partition))
            attempt += 1

    async def _consume(self, stream: AttendPort, generation: int) -> None:
        key = self._routes.topology.cluster_key
        request = JoinRequest(key, self.partition, generation, self.group, self._member, self._room, tells_begun=True)
        tasks: list[asyncio.Task[None]] = []
        try:
            try:
                async with asyncio.timeout(self._settings.call_seconds):
                    await stream.send([request])
                    frames = await self._receive(stream)
            except TimeoutError:
                raise CannotConnect(f"the owner of partition {self.partition} did not answer a member") from None
            match frames[0] if frames else None:
                case Joined() as joined:
                    self._join(joined)
                case Dismissed(error):
                    raise error
                case _:
                    raise CannotConnect(f"the owner of partition {self.partition} did not answer the request to join")
            self._take(frames[1:])
            tasks = [asyncio.create_task(work) for work in (self._read(stream), self._write(stream))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():  # the reason in the last frame is better than the error of the writer
                await asyncio.wait(tasks[:1], timeout=1.0)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, stream: AttendPort) -> Sequence[DeliveryFrame]:
        try:
            frames = await stream.receive()
        except BadFrame as error:
            raise CannotConnect(f"the owner of partition {self.partition} sent a damaged frame: {error.message}") from error
        if not frames and not self._is_leaving:
            raise CannotConnect(f"the owner of partition {self.partition} ended the stream of a member")
        return frames or ()

    async def _read(self, stream: AttendPort) -> None:
        try:
            while (frames := await self._receive(stream)) or not self._is_leaving:
                self._take(frames)
        finally:
            self._is_over.set()

    async def _write(self, stream: AttendPort) -> None:
        """Send acknowledgements; those that come while a message is being sent are sent together in the next one."""
        while True:
            self._changed.clear()
            frames: list[MemberFrame] = []
            begun: list[PendingAck] = []
            while self._unsent and len(frames) < ACKS_MAX:
                ack = self._unsent.popleft()
                self._number += 1
                if ack.verb is AckKind.BEGIN:
                    begun.append(ack)
                else:
                    self._unanswered[self._number] = ack
                frames.append(ack.frame(self._number))
            is_last = self._is_leaving and not self._has_left and not self._unsent
            if frames or is_last:
                try:
                    await stream.send([*frames, Leave()] if is_last else frames)
                except BaseException:
                    self._unsent.extendleft(begun)  # `_lost` settles these acknowledgements
                    raise
                for ack in begun:
                    self._done(ack, is_kept=True)
                self._has_left |= is_last
            else:
                await self._changed.wait()

    def _join(self, joined: Joined) -> None:
        if joined.made_at != self._made_at:
            raise NoSuchGroup(f"group {self.group} was removed, and a new one with its name was created", group=self.group)
        _log.debug("partition %d: member %s of group %s joined", self.partition, self._member, self.group)
        try:
            self._lineage = Lineage(joined.timelines)
        except ValueError as error:
            raise CannotConnect(f"the owner reported invalid timelines of partition {self.partition}: it {error}") from None
        group_epoch = GroupEpoch(joined.made_at, joined.epoch, self._lineage.current)
        self.joined, self.trouble, self._number, self._kept = joined, None, 0, 0
        self._joined_at = self._loop.time()
        again = [*self._unanswered.values(), *self._unkept, *self._unsent]
        self._unanswered.clear()
        self._unkept.clear()
        self._unsent.clear()
        is_same, self._group_epoch = group_epoch == self._group_epoch, group_epoch
        for ack in again:
            if is_same and ack.verb in (AckKind.ACKNOWLEDGE, AckKind.REJECT):
                self._unsent.append(ack)
            else:
                self._miss(ack, OTHER_EPOCH)
        if not is_same:
            self._newest.clear()
        self._is_over.clear()
        self._plan_beat()

    def _lost(self, error: WaltzError) -> None:
        if self.trouble is None or type(error) is not type(self.trouble):
            what = f"partition {self.partition}: member {self._member} of group {self.group}"
            _log.info("%s: %s %s", what, error.code, error.message)
        self.joined, self.trouble, self.paused = None, error, ""
        for ack in [one for one in self._unsent if one.verb is AckKind.BEGIN]:
            self._unsent.remove(ack)
            self._done(ack, is_kept=True)
        self.drop()
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def drop(self) -> None:
        """Drop the deliveries that no caller has taken yet; the owner delivers them again."""
        for one in self.queue:
            self._forget(one)
        self.queue.clear()

    # -- deliveries   -------------------------------------------------------------------------------------------------

    def _take(self, frames: Sequence[DeliveryFrame]) -> None:
        for frame in frames:
            match frame:
                case Deliveries():
                    self._take_in(frame)
                case AckResult():
                    self._answer(frame)
                case AcksDurable(number):
                    self._keep(number)
                case Paused(reason):
                    self.paused = reason
                    if reason:
                        _log.warning("partition %d: group %s pauses: %s", self.partition, self.group, reason)
                case Dismissed(error):
                    raise error
                case Joined():
                    raise CannotConnect(f"the owner of partition {self.partition} answered a join twice")

    def _take_in(self, frame: Deliveries) -> None:
        joined, group_epoch = self.joined, self._group_epoch
        assert joined is not None
        assert group_epoch is not None
        if frame.epoch != group_epoch.epoch:
            raise CannotConnect(f"the owner of partition {self.partition} sent deliveries of another epoch")
        until, payloads, start = self._loop.time() + joined.ack_wait_ms / 1000, bytes(frame.payloads), 0
        columns = (frame.ids, frame.attempts, frame.headers, frame.times, frame.lengths, frame.data_crcs)
        found: list[Delivery[Any]] = []
        if not len(frame.ids):
            return
        for id, attempt, header, time, length, crc in zip(*(column.tolist() for column in columns), strict=True):
            payload = payloads[start : start + length]
            start += length
            if crc32(payload) != crc:
                raise CannotConnect(f"the payload of transaction {id} was damaged on the way")
            transaction: Transaction[Any] = Transaction(
                self.partition,
                id,
                header,
                length,
                crc,
                NO_REQUEST,
                payload,
                None,
                self._serializer,
                None if time == NO_TIME else time,
                lineage=self._lineage,
                timeline=self._lineage.current,
            )
            self._newest[id] = frame.tag
            found.append(
                Delivery(transaction, self.group, attempt, source=self, group_epoch=group_epoch, tag=frame.tag, until=until)
            )
        if self.is_ordered and self.queue and found[0].id <= self.queue[-1].id:
            self.drop()  # they are delivered again after this one
        elif not self.is_ordered and self.queue:
            coming = {one.id for one in found}
            if not coming.isdisjoint(one.id for one in self.queue):
                self.queue = deque(one for one in self.queue if one.id not in coming)
        while len(self._newest) > max(1000, 4 * joined.room):  # deliveries that the application dropped
            del self._newest[next(iter(self._newest))]
        found = self._pass_over(found)
        self.queue.extend(found)
        self._listener.arrived(self, len(found))

    def _pass_over(self, found: Sequence[Delivery[Any]]) -> list[Delivery[Any]]:
        """Return the deliveries for the application. Acknowledge the foreign ones, or attach each to the delivery in
        front of it in an ordered group."""
        own: list[Delivery[Any]] = []
        for one in found:
            front = self._last if self.is_ordered else None
            if not one.transaction.is_foreign:
                own.append(one)
                self._last = one
            elif front is None or front._is_settled or front._said is AckKind.ACKNOWLEDGE or self._why_late(front):
                self._acknowledge([one])
            else:
                front._behind.append(one)
        return own

    def _acknowledge(self, foreign: Sequence[Delivery[Any]]) -> None:
        for one in foreign:
            self._pending_ack(AckKind.ACKNOWLEDGE, one, None, "").deliveries.append(one)
        self._changed.set()

    # -- acknowledgements --------------------------------------------------------------------------------------------------

    async def begin(self, deliveries: Sequence[Delivery[Any]]) -> bool:
        """Report deliveries before the application gets them. Return False if they are not this member's any more.

        It returns when the report has left this process: the application may end the process at once, and such a
        transaction must use up its tries."""
        joined = self.joined
        if joined is None:
            return False
        if joined.hears_begun:
            ack = PendingAck(AckKind.BEGIN, deliveries[0]._group_epoch)
            ack.deliveries.extend(deliveries)
            self._unsent.append(ack)
            self._changed.set()
            await asyncio.shield(ack.answered)
        return self.joined is joined and not self._is_closed

    def put_back(self, deliveries: Sequence[Delivery[Any]]) -> None:
        """Put back deliveries that were picked and not handed out. A newer delivery of the same transaction stays."""
        mine = [one for one in deliveries if self.joined is not None and self._why_late(one) is None]
        if mine and not (self.is_ordered and self.queue and self.queue[0].id <= mine[-1].id):
            self.queue.extendleft(reversed(mine))

    async def settle(
        self,
        verb: AckKind,
        deliveries: Sequence[Delivery[Any]],
        *,
        delay: float | None = None,
        reason: str = "",
        durable: bool = False,
    ) -> list[DeliveryLate]:
        """Send an acknowledgement; return the errors of deliveries that were too late. While the partition has no owner
        this waits, and sends it to the next owner. The end of the subscription ends the wait."""
        late: list[DeliveryLate] = []
        acks: dict[PendingAck, list[Delivery[Any]]] = {}
        for one in deliveries:
            why = self._why_late(one)
            if why is not None:
                one._said = None
                late.append(why)
                continue
            ack = self._pending_ack(verb, one, delay, reason)
            ack.deliveries.append(one)
            if verb is AckKind.ACKNOWLEDGE:
                ack.deliveries += one._behind
            ack.is_durable |= durable
            acks.setdefault(ack, []).append(one)
        self._changed.set()
        for ack in acks:
            await asyncio.shield(ack.answered)
            if durable:
                await asyncio.shield(ack.kept)
        for ack, mine in acks.items():
            late += [error for one, error in ack.late if any(one is own for own in mine)]
        return late

    def _pending_ack(self, verb: AckKind, one: Delivery[Any], delay: float | None, reason: str) -> PendingAck:
        """Return a pending acknowledgement that `one` may be added to. Acknowledgements that may be repeated are sent
        together."""
        last = self._unsent[-1] if self._unsent else None
        if (
            last is not None
            and last.parent is None
            and verb in (AckKind.ACKNOWLEDGE, AckKind.EXTEND)
            and (last.verb, last.group_epoch) == (verb, one._group_epoch)
            and len(last.deliveries) < TOGETHER_MAX
        ):
            return last
        ack = PendingAck(verb, one._group_epoch, delay=delay, reason=reason)
        self._unsent.append(ack)
        if verb in (AckKind.REFUSE, AckKind.REJECT) and self.is_ordered:
            self.holds += 1
            ack.answered.add_done_callback(lambda _: self._release_checked(one))
        return ack

    def _why_late(self, one: Delivery[Any]) -> DeliveryLate | None:
        if self._is_closed:
            return self._late(one, "the subscription is closed")
        if one._group_epoch != self._group_epoch:
            return self._late(one, OTHER_EPOCH)
        if self._newest.get(one.id, one._tag) != one._tag:
            return self._late(one, "it was taken away, and given to this member again")
        return None

    def _late(self, one: Delivery[Any], why: str) -> DeliveryLate:
        return DeliveryLate(
            f"transaction {one.id} of partition {self.partition} can no longer be settled by this member in group "
            f"{self.group}: {why}",
            partition=self.partition,
            id=one.id,
        )

    def _answer(self, answer: AckResult) -> None:
        ack = self._unanswered.pop(answer.number, None)
        if ack is None:
            raise CannotConnect(f"the owner of partition {self.partition} answered an acknowledgement that was not sent")
        bad = answer.is_old or answer.late or answer.unknown
        if not bad:
            self._settled(ack)
        elif len(ack.deliveries) == 1:
            if answer.unknown:
                self._refuse(ack, "the group has never delivered it")
            elif answer.is_old:
                self._refuse(ack, "the group is in another epoch there")
            else:
                self._refuse(ack, "its `ack_wait` has passed, and another member has it or will get it")
            if self.is_ordered:
                self.drop()  # the owner took back everything after it
            elif (one := ack.deliveries[0]) in self.queue:
                self.queue.remove(one)
        else:
            ack.parts = ack.unkept = len(ack.deliveries)
            for one in ack.deliveries:
                part = PendingAck(ack.verb, ack.group_epoch, parent=ack)
                part.deliveries.append(one)
                part.is_durable = ack.is_durable
                self._unsent.append(part)
            self._changed.set()

    def _settled(self, ack: PendingAck) -> None:
        if ack.verb is AckKind.EXTEND:
            assert self.joined is not None
            until = self._loop.time() + self.joined.ack_wait_ms / 1000
            for one in ack.deliveries:
                one._until = until
        else:
            for one in ack.deliveries:
                one._is_settled = True
                self._forget(one)
        if not ack.answered.done():
            self._listener.told(self, ack.verb, len(ack.deliveries))
        self._done(ack, is_kept=not ack.is_durable or ack.number <= self._kept)
        if not ack.kept.done():
            self._unkept.append(ack)

    def _refuse(self, ack: PendingAck, why: str) -> None:
        for one in ack.deliveries:
            one._said = None
            self._forget(one)
            ack.late.append((one, self._late(one, why)))
        self._done(ack, is_kept=True)

    def _miss(self, ack: PendingAck, why: str) -> None:
        """Settle an acknowledgement whose answer will not come, because the stream or the epoch has ended."""
        if ack.answered.done():  # answered, and a caller waits until it is durable
            self._refuse(ack, f"it was received, but {why} before it was saved")
        elif ack.verb is AckKind.REFUSE:  # it is delivered again, as requested
            for one in ack.deliveries:
                one._is_settled = True
            self._done(ack, is_kept=True)
        else:
            self._refuse(ack, why)

    def _done(self, ack: PendingAck, *, is_kept: bool) -> None:
        """Mark an acknowledgement as answered; if `is_kept`, nothing more is waited for."""
        parent = ack.parent
        if not ack.answered.done():
            ack.answered.set_result(None)
            if parent is not None:
                parent.parts -= 1
        if is_kept and not ack.kept.done():
            ack.kept.set_result(None)
            if parent is not None:
                parent.late += ack.late
                parent.unkept -= 1
        if parent is not None and parent.parts == 0:
            self._done(parent, is_kept=parent.unkept == 0)

    def _forget(self, one: Delivery[Any]) -> None:
        if self._newest.get(one.id) == one._tag:
            del self._newest[one.id]

    def _keep(self, number: int) -> None:
        self._kept = number
        while self._unkept and self._unkept[0].number <= number:
            ack = self._unkept.popleft()
            self._done(ack, is_kept=True)

    # -- order and time ------------------------------------------------------------------------------------------------

    def _release_checked(self, failed: Delivery[Any]) -> None:
        """Release the queue after a failure in an ordered group, once the owner has confirmed that its deliveries are
        still valid."""
        following = [*failed._behind, *self.queue]
        if not following or self.joined is None:
            self._release()
            return
        ack = PendingAck(AckKind.EXTEND, following[0]._group_epoch)
        ack.deliveries.extend(following)
        self._unsent.append(ack)
        self._changed.set()
        ack.answered.add_done_callback(lambda _: self._release([] if ack.late else failed._behind))

    def _release(self, foreign: Sequence[Delivery[Any]] = ()) -> None:
        self._acknowledge([one for one in foreign if self._why_late(one) is None])
        self.holds -= 1
        self._listener.arrived(self, 0)

    def _plan_beat(self) -> None:
        assert self.joined is not None
        self._beat = self._loop.call_later(self.joined.ack_wait_ms / 2000, self._prolong)

    def _prolong(self) -> None:
        """Extend the deliveries that handlers are processing, and those that wait to be taken."""
        self._plan_beat()
        found = [one for one in self.in_progress if self._why_late(one) is None]
        if self._listener.is_taking(self):
            found += self.queue
        for start in range(0, len(found), TOGETHER_MAX):
            assert self._group_epoch is not None
            ack = PendingAck(AckKind.EXTEND, self._group_epoch)
            ack.deliveries.extend(found[start : start + TOGETHER_MAX])
            self._unsent.append(ack)
        self._changed.set()

    # -- the end -------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Send the last acknowledgements and leave; the owner gives what is not settled to other members at once."""
        self.drop()
        self._is_leaving = True
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.close_seconds):
                await self._is_over.wait()

    def end(self, why: str = "the subscription was closed") -> None:
        """End the consumer, and fail everything that waits for an answer."""
        self._is_closed = True
        if self._beat is not None:
            self._beat.cancel()
        left = [*self._unanswered.values(), *self._unkept, *self._unsent]
        self._unanswered.clear()
        self._unkept.clear()
        self._unsent.clear()
        for ack in left:
            self._miss(ack, why)
        self.drop()
