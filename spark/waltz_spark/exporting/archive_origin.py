"""An export as an origin: the records that its files describe, as the log had them, byte for byte.

What is there is what the newest manifest says. Before a file is believed, its hash has to be the one in the manifest; where
all of it is read, the checksum of its records has to be that of the log's records, too. The export may grow meanwhile: its
files never change. Only columns are kept in files, so whatever the format, records are made of them anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from waltz_spark.exporting.destination import Destination, destination_of, measured
from waltz_spark.exporting.export import newest_manifest
from waltz_spark.exporting.form import Form, read_batches
from waltz_spark.exporting.manifest import Manifest, Piece, SegmentHead, check_whole
from waltz_spark.log.encode import encode, resealed
from waltz_spark.log.origin import Catalog, Extent, Span
from waltzd.errors import ExportDamaged, NoSuchName, NoSuchPartition
from waltzd.format.checksum import crc32
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run


@dataclass(frozen=True)
class _File:
    """What a task has to know of one file; it travels with the extent, because manifests can be large."""

    path: str
    size: int
    sha256: str
    crc: int
    format: str
    compression: str
    segment_header: str
    """In hexadecimal digits; empty where the export is not lossless."""

    @staticmethod
    def of(manifest: Manifest, piece: Piece) -> _File:
        shape, segment = manifest.shape, piece.segment
        header = segment.header.hex() if isinstance(segment, SegmentHead) else ""
        return _File(piece.path, piece.size, piece.sha256, piece.crc, shape.format, shape.compression, header)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> _File:
        return _File(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class ArchiveOrigin:
    output: str
    """A path, or a URI."""

    def describe(self) -> str:
        return f"the export {self.output}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        manifest = newest_manifest(destination_of(self.output))
        if manifest is None:
            raise NoSuchName(
                f"there is no export in {self.output}",
                not_done="nothing was read",
                next_step="give the output of `waltzctl spark-export`; one that was killed early has nothing yet",
            )
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
                Extent(
                    partition=piece.partition,
                    span=piece.span,
                    bytes=piece.data_bytes,
                    place=_File.of(manifest, piece).encode(),
                )
                for piece in manifest.pieces
                if piece.partition in wanted
            ),
        )

    def header(self, extent: Extent) -> FileHeader | None:
        """Of the segment that the records lay in, where the export kept it."""
        raw = bytes.fromhex(_File.decode(extent.place).segment_header)
        return FileHeader.decode(raw, self.output) if raw else None

    def read(self, extent: Extent, span: Span, *, batch_bytes: int) -> Iterator[Run]:
        if span.count == 0:
            return
        destination, file = destination_of(self.output), _File.decode(extent.place)
        place = f"{destination.place}/{file.path}"
        _prove(destination, file, extent, place)
        next_id, crc = extent.span.first, 0
        with destination.open(file.path) as source:
            for batch in read_batches(Form(format=file.format, compression=file.compression), source, place):
                if next_id > span.last:
                    return
                if next_id + batch.num_rows <= span.first or batch.num_rows == 0:
                    next_id += batch.num_rows
                    continue
                run = resealed(encode(batch))
                if run.first_id != next_id or batch.column("partition")[0].as_py() != extent.partition:
                    raise _damaged(place, extent, f"it has id {run.first_id} where {next_id} has to be")
                crc, next_id = crc32(run.data, crc), run.last_id + 1
                wanted = Span(run.first_id, run.last_id).cut(span)
                yield from _pieces(run.part(wanted.first - run.first_id, wanted.last - run.first_id + 1), batch_bytes)
        if next_id <= span.last:
            raise _damaged(place, extent, f"its rows end before id {next_id}")
        if span == extent.span and crc != file.crc:
            raise _damaged(place, extent, f"its records have the checksum {crc:08x} and should have {file.crc:08x}")


def _prove(destination: Destination, file: _File, extent: Extent, place: str) -> None:
    size = destination.size(file.path)
    if size != file.size:
        raise _damaged(
            place, extent, "it is missing" if size is None else f"it has {size} bytes and should have {file.size}"
        )
    if measured(destination, file.path)[1] != file.sha256:
        raise _damaged(place, extent, "its hash is not the one in the manifest")


def _damaged(place: str, extent: Extent, what: str) -> ExportDamaged:
    first, last = extent.span.first, extent.span.last
    return ExportDamaged(
        f"{place}, ids {first} to {last} of partition {extent.partition}: {what}",
        not_done="no row of this file was returned as sound",
        partition=extent.partition, first_id=first, last_id=last,
    )  # fmt: skip


def _pieces(run: Run, bytes_max: int) -> Iterator[Run]:
    """About so large."""
    start = 0
    while start < len(run):
        stop = int(np.searchsorted(run.bounds, run.bounds[start] + bytes_max, "right")) - 1
        stop = max(stop, start + 1)
        yield run.part(start, stop)
        start = stop
