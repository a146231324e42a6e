"""The tasks of an export, and their execution by Spark.

A task reads records and writes one file under a hidden name; only the driver renames files. So a task may run twice, be
killed at any time, or outlive its driver without harm. A `WaltzError` is a result, not a failure that Spark would retry.

All tasks are one Spark job. Each task adds its result to an accumulator, so the driver gets it when the task ends, not when
the job does: finished files are published while others are written.
"""

from __future__ import annotations

import hashlib
import io
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

from waltz_spark.export.destination import Destination, Output
from waltz_spark.export.form import Form, ParquetFile
from waltz_spark.export.manifest import (
    META_BESIDE,
    META_CLUSTER,
    META_CRC,
    META_FIRST,
    META_LAST,
    META_PARTITION,
    META_RECORDS,
    UNFINISHED,
    Piece,
    Shape,
    path_of,
)
from waltz_spark.log.arrow import SCHEMA, Grouped, Proof, read_grouped
from waltz_spark.log.origin import NO_THROTTLE, Origin, Span, Throttle, check_read
from waltz_spark.log.plan import Split
from waltz_spark.payloads.decoders import Decoder
from waltz_spark.table.columns import record_batch
from waltzd.errors import OtherTimeline, WaltzError
from waltzd.errors.operations import ExportDamaged
from waltzd.protocol.timelines import FIRST


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parameters of all tasks of a run, which are sent to the executors."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of the run."""
    origin: Origin
    destination: Destination
    cluster: UUID
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Timeline that is read, for each partition whose log has forked."""
    routes: Mapping[int, Any] = field(default_factory=dict)
    """Value for each partition by which `Origin.check` reaches its log from a task."""
    form: Form
    decoder: Decoder | None = None
    throttle: Throttle = NO_THROTTLE

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA if self.decoder is None else self.decoder.schema(SCHEMA)

    @property
    def shape(self) -> Shape:
        decoder = self.decoder
        return Shape(
            format=self.form.format, compression=self.form.compression,
            decoder=decoder.text if decoder else "", decoder_fingerprint=decoder.fingerprint if decoder else "",
            schema=tuple((column.name, str(column.type)) for column in self.schema),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One file to write."""

    number: int
    split: Split

    @property
    def partition(self) -> int:
        return self.split.partition

    @property
    def span(self) -> Span:
        return self.split.span

    @property
    def path(self) -> str:
        return path_of(self.partition, self.span)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of a task: a file under its hidden name, or an error."""

    number: int
    piece: Piece | None = None
    place: str = ""
    error: WaltzError | None = None
    started: float = 0.0
    ended: float = 0.0
    """Seconds since 1970 by the clock of the machine that ran the task: only shown."""


def write(job: Job, given: Assignment) -> Written:
    """Carry out one task. A `WaltzError` is returned, not raised."""
    started = time.time()
    place = f"{UNFINISHED}/{job.run}/{uuid.uuid4().hex}"
    try:
        piece = _written(job, given, place)
    except WaltzError as error:
        return Written(number=given.number, error=error, started=started, ended=time.time())
    return Written(number=given.number, piece=piece, place=place, started=started, ended=time.time())


def _written(job: Job, given: Assignment, place: str) -> Piece:
    with job.destination.create(place, in_small_steps=job.throttle.is_on) as file:
        sink = _Sink(file)
        try:
            proof = _fill(job, given, sink)
        except BaseException as error:
            sink.abandon()
            if isinstance(error, OtherTimeline):  # of an owner: what it means for the export is said by the check
                _check_log(job, given)
            raise
    if job.destination.size(place) != sink.size:
        raise ExportDamaged(
            f"{place} has {job.destination.size(place)} bytes after {sink.size} were written to it",
            not_done=f"ids {given.span.first} to {given.span.last} of partition {given.partition} were not exported",
            next_step="look at the file system of the output, then run the same command again",
        )
    _check_log(job, given)
    return Piece(
        path=given.path, partition=given.partition, span=given.span, data_bytes=proof.data_bytes, crc=proof.crc,
        size=sink.size, sha256=sink.digest(), times=proof.times, beside=proof.beside,
    )  # fmt: skip


def _check_log(job: Job, given: Assignment) -> None:
    check_read(
        job.origin, given.partition, given.span, job.timelines.get(given.partition, FIRST),
        route=job.routes.get(given.partition),
        not_done="the file is in no export, and the export was left as it is",
        next_step="run the same command again: it goes on if the export ends at or below the fork",
    )  # fmt: skip


def _rows(job: Job, given: Assignment, proof: Proof) -> Iterator[Grouped]:
    """Yield the records of an assignment, read at the rate limit of the job, and add them to the proof."""
    span, throttle = given.span, job.throttle
    next_id = span.first
    for part in given.split.parts:
        found = read_grouped(job.origin, part.extent, part.span, batch_bytes=throttle.batch_bytes, with_locks=True)
        for run, groups in found:
            throttle.sleep(len(run.data))
            assert run.first_id == next_id, f"id {run.first_id} came when {next_id} was to come"
            proof.add(run)
            next_id = run.last_id + 1
            yield Grouped(run, groups)
    assert next_id == span.last + 1, f"{span} of partition {given.partition} ended before id {next_id}"


def _fill(job: Job, given: Assignment, sink: _Sink) -> Proof:
    proof = Proof()
    metadata = {
        META_CLUSTER: str(job.cluster),
        META_PARTITION: str(given.partition),
        META_FIRST: str(given.span.first),
        META_LAST: str(given.span.last),
        META_RECORDS: str(given.span.count),
    }
    file = ParquetFile(job.form, sink, job.schema, metadata)
    for run, groups in _rows(job, given, proof):
        batch = record_batch(run, given.partition, groups)
        file.write(batch if job.decoder is None else job.decoder.decode(batch))
    beside = {} if proof.beside is None else {META_BESIDE: f"{proof.beside:08x}"}
    file.close({META_CRC: f"{proof.crc:08x}", **beside})
    return proof


class _Sink(io.RawIOBase):
    """A file that is hashed while it is written. The caller closes it."""

    def __init__(self, file: Output) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        self._is_abandoned = False

    def abandon(self) -> None:
        """Ignore further writes: PyArrow's writers write their ends when they are collected, after the file was closed."""
        self._is_abandoned = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        if not self._is_abandoned:
            self._hash.update(data)
            self._file.write(data)
            self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def digest(self) -> str:
        return self._hash.hexdigest()


