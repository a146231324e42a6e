"""Times, groups and locks of batches as columns, many batches at a time: a quiet log has one batch for each transaction.

The slow twin, for one batch, is `waltzd.format.batch.Batch.run_with_locks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from waltzd.format.batch import HEAD_BYTES, Flags, are_locks, decode_groups, decode_locks
from waltzd.format.checksum import I64
from waltzd.format.record import LockColumns, Run
from waltzd.format.span import BatchSpan

_ONE_BYTES = 5
"""Bytes before the ids of locks if all records have the same number of locks: the form of the counts, and the count."""


def columns_of(span: BatchSpan, *, with_locks: bool) -> Run | None:
    """Return the records of the sound batches as one run; None if a section of locks is invalid despite its checksum,
    because of a faulty owner."""
    times = np.repeat(span.head["time"][: span.count].astype(np.int64), span.records)
    locks = _locks(span) if with_locks else None
    if with_locks and locks is None:
        return None
    return replace(span.run, times=times, follows=_follows(span), locks=locks)


def _follows(span: BatchSpan) -> Flags | None:
    head, records = span.head[: span.count], span.records
    grouped = np.flatnonzero(head["group_bytes"])
    if not len(grouped):
        return None
    found = np.zeros(int(records.sum()), np.bool_)
    behind = np.cumsum(records)
    for number in grouped.tolist():
        start = int(span.at[number]) + HEAD_BYTES + int(head["lock_bytes"][number])
        count, stop = int(records[number]), int(span.at[number] + span.lead[number])
        flags = decode_groups(span.raw[start:stop], count)
        assert flags is not None
        found[behind[number] - count : behind[number]] = flags
    return found


def _locks(span: BatchSpan) -> LockColumns | None:
    records = span.records
    behind = np.cumsum(records)
    sizes, starts = span.head["lock_bytes"][: span.count].astype(np.int64), span.at[: span.count] + HEAD_BYTES
    parts: list[tuple[I64, LockColumns]] = []
    """Batches with the same number of locks for each record, and their locks."""
    forms = np.frombuffer(span.raw, np.uint8)[starts]
    has_one = (records == 1) & (sizes >= _ONE_BYTES) & (forms == 0)
    for size in np.unique(sizes[has_one]).tolist():
        numbers = np.flatnonzero(has_one & (sizes == size))
        found = _locks_of_ones(span.raw, starts[numbers], size)
        if found is None:
            return None
        parts.append((numbers, found))
    for number in np.flatnonzero((sizes > 0) & ~has_one).tolist():
        raw, count = span.raw[int(starts[number]) : int(starts[number] + sizes[number])], int(records[number])
        found = decode_locks(raw, count) if are_locks(raw, count) else None
        if found is None:
            return None
        parts.append((np.array([number]), found))
    return _in_order(parts, behind - records, int(behind[-1]))


def _locks_of_ones(raw: memoryview, starts: I64, size: int) -> LockColumns | None:
    """Return the locks of batches with one record and equal sizes, as columns: a quiet log has no other batches."""
    every = np.ndarray((len(raw) - size + 1,), f"V{size}", buffer=raw, strides=(1,))
    rows = np.ascontiguousarray(every[starts]).view(np.uint8).reshape(-1, size)
    each = 4 * (size - _ONE_BYTES) // 33  # of 8 bytes and 2 bits
    counts = np.ascontiguousarray(rows[:, 1:_ONE_BYTES]).view(">u4").ravel()
    if each == 0 or (counts != each).any() or _ONE_BYTES + 8 * each + (each + 3) // 4 != size:
        return None
    ids = np.ascontiguousarray(rows[:, _ONE_BYTES : _ONE_BYTES + 8 * each]).view(">u8").astype(np.uint64)
    packed = rows[:, _ONE_BYTES + 8 * each :]
    modes = (packed[:, :, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).reshape(len(rows), -1)[:, :each]
    if (modes == 0).any():
        return None
    return LockColumns(np.full(len(rows), each, np.int64), ids.ravel(), modes.astype(np.uint8).ravel())


def _in_order(parts: Sequence[tuple[I64, LockColumns]], firsts: I64, records: int) -> LockColumns:
    """Merge locks in the order of records. `firsts`: index of the first record of each batch."""
    counts = np.zeros(records, np.int64)
    places = []
    for numbers, found in parts:
        each = len(found) // len(numbers)
        rows = (firsts[numbers][:, None] + np.arange(each)).ravel()
        counts[rows] = found.counts
        places.append(rows)
    starts = np.cumsum(counts) - counts
    ids, modes = np.zeros(int(counts.sum()), np.uint64), np.zeros(int(counts.sum()), np.uint8)
    for rows, (_, found) in zip(places, parts, strict=True):
        within = np.arange(len(found.ids)) - np.repeat(np.cumsum(found.counts) - found.counts, found.counts)
        at = np.repeat(starts[rows], found.counts) + within
        ids[at], modes[at] = found.ids, found.modes
    return LockColumns(counts, ids, modes)
