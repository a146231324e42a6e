"""Groups whose log, or the group log itself, was ended by an operator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from uuid import UUID

import pytest

from tests.unit.waltzd.server.subscriptions.room import Room
from waltzd.errors import NotReady, OtherTimeline
from waltzd.protocol.groups import AckKind, Change
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import NEVER_FORKED
from waltzd.server.groups.state_log import group_entry


def test_a_group_goes_over_by_itself_where_nothing_above_the_fork_was_acknowledged() -> None:
    async def story(room: Room) -> None:
        for _ in range(10):
            await room.append(1)
        await room.make("mailer")
        async with room.member("mailer", "a", room=100) as a:
            await a.take(10)
            await a.acknowledge(0, 1, 2, 3, 4)
            await a.say(AckKind.REJECT, 7, reason="never")
        timeline = await room.cluster.rescue(0, 5)
        await room.client.set_partitions([])
        await room.client.set_partitions([0])
        await room.append(10)
        async with room.member("mailer", "b", room=100) as b:
            assert b.joined is not None
            assert b.joined.timelines[-1].identity == timeline
            assert [one.id for one in await b.take(11)] == list(range(5, 16)), "each id of the new log is given out"
        assert room.parked("mailer") == []

    Room.run(story)


def test_a_group_stops_above_the_fork_until_it_is_reset() -> None:
    async def story(room: Room) -> None:
        for _ in range(10):
            await room.append(1)
        found = await room.make("mailer")
        async with room.member("mailer", "a", room=100) as a:
            await a.take(10)
            await a.acknowledge(*range(8))
        await room.cluster.rescue(0, 5)
        await room.client.set_partitions([])
        await room.client.set_partitions([0])
        await room.append(20)
        await room.again_and_again(lambda: room.coordinator().level())
        await room.until(lambda: "stands at id" in room.group_partition("mailer").stopped)
        async with room.member("mailer", "b", room=100) as b:
            await b.until(lambda: "group reset mailer --partitions 0 --after 5" in b.paused)
            assert (b.given, room.group_partition("mailer").is_at_work) == ([], True)
            for change, ids in ((Change.GO_ON, []), (Change.SKIP, [20])):
                with pytest.raises(OtherTimeline):
                    await room.coordinator().change("mailer", found.made_at, 0, change, ids)
            await room.coordinator().change("mailer", found.made_at, 0, Change.RESET, [5])
        async with room.member("mailer", "c", room=100) as c:
            assert [one.id for one in await c.take(20)] == list(range(6, 26))
            await c.acknowledge(*range(6, 26))
            await c.kept(1)
        assert (room.group_partition("mailer").floor, room.group_partition("mailer").stopped) == (25, "")

    Room.run(story)


def test_what_a_group_log_forgot_is_read_anew_and_claimed_again() -> None:
    async def story(room: Room) -> None:
        for _ in range(10):
            await room.append(1)
        await room.make("mailer")
        async with room.member("mailer", "a", room=100) as a:
            await a.take(10)
            await a.acknowledge(0, 1)
            await a.kept(1)
        end = room.cluster.end_position(room.cluster.meta.partitions)
        async with room.member("mailer", "a2", room=100) as a:
            await a.acknowledge(*[one.id for one in await a.take(8)])
            await a.kept(1)
        await room.make("other")
        await room.cluster.rescue(room.cluster.meta.partitions, end)
        async with room.member("mailer", "b", room=100) as b:
            assert [one.id for one in await b.take(8)] == list(range(2, 10)), "what was given up is done again"
        assert "other" not in room.coordinator().state_log.groups

    Room.run(story)


def test_a_server_that_lives_on_reads_a_forked_group_log_anew() -> None:
    """In a test all servers are killed by a rescue; a server that is not has read what was given up."""

    async def story(room: Room) -> None:
        await room.make("mailer")
        await room.append(5)
        async with room.member("mailer", "a", room=100) as a:
            await a.take(5)
            coordinator = room.coordinator()
            await coordinator.level()
            right, log = coordinator.state_log, coordinator.group_log
            lineage = NEVER_FORKED.forked(identity=UUID(int=2), fork=0, session=1, cause="c", began="b", who="w")

            class Forked:
                """The group log, as it would stand behind a fork."""

                async def end(self) -> Position:
                    return Position(0, lineage.current)

                async def read(self, after: int, to: int) -> AsyncGenerator[list[tuple[int, bytes]], None]:
                    assert (after, to) == (-1, 0)
                    yield [(Position(0, lineage.current), group_entry(right.groups["mailer"][0]))]

            coordinator.group_log = Forked()  # type: ignore[assignment]
            await coordinator.level()
            assert (coordinator.state_log.position.timeline, coordinator.state_log.reach) == (lineage.current, 0)
            assert coordinator.state_log.state("mailer", 0) is None
            assert isinstance(await a.dismissed(), NotReady)
            coordinator.group_log = log

    Room.run(story)
