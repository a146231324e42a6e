"""One owned partition: who gets which id, who is told what, and in which order."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import numpy as np
import pytest

from tests.unit.mounting import KEY, LIMITS, FakeSession, MemoryLink, Reader, Room, batch_of, in_room, mount_request
from waltzd.cluster.cluster import CLIENT_ID_MAX, CLIENT_NUMBERS_KEPT
from waltzd.errors import (
    BadArgument,
    BeyondLog,
    ClientAhead,
    Displaced,
    ForeignCluster,
    NeedsBatches,
    NotPermitted,
    NotReady,
    TooLarge,
    WaltzError,
)
from waltzd.errors.operations import BadFrame, NotOwner, SessionEnded, TooManyCallers
from waltzd.format.batch import Piece
from waltzd.format.record import bad_payloads, first_bad
from waltzd.protocol.batches import AppendBatch, Committals, Credit, Feed, FeedMode, Refused, Registration
from waltzd.protocol.locks import MarkedQuery, Mode, Reason
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.calls import token_of
from waltzd.server.clients.mounts import FRAME_COST
from waltzd.server.clients.pipeline import NUMBER_JUMP_MAX, STEP_ROWS_MAX, MountHandle, Pipeline
from waltzd.server.clients.registry import NOBODY, QuotaUsage

WRITE = Mode.WRITE


def slow(*, next_id: int = 0) -> FakeSession:
    """A session whose commits wait for the test."""
    return FakeSession(next_id=next_id, commits_at_once=False)


# -- ids and records ---------------------------------------------------------------------------------------------------


def test_what_arrives_together_becomes_one_run() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1), await room.mount(2)
        await one.say(batch_of(b"a", b"b", first=10, header=-7))
        await two.say(batch_of(b"c", first=4))
        await one.say(batch_of(b"d", first=20))
        await one.until(lambda reader: len(reader.committed) == 3)
        await two.until(lambda reader: len(reader.committed) == 1)
        (run,) = room.session.runs
        assert first_bad(run) is None
        assert not bad_payloads(run).size
        records = [run.record(number) for number in range(len(run))]
        ids = {(str(record.request), record.payload): record.id for record in records}
        assert ids == {
            ("1:5:3:10", b"a"): one.committed[10],
            ("1:5:3:11", b"b"): one.committed[11],
            ("1:5:3:20", b"d"): one.committed[20],
            ("2:5:3:4", b"c"): two.committed[4],
        }
        assert sorted(ids.values()) == [0, 1, 2, 3]
        assert one.committed[10] < one.committed[11] < one.committed[20]
        assert {record.header for record in records if record.request.sequence == 10} == {-7}

    in_room(test)


def test_what_has_no_company_gets_its_ids_in_the_call_that_brings_it_and_what_has_some_waits_for_it() -> None:
    async def test(room: Room) -> None:
        pipe, session = room.pipe, room.session
        one, two = (
            MountHandle(1, 0, -1, QuotaUsage(NOBODY, lambda: 0.0)),
            MountHandle(2, 0, -1, QuotaUsage(NOBODY, lambda: 0.0)),
        )
        pipe.join(one)
        await pipe.append(one, batch_of(b"alone"), 100)
        assert session.payloads() == [b"alone"]
        await pipe.append(one, batch_of(b"behind it", first=1), 100)
        assert len(session.runs) == 1, "what is in flight may be joined by more"
        await room.quiet()
        session.commit(session.cache.next_id - 1)
        pipe.join(two)
        await pipe.append(one, batch_of(b"beside", first=2), 100)
        await pipe.append(two, batch_of(b"another"), 100)
        assert len(session.runs) == 2
        await room.quiet()
        assert [len(run) for run in session.runs] == [1, 1, 2]
        pipe.leave(one)
        pipe.leave(two)

    in_room(test, slow)


def test_a_pipeline_that_is_held_gives_no_ids_to_what_has_no_company_either() -> None:
    async def test(room: Room) -> None:
        one = MountHandle(1, 0, -1, QuotaUsage(NOBODY, lambda: 0.0))
        room.pipe.join(one)
        room.pipe.hold()
        await room.pipe.append(one, batch_of(b"late"), 100)
        await room.quiet()
        assert room.session.runs == []
        room.pipe.leave(one)

    in_room(test, slow)


def test_refused_rows_leave_no_hole_and_the_others_keep_their_payloads() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        locks = [[(9, WRITE)], [(9, WRITE)], [], [(9, WRITE)], []]
        await one.say(batch_of(b"first", b"no", b"third", b"nor this", b"", locks=locks))
        await one.until(lambda reader: len(reader.committed) + len(reader.refused) == 5)
        assert one.committed == {0: 0, 2: 1, 4: 2}
        assert one.refused == {1: (Reason.IN_FLIGHT, 0, 9), 3: (Reason.IN_FLIGHT, 0, 9)}
        assert room.session.payloads() == [b"first", b"third", b""]
        assert not bad_payloads(room.session.runs[0]).size
        assert room.pipe.counters.refused[Reason.IN_FLIGHT] == 2

    in_room(test)


@pytest.mark.parametrize(("is_committed", "reason"), [(False, Reason.IN_FLIGHT), (True, Reason.CONFLICT)])
def test_a_conflict_with_another_client(is_committed: bool, reason: Reason) -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1), await room.mount(2)
        await one.say(batch_of(b"mine", locks=[[(5, WRITE)]]))
        await room.quiet()
        if is_committed:
            room.session.commit(0)
        await two.say(batch_of(b"yours", b"free", locks=[[(5, WRITE)], []]))
        await two.until(lambda reader: bool(reader.refused))
        assert two.refused == {0: (reason, 0, 5)}
        room.session.commit(1)
        await two.until(lambda reader: bool(reader.committed))
        assert two.committed == {1: 1}

    in_room(test, slow)


def test_a_commit_in_the_middle_of_a_batch_tells_just_that_part() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", b"b", b"c", first=5))
        await room.quiet()
        room.session.commit(1)
        await one.settle()
        assert one.committed == {5: 0, 6: 1}
        assert room.inflight_bytes > 0
        room.session.commit(2)
        await one.settle()
        assert one.committed == {5: 0, 6: 1, 7: 2}
        assert room.inflight_bytes == 0

    in_room(test, slow)


def test_a_long_batch_is_done_in_pieces_and_others_have_their_turn() -> None:
    limits = replace(LIMITS, frame_bytes_max=16 << 20)

    async def test(room: Room) -> None:
        one, two = await room.mount(1), await room.mount(2)
        count = 2 * STEP_ROWS_MAX + 10
        rows = [[(row, WRITE)] if row % 3 == 0 else [] for row in range(count)]
        await one.say(batch_of(*[b"%d" % row for row in range(count)], locks=rows))
        await two.say(batch_of(b"short"))
        await two.until(lambda reader: bool(reader.committed))
        await one.until(lambda reader: len(reader.committed) == count)
        assert [len(run) <= STEP_ROWS_MAX + 1 for run in room.session.runs] == [True] * len(room.session.runs)
        assert len(room.session.runs) >= 3
        assert two.committed[0] <= 2 * STEP_ROWS_MAX
        written = [payload for payload in room.session.payloads() if payload != b"short"]
        assert written == [b"%d" % row for row in range(count)]
        assert room.pipe.explain(0).locks == len([row for row in rows if row])

    in_room(test, limits=limits)


# -- outcomes ----------------------------------------------------------------------------------------------------------


def test_an_outcome_comes_before_the_transaction_in_the_feed() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(feed=FeedMode.RECORDS)
        for number in range(5):
            await one.say(batch_of(b"%d" % number, first=number))
            await one.until(lambda reader, number=number: len(reader.ids) == number + 1)  # type: ignore[misc]
        seen: set[int] = set()
        for frame in one.frames:
            if isinstance(frame, Committals):
                seen |= set(frame.ids.tolist())
            if isinstance(frame, Feed):
                assert set(range(frame.run.first_id, frame.run.last_id + 1)) <= seen

    in_room(test)


def test_what_is_ready_leaves_as_one_message() -> None:
    """While a message is on its way, outcomes gather: load makes messages larger and not more."""

    async def test(room: Room) -> None:
        one = await room.mount(room=1)
        await one.say(batch_of(b"0"))
        await room.quiet()
        for number in range(1, 50):
            await one.say(batch_of(b"%d" % number, first=number))
            await room.quiet()
        assert len(room.session.runs) == 50
        await one.until(lambda reader: len(reader.committed) == 50)
        assert len(one.messages) <= 4
        assert one.committed == {number: number for number in range(50)}

    in_room(test)


def test_a_client_that_has_no_more_to_say_is_answered_first() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a"))
        await one.link.finish()
        await room.quiet()
        assert not one.serving.done()
        room.session.commit(0)
        await one.until(lambda reader: bool(reader.committed))
        await one.serving
        assert one.committed == {0: 0}
        assert room.pipe.mounts == 0

    in_room(test, slow)


# -- displacement and the barrier --------------------------------------------------------------------------------------


def test_a_newer_mount_displaces_the_older_one_and_what_that_still_had_is_lost() -> None:
    async def test(room: Room) -> None:
        old = await room.mount(number=1)
        await old.say(batch_of(b"has an id"))
        await room.quiet()
        assert room.pipe.last_id == 0
        await old.say(batch_of(b"too late", first=1))  # not taken before the next mount is
        new = await room.knock(mount_request(number=2))
        await new.hear()
        assert new.mounted is not None
        barrier = new.mounted.barrier
        await old.say(batch_of(b"much too late", first=2))
        await new.say(batch_of(b"again", first=3))
        await old.until(lambda reader: reader.end is not None)
        assert isinstance(old.end, Displaced)
        await room.quiet()
        room.session.commit(room.pipe.last_id)
        await new.until(lambda reader: bool(reader.committed))
        written = room.session.payloads()
        assert written[: barrier + 1] in ([b"has an id"], [b"has an id", b"too late"])
        assert written[barrier + 1 :] == [b"again"]

    in_room(test, slow)


def test_what_waits_in_the_queue_when_a_newer_mount_comes_never_gets_an_id() -> None:
    async def test(room: Room) -> None:
        old = await room.mount(number=1)
        await old.say(batch_of(b"x" * 3000))
        await room.quiet()
        await old.say(batch_of(b"queued behind the bound", first=1))
        await room.quiet()
        assert room.queued_bytes > 0
        new = await room.mount(number=2)
        assert new.mounted is not None
        assert new.mounted.barrier == 0
        await new.say(batch_of(b"new", first=2))
        room.session.commit(0)
        await room.quiet()
        assert room.session.payloads() == [b"x" * 3000, b"new"]

    in_room(test, slow, inflight_bytes_max=2000)


def test_the_barrier_counts_what_is_not_committed() -> None:
    async def test(room: Room) -> None:
        old = await room.mount(client=4, number=1)
        await old.say(batch_of(b"a", b"b", marks=6))
        await room.quiet()
        new = await room.mount(client=4, number=2, mark=6, feed=FeedMode.RECORDS)
        assert new.mounted is not None
        assert (new.mounted.barrier, room.pipe.committed) == (8, 6)
        await new.settle()
        assert new.ids == [], "nothing is fed before it is committed"
        room.session.commit(8)
        await new.until(lambda reader: reader.ids == [7, 8])
        assert new.committed == {}, "outcomes belong to the mount that asked"

    in_room(test, lambda: slow(next_id=7))


@pytest.mark.parametrize("number", [3, 2])
def test_a_mount_that_is_not_newer_is_refused(number: int) -> None:
    async def test(room: Room) -> None:
        current = await room.mount(number=3)
        late = await room.knock(mount_request(number=number))
        await late.hear()
        assert isinstance(late.end, Displaced)
        await current.say(batch_of(b"a"))
        await current.until(lambda reader: bool(reader.committed))

    in_room(test)


def test_who_is_ahead_of_the_log_does_not_get_in_and_displaces_nobody() -> None:
    async def test(room: Room) -> None:
        current = await room.mount(number=1)
        await current.say(batch_of(b"a"))
        await room.quiet()
        ahead = await room.knock(mount_request(number=2, mark=1))
        await ahead.hear()
        assert isinstance(ahead.end, ClientAhead)
        level = await room.knock(mount_request(client=2, mark=0))  # not committed yet, but there
        await level.hear()
        assert level.mounted is not None
        room.session.commit(0)
        await current.until(lambda reader: bool(reader.committed))

    in_room(test, slow)


def test_a_broken_connection_takes_what_was_queued_with_it() -> None:
    """The client's next mount must not find it later behind its barrier."""

    async def test(room: Room) -> None:
        other = await room.mount(client=2)
        await other.say(batch_of(b"x" * 3000))
        await room.quiet()
        one = await room.mount(number=1)
        await one.say(batch_of(b"waits behind the bound"))
        await room.quiet()
        assert room.queued_bytes > 0
        await one.leave()
        again = await room.mount(number=2)
        assert again.mounted is not None
        assert again.mounted.barrier == 0
        room.session.commit(0)
        await room.quiet()
        assert room.session.payloads() == [b"x" * 3000]
        assert room.queued_bytes == 0

    in_room(test, slow, inflight_bytes_max=2000)


