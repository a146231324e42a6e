"""The lock table against a dumb twin that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.mounting import batch_of, single_of
from waltzd.format.record import LockColumns
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory
from waltzd.server.core.locks import EVICTED_TOGETHER, LockTable, Lookup

READ, WRITE, APPEND = Mode.READ, Mode.WRITE, Mode.APPEND
Row = tuple[int, list[tuple[int, Mode]]]
"""How far behind the newest id the client is, and the locks."""


@dataclass
class Twin:
    """Every mark that was ever set, one transaction at a time."""

    low_mark: int
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(lock, id), in the order in which they were set."""

    def last(self, lock: int) -> int | None:
        return next((id_ for marked, id_ in reversed(self.marks) if marked == lock), None)

    def newest(self, size: int) -> list[int]:
        """The locks that were marked last, each once: the window."""
        found: dict[int, None] = {}
        for lock, _ in reversed(self.marks):
            found.setdefault(lock)
            if len(found) == size:
                break
        return list(found)


modes = st.sampled_from([READ, WRITE, APPEND])
row = st.tuples(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 9), modes), max_size=4))


@pytest.mark.slow
@given(
    size=st.integers(1, 8),
    low_mark=st.integers(-1, 3),
    batches=st.lists(st.lists(row, min_size=1, max_size=6), max_size=12),
)
def test_never_lenient_and_exact_within_the_window(size: int, low_mark: int, batches: list[list[Row]]) -> None:
    table, twin = LockTable(size, low_mark), Twin(low_mark)
    next_id = low_mark + 1
    for rows in batches:
        marks = [max(-1, next_id - 1 - lag) for lag, _ in rows]
        batch = batch_of(*[b"x"] * len(rows), marks=marks, locks=[locks for _, locks in rows])
        committed = next_id - 3
        floor_before = table.floor
        decision = table.decide(batch, next_id, committed)
        assert len(decision.sequences) == len(decision.reasons) == len(decision.conflict_ids) == len(decision.locks)
        refused = {
            int(number): (Reason(int(reason)), int(conflict), int(lock))
            for number, reason, conflict, lock in zip(
                decision.sequences, decision.reasons, decision.conflict_ids, decision.locks, strict=True
            )
        }
        for number, (_, locks) in enumerate(rows):
            mark = marks[number]
            checked = [lock for lock, mode in locks if mode is not APPEND]
            window = twin.newest(size)
            truly = [lock for lock in checked if (last := twin.last(lock)) is not None and last > mark]
            before_us = bool(checked) and mark < low_mark and any(twin.last(lock) is None for lock in checked)
            if truly or before_us:
                assert number in refused, "a transaction that was not to see this lock's mark was let through"
            if number not in refused:
                twin.marks += [(lock, next_id) for lock, mode in locks if mode is not READ]
                next_id += 1
                continue
            reason, conflict_id, lock = refused[number]
            assert lock in checked
            assert conflict_id > mark
            if reason in (Reason.CONFLICT, Reason.IN_FLIGHT):
                assert lock in window
                assert conflict_id == twin.last(lock)
                assert (reason is Reason.IN_FLIGHT) == (conflict_id > committed)
            else:
                assert lock not in window, "inside the window only a true conflict is one"
                assert (reason is Reason.OWNER_CHANGED) == (conflict_id == low_mark)
            known = [twin.last(one) if one in window else None for one in checked]
            assert conflict_id == max(mark_ if mark_ is not None else conflict_id_of(twin, size) for mark_ in known)
        assert table.floor == conflict_id_of(twin, size)
        for lock in range(10):
            last = -1 if (last := twin.last(lock)) is None else last
            assert table.newest_mark(lock) == (last if lock in twin.newest(size) else table.floor) >= last
        assert table.floor >= floor_before
        assert len(table) <= size


