"""A log of format 1 as tests think of it: a list of batches, drawn at random, and everything that a replica must say of it.

The model knows nothing of segments but the rule that a batch with the flag LAST ends one, and `tests.batches`, which makes
the files of a log by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

import numpy as np

from tests.batches import READ, segment_raw, segments_of
from waltzd.disk.simulated import SimDisk
from waltzd.errors import BadArgument, NeedsBatches
from waltzd.format.batch import Batch, End, Piece, encode_batch
from waltzd.format.footer import NO_HASH
from waltzd.format.key_index import LockQuery
from waltzd.format.layout import segment_name
from waltzd.format.record import LockColumns, Run, encode_payloads
from waltzd.protocol.peers import runs_of
from waltzd.storage.replica.partition import Partition

SIZES = (0, 3, 40, 200, 900)


@dataclass
class BatchLog:
    """What was appended so far: records of format 0, then batches."""

    random: random.Random
    segment_bytes_max: int = 2000
    partition: int = 0
    first: list[Run] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return [*self.first, *self.batches]

    @property
    def last_id(self) -> int:
        return self.pieces[-1].last_id if self.pieces else -1

    @property
    def end(self) -> End | None:
        return end_of(self.batches)

    def draw(self, count: int, *, behind: Sequence[Batch] = ()) -> list[Batch]:
        """Batches that would come next; they are not part of the log yet."""
        out = [*self.batches, *behind]
        known = len(out)
        for _ in range(count):
            first_id = out[-1].last_id + 1 if out else self.last_id + 1
            out.append(self._batch(first_id, end_of(out) or End()))
        return out[known:]

    def _batch(self, first_id: int, before: End) -> Batch:
        pick = self.random
        count = pick.choice([1, 1, 2, 5, 70])
        sizes = [pick.choice(SIZES if count < 70 else SIZES[:3]) for _ in range(count)]
        counts = np.array([pick.choice([0, 0, 1, 3]) for _ in sizes], np.int64)
        locks = LockColumns(
            counts,
            np.array([pick.getrandbits(64) for _ in range(counts.sum())], np.uint64),
            np.array([pick.randrange(1, 4) for _ in range(counts.sum())], np.uint8),
        )
        follows = np.array([number > 0 and pick.random() < 0.2 for number in range(count)], np.bool_)
        return encode_batch(
            encode_payloads(first_id, [pick.randbytes(size) for size in sizes], partition=self.partition),
            session=1,
            generation=0,
            committed=first_id - 1 if pick.random() < 0.1 else -1,
            time=before.time + pick.choice([0, 0, 1, 7_000_000]),
            before=before,
            locks=locks if pick.random() < 0.7 else None,
            follows=follows if pick.random() < 0.5 else None,
            segment_bytes_max=self.segment_bytes_max,
        )

    def marks(self) -> list[int]:
        """Where the log can be cut."""
        return [-1, *(id_ for run in self.first for id_ in range(run.first_id, run.last_id + 1)), *self.batch_marks()]

    def batch_marks(self) -> list[int]:
        return [batch.last_id for batch in self.batches]

    def lands_on(self, mark: int) -> int:
        """A cut above `mark` ends there."""
        return max(found for found in self.marks() if found <= mark)

    def cut(self, mark: int) -> None:
        self.batches = [batch for batch in self.batches if batch.last_id <= mark]
        kept = [run.part(0, min(len(run), mark + 1 - run.first_id)) for run in self.first if run.first_id <= mark]
        self.first = [run for run in kept if len(run)]

    # -- what a replica must say

    def files(self, key: UUID) -> dict[str, bytes]:
        """By name: those that hold batches."""
        found: dict[str, bytes] = {}
        before = NO_HASH
        for own in segments_of(self.batches) if self.batches else []:
            raw, before = segment_raw(own, key=key, partition=self.partition, footer_before=before)
            found[segment_name(own[0].first_id)] = raw
        return found

    def check_files(self, disk: SimDisk, directory: str, key: UUID) -> None:
        for name, raw in self.files(key).items():
            path = f"{directory}/{name}"
            assert disk.exists(path), f"{name} is missing"
            found = disk.open(path).read(0, disk.size(path))
            assert found == raw, f"{name} has {len(found)} bytes, {len(raw)} are right, or others than these"

    def check(self, partition: Partition) -> None:
        status = partition.status()
        assert (status.findings, status.last_id) == ((), self.last_id)
        assert status.end == self.end, f"{status.end}, not {self.end}"
        if self.last_id >= 0:
            self._check_reads(partition)
            self._check_whole(partition)
            self._check_locks(partition)
            self._check_times(partition)
            self._check_marks(partition)

    def _check_reads(self, partition: Partition) -> None:
        session, pick = partition.promised_session, self.random
        first = pick.randrange(self.last_id + 1)
        last = min(self.last_id, first + pick.choice([0, 3, 500]))
        at, bytes_max = first, pick.choice([1, 300, 3000, 1 << 20])
        with_locks = pick.random() < 0.5
        while at <= last:
            run = partition.read(at, last, bytes_max, session=session, with_locks=with_locks)
            assert run.first_id == at
            assert run.last_id <= last
            assert len(run) == 1 or len(run.data) <= bytes_max
            for number in range(len(run)):
                self._check_record(run, number, with_locks=with_locks)
            at = run.last_id + 1

    def _check_record(self, run: Run, number: int, *, with_locks: bool) -> None:
        id_ = run.first_id + number
        right = next(one for one in self.pieces if one.last_id >= id_)
        mine = right.run_with_locks if isinstance(right, Batch) else right
        part, found = mine.part(id_ - mine.first_id, id_ - mine.first_id + 1), run.part(number, number + 1)
        assert found.data == part.data, f"id {id_} has other bytes"
        if not isinstance(right, Batch):
            return
        assert found.times is not None
        assert found.times[0] == right.head.time
        assert (found.follows is not None and found.follows[0]) == (part.follows is not None and part.follows[0])
        if with_locks:
            assert found.locks is not None
            assert part.locks is not None
            assert found.locks.ids.tolist() == part.locks.ids.tolist()
            assert found.locks.modes.tolist() == part.locks.modes.tolist()

    def _check_whole(self, partition: Partition) -> None:
        session = partition.promised_session
        at = self.random.choice(self.pieces).first_id
        while at <= self.last_id:
            content = partition.read_whole(at, self.last_id, self.random.choice([1, 1000, 1 << 20]), session=session)
            for batch in content if not isinstance(content, Run) else ():
                assert batch.is_same_as(next(one for one in self.batches if one.first_id == batch.first_id))
            assert isinstance(content, Run) == (not self.batches or at < self.batches[0].first_id)
            at = runs_of(content)[-1].last_id + 1

    def _check_locks(self, partition: Partition) -> None:
        mark, bytes_max = self.random.choice(self.marks()[1:]), self.random.choice([1, 1000, 1 << 20])
        history = partition.read_locks(mark, bytes_max, session=partition.promised_session)
        in_front = [batch for batch in self.batches if batch.last_id <= mark]
        assert (history is None) == (not in_front)
        if history is None:
            return
        found = [batch for batch in in_front if batch.first_id >= history.first_id]
        assert found
        assert found[0].first_id == history.first_id
        assert bytes_max < 1 << 20 or found == in_front
        assert len(history.locks) == mark + 1 - history.first_id
        assert history.locks.ids.tolist() == [id_ for batch in found for id_ in batch.locks.ids.tolist()]
        if len(in_front[-1]) > 1:
            try:
                partition.read_locks(mark - 1, bytes_max, session=partition.promised_session)
            except BadArgument:
                return
            raise AssertionError(f"no batch ends at id {mark - 1}")

    def _check_marks(self, partition: Partition) -> None:
        """Compare the marks of a lock with a loop over the log: by the key indexes, which are made now and then, or by the
        batches."""
        chance = random.Random(self.last_id)  # one of its own, so that the log is drawn as without this check
        session = partition.promised_session
        if not self.batches:
            return
        for first_id in partition.missing_keys():
            if chance.random() < 0.5:
                partition.write_key(first_id)
        first_batch = self.batches[0].first_id
        for _ in range(4):
            query = self._query(chance, first_batch)
            right = self.marked(query)
            rest, found = query, list[int]()
            while not rest.is_done:
                part = partition.find_marks(rest, session=session)
                assert rest.first_id <= part.through <= rest.last_id
                found += part.ids
                rest = rest.after(part)
            assert found == right, (query, found, right)
        if self.first:
            with suppress(NeedsBatches):
                partition.find_marks(LockQuery(lock=0, last_id=self.last_id, limit=1), session=session)
                raise AssertionError("records of format 0 keep no locks")

    def _query(self, chance: Random, first_batch: int) -> LockQuery:
        marks = [lock for batch in self.batches for lock in batch.locks.ids.tolist()] or [0]
        low = chance.randint(first_batch, self.last_id)
        return LockQuery(
            lock=chance.choice([*marks[:50], *marks[-50:], 12345]),
            first_id=chance.choice([first_batch, low]),
            last_id=chance.choice([self.last_id, chance.randint(low, self.last_id)]),
            limit=chance.choice([1, 2, 1000]),
            newest_first=chance.random() < 0.5,
        )

    def marked(self, query: LockQuery) -> list[int]:
        found: list[int] = []
        for batch in self.batches:
            locks = batch.locks
            ids = np.repeat(np.arange(batch.first_id, batch.last_id + 1), locks.counts)
            is_mark = (locks.ids == np.uint64(query.lock)) & (locks.modes != READ)
            found += dict.fromkeys(ids[is_mark].tolist())
        found = [id_ for id_ in found if query.first_id <= id_ <= query.last_id]
        return (found[::-1] if query.newest_first else found)[: query.limit]

    def _check_times(self, partition: Partition) -> None:
        known = [batch.head.time for batch in self.batches] or [0]
        time = self.random.choice([-5, *known, *(time + 1 for time in known)])
        before = [batch.last_id for batch in self.batches if batch.head.time < time]
        right = max([-1, *(run.last_id for run in self.first), *before])
        assert partition.find_time(time, session=partition.promised_session) == right


def end_of(batches: Sequence[Batch]) -> End | None:
    end: End | None = None
    for batch in batches:
        end = batch.end(end or End())
    return end