# -- one who is wrong is wrong alone -----------------------------------------------------------------------------------

GOOD = batch_of(b"one", b"two", first=100, locks=[[(1, Mode.READ)], []])
NONSENSE: list[tuple[str, AppendBatch | Credit, type[WaltzError]]] = [
    ("damaged payload", replace(GOOD, payloads=b"oneTwo"), BadFrame),
    ("wrong checksum", replace(GOOD, data_crcs=GOOD.data_crcs + np.uint32(1)), BadFrame),
    ("columns differ", replace(GOOD, headers=GOOD.headers[:1]), BadFrame),
    ("lengths differ", replace(GOOD, lengths=GOOD.lengths + 1), BadFrame),
    ("negative length", replace(GOOD, lengths=np.array([7, -1])), BadFrame),
    ("too few locks", replace(GOOD, lock_ids=GOOD.lock_ids[:0]), BadFrame),
    ("negative locks", replace(GOOD, lock_counts=np.array([2, -1])), BadFrame),
    ("unknown mode", replace(GOOD, lock_modes=GOOD.lock_modes + np.uint8(3)), BadFrame),
    ("mark below", replace(GOOD, marks=np.array([-1, -2])), BadFrame),
    ("ahead", replace(GOOD, marks=np.array([-1, 10_000])), ClientAhead),
    ("old sequence", replace(GOOD, first_sequence=4), BadFrame),
    ("negative sequence", replace(GOOD, first_sequence=-1), BadFrame),
    ("last sequence", replace(GOOD, first_sequence=0x7FFFFFFF), BadFrame),
    ("too long", batch_of(b"x" * (LIMITS.payload_bytes_max + 1), first=100), TooLarge),
    ("too many locks", batch_of(b"x", first=100, locks=[[(1, WRITE)] * 11]), TooLarge),
    ("too large", batch_of(*[b"x" * 60_000] * 5, first=100), TooLarge),
    ("damaged among many", replace(batch_of(*[b"abc"] * 40, first=100), payloads=b"abc" * 39 + b"abd"), BadFrame),
    ("no credit", Credit(0), BadFrame),
    ("negative credit", Credit(-5), BadFrame),
]