@example(size=3, rows=[(0, [(1, WRITE)]), (9, [(1, WRITE)]), (0, [(2, APPEND)]), (9, [(2, READ)])])
@given(size=st.integers(1, 4), rows=st.lists(row, max_size=30))
def test_a_transaction_alone_is_decided_like_a_batch_of_one(size: int, rows: list[Row]) -> None:
    alone, columns = LockTable(size, -1, looks_up=True), LockTable(size, -1, looks_up=True)
    next_id = 0
    for lag, locks in rows:
        batch = batch_of(b"x", first=7, marks=max(-1, next_id - 1 - lag), locks=[locks])
        committed = next_id - 1
        asked = [
            table.look_up(one, committed, decided=0, most=3, ahead=3)
            for table, one in ((alone, single_of(batch)), (columns, batch))
        ]
        assert asked[0] == asked[1]
        for lookup in () if asked[0] is None else asked[0][1]:
            alone.learn(lookup, -1)
            columns.learn(lookup, -1)
        mine, theirs = alone.decide(single_of(batch), next_id, next_id - 3), columns.decide(batch, next_id, next_id - 3)
        assert [column.tolist() for column in vars(mine).values()] == [column.tolist() for column in vars(theirs).values()]
        assert vars(alone) == vars(columns)
        next_id += 1 - len(mine.sequences)


def conflict_id_of(twin: Twin, size: int) -> int:
    """The floor: the highest mark of a lock that is no longer in the window."""
    window = twin.newest(size)
    gone = [twin.last(lock) for lock, _ in twin.marks if lock not in window]
    return max([mark for mark in gone if mark is not None], default=twin.low_mark)


def test_a_later_row_sees_an_earlier_one_of_the_same_batch() -> None:
    table = LockTable(10, -1)
    rows = [[(1, WRITE)], [(1, WRITE)], [(1, READ)], [(2, WRITE)], [(1, APPEND)], [(1, READ)]]
    decision = table.decide(batch_of(*[b""] * 6, locks=rows), 0, -1)
    assert decision.sequences.tolist() == [1, 2, 5]
    assert decision.conflict_ids.tolist() == [0, 0, 2]
    assert set(decision.reasons.tolist()) == {Reason.IN_FLIGHT}


def test_a_transaction_does_not_conflict_with_itself() -> None:
    table = LockTable(10, -1)
    assert (
        table.decide(batch_of(b"", locks=[[(1, WRITE), (1, READ), (1, APPEND), (1, WRITE)]]), 0, -1).sequences.tolist()
        == []
    )
    assert table.decide(batch_of(b"", marks=0, locks=[[(1, READ), (1, WRITE)]]), 1, 0).sequences.tolist() == []


def test_appenders_do_not_conflict_with_each_other_and_readers_notice() -> None:
    table = LockTable(10, -1)
    assert table.decide(batch_of(b"", b"", locks=[[(1, APPEND)], [(1, APPEND)]]), 0, -1).sequences.tolist() == []
    assert table.decide(batch_of(b"", marks=0, locks=[[(1, READ)]]), 2, 1).conflict_ids.tolist() == [1]
    assert table.decide(batch_of(b"", marks=1, locks=[[(1, READ)]]), 2, 1).sequences.tolist() == []


def test_a_refused_row_leaves_no_mark() -> None:
    table = LockTable(10, -1)
    table.decide(batch_of(b"", locks=[[(1, WRITE)]]), 0, -1)
    refused = table.decide(batch_of(b"", locks=[[(2, APPEND), (1, WRITE)]]), 1, 0)
    assert (refused.sequences.tolist(), refused.locks.tolist()) == ([0], [1])
    assert table.decide(batch_of(b"", locks=[[(2, WRITE)]]), 1, 0).sequences.tolist() == []


