"""What one task of an export does: some records in, one file out.

A task writes to a name that nobody looks at, and tells what it wrote; only the driver gives files their names. So a task
may run twice, be stopped anywhere, or live on after its driver: nobody will ever see what it left. An error of ours is an
answer, too, and not a failure that Spark would try again: its class and its parts come back as they were.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from waltz_spark.exporting.destination import Destination, Output
from waltz_spark.exporting.form import Form, open_writer
from waltz_spark.exporting.manifest import (
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
    Piece,
    SegmentHead,
    path_of,
)
from waltz_spark.exporting.pace import Pace, Walk, batch_bytes_of
from waltz_spark.log.decode import SCHEMA, record_batch
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.origin import Extent, Origin, Span
from waltz_spark.log.plan import Split, runs
from waltz_spark.payloads.payload import Decoder
from waltzd.errors import BadArgument, ExportDamaged, WaltzError, tree
from waltzd.format.checksum import crc32
from waltzd.format.layout import HEADER_BYTES, SEGMENT_SUFFIX, first_id_of, index_name
from waltzd.storage.offline.ledger import read_whole


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of a run have in common; goes with them to the executors."""

    run: str
    origin: Origin
    destination: Destination
    cluster: str
    form: Form
    is_lossless: bool
    decoder: Decoder | None
    pace: Pace | None


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
    """Names and types in the file, where nobody could tell before Spark was asked."""


def schema_of(decoder: Decoder | None) -> pa.Schema:
    return SCHEMA if decoder is None else decoder.schema(SCHEMA)


def segment_head(origin: Origin, extent: Extent) -> SegmentHead:
    """What a lossless export keeps of the segment that an extent lies in."""
    if not isinstance(origin, DirectoryOrigin) or not extent.place.endswith(SEGMENT_SUFFIX):
        raise BadArgument(
            f"--lossless keeps segments as they are, and {origin.describe()} has none that are its own: replicas cut the "
            "same records in different places",
            not_done="nothing was written",
            next_step="export from the directory of a storage with --source, or leave --lossless out: all columns of all "
            "records are kept without it, too",
        )
    disk, directory = origin.disk, extent.place.rpartition("/")[0]
    first = first_id_of(extent.place.rpartition("/")[2])
    assert first is not None
    index = f"{directory}/{index_name(first)}"
    index_header = read_whole(disk, index, HEADER_BYTES) if disk.exists(index) else b""
    return SegmentHead(
        first=first,
        header=read_whole(disk, extent.place, HEADER_BYTES),
        index_header=index_header if len(index_header) == HEADER_BYTES else b"",
    )


def write(job: Job, given: Assignment) -> Written:
    """The whole task. Errors of ours are in what it returns."""
    started = time.time()
    place = f"{UNFINISHED}/{job.run}/{uuid.uuid4().hex}"
    try:
        piece = _written(job, given, place)
    except WaltzError as error:
        return Written(number=given.number, error=error, started=started, ended=time.time())
    return Written(number=given.number, piece=piece, place=place, started=started, ended=time.time())


def _written(job: Job, given: Assignment, place: str) -> Piece:
    head = segment_head(job.origin, given.split.parts[0].extent) if job.is_lossless else None
    with job.destination.create(place, in_small_steps=job.pace is not None) as file:
        sink = _Sink(file)
        try:
            crc, data_bytes = _fill(job, given, head, sink)
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
        data_bytes=data_bytes,
        crc=crc,
        size=sink.size,
        sha256=sink.digest(),
        segment=head,
    )


def _fill(job: Job, given: Assignment, head: SegmentHead | None, sink: _Sink) -> tuple[int, int]:
    """The checksum of the records, and how many bytes they are."""
    decoder, walk = job.decoder, Walk(job.pace)
    writer = open_writer(job.form, sink, schema_of(decoder), _metadata(job, given, head))
    crc = data_bytes = 0
    next_id = given.span.first
    for run in runs(job.origin, given.split, batch_bytes=batch_bytes_of(job.pace)):
        walk.wait(len(run.data))
        assert run.first_id == next_id, f"id {run.first_id} came when {next_id} was to come"
        crc, data_bytes, next_id = crc32(run.data, crc), data_bytes + len(run.data), run.last_id + 1
        batch = record_batch(run, given.partition)
        writer.write(batch if decoder is None else decoder.decode(batch))
    assert next_id == given.span.last + 1, f"{given.span} of partition {given.partition} ended before id {next_id}"
    writer.close({META_CRC: f"{crc:08x}"})
    return crc, data_bytes


def _metadata(job: Job, given: Assignment, head: SegmentHead | None) -> Mapping[str, str]:
    found = {
        META_CLUSTER: job.cluster,
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
    """A file that is hashed while it is written: it need not be read again. Whoever opened the file closes it."""

    def __init__(self, file: Output) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0
        self._is_abandoned = False

    def abandon(self) -> None:
        """Writers of PyArrow write their ends when they are thrown away, and would complain to nobody that they cannot."""
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
