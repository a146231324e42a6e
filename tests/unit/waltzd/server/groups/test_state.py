"""What is kept of a group: written and read again, whole, in pieces, and damaged.

Numbers of ids as intervals, beside a dictionary of all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import together
from waltzd.errors.operations import GroupStateDamaged
from waltzd.server.groups.state import FAILURES_MAX, PARKED_MAX, TEXT_BYTES_MAX, GroupState, Interval, Intervals, Parked


def grown(after: int = 4) -> GroupState:
    """Of ids 5 to 14: 6 was left out by a filter, 7 and 8 are done, 9 failed twice and 10 once, 11 is parked."""
    state = GroupState(after=after)
    for id in range(after + 1, after + 11):
        state.reach_to(id, is_open=id != 6)
    state.settle(7, 8)
    for id in (9, 9, 10, 11):
        state.fail(id)
    state.park(11, "worker-ä", "it is no invoice")
    return state


def test_what_it_says() -> None:
    state = grown()
    state.check()
    assert (state.floor, state.reach, len(state.open)) == (4, 14, 4)
    assert list(state.open) == [(5, 5, 0), (9, 9, 2), (10, 10, 1), (12, 14, 0)]
    assert state.parked == {11: Parked(1, "worker-ä", "it is no invoice")}
    state.settle(5, 5)
    assert state.floor == 8, "what is done behind it counts at once"
    state.release(11, is_open=True)
    assert state.open.get(11) == 0, "its tries begin anew"
    state.settle(9, 14)
    assert state.floor == 14


CHANGES: dict[str, Callable[[Any], object]] = {
    "reach": lambda state: state.reach_to(15, is_open=True),
    "left out": lambda state: state.reach_to(15, is_open=False),
    "jump": lambda state: state.jump_to(99),
    "settle": lambda state: state.settle(5, 9),
    "fail": lambda state: state.fail(12),
    "park": lambda state: state.park(12, "m", ""),
    "release": lambda state: state.release(11, is_open=True),
    "discard": lambda state: state.release(11, is_open=False),
    "again": lambda state: (state.release(11, is_open=True), state.park(11, "m", "again")),
    "park and release": lambda state: (state.park(12, "m", ""), state.release(12, is_open=False)),
    "stop": lambda state: state.stop("id 9: no"),
    "go on": lambda state: (state.stop("no"), state.resume()),
    "epoch": lambda state: state.begin_epoch(),
    "far": lambda state: (state.jump_to(1 << 62), state.reach_to((1 << 62) + 1, is_open=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_delta_is_what_changed(name: str) -> None:
    state = grown()
    assert GroupState.of(state.snapshot()) == state
    other = GroupState(after=4)
    first = state.delta()
    assert first is not None
    assert other.apply(first) == state
    assert state.delta() is None
    CHANGES[name](state)
    delta = state.delta()
    assert delta is not None
    assert other.apply(delta) == state
    state.check()
    CHANGES["epoch"](state)
    state.forget_changes()
    assert state.delta() is None
    assert other.apply(state.snapshot()) == state


def test_a_thousand_acknowledgements_are_a_short_delta() -> None:
    state = GroupState()
    for id in range(1000):
        state.reach_to(id, is_open=True)
    state.forget_changes()
    for id in range(1000):
        state.settle(id, id)
    delta = state.delta()
    assert delta is not None
    assert len(delta) < 64
    assert len(state.snapshot()) < 64


def test_texts_of_members_are_bounded_and_readable() -> None:
    state = GroupState()
    state.reach_to(0, is_open=True)
    state.park(0, "m" * 5000, "ä" * 5000 + "\ud800")
    one = GroupState.of(state.snapshot()).parked[0]
    assert (len(one.member.encode()), len(one.reason.encode())) == (TEXT_BYTES_MAX, TEXT_BYTES_MAX)
    state.stop("ä" * 5000)
    assert GroupState.of(state.snapshot()) == state


def test_failures_are_counted_up_to_a_bound() -> None:
    state = GroupState()
    state.reach_to(0, is_open=True)
    state.open.put(0, 0, FAILURES_MAX)
    assert state.fail(0) == FAILURES_MAX
    assert GroupState.of(state.snapshot()).open.get(0) == FAILURES_MAX


# -- what is no state --------------------------------------------------------------------------------------------------

WHOLE = grown().snapshot()


@together("size", range(len(WHOLE)))
def test_every_beginning_is_torn(size: int) -> None:
    with pytest.raises(GroupStateDamaged):
        GroupState.of(WHOLE[:size])


def test_what_comes_behind_the_end_is_noticed() -> None:
    with pytest.raises(GroupStateDamaged, match="behind its end"):
        GroupState.of(WHOLE + b"\0")


@given(st.binary(max_size=200))
def test_no_bytes_surprise_it(data: bytes) -> None:
    with pytest.raises(GroupStateDamaged):
        GroupState.of(data)


def test_every_flipped_bit_is_refused_or_another_state() -> None:
    for at in range(8 * len(WHOLE)):
        flipped = bytearray(WHOLE)
        flipped[at // 8] ^= 1 << at % 8
        try:
            state = GroupState.of(bytes(flipped))
        except GroupStateDamaged:
            continue
        state.check()
        assert state.snapshot() == flipped


def test_counts_are_not_believed_before_the_bytes_are_there() -> None:
    head = struct.pack(">BBqqIIIH", 1, 1, 1, 5, 0xFFFFFFFF, 0, 0, 0)
    with pytest.raises(GroupStateDamaged, match="is cut off"):
        GroupState.of(head)


def test_deltas_do_not_go_back() -> None:
    old = GroupState(after=4)
    old.reach_to(5, is_open=True)
    delta = old.delta()
    assert delta is not None
    with pytest.raises(GroupStateDamaged, match="back from epoch 2 to 1"):
        GroupState(after=4, epoch=2).apply(delta)
    with pytest.raises(GroupStateDamaged, match="back from epoch 2 to 1"):
        GroupState(after=4, epoch=2).apply(old.snapshot())
    with pytest.raises(GroupStateDamaged, match="back from id 9 to 5"):
        GroupState(after=9).apply(delta)
    with pytest.raises(GroupStateDamaged, match="snapshot before it is missing"):
        GroupState.of(delta)


def test_a_newer_version_is_not_guessed_at() -> None:
    with pytest.raises(GroupStateDamaged, match="kind 1 or version 3"):
        GroupState.of(WHOLE[:1] + b"\3" + WHOLE[2:])


IDS = st.integers(0, 20)
PUTS = st.lists(st.tuples(IDS, st.integers(0, 6), st.none() | st.integers(0, 2)))


def made(puts: list[tuple[int, int, int | None]]) -> tuple[Intervals, dict[int, int]]:
    found, twin = Intervals(), dict[int, int]()
    for first, more, value in puts:
        found.put(first, first + more, value)
        for id in range(first, first + more + 1):
            if value is None:
                twin.pop(id, None)
            else:
                twin[id] = value
    return found, twin


@pytest.mark.slow
@given(PUTS, IDS, IDS)
def test_they_hold_what_the_dictionary_holds(puts: list[tuple[int, int, int | None]], one: int, other: int) -> None:
    found, twin = made(puts)
    assert {id: value for first, last, value in found for id in range(first, last + 1)} == twin
    assert [found.get(id) for id in range(30)] == [twin.get(id) for id in range(30)]
    assert (found.first, found.last, found.ids) == (min(twin, default=None), max(twin, default=None), len(twin))
    first, last = sorted((one, other))
    within = {id: value for begin, end, value in found.within(first, last) for id in range(begin, end + 1)}
    assert within == {id: value for id, value in twin.items() if first <= id <= last}


@given(PUTS)
def test_there_are_as_few_as_there_can_be(puts: list[tuple[int, int, int | None]]) -> None:
    found, twin = made(puts)
    ends = [id for id, value in twin.items() if twin.get(id + 1) != value]
    assert len(found) == len(ends)
    again = Intervals()
    for id in sorted(twin, reverse=True):
        again.put(id, id, twin[id])
    assert again == found


def test_one_in_the_middle_is_cut_out_and_comes_back() -> None:
    found = Intervals()
    found.put(0, 9, 0)
    found.put(4, 5, None)
    assert list(found) == [Interval(0, 3, 0), Interval(6, 9, 0)]
    found.put(4, 5, 0)
    assert list(found) == [Interval(0, 9, 0)]
    found.clear()
    assert len(found) == 0


def test_a_snapshot_of_all_that_may_be_parked_fits_into_one_transaction() -> None:
    """By default a transaction has at most 1 MiB, and an entry that is larger can never be written."""
    state = GroupState()
    for id in range(PARKED_MAX):
        state.reach_to(id, is_open=True)
        state.park(id, "worker-1", "ä" * (1 + id % 700))
        if id == PARKED_MAX // 2:
            before = state.delta() or b""
    rest, snapshot = state.delta() or b"", state.snapshot()
    assert max(map(len, (before, rest, snapshot))) < 1 << 20
    replayed = GroupState.of(GroupState().snapshot()).apply(before).apply(rest)
    assert sorted(replayed.parked) == sorted(GroupState.of(snapshot).parked) == list(range(PARKED_MAX))
    for read in (replayed.parked, GroupState.of(snapshot).parked):
        assert all(one.member == "worker-1" and one.reason in state.parked[id].reason for id, one in read.items())
        assert all(one.reason for one in read.values()), "a part of each reason is kept"