@pytest.mark.parametrize(
    ("frame", "kind"), [(frame, kind) for _, frame, kind in NONSENSE], ids=[name for name, *_ in NONSENSE]
)
def test_nonsense_ends_that_mount_and_no_other(frame: AppendBatch | Credit, kind: type[WaltzError]) -> None:
    async def test(room: Room) -> None:
        bad, good = await room.mount(1), await room.mount(2)
        await bad.say(batch_of(b"before", first=4))
        await bad.until(lambda reader: reader.committed == {4: 0})
        await bad.say(frame)
        await bad.say(batch_of(b"behind", first=500))
        await good.say(batch_of(b"good"))
        await bad.until(lambda reader: reader.end is not None)
        assert type(bad.end) is kind
        await good.until(lambda reader: bool(reader.committed))
        assert room.session.payloads() == [b"before", b"good"], "nothing of the frame is written, and nothing behind it"
        await bad.link.finish()
        with pytest.raises(kind):
            await bad.serving
        assert room.pipe.mounts == 1

    in_room(test)


def test_a_message_that_cannot_be_read_ends_that_mount() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.link.say_nonsense(BadFrame("a column of 7 bytes"))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, BadFrame)

    in_room(test)


def test_a_second_mount_request_ends_the_stream() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(mount_request(number=9))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, BadFrame)
        for number in range(100):
            await one.say(batch_of(b"x" * 60_000, first=number))
        await room.quiet()
        for _ in range(20):
            await room.quiet()
        assert one.link.untaken == 0, "what comes behind a refusal is read and ignored, and does not wait for room"
        assert room.session.runs == []

    in_room(test, mount_bytes_max=100_000)


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((mount_request(key=UUID(int=8)),), ForeignCluster),
        ((mount_request(partition=2),), NotOwner),
        ((mount_request(generation=4),), NotOwner),
        ((mount_request(client=-1),), BadFrame),
        ((mount_request(number=-1),), BadFrame),
        ((mount_request(mark=-2),), BadFrame),
        ((mount_request(credit=-1),), BadFrame),
        ((batch_of(b"a"),), BadFrame),
        ((mount_request(), batch_of(b"a")), BadFrame),
        ((), BadFrame),
    ],
)
def test_who_does_not_get_in_is_told_why(frames: tuple[AppendBatch, ...], kind: type[WaltzError]) -> None:
    async def test(room: Room) -> None:
        stranger = await room.knock(*frames)
        (refused,) = await stranger.hear()
        assert isinstance(refused, Refused)
        assert type(refused.error) is kind
        await stranger.say(batch_of(b"ignored"))
        await stranger.link.finish()
        with pytest.raises(kind):
            await stranger.serving
        assert room.session.runs == []

    in_room(test)


