"""Appends to one replica: which records are new, and the write after the end of a segment, with one flush (fdatasync)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from waltzd.errors import TooLarge
from waltzd.errors.operations import BadFrame, DiskFull, Diverged, NotNextId
from waltzd.format.batch import Batch, End, Piece
from waltzd.format.layout import CHECKPOINT_TRANSACTIONS, FileHeader
from waltzd.format.record import Run
from waltzd.format.scan import BATCH_BYTES_MAX
from waltzd.storage.replica.hard_state import HardStateFile
from waltzd.storage.replica.replica_context import ReplicaContext
from waltzd.storage.replica.segment import BATCH_SEGMENT_BYTES_MAX, BatchSegment, Segment
from waltzd.storage.replica.segment_list import SegmentList

ReadStored = Callable[[int, int, int], Run]
"""Stored records from a first id on: up to a last id, up to some bytes, at least one."""


def only_new(runs: Sequence[Run], *, partition: int, last_id: int, stored: ReadStored) -> list[Run]:
    """Return the runs without the records that are stored, or came earlier among these runs, with the same bytes."""
    next_id = last_id + 1
    fresh: list[Run] = []
    for run in runs:
        if run.first_id > next_id:
            raise NotNextId(
                f"an append to partition {partition} starts at id {run.first_id}; the next id here is {next_id}",
                next_id=next_id,
            )
        known = min(next_id - run.first_id, len(run))
        at = 0
        while at < known:
            id_ = run.first_id + at
            if id_ <= last_id:
                same = stored(id_, min(last_id, run.last_id), len(run.data))
            else:
                whole = next(other for other in fresh if id_ <= other.last_id)
                same = whole.part(id_ - whole.first_id, min(len(whole), run.last_id + 1 - whole.first_id))
            part = run.part(at, at + len(same))
            if part.data != same.data:
                raise Diverged(
                    f"partition {partition} already holds ids {part.first_id} to {part.last_id} with other content"
                )
            at += len(same)
        if known < len(run):
            fresh.append(run.part(known, len(run)) if known else run)
            next_id = fresh[-1].last_id + 1
    return fresh


def only_new_batches(
    batches: Sequence[Batch], *, partition: int, place: tuple[int, End | None], stored: Callable[[int], Batch | None]
) -> list[Batch]:
    """Return the batches that are neither stored nor repeated among these; a repeated batch has to have equal bytes.
    `place`: the last id before them, and the end of the batch there."""
    last_id, end = place
    next_id, before = last_id + 1, end or End()
    fresh: dict[int, Batch] = {}
    for batch in batches:
        if batch.first_id > next_id:
            raise NotNextId(
                f"a batch for partition {partition} starts at id {batch.first_id}; the next id here is {next_id}",
                next_id=next_id,
            )
        if batch.first_id < next_id:
            known = stored(batch.first_id) if batch.first_id <= last_id else fresh.get(batch.first_id)
            if known is None or not known.is_same_as(batch):
                raise Diverged(
                    f"partition {partition} already holds ids {batch.first_id} to {min(batch.last_id, next_id - 1)} with "
                    "other content"
                )
            continue
        if batch.head.before != before.crc:
            raise Diverged(
                f"the batch at id {batch.first_id} for partition {partition} names another one in front of it than stands "
                "there"
            )
        if batch.head.time < before.time:
            raise BadFrame(
                f"the time of the batch at id {batch.first_id} for partition {partition} is before that of the one in front"
            )
        if batch.size > BATCH_BYTES_MAX or before.segment_bytes + batch.size > BATCH_SEGMENT_BYTES_MAX:
            raise TooLarge(f"the batch at id {batch.first_id} has {batch.size} bytes; no segment has room for that")
        fresh[batch.first_id] = batch
        next_id, before = batch.last_id + 1, batch.end(before)
    return list(fresh.values())


class Writer:
    """Writes at the end of the log: from one segment to the next, flushed once, taken back whole on a full disk."""

    def __init__(self, context: ReplicaContext, segments: SegmentList, hard_state: HardStateFile) -> None:
        self._context = context
        self._segments = segments
        self._hard_state = hard_state
        self._segment_bytes_max = context.settings.segment_bytes_max
        self.checkpoint_id = hard_state.value.durable
        """Up to here the next start trusts index and marks."""

    def write(self, pieces: Sequence[Piece], *, committed: int) -> None:
        """Write records and flush them. After `DiskFull` the records of the last segment are removed again."""
        active = self._segments.active
        assert active is not None
        try:
            for piece in pieces:
                if isinstance(piece, Run):
                    active = self._write(active, piece, committed)
                else:
                    active = self._write_batch(active, piece, committed)
            self._segments.flush()
        except DiskFull as error:
            assert self._segments.active is not None
            self._segments.active.take_back()
            last_id = self._segments.last_id
            raise DiskFull(
                f"partition {self._hard_state.value.partition}: {error.message}; all above id {last_id} was taken back",
                durable_id=last_id,
            ) from error

    def _write(self, active: Segment, run: Run, committed: int) -> Segment:
        """Write a run. A record goes to the next segment if the record before it ended above the threshold."""
        if isinstance(active, BatchSegment):  # it is empty: after the first batch a log has batches only
            active = self._roll(self._context.header(active.next_id), committed)
        while active.end + int(run.bounds[-2]) > self._segment_bytes_max:
            fits = int(np.searchsorted(active.end + run.bounds[:-1], self._segment_bytes_max, "right"))
            if active.next_id == active.first_id:
                fits = max(1, fits)  # however small the threshold is, a segment holds a record
            if fits:
                active.write([run.part(0, fits)])
            if fits == len(run):
                return active
            active = self._roll(self._context.header(active.next_id), committed)
            run = run.part(fits, len(run))
        active.write([run])
        return active

    def _write_batch(self, active: Segment, batch: Batch, committed: int) -> Segment:
        """Write a batch. It goes to the next segment if the batch before it was the last of its segment, or is of
        format 0. The header states the time of the first batch, so an empty segment is created anew."""
        if not isinstance(active, BatchSegment) or active.is_full or active.next_id == active.first_id:
            active = self._roll(self._context.batch_header(batch.first_id, batch.head.time), committed)
        assert isinstance(active, BatchSegment)
        active.write_batches([batch])
        return active

    def _roll(self, header: FileHeader, committed: int) -> Segment:
        new, hard_state, last_id = self._segments.start_segment(header), self._hard_state.value, self._segments.last_id
        self._hard_state.change(
            durable=max(hard_state.durable, last_id),
            newest=max(hard_state.newest, new.first_id),
            segments=len(self._segments.first_ids),
            committed=committed,
        )
        self.checkpoint_id = last_id
        return new

    @property
    def wants_checkpoint(self) -> bool:
        return self._segments.last_id // CHECKPOINT_TRANSACTIONS > self.checkpoint_id // CHECKPOINT_TRANSACTIONS

    def checkpoint(self, *, committed: int) -> None:
        """Flush the index and write down the marks: the next start trusts both up to here."""
        assert self._segments.active is not None
        self._segments.active.index.flush()
        self._hard_state.change(durable=max(self._hard_state.value.durable, self._segments.last_id), committed=committed)
        self.checkpoint_id = self._segments.last_id
