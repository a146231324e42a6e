"""The server as a process: from a configuration to two listening services, and to an orderly end.

It exits with 0 after SIGTERM or SIGINT, when its partitions are with other servers or closed in order. It exits with the
exit code of the error that kept it from starting or continuing (for example, another process has its name). It exits with
`EXIT_BUG` at once after an internal error, because a server that is half alive is worse than none.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from importlib.metadata import version
from typing import NoReturn
from uuid import uuid4

import uvloop

from waltzd.archive.location import open_store
from waltzd.archive.reader import ArchiveReader, SegmentCache
from waltzd.client.settings import ClientSettings
from waltzd.cluster.clients import ClientNames
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, ServerMeta, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.daemon import alarm, logs, readiness
from waltzd.daemon.audit import AuditLog, audit_log
from waltzd.daemon.config import ServerConfig
from waltzd.daemon.expiry import Expiry
from waltzd.daemon.health_service import add_health
from waltzd.daemon.process import Supervisor, Threads, allow_open_files, collect_seldom, print_ready, share_arena
from waltzd.errors import EXIT_BUG, WaltzError
from waltzd.errors.operations import BadConfig, CoordinatorOpen, PartitionsClosed
from waltzd.protocol.batches import Limits
from waltzd.protocol.descriptions import OwnedPartition, ServerDescription
from waltzd.protocol.locks import LockExplanation
from waltzd.protocol.peers import SECRET_BYTES, ReplicaPort
from waltzd.protocol.role import Role
from waltzd.server.admin_service import SERVICE as ADMIN
from waltzd.server.admin_service import add_admin_service
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.pipeline import AllCounters, Capacity, Pipeline, PipelineSettings
from waltzd.server.clients.registry import ClientRegistry
from waltzd.server.clients.service import LogService
from waltzd.server.clients.stream_port import StreamPort
from waltzd.server.election import Election
from waltzd.server.failure_detector import FailureDetector, open_probe
from waltzd.server.metadata import MetadataSaver
from waltzd.server.ownership import PartitionOwner
from waltzd.server.reconcile import CopyRateLimit, NameRecorder, PolicyFollower, VersionCheck
from waltzd.server.registration import Registration
from waltzd.server.session.archive_fetcher import ArchiveFetcher
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.settings import TICK_SECONDS, SessionSettings
from waltzd.server.subscriptions.group_coordinator import GroupCoordinator
from waltzd.server.subscriptions.group_log import ClientLog, GroupLogClient
from waltzd.wire.calls import roles_at
from waltzd.wire.codec import REQUEST_BYTES_MAX
from waltzd.wire.grpc import Server
from waltzd.wire.listener import Listener
from waltzd.wire.servers import ServerAdminClient, ServerClient
from waltzd.wire.servicer import add_service
from waltzd.wire.storages import ReplicaClient
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import Tls, tls_for

ALIVE_SECONDS = 2.0
"""Time for a process that has our name to answer before it is treated as dead."""
STOP_SECONDS = 2.0
"""Time for running calls to finish after the partitions are closed."""
GROUP_LOG_SECONDS = 5.0
"""Deadline of one call to the owner of the group log."""
OPEN_SHOWN = 3
ARCHIVE_THREADS = 4
"""Segments that are fetched from the archive at a time, and readers that are served from the cache at a time."""
log = logging.getLogger("waltz.server")


def run(config: ServerConfig) -> None:
    """Serve until stopped."""
    logs.configure(config.log_format, config.log_level)
    # A server has no files of its own; a service manager may give it a place.
    home = os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or None
    if home is not None:
        logs.RECENT.keep(os.path.join(home, logs.EVENTS_NAME))
    audit = audit_log(config, home)
    faulthandler.enable()
    allow_open_files()
    share_arena()
    collect_seldom()
    # The loop stays open until the process ends: a thread of gRPC may still call it.
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    runner.run(_serve(config, audit))


def end_at_once(error: BaseException) -> NoReturn:
    """Log an internal error and exit at once, before anything else is decided in an unknown state."""
    log.critical("a mistake in Waltz itself. Ending with exit code %d.", EXIT_BUG, exc_info=error)
    logging.shutdown()
    os._exit(EXIT_BUG)


async def _serve(config: ServerConfig, audit: AuditLog) -> None:
    async with AsyncExitStack() as ends:
        ends.callback(audit.close)
        supervisor = ends.enter_context(closing(Supervisor.of_this_process()))
        supervisor.status(f"waiting for the coordinator at {config.hosts}")
        coordinator = ZooKeeperCoordinator(
            config.hosts, config.cluster, config.access, session_seconds=config.session_seconds, needs_loop=True
        )
        await coordinator.start()
        ends.push_async_callback(coordinator.close)
        cluster = Cluster(coordinator)
        meta = await cluster.meta()
        await VersionCheck(cluster, config.name, meta.level).check_servers()
        await check_closed(cluster, config)
        _check_preferred(config, meta)
        tls = tls_for(config, Role.SERVER, meta.key)
        clients = Listener(config.listen, config.message_bytes_max, tls, audit, roles=roles_at("waltz.v1.Log"))
        operators = Listener(config.admin_listen, REQUEST_BYTES_MAX, tls, audit, roles=roles_at(ADMIN))
        ends.push_async_callback(_stop, clients, operators)
        streams = await _open_streams(config, tls, audit, ends)
        daemon = _Daemon(config, cluster, meta, tls, clients, operators, streams, _open_archive(config, meta, ends))
        ends.push_async_callback(daemon.close)
        if streams is not None:
            streams.serve(daemon.calls, on_fatal=end_at_once)

        def add_log_service(server: Server) -> None:
            add_service(server, "Log", LogService(daemon.calls, audit))
            add_health(server, {"waltz.v1.Log": True}, daemon.unready)

        await clients.start(add_log_service, on_fatal=end_at_once)
        await operators.start(
            lambda server: add_admin_service(
                server,
                daemon.describe,
                daemon.registration,
                daemon.explain,
                daemon.clients,
                daemon.unready,
                daemon.groups,
            ),
            on_fatal=end_at_once,
        )
        if config.http_listen is not None or config.otlp_endpoint is not None:
            await _watch(config, daemon, ends, tls if config.http_tls == "on" else None)
        await daemon.live(supervisor)
    log.info("stopped")


async def check_closed(cluster: Cluster, config: ServerConfig) -> None:
    """Raise `CoordinatorOpen` if certificates are configured and their ACLs let every client change the documents. Log a
    warning instead if that is allowed by name."""
    if config.tls_certificate is None and not cluster.coordinator.has_credentials:
        return
    if cluster.coordinator.has_credentials and (above := await cluster.coordinator.open_above()):
        log.warning(
            "ZooKeeper at %s lets everybody who gets a connection create nodes in %s, and ends when they fill its memory. "
            "Close it by `waltzctl cluster set --secure`", config.hosts, ", ".join(above),
        )  # fmt: skip
    found = await cluster.open_nodes()
    if not found:
        return
    more = f" and {len(found) - OPEN_SHOWN} more" if len(found) > OPEN_SHOWN else ""
    what = (
        f"ZooKeeper at {config.hosts} lets everybody change the documents of the cluster at {config.cluster}: "
        f"{', '.join(found[:OPEN_SHOWN])}{more}"
    )
    if config.tls_certificate is not None and config.coordinator_open == "refused":
        raise CoordinatorOpen(what)
    log.warning("%s %s. Close them by `waltzctl cluster set --secure`", CoordinatorOpen.code, what)


async def _open_streams(config: ServerConfig, tls: Tls | None, audit: AuditLog, ends: AsyncExitStack) -> StreamPort | None:
    if config.stream_port < 0:
        return None
    port = StreamPort(replace(config.listen, port=config.stream_port), config.message_bytes_max, tls, audit)
    await port.open()
    ends.push_async_callback(port.stop, STOP_SECONDS)
    return port


def _open_archive(config: ServerConfig, meta: ClusterMeta, ends: AsyncExitStack) -> ArchiveFetcher | None:
    """Return the reader of the archive, or None if there is no archive. The store is not contacted yet."""
    if config.archive is None:
        return None
    cache = SegmentCache(config.archive_cache_bytes, config.archive_cache)
    bring = ends.enter_context(Threads(ARCHIVE_THREADS, "archive", is_waited_for=False))
    read = ends.enter_context(Threads(ARCHIVE_THREADS, "archive_cache", is_waited_for=False))
    store = open_store(config.archive, config.archive_key, accepts_unsigned=config.archive_unsigned == "accepted")
    lane = ArchiveFetcher(ArchiveReader(store, meta.key, cache), bring=bring.run, read=read.run)
    ends.push_async_callback(lane.close)
    return lane


async def _stop(*listeners: Listener) -> None:
    await asyncio.gather(*(listener.stop(STOP_SECONDS) for listener in listeners))


async def _watch(config: ServerConfig, daemon: _Daemon, ends: AsyncExitStack, tls: Tls | None) -> None:
    """Start what shows metrics and health, as configured. Modules are loaded only for what is."""
    from waltzd.daemon import metrics

    async def collect() -> metrics.Families:
        return metrics.of_server(
            daemon.describe(),
            cluster_partitions=daemon.owner.logs,
            unready=await daemon.unready(),
            commit=daemon.all_counters.commit(),
            certificate_seconds=daemon.expiry.seconds_left(),
            archive=None if daemon.archive is None else daemon.archive.reader.told(),
        )

    if config.http_listen is not None:
        from waltzd.daemon.http import watch_port

        port = watch_port(config.http_listen, Role.SERVER, daemon.unready, collect, None if tls is None else tls.showing())
        await port.start()
        ends.push_async_callback(port.stop)
        log.info("metrics and health: %s://%s/", "http" if tls is None else "https", port.address)
    if config.otlp_endpoint is not None:
        from waltzd.daemon.otlp import MetricsExport

        export = MetricsExport(config.otlp_endpoint, Role.SERVER, config.name, collect)
        task = asyncio.create_task(export.run(), name="metrics over OTLP")
        tell_failure(task, end_at_once)
        ends.callback(task.cancel)


def _check_preferred(config: ServerConfig, meta: ClusterMeta) -> None:
    beyond = [number for number in config.preferred_partitions if number >= meta.partitions]
    if beyond:
        raise BadConfig(f"preferred: there is no partition {beyond[0]}; cluster {meta.name} has {meta.partitions}")


class _Daemon:
    """The parts of a server, put together."""

    def __init__(
        self,
        config: ServerConfig,
        cluster: Cluster,
        meta: ClusterMeta,
        tls: Tls | None,
        clients: Listener,
        operators: Listener,
        streams: StreamPort | None,
        archive: ArchiveFetcher | None,
    ) -> None:
        self._config = config
        self._doors = clients, operators
        self._tls = tls
        self.expiry = Expiry(tls)
        self._meta = meta
        self._cluster = cluster
        self._names = ClientNames(cluster.coordinator)
        self._started = asyncio.get_running_loop().time()
        self._server = ServerMeta(
            name=config.name,
            listen=str(config.reached_at(clients.address.port)),
            admin_listen=str(config.admin_reached_at(operators.address.port)),
            instance=uuid4(),
            version=version("waltzd"),
            preferred=config.preferred_partitions,
            streams=str(replace(config.reached_at(0), port=streams.address.port)) if streams is not None else None,
        )
        self._capacity = Capacity(config.mounts_max)
        self.all_counters = AllCounters()
        self._storages: dict[tuple[str, str], ReplicaClient] = {}
        self._owner_key = secrets.token_bytes(SECRET_BYTES)
        """Key from which the secrets of this server's sessions are derived. It never leaves this process."""
        self._timer = PeriodicTimer(TICK_SECONDS)
        self._copy_rate = CopyRateLimit(cluster, config.catch_up_bytes_per_second)
        self.archive = archive
        self._session_settings = SessionSettings(
            partitions=meta.partitions,
            key=meta.key,
            tail_bytes_max=config.tail_bytes_max // meta.partitions,
            session_bytes_max=config.session_bytes_max,
            storage_seconds=config.storage_seconds,
            lease_seconds=config.read_lease_ms / 1000,
            backup_seconds=config.backup_seconds,
            catch_up_bytes_per_second=lambda: self._copy_rate.bytes_per_second,
            level=lambda: self._versions.level,
            archive=archive,
        )
        self._pipeline_settings = PipelineSettings(
            limits=Limits(
                payload_bytes_max=config.payload_bytes_max,
                locks_max=config.locks_max,
                frame_bytes_max=config.frame_bytes_max,
            ),
            lock_table_size=config.lock_table_size,
            inflight_bytes_max=config.inflight_bytes_max,
            segment_bytes_max=config.segment_bytes_max,
        )
        self.authorizer = Authorizer()
        self._policy = PolicyFollower(cluster, self.authorizer)
        self._versions = VersionCheck(cluster, config.name, meta.level)
        self.registration = Registration(
            cluster, self._server, is_alive=self._is_alive, check_servers=self._versions.check_servers
        )
        self._detector = FailureDetector(
            cluster,
            config.name,
            open_probe=open_probe,
            ask_storage=lambda storage, numbers: self._connect(storage).quiet(numbers),
            is_alive=self._is_alive,
        )
        self.election = Election(cluster, config.name, meta.partitions, self._detector)
        self.owner: PartitionOwner = PartitionOwner(
            cluster,
            meta,
            self.registration,
            make_owned_log=self._make_owned_log,
            is_gone=self._detector.is_gone,
            names=self._names,
        )
        self._versions.on_rise = self.owner.check_storages
        self.clients = ClientRegistry()
        self.groups = GroupCoordinator(
            ClientLog(self._group_log_client, lambda: self.owner.group_log),
            partitions=meta.partitions,
            find_pipeline=self.owner.pipeline,
            channels=lambda: self.authorizer.all_channels,
            owns_group_log=lambda: self.owner.group_log in self.owner.owned,
            on_fatal=end_at_once,
        )
        self.owner.needed_from = self.groups.needed_from
        self.calls = ServerCalls(self.owner, self.authorizer, self.clients, self.groups)
        self._saver = MetadataSaver(
            cluster,
            self._connect,
            is_leader=lambda: self.election.is_leader,
            is_backing_up=lambda: self.owner.is_backing_up,
            seconds=config.backup_seconds,
        )
        self._name_recorder = NameRecorder(self._names, self.clients, is_leader=lambda: self.election.is_leader)

    async def live(self, supervisor: Supervisor) -> None:
        """Run until stopped, or until an error forbids to continue."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, supervisor.reload, self._tls)
        await self.owner.read()
        await self._policy.read()
        await self.registration.announce()
        try:
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(self._versions.reconciler.run(), name="level"),
                    tasks.create_task(self.registration.reconciler.run(), name="registration"),
                    tasks.create_task(self.election.reconciler.run(), name="election"),
                    tasks.create_task(self._detector.run(), name="failure detector"),
                    tasks.create_task(self._copy_rate.reconciler.run(), name="copy pace"),
                    tasks.create_task(self.owner.ids_reconciler.run(), name="client ids"),
                    tasks.create_task(self._name_recorder.run(), name="names of applications"),
                    tasks.create_task(self._saver.run(), name="metadata in the archive"),
                    tasks.create_task(self._policy.reconciler.run(), name="policy"),
                    tasks.create_task(self.expiry.run(), name="certificate"),
                    tasks.create_task(self._watch_partitions(), name="alarms"),
                    tasks.create_task(self.groups.run(), name="groups"),
                ]
                tasks.create_task(self.owner.run(), name="ownership")
                print_ready(
                    f"waltzd server is ready: listen={self._server.listen} streams={self._server.streams or 'none'} "
                    f"admin={self._server.admin_listen} name={self._server.name}"
                )
                supervisor.ready()
                supervisor.follow(self._story)
                await stop.wait()
                supervisor.stopping("giving the partitions to other servers")
                await self._drain()
                for task in following:
                    task.cancel()
        except BaseExceptionGroup as group:
            _end(group)

    def _group_log_client(self) -> GroupLogClient[bytes]:
        """Return a client of the group log, wherever its owner is."""
        addresses = [server.address for server in self.owner.topology().servers if server.address]
        return GroupLogClient(
            addresses or [self._server.listen],
            connect=lambda address, key: ServerClient(address, key, seconds=GROUP_LOG_SECONDS, tls=self._tls),
            settings=ClientSettings(instance=f"server {self._server.name}", close_seconds=STOP_SECONDS),
        )

    async def _watch_partitions(self) -> None:
        alarms = alarm.Alarms()
        while True:
            troubles = alarm.of_server(self.owner.describe_troubled(), PartitionsClosed.code)
            alarm.log_all(log, alarms.look(asyncio.get_running_loop().time(), troubles))
            await asyncio.sleep(alarm.LOOK_SECONDS)

    async def _drain(self) -> None:
        seconds = self._config.drain_seconds
        log.info("stopping: giving the partitions to other servers, for at most %d seconds", seconds)
        try:
            await self.owner.drain(seconds)
        except WaltzError as error:
            log.warning("%s the partitions cannot be given away: %s", error.code, error.message)
        await self.owner.close()

    def _story(self) -> str:
        """Return the state of this server in a sentence for the service manager."""
        return story(
            self.owner.describe(), is_draining=self.registration.server.is_draining, is_alone=self.owner.is_degraded
        )

    async def explain(self, partition: int, lock: int) -> LockExplanation:
        return await self.owner.pipeline(partition, None).explain_exactly(lock)

    def describe(self) -> ServerDescription:
        return ServerDescription(
            name=self._server.name,
            cluster_key=self._meta.key,
            instance=self._server.instance,
            version=self._server.version,
            uptime_ms=round(1000 * (asyncio.get_running_loop().time() - self._started)),
            is_connected=not self.owner.is_degraded,
            is_draining=self.registration.server.is_draining,
            is_leader=self.election.is_leader,
            partitions=self.owner.describe(),
            clients=self.clients.totals(),
            metadata_backup=self._saver.describe(),
            keeps_group_log=True,
            groups=self.groups.totals(),
        )

    async def unready(self) -> list[str]:
        shut = [reason for door in self._doors for reason in await door.knock()]
        ours = readiness.of_server(self.describe(), is_announced=self.registration.is_announced)
        return ours + shut + self.expiry.reasons() + readiness.of_policy(self.authorizer.why_closed)

    # -- what the parts need          --------------------------------------------------------------------------------------

    def _make_owned_log(
        self, partition: int, generation: int, previous_owner_alive: Callable[[], bool]
    ) -> OwnedLog[Pipeline]:
        counters = self.all_counters.begin(partition)
        settings, limits = self._session_settings, self._pipeline_settings
        if partition == self._meta.partitions:
            settings, limits = settings.of_group_log(lambda: self.owner.needed_from()), limits.of_group_log()

        def make_pipeline(session: ReplicatedLog) -> Pipeline:
            return Pipeline(session, limits, self._capacity, on_fatal=end_at_once, counters=counters)

        return OwnedLog(
            partition,
            generation,
            cluster=self._cluster,
            connect=self._connect,
            settings=settings,
            timer=self._timer,
            make_pipeline=make_pipeline,
            say=log.info,
            previous_owner_alive=previous_owner_alive,
            statistics=counters.statistics,
        )

    def _connect(self, storage: StorageMeta) -> ReplicaPort:
        """Return the client of a storage. All partitions share one connection to a storage."""
        place = storage.name, storage.listen  # another storage at the address has another certificate
        if place not in self._storages:
            self._storages[place] = ReplicaClient(
                storage.listen,
                self._meta.key,
                seconds=self._config.storage_seconds,
                tls=self._tls,
                name=storage.name,
                owner_key=self._owner_key,
                check_version=lambda version: self._versions.check_storage(storage.name, version),
            )
        return self._storages[place]

    async def close(self) -> None:
        for client in self._storages.values():
            await client.close()

    async def _is_alive(self, server: ServerMeta) -> bool:
        """Return whether this very process answers. Its address may belong to another process by now, or to us."""
        asked = ServerAdminClient(
            server.admin_listen, self._meta.key, seconds=ALIVE_SECONDS, tls=self._tls, name=server.name
        )
        async with asked as client:
            try:
                return (await client.describe()).instance == server.instance
            except WaltzError as error:
                log.info("server %s does not answer at %s: %s", server.name, server.admin_listen, error.message)
                return False


def story(partitions: Sequence[OwnedPartition], *, is_draining: bool, is_alone: bool) -> str:
    closed = [owned for owned in partitions if owned.step != "OPEN"]
    text = f"owns {len(partitions)} partitions, {len(partitions) - len(closed)} of them open"
    if closed:
        text += f"; partition {closed[0].partition} is {closed[0].step}: {closed[0].waiting or 'it is being opened'}"
    silent = sorted({replica.storage for owned in partitions for replica in owned.replicas if replica.state == "DOWN"})
    if silent:
        text += f"; storages that do not answer: {', '.join(silent)}"
    if is_alone:
        text += "; the coordinator does not answer, so nothing new is begun"
    return f"draining: {text}" if is_draining else text


def _end(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Exit with the cause for which the process must not continue."""
    causes = list(_leaves(group))
    for cause in causes:
        if not isinstance(cause, WaltzError):
            end_at_once(cause)
    raise causes[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in _leaves(part)]
