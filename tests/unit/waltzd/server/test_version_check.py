"""What a server refuses before it takes part: other servers, storages and clusters of versions that do not fit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzd.cluster.cluster import ROOT, Cluster
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import ClusterMeta, ServerMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import IncompatibleVersion, LevelUnknown
from waltzd.protocol.document import encode
from waltzd.server.reconcile import VersionCheck
from waltzd.server.registration import Registration

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")


def test_a_server_two_minor_versions_away_is_refused_by_name() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        check = VersionCheck(cluster, "one", 0)
        for name, version in (("one", "0.9.0"), ("two", "0.0.0"), ("three", "0.2.0")):  # its own last entry may be of any
            await cluster.register_server(
                ServerMeta(name=name, listen="a:1", admin_listen="a:2", instance=UUID(int=1), version=version)
            )
            await check.check_servers()
        await cluster.register_server(
            ServerMeta(name="zero", listen="a:1", admin_listen="a:2", instance=UUID(int=1), version="0.3.0")
        )
        with pytest.raises(IncompatibleVersion, match=r"^server zero runs version 0\.3\.0, and this is version 0\.1"):
            await check.check_servers()

    timeless.run(work())


@pytest.mark.parametrize("is_back", [False, True], ids=["at its start", "after its coordinator session was lost"])
def test_a_server_that_meets_another_version_in_the_list_leaves_it_and_ends(is_back: bool) -> None:
    """The other one registers between the look and the registration, or while the session of this one is lost."""

    async def nobody_answers(meta: ServerMeta) -> bool:
        return False

    async def work() -> None:
        tree = MemoryTree()
        first, other = tree.connect(), await Cluster.create(tree.connect(), META)
        cluster = Cluster(first)
        check = VersionCheck(cluster, "one", 0)
        server = ServerMeta(name="one", listen="a:1", admin_listen="a:2", instance=UUID(int=1), version="0.1.0")
        registration = Registration(cluster, server, is_alive=nobody_answers, check_servers=check.check_servers)
        await check.check_servers()
        if is_back:
            await registration.announce()
            first.lapse()
        await other.register_server(replace(server, name="zero", version="0.3.0"))
        if is_back:
            first.expire()
        with pytest.raises(IncompatibleVersion, match=r"^server zero runs version 0\.3\.0, and this is version 0\.1"):
            await registration.reconciler.run()
        assert (await other.servers()).keys() == {"zero"}
        assert not registration.is_announced

    timeless.run(work())


def test_older_storages_are_refused_from_the_moment_in_which_the_level_is_raised() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        levels: list[int] = []
        check = VersionCheck(cluster, "one", 0)
        check.on_rise = lambda check_storage: levels.append(check.level)
        check.check_storage("s1", "")
        following = asyncio.create_task(check.reconciler.run())
        await asyncio.sleep(1)
        await cluster.change_root(META, replace(META, level=1))
        await asyncio.sleep(1)
        check.check_storage("s1", "0.1.0")
        with pytest.raises(IncompatibleVersion, match=r"storage s1 runs version before 0\.1"):
            check.check_storage("s1", "")
        await cluster.coordinator.commit([Set(ROOT, encode(META), 1)])  # an older document was restored
        await asyncio.sleep(1)
        with pytest.raises(IncompatibleVersion):
            check.check_storage("s1", "")
        assert levels == [1]
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_a_server_ends_when_the_cluster_is_finalized_for_a_newer_version() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        following = asyncio.create_task(VersionCheck(cluster, "one", 0).reconciler.run())
        await asyncio.sleep(1)
        future = json.dumps({**json.loads(encode(META)), "level": 7, "colour": "blue"}).encode()
        await cluster.coordinator.commit([Set(ROOT, future, 0)])
        with pytest.raises(LevelUnknown, match="the cluster has level 7"):
            await following

    timeless.run(work())
