"""Transactions that wait until the log has answered which transaction marked their locks last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.mounting import FakeSession, Room, batch_of, in_room
from waltzd.errors.operations import NotOwner
from waltzd.format.batch import End
from waltzd.protocol.locks import Mode, Reason
from waltzd.server.clients import lookups

READ, WRITE, APPEND = Mode.READ, Mode.WRITE, Mode.APPEND
CLOCK = {"clock": lambda: 1_000_000}


def of_old(marks: dict[int, int] | None, *, gated: bool = False, **arguments: Any) -> Callable[[], FakeSession]:
    """A new owner of a log of ten transactions: its table knows none of their locks."""

    def make() -> FakeSession:
        session = FakeSession(**{"next_id": 10, "end": End(crc=1, time=1), **arguments})
        session.old_marks = marks
        session.lookup_gate = asyncio.Event() if gated else None
        return session

    return make


def test_an_unknown_lock_is_looked_up_instead_of_refused() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(mark=3)
        await one.say(batch_of(b"a", b"b", b"c", marks=3, locks=[[(1, WRITE)], [(2, READ)], [(3, WRITE), (1, APPEND)]]))
        await one.until(lambda reader: len(reader.refused) + len(reader.committed) == 3)
        assert one.committed == {0: 10, 2: 11}
        assert one.refused == {1: (Reason.CONFLICT, 7, 2)}
        assert {query.first_id for query in room.session.lookups} == {4}, "older marks do not matter"

    in_room(test, of_old({1: 2, 2: 7}), **CLOCK)


def test_a_table_that_has_evicted_a_lock_asks_the_log() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        for lock in range(6):
            await one.say(batch_of(b"x", first=lock, marks=9 + lock, locks=[[(lock, WRITE)]]))
            await one.until(lambda reader, lock=lock: lock in reader.committed)  # type: ignore[misc]
        assert room.pipe.explain(2).reason is Reason.TOO_FAR_BEHIND
        rows = [[(2, WRITE)], [(99, WRITE)], [(5, WRITE)]]
        await one.say(batch_of(b"a", b"b", b"c", first=6, marks=11, locks=rows))
        await one.until(lambda reader: len(reader.refused) + len(reader.committed) == 9)
        assert one.refused == {6: (Reason.CONFLICT, 12, 2), 8: (Reason.CONFLICT, 15, 5)}
        assert one.committed[7] == 16
        room.pipe.check()

    in_room(test, of_old({}), lock_table_size=2, **CLOCK)


def test_others_pass_and_the_mount_keeps_its_order() -> None:
    async def test(room: Room) -> None:
        one, other = await room.mount(mark=3), await room.mount(2, mark=3)
        await one.say(batch_of(b"a", b"b", b"c", marks=3, locks=[[(1, APPEND)], [(1, READ), (7, WRITE)], [(8, APPEND)]]))
        await one.say(batch_of(b"d", first=3, marks=9, locks=[[(9, WRITE)]]))
        await one.settle()
        assert one.committed == {0: 10}
        for number in range(3):
            await other.say(batch_of(b"o", first=number, marks=9, locks=[[(20 + number, WRITE)]]))
            await other.settle()
        assert list(other.committed.values()) == [11, 12, 13]
        await other.say(batch_of(b"o", first=3, marks=13, locks=[[(7, APPEND)]]))
        await other.settle()
        room.pipe.check()
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: len(reader.refused) + len(reader.committed) == 4)
        assert one.refused == {1: (Reason.CONFLICT, 14, 7)}, "marked while it waited"
        assert one.committed == {0: 10, 2: 15, 3: 16}

    in_room(test, of_old({}, gated=True), **CLOCK)


@pytest.mark.parametrize("fails", [True, False])
def test_without_an_answer_it_is_refused_as_if_nobody_had_asked(fails: bool) -> None:
    async def test(room: Room) -> None:
        one = await room.mount(mark=3)
        rows = [[(lock, WRITE)] for lock in range(40)]
        await one.say(batch_of(*[b"x"] * 40, marks=3, locks=rows))
        await one.until(lambda reader: len(reader.refused) == 40)
        assert set(one.refused.values()) == {(Reason.OWNER_CHANGED, 9, lock) for lock in range(40)}
        assert len({query.lock for query in room.session.lookups}) == lookups.AHEAD_MAX, "it is not asked for each row"
        room.pipe.check()

    in_room(test, of_old(None if fails else {}, gated=not fails), lookup_seconds=0.01, **CLOCK)


def test_over_the_bounds_it_is_refused() -> None:
    async def test(room: Room) -> None:
        one, two, three = [await room.mount(number, mark=3) for number in (1, 2, 3)]
        await one.say(batch_of(b"a", marks=3, locks=[[(1, WRITE), (2, WRITE)]]))
        await one.settle()
        await two.say(batch_of(b"b", b"c", marks=3, locks=[[(3, WRITE), (4, READ)], [(5, WRITE)]]))
        await two.settle()
        assert two.refused == {0: (Reason.OWNER_CHANGED, 9, 3)}, "there is room for one more lock"
        await three.say(batch_of(b"d", marks=3, locks=[[(6, WRITE)]]))
        await three.settle()
        assert three.refused == {0: (Reason.OWNER_CHANGED, 9, 6)}
        room.pipe.check()
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: bool(reader.committed))
        await two.until(lambda reader: bool(reader.committed))

    in_room(test, of_old({}, gated=True), lookups_max=3, **CLOCK)


def test_waiting_batches_are_bounded_in_bytes() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1, mark=3), await room.mount(2, mark=3)
        await one.say(batch_of(b"a" * 3000, marks=3, locks=[[(1, WRITE)]]))
        await one.settle()
        for number in range(1, 6):  # the first one of them is queued before the mount is known to wait
            await one.say(batch_of(b"a" * 3000, first=number, marks=3))
        await one.settle()
        assert room.queued_bytes == 0
        assert one.link.untaken >= 3, "a mount that waits takes nothing more from its client"
        await two.say(batch_of(b"b" * 3000, marks=3, locks=[[(2, WRITE)]]))
        await two.settle()
        assert two.refused == {0: (Reason.OWNER_CHANGED, 9, 2)}
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: len(reader.committed) == 6)
        assert sorted(one.committed.items()) == [(number, 10 + number) for number in range(6)]
        room.pipe.check()

    in_room(test, of_old({}, gated=True), inflight_bytes_max=6000, **CLOCK)


def test_two_mounts_share_a_lookup() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1, mark=3), await room.mount(2, mark=3)
        await one.say(batch_of(b"a", marks=6, locks=[[(1, WRITE)]]))
        await one.settle()
        await two.say(batch_of(b"b", marks=3, locks=[[(1, WRITE)]]))
        await two.settle()
        room.pipe.check()
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: bool(reader.committed))
        await two.until(lambda reader: bool(reader.refused))
        assert (one.committed, two.refused) == ({0: 10}, {0: (Reason.IN_FLIGHT, 10, 1)})

    in_room(test, of_old({1: 5}, gated=True), **CLOCK)


def test_a_lookup_that_reaches_less_far_is_followed_by_one_more() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1, mark=3), await room.mount(2, mark=3)
        await one.say(batch_of(b"a", marks=6, locks=[[(1, READ)]]))
        await one.settle()
        await two.say(batch_of(b"b", marks=3, locks=[[(1, READ)]]))
        await two.settle()
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: bool(reader.committed))
        await two.until(lambda reader: bool(reader.refused))
        assert (one.committed, two.refused) == ({0: 10}, {0: (Reason.CONFLICT, 5, 1)})

    in_room(test, of_old({1: 5}, gated=True), **CLOCK)


def test_what_waits_when_its_mount_or_session_ends_never_gets_an_id() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1, mark=3), await room.mount(2, mark=3)
        for reader in (one, two):
            await reader.say(batch_of(b"a", b"b", marks=3, locks=[[(1, APPEND)], [(5, WRITE)]]))
            await reader.settle()
        again = await room.mount(1, number=2, mark=3)
        assert again.mounted is not None
        assert again.mounted.barrier == 11
        await one.until(lambda reader: reader.end is not None)
        assert one.untaken == 1
        assert room.session.lookup_gate is not None
        room.pipe.close(NotOwner("it is elsewhere"))
        await two.until(lambda reader: reader.end is not None)
        assert two.untaken == 1
        room.session.lookup_gate.set()
        await room.quiet()
        assert room.session.payloads() == [b"a", b"a"]

    in_room(test, of_old({1: 5}, gated=True), **CLOCK)


def test_what_a_mount_that_has_ended_left_waiting_is_dropped() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1, mark=3)
        await one.say(batch_of(b"a", marks=3, locks=[[(5, WRITE)]]))
        await one.settle()
        await one.leave()
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await room.quiet()
        assert room.session.pieces == []
        room.pipe.check()

    in_room(test, of_old({1: 5}, gated=True), **CLOCK)


def test_a_group_waits_as_a_whole() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(mark=3)
        rows = [[(9, APPEND)], [(1, APPEND)], [(2, WRITE)], [(3, WRITE)]]
        await one.say(batch_of(b"a", b"b", b"c", b"d", marks=[9, 9, 3, 3], locks=rows, groups=[1, 2, 1]))
        await one.settle()
        assert one.committed == {0: 10}
        assert room.session.lookup_gate is not None
        room.session.lookup_gate.set()
        await one.until(lambda reader: len(reader.committed) == 4)
        assert one.committed == {0: 10, 1: 11, 2: 12, 3: 13}
        assert [run.follows is not None and run.follows.tolist() for run in room.session.runs][1] == [False, True, False]

    in_room(test, of_old({}, gated=True), **CLOCK)


def test_format_0_has_no_locks_to_look_up() -> None:
    async def test(room: Room) -> None:
        room.session.old_marks = {}
        one = await room.mount(mark=3)
        await one.say(batch_of(b"a", marks=3, locks=[[(5, WRITE)]]))
        await one.until(lambda reader: bool(reader.refused))
        assert one.refused == {0: (Reason.OWNER_CHANGED, 9, 5)}
        assert not room.session.lookups

    in_room(test, lambda: FakeSession(next_id=10))


def test_the_last_mark_of_any_lock_is_explained() -> None:
    async def test(room: Room) -> None:
        found = await room.pipe.explain_exactly(1)
        assert (found.mark, found.reason, found.marker) == (2, Reason.CONFLICT, 2)
        found = await room.pipe.explain_exactly(2)
        assert (found.mark, found.is_exact, found.marker) == (-1, True, None)
        room.session.old_marks = None
        found = await room.pipe.explain_exactly(3)
        assert (found.mark, found.reason, found.is_exact) == (9, Reason.OWNER_CHANGED, False)

    in_room(test, of_old({1: 2}), **CLOCK)
