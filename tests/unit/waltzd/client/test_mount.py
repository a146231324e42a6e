"""A client's view of one partition, event by event: what it asks, what it believes, what it refuses to believe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from waltzd.client.mount import MOVES, Mount, MountEvent, MountState
from waltzd.client.outbox import FRAME_BYTES, ROWS_MAX, TOGETHER_BYTES, Outbox
from waltzd.client.pending import BatchRequest, Request
from waltzd.errors import NotSent, WaltzError
from waltzd.errors.operations import BadFrame, NotOwner
from waltzd.format.record import HEAD, HeadArray
from waltzd.protocol.batches import (
    SEQUENCE_MAX,
    AppendBatch,
    Committals,
    Credit,
    FeedMode,
    Introduction,
    Limits,
    Mounted,
    PartitionLocation,
    Refusals,
    Registration,
    SingleCommittal,
)
from waltzd.protocol.locks import Committed, Reason, Rejected, Unknown

KEY = UUID(int=3)
PLACE = PartitionLocation(generation=4, server="s", address="s:1")
LIMITS = Limits(payload_bytes_max=1000, locks_max=3, frame_bytes_max=500)


class Waiter:
    def __init__(self) -> None:
        self.told: Any = None

    def done(self) -> bool:
        return self.told is not None

    def cancelled(self) -> bool:
        return False

    def set_result(self, outcome: Any) -> None:
        assert self.told is None
        self.told = outcome

    def set_exception(self, error: WaltzError) -> None:
        assert self.told is None
        self.told = error


def request(data: bytes = b"x", deadline: float = 1.0, locks: int = 0) -> Request:
    return Request(-1, data, 0, tuple(range(locks)), (1,) * locks, Waiter(), deadline)


def bundle(count: int, size: int = 1, deadline: float = 1.0) -> BatchRequest:
    return BatchRequest(-1, [b"%d" % (i % 10) * size for i in range(count)], None, None, Waiter(), deadline)


def told(submission: Request | BatchRequest) -> Any:
    assert isinstance(submission.waiter, Waiter)
    return submission.waiter.told


def ids(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


def committals(*pairs: tuple[int, int]) -> Committals:
    return Committals(ids(*[sequence for sequence, _ in pairs]), ids(*[id_ for _, id_ in pairs]))


def refusals(*rows: tuple[int, int, int, int]) -> Refusals:
    columns = list(zip(*rows, strict=True))
    return Refusals(ids(*columns[0]), np.array(columns[1], np.uint8), ids(*columns[2]), np.array(columns[3], np.uint64))


def heads(first_id: int, *requests: tuple[int, int]) -> HeadArray:
    """Heads of the requests (client, sequence)."""
    out = np.zeros(len(requests), HEAD)
    out["id"] = np.arange(first_id, first_id + len(requests))
    out["client"] = [client for client, _ in requests]
    out["sequence"] = [sequence for _, sequence in requests]
    return out


def outbox(messages_max: int = 4, bytes_max: int = 10_000, worth_bytes: int = 0) -> Outbox:
    return Outbox(messages_max=messages_max, bytes_max=bytes_max, worth_bytes=worth_bytes)


def mount(feed: FeedMode = FeedMode.RECORDS, mark: int = 9) -> Mount:
    made = Mount(0, feed, feed_bytes_max=1000, outbox=outbox())
    made.registered(Registration(5, b"token"))
    made.activated(mark)
    return made


def ready(feed: FeedMode = FeedMode.RECORDS, mark: int = 9, barrier: int = 9) -> Mount:
    made = mount(feed, mark)
    begin(made, barrier)
    assert made.state is MountState.READY
    return made


def begin(made: Mount, barrier: int) -> None:
    if made.state is MountState.LOCATING:
        made.located(PLACE)
    made.request(KEY)
    made.answered(Mounted(session=1, barrier=barrier, limits=LIMITS))
    made.check()


def send(made: Mount, *submissions: Request | BatchRequest) -> AppendBatch:
    for submission in submissions:
        made.outbox.add(submission)
    (batch,) = made.take()
    batch.check(LIMITS)
    made.check()
    return batch


def state_of(made: Mount) -> MountState:
    return made.state


# -- the states


def test_every_state_can_end_and_every_event_leads_somewhere() -> None:
    for state, moves in MOVES.items():
        assert (MountEvent.ENDED in moves) == (state is not MountState.IDLE)
    assert {event for moves in MOVES.values() for event in moves} == set(MountEvent)
    assert {target for moves in MOVES.values() for target in moves.values()} == set(MountState)


def test_a_move_that_is_not_in_the_table_stops_with_the_story() -> None:
    made = ready()
    with pytest.raises(AssertionError, match=r"LOCATED.*READY.*ACTIVATED"):
        made.located(PLACE)


def test_the_request_says_where_the_feed_goes_on() -> None:
    made = ready()
    made.fed(10, 12, 100)
    made.link_lost()
    made.located(PLACE)
    asked = made.request(KEY)
    assert (asked.partition, asked.generation, asked.client, asked.number) == (0, 4, 5, 2)
    assert (asked.mark, asked.feed, asked.credit) == (12, FeedMode.RECORDS, 900)


def half_sent() -> Mount:
    """One frame in flight, and one bundle that waits."""
    made = ready()
    made.fed(10, 11, 300)
    send(made, request(b"a"), request(b"b"))
    made.outbox.add(bundle(3))
    made.check()
    return made


@pytest.mark.parametrize(
    "spoil",
    [
        lambda made: setattr(made, "received", made.known + 1),
        lambda made: setattr(made, "state", MountState.LOCATING),
        lambda made: setattr(made, "client", None),
        lambda made: setattr(made, "_credit", 1000),
        lambda made: setattr(made.outbox.sent[0], "floor", made.known + 1),
        lambda made: setattr(made.outbox, "next_sequence", 1),
        lambda made: setattr(made.outbox, "rows", 4),
        lambda made: setattr(made.outbox, "bytes", made.outbox.bytes + 1),
        lambda made: setattr(made.outbox, "_waiting_bytes", 0),
        lambda made: setattr(made.outbox.waiting[0], "ticket", -1),
        lambda made: made.outbox.undecided.append(made.outbox.sent[0]),
        lambda made: made.outbox.sent[0].is_open.fill(False),
    ],
)
def test_a_state_that_cannot_be_is_noticed(spoil: Callable[[Mount], object]) -> None:
    made = half_sent()
    spoil(made)
    with pytest.raises(AssertionError):
        made.check()


# -- asking


def test_what_was_sent_is_asked_for_from_where_all_was_known() -> None:
    """Also when the feed told more than the outcomes: the floor is what was known when it was sent."""
    made = ready()
    first, second = request(b"a"), request(b"b")
    send(made, first)
    made.fed(10, 11, 50)
    send(made, second)
    made.fed(12, 30, 50)
    made.link_lost()
    made.located(PLACE)
    asked = made.request(KEY)
    assert (asked.mark, asked.feed, asked.asks) == (9, FeedMode.HEADS, True)
    made.answered(Mounted(session=2, barrier=31, limits=LIMITS))
    assert state_of(made) is MountState.ASKING
    made.told(heads(10, (7, 0), (5, 0), (5, 77)))
    assert told(first) == Committed(11)
    assert told(second) is None
    made.told(heads(13, *[(8, 1)] * 18))
    assert state_of(made) is MountState.ASKING
    assert told(second) is None
    made.told(heads(31, (8, 1)))
    assert told(second) == Rejected(Reason.NOT_IN_LOG)
    assert state_of(made) is MountState.MOUNTING
    following = made.request(KEY)
    assert (following.mark, following.feed, following.asks, following.number) == (30, FeedMode.RECORDS, False, 3)


def test_asking_ends_early_when_all_is_found() -> None:
    made = ready()
    only = request()
    send(made, only)
    made.link_lost()
    begin(made, barrier=1000)
    made.told(heads(10, (5, 0)))
    assert told(only) == Committed(10)
    assert made.state is MountState.MOUNTING


def test_a_barrier_that_was_passed_already_needs_no_feed() -> None:
    made = ready()
    only = request()
    send(made, only)
    made.link_lost()
    begin(made, barrier=9)
    assert told(only) == Rejected(Reason.NOT_IN_LOG)
    assert made.state is MountState.MOUNTING


def test_asking_again_after_another_loss_begins_at_the_same_floor() -> None:
    made = ready()
    only = request()
    send(made, only)
    made.link_lost()
    begin(made, barrier=20)
    made.told(heads(10, (1, 1), (1, 2)))
    made.link_lost()
    made.located(PLACE)
    assert made.request(KEY).mark == 9


def test_nothing_is_sent_while_something_is_undecided() -> None:
    made = ready()
    send(made, request())
    made.outbox.add(request())
    made.link_lost()
    begin(made, barrier=20)
    assert made.take() == []


def test_credit_while_asking_does_not_depend_on_the_application() -> None:
    made = ready()
    send(made, request())
    made.fed(10, 20, 1200)  # the application has taken in nothing
    assert made.credit() is None
    made.link_lost()
    made.located(PLACE)
    assert made.request(KEY).credit == 1000
    made.answered(Mounted(session=2, barrier=1000, limits=LIMITS))
    made.told(heads(10, *[(1, 1)] * 20))
    assert made.credit() == Credit(720)


# -- the feed and its credit


@pytest.mark.parametrize(("first", "last"), [(9, 9), (11, 11), (10, 9)])
def test_a_feed_that_does_not_go_on_is_not_believed(first: int, last: int) -> None:
    made = ready()
    with pytest.raises(BadFrame):
        made.fed(first, last, 1)
    assert made.received == 9


def test_heads_that_do_not_go_on_are_not_believed() -> None:
    made = ready(FeedMode.HEADS)
    made.fed_heads(heads(10, (1, 1), (1, 2)))
    gap = heads(12, (1, 3), (1, 4))
    gap["id"][1] += 1
    for bad in (heads(11, (1, 1)), heads(13, (1, 1)), heads(12), gap):
        with pytest.raises(BadFrame):
            made.fed_heads(bad)
    with pytest.raises(BadFrame):
        ready(FeedMode.RECORDS).fed_heads(heads(10, (1, 1)))
    with pytest.raises(BadFrame):
        ready(FeedMode.NONE).fed(10, 10, 1)


def test_credit_is_given_back_in_large_pieces_and_never_more_than_there_is_room() -> None:
    made = ready()
    assert made.credit() is None
    made.fed(10, 10, 300)
    made.consumed(200)
    assert made.credit() is None
    made.consumed(100)
    assert made.credit() == Credit(300)
    made.fed(11, 11, 1600)  # one frame may overdraw
    assert made.credit() is None
    made.consumed(600)
    assert made.credit() == Credit(600)  # what was overdrawn comes first
    made.consumed(1000)
    assert made.credit() == Credit(1000)
    assert ready(FeedMode.NONE).credit() is None


def test_without_a_feed_own_commits_raise_what_is_known() -> None:
    made = ready(FeedMode.NONE)
    send(made, request())
    made.committed(committals((0, 40)))
    send(made, request())
    made.link_lost()
    made.located(PLACE)
    assert made.request(KEY).mark == 40


# -- sequence numbers


def test_sequence_numbers_go_on_over_mounts_and_end_with_the_client_id() -> None:
    made = ready()
    send(made, request(), request())
    made.committed(committals((0, 10), (1, 11)))
    made.link_lost()
    begin(made, barrier=11)
    assert send(made, request()).first_sequence == 2
    made.committed(committals((2, 12)))
    made.outbox.next_sequence = SEQUENCE_MAX - 2
    batch = send(made, request(), request(), request())
    assert (batch.first_sequence, len(batch)) == (SEQUENCE_MAX - 2, 2)
    assert made.take() == []
    assert made.state is MountState.READY  # not while something is undecided
    made.committed(committals((SEQUENCE_MAX - 2, 13), (SEQUENCE_MAX - 1, 14)))
    assert made.take() == []
    assert (made.state, made.client) == (MountState.LOCATING, None)
    made.registered(Registration(6, b"token"))
    begin(made, barrier=14)
    (batch_of_the_rest,) = made.take()
    assert (batch_of_the_rest.first_sequence, len(batch_of_the_rest)) == (0, 1)


# -- what may be in a frame


def test_frames_keep_the_limits() -> None:
    box = outbox()
    sizes = [100, 300, 500, 900, 1, 1]
    for size in sizes:
        box.add(request(b"x" * size))
    messages = []
    while batches := box.take(LIMITS, -1):
        for batch in batches:
            batch.check(LIMITS)
        messages.append([batch.lengths.tolist() for batch in batches])
    assert messages == [[[100, 300]], [[500]], [[900]], [[1, 1]]]
    assert box.rows == 6
    assert box.bytes == sum(sizes) + 6 * 40


def test_a_frame_has_a_bounded_number_of_rows() -> None:
    box = outbox(bytes_max=1 << 30)
    for _ in range(ROWS_MAX + 1):
        box.add(request(b""))
    big = Limits(payload_bytes_max=10, locks_max=1, frame_bytes_max=1 << 30)
    assert [[len(batch) for batch in box.take(big, -1)] for _ in range(2)] == [[ROWS_MAX], [1]]


def test_bundles_travel_in_pieces_and_alone() -> None:
    box = outbox(messages_max=10)
    before, many, after = request(), bundle(25), request()
    for submission in (before, many, after):
        box.add(submission)
    batches = [batch for message in iter(lambda: box.take(LIMITS, -1), []) for batch in message]
    assert [len(batch) for batch in batches] == [1, 12, 12, 1, 1]
    assert [batch.first_sequence for batch in batches] == [0, 1, 13, 25, 26]
    assert b"".join(bytes(batch.payloads) for batch in batches[1:4]) == b"0123456789" * 2 + b"01234"
    box.committed(committals(*[(sequence, 100 + sequence) for sequence in range(1, 25)]))
    assert told(many) is None
    box.refused(refusals((25, int(Reason.TOO_FAR_BEHIND), 3, 8)))
    outcomes = told(many)
    assert (outcomes[0], outcomes[23], outcomes[24]) == (
        Committed(101),
        Committed(124),
        Rejected(Reason.TOO_FAR_BEHIND, 3, 8),
    )
    assert outcomes.committed == 24
    assert (box.rows, len(box.sent)) == (2, 2)


def test_whole_bundles_travel_together_up_to_a_size() -> None:
    big = Limits(payload_bytes_max=1000, locks_max=3, frame_bytes_max=4 << 20)
    box = outbox(bytes_max=1 << 30)
    each = bundle(1000).bytes + FRAME_BYTES
    entries: list[Request | BatchRequest] = [bundle(1000), request(), request(), *[bundle(1000) for _ in range(6)]]
    for submission in (*entries, bundle(9000), bundle(3)):
        box.add(submission)
    first = box.take(big, -1)
    assert [len(batch) for batch in first] == [1000, 2, *[1000] * (TOGETHER_BYTES // each - 1)]
    assert [len(batch) for batch in box.take(big, -1)] == [1000] * (8 - len(first))
    assert [len(batch) for batch in box.take(big, -1)] == [ROWS_MAX], "what is larger than that goes in pieces, alone"
    assert [len(batch) for batch in box.take(big, -1)] == [9000 - ROWS_MAX, 3]
    sequence = 0
    for sent in box.sent:
        assert sent.first_sequence == sequence
        sequence += sent.rows


def test_a_message_counts_once_however_many_frames_it_has() -> None:
    box = outbox(messages_max=2, bytes_max=1 << 30)
    for _ in range(3):
        box.add(bundle(2))
        box.add(request())
    assert len(box.take(LIMITS, -1)) == 3
    box.add(request())
    assert len(box.take(LIMITS, -1)) > 0
    box.add(request())
    assert box.take(LIMITS, -1) == []


def test_no_more_than_allowed_is_in_flight() -> None:
    box = outbox(messages_max=2)
    for _ in range(3):
        box.add(request(b"x" * 400))
    assert box.take(LIMITS, -1)
    assert box.take(LIMITS, -1)
    assert not box.take(LIMITS, -1)
    box.committed(committals((1, 7)))  # any of them makes room
    assert box.take(LIMITS, -1)
    small = outbox(bytes_max=500)
    for _ in range(3):
        small.add(request(b"x" * 400))
    assert [len(small.take(LIMITS, -1)) for _ in range(3)] == [1, 1, 0]


def test_little_waits_for_the_frame_before_and_much_does_not() -> None:
    box = outbox(worth_bytes=300)
    box.add(request(b"x"))
    assert box.take(LIMITS, -1), "nothing is in flight: it leaves at once"
    for _ in range(5):
        box.add(request(b"x"))
    assert not box.take(LIMITS, -1)
    box.committed(committals((0, 7)))
    (batch,) = box.take(LIMITS, -1)
    assert len(batch) == 5, "what came meanwhile travels together"
    box.add(request(b"x" * 260))
    assert box.take(LIMITS, -1), "as much as that does not wait"
    for _ in range(6):
        box.add(request(b"x" * 10))
    box.withdraw(NotSent("it is over"))
    box.add(request(b"x" * 200))
    assert not box.take(LIMITS, -1), "what was withdrawn does not count"
    box.add(request(b"x" * 100))
    assert box.take(LIMITS, -1)


def test_a_request_is_alone_when_the_message_before_had_one_and_nothing_is_in_flight() -> None:
    box = outbox(worth_bytes=300)
    box.add(request(b"a"))
    assert not box.is_alone, "whether others come with the first one is not known"
    box.take(LIMITS, -1)
    box.add(request(b"b"))
    assert not box.is_alone, "one is in flight"
    box.committed(committals((0, 7)))
    assert box.is_alone
    box.add(request(b"c"))
    assert not box.is_alone, "two travel together"
    box.take(LIMITS, -1)
    box.committed(committals((1, 8), (2, 9)))
    assert not box.take(LIMITS, -1)
    box.add(request(b"d"))
    assert not box.is_alone, "the message before had two"
    box.take(LIMITS, -1)
    box.link_lost()
    box.add(request(b"e"))
    assert not box.is_alone, "one is undecided"
    box.lost()
    assert box.is_alone


def test_an_outcome_of_one_is_believed_like_a_column() -> None:
    made = ready()
    one = request()
    send(made, one)
    with pytest.raises(BadFrame, match="not waiting for it"):
        made.committed(SingleCommittal(1, 10, 0))
    assert told(one) is None
    made.committed(SingleCommittal(0, 10, 77))
    made.check()
    assert told(one) == Committed(10)
    assert (made.known, made.seen.time) == (10, 77)
    with pytest.raises(BadFrame, match="not waiting for it"):
        made.committed(SingleCommittal(0, 10, 0))
    first, second = request(), request()
    send(made, first, second)
    made.committed(SingleCommittal(2, 12, 0))
    assert (told(first), told(second)) == (None, Committed(12)), "one of two that travelled together"


def test_callers_that_have_gone_are_left_out() -> None:
    box = outbox()
    entries: list[Request | BatchRequest] = [request(), request(), bundle(3), request()]
    for entry in entries:
        box.add(entry)
    for gone in (entries[0], entries[2], entries[3]):
        gone.waiter.set_result("gone")
    (batch,) = box.take(LIMITS, -1)
    assert len(batch) == 1
    assert not box.take(LIMITS, -1)
    assert box.rows == 1
    box.committed(committals((0, 0)))
    assert (box.rows, box.bytes) == (0, 0)


def test_only_gone_callers_make_no_frame() -> None:
    box = outbox()
    only = request()
    box.add(only)
    only.waiter.set_result("gone")
    assert not box.take(LIMITS, -1)
    assert (box.rows, box.oldest_ticket) == (0, 1)


# -- servers that are mistaken


def test_decisions_about_nothing_are_not_believed_at_all() -> None:
    box = outbox()
    entries = [request(), request()]
    for entry in entries:
        box.add(entry)
    box.take(LIMITS, -1)
    for bad in (committals((0, 5), (2, 6)), committals((0, 5), (0, 6)), committals((-1, 5))):
        with pytest.raises(BadFrame):
            box.committed(bad)
    for wrong in (refusals((0, 1, 0, 0), (7, 1, 0, 0)), refusals((0, 0, 0, 0)), refusals((0, 9, 0, 0))):
        with pytest.raises(BadFrame):
            box.refused(wrong)
    assert [told(entry) for entry in entries] == [None, None]
    box.committed(committals((1, 6)))
    with pytest.raises(BadFrame, match="twice"):
        box.committed(committals((1, 6)))
    box.refused(refusals((0, int(Reason.CONFLICT), 4, 0)))
    assert [told(entry) for entry in entries] == [Rejected(Reason.CONFLICT, 4, None), Committed(6)]
    assert box.rows == 0


def test_columns_that_do_not_fit_are_refused() -> None:
    made = ready()
    send(made, request())
    with pytest.raises(BadFrame):
        made.committed(Committals(ids(0), ids(1, 2)))
    with pytest.raises(BadFrame):
        made.committed(Committals(ids(), ids()))
    with pytest.raises(BadFrame):
        made.refused(Refusals(ids(0), np.array([1], np.uint8), ids(), np.array([1], np.uint64)))


# -- giving up


def test_who_waits_too_long_is_told_what_is_known() -> None:
    error = NotSent("too long")
    box = outbox(messages_max=2)
    sent, half, unsent, young = request(deadline=1), bundle(25, deadline=2), request(deadline=3), request(deadline=9)
    for entry in (sent, half, unsent, young):
        box.add(entry)
    box.take(LIMITS, -1)
    box.take(LIMITS, -1)
    assert box.next_deadline() == 1
    box.expire(0.5, error)
    assert told(sent) is None
    box.expire(3, error)
    assert told(sent) == Unknown()
    assert {told(half)[i] for i in range(12)} == {Unknown()}
    assert {told(half)[i] for i in range(12, 25)} == {Rejected(Reason.NOT_IN_LOG)}
    assert isinstance(told(unsent), NotSent)
    assert told(young) is None
    assert box.next_deadline() == 9
    assert (box.rows, len(box.waiting)) == (14, 1)  # what was sent counts until it is decided
    snapshot = told(half)
    box.committed(committals(*[(sequence, sequence) for sequence in range(13)]))
    assert snapshot[0] == Unknown()
    assert box.rows == 1


# -- what the server did not take


def test_what_was_not_taken_goes_out_again_first_under_new_numbers() -> None:
    made = ready()
    first, second, third = (request(b"%d" % n * 40) for n in range(3))
    batch = send(made, first, second)
    later = send(made, third)
    assert (batch.first_sequence, later.first_sequence) == (0, 2)
    waiting = request(b"z")
    made.outbox.add(waiting)
    made.ends(1)
    assert made.take() == [], "it is over: nothing more goes this way"
    made.link_lost()
    assert made.outbox.rows == 4
    assert [sent.rows for sent in made.outbox.undecided] == [1], "the first one was taken, and is asked for"
    begin(made, barrier=10)
    made.told(heads(10, (5, 0)))
    assert told(first) == Committed(10)
    begin(made, barrier=10)
    again = made.take()
    assert [(sent.first_sequence, len(sent)) for sent in again] == [(3, 3)]
    assert bytes(again[0].payloads) == b"1" * 40 + b"2" * 40 + b"z"
    assert told(second) is told(third) is told(waiting) is None
    made.committed(committals((3, 11), (4, 12), (5, 13)))
    assert (told(second), told(third), told(waiting)) == (Committed(11), Committed(12), Committed(13))
    assert (made.outbox.rows, made.outbox.bytes) == (0, 0)


@pytest.mark.parametrize("untaken", [0, 1, 3, 7, 8, 9, 12])
def test_a_bundle_goes_on_where_it_was_taken_up_to(untaken: int) -> None:
    made = ready()
    many = bundle(12, size=60)
    made.outbox.add(many)
    sent = [made.take()[0], made.take()[0]]
    assert sum(map(len, sent)) < 12
    alone = request(b"alone")
    made.outbox.add(alone)
    taken = min(untaken, sum(map(len, sent)))
    made.ends(untaken)
    made.link_lost()
    if taken:
        begin(made, barrier=9 + taken)
        made.told(heads(10, *[(5, number) for number in range(taken)]))
    begin(made, barrier=9 + taken)
    payloads, next_id = b"", 10 + taken
    while found := made.take():
        for batch in found:
            payloads += bytes(batch.payloads)
            made.committed(committals(*[(batch.first_sequence + n, next_id + n) for n in range(len(batch))]))
            next_id += len(batch)
    assert payloads == bytes(many.payloads)[60 * taken :] + b"alone"
    assert told(many).ids.tolist() == list(range(10, 22))
    assert told(alone) == Committed(22)
    assert (made.outbox.rows, made.outbox.bytes, made.outbox.next_sequence) == (0, 0, sum(map(len, sent)) + 13 - taken)


def test_who_has_gone_or_was_withdrawn_meanwhile_is_not_sent_again() -> None:
    made = ready()
    gone, here, many, late = request(), request(), bundle(12, size=60), bundle(12, size=60)
    send(made, gone, here)
    for one in (many, late):
        made.outbox.add(one)
    made.take()
    gone.waiter.set_result(Unknown())
    made.outbox.withdraw(NotSent("stopped"))
    assert told(many) is None, "some of it was sent"
    made.ends(0)
    made.link_lost()
    assert list(made.outbox.waiting) == [here]
    assert told(many).reasons.tolist() == [Reason.NOT_IN_LOG] * 12
    made.outbox.withdraw(NotSent("stopped"))
    assert isinstance(told(here), NotSent)
    assert isinstance(told(late), NotSent)
    made.outbox.abandon()
    assert (made.outbox.rows, made.outbox.bytes, made.outbox._waiting_bytes) == (0, 0, 0)


def test_a_server_that_decided_what_it_says_it_has_not_taken_is_not_believed() -> None:
    made = ready()
    one, two = request(), request()
    send(made, one, two)
    made.committed(committals((1, 10)))
    with pytest.raises(BadFrame, match="not taken"):
        made.ends(0)
    made.link_lost()
    assert len(made.outbox.undecided) == 1
    assert not made.outbox.waiting


def test_what_is_withdrawn_and_abandoned_leaves_nothing_behind() -> None:
    box = outbox(messages_max=2)
    sent, half, unsent = request(), bundle(25), request()
    for entry in (sent, half, unsent):
        box.add(entry)
    box.take(LIMITS, -1)
    box.take(LIMITS, -1)
    error = NotSent("no")
    box.withdraw(error)
    assert isinstance(told(unsent), NotSent)
    assert told(unsent) is not error  # each caller raises one of its own
    assert told(half) is None
    assert box.rows == 13
    box.link_lost()
    box.abandon()
    assert told(sent) == Unknown()
    assert told(half)[0] == Unknown()
    assert told(half)[24] == Rejected(Reason.NOT_IN_LOG)
    assert (box.rows, box.bytes, box.sent, box.undecided) == (0, 0, [], [])
    assert box.oldest_ticket == box.next_ticket == 3


def test_tickets_tell_when_all_that_came_before_is_settled() -> None:
    box = outbox()
    for _ in range(3):
        box.add(request(b"x" * 400))
    box.take(LIMITS, -1)
    box.take(LIMITS, -1)
    assert box.oldest_ticket == 0
    box.committed(committals((1, 1)))
    assert box.oldest_ticket == 0
    box.committed(committals((0, 0)))
    assert box.oldest_ticket == 2


def test_an_owner_that_is_still_in_an_older_session_is_not_believed() -> None:
    made = ready()
    made.link_lost()
    made.located(PLACE)
    made.request(KEY)
    with pytest.raises(NotOwner, match="is in session 1"):
        made.answered(Mounted(session=0, barrier=99, limits=LIMITS))
    assert made.state is MountState.MOUNTING


def test_a_mount_says_who_it_is_and_carries_the_epoch_of_its_registration() -> None:
    made = Mount(
        0,
        FeedMode.NONE,
        feed_bytes_max=1000,
        outbox=outbox(),
        introduction=Introduction(instance="box:1", version="7", is_exclusive=True),
    )
    made.registered(Registration(5, b"token", 9))
    made.activated(-1)
    made.located(PLACE)
    asked = made.request(KEY)
    assert (asked.instance, asked.version, asked.epoch, asked.token) == ("box:1", "7", 9, b"token")
    made.link_lost()
    made.registered(Registration(6, b"other", 9))
    made.located(PLACE)
    asked = made.request(KEY)
    assert (asked.client, asked.epoch, asked.token) == (6, 9, b"other")
