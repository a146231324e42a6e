"""A cluster in one process: what applications can make go wrong there, and that nothing true is lost by it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from tests.checker.history import Writer, load
from tests.checker.recorder import Recorder, log_records
from tests.checker.verdict import Verdict, judge
from tests.examples import bank, counter
from tests.examples.counter import CounterView
from tests.unit import timeless
from tests.unit.told import told
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Builder, Command, View
from waltzd.errors import BadArgument, BeyondLog, NoSuchChannel, NotGranted
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed, Outcome, Reason, Rejected, append_lock, write_lock
from waltzd.protocol.policy import Amount, Quotas
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.registry import principal_of
from waltzd.sql import sqlite
from waltzd.testing import LocalCluster


class Plus(Command):
    """Adds one to the counter, under a WRITE lock, and remembers what it was told."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.attempts = 0
        self.failures: list[Rejected] = []
        self.applied = asyncio.Event()

    def partition(self, count: int) -> int:
        return 0

    def build(self, builder: Builder) -> bool:
        self.attempts += 1
        builder.locks = [write_lock("counter")]
        builder.payload = b'{"add": 1, "attempt": %d}' % next(self.numbers)
        return True

    def on_lock_failure(self, rejected: Rejected) -> None:
        self.failures.append(rejected)

    def on_applied(self, id: int) -> None:
        self.applied.set()


def with_cluster(story: Callable[[LocalCluster], Coroutine[Any, Any, None]], **size: Any) -> None:
    timeless.run_cluster(LocalCluster(**size), story)


# -- as it is ----------------------------------------------------------------------------------------------------------


@told(with_cluster)
async def test_what_is_appended_is_fed_and_logged(cluster: LocalCluster) -> None:
    view = CounterView()
    async with cluster.client(view=view) as client:
        assert await client.submit(Plus()) == Committed(0)
        assert await client.submit(Plus()) == Committed(1)
        await view.reached(1)
    assert view.value == 2
    assert [record.id for record in await cluster.log()] == [0, 1]


@told(with_cluster, partitions=4)
async def test_partitions_spread_over_servers(cluster: LocalCluster) -> None:
    assert {cluster.owner(partition) for partition in range(4)} == {"server-1", "server-2"}
    async with cluster.client() as client:
        for partition in range(4):
            assert await client.append(b"x", partition=partition) == Committed(0)


