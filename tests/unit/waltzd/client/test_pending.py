"""Groups in the outbox: never split, decided as a whole, and a server that says something else is not believed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.tiers import together
from tests.unit.waltzd.client.test_mount import (
    KEY,
    LIMITS,
    PLACE,
    Waiter,
    bundle,
    committals,
    heads,
    mount,
    outbox,
    refusals,
    request,
    told,
)
from waltzd.client.mount import Mount, MountState
from waltzd.client.pending import AtomicRequest, BatchRequest, Request, why_refused
from waltzd.errors import NeedsBatches, NotSent, TooLarge
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import GROUPS_BYTES_MAX
from waltzd.protocol.batches import (
    SEQUENCE_MAX,
    AppendBatch,
    Committals,
    FeedMode,
    Limits,
    Mounted,
    Registration,
)
from waltzd.protocol.locks import AppendOutcome, Committed, Reason, Rejected, Unknown, write_lock


def group(count: int, size: int = 1, deadline: float = 1.0) -> AtomicRequest:
    return AtomicRequest(-1, [b"x" * size] * count, None, None, Waiter(), deadline)


def ready(barrier: int = 9) -> Mount:
    made = mount(FeedMode.NONE)
    begin(made, barrier)
    return made


def begin(made: Mount, barrier: int) -> None:
    if made.state is MountState.LOCATING:
        made.located(PLACE)
    made.request(KEY)
    made.answered(Mounted(session=1, barrier=barrier, limits=LIMITS, format=1))
    made.check()


def test_groups_go_out_whole_and_in_their_order() -> None:
    """Nine rows of these fill a frame."""
    box = outbox(messages_max=10)
    entries: list[Request | BatchRequest] = [request(), group(3), group(4), group(9, size=10), bundle(2), group(12)]
    for entry in entries:
        box.add(entry)
    messages = list(iter(lambda: box.take(LIMITS, -1, format=1), []))
    box.check()
    assert [[len(frame) for frame in message] for message in messages] == [[1, 3], [4], [9], [2], [12]]
    for frame in [frame for message in messages for frame in message]:
        frame.check(LIMITS)
        is_group = len(frame) not in (1, 2)
        assert (frame.follows is not None) == is_group
        assert frame.follows is None or frame.follows.tolist() == [False, *[True] * (len(frame) - 1)]


def test_what_cannot_go_is_refused_alone() -> None:
    box = outbox()
    large, fits, small = group(5, size=61), group(5, size=60), request()
    for handed in (large, fits, small):
        box.add(handed)
    assert [len(frame) for message in iter(lambda: box.take(LIMITS, -1, format=1), []) for frame in message] == [5, 1]
    assert isinstance(told(large), TooLarge)
    old = outbox()
    entries: list[Request | BatchRequest] = [group(2), group(1), request()]
    for entry in entries:
        old.add(entry)
    assert [len(frame) for frame in old.take(LIMITS, -1, format=0)] == [1, 1]
    assert isinstance(told(entries[0]), NeedsBatches)
    old.check()


def test_positions_headers_and_locks_are_those_of_each() -> None:
    one = AtomicRequest([3, 7], [b"a", b"b"], [1, -2], [[write_lock("x")], []], Waiter(), 1.0)
    frame = one.piece(0, 2, 5)
    assert (frame.first_sequence, frame.marks.tolist(), frame.headers.tolist()) == (5, [3, 7], [1, -2])
    assert (frame.lock_counts.tolist(), frame.lock_ids.tolist()) == ([1, 0], [write_lock("x").hash])


def test_a_group_that_needs_more_numbers_than_are_left_takes_a_new_client_id() -> None:
    made = ready()
    made.outbox.next_sequence = SEQUENCE_MAX - 2
    one = group(3)
    made.outbox.add(one)
    assert made.take() == []
    assert (made.state, made.client) == (MountState.LOCATING, None)
    made.registered(Registration(6, b"token"))
    begin(made, barrier=9)
    (frame,) = made.take()
    assert (frame.first_sequence, len(frame)) == (0, 3)
    two = ready()
    two.outbox.next_sequence = SEQUENCE_MAX - 3
    two.outbox.add(group(3))
    assert len(two.take()) == 1, "exactly as many will do"


# -- outcomes


def sent(made: Mount, *entries: Request | BatchRequest) -> list[AppendBatch]:
    for entry in entries:
        made.outbox.add(entry)
    frames = [frame for message in iter(made.take, []) for frame in message]
    made.check()
    return frames


def test_one_outcome_for_all() -> None:
    made = ready()
    first, second = group(3), group(2)
    sent(made, first, second)
    made.committed(committals((0, 10), (1, 11), (2, 12)))
    made.refused(refusals((3, Reason.CONFLICT, 10, 77), (4, Reason.CONFLICT, 10, 77)))
    assert told(first) == Committed(10, 3)
    assert told(second) == Rejected(Reason.CONFLICT, 10, 77)
    assert (made.outbox.rows, made.outbox.bytes) == (0, 0)
    made.check()


def test_a_server_that_takes_a_group_apart_is_not_believed() -> None:
    made = ready()
    one = group(3)
    sent(made, request(), one)
    wrong: list[Callable[[], None]] = [
        lambda: made.committed(committals((0, 10), (1, 11), (2, 12))),
        lambda: made.refused(refusals((2, Reason.CONFLICT, 1, 0))),
        lambda: made.committed(committals((1, 11), (2, 12), (3, 14))),
        lambda: made.committed(committals((1, 12), (2, 11), (3, 13))),
        lambda: made.ends(2),
    ]
    for bad in wrong:
        with pytest.raises(BadFrame):
            bad()
        made.check()
    assert told(one) is None
    made.ends(1)
    assert list(made.outbox.waiting) == [one]
    made.check()


def test_a_group_is_found_as_a_whole_also_when_its_heads_come_in_pieces() -> None:
    made = ready()
    there, lost = group(4), group(2)
    sent(made, there, lost)
    made.link_lost()
    begin(made, barrier=20)
    made.told(heads(10, (8, 1), (5, 0), (5, 1)))
    assert told(there) is None
    made.told(heads(13, (5, 2), (5, 3), *[(8, 2)] * 6))
    assert told(there) == Committed(11, 4)
    assert told(lost) == Rejected(Reason.NOT_IN_LOG)


def test_half_of_a_group_in_the_log_is_not_believed() -> None:
    made = ready()
    one = group(4)
    sent(made, one)
    made.link_lost()
    begin(made, barrier=12)
    with pytest.raises(BadFrame, match="a part of an atomic request"):
        made.told(heads(10, (5, 0), (5, 1), (8, 0)))
    assert told(one) is None
    made.link_lost()
    begin(made, barrier=20)
    with pytest.raises(BadFrame, match="not consecutive"):
        made.told(heads(10, (5, 0), (5, 1), (8, 0), (5, 2)))
    made.outbox.expire(2.0, NotSent("too late"))
    assert told(one) == Unknown()


def test_who_waits_too_long_is_told_once_for_all() -> None:
    box = outbox(messages_max=1)
    left, waits = group(8), group(8)
    for entry in (left, waits):
        box.add(entry)
    box.take(LIMITS, -1, format=1)
    box.expire(2.0, NotSent("too late"))
    assert told(left) == Unknown()
    assert isinstance(told(waits), NotSent)
    box.committed(committals(*[(number, 10 + number) for number in range(8)]))
    box.check()
    assert (box.rows, box.bytes) == (0, 0)


# -- everything in the middle of everything else


@together("seed", range(150), quick=20, short=75)
def test_whatever_happens_a_group_has_the_outcome_that_the_log_has(seed: int) -> None:
    """A log of its own stands for the server: what it has, and only that, is committed, in whole groups."""
    chance = random.Random(seed)
    made, log = ready(), [(0, 0)] * 10
    entries: dict[int, Request | BatchRequest] = {}
    told_of: dict[int, AppendOutcome] = {}
    open_frames: list[AppendBatch] = []
    for _ in range(60):
        match chance.choice(["add", "add", "take", "take", "decide", "decide", "lose", "end"]):
            case "add":
                entry = request() if chance.random() < 0.5 else group(chance.randint(1, 8), chance.randint(0, 5))
                made.outbox.add(entry)
                entries[entry.ticket] = entry
            case "take":
                open_frames += made.take()
            case "decide" if open_frames:
                decide(made, log, open_frames.pop(0), chance)
            case "lose":
                # Some of what was sent reached the log, each group whole; the rest never will.
                for frame in open_frames[: chance.randint(0, len(open_frames))]:
                    write(log, frame)
                open_frames = []
                made.link_lost()
                settle(made, log, chance)
            case "end":
                taken = chance.randint(0, len(open_frames))
                for frame in open_frames[:taken]:
                    write(log, frame)
                made.ends(open_frames[taken].first_sequence if taken < len(open_frames) else made.outbox.next_sequence)
                open_frames = []
                made.link_lost()
                settle(made, log, chance)
        made.check()
    made.link_lost()
    settle(made, log, chance)
    while made.outbox.rows:
        for frame in made.take():
            decide(made, log, frame, chance)
    for handed in entries.values():
        outcome = told(handed)
        if isinstance(outcome, Committed):
            places = [log[id_] for id_ in outcome.ids]
            assert outcome.count == handed.rows
            assert [sequence for _, sequence in places] == list(range(places[0][1], places[0][1] + handed.rows))
            assert told_of.setdefault(outcome.id, outcome) is outcome, "two submissions have one id"
        else:
            assert isinstance(outcome, Rejected)
    mine = sum(entry.rows for entry in entries.values() if isinstance(told(entry), Committed))
    assert mine == sum(client == 5 for client, _ in log)


def write(log: list[tuple[int, int]], frame: AppendBatch) -> range:
    first = len(log)
    log += [(5, frame.first_sequence + row) for row in range(len(frame))]
    return range(first, len(log))


def decide(made: Mount, log: list[tuple[int, int]], frame: AppendBatch, chance: random.Random) -> None:
    sequences = range(frame.first_sequence, frame.first_sequence + len(frame))
    if chance.random() < 0.7:
        made.committed(committals(*zip(sequences, write(log, frame), strict=True)))
    else:
        made.refused(refusals(*[(sequence, Reason.CONFLICT, 0, 1) for sequence in sequences]))


def settle(made: Mount, log: list[tuple[int, int]], chance: random.Random) -> None:
    """Mount again; heads come in pieces of any length, and now and then the link is lost once more."""
    while made.state is not MountState.READY:
        log.append((9, len(log)))
        begin(made, barrier=len(log) - 1)
        at = made._asked + 1
        while made.state is MountState.ASKING:
            stop = min(len(log), at + chance.randint(1, 7))
            made.told(heads(at, *log[at:stop]))
            at = stop
            if made.state is MountState.ASKING and chance.random() < 0.1:
                made.link_lost()
                break
        made.check()


def test_a_batch_says_what_was_seen() -> None:
    made = ready()
    made.seen.note(np.array([-1, 7]))
    made.seen.note(None)
    made.outbox.add(request())
    assert [frame.seen_time for frame in made.take()] == [7]
    made.committed(replace(committals((0, 10)), time=9))
    made.outbox.add(group(2))
    assert [frame.seen_time for frame in made.take()] == [9]
    made.refused_time()
    made.outbox.add(request())
    assert [frame.seen_time for frame in made.take()] == [0]
    made.committed(replace(committals((3, 13)), time=8))
    assert not made.tells_time
    made.committed(replace(committals((1, 11), (2, 12)), time=9))
    assert made.tells_time


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1)])
def test_outcomes_belong_to_their_numbers_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    made = ready()
    entries = [request(), request(), request()]
    (frame,) = sent(made, *entries)
    first = frame.first_sequence
    made.committed(Committals(np.array([first + row for row in order]), np.array([10 + row for row in order])))
    made.check()
    assert [told(entry) for entry in entries] == [Committed(10), Committed(11), Committed(12)]
    with pytest.raises(BadFrame, match="not waiting"):
        made.committed(Committals(np.array([first]), np.array([13])))


def test_a_group_that_no_server_takes_is_not_sent_whatever_the_limits_are() -> None:
    limits = Limits(payload_bytes_max=8 << 20, locks_max=1, frame_bytes_max=64 << 20)
    size = GROUPS_BYTES_MAX // 8
    assert why_refused(group(7, size), limits, 1) is None
    assert isinstance(why_refused(group(8, size), limits, 1), TooLarge)
