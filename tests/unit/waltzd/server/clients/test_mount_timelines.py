"""What an owner takes of positions after an operator has ended the log: mounts, ends and reads."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit.mounting import KEY, FakeSession, Room, batch_of, in_room, mount_request
from waltzd.errors import OtherTimeline
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED

SECOND, STRANGE = UUID(int=2), UUID(int=9)
LINEAGE = NEVER_FORKED.forked(identity=SECOND, fork=4, session=3, cause="rescue", began="now", who="me")


def forked() -> FakeSession:
    session = FakeSession(next_id=0)
    session.core.meta = replace(session.core.meta, timelines=LINEAGE.later)
    return session


async def grow(room: Room, count: int) -> None:
    one = await room.mount(99)
    await one.say(batch_of(*[b"%d" % number for number in range(count)]))
    await one.until(lambda reader: len(reader.committed) == count)


def test_a_mount_above_the_fork_is_refused_and_one_that_asks_begins_there() -> None:
    async def test(room: Room) -> None:
        await grow(room, 10)
        for client, (mark, timeline) in enumerate([(-1, None), (4, None), (4, FIRST), (9, SECOND), (-1, STRANGE)]):
            request = replace(mount_request(client=client, mark=mark), timeline=timeline)
            reader = await room.knock(request)
            await reader.until(lambda reader: reader.mounted is not None)
            assert reader.mounted is not None
            assert reader.mounted.timelines == tuple(one.bare for one in LINEAGE.later)
            await reader.leave()
        for client, (mark, timeline, fork) in enumerate([(5, None, 4), (9, FIRST, 4), (0, STRANGE, -1), (40, None, 4)], 10):
            reader = await room.knock(replace(mount_request(client=client, mark=mark), timeline=timeline))
            await reader.until(lambda reader: reader.end is not None)
            assert isinstance(reader.end, OtherTimeline)
            facts = {"partition": "3", "fork": str(fork), "position": str(mark), "timeline": str(SECOND)}
            assert reader.end.facts == facts
        asking = mount_request(client=20, mark=40, feed=FeedMode.HEADS, asks=True)
        reader = await room.knock(asking)
        await reader.until(lambda reader: len(reader.ids) == 5)
        assert reader.ids == [5, 6, 7, 8, 9]

    in_room(test, forked)


def test_ends_and_reads_say_whose_ids_they_are() -> None:
    async def test(room: Room) -> None:
        await grow(room, 10)
        end = await room.calls.high_water_mark(KEY, 3, since=Position(4))
        assert (end, end.timeline) == (9, SECOND)
        with pytest.raises(OtherTimeline):
            await room.calls.high_water_mark(KEY, 3, since=Position(5))
        for timeline, last, is_taken in ((None, 9, True), (SECOND, 9, True), (FIRST, 4, True), (FIRST, 5, False)):
            runs = room.calls.fetch(KEY, 3, 0, last, timeline=timeline)
            if is_taken:
                assert sum([len(run) async for run in runs]) == last + 1
            else:
                with pytest.raises(OtherTimeline):
                    await anext(runs)

    in_room(test, forked)
