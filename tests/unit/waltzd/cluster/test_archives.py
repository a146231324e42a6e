"""How far archives reach: a document that only goes forward."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from waltzd.cluster.cluster import NO_VERSION, Cluster, all_archived, archived, save_archived
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta, ReplicaSets
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile
from waltzd.protocol.document import encode

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
        trimmed = replace(SECOND, floor=10)
        assert await save_archived(one, 0, trimmed, SECOND, version + 1) == version + 2
        assert await archived(other, 0) == (trimmed, version + 2)

    asyncio.run(run())


@pytest.mark.parametrize(
    "back",
    [
        replace(SECOND, number=1),
        FIRST,
        replace(SECOND, number=3, last=18),
        replace(SECOND, number=3, archive=UUID(int=2)),
        SECOND,
        replace(SECOND, number=3, floor=9),
        replace(SECOND, floor=9),
        replace(SECOND, last=20, floor=11),
    ],
)
def test_it_never_goes_back_or_elsewhere(back: ArchiveMeta) -> None:
    async def run() -> None:
        with pytest.raises(BadMetadata, match="does not go back"):
            await save_archived(MemoryTree().connect(), 0, back, replace(SECOND, floor=10), 1)

    asyncio.run(run())


def test_a_floor_is_at_most_behind_what_is_archived() -> None:
    assert encode(replace(FIRST, floor=10))
    with pytest.raises(BadMetadata, match="floor must be a whole number from 0 to 10, not 11"):
        encode(replace(FIRST, floor=11))
