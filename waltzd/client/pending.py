"""Requests of an application to append transactions, from the call until the outcome. Pure.

- `Request`: one transaction, one outcome.
- `BatchRequest`: many independent transactions, with a column of outcomes. It may be sent in pieces.
- `AtomicRequest`: many transactions with one outcome. It is sent in one frame, and the log holds all of it or nothing.

Each request has a waiter, which is settled exactly once: by the outcome; by the deadline, with what is known then; or by an
error, if nothing of the request was sent. `waltzd.client.outbox` decides when requests are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from waltzd.client.view import Builder
from waltzd.errors import NeedsBatches, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import GROUPS_BYTES_MAX
from waltzd.format.checksum import I64, crc32
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.batches import U8, U64, AppendBatch, Limits, SingleAppend
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Reason, Rejected, Unknown
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

LOCK_BYTES = 9
IS_COMMITTED, IS_UNKNOWN = 0, 255
"""Values in the column of reasons, beside the numbers of `Reason`."""


class Waiter(Protocol):
    """Receiver of an outcome, such as a future of asyncio."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def set_result(self, outcome: Any, /) -> None: ...
    def set_exception(self, error: Any, /) -> None: ...


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Outcomes of `append_many`, as numpy columns with a row for each payload.

    `len(outcomes)` is the number of rows. `outcomes[row]` returns the `Committed`, `Rejected` or `Unknown` of a row.

    Example:
        ```python
        outcomes = await client.append_many(payloads, partition=0)
        if outcomes.committed < len(outcomes):
            print([outcomes[row] for row in range(len(outcomes)) if outcomes.ids[row] < 0])
        ```
    """

    ids: I64
    """Ids of the committed transactions, -1 in other rows."""
    reasons: U8
    """0 for a committed transaction, 255 for an unknown one, else the `Reason` of the rejection."""
    conflict_ids: I64
    """`Rejected.conflict_id` of a rejected transaction, -1 in other rows."""
    locks: U64
    """Hash of the lock that failed; 0 if none did."""
    partition: int | None = None
    """Partition of all the transactions."""
    timeline: UUID = FIRST
    """Timeline of the log that the ids belong to."""

    @staticmethod
    def unknown(count: int) -> Outcomes:
        """Return `count` rows with an unknown outcome."""
        nothing = np.full(count, EMPTY, np.int64)
        return Outcomes(nothing, np.full(count, IS_UNKNOWN, np.uint8), nothing.copy(), np.zeros(count, np.uint64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def committed(self) -> int:
        """Number of committed transactions."""
        return int(np.count_nonzero(self.reasons == IS_COMMITTED))

    def __getitem__(self, row: int) -> AppendOutcome:
        reason = int(self.reasons[row])
        if reason == IS_COMMITTED:
            return Committed(int(self.ids[row]), partition=self.partition, timeline=self.timeline)
        if reason == IS_UNKNOWN:
            return Unknown(self.partition)
        return Rejected(Reason(reason), int(self.conflict_ids[row]), int(self.locks[row]) or None, self.partition)

    def copy(self) -> Outcomes:
        """Return a copy with its own columns."""
        columns = (self.ids.copy(), self.reasons.copy(), self.conflict_ids.copy(), self.locks.copy())
        return Outcomes(*columns, self.partition, self.timeline)


Late: TypeAlias = Callable[[AppendOutcome], object]
"""Function that is called with the outcome of a sent request, if its waiter was cancelled before the outcome came."""


@dataclass(eq=False, slots=True)
class Request:
    """One transaction that waits for its outcome."""

    mark: int
    payload: bytes
    header: int
    lock_ids: tuple[int, ...]
    lock_modes: tuple[int, ...]
    waiter: Waiter
    deadline: float
    data_crc: int = 0
    bytes: int = 0
    ticket: int = 0
    late: Late | None = None
    timeline: UUID = FIRST
    """Identity of the timeline in which `mark` is an id."""

    def __post_init__(self) -> None:
        self.data_crc = crc32(self.payload)
        self.bytes = len(self.payload) + OVERHEAD_BYTES + LOCK_BYTES * len(self.lock_ids)

    @property
    def rows(self) -> int:
        return 1

    @property
    def rest_rows(self) -> int:
        return 1

    @property
    def highest_mark(self) -> int:
        return self.mark

    @property
    def rest_bytes(self) -> int:
        return self.bytes

    def settle(self, outcome: AppendOutcome) -> None:
        if not self.waiter.done():
            self.waiter.set_result(outcome)
        elif self.late is not None and self.waiter.cancelled():
            late, self.late = self.late, None
            late(outcome)

    def refuse(self, error: WaltzError) -> None:
        """Settle the waiter with an error: the request was not sent."""
        if not self.waiter.done():
            self.waiter.set_exception(copy(error))  # each waiter raises its own


class BatchRequest:
    """Many independent transactions. They are sent in pieces, in order."""

    partition: int | None = None
    """Partition of the outbox that holds the request."""
    timeline: UUID = FIRST
    """Identity of the timeline in which `marks` are ids."""
    outcome_timeline: UUID = FIRST
    """Identity of the timeline in which the transactions have ids."""
    late: Late | None = None

    def __init__(
        self,
        marks: int | Sequence[int],
        payloads: Sequence[bytes],
        headers: Sequence[int] | None,
        locks: Sequence[Sequence[Lock]] | None,
        waiter: Waiter,
        deadline: float,
    ) -> None:
        """Create a request; `marks` is one mark for all transactions, or one for each."""
        count = len(payloads)
        each = locks if locks is not None else [()] * count
        assert count > 0
        assert len(each) == count
        assert headers is None or len(headers) == count
        self.rows = count
        self.marks: I64 = np.broadcast_to(np.array(marks, np.int64), count)
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
        """Number of rows that were sent."""
        self._undecided = count
        self._outcomes = Outcomes.unknown(count)

    @property
    def rest_rows(self) -> int:
        """Number of rows that were not sent."""
        return self.rows - self.taken

    @property
    def rest_bytes(self) -> int:
        return self.bytes - int(self.ends[self.taken])

    @property
    def highest_mark(self) -> int:
        return int(self.marks.max())

    def piece(self, start: int, stop: int, first_sequence: int) -> AppendBatch:
        data = slice(int(self._data_ends[start]), int(self._data_ends[stop]))
        locks = slice(int(self._lock_ends[start]), int(self._lock_ends[stop]))
        return AppendBatch(
            first_sequence=first_sequence,
            marks=self.marks[start:stop],
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
        self._outcomes.reasons[rows] = int(Reason.NOT_IN_LOG)
        self._decided(len(self._outcomes.ids[rows]))

    def forked(self, shared: int) -> None:
        """Reject what was committed above the id `shared`, where the log forked: it is not in the log any more."""
        gone = self._outcomes.ids > shared
        self._outcomes.ids[gone], self._outcomes.reasons[gone] = EMPTY, int(Reason.NOT_IN_LOG)

    def _decided(self, count: int) -> None:
        self._undecided -= count
        if self._undecided == 0 and not self.waiter.done():
            self.waiter.set_result(self._result())

    def _result(self) -> Outcomes | AppendOutcome:
        return replace(self._outcomes, partition=self.partition, timeline=self.outcome_timeline)

    def refuse(self, error: WaltzError) -> None:
        """Refuse what was not sent: raise `error` if nothing was sent, else reject the remaining rows."""
        if self.taken:
            self.lost(slice(self.taken, None))
        elif not self.waiter.done():
            self.waiter.set_exception(copy(error))  # each waiter raises its own

    def settle_as_it_is(self) -> None:
        """Settle the waiter with the outcomes known now; ignore later ones."""
        if not self.waiter.done():
            self.waiter.set_result(replace(self._outcomes.copy(), partition=self.partition, timeline=self.outcome_timeline))


class AtomicRequest(BatchRequest):
    """Many transactions with one outcome. They are sent in one frame and stay together everywhere."""

    place: int | None = None
    """First id of the request, once any of its ids is known."""

    def piece(self, start: int, stop: int, first_sequence: int) -> AppendBatch:
        assert (start, stop) == (0, self.rows), "a group is never split"
        return replace(super().piece(start, stop, first_sequence), follows=np.arange(self.rows) > 0)

    def check_places(self, rows: I64, ids: I64) -> None:
        """Raise `BadFrame` if the ids are not consecutive, in the order of the request."""
        places = set((ids - rows).tolist()) | ({self.place} if self.place is not None else set())
        if len(places) > 1:
            raise BadFrame(f"an atomic request of {self.rows} transactions has ids that are not consecutive")

    def committed(self, rows: I64, ids: I64) -> None:
        self.place = int(ids[0] - rows[0])
        super().committed(rows, ids)

    def forked(self, shared: int) -> None:
        if self.place is not None and self.place > shared:  # a fork is never inside an atomic append
            rest = np.flatnonzero(self._outcomes.reasons == IS_UNKNOWN)
            super().forked(shared)
            self.place = None
            self.lost(rest)

    def _result(self) -> AppendOutcome:
        first = self._outcomes[0]
        if not isinstance(first, Committed):
            return replace(first, partition=self.partition)
        return Committed(first.id, self.rows, self.partition, timeline=self.outcome_timeline)

    def _decided(self, count: int) -> None:
        super()._decided(count)
        if self._undecided == 0:
            self._tell_late(self._result())

    def settle_as_it_is(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(Unknown(self.partition))
        elif self.taken:
            self._tell_late(Unknown(self.partition))

    def _tell_late(self, outcome: AppendOutcome) -> None:
        if self.late is not None and self.waiter.cancelled():
            late, self.late = self.late, None
            late(outcome)


AnyRequest: TypeAlias = Request | BatchRequest


def request(mark: int, payload: bytes, header: int, locks: Sequence[Lock]) -> Callable[[Waiter, float], Request]:
    """Return a function that makes a request of a waiter and a deadline."""
    return partial(
        Request, mark, payload, header, tuple([lock.hash for lock in locks]), tuple([int(lock.mode) for lock in locks])
    )


def atomic_request(marks: Sequence[int], built: Sequence[Builder[Any]]) -> Callable[[Waiter, float], AtomicRequest]:
    columns = [one.payload for one in built], [one.kind for one in built], [one.locks for one in built]
    return partial(AtomicRequest, marks, *columns)


def _ends(sizes: I64) -> I64:
    out: NDArray[np.int64] = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def why_refused(request: AnyRequest, limits: Limits, format: int) -> WaltzError | None:
    """Return why a server whose session writes `format` would refuse a frame with this request; None if it would not."""
    if isinstance(request, BatchRequest):
        size, locks = int(request.lengths.max()), int(request.lock_counts.max())
    else:
        size, locks = len(request.payload), len(request.lock_ids)
    if size > limits.payload_bytes_max:
        return _too_large(f"a payload has {size} bytes", "payload_bytes_max", limits.payload_bytes_max)
    if locks > limits.locks_max:
        return _too_large(f"a transaction has {locks} locks", "locks_max", limits.locks_max)
    if not isinstance(request, AtomicRequest) or request.rows == 1:
        return None
    if format == 0:
        return NeedsBatches(f"an atomic append of {request.rows} transactions needs format 1; the partition has format 0")
    what = f"an atomic append of {request.rows} transactions has {request.bytes} bytes"
    if request.bytes > GROUPS_BYTES_MAX:
        return TooLarge(f"{what}; {GROUPS_BYTES_MAX} are allowed", next_step="send less")
    if request.bytes > limits.frame_bytes_max:
        return _too_large(what, "frame_bytes_max", limits.frame_bytes_max)
    return None


def _too_large(what: str, setting: str, limit: int) -> TooLarge:
    facts: dict[str, Any] = {setting: limit}
    return TooLarge(
        f"{what}; the servers allow {limit} (`{setting}`)",
        next_step=f"send less, or raise `{setting}` in the configuration of every server",
        **facts,
    )


def batch_of(requests: Sequence[Request], first_sequence: int, seen_time: int = 0) -> AppendBatch:
    count = len(requests)
    if count == 1:
        one = requests[0]
        return SingleAppend(
            first_sequence, one.mark, one.header, one.data_crc, one.lock_ids, one.lock_modes, one.payload, seen_time
        )
    locks = [request.lock_ids for request in requests]
    return AppendBatch(
        first_sequence=first_sequence,
        marks=np.array([request.mark for request in requests], np.int64),
        headers=np.array([request.header for request in requests], np.int32),
        lengths=np.array([len(request.payload) for request in requests], np.int64),
        data_crcs=np.array([request.data_crc for request in requests], np.uint32),
        lock_counts=np.fromiter(map(len, locks), np.int64, count),
        lock_ids=np.array([id_ for some in locks for id_ in some], np.uint64),
        lock_modes=np.array([mode for request in requests for mode in request.lock_modes], np.uint8),
        payloads=b"".join([request.payload for request in requests]),
        seen_time=seen_time,
    )


async def no_outcomes() -> Outcomes:
    return Outcomes.unknown(0)
