"""`LocalCluster`: storages, coordinator and servers in one process, put together as in the daemons.

The code is that of the daemons; only its environment is replaced: disks and the coordinator are in memory, and sockets
are direct calls. A bug in Waltz itself that shows up in any task is kept and raised when the cluster is closed, so that
no test misses it."""

from __future__ import annotations

import asyncio
import json
import secrets
import warnings
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

from waltzd.client.client import Client
from waltzd.client.routes import Connect
from waltzd.client.settings import ClientSettings
from waltzd.client.view import E, Serializer, View, checked_time
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import (
    ChannelsDocument,
    ClusterMeta,
    Decision,
    Membership,
    PolicyDocument,
    ReplicaSets,
    ReplicaState,
    ServerMeta,
    StorageMeta,
    whole_grant,
)
from waltzd.cluster.groups import GroupPort, begin_group_log
from waltzd.cluster.memory import MemoryTree
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.errors import BadArgument, CannotConnect, NoSuchPartition, NotReady
from waltzd.errors.operations import NotOwner
from waltzd.format.record import Record, Run
from waltzd.protocol.batches import Limits
from waltzd.protocol.channels import NO_CHANNELS, key_hash
from waltzd.protocol.document import SCHEMA, decode
from waltzd.protocol.level import THIS, Program
from waltzd.protocol.peers import SECRET_BYTES, ReplicaPort
from waltzd.protocol.policy import Policy
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.pipeline import Capacity, Pipeline, PipelineSettings, microseconds
from waltzd.server.clients.registry import ClientRegistry
from waltzd.server.election import Election
from waltzd.server.failure_detector import FailureDetector, OpenProbe
from waltzd.server.ownership import PartitionOwner
from waltzd.server.reconcile import PolicyFollower, VersionCheck
from waltzd.server.registration import Registration
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import TICK_SECONDS, SessionSettings
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.server.subscriptions.group_log import ClientLog, GroupLogClient
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.testing.ports import (
    InjectedFaults,
    ServerEndpoint,
    ServerPort,
    StorageEndpoint,
    StoragePort,
    WrittenLocks,
)
from waltzd.wire.tasks import tell_failure

LIMITS = Limits(payload_bytes_max=1 << 20, locks_max=1000, frame_bytes_max=4 << 20)
MOUNTS_MAX = 10_000
LOG_CLOSE_SECONDS = 0.5
"""Seconds that a server that ends waits for its last entries in the group log."""


async def _never_alive(server: ServerMeta) -> bool:
    """Return False: names are unique here, so a registration that is left is that of a killed server."""
    return False


