"""Writing at the end of the log: from one segment to the next, flushed once, and taken back whole where there is no space.

It knows segments and the promise file. Who may write, and what, is decided by `waltzd.storage.partition`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from waltzd.errors import DiskFull
from waltzd.layout import CHECKPOINT_TRANSACTIONS
from waltzd.promise import PromiseFile
from waltzd.record import Run
from waltzd.storage.segment import Segment
from waltzd.storage.shelf import Shelf


class Writer:
    def __init__(self, shelf: Shelf, promise: PromiseFile, *, segment_bytes_max: int) -> None:
        self._shelf = shelf
        self._promise = promise
        self._segment_bytes_max = segment_bytes_max
        self.checkpoint_id = promise.value.durable
        """Up to here the next start trusts index and marks."""

    def write(self, runs: Sequence[Run], *, committed: int) -> None:
        """The records are on the disk when this returns. `DiskFull`: those of the last segment are not there any more."""
        active = self._shelf.active
        assert active is not None
        try:
            for run in runs:
                active = self._write(active, run, committed)
            active.flush()
        except DiskFull as error:
            assert self._shelf.active is not None
            self._shelf.active.take_back()
            last_id = self._shelf.last_id
            raise DiskFull(
                f"partition {self._promise.value.partition}: {error.message}; everything above id {last_id} was taken back",
                durable_id=last_id,
            ) from error
        self._shelf.last_id = active.next_id - 1

    def _write(self, active: Segment, run: Run, committed: int) -> Segment:
        """A record goes to the next segment when the one before it ended above the threshold."""
        while active.end + int(run.bounds[-2]) > self._segment_bytes_max:
            fits = int(np.searchsorted(active.end + run.bounds[:-1], self._segment_bytes_max, "right"))
            if active.next_id == active.first_id:
                fits = max(1, fits)  # however small the threshold is, a segment holds a record
            if fits:
                active.write([run.part(0, fits)])
            if fits == len(run):
                return active
            active = self._roll(committed)
            run = run.part(fits, len(run))
        active.write([run])
        return active

    def _roll(self, committed: int) -> Segment:
        new, promise, last_id = self._shelf.start_segment(), self._promise.value, self._shelf.last_id
        self._promise.change(
            durable=max(promise.durable, last_id),
            newest=max(promise.newest, new.first_id),
            segments=len(self._shelf.first_ids),
            committed=committed,
        )
        self.checkpoint_id = last_id
        return new

    @property
    def wants_checkpoint(self) -> bool:
        return self._shelf.last_id // CHECKPOINT_TRANSACTIONS > self.checkpoint_id // CHECKPOINT_TRANSACTIONS

    def checkpoint(self, *, committed: int) -> None:
        """Flush the index and write down the marks: the next start trusts both up to here."""
        assert self._shelf.active is not None
        self._shelf.active.index.flush()
        self._promise.change(durable=max(self._promise.value.durable, self._shelf.last_id), committed=committed)
        self.checkpoint_id = self._shelf.last_id
