"""One owned partition in format 1: what a batch says beside its records, groups, times, a new owner's lock table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mounting import LIMITS, FakeSession, Room, batch_of, in_room, piece_of
from waltzd.errors import NeedsBatches, NotReady, TooLarge
from waltzd.errors.operations import ClockAhead, SessionEnded
from waltzd.format.batch import GROUPS_BYTES_MAX, End, why_wrong
from waltzd.format.record import LockColumns
from waltzd.protocol.batches import Committals, Feed, FeedMode, HeadFeed
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory
from waltzd.server.clients.pipeline import STEP_BYTES_MAX, STEP_ROWS_MAX
from waltzd.server.core.log_cache import RUN_BYTES
from waltzd.server.core.step import AHEAD_MAX

READ, WRITE, APPEND = Mode.READ, Mode.WRITE, Mode.APPEND
NOW = 1_000_000_000


class Clock:
    def __init__(self, now: int = NOW) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def newer(**arguments: Any) -> Callable[[], FakeSession]:
    return lambda: FakeSession(**{"end": End(), **arguments})


# -- what a batch says -------------------------------------------------------------------------------------------------


def test_a_step_becomes_one_batch_that_says_when_where_and_under_which_locks() -> None:
    clock = Clock()

    async def test(room: Room) -> None:
        one = await room.mount(mark=6)
        assert one.mounted is not None
        assert one.mounted.format == 1
        locks = [[(5, WRITE), (6, READ)], [(5, WRITE)], [], [(7, APPEND)], []]
        await one.say(batch_of(b"a", b"refused", b"b", b"c", b"d", first=10, marks=6, locks=locks, groups=[1, 1, 1, 2]))
        await room.quiet()
        clock.now += 7
        await one.say(batch_of(b"e", first=20, marks=6))
        await room.quiet()
        room.session.commit(room.pipe.last_id)
        await one.settle()
        first, second = room.session.batches
        assert (first.head.session, first.head.generation, first.head.committed) == (11, 5, 6)
        assert (first.first_id, len(first), first.head.before, first.head.time) == (7, 4, 99, NOW)
        assert why_wrong(first, End(crc=99, time=5)) == ""
        assert first.locks.counts.tolist() == [2, 0, 1, 0]
        assert first.locks.ids.tolist() == [5, 6, 7]
        assert first.locks.modes.tolist() == [WRITE, READ, APPEND]
        assert first.run.follows is not None
        assert first.run.follows.tolist() == [False, False, False, True]
        assert (second.head.before, second.head.time, second.head.lock_bytes) == (first.head.crc, NOW + 7, 0)
        assert second.head.committed == 6, "the first one was not committed yet"
        assert one.refused == {11: (Reason.IN_FLIGHT, 7, 5)}
        assert one.committed == {10: 7, 12: 8, 13: 9, 14: 10, 20: 11}
        assert [frame.time for frame in one.frames if isinstance(frame, Committals)][-1] == NOW + 7

    in_room(
        test,
        newer(next_id=7, end=End(crc=99, time=5, segment_bytes=1000), commits_at_once=False),
        clock=clock,
    )


def test_the_owner_cuts_segments() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        for number in range(6):
            await one.say(batch_of(b"x" * 100, first=number))
            await one.until(lambda reader, number=number: number in reader.committed)  # type: ignore[misc]
        assert [batch.head.is_last for batch in room.session.batches] == [False, False, False, True, False, False]

    in_room(test, newer(), segment_bytes_max=128 + 4 * 236 - 5, clock=Clock())


def test_a_log_goes_over_with_its_next_session_and_its_clients_mount_again() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        assert one.mounted is not None
        assert one.mounted.format == 0
        await one.say(batch_of(b"a"))
        await one.until(lambda reader: bool(reader.committed))
        room.session.rise(1)
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, SessionEnded)
        again = await room.mount(number=2)
        assert again.mounted is not None
        assert again.mounted.format == 1
        await again.say(batch_of(b"b", b"c", first=1, groups=[2]))
        await again.until(lambda reader: len(reader.committed) == 2)
        (batch,) = room.session.batches
        assert (batch.first_id, batch.head.before) == (1, 0)

    in_room(test, clock=Clock())


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_of_which_a_lock_fails_leaves_nothing() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        rows = [[(1, WRITE)], [], [(2, WRITE)], [(1, WRITE)], [(3, WRITE)]]
        await one.say(batch_of(b"a", b"b", b"c", b"d", b"e", locks=rows, groups=[1, 3, 1]))
        await one.until(lambda reader: len(reader.refused) == 3 and len(reader.committed) == 2)
        assert one.refused == dict.fromkeys((1, 2, 3), (Reason.IN_FLIGHT, 0, 1))
        assert room.session.payloads() == [b"a", b"e"]
        assert room.pipe.counters.refused[Reason.IN_FLIGHT] == 3

    in_room(test, newer(), clock=Clock())


def test_a_group_larger_than_a_step_is_one_batch() -> None:
    rows, size = STEP_ROWS_MAX + 10, STEP_BYTES_MAX // 1000

    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(*[b""] * (rows + 5), groups=[2, rows, 3]))
        await one.until(lambda reader: len(reader.committed) == rows + 5)
        await one.say(batch_of(*[b"x" * 1000] * (size + 5), first=rows + 5, groups=[2, size, 3]))
        await one.until(lambda reader: len(reader.committed) == rows + size + 10)
        for batch in room.session.batches:
            assert batch.run.follows is None or not batch.run.follows[0]
        starts = [batch.first_id for batch in room.session.batches]
        assert not [start for start in starts if 2 < start < rows + 2 or rows + 7 < start < rows + size + 7]

    limits = replace(LIMITS, frame_bytes_max=40 * rows + 2000 * size)
    in_room(test, newer(), limits=limits, clock=Clock())


def test_a_group_larger_than_a_frame_is_refused() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(*[b"x" * 60_000] * 5, groups=[5]))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, TooLarge)
        assert one.untaken == 0
        assert room.session.pieces == []

    in_room(test, newer(), clock=Clock())


def test_a_group_that_no_storage_must_take_is_refused_whatever_the_limits_are() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        size = GROUPS_BYTES_MAX // 8
        await one.say(batch_of(*[bytes(size)] * 8))
        await one.until(lambda reader: len(reader.committed) == 8)
        await one.say(batch_of(*[bytes(size)] * 8, first=8, groups=[8]))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, TooLarge)
        assert one.untaken == 8

    limits = replace(LIMITS, frame_bytes_max=64 << 20, payload_bytes_max=16 << 20)
    in_room(test, newer(), limits=limits, clock=Clock(), mount_bytes_max=64 << 20, inflight_bytes_max=64 << 20)


def test_format_0_has_no_groups() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"alone", b"too", groups=[1, 1]))
        await one.until(lambda reader: len(reader.committed) == 2)
        await one.say(batch_of(b"a", b"b", first=2, groups=[2]))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, NeedsBatches)
        assert room.session.payloads() == [b"alone", b"too"]

    in_room(test)


@pytest.mark.slow
@given(
    frames=st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4), max_size=6),
    inflight=st.integers(100, 1000),
)
def test_every_group_is_in_one_batch_or_nowhere(frames: list[list[list[int]]], inflight: int) -> None:
    """Of each frame some groups, of each group some rows that write one lock each; whatever waits for what."""

    async def test(room: Room) -> None:
        one = await room.mount(mark=-1)
        wanted: list[list[bytes]] = []
        sequence = 0
        for groups in frames:
            payloads = [
                [b"%d %d %d" % (sequence, number, n) for n in range(len(group))] for number, group in enumerate(groups)
            ]
            flat = [payload for group in payloads for payload in group]
            locks = [[(lock, WRITE)] for group in groups for lock in group]
            seen = room.pipe.committed
            await one.say(batch_of(*flat, first=sequence, marks=seen, locks=locks, groups=[len(group) for group in groups]))
            await room.quiet()
            sequence += len(flat)
            wanted += payloads
        await one.until(lambda reader: len(reader.committed) + len(reader.refused) == sequence)
        found = [[batch.run.record(n).payload for n in range(len(batch))] for batch in room.session.batches]
        for group in wanted:
            homes = [payloads for payloads in found if set(group) & set(payloads)]
            assert len(homes) <= 1
            assert not homes or group == [payload for payload in homes[0] if payload in group]
        assert len([payload for payloads in found for payload in payloads]) == len(one.committed)

    in_room(test, newer(), inflight_bytes_max=inflight, clock=Clock())


# -- times -------------------------------------------------------------------------------------------------------------


def test_time_never_falls_whatever_the_clock_shows() -> None:
    clock = Clock(NOW)

    async def test(room: Room) -> None:
        one = await room.mount()
        for number, now in enumerate((NOW, NOW - 500, NOW + 3, 0)):
            clock.now = now
            await one.say(batch_of(b"a", first=number))
            await one.until(lambda reader, number=number: number in reader.committed)  # type: ignore[misc]
        assert [batch.head.time for batch in room.session.batches] == [NOW + 100, NOW + 100, NOW + 100, NOW + 100]

    in_room(test, newer(next_id=5, end=End(crc=1, time=NOW + 100, segment_bytes=0)), clock=clock)


def test_an_effect_is_not_earlier_than_its_cause_in_another_partition() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", seen_time=NOW + 70))
        await one.until(lambda reader: bool(reader.committed))
        await one.say(batch_of(b"b", first=1))
        await one.until(lambda reader: len(reader.committed) == 2)
        assert [batch.head.time for batch in room.session.batches] == [NOW + 70, NOW + 70]

    in_room(test, newer(), clock=Clock())


@pytest.mark.parametrize(("last", "seen", "is_taken"), [
    (0, NOW + AHEAD_MAX, True),
    (0, NOW + AHEAD_MAX + 1, False),
    (NOW + 100 * AHEAD_MAX, NOW + 100 * AHEAD_MAX, True),
])  # fmt: skip
def test_a_time_far_ahead_is_refused_unless_it_is_of_this_very_log(last: int, seen: int, is_taken: bool) -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", seen_time=seen))
        await one.until(lambda reader: bool(reader.committed) or reader.end is not None)
        if is_taken:
            assert room.session.batches[0].head.time == seen
        else:
            assert isinstance(one.end, ClockAhead)
            assert one.untaken == 0
            other = await room.mount(2)
            await other.say(batch_of(b"b"))
            await other.until(lambda reader: bool(reader.committed))
            assert [batch.head.time for batch in room.session.batches] == [NOW], "its time went nowhere"

    in_room(test, newer(end=End(time=last)), clock=Clock())


def test_a_place_is_found_by_its_time() -> None:
    clock = Clock()

    async def test(room: Room) -> None:
        one = await room.mount(mark=9)
        for number in range(4):
            clock.now = NOW + 10 * number
            await one.say(batch_of(b"a", b"b", first=2 * number, marks=9))
            await room.quiet()
        room.session.commit(15)
        room.session.times = {0: 3, NOW: 8, NOW - 5: 20}
        find = room.pipe.find_time
        assert [await find(time) for time in (NOW + 1, NOW + 10, NOW + 11, NOW + 20)] == [11, 11, 13, 13]
        assert [await find(time) for time in (NOW + 21, NOW + 31)] == [15, 15], "never above what is committed"
        assert [await find(time) for time in (0, NOW)] == [3, 8], "from a replica: older ones may be as late"
        assert await find(NOW - 5) == 9, "what stands behind a replica's last id is ours to say"
        assert await room.calls.find_time(room.topology().cluster_key, 3, NOW + 10) == 11

    in_room(test, newer(next_id=10, end=End(crc=1, time=NOW - 5), commits_at_once=False), clock=clock)


def test_format_0_says_nothing_of_time() -> None:
    async def test(room: Room) -> None:
        with pytest.raises(NeedsBatches):
            await room.pipe.find_time(5)

    in_room(test)


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed", [FeedMode.RECORDS, FeedMode.HEADS])
def test_the_feed_says_times_and_groups_also_from_storages(feed: FeedMode) -> None:
    async def test(room: Room) -> None:
        for number in range(20):
            tail = room.session.cache
            room.session.append(piece_of(tail, [b"x" * 50] * 3, time=number, groups=[3] if number % 2 else ()))
        assert room.session.cache.first_id > 20
        one = await room.mount(mark=-1, feed=feed)
        await one.until(lambda reader: len(reader.ids) == 60)
        times: list[int] = []
        follows: list[bool] = []
        goes_on: list[bool] = []
        for frame in one.frames:
            if isinstance(frame, Feed | HeadFeed):
                beside = frame.run if isinstance(frame, Feed) else frame
                count = len(frame.run if isinstance(frame, Feed) else frame.heads)
                assert beside.times is not None
                times += beside.times.tolist()
                follows += [False] * count if beside.follows is None else beside.follows.tolist()
                goes_on += [False] * (count - 1) + [beside.goes_on]
        assert times == [id_ // 3 for id_ in range(60)]
        assert follows == [id_ // 3 % 2 == 1 and id_ % 3 > 0 for id_ in range(60)]
        assert all(follows[at + 1] for at in range(59) if goes_on[at]), "only in the middle of a group"

    in_room(test, newer(tail_bytes=3 * (400 + RUN_BYTES)), feed_frame_bytes=200, cold_chunk_bytes=200)


def test_records_are_read_with_their_locks_from_memory_and_from_storages() -> None:
    async def test(room: Room) -> None:
        for number in range(20):
            room.session.append(piece_of(room.session.cache, [b"a", b"b"], time=1, locks=[[(number, 2)], []]))
        key, ids = room.topology().cluster_key, []
        async for run in room.calls.fetch(key, 3, 0, 39, with_locks=True):
            assert run.locks is not None
            assert run.locks.counts.tolist() == [1 - id_ % 2 for id_ in range(run.first_id, run.last_id + 1)]
            ids += run.locks.ids.tolist()
        assert ids == list(range(20))
        assert room.session.reads
        runs = [run async for run in room.calls.fetch(key, 3, 0, 39)]
        assert all(run.locks is None for run in runs)

    in_room(test, newer(tail_bytes=3 * (300 + RUN_BYTES)), cold_chunk_bytes=200)


# -- the lock table of a new owner -------------------------------------------------------------------------------------


def history(first_id: int, locks: list[int]) -> LockHistory:
    """Each transaction writes one lock."""
    columns = batch_of(*[b""] * len(locks), locks=[[(lock, WRITE)] for lock in locks])
    return LockHistory(first_id, LockColumns(columns.lock_counts, columns.lock_ids, columns.lock_modes))


def with_histories(*found: LockHistory, **arguments: Any) -> Callable[[], FakeSession]:
    def make() -> FakeSession:
        session = newer(next_id=10, end=End(crc=1, time=1), **arguments)()
        session.histories = list(found)
        return session

    return make


def test_a_lagging_client_is_refused_by_a_new_owner_only_until_it_has_read_the_locks() -> None:
    async def test(room: Room) -> None:
        assert (room.pipe.explain(77).mark, room.pipe.explain(77).reason) == (9, Reason.OWNER_CHANGED)
        await room.quiet()
        one = await room.mount(mark=3)
        await one.say(batch_of(b"a", b"b", marks=3, locks=[[(77, WRITE)], [(5, WRITE)]]))
        await one.until(lambda reader: len(reader.refused) + len(reader.committed) == 2)
        assert one.refused == {1: (Reason.CONFLICT, 5, 5)}
        assert room.pipe.explain(100).floor == -1
        room.pipe.check()

    in_room(test, with_histories(history(6, [6, 7, 8, 9]), history(0, [0, 1, 2, 3, 4, 5])), clock=Clock())


def test_a_log_without_batches_is_not_asked_for_locks() -> None:
    async def test(room: Room) -> None:
        room.session.histories = [history(6, [6, 7, 8, 9])]
        await room.quiet()
        assert len(room.session.histories) == 1

    in_room(test, lambda: FakeSession(next_id=10))


def test_locks_that_no_replica_gives_leave_the_table_as_it_is() -> None:
    def silent() -> FakeSession:
        session = with_histories(history(6, [6, 7, 8, 9]))()
        session.fault = NotReady("nobody")
        return session

    async def test(room: Room) -> None:
        await room.quiet()
        assert room.pipe.explain(7).mark == 9
        assert not room.fatal

    in_room(test, silent)


def test_the_reading_of_locks_stops_where_the_log_has_no_batches() -> None:
    async def test(room: Room) -> None:
        await room.quiet()
        explained = room.pipe.explain(3)
        assert (explained.mark, explained.reason) == (5, Reason.OWNER_CHANGED)
        assert room.pipe.explain(7).mark == 7

    in_room(test, with_histories(history(6, [6, 7, 8, 9])))