def test_the_failed_lock_with_the_highest_mark_is_named() -> None:
    """One retry behind that mark is enough."""
    table = LockTable(10, -1)
    table.decide(batch_of(b"", b"", b"", marks=-1, locks=[[(1, WRITE)], [(2, WRITE)], [(3, WRITE)]]), 0, -1)
    decision = table.decide(batch_of(b"", marks=0, locks=[[(2, READ), (3, READ), (1, READ)]]), 3, 2)
    assert (decision.conflict_ids.tolist(), decision.locks.tolist()) == ([2], [3])


@pytest.mark.parametrize(("mark", "reason"), [(4, Reason.OWNER_CHANGED), (5, None)])
def test_a_new_owner_knows_nothing_from_before(mark: int, reason: Reason | None) -> None:
    decision = LockTable(10, 5).decide(batch_of(b"", marks=mark, locks=[[(1, READ)]]), 6, 5)
    assert decision.reasons.tolist() == ([] if reason is None else [reason])
    assert decision.conflict_ids.tolist() == ([] if reason is None else [5])


def test_behind_the_table_there_is_the_floor() -> None:
    table = LockTable(2, -1)
    for lock in range(3):
        table.decide(batch_of(b"", marks=lock - 1, locks=[[(lock, WRITE)]]), lock, lock - 1)
    assert table.floor == 0
    decision = table.decide(batch_of(b"", marks=-1, locks=[[(99, READ)]]), 3, 2)
    assert (decision.reasons.tolist(), decision.conflict_ids.tolist()) == ([Reason.TOO_FAR_BEHIND], [0])
    assert table.decide(batch_of(b"", marks=0, locks=[[(99, READ)]]), 3, 2).sequences.tolist() == []


@pytest.mark.parametrize("again", [0, 3, 700])
def test_locks_that_were_marked_again_are_evicted_later(again: int) -> None:
    """Many more locks than are found at once. When the first are evicted, the next `again` are marked once more."""
    size = 3 * EVICTED_TOGETHER
    table = LockTable(size, -1)
    locks = [*range(size + 10), *range(10, 10 + again), *range(size + 10, 2 * size)]
    for id_, lock in enumerate(locks):
        table.decide(batch_of(b"", marks=id_ - 1, locks=[[(lock, APPEND)]]), id_, id_ - 1)
        table.check()
    left = list(dict.fromkeys(reversed(locks)))[:size]
    assert table.floor == max(id_ for id_, lock in enumerate(locks) if lock not in left)
    assert all(table.explain(lock, 10 * size)[0] > table.floor for lock in left)
    assert table.explain(0, 10 * size)[0] == table.floor


def test_a_lock_that_a_transaction_marks_twice_is_evicted_behind_its_others() -> None:
    table = LockTable(2, -1)
    table.decide(batch_of(b"", marks=-1, locks=[[(9, APPEND)]]), 0, -1)
    table.decide(batch_of(b"", marks=0, locks=[[(lock, APPEND) for lock in (1, 2, 1, 3)]]), 1, 0)
    assert [table.explain(lock, 5)[1] for lock in (1, 2, 3)] == [Reason.CONFLICT, Reason.TOO_FAR_BEHIND, Reason.CONFLICT]


def test_locks_are_64_bits() -> None:
    table, highest = LockTable(2, -1), (1 << 64) - 1
    table.decide(batch_of(b"", locks=[[(highest, WRITE)]]), 0, -1)
    decision = table.decide(batch_of(b"", locks=[[(highest, READ)]]), 1, 0)
    assert decision.locks.dtype == np.uint64
    assert decision.locks.tolist() == [highest]


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass
class GroupTwin:
    """The marks of the window, and the floor under them; one row at a time."""

    size: int
    floor: int
    marks: dict[int, int] = field(default_factory=dict)
    """By lock, in the order in which they were set last."""

    def refusal(self, rows: list[Row], newest: int) -> tuple[int, int] | None:
        """The mark that is in the way of any row, and its lock; of several the highest, and of these the first."""
        seen = min(max(-1, newest - lag) for lag, _ in rows)
        checked = [lock for _, locks in rows for lock, mode in locks if mode is not APPEND]
        found = [(self.marks.get(lock, self.floor), lock) for lock in checked]
        worst = [(mark, lock) for mark, lock in found if mark > seen]
        return max(worst, key=lambda one: one[0]) if worst else None

    def accept(self, rows: list[Row], next_id: int) -> None:
        for id_, (_, locks) in enumerate(rows, next_id):
            for lock, mode in locks:
                if mode is not READ:
                    self.marks.pop(lock, None)
                    self.marks[lock] = id_
                    if len(self.marks) > self.size:
                        oldest = next(iter(self.marks))
                        self.floor = self.marks.pop(oldest)