class LocalServer:
    """Server with all parts of the daemon, except process and network."""

    def __init__(
        self,
        name: str,
        meta: ClusterMeta,
        coordinator: Coordinator,
        *,
        address: str,
        instance: UUID,
        connect: Callable[[StorageMeta], ReplicaPort],
        settings: SessionSettings,
        on_fatal: Callable[[BaseException], None],
        pipeline: PipelineSettings | None = None,
        is_alive: Callable[[ServerMeta], Awaitable[bool]] = _never_alive,
        open_probe: OpenProbe | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        reach: Connect | None = None,
        authorizer: Authorizer | None = None,
        program: Program | None = None,
    ) -> None:
        """Create a server. Without `open_probe` it does not detect dead servers. `reach` connects it as a client of the
        group log; without it there are no groups. `authorizer` follows the policy of the cluster; without it everything
        is allowed. `program` is the version that the server says it is; without it no versions are checked."""
        self.name = name
        self.meta = ServerMeta(
            name=name,
            listen=address,
            admin_listen=f"{name} admin",
            instance=instance,
            version=version("waltzd") if program is None else program.version,
        )
        self._on_fatal = on_fatal
        self._connect = connect
        self._settings = settings
        self._pipeline = pipeline or PipelineSettings(limits=LIMITS)
        self._say = say
        # Ids count from 1: a run can be repeated.
        self._cluster = Cluster(coordinator, clock=lambda: 0.0, program=program or THIS)
        self._capacity = Capacity(MOUNTS_MAX)
        self._timer = PeriodicTimer(TICK_SECONDS)
        self.owned_logs: list[OwnedLog[Pipeline]] = []
        self.versions = None if program is None else VersionCheck(self._cluster, name, 0, program)
        self._registration = (
            Registration(self._cluster, self.meta, is_alive=is_alive)
            if self.versions is None
            else Registration(self._cluster, self.meta, is_alive=is_alive, check_servers=self.versions.check_servers)
        )
        self._detector = (
            None
            if open_probe is None
            else FailureDetector(
                self._cluster, name, open_probe=open_probe, ask_storage=self._ask_storage, is_alive=is_alive
            )
        )
        self._election = Election(self._cluster, name, meta.partitions, self._detector)
        self.owner: PartitionOwner = PartitionOwner(
            self._cluster,
            meta,
            self._registration,
            make_owned_log=self._make_owned_log,
            is_gone=(lambda server: False) if self._detector is None else self._detector.is_gone,
            names=ClientNames(coordinator, clock=lambda: 0.0),
        )
        if self.versions is not None:
            self.versions.on_rise = self.owner.check_storages
        self.authorizer = authorizer or Authorizer.free()
        self._policy = None if authorizer is None else PolicyFollower(self._cluster, authorizer)
        self.clients = ClientRegistry()
        self.groups: GroupCoordinator | None = None if reach is None else self._make_group_coordinator(reach)
        if self.groups is not None:
            self.owner.needed_from = self.groups.needed_from
        self.calls = ServerCalls(self.owner, self.authorizer, self.clients, self.groups)
        self._tasks: list[asyncio.Task[None]] = []
        self._hosting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.versions is not None:
            await self.versions.read()
            await self.versions.check_servers()
        await self.owner.read()
        await self._registration.announce()
        self._tasks = [
            self._task(self._registration.reconciler.run(), "registration"),
            self._task(self._election.reconciler.run(), "election"),
        ]
        if self.versions is not None:
            self._tasks.append(self._task(self.versions.reconciler.run(), "level"))
        if self.groups is not None:
            self._tasks.append(self._task(self.groups.run(), "groups"))
        if self._detector is not None:
            self._tasks.append(self._task(self._detector.run(), "failure detector"))
        if self._policy is not None:
            self._tasks.append(self._task(self._policy.reconciler.run(), "policy"))
        self._hosting = self._task(self.owner.run(), "ownership")

    def _make_group_coordinator(self, reach: Connect) -> GroupCoordinator:
        settings = ClientSettings(instance=f"server {self.name}", close_seconds=LOG_CLOSE_SECONDS)
        return GroupCoordinator(
            ClientLog(
                lambda: GroupLogClient([self.meta.listen], connect=reach, settings=settings),
                lambda: self.owner.group_log,
            ),
            partitions=self.owner.meta.partitions,
            find_pipeline=self.owner.pipeline,
            channels=lambda: self.authorizer.all_channels,
            owns_group_log=lambda: self.owner.group_log in self.owner.owned,
            on_fatal=self._on_fatal,
            say=self._say,
        )

    def _task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{what} of {self.name}")
        tell_failure(task, self._on_fatal)
        return task

    async def drain(self, seconds: float) -> None:
        """Hand the partitions over, if another server can take them."""
        await self.owner.drain(seconds)

    async def stop(self) -> None:
        """Close in order what is left."""
        await self.owner.close()
        await self.end()

    @property
    def callers(self) -> int:
        return self._capacity.callers

    async def kill(self) -> None:
        """Stop without closing anything in order. Break the connections before."""
        await asyncio.gather(*[owned.close(hand_over=False) for owned in self.owned_logs])
        if self._hosting is not None:
            self._hosting.cancel()
        await self.end()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = [*self._tasks, self._hosting] if self._hosting is not None else self._tasks
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the parts are given

    def _make_owned_log(
        self, partition: int, generation: int, previous_owner_alive: Callable[[], bool]
    ) -> OwnedLog[Pipeline]:
        settings, limits = self._settings, self._pipeline
        if partition == self.owner.meta.partitions:
            settings, limits = settings.of_group_log(lambda: self.owner.needed_from()), limits.of_group_log()
        owned: OwnedLog[Pipeline] = OwnedLog(
            partition,
            generation,
            cluster=self._cluster,
            connect=self._connect,
            settings=settings,
            timer=self._timer,
            make_pipeline=lambda session: Pipeline(session, limits, self._capacity, on_fatal=self._on_fatal),
            say=lambda sentence: self._say(f"partition {partition}: {sentence}"),
            previous_owner_alive=previous_owner_alive,
        )
        self.owned_logs = [one for one in self.owned_logs if not one.task.done()] + [owned]
        return owned

    async def _ask_storage(self, storage: StorageMeta, numbers: Sequence[int]) -> Sequence[int]:
        return await self._connect(storage).quiet(numbers)


