"""The stream of one member of a group in one partition, at the owner.

Frames are collected and sent as one message when the message before has left: results of acknowledgements first, then
one frame of deliveries. Until then only the ids of deliveries are kept, so a member that does not read costs no memory
for payloads. Frames of the member are validated here; an invalid one ends this stream only.

The last frame says why the stream ends. The member has some seconds to close it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np

from waltzd.cluster.groups import MS_MAX
from waltzd.errors import CannotConnect, NotGranted, NotReady, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.layout import ID_MAX
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    GroupMember,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
    Paused,
)
from waltzd.protocol.peers import AttendLink
from waltzd.protocol.policy import Bucket, Rights
from waltzd.server.clients.authorizer import check_attend
from waltzd.server.clients.pipeline import Capacity
from waltzd.server.clients.registry import QuotaUsage
from waltzd.server.groups.delivery_tracker import Delivery
from waltzd.server.subscriptions.group_partition import GroupPartition, RecordBlock

FRAME_BYTES = 1 << 20
STRETCHES_MAX = 4096
REASON_MAX = 4096
ANSWERS_MAX = 1000
"""Number of unsent results at which no more frames of the member are read."""
WORK_PER_SECOND = 100_000
"""Deliveries examined each second for the acknowledgements of one member: as many as it can have in flight. Deliveries
that it acknowledges are free, they were paid for when they were sent."""
WORK_AT_ONCE = 5_000
"""Number of deliveries examined after which other tasks run."""
REFUSED_SECONDS = 2.0
"""Seconds that a dismissed member has to close the stream."""
LAST_SECONDS = 5.0
"""Seconds that a leaving member is told which acknowledgements are durable."""


class ConsumerStream:
    def __init__(
        self, link: AttendLink, request: JoinRequest, group_partition: GroupPartition, usage: QuotaUsage, capacity: Capacity
    ) -> None:
        """Join the group; raise if that is refused. `serve` must follow."""
        self.name = request.member
        self.error: WaltzError | None = None
        self.changed = asyncio.Event()
        """Set when there may be something to send."""
        self._link = link
        self._partition = request.partition
        self._group = request.group
        self._group_partition = group_partition
        self._usage = usage
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._epoch = group_partition.epoch
        self._deliveries: deque[Delivery] = deque()
        """Deliveries of this member that are not sent yet."""
        self._results: list[AckResult] = []
        self._later: deque[tuple[int, AckResult]] = deque()
        """Results that wait until a change is durable, with the number of the change."""
        self._unkept: deque[tuple[int, int | None, int]] = deque()
        """Acknowledgements not known to be durable: number, the change that makes it so, and an id. The change is None
        while the id waits for earlier ones."""
        self._kept: int | None = None
        self._paused = self._reported_pause = ""
        self._pace = Bucket(WORK_PER_SECOND, self._loop.time())
        self._work_in_turn = 0
        self._number = 0
        self._is_leaving = False
        self._is_done = False
        self._sent = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        """Timer that runs while a quota holds deliveries back; None otherwise."""
        self.delivered = self.acknowledged = self.failed = 0
        self._room = 0
        capacity.enter(usage)
        try:
            self._room = group_partition.join(self, request.room, tells_begun=request.tells_begun)
        except BaseException:
            capacity.leave(usage)
            raise

    # -- events ------------------------------------------------------------------------------------------------------

    def give(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self.changed.set()

    def kept(self, kept: int) -> None:
        """Send the results that waited for changes up to this number."""
        while self._later and self._later[0][0] <= kept:
            self._results.append(self._later.popleft()[1])
            self.changed.set()
        self._report_durable(kept)
        if self._unkept:
            self.changed.set()

    def _report_durable(self, kept: int) -> None:
        while self._unkept:
            number, change, id = self._unkept[0]
            if change is None and self._group_partition.is_settled(id):
                change = self._group_partition.changes
                self._unkept[0] = number, change, id
            if change is None or change > kept:
                return
            self._unkept.popleft()
            self._kept = number
            self.changed.set()

    def _check_void(self) -> None:
        """End the stream if an acknowledgement is void that a caller may wait for. The member joins again, sends it once
        more, and hears that it is too late: no frame takes an acknowledgement back."""
        if not self._unkept or self._is_leaving or self.error is not None:
            return
        _, change, id = self._unkept[0]
        group_partition = self._group_partition
        if change is None and not group_partition.is_settled(id) and not group_partition.is_waiting(id, self.name):
            group_partition.leave(self, is_lost=False)
            self.dismiss(
                NotReady(
                    f"partition {self._partition}: id {id}, which a member of group {self._group} acknowledged, is "
                    "delivered again because one in front of it is"
                )
            )

    def pause(self, reason: str) -> None:
        if reason != self._paused:
            self._paused = reason
            self.changed.set()

    def prolong(self) -> None:
        """Extend the deliveries that could not be sent yet."""
        for delivery in self._deliveries:
            if self._group_partition.is_out(delivery):
                self._group_partition.extend(delivery)

    def dismiss(self, error: WaltzError) -> None:
        """End the stream: send the results that wait, then this error."""
        if self.error is None:
            self.error = error
            self.changed.set()
            self._sent.set()

    def review(self, rights: Rights) -> None:
        """Apply a changed policy; dismiss the member if its right to the group is gone."""
        self._usage.grant(rights.quotas)
        try:
            check_attend(rights, self._partition, self._group)
        except NotGranted as error:
            self._group_partition.leave(self, is_lost=False)
            self.dismiss(error)

    # -- the stream ----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve the stream until the member leaves or closes it. Raise the error that ended it, after the member was
        told."""
        sending = asyncio.create_task(self._send(), name=f"to member {self.name} of {self._group}")
        receiving = asyncio.create_task(self._receive(), name=f"from member {self.name} of {self._group}")
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                _result(receiving)
                await asyncio.wait((sending,), timeout=LAST_SECONDS if self.error is None else REFUSED_SECONDS)
            elif self.error is not None:
                await asyncio.wait((receiving,), timeout=REFUSED_SECONDS)
            _result(sending)
        finally:
            self._group_partition.leave(self, is_lost=not self._is_leaving)
            self._group_partition.forget(self)
            self._capacity.leave(self._usage)
            for task in (sending, receiving):
                task.cancel()
            if self._alarm is not None:
                self._alarm.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)
        if self.error is not None:
            raise self.error

    async def _send(self) -> None:
        group_partition = self._group_partition
        await self._link.send(
            [
                Joined(
                    made_at=group_partition.key.made_at,
                    epoch=self._epoch,
                    mode=group_partition.meta.mode,
                    ack_wait_ms=group_partition.meta.ack_wait_ms,
                    room=self._room,
                    hears_begun=True,
                    timelines=tuple(one.bare for one in group_partition.pipeline.session.lineage.later),
                )
            ]
        )
        while True:
            self.changed.clear()
            self._check_void()
            error, frames = self.error, self._control_frames()
            if error is not None:
                frames.append(Dismissed(error))
            elif (frame := self._frame()) is not None:
                frames.append(frame)
            if frames:
                await self._link.send(frames)
            if error is not None or (self._is_done and not self._unkept and not self._later):
                return
            if not frames:
                await self.changed.wait()

    def _control_frames(self) -> list[DeliveryFrame]:
        frames: list[DeliveryFrame] = [*self._results]
        self._results.clear()
        self._sent.set()
        if self._kept is not None:
            frames.append(AcksDurable(self._kept))
            self._kept = None
        if self._paused != self._reported_pause:
            self._reported_pause = self._paused
            frames.append(Paused(self._paused))
        return frames

    def _frame(self) -> Deliveries | None:
        """Build a frame from unsent deliveries, as many as fit and are in memory; None if there are none."""
        if not self._deliveries or self._is_held():
            return None
        group_partition, size = self._group_partition, 0
        found: list[tuple[Delivery, RecordBlock]] = []
        block: RecordBlock | None = None
        while self._deliveries and size < FRAME_BYTES:
            delivery = self._deliveries[0]
            if not group_partition.is_out(delivery):
                self._deliveries.popleft()
                continue
            if block is None or not block.first_id <= delivery.id <= block.last_id:
                block = group_partition.block(delivery.id)
                if block is None:
                    group_partition.want(delivery.id, max(delivery.id, self._deliveries[-1].id))
                    break
            length = block.length(delivery.id)
            if found and size + length > FRAME_BYTES:
                break
            size += length
            found.append((delivery, block))
            self._deliveries.popleft()
        if not found:
            return None
        self.delivered += len(found)
        self._usage.fed(size)
        return _deliveries(self._epoch, found)

    def _is_held(self) -> bool:
        if self._alarm is None and (wait := self._usage.feed_wait()) > 0:
            self._alarm = self._loop.call_later(wait, self._go_on)
        return self._alarm is not None

    def _go_on(self) -> None:
        self._alarm = None
        self.changed.set()

    # -- frames of the member ------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Handle frames until the member leaves or closes the stream. After an invalid frame, only wait for the member
        to close it."""
        try:
            while not self._is_leaving and (frames := await self._link.receive()) is not None:
                for frame in frames:
                    if self.error is None:
                        await self._paced(frame)
                while len(self._results) + len(self._later) > ANSWERS_MAX and self.error is None:
                    self._sent.clear()
                    await self._sent.wait()
        except CannotConnect:
            raise
        except WaltzError as error:
            self._group_partition.leave(self, is_lost=True)
            self.dismiss(error)
            return
        self._is_done = True
        self._group_partition.leave(self, is_lost=not self._is_leaving)
        if self._unkept or self._later:
            self._group_partition.write_now()
        self.changed.set()

    async def _paced(self, frame: MemberFrame) -> None:
        """Handle a frame; then wait if its cost exceeds the member's rate."""
        before, settled = self._group_partition.work, self.acknowledged + self.failed
        self._take(frame)
        work = self._group_partition.work - before
        self._work_in_turn += work
        wait = self._pace.take(max(0, work - (self.acknowledged + self.failed - settled)), self._loop.time())
        if wait > 0:
            self._work_in_turn = 0
            await asyncio.sleep(wait)
        elif self._work_in_turn > WORK_AT_ONCE:
            self._work_in_turn = 0
            await asyncio.sleep(0)

    def _take(self, frame: MemberFrame) -> None:
        match frame:
            case Ack():
                self._take_ack(frame)
            case Leave():
                self._is_leaving = True
                self._group_partition.leave(self, is_lost=False)
                self._deliveries.clear()
            case JoinRequest():
                raise BadFrame("a second join request in one stream")

    def _take_ack(self, ack: Ack) -> None:
        check_ack(ack, self._number)
        self._number = ack.number
        if ack.verb is AckKind.BEGIN:
            self._group_partition.begin(self, ack)
            return
        result, number, is_aside = self._group_partition.acknowledge(self, ack)
        if is_aside:
            self._later.append((number, result))
        else:
            self._results.append(result)
        if ack.verb is AckKind.ACKNOWLEDGE:
            self.acknowledged += result.taken
        elif ack.verb is not AckKind.EXTEND:
            self.failed += result.taken
        unsettled = self._group_partition.unsettled(self.name) if ack.verb is AckKind.ACKNOWLEDGE and result.taken else None
        until = (number, -1) if unsettled is None else (None, unsettled)
        if self._unkept and self._unkept[-1][1:] == until:  # the same change makes both durable
            self._unkept.pop()
        self._unkept.append((ack.number, *until))
        self._report_durable(self._group_partition.kept)
        self.changed.set()

    # -- status ----------------------------------------------------------------------------------------------------------

    def describe(self) -> GroupMember:
        return GroupMember(
            name=self.name,
            who=self._usage.principal.name,
            peer=self._link.peer,
            in_flight=self._group_partition.held(self.name),
            room=self._room,
            delivered=self.delivered,
            acknowledged=self.acknowledged,
            failed=self.failed,
            age_ms=round(1000 * (self._loop.time() - self._began)),
        )


