"""Members of durable groups, against real owners in this process: what is given, settled, and given again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from waltzd.client.client import Client
from waltzd.client.delivery import Delivery
from waltzd.errors import DeliveryLate
from waltzd.testing import LocalCluster

SECONDS = 30.0


def with_cluster(test: Callable[[LocalCluster, Client], Awaitable[Any]], *, partitions: int = 1, **settings: Any) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with asyncio.timeout(SECONDS), cluster.client(**settings) as client:
            await test(cluster, client)

    LocalCluster(partitions=partitions, groups=True).run(story)


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
