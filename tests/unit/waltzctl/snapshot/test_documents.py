"""Documents that are kept while they stay the same: nothing is asked then, and a change of any of them is seen."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.unit.snapshots import KEY, server, storage
from waltzctl.snapshot.collector import DocumentCache, read
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Create, Delete, Node, Set
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadMetadata

META = ClusterMeta(name="trial", key=KEY, partitions=2, created="2026-01-01")


class Counting(MemoryCoordinator):
    """It knows what it was asked."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.documents: list[str] = []
        self.folders: list[str] = []

    @property
    def is_asked(self) -> bool:
        return bool(self.documents or self.folders)

    def forget(self) -> None:
        self.documents, self.folders = [], []

    async def get(self, path: str) -> Node | None:
        self.documents.append(path)
        return await super().get(path)

    async def children(self, path: str) -> list[str]:
        self.folders.append(path)
        return await super().children(path)


async def made() -> tuple[MemoryCoordinator, Counting]:
    """Of an operator or of daemons, and of the one that looks."""
    tree = MemoryTree()
    other, ours = tree.connect(), Counting(tree)
    storages = [storage(name).meta for name in ("s1", "s2")]
    members = {"s1": Membership.MEMBER, "s2": Membership.MEMBER}
    cluster = await Cluster.create(
        other, META, storages=storages, replicas=ReplicaSets(partitions={0: members, 1: members})
    )
    await cluster.register_server(server("a").meta)
    await cluster.become_leader("a")
    tree._connected.append(ours)
    return other, ours


async def settled() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


async def steady(kept: DocumentCache, ours: Counting) -> None:
    """Nothing is asked any more."""
    for _ in range(4):
        await kept.read(Cluster(ours))
        await settled()
    ours.forget()
    await kept.read(Cluster(ours))
    assert not ours.is_asked


@pytest.mark.slow
def test_whatever_of_it_changes_is_read_again() -> None:
    async def work() -> None:
        other, ours = await made()
        kept = DocumentCache()
        await read(Cluster(ours))
        documents, folders = sorted(set(ours.documents)), sorted(set(ours.folders))
        assert len(documents) >= 10
        assert len(folders) == 4
        changes = [(path, "document") for path in documents] + [(path, "folder") for path in folders]
        for path, what in changes:
            await steady(kept, ours)
            node = await other.get(path)
            if what == "folder":
                change: Create | Set = Create(f"{path}/zz", b"")
            else:
                change = Create(path, b"") if node is None else Set(path, node.data, node.version)
            await other.commit([change])
            await settled()
            ours.forget()
            with suppress(BadMetadata):  # what was put there may be no document
                await kept.read(Cluster(ours))
            assert ours.is_asked, (path, what)
            if isinstance(change, Create):
                await other.commit([Delete(change.path, 0)])
            await settled()
        await kept.forget()

    asyncio.run(work())


def test_it_is_what_the_coordinator_has_now() -> None:
    async def work() -> None:
        other, ours = await made()
        kept, cluster = DocumentCache(), Cluster(other)
        await steady(kept, ours)
        await cluster.register_server(server("b").meta)
        await settled()
        assert set((await kept.read(Cluster(ours))).servers) == {"a", "b"}
        await steady(kept, ours)
        await cluster.unregister_server("b")
        await settled()
        found = await kept.read(Cluster(ours))
        assert (set(found.servers), set(found.expected)) == ({"a"}, {"a", "b"})
        await kept.forget()

    asyncio.run(work())


def test_without_contact_nothing_that_was_kept_counts() -> None:
    async def work() -> None:
        _, ours = await made()
        kept = DocumentCache()
        await steady(kept, ours)
        ours.disconnect()
        with pytest.raises(CannotConnect):
            await kept.read(Cluster(ours))
        await kept.forget()
        ours.reconnect()
        await steady(kept, ours)
        await kept.forget()

    asyncio.run(work())
