"""One session of one partition, from its id to its end: the shell around `recovery` and `session`.

It contacts every replica, saves what the recovery decides before anybody acts on it, opens, and then keeps the promise:
what a majority of the members has on disk is committed. Whatever is known here dies with the session. It ends by itself
only when a storage belongs to a newer one, or when somebody else has changed the partition's document.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from waltzd.cluster import Cluster
from waltzd.errors import CannotConnect, ChangedMeanwhile, SessionEnded, StaleSession, WaltzError
from waltzd.layout import FileHeader
from waltzd.meta import PartitionMeta, ReplicaSets, Role, StorageMeta
from waltzd.port import ReplicaPort
from waltzd.quorum import majority
from waltzd.record import Run
from waltzd.replica import ReplicaStatus
from waltzd.server.bell import Bell
from waltzd.server.copying import Copier
from waltzd.server.reading import ReplicaReader
from waltzd.server.recovery import NEAR_IDS, Recovery
from waltzd.server.replica_link import ReplicaLink
from waltzd.server.session import Session
from waltzd.server.tail import Tail
from waltzd.server.ticker import Ticker

TICK_SECONDS = 1.0
"""How often the links of an open session are looked at."""
PATIENCE_SECONDS = 0.3
"""How long a session that could open waits for replicas that are nearly level."""
SETTLED_SECONDS = 2.0
"""How old a session is before it gives way to another one for the sake of a new member."""


def unbounded() -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    partitions: int
    key: UUID
    tail_bytes_max: int = 16 << 20
    """For each partition."""
    session_bytes_max: int = 1 << 30
    """A planned new session after so many bytes, so that replicas have little to prove when they come back."""
    storage_seconds: float = 10.0
    """How long a storage may take to answer anything."""
    retry_seconds: float = 0.2
    """The first pause after a replica failed, or the coordinator did not answer; it doubles a few times."""
    hand_over_seconds: float = 1.0
    """How long a new owner waits for the old one to close, and an old one for what is in flight."""
    catch_up_bytes_per_second: Callable[[], int] = unbounded
    """How fast one replica copies from another just now; 0 for as fast as it can."""


class StoreSession:
    def __init__(
        self,
        partition: int,
        *,
        meta: PartitionMeta,
        version: int,
        cluster: Cluster,
        replicas: ReplicaSets,
        replicas_version: int,
        storages: Mapping[str, StorageMeta],
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: StoreSettings,
        ticker: Ticker,
        acknowledged: Mapping[str, int],
        say: Callable[[str], None],
    ) -> None:
        """`meta` is saved as `version` and carries the new session id."""
        self.partition = partition
        self.partitions = settings.partitions
        self.session = meta.session
        self.generation = meta.generation
        self.decided, self.appended, self._progressed = Bell(), Bell(), Bell()
        self.core = Recovery(meta, replicas.partitions.get(partition, {}), acknowledged=acknowledged)
        self.live: Session | None = None
        self.ended: BaseException | None = None
        self.acknowledged_marks: dict[str, int] = dict(acknowledged)
        """The most that each replica ever acknowledged: who then holds less has forgotten it."""
        self._version = version
        self._cluster = cluster
        self._replicas, self._replicas_version = replicas, replicas_version
        self._storages = dict(storages)
        self._connect = connect
        self._settings = settings
        self._ticker = ticker
        self.say = say
        self._tail: Tail | None = None
        self._on_commit: list[Callable[[int], None]] = []
        self._links: dict[str, ReplicaLink] = {}
        self._lost: dict[str, None] = {}
        self._bytes = 0
        self._opened_at = 0.0
        self._asked_for_another: str | None = None
        self._reader = ReplicaReader(
            partition, self.session, self._links, held=self.core.held, seconds=settings.storage_seconds
        )

    # -- what the pipeline uses

    @property
    def low_mark(self) -> int:
        assert self.core.mark is not None
        return self.core.mark

    @property
    def tail(self) -> Tail:
        assert self._tail is not None, "the session is not open"
        return self._tail

    @property
    def open_tail(self) -> Tail | None:
        return self._tail

    @property
    def committed(self) -> int:
        return self.live.committed if self.live is not None else -1

    def append(self, run: Run) -> None:
        self.tail.append(run)
        self._bytes += len(run.data)
        self.appended.ring()
        if self._bytes > self._settings.session_bytes_max:
            self.decided.ring()

    def on_commit(self, listener: Callable[[int], None]) -> None:
        self._on_commit.append(listener)

    def read(self, first_id: int, last_id: int, chunk_bytes: int) -> AsyncIterator[Run]:
        """Committed records from whichever replica can give them."""
        assert last_id <= self.committed
        return self._reader.read(first_id, last_id, chunk_bytes)

    # -- what the links use

    @property
    def links(self) -> Mapping[str, ReplicaLink]:
        return self._links

    def acknowledged(self, name: str, mark: int) -> None:
        self.acknowledged_marks[name] = max(mark, self.acknowledged_marks.get(name, -1))
        if self.live is None:
            return
        if self.live.acknowledge(name, mark):
            self._committed_up_to(self.live.committed)
        elif self.live.durable(name) is None and mark + NEAR_IDS >= self.tail.next_id:
            self.decided.ring()

    def _committed_up_to(self, mark: int) -> None:
        self.tail.commit(mark)
        for listener in self._on_commit:
            listener(mark)
        self._progressed.ring()

    def has_forgotten(self, name: str, status: ReplicaStatus) -> bool:
        """It holds less than it had acknowledged, does not know that it has begun, or its directory is another one now, in
        this very session."""
        state = self.core.meta.replicas.get(name)
        if state is None or state.session != self.session:
            return False
        holds_less = status.last_id < self.acknowledged_marks.get(name, -1)
        if not holds_less and status.incarnation == state.incarnation and status.session == self.session:
            return False
        if self.live is not None:
            self.live.lose(name)
            self.watch()  # it may be level again before the session is old enough to give way to another one
        self._lost[name] = None
        self.decided.ring()
        return True

    def cut(self, name: str, mark: int) -> None:
        """It was told to forget what is above this."""
        self.acknowledged_marks[name] = min(mark, self.acknowledged_marks.get(name, mark))

    def fenced(self, error: StaleSession) -> None:
        self.end(error)

    def doubt(self, name: str, error: WaltzError) -> None:
        self._links[name].doubt(error)

    def copier(self, name: str) -> Copier:
        link = self._links[name]
        return Copier(
            link.port,
            partition=self.partition,
            session=self.session,
            source=lambda source: self._links[source].port,
            committed=lambda: max(self.committed, self.core.mark if self.core.mark is not None else -1),
            copied=lambda mark: self.core.copied(name, mark),
            header=self._header,
            seconds=self._settings.storage_seconds,
            bytes_per_second=self._settings.catch_up_bytes_per_second,
        )

    def _header(self, first_id: int) -> bytes:
        """Of a segment that is made anew. There is no clock here: the date of the original is not known."""
        key, partition = self._settings.key, self.partition
        return FileHeader(created_ms=0, key=key, partition=partition, first_id=first_id).encode()

    # -- the life

    def end(self, error: BaseException) -> None:
        """Nothing more is decided in this session."""
        if self.ended is None:
            self.ended = error
        self.decided.ring()
        self._progressed.ring()

    def ask_for_another(self, reason: str) -> None:
        """Bring this session to an end in order, as soon as it is open."""
        self._asked_for_another = reason
        self.decided.ring()

    async def recover(self) -> None:
        """Until the session is open; raises what ended it before."""
        self._start_links()
        while self.core.step != "OPEN":
            seen = self.decided.rings
            self._check()
            refusal = self.core.refusal
            if refusal is not None:
                raise refusal
            wanted = self.core.next_save()
            if wanted is None:
                await self._wait_for_change(seen)
                continue
            await self._save(wanted, promote=wanted.opened == self.session)
        assert self.core.mark is not None
        self._opened_at = asyncio.get_running_loop().time()
        self._tail = Tail(self.core.mark + 1, self._settings.tail_bytes_max)
        self.live = Session(self.core.meta.members, self.core.meta.joined, self.core.mark)
        self.decided.ring()

    async def _wait_for_change(self, seen: int) -> None:
        """While a majority is level and others nearly are, for a moment only: then the session opens without them."""
        if self.core.patience_left and self.core.has_level_majority:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self.decided.wait(seen)
            except TimeoutError:
                self.core.patience_left = False
        else:
            await self.decided.wait(seen)

    async def serve(self) -> str:
        """Keep the open session until there is a reason to have a new one, which is returned. Raises what ended it."""
        assert self.live is not None
        self.watch()
        try:
            while True:
                seen = self.decided.rings
                self._check()
                reason = self._reason_for_another()
                if reason is not None:
                    return reason
                if not await self._save_changes():
                    await self.decided.wait(seen)
        finally:
            self._ticker.remove(self._look)

    def _check(self) -> None:
        if self.ended is not None:
            raise self.ended
        for link in self._links.values():
            if link.task.done() and not link.task.cancelled():
                error = link.task.exception()
                if error is not None:
                    raise error

    def watch(self) -> None:
        """Something is owed, or somebody is not level: look every second until that is over."""
        self._ticker.add(self._look)

    def _look(self, now: float) -> None:
        if self.ended is not None:
            self._ticker.remove(self._look)
            return
        assert self.live is not None
        quiet = [link.look(now) for link in self._links.values()]
        if len(self.live.counted) < len(self.core.roles):  # somebody may have become level
            self.decided.ring()
        elif all(quiet):
            self._ticker.remove(self._look)

    def _reason_for_another(self) -> str | None:
        if self._asked_for_another is not None:
            return self._asked_for_another
        if self._bytes > self._settings.session_bytes_max:
            return f"{self._bytes} bytes were written in session {self.session}"
        gone = [name for name in self.core.meta.members if name not in self.core.roles]
        if gone:
            return f"{', '.join(gone)} left the partition"
        if asyncio.get_running_loop().time() - self._opened_at < SETTLED_SECONDS:
            return None
        for name, role in self.core.roles.items():
            if name not in self.core.meta.members and self._is_nearly_level(name):
                return f"{role.value} {name} is level and becomes a member"
        for name in self.core.meta.members:
            state = self.core.meta.replicas.get(name)
            if state is not None and state.is_lost and self._is_nearly_level(name):
                return f"{name} has again what it had forgotten"
        return None

    def _is_nearly_level(self, name: str) -> bool:
        link = self._links.get(name)
        return link is not None and link.is_readable and self.core.held(name) + NEAR_IDS >= self.tail.next_id

    async def _save_changes(self) -> bool:
        """Members that join, or have forgotten something; whether there was anything to save."""
        assert self.live is not None
        for name in list(self._lost):
            wanted = self.core.losing(name)
            if wanted is not None:
                self.say(f"{name} has forgotten what it had acknowledged; it has no vote until it has been admitted again")
                await self._save(wanted)
            del self._lost[name]
            return True
        for name in self.core.meta.members:
            if self.live.durable(name) is None and self._is_nearly_level(name):
                if not self.core.has_joined(name):  # else it was saved, and the replica was away again in that moment
                    wanted = self.core.joining(name)
                    if wanted is None:
                        continue
                    await self._save(wanted)
                if self._is_nearly_level(name) and self.live.join(name, self.core.held(name)):
                    self._committed_up_to(self.live.committed)
                return True
        return False

    async def _save(self, wanted: PartitionMeta, *, promote: bool = False) -> None:
        """Compare-and-set. When the answer is lost, look what is there."""
        sets = self._promoted(wanted) if promote else None
        # With the version that `sets` was made from: what somebody else saves meanwhile must end this, not be undone by it.
        replicas = None if sets is None else (sets, self._replicas_version)
        pause = self._settings.retry_seconds
        while True:
            try:
                self._version = await self._cluster.save_partition(self.partition, wanted, self._version, replicas=replicas)
            except CannotConnect:
                self._check()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 20 * self._settings.retry_seconds)
                try:
                    found, version = await self._cluster.partition(self.partition)
                except CannotConnect:
                    continue
                if found != wanted:
                    if version != self._version:
                        raise ChangedMeanwhile(
                            f"somebody else changed the document of partition {self.partition}"
                        ) from None
                    continue
                self._version = version
            if replicas is not None and replicas[1] == self._replicas_version:
                self._replicas, self._replicas_version = replicas[0], replicas[1] + 1
            self.core.saved(wanted)
            self.decided.ring()
            return

    def _promoted(self, wanted: PartitionMeta) -> ReplicaSets | None:
        """The replica sets in which the learners that are admitted are members; None when nothing changes."""
        mine = self._replicas.partitions.get(self.partition, {})
        new = {name: Role.MEMBER if name in wanted.members else role for name, role in mine.items()}
        if new == dict(mine):
            return None
        return replace(self._replicas, partitions={**self._replicas.partitions, self.partition: new})

    # -- the ends

    async def drain(self) -> bool:
        """Wait a while for what is in flight; whether all of it is committed. The caller appends nothing any more."""
        try:
            async with asyncio.timeout(self._settings.hand_over_seconds):
                while self.ended is None and self.committed < self.tail.next_id - 1:
                    await self._progressed.wait(self._progressed.rings)
        except TimeoutError:
            return False
        return self.ended is None

    async def save_closing(self) -> None:
        """Nothing is in flight: the next session need not vote."""
        await self._save(self.core.closing(self.committed))

    def abandon(self) -> None:
        """It is over: nothing more is sent or saved."""
        self.end(SessionEnded(f"session {self.session} of partition {self.partition} was closed"))
        for link in self._links.values():
            link.cancel()

    async def close(self) -> None:
        self.abandon()
        for link in self._links.values():
            await link.close()

    # -- who takes part

    def _start_links(self) -> None:
        for name in self.core.names:
            if name not in self._links and name in self._storages:
                self._start_link(name)
        for name in self.core.names:
            if name not in self._storages:
                self.core.silent(name, "it is not in the list of storages")

    def _start_link(self, name: str) -> None:
        link = ReplicaLink(
            self,
            name,
            self._connect(self._storages[name]),
            seconds=self._settings.storage_seconds,
            retry_seconds=self._settings.retry_seconds,
        )
        self._links[name] = link
        link.start()

    async def reassign(self, replicas: ReplicaSets, version: int, storages: Mapping[str, StorageMeta]) -> None:
        """The lists of replicas or storages changed: contact who is new, and who has moved."""
        moved = [name for name in self._links if storages.get(name) != self._storages.get(name)]
        self._replicas, self._replicas_version = replicas, version
        self._storages = dict(storages)
        self.core.roles = dict(sorted(replicas.partitions.get(self.partition, {}).items()))
        if self.live is not None:
            self.watch()
        for name in moved:
            await self._links.pop(name).close()
            self.core.silent(name, "its address changed")
        self._start_links()
        self.decided.ring()

    @property
    def missing(self) -> str:
        """Why nothing can be committed at this moment, in one sentence; empty when it can."""
        assert self.live is not None
        writable = [name for name in self.live.counted if name in self._links and self._links[name].is_readable]
        if len(writable) >= majority(len(self.live.members)):
            return ""
        others = [name for name in self.live.members if name not in writable]
        return f"no majority takes appends: {', '.join(others)} of {', '.join(self.live.members)} do not"