T = TypeVar("T")
READY_SECONDS = 30.0
LOOK_SECONDS = 0.005


async def _inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function without a thread: a disk in memory never blocks."""
    return function(*arguments)


class LocalCluster:
    """A whole cluster in the process of a test: real servers and storages, without network, files or ZooKeeper.

    Use it as an async context manager, or give `run` a coroutine function. Its clients may use any event loop;
    everything else here belongs to the loop of the cluster. With pytest, the fixture `waltz_cluster` is such a cluster;
    the mark `waltz` takes the arguments below. For tests without an event loop use `BlockingCluster`.

    Example:
        ```python
        async with LocalCluster(partitions=2) as cluster, cluster.client(view=view) as client:
            cluster.force_next_lock_failure(partition=0)
            await client.submit(command)
            assert await cluster.log(0)
        ```
    """

    def __init__(
        self,
        *,
        partitions: int = 4,
        servers: int = 2,
        storages: int = 3,
        storage_seconds: float = 5.0,
        format: int = 1,
        groups: bool = True,
    ) -> None:
        """Create a cluster; every storage holds every partition.

        Args:
            partitions: Number of partitions. Locks hold within one partition, so tests should have several.
            servers: Number of servers; with two, one can take over from the other one.
            storages: Number of storages; a majority of them commits.
            storage_seconds: Seconds that a server waits for a storage that is paused.
            format: Format of the files: 1 also keeps times, locks and atomic appends.
            groups: Whether to begin with the group log, as a new cluster does. Without it, the cluster is like one of
                an older version of Waltz, and `make_group_log` adds it.

        Raises:
            BadArgument: A number is below 1.
        """
        for name, value in (("partitions", partitions), ("servers", servers), ("storages", storages)):
            if value < 1:
                raise BadArgument(f"{name} must be at least 1, not {value}")
        self.meta = ClusterMeta(name="local", key=uuid4(), partitions=partitions, created="in a test", format=format)
        self.storage_seconds = storage_seconds
        self._has_groups = groups
        self.luck = InjectedFaults()
        self._time: int | None = None
        """Time that the clocks of all servers show, in microseconds; None for the clock of this machine."""
        self._policy: Policy | None = None
        self._channels = ChannelsDocument(channels=NO_CHANNELS)
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the cluster."""
        self.tree = MemoryTree()
        self._servers: dict[str, _Server | None] = {f"server-{number + 1}": None for number in range(servers)}
        self._storages: dict[str, StorageEndpoint] = {}
        self._storage_names = [f"storage-{number + 1}" for number in range(storages)]
        self._under_way: set[asyncio.Task[None]] = set()
        self.mistakes: list[BaseException] = []
        """Bugs of Waltz that showed up; `close` raises the first."""

    # -- life

    async def start(self) -> None:
        """Start everything, and wait until every partition takes transactions.

        Raises:
            NotReady: It took longer than 30 seconds; the message shows the state of each partition.
        """
        self.loop = asyncio.get_running_loop()
        for name in self._storage_names:
            self._storages[name] = await self._make_storage(name)
        everywhere = {partition: dict.fromkeys(self._storage_names, Membership.MEMBER) for partition in self._logs}
        coordinator = self.tree.connect()
        await Cluster.create(
            coordinator,
            self.meta,
            storages=[
                StorageMeta(name=name, listen=name, admin_listen=f"{name} admin", group=name)
                for name in self._storage_names
            ],
            replicas=ReplicaSets(partitions=everywhere),
        )
        await coordinator.close()
        for name in self._servers:
            await self.start_server(name)
        await self.wait_until_ready()

    async def make_group_log(self) -> None:
        """Add the log in which the cluster keeps the state of consumer groups, if it has none, and wait until the log
        is open."""
        if not self._has_groups:
            for door in self._storages.values():
                await door.calls.create_partition(self.meta.partitions)
            coordinator = self.tree.connect()
            await begin_group_log(Cluster(coordinator), self.meta, dict.fromkeys(self._storage_names, Membership.MEMBER))
            await coordinator.close()
            self._has_groups = True
        await self.wait_until_ready()

    async def close(self) -> None:
        """Close in order. Raise a bug of Waltz itself that showed up meanwhile. Warn of each lock that was written in two
        partitions (`RuntimeWarning`): locks hold within one partition, so it protects nothing."""
        for door in self._storages.values():
            door.resume()
        await asyncio.gather(*self._under_way)
        for name, server in self._servers.items():
            if server is not None:
                self._servers[name] = None
                await server.stop()
        for door in self._storages.values():
            await door.close()
        self._storages.clear()
        if self.mistakes:
            raise self.mistakes[0]
        written, self.luck.written = self.luck.written, WrittenLocks()
        for sentence in written.in_several():
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def run(self, story: Callable[[LocalCluster], Coroutine[Any, Any, T]]) -> T:
        """Start the cluster, run a story, and close, for tests that are plain functions.

        Args:
            story: Coroutine function that is called with this cluster.

        Returns:
            The result of the story.
        """

        async def whole() -> T:
            async with self:
                return await story(self)

        return asyncio.run(whole())

    @property
    def is_running(self) -> bool:
        """True while the cluster runs: it was started and not closed."""
        return bool(self._storages)

    async def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until `is_ready`. Raise `NotReady` after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self.is_ready:
                    if self.mistakes:
                        raise self.mistakes[0]
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise NotReady(f"the cluster was not ready in {seconds:g} seconds: {self.story()}") from None

    @property
    def is_ready(self) -> bool:
        """True if every partition has an owner that takes transactions, and the group log if there is one."""
        return all(map(self._is_open, self._logs))

    @property
    def _logs(self) -> range:
        """Numbers of all partitions, and of the group log if there is one."""
        return range(self.meta.partitions + self._has_groups)

    def _is_open(self, partition: int) -> bool:
        try:
            self._open(partition)
        except NotReady:
            return False
        return True

    def story(self) -> str:
        """State of every partition, for messages of tests."""
        return "; ".join(
            f"{server.name} partition {owned.partition}: {owned.step} {owned.waiting}".rstrip()
            for server in self._living()
            for owned in server.owner.describe()
        )

    def _living(self) -> list[_Server]:
        return [server for server in self._servers.values() if server is not None]

    def _on_fatal(self, error: BaseException) -> None:
        self.mistakes.append(error)

    async def _make_storage(self, name: str) -> StorageEndpoint:
        disk = SimDisk(zlib.crc32(name.encode()))  # each draws its own random numbers
        disk.make_directory(name)
        config = StorageConfig(directory=name, free_bytes_min=0)
        directory = Directory.open(
            disk, name, key=self.meta.key, partitions=self.meta.partitions, settings=PartitionSettings()
        )
        calls = StorageCalls(disk, directory, config, run_writing=_inline, run_reading=_inline, on_fatal=self._on_fatal)
        calls.start()
        for partition in self._logs:
            await calls.create_partition(partition)
        return StorageEndpoint(name, calls, self._on_fatal)

    # -- for applications

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of all servers; only `connect` understands them."""
        return tuple(_address(name) for name in self._servers)

    def connect(self, address: str, key: UUID | None) -> GroupPort:
        """Connect to a server: the value for the argument `connect` of a `Client`, on any event loop."""
        return self._port(address, key)

    def _port(self, address: str, key: UUID | None = None, identity: Identity | None = None) -> GroupPort:
        return ServerPort(lambda: self._door(address), key, address, identity, self.loop)

    def _door(self, address: str) -> ServerEndpoint:
        for server in self._living():
            if _address(server.name) == address:
                return server.door
        raise CannotConnect(f"no server listens at {address}")

    def client(
        self,
        *,
        name: str | None = None,
        view: View[E] | None = None,
        serializer: Serializer[E] | None = None,
        **settings: Any,
    ) -> Client[E]:
        """Return a `waltzd.Client` of this cluster, with the keyword arguments of `Client`; use it with `async with`.
        `name` is the name that its certificate would have, for policies; without it the client is `anonymous`."""
        return Client(self.servers, connect=self.connect_as(name), view=view, serializer=serializer, **settings)

    def connect_as(self, name: str | None) -> Connect:
        """Return a `connect` with the name that a certificate would have."""
        identity = Identity(self.meta.key, Role.CLIENT, name) if name is not None else None
        return lambda address, key: self._port(address, key, identity)

    def set_policy(self, grants: Sequence[Mapping[str, Any]] | None) -> None:
        """Set the grants of the policy: clients may do what they allow, and nothing else. None allows everything.
        Mounts that lose a right end, and their clients get `NotGranted`.

        Raises:
            BadArgument: A grant is malformed.

        Example:
            ```python
            cluster.set_policy([{"names": ["billing-*"], "may": ["append"], "partitions": "0"}])
            ```
        """
        if grants is None:
            self._policy = None
        else:
            text = json.dumps({"schema": SCHEMA, "grants": [whole_grant(grant) for grant in grants]}, default=str)
            self._policy = Policy(decode(PolicyDocument, text.encode(), "the policy", BadArgument).grants)
        self._adopt()

    def set_channels(self, channels: Mapping[str, str]) -> None:
        """Set the channels: names for sets of partitions, as in `{"orders": "0-1"}`. As with `waltzctl channel set`, a
        channel that exists keeps the partitions over which its keys are hashed.

        Raises:
            BadArgument: A name or a set is malformed.
        """
        text = json.dumps({"schema": SCHEMA, "channels": dict(channels)})
        found = decode(ChannelsDocument, text.encode(), "the channels", BadArgument)
        keys = {name: self._channels.keys.get(name, key_hash(ranges)) for name, ranges in found.channels.items()}
        self._channels = replace(found, keys=keys)
        self._adopt()

    def _adopt(self) -> None:
        if self._policy is not None:
            self._policy = Policy(self._policy.grants, self._channels.channels)
        for server in self._living():
            server.authorizer.adopt(self._policy, self._channels.channels, self._channels.keys)

    async def log(self, partition: int = 0) -> list[Record]:
        """Return every committed transaction of a partition, as records."""
        return [run.record(number) async for run in self.runs(partition) for number in range(len(run))]

    async def runs(self, partition: int = 0) -> AsyncIterator[Run]:
        """Yield the committed transactions of a partition as they are stored, one run of records at a time."""
        port = self._port(_address(self.owner(partition)))
        async for run in port.fetch(partition, 0):
            yield run

    def owner(self, partition: int = 0) -> str:
        """Return the name of the server that has the partition open. Raise `NotReady` if none has."""
        return self._open(partition)[0].name

    def end_position(self, partition: int = 0) -> int:
        """Return the highest committed id of a partition, -1 if it is empty."""
        return self._open(partition)[1].committed

    def _open(self, partition: int) -> tuple[_Server, Pipeline]:
        for server in self._living():
            try:
                return server, server.owner.pipeline(partition, None)
            except (NotOwner, NotReady, NoSuchPartition):
                continue
        raise NotReady(f"no server has partition {partition} open: {self.story()}")

    def set_time(self, time: datetime | int | None) -> None:
        """Stop the clocks of all servers at a time. Times in a log never decrease even so.

        Args:
            time: A datetime with a time zone, or microseconds since 1970. None starts the clocks again.

        Raises:
            BadArgument: The time has no time zone.
        """
        self._time = None if time is None else checked_time(time)

    def _clock(self) -> int:
        return microseconds() if self._time is None else self._time

    # -- faults

    def force_next_lock_failure(self, partition: int = 0, *, times: int = 1) -> None:
        """Reject the next `times` transactions with a READ or WRITE lock, as if their client was too far behind."""
        self._check_luck(partition, times)
        self.luck.lock_failures[partition] = self.luck.lock_failures.get(partition, 0) + times

    def lose_next_acknowledgement(self, partition: int = 0, *, times: int = 1) -> None:
        """Break the connection before the next `times` outcomes: a transaction that is committed stays so, without an
        answer."""
        self._check_luck(partition, times)
        self.luck.lost_answers[partition] = self.luck.lost_answers.get(partition, 0) + times

    def _check_luck(self, partition: int | None, times: int = 1) -> None:
        """Refuse a fault that cannot happen, or the test would pass without it."""
        if partition is not None and partition not in range(self.meta.partitions):
            raise BadArgument(f"there is no partition {partition!r}; there are partitions 0 to {self.meta.partitions - 1}")
        if times < 1:
            raise BadArgument(f"times must be at least 1, not {times}")

    def suspend_feed(self) -> None:
        """Stop feeding views; outcomes still arrive."""
        self.luck.is_feed_suspended = True

    def resume_feed(self) -> None:
        """Continue to feed views, from where the feed stopped."""
        self.luck.is_feed_suspended = False
        for server in self._living():
            server.door.look()

    def break_connections(self, partition: int | None = None) -> None:
        """Break the mounts of all clients of the partition, or of all partitions, with everything that is in flight."""
        self._check_luck(partition)
        for server in self._living():
            server.door.break_connections(partition)

    def pause_storage(self, number: int) -> None:
        """Pause the storage with this number, from 0 on: it does not answer. With a majority paused nothing is
        committed."""
        self._storage(number).pause()

    def resume_storage(self, number: int) -> None:
        """Resume a storage: it answers again, also the calls that came while it was paused."""
        self._storage(number).resume()

    def _storage(self, number: int) -> StorageEndpoint:
        if not 0 <= number < len(self._storage_names):
            raise BadArgument(f"there is no storage {number}; there are storages 0 to {len(self._storage_names) - 1}")
        return self._storages[self._storage_names[number]]

    async def kill_owner(self, partition: int = 0) -> str:
        """Kill the server that owns the partition (see `kill_server`). Another server takes over if there is one.

        Returns:
            The name of the server, for `start_server`.
        """
        name = self.owner(partition)
        await self.kill_server(name)
        return name

    async def rescue(self, partition: int = 0, mark: int = -1) -> UUID:
        """End the log of a partition after an id, although more was acknowledged, and continue it on another timeline.

        This is what `waltzctl partition rescue` does after the disks with the rest are lost. All servers are killed and
        restarted.

        Args:
            partition: Number of the partition; the number after the last one is the group log.
            mark: Last id that is kept. Transactions that were written together are kept together.

        Returns:
            The identity of the new timeline.

        Raises:
            BadArgument: The log does not reach `mark`, or `mark` is within transactions that were written together.
        """
        if partition != self.meta.partitions or not self._has_groups:
            self._check_luck(partition)
        for door in self._storages.values():
            door.resume()
        names, identity = [server.name for server in self._living()], uuid4()
        for name in names:
            await self.kill_server(name)
        try:
            await self._end_log(partition, mark, identity)
        finally:
            for name in names:
                await self.start_server(name)
        await self.wait_until_ready()
        return identity

    async def _end_log(self, partition: int, mark: int, identity: UUID) -> None:
        coordinator = self.tree.connect()
        cluster = Cluster(coordinator)
        meta, version = await cluster.partition(partition)
        assert meta is not None
        ports = {name: StoragePort(door, self.meta.key, b"rescue") for name, door in self._storages.items()}
        statuses = {name: await port.status(partition) for name, port in ports.items()}
        session = 1 + max(meta.session, *(status.promised_session for status in statuses.values()))
        lineage = meta.lineage.forked(
            identity=identity, fork=mark, session=session, cause="partition rescue", began="in a test", who="a test"
        )
        for port in ports.values():
            await port.open(partition, session, partitions=self.meta.partitions)
        if mark not in (ends := await self._batch_ends(next(iter(ports.values())), partition, session)):
            near = max(end for end in ends if end <= max(mark, EMPTY))
            raise BadArgument(f"the log of partition {partition} cannot end after id {mark}; it can end after id {near}")
        for name, port in ports.items():
            statuses[name] = await port.fork(partition, session, lineage)
        states = {
            name: ReplicaState(session=status.session, closing=status.last_id, incarnation=status.incarnation)
            for name, status in sorted(statuses.items())
        }
        document = replace(
            meta,
            session=session,
            low_mark=min(mark, meta.low_mark),
            members=tuple(states),
            replicas=states,
            decision=Decision(mark=mark, session=session),
            given_up={**meta.given_up, session: mark},
            timelines=lineage.later,
            lease_ms=0,
        )
        await cluster.save_partition(partition, document, version)
        await coordinator.close()

    @staticmethod
    async def _batch_ends(port: StoragePort, partition: int, session: int) -> set[int]:
        last, ends = (await port.status(partition)).last_id, {EMPTY}
        if last == EMPTY:
            return ends
        async for piece in port.read_whole(partition, 0, last, session=session):
            ends |= {*range(piece.first_id, piece.last_id + 1)} if isinstance(piece, Run) else {piece.last_id}
        return ends

    @property
    def server_names(self) -> tuple[str, ...]:
        """Names of all servers, whether they run or not."""
        return tuple(self._servers)

    def is_alive(self, name: str) -> bool:
        """Return whether a server runs."""
        return self._server(name) is not None

    def _server(self, name: str) -> _Server | None:
        if name not in self._servers:
            raise BadArgument(f"there is no server {name!r}; there are {', '.join(self._servers)}")
        return self._servers[name]

    def _running(self, name: str) -> _Server:
        server = self._server(name)
        if server is None:
            raise BadArgument(f"{name} does not run")
        return server

    async def _finished(self, work: Coroutine[Any, Any, None]) -> None:
        """Finish the work even if the test is cancelled meanwhile: a server that is half dead would keep its
        partitions."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def kill_server(self, name: str) -> None:
        """Kill a server: all its connections break at once. Raise `BadArgument` if it does not run."""
        server = self._running(name)
        self._servers[name] = None
        await self._finished(server.kill())

    async def stop_server(self, name: str) -> None:
        """Stop a server: it hands its partitions over, if another server runs. Raise `BadArgument` if it does not run."""
        server = self._running(name)
        await server.drain(READY_SECONDS)
        self._servers[name] = None
        await server.stop()

    async def start_server(self, name: str) -> None:
        """Start a server that was killed or stopped. Raise `BadArgument` if it runs."""
        if self._server(name) is not None:
            raise BadArgument(f"{name} runs already")
        server = _Server(name, self)
        self._servers[name] = server
        await self._finished(server.start())


