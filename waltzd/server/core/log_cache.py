"""The newest records of a partition in memory: what is in flight to the replicas, and what readers ask for most. Pure.

The cache holds pieces: runs of format 0, or batches. Each replica and each reader near the end of the log is a cursor
into the same pieces, so a slow one costs nothing. Committed pieces are evicted, oldest first. A cursor that is then
before the cache reads from a storage until it has caught up. The newest piece and uncommitted pieces are never evicted;
the pipeline bounds them by accepting no more. Readers get runs, of which any part may be taken; replicas get whole
batches.
"""

from __future__ import annotations

from bisect import bisect_right

from waltzd.format.batch import Batch, End, Piece
from waltzd.format.record import NO_TIME, Run, empty_run, join_runs
from waltzd.protocol.peers import Content
from waltzd.protocol.quorum import EVERYTHING

RUN_BYTES = 512
"""Cost of a piece besides its bytes, so that many small pieces count against a limit in bytes."""
_GONE = empty_run(0)


def _weight(piece: Piece) -> int:
    return (len(piece.data) if isinstance(piece, Run) else piece.size) + RUN_BYTES


class LogCache:
    def __init__(self, next_id: int, bytes_max: int, end: End | None = None) -> None:
        """`end`: where the last batch of the log ends; None if its last records are of format 0, or if there are none."""
        self.next_id = next_id
        self.end = end
        self.bytes = 0
        self.pending_bytes = 0
        """Bytes of the pieces that are not wholly committed."""
        self.committed = next_id - 1
        self._bytes_max = bytes_max
        self._first_batch = next_id if end is not None else EVERYTHING
        """First id that is stored in a batch; the records before are of format 0."""
        self._pieces: list[Piece] = []
        self._first_ids: list[int] = []
        self._evicted = 0
        """Number of evicted pieces at the start of the lists. They are cut off now and then."""
        self._joined: Run | None = None
        """Newest run that was joined from several pieces, kept because every replica is sent it."""
        self._settled = 0
        """Number of wholly committed pieces at the start of the lists."""

    @property
    def first_id(self) -> int:
        """Oldest id in the cache; `next_id` if the cache is empty."""
        return self._first_ids[self._evicted] if self._evicted < len(self._pieces) else self.next_id

    def append(self, piece: Piece) -> None:
        assert len(piece) > 0
        assert piece.first_id == self.next_id, (piece.first_id, self.next_id)
        if isinstance(piece, Batch):
            before = self.end or End()
            assert piece.head.before == before.crc, "a batch stands behind the one that it names"
            assert piece.head.time >= before.time, "time never falls"
            self.end = piece.end(before)
            self._first_batch = min(self._first_batch, piece.first_id)
        else:
            assert self.end is None, "behind a batch stand batches only"
        self._pieces.append(piece)
        self._first_ids.append(piece.first_id)
        self.next_id = piece.last_id + 1
        weight = _weight(piece)
        self.bytes += weight
        self.pending_bytes += weight
        self._make_room()

    def commit(self, mark: int) -> None:
        """Set the committed mark. Pieces up to it may be evicted when there is no room."""
        assert self.committed <= mark < self.next_id
        self.committed = mark
        while self._settled < len(self._pieces) and self._pieces[self._settled].last_id <= mark:
            self.pending_bytes -= _weight(self._pieces[self._settled])
            self._settled += 1
        if self._joined is not None and self._joined.last_id <= mark:
            self._joined = None
        self._make_room()

    def _make_room(self) -> None:
        # The newest piece stays, however large: a run, sent again, tells a replica that comes back what is committed.
        while self.bytes > self._bytes_max and self._evicted < min(self._settled, len(self._pieces) - 1):
            self.bytes -= _weight(self._pieces[self._evicted])
            self._pieces[self._evicted] = _GONE
            self._evicted += 1
        if self._evicted > 64 and self._evicted * 2 > len(self._pieces):
            del self._pieces[: self._evicted], self._first_ids[: self._evicted]
            self._settled -= self._evicted
            self._evicted = 0

    def check(self) -> None:
        """Assert the invariants of the cache."""
        pieces, settled = self._pieces, self._settled
        assert len(pieces) == len(self._first_ids)
        assert self._evicted <= settled <= len(pieces), "nothing that is not committed is evicted"
        assert self.committed < self.next_id == (pieces[-1].last_id + 1 if pieces else self.next_id)
        assert 0 <= self.pending_bytes <= self.bytes
        assert settled == len(pieces) or pieces[settled].last_id > self.committed
        assert settled == self._evicted or pieces[settled - 1].last_id <= self.committed
        assert self.bytes <= self._bytes_max or self._evicted == min(settled, len(pieces) - 1)
        next_ = pieces[settled] if settled < len(pieces) else None
        assert not isinstance(next_, Batch) or next_.first_id > self.committed, "a batch is committed whole"

    # -- for replicas

    def content_from(self, first_id: int, last_id: int, bytes_max: int) -> Content | None:
        """Return what is sent to a replica that holds everything before `first_id`: one run up to `last_id`, or whole
        batches, of about `bytes_max` bytes and at least one record or batch. Return None when there is nothing up to
        `last_id`."""
        if first_id < self._first_batch:
            return self.joined_from(first_id, min(last_id, self._first_batch - 1), bytes_max)
        return self.batches_from(first_id, last_id, bytes_max) or None

    def batches_from(self, first_id: int, last_id: int, bytes_max: int) -> tuple[Batch, ...]:
        """Return whole batches, starting with the batch that holds `first_id`."""
        found: list[Batch] = []
        size = 0
        for position in range(self._position(first_id), len(self._pieces)):
            piece = self._pieces[position]
            assert isinstance(piece, Batch), "behind a batch stand batches only"
            size += piece.size
            if piece.last_id > last_id or (found and size > bytes_max):
                break
            found.append(piece)
        return tuple(found)

    def end_at(self, id_: int) -> End | None:
        """Return the end of the batch that ends at this id, or None if it is unknown here. For a batch that is not the
        newest the position in its segment is left out."""
        if id_ == self.next_id - 1:
            return self.end
        at = bisect_right(self._first_ids, id_, self._evicted) - 1
        piece = self._pieces[at] if at >= self._evicted else None
        return End(crc=piece.head.crc, time=piece.head.time) if isinstance(piece, Batch) and piece.last_id == id_ else None

    def records_up_to(self, id_: int, count: int) -> Run | None:
        """Return the last `count` records of format 0 up to this id; None if the cache lacks some of them."""
        first_id = max(0, id_ - count + 1)
        if not self.first_id <= first_id <= id_ < min(self.next_id, self._first_batch):
            return None
        return self.joined_from(first_id, id_, EVERYTHING)

    # -- for readers

    def runs_from(self, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> list[Run]:
        """Return consecutive runs from `first_id` to `last_id` of about `bytes_max` bytes together, at least one record.
        Return an empty list when there is nothing up to `last_id`."""
        assert first_id >= self.first_id, (first_id, self.first_id)
        last_id = min(last_id, self.next_id - 1)
        found: list[Run] = []
        size = 0
        position = self._position(first_id)
        while first_id <= last_id:
            run = _run_of(self._pieces[position], with_locks)
            start, stop = first_id - run.first_id, min(len(run), last_id - run.first_id + 1)
            room = bytes_max - size
            if int(run.bounds[stop] - run.bounds[start]) > room:
                fits = int(run.bounds.searchsorted(int(run.bounds[start]) + room, "right")) - 1
                if fits <= start and found:
                    break
                stop = min(stop, max(fits, start + 1))
            part = run if (start, stop) == (0, len(run)) else run.part(start, stop)
            found.append(part)
            size += len(part.data)
            first_id += len(part)
            if size >= bytes_max or stop < len(run):
                break
            position += 1
        return found

    def joined_from(self, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> Run | None:
        """Return the runs of `runs_from` as one run; None when there is nothing."""
        runs = self.runs_from(first_id, last_id, bytes_max, with_locks=with_locks)
        if len(runs) <= 1:
            return runs[0] if runs else None
        if with_locks:
            return join_runs(runs)
        joined = self._joined
        if joined is None or joined.first_id != runs[0].first_id or joined.last_id != runs[-1].last_id:
            joined = self._joined = join_runs(runs)
        return joined

    @property
    def newest_batch(self) -> Batch | None:
        """Last batch of the log, if the cache holds it."""
        newest = self._pieces[-1] if self._evicted < len(self._pieces) else None
        return newest if isinstance(newest, Batch) else None

    def record(self, id_: int) -> memoryview:
        """Return the bytes of one record that the cache holds."""
        assert self.first_id <= id_ < self.next_id, (id_, self.first_id, self.next_id)
        piece = self._pieces[self._position(id_)]
        number = id_ - piece.first_id
        return piece.data[int(piece.bounds[number]) : int(piece.bounds[number + 1])]

    @property
    def first_batch_id(self) -> int:
        """Oldest id in the cache that is stored in a batch; `next_id` if there is none."""
        return min(max(self.first_id, self._first_batch), self.next_id)

    def find_time(self, time: int) -> tuple[int, bool]:
        """Return the highest id before the first cached transaction at or after `time`; and whether the answer is
        certain, which it is not if an evicted transaction may be as late, or has no time."""
        mark, before = self.next_id - 1, NO_TIME
        for piece in self._pieces[self._evicted :]:
            if isinstance(piece, Batch) and piece.head.time >= time:
                mark = piece.first_id - 1
                break
            before = piece.head.time if isinstance(piece, Batch) else NO_TIME
        return mark, mark < 0 or before != NO_TIME

    def _position(self, id_: int) -> int:
        """Return the index of the piece that holds this id; the number of pieces if the id is behind the last one."""
        if id_ >= self.next_id:
            return len(self._pieces)
        return max(self._evicted, bisect_right(self._first_ids, id_) - 1)


def _run_of(piece: Piece, with_locks: bool) -> Run:
    if isinstance(piece, Run):
        return piece
    return piece.run_with_locks if with_locks else piece.run
