"""An owner that was replaced and does not know it yet is never believed again; whoever opens has patience."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast
from uuid import UUID

import pytest

from tests.unit.timeless import run
from waltzd.client.routes import Routes
from waltzd.cluster.groups import GroupPort
from waltzd.errors import CannotConnect, NotGranted, NotReady
from waltzd.errors.operations import NotOwner
from waltzd.protocol.batches import INTRODUCTION, Introduction, PartitionLocation, Registration, ServerAddress, Topology

KEY = UUID(int=1)


class Server:
    """Knows one partition, of one owner."""

    def __init__(self, owner: str, generation: int) -> None:
        self.place = PartitionLocation(generation=generation, server=owner, address=f"{owner}:1")
        self.is_silent = False
        self.refusals = 0
        self.asked = 0
        self.introductions: list[Introduction] = []
        self.epoch = 0

    async def locate(self) -> Topology:
        self.asked += 1
        if self.is_silent:
            raise CannotConnect("no answer")
        return Topology(
            cluster="c",
            cluster_key=KEY,
            places=(self.place,),
            servers=(ServerAddress("a", "a:1"), ServerAddress("b", "b:1")),
        )

    def expect(self, name: str | None, streams: str = "") -> None:
        pass

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        if self.refusals:
            self.refusals -= 1
            raise CannotConnect("the coordinator does not answer")
        self.introductions.append(introduction)
        return Registration(7, b"token", self.epoch)

    async def close(self) -> None:
        return None


def whereabouts(servers: dict[str, Server]) -> Routes:
    def connect(address: str, key: UUID | None) -> GroupPort:
        return cast(GroupPort, servers[address])

    return Routes(list(servers), connect, call_seconds=1.0)


def test_a_partition_that_is_hidden_is_refused_at_once_and_asked_for_again() -> None:
    async def test() -> None:
        servers = {"a:1": Server("a", 1)}
        known = servers["a:1"].place
        servers["a:1"].place = PartitionLocation(generation=1, server=None, address=None, is_hidden=True)
        where = whereabouts(servers)
        await where.open(5)
        with pytest.raises(NotGranted, match="grants this client nothing in partition 0"):
            await where.find(0)
        servers["a:1"].place = known
        assert await where.find(0) == known, "it was granted meanwhile"
        await where.close()

    run(test())


def test_what_is_older_than_what_was_known_is_not_taken() -> None:
    async def test() -> None:
        servers = {"a:1": Server("a", 1), "b:1": Server("b", 2)}
        where = whereabouts(servers)
        await where.open(5)
        assert (await where.find(0)).address == "a:1"
        servers["a:1"].is_silent = True
        await where.look_up()
        place = await where.find(0)
        assert place.address == "b:1"
        where.forget(0, place)
        servers["a:1"].is_silent = False
        servers["b:1"].is_silent = True
        with pytest.raises((CannotConnect, NotReady)):
            await where.find(0)
        servers["b:1"].is_silent = False
        assert (await where.find(0)).address == "b:1"
        await where.close()

    run(test())


def test_a_partition_that_moved_is_noticed_although_its_old_owner_says_nothing() -> None:
    async def test() -> None:
        servers = {"a:1": Server("a", 1), "b:1": Server("a", 1)}
        servers["b:1"].place = servers["a:1"].place
        where = whereabouts(servers)
        await where.open(5)
        where.keep_fresh()
        place = await where.find(0)
        waiting = asyncio.create_task(where.replaced(0, place))
        await asyncio.sleep(5)
        assert not waiting.done()
        servers["a:1"].is_silent = True
        servers["b:1"].place = PartitionLocation(generation=2, server="b", address="b:1")
        async with asyncio.timeout(10):
            assert (await waiting).address == "b:1"
        await where.close()

    run(test())


def test_a_client_id_is_waited_for_while_the_coordinator_is_away() -> None:
    """An application that starts while ZooKeeper elects a leader starts a little later, and does not fail."""

    async def test() -> None:
        servers = {"a:1": Server("a", 1), "b:1": Server("b", 1)}
        where = whereabouts(servers)
        await where.open(5)
        servers["a:1"].refusals = servers["b:1"].refusals = 3
        assert await where.register(60) == Registration(7, b"token")
        servers["a:1"].refusals = servers["b:1"].refusals = 1_000_000
        with pytest.raises(CannotConnect, match="no client id was given out in 5 seconds"):
            await where.register(5)
        await where.close()

    run(test())


def test_a_server_that_went_while_another_one_is_being_closed() -> None:
    class Port:
        def expect(self, name: str | None, streams: str = "") -> None:
            pass

        async def locate(self) -> Topology:
            place = PartitionLocation(generation=1, server="a", address="a:1")
            return Topology(
                cluster="c",
                cluster_key=KEY,
                places=(place,),
                servers=tuple(ServerAddress(name, f"{name}:1") for name in names),
            )

        async def close(self) -> None:
            await asyncio.sleep(0.01)

    names = ["a", "b", "c"]

    async def work() -> None:
        where = Routes(["a:1"], lambda address, key: cast(GroupPort, Port()), call_seconds=2)
        await where.open(5)
        async with where.at("b:1"):
            pass
        left = asyncio.Event()

        async def use() -> None:
            async with where.at("c:1"):
                await left.wait()
                raise CannotConnect("it went")

        using = asyncio.create_task(use())
        await asyncio.sleep(0)
        names[:] = ["a"]
        looking = asyncio.create_task(where.look_up())
        await asyncio.sleep(0.005)  # b's port is being closed
        left.set()
        await asyncio.gather(using, return_exceptions=True)
        await looking
        await where.close()

    run(work())


def test_a_hint_of_an_older_generation_is_not_taken() -> None:
    async def test() -> None:
        where = whereabouts({"b:1": Server("b", 2)})
        await where.open(5)
        where.hint(0, NotOwner("it belongs to a", owner="a", address="a:1", generation=1))
        assert (await where.find(0)).address == "b:1"
        where.hint(0, NotOwner("it belongs to a", owner="a", address="a:1", generation=3))
        assert (await where.find(0)).address == "a:1"
        await where.close()

    run(test())


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_that_was_given_once_goes_with_the_next_registration(epoch: int) -> None:
    async def test() -> None:
        server = Server("a", 1)
        server.epoch = epoch
        introduction = Introduction(instance="box:1", is_exclusive=epoch > 0)
        where = Routes(["a:1"], lambda address, key: cast(GroupPort, server), call_seconds=1.0, introduction=introduction)
        await where.open(5)
        found = [await where.register(5), await where.register(5)]
        first, second = server.introductions
        assert first == introduction
        assert second == replace(introduction, before=found[0] if epoch else None)
        await where.close()

    run(test())