def test_a_client_that_does_not_say_what_it_wants_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(room: Room) -> None:
        link = MemoryLink()
        await link.finish()
        await room.calls.mount(link)
        assert link.unread == 0
        silent = MemoryLink()
        with pytest.raises(BadFrame, match="sent no request"):
            await room.calls.mount(silent)
        assert len(await silent.hear()) == 1

    monkeypatch.setattr("waltzd.server.clients.calls.REQUEST_SECONDS", 0.01)
    monkeypatch.setattr("waltzd.server.clients.mounts.REFUSED_SECONDS", 0.01)
    in_room(test)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_client_that_never_reads_is_not_read_either_and_stops_nobody() -> None:
    async def test(room: Room) -> None:
        deaf, good = await room.mount(1, feed=FeedMode.RECORDS, room=1), await room.mount(2)
        for number in range(500):
            await deaf.say(batch_of(b"x" * 500, first=number))
        await room.quiet()
        for _ in range(50):
            await room.quiet()
        cost = 500 + 40 + FRAME_COST
        written = len(room.session.whole())
        assert written * cost <= 2 * 20_000, "one message is in the link, what the next answers fills the bound"
        assert deaf.link.untaken >= 500 - written - 1
        await good.say(batch_of(b"good"))
        await good.until(lambda reader: bool(reader.committed))
        await deaf.until(lambda reader: len(reader.committed) == 500)

    in_room(test, mount_bytes_max=20_000)


