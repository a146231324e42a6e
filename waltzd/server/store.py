"""One partition that this server owns: one session after the other, from the assignment to the hand-over.

While a session is open there is exactly one pipeline, made for it and closed with it: lock table, feed and requests in
flight never outlive the session that they belong to. When a session ends, for whatever reason, the next one begins with
the same steps as after a crash; there is no shorter way back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from waltzd.cluster import Cluster
from waltzd.errors import (
    BadMetadata,
    CannotConnect,
    ChangedMeanwhile,
    MetadataBehind,
    MetadataMissing,
    NotOwner,
    NotReady,
    SessionEnded,
    WaltzError,
)
from waltzd.meta import PartitionMeta, StorageMeta
from waltzd.owner import OwnedPartition, OwnedReplica, PartitionStatistics
from waltzd.port import ReplicaPort
from waltzd.record import Run
from waltzd.server.bell import Bell
from waltzd.server.changes import acknowledging
from waltzd.server.documents import Documents
from waltzd.server.store_session import StoreSession
from waltzd.server.store_settings import StoreSettings
from waltzd.server.tail import Tail
from waltzd.server.ticker import Ticker


class OpenSession(Protocol):
    """What a pipeline gets: the log at its end, for as long as it is ours without a break."""

    @property
    def partition(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def session(self) -> int:
        """Rises when it gives way to another one of the same owner, with nothing in between."""
        ...

    @property
    def low_mark(self) -> int:
        """The mark at which it opened."""
        ...

    @property
    def tail(self) -> Tail: ...
    @property
    def committed(self) -> int: ...
    def append(self, run: Run) -> None:
        """Keep it in the tail and let the replicas have it; `on_commit` tells when it is committed."""
        ...

    def on_commit(self, listener: Callable[[int], None]) -> None: ...
    def read(self, first_id: int, last_id: int, chunk_bytes: int) -> AsyncIterator[Run]:
        """Committed records from a replica."""
        ...


class ClosablePipeline(Protocol):
    def hold(self) -> None:
        """Nothing more is appended; what was is still answered."""
        ...

    def close(self, error: WaltzError) -> None:
        """Every mount is told, and nothing more is appended."""
        ...

    @property
    def mounts(self) -> int: ...


P = TypeVar("P", bound=ClosablePipeline)
RETRY_SECONDS_MAX = 10.0


class Store(Generic[P]):
    def __init__(
        self,
        partition: int,
        generation: int,
        *,
        cluster: Cluster,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: StoreSettings,
        ticker: Ticker,
        make_pipeline: Callable[[OpenSession], P],
        say: Callable[[str], None],
        previous_owner_alive: bool = False,
        statistics: Callable[[], PartitionStatistics] = PartitionStatistics,
    ) -> None:
        """`statistics` tells what the pipelines, one after the other, have counted."""
        self.partition = partition
        self.generation = generation
        self._cluster = cluster
        self._connect = connect
        self._settings = settings
        self._ticker = ticker
        self._make_pipeline = make_pipeline
        self._say = say
        self._statistics = statistics
        self._previous_owner_alive = previous_owner_alive
        self._session: StoreSession | None = None
        self._pipeline: P | None = None
        self._marks: tuple[int, Mapping[str, int]] = 0, {}
        """The last session that was open, and how far each replica had acknowledged in it: the coordinator may not know."""
        self._trouble = ""
        self._was_open = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.bell = Bell()
        """Rings when the pipeline came or went."""
        self.story: deque[str] = deque(maxlen=200)

    # -- the life

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"partition {self.partition}")

    @property
    def task(self) -> asyncio.Task[Any]:
        """Ends only when the store is closed, or with a mistake of ours."""
        assert self._task is not None
        return self._task

    async def close(self, *, hand_over: bool) -> None:
        """No longer ours. With `hand_over` what is in flight is brought to its end and the session is closed in order, so
        that the next owner has nothing to find out."""
        self._is_closing = True
        session, task = self._session, self.task
        if hand_over and session is not None and self._pipeline is not None:
            session.ask_to_end()
            await asyncio.wait((task,), timeout=3 * self._settings.hand_over_seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()  # a mistake of ours on the way out is one all the same

    def _note(self, sentence: str) -> None:
        self.story.append(sentence)
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
                if self._trouble != error.message:  # once, however often it is tried again
                    self._trouble = error.message
                    self._note(f"{error.code} {error.message}")
            if self._was_open:
                pause = self._settings.retry_seconds
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def _hold_one_session(self) -> None:
        """From a new session id until there is a reason for another one."""
        self._was_open = False
        cluster = self._cluster
        token = await cluster.wait_for_replicas(self.partition, None)
        meta, version = await self._next_session()
        documents = Documents(cluster, self.partition, version=version, retry_seconds=self._settings.retry_seconds)
        await documents.read()
        session = self._session = StoreSession(
            self.partition,
            meta=meta,
            documents=documents,
            connect=self._connect,
            settings=self._settings,
            ticker=self._ticker,
            say=self._note,
        )
        following = asyncio.create_task(self._follow_replicas(session, token))
        following.add_done_callback(lambda task: self._look_at_the_end(session, task))
        others = asyncio.create_task(self._look_for_others(session))
        others.add_done_callback(lambda task: self._look_at_the_end(session, task))
        try:
            await session.recover()
            self._was_open, self._trouble = True, ""
            self._pipeline = pipeline = self._make_pipeline(session)
            self.bell.ring()
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
            self._drop_pipeline(SessionEnded(f"session {session.session} of partition {self.partition} has ended"))
            if session.live is not None:
                self._marks = session.session, session.live.marks
            self._session = None
            # Everything is told to end before anything is waited for: a second cancellation must not leave a link behind.
            following.cancel()
            others.cancel()
            session.abandon()
            await asyncio.gather(following, others, return_exceptions=True)
            await session.close()

    def _drop_pipeline(self, error: WaltzError) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close(error)
            self.bell.ring()

    async def _next_session(self) -> tuple[PartitionMeta, int]:
        """The document with a session id above every other, and the version of the one that it follows upon."""
        meta, version = await self._cluster.partition(self.partition)
        if meta is not None and self._previous_owner_alive and meta.generation < self.generation:
            meta, version = await self._wait_for_closing(meta, version)
        if meta is None:
            return PartitionMeta(generation=self.generation, session=1), version
        if meta.generation > self.generation:
            raise NotOwner(
                f"partition {self.partition} belongs to generation {meta.generation}; this server was given generation "
                f"{self.generation}"
            )
        opened, marks = self._marks
        known = acknowledging(meta, marks) if meta.opened == opened else meta
        return replace(known, generation=self.generation, session=meta.session + 1), version

    async def _wait_for_closing(self, meta: PartitionMeta, version: int) -> tuple[PartitionMeta, int]:
        """The old owner is alive and knows: give it a moment to bring its session to an end."""
        self._previous_owner_alive = False
        token: object | None = None
        try:
            async with asyncio.timeout(self._settings.hand_over_seconds):
                while meta.opened > 0 and meta.decision is None:
                    token = await self._cluster.wait_for_partition(self.partition, token)
                    found, version = await self._cluster.partition(self.partition)
                    if found is None:
                        raise ChangedMeanwhile(f"the document of partition {self.partition} went away")
                    meta = found
        except TimeoutError:
            self._note("the old owner did not close its session in time; its last mark is found out from the replicas")
        return meta, version

    async def _follow_replicas(self, session: StoreSession, token: object) -> None:
        """Tell the session when storages come, go, move or change their role."""
        while True:
            try:
                token = await self._cluster.wait_for_replicas(self.partition, token)
                await session.reassign()
            except CannotConnect:
                await asyncio.sleep(self._settings.retry_seconds)

    async def _look_for_others(self, session: StoreSession) -> None:
        """Until it is open: who waits for replicas that never come notices in no other way that an operator has decided.
        Afterwards, whether the document is still there."""
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
            if self._was_open:
                continue
            session_id, mine = session.session, session.core
            if meta is not None and meta.session >= session_id:
                if meta.session == session_id and (mine.is_taken or meta == mine.meta):
                    continue
                raise ChangedMeanwhile(f"somebody else took session {meta.session} of partition {self.partition}")

    @staticmethod
    def _look_at_the_end(session: StoreSession, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            session.end(error)

    # -- what others see

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
        """What it waits for, in one sentence."""
        session = self._session
        if session is None:
            return self._trouble
        if session.live is not None:
            return session.missing
        return session.core.waiting() or self._trouble

    def describe(self) -> OwnedPartition:
        session = self._session
        if session is None:
            return OwnedPartition(
                partition=self.partition,
                generation=self.generation,
                session=0,
                step="CLOSED",
                waiting=self.waiting,
                committed=-1,
                last_id=-1,
                low_mark=-1,
                mounts=0,
                tail_bytes=0,
                replicas=(),
                statistics=self._statistics(),
            )
        tail = session.open_tail
        return OwnedPartition(
            partition=self.partition,
            generation=self.generation,
            session=session.session,
            step=str(session.core.step),
            waiting=self.waiting,
            committed=session.committed,
            last_id=tail.next_id - 1 if tail is not None else -1,
            low_mark=session.core.meta.low_mark,
            mounts=self._pipeline.mounts if self._pipeline is not None else 0,
            tail_bytes=tail.bytes if tail is not None else 0,
            replicas=tuple(self._replica(session, name) for name in session.core.names),
            statistics=self._statistics(),
            trouble=session.documents.trouble,
        )

    @staticmethod
    def _replica(session: StoreSession, name: str) -> OwnedReplica:
        link = session.links.get(name)
        role = session.core.roles.get(name)
        has_joined = session.live is not None and session.live.durable(name) is not None
        return OwnedReplica(
            storage=name,
            role=str(role) if role is not None else "leaving",
            state=str(link.state) if link is not None else "DOWN",
            durable_id=session.core.held(name),
            counts=has_joined and link is not None and link.is_readable,
            story=link.story if link is not None else "it is not in the list of storages",
        )
