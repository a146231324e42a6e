"""Forgotten replicas that are set aside after a person was asked: what the cluster needs by then stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tests.unit.snapshots import KEY, STORAGES, well
from tests.unit.typed_command import typed_command
from waltzctl.placement import storage as command
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.mover import Mover, Throttle
from waltzctl.shell.change import ConfirmOptions, carried_out
from waltzctl.shell.progress import unreported
from waltzd.cluster.cluster import NO_VERSION, Cluster, replicas_path
from waltzd.cluster.coordinator import Change, Coordinator, Node
from waltzd.cluster.documents import ClusterMeta, Membership, PartitionMeta, ReplicaSets
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import WaltzError
from waltzd.errors.operations import ChangedMeanwhile

META = ClusterMeta(name="trial", key=KEY, partitions=4, created="2026-01-01")
YES = ConfirmOptions(yes=True)


class Asked(Daemons):
    """Daemons that are well, and a storage that does what it is told."""

    def __init__(self, _tls: object) -> None:
        super().__init__(None)
        self.removed: list[int] = []

    async def take_snapshot(self, cluster: Cluster) -> Any:
        return well()

    @asynccontextmanager
    async def admin(self, *_: object) -> AsyncIterator[Any]:
        yield self

    async def remove_partitions(
        self, partitions: Sequence[int], *, delete_files: bool = False
    ) -> dict[int, WaltzError | None]:
        self.removed += partitions
        return dict.fromkeys(partitions)


class Lagging:
    """A connection to a server of ZooKeeper that lags: once `old` is set, reads of some documents find what they were."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        self._coordinator = coordinator
        self.old: dict[str, Node | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    async def get(self, path: str) -> Node | None:
        return self.old[path] if path in self.old else await self._coordinator.get(path)

    async def commit(self, changes: Sequence[Change]) -> None:
        try:
            await self._coordinator.commit(changes)
        finally:
            self.old.clear()  # the answer comes behind all that it waited for


@pytest.mark.parametrize("clears", ["recover", "move"])
def test_what_was_assigned_while_the_own_server_of_the_coordinator_lags_stays(
    clears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons, typed = Asked(None), typed_command()
    monkeypatch.setattr(command, "Daemons", lambda _tls: daemons)
    command.tidy(typed, "s1")

    async def work() -> None:
        sets = {number: dict.fromkeys(("s2", "s3"), Membership.MEMBER) for number in range(4)}
        storages, tree = [view.meta for view in well().storages], MemoryTree()
        other = await Cluster.create(tree.connect(), META, storages=storages, replicas=ReplicaSets(partitions=sets))
        for number in range(4):
            meta = PartitionMeta(generation=1, session=1, opened=1, members=("s2", "s3"))
            await other.save_partition(number, meta, NO_VERSION)
        lagging = Lagging(tree.connect())
        cluster = Cluster(cast(Coordinator, lagging))
        change = await typed.prepare(cluster)
        before = await other.coordinator.get(replicas_path(2))
        _, versions = await other.replicas()
        await other.save_replica_set(2, dict.fromkeys(STORAGES, Membership.MEMBER), versions[2])
        lagging.old = {replicas_path(2): before}
        if clears == "recover":
            with pytest.raises(ChangedMeanwhile):
                await change.do(cluster, unreported)
            assert daemons.removed == []
        else:
            mover = Mover(cluster, daemons, unreported, Throttle(cluster, None))
            goals = dict.fromkeys(range(4), ("s2", "s3"))
            assert await mover.clear(goals, moved=goals, deletes_on=None) == {"s1": [0, 1, 3]}

    asyncio.run(work())


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_replica_that_was_assigned_while_a_person_was_asked_stays(
    is_assigned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons, typed = Asked(None), typed_command()
    monkeypatch.setattr(command, "Daemons", lambda _tls: daemons)
    command.tidy(typed, "s1")

    async def work() -> None:
        sets = {number: dict.fromkeys(("s2", "s3"), Membership.MEMBER) for number in range(4)}
        storages = [view.meta for view in well().storages]
        cluster = await Cluster.create(
            MemoryTree().connect(), META, storages=storages, replicas=ReplicaSets(partitions=sets)
        )
        change = await typed.prepare(cluster)
        assert change.plan.steps == ("set aside the files of partitions 0-3 on s1; not assigned to it",)
        if is_assigned:  # by another operator, whose `partition assign` takes the replica that is there
            _, versions = await cluster.replicas()
            await cluster.save_replica_set(2, dict.fromkeys(STORAGES, Membership.MEMBER), versions[2])
        await carried_out(cluster, change, typed.prepare, YES, None, unreported)

    if is_assigned:
        with pytest.raises(ChangedMeanwhile, match="partition 2 was assigned to s1"):
            asyncio.run(work())
        assert daemons.removed == []
    else:
        asyncio.run(work())
        assert daemons.removed == [0, 1, 2, 3]
