"""A whole cluster of real processes that are killed, paused and cut off while clients race; every story ends with the
checker's verdict on what they saw, on what the owners give, and on what each storage holds."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.process.cluster import Cluster
from tests.process.race import Race
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.client.pending import IS_COMMITTED
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Reason, Rejected, write_lock

PARTITIONS = 4
RACED = (0, 1, 2)
QUIET = 3
"""The partition for stories that are not recorded: the checker must know everything that is in the others."""
LOCK = [write_lock("X")]
SESSION_SECONDS = 40
"""Of the coordinator, where the test must not wait for its end."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.make(tmp_path_factory.mktemp("cluster"), partitions=PARTITIONS, session_seconds=2)
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Everything runs and every partition is open."""
    run(shared.heal())
    return shared


def race(cluster: Cluster, folder: tuple[Path, str], story: Callable[[Race], Awaitable[None]], *, clients: int = 3) -> None:
    """Race while the story is told; then everything is mended, and the checker judges."""

    async def tell() -> None:
        racing = Race(folder[0], cluster.server_addresses, tag=folder[1], partitions=RACED, clients=clients)
        async with racing.running():
            await racing.more(50)
            await story(racing)
            await cluster.heal()
            await racing.more(50)
        verdict = await racing.verdict(cluster.storage_addresses, cluster.key)
        assert verdict.is_sound, str(verdict)
        assert racing.failures == [], "a fault of a minority is no fault of the application"
        print(verdict)

    run(tell())


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history")


@pytest.fixture
def folder(histories: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """Where all histories of this cluster are, and the name of this one."""
    return histories, request.node.name


@pytest.mark.parametrize("times", [2])
def test_the_owner_is_killed(cluster: Cluster, folder: tuple[Path, str], times: int) -> None:
    """Submits wait and none fails, where the original gave up after ten seconds (waltz-original 5.5-7)."""

    async def story(race: Race) -> None:
        for _ in range(times):
            name = await cluster.owner(0)
            cluster.kill(name)
            await race.more(100)
            cluster.spawn(name)
            await race.more(100)

    race(cluster, folder, story)


@pytest.mark.parametrize("lease_ms", [pytest.param(0, marks=pytest.mark.long), 50])
def test_killed_servers_are_replaced_before_the_coordinator_misses_them(tmp_path: Path, lease_ms: int) -> None:
    """The sessions of the coordinator outlast the test: what it forgets plays no part. A server that is only paused is
    replaced by nobody."""
    cluster = Cluster.make(
        tmp_path, partitions=PARTITIONS, servers=3, session_seconds=SESSION_SECONDS, read_lease_ms=lease_ms
    )

    async def owners() -> list[str]:
        return [await cluster.owner(number) for number in range(PARTITIONS)]

    async def append(client: Client) -> None:
        for number in range(PARTITIONS):
            while not isinstance(await client.append(b"x", partition=number), Committed):
                pass  # what was under way when its owner died is lost, or unknown

    async def story() -> None:
        await cluster.settled()
        async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            await append(client)
            before = await owners()
            cluster.pause(before[0])
            await asyncio.sleep(3.0)
            found = await cluster.local.snapshot()
            assert [view.owner for view in found.partitions[:PARTITIONS]] == before, "silence is no suspicion"
            cluster.resume(before[0])
            for is_leader in (False, True):
                await cluster.settled()
                found = await cluster.local.snapshot()
                name = next(name for name in await owners() if (name == found.leader) is is_leader)
                cluster.kill(name)
                clock = asyncio.get_running_loop()
                began = clock.time()
                await append(client)
                marks = [await client.end_position(number) for number in range(PARTITIONS)]
                assert marks == [await client.end_position(number, confirmed=False) for number in range(PARTITIONS)]
                print(f"{name} is killed, leader: {is_leader}; silence {clock.time() - began:.3f} s")
                assert name not in await owners()
                assert clock.time() - began < SESSION_SECONDS / 2, "the coordinator goes on believing that it is there"
                cluster.spawn(name)

    cluster.start()
    try:
        run(story())
    finally:
        cluster.close()


@pytest.mark.parametrize("storages", [slice(1), pytest.param(slice(3), marks=pytest.mark.long)], ids=["one", "each"])
def test_a_storage_is_killed_and_comes_back(cluster: Cluster, folder: tuple[Path, str], storages: slice) -> None:
    async def story(race: Race) -> None:
        for name in cluster.storage_names[storages]:
            cluster.kill(name)
            await race.more(100)
            cluster.spawn(name)
            await cluster.settled()

    race(cluster, folder, story)


def test_the_coordinator_is_killed_and_the_servers_go_on(cluster: Cluster, folder: tuple[Path, str]) -> None:
    async def story(race: Race) -> None:
        cluster.kill("zookeeper")
        await race.more(100)
        cluster.spawn("zookeeper")
        await race.more(100)

    race(cluster, folder, story)


def test_a_paused_owner_comes_back_and_nothing_of_it_is_taken(cluster: Cluster, folder: tuple[Path, str]) -> None:
    async def story(race: Race) -> None:
        name = await cluster.owner(0)
        cluster.pause(name)
        await race.more(100)
        assert await cluster.owner(0) != name
        cluster.resume(name)
        await race.more(100)

    race(cluster, folder, story)


async def taken(client: Client, payload: bytes, mark: int) -> int:
    """The id of a transaction that writes the lock, for a client that has seen everything up to `mark`, and looks again
    when it is refused: it was lost in a fail-over, or a new owner does not know the lock."""
    outcome = await client.append(payload, partition=QUIET, locks=LOCK, position=mark)
    while isinstance(outcome, Rejected):
        mark = await client.end_position(QUIET)
        outcome = await client.append(payload, partition=QUIET, locks=LOCK, position=mark)
    assert isinstance(outcome, Committed)
    return outcome.id


def test_a_lock_that_another_owner_marked_is_not_forgotten(cluster: Cluster) -> None:
    """The original kept its lock table over a pause and lost an update (waltz-original 5.5-1)."""

    async def tell() -> None:
        async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            first = await taken(client, b"one", await client.end_position(QUIET))
            name = await cluster.owner(QUIET)
            cluster.pause(name)
            second = await taken(client, b"two", first)
            other = await cluster.owner(QUIET)  # once the paused one is back, it may be given the partition at any moment
            assert other != name
            cluster.resume(name)
            cluster.kill(other)
            await cluster.owned_by(QUIET, name)
            stale = await client.append(b"three", partition=QUIET, locks=LOCK, position=first)
            while isinstance(stale, Rejected) and stale.reason is Reason.NOT_IN_LOG:
                stale = await client.append(b"three", partition=QUIET, locks=LOCK, position=first)
            assert isinstance(stale, Rejected)
            assert stale.conflict_id >= second

    run(tell())


def test_requests_in_flight_are_found_by_their_ids_and_not_by_counting(cluster: Cluster, folder: tuple[Path, str]) -> None:
    """The original declared a commit that was none, and fed it (waltz-original 5.5-2)."""

    async def story(race: Race) -> None:
        name = await cluster.owner(0)
        for storage in cluster.storage_names:
            cluster.pause(storage)
        await asyncio.sleep(0.5)
        cluster.pause(name)
        for storage in cluster.storage_names:
            cluster.resume(storage)
        await race.more(100)
        cluster.resume(name)
        await race.more(100)
        other = await cluster.owner(0)
        cluster.kill(other)
        await race.more(100)
        cluster.spawn(other)

    race(cluster, folder, story)


def test_reads_go_on_while_a_storage_hangs(cluster: Cluster) -> None:
    """In the original two of nine cold reads were never answered (waltz-original 5.5-5)."""

    async def tell() -> None:
        async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            ids = await kept(client, [b"%d" % n for n in range(500)])
            for name in cluster.storage_names:
                cluster.pause(name)
                for number in range(0, 500, 100):
                    assert (await client.read(QUIET, ids[number])).payload == b"%d" % number
                await kept(client, [b"more"])
                cluster.resume(name)

    run(tell())


async def kept(client: Client, payloads: list[bytes]) -> list[int]:
    """The ids of all of them. What a fail-over lost is appended again."""
    ids = np.full(len(payloads), -1)
    while (left := np.flatnonzero(ids < 0)).size:
        outcomes = await client.append_many([payloads[row] for row in left], partition=QUIET)
        assert set(outcomes.reasons.tolist()) <= {IS_COMMITTED, Reason.NOT_IN_LOG}
        ids[left] = outcomes.ids
    return [int(id_) for id_ in ids]


def test_a_planned_hand_over_loses_nothing(cluster: Cluster, folder: tuple[Path, str]) -> None:
    async def story(race: Race) -> None:
        name = await cluster.owner(0)
        cluster.send(name, signal.SIGTERM)
        await race.more(100)
        await cluster.gone(name)
        cluster.spawn(name)
        await race.more(100)
        assert race.lost == 0, "what the old owner did not take goes to the new one"

    race(cluster, folder, story)
