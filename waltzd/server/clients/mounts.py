"""One mount: a client's stream to the partition it writes and reads.

Receiving and sending go on side by side. What is received is checked here, so that a mistake in it ends this mount and no
other. What is to be sent gathers in the `MountHandle`, and leaves as one message as soon as the message before has left:
first outcomes, then at most one frame of the feed. For a client that stops reading, outcomes are kept. They are bounded,
as what is not answered counts against what the client may send. Of the feed only the position is kept.

What the client may do is in `Rights`, which change while the mount goes on (`review`). A right that is gone ends the
mount when it was used; one that was not used yet is asked for with the first frame that needs it.

A refusal is the last frame, behind everything that was decided, and says what was not taken. A status of the transport
could be overtaken by frames that are still on their way here; so what comes afterwards is read and ignored until the
client has noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from waltzd.errors import ArchiveAway, CannotConnect, NotGranted, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.audit import ANONYMOUS, Auditor, AuditRecord
from waltzd.protocol.batches import (
    SEQUENCE_MAX,
    AppendBatch,
    ClientFrame,
    Credit,
    Feed,
    FeedMode,
    HeadFeed,
    Mounted,
    MountRequest,
    Refused,
    ServerFrame,
    SingleAppend,
)
from waltzd.protocol.peers import MountLink
from waltzd.protocol.policy import Rights, first_denied
from waltzd.protocol.timelines import FIRST
from waltzd.server.clients.authorizer import check_append, check_subscribe, denied_lock
from waltzd.server.clients.feed import Cursor
from waltzd.server.clients.pipeline import STEP_BYTES_MAX, STEP_ROWS_MAX, MountHandle, Pipeline
from waltzd.server.clients.registry import ConnectedClient, QuotaUsage
from waltzd.server.core.step import check_payloads, slices
from waltzd.wire.flow_control import Budget, CoalescingSender

MOUNT_CALL = "Log/Mount"


class MountAudit:
    """Records of one mount in the audit log, whatever transport carries it: its begin, its end and the cause of the end.

    The transport passes each frame here; only the first frame of a client, and the answer to it, are examined.
    """

    def __init__(self, auditor: Auditor, *, who: str, peer: str) -> None:
        self._auditor = auditor
        self._deed = AuditRecord(who=who or ANONYMOUS, peer=peer, what=MOUNT_CALL)
        self._is_asked = self._is_mounted = False
        self._code: str | None = None

    def note_received(self, frames: Sequence[ClientFrame]) -> None:
        """Examine frames from the client."""
        if self._is_asked:
            return
        self._is_asked = True
        for frame in frames:
            if isinstance(frame, MountRequest):
                about = f"client={frame.client} feed={frame.feed.name.lower()}"
                self._deed = replace(self._deed, partitions=str(frame.partition), about=about)

    def note_sent(self, frames: Sequence[ServerFrame]) -> None:
        """Examine frames to the client."""
        if not self._is_mounted and isinstance(frames[0], Mounted):
            self._is_mounted = True
            self._auditor.note(self._deed)
        if isinstance(frames[-1], Refused):
            self._code = frames[-1].error.code

    def note_end(self) -> None:
        what = f"{MOUNT_CALL}/end" if self._is_mounted else MOUNT_CALL
        if self._is_mounted or self._code is not None:
            self._auditor.note(replace(self._deed, what=what, code=self._code))


FRAME_COST = 1 << 10
"""Cost of a frame besides its bytes, so that many small frames count against a limit in bytes."""
TEXT_MAX = 128
"""Limit in characters of the texts by which a client names itself."""
NUMBER_MAX = 1 << 40
"""Highest number of a mount. A client that mounts again without a pause does not reach it."""
ARCHIVE_SECONDS, ARCHIVE_SECONDS_MAX = 0.5, 30.0
"""First and longest pause before an archive that is away is asked again; the pause doubles."""
MEND_VIEW = (
    "set the view back to the fork after undoing what came from the transactions above it (`SqlView.reset`), or empty it "
    "and let it be built anew; a client without a view mounts the partition again with `set_partitions`"
)
"""Next step for a client that has seen transactions of another timeline."""
REFUSED_SECONDS = 2.0
"""Time that a client has to notice that it was refused."""


class Mount:
    def __init__(
        self,
        link: MountLink,
        request: MountRequest,
        pipeline: Pipeline,
        rights: Rights,
        usage: QuotaUsage,
        *,
        lap: int = 0,
    ) -> None:
        """`usage`: quotas used by the name in the client's certificate. `lap`: lap of the client id (`lap_of`)."""
        self._partition = request.partition
        self._takes_feed = request.feed is not FeedMode.NONE and not request.asks
        self._appends = not self._takes_feed
        """Whether it has appended, or does nothing but append."""
        self._rights = rights
        self._spaces = rights.locks(request.partition)
        mark = checked_mark(request, pipeline)
        self._handle = MountHandle(request.client, request.number, mark, usage, epoch=request.epoch, lap=lap)
        self._link = link
        self._pipeline = pipeline
        self._usage = usage
        self._connected: ConnectedClient
        """Entry of this mount in the registry; set by `serve`."""
        self._cursor = Cursor(
            pipeline.session,
            pipeline.cold_reader(),
            next_id=mark + 1,
            mode=request.feed,
            credit=request.credit,
            frame_bytes=pipeline.settings.feed_frame_bytes,
            asks=request.client if request.asks else None,
        )
        self._unanswered = Budget(pipeline.settings.mount_bytes_max, within=usage.inflight)
        self._last_sequence = -1
        self._barrier = -1
        self._client_is_done = False
        self._is_taking = False
        """Whether a message that was received is not taken to its end: what arrives now must not overtake it."""
        self._is_refused = False
        """Whether the refusal that ends the mount was handed to the link."""
        self._sender = CoalescingSender(self, self._handle.changed)
        self._handle.notify = self._sender.send_now
        self._cold_wanted = asyncio.Event()
        self._feed_alarm: asyncio.TimerHandle | None = None
        """Timer that resumes the feed; None while the quota does not hold it back."""

    # -- the work

    def join(self) -> None:
        """Replace an earlier mount of this client; raise if that is refused. `serve` must follow."""
        self._barrier = self._pipeline.join(self._handle)
        if self._cursor.asks is not None:
            self._cursor.last_id = self._barrier

    def review(self, rights: Rights) -> None:
        """Apply a changed policy. If the client used a right that is revoked, refuse the mount: batches that have no id
        by now are not appended."""
        self._rights, self._spaces = rights, rights.locks(self._partition)
        self._usage.grant(rights.quotas)
        try:
            if self._appends:
                check_append(rights, self._partition)
            if self._takes_feed:
                check_subscribe(rights, self._partition)
        except NotGranted as error:
            self._handle.refuse(error)

    async def serve(self, connected: ConnectedClient) -> None:
        """Serve until the client has finished and everything is answered. Raise the error that ended the mount, after the
        client was sent it."""
        self._connected = connected
        connected.end = self._end
        self._link.hear_singles(self._take_now)
        sending = asyncio.create_task(self._send())
        receiving = asyncio.create_task(self._receive())
        reading = asyncio.create_task(self._read_cold())
        ending = asyncio.create_task(self._handle.over.wait())
        tasks = (sending, receiving, reading, ending)
        try:
            await self._until_sent(tasks)
            if self._handle.error is not None:
                await asyncio.wait((receiving,), timeout=REFUSED_SECONDS)
        finally:
            self._handle.over.set()
            self._pipeline.leave(self._handle)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also where the mount is cancelled a second time
                self._unanswered.give(self._unanswered.used)
                if self._feed_alarm is not None:
                    self._feed_alarm.cancel()
        if self._handle.error is not None:
            raise self._handle.error

    def _end(self, error: WaltzError) -> bool:
        is_new = not self._handle.is_over
        self._handle.refuse(error)
        return is_new

    async def _until_sent(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        """Wait until the last frame is sent. A client that was refused and does not read has limited time."""
        sending, ending = tasks[0], tasks[-1]
        at_work = list(tasks)
        while not sending.done():
            timeout = REFUSED_SECONDS if ending.done() else None
            done, _ = await asyncio.wait(at_work, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in at_work:
                if task in done:
                    task.result()
            if not done:
                return
            at_work = [task for task in at_work if task not in done]

    async def _send(self) -> None:
        session, limits = self._pipeline.session, self._pipeline.settings.limits
        mounted = Mounted(
            session=session.session,
            barrier=self._barrier,
            limits=limits,
            format=session.format,
            timelines=tuple(one.bare for one in session.lineage.later),
            takes_singles=self._link.takes_singles,
        )
        await self._link.send([mounted])
        await self._sender.run()

    # -- what the sender asks

    def take(self) -> tuple[list[ServerFrame], int] | None:
        """Return what may leave as one message, and the cost of what it answers. A refusal is the last frame."""
        error = self._handle.error
        frames, cost = self._ready()
        if error is not None:
            frames.append(Refused(error, self._handle.untaken))
            self._is_refused = True
        return (frames, cost) if frames else None

    async def send(self, message: tuple[list[ServerFrame], int]) -> None:
        frames, cost = message
        await self._link.send(frames)
        self._unanswered.give(cost)

    def post(self, message: tuple[list[ServerFrame], int]) -> bool:
        frames, cost = message
        self._link.post(frames)
        self._unanswered.give(cost)
        if isinstance(frames[-1], Feed | HeadFeed):
            self._handle.changed.set()  # there may be more of the feed, which the task sends
        return False

    @property
    def may_post(self) -> bool:
        return self._handle.error is None and not self._client_is_done and self._link.may_post

    @property
    def is_over(self) -> bool:
        return self._is_refused or (self._client_is_done and self._unanswered.used == 0)

    def _ready(self) -> tuple[list[ServerFrame], int]:
        """Return the frames that can be sent at once as one message, and the cost of what they answer."""
        frames, cost = self._handle.outcomes()
        if self._handle.error is None and not self._is_feed_held():
            feed = self._cursor.take(self._pipeline.committed)
            if feed is not None:
                frames.append(feed)
                count, size = _extent(feed)
                self._pipeline.counters.fed(count, size)
                self._connected.fed(count, size)
            if self._cursor.needs_cold(self._pipeline.committed):
                self._cold_wanted.set()
        self._handle.is_fed = self._cursor.has_room
        return frames, cost

    def _is_feed_held(self) -> bool:
        """Return whether the quota holds the feed back."""
        if self._feed_alarm is None and self._cursor.has_room and (wait := self._usage.feed_wait()) > 0:
            self._feed_alarm = asyncio.get_running_loop().call_later(wait, self._go_on_feeding)
        return self._feed_alarm is not None

    def _go_on_feeding(self) -> None:
        self._feed_alarm = None
        self._handle.changed.set()

    async def _read_cold(self) -> None:
        """Read the feed from storages, in a task of its own, because outcomes do not wait for storages."""
        pause = ARCHIVE_SECONDS
        while True:
            await self._cold_wanted.wait()
            self._cold_wanted.clear()
            if self._cursor.needs_cold(self._pipeline.committed):
                try:
                    await self._cursor.read_cold()
                except ArchiveAway as error:  # it passes, and the client would only mount again to wait for the same
                    self._connected.waiting = error.message
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, ARCHIVE_SECONDS_MAX)
                    self._cold_wanted.set()
                    continue
                except WaltzError as error:
                    self._handle.refuse(error)
                    return
                self._connected.waiting, pause = "", ARCHIVE_SECONDS
                self._handle.changed.set()

    # -- frames from the client

    async def _receive(self) -> None:
        while not self._client_is_done:
            try:
                await self._take_message()
            except CannotConnect:
                raise
            except WaltzError as error:
                self._handle.refuse(error)
        self._handle.changed.set()

    async def _take_message(self) -> None:
        """Receive one message. In a function of its own, so that no message is kept alive while the next one is awaited."""
        frames = await self._link.receive()
        if frames is None:
            self._client_is_done = True
            return
        self._is_taking = True
        try:
            for frame in frames:
                if not self._handle.is_over:
                    await self._take(frame)
        finally:
            self._is_taking = False

    def _take_now(self, batch: SingleAppend) -> bool:
        """Take a transaction in the call that brings it. Return False if it has to wait: then it is received behind what
        waits in front of it."""
        if self._is_taking or self._handle.is_over or not self._usage.is_free:
            return False
        try:
            self._check(batch)
        except WaltzError as error:
            self._handle.refuse(error)
            return True
        cost = batch.bytes + FRAME_COST
        if not self._unanswered.take_now(cost):
            return False
        if not self._pipeline.append_now(self._handle, batch, cost):
            self._unanswered.give(cost)
            return False
        self._note_taken(batch)
        return True

    async def _take(self, frame: ClientFrame) -> None:
        match frame:
            case AppendBatch():
                await self._take_batch(frame)
            case Credit():
                if frame.bytes <= 0:
                    raise BadFrame(f"a credit of {frame.bytes} bytes, which must be above 0")
                self._cursor.credit += frame.bytes
                self._handle.changed.set()
            case MountRequest():
                raise BadFrame("a second mount request in one stream")

    def _check_rights(self, batch: AppendBatch) -> None:
        if not self._appends:
            check_append(self._rights, self._partition)
            self._appends = True
        if self._spaces is not None and (lock := first_denied(self._spaces, batch.lock_ids)) is not None:
            raise denied_lock(self._rights, lock, self._partition)

    def _check(self, batch: AppendBatch) -> None:
        """Raise the error that ends the mount if the batch is malformed or must not be appended."""
        batch.check(self._pipeline.settings.limits)
        self._check_rights(batch)
        if batch.first_sequence <= self._last_sequence:
            raise BadFrame(
                f"a batch starts at sequence {batch.first_sequence}; {self._last_sequence} was sent before it in this mount"
            )
        self._pipeline.check_mark(batch.highest_mark)
        self._pipeline.check_seen(batch.seen_time)
        self._pipeline.check_groups(batch)
        check_payloads(batch)

    def _note_taken(self, batch: AppendBatch) -> None:
        self._connected.note_received(len(batch), batch.bytes)
        self._last_sequence = batch.first_sequence + len(batch) - 1

    async def _take_batch(self, batch: AppendBatch) -> None:
        self._check(batch)
        size = batch.bytes
        self._note_taken(batch)
        if wait := self._usage.wait(batch, size):
            await self._usage.sleep(wait)
        frame_cost = FRAME_COST
        await self._unanswered.take(size + frame_cost)
        for piece in slices(batch, STEP_ROWS_MAX, STEP_BYTES_MAX):
            await self._pipeline.append(self._handle, piece, piece.bytes + frame_cost)
            frame_cost = 0


async def refuse(link: MountLink, error: WaltzError) -> None:
    """Send the error to a client that was not admitted, and give it some time to notice."""
    try:
        async with asyncio.timeout(REFUSED_SECONDS):
            await link.send([Refused(error)])
            while await _is_talking(link):
                pass
    except TimeoutError:
        return


async def _is_talking(link: MountLink) -> bool:
    try:
        return await link.receive() is not None
    except CannotConnect:
        return False
    except WaltzError:
        return True  # it was refused already; one more reason changes nothing


def check_request(request: MountRequest) -> None:
    """Validate a mount request; raise `BadFrame` if it is malformed."""
    for name, value, least, most in (
        ("client", request.client, 0, SEQUENCE_MAX),
        ("number", request.number, 0, NUMBER_MAX),
        ("mark", request.mark, -1, None),
        ("credit", request.credit, 0, None),
        ("epoch", request.epoch, 0, None),
    ):
        if value < least or (most is not None and value > most):
            raise BadFrame(f"a mount request has an invalid {name}: {value}")
    for text in (request.instance, request.version):
        if len(text) > TEXT_MAX or not text.isprintable():
            raise BadFrame(f"a mount request has an invalid text about its client: {text[:TEXT_MAX]!a}")
    if request.asks and request.feed is not FeedMode.HEADS:
        raise BadFrame("a mount request that asks what became of transactions takes heads, and nothing else")


def checked_mark(request: MountRequest, pipeline: Pipeline) -> int:
    """Return the id after which the mount begins; raise `OtherTimeline` if the client's position is on another timeline.

    A question for outcomes begins at the fork: transactions that got an id above it are not in the log, and a client that
    asks has to learn that before it is refused."""
    lineage, timeline = pipeline.session.lineage, request.timeline or FIRST
    shared = lineage.shared_to(timeline)
    if request.asks and timeline in lineage and shared is not None:
        return min(request.mark, shared)
    what = f"client {request.client}"
    lineage.check(timeline, request.mark, what=what, partition=request.partition, next_step=MEND_VIEW)
    return request.mark


def _extent(feed: Feed | HeadFeed) -> tuple[int, int]:
    """Return the number of transactions and their bytes."""
    if isinstance(feed, Feed):
        return len(feed.run), len(feed.run.data)
    return len(feed.heads), feed.heads.nbytes
