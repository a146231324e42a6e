"""One partition that this server owns: its sessions in turn, from the assignment to the hand-over.

While a session is open there is exactly one pipeline, made for it and closed with it: lock table, feed and requests in
flight never outlive it. However a session ends, the next one begins with the same steps as after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from waltzd.cluster.cluster import Cluster, archived, shared_with
from waltzd.cluster.documents import PartitionMeta, StorageMeta, acknowledging
from waltzd.errors import CannotConnect, NotReady, WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, MetadataBehind, MetadataMissing, NotOwner, SessionEnded
from waltzd.protocol.descriptions import Archived, OwnedPartition, PartitionStatistics
from waltzd.protocol.peers import ReplicaPort
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.recovery import Step
from waltzd.server.core.step import AHEAD_MAX
from waltzd.server.session.archive import ArchiveUploader, Backup
from waltzd.server.session.change_signal import ChangeSignal, PeriodicTimer
from waltzd.server.session.documents import PartitionDocuments
from waltzd.server.session.replicated_log import ReplicatedLog, ReplicatorState
from waltzd.server.session.session import Session
from waltzd.server.session.settings import RECOVERY_SECONDS_MAX, SessionSettings
from waltzd.wire.tasks import tell_failure


class ClosablePipeline(Protocol):
    def hold(self) -> None:
        """Append nothing more. Batches that have ids are still answered."""
        ...

    def close(self, error: WaltzError) -> None:
        """End every mount with this error, and append nothing more."""
        ...

    @property
    def mounts(self) -> int: ...


P = TypeVar("P", bound=ClosablePipeline)
RETRY_SECONDS_MAX = 10.0
CLOCKS_SECONDS = 60.0
"""Interval in which an owner looks whether the clocks of its storages have to be read again."""
LOOK_SECONDS = 0.05
"""Interval in which a new owner looks whether the old owner, which is to close its session, still lives."""


class OwnedLog(Generic[P]):
    def __init__(
        self,
        partition: int,
        generation: int,
        *,
        cluster: Cluster,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: SessionSettings,
        timer: PeriodicTimer,
        make_pipeline: Callable[[ReplicatedLog], P],
        say: Callable[[str], None],
        previous_owner_alive: Callable[[], bool] = lambda: False,
        statistics: Callable[[], PartitionStatistics] = PartitionStatistics,
    ) -> None:
        """`previous_owner_alive` is called again while that owner is given time to close. `statistics`: counters of all
        pipelines of this partition."""
        self.partition = partition
        self.generation = generation
        self._cluster = cluster
        self._connect = connect
        self._settings = settings
        self._timer = timer
        self._make_pipeline = make_pipeline
        self._say = say
        self._statistics = statistics
        self._previous_owner_alive = previous_owner_alive
        self._session: Session | None = None
        self._pipeline: P | None = None
        self._marks: tuple[int, Mapping[str, int]] = 0, {}
        """Id of the last session that was open, and how far each replica had acknowledged in it. The coordinator may not
        have that yet."""
        self._uploader: ArchiveUploader | None = None
        self._backup: Backup | None = None
        """Backup of the present session, or of the last one."""
        self._trouble = ""
        self._was_open = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.signal = ChangeSignal()
        """Notified when the pipeline appears or goes."""

    # -- the life

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"partition {self.partition}")

    @property
    def task(self) -> asyncio.Task[Any]:
        """Task of the log. It ends when the log is closed, or by itself with an internal error."""
        assert self._task is not None
        return self._task

    async def close(self, *, hand_over: bool) -> None:
        """Give up the partition. With `hand_over` finish what is in flight and close the session in order, so that the
        next owner has nothing to find out."""
        self._is_closing = True
        session, task = self._session, self.task
        if hand_over and session is not None and self._pipeline is not None:
            session.ask_to_end()
            await asyncio.wait((task,), timeout=3 * self._settings.hand_over_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()  # raise an internal error that happened while closing

    def check_storages(self, check: Callable[[str, str], None]) -> None:
        """Cut off each replica whose storage `check` refuses, by its name and version."""
        if self._session is not None:
            self._session.log.check_storages(check)

    def _note(self, sentence: str) -> None:
        self._say(f"partition {self.partition}: {sentence}")

    async def _run(self) -> None:
        pause = self._settings.retry_seconds
        while not self._is_closing:
            try:
                await self._hold_one_session()
                self._trouble = ""
                pause = self._settings.retry_seconds
                continue
            except WaltzError as error:
                if self._trouble != error.message:  # log each trouble once, however often it is retried
                    self._trouble = error.message
                    self._note(f"{error.code} {error.message}")
            if self._was_open:
                pause = self._settings.retry_seconds
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def _hold_one_session(self) -> None:
        """Run one session, from a new session id until there is a reason for another one."""
        self._was_open = False
        cluster = self._cluster
        token = await cluster.wait_for_replicas(self.partition, None)
        meta, known, version = await self._next_session()
        with ExitStack() as turn:
            await self._settings.recoveries.acquire()
            turn.callback(self._settings.recoveries.release)
            asyncio.get_running_loop().call_later(RECOVERY_SECONDS_MAX, turn.close)
            await self._hold_session(token, meta, known, version, turn.close)

    async def _hold_session(
        self, token: object, meta: PartitionMeta, known: PartitionMeta | None, version: int, end_turn: Callable[[], None]
    ) -> None:
        """Run the session that `_next_session` returned. `token`: state of the documents before. `end_turn` is called as
        soon as another partition may be recovered."""
        # Where the session before was this owner's, its pipeline is closed already and answers nothing.
        lease_before = 0.0 if meta.opened == self._marks[0] else meta.lease_ms / 1000
        documents = PartitionDocuments(
            self._cluster, self.partition, version=version, known=known, retry_seconds=self._settings.retry_seconds
        )
        await documents.read()
        session = self._session = Session(
            self.partition,
            meta=meta,
            documents=documents,
            connect=self._connect,
            settings=self._settings,
            timer=self._timer,
            say=self._note,
            lease_before=lease_before,
            end_turn=end_turn,
        )
        session.log.ask_archived = self._ask_archived
        following = asyncio.create_task(self._follow_replicas(session, token))
        tell_failure(following, session.log.end)
        others = asyncio.create_task(self._look_for_others(session))
        tell_failure(others, session.log.end)
        uploader = self._uploader = ArchiveUploader(session.log, self._cluster, self._note)
        backup = self._backup = Backup(session.log, self._cluster.coordinator, uploader, self._note)
        uploading: list[asyncio.Task[None]] = []
        try:
            await session.recover()
            self._was_open, self._trouble = True, ""
            self._pipeline = pipeline = self._make_pipeline(session.log)
            uploading.append(asyncio.create_task(uploader.run(), name=f"archive of partition {self.partition}"))
            uploading.append(asyncio.create_task(self._read_clocks(session.log)))
            if self._settings.backup_seconds:
                uploading.append(asyncio.create_task(backup.run(), name=f"backup of partition {self.partition}"))
            self.signal.notify()
            await session.serve()
            self._note("the session ends: it is handed over")
            pipeline.hold()
            is_drained = await session.drain(self._settings.hand_over_seconds)
            self._drop_pipeline(SessionEnded(f"partition {self.partition} is handed over"))
            if is_drained:
                await session.save_closing()
        except (MetadataBehind, MetadataMissing):
            await documents.check_newest()  # else a newer owner is the reason
            raise
        finally:
            self._drop_pipeline(SessionEnded(f"session {session.log.session} of partition {self.partition} has ended"))
            if session.log.marks is not None:
                self._marks = session.log.session, session.log.marks.acknowledged
            self._session = None
            # Cancel everything before waiting for anything: a second cancellation must not leave a replicator behind.
            aside = [following, others, *uploading]
            for task in aside:
                task.cancel()
            session.abandon()
            await asyncio.gather(*aside, return_exceptions=True)
            await session.close()

    async def _ask_archived(self) -> Archived | None:
        """Return how far the archive reaches in the log of the session, for readers and for replicas that trim."""
        meta, _ = await archived(self._cluster.coordinator, self.partition)
        session = self._session
        return None if session is None else shared_with(meta, session.log.core.meta.lineage)

    def _drop_pipeline(self, error: WaltzError) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close(error)
            self.signal.notify()

    async def _next_session(self) -> tuple[PartitionMeta, PartitionMeta | None, int]:
        """Return the document with a session id above every other, the document that it follows upon, and the version of
        the latter."""
        meta, version = await self._cluster.partition(self.partition)
        if meta is not None and self._previous_owner_alive() and meta.generation < self.generation:
            meta, version = await self._wait_for_closing(meta, version)
        if meta is None:
            return PartitionMeta(generation=self.generation, session=1), None, version
        if meta.generation > self.generation:
            raise NotOwner(
                f"partition {self.partition} belongs to generation {meta.generation}; this server was given generation "
                f"{self.generation}"
            )
        opened, marks = self._marks
        known = acknowledging(meta, marks) if meta.opened == opened else meta
        return replace(known, generation=self.generation, session=meta.session + 1), meta, version

    async def _wait_for_closing(self, meta: PartitionMeta, version: int) -> tuple[PartitionMeta, int]:
        """Give the old owner, which is alive, some time to close its session; return the newest document."""
        is_alive, self._previous_owner_alive = self._previous_owner_alive, lambda: False
        token: object | None = None
        try:
            async with asyncio.timeout(self._settings.hand_over_seconds):
                while meta.opened > 0 and meta.decision is None:
                    try:
                        async with asyncio.timeout(LOOK_SECONDS):
                            token = await self._cluster.wait_for_partition(self.partition, token)
                    except TimeoutError:
                        if not is_alive():
                            return meta, version
                        continue
                    found, version = await self._cluster.partition(self.partition)
                    if found is None:
                        raise ChangedMeanwhile(f"the document of partition {self.partition} went away")
                    meta = found
        except TimeoutError:
            self._note("the old owner did not close its session in time; its last mark is found out from the replicas")
        return meta, version

    async def _follow_replicas(self, session: Session, token: object) -> None:
        """Notify the session when storages come, go, move or change their role."""
        while True:
            try:
                token = await self._cluster.wait_for_replicas(self.partition, token)
                await session.reassign()
            except CannotConnect:
                await asyncio.sleep(self._settings.retry_seconds)

    async def _read_clocks(self, log: ReplicatedLog) -> None:
        """Read the clocks of the storages again while they correct that of this owner: all may have been set."""
        while True:
            await asyncio.sleep(CLOCKS_SECONDS)
            now = self._settings.wall()
            if log.storage_clocks.corrected(now, asyncio.get_running_loop().time()) != now:
                for _, replicator in sorted(log.replicators.items()):
                    with suppress(WaltzError):
                        await replicator.read_clock()

    async def _look_for_others(self, session: Session) -> None:
        """Look for a session of another owner, because a session that waits for replicas would not notice that an operator
        has decided; a session that follows an open one waits, too. Once the log was open, look also whether the document
        still exists."""
        token: object | None = None
        while True:
            try:
                token = await self._cluster.wait_for_partition(self.partition, token)
                meta, _ = await self._cluster.partition(self.partition)
                if meta is None and self._was_open:
                    await session.reassign()
            except CannotConnect:
                await asyncio.sleep(self._settings.retry_seconds)
                continue
            except BadMetadata:
                if not self._was_open:
                    raise
                await session.reassign()
                continue
            log, mine = session.log, session.log.core
            if meta is None or meta.session < log.session:
                continue
            if log.marks is not None:  # storages tell an open log that it is over
                if meta.session > log.session + 1:  # our own next session may be saved before we know, and be taken over
                    await log.decided.wait(log.decided.version)
                    token = None
                continue
            if meta.session == log.session and (mine.is_taken or meta == mine.meta):
                continue
            raise ChangedMeanwhile(f"another owner took session {meta.session} of partition {self.partition}")

    def check(self) -> None:
        """Assert the invariants of the session."""
        if self._session is not None:
            self._session.log.check()

    # -- reports

    @property
    def pipeline(self) -> P:
        if self._pipeline is None:
            raise NotReady(
                f"partition {self.partition} is being recovered: {self.waiting or 'it is being opened'}",
                partition=self.partition,
            )
        return self._pipeline

    @property
    def waiting(self) -> str:
        """Sentence that says what the partition waits for; empty for nothing."""
        if self._session is None:
            return self._trouble
        log = self._session.log
        return log.missing if log.marks is not None else log.core.waiting() or self._trouble

    @property
    def is_troubled(self) -> bool:
        """Return whether it takes no transactions, or a replica has another history."""
        if self._session is None or self.waiting:
            return True
        log = self._session.log
        is_open = log.core.step is Step.OPEN
        return not is_open or any(one.state is ReplicatorState.DIVERGED for one in log.replicators.values())

    @property
    def is_backed_up(self) -> bool:
        return self._backup is not None and self._backup.known is not None

    def describe(self) -> OwnedPartition:
        owned = OwnedPartition(
            partition=self.partition,
            generation=self.generation,
            session=0,
            step="CLOSED",
            waiting=self.waiting,
            committed=EMPTY,
            last_id=EMPTY,
            low_mark=EMPTY,
            mounts=0,
            tail_bytes=0,
            replicas=(),
            statistics=self._statistics(),
        )
        session = self._session
        if session is None:
            return owned
        log, cache = session.log, session.log.open_cache
        return replace(
            owned,
            session=log.session,
            step=str(log.core.step),
            committed=log.committed,
            last_id=cache.next_id - 1 if cache is not None else EMPTY,
            low_mark=log.core.meta.low_mark,
            mounts=self._pipeline.mounts if self._pipeline is not None else 0,
            tail_bytes=cache.bytes if cache is not None else 0,
            replicas=tuple(log.describe(name) for name in log.core.names),
            format=log.format,
            trouble=session.documents.trouble,
            archived=None if self._uploader is None else self._uploader.known,
            archive_trouble="" if self._uploader is None else self._uploader.trouble or self._uploader.trim_trouble,
            backed_up=None if self._backup is None else self._backup.known,
            backup_lag_ms=0 if self._backup is None else round(1000 * self._backup.lag),
            backup_trouble="" if self._backup is None else self._backup.trouble,
            archive_check=None if self._uploader is None else self._uploader.seen,
            timelines=log.core.meta.timelines,
            ahead_ms=self._ahead(log) // 1000,
        )

    def _ahead(self, log: ReplicatedLog) -> int:
        """Return the microseconds by which the time of the log is ahead of the clocks of its owner and storages; 0 if
        they differ no more than correct clocks may."""
        end = log.open_cache.end if log.open_cache is not None else None
        if end is None:
            return 0
        ahead = end.time - log.storage_clocks.bounded(self._settings.wall(), asyncio.get_running_loop().time())
        return ahead if ahead > AHEAD_MAX else 0
