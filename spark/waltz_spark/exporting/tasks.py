"""The tasks of an export: what one of them does, and how Spark carries them out.

Some records in, one file out. A task writes to a hidden name, and tells what it wrote; only the driver gives files their
names. So a task may run twice, be stopped anywhere, or outlive its driver: what it left never counts. An error of ours is
an answer, too, and not a failure that Spark would retry: its class and its parts come back as they were.

On Spark they are the plainest job that there is: a function over a list, on every master, on a driver of ours and on one
that the cluster runs. Tasks go out in waves, two at a time, so that the next one fills the cores that the last tasks of the
one before leave idle. What a wave tells arrives when it is over, and can be published then. A data source would do as well,
and did: but Spark starts three Pythons to plan a reading of one, for each wave, and that costs more than all else in a
small export.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from waltz_spark.exporting.destination import Destination, Output
from waltz_spark.exporting.form import Form, open_writer
from waltz_spark.exporting.manifest import (
    META_BESIDE,
    META_CLUSTER,
    META_CRC,
    META_FIRST,
    META_INDEX_HEADER,
    META_LAST,
    META_PARTITION,
    META_RECORDS,
    META_SEGMENT,
    META_SEGMENT_HEADER,
    UNFINISHED,
    Fronts,
    Piece,
    Query,
    SegmentHead,
    Shape,
    path_of,
)
from waltz_spark.log.decode import BATCH, LOSSLESS, SCHEMA, record_batch
from waltz_spark.log.encode import Beside
from waltz_spark.log.groups import Grouped, read_grouped
from waltz_spark.log.origin import Extent, Origin, Span
from waltz_spark.log.plan import Split
from waltz_spark.log.segment import KeepsSegments
from waltz_spark.log.throttle import NO_THROTTLE, Throttle
from waltzd.errors import BadArgument, ExportDamaged, WaltzError, tree
from waltzd.format.checksum import crc32
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run

if TYPE_CHECKING:
    from waltz_spark.payloads.payload import Decoder


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, as far as all tasks of a run have it in common; goes with them to the executors."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The name of the run, which no other run has."""
    origin: Origin
    destination: Destination
    cluster: UUID
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Of each partition whose log has forked, the timeline that is read."""
    form: Form
    is_lossless: bool = False
    decoder: Decoder | None = None
    query: Query = field(default=Query())
    columns: tuple[tuple[str, str], ...] = ()
    """Names and types in the files of an export that goes on, where SQL makes them: only Spark can tell them."""
    throttle: Throttle = NO_THROTTLE

    @property
    def schema(self) -> pa.Schema:
        own = LOSSLESS if self.is_lossless else SCHEMA
        return own if self.decoder is None else self.decoder.schema(own)

    @property
    def shape(self) -> Shape:
        decoder = self.decoder
        return Shape(
            format=self.form.format, compression=self.form.compression, lossless=self.is_lossless,
            decoder=decoder.text if decoder else "", decoder_fingerprint=decoder.fingerprint if decoder else "",
            schema=self.columns or tuple((column.name, str(column.type)) for column in self.schema), query=self.query,
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

    def path(self, form: Form) -> str:
        return path_of(self.partition, self.span, form.suffix)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a task tells: a file, under the name that it has until the driver gives it its own; or what went wrong."""

    number: int
    piece: Piece | None = None
    place: str = ""
    error: WaltzError | None = None
    started: float = 0.0
    ended: float = 0.0
    """By the clock of the machine that ran it: for showing how fast it went, for nothing else."""
    columns: tuple[tuple[str, str], ...] = ()
    """Names and types in the file, where only Spark knows them."""


def segment_head(origin: Origin, extent: Extent) -> SegmentHead:
    """What a lossless export keeps of the segment that an extent lies in."""
    if not isinstance(origin, KeepsSegments):
        raise BadArgument(
            f"--lossless keeps segments as they are, and {origin.describe()} has none that are its own: replicas cut the "
            "same records in different places",
            not_done="nothing was written",
            next_step="export from the directory of a storage or from an archive with --source, or leave --lossless out: "
            "all columns of all records are kept without it, too",
        )
    header, index_header = origin.headers(extent)
    return SegmentHead(
        first=FileHeader.decode(header, origin.describe()).first_id,
        header=header,
        index_header=index_header if len(index_header) == HEADER_BYTES else b"",
    )