@pytest.mark.slow
@given(
    size=st.integers(1, 8),
    low_mark=st.integers(-1, 3),
    batches=st.lists(st.lists(st.lists(row, min_size=1, max_size=4), min_size=1, max_size=5), max_size=10),
)
def test_a_group_is_accepted_as_a_whole_or_refused_as_a_whole(
    size: int, low_mark: int, batches: list[list[list[Row]]]
) -> None:
    table, twin = LockTable(size, low_mark), GroupTwin(size, low_mark)
    next_id = low_mark + 1
    for groups in batches:
        rows = [row for group in groups for row in group]
        newest = next_id - 1
        batch = batch_of(
            *[b""] * len(rows),
            first=7,
            marks=[max(-1, newest - lag) for lag, _ in rows],
            locks=[locks for _, locks in rows],
            groups=[len(group) for group in groups],
        )
        decision = table.decide(batch, next_id, newest)
        expected: list[tuple[int, int, int]] = []
        sequence = 7
        for group in groups:
            refusal = twin.refusal(group, newest)
            if refusal is None:
                twin.accept(group, next_id)
                next_id += len(group)
            else:
                expected += [(sequence + n, *refusal) for n in range(len(group))]
            sequence += len(group)
        told = zip(decision.sequences.tolist(), decision.conflict_ids.tolist(), decision.locks.tolist(), strict=True)
        assert list(told) == expected
        assert table.floor == twin.floor
        assert {lock: table.explain(lock, newest)[0] for lock in twin.marks} == twin.marks
        table.check()


def test_a_group_does_not_conflict_with_itself_and_each_of_it_marks_with_its_own_id() -> None:
    table = LockTable(10, -1)
    rows = [[(1, WRITE)], [(1, WRITE), (2, WRITE)], [(3, APPEND)]]
    assert table.decide(batch_of(*[b""] * 3, locks=rows, groups=[3]), 0, -1).sequences.tolist() == []
    assert [table.explain(lock, 2)[0] for lock in (1, 2, 3)] == [1, 1, 2]


def test_nothing_of_a_group_is_marked_whose_second_lock_fails() -> None:
    table = LockTable(10, -1)
    table.decide(batch_of(b"", locks=[[(2, WRITE)]]), 0, -1)
    rows = [[(1, WRITE)], [(2, WRITE)], []]
    decision = table.decide(batch_of(*[b""] * 3, locks=rows, groups=[3]), 1, 0)
    assert decision.sequences.tolist() == [0, 1, 2], "the same refusal for each of it, also for one without a lock"
    assert (set(decision.conflict_ids.tolist()), set(decision.locks.tolist())) == ({0}, {2})
    assert table.decide(batch_of(b"", locks=[[(1, READ)]]), 1, 0).sequences.tolist() == []


# -- what the log says of locks ----------------------------------------------------------------------------------------


def history_of(first_id: int, rows: list[list[tuple[int, Mode]]]) -> LockHistory:
    batch = batch_of(*[b""] * len(rows), locks=rows)
    return LockHistory(first_id, LockColumns(batch.lock_counts, batch.lock_ids, batch.lock_modes))