def _address(name: str) -> str:
    return f"{name}:1"


class _Server(LocalServer):
    """Server with its door and its connections to the storages."""

    def __init__(self, name: str, local: LocalCluster) -> None:
        self._coordinator = local.tree.connect()
        self._doors = local._storages
        self._ports: list[StoragePort] = []
        self._owner_key = secrets.token_bytes(SECRET_BYTES)
        super().__init__(
            name,
            local.meta,
            self._coordinator,
            address=_address(name),
            instance=uuid4(),
            connect=self._port,
            settings=SessionSettings(
                partitions=local.meta.partitions,
                key=local.meta.key,
                storage_seconds=local.storage_seconds,
                retry_seconds=0.02,
                hand_over_seconds=0.5,
            ),
            on_fatal=local._on_fatal,
            pipeline=PipelineSettings(limits=LIMITS, clock=local._clock),
            reach=lambda address, key: local._port(address, key, Identity(local.meta.key, Role.SERVER, name)),
        )
        self.authorizer.adopt(local._policy, local._channels.channels, local._channels.keys)
        self.door = ServerEndpoint(_address(name), self.calls, local.luck, local._on_fatal)

    async def stop(self) -> None:
        await self.owner.close()
        await self.door.slam()
        await self.end()
        await self._coordinator.close()

    async def kill(self) -> None:
        """Break the connections first, so that nothing that the dying server sends or writes arrives."""
        self._coordinator.disconnect()
        for port in self._ports:
            port.cut()
        await self.door.slam()
        await super().kill()
        await self._coordinator.close()

    def _port(self, storage: StorageMeta) -> StoragePort:
        port = StoragePort(self._doors[storage.listen], self._settings.key, self._owner_key)
        self._ports.append(port)
        return port
