"""The log of one partition at its owner, and the replication of it to each storage.

`ReplicatedLog` is shared by the session, the replicators, the pipeline and its readers: the log cache, the committed
mark and the state of recovery. It outlives a planned change of session by the same owner; `follow` replaces everything
that belongs to one session.

`Replicator` drives one replica through three phases: contact, settling (recovery decides each step), and streaming from
the log cache. A replicator fails alone: it reports its replica as silent to recovery, waits longer after each failure,
and begins again with contact. Only a storage that is fenced by a newer session ends more than the replicator. There is no
queue for each replica: a replicator is a cursor into the log cache. One that has fallen behind the cache copies from the
other replicas, sealed segments as files, until it can stream again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from uuid import UUID

from waltzd.cluster.documents import Membership, PartitionMeta, StorageMeta, written_by_another
from waltzd.errors import CannotConnect, NoSuchPartition, WaltzError
from waltzd.errors.operations import BadFrame, DiskFull, Diverged, SessionEnded, StaleSession, WrongStorage
from waltzd.format.batch import Piece
from waltzd.format.record import TAIL_RECORDS, Run, tail_hash
from waltzd.protocol.descriptions import DIVERGED, OwnedReplica, ReplicaStatus
from waltzd.protocol.peers import AppendPort, Content, ReplicaPort, last_id_of
from waltzd.protocol.quorum import EMPTY, reached
from waltzd.protocol.timelines import Lineage
from waltzd.server.core.log_cache import LogCache
from waltzd.server.core.progress import Lease, Marks
from waltzd.server.core.recovery import (
    NEAR_IDS,
    Copy,
    Foreign,
    Fork,
    GiveUp,
    Heal,
    Level,
    Recovery,
    SetLowMark,
    Task,
    Trim,
    Truncate,
    Wait,
)
from waltzd.server.core.step import StorageClocks
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.copier import Copier, SourceFailed
from waltzd.server.session.reader import ReplicaReader
from waltzd.server.session.settings import SessionSettings
from waltzd.wire.flow_control import CoalescingSender


def renew_by_acknowledgements(stream: AppendPort, name: str, sent: int, owner: ReplicatedLog) -> AppendPort:
    """Return a stream that renews the lease of the session; the stream itself if there is no lease. The storage `name`
    was sent everything up to `sent` before."""
    lease = owner.marks.lease if owner.marks is not None else None
    return stream if lease is None else _RenewingStream(stream, name, sent, lease, owner)


class _RenewingStream(AppendPort):
    """A stream whose acknowledgements renew the lease. A storage checks its session before it writes, so an
    acknowledgement confirms that the storage was not fenced by a newer session after the records were sent."""

    def __init__(self, stream: AppendPort, name: str, sent: int, lease: Lease, owner: ReplicatedLog) -> None:
        self._stream = stream
        self._name = name
        self._lease = lease
        self._owner = owner
        self._sent = sent
        """Last id that was sent. An acknowledgement up to the first value may be for what the storage held before this
        stream."""
        self._asked: tuple[int, float] | None = None
        """First sent id that is not acknowledged, and the time at which it was sent; None if all are acknowledged."""

    async def start(self) -> None:
        await self._stream.start()

    @property
    def may_post(self) -> bool:
        return self._stream.may_post

    def post(self, content: Content, committed: int) -> None:
        self._leaves(content)
        self._stream.post(content, committed)

    async def send(self, content: Content, committed: int) -> None:
        self._leaves(content)
        await self._stream.send(content, committed)

    def _leaves(self, content: Content) -> None:
        last_id = last_id_of(content) if content else self._sent
        # What is sent while the session gives way renews nothing.
        if last_id > self._sent and self._asked is None and self._owner.sending_up_to is None:
            self._asked = last_id, self._owner.settings.clock()
        self._sent = max(self._sent, last_id)

    def hear(self, taker: Callable[[int], None]) -> None:
        def take(mark: int) -> None:
            self._came(mark)
            taker(mark)

        self._stream.hear(take)

    async def receive(self) -> int | None:
        mark = await self._stream.receive()
        if mark is not None:
            self._came(mark)
        return mark

    def _came(self, mark: int) -> None:
        if self._asked is not None and mark >= self._asked[0]:
            self._lease.renew(self._name, self._asked[1])
            self._asked = None

    def cancel(self) -> None:
        self._stream.cancel()


T = TypeVar("T")
PROOF_BYTES_MAX = 64 << 10
"""Size of the newest batch up to which it is sent again as a question."""
FRAME_BYTES = 1 << 20
"""Bytes of records in one message to a storage. More is not faster, and delays the first records of the message."""
PAUSES = 5
"""Longest pause before a replica is tried again, in multiples of the first pause. It is short, so that a replica that
returns is level soon."""
OPEN_PATIENCE = 6
"""Factor on the deadline of other calls: a storage proves what it holds before it answers."""


class ReplicatorState(enum.StrEnum):
    CONNECTING = "CONNECTING"
    SETTLING = "SETTLING"
    LIVE = "LIVE"
    SLOW = "SLOW"
    CATCHING_UP = "CATCHING_UP"
    DAMAGED = "DAMAGED"
    """A damaged segment is being replaced."""
    GIVEN_UP = "GIVEN_UP"
    """Damaged, and no replica that answers can repair it."""
    DIVERGED = DIVERGED
    """Holds another history than the log."""
    DOWN = "DOWN"


_STATES: dict[type[Task], ReplicatorState] = {GiveUp: ReplicatorState.GIVEN_UP, Foreign: ReplicatorState.DIVERGED}
"""States of replicas that wait for an operator, by their task."""


class ReplicatedLog(ReplicaReader):
    def __init__(
        self,
        partition: int,
        meta: PartitionMeta,
        roles: Mapping[str, Membership],
        settings: SessionSettings,
        *,
        say: Callable[[str], None],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """`meta` carries the session id, which is not saved yet. `watch` starts the timer that calls `check_progress`."""
        super().__init__()
        self.partition = partition
        self.generation = meta.generation
        self.settings = settings
        self.say = say
        self.watch = watch
        self.core = Recovery(meta, roles, is_taken=False)
        self.storage_clocks = StorageClocks()
        self.marks: Marks | None = None
        """Committed marks of the open session; None while it is not open."""
        self.open_cache: LogCache | None = None
        self.format = 0
        """Format of new records. It rises when a session opens, and never falls."""
        self.replicators: dict[str, Replicator] = {}
        self.ended: BaseException | None = None
        """Error that ends the owner's work on this partition; None while there is none."""
        self.decided = ChangeSignal()
        """Notified when recovery may have something new to do."""
        self.progressed = ChangeSignal()
        """Notified when more is committed and, while `is_draining`, when a replica holds more."""
        self.is_draining = False
        """Whether the session waits until a majority holds what is in flight."""
        self.bytes = 0
        """Bytes appended in this session."""
        self.opened_at = 0.0
        self.sending_up_to: int | None = None
        """Last id that is sent while a session gives way: records above it wait in the log cache for the next session.
        Else None."""
        self._on_commit: list[Callable[[int], None]] = []
        self.on_rise: Callable[[], None] = lambda: None
        """Called when the format has risen."""

    # -- what the pipeline uses

    @property
    def low_mark(self) -> int:
        """Mark at which the session opened."""
        assert self.core.mark is not None
        return self.core.mark

    @property
    def lineage(self) -> Lineage:
        """Timelines of the log. A rescue or a restore, which begin another timeline, take a session of their own."""
        return self.core.meta.lineage

    @property
    def cache(self) -> LogCache:
        assert self.open_cache is not None, "the session is not open"
        return self.open_cache

    def append(self, piece: Piece) -> None:
        """Add a piece to the log cache, from where replicators send it. `on_commit` reports when it is committed."""
        assert isinstance(piece, Run) == (self.format == 0)
        self.cache.append(piece)
        self.bytes += len(piece.data) if isinstance(piece, Run) else piece.size
        self.resume_sending()
        if self.bytes > self.settings.session_bytes_max:
            self.decided.notify()

    def resume_sending(self) -> None:
        """Send what is new, records or a committed mark, to every replica."""
        for replicator in self.replicators.values():
            replicator.resume_sending()

    def on_commit(self, listener: Callable[[int], None]) -> None:
        self._on_commit.append(listener)

    def rise(self, format: int) -> None:
        if format > self.format:
            self.format = format
            self.on_rise()

    # -- what the links use

    @property
    def sendable(self) -> int:
        """Last id that may be sent to replicas."""
        last_id = self.cache.next_id - 1
        return last_id if self.sending_up_to is None else min(last_id, self.sending_up_to)

    async def may_be_opened(self) -> None:
        """Wait until the session is saved, and no replica contradicts it."""
        while not self.core.is_taken or self.core.refusal is not None:
            await self.decided.wait(self.decided.version)

    def acknowledged(self, name: str, mark: int) -> None:
        if self.open_cache is not None and mark >= self.open_cache.next_id:
            last_id = self.open_cache.next_id - 1
            self.end(written_by_another(name, mark, partition=self.partition, session=self.session, last_id=last_id))
            return
        if self.marks is None:
            return
        if self.marks.acknowledge(name, mark):
            self.commit(self.marks.committed)
        elif self.is_draining:
            self.progressed.notify()
        elif not self.marks.counts(name) and mark + NEAR_IDS >= self.cache.next_id:
            self.decided.notify()

    def commit(self, mark: int) -> None:
        self.cache.commit(mark)
        for listener in self._on_commit:
            listener(mark)
        self.progressed.notify()

    def has_forgotten(self, name: str, status: ReplicaStatus, held: int) -> bool:
        """Return whether a replica, which holds the ids up to `held`, has lost something: that is less than it acknowledged
        in this session, or it has not begun the session, or is another directory now."""
        state = self.core.meta.replicas.get(name)
        if state is None or state.session != self.session or self.marks is None:
            return False
        progress = self.core.progress(name)
        holds_less = held < progress.acknowledged
        if not holds_less and status.incarnation == state.incarnation and status.session == self.session:
            return False
        self.marks.lose(name)
        self.watch()  # start the timer, which runs until the replica is level again
        progress.has_forgotten = True
        self.decided.notify()
        return True

    def is_other(self, status: ReplicaStatus) -> bool:
        """Return whether the last records of a replica of this session differ from what was sent to it."""
        cache, last_id = self.open_cache, status.last_id
        if cache is None or self.marks is None or status.session != self.session:
            return False
        if status.end is not None:
            ours = cache.end_at(last_id)
            return ours is not None and (ours.crc, ours.time) != (status.end.crc, status.end.time)
        records = cache.records_up_to(last_id, TAIL_RECORDS) if status.tail else None
        return records is not None and tail_hash([records]) != status.tail

    def diverge(self, name: str, why: str) -> None:
        """Exclude a replica. Only another directory in its place can become level."""
        self.core.diverged(name, why)
        self.say(f"{name} {why}")
        self.decided.notify()

    def doubt(self, name: str, error: WaltzError) -> bool:
        """Question the status that a replica reported when it was opened; return whether it is opened again."""
        replicator = self.replicators.get(name)  # None: it has left the partition meanwhile
        return replicator is not None and replicator.doubt(error)

    def port(self, name: str) -> ReplicaPort:
        replicator = self.replicators.get(name)
        if replicator is None:
            raise CannotConnect(f"{name} has left partition {self.partition}")
        return replicator.port

    def end(self, error: BaseException) -> None:
        self.ended = self.ended or error
        self.decided.notify()
        self.progressed.notify()

    fenced = end

    # -- what the session uses

    def contact(self, storages: Mapping[str, StorageMeta], connect: Callable[[StorageMeta], ReplicaPort]) -> None:
        """Start a replicator for each storage that takes part and has none yet, and cancel all replicators of other
        storages."""
        names = self.core.names
        for name in [name for name in self.replicators if name not in names]:
            self.replicators.pop(name).cancel()
        for name in names:
            if name not in storages:
                self.core.silent(name)
            elif name not in self.replicators:
                self.replicators[name] = Replicator(self, name, connect(storages[name]))
                self.replicators[name].start()

    def check_storages(self, check: Callable[[str, str], None]) -> None:
        """Cut off each open replica whose storage `check` refuses, by its name and version, and try it again."""
        for name, replicator in list(self.replicators.items()):
            status = self.core.status(name)
            try:
                if status is not None:
                    check(name, status.version)
            except WaltzError as error:
                replicator.cut_off(error)
                self.replicators[name] = Replicator(self, name, replicator.port)
                self.replicators[name].start()

    def raise_end(self) -> None:
        """Raise what ended the log. An internal error of a replicator counts too: it must not look like a replica that is
        level."""
        if self.ended is not None:
            raise self.ended
        refusal = self.core.refusal
        if refusal is not None:
            raise refusal
        for replicator in self.replicators.values():
            error = replicator.task.exception() if replicator.task.done() and not replicator.task.cancelled() else None
            if error is not None:
                raise error

    def is_on_majority(self, last_id: int) -> bool:
        """Return whether a majority of the members has everything up to this id on its disk."""
        assert self.marks is not None
        held = [self.core.held(name) for name in self.marks.members if self._has_our_log(name)]
        return last_id <= max(self.committed, reached(held, len(self.marks.members)))

    def copies(self, mark: int) -> dict[str, UUID]:
        """Return the directories of members that hold everything up to `mark`, and whose acknowledgements do not count."""
        assert self.marks is not None
        return {
            name: status.incarnation
            for name in self.marks.members
            if not self.marks.counts(name)
            and self._has_our_log(name)
            and (status := self.core.status(name)) is not None
            and self.core.held(name) >= mark
        }

    def _has_our_log(self, name: str) -> bool:
        """Return whether a member has all that it holds from the log of this session, as far as it is known now."""
        replicator = self.replicators.get(name)
        return replicator is not None and replicator.is_readable and not self.core.divergence(name)

    async def follow(self, meta: PartitionMeta) -> None:
        """Begin the next session of the same owner: it is saved, and nothing was written in between."""
        replicators, self.replicators = self.replicators, {}
        for replicator in replicators.values():
            replicator.cancel()  # all at once: they act for the former session
        self.marks = None
        assert meta.decision is not None
        end = self.cache.end_at(meta.decision.mark)
        before = self.core
        self.core = Recovery(meta, before.roles, ours=before.incarnations, end=end)
        self.core.leaving = before.leaving
        for name in before.names:
            if before.status(name) is None:
                self.core.silent(name)  # it is not waited for
        self.bytes = 0
        await _close(replicators)

    def abandon(self) -> None:
        """End the log: nothing more is sent."""
        self.end(SessionEnded(f"session {self.session} of partition {self.partition} was closed"))
        for replicator in self.replicators.values():
            replicator.cancel()

    async def close(self) -> None:
        await _close(self.replicators)

    @property
    def missing(self) -> str:
        """Sentence that says why nothing can be committed in the open session; empty if it can."""
        assert self.marks is not None
        return self.marks.missing([name for name, replicator in self.replicators.items() if replicator.is_readable])

    def describe(self, name: str) -> OwnedReplica:
        replicator, role = self.replicators.get(name), self.core.roles.get(name)
        has_joined = self.marks is not None and self.marks.counts(name)
        return OwnedReplica(
            storage=name,
            role=str(role) if role is not None else "leaving",
            state=str(replicator.state) if replicator is not None else "DOWN",
            durable_id=self.core.held(name),
            counts=has_joined and replicator is not None and replicator.is_readable,
            story=replicator.story if replicator is not None else "it is not in the list of storages",
        )

    def check(self) -> None:
        """Assert the invariants of the log after an event."""
        self.core.check()
        if self.marks is None or self.open_cache is None:
            return
        cache, last_id = self.open_cache, self.open_cache.next_id - 1
        self.marks.check()
        cache.check()
        assert cache.committed == self.marks.committed
        for name in self.marks.members:
            progress = self.core.progress(name)
            assert progress.sent <= last_id
            assert progress.told <= cache.committed
            assert progress.acknowledged <= last_id


