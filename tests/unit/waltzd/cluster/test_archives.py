"""How far archives reach: a document that only goes forward."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from waltzd.cluster.archives import all_archived, archived, save_archived
from waltzd.cluster.cluster import NO_VERSION, Cluster
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta, ReplicaSets
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import BadMetadata, ChangedMeanwhile

KEY = UUID(int=1)
FIRST = ArchiveMeta(archive=KEY, number=1, sha256=64 * "a", last=9)
SECOND = ArchiveMeta(archive=KEY, number=2, sha256=64 * "b", last=19)


def test_an_archive_goes_forward_and_of_two_owners_one_is_refused() -> None:
    async def run() -> None:
        tree = MemoryTree()
        one, other = tree.connect(), tree.connect()
        meta = ClusterMeta(name="test", key=KEY, partitions=2, created="2026-01-01T00:00:00Z")
        await Cluster.create(one, meta, storages=[], replicas=ReplicaSets(partitions={}))
        assert await archived(one, 0) == (None, NO_VERSION)
        assert await all_archived(one) == {}
        version = await save_archived(one, 0, FIRST, None, NO_VERSION)
        assert await archived(other, 0) == (FIRST, version)
        with pytest.raises(ChangedMeanwhile):
            await save_archived(other, 0, replace(FIRST, sha256=64 * "c"), None, NO_VERSION)
        assert await save_archived(other, 0, FIRST, None, NO_VERSION) == version, "its answer was lost"
        assert await save_archived(one, 0, SECOND, FIRST, version) == version + 1
        with pytest.raises(ChangedMeanwhile):
            await save_archived(other, 0, replace(SECOND, last=18), FIRST, version)
        await save_archived(other, 1, FIRST, None, NO_VERSION)
        assert await all_archived(one) == {0: SECOND, 1: FIRST}

    asyncio.run(run())


@pytest.mark.parametrize(
    "back",
    [replace(SECOND, number=1), FIRST, replace(SECOND, number=3, last=18), replace(SECOND, number=3, archive=UUID(int=2))],
)
def test_it_never_goes_back_or_elsewhere(back: ArchiveMeta) -> None:
    async def run() -> None:
        with pytest.raises(BadMetadata, match="does not go back"):
            await save_archived(MemoryTree().connect(), 0, back, SECOND, 1)

    asyncio.run(run())