def check_batches(origin: Origin, assignments: Sequence[Assignment]) -> None:
    """Refuses a lossless export that would end within a batch: no segment can be made of a part of one."""
    assert isinstance(origin, KeepsSegments)
    lasts = {given.partition: given for given in sorted(assignments, key=lambda given: given.span)}
    for given in lasts.values():
        extent, last = given.split.parts[-1].extent, given.span.last
        if last >= extent.span.last or segment_head(origin, extent).format == 0:
            continue
        if not origin.preambles(extent, Span(last + 1, last + 1)):
            raise BadArgument(
                f"partition {given.partition}: --to-txn {last} lies within a batch, and --lossless keeps batches whole",
                not_done="nothing was written",
                next_step="choose another id (`waltzctl segment dump` shows where batches end), or leave --to-txn out",
            )


def write(job: Job, given: Assignment) -> Written:
    """The whole task. Returns errors of ours."""
    started = time.time()
    place = f"{UNFINISHED}/{job.run}/{uuid.uuid4().hex}"
    try:
        piece = _written(job, given, place)
    except WaltzError as error:
        return Written(number=given.number, error=error, started=started, ended=time.time())
    return Written(number=given.number, piece=piece, place=place, started=started, ended=time.time())


def _written(job: Job, given: Assignment, place: str) -> Piece:
    head = segment_head(job.origin, given.split.parts[0].extent) if job.is_lossless else None
    with job.destination.create(place, in_small_steps=job.throttle.is_on) as file:
        sink = _Sink(file)
        try:
            reading, fronts = _fill(job, given, head, sink)
        except BaseException:
            sink.abandon()
            raise
    if job.destination.size(place) != sink.size:
        raise ExportDamaged(
            f"{place} has {job.destination.size(place)} bytes after {sink.size} were written to it",
            not_done=f"ids {given.span.first} to {given.span.last} of partition {given.partition} were not exported",
            next_step="look at the file system of the output, then run the same command again",
        )
    return Piece(
        path=given.path(job.form),
        partition=given.partition,
        span=given.span,
        data_bytes=reading.data_bytes,
        crc=reading.crc,
        size=sink.size,
        sha256=sink.digest(),
        segment=head,
        fronts=fronts,
        times=reading.beside.times,
        beside=reading.beside.crc,
    )


class Reading:
    """All records of an assignment, as fast as the job lets a task read, and what proves them."""

    def __init__(self, job: Job, given: Assignment) -> None:
        self._job, self._given = job, given
        self.crc = self.data_bytes = 0
        self.beside = Beside()

    def rows(self) -> Iterator[Grouped]:
        span, throttle = self._given.span, self._job.throttle
        next_id = span.first
        for run, groups in self._parts(throttle.batch_bytes):
            throttle.sleep(len(run.data))
            assert run.first_id == next_id, f"id {run.first_id} came when {next_id} was to come"
            self.crc, self.data_bytes = crc32(run.data, self.crc), self.data_bytes + len(run.data)
            self.beside.add(run)
            next_id = run.last_id + 1
            yield Grouped(run, groups)
        assert next_id == span.last + 1, f"{span} of partition {self._given.partition} ended before id {next_id}"

    def _parts(self, batch_bytes: int) -> Iterator[Grouped]:
        for part in self._given.split.parts:
            yield from read_grouped(self._job.origin, part.extent, part.span, batch_bytes=batch_bytes, with_locks=True)


class _FrontColumn:
    """What stands in front of the records of each batch, in a column of its own, and what proves it."""

    def __init__(self, origin: KeepsSegments, given: Assignment, head: SegmentHead) -> None:
        self._origin, self._given, self._head = origin, given, head
        self._bytes = self._crc = 0

    def beside(self, batch: pa.RecordBatch, run: Run) -> pa.RecordBatch:
        found = self._origin.preambles(self._given.split.parts[0].extent, Span(run.first_id, run.last_id))
        number = np.full(len(run), -1)
        number[[first_id - run.first_id for first_id, _ in found]] = np.arange(len(found))
        for _, raw in found:
            self._bytes, self._crc = self._bytes + len(raw), crc32(raw, self._crc)
        fronts = pa.array([raw for _, raw in found], pa.binary())
        return batch.append_column(BATCH, fronts.take(pa.array(number, mask=number < 0)))

    def found(self) -> Fronts | None:
        if self._head.format == 0:
            return None
        footer = self._origin.footer(self._given.split.parts[0].extent, self._given.span.last)
        hashes = footer.before + footer.hash if footer is not None else b""
        return Fronts(size=self._bytes, crc=self._crc, footer=hashes)


