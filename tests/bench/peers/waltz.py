"""Waltz as it is run: ZooKeeper, three storages, one server, one partition; a WRITE lock for each slot."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
from uuid import UUID

from tests.bench.peers.system import Facts, NotCommittedError, System
from tests.process.cluster import Cluster
from waltzctl.local_cluster.java import java_command
from waltzd.client.client import Client
from waltzd.errors import WaltzError
from waltzd.protocol.locks import Committed, write_lock
from waltzd.wire.storages import AdminClient

SESSION_SECONDS = 10
LOCK = "slot"


class Waltz(System):
    name = "waltz"
    package = "./dev setup"

    _cluster: Cluster | None = None

    @classmethod
    def missing(cls) -> str | None:
        try:
            java_command()
        except WaltzError as error:
            return str(error)
        return None

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "it was not started"
        return self._cluster

    def start(self) -> None:
        self._cluster = Cluster.make(self.home / "cluster", partitions=1, servers=1, session_seconds=SESSION_SECONDS)
        self._cluster.start()

    @property
    def pids(self) -> list[int]:
        return [daemon.life.pid for daemon in self.cluster.local.daemons.values() if daemon.life is not None]

    @property
    def address(self) -> tuple[str, ...]:
        blueprint = self.cluster.local.blueprint
        return (
            self.cluster.servers,
            str(blueprint.key),
            *(blueprint.addresses(name)[1] for name in blueprint.storage_names),
        )

    @property
    def facts(self) -> Facts:
        return Facts(
            version=importlib.metadata.version("waltzd"),
            durability="flushed to the disks of two of three storages before it is acknowledged",
            caveat="one partition; many in flight go through `append_many`, which coalesces them into frames",
        )

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            shutil.rmtree(self.home / "cluster")


class WaltzSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        servers, key, *self._storages = address
        self._key = UUID(key)
        self._client = Client(servers)
        self._marks: dict[int, int] = {}
        """For each slot the last transaction there: what the next one relies on."""

    async def open(self) -> None:
        await self._client.open()

    async def append(self, slot: int, payload: bytes) -> None:
        locks = (write_lock(LOCK, slot),)
        outcome = await self._client.append(payload, partition=0, locks=locks, position=self._marks.get(slot, -1))
        if not isinstance(outcome, Committed):
            raise NotCommittedError(f"slot {slot}: {outcome}")
        self._marks[slot] = outcome.id

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        locks = [(write_lock(LOCK, slot),) for slot in slots]
        mark = max(self._marks.get(slot, -1) for slot in slots)
        outcomes = await self._client.append_many([payload] * len(slots), partition=0, locks=locks, position=mark)
        if outcomes.committed != len(slots):
            raise NotCommittedError(f"{len(slots) - outcomes.committed} of {len(slots)} were not committed")
        self._marks.update(zip(slots, outcomes.ids.tolist(), strict=True))

    async def kept(self) -> int:
        last_ids = sorted(await asyncio.gather(*[self._last_id(address) for address in self._storages]))
        return last_ids[len(last_ids) // 2] + 1  # what a majority holds; ids have no gaps

    async def _last_id(self, address: str) -> int:
        async with AdminClient(address, self._key) as admin:
            assigned = next(each for each in (await admin.describe()).assigned if each.partition == 0)
        assert assigned.status is not None
        assert assigned.status.is_sound
        return assigned.status.last_id

    async def close(self) -> None:
        await self._client.close()
