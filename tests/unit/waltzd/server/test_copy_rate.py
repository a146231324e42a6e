"""How fast replicas copy: what a command of an operator says, what servers make of it, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzctl.placement.mover import MoveOptions, Moving, Throttle
from waltzctl.shell.options import command_of
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, CopyRate
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import BadArgument
from waltzd.errors.operations import NodeMissing
from waltzd.server.reconcile import CopyRateLimit

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")
MB = 1_000_000


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):  # the clock stands still meanwhile
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize(("configured", "bounded"), [(0, 10 * MB), (64 * MB, 10 * MB), (MB, MB)])
def test_a_bound_lasts_as_long_as_the_session_that_set_it(configured: int, bounded: int) -> None:
    """However the command ends: nobody has to take it back."""

    async def work() -> None:
        tree = MemoryTree()
        pace = CopyRateLimit(await Cluster.create(tree.connect(), META), configured)
        watching = asyncio.create_task(pace.reconciler.run())
        command = tree.connect()
        assert pace.bytes_per_second == configured
        await Throttle(Cluster(command), 10 * MB).share(1)
        await until(lambda: pace.bytes_per_second == bounded)
        command.expire()
        await until(lambda: pace.bytes_per_second == configured)
        watching.cancel()
        await asyncio.wait([watching])

    timeless.run(work())


def test_a_bound_on_moves_outlives_the_command_until_it_is_lifted() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        command = tree.connect()
        await Throttle(Cluster(command), 10 * MB, lasts=True).share(2)
        command.expire()
        found = await cluster.copy_rate()
        assert found is not None
        assert found.bytes_per_second == 5 * MB, "owners go on copying when a tool was killed, and not faster"
        for _ in range(2):
            await Throttle(cluster, None).lift()
            assert await cluster.copy_rate() is None

    timeless.run(work())


def test_what_is_copied_at_once_shares_it() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        throttle = Throttle(cluster, 10 * MB)

        async def each() -> int | None:
            found = await cluster.copy_rate()
            return None if found is None else found.bytes_per_second

        await throttle.share(0)
        assert await each() is None, "nobody copies"
        await throttle.share(4)
        assert await each() == 2_500_000
        await throttle.share(1)
        assert await each() == 10 * MB
        await throttle.share(100 * MB)
        assert await each() == 1, "never without a bound"
        await Throttle(cluster, None).share(1)
        assert await each() == 1, "a command that says nothing changes nothing"

    timeless.run(work())


def test_the_last_one_counts_and_is_said_again_to_a_new_session() -> None:
    async def work() -> None:
        tree = MemoryTree()
        await Cluster.create(tree.connect(), META)
        first, second = tree.connect(), tree.connect()
        killed, running = Throttle(Cluster(first), MB), Throttle(Cluster(second), 2 * MB)
        await killed.share(1)
        await running.share(1)
        found = await Cluster(first).copy_rate()
        assert found is not None
        assert found.bytes_per_second == 2 * MB
        assert "@" in found.who
        first.expire()
        assert await Cluster(second).copy_rate() == found
        second.expire()
        second.reconnect()
        assert await Cluster(second).copy_rate() is None
        await running.share(1)
        assert await Cluster(second).copy_rate() == found

    timeless.run(work())


def test_two_at_the_same_moment_and_a_cluster_that_is_gone() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        rates = [CopyRate(bytes_per_second=number, who="a@b") for number in range(1, 9)]
        await asyncio.gather(*(Cluster(tree.connect()).set_copy_rate(rate) for rate in rates))
        assert await cluster.copy_rate() in rates
        await cluster.delete()
        with pytest.raises(NodeMissing):
            await cluster.set_copy_rate(rates[0])

    timeless.run(work())


def options_of(*words: str) -> MoveOptions:
    found: list[MoveOptions] = []

    def move(*, options: Moving) -> int:
        found.append(options)
        return 0

    command_of("move", move).main(list(words), standalone_mode=False)
    return found[0]


def test_how_it_is_typed() -> None:
    assert options_of() == MoveOptions()
    assert options_of("--rate", "50MB", "--timeout", "3") == MoveOptions(timeout=3, bytes_per_second=50 * MB)
    assert options_of("--rate", "1MiB/s").bytes_per_second == 1 << 20
    for wrong in ("fast", "0", "-1MB"):
        with pytest.raises(BadArgument, match="--rate"):
            options_of("--rate", wrong)
