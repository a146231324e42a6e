"""The newest records of a partition in memory: what is on its way to the replicas, and what readers ask for most.

Every replica and every hot reader is a cursor into the same runs, so a slow one costs nothing: what is committed may be
evicted, oldest first, and a cursor that is then in front of the tail reads from a storage until it has caught up. The
newest run and what is not committed are never evicted; the pipeline bounds that by taking no more. Pure.
"""

from __future__ import annotations

from bisect import bisect_right

from waltzd.format.record import Run, empty_run, join_runs

RUN_BYTES = 512
"""What a run costs besides its records: many small ones must not hide behind a bound in bytes."""
_GONE = empty_run(0)


def _weight(run: Run) -> int:
    return len(run.data) + RUN_BYTES


class Tail:
    def __init__(self, next_id: int, bytes_max: int) -> None:
        self.next_id = next_id
        self.bytes = 0
        self.pending_bytes = 0
        """Of the runs that are not committed as a whole."""
        self.committed = next_id - 1
        self._bytes_max = bytes_max
        self._runs: list[Run] = []
        self._first_ids: list[int] = []
        self._evicted = 0
        """How many runs at the start of the lists are gone; cut off now and then."""
        self._joined: Run | None = None
        """The last that were put together: what one replica is sent the others are sent, too."""
        self._settled = 0
        """How many runs at the start are committed as a whole."""

    @property
    def first_id(self) -> int:
        """The oldest id that is still here."""
        return self._first_ids[self._evicted] if self._evicted < len(self._runs) else self.next_id

    def append(self, run: Run) -> None:
        assert len(run) > 0
        assert run.first_id == self.next_id, (run.first_id, self.next_id)
        self._runs.append(run)
        self._first_ids.append(run.first_id)
        self.next_id = run.last_id + 1
        self.bytes += _weight(run)
        self.pending_bytes += _weight(run)
        self._make_room()

    def commit(self, mark: int) -> None:
        """Everything up to `mark` may go when there is no room."""
        assert self.committed <= mark < self.next_id
        self.committed = mark
        while self._settled < len(self._runs) and self._runs[self._settled].last_id <= mark:
            self.pending_bytes -= _weight(self._runs[self._settled])
            self._settled += 1
        if self._joined is not None and self._joined.last_id <= mark:
            self._joined = None
        self._make_room()

    def _make_room(self) -> None:
        # The newest run stays, however large: sent again, it tells a replica that comes back what is committed.
        while self.bytes > self._bytes_max and self._evicted < min(self._settled, len(self._runs) - 1):
            self.bytes -= _weight(self._runs[self._evicted])
            self._runs[self._evicted] = _GONE
            self._evicted += 1
        if self._evicted > 64 and self._evicted * 2 > len(self._runs):
            del self._runs[: self._evicted], self._first_ids[: self._evicted]
            self._settled -= self._evicted
            self._evicted = 0

    def check(self) -> None:
        """What is true after every event."""
        runs, settled = self._runs, self._settled
        assert len(runs) == len(self._first_ids)
        assert self._evicted <= settled <= len(runs), "nothing that is not committed is evicted"
        assert self.committed < self.next_id == (runs[-1].last_id + 1 if runs else self.next_id)
        assert 0 <= self.pending_bytes <= self.bytes
        assert settled == len(runs) or runs[settled].last_id > self.committed
        assert settled == self._evicted or runs[settled - 1].last_id <= self.committed
        assert self.bytes <= self._bytes_max or self._evicted == min(settled, len(runs) - 1)

    def runs_from(self, first_id: int, last_id: int, bytes_max: int) -> list[Run]:
        """Consecutive runs, the first of them from `first_id` on, up to `last_id`, of about `bytes_max` together but never
        less than one record; empty when there is nothing up to `last_id`."""
        assert first_id >= self.first_id, (first_id, self.first_id)
        last_id = min(last_id, self.next_id - 1)
        found: list[Run] = []
        size = 0
        position = self._position(first_id)
        while first_id <= last_id:
            run = self._runs[position]
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

    def joined_from(self, first_id: int, last_id: int, bytes_max: int) -> Run | None:
        """The same as one run; None when there is nothing."""
        runs = self.runs_from(first_id, last_id, bytes_max)
        if len(runs) <= 1:
            return runs[0] if runs else None
        joined = self._joined
        if joined is None or joined.first_id != runs[0].first_id or joined.last_id != runs[-1].last_id:
            joined = self._joined = join_runs(runs)
        return joined

    def _position(self, id_: int) -> int:
        """Of the run that holds this id, or behind the last."""
        if id_ >= self.next_id:
            return len(self._runs)
        return max(self._evicted, bisect_right(self._first_ids, id_) - 1)
