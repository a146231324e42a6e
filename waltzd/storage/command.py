"""The storage daemon as a process: from a configuration to listening services, and to a clean end.

It ends with 0 after SIGTERM or SIGINT, with the exit code of the error that kept it from starting, and with
`EXIT_DISK_FAULT` the moment a flush fails: a process that is gone acknowledges nothing more.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import NoReturn

import uvloop

from waltzd.archive.location import open_store
from waltzd.client.loop import LoopThread
from waltzd.daemon import alarm, logs
from waltzd.daemon.audit import AuditLog, audit_log
from waltzd.daemon.config import StorageConfig
from waltzd.daemon.expiry import Expiry
from waltzd.daemon.health_service import add_health, add_reflection
from waltzd.daemon.http import HttpPort
from waltzd.daemon.process import Supervisor, Threads, Underway, allow_open_files, collect_seldom, print_ready, share_arena
from waltzd.daemon.readiness import Unready
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_BUG, EXIT_DISK_FAULT, BadArgument, WaltzError
from waltzd.errors.operations import BadConfig, FlushFailed
from waltzd.protocol.role import Role
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.storage.service import ReplicaService, StorageAdminService
from waltzd.storage.stream_port import StreamPort
from waltzd.wire.calls import roles_at
from waltzd.wire.codec import REQUEST_BYTES_MAX
from waltzd.wire.grpc import Server
from waltzd.wire.listener import Listener
from waltzd.wire.servicer import add_service
from waltzd.wire.tasks import on_loop, tell_failure
from waltzd.wire.tls import Tls, tls_for

REPLICA, ADMIN = "waltz.v1.Replica", "waltz.v1.StorageAdmin"


@dataclass(frozen=True)
class Ports:
    """The ports of a storage: for servers, for their append streams, and for operators."""

    replicas: Listener
    streams: StreamPort
    admin: Listener
    streams_loop: asyncio.AbstractEventLoop | None

    async def knock(self) -> list[str]:
        """Return the reasons why a new caller would not be let in; empty if it would."""
        return [*await self.replicas.knock(), *await self.admin.knock()]

    async def stop(self, seconds: float) -> None:
        """Refuse new calls; running calls may go on for `seconds`."""
        streams = on_loop(self.streams_loop, self.streams.stop(seconds))
        await asyncio.gather(self.replicas.stop(seconds), streams, self.admin.stop(seconds))


async def start_services(
    calls: StorageCalls,
    tls: Tls | None,
    unready: Callable[[Ports], Unready],
    audit: AuditLog,
    *,
    on_fatal: Callable[[BaseException], None],
) -> Ports:
    config = calls.config
    replicas = Listener(config.listen, REQUEST_BYTES_MAX, tls, audit, roles=roles_at(REPLICA))
    streams = StreamPort(calls, replace(config.listen, port=config.stream_port), tls, audit)
    admin = Listener(config.admin_listen, REQUEST_BYTES_MAX, tls, audit, roles=roles_at(ADMIN))
    await on_loop(calls.streams_loop, streams.start(on_fatal))
    service = ReplicaService(calls, streams.address.port)
    await replicas.start(lambda server: add_service(server, "Replica", service), on_fatal=on_fatal)
    ports = Ports(replicas, streams, admin, calls.streams_loop)
    await admin.start(lambda server: _add_admin_services(calls, server, unready(ports)), on_fatal=on_fatal)
    return ports


def _add_admin_services(calls: StorageCalls, server: Server, unready: Unready) -> None:
    add_service(server, "StorageAdmin", StorageAdminService(calls))
    add_health(server, {ADMIN: False}, unready, is_ending=lambda: calls.is_draining)
    add_reflection(server, [ADMIN])


READING_THREADS = 2
RESTORING_THREADS = 3
"""Idle, unless replicas are made out of an archive."""
RESERVE_SECONDS = 10
log = logging.getLogger("waltz.storage")


def run(config: StorageConfig, *, is_renamed: bool = False) -> None:
    """Serve until a signal. `is_renamed`: accept a directory of a storage with another name, and give it this name."""
    logs.configure(config.log_format, config.log_level)
    faulthandler.enable()
    allow_open_files()
    share_arena()
    collect_seldom()
    supervisor = Supervisor.of_this_process()
    supervisor.status(f"opening {config.directory}")
    disk = RealDisk()
    if not disk.exists(config.directory):
        disk.make_directory(config.directory)
        disk.flush_directory(os.path.dirname(os.path.abspath(config.directory)))
    tls = tls_for(config, Role.STORAGE, config.cluster_key)
    name = _name(config, tls)
    if is_renamed and not name:
        raise BadArgument("--rename needs a name: set `name` in the configuration, or give a certificate")
    try:
        directory = Directory.open(
            disk,
            config.directory,
            key=config.cluster_key,
            partitions=config.partitions,
            settings=PartitionSettings(
                segment_bytes_max=config.segment_bytes_max,
                free_bytes_min=config.free_bytes_min,
                record_bytes_max=config.record_bytes_max,
                archives=config.archive is not None,
                version=version("waltzd"),
                say=log.info,
                complain=log.error,
            ),
            reserve_bytes=config.reserve_bytes,
            name=name,
            is_renamed=is_renamed,
        )
    except FlushFailed as error:
        end_at_once(error)
    logs.RECENT.keep(os.path.join(config.directory, logs.EVENTS_NAME))
    audit = audit_log(config, config.directory)
    tls = tls_for(config, Role.STORAGE, directory.control.header.key)
    with (
        closing(supervisor),
        Threads(config.flush_threads, "flush") as writers,
        Threads(READING_THREADS, "read") as readers,
        Threads(1, "archive", is_waited_for=False) as archiving,
        Threads(RESTORING_THREADS, "restore", is_waited_for=False) as restoring,
        Threads(1, "scrub", is_waited_for=False) as scrubbing,
    ):
        # The loop stays open until the process ends: a thread of gRPC may still have something to tell it.
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        runner.run(
            _serve(config, disk, directory, tls, supervisor, writers, readers, archiving, restoring, scrubbing, audit)
        )


def _name(config: StorageConfig, tls: Tls | None) -> str:
    said = "" if tls is None else tls.identity.name
    if config.name and said and config.name != said:
        raise BadConfig(f"`name` is {config.name}, and {config.tls_certificate} is the certificate of the storage {said}")
    return config.name or said


def end_at_once(error: BaseException) -> NoReturn:
    """Log an error after which the state of the disk or of this program is unknown, and end the process before
    anything else is acknowledged."""
    if not isinstance(error, FlushFailed):
        log.critical("a mistake in Waltz itself. Ending with exit code %d.", EXIT_BUG, exc_info=error)
        logging.shutdown()
        os._exit(EXIT_BUG)
    log.critical("%s %s. Ending with exit code %d. Next: %s", error.code, error.message, EXIT_DISK_FAULT,
                 error.detail_next_step, extra=error.facts)  # fmt: skip
    logging.shutdown()
    os._exit(EXIT_DISK_FAULT)


async def _serve(
    config: StorageConfig,
    disk: RealDisk,
    directory: Directory,
    tls: Tls | None,
    supervisor: Supervisor,
    writers: Threads,
    readers: Threads,
    archiving: Threads,
    restoring: Threads,
    scrubbing: Threads,
    audit: AuditLog,
) -> None:
    underway, streams_loop = Underway(), LoopThread("streams").loop
    underway.watch(streams_loop.call_soon_threadsafe)
    run_writing = functools.partial(writers.run, underway.call)
    store = None
    if config.archive is not None:
        store = open_store(config.archive, config.archive_key, accepts_unsigned=config.archive_unsigned == "accepted")
    calls = StorageCalls(
        disk,
        directory,
        config,
        run_writing=run_writing,
        run_reading=readers.run,
        on_fatal=end_at_once,
        run_here=underway.call,
        streams_loop=streams_loop,
        store=store,
        run_archiving=archiving.run,
        run_restoring=restoring.run,
        run_scrubbing=scrubbing.run,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number_of_signal in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number_of_signal, stop.set)
    loop.add_signal_handler(signal.SIGHUP, supervisor.reload, tls)
    calls.start()
    expiry = Expiry(tls)

    def unready_at(ports: Ports) -> Unready:
        async def unready() -> list[str]:
            return await calls.unready() + await ports.knock() + expiry.reasons()

        return unready

    ports = await start_services(calls, tls, unready_at, audit, on_fatal=end_at_once)
    http, export = await _watch(config, calls, expiry, unready_at(ports), tls if config.http_tls == "on" else None)
    for found in (await calls.describe()).assigned:
        log.info("%s", found.story, extra={"code": found.refused.code if found.refused else None})
    print_ready(
        f"waltzd storage is ready: listen={ports.replicas.address} streams={ports.streams.address} "
        f"admin={ports.admin.address} directory={config.directory}"
    )
    scrub = asyncio.create_task(calls.scrub.run(), name="scrub")
    tell_failure(scrub, end_at_once)
    indexing = asyncio.create_task(calls.key_indexer.run(), name="key indexes")
    tell_failure(indexing, end_at_once)
    supervisor.ready()
    supervisor.follow(lambda: _story(calls), lambda: underway.ailment(supervisor.patience_seconds))
    alarms, reserve_at = alarm.Alarms(), 0.0
    while not stop.is_set():
        now = loop.time()
        await calls.check_in_place()
        alarm.log_all(log, alarms.look(now, await calls.troubles()))
        if now >= reserve_at:
            reserve_at = now + RESERVE_SECONDS
            expiry.look()
            await _keep_reserve(calls)
        try:
            await asyncio.wait_for(stop.wait(), alarm.LOOK_SECONDS)
        except TimeoutError:
            continue
    supervisor.stopping("finishing what is under way")
    log.info("stopping: finishing what is under way, for at most %d seconds", config.drain_seconds)
    scrub.cancel()
    indexing.cancel()
    calls.refuse_new()
    await ports.stop(config.drain_seconds)
    await calls.close()
    if http is not None:
        await http.stop()
    if export is not None:
        export.cancel()
    audit.close()
    log.info("stopped: everything that was acknowledged is on the disk, and marked so")


async def _watch(
    config: StorageConfig, calls: StorageCalls, expiry: Expiry, unready: Unready, tls: Tls | None
) -> tuple[HttpPort | None, asyncio.Task[None] | None]:
    """Return the port for health and metrics, and the task that exports metrics, as configured. Modules are loaded only for
    what is."""
    if config.http_listen is None and config.otlp_endpoint is None:
        return None, None
    from waltzd.daemon import metrics

    async def collect() -> metrics.Families:
        found, reasons, seconds = await calls.describe(), await unready(), expiry.seconds_left()
        return metrics.of_storage(found, unready=reasons, free_bytes_min=config.free_bytes_min, certificate_seconds=seconds)

    port, task = None, None
    if config.http_listen is not None:
        from waltzd.daemon.http import watch_port

        port = watch_port(config.http_listen, Role.STORAGE, unready, collect, None if tls is None else tls.showing())
        await port.start()
        log.info("metrics and health: %s://%s/", "http" if tls is None else "https", port.address)
    if config.otlp_endpoint is not None:
        from waltzd.daemon.otlp import MetricsExport

        export = MetricsExport(config.otlp_endpoint, Role.STORAGE, calls.directory.name or config.name, collect)
        task = asyncio.create_task(export.run(), name="metrics over OTLP")
        tell_failure(task, end_at_once)
    return port, task


def _story(calls: StorageCalls) -> str:
    """For the service manager."""
    text = f"keeps {len(calls.directory.partitions())} partitions in {calls.directory.path}"
    return f"finishing what is under way; {text}" if calls.is_draining else text


async def _keep_reserve(calls: StorageCalls) -> None:
    """Keep the reserve; log a failure, which matters for the next start only."""
    try:
        await calls.keep_reserve()
    except WaltzError as error:
        log.warning("%s the reserve for a start on a full disk cannot be kept: %s", error.code, error.message)
