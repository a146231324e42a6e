"""Writes down what an application asks of a client and what it is given, while it runs.

A `Recorder` stands between the application and its client on both sides: commands go through `command`, so that each
attempt becomes an operation of its own; the view goes through `view`, so that everything that is fed is written down.
What makes a payload unique is the application's business: two attempts must never have the same bytes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any
from uuid import UUID

from tests.checker.history import UNTIMED, LogRecord, Observed, Operation, Recording, Seen
from waltzd.client.follower import call_here, call_opened
from waltzd.client.view import (
    Builder,
    Command,
    Decision,
    Partitioner,
    Transaction,
    View,
    partition_by_hash,
    partition_of,
)
from waltzd.format.checksum import crc32
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, LockColumns, Run, heads
from waltzd.protocol.locks import AppendOutcome, Committed, Declined, Lock, Mode, Outcome, Reason, Rejected, Unknown
from waltzd.protocol.quorum import EMPTY


def payload_key(payload: bytes) -> str:
    """What an attempt is called in a history."""
    return blake2b(payload, digest_size=12).hexdigest()


def log_records(run: Run) -> Iterator[LogRecord]:
    """The records of a run, from wherever it was read, as a history knows them."""
    ends = run.bounds.tolist()
    locks = [None] * len(run) if run.locks is None else _locks_of(run.locks)
    for number, (head, start, end) in enumerate(zip(heads(run), ends, ends[1:], strict=False)):
        payload = bytes(run.data[start + HEAD_BYTES : end - TRAILER_BYTES])
        time = UNTIMED if run.times is None else int(run.times[number])
        yield LogRecord(
            payload_key(payload),
            crc32(payload),
            int(head["header"]),
            int(head["generation"]),
            time,
            None if time == UNTIMED else run.follows is not None and bool(run.follows[number]),
            None if time == UNTIMED else locks[number],
        )


def _locks_of(columns: LockColumns) -> list[tuple[tuple[int, int], ...] | None]:
    pairs = iter(zip(columns.ids.tolist(), columns.modes.tolist(), strict=True))
    return [tuple(islice(pairs, count)) for count in columns.counts.tolist()]


def hashes(locks: Iterable[Lock], mode: Mode) -> tuple[int, ...]:
    return tuple(lock.hash for lock in locks if lock.mode is mode)


class Recorder:
    def __init__(
        self,
        writer: Recording,
        name: str,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        partitioner: Partitioner = partition_by_hash,
        are_clocks_right: bool = True,
    ) -> None:
        """`name`: of the client. `partitioner`: the one that the client uses. `are_clocks_right`: effects have to be behind
        their causes by time; owners whose clocks are far behind are told none."""
        self.writer = writer
        self.name = name
        self.clock = clock
        self.partitioner = partitioner
        self.are_clocks_right = are_clocks_right
        self.time_seen = UNTIMED
        """The highest time that the view was given."""

    def command(self, command: Command, *, is_fresh: bool = False) -> Command:
        """`is_fresh`: it is submitted at once, and so that its view has seen all that was committed by then."""
        return _RecordedCommand(command, self, asked=self.clock() if is_fresh else None)

    def group(self, commands: Iterable[Command]) -> list[Command]:
        group = _Group()
        return [_RecordedCommand(command, self, group, number) for number, command in enumerate(commands)]

    def view(self, view: View) -> View:
        recorded = _RecordedView(view, self)
        return _RecordedBatchView(view, self) if hasattr(view, "apply_batch") else recorded

    async def append(self, client: Any, data: bytes, *, partition: int, header: int = 0) -> AppendOutcome:
        """The client's short form, without locks: what it had seen does not matter then."""
        attempt = self.invoked(Builder(EMPTY), partition, data, header, ())
        outcome: AppendOutcome = await client.append(data, partition=partition, kind=header)
        self.returned(attempt, outcome)
        return outcome

    async def append_behind(self, client: Any, command: Command, partition: int, position: int) -> AppendOutcome:
        """Append under locks as one who has seen the log only up to this position."""
        builder = Builder(position)
        command.build(builder)
        attempt = self.invoked(builder, partition, builder.payload, builder.kind, builder.locks)
        outcome: AppendOutcome = await client.append(
            builder.payload, partition=partition, kind=builder.kind, locks=builder.locks, position=position
        )
        self.returned(attempt, outcome)
        return outcome

    async def end_position(self, client: Any, partition: int, *, confirmed: bool = True) -> int:
        invoked = self.clock()
        mark: int = await client.end_position(partition, confirmed=confirmed)
        self.writer.observed(Observed(self.name, partition, invoked, self.clock(), mark, is_confirmed=confirmed))
        return mark

    # -- attempts

    def invoked(
        self, builder: Builder, partition: int, data: bytes, header: int, locks: Sequence[Lock], *, together: str = ""
    ) -> Operation:
        operation = Operation(
            key=payload_key(data),
            client=self.name,
            partition=partition,
            invoked=self.clock(),
            mark=builder.position,
            read=hashes(locks, Mode.READ),
            write=hashes(locks, Mode.WRITE),
            append=hashes(locks, Mode.APPEND),
            header=header,
            crc=crc32(data),
            together=together,
            time_seen=self.time_seen if self.are_clocks_right else UNTIMED,
        )
        self.writer.invoked(operation)
        return operation

    def returned(self, operation: Operation, outcome: AppendOutcome, number: int = 0) -> None:
        """`number`: of the transaction in its group."""
        operation.returned = self.clock()
        match outcome:
            case Committed():
                operation.kind, operation.id = "committed", outcome.ids[number]
            case Rejected(reason, conflict, lock):
                operation.kind, operation.reason = "rejected", reason.name
                operation.conflict, operation.lock = conflict, lock
            case Unknown():
                operation.kind = "unknown"
        self.writer.returned(operation)