async def _close(replicators: Mapping[str, Replicator]) -> None:
    for replicator in list(replicators.values()):
        await replicator.close()


class Replicator:
    def __init__(self, log: ReplicatedLog, name: str, port: ReplicaPort) -> None:
        self.name = name
        self.port = port
        self.state = ReplicatorState.CONNECTING
        self.story = "not contacted yet"
        self._log = log
        self._seconds = log.settings.storage_seconds
        self._retry_seconds = log.settings.retry_seconds
        self._was_asked = False
        """Whether the replica was asked before it was opened for the first time."""
        self._stream: AppendPort | None = None
        self._sender = CoalescingSender(self)
        self._progress = log.core.progress(name)
        self._owes_since: float | None = None
        """Time since when acknowledgements are owed; None while none are."""
        self._overdue: CannotConnect | None = None
        self._doubt: WaltzError | None = None
        """Error because of which the replica is opened again, although no call of this replicator failed."""
        self._look_again_at = 0.0
        """Time at which a replica that is given up is asked whether its directory was replaced; 0 while it is not given
        up."""
        self._is_cut_off = False
        """Whether acknowledgements that arrive are ignored."""
        self._said: type[WaltzError] | None = None
        """Kind of the failure that was logged since the replica was level."""
        self._task: asyncio.Task[None] | None = None
        self._unproven: list[asyncio.Future[None]] = []
        """Questions for which nothing was sent yet that the storage could acknowledge."""
        self._proving: tuple[int, list[asyncio.Future[None]]] | None = None
        """First id that was sent after some questions and is not acknowledged, and these questions; None if there is
        none."""
        self._acknowledged = EMPTY
        """Last acknowledgement of the stream; what was sent above it is in flight."""

    @property
    def is_readable(self) -> bool:
        """Return whether the replica has begun this session and answers."""
        return self.state in (ReplicatorState.LIVE, ReplicatorState.SLOW)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"partition {self._log.partition} on {self.name}")
        self._task.add_done_callback(lambda _: self._log.decided.notify())  # its end has a cause: `raise_end` looks

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None
        return self._task

    def doubt(self, error: WaltzError) -> bool:
        """Open the replica again if it is settling; return whether it is. A replicator that waits while others decide
        makes no calls, and does not notice that its storage was restarted."""
        if self.state is not ReplicatorState.SETTLING:
            return False
        self._doubt = error
        self._log.decided.notify()
        return True

    def _check_doubt(self) -> None:
        error, self._doubt = self._doubt, None
        if error is not None:
            raise CannotConnect(f"{self.name} has to be opened again: {error.message}") from error

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cut_off(self, error: WaltzError) -> None:
        """End at once: acknowledgements that arrive from now on do not count."""
        self._fail(error)
        self._is_cut_off = True
        self.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def check_progress(self, now: float) -> bool:
        """End the stream if an acknowledgement is overdue, and send the committed mark to an idle replica. Return True if
        this need not be called again before the next `watch`."""
        if self._owes_since is not None and now - self._owes_since > self._seconds and self._stream is not None:
            self._overdue = CannotConnect(f"{self.name} has not acknowledged anything for {self._seconds:.0f} seconds")
            self._stream.cancel()
        if self._progress.told < self._log.committed and self.is_readable:
            self.resume_sending()
            return False
        return self._owes_since is None and self.is_readable

    # -- from contact to failure, and again

    async def _run(self) -> None:
        pause = self._retry_seconds
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._serve()
            except Diverged as error:
                if self._has_begun:  # else it was compared with what another owner wrote
                    self._log.diverge(self.name, f"holds another history than the log: {error.message}")
                self._fail(error)
            except StaleSession as error:
                error.facts.setdefault("storage", self.name)
                self._fail(error)
                self._log.fenced(error)
                return
            except WaltzError as error:
                self._fail(self._overdue or error)
            self._overdue = None
            if asyncio.get_running_loop().time() - started > 10 * self._retry_seconds:
                pause = self._retry_seconds
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSES * self._retry_seconds)

    @property
    def _has_begun(self) -> bool:
        status = self._progress.status
        return status is not None and status.session == self._log.session

    def _fail(self, error: WaltzError) -> None:
        if type(error) is not self._said:  # log each kind of error once, not with every attempt
            self._said = type(error)
            self._log.say(f"{self.name} failed while it was {self.state}: {error.code} {error.message}")
        self.state, self.story = ReplicatorState.DOWN, error.message
        self._log.core.silent(self.name)
        self._log.decided.notify()

    async def _timely(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except TimeoutError:
            raise CannotConnect(f"{self.name} did not {what} within {self._seconds:.0f} seconds") from None

    async def _serve(self) -> None:
        log = self._log
        if self._said is None:
            self.state, self.story = ReplicatorState.CONNECTING, "being opened"
        self._doubt = None
        if not self._was_asked:
            await self._ask()
            await log.may_be_opened()
            self._was_asked = True
        asked = asyncio.get_running_loop().time()
        status = await self._open()
        answered = asyncio.get_running_loop().time()
        core = log.core
        twin = core.twin_of(self.name, status)
        if twin is not None:
            error = WrongStorage(
                f"{self.name} and {twin} are one storage: both addresses lead to the same replica",
                not_done="nothing is written under the name that answered later",
                next_step="see the addresses in `waltzctl storage list`, and correct one with `waltzctl storage set`",
            )
            is_ours = core.is_recorded(self.name, status) and not core.is_recorded(twin, status)
            if not is_ours or not log.doubt(twin, error):
                raise error
            core.silent(twin)
        if log.has_forgotten(self.name, status, status.last_id):
            self.story = f"has forgotten what it had acknowledged: it holds ids up to {status.last_id}"
        core.opened(self.name, status)
        if not log.storage_clocks.note(self.name, status.time, asked, answered):
            await self.read_clock()
        if log.is_other(status) and not core.divergence(self.name):
            log.diverge(self.name, f"holds something else at id {status.last_id} than was sent to it")
        log.decided.notify()
        await self._settle()
        while True:
            await self._wait_for_space()
            await self._catch_up()
            await self._stream_cache()

    async def read_clock(self) -> None:
        asked = asyncio.get_running_loop().time()
        status = await self._timely(self.port.status(self._log.partition), "say what time it is")
        self._log.storage_clocks.note(self.name, status.time, asked, asyncio.get_running_loop().time())

    async def _ask(self) -> None:
        """Ask for the status before the replica is opened. Opening fences the replica, and its status no longer says
        which session had fenced it before."""
        log = self._log
        if log.core.is_taken and self._progress.was_asked:
            return  # an earlier replicator of this session may have opened it: it would report our own promise
        try:
            status = await self._timely(self.port.status(log.partition), "say where it stands")
        except NoSuchPartition:
            status = None
        log.core.asked(self.name, status)
        self.story = "asked where it stands; the session is not saved yet"
        log.decided.notify()

    async def _open(self) -> ReplicaStatus:
        """Open the replica, and create an empty one if the storage has none but is assigned one: its disk was replaced.
        An empty replica has no vote, so nothing is forgotten by that."""
        log, seconds = self._log, OPEN_PATIENCE * self._seconds
        try:
            return await self.port.open(log.partition, log.session, partitions=log.settings.partitions, seconds=seconds)
        except NoSuchPartition:
            if self.name not in log.core.roles:
                raise
            log.say(f"{self.name} holds nothing of this partition: an empty replica is made there")
            return await self.port.open(
                log.partition, log.session, partitions=log.settings.partitions, create=True, seconds=seconds
            )

    async def _settle(self) -> None:
        """Carry out the tasks of recovery until this replica is level with the decided log and the session is open."""
        log, core = self._log, self._log.core
        while True:
            seen, before = log.decided.version, self._progress.status
            self._check_doubt()
            task = core.next_for(self.name)
            self.state = _STATES.get(type(task), ReplicatorState.SETTLING)
            match task:
                case Wait(why):
                    self.story = why
                    if isinstance(task, GiveUp):
                        await self._wait_for_another(seen)
                    else:
                        await log.decided.wait(seen)
                    continue
                case Fork(lineage):
                    self.story = f"going over to timeline {lineage.number}, which forked behind id {lineage.fork}"
                    gone_over = await self.port.fork(log.partition, log.session, lineage)
                    if gone_over.timeline != lineage.current:
                        raise BadFrame(
                            f"{self.name} reported the switch of its timeline, and holds timeline {gone_over.timeline}"
                        )
                    core.changed(self.name, gone_over)
                    log.say(f"{self.name} went over to timeline {lineage.number} and holds ids up to {self._progress.held}")
                case Truncate(mark):
                    self.story = f"being cut above {mark}"
                    core.changed(self.name, await self.port.truncate(log.partition, log.session, mark))
                case SetLowMark(mark):
                    self.story = f"beginning the session at {mark}"
                    core.changed(self.name, await self.port.set_low_mark(log.partition, log.session, mark))
                case Trim(floor):
                    self.story = f"beginning at the floor {floor}, as the other replicas do"
                    needs_none = log.settings.needed_from is not None
                    known = None if needs_none else await log.ask_archived()
                    status = await self.port.trim(log.partition, log.session, floor, known, needs_none=needs_none)
                    core.changed(self.name, status)
                    core.trimmed(self.name, floor, status)
                case Copy(last_id, sources):
                    self.story = f"copying up to {last_id} from {sources[0]}"
                    await self._copy(last_id, sources)
                case Heal(segment, last_id, sources):
                    self.state, self.story = ReplicatorState.DAMAGED, f"the damaged segment {segment} is being replaced"
                    core.changed(self.name, await self.copier().heal(segment, last_id, sources))
                    if self._progress.status == before:  # with a pause, because it may go on like that
                        raise BadFrame(f"{self.name} took a file for the segment {segment}, and is as it was")
                case Level():
                    if log.marks is not None:
                        return
                    self.story = "level"
                    await log.decided.wait(seen)
                    continue
            log.decided.notify()

    async def _wait_for_another(self, seen: int) -> None:
        """Wait until something changes, and ask now and then whether an operator has replaced the directory, which is not
        reported."""
        log, clock = self._log, asyncio.get_running_loop()
        self._look_again_at = self._look_again_at or clock.time() + self._seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._look_again_at):
                await log.decided.wait(seen)
        if clock.time() < self._look_again_at:
            return
        self._look_again_at = 0.0
        found, status = await self._timely(self.port.status(log.partition), "say where it stands"), self._progress.status
        if status is None or found.incarnation != status.incarnation:
            raise CannotConnect(f"{self.name} has another directory now")
        if status.untrimmed:  # the archive may be readable by now
            self._progress.trimmed = 0

    def copier(self) -> Copier:
        """Return a copier from other replicas to this one."""
        log, name, settings = self._log, self.name, self._log.settings
        return Copier(
            self.port,
            partition=log.partition,
            session=log.session,
            source=log.port,
            committed=lambda: max(log.committed, log.core.mark if log.core.mark is not None else EMPTY),
            copied=lambda mark: log.core.copied(name, mark),
            key=settings.key,
            seconds=settings.storage_seconds,
            bytes_per_second=settings.catch_up_bytes_per_second,
        )

    async def _copy(self, last_id: int, sources: tuple[str, ...]) -> None:
        """Copy from the first source that can. If none can, raise, and begin again with contact a moment later."""
        log = self._log
        copier = self.copier()
        failed: SourceFailed | None = None
        for source in sources:
            try:
                await copier.copy(self._progress.held + 1, last_id, source)
                return
            except SourceFailed as error:
                failed = error
                log.doubt(source, error.error)
        assert failed is not None
        raise CannotConnect(f"{self.name} could not copy: {failed.error.message}") from failed

    # -- while the session is open

    async def _wait_for_space(self) -> None:
        """After a write that met a full disk, wait until the storage accepts writes again. Otherwise the replica would be
        level and fail in turns."""
        pause = self._retry_seconds
        while self._said is DiskFull:
            status = await self._timely(self.port.status(self._log.partition), "say whether its disk is full")
            if not status.is_full:
                return
            self.state, self.story = ReplicatorState.DOWN, "its disk is full; it takes part again when there is space"
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSES * self._retry_seconds)

    async def _catch_up(self) -> None:
        """Copy until the next record is in the log cache."""
        log = self._log
        while self._progress.held + 1 < log.cache.first_id:
            held = self._progress.held
            self.state = ReplicatorState.CATCHING_UP
            last_id, sources = log.core.sources_for(self.name, held, log.committed)
            self.story = f"holds ids up to {held} of {log.committed}, copying from {sources[0] if sources else 'none'}"
            if not sources:
                seen = log.decided.version
                await log.decided.wait(seen)
                continue
            await self._copy(last_id, sources)

    async def _stream_cache(self) -> None:
        """Send from the log cache and take acknowledgements, until this replica has fallen behind the cache."""
        log, status = self._log, self._progress.status
        assert status is not None
        self._progress.sent = self._progress.held
        # What the storage knows, not what it holds: it may have restarted, and have copied without a committed mark.
        self._progress.told = max(status.committed, min(status.low_mark, self._progress.sent))
        self._owes_since = None
        self._acknowledged = self._progress.sent
        stream = self._stream = renew_by_acknowledgements(
            self.port.append(log.partition, log.session), self.name, self._progress.sent, log
        )
        try:
            await self._timely(stream.start(), "take a stream")
            self.state, self.story = ReplicatorState.LIVE, "level"
            if self._said is not None:
                self._log.say(f"{self.name} is level again, at {self._progress.sent}")
                self._said = None
            log.acknowledged(self.name, self._progress.sent)
            stream.hear(self._take)
            sending = asyncio.create_task(self._sender.run())
            receiving = asyncio.create_task(self._receive(stream))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stream.cancel()
                sending.cancel()
                receiving.cancel()
                ends = await asyncio.gather(sending, receiving, return_exceptions=True)
            for end in ends[::-1]:  # the error of the receiving end names the cause
                if isinstance(end, Exception):
                    raise end
        finally:
            self._stream = None
            proving, self._proving = self._proving, None
            for question in [*self._unproven, *(proving[1] if proving is not None else ())]:
                question.cancel()
            self._unproven.clear()

    # -- proof that the storage still obeys the session

    def prove(self) -> asyncio.Future[None] | None:
        """Return a question that is done when the storage has acknowledged something that was sent after this call: then
        no newer session had fenced it before. It is cancelled at the end of the stream. Return None if the stream cannot
        answer now."""
        newest = self._log.cache.newest_batch
        if newest is None or newest.size > PROOF_BYTES_MAX or self.state is not ReplicatorState.LIVE or self._is_behind:
            return None
        question: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unproven.append(question)
        self.resume_sending()
        return question

    def _again(self) -> Content | None:
        """Return the newest batch, to be sent again, if there are questions and nothing is in flight: a storage
        acknowledges what it holds already. What is in flight was sent before the questions, and an acknowledgement does
        not say what for."""
        newest, sent = self._log.cache.newest_batch, self._progress.sent
        if not self._unproven or self._proving is not None or self._acknowledged < sent:
            return None
        return (newest,) if newest is not None and newest.last_id == sent else None

    def _leaves(self, content: Content) -> None:
        """Note before it is sent what the next acknowledgement proves."""
        if content and self._unproven and self._proving is None:
            self._proving, self._unproven = (last_id_of(content), self._unproven), []

    def _note_proof(self, mark: int) -> None:
        self._acknowledged = mark
        if self._proving is not None and mark >= self._proving[0]:
            for question in self._proving[1]:
                if not question.done():
                    question.set_result(None)
            self._proving = None
        if self._unproven:
            self.resume_sending()

    def resume_sending(self) -> None:
        """Send what is new: records, or a new committed mark."""
        self._sender.send_now()

    # -- what the sender asks

    def take(self) -> tuple[Content, int] | None:
        """Return what is sent next, and the committed mark that goes with it; None if there is nothing."""
        if self._is_behind:
            return None
        log, cache, progress = self._log, self._log.cache, self._progress
        last_id, committed = log.sendable, log.committed
        content: Content | None = cache.content_from(progress.sent + 1, last_id, FRAME_BYTES) or self._again()
        if content is None and progress.told < committed and self._owes_since is None:
            # A new committed mark to tell: by a frame without records; in format 0, by the last record once more.
            content = () if log.format > 0 else cache.joined_from(max(cache.first_id, last_id), last_id, FRAME_BYTES)
        if content and self._owes_since is None:
            self._owes_since = asyncio.get_running_loop().time()
            log.watch()
        return None if content is None else (content, committed)

    async def send(self, message: tuple[Content, int]) -> None:
        assert self._stream is not None
        self._leaves(message[0])
        await self._stream.send(*message)
        self._has_sent(*message)

    def post(self, message: tuple[Content, int]) -> bool:
        assert self._stream is not None
        self._leaves(message[0])
        self._stream.post(*message)
        self._has_sent(*message)
        return self._progress.sent < self._log.sendable

    @property
    def may_post(self) -> bool:
        return self._stream is not None and not self._is_behind and self._stream.may_post

    @property
    def is_over(self) -> bool:
        if self._is_behind:
            self.state = ReplicatorState.SLOW
        return self._is_behind

    @property
    def _is_behind(self) -> bool:
        """Return whether the next record for this replica has left the log cache."""
        return self._progress.sent + 1 < self._log.cache.first_id

    def _has_sent(self, content: Content, committed: int) -> None:
        self._progress.told = committed
        if content:
            self._progress.sent = max(self._progress.sent, last_id_of(content))

    async def _receive(self, stream: AppendPort) -> None:
        while (mark := await stream.receive()) is not None:
            self._take(mark)
        raise CannotConnect(f"{self.name} ended the stream")

    def _take(self, mark: int) -> None:
        """Note that the replica has everything up to `mark` on its disk."""
        if self._is_cut_off:
            return
        self._owes_since = None if mark >= self._progress.sent else asyncio.get_running_loop().time()
        self._log.core.copied(self.name, mark)
        self._log.acknowledged(self.name, mark)
        self._note_proof(mark)
