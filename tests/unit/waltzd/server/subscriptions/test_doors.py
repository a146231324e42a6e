"""What a caller without rights, or with few, can do to the groups of a server."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.waltzd.server.subscriptions.room import Room
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import NotGranted
from waltzd.protocol.channels import Parts
from waltzd.protocol.groups import AckKind, Mode
from waltzd.server.subscriptions import consumer_stream


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
            assert slept == [], "what it acknowledges was paid for"
            for _ in range(5):
                assert (await a.say(AckKind.EXTEND, *range(50, 100))).taken == 50
            await room.until(lambda: len(slept) >= 3)
            assert max(slept) > 1.0

    Room.run(story)
