"""Members of consumer groups, against real owners in this process: what is given, settled, and given again."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Any

import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run, run_cluster
from tests.unit.waltzd.client.test_client import until
from waltzd.client import consumer_groups
from waltzd.client.blocking import BlockingDelivery
from waltzd.client.client import Client
from waltzd.client.delivery import Delivery, Reject
from waltzd.client.settings import ClientSettings
from waltzd.client.subscription import Subscription
from waltzd.errors import BadArgument, DeliveryLate, EventUnknown, GroupExists, NoSuchGroup, NotGranted, NotInGroup
from waltzd.server.groups.state_log import GroupStateLog
from waltzd.testing import BlockingCluster, LocalCluster

SECONDS = 30.0


def with_cluster(
    test: Callable[[LocalCluster, Client[Any]], Awaitable[Any]], *, partitions: int = 1, **settings: Any
) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with asyncio.timeout(SECONDS), cluster.client(**settings) as client:
            await test(cluster, client)

    run_cluster(LocalCluster(partitions=partitions), story)


async def fill(client: Client, count: int, partition: int = 0) -> None:
    await client.append_many([b"%d" % number for number in range(count)], partition=partition)


def test_what_is_committed_is_given_once_and_acknowledged() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        assert await client.create_group("mailer", mode="queue", max_in_flight=7)
        assert not await client.create_group("mailer", mode="queue", max_in_flight=7)
        await fill(client, 20)
        found = []
        async with aclosing(aiter(client.subscribe("mailer"))) as deliveries:  # type: ignore[type-var]
            async for delivery in deliveries:
                assert (delivery.group, delivery.attempt, delivery.partition) == ("mailer", 1, 0)
                found.append(delivery.payload)
                await delivery.ack()
                await delivery.ack()
                if len(found) == 20:
                    break
        assert sorted(found, key=int) == [b"%d" % number for number in range(20)]
        assert client._subscriptions == {}

    with_cluster(test)


def test_a_fail_over_gives_again_only_what_was_not_written_down() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue")
        await fill(client, 10)
        async with client.subscribe("mailer") as subscription:
            first = await anext(subscription.batches())
            while len(first) < 10:
                first += await anext(subscription.batches())
            await subscription.ack(first[:5], durable=True)
            await cluster.kill_owner(0)
            again: list[Delivery] = []
            async for delivery in subscription:
                again.append(delivery)
                if len(again) == 5:
                    break
            assert [one.id for one in again] == [5, 6, 7, 8, 9]
            with pytest.raises(DeliveryLate):
                await first[7].ack()
            await subscription.ack(again)

    with_cluster(test)


async def some(subscription: Subscription[Any], count: int) -> list[Delivery[Any]]:
    """The next ones, as many as that."""
    found: list[Delivery[Any]] = []
    while len(found) < count:
        found += await subscription.take(count - len(found))
    return found


async def parked(cluster: LocalCluster, group: str, count: int = 1) -> list[tuple[int, str]]:
    """What was put aside, with the reason, when so many are."""
    board = cluster._living()[0].groups
    assert board is not None
    while len(found := board.parked(group, None, None, 100)[0]) < count:
        await asyncio.sleep(0.01)
    return [(one.id, one.reason) for one in found]


def test_an_unknown_group_is_refused_with_what_to_do() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        with pytest.raises(NoSuchGroup) as caught:
            await anext(aiter(client.subscribe("mailer")))
        assert "create" in caught.value.detail_next_step
        await client.create_group("mailer", mode="queue", partitions=[0])
        with pytest.raises(BadArgument, match="partition 1 is not a partition of group mailer"):
            async with client.subscribe("mailer", partitions=[1]):
                raise AssertionError("it is not open")

    with_cluster(test, partitions=2)


def test_what_failed_comes_again_and_what_is_rejected_does_not() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue", tries=2, back_off=[0])
        await fill(client, 3)
        async with client.subscribe("mailer") as subscription:
            first, second, third = await some(subscription, 3)
            await first.nack(reason="the server is away")
            await second.reject("this is no address")
            (again,) = await some(subscription, 1)
            assert (again.id, again.attempt) == (0, 2)
            with pytest.raises(BadArgument, match="was settled with `nack`"):
                await first.ack()
            await again.nack(reason="it is still away")
            await third.ack(durable=True)
            assert await parked(cluster, "mailer", 2) == [(0, "it is still away"), (1, "this is no address")]

    with_cluster(test)


def test_in_an_ordered_group_a_failure_brings_back_what_lies_behind() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("index", mode="ordered", tries=3, back_off=[0])
        await fill(client, 6)
        seen: list[tuple[int, int]] = []
        async with client.subscribe("index") as subscription:
            while len(seen) < 8:
                (one,) = await some(subscription, 1)
                seen.append((one.id, one.attempt))
                if one.id == 2:
                    await one.nack(reason="no")
                else:
                    await one.ack()
            assert seen == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (4, 1), (5, 1)]
            assert await parked(cluster, "index") == [(2, "no")]

    with_cluster(test)


@pytest.mark.parametrize("how", ["nothing is said", "failed"])
def test_a_durable_acknowledgement_behind_one_that_is_given_again_is_late(how: str) -> None:
    """Without that the member would wait for itself: it gets the one in front again, and does not take it."""

    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("index", mode="ordered", ack_wait=1.0, back_off=[0])
        await fill(client, 4)
        seen: list[tuple[int, int]] = []
        async with client.subscribe("index") as subscription:
            first, second, third = await some(subscription, 3)
            await second.ack()
            behind = asyncio.create_task(third.ack(durable=True))
            if how == "failed":
                await first.nack(reason="no")
            with pytest.raises(DeliveryLate) as caught:
                await behind
            assert caught.value.number("id") == 2
            while len(seen) < 4:
                (one,) = await some(subscription, 1)
                seen.append((one.id, one.attempt))
                await one.ack(durable=True)
        assert seen == [(0, 2), (1, 1), (2, 1), (3, 1)]

    with_cluster(test)


def test_one_that_is_too_late_among_many_is_named_and_the_others_count() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue", ack_wait=0.5, back_off=[100])
        await fill(client, 3)
        async with client.subscribe("mailer") as subscription:
            found = await some(subscription, 3)
            for _ in range(4):  # longer than its time, while two of them are extended
                await asyncio.sleep(0.2)
                await subscription.extend(found[1:])
            with pytest.raises(DeliveryLate) as caught:
                await subscription.ack(found)
            assert caught.value.number("id") == 0
            await found[1].ack()  # was acknowledged

    with_cluster(test)


def test_a_member_that_goes_gives_back_what_it_has_at_once() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue")
        await fill(client, 5)
        async with client.subscribe("mailer") as subscription:
            found = await some(subscription, 5)
        with pytest.raises(DeliveryLate, match="closed"):
            await found[0].ack()
        async with client.subscribe("mailer") as subscription:
            again = await some(subscription, 5)
            assert [(one.id, one.attempt) for one in again] == [(number, 1) for number in range(5)]

    with_cluster(test)


def test_a_handler_settles_by_how_it_ends() -> None:
    tries = Counter[int]()

    async def handler(delivery: Delivery) -> None:
        tries[delivery.id] += 1
        if delivery.id == 1:
            raise Reject("never")
        if delivery.id == 2 and delivery.attempt < 3:
            raise ValueError("not yet")

    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue", back_off=[0])
        await fill(client, 8)
        handling = client.handle("mailer", handler, concurrency=3)
        working = asyncio.create_task(handling.run())
        while tries[2] < 3 or len(tries) < 8:
            await asyncio.sleep(0.01)
        handling.stop()
        await working
        assert tries == Counter(dict.fromkeys(range(8), 1) | {2: 3})
        assert await parked(cluster, "mailer") == [(1, "never")]

    with_cluster(test)


def test_a_handler_that_takes_longer_than_its_time_keeps_its_delivery() -> None:
    seen = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.id)
        await asyncio.sleep(1.0)

    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue", ack_wait=0.3, back_off=[0])
        await fill(client, 2)
        handling = client.handle("mailer", handler)
        working = asyncio.create_task(handling.run())
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        handling.stop()  # the second one runs, and is finished
        await working
        assert seen == [0, 1]
        async with client.subscribe("mailer") as subscription:
            await client.append(b"2", partition=0)
            assert [one.id for one in await some(subscription, 1)] == [2]

    with_cluster(test)


def test_an_ordered_group_has_one_call_at_a_time_in_each_partition() -> None:
    running, seen = set[int](), dict[int, list[int]]()

    async def handler(delivery: Delivery) -> None:
        assert delivery.partition not in running
        running.add(delivery.partition)
        await asyncio.sleep(0.001)
        seen.setdefault(delivery.partition, []).append(delivery.id)
        running.discard(delivery.partition)
        if (delivery.id, delivery.attempt) == (4, 1):
            raise ValueError("once more")

    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("index", mode="ordered", back_off=[0])
        for partition in (0, 1):
            await fill(client, 10, partition)
        handling = client.handle("index", handler, concurrency=8)
        working = asyncio.create_task(handling.run())
        while sum(map(len, seen.values())) < 22:
            await asyncio.sleep(0.01)
        handling.stop()
        await working
        assert list(seen.values()) == [[0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]] * 2

    with_cluster(test, partitions=2)


def test_what_cannot_be_decoded_is_put_aside_with_the_reason() -> None:
    class Numbers:
        def encode(self, value: int) -> bytes:
            return b"?" if value == 1 else b"%d" % value

        def decode(self, payload: bytes) -> int:
            return int(payload)

    async def test(cluster: LocalCluster, client: Client[Any]) -> None:
        await client.create_group("mailer", mode="queue")
        await client.append_many([0, 1, 2], partition=0)
        async with client.subscribe("mailer") as subscription:
            found = await some(subscription, 2)
            assert [one.value for one in found] == [0, 2]
            await subscription.ack(found, durable=True)
        ((id, reason),) = await parked(cluster, "mailer")
        assert id == 1
        assert "cannot be decoded" in reason

    with_cluster(test, serializer=Numbers())


def test_closing_does_not_wait_for_the_answer_to_what_cannot_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner hangs, and nobody else has the partition."""

    class Words:
        def encode(self, value: bytes) -> bytes:
            return value

        def decode(self, payload: bytes) -> str:
            return payload.decode("ascii")

    async def test(cluster: LocalCluster, client: Client[Any]) -> None:
        await client.create_group("mailer", mode="queue")
        await client.append_many([b"0", b"\xff", b"2"], partition=0)
        subscription = client.subscribe("mailer")
        await subscription.open()
        (consumer,) = subscription._consumers.values()
        await until(lambda: len(consumer.queue) == 3)
        monkeypatch.setattr(consumer, "_take", lambda frames: None)
        assert [one.id for one in await subscription.take(3)] == [0, 2]
        await subscription.close()

    with_cluster(test, serializer=Words(), settings=ClientSettings(close_seconds=5))


