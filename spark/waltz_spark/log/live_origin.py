"""A running cluster as an origin: high-water marks from the owners of partitions, records from replicas.

The owner of a partition reports its committed mark, and no id above it is read. The mark is confirmed: it includes every
append that was acknowledged before. If no majority of the storages confirms it, the mark that the owner knows is used, with
a warning: it may be old, but all ids below it are committed. Records are read from replicas, which return only committed
ids to readers without a session, so reading does not load the owners. If a replica fails or is behind, the next one is
read, and at last the owner. Tasks get all addresses from the catalog; only the catalog connects to ZooKeeper.

`JoinedOrigin` is the cluster with its archive: archived segments come from the store, later records from the cluster.
Old ids then cost the cluster nothing, and ids that have left its storages are available. The cluster determines the end of
each partition: ids that the archive has above it are not returned.

Synchronous code, such as a Spark task, reads asynchronous streams by one event loop for the process, on its own thread.

The thread lives as long as the process and its loop is never closed, because a thread of gRPC may call it after the last
call has ended. The next item of a stream is fetched while its reader processes the current one, and no further ahead, so
memory is bounded.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID
from zlib import crc32

from waltz_spark.log.archive_segments import ArchiveSegments, Contents, is_piece
from waltz_spark.log.origin import Catalog, Extent, Origin, Span, Throttle
from waltzd.client.loop import LoopThread
from waltzd.client.routes import Routes, pause_seconds
from waltzd.cluster.documents import Membership
from waltzd.cluster.zookeeper_credentials import OFF, ZooKeeperCredentials, load_credentials
from waltzd.errors import (
    BadArgument,
    BeyondLog,
    CannotConnect,
    NeedsBatches,
    NoSuchPartition,
    NotReady,
    OnlyInArchive,
    OtherTimeline,
    Retry,
    Trimmed,
    WaltzError,
)
from waltzd.errors.operations import BadConfig, BadFrame, ForeignArchive, LogUnreadable, NoServerUp
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run, join_runs
from waltzd.protocol.locks import HISTORY_IDS_MAX, HistoryPart
from waltzd.protocol.peers import ServerPort
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST
from waltzd.wire.calls import READ
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import ReplicaClient
from waltzd.wire.tls import Tls

T = TypeVar("T")
AHEAD_MAX = 2
"""Items of one stream that are fetched ahead at most."""

END_SECONDS = 5.0
"""Seconds that the end of the process waits for its streams."""

_lock = threading.Lock()
_threads: dict[int, LoopThread] = {}
"""Thread of each process id: a forked process needs a new one."""


def _thread() -> LoopThread:
    with _lock:
        process = os.getpid()
        if process not in _threads:
            _threads[process] = LoopThread("waltz reading")
            atexit.register(_end, process)
        return _threads[process]


def _end(process: int) -> None:
    """Close streams that were not read to their end, before the thread ends with the process."""
    if process == os.getpid():
        wait_for(_cancel_all())


async def _cancel_all() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await asyncio.gather(*rest, return_exceptions=True)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    return _thread().wait_for(work)


def items(stream: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of an asynchronous stream; close it at its end, or when this generator is closed."""
    pump = wait_for(_start(stream))
    try:
        while True:
            found = wait_for(pump.next())
            if not found:
                return
            yield found[0]
    finally:
        if not sys.is_finalizing():  # else the thread has ended, and the call would not return
            wait_for(pump.stop())


async def _start(stream: AsyncGenerator[T, None]) -> _Pump[T]:
    return _Pump(stream)


class _Pump(Generic[T]):
    def __init__(self, stream: AsyncGenerator[T, None]) -> None:
        self._stream = stream
        self._waiting: asyncio.Queue[tuple[T, ...]] = asyncio.Queue(AHEAD_MAX)
        self._task = asyncio.create_task(self._run(), name="waltz reading")

    async def _run(self) -> None:
        try:
            async with aclosing(self._stream) as stream:
                async for item in stream:
                    await self._waiting.put((item,))
        finally:
            if not self._is_cancelled():
                await self._waiting.put(())

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def next(self) -> tuple[T, ...]:
        """Return the next item in a tuple, or an empty one at the end; raise an error of the stream after its last item."""
        found = await self._waiting.get()
        if not found:
            await self._task
        return found

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