def _fill(job: Job, given: Assignment, head: SegmentHead | None, sink: _Sink) -> tuple[Reading, Fronts | None]:
    decoder, reading = job.decoder, Reading(job, given)
    fronts: _FrontColumn | None = None
    if head is not None:
        assert isinstance(job.origin, KeepsSegments)
        fronts = _FrontColumn(job.origin, given, head)
    writer = open_writer(job.form, sink, job.schema, _metadata(job, given, head))
    for run, groups in reading.rows():
        batch = record_batch(run, given.partition, groups)
        if fronts is not None:
            batch = fronts.beside(batch, run)
        writer.write(batch if decoder is None else decoder.decode(batch))
    beside = {} if reading.beside.crc is None else {META_BESIDE: f"{reading.beside.crc:08x}"}
    writer.close({META_CRC: f"{reading.crc:08x}", **beside})
    return reading, None if fronts is None else fronts.found()


def _metadata(job: Job, given: Assignment, head: SegmentHead | None) -> Mapping[str, str]:
    found = {
        META_CLUSTER: str(job.cluster),
        META_PARTITION: str(given.partition),
        META_FIRST: str(given.span.first),
        META_LAST: str(given.span.last),
        META_RECORDS: str(given.span.count),
    }
    if head is not None:
        found |= {
            META_SEGMENT: str(head.first),
            META_SEGMENT_HEADER: head.header.hex(),
            META_INDEX_HEADER: head.index_header.hex(),
        }
    return found


class _Sink(io.RawIOBase):
    """A file that is hashed while it is written: it need not be read again. The caller closes the file."""

    def __init__(self, file: Output) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        self._is_abandoned = False

    def abandon(self) -> None:
        """PyArrow's writers write their ends when they are collected: that must not reach a file that is closed."""
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


# -- to the executors and back -----------------------------------------------------------------------------------------


