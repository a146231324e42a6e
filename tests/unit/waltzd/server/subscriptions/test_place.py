"""Groups at work on a real log, with members that say what a test wants."""

from __future__ import annotations

from tests.unit.waltzd.server.subscriptions.room import Room


def test_members_share_a_queue_and_what_is_acknowledged_comes_never_again() -> None:
    async def story(room: Room) -> None:
        await room.append(10)
        await room.make("mailer")
        async with room.member("mailer", "a", room=2) as a, room.member("mailer", "b", room=2) as b:
            assert {one.id for one in [*await a.take(2), *await b.take(2)]} == {0, 1, 2, 3}
            for hand in (a, b):
                assert [one.payload for one in hand.given] == [b"%d" % id for id in hand.ids]
                answer = await hand.acknowledge(*hand.ids)
                assert (answer.taken, answer.late, answer.unknown) == (2, 0, 0)
            assert {one.id for one in [*await a.take(2), *await b.take(2)]} == {4, 5, 6, 7}
            again = await a.acknowledge(0, 1, 2, 3)
            assert (again.taken, again.done) == (0, 4)
            await a.kept(again.number)
            await b.kept(1)
        await room.cluster.kill_owner()
        async with room.member("mailer", "c", room=100) as c:
            assert {one.id for one in await c.take(6)} == {4, 5, 6, 7, 8, 9}
            assert c.epoch > a.epoch

    Room.run(story)
