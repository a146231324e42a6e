"""Client ids are not given out without end, so that they do not begin again while clients have them."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from waltzd.cluster import cluster as module
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import TooManyCallers

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")


def test_client_ids_are_refused_before_they_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_IDS_BEYOND_MAX", 40)
    monkeypatch.setattr(module, "CLIENT_IDS_PER_SECOND", 0)

    async def story() -> None:
        tree = MemoryTree()
        await Cluster.create(tree.connect(), META)
        cluster, other = (Cluster(tree.connect(), clock=lambda: 0.0) for _ in range(2))
        ids = [await cluster.new_client_id() for _ in range(40)]
        assert len(ids) == len(set(ids))
        with pytest.raises(TooManyCallers, match="40 client ids more than"):
            await cluster.new_client_id()
        monkeypatch.setattr(module, "CLIENT_IDS_PER_SECOND", 1)
        cluster._beyond_at -= 2.5  # time passes
        ids.append(await cluster.new_client_id())
        monkeypatch.setattr(module, "CLIENT_IDS_PER_SECOND", 0)
        cluster._beyond += 2
        with pytest.raises(TooManyCallers):
            await cluster.new_client_id()
        assert await other.new_client_id() > max(ids), "other servers count for themselves"

    asyncio.run(story())
