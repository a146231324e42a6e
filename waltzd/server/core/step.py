"""One step of a pipeline: batches that arrived together become one run of records, and in format 1 one batch. Pure.

Batches stay columns from the message to the disk: nothing here makes an object for a transaction. A batch is checked
before it is queued, so that a step cannot fail half-way.

The hybrid clock gives each batch its time; the shell brings what its own clock shows.

A batch gets the highest of three times: that of the batch before, what the owner's clock shows, and the highest time that
the client has seen in any partition and passes on. So time never falls within a partition, a fail-over included, and an
effect is never earlier than its cause, across partitions too. It decides nothing: a wrong clock makes times wrong, and no
transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors.operations import BadFrame, ClockAhead
from waltzd.format.batch import Flags, PlainLocks
from waltzd.format.checksum import I64, crc32
from waltzd.format.record import OVERHEAD_BYTES, LockColumns, Run, encode_record, encode_run, join_locks
from waltzd.protocol.batches import AppendBatch, SingleAppend

AHEAD_MAX = 60_000_000
"""Microseconds that a client's time may be ahead of the owner's clock. One wrong clock must not push the time of the
whole cluster into the future."""
OWN_AHEAD_MAX = 10_000_000
"""Microseconds that an owner's clock may be ahead of the median of the clocks of its storages, or behind it. Clocks that
are synchronized over a network differ by less, and people do not notice a time that is wrong by so little."""


class StorageClocks:
    """Clocks of the storages of a partition, advanced by the owner's steady clock from when they were last read: at the
    start of a session, and again while they correct the owner's clock. They bound that clock: if it is wrong or jumps, the
    time of the log is not pushed into the future, and does not stand still either. What was written while it stood still
    would look older than it is, and would be trimmed too early."""

    def __init__(self) -> None:
        self._ahead: dict[str, int] = {}
        """Storage to microseconds by which its clock is ahead of the owner's steady clock. The steady clock has no fixed
        origin."""

    def note(self, name: str, time: int, asked: float, answered: float) -> bool:
        """Note the clock of a storage. `time`: microseconds since 1970; 0 if the storage reports none. `asked` and
        `answered`: seconds of the owner's steady clock. Return False, and note nothing, if the answer was under way for
        too long, as when the machines slept meanwhile: the storage's clock may be as much ahead of it."""
        if answered - asked > OWN_AHEAD_MAX / 1e6:
            return False
        if time > 0:
            self._ahead[name] = time - round(1e6 * answered)
        return True

    def bounded(self, own: int, steady: float) -> int:
        """Return the time of the owner's clock, or the highest time that the storages' clocks allow if that is less."""
        known = median(self._ahead)
        return own if known is None else min(own, known + round(1e6 * steady) + OWN_AHEAD_MAX)

    def corrected(self, own: int, steady: float) -> int:
        """Return the time of the owner's clock, or the nearest time that the storages' clocks allow. If their number is
        even, the owner's clock is one of those that decide, so that a single wrong clock is outvoted. The clock of one
        storage alone sets no lower bound."""
        if len(self._ahead) < 2:
            return self.bounded(own, steady)
        clocks = [ahead + round(1e6 * steady) for ahead in self._ahead.values()]
        middle = sorted(clocks if len(clocks) % 2 else [*clocks, own])[len(clocks) // 2]
        return min(max(own, middle - OWN_AHEAD_MAX), middle + OWN_AHEAD_MAX)


def median(values: Mapping[str, int]) -> int | None:
    """Return the lower median; None if there are no values."""
    return sorted(values.values())[(len(values) - 1) // 2] if values else None


def check_seen(seen: int, now: int, last: int = 0) -> None:
    """Raise `ClockAhead` if the highest time that a client has seen would move the log far ahead of `now`. `last`: the
    time of the log. A time that is not above `last` moves nothing."""
    if seen > last and seen > now + AHEAD_MAX:
        raise ClockAhead(
            f"the client has seen a time {(seen - now) / 1e6:.0f} seconds ahead of this server's clock; "
            f"{AHEAD_MAX // 1_000_000} are allowed"
        )


class HybridClock:
    def __init__(self, last: int) -> None:
        """`last`: the time of the last batch of the log."""
        self.last = last

    def next(self, now: int, seen: int = 0) -> int:
        """Return the time of the next batch. `seen` has passed `check_seen`."""
        self.last = max(self.last, now, seen)
        return self.last


def check_payloads(batch: AppendBatch) -> None:
    """Check each payload against the client's checksum, and raise `BadFrame` for the first wrong one. One check over all
    payloads would not do: two wrong checksums could cancel out, and storages would refuse the records that are made with
    them."""
    if isinstance(batch, SingleAppend):
        found, said = [crc32(batch.payloads)], [batch.data_crc]
    else:
        view, bounds = memoryview(batch.payloads), [0, *np.cumsum(batch.lengths).tolist()]
        found = [crc32(view[start:stop]) for start, stop in pairwise(bounds)]
        said = batch.data_crcs.tolist()
    if found != said:
        sequence = batch.first_sequence + next(row for row, crc in enumerate(said) if crc != found[row])
        raise BadFrame(f"the payload of sequence {sequence} does not match its checksum", sequence=sequence)


def slices(batch: AppendBatch, rows_max: int, bytes_max: int) -> Iterator[AppendBatch]:
    """Cut a batch into pieces of at most `rows_max` rows and about `bytes_max` bytes, without copying payloads. Each
    piece is one turn of the event loop, so other partitions of this server get their turns in between. A group is never
    cut."""
    count = len(batch)
    if count <= rows_max and batch.bytes <= bytes_max:
        yield batch
        return
    payload_at = np.concatenate(([0], np.cumsum(batch.lengths)))
    lock_at = np.concatenate(([0], np.cumsum(batch.lock_counts)))
    view = memoryview(batch.payloads)
    size_at = payload_at + np.arange(count + 1) * OVERHEAD_BYTES
    cuts = np.arange(1, count + 1) if batch.follows is None else np.append(np.flatnonzero(~batch.follows)[1:], count)
    # `cuts`: rows before which the batch may be cut: after each row, but not within a group.
    start = 0
    while start < count:
        most = min(start + rows_max, int(size_at.searchsorted(size_at[start] + bytes_max, "right")) - 1)
        fits, least = cuts.searchsorted([most, start], "right").tolist()
        stop = int(cuts[max(fits - 1, least)])
        first_lock, last_lock = int(lock_at[start]), int(lock_at[stop])
        payloads = view[int(payload_at[start]) : int(payload_at[stop])]
        yield _part(batch, slice(start, stop), slice(first_lock, last_lock), payloads)
        start = stop


def cut(batch: AppendBatch, row: int) -> tuple[AppendBatch, AppendBatch]:
    """Cut a batch in front of a row that begins a group, without copying payloads."""
    payload, lock = int(batch.lengths[:row].sum()), int(batch.lock_counts[:row].sum())
    view = memoryview(batch.payloads)
    return (
        _part(batch, slice(0, row), slice(0, lock), view[:payload]),
        _part(batch, slice(row, None), slice(lock, None), view[payload:]),
    )


def _part(batch: AppendBatch, rows: slice, locks: slice, payloads: Buffer) -> AppendBatch:
    return AppendBatch(
        first_sequence=batch.first_sequence + rows.start,
        marks=batch.marks[rows],
        headers=batch.headers[rows],
        lengths=batch.lengths[rows],
        data_crcs=batch.data_crcs[rows],
        lock_counts=batch.lock_counts[rows],
        lock_ids=batch.lock_ids[locks],
        lock_modes=batch.lock_modes[locks],
        payloads=payloads,
        follows=None if batch.follows is None else batch.follows[rows],
        seen_time=batch.seen_time,
    )


class Sender(Protocol):
    """Mount that sent a request."""

    client: int


S = TypeVar("S", bound=Sender)


@dataclass(eq=False)
class QueuedBatch(Generic[S]):
    """A batch of one mount on its way to the log. It is queued, then `decide` accepts rows, then `take_off` puts it in
    flight until all of its rows are committed."""

    mount: S
    batch: AppendBatch
    """Columns and payloads as the client sent them. Dropped when the rows are in flight: the log cache has the records."""
    cost: int = 0
    """Bytes that this batch takes of the bounds on queued, in-flight and unanswered bytes."""
    arrived: float = 0.0
    """Time of the event loop at which the batch came, in seconds."""
    looked_up: int = 0
    """Rows at the start whose locks were looked up; they are decided with what is known."""
    refused: I64 = field(init=False)
    """Rows that were refused, ascending. All other rows are accepted."""
    sequences: I64 | range = field(init=False)
    """Sequence numbers of the accepted rows, once they are decided; in flight, of those that are not committed yet."""
    first_id: int = field(init=False)
    """Id of the first row in flight; its neighbours follow without a gap."""
    bytes: int = field(init=False)
    """Size of the records of all accepted rows."""
    time: int = field(init=False)
    """Time of the batch in the log, in microseconds since 1970; 0 in format 0."""

    @property
    def last_id(self) -> int:
        return self.first_id + len(self.sequences) - 1

    def decide(self, refused: I64) -> int:
        """Accept all rows except `refused`; return the number of accepted rows."""
        first, count = self.batch.first_sequence, len(self.batch)
        self.refused, every = refused, range(first, first + count)
        if len(refused):
            self.sequences = np.delete(every, refused)
        else:
            self.sequences = every if count == 1 else np.arange(first, first + count)
        return len(self.sequences)

    def column(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return the accepted rows of a column."""
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
        """Return the payloads of the accepted rows, in as few pieces as there are."""
        if len(self.refused) == 0:
            return [self.batch.payloads]
        at = np.concatenate(([0], np.cumsum(self.batch.lengths)))
        starts = at[np.concatenate(([0], self.refused + 1))].tolist()
        stops = at[np.append(self.refused, len(self.batch))].tolist()
        view = memoryview(self.batch.payloads)
        return [view[start:stop] for start, stop in zip(starts, stops, strict=True) if stop > start]

    def take_off(self, first_id: int, time: int) -> None:
        """Record that the accepted rows have ids from `first_id` on."""
        size = len(self.batch.payloads) if len(self.refused) == 0 else int(self.column(self.batch.lengths).sum())
        self.bytes = size + OVERHEAD_BYTES * len(self.sequences)
        self.first_id, self.time = first_id, time
        del self.batch


def build(first_id: int, items: Sequence[QueuedBatch[Any]], *, partition: int, generation: int) -> Run:
    """Encode all accepted rows, in order, as the records that are written to the disk."""
    if (one := _single_of(items)) is not None:
        request = items[0].mount.client, generation, partition, one.first_sequence
        return encode_record(first_id, request, one.header, one.data_crc, one.payloads)
    total = sum(len(item.sequences) for item in items)
    requests = np.empty((total, 4), np.int32)
    requests[:, 1], requests[:, 2] = generation, partition
    payloads: list[Buffer] = []
    at = 0
    for item in items:
        rows = slice(at, at + len(item.sequences))
        requests[rows, 0], requests[rows, 3] = item.mount.client, item.sequences
        payloads += item.payloads()
        at += len(item.sequences)
    return encode_run(
        first_id,
        requests=requests,
        headers=_joined([item.column(item.batch.headers) for item in items]),
        lengths=_joined([item.column(item.batch.lengths) for item in items]),
        data_crcs=_joined([item.column(item.batch.data_crcs) for item in items]),
        payloads=payloads[0] if len(payloads) == 1 else b"".join(payloads),
    )


def _single_of(items: Sequence[QueuedBatch[Any]]) -> SingleAppend | None:
    """Return the transaction that is all of a step, if it arrived as one and is accepted."""
    batch = items[0].batch
    return batch if len(items) == 1 and isinstance(batch, SingleAppend) and len(items[0].sequences) == 1 else None


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def locks_of(items: Sequence[QueuedBatch[Any]]) -> LockColumns | PlainLocks | None:
    """Return the locks of all accepted rows; None if there are none."""
    if (one := _single_of(items)) is not None:
        return PlainLocks((len(one.locks),), one.locks, one.modes) if one.locks else None
    if not any(len(item.batch.lock_ids) for item in items):
        return None
    found = [item.locks() for item in items]
    return found[0] if len(found) == 1 else join_locks(found)


def groups_of(items: Sequence[QueuedBatch[Any]]) -> Flags | None:
    """Return which accepted rows belong to the group of the row before; None if there are no groups."""
    if all(item.batch.follows is None for item in items):
        return None
    found = [
        np.zeros(len(item.sequences), np.bool_) if item.batch.follows is None else item.column(item.batch.follows)
        for item in items
    ]
    return _joined(found)
