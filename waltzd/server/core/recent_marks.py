"""The locks of the newest committed transactions, in memory: what an owner answers without asking a storage. Pure.

The index is filled by questions, not by appends: a question first adds the batches that were committed since the last one.
A partition without such questions pays nothing. It covers one range of ids without a gap, from `first_id` on. Marks
in the newest block are in a dictionary; a full block becomes sorted columns, and the oldest blocks are dropped. What is
below `first_id` the key indexes of the storages answer.

Only committed batches may be added: they stay in the log for as long as the session of the owner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from waltzd.format.batch import HEAD_BYTES, Batch
from waltzd.format.checksum import I64
from waltzd.format.key_index import U64, LockMarks, LockQuery, lone_marks, marks_of

BLOCK_MARKS = 8192
BLOCKS_MAX = 16
"""Full blocks of 128 KiB that are kept."""
NEW_MARKS_MAX = 2 * BLOCK_MARKS
"""Marks that one question adds. If there are more, the index begins anew with the newest batches: a question after
many appends keeps the event loop busy for a few milliseconds only."""
OLDER_LOCKS_MAX, OLDER_IDS_MAX = 4096, 32
"""Locks of which the answers of storages are kept, and the largest answer that is kept."""
LOCK_BYTES = 8
"""Least number of bytes of a lock in the head of a batch."""


class _Block(NamedTuple):
    """Marks of the ids from `first_id` on, sorted by lock and id."""

    first_id: int
    locks: U64
    ids: I64


class RecentMarks:
    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, first_id: int) -> None:
        self.first_id = first_id
        """First id of the range that the index covers."""
        self.next_id = first_id
        """Id behind that range."""
        self._blocks: list[_Block] = []
        self._newest: dict[int, list[int]] = {}
        """For each lock the ids above those of the blocks that marked it, ascending."""
        self._newest_first_id = first_id
        self._newest_marks = 0

    def add(self, batches: Sequence[Batch]) -> None:
        """Add committed batches in a row. If they do not follow what is covered, or have too many marks, the index begins
        anew with the newest of them."""
        start, marks = len(batches), 0
        while start > 0 and (marks == 0 or marks + _marks_in(batches[start - 1]) <= NEW_MARKS_MAX):
            start -= 1
            marks += _marks_in(batches[start])
        if start < len(batches) and batches[start].first_id != self.next_id:
            self._begin(batches[start].first_id)
        for batch in batches[start:]:
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        if batch.head.lock_bytes:
            newest = self._newest
            for lock, id_ in _marks_of(batch):
                ids = newest.setdefault(lock, [])
                if not ids or ids[-1] != id_:
                    ids.append(id_)
                    self._newest_marks += 1
        self.next_id = batch.last_id + 1
        if self._newest_marks >= BLOCK_MARKS:
            self._close_block()

    def _close_block(self) -> None:
        newest = self._newest
        counts = np.fromiter(map(len, newest.values()), np.int64, len(newest))
        locks = np.repeat(np.fromiter(newest, np.uint64, len(newest)), counts)
        ids = np.fromiter(chain.from_iterable(newest.values()), np.int64, len(locks))
        order = np.argsort(locks, kind="stable")
        self._blocks.append(_Block(self._newest_first_id, locks[order], ids[order]))
        self._newest, self._newest_first_id, self._newest_marks = {}, self.next_id, 0
        if len(self._blocks) > BLOCKS_MAX:
            del self._blocks[0]
            self.first_id = self._blocks[0].first_id

    def find(self, query: LockQuery) -> LockMarks:
        """Return the whole answer to a query whose ids are all covered."""
        assert self.first_id <= query.first_id <= query.last_id < self.next_id, (query, self.first_id, self.next_id)
        lock, ids = np.uint64(query.lock), list[int]()
        for block in self._blocks:
            start, stop = block.locks.searchsorted(lock, "left"), block.locks.searchsorted(lock, "right")
            if start < stop:
                ids += block.ids[start:stop].tolist()
        ids += self._newest.get(query.lock, ())
        return _selected(ids, query)

    def check(self) -> None:
        """Assert that the index is bounded and covers one range."""
        starts = [*(block.first_id for block in self._blocks), self._newest_first_id, self.next_id]
        assert starts == sorted(starts)
        assert self.first_id == starts[0]
        assert len(self._blocks) <= BLOCKS_MAX
        assert self._newest_marks == sum(map(len, self._newest.values())) < BLOCK_MARKS


class OlderMarks:
    """Answers of storages about single locks: for each lock all transactions up to some id that marked it. Boundaries are
    read again and again, and what is committed does not change."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()
        """Last id that is known of each lock, and the ids up to it that marked the lock; last used last."""

    def learn(self, lock: int, last_id: int, ids: list[int]) -> None:
        """Note all ids from 0 to `last_id` that marked a lock."""
        if len(ids) <= OLDER_IDS_MAX:
            self._known[lock] = last_id, ids
            self._known.move_to_end(lock)
            if len(self._known) > OLDER_LOCKS_MAX:
                self._known.popitem(last=False)

    def find(self, query: LockQuery) -> LockMarks | None:
        """Return an answer to the start of a query; None if nothing is known of its next id."""
        last_id, known = self._known.get(query.lock, (-1, []))
        if query.next_id > last_id:
            return None
        self._known.move_to_end(query.lock)
        return _selected(known, query.within(0, last_id))


