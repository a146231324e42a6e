"""Verification of an export against its manifest, and against the log.

A file is valid if it has its size and its hash, and if the records of its rows have the checksum that the records of the
log had: the records are encoded again, byte for byte, so a file that was forged with its hash is detected. With a log, its
records are read and their checksums compared, without reading the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from waltz_spark.export.delta import differences
from waltz_spark.export.destination import READ_BYTES, Destination, measured
from waltz_spark.export.form import read_batches
from waltz_spark.export.manifest import Manifest, Piece
from waltz_spark.log.arrow import Proof, beside, encode, resealed
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.log.plan import Split, parts_of, runs
from waltzd.errors import WaltzError

_OTHERS = "they are not those that were read from the log"


@dataclass(frozen=True, kw_only=True)
class Finding:
    path: str
    """Path of the file; empty if the finding is not about a file."""
    partition: int
    span: Span
    detail: str


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The verdict on one file, or on the ids of one file in a log."""

    piece: Piece
    finding: Finding | None


def check_files(destination: Destination, manifest: Manifest) -> Iterator[Checked]:
    """Check every file, several at a time; yield them in the order of the manifest."""
    yield from _each(manifest.pieces, lambda piece: _wrong_with(destination, piece))


def check_log(origin: Origin, catalog: Catalog, manifest: Manifest) -> Iterator[Checked]:
    """Compare the ids of every file with the log."""
    yield from _each(manifest.pieces, lambda piece: _differs(origin, catalog, piece))


def check_table(destination: Destination, manifest: Manifest) -> list[Finding]:
    """Return the differences between the files and the Delta table; empty without a table."""
    if manifest.shape.format != "delta":
        return []
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


def _wrong_with(destination: Destination, piece: Piece) -> str:
    """Check a file; return an error, or an empty text."""
    size = destination.size(piece.path)
    if size is None:
        return "it is missing"
    if size != piece.size:
        return f"it has {size} bytes; {piece.size} were written"
    if measured(destination, piece.path)[1] != piece.sha256:
        return "its hash is not the one in the manifest"
    return _wrong_rows(destination, piece)


def _wrong_rows(destination: Destination, piece: Piece) -> str:
    """Check the records of the rows of a file; return an error, or an empty text."""
    next_id, proof = piece.span.first, Proof()
    with destination.open(piece.path) as source:
        for batch in read_batches(source, f"{destination.place}/{piece.path}"):
            if batch.num_rows == 0:
                continue
            run = resealed(encode(batch))
            if run.first_id != next_id or batch.column("partition")[0].as_py() != piece.partition:
                return f"it has id {run.first_id} where {next_id} has to be, or rows of another partition"
            proof.add(beside(run, batch))
            next_id = run.last_id + 1
            if run.last_id > piece.span.last or proof.data_bytes > piece.data_bytes:
                return f"its records go on behind id {piece.span.last} or are longer: {_OTHERS}"
    if next_id <= piece.span.last:
        return f"its records end before id {next_id}"
    if (proof.crc, proof.data_bytes) != (piece.crc, piece.data_bytes):
        return f"its records have the checksum {proof.crc:08x} and should have {piece.crc:08x}: {_OTHERS}"
    if (proof.beside, proof.times) != (piece.beside, piece.times):
        return "its times, groups or locks are not those that were read from the log"
    return ""


def _differs(origin: Origin, catalog: Catalog, piece: Piece) -> str:
    there = catalog.spans.get(piece.partition)
    if there is None:
        return f"the log has no partition {piece.partition}"
    if not there.first <= piece.span.first <= piece.span.last <= there.last:
        return f"the log has ids {there.first} to {there.last} of this partition, and not all of these"
    parts = parts_of(piece.span, [extent for extent in catalog.extents if extent.partition == piece.partition])
    proof = Proof()
    for run in runs(origin, Split(tuple(parts)), batch_bytes=READ_BYTES):
        proof.add(run)
    if (proof.crc, proof.data_bytes) != (piece.crc, piece.data_bytes):
        return "the log holds other records under these ids: their checksum is another"
    if (proof.beside, proof.times) != (piece.beside, piece.times):
        return "the log says other times, groups or locks of these records"
    return ""
