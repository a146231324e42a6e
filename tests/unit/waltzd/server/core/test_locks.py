"""The lock table against a dumb twin that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mounting import batch_of
from waltzd.protocol.locks import Mode, Reason
from waltzd.server.core.locks import LockTable

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
            if reason in (Reason.REAL, Reason.IN_FLIGHT):
                assert lock in window
                assert conflict_id == twin.last(lock)
                assert (reason is Reason.IN_FLIGHT) == (conflict_id > committed)
            else:
                assert lock not in window, "inside the window only a true conflict is one"
                assert (reason is Reason.NEW_OWNER) == (conflict_id == low_mark)
            known = [twin.last(one) if one in window else None for one in checked]
            assert conflict_id == max(mark_ if mark_ is not None else conflict_id_of(twin, size) for mark_ in known)
        assert table.floor == conflict_id_of(twin, size)
        assert table.floor >= floor_before
        assert len(table) <= size


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


@pytest.mark.parametrize(("mark", "reason"), [(4, Reason.NEW_OWNER), (5, None)])
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
    assert (decision.reasons.tolist(), decision.conflict_ids.tolist()) == ([Reason.FLOOR], [0])
    assert table.decide(batch_of(b"", marks=0, locks=[[(99, READ)]]), 3, 2).sequences.tolist() == []


def test_locks_are_64_bits() -> None:
    table, highest = LockTable(2, -1), (1 << 64) - 1
    table.decide(batch_of(b"", locks=[[(highest, WRITE)]]), 0, -1)
    decision = table.decide(batch_of(b"", locks=[[(highest, READ)]]), 1, 0)
    assert decision.locks.dtype == np.uint64
    assert decision.locks.tolist() == [highest]
