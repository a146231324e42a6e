"""One partition's log while this server owns it: the shell around recovery and marks.

How to think about it. A `Session` has one loop, which pulls from `Recovery` what has to be saved, and one link for each
replica, which pulls what that replica has to do. They meet in the core and in the replica's `Progress`, and wake each other
by bells: `decided` when there may be something new to decide, `appended` when there is something to send, `_progressed`
when more is committed. A bell carries no data: whoever is woken looks at the state itself, so a ring too many
changes nothing.

Three phases. `recover`: ask the storages, save the session id, vote, save the closing mark, make a majority level, save who
takes part, open. `serve`: what a majority of the members has on disk is committed; a replica that becomes level joins, one
that has forgotten something loses its vote, and each of these is saved before it counts. The end: handed over in order
(`drain`, `save_closing`), or at once when a storage belongs to a newer session or the partition's document was changed by
another process. Whatever is known here dies with the session; the document is all that the next one needs.

A planned new session (`_renew`: new members, or too much to prove for a replica that comes back) is saved as the closing
mark and the next session id in one write. Links and core are made anew; the log, its tail and its pipeline go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack

from waltzd.cluster.documents import PartitionMeta, StorageMeta
from waltzd.errors import CannotConnect, SessionEnded, WaltzError
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import ReplicaPort
from waltzd.server.core.progress import Marks
from waltzd.server.core.recovery import (
    NEAR_IDS,
    Recovery,
    acknowledging,
    closing,
    following,
    joining,
    losing,
    written_by_another,
)
from waltzd.server.core.tail import Tail
from waltzd.server.session.copying import Copier
from waltzd.server.session.documents import Documents
from waltzd.server.session.replica import Links, ReplicaLink, ReplicaReader
from waltzd.server.session.settings import (
    ACKNOWLEDGED_SECONDS,
    DRAIN_SECONDS,
    PATIENCE_SECONDS,
    RENEWAL_PATIENCE_SECONDS,
    SETTLED_SECONDS,
    SessionSettings,
)
from waltzd.server.session.wake import Bell, Ticker


class Session:
    def __init__(
        self,
        partition: int,
        *,
        meta: PartitionMeta,
        documents: Documents,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: SessionSettings,
        ticker: Ticker,
        say: Callable[[str], None],
    ) -> None:
        """`meta` carries the new session id, and follows upon what the documents were read as. It is not saved yet."""
        self.partition = partition
        self.partitions = settings.partitions
        self.session = meta.session
        self.generation = meta.generation
        self.decided, self.appended, self._progressed = Bell(), Bell(), Bell()
        self.core = Recovery(meta, documents.roles, is_taken=False)
        self.live: Marks | None = None
        self.ended: BaseException | None = None
        self.documents = documents
        self._noted_at = 0.0
        self._connect = connect
        self._settings = settings
        self._ticker = ticker
        self.say = say
        self._tail: Tail | None = None
        self._on_commit: list[Callable[[int], None]] = []
        self._links = Links()
        self._bytes = 0
        self._opened_at = 0.0
        self._is_asked_to_end = False
        self._sending_up_to: int | None = None
        """While a session gives way: what is above this waits in the tail for the next one."""
        self._drain_seconds, self._renew_after = DRAIN_SECONDS, 0.0
        self._reader = ReplicaReader(self, seconds=settings.storage_seconds)

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
    def is_open(self) -> bool:
        return self.live is not None

    @property
    def committed(self) -> int:
        return self._tail.committed if self._tail is not None else -1

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

    @property
    def is_beginning(self) -> bool:
        """Not open yet, or only just: replicas may not be readable for that."""
        is_settled = self.is_open and asyncio.get_running_loop().time() - self._opened_at > SETTLED_SECONDS
        return self.ended is None and not is_settled

    def held(self, name: str) -> int:
        return self.core.held(name)

    # -- what the links use

    @property
    def links(self) -> Mapping[str, ReplicaLink]:
        return self._links

    @property
    def sendable(self) -> int:
        """The last id that replicas may have."""
        last_id = self.tail.next_id - 1
        return last_id if self._sending_up_to is None else min(last_id, self._sending_up_to)

    async def may_be_opened(self) -> None:
        while not self.core.is_taken or self.core.refusal is not None:
            await self.decided.wait(self.decided.rings)

    def acknowledged(self, name: str, mark: int) -> None:
        if self._tail is not None and mark >= self._tail.next_id:
            last_id = self._tail.next_id - 1
            self.end(written_by_another(name, mark, partition=self.partition, session=self.session, last_id=last_id))
            return
        if self.live is None:
            return
        if self.live.acknowledge(name, mark):
            self._committed_up_to(self.live.committed)
        elif not self.live.counts(name) and mark + NEAR_IDS >= self.tail.next_id:
            self.decided.ring()

    def _committed_up_to(self, mark: int) -> None:
        self.tail.commit(mark)
        for listener in self._on_commit:
            listener(mark)
        self._progressed.ring()

    def has_forgotten(self, name: str, status: ReplicaStatus) -> bool:
        """It holds less than it acknowledged in this session, does not know that it began it, or is another one now."""
        state = self.core.meta.replicas.get(name)
        if state is None or state.session != self.session or self.live is None:
            return False
        progress = self.core.progress(name)
        holds_less = status.last_id < progress.acknowledged
        if not holds_less and status.incarnation == state.incarnation and status.session == self.session:
            return False
        self.live.lose(name)
        self.watch()  # until it is level again
        progress.has_forgotten = True
        self.decided.ring()
        return True

    def doubt(self, name: str, error: WaltzError) -> bool:
        link = self._links.get(name)  # None: it has left the partition meanwhile
        return link is not None and link.doubt(error)

    def _port_of(self, name: str) -> ReplicaPort:
        link = self._links.get(name)
        if link is None:
            raise CannotConnect(f"{name} has left partition {self.partition}")
        return link.port

    def copier(self, name: str) -> Copier:
        key = self._settings.key
        return Copier(
            self._links[name].port,
            partition=self.partition,
            session=self.session,
            source=self._port_of,
            committed=lambda: max(self.committed, self.core.mark if self.core.mark is not None else -1),
            copied=lambda mark: self.core.copied(name, mark),
            # There is no clock here: the date of the original is not known.
            header=lambda first: FileHeader(created_ms=0, key=key, partition=self.partition, first_id=first).encode(),
            seconds=self._settings.storage_seconds,
            bytes_per_second=self._settings.catch_up_bytes_per_second,
        )

    # -- the life

    def end(self, error: BaseException) -> None:
        if self.ended is None:
            self.ended = error
        self.decided.ring()
        self._progressed.ring()

    fenced = end

    def ask_to_end(self) -> None:  # in order, as soon as it is open
        self._is_asked_to_end = True
        self.decided.ring()

    async def recover(self, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Until the session is open; raises what ended it before."""
        self._start_links()
        if not self.core.is_taken:
            await self._take()
        while self.core.step != "OPEN":
            seen = self.decided.rings
            self._raise_end()
            wanted = self.core.next_save()
            if wanted is None:
                await self._wait_for_change(seen, patience_seconds)
                continue
            if not await self._save(wanted, promote=wanted.opened == self.session):
                self._take_roles()
        assert self.core.mark is not None
        self._opened_at = asyncio.get_running_loop().time()
        if self._tail is None:
            self._tail = Tail(self.core.mark + 1, self._settings.tail_bytes_max)
        assert self._tail.committed == self.core.mark
        meta = self.core.meta
        self.live = self.core.marks()
        self.say(
            f"open: session {self.session}, generation {self.generation}, from id {self.low_mark + 1} on, with "
            f"{', '.join(meta.joined)} of {', '.join(meta.members)}"
        )
        self._start_links()
        self.watch()
        self.decided.ring()

    async def _take(self) -> None:
        """Save the session id: from then on nobody else decides anything here. Not before enough replicas were asked: a
        number that is taken hides that storages have promised themselves to it before."""
        self._raise_end()
        while not self.core.has_asked_enough:
            await self.decided.wait(self.decided.rings)
            self._raise_end()
        await self.documents.save(self.core.meta, check=self._raise_end)
        self.core.is_taken = True
        self.decided.ring()

    async def _wait_for_change(self, seen: int, patience_seconds: float) -> None:
        """While a majority is level and others nearly are, for a moment only: then the session opens without them."""
        has_patience = self.core.patience_left and self.core.has_level_majority
        try:
            async with asyncio.timeout(patience_seconds if has_patience else None):
                await self.decided.wait(seen)
        except TimeoutError:
            self.core.patience_left = False

    async def serve(self) -> None:
        """Keep the log open until it is asked to end. Raises what ended it before."""
        try:
            while True:
                seen = self.decided.rings
                self._raise_end()
                if self._is_asked_to_end:
                    return
                reason = self._reason_for_another()
                if reason is not None and self._settings.turns.take(self.decided.ring):
                    await self._renew(reason)
                elif not await self._save_changes():
                    await self.decided.wait(seen)
        finally:
            self._ticker.remove(self._look)

    def _raise_end(self) -> None:
        if self.ended is not None:
            raise self.ended
        refusal = self.core.refusal
        if refusal is not None:
            raise refusal
        self._links.check()

    def watch(self) -> None:
        """Something is owed, or somebody is not level: look every second until that is over."""
        self._ticker.add(self._look)

    def _look(self, now: float) -> None:
        if self.ended is not None:
            self._ticker.remove(self._look)
        if self.ended is not None or self.live is None:
            return
        quiet = [link.look(now) for link in self._links.values()]
        is_level = len(self.live.counted) >= len(self.core.roles) == len(self.live.members)
        is_busy = not is_level or self._reason_for_another() is not None  # somebody may have become level, or has left
        if is_busy:
            self.decided.ring()
        if self._is_noted(now) and not is_busy and all(quiet):
            self._ticker.remove(self._look)

    def _reason_for_another(self) -> str | None:
        """Why there should be a new session; None also while it could not be saved."""
        now = asyncio.get_running_loop().time()
        if now < self._renew_after or not self.documents.can_be_saved:
            return None
        if self._bytes > self._settings.session_bytes_max:
            return f"{self._bytes} bytes were written in session {self.session}"
        gone = [name for name in self.core.meta.members if name not in self.core.roles]
        if gone:
            return f"{', '.join(gone)} left the partition"
        if now - self._opened_at < SETTLED_SECONDS:
            return None
        for name, role in self.core.roles.items():
            if name not in self.core.meta.members and self._is_nearly_level(name):
                return f"{role.value} {name} is level and becomes a member"
        return None

    def _is_nearly_level(self, name: str) -> bool:
        link, held, next_id = self._links.get(name), self.core.held(name), self.tail.next_id
        return link is not None and link.is_readable and held < next_id <= held + NEAR_IDS

    async def _save_changes(self) -> bool:
        """Members that join, or have forgotten something; whether there was anything to save."""
        assert self.live is not None
        if self.documents.has_to_write:
            await self._save(self.core.meta)
            return True
        for name in self.core.forgetful:
            wanted = losing(self.core.meta, name, self.core.progress(name).acknowledged)
            if wanted is not None:
                self.say(f"{name} has forgotten what it had acknowledged; it has no vote until it has been admitted again")
                await self._save(wanted)
            self.core.progress(name).has_forgotten = False
            return True
        for name in self.core.meta.members:
            if not self.live.counts(name) and self._is_nearly_level(name):
                if not self.core.has_joined(name):  # else it was saved, and the replica was away again in that moment
                    wanted = joining(self.core.meta, name, self.core.status(name), self.core.held(name))
                    if wanted is None:
                        continue
                    await self._save(wanted)
                if self._is_nearly_level(name) and self.live.join(name, self.core.held(name)):
                    self._committed_up_to(self.live.committed)
                return True
        return False

    async def _save(self, wanted: PartitionMeta, *, promote: bool = False) -> bool:
        wanted = self._with_marks(wanted)
        if not await self.documents.save(wanted, promote=promote, check=self._raise_end):
            return False
        self.core.saved(wanted)
        self.decided.ring()
        return True

    def _with_marks(self, meta: PartitionMeta) -> PartitionMeta:
        return meta if self.live is None else acknowledging(meta, self.live.acknowledged)

    def _is_noted(self, now: float) -> bool:
        """Whether the document says how far replicas have acknowledged. Nobody waits for that, and it may fail."""
        if self._with_marks(self.core.meta) is self.core.meta:
            return True
        if now - self._noted_at >= ACKNOWLEDGED_SECONDS and self.documents.can_be_saved:
            self._noted_at = now
            self.documents.note(lambda: self._with_marks(self.core.meta), lambda meta: self.core.saved(meta), self.end)
        return False

    def check(self) -> None:
        """What is true of the whole session after every event."""
        self.core.check()
        if self.live is None or self._tail is None:
            return
        tail, last_id = self._tail, self._tail.next_id - 1
        self.live.check()
        tail.check()
        assert tail.committed == self.live.committed
        for name in self.live.members:
            progress = self.core.progress(name)
            assert progress.sent <= last_id
            assert progress.told <= tail.committed
            assert progress.acknowledged <= last_id

    # -- from one session to the next

    async def _renew(self, reason: str) -> None:
        """Give way to a new session of our own. The log stays open to whoever uses it: what comes meanwhile gathers in the
        tail, and nothing that is in flight is given up. The open session goes on until the coordinator has shown that it
        takes saves, and everything that was sent is committed."""
        clock = asyncio.get_running_loop()
        with ExitStack() as turn:
            turn.callback(self._settings.turns.give)
            await self._save(self.core.meta)
            clock.call_later(self._settings.hand_over_seconds, turn.close)  # one that stands still holds up no other
            try:
                self._sending_up_to = self.tail.next_id - 1
                if not await self.drain(self._drain_seconds):
                    self._drain_seconds = min(2 * self._drain_seconds, self._settings.hand_over_seconds)
                    self._renew_after = clock.time() + SETTLED_SECONDS
                    return
                after = following(self.core.meta, self.committed)
                await self.documents.save(after, check=self._raise_end)
                self.say(f"a new session: {reason}")
                await self._follow(after)
            finally:
                self._sending_up_to = None
                self.appended.ring()

    async def _follow(self, meta: PartitionMeta) -> None:
        links, self._links = self._links, Links()  # nobody wrote in between: it is saved that this session is the next
        links.cancel()  # all at once: what they were told belongs to the session before
        self.session, self.live = meta.session, None
        self.core = Recovery(meta, self.core.roles, ours=self.core.incarnations)
        self._bytes, self._drain_seconds = 0, DRAIN_SECONDS
        await links.close()
        await self.recover(patience_seconds=RENEWAL_PATIENCE_SECONDS)

    # -- the ends

    async def drain(self, seconds: float) -> bool:
        """Wait so long for what is in flight; whether all of it is committed."""
        last_id = self.sendable
        try:
            async with asyncio.timeout(seconds):
                while self.ended is None and self.committed < last_id:
                    await self._progressed.wait(self._progressed.rings)
        except TimeoutError:
            return False
        return self.ended is None

    async def save_closing(self) -> None:
        """Nothing is in flight: the next session need not vote."""
        await self._save(closing(self.core.meta, self.committed))

    def abandon(self) -> None:
        """It is over: nothing more is sent or saved."""
        self.end(SessionEnded(f"session {self.session} of partition {self.partition} was closed"))
        self._links.cancel()
        self.documents.close()

    async def close(self) -> None:
        self.abandon()
        await self._links.close()

    def _start_links(self) -> None:
        self._links.start(self, self.documents.storages, self._connect, self._settings)

    async def reassign(self) -> None:
        """The lists of replicas or storages changed: contact who is new, and who has moved."""
        before = self.documents.addresses
        if news := await self.documents.look_again():
            self.say(news)
        moved = [name for name in self._links if self.documents.addresses.get(name) != before.get(name)]
        self._take_roles()
        self.watch()
        for name, link in [(name, self._links.pop(name)) for name in moved]:
            await link.close()
            self.core.silent(name, "its address changed")
        self._start_links()

    def _take_roles(self) -> None:
        self.core.roles = dict(sorted(self.documents.roles.items()))
        self.decided.ring()

    @property
    def missing(self) -> str:
        assert self.live is not None
        return self.live.missing([name for name, link in self._links.items() if link.is_readable])