@pytest.mark.slow
@given(
    size=st.integers(1, 12),
    before=st.lists(st.lists(st.tuples(st.integers(0, 9), modes), max_size=3), max_size=14),
    pieces=st.lists(st.integers(1, 5), max_size=8),
    after=st.lists(st.lists(row, min_size=1, max_size=4), max_size=8),
    order=st.lists(st.booleans(), max_size=16),
)
def test_a_table_that_is_lowered_is_never_more_lenient_than_one_that_saw_everything(
    size: int,
    before: list[list[tuple[int, Mode]]],
    pieces: list[int],
    after: list[list[Row]],
    order: list[bool],
) -> None:
    """The session opened behind `before`, which is read backwards in pieces, while batches come in between."""
    low_mark = len(before) - 1
    table = LockTable(size, low_mark)
    marks = {lock: id_ for id_, locks in enumerate(before) for lock, mode in locks if mode is not READ}
    next_id, may_go_on = low_mark + 1, True
    for is_reading in order:
        floor = table.floor
        if is_reading and pieces and may_go_on and table.lowest >= 0:
            first_id = max(0, table.lowest - pieces.pop() + 1)
            may_go_on = table.lower(history_of(first_id, before[first_id : table.lowest + 1]))
            assert table.floor <= floor
            assert not may_go_on or table.floor == first_id - 1, "the floor is where the reading has come"
        elif not is_reading and after:
            rows = after.pop()
            seen = [max(-1, next_id - 1 - lag) for lag, _ in rows]
            batch = batch_of(*[b""] * len(rows), marks=seen, locks=[locks for _, locks in rows])
            decision = table.decide(batch, next_id, next_id - 1)
            refused = dict(zip(decision.sequences.tolist(), decision.reasons.tolist(), strict=True))
            for number, (_, locks) in enumerate(rows):
                checked = [lock for lock, mode in locks if mode is not APPEND]
                if any(marks.get(lock, -1) > seen[number] for lock in checked):
                    assert number in refused, "a table that saw everything would refuse it"
                if number in refused:
                    if refused[number] in (Reason.CONFLICT, Reason.IN_FLIGHT):
                        conflict = decision.conflict_ids[list(refused).index(number)]
                        assert conflict in [marks.get(lock) for lock in checked]
                    continue
                marks |= {lock: next_id for lock, mode in locks if mode is not READ}
                next_id += 1
        table.check()
        for lock in range(10):
            mark, reason = table.explain(lock, next_id - 1)
            assert mark >= marks.get(lock, -1)
            assert reason in (Reason.CONFLICT, Reason.IN_FLIGHT) or mark == table.floor
            assert mark == marks.get(lock) or reason in (Reason.TOO_FAR_BEHIND, Reason.OWNER_CHANGED), (
                "what is known is exact"
            )
            assert reason is not Reason.TOO_FAR_BEHIND or table.has_evicted


def test_a_table_that_has_read_all_of_the_log_knows_all_of_it() -> None:
    table = LockTable(10, 3)
    assert table.lower(history_of(2, [[(1, WRITE)], [(2, READ)]]))
    assert (table.floor, table.explain(1, 3)) == (1, (2, Reason.CONFLICT))
    assert table.explain(9, 3) == (1, Reason.OWNER_CHANGED)
    assert not table.lower(history_of(0, [[(1, WRITE), (3, APPEND)], []])), "nothing stands in front of the first id"
    assert (table.floor, table.explain(1, 3), table.explain(3, 3)) == (-1, (2, Reason.CONFLICT), (0, Reason.CONFLICT))
    assert table.decide(batch_of(b"", marks=-1, locks=[[(9, READ)]]), 4, 3).sequences.tolist() == []


