"""The lock table of one session: whether a client may still act on what it has seen. Pure.

The table maps each lock to the last transaction that marked it, and is bounded in size. The oldest marks are evicted
first. The highest evicted id is the *floor*: the mark of every lock that is not in the table. So a decision may be too
strict for a client that lags far behind, and is never too lenient. Marks are set when the id is given, not when it is
committed, so that transactions in flight conflict exactly; a transaction that then gets lost takes the session, and this
table, with it.

A lock that the table has evicted can be looked up in the log (`look_up`, `learn`): the log is asked for its last mark up to
the floor of that moment, and the table has each mark above it. A mark that is evicted before the answer comes is newer
than the answer, and counts instead of it. Later evictions keep the answer exact. So a transaction that waited for an answer
is decided by the same rule as every other one.

A new table is empty, and its floor is the mark at which the session opened. In format 1 the log holds the locks of its
transactions. They are read backwards (`lower`), and the floor sinks to the first transaction that was read. At any moment
the table decides like one that has seen everything, or more strictly.

A group of transactions is decided like one transaction that has the locks of all of them and has seen the least that any
of them has: all of them are accepted, or all are refused for the same reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np

from waltzd.protocol.batches import AppendBatch, Refusals, SingleAppend
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory

_READ, _APPEND = int(Mode.READ), int(Mode.APPEND)

_EXACT = Reason.CONFLICT, Reason.IN_FLIGHT
"""Reasons that name the transaction that marked the lock."""
FOUND_MAX = 4096
"""Locks in memory that were looked up in the log."""
EVICTED_TOGETHER = 512
"""Locks that are found at once for eviction. A dict is read from its start, where the places of removed locks stay for a
while, so finding them one by one would take longer the more were removed."""
NOTHING_REFUSED = Refusals(np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.uint64))
"""Refusals of a batch whose rows are all accepted."""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A question to the log for the last transaction that marked a lock, in a range of ids."""

    lock: int
    first_id: int
    last_id: int


