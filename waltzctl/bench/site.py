"""The cluster under load: one that is made for the run and removed afterwards, or one that is there.

Of a cluster of our own all is seen: what each process uses, how often each storage flushes. Of another one only its
applications' side is seen, and what is written to it stays there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from uuid import UUID

from waltzctl.bench.machine import Disk, Use, disk_of, use_of
from waltzctl.bench.result import Place, ProcessUse, StorageUse
from waltzctl.placement.plan import assign_replicas
from waltzctl.playground.daemon import Reporter
from waltzctl.playground.local import LocalCluster
from waltzctl.shell.reach import first_contact
from waltzd.client.client import Client
from waltzd.client.routes import Partitions
from waltzd.client.settings import ClientSettings
from waltzd.client.view import View
from waltzd.disk.real import translate
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.descriptions import Statistics
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

PREFIX = "waltz-bench-"
ROUND_TRIPS = 50
CLIENT = "client"
"""The name of this process in the figures."""


@dataclass(frozen=True)
class Reading:
    """The counters of all processes at one moment."""

    at: float
    uses: Mapping[str, Use]
    storages: Mapping[str, Statistics]


class Site:
    def __init__(
        self, servers: str, *, local: LocalCluster | None = None, disk: Disk | None = None, tls: Tls | None = None
    ) -> None:
        self._servers = servers
        self._tls = tls
        self.local = local
        """None for a cluster that was not made here."""
        self.disk = disk
        self.round_trip_seconds: float | None = None

    def client(
        self,
        partitions: Partitions,
        *,
        view: View | None = None,
        feed: FeedMode | None = None,
        settings: ClientSettings | None = None,
    ) -> Client:
        return Client(self._servers, view=view, feed=feed, partitions=partitions, settings=settings, connect=self._connect)

    def _connect(self, address: str, key: UUID | None = None) -> ServerClient:
        return ServerClient(address, key, tls=self._tls)

    async def time_round_trip(self) -> None:
        """What the network and gRPC take by themselves, while nothing else goes on."""
        taken = []
        first = self._servers.split(",")[0].strip()
        async with first_contact(first, self._tls), self.client((), feed=FeedMode.NONE) as client:
            addresses = [server.address for server in client.topology.servers]
        if not addresses:  # it answers, and is not in its own list yet
            return
        async with self._connect(addresses[0]) as server:
            for _ in range(1 + ROUND_TRIPS):
                begun = time.perf_counter()
                await server.locate()
                taken.append(time.perf_counter() - begun)
        self.round_trip_seconds = statistics.median(taken[1:])  # the first one connects

    def place(self, client: Client) -> Place:
        """What an open client sees of it, with what is known of a cluster that was made here."""
        drawn = self.local.blueprint if self.local is not None else None
        return Place(
            cluster="made for this run" if drawn is not None else client.cluster,
            version=version("waltzd"),
            partitions=client.partition_count,
            storages=drawn.storages if drawn is not None else 0,
            servers=drawn.servers if drawn is not None else len(client.topology.servers),
            replicas=drawn.replication if drawn is not None else None,
            disk=self.disk,
            round_trip_seconds=self.round_trip_seconds,
        )

    async def read(self) -> Reading:
        pids = {CLIENT: os.getpid()}
        storages: dict[str, Statistics] = {}
        if self.local is not None:
            pids |= {name: daemon.life.pid for name, daemon in self.local.daemons.items() if daemon.life is not None}
            blueprint = self.local.blueprint
            for name in blueprint.storage_names:
                if self.local.daemons[name].is_running:
                    async with AdminClient(blueprint.addresses(name)[1], blueprint.key) as admin:
                        storages[name] = (await admin.describe()).statistics
        uses = {name: use for name, pid in pids.items() if (use := use_of(pid)) is not None}
        return Reading(time.perf_counter(), uses, storages)


def processes(before: Reading, after: Reading, *, rate: float = 0.0) -> tuple[ProcessUse, ...]:
    """What each process that was there all the time has used in between. `rate`: transactions a second."""
    seconds = after.at - before.at
    shares = {
        name: (after.uses[name].cpu_seconds - use.cpu_seconds) / seconds
        for name, use in before.uses.items()
        if name in after.uses
    }
    return tuple(
        ProcessUse(
            name=name,
            cpu_share=share,
            memory_bytes=after.uses[name].memory_bytes,
            transaction_cpu_seconds=share / rate if rate else None,
        )
        for name, share in shares.items()
    )


def flushes(before: Reading, after: Reading) -> tuple[StorageUse, ...]:
    """How each storage wrote in between."""
    seconds = after.at - before.at
    found = []
    for name, first in before.storages.items():
        last = after.storages.get(name, first)
        groups = last.groups - first.groups
        if groups > 0:
            found.append(
                StorageUse(
                    name=name,
                    flushes_per_second=groups / seconds,
                    records_per_flush=(last.appended_records - first.appended_records) / groups,
                    flush_seconds=(last.group_microseconds - first.group_microseconds) / groups / 1e6,
                )
            )
    return tuple(found)


@contextmanager
def scratch(
    parent: Path | None,
    *,
    partitions: int,
    storages: int,
    servers: int,
    replicas: int,
    format: int,
    server_settings: Mapping[str, object],
    reporter: Reporter,
) -> Iterator[Site]:
    """A cluster on this machine, which is removed at the end, whatever happens meanwhile."""
    assign_replicas(1, {str(number): str(number) for number in range(storages)}, replicas)  # refuses too many
    try:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise translate(error, f"making a directory in {parent or tempfile.gettempdir()}") from error
    try:
        disk = disk_of(directory)
        cluster = LocalCluster.make(
            directory / "cluster",
            partitions=partitions,
            storages=storages,
            servers=servers,
            replication=replicas,
            format=format,
            reporter=reporter,
            settings={"server": server_settings},
        )
        try:
            cluster.start()
            yield Site(",".join(cluster.server_addresses), local=cluster, disk=disk)
        finally:
            cluster.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