def test_nothing_is_written_above_the_bound_until_something_is_committed() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        for number in range(40):
            await one.say(batch_of(b"x" * 960, first=number))
            await room.quiet()
        cost = 960 + 40 + FRAME_COST
        assert room.pipe.last_id + 1 == 5, "the step that crosses the bound is the last"
        assert room.inflight_bytes == 5 * cost
        assert room.queued_bytes <= 10_000
        assert one.link.untaken == 40 - 5 - room.queued_bytes // cost - 1
        while room.pipe.committed < 39:
            room.session.commit(room.pipe.last_id)
            await one.settle()
        assert one.committed == {number: number for number in range(40)}
        assert room.queued_bytes == 0

    in_room(test, slow, inflight_bytes_max=10_000)


def test_a_batch_larger_than_every_bound_passes_alone() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"x" * 60_000))
        await one.say(batch_of(b"y" * 60_000, first=1))
        await one.until(lambda reader: len(reader.committed) == 2)

    in_room(test, inflight_bytes_max=1000, mount_bytes_max=1000)


def test_many_tiny_frames_are_bounded_as_well() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(room=1)
        await one.say(batch_of(b"never committed"))
        for number in range(200):
            await one.say(batch_of(b"", first=number + 1))
        await room.quiet()
        for _ in range(30):
            await room.quiet()
        assert one.link.untaken >= 200 - 20_000 // FRAME_COST
        while len(one.committed) < 201:
            room.session.commit(room.pipe.last_id)
            await one.settle()

    in_room(test, slow, mount_bytes_max=20_000)


