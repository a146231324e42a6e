"""What an application may share: the keys of a channel, and partitions with events of other applications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tests.unit.waltzd.testing.test_cluster import with_cluster
from waltzd.client.view import Builder, Command, Transaction, partition_by_hash
from waltzd.errors import BadArgument, EventUnknown, NotMounted
from waltzd.protocol.channels import KeyHash
from waltzd.protocol.locks import Committed, write_lock
from waltzd.serializers import EventType, Json, JsonEvents, MsgspecEvents, PydanticEvents
from waltzd.sql import SqlView, sqlite
from waltzd.testing import LocalCluster

KEYS = [f"customer-{number}" for number in range(40)]


@dataclass(frozen=True)
class Deposited:
    account: str
    amount: int


@dataclass(frozen=True)
class Closed:
    account: str


TYPES = EventType(Deposited, "bank.deposited", kind=1), EventType(Closed, "bank.closed", kind=2)


def bank() -> JsonEvents[Any]:
    return JsonEvents[Any](*TYPES, prefix="bank.")


def shop() -> JsonEvents[Any]:
    return JsonEvents[Any](EventType(Deposited, "shop.deposited"))


# -- keys ------------------------------------------------------------------------------------------------------------------


def test_a_client_of_a_channel_hashes_keys_within_it() -> None:
    async def story(cluster: LocalCluster) -> None:
        cluster.set_channels({"orders": "1,3-4", "audit": "0"})
        expected = [(1, 3, 4)[partition_by_hash(key, 3)] for key in KEYS]
        async with cluster.client(partitions="orders") as one, cluster.client(partitions=["orders"]) as other:
            assert [one.partition_of(key) for key in KEYS] == expected == [other.partition_of(key) for key in KEYS]
            assert set(expected) == {1, 3, 4}
            for key, partition in zip(KEYS, expected, strict=True):
                found = await one.append(b"", key=key)
                assert isinstance(found, Committed)
                assert found.partition == partition
            locked = await one.append(b"", locks=[write_lock("cart")], position=-1)
            assert isinstance(locked, Committed)
            assert locked.partition == one.partition_of("cart")

            class Put(Command):
                key = KEYS[0]

                def build(self, builder: Builder) -> bool:
                    builder.payload = b""
                    return True

            built = await other.submit(Put())
            assert isinstance(built, Committed)
            assert built.partition == expected[0]
            await one.set_partitions("audit")
            assert one.partition_of(KEYS[0]) == 0
            await one.set_partitions("all")
            assert one.partition_of(KEYS[0]) == partition_by_hash(KEYS[0], 6)
        async with cluster.client(partitions="orders,audit") as several:
            assert [several.partition_of(key) for key in KEYS] == [partition_by_hash(key, 6) for key in KEYS]

    with_cluster(story, partitions=6)


def test_keys_stay_where_they_are_when_a_channel_grows_or_shrinks() -> None:
    async def story(cluster: LocalCluster) -> None:
        cluster.set_channels({"orders": "0-1"})
        async with cluster.client(partitions="orders") as before:
            cluster.set_channels({"orders": "0-3"})
            async with cluster.client(partitions="orders") as after:
                assert after.partitions == (0, 1, 2, 3)
                assert [after.partition_of(key) for key in KEYS] == [before.partition_of(key) for key in KEYS]
        cluster.set_channels({"orders": "1"})
        gone = next(key for key in KEYS if partition_by_hash(key, 2) == 0)
        async with cluster.client(partitions="orders") as smaller:
            with pytest.raises(NotMounted, match=f"{gone}' belongs to partition 0"):
                await smaller.append(b"", key=gone)
        cluster.set_channels({})
        cluster.set_channels({"orders": "2-3"})
        async with cluster.client(partitions="orders") as anew:
            assert {anew.partition_of(key) for key in KEYS} == {2, 3}

    with_cluster(story, partitions=4)


def test_a_hash_function_of_a_newer_version_is_refused_and_a_partitioner_is_held_to_its_range() -> None:
    async def story(cluster: LocalCluster) -> None:
        cluster.set_channels({"orders": "0-1"})
        async with cluster.client(partitions="orders", partitioner=lambda key, count: key) as own:
            assert own.partition_of(1) == 1
            for wrong in (2, -1):
                with pytest.raises(BadArgument, match=f"chose {wrong} from 2 partitions"):
                    own.partition_of(wrong)
        async with cluster.client(partitions="orders") as client:
            client._key_hash = KeyHash("blake9:0-1")
            with pytest.raises(BadArgument, match="hashed by blake9, which this version does not know"):
                await client.append(b"", key="a")

    with_cluster(story, partitions=2)


# -- events ----------------------------------------------------------------------------------------------------------------


class Ledger:
    def __init__(self) -> None:
        self.last, self.values = -1, list[Any]()

    def position(self, partition: int) -> int:
        return self.last

    def apply(self, transaction: Transaction[Any]) -> None:
        self.values.append(transaction.value)
        self.last = transaction.id


async def both(cluster: LocalCluster, bank_client: Any) -> None:
    """Append events of two applications, and of one that writes no events."""
    async with cluster.client(serializer=shop()) as other, cluster.client() as plain:
        await bank_client.append(Deposited("a", 1), partition=0)
        await other.append(Deposited("x", 9), partition=0)
        await plain.append(b"{", partition=0)
        await bank_client.append(Closed("a"), partition=0)
        await other.append(Deposited("y", 9), partition=0)


def test_a_second_application_on_the_cluster_stops_no_view_of_the_first() -> None:
    async def story(cluster: LocalCluster) -> None:
        view = Ledger()
        async with cluster.client(serializer=bank(), view=view) as client:
            await both(cluster, client)
            await client.wait_caught_up()
            assert (view.values, view.last, client.position(0)) == ([Deposited("a", 1), Closed("a")], 3, 4)
            assert [one.value async for one in client.scan(0)] == view.values
            feed, fed = client.feed(0, after=-1), list[Any]()
            async for one in feed:
                fed.append(one.value)
                if len(fed) == 2:
                    break
            await feed.aclose()
            assert fed == view.values
            foreign = await client.read(0, 1)
            assert foreign.is_foreign
            with pytest.raises(EventUnknown):
                foreign.value  # noqa: B018

    with_cluster(story)


def test_a_view_in_a_database_is_past_what_is_not_its_own(tmp_path: Path) -> None:
    table = sa.Table("events", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))

    def apply(connection: Connection, transaction: Transaction[Any]) -> None:
        assert isinstance(transaction.value, Deposited | Closed)
        connection.execute(sa.insert(table).values(id=transaction.id))

    async def story(cluster: LocalCluster) -> None:
        engine = sqlite(str(tmp_path / "view.db"))
        view = SqlView(engine, apply, tables=table.metadata)
        async with cluster.client(serializer=bank(), view=view) as client:
            await both(cluster, client)
            await client.wait_caught_up()
        assert view.read_position(0) == 4, "the position is saved behind the last foreign event, too"
        with engine.connect() as connection:
            assert [row.id for row in connection.execute(sa.select(table))] == [0, 3]
        await view.close()
        engine.dispose()

    with_cluster(story)


@pytest.mark.parametrize("mode", ["ordered", "queue", "keyed"])
def test_a_group_passes_over_what_is_not_its_own(mode: Any) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(serializer=bank()) as client:
            await client.create_group("audit", mode=mode)
            await both(cluster, client)
            found = list[Any]()
            async with client.subscribe("audit") as deliveries:
                async for delivery in deliveries:
                    found.append(delivery.value)
                    await delivery.ack(durable=True)
                    if len(found) == 2:
                        await client.append(Deposited("last", 1), partition=0)
                    if len(found) == 3:
                        break
            assert found == [Deposited("a", 1), Closed("a"), Deposited("last", 1)]
        async with cluster.client() as plain:  # it would get what nobody acknowledged
            await plain.append(b"the next one", partition=0)
            async for delivery in plain.subscribe("audit"):
                assert delivery.payload == b"the next one"
                await delivery.ack()
                break

    with_cluster(story)


def test_an_ordered_group_passes_over_what_follows_a_failure() -> None:
    """Nothing waits for an `ack_wait`, which is longer than the test."""

    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(serializer=bank()) as client:
            await client.create_group("audit", mode="ordered", ack_wait=3600, tries=2, back_off=[0])
            await both(cluster, client)
            tries = list[Any]()
            async with client.subscribe("audit") as deliveries:
                async for delivery in deliveries:
                    tries.append((delivery.id, delivery.attempt))
                    if delivery.id == 0:
                        await delivery.nack()
                    elif delivery.id == 3:
                        await delivery.reject("it is closed")
                        await client.append(Deposited("last", 1), partition=0)
                    else:
                        await delivery.ack(durable=True)
                        break
            assert tries == [(0, 1), (0, 2), (3, 1), (5, 1)]

    with_cluster(story)


def test_a_group_selects_types_of_events() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(serializer=bank()) as client:
            await client.create_group("closings", mode="queue", types=[Closed])
            with pytest.raises(BadArgument, match="both `types` and `kinds`"):
                await client.create_group("other", mode="queue", types=[Closed], kinds=[2])
            with pytest.raises(BadArgument, match="is none of the event types"):
                await client.create_group("other", mode="queue", types=[int])
            await both(cluster, client)
            await client.append_many([Deposited("b", 1), Closed("b")], partition=0)
            await client.append_atomic([Closed("c")], partition=0)
            kinds = [one.kind async for one in client.scan(0)]
            assert kinds == [1, 2, 1, 2, 2]
            found = list[Any]()
            async for delivery in client.subscribe("closings"):
                found.append(delivery.value.account)
                await delivery.ack()
                if len(found) == 3:
                    break
            assert found == ["a", "b", "c"]
        async with cluster.client(serializer=shop()) as other, cluster.client() as plain:
            with pytest.raises(BadArgument, match="has no kind in its event type"):
                await other.create_group("other", mode="queue", types=[Deposited])
            with pytest.raises(BadArgument, match="needs a client with a serializer of events"):
                await plain.create_group("other", mode="queue", types=[int])  # type: ignore[list-item]

    with_cluster(story)


def test_a_command_gives_the_kind_of_its_event_unless_it_sets_another() -> None:
    builder = Builder[Any](-1, bank())
    builder.payload = Closed("a")
    assert builder.kind == 2
    builder.kind = 7
    builder.payload = Deposited("a", 1)
    assert builder.kind == 7
    assert Builder(-1).kind == 0


def makers() -> list[Callable[..., Any]]:
    return [
        JsonEvents,
        PydanticEvents,
        MsgspecEvents,
        lambda *types, **given: MsgspecEvents(*types, form="msgpack", **given),
    ]


@pytest.mark.parametrize("make", makers())
def test_what_does_not_begin_with_the_prefix_is_foreign(make: Callable[..., Any]) -> None:
    ours, theirs, all_of_it = make(*TYPES, prefix="bank."), make(EventType(Closed, "banking")), make(*TYPES)
    assert not ours.is_foreign(ours.encode(Closed("a")))
    newer = make(EventType(Closed, "bank.reopened", version=2, upcasts={1: dict}))
    assert not ours.is_foreign(newer.encode(Closed("a"))), "of this application, and of a newer program"
    for payload in (theirs.encode(Closed("a")), Json[Any]().encode([1]), b"", b"\xff" * 9):
        assert ours.is_foreign(payload)
        assert not all_of_it.is_foreign(payload)


def test_a_name_without_the_prefix_and_a_kind_that_is_used_twice_are_refused() -> None:
    with pytest.raises(BadArgument, match="the event type closed does not begin with the prefix 'bank"):
        JsonEvents(EventType(Closed, "closed"), prefix="bank.")
    with pytest.raises(BadArgument, match="a kind is given twice"):
        JsonEvents[Any](EventType(Closed, "closed", kind=1), EventType(Deposited, "deposited", kind=1))
    with pytest.raises(BadArgument, match="0x57414c5a is reserved"):
        EventType(Closed, "closed", kind=0x57414C5A)
    with pytest.raises(BadArgument, match="32 bits"):
        EventType(Closed, "closed", kind=1 << 31)