@told(with_cluster, servers=1, storages=1)
async def test_one_of_everything_is_enough(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        assert await client.append(b"x", partition=0) == Committed(0)


# -- bad luck ----------------------------------------------------------------------------------------------------------


@told(with_cluster)
async def test_a_lock_that_is_made_to_fail_is_tried_again(cluster: LocalCluster) -> None:
    async with cluster.client(view=CounterView()) as client:
        cluster.force_next_lock_failure(times=2)
        command = Plus()
        assert await client.submit(command) == Committed(0)
        assert command.attempts == 3
        assert [failure.reason for failure in command.failures] == [Reason.TOO_FAR_BEHIND, Reason.TOO_FAR_BEHIND]
        assert command.failures[0].lock == write_lock("counter").hash
    assert len(await cluster.log()) == 1


@told(with_cluster)
async def test_only_a_transaction_that_checks_a_lock_can_be_made_to_fail(cluster: LocalCluster) -> None:
    async with cluster.client(view=CounterView(), partitions=[0]) as client:
        cluster.force_next_lock_failure()
        locks = [[], [write_lock("a")], [write_lock("b")]]
        outcomes = await client.append_many([b'{"add": 1}'] * 3, partition=0, locks=locks)
        kinds = [type(outcomes[row]) for row in range(3)]
        assert kinds == [Committed, Rejected, Committed]
    assert len(await cluster.log()) == 2


@told(with_cluster)
async def test_a_view_learns_nothing_while_the_feed_is_suspended(cluster: LocalCluster) -> None:
    view = CounterView()
    async with cluster.client(view=view) as client:
        cluster.suspend_feed()
        command = Plus()
        assert await client.submit(command) == Committed(0)
        await client.flush()
        assert (view.value, command.applied.is_set()) == (0, False)
        # Another one of this client cannot get past its own lock now: it has not seen what it wrote.
        second = asyncio.create_task(client.submit(Plus()))
        await client.end_position(0)
        cluster.resume_feed()
        assert await second == Committed(1)
        await view.reached(1)
        assert view.value == 2


@told(with_cluster)
async def test_an_answer_that_is_lost_is_found_again_and_nothing_is_sent_twice(cluster: LocalCluster) -> None:
    view = CounterView()
    async with cluster.client(view=view) as client:
        cluster.lose_next_acknowledgement()
        command = Plus()
        assert await client.submit(command) == Committed(0)
        assert command.attempts == 1
        assert await client.submit(Plus()) == Committed(1)
    assert len(await cluster.log()) == 2


@told(with_cluster)
async def test_broken_connections_are_mended(cluster: LocalCluster) -> None:
    view = CounterView()
    async with cluster.client(view=view) as client:
        for _ in range(5):
            await client.submit(Plus())
            cluster.break_connections()
        await client.flush()
        await view.reached(4)
    assert [record.id for record in await cluster.log()] == list(range(5))


@told(with_cluster)
async def test_another_server_takes_over_when_the_owner_dies(cluster: LocalCluster) -> None:
    view = CounterView()
    async with cluster.client(view=view) as client:
        await client.submit(Plus())
        dead = await cluster.kill_owner()
        assert await client.submit(Plus()) == Committed(1)
        assert cluster.owner() != dead
        await cluster.start_server(dead)
        assert dead != await cluster.kill_owner()
        assert await client.submit(Plus()) == Committed(2)
        assert cluster.owner() == dead
        await view.reached(2)
    assert view.value == 3


@told(with_cluster)
async def test_nothing_keeps_a_server_that_was_killed(cluster: LocalCluster) -> None:
    dead = []
    async with cluster.client() as client:
        for number in range(4):
            dead.append(weakref.ref(cluster._running(cluster.owner())))
            await cluster.start_server(await cluster.kill_owner())
            assert await client.append(b"x", partition=0) == Committed(number)
        async with asyncio.timeout(30):
            while any(server() is not None for server in dead):
                await asyncio.sleep(0.01)
                gc.collect()


@told(with_cluster, servers=1)
async def test_a_lone_server_that_is_killed_comes_back(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.append(b"x", partition=0)
        name = await cluster.kill_owner()
        waiting = asyncio.create_task(client.append(b"y", partition=0))
        await cluster.start_server(name)
        assert await waiting == Committed(1)


@told(with_cluster)
async def test_a_server_that_stops_in_order_hands_over(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.append(b"x", partition=0)
        first = cluster.owner()
        await cluster.stop_server(first)
        assert await client.append(b"y", partition=0) == Committed(1)
        assert cluster.owner() != first


@told(with_cluster)
async def test_a_majority_of_storages_is_enough_and_less_is_not(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        cluster.pause_storage(0)
        assert await client.append(b"x", partition=0) == Committed(0)
        cluster.pause_storage(2)
        waiting = asyncio.create_task(client.append(b"y", partition=0))
        with pytest.raises(BeyondLog):
            await client.read(0, 1)
        assert not waiting.done()
        cluster.resume_storage(0)
        assert await waiting == Committed(1)


@told(with_cluster)
async def test_arguments_that_make_no_sense(cluster: LocalCluster) -> None:
    with pytest.raises(BadArgument, match="storages must be at least 1"):
        LocalCluster(storages=0)
    with pytest.raises(BadArgument, match="there is no storage 3"):
        cluster.pause_storage(3)
    for cause in (cluster.force_next_lock_failure, cluster.lose_next_acknowledgement, cluster.break_connections):
        with pytest.raises(BadArgument, match="there is no partition 7"):
            cause(7)
    with pytest.raises(BadArgument, match="at least 1"):
        cluster.force_next_lock_failure(times=0)
    with pytest.raises(BadArgument, match="there is no server 'x'; there are server-1, server-2"):
        await cluster.stop_server("x")
    with pytest.raises(BadArgument, match="runs already"):
        await cluster.start_server("server-1")
    await cluster.kill_server("server-1")
    with pytest.raises(BadArgument, match="does not run"):
        await cluster.kill_server("server-1")


@pytest.mark.parametrize("turns", [1, 2, 5, 10, 20])
@told(with_cluster)
async def test_a_kill_or_a_start_that_nobody_waits_for_is_finished_all_the_same(cluster: LocalCluster, turns: int) -> None:
    async def trouble() -> None:
        await cluster.start_server(await cluster.kill_owner())

    task = asyncio.create_task(trouble())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.wait_until_ready()


def test_a_mistake_in_waltz_does_not_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(settings=ClientSettings(close_seconds=0.01)) as client:
            monkeypatch.setattr("waltzd.server.clients.pipeline.build", lambda *_, **__: 1 // 0)
            asyncio.ensure_future(client.append(b"x", partition=0)).add_done_callback(lambda done: done.exception())
            while not cluster.mistakes:
                await asyncio.sleep(0)

    with pytest.raises(ZeroDivisionError):
        with_cluster(story)


# -- applications, judged by the checker -------------------------------------------------------------------------------


async def judged(cluster: LocalCluster, writer: Writer, folder: Path) -> Verdict:
    for partition in range(cluster.meta.partitions):
        async for run in cluster.runs(partition):
            writer.log(partition, log_records(run), first=run.first_id)
    return judge(load(folder.glob("*.jsonl")))


class Recorded:
    """Clients whose every attempt and every fed transaction is written down."""

    def __init__(self, cluster: LocalCluster, writer: Writer) -> None:
        self._cluster = cluster
        self._writer = writer
        self._names = itertools.count()

    def make(self, view: View) -> Any:
        recorder = Recorder(self._writer, f"client {next(self._names)}")
        client = self._cluster.client(view=recorder.view(view))
        submit = client.submit

        async def recorded_submit(command: Command) -> Outcome:
            return await submit(recorder.command(command))

        client.submit = recorded_submit  # type: ignore[method-assign, assignment]
        return client


async def mischief(cluster: LocalCluster) -> None:
    """One piece of bad luck after the other, each as soon as the applications have got over the one before."""
    for round in itertools.count():
        await a_few_more(cluster)
        match round % 6:
            case 0:
                cluster.lose_next_acknowledgement()
            case 1:
                cluster.force_next_lock_failure(times=2)
            case 2:
                cluster.break_connections()
            case 3:
                cluster.pause_storage(round // 6 % 3)
            case 4:
                for number in range(3):
                    cluster.resume_storage(number)
            case 5:
                await cluster.start_server(await cluster.kill_owner())


async def a_few_more(cluster: LocalCluster) -> None:
    await cluster.wait_until_ready()
    before = cluster.end_position()
    while not cluster.is_ready or cluster.end_position() < before + 3:
        await asyncio.sleep(0.002)


def under_mischief(tmp_path: Path, run: Callable[[Recorded], Coroutine[Any, Any, Any]], **size: Any) -> tuple[Any, Verdict]:
    async def whole() -> tuple[Any, Verdict]:
        with Writer(tmp_path / "history.jsonl") as writer:
            async with LocalCluster(storage_seconds=1.0, **size) as cluster:
                trouble = asyncio.create_task(mischief(cluster))
                result = await run(Recorded(cluster, writer))
                assert not trouble.done()
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
                for number in range(3):
                    cluster.resume_storage(number)
                await cluster.wait_until_ready()
                return result, await judged(cluster, writer, tmp_path)

    return asyncio.run(whole())


@pytest.mark.slow
def test_a_counter_stays_right_through_all_kinds_of_trouble(tmp_path: Path) -> None:
    result, verdict = under_mischief(tmp_path, lambda recorded: counter.run(recorded.make, clients=4, changes=40))
    assert result.is_right, str(result)
    assert verdict.is_sound, str(verdict)
    assert verdict.counts["committed"] == result.committed > 100


@pytest.mark.slow
def test_a_bank_stays_right_through_all_kinds_of_trouble(tmp_path: Path) -> None:
    """Two of its three clients share a database."""
    shared, own = sqlite(str(tmp_path / "shared.db")), sqlite(str(tmp_path / "own.db"))
    result, verdict = under_mischief(
        tmp_path, lambda recorded: bank.run(recorded.make, [shared, own, shared], branches=2, transfers=40), partitions=2
    )
    assert result.is_right, str(result)
    assert verdict.is_sound, str(verdict)
    assert verdict.counts["committed"] == result.committed > 40
    for engine in (shared, own):
        engine.dispose()


# -- with pytest -------------------------------------------------------------------------------------------------------


@pytest.mark.waltz(partitions=3, servers=1)
def test_the_fixture_is_a_cluster(waltz_cluster: LocalCluster) -> None:
    async def story(cluster: LocalCluster) -> int:
        async with cluster.client() as client:
            return client.partition_count

    assert waltz_cluster.run(story) == 3
    assert not waltz_cluster.is_running


def test_a_policy_says_what_the_clients_of_a_test_may_do() -> None:
    async def story(cluster: LocalCluster) -> None:
        cluster.set_policy(
            [{"names": ["billing-*"], "may": ["append"], "partitions": "0"}, {"names": ["audit"], "may": ["read"]}]
        )
        view = CounterView()
        async with (
            cluster.client(name="billing-1", feed=FeedMode.NONE) as billing,
            cluster.client(name="audit", view=view, partitions=[0]) as audit,
        ):
            assert isinstance(await billing.append(b'{"add": 1}', partition=0), Committed)
            with pytest.raises(NotGranted, match="grants this client nothing in partition 1"):
                await billing.append(b"2", partition=1)
            while audit.status()[0].applied < 0:
                await asyncio.sleep(0.01)
            with pytest.raises(NotGranted, match="audit may not append to partition 0"):
                await audit.append(b"3", partition=0)
            cluster.lose_next_acknowledgement(partition=0)
            assert isinstance(await billing.append(b"4", partition=0), Committed), "it may ask what became of it"
            await cluster.kill_owner(0)
            assert isinstance(await billing.append(b"5", partition=0), Committed), "by the grants of the next owner"
            cluster.set_policy([])
            with pytest.raises(NotGranted):
                await billing.append(b"6", partition=0)
        with pytest.raises(NotGranted, match="anonymous may do nothing in this cluster"):
            async with cluster.client(feed=FeedMode.NONE):
                pass
        cluster.set_policy(None)
        async with cluster.client(feed=FeedMode.NONE) as anybody:
            assert isinstance(await anybody.append(b"7", partition=1), Committed)
        assert [record.payload for record in await cluster.log(0)][1:] == [b"4", b"5"]
        cluster.set_policy([{"names": ["billing-*"], "may": ["append"], "partitions": "orders"}])
        cluster.set_channels({"orders": "1", "audit": "0"})
        async with cluster.client(name="billing-1", partitions="orders", feed=FeedMode.NONE) as billing:
            assert (billing.partitions, await billing.channel("orders")) == ((1,), (1,))
            assert isinstance(await billing.append(b"8", partition=1), Committed)
            with pytest.raises(NoSuchChannel, match="no channel audit"):
                await billing.channel("audit")
            cluster.set_channels({"orders": "0-1"})
            await billing.set_partitions([1, "orders"])
            assert list(billing.partitions) == [0, 1]
            cluster.set_channels({})
            with pytest.raises(NotGranted):
                await billing.append(b"9", partition=1)
        with pytest.raises(BadArgument):
            cluster.set_channels({"orders": "0-"})
        for wrong in ([{"names": ["a"]}], [{"names": ["a"], "may": ["write"]}], ["all"], [{"names": {1}, "may": []}]):
            with pytest.raises(BadArgument):
                cluster.set_policy(cast(Any, wrong))

    with_cluster(story, partitions=2)


def test_the_end_names_a_lock_that_was_written_in_two_partitions() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:
            for partition in (0, 2):
                for name in ("seat", "other"):
                    lock = write_lock(name, partition if name == "other" else 7)
                    await client.append(
                        b"%d %s" % (partition, name.encode()), partition=partition, locks=[lock], position=-1
                    )
                await client.append(b"x", partition=partition, locks=[append_lock("log")])
                await client.append(b"x", partition=partition, locks=[write_lock("dcb", "type")], position=-1)

    with pytest.warns(RuntimeWarning) as told:
        LocalCluster().run(story)
    assert [str(one.message) for one in told] == [
        f"the lock {write_lock('seat', 7).hash:016x} was written in several partitions, and locks hold within one "
        "partition only: in partition 0 by b'0 seat', in partition 2 by b'2 seat'"
    ]


@told(with_cluster, servers=1)
async def test_a_mount_that_breaks_gives_back_what_it_had_in_flight(cluster: LocalCluster) -> None:
    """Otherwise the quota of its name would shrink with each broken connection."""
    bounded = Quotas(inflight_bytes=Amount(1 << 20))
    cluster.set_policy([{"names": ["app"], "may": ["append", "read"], "partitions": "0", "quotas": asdict(bounded)}])
    name = Identity(cluster.meta.key, Role.CLIENT, "app")
    usage = cluster._running("server-1").clients.usage_of(principal_of(name.uri), bounded)
    async with cluster.client(name="app", partitions=[0]) as client:
        for number in (0, 1):
            cluster.pause_storage(number)
        appending = asyncio.create_task(client.append(b"x" * 1000, partition=0))
        while not usage.inflight.used:
            await asyncio.sleep(0.001)
        cluster.break_connections()
        for number in (0, 1):
            cluster.resume_storage(number)
        await asyncio.wait([appending])
    assert usage.inflight.used == 0