def test_so_many_callers_and_no_more() -> None:
    async def test(room: Room) -> None:
        one, two = await room.mount(1), await room.mount(2)
        third = await room.knock(mount_request(3))
        await third.hear()
        assert isinstance(third.end, TooManyCallers)
        again = await room.mount(2, number=2)  # takes the place of its older self
        await two.until(lambda reader: reader.end is not None)
        await one.leave()
        await room.mount(3)
        assert again.mounted is not None

    in_room(test, callers_max=2)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_end_of_a_session_is_told_behind_what_was_decided() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(room=1)
        await one.say(batch_of(b"committed", b"refused", locks=[[(1, WRITE)], [(1, WRITE)]]))
        await room.quiet()
        room.session.commit(0)
        await room.quiet()
        await one.say(batch_of(b"in flight", first=2))
        await room.quiet()
        room.pipe.close(SessionEnded("a member came"))
        room.session.commit(1)
        await one.say(batch_of(b"too late", first=3))
        await one.until(lambda reader: reader.end is not None)
        assert isinstance(one.end, SessionEnded)
        assert one.untaken == 3
        assert one.committed == {0: 0}
        assert list(one.refused) == [1]
        await room.quiet()
        assert room.session.payloads() == [b"committed", b"in flight"]
        late = await room.knock(mount_request(2))
        await late.hear()
        assert isinstance(late.end, SessionEnded)

    in_room(test, slow)


def test_what_has_no_id_when_a_session_is_held_is_told_to_be_untaken_and_the_rest_is_answered() -> None:
    async def test(room: Room) -> None:
        one, two, three = await room.mount(1), await room.mount(2), await room.mount(3)
        await one.say(batch_of(b"in flight", b"refused", b"x" * 2000, first=4, locks=[[(1, WRITE)], [(1, WRITE)], []]))
        await room.quiet()
        await one.say(batch_of(b"queued", first=7), batch_of(b"too", first=8))  # too much is in flight
        await two.say(batch_of(b"queued as well", first=50))
        await room.quiet()
        room.pipe.hold()
        await one.say(batch_of(b"late", first=9))
        await room.quiet()
        room.session.commit(1)  # there would be room again
        await room.quiet()
        room.pipe.close(SessionEnded("handed over"))
        for reader in (one, two, three):
            await reader.until(lambda reader: reader.end is not None)
        assert (one.committed, list(one.refused)) == ({4: 0, 6: 1}, [5])
        assert (one.untaken, two.untaken, three.untaken) == (7, 0, 0)
        await room.quiet()
        assert room.session.payloads() == [b"in flight", b"x" * 2000]

    in_room(test, slow, inflight_bytes_max=1500)


def test_a_batch_that_is_taken_in_part_is_told_to_be_untaken_from_there() -> None:
    async def test(room: Room) -> None:
        one = await room.mount(1)
        await one.say(batch_of(*[b"x"] * (STEP_ROWS_MAX + 1), first=3))
        await room.quiet()
        room.pipe.close(SessionEnded("handed over"))
        await one.until(lambda reader: reader.end is not None)
        assert len(room.session.payloads()) == STEP_ROWS_MAX
        assert one.untaken == 3 + STEP_ROWS_MAX

    in_room(test, slow, inflight_bytes_max=1500)


def test_a_client_that_does_not_read_cannot_hold_a_closed_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(room: Room) -> None:
        deaf = await room.mount(room=1)
        for number in range(3):
            await deaf.say(batch_of(b"x", first=number))
            await room.quiet()
        room.pipe.close(SessionEnded("over"))
        with pytest.raises(SessionEnded):
            await deaf.serving
        assert room.capacity.callers == 0

    monkeypatch.setattr("waltzd.server.clients.mounts.REFUSED_SECONDS", 0.01)
    in_room(test)