@pytest.mark.parametrize("mode", ["queue", "ordered"])
def test_an_event_of_a_newer_version_goes_to_a_newer_member_and_uses_up_no_try(mode: Any) -> None:
    class Words:
        def __init__(self, version: int) -> None:
            self.version = version

        def encode(self, value: str) -> bytes:
            return value.encode()

        def decode(self, payload: bytes) -> str:
            if payload.startswith(b"new") and self.version < 2:
                raise EventUnknown("this program does not know version 2")
            return payload.decode()

    async def test(cluster: LocalCluster, client: Client[Any]) -> None:
        await client.create_group("mailer", mode=mode, tries=1)
        await client.append_many(["old", "new", "old"], partition=0)
        found: list[tuple[str, str, int]] = []

        async def work(name: str, member: Client[Any]) -> None:
            async for delivery in member.subscribe("mailer"):
                found.append((name, delivery.value, delivery.attempt))
                await delivery.ack()

        async with cluster.client(serializer=Words(2)) as newer:
            working = [asyncio.create_task(work("old", client))]
            await until(lambda: ("old", "old", 1) in found)
            await asyncio.sleep(12)
            assert ("old", "new", 1) not in found
            working.append(asyncio.create_task(work("new", newer)))
            await until(lambda: len(found) == 3)
            for one in working:
                one.cancel()
            ended = await asyncio.gather(*working, return_exceptions=True)
        assert {type(one) for one in ended} == {asyncio.CancelledError}
        assert mode == "queue" or [value for _, value, _ in found] == ["old", "new", "old"]
        assert ("new", "new", 1) in found, "no try was counted, although there is only one"

    with_cluster(test, serializer=Words(1))