def _result(task: asyncio.Task[None]) -> None:
    if task.done():
        task.result()


def _deliveries(epoch: int, found: Sequence[tuple[Delivery, RecordBlock]]) -> Deliveries:
    """Build a frame of deliveries by selecting rows of each block's columns."""
    ids = np.array([delivery.id for delivery, _ in found], np.int64)
    heads, at = [], 0
    while at < len(found):
        block, end = found[at][1], at + 1
        while end < len(found) and found[end][1] is block:
            end += 1
        heads.append(block.heads[ids[at:end] - block.first_id])
        at = end
    rows = heads[0] if len(heads) == 1 else np.concatenate(heads)
    return Deliveries(
        epoch=epoch,
        tag=found[-1][0].tag,
        ids=ids,
        attempts=np.array([delivery.attempt for delivery, _ in found], np.int32),
        headers=rows["header"].astype(np.int32),
        times=np.array([block.time(delivery.id) for delivery, block in found], np.int64),
        lengths=rows["length"].astype(np.uint32),
        data_crcs=rows["data_crc"].astype(np.uint32),
        payloads=b"".join([block.payload(delivery.id) for delivery, block in found]),
    )


def check_ack(ack: Ack, before: int) -> None:
    """Validate an acknowledgement; raise `BadFrame` if it is malformed. `before` is the number of the last one."""
    firsts, lasts = ack.firsts, ack.lasts
    if ack.number <= before:
        raise BadFrame(f"the number of an acknowledgement does not rise: {ack.number} after {before}")
    if not 0 < len(firsts) <= STRETCHES_MAX or len(firsts) != len(lasts):
        raise BadFrame(
            f"an acknowledgement has {len(firsts)} first and {len(lasts)} last ids; at most {STRETCHES_MAX} are allowed"
        )
    if int(firsts[0]) < 0 or (lasts < firsts).any() or (firsts[1:] <= lasts[:-1]).any():
        raise BadFrame("the ranges of ids in an acknowledgement are negative, overlap or do not rise")
    if int(lasts[-1]) == ID_MAX:  # no log has that id, and a count of the ids from 0 on has no room in the answer
        raise BadFrame(f"an acknowledgement names the id {ID_MAX}; ids end below it")
    if ack.epoch < 0 or ack.tag < 0 or (ack.delay_ms is not None and not 0 <= ack.delay_ms <= MS_MAX):
        raise BadFrame(f"an acknowledgement has epoch {ack.epoch}, tag {ack.tag} and a delay of {ack.delay_ms} ms")
    if len(ack.reason) > REASON_MAX:
        raise BadFrame(f"the reason of an acknowledgement has {len(ack.reason)} characters; {REASON_MAX} are allowed")
