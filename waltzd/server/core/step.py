"""One step of a pipeline: what arrived together becomes one run of records, and in format 1 one batch. Pure.

Batches stay columns from the message to the disk: nothing here makes an object for a transaction. A batch is checked before
it is queued, so that a step cannot fail half-way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors import BadFrame
from waltzd.format.batch import Flags
from waltzd.format.checksum import I64, crc32
from waltzd.format.record import OVERHEAD_BYTES, LockColumns, Run, encode_run, join_locks
from waltzd.protocol.batches import AppendBatch


def check_payloads(batch: AppendBatch) -> None:
    """Every payload is what the client's checksum says, each by itself: two wrong checksums that make up for each other
    would pass a check of all together, and no storage would take the records that are made with them."""
    view, bounds = memoryview(batch.payloads), [0, *np.cumsum(batch.lengths).tolist()]
    found = [crc32(view[start:stop]) for start, stop in pairwise(bounds)]
    said = batch.data_crcs.tolist()
    if found != said:
        sequence = batch.first_sequence + next(row for row, crc in enumerate(said) if crc != found[row])
        raise BadFrame(f"the payload of sequence {sequence} is not what its checksum says", sequence=sequence)


def slices(batch: AppendBatch, rows_max: int, bytes_max: int) -> Iterator[AppendBatch]:
    """The batch in pieces of about so many rows and bytes at most, without copying payloads: each piece is one turn of the
    loop, and the other partitions of this server have theirs in between. A group is never cut."""
    count = len(batch)
    if count <= rows_max and batch.bytes <= bytes_max:
        yield batch
        return
    payload_at = np.concatenate(([0], np.cumsum(batch.lengths)))
    lock_at = np.concatenate(([0], np.cumsum(batch.lock_counts)))
    view = memoryview(batch.payloads)
    size_at = payload_at + np.arange(count + 1) * OVERHEAD_BYTES
    cuts = np.arange(1, count + 1) if batch.follows is None else np.append(np.flatnonzero(~batch.follows)[1:], count)
    """Behind each row or group."""
    start = 0
    while start < count:
        most = min(start + rows_max, int(size_at.searchsorted(size_at[start] + bytes_max, "right")) - 1)
        fits, least = cuts.searchsorted([most, start], "right").tolist()
        stop = int(cuts[max(fits - 1, least)])
        first_lock, last_lock = int(lock_at[start]), int(lock_at[stop])
        yield AppendBatch(
            first_sequence=batch.first_sequence + start,
            marks=batch.marks[start:stop],
            headers=batch.headers[start:stop],
            lengths=batch.lengths[start:stop],
            data_crcs=batch.data_crcs[start:stop],
            lock_counts=batch.lock_counts[start:stop],
            lock_ids=batch.lock_ids[first_lock:last_lock],
            lock_modes=batch.lock_modes[first_lock:last_lock],
            payloads=view[int(payload_at[start]) : int(payload_at[stop])],
            follows=None if batch.follows is None else batch.follows[start:stop],
            seen_time=batch.seen_time,
        )
        start = stop


@dataclass(frozen=True, eq=False)
class Portion:
    """What is accepted of one batch: all of it, or all but the rows in `refused`."""

    client: int
    batch: AppendBatch
    refused: I64

    @property
    def accepted(self) -> int:
        return len(self.batch) - len(self.refused)

    @property
    def bytes(self) -> int:
        """Of the records that the accepted rows become."""
        if len(self.refused) == 0:
            return len(self.batch.payloads) + OVERHEAD_BYTES * len(self.batch)
        return int(self.column(self.batch.lengths).sum()) + OVERHEAD_BYTES * self.accepted

    @cached_property
    def sequences(self) -> I64:
        first = self.batch.first_sequence
        every = np.arange(first, first + len(self.batch))
        return every if len(self.refused) == 0 else np.delete(every, self.refused)

    def column(self, column: NDArray[Any]) -> NDArray[Any]:
        """The accepted rows of a column."""
        return column if len(self.refused) == 0 else np.delete(column, self.refused)

    def locks(self) -> LockColumns:
        batch = self.batch
        if len(self.refused) == 0:
            return LockColumns(batch.lock_counts, batch.lock_ids, batch.lock_modes)
        is_accepted = np.ones(len(batch), np.bool_)
        is_accepted[self.refused] = False
        mine = np.repeat(is_accepted, batch.lock_counts)
        return LockColumns(batch.lock_counts[is_accepted], batch.lock_ids[mine], batch.lock_modes[mine])

    def payloads(self) -> list[Buffer]:
        """The payloads of the accepted rows, in as few pieces as there are."""
        if len(self.refused) == 0:
            return [self.batch.payloads]
        at = np.concatenate(([0], np.cumsum(self.batch.lengths)))
        starts = at[np.concatenate(([0], self.refused + 1))].tolist()
        stops = at[np.append(self.refused, len(self.batch))].tolist()
        view = memoryview(self.batch.payloads)
        return [view[start:stop] for start, stop in zip(starts, stops, strict=True) if stop > start]


def build(first_id: int, portions: Sequence[Portion], *, partition: int, generation: int) -> Run:
    """The records of all accepted rows, in order, as the bytes that go to the disk."""
    total = sum(portion.accepted for portion in portions)
    requests = np.empty((total, 4), np.int32)
    requests[:, 1], requests[:, 2] = generation, partition
    payloads: list[Buffer] = []
    at = 0
    for portion in portions:
        rows = slice(at, at + portion.accepted)
        requests[rows, 0], requests[rows, 3] = portion.client, portion.sequences
        payloads += portion.payloads()
        at += portion.accepted
    return encode_run(
        first_id,
        requests=requests,
        headers=_joined([portion.column(portion.batch.headers) for portion in portions]),
        lengths=_joined([portion.column(portion.batch.lengths) for portion in portions]),
        data_crcs=_joined([portion.column(portion.batch.data_crcs) for portion in portions]),
        payloads=payloads[0] if len(payloads) == 1 else b"".join(payloads),
    )


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def locks_of(portions: Sequence[Portion]) -> LockColumns | None:
    """The locks of all accepted rows; None: none of them has one."""
    if not any(len(portion.batch.lock_ids) for portion in portions):
        return None
    found = [portion.locks() for portion in portions]
    return found[0] if len(found) == 1 else join_locks(found)


def groups_of(portions: Sequence[Portion]) -> Flags | None:
    """Which accepted row goes on with the one before; None: none does."""
    if all(portion.batch.follows is None for portion in portions):
        return None
    found = [
        np.zeros(portion.accepted, np.bool_) if portion.batch.follows is None else portion.column(portion.batch.follows)
        for portion in portions
    ]
    return _joined(found)