# -- by Spark ----------------------------------------------------------------------------------------------------------

Watch = Callable[[Collection[int]], None]
"""Function that is called repeatedly with the numbers of the tasks that have ended since the last call."""
_TICK_SECONDS = 0.2


def unseen(_ended: Collection[int]) -> None:
    """Show no progress."""


def run_by_spark(
    spark: Any, job: Job, assignments: Sequence[Assignment], *, bucket: Path | None = None, watch: Watch = unseen
) -> Generator[Written, None, None]:
    """Yield the result of each task soon after its end, in any order. Closing the generator cancels what still runs.

    Args:
        spark: The session.
        job: The parameters of the tasks.
        assignments: The tasks.
        bucket: File that all tasks share to keep the rate together, if all of them run on this machine.
        watch: Progress display.
    """
    from pyspark.accumulators import AccumulatorParam

    class Results(AccumulatorParam):  # type: ignore[type-arg]
        def zero(self, value: list[Written]) -> list[Written]:
            return []

        def addInPlace(self, value1: list[Written], value2: list[Written]) -> list[Written]:
            value1 += value2
            return value1

    context = spark.sparkContext
    throttle = job.throttle.shared(min(context.defaultParallelism, len(assignments)), bucket)
    job = replace(job, throttle=throttle)
    results = context.accumulator([], Results())

    def task(given: Assignment) -> None:
        results.add([write(job, given)])

    def run() -> None:
        context.parallelize(assignments, len(assignments)).foreach(task)

    pool = ThreadPoolExecutor(1, thread_name_prefix="waltz export")  # signals come to this thread
    future = pool.submit(run)
    seen = 0
    try:
        is_over = False
        while not is_over:
            is_over = bool(wait([future], timeout=_TICK_SECONDS).done)
            news = results.value[seen:]
            seen += len(news)
            watch([written.number for written in news])
            yield from news
        future.result()
    finally:
        while not future.done():  # the job may not have begun yet when it is cancelled for the first time
            with suppress(*_gone()):
                context.cancelAllJobs()
            wait([future], timeout=_TICK_SECONDS)
        pool.shutdown()


def _gone() -> tuple[type[Exception], ...]:
    """Return the errors of calls to a Java that has ended, and so has no jobs."""
    from py4j.protocol import Py4JError

    return Py4JError, OSError