class LockTable:
    def __init__(self, size: int, low_mark: int, *, looks_up: bool = False, found_max: int = FOUND_MAX) -> None:
        """`low_mark`: the mark at which the session opened. Older marks are unknown until `lower` adds them. `looks_up`:
        whether unknown locks are looked up, so that a refusal names a known conflict rather than the floor. `found_max`:
        locks in memory that were looked up."""
        assert size > 0
        self._looks_up = looks_up
        self._found_max = found_max
        self.floor = low_mark
        self._low_mark = low_mark
        self._size = size
        self._marked: dict[int, int] = {}
        """Locks marked in this session, oldest mark first. An `OrderedDict` takes 40 % more memory."""
        self._oldest: list[tuple[int, int]] = []
        """Locks to evict next, with their marks, oldest last. An entry is void once its lock has another mark."""
        self._before: dict[int, int] = {}
        """Locks marked before this session and not since, newest mark first, so that `popitem` takes the oldest."""
        self.lowest = low_mark
        """Id above which each mark is in the table or was evicted."""
        self.has_evicted = False
        self._found: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        """Locks that were looked up, newest answer last: no id above the number marked the lock, and whether that id did.
        While the table has the lock, the table counts."""
        self._sought: dict[int, int] = {}
        """Locks that are being looked up, with the mark that was evicted since; -1 for none."""

    def __len__(self) -> int:
        return len(self._marked) + len(self._before)

    def decide(self, batch: AppendBatch, next_id: int, committed: int) -> Refusals:
        """Decide the locks of a batch. Return the refused rows, each with the failed lock of the highest mark. The
        accepted rows get the ids from `next_id` on, in order, and set their marks, so that a later row or group sees
        them."""
        ids, modes = batch.lock_lists
        if not ids:
            return NOTHING_REFUSED
        marked, before, found = self._marked, self._before, self._found
        mark_of, room = marked.get, self._size - len(before)
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
                        if found and mark > worst:
                            mark = self._highest_mark(ids[k])
                    if mark > worst:
                        worst, failed = mark, ids[k]
            if worst > seen:
                reason = self._reason(failed, worst, committed)
                if self._looks_up and reason not in _EXACT:
                    known = [(self._mark(ids[k]), ids[k]) for k in mine if modes[k] != _APPEND]
                    if (best := max(known))[0] > seen:
                        worst, failed = best
                        reason = self._reason(failed, worst, committed)
                refused += [(row + n, reason, worst, failed) for n in range(size)]
            else:
                for k in mine:
                    if modes[k] != _READ:
                        lock = ids[k]
                        mark = next_id + steps[k] if steps else next_id
                        if marked.pop(lock, None) == mark:  # twice in one transaction
                            self._oldest.clear()
                        marked[lock] = mark
                        if before and before.pop(lock, None) is not None:
                            room += 1
                        if len(marked) > room:
                            self._evict()
                            room = self._size - len(before)
                next_id += size
            row += size
        return _columns(refused) if refused else NOTHING_REFUSED

    def _evict(self) -> None:
        self.has_evicted = True
        lock, self.floor = self._before.popitem() if self._before else self._pop_oldest()
        if lock in self._found:
            self._found[lock] = self.floor, True
        if lock in self._sought:
            self._sought[lock] = self.floor

    def _pop_oldest(self) -> tuple[int, int]:
        """Remove the lock with the oldest mark of this session; return both."""
        marked = self._marked
        while True:
            if not self._oldest:
                self._oldest = list(islice(marked.items(), EVICTED_TOGETHER))
                self._oldest.reverse()
            lock, mark = self._oldest.pop()
            if marked.get(lock) == mark:
                del marked[lock]
                return lock, mark

    # -- locks that are looked up in the log

    def look_up(
        self, batch: AppendBatch, committed: int, *, decided: int, most: int, ahead: int
    ) -> tuple[int, list[Lookup], list[int]] | None:
        """Return the first row of a batch that would be refused only because locks are unknown; the look-ups that its
        decision needs, at most `most`, and, up to `ahead` in all, those of later rows; and all locks to wait for, some of
        which are looked up for another batch already. Each look-up has to end with `learn`. Return None if there is no
        such row, or if the floor is not committed.

        `decided`: number of rows at the start that are decided with what is known."""
        if self.floor > committed or batch.lowest_mark >= self.floor:
            return None
        (ids, modes), groups = batch.lock_lists, _groups(batch)[0]
        first: int | None = None
        wanted: dict[int, int] = {}
        begun: dict[int, None] = {}
        start = row = 0
        for seen, count, size in groups:
            mine, at = range(start, start + count), row
            start, row = start + count, row + size
            if seen >= self.floor or at < decided:
                continue
            checked = [ids[k] for k in mine if modes[k] != _APPEND]
            unknown = dict.fromkeys(lock for lock in checked if not self._is_known(lock, seen))
            if not unknown or any(self._mark(lock) > seen for lock in checked):
                continue
            new = [lock for lock in unknown if lock not in self._sought]
            if len(wanted.keys() | dict.fromkeys(new)) > (most if first is None else min(most, ahead)):
                if first is None:
                    continue
                break
            first = at if first is None else first
            begun |= unknown
            wanted |= {lock: min(seen, wanted.get(lock, seen)) for lock in new}
            for lock in checked:  # the table may forget it meanwhile
                if lock in self._marked or lock in self._before:
                    self._keep(lock, self._mark(lock), is_exact=True)
        if first is None:
            return None
        self._sought |= dict.fromkeys(wanted, -1)
        lookups = [Lookup(lock=lock, first_id=seen + 1, last_id=self.floor) for lock, seen in wanted.items()]
        return first, lookups, list(begun)

    def learn(self, lookup: Lookup, mark: int | None) -> None:
        """End a look-up. `mark`: last id in its range that marked the lock, -1 for none, None if there was no answer."""
        evicted = self._sought.pop(lookup.lock)
        if evicted >= 0:
            self._keep(lookup.lock, evicted, is_exact=True)
        elif mark is not None:
            is_exact = mark >= lookup.first_id or lookup.first_id == 0
            self._keep(lookup.lock, max(mark, lookup.first_id - 1), is_exact=is_exact)

    def _keep(self, lock: int, mark: int, *, is_exact: bool) -> None:
        found = self._found
        found[lock] = mark, is_exact
        found.move_to_end(lock)
        if len(found) > self._found_max:
            found.popitem(last=False)

    def _mark(self, lock: int) -> int:
        """Return the last mark of a lock if it is known exactly; else -1."""
        mark = self._marked.get(lock)
        if mark is None:
            mark = self._before.get(lock)
        if mark is None:
            mark, is_exact = self._found.get(lock, (-1, True))
            return mark if is_exact else -1
        return mark

    def _is_known(self, lock: int, seen: int) -> bool:
        """Return whether it is known if an id above `seen` marked the lock."""
        if lock in self._marked or lock in self._before:
            return True
        mark, is_exact = self._found.get(lock, (self.floor, False))
        return is_exact or mark <= seen

    def _highest_mark(self, lock: int) -> int:
        """Return an id above which the lock, which is not among those of this session, was not marked."""
        mark = self._before.get(lock)
        return min(self.floor, self._found.get(lock, (self.floor, False))[0]) if mark is None else mark

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
        mark = self.newest_mark(lock)
        return mark, self._reason(lock, mark, committed)

    def newest_mark(self, lock: int) -> int:
        """Return an id above which the lock was not marked."""
        mark = self._marked.get(lock)
        return self._highest_mark(lock) if mark is None else mark

    def check(self) -> None:
        """Assert that the table is bounded, and that its floor is not above any mark in it."""
        assert len(self) <= self._size
        assert self.has_evicted or self.floor <= self._low_mark
        marks = list(self._marked.values())
        oldest = [self.floor, *islice(reversed(self._before.values()), 1), *marks[:1]]
        assert oldest == sorted(oldest)
        assert marks == sorted(marks)
        assert len(self._found) <= self._found_max
        for lock, (mark, is_exact) in self._found.items():
            assert mark <= self.floor or not is_exact or lock in self._marked or lock in self._before

    def _reason(self, lock: int, conflict_id: int, committed: int) -> Reason:
        if lock in self._marked or lock in self._before or self._found.get(lock, (0, False))[1]:
            return Reason.IN_FLIGHT if conflict_id > committed else Reason.CONFLICT
        return Reason.TOO_FAR_BEHIND if self.has_evicted else Reason.OWNER_CHANGED


def _groups(batch: AppendBatch) -> tuple[Iterable[tuple[int, int, int]], list[int] | None]:
    """Return for each group what it has seen, its locks and its rows; and for each lock the distance of its row from the
    first row of its group. The second value is None if each row stands by itself."""
    if isinstance(batch, SingleAppend):
        return ((batch.mark, len(batch.locks), 1),), None
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
