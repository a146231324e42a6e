"""What one caller hands in at once, and what is told to it: one transaction with one outcome, or many with columns. Pure.

A submission has somebody who waits for it, and a deadline after which it is told what is known by then. It is settled
exactly once; a caller that has gone away is not told anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.checksum import I64, crc32
from waltzd.errors import TooLarge, WaltzError
from waltzd.frame import U8, U64, AppendBatch, Limits
from waltzd.lock import Lock
from waltzd.outcome import Committed, Outcome, Reason, Rejected, Unknown
from waltzd.quorum import EMPTY
from waltzd.record import OVERHEAD_BYTES

LOCK_BYTES = 9
IS_COMMITTED, IS_UNKNOWN = 0, 255
"""In the column of reasons, beside the numbers of `Reason`."""


class Waiter(Protocol):
    """Who waits; a future of asyncio is one."""

    def done(self) -> bool: ...
    def set_result(self, outcome: Any, /) -> None: ...
    def set_exception(self, error: Any, /) -> None: ...


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What became of many transactions, as columns. `ids`: of those that are committed, -1 elsewhere. `reasons`: 0 for
    committed, 255 for unknown, else why it was rejected; then the conflicting id and the lock stand beside it."""

    ids: I64
    reasons: U8
    conflict_ids: I64
    locks: U64

    @staticmethod
    def unknown(count: int) -> Outcomes:
        nothing = np.full(count, EMPTY, np.int64)
        return Outcomes(nothing, np.full(count, IS_UNKNOWN, np.uint8), nothing.copy(), np.zeros(count, np.uint64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def committed(self) -> int:
        """How many are in the log."""
        return int(np.count_nonzero(self.reasons == IS_COMMITTED))

    def __getitem__(self, row: int) -> Outcome:
        reason = int(self.reasons[row])
        if reason == IS_COMMITTED:
            return Committed(int(self.ids[row]))
        if reason == IS_UNKNOWN:
            return Unknown()
        return Rejected(Reason(reason), int(self.conflict_ids[row]), int(self.locks[row]) or None)

    def copy(self) -> Outcomes:
        return Outcomes(self.ids.copy(), self.reasons.copy(), self.conflict_ids.copy(), self.locks.copy())


@dataclass(eq=False, slots=True)
class Request:
    """One transaction."""

    mark: int
    data: bytes
    header: int
    lock_ids: tuple[int, ...]
    lock_modes: tuple[int, ...]
    waiter: Waiter
    deadline: float
    data_crc: int = 0
    bytes: int = 0
    ticket: int = 0

    def __post_init__(self) -> None:
        self.data_crc = crc32(self.data)
        self.bytes = len(self.data) + OVERHEAD_BYTES + LOCK_BYTES * len(self.lock_ids)

    @property
    def rows(self) -> int:
        return 1

    @property
    def rest_bytes(self) -> int:
        return self.bytes

    def settle(self, outcome: Outcome) -> None:
        if not self.waiter.done():
            self.waiter.set_result(outcome)

    def refuse(self, error: WaltzError) -> None:
        """It was not sent."""
        if not self.waiter.done():
            self.waiter.set_exception(copy(error))  # each waiter raises its own


class Bundle:
    """Many transactions, built against the same mark. They go out in pieces, in order."""

    def __init__(
        self,
        mark: int,
        payloads: Sequence[bytes],
        headers: Sequence[int] | None,
        locks: Sequence[Iterable[Lock]] | None,
        waiter: Waiter,
        deadline: float,
    ) -> None:
        count = len(payloads)
        each = [tuple(some) for some in locks] if locks is not None else [()] * count
        assert count > 0
        assert len(each) == count
        assert headers is None or len(headers) == count
        self.rows = count
        self.mark = mark
        self.waiter = waiter
        self.deadline = deadline
        self.ticket = 0
        self.headers = np.zeros(count, np.int32) if headers is None else np.array(headers, np.int32)
        self.lengths = np.fromiter(map(len, payloads), np.int64, count)
        self.data_crcs = np.fromiter(map(crc32, payloads), np.uint32, count)
        self.lock_counts = np.fromiter(map(len, each), np.int64, count)
        self.lock_ids = np.array([lock.hash for some in each for lock in some], np.uint64)
        self.lock_modes = np.array([int(lock.mode) for some in each for lock in some], np.uint8)
        self.payloads = memoryview(b"".join(payloads))
        self._data_ends = _ends(self.lengths)
        self._lock_ends = _ends(self.lock_counts)
        self.ends = _ends(self.lengths + OVERHEAD_BYTES + LOCK_BYTES * self.lock_counts)
        self.bytes = int(self.ends[-1])
        self.taken = 0
        """So many rows were sent."""
        self._undecided = count
        self._outcomes = Outcomes.unknown(count)

    @property
    def rest_bytes(self) -> int:
        """Of the rows that were not sent."""
        return self.bytes - int(self.ends[self.taken])

    def piece(self, start: int, stop: int, first_sequence: int) -> AppendBatch:
        data = slice(int(self._data_ends[start]), int(self._data_ends[stop]))
        locks = slice(int(self._lock_ends[start]), int(self._lock_ends[stop]))
        return AppendBatch(
            first_sequence=first_sequence,
            marks=np.full(stop - start, self.mark, np.int64),
            headers=self.headers[start:stop],
            lengths=self.lengths[start:stop],
            data_crcs=self.data_crcs[start:stop],
            lock_counts=self.lock_counts[start:stop],
            lock_ids=self.lock_ids[locks],
            lock_modes=self.lock_modes[locks],
            payloads=self.payloads[data],
        )

    def committed(self, rows: I64, ids: I64) -> None:
        self._outcomes.reasons[rows] = IS_COMMITTED
        self._outcomes.ids[rows] = ids
        self._decided(len(rows))

    def rejected(self, rows: I64, reasons: U8, conflict_ids: I64, locks: U64) -> None:
        self._outcomes.reasons[rows] = reasons
        self._outcomes.conflict_ids[rows] = conflict_ids
        self._outcomes.locks[rows] = locks
        self._decided(len(rows))

    def lost(self, rows: I64 | slice) -> None:
        self._outcomes.reasons[rows] = int(Reason.LOST)
        self._decided(len(self._outcomes.ids[rows]))

    def _decided(self, count: int) -> None:
        self._undecided -= count
        if self._undecided == 0 and not self.waiter.done():
            self.waiter.set_result(self._outcomes)

    def refuse(self, error: WaltzError) -> None:
        """What of it was not sent will not be: an error when that is all of it, else those rows never reach the log."""
        if self.taken:
            self.lost(slice(self.taken, None))
        elif not self.waiter.done():
            self.waiter.set_exception(copy(error))  # each waiter raises its own

    def settle_as_it_is(self) -> None:
        """Tell what is known by now; later answers are for nobody."""
        if not self.waiter.done():
            self.waiter.set_result(self._outcomes.copy())


Submission: TypeAlias = Request | Bundle


def _ends(sizes: I64) -> I64:
    out: NDArray[np.int64] = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def too_large(submission: Submission, limits: Limits) -> TooLarge | None:
    """What the server would refuse the whole frame for."""
    if isinstance(submission, Bundle):
        size, locks = int(submission.lengths.max()), int(submission.lock_counts.max())
    else:
        size, locks = len(submission.data), len(submission.lock_ids)
    if size > limits.payload_bytes_max:
        return TooLarge(f"a transaction has {size} bytes; the server takes {limits.payload_bytes_max}")
    if locks > limits.locks_max:
        return TooLarge(f"a transaction has {locks} locks; the server takes {limits.locks_max}")
    return None


def batch_of(requests: Sequence[Request], first_sequence: int) -> AppendBatch:
    count = len(requests)
    locks = [request.lock_ids for request in requests]
    return AppendBatch(
        first_sequence=first_sequence,
        marks=np.array([request.mark for request in requests], np.int64),
        headers=np.array([request.header for request in requests], np.int32),
        lengths=np.array([len(request.data) for request in requests], np.int64),
        data_crcs=np.array([request.data_crc for request in requests], np.uint32),
        lock_counts=np.fromiter(map(len, locks), np.int64, count),
        lock_ids=np.array([id_ for some in locks for id_ in some], np.uint64),
        lock_modes=np.array([mode for request in requests for mode in request.lock_modes], np.uint8),
        payloads=b"".join([request.data for request in requests]),
    )
