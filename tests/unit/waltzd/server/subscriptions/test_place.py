"""Groups at work on a real log: an ordinary partition of a cluster in this process stands for the group log."""

from __future__ import annotations

from tests.unit.waltzd.server.subscriptions.room import Room


def test_members_share_a_queue_and_what_is_acknowledged_comes_never_again() -> None:
    async def story(room: Room) -> None:
        await room.append(10)
        await room.make("mailer")
        async with room.member("mailer", "a", room=2) as a, room.member("mailer", "b", room=2) as b:
            found = {one.id for one in [*await a.take(2), *await b.take(2)]}
            assert found == {0, 1, 2, 3}
            assert [payload for payload in a.payloads] == [b"%d" % id for id in a.ids]
            for hand in (a, b):
                answer = await hand.acknowledge(*hand.ids)
                assert (answer.taken, answer.late, answer.unknown) == (2, 0, 0)
            assert {one.id for one in [*await a.take(2), *await b.take(2)]} == {4, 5, 6, 7}
            again = await a.acknowledge(0, 1, 2, 3)
            assert (again.taken, again.done) == (0, 4)
            await a.kept(again.number)
        await room.again()
        async with room.member("mailer", "c", room=100) as c:
            found = await c.take(6)
            assert {one.id for one in found} == {4, 5, 6, 7, 8, 9}
            assert c.epoch > a.epoch

    Room.run(story)