def _selected(ids: list[int], query: LockQuery) -> LockMarks:
    """Return the whole answer to a query, of the ids in ascending order that marked its lock."""
    ids = ids[bisect_left(ids, query.first_id) : bisect_right(ids, query.last_id)]
    if query.newest_first:
        ids.reverse()
    through = query.first_id if query.newest_first else query.last_id
    if len(ids) >= query.limit:
        ids = ids[: query.limit]
        through = ids[-1]
    return LockMarks(ids=tuple(ids), through=through)


def join_marks(groups: Sequence[Sequence[int]], marks: Mapping[int, LockMarks], *, newest_first: bool) -> LockMarks:
    """Return the transactions that marked all locks of one of the groups, from answers to the same query for each lock.

    Answers end at different ids. The result ends where the answers no longer tell all transactions of some group. Of a
    group, the answer that reaches furthest is taken, and the other answers exclude ids as far as they reach."""

    def is_within(id_: int, found: LockMarks) -> bool:
        return id_ >= found.through if newest_first else id_ <= found.through

    if len(groups) == 1 and len(groups[0]) == 1:
        return marks[groups[0][0]]
    joined: dict[int, None] = {}
    ends: list[int] = []
    for group in groups:
        answers = [marks[lock] for lock in group]
        widest = min(answers, key=lambda found: (found.through if newest_first else -found.through, len(found.ids)))
        others = [(found, dict.fromkeys(found.ids)) for found in answers if found is not widest]
        ends.append(widest.through)
        for id_ in widest.ids:
            if all(id_ in ids or not is_within(id_, found) for found, ids in others):
                joined[id_] = None
    whole = LockMarks(ids=(), through=max(ends) if newest_first else min(ends))
    return replace(whole, ids=tuple(sorted((id_ for id_ in joined if is_within(id_, whole)), reverse=newest_first)))


def _marks_of(batch: Batch) -> Iterable[tuple[int, int]]:
    """Return each lock that a batch marked, and the id of the transaction that did."""
    if batch.head.records == 1:
        lone = lone_marks(memoryview(batch.preamble)[HEAD_BYTES : HEAD_BYTES + batch.head.lock_bytes])
        if lone is not None:
            return [(lock, batch.first_id) for lock in lone]
    found = marks_of(batch.first_id, batch.locks)
    return zip(found.locks.tolist(), found.ids.tolist(), strict=True)


def _marks_in(batch: Batch) -> int:
    """Return a bound of the number of marks of a batch."""
    return batch.head.lock_bytes // LOCK_BYTES
