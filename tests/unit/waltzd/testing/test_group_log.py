"""The group log of a cluster: made while it runs, hidden from applications, and kept as safe as any partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from tests.unit import timeless
from waltzd.client.client import Client
from waltzd.client.view import Transaction
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Assignment
from waltzd.errors import BadArgument, NoSuchPartition, Trimmed
from waltzd.errors.operations import GroupLogClosed
from waltzd.protocol.locks import Committed, Rejected
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients import pipeline
from waltzd.server.core import archive
from waltzd.server.groups.state_log import lock_of
from waltzd.server.session import settings
from waltzd.server.session.settings import SessionSettings
from waltzd.server.subscriptions.group_log import GroupLogClient
from waltzd.testing import LocalCluster
from waltzd.testing import cluster as cluster_of_one_process


def told(**size: Any) -> Callable[[Callable[[LocalCluster], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """A test that tells a story of such a cluster."""

    def of(story: Callable[[LocalCluster], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        return lambda: timeless.run_cluster(LocalCluster(**size), story)

    return of


class Entries:
    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.reach = -1
        self.changed = asyncio.Event()

    def position(self, partition: int) -> int:
        return self.reach

    def apply(self, transaction: Transaction[Any]) -> None:
        self.reach = transaction.id
        self.payloads.append(transaction.payload)
        self.changed.set()

    async def wait(self, count: int) -> list[bytes]:
        async with asyncio.timeout(30):
            while len(self.payloads) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.payloads


def as_server(cluster: LocalCluster, **settings: Any) -> GroupLogClient[bytes]:
    identity = Identity(cluster.meta.key, Role.SERVER, "server-1")
    return GroupLogClient(cluster.servers, connect=lambda at, key: cluster._port(at, key, identity), **settings)


@told(partitions=2, groups=False)
async def test_a_cluster_gets_its_group_log_while_it_runs(cluster: LocalCluster) -> None:
    async with cluster.client() as application:
        with pytest.raises(NoSuchPartition):
            cluster._living()[0].owner.pipeline(2, None)
        entries = Entries()
        async with as_server(cluster, view=entries) as early:  # it waits for what does not exist yet
            await cluster.make_group_log()
            assert isinstance(await early.append(b"made", partition=early.number), Committed)
            assert await entries.wait(1) == [b"made"]
        assert isinstance(await application.append(b"hello", partition=1), Committed)
        assert application.partition_count == 2
        assert len(application.topology.places) == 2
        await cluster.make_group_log()  # once more: nothing to do


@told(partitions=2, storage_seconds=1.0)
async def test_it_keeps_what_was_acknowledged_through_the_loss_of_its_owner_and_of_a_storage(cluster: LocalCluster) -> None:
    cluster.pause_storage(0)
    async with as_server(cluster) as client:
        for number in range(10):
            await client.append(b"%d" % number, partition=client.number)
    cluster.resume_storage(0)
    cluster.pause_storage(1)
    await cluster.start_server(await cluster.kill_owner(2))
    await cluster.wait_until_ready()
    entries = Entries()
    async with as_server(cluster, view=entries) as client:
        assert await entries.wait(10) == [b"%d" % number for number in range(10)]
        assert await client.end_position(client.number) == 9
    cluster.resume_storage(1)


@told(partitions=1)
async def test_the_lock_of_a_group_refuses_who_has_not_read_on(cluster: LocalCluster) -> None:
    async with as_server(cluster) as client:
        lock = lock_of("mailer", 0)
        first = await client.append(b"first", partition=1, locks=[lock], position=-1)
        assert isinstance(first, Committed)
        late = await client.append(b"late", partition=1, locks=[lock], position=-1)
        assert isinstance(late, Rejected)


@told(partitions=2)
async def test_applications_are_refused_and_not_told_where_it_is(cluster: LocalCluster) -> None:
    async with cluster.client(name="billing") as application:
        assert application.topology.groups is None
        with pytest.raises(BadArgument, match="there is no partition 2"):
            await application.append(b"", partition=2)
    mine = cluster.connect_as("billing")
    port = mine(cluster.servers[0], cluster.meta.key)
    with pytest.raises(GroupLogClosed):
        await port.high_water_mark(2)
    with pytest.raises(GroupLogClosed):
        await anext(aiter(port.fetch(2, 0)))


@told(partitions=2)
async def test_without_certificates_the_library_refuses(cluster: LocalCluster) -> None:
    async with cluster.client() as application:
        assert application.topology.groups is not None
        with pytest.raises(BadArgument, match="there is no partition 2"):
            await application.end_position(2)
        with pytest.raises(BadArgument, match="there is no partition 2"):
            await application.append(b"", partition=2)


@told(partitions=2)
async def test_a_server_is_a_client_of_the_group_log_alone(cluster: LocalCluster) -> None:
    async with as_server(cluster) as client:
        with pytest.raises(BadArgument, match="for the group log, 2"):
            await client.append(b"", partition=1)
        identity = Identity(cluster.meta.key, Role.SERVER, "server-1")
        other: Client[bytes] = Client(cluster.servers, connect=lambda at, key: cluster._port(at, key, identity))
        async with other:
            with pytest.raises(GroupLogClosed):
                await other.end_position(1)


@told(partitions=2)
async def test_servers_follow_an_assignment_that_has_lost_it(cluster: LocalCluster) -> None:
    """As after documents that were put back from a time before there was one."""
    documents = Cluster(cluster.tree.connect())
    assignment, version = await documents.assignment()
    await documents.save_assignment(Assignment(owners=assignment.owners[:2]), version)
    async with asyncio.timeout(30):
        while any(2 in server.owner.owned for server in cluster._living()):
            await asyncio.sleep(0.01)
    for server in cluster._living():
        with pytest.raises(NoSuchPartition):
            server.owner.pipeline(2, None)


def test_a_client_begins_where_the_trimmed_log_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through real sessions, a mount and reads by id: who begins too low is told where to begin."""
    monkeypatch.setattr(settings, "GROUP_SESSION_BYTES", 20_000)
    monkeypatch.setattr(pipeline, "GROUP_SEGMENT_BYTES", 10_000)
    monkeypatch.setattr(archive, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(
        cluster_of_one_process, "SessionSettings", partial(SessionSettings, trim_seconds=0.02, tail_bytes_max=4_000)
    )

    async def story(cluster: LocalCluster) -> None:
        async with as_server(cluster) as client:
            assert await client.first_id() == 0
            for server in cluster._living():
                server.owner.needed_from = lambda: 15  # within the second segment: one segment is trimmed, and no more
            await written(client, 60)
            async with asyncio.timeout(60):
                while (first_id := await client.first_id()) == 0:
                    await written(client, 10)  # a session that ends moves the low marks
            assert 0 < first_id <= 15
            found = await client.read_some(client.number, after=first_id - 1)
            assert found[0].id == first_id
            with pytest.raises(Trimmed) as caught:
                await client.read_some(client.number)
            assert caught.value.number("floor") == first_id
            entries = Entries()
            async with as_server(cluster, view=entries) as late:
                async with asyncio.timeout(60):
                    while not isinstance(late._clients[2].stopped, Trimmed):
                        await asyncio.sleep(0.01)
            entries.reach = first_id - 1
            async with as_server(cluster, view=entries):
                await entries.wait(len(found))

    LocalCluster(partitions=2).run(story)


async def written(client: GroupLogClient[bytes], count: int) -> None:
    for _ in range(count):
        await client.append(b"x" * 1000, partition=client.number)
