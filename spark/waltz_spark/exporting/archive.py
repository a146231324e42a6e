"""An export read again: the records of its files, as the log had them, byte for byte; and an export as an origin.

What is there is what the newest manifest says. Files keep columns only, so whatever the format, records are made of them
anew, and are believed when they have the checksum that the log's records had. Where only a part of a file is read, that is
not known, and the file's hash is compared first. An export may grow meanwhile: files never change.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from waltz_spark.exporting.destination import Destination, destination_of, measured, the_manifest
from waltz_spark.exporting.form import Form, read_batches
from waltz_spark.exporting.manifest import Manifest, Piece, check_whole, piece_json, piece_of
from waltz_spark.log.decode import BATCH
from waltz_spark.log.encode import Beside, beside, encode, resealed
from waltz_spark.log.groups import Grouped
from waltz_spark.log.origin import BATCH_BYTES, Catalog, Extent, Span
from waltzd.errors import ArchiveUnfit, ExportDamaged, NoSuchPartition, OtherTimeline, WaltzError
from waltzd.format.checksum import I64, crc32
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

_OTHERS = "they are not those that were read from the log"


class NotAsWritten(Exception):
    """What is wrong with a file, in words that go behind its name."""


def form_in(manifest: Manifest) -> Form:
    return Form(format=manifest.shape.format, compression=manifest.shape.compression)


def check_bytes(destination: Destination, piece: Piece) -> None:
    size = destination.size(piece.path)
    if size is None:
        raise NotAsWritten("it is missing")
    if size != piece.size:
        raise NotAsWritten(f"it has {size} bytes; {piece.size} were written")
    if measured(destination, piece.path)[1] != piece.sha256:
        raise NotAsWritten("its hash is not the one in the manifest")


@dataclass(frozen=True, eq=False)
class Rows:
    """Of a file: records, and what stood beside them."""

    run: Run
    groups: I64 | None
    fronts: pa.Array | None
    """Of a lossless export: what stands in front of the records of a batch, where its first one is; null elsewhere."""


def proven(destination: Destination, form: Form, piece: Piece, span: Span | None = None) -> Iterator[Rows]:
    """The records of a file, in order; NotAsWritten unless they are those that the manifest says. With a `span`, at least
    those, and then the checksum of all is not known."""
    span = span or piece.span
    crc, data_bytes, next_id, others = 0, 0, piece.span.first, Beside()
    with destination.open(piece.path) as source:
        for batch in read_batches(form, source, f"{destination.place}/{piece.path}"):
            if span != piece.span and next_id > span.last:
                return
            if next_id + batch.num_rows <= span.first or batch.num_rows == 0:
                next_id += batch.num_rows
                continue
            run = resealed(encode(batch))
            if run.first_id != next_id or batch.column("partition")[0].as_py() != piece.partition:
                raise NotAsWritten(f"it has id {run.first_id} where {next_id} has to be, or rows of another partition")
            crc, data_bytes, next_id = crc32(run.data, crc), data_bytes + len(run.data), run.last_id + 1
            if run.last_id > piece.span.last or data_bytes > piece.data_bytes:  # and not one byte of it is given
                raise NotAsWritten(f"its records go on behind id {piece.span.last} or are longer: {_OTHERS}")
            run, groups = beside(run, batch, with_locks=True)
            others.add(run)
            yield Rows(run, groups, batch.column(BATCH) if BATCH in batch.schema.names else None)
    if next_id <= span.last:
        raise NotAsWritten(f"its records end before id {next_id}")
    if span == piece.span and (crc, data_bytes) != (piece.crc, piece.data_bytes):
        raise NotAsWritten(f"its records have the checksum {crc:08x} and should have {piece.crc:08x}: {_OTHERS}")
    if span == piece.span and (others.crc, others.times) != (piece.beside, piece.times):
        raise NotAsWritten("its times, groups or locks are not those that were read from the log")


def records(
    destination: Destination, form: Form, piece: Piece, span: Span | None = None, *, not_done: str, is_hashed: bool = False
) -> Iterator[Rows]:
    """What `proven` gives; an error names the file and its ids. `is_hashed`: its bytes are compared first."""
    place, whole = f"{destination.place}/{piece.path}", piece.span
    try:
        if is_hashed:
            check_bytes(destination, piece)
        yield from proven(destination, form, piece, span)
    except (NotAsWritten, ExportDamaged, ArchiveUnfit) as error:
        what = error.message.removeprefix(place).strip() if isinstance(error, WaltzError) else str(error)
        raise ExportDamaged(
            f"{place}, ids {whole.first} to {whole.last} of partition {piece.partition}: {what}",
            not_done=not_done, partition=piece.partition, first_id=whole.first, last_id=whole.last,
        ) from error  # fmt: skip


# -- as an origin ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOrigin:
    output: str
    """A path, or a URI."""

    def describe(self) -> str:
        return f"the export {self.output}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        manifest = the_manifest(destination_of(self.output))
        check_whole(manifest, self.output, not_done="nothing was read")
        there = manifest.partitions
        wanted = sorted(there) if partitions is None else sorted(set(partitions))
        missing = [str(number) for number in wanted if number not in there]
        if missing:
            raise NoSuchPartition(
                f"{self.describe()} has nothing of partition {', '.join(missing)}", not_done="nothing was read"
            )
        return Catalog(
            key=manifest.cluster,
            spans={number: there[number].span for number in wanted},
            extents=tuple(
                Extent(partition=piece.partition, span=piece.span, bytes=piece.data_bytes, place=_place(manifest, piece))
                for piece in manifest.pieces
                if piece.partition in wanted
            ),
            timelines={number: manifest.timelines[number] for number in wanted if number in manifest.timelines},
        )

    def check(self, partition: int, position: Position) -> None:
        """An export does not know where its timeline forked, so no position of another one is taken."""
        current = the_manifest(destination_of(self.output)).timelines.get(partition, FIRST)
        raise OtherTimeline(
            f"the reader stands at id {position} of partition {partition} on timeline {position.timeline}; "
            f"{self.describe()} ends on timeline {current}, and does not know where that one forked",
            partition=partition, position=position, timeline=current,
        )  # fmt: skip

    def header(self, extent: Extent) -> FileHeader | None:
        """Of the segment that the records lay in, where the export kept it."""
        segment = _file_at(extent.place)[1].segment
        return FileHeader.decode(segment.header, self.output) if segment else None

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """By the times of each file, and the rows of one."""
        for extent in catalog.extents:
            last = _file_at(extent.place)[1].times if extent.partition == partition else None
            if last is not None and last[1] >= time:
                for run in self.read(extent, extent.span, batch_bytes=BATCH_BYTES):
                    if run.times is not None and run.times[-1] >= time:
                        return run.first_id + int(np.searchsorted(run.times, time))
        return catalog.spans[partition].last + 1

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        for rows in self.read_grouped(extent, span, batch_bytes=batch_bytes, with_locks=with_locks):
            yield rows.run

    def read_grouped(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool) -> Iterator[Grouped]:
        if span.count == 0:
            return
        form, piece = _file_at(extent.place)
        not_done = "no row of this file was returned as sound"
        found = records(destination_of(self.output), form, piece, span, not_done=not_done, is_hashed=True)
        for rows in found:
            run = rows.run if with_locks else replace(rows.run, locks=None)
            wanted = Span(run.first_id, run.last_id).cut(span)
            for start, stop in _pieces(run, wanted, batch_bytes):
                yield Grouped(run.part(start, stop), None if rows.groups is None else rows.groups[start:stop])


def _place(manifest: Manifest, piece: Piece) -> str:
    """What a task has to know of one file; it travels with the extent, because manifests can be large."""
    shape = manifest.shape
    return json.dumps({"format": shape.format, "compression": shape.compression, "file": piece_json(piece)})


def _file_at(place: str) -> tuple[Form, Piece]:
    found = json.loads(place)
    return Form(format=found["format"], compression=found["compression"]), piece_of(found["file"])


def _pieces(run: Run, wanted: Span, bytes_max: int) -> Iterator[tuple[int, int]]:
    """The numbers of its records, of each piece the first and the one behind the last."""
    start, end = wanted.first - run.first_id, wanted.last - run.first_id + 1
    while start < end:
        stop = int(np.searchsorted(run.bounds, run.bounds[start] + bytes_max, "right")) - 1
        stop = min(end, max(stop, start + 1))
        yield start, stop
        start = stop