def test_a_table_without_room_keeps_its_newest_marks_and_its_floor_above_the_others() -> None:
    table = LockTable(2, 5)
    assert not table.lower(history_of(3, [[(1, WRITE)], [(2, WRITE)], [(3, WRITE)]]))
    assert (table.floor, len(table)) == (3, 2)
    assert table.explain(1, 5) == (3, Reason.OWNER_CHANGED)
    table.decide(batch_of(b"", marks=5, locks=[[(4, WRITE)]]), 6, 5)
    assert (table.floor, table.explain(2, 5)) == (4, (4, Reason.TOO_FAR_BEHIND)), "the oldest goes first"


def test_a_table_that_has_evicted_is_not_lowered() -> None:
    table = LockTable(1, 5)
    table.decide(batch_of(b"", b"", marks=5, locks=[[(1, WRITE)], [(2, WRITE)]]), 6, 5)
    assert not table.lower(history_of(4, [[(8, WRITE)], []]))
    assert (table.floor, table.explain(8, 5)) == (6, (6, Reason.TOO_FAR_BEHIND))


def test_an_old_mark_makes_room_when_its_lock_is_marked_again() -> None:
    table = LockTable(2, 5)
    assert not table.lower(history_of(0, [[(1, WRITE)], [], [], [], [], []]))
    for id_, lock in ((6, 1), (7, 2)):
        table.decide(batch_of(b"", marks=id_ - 1, locks=[[(lock, WRITE)]]), id_, id_ - 1)
    assert (table.explain(1, 7)[0], table.explain(2, 7)[0], table.floor) == (6, 7, -1)


# -- locks that are looked up in the log -------------------------------------------------------------------------------


@dataclass
class WaitingTwin:
    """A row that waits for look-ups."""

    seen: int
    locks: list[tuple[int, Mode]]
    wanted: dict[int, None]
    decided: int


@dataclass
class Asking:
    """A table whose unknown locks are looked up in a log that remembers everything, and answers when it likes."""

    size: int
    low_mark: int
    twin: Twin
    waiting: list[WaitingTwin] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = LockTable(self.size, self.low_mark, looks_up=True)
        self.next_id = self.low_mark + 1

    def submit(self, seen: int, locks: list[tuple[int, Mode]], *, decided: int = 0) -> None:
        batch = batch_of(b"x", marks=seen, locks=[locks])
        found = self.table.look_up(batch, self.next_id - 1, decided=decided, most=100, ahead=100)
        if found is None:
            self.decide(seen, locks)
            return
        row, lookups, wanted = found
        assert row == 0
        assert not decided, "one round is enough"
        own = {lookup.lock for lookup in lookups}
        assert set(wanted) >= own
        self.lookups += lookups
        self.waiting.append(WaitingTwin(seen, locks, dict.fromkeys(wanted), int(set(wanted) == own)))

    def answer(self, number: int) -> None:
        if not self.lookups:
            return
        lookup = self.lookups.pop(number % len(self.lookups))
        marks = [id_ for lock, id_ in self.twin.marks if lock == lookup.lock and lookup.first_id <= id_ <= lookup.last_id]
        self.table.learn(lookup, max(marks, default=-1))
        for one in list(self.waiting):
            one.wanted.pop(lookup.lock, None)
            if not one.wanted:
                self.waiting.remove(one)
                self.submit(one.seen, one.locks, decided=one.decided)

    def decide(self, seen: int, locks: list[tuple[int, Mode]]) -> None:
        refused = self.table.decide(batch_of(b"x", marks=seen, locks=[locks]), self.next_id, self.next_id - 1)
        checked = [lock for lock, mode in locks if mode is not APPEND]
        worst = max([last for lock in checked if (last := self.twin.last(lock)) is not None], default=-1)
        if worst > seen:
            assert refused.sequences.tolist() == [0], "a real conflict was let through"
            assert refused.reasons.tolist() == [Reason.CONFLICT]
            assert int(refused.conflict_ids[0]) > seen
            assert int(refused.conflict_ids[0]) in [self.twin.last(lock) for lock in checked]
        else:
            assert refused.sequences.tolist() == [], "nothing stands in the way"
            self.twin.marks += [(lock, self.next_id) for lock, mode in locks if mode is not READ]
            self.next_id += 1
        self.table.check()