def test_a_group_begins_where_it_was_said_and_making_it_again_changes_nothing() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await fill(client, 4)
        assert await client.create_group("late", mode="queue", start="last")
        await fill(client, 2)
        assert not await client.create_group("late", mode="queue", start="last")
        assert await client.create_group("some", mode="queue", after={0: 2}, kinds=[0])
        with pytest.raises(GroupExists):
            await client.create_group("late", mode="ordered", start="last")
        for group, ids in (("late", [4, 5]), ("some", [3, 4, 5])):
            async with client.subscribe(group) as subscription:
                assert [one.id for one in await some(subscription, len(ids))] == ids

    with_cluster(test)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "stack"},
        {"partitions": [7]},
        {"partitions": []},
        {"after": {7: 0}},
        {"after": {0: 0}, "start": "last"},
        {"start": {0: 0}},
        {"start": "middle"},
        {"start": datetime(2026, 1, 1)},
        {"ack_wait": 0},
        {"ack_wait": math.inf},
        {"back_off": [math.nan]},
        {"max_in_flight": 0},
        {"back_off": [-1]},
        {"then": "drop"},
        {"key": "payload"},
        {"kinds": [1 << 40]},
    ],
    ids=str,
)
def test_a_group_that_makes_no_sense_is_refused_here(wrong: dict[str, Any]) -> None:
    async def work() -> None:
        fake = FakeCluster()
        async with Client("s0:1", connect=fake.connect) as client:
            with pytest.raises(BadArgument):
                await client.create_group("mailer", **{"mode": "queue", **wrong})

    run(work())


