"""Forgotten replicas that are set aside after a person was asked: what the cluster needs by then stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.snapshots import KEY, STORAGES, well
from tests.unit.typed_command import typed_command
from waltzctl.placement import storage as command
from waltzctl.placement.daemons import Daemons
from waltzctl.shell.change import ConfirmOptions, carried_out
from waltzctl.shell.progress import unreported
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets
from waltzd.cluster.memory import MemoryTree
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

    async def remove_partitions(self, partitions: Sequence[int]) -> dict[int, WaltzError | None]:
        self.removed += partitions
        return dict.fromkeys(partitions)


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