@given(
    size=st.integers(1, 6),
    before=st.lists(st.integers(0, 9), max_size=5),
    steps=st.lists(st.one_of(row, st.integers(0, 9)), max_size=40),
)
def test_with_lookups_every_decision_is_exact(size: int, before: list[int], steps: list[Row | int]) -> None:
    """A later look-up of a lock may not reach as far back as the row needs that joins it; such a row asks once more."""
    asking = Asking(size, len(before) - 1, Twin(len(before) - 1, [(lock, id_) for id_, lock in enumerate(before)]))
    for step in steps:
        if isinstance(step, int):
            asking.answer(step)
        else:
            asking.submit(max(-1, asking.next_id - 1 - step[0]), step[1])
    while asking.lookups:
        asking.answer(0)
    assert not asking.waiting
    assert not asking.table._sought


def test_a_mark_that_came_and_went_during_a_lookup_counts() -> None:
    table = LockTable(1, 4, looks_up=True)
    found = table.look_up(batch_of(b"", marks=2, locks=[[(7, WRITE)]]), 4, decided=0, most=9, ahead=9)
    assert found is not None
    assert found == (0, [Lookup(lock=7, first_id=3, last_id=4)], [7])
    table.decide(batch_of(b"", b"", marks=4, locks=[[(7, APPEND)], [(8, APPEND)]]), 5, 4)
    assert table.floor == 5, "the lock was marked by id 5, and evicted"
    table.learn(found[1][0], -1)
    refused = table.decide(batch_of(b"", marks=4, locks=[[(7, WRITE)]]), 7, 6)
    assert (refused.reasons.tolist(), refused.conflict_ids.tolist()) == ([Reason.CONFLICT], [5])


def test_an_answer_about_part_of_the_log_is_not_taken_for_more() -> None:
    table = LockTable(1, 9, looks_up=True)
    found = table.look_up(batch_of(b"", marks=7, locks=[[(7, WRITE)]]), 9, decided=0, most=9, ahead=9)
    assert found is not None
    table.learn(found[1][0], -1)
    assert table.explain(7, 9) == (7, Reason.OWNER_CHANGED)
    assert table.look_up(batch_of(b"", marks=7, locks=[[(7, WRITE)]]), 9, decided=0, most=9, ahead=9) is None
    assert table.look_up(batch_of(b"", marks=6, locks=[[(7, WRITE)]]), 9, decided=0, most=9, ahead=9) is not None


def test_lookups_are_bounded_and_later_rows_are_looked_up_together() -> None:
    table = LockTable(1, 9, looks_up=True)
    rows = [[(1, APPEND)], [(2, WRITE), (3, READ)], [(4, WRITE)], [(5, WRITE)]]
    batch = batch_of(*[b""] * 4, marks=3, locks=rows)

    def look_up(**arguments: int) -> tuple[int, list[int]] | None:
        fresh = LockTable(1, 9, looks_up=True)
        found = fresh.look_up(batch, 9, **arguments)
        return None if found is None else (found[0], [lookup.lock for lookup in found[1]])

    assert look_up(decided=0, most=9, ahead=9) == (1, [2, 3, 4, 5])
    assert look_up(decided=0, most=9, ahead=3) == (1, [2, 3, 4])
    assert look_up(decided=0, most=9, ahead=1) == (1, [2, 3]), "the first row needs both"
    assert look_up(decided=0, most=1, ahead=9) == (2, [4]), "too many for the room that is left: it is refused"
    assert look_up(decided=2, most=9, ahead=9) == (2, [4, 5])
    assert table.look_up(batch, 8, decided=0, most=9, ahead=9) is None, "the floor is not committed"
