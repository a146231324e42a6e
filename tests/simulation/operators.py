"""Operators in a simulation: each is a person who runs the tool's own code against the daemons of the moment.

What is to be done is given by the plan. The tool may be killed at any moment and is run again, and two of them may work at
the same time; whatever one of them is told by an error, it tries again a moment later, like a person does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.simulation.loop import Life
from tests.simulation.machines import Machine, World
from tests.simulation.ports import SimAdminPort, SimServerAdminPort
from waltzctl.placement.cluster import finalize_plan, format_plan, unchanged
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import MoveOptions, carry_out, placement_state, take_out
from waltzctl.placement.replica_moves import MovePlan, PlacementState
from waltzctl.placement.rescue import carry_out as finish_rescue
from waltzctl.placement.rescue import read_scene, with_archive
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, ServerView, StorageView, compared
from waltzd.cluster.cluster import Cluster, partition_path
from waltzd.cluster.documents import PartitionMeta, ServerMeta, StorageMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.format.layout import BATCHES
from waltzd.protocol.document import decode
from waltzd.protocol.level import THIS

POLL_SECONDS = 0.2
TRIES_SECONDS = 3.0
"""How long one command may take; then it is run again, behind what was wanted meanwhile."""
TRIES_MAX = 3


class OperatorMachine(Machine):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.wanted: tuple[dict[int, tuple[str, ...]], bool] | None = None
        """Where replicas shall be, and whether storages that are left without any are taken out of the cluster then."""
        self.is_upgrading = False
        """The cluster shall write format 1."""
        self.finalizing = 0
        """How often the level of the cluster is tried to be raised yet."""
        self.hesitates = 0.0
        """Seconds between the look at the cluster and the change of its level."""
        self.rescues: dict[int, int] = {}
        """Partitions that are to be rescued if they cannot go on: how many timelines each had before all was lost."""
        self.kept = ""
        """The storage that has the only copy of them."""

    @property
    def is_at_work(self) -> bool:
        return self.wanted is not None or self.is_upgrading or bool(self.rescues) or self.finalizing > 0

    def upgrade(self) -> None:
        self.is_upgrading = True
        self.start()

    def finalize(self, seconds: float) -> None:
        """`seconds`: time between the last look at the cluster and the change of its level."""
        self.finalizing, self.hesitates = TRIES_MAX, seconds
        self.start()

    def rescue(self, kept: str) -> None:
        self.kept, self.rescues = kept, dict.fromkeys(range(self.world.log_count), 0)
        for number in self.rescues:
            entry = self.world.zookeeper.tree.find(partition_path(number))
            assert entry is not None
            self.rescues[number] = decode(PartitionMeta, entry.data, "here").lineage.number
        self.start()

    def place(self, goals: dict[int, tuple[str, ...]], *, is_taking_out: bool) -> None:
        self.wanted = (goals, is_taking_out)
        self.start()

    async def _live(self, life: Life) -> None:
        session = self.world.zookeeper.connect(life)
        versions = self.world.versions
        cluster = Cluster(session.coordinator, program=THIS if versions is None else versions.newest)
        tool = _Tool(self.world, life, cluster)
        tries, trying = 0, self.wanted
        while True:
            if self.wanted is not trying:
                tries, trying = 0, self.wanted
            try:
                if self.is_upgrading and await tool.upgrade():
                    self.is_upgrading = False
                if self.finalizing:
                    self.finalizing -= 1
                    await tool.finalize(self.hesitates)
                    self.finalizing = 0
                if self.rescues:
                    await tool.rescue(self.kept, self.rescues)
                if trying is None:
                    await tool.go_on()
                else:
                    await tool.carry_out(*trying)
                    self._is_done(trying)
            except WaltzError as error:
                self.world.say(self.name, f"{error.code} {error.message}")
                tries += isinstance(error, ChangedMeanwhile)
                if tries == TRIES_MAX:  # others want something else
                    self._is_done(trying)
            except Exception as mistake:  # noqa: BLE001  any mistake ends the whole run
                self.world.mistake(mistake)
                return
            await asyncio.sleep(POLL_SECONDS)

    def _is_done(self, wanted: object) -> None:
        if self.wanted is wanted:  # else something newer is wanted by now
            self.wanted = None


class _Tool(Daemons):
    """The daemons as the tool sees them, and the commands of it that are simulated."""

    def __init__(self, world: World, life: Life, cluster: Cluster) -> None:
        super().__init__(None)
        self._world = world
        self._life = life
        self._cluster = cluster

    async def carry_out(self, goals: dict[int, tuple[str, ...]], is_taking_out: bool) -> None:
        cluster = self._cluster
        there = await cluster.storages()
        for name in sorted({name for goal in goals.values() for name in goal} - there.keys()):
            await cluster.add_storage(self._world.storages[name].meta)
            self._say(f"{name} belongs to the cluster")
        await self._move(goals)
        if is_taking_out:
            await self._take_out()

    async def upgrade(self) -> bool:
        """One turn of `cluster set --format 1`. True when every partition writes it."""
        found = await self.take_snapshot(self._cluster)
        if found.meta.format != BATCHES:
            format_plan(found, BATCHES)  # refuses while a storage is silent, or too old
            await self._cluster.set_format(BATCHES, before=found.meta)
            self._say("the cluster writes format 1 from the next sessions on")
        return not unchanged(found, BATCHES)

    async def finalize(self, seconds: float) -> None:
        """One turn of `cluster finalize`. `seconds` pass between the look and the change."""
        versions = self._world.versions
        assert versions is not None
        versions.looks()
        found = await self.take_snapshot(self._cluster)
        up = {view.meta.name for view in found.servers}
        expected = (await self._cluster.expected_servers()).values()
        found = replace(found, missing=tuple(meta for meta in expected if meta.name not in up))
        if finalize_plan(found, versions.newest).steps:
            if seconds:
                await asyncio.sleep(seconds)
            await self._cluster.change_root(found.meta, replace(found.meta, level=versions.newest.level))

    async def rescue(self, kept: str, wanted: dict[int, int]) -> None:
        """One turn of `partition rescue` for what is closed, while the storage that has all of it answers."""
        found = await self.take_snapshot(self._cluster)
        silent = frozenset(storage.meta.name for storage in found.storages if storage.reported is None)
        for number, timelines in list(wanted.items()):
            scene, _ = await read_scene(self._cluster, found, number)
            view = found.partitions[number]
            is_open = replace(view, refusing=view.refusing | silent).is_open  # a hung owner counts storages that are gone
            if scene.lineage.number > timelines or is_open:
                wanted.pop(number, None)
            elif kept in scene.statuses and not scene.by_itself and not scene.refusal:
                scene = await with_archive(self, scene, found)
                done = await finish_rescue(
                    self._cluster, self, scene, self._life.name,
                    new_identity=lambda: UUID(int=self._world.pick.getrandbits(128), version=4),
                )  # fmt: skip
                self._say(f"partition {number} is rescued up to id {done.mark}")

    async def go_on(self) -> None:
        """Resume a change that a tool began, also where a storage that it needs was taken out in the same moment."""
        moves, _ = await self._cluster.moves()
        if moves.partitions:
            await self.carry_out(dict(moves.partitions), False)

    async def _move(self, goals: dict[int, tuple[str, ...]]) -> None:
        def wish(now: PlacementState) -> MovePlan:
            return MovePlan(now=now, verb="partition assign", subject="", goals=goals)

        agreed, options = wish(await placement_state(self._cluster, self)), MoveOptions(timeout=TRIES_SECONDS)
        cleared = await carry_out(self._cluster, self, wish, agreed, options, lambda *reported: None)
        self._say(f"replicas are where they shall be: {goals}" + (f", cleared: {cleared}" if cleared else ""))

    async def _take_out(self) -> None:
        now = await placement_state(self._cluster, self)
        used = {name for names in now.goals.values() for name in names}
        used |= {name for roles in now.sets.partitions.values() for name in roles}
        for name in sorted(now.storages):
            if name not in used:
                await take_out(self._cluster, name)
                self._say(f"{name} is taken out of the cluster")

    def _say(self, what: str) -> None:
        self._world.say(self._life.name, what)

    # -- what the tool asks of daemons

    async def take_snapshot(self, cluster: Cluster) -> ClusterSnapshot:
        assignment, _ = await cluster.assignment()
        sets, _ = await cluster.replicas()
        moves, _ = await cluster.moves()
        servers = [await self._server(meta) for _, meta in sorted((await cluster.servers()).items())]
        storages = [await self._storage(meta) for _, meta in sorted((await cluster.storages()).items())]
        owned = {
            (view.meta.name, found.partition): found
            for view in servers
            if view.reported is not None
            for found in view.reported.partitions
        }
        return ClusterSnapshot(
            meta=await cluster.meta(),
            leader=None,
            servers=tuple(servers),
            storages=tuple(storages),
            partitions=compared(
                (
                    PartitionView(
                        partition=partition,
                        owner=owner.server,
                        generation=owner.generation,
                        replicas=sets.partitions.get(partition, {}),
                        reported=owned.get((owner.server, partition)) if owner.server is not None else None,
                    )
                    for partition, owner in enumerate(assignment.owners)
                ),
                storages,
            ),
            moves=moves.partitions,
        )

    async def _server(self, meta: ServerMeta) -> ServerView:
        machine = self._world.servers[meta.name]
        try:
            port = SimServerAdminPort(self._world.network, self._life, meta.name, machine.daemon, seconds=1.0)
            return ServerView(meta=meta, reported=await port.describe(), error=None)
        except WaltzError as error:
            return ServerView(meta=meta, reported=None, error=error)

    async def _storage(self, meta: StorageMeta) -> StorageView:
        try:
            return StorageView(meta=meta, reported=await self._admin(meta).describe(), error=None)
        except WaltzError as error:
            return StorageView(meta=meta, reported=None, error=error)

    @asynccontextmanager
    async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
        yield self._admin(storage)

    def _admin(self, meta: StorageMeta) -> SimAdminPort:
        machine = self._world.storages[meta.name]
        return SimAdminPort(self._world.network, self._life, meta.name, machine.serving, seconds=1.0)
