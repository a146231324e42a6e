"""The lock table of one session: whether a client may still act on what it has seen. Pure.

The table maps each lock to the last transaction that marked it, and is bounded in size. The oldest marks are evicted
first. The highest evicted id is the *floor*: the mark of every lock that is not in the table. So a decision may be too
strict for a client that lags far behind, and is never too lenient. Marks are set when the id is given, not when it is
committed, so that transactions in flight conflict exactly; a transaction that then gets lost takes the session, and this
table, with it.

A new table is empty, and its floor is the mark at which the session opened. In format 1 the log holds the locks of its
transactions. They are read backwards (`lower`), and the floor sinks to the first transaction that was read. At any moment
the table decides like one that has seen everything, or more strictly.

A group of transactions is decided like one transaction that has the locks of all of them and has seen the least that any
of them has: all of them are accepted, or all are refused for the same reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from waltzd.protocol.batches import AppendBatch, Refusals
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory

_READ, _APPEND = int(Mode.READ), int(Mode.APPEND)


_NOTHING_REFUSED = Refusals(np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.uint64))


class LockTable:
    def __init__(self, size: int, low_mark: int) -> None:
        """`low_mark`: the mark at which the session opened. Older marks are unknown until `lower` adds them."""
        assert size > 0
        self.floor = low_mark
        self._low_mark = low_mark
        self._size = size
        self._marked: OrderedDict[int, int] = OrderedDict()
        """Locks marked in this session, oldest mark first."""
        self._before: dict[int, int] = {}
        """Locks marked before this session and not since, newest mark first, so that `popitem` takes the oldest."""
        self.lowest = low_mark
        """Id above which each mark is in the table or was evicted."""
        self.has_evicted = False

    def __len__(self) -> int:
        return len(self._marked) + len(self._before)

    def decide(self, batch: AppendBatch, next_id: int, committed: int) -> Refusals:
        """Decide the locks of a batch. Return the refused rows, each with the failed lock of the highest mark. The
        accepted rows get the ids from `next_id` on, in order, and set their marks, so that a later row or group sees
        them."""
        if len(batch.lock_ids) == 0:
            return _NOTHING_REFUSED
        ids, modes = batch.lock_ids.tolist(), batch.lock_modes.tolist()
        marked, before = self._marked, self._before
        mark_of, to_the_end, room = marked.get, marked.move_to_end, self._size - len(before)
        refused: list[tuple[int, Reason, int, int]] = []
        start, row = 0, batch.first_sequence
        rows, steps = _groups(batch)
        for seen, count, size in rows:
            mine = range(start, start + count)
            start += count
            worst = seen
            for k in mine:
                if modes[k] != _APPEND:
                    mark = mark_of(ids[k])
                    if mark is None:
                        mark = before.get(ids[k], self.floor)
                    if mark > worst:
                        worst, failed = mark, ids[k]
            if worst > seen:
                reason = self._reason(failed, worst, committed)
                refused += [(row + n, reason, worst, failed) for n in range(size)]
            else:
                for k in mine:
                    if modes[k] != _READ:
                        lock = ids[k]
                        marked[lock] = next_id + steps[k] if steps else next_id
                        to_the_end(lock)
                        if before and before.pop(lock, None) is not None:
                            room += 1
                        if len(marked) > room:
                            self._evict()
                            room = self._size - len(before)
                next_id += size
            row += size
        return _columns(refused) if refused else _NOTHING_REFUSED

    def _evict(self) -> None:
        self.has_evicted = True
        self.floor = (self._before.popitem() if self._before else self._marked.popitem(last=False))[1]

    def lower(self, history: LockHistory) -> bool:
        """Add the marks of the transactions before the oldest known ones, and lower the floor to the first of them.
        Return False when nothing older can be added: the table is full, or marks were evicted."""
        count = len(history.locks)
        assert history.first_id + count - 1 == self.lowest, "nothing may be left out"
        if self.has_evicted:
            return False
        marks = history.locks.modes != _READ
        ids = history.locks.ids[marks][::-1].tolist()
        at = np.repeat(np.arange(history.first_id, history.first_id + count), history.locks.counts)[marks][::-1].tolist()
        marked, before = self._marked, self._before
        room = self._size - len(self)
        for lock, mark in zip(ids, at, strict=True):
            if lock in marked or lock in before:
                continue
            if room == 0:
                self.floor = mark
                return False
            before[lock] = mark
            room -= 1
        self.floor = self.lowest = history.first_id - 1
        return self.floor >= 0

    def explain(self, lock: int, committed: int) -> tuple[int, Reason]:
        """Return the mark that a client's mark is compared with, and the reason why a client with a lower mark is
        refused."""
        mark = self._marked.get(lock)
        if mark is None:
            mark = self._before.get(lock, self.floor)
        return mark, self._reason(lock, mark, committed)

    def check(self) -> None:
        """Assert that the table is bounded, and that its floor is not above any mark in it."""
        assert len(self) <= self._size
        assert self.has_evicted or self.floor <= self._low_mark
        oldest = [*list(reversed(self._before.values()))[:1], *list(self._marked.values())[:1]]
        assert [self.floor, *oldest] == sorted([self.floor, *oldest])

    def _reason(self, lock: int, conflict_id: int, committed: int) -> Reason:
        if lock in self._marked or lock in self._before:
            return Reason.IN_FLIGHT if conflict_id > committed else Reason.CONFLICT
        return Reason.TOO_FAR_BEHIND if self.has_evicted else Reason.OWNER_CHANGED


def _groups(batch: AppendBatch) -> tuple[Iterable[tuple[int, int, int]], list[int] | None]:
    """Return for each group what it has seen, its locks and its rows; and for each lock the distance of its row from the
    first row of its group. The second value is None if each row stands by itself."""
    if batch.follows is None:
        return zip(batch.marks.tolist(), batch.lock_counts.tolist(), repeat(1), strict=False), None
    starts = np.flatnonzero(~batch.follows)
    sizes = np.diff(np.append(starts, len(batch)))
    seen, counts = np.minimum.reduceat(batch.marks, starts), np.add.reduceat(batch.lock_counts, starts)
    steps = np.repeat(np.arange(len(batch)) - np.repeat(starts, sizes), batch.lock_counts)
    return zip(seen.tolist(), counts.tolist(), sizes.tolist(), strict=True), steps.tolist()


def _columns(refused: list[tuple[int, Reason, int, int]]) -> Refusals:
    sequences, reasons, conflict_ids, locks = zip(*refused, strict=True)
    return Refusals(
        np.array(sequences, np.int64),
        np.array(reasons, np.uint8),
        np.array(conflict_ids, np.int64),
        np.array(locks, np.uint64),
    )
