"""Writes down what an application asks of a client and what it is given, while it runs.

A `Recorder` stands between the application and its client on both sides: contexts go through `context`, so that each
attempt becomes an operation of its own; the handler goes through `handler`, so that everything that is fed is written down.
What makes a payload unique is the application's business: two attempts must never have the same bytes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from tests.checker.history import LogRecord, Observed, Operation, Recording, Seen
from waltzd.client.view import (
    Builder,
    Decision,
    Declined,
    Handler,
    Partitioner,
    Transaction,
    TransactionContext,
    partition_by_hash,
)
from waltzd.format.checksum import crc32
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, Run, heads
from waltzd.protocol.locks import Committed, Lock, Mode, Outcome, Reason, Rejected, Unknown
from waltzd.protocol.quorum import EMPTY


def payload_key(payload: bytes) -> str:
    """What an attempt is called in a history."""
    return blake2b(payload, digest_size=12).hexdigest()


def log_records(run: Run) -> Iterator[LogRecord]:
    """The records of a run, from wherever it was read, as a history knows them."""
    ends = run.bounds.tolist()
    for head, start, end in zip(heads(run), ends, ends[1:], strict=False):
        payload = bytes(run.data[start + HEAD_BYTES : end - TRAILER_BYTES])
        yield LogRecord(payload_key(payload), crc32(payload), int(head["header"]), int(head["generation"]))


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
    ) -> None:
        """`name`: of the client. `partitioner`: the one that the client uses."""
        self.writer = writer
        self.name = name
        self.clock = clock
        self.partitioner = partitioner

    def context(self, context: TransactionContext) -> TransactionContext:
        return _RecordedContext(context, self)

    def handler(self, handler: Handler) -> Handler:
        recorded = _RecordedHandler(handler, self)
        return _RecordedBatchHandler(handler, self) if hasattr(handler, "apply_batch") else recorded

    async def append(self, client: Any, data: bytes, *, partition: int, header: int = 0) -> Outcome:
        """The client's short form, without locks: what it had seen does not matter then."""
        attempt = self.invoked(Builder(EMPTY), partition, data, header, ())
        outcome: Outcome = await client.append(data, partition=partition, header=header)
        self.returned(attempt, outcome)
        return outcome

    async def high_water_mark(self, client: Any, partition: int) -> int:
        invoked = self.clock()
        mark: int = await client.high_water_mark(partition)
        self.writer.observed(Observed(self.name, partition, invoked, self.clock(), mark, is_confirmed=False))
        return mark

    # -- attempts

    def invoked(self, builder: Builder, partition: int, data: bytes, header: int, locks: Sequence[Lock]) -> Operation:
        operation = Operation(
            key=payload_key(data),
            client=self.name,
            partition=partition,
            invoked=self.clock(),
            mark=builder.mark,
            read=hashes(locks, Mode.READ),
            write=hashes(locks, Mode.WRITE),
            append=hashes(locks, Mode.APPEND),
            header=header,
            crc=crc32(data),
        )
        self.writer.invoked(operation)
        return operation

    def returned(self, operation: Operation, outcome: Outcome) -> None:
        operation.returned = self.clock()
        match outcome:
            case Committed(id):
                operation.kind, operation.id = "committed", id
            case Rejected(reason, conflict, lock):
                operation.kind, operation.reason = "rejected", reason.name
                operation.conflict, operation.lock = conflict, lock
            case Unknown():
                operation.kind = "unknown"
        self.writer.returned(operation)


class _RecordedContext(TransactionContext):
    def __init__(self, inner: TransactionContext, recorder: Recorder) -> None:
        self.key = inner.key
        self._inner = inner
        self._recorder = recorder
        self._partition = 0
        self._open: Operation | None = None

    def partition(self, count: int) -> int | None:
        chosen = self._inner.partition(count)
        self._partition = self._recorder.partitioner(self._inner.key, count) if chosen is None else chosen
        return self._partition

    async def build(self, builder: Builder) -> bool:
        self._close(Rejected(Reason.LOST))  # a client builds again only when it is certain that the last one is lost
        wanted = self._inner.build(builder)
        if not (await wanted if inspect.isawaitable(wanted) else wanted):
            return False
        self._open = self._recorder.invoked(builder, self._partition, builder.data, builder.header, builder.locks)
        return True

    def on_lock_failure(self, rejected: Rejected) -> object:
        self._close(rejected)
        return self._inner.on_lock_failure(rejected)

    def on_completion(self, outcome: Outcome | Declined) -> object:
        if not isinstance(outcome, Declined):
            self._close(outcome)
        return self._inner.on_completion(outcome)

    def on_application(self, id: int) -> object:
        return self._inner.on_application(id)

    def _close(self, outcome: Outcome) -> None:
        attempt, self._open = self._open, None
        if attempt is not None:
            self._recorder.returned(attempt, outcome)


class _RecordedHandler:
    def __init__(self, inner: Handler, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self._marks: dict[int, int] = {}

    async def mark(self, partition: int) -> int:
        found = self._inner.mark(partition)
        mark = await found if inspect.isawaitable(found) else found
        self._marks[partition] = mark
        return mark

    async def apply(self, transaction: Transaction) -> None:
        done = self._inner.apply(transaction)
        if inspect.isawaitable(done):
            await done
        self._fed([(transaction, await transaction.data())])

    async def failed(self, transaction: Transaction, error: Exception) -> Decision:
        failed = getattr(self._inner, "failed", None)
        if failed is None:
            return Decision.RETRY
        decision = failed(transaction, error)
        found: Decision = await decision if inspect.isawaitable(decision) else decision
        return found

    def _fed(self, fed: Sequence[tuple[Transaction, bytes]]) -> None:
        """Behind what came before in this partition: an id that is left out shows."""
        partition = fed[0][0].partition
        rows = [(transaction.id, payload_key(data), crc32(data)) for transaction, data in fed]
        at = self._recorder.clock()
        self._recorder.writer.seen(Seen(self._recorder.name, partition, self._marks[partition], rows, at))
        self._marks[partition] = rows[-1][0]


class _RecordedBatchHandler(_RecordedHandler):
    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        apply_batch: Any = self._inner.apply_batch  # type: ignore[attr-defined]
        done = apply_batch(transactions)
        if inspect.isawaitable(done):
            await done
        self._fed([(transaction, await transaction.data()) for transaction in transactions])