_log = logging.getLogger("waltz.spark")
CALL_SECONDS = 5.0
FRAME_SECONDS = 30.0
"""Time-out for the next records of a replica, after which another one is read."""
PATIENCE_SECONDS = 30.0
"""Time-out for finding an owner of a partition, which covers a fail-over."""
CONFIRM_SECONDS = 3.0
"""Time for which a confirmed mark is requested: an owner without a majority fails after two seconds."""
CALLS_MAX = 64
"""Concurrent calls about partitions."""
REMEMBERED_SECONDS = 10.0
"""Seconds for which the lists of servers, storages and segments are cached."""
FRAME_BYTES = 1 << 20
"""Bytes of records in one message: smaller and larger messages were slower."""
MARKS_MAX = 100_000
"""Transactions that marked a lock, of one partition, up to which they are read alone. All ids below them are read: the
driver keeps them in memory, and a lock with more marks is found everywhere."""
RECORD_BYTES_LIKELY = 256
"""Assumed size of a record while no segment is known."""


@dataclass(frozen=True)
class Certificate:
    """Paths of three files, which have to exist on all machines that read."""

    certificate: str
    key: str
    ca: str


@functools.lru_cache(maxsize=8)
def _tls(certificate: Certificate) -> Tls:
    """Return the TLS of the process, which reloads replaced files."""
    try:
        return Tls(certificate.certificate, certificate.key, certificate.ca, role=None)
    except BadConfig as error:
        raise BadArgument(
            error.message,
            not_done="nothing was asked of the cluster",
            next_step="correct the file, or give another one; it has to be on every machine that reads",
        ) from error


@dataclass(frozen=True)
class Route:
    """The place of an extent of a cluster: the addresses for reading its partition."""

    key: UUID
    servers: tuple[str, ...]
    replicas: tuple[tuple[str | None, str], ...]
    """Name, if known, and address of each storage; members of the replica set come first."""
    timeline: UUID = FIRST
    """Timeline of the log: a replica, or an owner that was replaced, may still have what an operator gave up, above the
    fork."""

    def in_turn(self, partition: int, first_id: int) -> Sequence[tuple[str | None, str]]:
        """Return the storages in an order that depends on the ids, to spread readers over replicas."""
        if not self.replicas:
            return ()
        start = crc32(b"%d %d" % (partition, first_id)) % len(self.replicas)
        return self.replicas[start:] + self.replicas[:start]


_Storages: TypeAlias = Callable[[int], Sequence[tuple[str | None, str]]]
"""Function from a partition to the names and addresses of its storages."""
_Sealed: TypeAlias = Sequence[tuple[int, int, int]]
"""First id, last id and size of each sealed segment."""


class _Memory:
    """A cache for streams, which read the catalog repeatedly.

    It also keeps the highest mark of each timeline, because an owner that was replaced without noticing may report a lower
    one."""

    def __init__(self) -> None:
        self.until = 0.0
        self.addresses: tuple[tuple[str, ...], _Storages] | None = None
        self.sealed: dict[int, _Sealed] = {}
        self.marks: dict[int, Position] = {}
        self.key: UUID | None = None

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        """Pickle as an empty cache."""
        return _Memory, ()

    def refresh(self, now: float) -> None:
        if now >= self.until:
            self.until, self.addresses = now + REMEMBERED_SECONDS, None
            self.sealed.clear()

    def highest(self, key: UUID, marks: Mapping[int, Position]) -> dict[int, Position]:
        if self.key != key:
            self.key = key
            self.marks.clear()
        found = dict(marks)
        for number, mark in marks.items():
            known = self.marks.get(number, mark)
            if known.timeline == mark.timeline:
                found[number] = max(known, mark)
        self.marks |= found
        return found


