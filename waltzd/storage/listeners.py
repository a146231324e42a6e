"""The ports of a storage: for servers, for their append streams, and for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from waltzd.daemon.audit import AuditLog
from waltzd.daemon.health_service import add_health, add_reflection
from waltzd.daemon.readiness import Unready
from waltzd.storage.calls import StorageCalls
from waltzd.storage.service import ReplicaService, StorageAdminService
from waltzd.storage.stream_port import StreamPort
from waltzd.wire.calls import roles_at
from waltzd.wire.grpc import Server
from waltzd.wire.limits import REQUEST_BYTES_MAX
from waltzd.wire.listener import Listener
from waltzd.wire.servicer import add_service
from waltzd.wire.tasks import on_loop
from waltzd.wire.tls import Tls

REPLICA, ADMIN = "waltz.v1.Replica", "waltz.v1.StorageAdmin"


@dataclass(frozen=True)
class Ports:
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
