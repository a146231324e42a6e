"""A server follows the document of the policy: each change, one that is spoiled, one that is taken away, and silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzd.cluster.cluster import CHANNELS, NO_VERSION, POLICY, Cluster, save_channels
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import ChannelsDocument, ClusterMeta, PolicyDocument
from waltzd.cluster.memory import MemoryTree
from waltzd.errors.operations import ChangedMeanwhile, PolicyUnreadable
from waltzd.protocol.channels import Channel, KeyHash, Parts, Ranges
from waltzd.protocol.policy import Grant, Pattern, Verb
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.reconcile import PolicyFollower

KEY = UUID(int=7)
META = ClusterMeta(name="test", key=KEY, partitions=4, created="2026-01-01")
APP = Identity(KEY, Role.CLIENT, "app").uri


def document(*names: str) -> PolicyDocument:
    return PolicyDocument(grants=tuple(Grant(names=(Pattern(name),), may=(Verb.APPEND,)) for name in names))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):  # the clock stands still meanwhile
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


def test_each_change_counts_as_soon_as_it_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        authorizer = Authorizer()
        follower = PolicyFollower(Cluster(tree.connect()), authorizer)
        await follower.read()
        following = asyncio.create_task(follower.reconciler.run())

        def may() -> bool:
            return authorizer.rights(APP).may_append(0)

        async def version() -> int:
            return await cluster.policy_version()

        assert may(), "no document, no policy"
        await cluster.save_policy(document("other"), NO_VERSION)
        await until(lambda: not may())
        await cluster.save_policy(document("app"), await version())
        await until(may)
        await cluster.coordinator.commit([Set(POLICY, b"nonsense", await version())])
        await until(lambda: follower.trouble != "")
        assert may(), "the last good one stays"
        assert "the last one stays in force" in caplog.text
        await cluster.save_policy(document("other"), await version())
        await until(lambda: not may())
        assert follower.trouble == ""
        await cluster.save_policy(None, await version())
        await cluster.save_policy(document("app"), NO_VERSION)
        await until(may)
        await cluster.save_policy(document("other"), await version())
        await until(lambda: not may())
        await cluster.save_policy(None, await version())
        await until(may)
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_a_channel_is_what_its_document_says() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        authorizer = Authorizer()
        follower = PolicyFollower(Cluster(tree.connect()), authorizer)
        grant = Grant(names=(Pattern("app"),), may=(Verb.APPEND,), partitions=Parts("3,orders"))
        await cluster.save_policy(PolicyDocument(grants=(grant,)), NO_VERSION)
        await follower.read()
        following = asyncio.create_task(follower.reconciler.run())

        def partitions() -> list[int]:
            return [number for number in range(4) if authorizer.rights(APP).may_append(number)]

        assert partitions() == [3], "a channel that is not there grants nothing"
        ranges = {"orders": Ranges("0-1"), "other": Ranges("2")}
        channels = ChannelsDocument(channels=ranges, keys={"orders": KeyHash("blake2b:0-1")})
        await save_channels(cluster.coordinator, channels, NO_VERSION, policy=0)
        await until(lambda: partitions() == [0, 1, 3])
        assert authorizer.channels(authorizer.rights(APP)) == (Channel("orders", "0-1", "blake2b:0-1"),), (
            "it is not told of what it may not see"
        )
        await save_channels(cluster.coordinator, ChannelsDocument(channels={"orders": Ranges("2")}), 0, policy=0)
        await until(lambda: partitions() == [2, 3])
        await cluster.coordinator.commit([Set(CHANNELS, b"nonsense", 1)])
        await until(lambda: follower.trouble != "")
        assert partitions() == [2, 3], "the last good one stays"
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_one_that_was_taken_away_and_written_anew_has_the_same_version() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        authorizer = Authorizer()
        follower = PolicyFollower(cluster, authorizer)
        await cluster.save_policy(document("app"), NO_VERSION)
        await follower.read()
        assert authorizer.rights(APP).may_append(0)
        await cluster.save_policy(None, 0)
        await cluster.save_policy(document("other"), NO_VERSION)
        await follower.read()
        assert not authorizer.rights(APP).may_append(0)

    timeless.run(work())


def test_a_server_that_starts_with_one_it_cannot_read_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        await cluster.save_policy(document("app"), NO_VERSION)
        await cluster.coordinator.commit([Set(POLICY, b'{"schema": 9, "grants": []}', 0)])
        authorizer = Authorizer()
        follower = PolicyFollower(cluster, authorizer)
        for _ in range(2):
            await follower.read()
        assert caplog.text.count("only operators are admitted") == 1
        with pytest.raises(PolicyUnreadable, match="schema 9"):
            authorizer.rights(APP)
        assert authorizer.rights(Identity(KEY, Role.OPERATOR, "ann").uri).may_append(0)
        await cluster.save_policy(document("app"), await cluster.policy_version())
        await follower.read()
        assert authorizer.rights(APP).may_append(0)

    timeless.run(work())


def test_two_operators_at_once() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        await cluster.save_policy(document("app"), NO_VERSION)
        for policy, version in ((document("b"), NO_VERSION), (document("b"), 1), (None, 1)):
            with pytest.raises(ChangedMeanwhile):
                await cluster.save_policy(policy, version)
        assert await cluster.policy() == (document("app"), 0)

    timeless.run(work())


def test_a_coordinator_that_lost_everything_took_no_policy_away() -> None:
    """Only where the cluster is still written down is no document a policy, by which everybody may do everything."""

    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        await cluster.save_policy(document("other"), NO_VERSION)
        authorizer, own = Authorizer(), tree.connect()
        follower = PolicyFollower(Cluster(own), authorizer)
        await follower.read()
        following = asyncio.create_task(follower.reconciler.run())
        tree._entries = {}
        own.expire()
        await until(lambda: "no cluster at this root" in follower.reconciler.trouble)
        assert not authorizer.rights(APP).may_append(0)
        await Cluster.create(cluster.coordinator, META)
        await until(lambda: authorizer.rights(APP).may_append(0))
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_a_coordinator_that_is_away_leaves_the_policy_that_was_read_last() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        await cluster.save_policy(document("app"), NO_VERSION)
        authorizer, own = Authorizer(), tree.connect()
        follower = PolicyFollower(Cluster(own), authorizer)
        await follower.read()
        following = asyncio.create_task(follower.reconciler.run())
        own.disconnect()
        await cluster.save_policy(document("other"), 0)
        for _ in range(100):
            await asyncio.sleep(0)
            assert authorizer.rights(APP).may_append(0)
        own.reconnect()
        await asyncio.sleep(60)
        assert not authorizer.rights(APP).may_append(0)
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())