def test_the_blocking_twins() -> None:
    seen = []
    with BlockingCluster(partitions=1) as cluster, cluster.client() as client:
        assert client.create_group("mailer", mode="queue")
        client.append_many([b"0", b"1", b"2", b"3"], partition=0)
        for delivery in client.subscribe("mailer"):
            seen.append(delivery.id)
            delivery.ack()
            if len(seen) == 2:
                break

        def handler(delivery: BlockingDelivery) -> None:
            seen.append(delivery.id)
            if delivery.id == 3:
                handling.stop()

        handling = client.handle("mailer", handler)
        handling.run()
        assert seen == [0, 1, 2, 3]
        with client.subscribe("mailer") as subscription:
            client.append(b"4", partition=0)
            batch = next(subscription.batches())
            assert [one.payload for one in batch] == [b"4"]
            subscription.ack(batch, durable=True)


# -- how a group is ----------------------------------------------------------------------------------------------------


def test_a_client_asks_for_lag_and_what_is_parked_and_has_it_given_again() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        for partition in (0, 1):
            await fill(client, 4, partition)
        await client.create_group("mailer", mode="queue", after={1: 0})
        fresh = await client.group_status("mailer")
        assert [(one.partition, one.position, one.lag, one.members, one.parked) for one in fresh] == [
            (0, -1, 4, 0, 0),
            (1, 0, 3, 0, 0),
        ]
        async with client.subscribe("mailer") as subscription:
            for one in await some(subscription, 7):
                if one.id == 3:
                    await one.reject(f"no address in {one.partition}")
                elif (one.partition, one.id) != (0, 2):
                    await one.ack(durable=True)
            held = await client.group_status("mailer")
            assert [(one.lag, one.members, one.in_flight, one.parked) for one in held] == [(1, 1, 1, 1), (0, 1, 0, 1)]
            assert held[0].position == 1
            found = await client.parked("mailer")
            assert [(one.partition, one.id, one.failures, one.reason) for one in found] == [
                (0, 3, 1, "no address in 0"),
                (1, 3, 1, "no address in 1"),
            ]
            assert await client.parked("mailer", partitions=[1]) == found[1:]
            assert await client.replay("mailer", []) == 0
            assert await client.replay("mailer", found[1:]) == 1
            assert await client.replay("mailer", found[1:]) == 0
            (again,) = await some(subscription, 1)
            assert (again.partition, again.id, again.attempt) == (1, 3, 1)
            await again.ack(durable=True)
            await cluster.kill_owner(0)
            assert await client.replay("mailer") == 1, "the new owner knows what is parked"
        assert await client.parked("mailer") == []
        with pytest.raises(BadArgument, match="both `transactions` and `partitions`"):
            await client.replay("mailer", found, partitions=[0])
        with pytest.raises(NoSuchGroup):
            await client.group_status("printer")
        await client.create_group("one", mode="queue", partitions=[0])
        assert [one.partition for one in await client.group_status("one")] == [0]
        with pytest.raises(NotInGroup):
            await client._routes.ask(1, "DescribeGroup", lambda port: port.group_status("one", 1), 5)

    with_cluster(test, partitions=2)


