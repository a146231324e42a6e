"""Whether an export is what its manifest says, from its files alone, and whether it is the log.

A file is right when it has its size and its hash, and when the records that its rows describe have the checksum that the
log's records had: that is computed anew, byte for byte, so a file that was forged with its hash is found, too. Where SQL
left out columns or records, there is only the number of rows to compare. Against a log, the log's records are read and
their checksums compared, which does not need the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from waltz_spark.exporting.archive import NotAsWritten, check_bytes, form_in, proven
from waltz_spark.exporting.destination import READ_BYTES, Destination
from waltz_spark.exporting.form import KINDS, Form, row_count
from waltz_spark.exporting.manifest import HIDDEN, Manifest, Piece
from waltz_spark.log.encode import Beside
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.log.plan import Part, Split, runs
from waltzd.errors import WaltzError
from waltzd.format.checksum import crc32

_OURS = re.compile(r"partition-\d+-\d{19}-\d{19}\..+")


@dataclass(frozen=True, kw_only=True)
class Finding:
    path: str
    """Empty where it is not about a file."""
    partition: int
    span: Span
    detail: str


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The verdict on one file, or on one stretch of a log."""

    piece: Piece
    finding: Finding | None


def check_files(destination: Destination, manifest: Manifest) -> Iterator[Checked]:
    """Every file, several at a time, in the order in which they are done."""
    form, has_records = form_in(manifest), manifest.shape.query.keeps_records
    yield from _each(manifest.pieces, lambda piece: _wrong_with(destination, form, piece, has_records=has_records))


def check_log(origin: Origin, catalog: Catalog, manifest: Manifest) -> Iterator[Checked]:
    """Every stretch of ids that is in a file, as the log has it."""
    yield from _each(manifest.pieces, lambda piece: _differs(origin, catalog, piece))


def strays(destination: Destination, manifest: Manifest) -> list[str]:
    """Files that look like ours and are in no manifest: readers of the directory would read them, too."""
    known = {piece.path for piece in manifest.pieces}
    suffixes = tuple(kind.suffix for kind in KINDS.values())
    return [
        name
        for name in destination.names()
        if name not in known and name != HIDDEN and _OURS.fullmatch(name) and any(suffix in name for suffix in suffixes)
    ]


def check_table(destination: Destination, manifest: Manifest) -> list[Finding]:
    """Whether the table beside the files, where there is one, has exactly these files."""
    if manifest.shape.format != "delta":
        return []
    from waltz_spark.exporting.delta import differences

    known = {piece.path: piece for piece in manifest.pieces}
    return [
        Finding(path=path, partition=known[path].partition, span=known[path].span, detail=detail)
        if path in known
        else Finding(path=path, partition=-1, span=Span(0, -1), detail=detail)
        for path, detail in differences(destination, manifest)
    ]


def _each(pieces: Sequence[Piece], wrong: Callable[[Piece], str]) -> Iterator[Checked]:
    def check(piece: Piece) -> Checked:
        try:
            detail = wrong(piece)
        except WaltzError as error:
            detail = error.message
        found = Finding(path=piece.path, partition=piece.partition, span=piece.span, detail=detail) if detail else None
        return Checked(piece=piece, finding=found)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            yield from pool.map(check, pieces)
        finally:
            pool.shutdown(cancel_futures=True)


def _wrong_with(destination: Destination, form: Form, piece: Piece, *, has_records: bool) -> str:
    """Empty when nothing is wrong."""
    try:
        check_bytes(destination, piece)
        if has_records:
            for _ in proven(destination, form, piece):
                pass  # it proves them by reading
            return ""
    except NotAsWritten as error:
        return str(error)
    with destination.open(piece.path) as file:
        found = row_count(form, file, piece.path)
    return "" if found == piece.row_count else f"it has {found} rows, and {piece.row_count} were written"


def _differs(origin: Origin, catalog: Catalog, piece: Piece) -> str:
    there = catalog.spans.get(piece.partition)
    if there is None:
        return f"the log has no partition {piece.partition}"
    if not there.first <= piece.span.first <= piece.span.last <= there.last:
        return f"the log has ids {there.first} to {there.last} of this partition, and not all of these"
    parts = tuple(
        Part(extent, extent.span.cut(piece.span))
        for extent in catalog.extents
        if extent.partition == piece.partition and extent.span.cut(piece.span).count
    )
    crc = data_bytes = 0
    beside = Beside()
    for run in runs(origin, Split(parts), batch_bytes=READ_BYTES):
        crc, data_bytes = crc32(run.data, crc), data_bytes + len(run.data)
        beside.add(run)
    if (crc, data_bytes) != (piece.crc, piece.data_bytes):
        return "the log holds other records under these ids: their checksum is another"
    if (beside.crc, beside.times) != (piece.beside, piece.times):
        return "the log says other times, groups or locks of these records"
    return ""