@dataclass(frozen=True, kw_only=True)
class LiveOrigin(Origin):
    servers: tuple[str, ...] = ()
    """Addresses of some servers; with a coordinator, its servers are added."""
    storages: tuple[str, ...] = ()
    """Addresses of storages, if there is no coordinator. Without any, records are read from owners."""
    coordinator: str | None = None
    root: str = "/waltz"
    access: Mapping[str, str] = field(default_factory=dict)
    """Arguments of `load_credentials` for ZooKeeper; only the driver has these files."""
    certificate: Certificate | None = None
    bytes_per_second: int | None = None
    """Rate limit of one task; None for no limit."""
    seconds: float = PATIENCE_SECONDS
    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    @functools.cached_property
    def _throttle(self) -> Throttle:
        return Throttle(self.bytes_per_second)

    def describe(self) -> str:
        where = f"{self.coordinator}{self.root}" if self.coordinator is not None else ", ".join(self.servers)
        return f"the cluster at {where}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        return wait_for(self._catalog(partitions))

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        if span.count:
            with closing(items(self._runs(extent, span, with_locks=with_locks))) as runs:
                yield from _gathered(runs, batch_bytes)

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """Ask the owner; a log that ends in format 0 has no times."""
        span = catalog.spans[partition]
        if not span.count:
            return span.first
        try:
            mark = wait_for(self._mark_before(catalog.routes[partition], partition, time))
        except NeedsBatches:
            mark = span.last
        return max(span.first, min(span.last, mark) + 1)

    async def _mark_before(self, route: Route, number: int, time: int) -> int:
        async with self._owners(route.servers) as where:
            return await where.ask(number, "FindTime", lambda port: port.find_time(number, time), self.seconds)

    def marked(self, catalog: Catalog, spans: Mapping[int, Span], lock: int) -> dict[int, list[Span]]:
        """Ask the owners, whose storages have key indexes."""
        return wait_for(self._marked(catalog, spans, lock)) if spans else {}

    async def _marked(self, catalog: Catalog, spans: Mapping[int, Span], lock: int) -> dict[int, list[Span]]:
        route: Route = catalog.routes[next(iter(spans))]
        async with self._owners(route.servers) as where:
            return await _each(spans, lambda number: self._marked_in(where, catalog, number, spans[number], lock))

    async def _marked_in(self, where: Routes, catalog: Catalog, number: int, span: Span, lock: int) -> list[Span]:
        """Return the ids that marked a lock, and the ids for which the owner has no answer. The newest come first: the
        start of the log may be of format 0, or in an archive that the owner cannot read."""
        found: list[Span] = []
        rest = span

        async def ask(port: ServerPort) -> HistoryPart:
            part = await port.history(
                number, lock, after=rest.first - 1, before=rest.last + 1, limit=HISTORY_IDS_MAX, newest_first=True,
                confirmed=False,
            )  # fmt: skip
            if part.history.end < rest.last:
                raise CannotConnect(f"an owner before answered: it had committed up to id {part.history.end}")
            return part

        while rest.count and len(found) < MARKS_MAX:
            try:
                part = await where.ask(number, "History", ask, self.seconds)
            except WaltzError as error:
                level = logging.DEBUG if isinstance(error, NeedsBatches) else logging.WARNING
                _log.log(level, "partition %d: ids %d to %d are all read, to look for the lock in them: %s",
                         number, rest.first, rest.last, error.message)  # fmt: skip
                break
            if part.history.end.timeline != catalog.position(number, span.last).timeline:
                return [span]  # what was found may be above the fork; the tasks notice it
            found += [Span(id_, id_) for id_ in part.history.ids]
            through = part.history.ids[-1] if part.history.has_more else part.through
            rest = Span(rest.first, rest.first - 1 if through is None else through - 1)
        return [*found, rest]

    def check(self, partition: int, position: Position, *, route: Route | None = None) -> None:
        wait_for(self._check(partition, position, route))

    async def _check(self, partition: int, position: Position, route: Route | None) -> None:
        if route is None:
            servers, _ = self._memory.addresses = self._memory.addresses or await self._addresses()
        else:
            servers = route.servers
        async with self._owners(servers) as where:
            await where.ask(
                partition, "HighWaterMark", lambda port: port.high_water_mark(partition, since=position), self.seconds
            )

    # -- catalog

    async def _catalog(self, partitions: Collection[int] | None) -> Catalog:
        _ = self._identity  # report errors of the files before the first call
        memory = self._memory
        memory.refresh(asyncio.get_running_loop().time())
        try:
            return await self._catalog_by(memory, partitions)
        except WaltzError:
            memory.until = 0.0
            raise

    async def _catalog_by(self, memory: _Memory, partitions: Collection[int] | None) -> Catalog:
        servers, storages = memory.addresses = memory.addresses or await self._addresses()
        async with self._owners(servers) as where:
            topology = where.topology
            numbers = range(where.partitions) if partitions is None else sorted(set(partitions))
            missing = [str(number) for number in numbers if not 0 <= number < where.partitions]
            if missing:
                raise NoSuchPartition(
                    f"{self.describe()} has no partition {', '.join(missing)}: it has {where.partitions}",
                    not_done="nothing was read",
                )
            up = (*dict.fromkeys([server.address for server in topology.servers] + list(servers)),)
            routes = {number: Route(topology.cluster_key, up, tuple(storages(number))) for number in numbers}
            marks = memory.highest(topology.cluster_key, await _each(numbers, lambda number: self._mark(where, number)))
        routes = {number: replace(route, timeline=marks[number].timeline) for number, route in routes.items()}
        memory.sealed |= await self._sealed({number: routes[number] for number in numbers if number not in memory.sealed})
        return Catalog(
            key=topology.cluster_key,
            spans={number: Span(0, int(marks[number])) for number in numbers},
            extents=tuple(
                extent
                for number in numbers
                for extent in extents_of(number, int(marks[number]), memory.sealed[number], routes[number])
            ),
            timelines={number: mark.timeline for number, mark in marks.items() if mark.timeline != FIRST},
            routes=routes,
        )

    async def _mark(self, where: Routes, number: int) -> Position:
        """Return the mark of a partition: a confirmed one, or the one that an owner without a majority knows.

        Reading committed records needs no majority. An owner that is recovering reports no mark."""
        clock = asyncio.get_running_loop().time
        until = clock() + CONFIRM_SECONDS

        async def ask(port: ServerPort) -> Position:
            try:
                return await port.high_water_mark(number, confirmed=True)
            except NotReady as error:
                if clock() < until:
                    raise
                mark = await port.high_water_mark(number)
                _log.warning(
                    "partition %d is read up to id %d, which may not be the newest committed one: %s",
                    number, mark, error.message,
                )  # fmt: skip
                return mark

        return await where.ask(number, "HighWaterMark", ask, self.seconds)

    async def _addresses(self) -> tuple[tuple[str, ...], _Storages]:
        if self.coordinator is None:
            found = tuple((None, address) for address in self.storages)
            return self.servers, lambda _: found
        from waltzd.cluster.cluster import Cluster
        from waltzd.cluster.zookeeper import ZooKeeperCoordinator

        coordinator = ZooKeeperCoordinator(self.coordinator, self.root, self._access)
        await coordinator.start()
        try:
            cluster = Cluster(coordinator)
            await cluster.meta()  # raises if there is no cluster
            servers, storages, (sets, _) = await asyncio.gather(cluster.servers(), cluster.storages(), cluster.replicas())
        finally:
            await coordinator.close()
        addresses = tuple(dict.fromkeys([*self.servers, *(server.listen for server in servers.values())]))
        if not addresses:
            raise NoServerUp(f"{self.describe()} has no server that is up, so its committed marks are unknown")

        def of(number: int) -> list[tuple[str | None, str]]:
            replicas = sorted(sets.partitions.get(number, {}).items(), key=lambda each: each[1] is not Membership.MEMBER)
            return [(name, storages[name].listen) for name, _ in replicas if name in storages]

        return addresses, of

    @property
    def _access(self) -> ZooKeeperCredentials:
        own = {} if self.certificate is None else asdict(self.certificate)
        try:
            return load_credentials(**{"how": OFF, **own, **self.access})
        except BadConfig as error:
            raise BadArgument(error.message, not_done="nothing was asked of the cluster") from error

    async def _sealed(self, routes: Mapping[int, Route]) -> dict[int, _Sealed]:
        """Ask storages for their sealed segments, at which reads are split, and for their sizes."""
        silent: set[str] = set()
        replicas: dict[str, ReplicaClient] = {}

        async def ask(number: int) -> _Sealed:
            for name, address in routes[number].in_turn(number, 0) if self._may_read_replicas else ():
                if address in silent:
                    continue
                if address not in replicas:
                    replicas[address] = self._replica(routes[number], name, address)
                try:
                    return await replicas[address].segments(number)
                except CannotConnect as error:
                    silent.add(address)
                    _log.info("%s does not say which segments it has: %s", address, error.message)
                except WaltzError as error:
                    _log.info("%s does not say which segments of partition %d it has: %s", address, number, error.message)
            return ()

        try:
            return await _each(routes, ask)
        finally:
            for replica in replicas.values():
                await replica.close()

    # -- reading

    async def _runs(self, extent: Extent, span: Span, *, with_locks: bool) -> AsyncGenerator[Run, None]:
        route: Route = extent.place
        number, next_id = extent.partition, span.first
        said: list[str] = []
        has_left, refused = False, None
        sources = [
            (name or address, functools.partial(self._of_replica, route, name, address))
            for name, address in (route.in_turn(number, span.first) if self._may_read_replicas else ())
        ]
        for who, source in [*sources, ("its owner", functools.partial(self._of_owner, route))]:
            try:
                async with aclosing(source(number, Span(next_id, span.last), with_locks=with_locks)) as runs:
                    async for run in runs:
                        if run.first_id != next_id or run.last_id > span.last or not len(run):
                            raise BadFrame(f"it sent ids {run.first_id} to {run.last_id} where id {next_id} was asked for")
                        await self._throttle.wait(len(run.data))
                        next_id = run.last_id + 1
                        yield run
                if next_id > span.last:
                    return
                said.append(f"{who}: it ended in front of id {next_id}")
            except WaltzError as error:
                said.append(f"{who}: {error.message}")
                refused = error if isinstance(error, OtherTimeline) else None
                has_left = has_left or isinstance(error, Trimmed | OnlyInArchive)
                # A replica that is slightly behind, or has trimmed archived records, is normal.
                level = logging.DEBUG if isinstance(error, BeyondLog | Trimmed) else logging.WARNING
                _log.log(level, "ids from %d of partition %d are asked of another one. %s", next_id, number, said[-1])
        if refused is not None:  # by the owner, who knows best
            raise refused
        raise LogUnreadable(
            f"no storage and no server returned ids {next_id} to {span.last} of partition {number}. {'; '.join(said)}",
            next_step="they have left the storages: name the archive beside the cluster, as `archive` of the reader or "
            "--archive of the command, so that they are read from there" if has_left else "",
            partition=number, first_id=next_id, last_id=span.last,
        )  # fmt: skip

    async def _of_replica(
        self, route: Route, name: str | None, address: str, number: int, span: Span, *, with_locks: bool
    ) -> AsyncGenerator[Run, None]:
        size = min(FRAME_BYTES, self._throttle.batch_bytes)
        async with self._replica(route, name, address) as replica:
            runs = replica.read(
                number, span.first, span.last, frame_bytes=size, with_locks=with_locks, timeline=route.timeline
            )
            while True:
                try:
                    async with asyncio.timeout(FRAME_SECONDS):
                        run = await anext(runs, None)
                except TimeoutError:
                    raise CannotConnect(f"{address} sent nothing for {FRAME_SECONDS:.0f} seconds") from None
                if run is None:
                    return
                yield run

    async def _of_owner(self, route: Route, number: int, span: Span, *, with_locks: bool) -> AsyncGenerator[Run, None]:
        """Read from the owner, through fail-overs, while there is progress."""
        next_id, attempt, loop = span.first, 0, asyncio.get_running_loop()
        async with self._owners(route.servers) as where:
            until = loop.time() + self.seconds
            while next_id <= span.last:
                try:
                    rest = Span(next_id, span.last)
                    async with aclosing(self._fetched(where, route, number, rest, with_locks=with_locks)) as runs:
                        async for run in runs:
                            yield run
                            next_id, attempt, until = run.last_id + 1, 0, loop.time() + self.seconds
                except WaltzError as error:
                    if error.retry is Retry.NEVER or loop.time() > until:
                        raise
                    await asyncio.sleep(pause_seconds(attempt, number))
                    attempt += 1

    @staticmethod
    async def _fetched(
        where: Routes, route: Route, number: int, span: Span, *, with_locks: bool
    ) -> AsyncGenerator[Run, None]:
        place = await where.find(number)
        assert place.address is not None
        try:
            async with (
                where.at(place.address) as port,
                aclosing(port.fetch(number, span.first, span.last, with_locks=with_locks, timeline=route.timeline)) as runs,
            ):
                async for run in runs:
                    yield run
        except WaltzError as error:
            where.failed(number, place, error)
            raise

    # -- connections

    @property
    def _identity(self) -> Tls | None:
        return _tls(self.certificate) if self.certificate is not None else None

    @property
    def _may_read_replicas(self) -> bool:
        """False for applications, which may read from owners only."""
        tls = self._identity
        return tls is None or tls.identity.role in READ.roles

    @asynccontextmanager
    async def _owners(self, servers: Sequence[str]) -> AsyncIterator[Routes]:
        """Yield the way to the owners of partitions, by the addresses of some servers."""
        where = Routes(servers, self._server, call_seconds=CALL_SECONDS)
        try:
            await where.open(self.seconds)
            yield where
        finally:
            await where.close()

    def _server(self, address: str, key: UUID | None) -> ServerClient:
        return ServerClient(address, key, seconds=CALL_SECONDS, tls=self._identity)

    def _replica(self, route: Route, name: str | None, address: str) -> ReplicaClient:
        return ReplicaClient(address, route.key, seconds=CALL_SECONDS, tls=self._identity, name=name)