def test_a_mistake_of_ours_is_not_silent() -> None:
    class Broken(FakeSession):
        def append(self, piece: Piece) -> None:
            raise AssertionError("the tail stands elsewhere")

    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a"))
        await room.quiet()
        (error,) = room.fatal
        assert isinstance(error, AssertionError)
        room.fatal.clear()

    in_room(test, Broken)


# -- whose a client id is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["none", "of another id", "of another cluster", "of a certificate", "longer"])
def test_a_client_id_is_mounted_only_by_whom_it_was_given_to(token: str) -> None:
    async def test(room: Room) -> None:
        registration = await room.calls.register(KEY)
        client = registration.client
        first = await room.mount(client)
        shown = {
            "none": b"",
            "of another id": (await room.calls.register(KEY)).token,
            "of another cluster": token_of(b"another secret", client, ""),
            "of a certificate": token_of(room.client_secret, client, "waltz://k/role/client/ann"),
            "longer": registration.token + b"\0",
        }[token]
        stranger = await room.knock(mount_request(client, number=2, token=shown))
        await stranger.hear()
        assert isinstance(stranger.end, NotPermitted)
        await first.say(batch_of(b"mine"))
        await first.until(lambda reader: len(reader.committed) == 1)
        assert first.end is None, "it does not notice anything"

    in_room(test)


def test_a_token_is_good_with_the_certificate_that_it_was_given_to() -> None:
    async def test(room: Room) -> None:
        ann, eve = (Identity(KEY, Role.CLIENT, name).uri for name in ("ann", "eve"))
        registration = await room.calls.register(KEY, ann)
        for identity in (eve, "", ann):
            reader = await room.knock(mount_request(registration.client, token=registration.token), identity=identity)
            await reader.hear()
            assert (reader.mounted is not None) is (identity == ann)
            assert (isinstance(reader.end, NotPermitted)) is (identity != ann)

    in_room(test)


def test_the_holder_of_a_client_id_that_is_given_out_again_is_refused() -> None:
    async def test(room: Room) -> None:
        async def knock(found: Registration, number: int = 1) -> Reader:
            reader = await room.knock(mount_request(found.client, token=found.token, number=number))
            await reader.hear()
            return reader

        first = await room.calls.register(KEY)
        standing = await knock(first, number=9)
        assert standing.mounted is not None
        room.newest_client = CLIENT_NUMBERS_KEPT
        assert (await knock(first, number=10)).mounted is not None, "it is good for a long time"
        for newest in (CLIENT_NUMBERS_KEPT + 2, CLIENT_ID_MAX, CLIENT_ID_MAX + CLIENT_NUMBERS_KEPT + 2):
            room.newest_client = newest
            late = await knock(first, number=11)
            assert isinstance(late.end, NotPermitted)
            assert "are given out again" in late.end.message

        room.registered = room.newest_client = CLIENT_ID_MAX
        second = await room.calls.register(KEY)
        room.newest_client += 1
        assert (second.client, second.token == first.token) == (first.client, False)
        anew = await knock(second)
        assert anew.mounted is not None, "whatever number the older holder has come to"
        await anew.say(batch_of(b"anew"))
        await anew.until(lambda reader: len(reader.committed) == 1)
        assert isinstance((await knock(first, number=12)).end, NotPermitted)

    in_room(test)


def test_a_mount_of_an_older_lap_ends_when_the_id_has_another_holder() -> None:
    """It stood all the time, so nobody asked how old its client id is."""

    async def test(room: Room) -> None:
        first = await room.calls.register(KEY)
        standing = await room.knock(mount_request(first.client, token=first.token, number=9))
        await standing.hear()
        room.registered = room.newest_client = CLIENT_ID_MAX
        second = await room.calls.register(KEY)
        anew = await room.knock(mount_request(second.client, token=second.token))
        await anew.hear()
        assert anew.mounted is not None
        await standing.hear()
        assert isinstance(standing.end, Displaced)
        with pytest.raises(Displaced):
            await standing.serving
        assert room.capacity.callers == 1
        room.newest_client = 0  # an owner that knows little, and a mount that was let in meanwhile
        late = await room.knock(mount_request(first.client, token=first.token, number=10))
        await late.hear()
        assert isinstance(late.end, Displaced)
        assert "was given out again" in late.end.message

    in_room(test)


