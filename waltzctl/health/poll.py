"""Repeated health reports of a cluster: from its documents in ZooKeeper, or, while ZooKeeper does not answer, from the
daemons whose addresses are known.

Each report tries ZooKeeper again, for no longer than one call may take. Daemons are known from the blueprint of a local
cluster, or from the last report (`last_seen`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from uuid import UUID

from waltzctl.health.facts import REPAIR, Facts, HealthReport, Lost
from waltzctl.health.rules import judge, with_since
from waltzctl.shell import moment
from waltzctl.shell.blueprint import BLUEPRINT, ZOOKEEPER, load_blueprint
from waltzctl.shell.cluster_target import ClusterTarget
from waltzctl.shell.progress import waiting_aloud
from waltzctl.snapshot import last_seen
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import AdminConnections, DocumentCache, snapshot_from_daemons, take_snapshot
from waltzctl.snapshot.last_seen import LastSeen
from waltzd.cluster.cluster import ROOT, Cluster
from waltzd.cluster.documents import ClusterMeta, ReplicaSets, ServerMeta, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadMetadata, CoordinatorRefused, NodeMissing
from waltzd.protocol.address import parse_address

if TYPE_CHECKING:
    from waltzctl.local_cluster.local import LocalCluster

CALL_SECONDS = 3.0
SAVE_SECONDS = 10.0
UNKNOWN_INSTANCE = UUID(int=0)
LOST = (CannotConnect, CoordinatorRefused, NodeMissing, BadMetadata)
"""Errors after which a report is made without ZooKeeper: no answer, documents that are missing, or documents that
cannot be read."""


class Poll:
    """Connections and documents kept from one health report to the next. Use it as `async with`."""

    def __init__(self, target: ClusterTarget, *, seconds: float = CALL_SECONDS, aloud: bool = False) -> None:
        """Prepare a poll. With `aloud`, name on standard error what it waits for."""
        self.target = target
        self._aloud = aloud
        self._seconds = seconds
        self._coordinator: ZooKeeperCoordinator | None = None
        self._connecting = asyncio.Lock()
        self._contacts = AdminConnections()
        self._documents = DocumentCache()
        self._local: LocalCluster | None = None
        self._last: LastSeen | None = None
        self._saved: LastSeen | None = None
        self._saved_at = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._contacts:
            await self._documents.forget()
            if self._coordinator is not None:
                await self._coordinator.close()

    async def cluster(self) -> Cluster:
        """Return the documents of the cluster; raise `CannotConnect` if ZooKeeper does not answer."""
        async with self._connecting:
            return Cluster(await self._connected())

    async def _connected(self) -> ZooKeeperCoordinator:
        if self._coordinator is None:
            if await _is_refused(self.target.hosts, self._seconds):
                raise CannotConnect(
                    f"no ZooKeeper listens at {self.target.hosts}",
                    not_done="nothing was read or changed",
                    next_step="check that ZooKeeper runs there and that its address is right",
                )
            coordinator = ZooKeeperCoordinator(
                self.target.hosts, self.target.root, self.target.access, call_seconds=self._seconds
            )
            async with waiting_aloud(lambda: f"waiting for ZooKeeper at {self.target.hosts}" if self._aloud else ""):
                await coordinator.start()
            self._coordinator = coordinator
        return self._coordinator

    async def report(self) -> HealthReport:
        """Make a report and remember it for the next one. Raise the error of ZooKeeper if no daemon is known."""
        started = time.perf_counter()
        now = moment.shown(time.time_ns() // 1000, is_narrow=True)
        last = self._last or await asyncio.to_thread(last_seen.load, self.target.where)
        lost: Lost | None = None
        coordinator_ms: float | None = None
        opened: list[str] = []
        try:
            cluster = await self.cluster()
            found = await take_snapshot(
                cluster.coordinator,
                tls=self.target.tls,
                seconds=self._seconds,
                aloud=self._aloud,
                contacts=self._contacts,
                documents=self._documents.read,
            )
            coordinator_ms = await _round_trip(cluster)
            if should_be_closed(self.target) and await cluster.coordinator.is_open(ROOT):
                opened.append(ROOT)
        except LOST as error:
            await self._documents.forget()
            known = known_of(self.target, last)
            if known is None:
                raise
            if known is not last:  # the remembered state belongs to an earlier cluster at this address
                last = None
            lost = Lost(cause=error, seen=known.seen or None)
            found = await snapshot_from_daemons(
                known.meta,
                known.servers,
                known.storages,
                known.replicas.partitions,
                tls=self.target.tls,
                seconds=self._seconds,
            )
            owned = any(server.partitions for server in found.server_reports.values())
            if not isinstance(error, CannotConnect | CoordinatorRefused) and last is None and not owned:
                raise  # there may never have been a cluster
        directory = self.target.directory
        down, unlisted = ([], {}) if directory is None else processes(self._cluster_in(directory), found)
        if lost is None:  # a server that an operator removed may be down
            there = {ZOOKEEPER, *(view.meta.name for view in found.nodes), *(meta.name for meta in found.missing)}
            down = [name for name in down if name in there]
        facts = Facts(
            snapshot=found,
            lost=lost,
            coordinator_ms=coordinator_ms,
            opened=opened,
            down=down,
            unlisted={} if lost is not None else unlisted,
            repair=REPAIR if directory is None else f"waltzctl up {directory} --detach",
        )
        verdict = judge(facts)
        before = last.troubles if last is not None and last.meta.key == found.meta.key else {}
        reasons, troubles = with_since(verdict.reasons, before, now)
        if lost is None:
            last = last_seen.of(self.target.where, found, seen=now, troubles=troubles)
        elif last is not None:
            last = replace(last, troubles=troubles)
        self._last = last
        if last is not None:
            await self._save(last)
        return HealthReport(
            facts=facts,
            verdict=replace(verdict, reasons=reasons),
            at=now,
            milliseconds=(time.perf_counter() - started) * 1000,
        )

    def _cluster_in(self, directory: Path) -> LocalCluster:
        from waltzctl.local_cluster.local import LocalCluster

        if self._local is None or not (directory / BLUEPRINT).exists():
            self._local = LocalCluster.find(directory)
        else:
            self._local.recall()
        return self._local

    async def _save(self, last: LastSeen) -> None:
        """Save the state for other commands: at once if it changed, else every `SAVE_SECONDS`."""
        is_new = self._saved is None or replace(last, seen=self._saved.seen) != self._saved
        if is_new or time.monotonic() - self._saved_at > SAVE_SECONDS:
            await asyncio.to_thread(last_seen.save, last)
            self._saved, self._saved_at = last, time.monotonic()

    async def reports(self, every: float) -> AsyncIterator[HealthReport | WaltzError]:
        """Yield a report every `every` seconds, without end. An error is yielded too; the next report may succeed."""
        while True:
            started = time.monotonic()
            try:
                found: HealthReport | WaltzError = await self.report()
            except WaltzError as error:
                found = error
            yield found
            await asyncio.sleep(max(0.0, every - (time.monotonic() - started)))


def known_of(target: ClusterTarget, last: LastSeen | None) -> LastSeen | None:
    """Return the daemons to ask without ZooKeeper. `last` is the state remembered from an earlier report."""
    blueprint = _blueprint(target, target.directory) if target.directory is not None else None
    return last if last is not None and (blueprint is None or blueprint.meta.key == last.meta.key) else blueprint


def _blueprint(target: ClusterTarget, directory: Path) -> LastSeen:
    """Return the daemons of a local cluster, whose addresses are in its blueprint."""
    blueprint = load_blueprint(directory)
    servers = [(name, *blueprint.addresses(name)) for name in blueprint.server_names]
    storages = [(name, *blueprint.addresses(name)) for name in blueprint.storage_names]
    return LastSeen(
        where=target.where,
        meta=ClusterMeta(
            name="local", key=blueprint.key, partitions=blueprint.partitions, created="", format=blueprint.format
        ),
        servers=tuple(
            ServerMeta(name=name, listen=listen, admin_listen=admin, instance=UNKNOWN_INSTANCE, version="")
            for name, listen, admin in servers
        ),
        storages=tuple(
            StorageMeta(name=name, listen=listen, admin_listen=admin, group=name) for name, listen, admin in storages
        ),
        replicas=ReplicaSets(partitions={}),
        seen="",
    )


def processes(cluster: LocalCluster, found: ClusterSnapshot) -> tuple[list[str], dict[str, int]]:
    """Return, for a local cluster, the processes that should run and do not, and the servers that run and are not
    registered: name → process number."""
    running = {
        name: daemon.life.pid for name, daemon in cluster.daemons.items() if daemon.life is not None and daemon.is_running
    }
    down = [name for name in cluster.daemons if name not in running]
    listed = {view.meta.name for view in found.servers}
    unlisted = {name: running[name] for name in cluster.blueprint.server_names if name in running and name not in listed}
    return missed(down, cluster.blueprint.storage_names, found), unlisted


def missed(down: Sequence[str], storage_names: Sequence[str], found: ClusterSnapshot) -> list[str]:
    """Leave out storages that are not (yet, or any more) in the cluster: they may be down."""
    members = {view.meta.name for view in found.storages}
    return [name for name in down if name not in storage_names or name in members]


def should_be_closed(target: ClusterTarget) -> bool:
    return target.tls is not None or target.access.has_credentials


async def _round_trip(cluster: Cluster) -> float:
    """Return the milliseconds of one small read in ZooKeeper."""
    started = time.perf_counter()
    await cluster.meta()
    return (time.perf_counter() - started) * 1000


async def _is_refused(hosts: str, seconds: float) -> bool:
    """Return whether no process listens at any of the addresses. This is known at once, while the ZooKeeper client
    would keep trying."""

    async def one(address: str) -> bool:
        try:
            place = parse_address(address.strip())
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(place.host, place.port)
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):  # the ZooKeeper client reports any other error
            return False
        writer.transport.abort()
        return False

    return all(await asyncio.gather(*(one(address) for address in hosts.split(","))))
