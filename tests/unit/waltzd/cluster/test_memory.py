"""The coordinator in memory keeps to the contract, and does what a test asks of it, deterministically."""

from __future__ import annotations

import asyncio

import pytest

from tests.coordinator_contract import STORIES, Story, tell
from waltzd.cluster.coordinator import Coordinator, Create, Set
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import CannotConnect


class MemoryWorld:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.elsewhere = MemoryTree()

    async def connect(self) -> Coordinator:
        coordinator = self.tree.connect()
        if await coordinator.get("/") is None:
            await coordinator.commit([Create("/", b"")])
        return coordinator

    async def connect_elsewhere(self, root: str) -> Coordinator:
        return self.elsewhere.connect()

    async def connect_as(self, credentials: str | None, root: str) -> Coordinator:
        return self.elsewhere.connect(credentials)

    async def expire(self, coordinator: Coordinator) -> None:
        assert isinstance(coordinator, MemoryCoordinator)
        coordinator.expire()

    async def interrupt(self, coordinator: Coordinator) -> None:
        assert isinstance(coordinator, MemoryCoordinator)
        coordinator.disconnect()

    async def resume(self, coordinator: Coordinator) -> None:
        assert isinstance(coordinator, MemoryCoordinator)
        coordinator.reconnect()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_contract(story: Story) -> None:
    asyncio.run(tell(story, MemoryWorld()))


def a_tree() -> tuple[MemoryCoordinator, MemoryCoordinator]:
    tree = MemoryTree()
    return tree.connect(), tree.connect()


def test_a_session_that_expires_out_of_contact_learns_of_it_later() -> None:
    async def work() -> None:
        one, two = a_tree()
        await one.commit([Create("/", b""), Create("/e", b"", ephemeral=True)])
        one.disconnect()
        one.expire()
        assert await two.get("/e") is None  # everybody else knows
        assert one.session == 1
        one.reconnect()
        assert one.session == 2

    asyncio.run(work())


def test_an_answer_that_is_lost_leaves_a_change_that_was_made() -> None:
    async def work() -> None:
        one, two = a_tree()
        await one.commit([Create("/", b"")])
        one.lose_answer()
        with pytest.raises(CannotConnect):
            await one.commit([Set("/", b"made", 0)])
        node = await two.get("/")
        assert node is not None
        assert (node.data, node.version) == (b"made", 1)
        await one.commit([Set("/", b"again", 1)])

    asyncio.run(work())


@pytest.mark.parametrize(("loses_at", "version"), [(0, None), (1, 0), (2, 0)])
def test_contact_can_be_lost_on_the_way_there_and_back(loses_at: int, version: int | None) -> None:
    """Before the call, while it is under way, and while its answer is: only the last two can have changed something."""

    async def work() -> None:
        crossings = 0

        async def pause() -> None:
            nonlocal crossings
            crossings += 1
            if crossings == loses_at:
                one.disconnect()

        tree = MemoryTree(pause)
        one = tree.connect()
        if loses_at == 0:
            one.disconnect()
        with pytest.raises(CannotConnect):
            await one.commit([Create("/", b"")])
        node = await tree.connect().get("/")
        assert (node and node.version) == (version if loses_at == 2 else None)

    asyncio.run(work())
