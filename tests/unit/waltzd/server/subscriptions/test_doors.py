"""What a caller without rights, or with few, can do to the groups of a server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.unit.waltzd.server.subscriptions.room import Room
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import NotGranted
from waltzd.errors.operations import BadFrame
from waltzd.format.layout import ID_MAX
from waltzd.protocol.channels import Parts
from waltzd.protocol.groups import Ack, AckKind, Mode
from waltzd.server.groups.delivery_tracker import DeliveryTracker, GroupSettings
from waltzd.server.groups.state import GroupState
from waltzd.server.subscriptions import consumer_stream
from waltzd.wire.codec import delivery_message


def test_a_group_is_made_only_where_each_partition_is_granted() -> None:
    async def story(room: Room) -> None:
        room.cluster.set_policy([{"names": ["*"], "may": ["subscribe"], "partitions": "0", "groups": ["mail*"]}])
        server = room.cluster._running(room.cluster.owner(0))
        key = room.cluster.meta.key

        async def make(name: str, partitions: str | None) -> None:
            meta = GroupMeta(name=name, partitions=None if partitions is None else Parts(partitions), mode=Mode.QUEUE)
            await server.calls.make_group(key, meta)

        for name, partitions in [("other", "0"), ("mail", "0-1"), ("mail", None), ("mail", "1")]:
            with pytest.raises(NotGranted):
                await make(name, partitions)
        with pytest.raises(NotGranted, match="may do nothing in group other"):
            await make("other", "nonsense")
        await make("mail", "0")

    Room.run(story, partitions=2)


def test_a_member_that_asks_for_more_time_without_end_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_stream, "WORK_PER_SECOND", 100)
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    class Recorded:
        """The module `asyncio`, of which only `sleep` is another one."""

        def __getattr__(self, name: str) -> object:
            return sleep if name == "sleep" else getattr(asyncio, name)

    async def story(room: Room) -> None:
        await room.append(100)
        await room.make("mailer", max_in_flight=100)
        async with room.member("mailer", "a") as a:
            await a.take(100)
            monkeypatch.setattr(consumer_stream, "asyncio", Recorded())
            assert (await a.acknowledge(*range(50))).taken == 50
            assert sum(slept) < 1e-6, "what it acknowledges was paid for"
            for _ in range(5):
                assert (await a.say(AckKind.EXTEND, *range(50, 100))).taken == 50
            await room.until(lambda: len(slept) >= 3)
            assert max(slept) > 1.0

    Room.run(story)


def test_what_a_member_never_got_is_not_acknowledged_by_it() -> None:
    async def story(room: Room) -> None:
        await room.append(20)
        await room.make("mailer", max_in_flight=5)
        async with room.member("mailer", "liar") as liar:
            await liar.take(5)
            assert (await liar.acknowledge(7, 11, 19)).taken == 0, "they are not delivered"
            assert (await liar.acknowledge(20, 500)).unknown == 2, "they are not in the log"
            assert (await liar.say(AckKind.ACKNOWLEDGE, 0, epoch=liar.epoch + 1)).is_old
            assert (await liar.say(AckKind.ACKNOWLEDGE, 0, tag=0)).taken == 0, "an older delivery"
            assert (await liar.acknowledge(0)).taken == 1
            for verb in AckKind:
                if verb is not AckKind.BEGIN:
                    assert (await liar.say(verb, 0)).taken == 0, "again"
        async with room.member("mailer", "honest") as honest:
            seen: list[int] = []
            while len(seen) < 19:
                [one] = await honest.take(1)
                seen.append(one.id)
                await honest.acknowledge(one.id)
            assert sorted(seen) == list(range(1, 20))

    Room.run(story)


def test_an_acknowledgement_of_every_number_is_refused() -> None:
    """It counted 2^63 ids, which no field of the answer holds: a traceback in the log for each."""

    def ack(last: int) -> Ack:
        ids = np.array([0], np.int64), np.array([last], np.int64)
        return Ack(number=1, verb=AckKind.ACKNOWLEDGE, epoch=1, tag=0, firsts=ids[0], lasts=ids[1])

    tracker = DeliveryTracker(GroupSettings(mode=Mode.QUEUE), GroupState())
    tracker.join("a")
    consumer_stream.check_ack(ack(ID_MAX - 1), 0)
    found = tracker.acknowledge("a", tracker.state.epoch, 0, 0, ID_MAX - 1, 0.0)
    assert found.unknown == ID_MAX
    delivery_message([found])
    with pytest.raises(BadFrame, match="ids end below it"):
        consumer_stream.check_ack(ack(ID_MAX), 0)