class _Group:
    """Transactions that are submitted together."""

    key = ""
    """Of the first of them, as it was built last."""


class _RecordedCommand(Command):
    def __init__(
        self,
        inner: Command,
        recorder: Recorder,
        group: _Group | None = None,
        number: int = 0,
        asked: int | None = None,
    ) -> None:
        self._asked = asked
        """When it was asked for a view that is fresh."""
        self._group = group
        self._number = number
        self.key, self.locks = inner.key, inner.locks
        self._inner = inner
        self._recorder = recorder
        self._partition = 0
        self._open: Operation | None = None

    def partition(self, count: int) -> int | None:
        self._partition = partition_of(self._inner, lambda key: self._recorder.partitioner(key, count), count)
        return self._partition

    async def build(self, builder: Builder) -> bool:
        self._close(Rejected(Reason.NOT_IN_LOG))  # a client builds again only when it is certain that the last one is lost
        recorder, asked, self._asked = self._recorder, self._asked, None
        if asked is not None:  # as if it had asked for the end of the log
            look = Observed(recorder.name, self._partition, asked, recorder.clock(), builder.position)
            recorder.writer.observed(look)
        wanted = self._inner.build(builder)
        if not (await wanted if inspect.isawaitable(wanted) else wanted):
            return False
        if self._group is not None and self._number == 0:
            self._group.key = payload_key(builder.payload)
        together = "" if self._group is None else self._group.key
        self._open = self._recorder.invoked(
            builder, self._partition, builder.payload, builder.kind, builder.locks, together=together
        )
        return True

    def on_lock_failure(self, rejected: Rejected) -> object:
        self._close(rejected)
        return self._inner.on_lock_failure(rejected)

    def on_outcome(self, outcome: Outcome) -> object:
        if not isinstance(outcome, Declined):
            self._close(outcome)
        return self._inner.on_outcome(outcome)

    def on_applied(self, id: int) -> object:
        return self._inner.on_applied(id)

    def _close(self, outcome: AppendOutcome) -> None:
        attempt, self._open = self._open, None
        if attempt is not None:
            self._recorder.returned(attempt, outcome, self._number)


class _RecordedView:
    def __init__(self, inner: View, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._marks: dict[int, int] = {}

    async def opened(self, cluster: UUID) -> None:
        await call_opened(self._inner, call_here, cluster)

    async def position(self, partition: int) -> int:
        found = self._inner.position(partition)
        mark = await found if inspect.isawaitable(found) else found
        self._marks[partition] = mark
        return mark

    async def apply(self, transaction: Transaction) -> None:
        done = self._inner.apply(transaction)
        if inspect.isawaitable(done):
            await done
        self._fed([(transaction, await transaction.fetch())])

    async def failed(self, transaction: Transaction, error: Exception) -> Decision:
        failed = getattr(self._inner, "failed", None)
        if failed is None:
            return Decision.RETRY
        decision = failed(transaction, error)
        found: Decision = await decision if inspect.isawaitable(decision) else decision
        return found

    def _fed(self, fed: Sequence[tuple[Transaction, bytes]], *, is_whole: bool = False) -> None:
        """Behind what came before in this partition: an id that is left out shows."""
        partition, recorder = fed[0][0].partition, self._recorder
        rows = [(transaction.id, payload_key(data), crc32(data)) for transaction, data in fed]
        times = [UNTIMED if transaction.time_us is None else transaction.time_us for transaction, _ in fed]
        seen = Seen(recorder.name, partition, self._marks[partition], rows, recorder.clock(), "", times, is_whole)
        recorder.writer.seen(seen)
        recorder.time_seen = max(recorder.time_seen, *times)
        self._marks[partition] = rows[-1][0]


class _RecordedBatchView(_RecordedView):
    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        apply_batch: Any = self._inner.apply_batch  # type: ignore[attr-defined]
        done = apply_batch(transactions)
        if inspect.isawaitable(done):
            await done
        self._fed([(transaction, await transaction.fetch()) for transaction in transactions], is_whole=True)