def test_a_question_about_one_group_costs_nothing_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has ten thousand groups, and a member of one may ask as often as it likes."""
    monkeypatch.setattr(GroupStateLog, "states", None)

    async def test(cluster: LocalCluster, client: Client) -> None:
        await fill(client, 3)
        await client.create_group("mailer", mode="queue", partitions=[0])
        async with client.subscribe("mailer") as subscription:
            for one in await some(subscription, 3):
                await one.reject("no address")
            assert [one.id for one in await client.parked("mailer")] == [0, 1, 2]
            assert [one.parked for one in await client.group_status("mailer")] == [3]
        calls = cluster._running(cluster.owner(0)).groups
        assert calls is not None
        pages = [calls.parked("mailer", 0, after, 2) for after in (None, 1, 2)]
        assert [([one.id for one in found], has_more) for found, has_more in pages] == [
            ([0, 1], True),
            ([2], False),
            ([], False),
        ]

    with_cluster(test, partitions=2)


def test_who_may_work_in_a_group_may_ask_for_it_and_nobody_else() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue")
        await fill(client, 1)
        cluster.set_policy([{"names": ["mailer"], "may": ["subscribe"], "partitions": "0", "groups": ["mailer"]}])
        async with (
            cluster.client(name="mailer", partitions=[]) as member,
            cluster.client(name="other", partitions=[]) as other,
        ):
            assert [one.lag for one in await member.group_status("mailer")] == [1]
            assert await member.parked("mailer") == []
            assert await member.replay("mailer") == 0
            for asked in (other.group_status("mailer"), other.parked("mailer"), other.replay("mailer")):
                with pytest.raises(NotGranted):
                    await asked
        cluster.set_policy(None)

    with_cluster(test)


def test_more_than_one_answer_of_parked_transactions() -> None:
    async def test(cluster: LocalCluster, client: Client) -> None:
        await client.create_group("mailer", mode="queue", max_in_flight=1000)
        await fill(client, 5)
        async with client.subscribe("mailer") as subscription:
            await subscription.reject(await some(subscription, 5), "never")
        port = consumer_groups.PARKED_AT_ONCE
        try:
            consumer_groups.PARKED_AT_ONCE = 2
            assert [one.id for one in await client.parked("mailer")] == [0, 1, 2, 3, 4]
        finally:
            consumer_groups.PARKED_AT_ONCE = port
        assert await client.replay("mailer") == 5

    with_cluster(test)


def test_the_same_without_an_event_loop() -> None:
    with BlockingCluster(partitions=1) as cluster, cluster.client() as client:
        client.create_group("mailer", mode="queue")
        client.append(b"x", partition=0)
        assert [one.lag for one in client.group_status("mailer")] == [1]
        assert client.parked("mailer") == []
        assert client.replay("mailer") == 0
