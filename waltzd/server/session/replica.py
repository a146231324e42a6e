"""One replica of a partition, driven by one session: contacted, brought level, kept level, and again after any failure.

What is to be done next is decided by `recovery`; this does it. A link fails alone: it tells the session that its replica is
silent, waits a little longer each time, and tries again from the start. Only a storage that has promised itself to a newer
session ends more than the link.

Records reach a level replica from the tail; one that has fallen out of the tail copies from the other replicas, sealed
segments as files, until it can go on from the tail. No queue: the replica is a cursor.

Committed records from whichever replica can give them: for readers that are behind the tail.

A replica that fails, or lets us wait too long, is asked last from then on, until it has answered again: a storage that
hangs costs one deadline, not one for each read. What a storage says when it cannot give is about that storage: it never
goes to a reader as if it were about the partition. A session that begins is no failure: storages refuse the one before
from the first contact on, and the links are not yet there again.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from waltzd.cluster.documents import StorageMeta
from waltzd.errors import CannotConnect, NoSuchPartition, NotReadable, SameStorage, StaleSession, WaltzError
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import AppendPort, ReplicaPort
from waltzd.server.core.recovery import Copy, GiveUp, Heal, Level, Recovery, SetLowMark, Truncate, Wait
from waltzd.server.core.tail import Tail
from waltzd.server.session.copying import Copier, SourceFailed, timely
from waltzd.server.session.settings import SessionSettings
from waltzd.server.session.wake import Bell

T = TypeVar("T")
FRAME_BYTES = 1 << 20
"""Of records in one message to a storage: more makes nothing faster, and the first of them waits longer."""
PAUSES = 5
"""The longest pause before a replica is tried again, in first pauses. Short: one that came back is level the sooner."""
OPEN_PATIENCE = 6
"""So many times longer than for other calls: a storage proves what it holds before it answers."""


class State(enum.StrEnum):
    CONNECTING = "CONNECTING"
    SETTLING = "SETTLING"
    LIVE = "LIVE"
    SLOW = "SLOW"
    CATCHING_UP = "CATCHING_UP"
    DAMAGED = "DAMAGED"
    """It is being healed."""
    GIVEN_UP = "GIVEN_UP"
    """It is damaged, and nobody who answers can heal it."""
    DOWN = "DOWN"


class Home(Protocol):
    """The session that a link belongs to."""

    partition: int
    partitions: int
    session: int
    core: Recovery
    decided: Bell
    """Rings when the recovery may have something new to do."""
    appended: Bell
    """Rings when the tail grew, or somebody should look again."""

    @property
    def is_open(self) -> bool: ...
    @property
    def tail(self) -> Tail:
        """Once the session is open."""
        ...

    @property
    def sendable(self) -> int:
        """The last id in the tail that this session may send."""
        ...

    @property
    def committed(self) -> int: ...
    def acknowledged(self, name: str, mark: int) -> None: ...
    def has_forgotten(self, name: str, status: ReplicaStatus) -> bool:
        """It answers: whether it is not what it was in this very session any more."""
        ...

    async def may_be_opened(self) -> None:
        """Wait until the session is saved, and nothing that the replicas say contradicts it."""
        ...

    def watch(self) -> None:
        """Call `look` of every link now and then."""
        ...

    def fenced(self, error: StaleSession) -> None: ...
    def say(self, sentence: str) -> None: ...
    def copier(self, name: str) -> Copier: ...
    def doubt(self, name: str, error: WaltzError) -> bool:
        """What this replica answered when it was opened may not be true any more: whether it is opened again."""
        ...


class ReplicaLink:
    def __init__(self, home: Home, name: str, port: ReplicaPort, *, seconds: float, retry_seconds: float) -> None:
        self.name = name
        self.state = State.CONNECTING
        self.story = "not contacted yet"
        self._home = home
        self._port = port
        self._seconds = seconds
        self._retry_seconds = retry_seconds
        self._was_asked = False
        """Before it was opened for the first time, as far as we know."""
        self._stream: AppendPort | None = None
        self._progress = home.core.progress(name)
        self._owes_since: float | None = None
        """Since when marks are owed for what was sent."""
        self._overdue: CannotConnect | None = None
        self._doubt: WaltzError | None = None
        """Why it should be opened again, although it has failed in nothing that this link asked of it."""
        self._said: type[WaltzError] | None = None
        """What kind of failure was logged since it was level."""
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> ReplicaPort:
        return self._port

    @property
    def is_readable(self) -> bool:
        """It has begun this session and answers."""
        return self.state in (State.LIVE, State.SLOW)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"partition {self._home.partition} on {self.name}")
        self._task.add_done_callback(lambda _: self._home.decided.ring())  # a link that ends has a reason to be looked at

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None
        return self._task

    def doubt(self, error: WaltzError) -> bool:
        """A link that waits while others decide asks nothing, and does not notice that its storage was started anew."""
        if self.state is not State.SETTLING:
            return False
        self._doubt = error
        self._home.decided.ring()
        return True

    def _check_doubt(self) -> None:
        error, self._doubt = self._doubt, None
        if error is not None:
            raise CannotConnect(f"{self.name} has to be opened again: {error.message}") from error

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self, now: float) -> bool:
        """Nobody waits for ever, and nobody is left with an old mark. Called now and then; whether there is nothing to look
        for any more, until `Home.watch` is called again."""
        if self._owes_since is not None and now - self._owes_since > self._seconds and self._stream is not None:
            self._overdue = CannotConnect(f"{self.name} has not acknowledged anything for {self._seconds:.0f} seconds")
            self._stream.cancel()
        if self._progress.told < self._home.committed and self.is_readable:
            self._home.appended.ring()
            return False
        return self._owes_since is None and self.is_readable

    # -- from contact to failure, and again

    async def _run(self) -> None:
        pause = self._retry_seconds
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._serve()
            except StaleSession as error:
                error.facts.setdefault("storage", self.name)
                self._fail(error)
                self._home.fenced(error)
                return
            except WaltzError as error:
                self._fail(self._overdue or error)
            self._overdue = None
            if asyncio.get_running_loop().time() - started > 10 * self._retry_seconds:
                pause = self._retry_seconds
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSES * self._retry_seconds)

    def _fail(self, error: WaltzError) -> None:
        if type(error) is not self._said:  # once, not with every attempt
            self._said = type(error)
            self._home.say(f"{self.name} failed while it was {self.state}: {error.code} {error.message}")
        self.state, self.story = State.DOWN, error.message
        self._home.core.silent(self.name, error.message)
        self._home.decided.ring()

    async def _timely(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except TimeoutError:
            raise CannotConnect(f"{self.name} did not {what} within {self._seconds:.0f} seconds") from None

    async def _serve(self) -> None:
        home = self._home
        if self._said is None:
            self.state, self.story = State.CONNECTING, "being opened"
        self._doubt = None
        if not self._was_asked:
            await self._ask()
            await home.may_be_opened()
            self._was_asked = True
        status = await self._open()
        core = home.core
        twin = core.twin_of(self.name, status)
        if twin is not None:
            error = SameStorage(f"{self.name} and {twin} are one storage: both addresses lead to the same replica")
            is_ours = core.is_recorded(self.name, status) and not core.is_recorded(twin, status)
            if not is_ours or not home.doubt(twin, error):
                raise error
            core.silent(twin, error.message)
        if home.has_forgotten(self.name, status):
            self.story = f"has forgotten what it had acknowledged: it holds ids up to {status.last_id}"
        core.opened(self.name, status)
        home.decided.ring()
        await self._settle()
        while True:
            await self._catch_up()
            await self._stream_tail()

    async def _ask(self) -> None:
        """Once it is opened nobody can tell any more whom it had promised itself to."""
        home = self._home
        try:
            status = await self._timely(self._port.status(home.partition), "say where it stands")
        except NoSuchPartition:
            status = None
        home.core.asked(self.name, status)
        self.story = "asked where it stands; the session is not saved yet"
        home.decided.ring()

    async def _open(self) -> ReplicaStatus:
        """A storage that knows nothing of the partition is given an empty replica, if it is assigned one: its disk was
        replaced. An empty replica has no vote, so nothing is forgotten by that."""
        home, seconds = self._home, OPEN_PATIENCE * self._seconds
        try:
            return await self._port.open(home.partition, home.session, partitions=home.partitions, seconds=seconds)
        except NoSuchPartition:
            if self.name not in home.core.roles:
                raise
            home.say(f"{self.name} holds nothing of this partition: an empty replica is made there")
            return await self._port.open(
                home.partition, home.session, partitions=home.partitions, create=True, seconds=seconds
            )

    async def _settle(self) -> None:
        """Until this replica is level with the decided log and the session is open."""
        home, core = self._home, self._home.core
        while True:
            seen = home.decided.rings
            self._check_doubt()
            task = core.next_for(self.name)
            self.state = State.GIVEN_UP if isinstance(task, GiveUp) else State.SETTLING
            match task:
                case Wait(why):
                    self.story = why
                    await home.decided.wait(seen)
                    continue
                case Truncate(mark):
                    self.story = f"being cut above {mark}"
                    core.changed(self.name, await self._port.truncate(home.partition, home.session, mark))
                case SetLowMark(mark):
                    self.story = f"beginning the session at {mark}"
                    core.changed(self.name, await self._port.set_low_mark(home.partition, home.session, mark))
                case Copy(last_id, sources):
                    self.story = f"copying up to {last_id} from {sources[0]}"
                    await self._copy(last_id, sources)
                case Heal(segment, last_id, sources):
                    self.state, self.story = State.DAMAGED, f"the damaged segment {segment} is being replaced"
                    core.changed(self.name, await home.copier(self.name).heal(segment, last_id, sources))
                case Level():
                    if home.is_open:
                        return
                    self.story = "level"
                    await home.decided.wait(seen)
                    continue
            home.decided.ring()

    async def _copy(self, last_id: int, sources: tuple[str, ...]) -> None:
        """From the first source that can. When none can, everything here begins anew a moment later."""
        home = self._home
        copier = home.copier(self.name)
        failed: SourceFailed | None = None
        for source in sources:
            try:
                await copier.copy(self._progress.held + 1, last_id, source)
                return
            except SourceFailed as error:
                failed = error
                home.doubt(source, error.error)
        assert failed is not None
        raise CannotConnect(f"{self.name} could not copy: {failed.error.message}") from failed

    # -- while the session is open

    async def _catch_up(self) -> None:
        """Until what comes next is in the tail."""
        home = self._home
        while self._progress.held + 1 < home.tail.first_id:
            held = self._progress.held
            self.state = State.CATCHING_UP
            last_id, sources = home.core.give(self.name, held, home.committed)
            self.story = f"holds ids up to {held} of {home.committed}, copying from {sources[0] if sources else 'nobody'}"
            if not sources:
                seen = home.decided.rings
                await home.decided.wait(seen)
                continue
            await self._copy(last_id, sources)

    async def _stream_tail(self) -> None:
        """Send what is in the tail and take the marks, until this replica has fallen out of it."""
        home, status = self._home, self._progress.status
        assert status is not None
        self._progress.sent = self._progress.held
        # What the storage knows, not what it holds: it may have been started anew, and have copied without being told.
        self._progress.told = max(status.committed, min(status.low_mark, self._progress.sent))
        self._owes_since = None
        stream = self._stream = self._port.append(home.partition, home.session)
        try:
            await self._timely(stream.start(), "take a stream")
            self.state, self.story = State.LIVE, "level"
            if self._said is not None:
                self._home.say(f"{self.name} is level again, at {self._progress.sent}")
                self._said = None
            home.acknowledged(self.name, self._progress.sent)
            sending = asyncio.create_task(self._send(stream))
            receiving = asyncio.create_task(self._receive(stream))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stream.cancel()
                sending.cancel()
                receiving.cancel()
                ends = await asyncio.gather(sending, receiving, return_exceptions=True)
            for end in ends[::-1]:  # what came in says best why
                if isinstance(end, Exception):
                    raise end
        finally:
            self._stream = None

    async def _send(self, stream: AppendPort) -> None:
        home, tail = self._home, self._home.tail
        loop = asyncio.get_running_loop()
        while True:
            seen = home.appended.rings
            first_id, last_id = self._progress.sent + 1, home.sendable
            if first_id < tail.first_id:
                self.state = State.SLOW
                return
            run = tail.joined_from(first_id, last_id, FRAME_BYTES)
            if run is None:
                if self._progress.told < home.committed and self._is_quiet and tail.first_id <= last_id:
                    # Nothing new to send, but a new committed mark to tell: the last record carries it again.
                    run = tail.joined_from(last_id, last_id, FRAME_BYTES)
                else:
                    await home.appended.wait(seen)
                    continue
            assert run is not None
            if self._owes_since is None:
                self._owes_since = loop.time()
                home.watch()
            self._progress.told = home.committed
            await stream.send(run, self._progress.told)
            self._progress.sent = max(self._progress.sent, run.last_id)

    @property
    def _is_quiet(self) -> bool:
        return self._owes_since is None

    async def _receive(self, stream: AppendPort) -> None:
        home = self._home
        loop = asyncio.get_running_loop()
        while (mark := await stream.receive()) is not None:
            self._owes_since = None if mark >= self._progress.sent else loop.time()
            home.core.copied(self.name, mark)
            home.acknowledged(self.name, mark)
        raise CannotConnect(f"{self.name} ended the stream")


class Links(dict[str, ReplicaLink]):
    """All links of a session, by name."""

    def start(
        self,
        home: Home,
        storages: Mapping[str, StorageMeta],
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: SessionSettings,
    ) -> None:
        """To everybody who takes part and has none yet, and to nobody else any more."""
        seconds, retry_seconds = settings.storage_seconds, settings.retry_seconds
        for name in [name for name in self if name not in home.core.names]:
            self.pop(name).cancel()
        for name in home.core.names:
            if name not in storages:
                home.core.silent(name, "it is not in the list of storages")
            elif name not in self:
                self[name] = ReplicaLink(home, name, connect(storages[name]), seconds=seconds, retry_seconds=retry_seconds)
                self[name].start()

    def check(self) -> None:
        """Raise what ended one of them: a mistake of ours, which must not look like a replica that is level."""
        for link in self.values():
            error = link.task.exception() if link.task.done() and not link.task.cancelled() else None
            if error is not None:
                raise error

    def cancel(self) -> None:
        for link in self.values():
            link.cancel()

    async def close(self) -> None:
        for link in list(self.values()):
            await link.close()


RETRY_SECONDS = 0.05


class Log(Protocol):
    """What is read from."""

    @property
    def partition(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def links(self) -> Mapping[str, ReplicaLink]: ...
    @property
    def is_beginning(self) -> bool:
        """Its session is not open yet, or only just."""
        ...

    def held(self, name: str) -> int: ...


class ReplicaReader:
    def __init__(self, log: Log, *, seconds: float) -> None:
        self._log = log
        self._seconds = seconds
        self._unwell: dict[str, None] = {}
        """Who failed, in the order in which they did."""

    async def read(self, first_id: int, last_id: int, chunk_bytes: int) -> AsyncGenerator[Run, None]:
        log, failed = self._log, dict[str, WaltzError]()
        while first_id <= last_id:
            name = self._choose(first_id, failed)
            if name is None and log.is_beginning:
                failed.clear()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if name is None:
                raise NotReadable(f"no replica gives ids from {first_id} on: {_reasons(failed)}")
            until = min(last_id, log.held(name))
            port = log.links[name].port
            runs = port.read(log.partition, first_id, until, session=log.session, frame_bytes=chunk_bytes)
            try:
                async for run in timely(runs, self._seconds, name):
                    yield run
                    first_id = run.last_id + 1
                self._unwell.pop(name, None)
            except WaltzError as error:
                failed[name] = error
                self._unwell.pop(name, None)
                self._unwell[name] = None

    def _choose(self, first_id: int, failed: Mapping[str, WaltzError]) -> str | None:
        able = [
            name
            for name, link in sorted(self._log.links.items())
            if link.is_readable and name not in failed and self._log.held(name) >= first_id
        ]
        well = [name for name in able if name not in self._unwell]
        if well:
            return well[self._log.partition % len(well)]  # partitions spread over the storages
        return next((name for name in self._unwell if name in able), None)


def _reasons(failed: Mapping[str, WaltzError]) -> str:
    said = [f"{name}: {error.code} {error.message}" for name, error in failed.items()]
    return "; ".join(said) or "none that holds them can be read"