async def _each(numbers: Collection[int], ask: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    turn = asyncio.Semaphore(CALLS_MAX)

    async def one(number: int) -> T:
        async with turn:
            return await ask(number)

    return dict(zip(numbers, await asyncio.gather(*map(one, numbers)), strict=True))


def extents_of(partition: int, mark: int, sealed: _Sealed, place: Any) -> Iterator[Extent]:
    """Yield ids 0 to `mark`, split at segments, with sizes estimated from the known segments. Pure."""
    known = [(last_id - first_id + 1, size) for first_id, last_id, size in sealed if size and last_id >= first_id]
    records = sum(count for count, _ in known)
    likely = sum(size for _, size in known) / records if records else RECORD_BYTES_LIKELY
    sizes = {(first_id, last_id): size for first_id, last_id, size in sealed if size}
    starts = sorted({0, *(id_ for first_id, last_id, _ in sealed for id_ in (first_id, last_id + 1) if 0 < id_ <= mark)})
    for first_id, following in zip(starts, [*starts[1:], mark + 1], strict=True):
        span = Span(first_id, following - 1)
        if span.count:
            size = sizes.get((span.first, span.last), int(likely * span.count))
            yield Extent(partition=partition, span=span, bytes=size, place=place)


def _gathered(runs: Iterator[Run], batch_bytes: int) -> Iterator[Run]:
    """Join small runs into runs of about `batch_bytes`."""
    waiting: list[Run] = []
    size = 0
    for run in runs:
        if waiting and size + len(run.data) > batch_bytes:
            yield join_runs(waiting)
            waiting, size = [], 0
        waiting.append(run)
        size += len(run.data)
    if waiting:
        yield join_runs(waiting)


# -- a cluster with its archive ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JoinedOrigin(Origin):
    archive: ArchiveSegments
    live: LiveOrigin

    def describe(self) -> str:
        return f"{self.live.describe()} and {self.archive.describe()}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        live = self.live.catalog(partitions)
        archived = self.archive.contents(live.spans.keys())
        if archived.key != live.key:
            raise ForeignArchive(
                f"{self.archive.describe()} is of the cluster {archived.key}; {self.live.describe()} is {live.key}",
                not_done="nothing was read",
                next_step="name the archive of this cluster, as its storages do in `archive`",
            )
        rest: dict[int, list[Extent]] = {number: [] for number in live.spans}
        for extent in live.extents:
            rest[extent.partition].append(extent)
        extents: list[Extent] = []
        for number, span in live.spans.items():
            shared = span.cut(self._shared(live, archived, number))
            own = [part for extent in archived.extents(number) if (part := extent.cut(shared)).span.count]
            behind = Span(own[-1].span.last + 1 if own else span.first, span.last)
            extents += [*own, *(part for extent in rest[number] if (part := extent.cut(behind)).span.count)]
        return replace(live, extents=tuple(extents))

    def _shared(self, live: Catalog, archived: Contents, partition: int) -> Span:
        """Return the ids of the archive that are on the log of the cluster; the archive may end with an older timeline."""
        pieces = archived.pieces.get(partition)
        if not pieces:
            return Span(0, EMPTY)
        last = Position(pieces[-1].last, archived.timelines.get(partition, FIRST))
        if last.timeline != live.position(partition, last).timeline:
            try:
                self.live.check(partition, last)
            except OtherTimeline as error:
                fork = error.number("fork")
                return Span(pieces[0].first, EMPTY if fork is None else fork)
        return Span(pieces[0].first, last)

    def check(self, partition: int, position: Position, *, route: Any = None) -> None:
        self.live.check(partition, position, route=route)

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        origin = self.archive if is_piece(extent) else self.live
        yield from origin.read(extent, span, batch_bytes=batch_bytes, with_locks=with_locks)

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """Search the archive first, and then the cluster for later times."""
        own = [extent for extent in catalog.extents if extent.partition == partition]
        archived = [extent for extent in own if is_piece(extent)]
        rest = [extent for extent in own if not is_piece(extent)]
        if archived:
            last = archived[-1].span.last
            found = self.archive.first_at(_of(catalog, partition, archived), partition, time)
            if found <= last or not rest:
                return min(found, last + 1)
        return self.live.first_at(_of(catalog, partition, rest), partition, time)

    def marked(self, catalog: Catalog, spans: Mapping[int, Span], lock: int) -> dict[int, list[Span]]:
        """Ask the cluster, whose servers look into the archive too; ids that they cannot answer for are read."""
        return self.live.marked(catalog, spans, lock)

    def header(self, extent: Extent) -> FileHeader | None:
        return self.archive.header(extent) if is_piece(extent) else None


def _of(catalog: Catalog, partition: int, extents: Sequence[Extent]) -> Catalog:
    """Return the catalog with only these extents of a partition."""
    span = Span(extents[0].span.first, extents[-1].span.last) if extents else catalog.spans[partition]
    return replace(catalog, spans={partition: span}, extents=tuple(extents))