def packed(value: object) -> str:
    """As an option of a data source, which can only be text. Only ever read by ourselves."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - our own driver wrote it


def answer_of(written: Written) -> str:
    """Of a task, to the driver that asked for it: Spark carries it, and nothing keeps it."""
    if written.error is None:
        return packed(written)
    return json.dumps({"number": written.number, "error": error_text(written.error)})


def written_of(answer: str) -> Written:
    if answer.startswith("{"):
        value = json.loads(answer)
        return Written(number=value["number"], error=error_told(value["error"]))
    found = unpacked(answer)
    assert isinstance(found, Written)
    return found


def error_text(error: WaltzError) -> str:
    """As it is left in an output, which others may be able to write to: text, and nothing that could be carried out."""
    return json.dumps(
        {"code": error.code, "message": error.message, "not_done": error.detail_not_done,
         "next_step": error.detail_next_step, "facts": error.facts}
    )  # fmt: skip


def error_told(text: str | bytes) -> WaltzError:
    try:
        value = json.loads(text)
        kind = tree()[value["code"]]
        message, not_done, next_step = (_words(value[name]) for name in ("message", "not_done", "next_step"))
        return kind(message, not_done=not_done, next_step=next_step, **value["facts"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportDamaged("what a task left in the output of its error cannot be understood") from error


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def assignments_of(splits: Sequence[Split], *, is_lossless: bool) -> list[Assignment]:
    """A lossless file lies within one segment."""
    if is_lossless:
        splits = [Split((part,)) for split in splits for part in split.parts]
    return [Assignment(number=number, split=split) for number, split in enumerate(splits)]


# -- by Spark ----------------------------------------------------------------------------------------------------------

Watch = Callable[[Collection[int]], None]
"""Told again and again, also without news: the numbers of the tasks that have ended since the last time."""
IN_FLIGHT = 2
_TICK_SECONDS = 0.5
_ATTEMPTS_MAX = 4
_NAMES = count()


def unseen(_ended: Collection[int]) -> None:
    """No progress display."""


def carried_out(job: str, assignment: str) -> str:
    """On an executor, which knows this package by its zip or because it has it: so what is sent there is packed."""
    return answer_of(write(unpacked(job), unpacked(assignment)))


def run_waves(
    spark: Any, job: Job, assignments: Sequence[Assignment], watch: Watch = unseen
) -> Generator[Written, None, None]:
    """What the tasks tell, wave by wave. When it is closed, what still runs is cancelled."""
    task = partial(carried_out, packed(job))

    def run(wave: Sequence[Assignment]) -> list[Written]:
        given = spark.sparkContext.parallelize([packed(assignment) for assignment in wave], len(wave))
        return [written_of(answer) for answer in given.map(task).collect()]

    yield from in_waves(spark, run, assignments, watch)


def in_waves(
    spark: Any, run: Callable[[Sequence[Assignment]], list[Written]], assignments: Sequence[Assignment],
    watch: Watch = unseen,
) -> Generator[Written, None, None]:  # fmt: skip
    """`run`: carries out one wave, in a thread of its own, by jobs of this Spark."""
    waves = deque(_waves(assignments, spark.sparkContext.defaultParallelism))
    progress = TaskProgress(spark)

    def seen(wave: Sequence[Assignment]) -> list[Written]:
        with progress.of(wave):
            return run(wave)

    pool = ThreadPoolExecutor(IN_FLIGHT + 1, thread_name_prefix="waltz export wave")
    running: set[Future[list[Written]]] = set()
    looking = pool.submit(progress.ended)  # not in this thread: signals come here, and would meet a question half asked
    try:
        while waves or running:
            while waves and len(running) < IN_FLIGHT:
                running.add(pool.submit(seen, waves.popleft()))
            done, running = wait(running, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
            if looking.done():
                watch(looking.result())
                looking = pool.submit(progress.ended)
            for future in done:
                yield from future.result()
    finally:
        if running:
            with suppress(*_gone()):  # a Java that is gone has no jobs
                spark.sparkContext.cancelAllJobs()
        pool.shutdown(wait=True, cancel_futures=True)


def _gone() -> tuple[type[Exception], ...]:
    """What calls to a Java raise that is gone."""
    from py4j.protocol import Py4JError

    return Py4JError, OSError


def _waves(assignments: Sequence[Assignment], slots: int) -> list[Sequence[Assignment]]:
    """Small enough that finished work is published soon, large enough that planning them costs little."""
    size = max(4, 2 * slots)
    return [assignments[at : at + size] for at in range(0, len(assignments), size)]


@dataclass
class _Wave:
    numbers: Sequence[int]
    """Of its tasks, in the order in which Spark has them."""
    ended: set[int] = field(default_factory=set)
    """Places in that order."""


class TaskProgress:
    """Which tasks of a wave have ended, before the wave tells what they wrote, which may be minutes later. Polled from
    Spark for the progress display alone: a poll that fails ends no run. Waves have threads of their own, and so has the
    poll."""

    def __init__(self, spark: Any) -> None:
        self._context = spark.sparkContext
        self._waves: dict[str, _Wave] = {}

    @contextmanager
    def of(self, assignments: Sequence[Assignment]) -> Iterator[None]:
        """Entered by the thread of the wave."""
        name = f"waltz wave {next(_NAMES)}"
        self._context.setJobGroup(name, "waltz spark-export")
        self._waves[name] = _Wave([given.number for given in assignments])
        try:
            yield
        finally:
            del self._waves[name]

    def ended(self) -> list[int]:
        """The tasks that have ended since the last poll."""
        found: list[int] = []
        with suppress(*_gone()):  # it is about to end; the thread of the wave is told why
            for name, wave in list(self._waves.items()):
                found += self._news(name, wave)
        return found

    def _news(self, name: str, wave: _Wave) -> list[int]:
        tracker = self._context.statusTracker()
        found: list[int] = []
        for job in tracker.getJobIdsForGroup(name):
            known = tracker.getJobInfo(job)
            for stage in known.stageIds if known else ():
                told = tracker.getStageInfo(stage)
                if told is None or told.numCompletedTasks <= len(wave.ended):
                    continue
                news = self._succeeded(stage, told.currentAttemptId, len(wave.numbers)) - wave.ended
                wave.ended |= news
                found += [wave.numbers[place] for place in sorted(news) if place < len(wave.numbers)]
        return found

    def _succeeded(self, stage: int, attempt: int, tasks: int) -> set[int]:
        store = self._context._jsc.sc().statusStore()
        listed = store.taskList(stage, attempt, _ATTEMPTS_MAX * tasks)
        each = (listed.apply(place) for place in range(listed.size()))
        return {task.partitionId() for task in each if task.status() == "SUCCESS"}