def test_a_mount_number_is_not_jumped_over() -> None:
    async def test(room: Room) -> None:
        first = await room.mount(1, number=5)
        for number in (5 + NUMBER_JUMP_MAX + 1, 1 << 62):
            jumper = await room.knock(mount_request(1, number=number))
            await jumper.hear()
            assert isinstance(jumper.end, BadFrame)
        assert first.end is None
        await room.mount(1, number=5 + NUMBER_JUMP_MAX)
        early = await room.knock(mount_request(2, number=(1 << 40) + 1))
        await early.hear()
        assert isinstance(early.end, BadFrame)

    in_room(test)


# -- without a mount ---------------------------------------------------------------------------------------------------


def test_calls_of_its_cluster_only_are_answered() -> None:
    async def test(room: Room) -> None:
        key, foreign = room.topology().cluster_key, UUID(int=9)
        assert room.calls.locate() == room.topology()
        assert [(await room.calls.register(key)).client for _ in range(2)] == [1, 2]
        assert await room.calls.high_water_mark(key, 3) == 6
        with pytest.raises(ForeignCluster):
            await room.calls.register(foreign)
        with pytest.raises(ForeignCluster):
            await room.calls.high_water_mark(foreign, 3)
        with pytest.raises(ForeignCluster):
            await anext(aiter(room.calls.fetch(foreign, 3, 0, None)))
        with pytest.raises(NotOwner):
            await room.calls.high_water_mark(key, 1)

    in_room(test, lambda: slow(next_id=7))


def test_reading_by_id_sees_what_is_committed_and_no_more() -> None:
    async def test(room: Room) -> None:
        one: Reader = await room.mount()
        await one.say(batch_of(*[b"%d" % number for number in range(10)]))
        await room.quiet()
        room.session.commit(6)
        key = room.topology().cluster_key

        async def fetch(first_id: int, last_id: int | None) -> list[bytes]:
            found: list[bytes] = []
            async for run in room.calls.fetch(key, 3, first_id, last_id):
                found += [run.record(number).payload for number in range(len(run))]
            return found

        assert await fetch(0, None) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
        assert await fetch(5, 6) == [b"5", b"6"]
        assert await fetch(7, None) == []
        for first_id, last_id in ((0, 7), (7, 7), (8, None), (9, 12)):
            with pytest.raises(BeyondLog) as beyond:
                await fetch(first_id, last_id)
            assert beyond.value.facts == {"high_water_mark": "6"}
        for first_id, last_id in ((-1, 3), (3, 2), (-5, None)):
            with pytest.raises(BadArgument):
                await fetch(first_id, last_id)
        assert room.capacity.callers == 1

    in_room(test, slow)


def test_what_is_told_of_a_pipeline() -> None:
    async def test(room: Room) -> None:
        one = await room.mount()
        await one.say(batch_of(b"a", b"b", b"c", marks=6, locks=[[(1, WRITE)], [(1, WRITE)], [(2, WRITE)]]))
        await room.quiet()
        told = room.pipe.explain(1)
        assert (room.pipe.mounts, told.last_id, told.committed) == (1, 8, 6)
        assert (told.locks, told.floor) == (2, 6)
        assert room.pipe.counters.refused == {reason: int(reason is Reason.IN_FLIGHT) for reason in Reason}
        with pytest.raises(ClientAhead):
            room.pipe.check_mark(9)

    in_room(test, lambda: slow(next_id=7))


def test_a_confirmed_mark_is_not_answered_by_who_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(room: Room) -> None:
        async def refuse(_pipeline: Pipeline) -> None:
            raise NotReady("no majority confirmed", partition=3)

        monkeypatch.setattr(Pipeline, "confirm", refuse)
        key = room.topology().cluster_key
        with pytest.raises(NotReady):
            await room.calls.high_water_mark(key, 3, confirmed=True)
        assert await room.calls.high_water_mark(key, 3) == 6
        query = MarkedQuery(groups=((1,),), limit=1)
        with pytest.raises(NotReady):
            await room.calls.fetch_marked(key, 3, query, confirmed=True)
        with pytest.raises(NeedsBatches):
            await room.calls.fetch_marked(key, 3, query)

    in_room(test, lambda: slow(next_id=7))
