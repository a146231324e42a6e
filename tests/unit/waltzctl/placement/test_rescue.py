"""What a rescue asks before it plans: an archive that cannot be asked may prove more than the copies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.unit.snapshots import KEY, held, partition, storage, well
from waltzctl.placement import rescue
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.proof import Scene
from waltzctl.placement.rescue import carry_out, carry_out_all, plan_for, read_scene, with_archive
from waltzd.cluster.cluster import Cluster, partition_path
from waltzd.cluster.coordinator import Create
from waltzd.cluster.documents import ClusterMeta, Decision, Membership, PartitionMeta, ReplicaSets
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, StoreUnavailable, Unsafe
from waltzd.protocol.descriptions import Restoring
from waltzd.protocol.document import encode
from waltzd.protocol.timelines import NEVER_FORKED, TIMELINES_MAX

META = ClusterMeta(name="trial", key=KEY, partitions=4, created="2026-01-01")
ROLES = dict.fromkeys(("s1", "s2", "s3"), Membership.MEMBER)


class Stores(Daemons):
    """Storages of which some reach the archive."""

    def __init__(self, *reached: str) -> None:
        super().__init__(None)
        self._reached = reached

    @asynccontextmanager
    async def admin(self, _key: object, storage: Any) -> AsyncIterator[Any]:
        async def restore(_order: object) -> AsyncIterator[Restoring]:
            if storage.name not in self._reached:
                raise StoreUnavailable("the store is away")
            yield Restoring(bytes=0, bytes_total=0, proven_to=150)

        yield SimpleNamespace(restore=restore)


UNREAD = (
    "the archive of partition 0 may prove more, and cannot be read by s1 (the store is away); --without-archive gives up "
    "what only the archive has"
)


@pytest.mark.parametrize(("reached", "end", "refusals"), [((), 99, [UNREAD]), (("s2",), 150, [])])
def test_an_archive_that_cannot_be_asked_is_not_taken_for_one_that_proves_nothing(
    reached: tuple[str, ...], end: int, refusals: list[str]
) -> None:
    statuses = {}
    for name in ("s1", "s2"):
        status = held(0).status
        assert status is not None
        statuses[name] = replace(status, archives=True)
    meta = PartitionMeta(generation=1, session=2, opened=1, low_mark=99, members=tuple(ROLES))
    scene = Scene(partition=0, generation=1, roles=ROLES, meta=meta, statuses=statuses)
    found = well(storages=tuple(storage(name) for name in ROLES))
    asked = asyncio.run(with_archive(Stores(*reached), scene, found))
    assert asked.end == end
    assert plan_for("trial/0", {0: asked}).refusals == refusals


def test_a_document_of_a_newer_version_is_not_written_over() -> None:
    async def look() -> None:
        sets = ReplicaSets(partitions=dict.fromkeys(range(4), ROLES))
        storages = [storage(name).meta for name in ROLES]
        cluster = await Cluster.create(MemoryTree().connect(), META, storages=storages, replicas=sets)
        meta = PartitionMeta(generation=1, session=5, opened=4, decision=Decision(mark=9, session=5), members=tuple(ROLES))
        newer = encode(meta).replace(b'"schema": 1', b'"schema": 2')
        await cluster.coordinator.commit([Create(partition_path(0), newer)])
        with pytest.raises(BadMetadata, match="has schema 2"):
            await read_scene(cluster, well(), 0)

    asyncio.run(look())


def test_a_log_that_forked_as_often_as_it_can_is_refused_before_a_storage_is_fenced() -> None:
    class Looking(Daemons):
        async def take_snapshot(self, cluster: Cluster) -> Any:
            return well(partitions=(partition(0, reported=None), *well().partitions[1:]))

        async def fence(self, *_: object) -> Any:
            raise AssertionError("a storage was fenced")

    async def attempt() -> None:
        lineage = NEVER_FORKED
        for number in range(TIMELINES_MAX):
            lineage = lineage.forked(
                identity=UUID(int=number + 2), fork=9, session=number + 1, cause="rescue", began="now", who=None
            )
        sets = ReplicaSets(partitions=dict.fromkeys(range(4), ROLES))
        storages = [storage(name).meta for name in ROLES]
        cluster = await Cluster.create(MemoryTree().connect(), META, storages=storages, replicas=sets)
        meta = PartitionMeta(generation=1, session=99, opened=98, members=tuple(ROLES), timelines=lineage.later)
        await cluster.coordinator.commit([Create(partition_path(0), encode(meta))])
        agreed = Scene(partition=0, generation=1, roles=ROLES, meta=meta, statuses={})
        with pytest.raises(Unsafe, match="partition 0 has forked 64 times, as often as it can"):
            plan_for("trial/0", {0: agreed})
        with pytest.raises(Unsafe, match="partition 0 has forked 64 times, as often as it can"):
            await carry_out(cluster, Looking(None), agreed)
        assert await cluster.partition(0) == (meta, 0)

    asyncio.run(attempt())


def test_the_error_of_one_partition_names_those_that_are_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails_at_2(_cluster: object, _daemons: object, agreed: Scene, _who: object) -> Scene:
        if agreed.partition == 2:
            raise ChangedMeanwhile("s3 does not answer any more")
        return agreed

    monkeypatch.setattr(rescue, "carry_out", fails_at_2)
    scenes = [Scene(partition=number, generation=1, roles=ROLES, meta=None, statuses={}) for number in range(4)]
    with pytest.raises(ChangedMeanwhile) as caught:
        asyncio.run(carry_out_all(Cluster(MemoryTree().connect()), Daemons(None), scenes, None))
    assert caught.value.message == "partition 2: s3 does not answer any more"
    assert caught.value.detail_not_done == "partitions 2-3 were not rescued; the decision of partitions 0-1 is saved"
