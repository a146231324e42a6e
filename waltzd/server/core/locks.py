"""The lock table of one session: whether a client may still act on what it has seen. Pure.

A map from each lock to the last transaction that marked it, bounded in size. The oldest marks are evicted first, and the
highest id that was ever evicted is the *floor*: the mark of every lock that is not in the table. So an answer may be too
strict for a client that lags far behind, and never too lenient. Marks are set when the id is given, not when it is
committed, so that transactions in flight conflict exactly; a transaction that then gets lost takes the session, and this
table, with it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from waltzd.protocol.batches import AppendBatch, Refusals
from waltzd.protocol.locks import Mode, Reason

_READ, _APPEND = int(Mode.READ), int(Mode.APPEND)


_NOTHING_REFUSED = Refusals(np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.uint64))


class LockTable:
    def __init__(self, size: int, low_mark: int) -> None:
        """`low_mark`: where the session opened. What was marked before that is not known here."""
        assert size > 0
        self.floor = low_mark
        self._low_mark = low_mark
        self._size = size
        self._marked: OrderedDict[int, int] = OrderedDict()
        """Oldest mark first."""

    def __len__(self) -> int:
        return len(self._marked)

    def decide(self, batch: AppendBatch, next_id: int, committed: int) -> Refusals:
        """What is refused, each with the failed lock of the highest mark. The other rows get the ids from `next_id` on, in
        order, and their marks are set, so that a later row sees those of an earlier one."""
        if len(batch.lock_ids) == 0:
            return _NOTHING_REFUSED
        ids, modes = batch.lock_ids.tolist(), batch.lock_modes.tolist()
        marked = self._marked
        mark_of, to_the_end, floor = marked.get, marked.move_to_end, self.floor
        refused: list[tuple[int, Reason, int, int]] = []
        start = 0
        for row, (seen, count) in enumerate(zip(batch.marks.tolist(), batch.lock_counts.tolist(), strict=True)):
            mine = range(start, start + count)
            start += count
            worst = seen
            for k in mine:
                if modes[k] != _APPEND:
                    mark = mark_of(ids[k], floor)
                    if mark > worst:
                        worst, failed = mark, ids[k]
            if worst > seen:
                refused.append((batch.first_sequence + row, self._reason(failed, worst, committed), worst, failed))
                continue
            for k in mine:
                if modes[k] != _READ:
                    lock = ids[k]
                    marked[lock] = next_id
                    to_the_end(lock)
                    if len(marked) > self._size:
                        floor = self.floor = marked.popitem(last=False)[1]
            next_id += 1
        return _columns(refused) if refused else _NOTHING_REFUSED

    def explain(self, lock: int, committed: int) -> tuple[int, Reason]:
        """The mark with which a client's is compared, and why one that has seen less would be refused."""
        mark = self._marked.get(lock, self.floor)
        return mark, self._reason(lock, mark, committed)

    def check(self) -> None:
        """What is true after every event: the table is bounded, and its floor is not above any mark in it."""
        assert len(self._marked) <= self._size
        assert self._low_mark <= self.floor
        if self._marked:
            oldest, newest = next(iter(self._marked.values())), next(reversed(self._marked.values()))
            assert self.floor <= oldest <= newest

    def _reason(self, lock: int, conflict_id: int, committed: int) -> Reason:
        if lock in self._marked:
            return Reason.IN_FLIGHT if conflict_id > committed else Reason.REAL
        return Reason.NEW_OWNER if self.floor == self._low_mark else Reason.FLOOR


def _columns(refused: list[tuple[int, Reason, int, int]]) -> Refusals:
    sequences, reasons, conflict_ids, locks = zip(*refused, strict=True)
    return Refusals(
        np.array(sequences, np.int64),
        np.array(reasons, np.uint8),
        np.array(conflict_ids, np.int64),
        np.array(locks, np.uint64),
    )
