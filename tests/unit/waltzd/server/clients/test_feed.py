"""The feed: every committed transaction, once, in order, from memory or from a storage, as fast as the client asks."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.mounting import FakeSession, Room, batch_of, in_room, mount_request
from waltzd.errors import ArchiveAway, NotReady
from waltzd.errors.operations import SessionEnded
from waltzd.format.record import HEAD_BYTES, Run, encode_payloads
from waltzd.protocol.batches import Committals, Credit, Feed, FeedMode, HeadFeed
from waltzd.server.clients import mounts
from waltzd.server.core.log_cache import RUN_BYTES


def tiny_tail() -> FakeSession:
    """Room for about two runs of ten."""
    return FakeSession(tail_bytes=2 * (10 * 50 + RUN_BYTES))


def filled(session: FakeSession, count: int, *, size: int = 10, runs: int = 10) -> None:
    """So many transactions in runs of ten."""
    for _ in range(0, count, runs):
        first_id = session.cache.next_id
        session.append(encode_payloads(first_id, [b"%0*d" % (size, first_id + number) for number in range(runs)]))


def payloads(first_id: int, stop: int, *, size: int = 10) -> list[bytes]:
    return [b"%0*d" % (size, id_) for id_ in range(first_id, stop)]


@pytest.mark.parametrize("mark", range(-1, 100, 7))
def test_from_storages_to_memory_without_gap_or_duplicate(mark: int) -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        assert room.session.cache.first_id >= 60
        one = await room.mount(mark=mark, feed=FeedMode.RECORDS)
        await one.until(lambda reader: len(reader.ids) == 99 - mark)
        filled(room.session, 20)
        await one.until(lambda reader: len(reader.ids) == 119 - mark)
        assert one.ids == list(range(mark + 1, 120))
        assert one.payloads == payloads(mark + 1, 120)
        assert bool(room.session.reads) == (mark + 1 < 60) or mark + 1 >= 60

    in_room(test, tiny_tail, cold_chunk_bytes=300, feed_frame_bytes=200)


@pytest.mark.parametrize("place", [-1, 0, 1])
def test_the_boundary_itself(place: int) -> None:
    """A reader right before, at and behind the first id of the tail."""

    async def test(room: Room) -> None:
        filled(room.session, 100)
        first_id = room.session.cache.first_id
        one = await room.mount(mark=first_id + place - 1, feed=FeedMode.RECORDS)
        await one.until(lambda reader: bool(reader.ids) and reader.ids[-1] == 99)
        assert one.ids == list(range(first_id + place, 100))
        assert room.session.reads == ([(first_id - 1, first_id - 1)] if place < 0 else [])

    in_room(test, tiny_tail)


moves = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 12)),
    st.tuples(st.just("commit"), st.integers(1, 20)),
    st.tuples(st.just("credit"), st.integers(1, 900)),
    st.tuples(st.just("turn"), st.integers(0, 4)),
    st.tuples(st.just("hear"), st.just(0)),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    plan=st.lists(moves, max_size=60),
    start=st.integers(-1, 60),
    tail_bytes=st.integers(0, 4000),
    chunk=st.integers(1, 1500),
    frame=st.integers(1, 1500),
    mode=st.sampled_from([FeedMode.RECORDS, FeedMode.HEADS]),
)
def test_whatever_happens_each_id_comes_once_and_in_order(
    plan: list[tuple[str, int]], start: int, tail_bytes: int, chunk: int, frame: int, mode: FeedMode
) -> None:
    async def test(room: Room) -> None:
        session = room.session
        session.commits_at_once = True
        filled(session, 70, runs=7)
        session.commits_at_once = False
        one = await room.mount(mark=start, feed=mode, credit=0)
        for move, amount in plan:
            match move:
                case "append":
                    first_id = session.cache.next_id
                    session.append(encode_payloads(first_id, [b"%010d" % (first_id + number) for number in range(amount)]))
                case "commit":
                    mark = min(session.committed + amount, session.cache.next_id - 1)
                    if mark > session.committed:
                        session.commit(mark)
                case "credit":
                    await one.say(Credit(amount))
                case "turn":
                    for _ in range(amount):
                        await asyncio.sleep(0)
                case "hear":
                    while one.link.unread:
                        await one.hear()
            assert one.ids == list(range(start + 1, start + 1 + len(one.ids)))
            assert not one.ids or one.ids[-1] <= session.committed
        await one.say(Credit(1 << 30))
        if start < session.committed:
            await one.until(lambda reader: bool(reader.ids) and reader.ids[-1] == session.committed)
        assert one.ids == list(range(start + 1, session.committed + 1))
        if mode is FeedMode.RECORDS:
            assert one.payloads == payloads(start + 1, session.committed + 1)

    in_room(test, lambda: FakeSession(tail_bytes=tail_bytes), cold_chunk_bytes=chunk, feed_frame_bytes=frame)


def test_a_feed_goes_as_far_as_its_credit_and_one_frame() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS, credit=501)
        await one.settle()
        assert len(one.ids) == 20, "two frames of ten records of 50 bytes: 500 are less than 501"
        await one.say(Credit(499))  # the debt is 499
        await one.settle()
        assert len(one.ids) == 20
        await one.say(Credit(1))
        await one.settle()
        assert len(one.ids) == 30
        await one.say(Credit(10_000))
        await one.settle()
        assert one.ids == list(range(100))

    in_room(test, feed_frame_bytes=500)


def test_without_credit_outcomes_still_come() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(feed=FeedMode.RECORDS, credit=0)
        await one.say(batch_of(b"a", b"b"))
        await one.until(lambda reader: len(reader.committed) == 2)
        await one.settle()
        assert one.ids == []
        await one.say(Credit(1))
        await one.until(lambda reader: len(reader.ids) == 2)

    in_room(test)


def test_a_reader_without_credit_reads_nothing_from_a_storage_and_holds_nothing() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 1000)
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS, credit=0)
        await one.settle()
        assert room.session.reads == []
        await one.say(Credit(1))
        await one.settle()
        assert len(room.session.reads) == 1, "one chunk for the credit, and no second one in advance"
        assert room.session.reads_at_once == 0

    in_room(test, tiny_tail, cold_chunk_bytes=500)


def test_a_reader_that_never_reads_keeps_its_place_and_no_record() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(feed=FeedMode.RECORDS, room=1)
        for _ in range(100):
            filled(room.session, 100)
            await room.quiet()
        assert room.session.cache.bytes <= 4 * (500 + RUN_BYTES), "a reader keeps nothing in the tail"
        assert room.session.reads_at_once == 0
        assert len(room.session.reads) <= 4
        await one.until(lambda reader: len(reader.ids) == 10_000)
        assert one.ids == list(range(10_000))

    in_room(test, tiny_tail, cold_chunk_bytes=10_000)


def test_heads_only() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        one = await room.mount(mark=9, feed=FeedMode.HEADS, credit=HEAD_BYTES * 10)
        await one.settle()
        assert one.ids == list(range(10, 20)), "ten records are a frame"
        await one.say(Credit(1))
        await one.settle()
        assert one.ids == list(range(10, 30)), "only heads count"
        await one.say(Credit(10_000))
        await one.until(lambda reader: reader.ids[-1] == 99)
        assert one.ids == list(range(10, 100))
        heads = [frame for frame in one.frames if isinstance(frame, HeadFeed)]
        assert heads[0].heads["length"].tolist() == [10] * 10
        assert heads[0].heads["sequence"].tolist() == list(range(10, 20))
        assert not [frame for frame in one.frames if isinstance(frame, Feed)]

    in_room(test, feed_frame_bytes=500)


def test_no_feed_where_none_was_asked_for() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        one = await room.mount(mark=-1, feed=FeedMode.NONE)
        await one.say(batch_of(b"a"))
        await one.settle()
        assert [isinstance(frame, Committals) for frame in one.frames[1:]] == [True]
        assert room.session.reads == []

    in_room(test, tiny_tail)


def test_nothing_is_copied_for_a_reader_of_whole_runs() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(feed=FeedMode.RECORDS)
        filled(room.session, 10)
        await one.settle()
        (feed,) = [frame for frame in one.frames if isinstance(frame, Feed)]
        assert feed.run is room.session.runs[0]

    in_room(test)


def test_outcomes_do_not_wait_for_a_storage() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        room.session.gate = asyncio.Event()
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS)
        await one.say(batch_of(b"now"))
        await one.until(lambda reader: bool(reader.committed))
        assert one.ids == []
        room.session.gate.set()
        await one.until(lambda reader: len(reader.ids) == 101)

    in_room(test, tiny_tail)


def test_many_readers_share_few_reads_and_take_turns() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 300)
        room.session.gate = asyncio.Event()
        readers = [await room.mount(client, mark=-1, feed=FeedMode.RECORDS) for client in range(10)]
        await room.quiet()
        room.session.gate.set()
        waiting = [asyncio.create_task(reader.until(lambda one: len(one.ids) == 300)) for reader in readers]
        await asyncio.gather(*waiting)
        assert room.session.reads_at_once_max == 2
        firsts = room.session.reads[:10]
        assert firsts == [(0, 63)] * 10, "nobody has a second turn before everybody had the first"
        for reader in readers:
            assert reader.ids == list(range(300))

    in_room(test, tiny_tail, cold_reads_max=2, cold_chunk_bytes=1000)


def test_a_chunk_is_about_as_large_as_it_should_be() -> None:
    """The first read finds out how large records are; the others then end where a chunk ends."""

    async def test(room: Room) -> None:
        filled(room.session, 3000)
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS)
        await one.until(lambda reader: len(reader.ids) == 3000)
        sizes = [last - first + 1 for first, last in room.session.reads]
        assert sizes[0] == 64
        assert set(sizes[1:-1]) == {200}
        assert max(len(frame.run.data) for frame in one.frames if isinstance(frame, Feed)) <= 10_000

    in_room(test, tiny_tail, cold_chunk_bytes=10_000)


def test_a_reader_whose_storage_cannot_be_read_is_told_why_and_nobody_else() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        room.session.fault = NotReady("no replica gives ids from 6 on")
        hot = await room.mount(1, feed=FeedMode.RECORDS)
        cold = await room.mount(2, mark=5, feed=FeedMode.RECORDS)
        await cold.until(lambda reader: reader.end is not None)
        assert isinstance(cold.end, NotReady)
        assert cold.ids == []
        await hot.say(batch_of(b"a"))
        await hot.until(lambda reader: reader.ids == [100])

    in_room(test, tiny_tail)


@pytest.mark.parametrize("answer", [[], [(11, 3)], [(10, 0)], [(9, 2)], [(10, 80)]])
def test_a_replica_that_gives_other_ids_is_not_passed_on(answer: list[tuple[int, int]]) -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)

        async def wrong(first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False):  # type: ignore[no-untyped-def]
            for start, count in answer:
                yield encode_payloads(start, [b"x"] * count)

        room.session.read = wrong  # type: ignore[method-assign]
        one = await room.mount(mark=9, feed=FeedMode.RECORDS)
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, NotReady)
        assert one.ids == []

    in_room(test, tiny_tail)


def test_a_session_that_ends_during_a_cold_read() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 100)
        room.session.gate = asyncio.Event()
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS)
        await room.quiet()
        room.pipe.close(SessionEnded("over"))
        await one.until(lambda reader: reader.end is not None)
        await one.link.finish()
        with pytest.raises(SessionEnded):
            await one.serving
        assert room.session.reads_at_once == 0
        assert not room.capacity.cold_turns.locked()

    in_room(test, tiny_tail, cold_reads_max=1)


def test_reading_by_id_goes_over_the_boundary() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 200)
        runs: list[Run] = [run async for run in room.calls.fetch(room.topology().cluster_key, 3, 5, 190)]
        found = [run.record(number) for run in runs for number in range(len(run))]
        assert [record.id for record in found] == list(range(5, 191))
        assert [record.payload for record in found] == payloads(5, 191)
        assert all(len(run.data) <= 1000 for run in runs)

    in_room(test, tiny_tail, cold_chunk_bytes=1000)


def test_a_reader_that_leaves_in_the_middle_frees_its_turn_and_place() -> None:
    async def test(room: Room) -> None:
        filled(room.session, 200)
        reading = room.calls.fetch(room.topology().cluster_key, 3, 0, 190)
        await anext(aiter(reading))
        assert room.capacity.callers == 1
        await reading.aclose()
        assert room.capacity.callers == 0
        room.session.gate = asyncio.Event()
        waiting = await room.knock(mount_request(mark=-1, feed=FeedMode.RECORDS))
        await room.quiet()
        await waiting.leave()
        assert room.session.reads_at_once == 0
        assert not room.capacity.cold_turns.locked()

    in_room(test, tiny_tail, cold_reads_max=1, cold_chunk_bytes=1000)


def test_a_mount_waits_for_an_archive_that_is_away_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "ARCHIVE_SECONDS", 0.05)

    class Trimmed(FakeSession):
        """Storages have nothing below 20, and the archive does not answer at first."""

        tries = 0

        def is_trimmed(self, id_: int) -> bool:
            return id_ < 20

        async def read_archived(self, first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False) -> Run:
            self.tries += 1
            if self.tries < 4:
                raise ArchiveAway("W2260 the store is away")
            return self.whole().part(first_id, min(last_id + 1, first_id + 3))

    async def test(room: Room) -> None:
        filled(room.session, 100)
        one = await room.mount(mark=-1, feed=FeedMode.RECORDS)
        async with asyncio.timeout(100):
            while not (said := room.registry.describe().clients[0].waiting):
                await asyncio.sleep(0.01)
        assert said == "W2260 the store is away"
        await one.say(batch_of(b"more"))
        await one.until(lambda reader: 0 in reader.committed)  # appends go on
        await one.until(lambda reader: len(reader.ids) == 101)
        assert one.ids == list(range(101))
        assert room.registry.describe().clients[0].waiting == ""
        assert min(first for first, _ in room.session.reads) >= 20

    in_room(test, lambda: Trimmed(tail_bytes=2 * (10 * 50 + RUN_BYTES)))
