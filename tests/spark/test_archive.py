"""An export read again: records that are, byte for byte, those of the log that was exported."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from waltz_spark.exporting.archive import ExportOrigin
from waltz_spark.exporting.destination import destination_of
from waltz_spark.exporting.form import form_of
from waltz_spark.exporting.manifest import Manifest, Piece, Shape, encode, manifest_path
from waltz_spark.exporting.opening import open_origin
from waltz_spark.exporting.tasks import Job, assignments_of, write
from waltz_spark.exporting.verification import check_files, check_log
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.origin import Catalog, Span
from waltz_spark.log.plan import Sizing, plan, runs
from waltz_spark.table.columns import columns_of
from waltz_spark.table.reading import Reading, tasks

from tests.spark.batches import Log, microseconds, mixed_log
from tests.spark.exporting import findings
from waltzd.errors import BadArgument, ExportDamaged, NoSuchName, NoSuchPartition
from waltzd.format.record import join_runs

BATCH = 4 << 20


def export(origin: DirectoryOrigin, output: Path, *, format_: str = "parquet", is_lossless: bool = False) -> Manifest:
    """As `waltzctl spark-export` does it, with the tasks one after the other."""
    catalog, destination, form = origin.catalog(), destination_of(str(output)), form_of(format_, None)
    job = Job(origin=origin, destination=destination, cluster=catalog.key, form=form, is_lossless=is_lossless)
    pieces: list[Piece] = []
    splits = plan(catalog, catalog.spans, Sizing(records_max=150))
    for given in assignments_of(splits, is_lossless=is_lossless):
        written = write(job, given)
        assert written.piece is not None, written.error
        assert destination.move_new(written.place, written.piece.path)
        pieces.append(written.piece)
    shape = Shape(format=form.format, compression=form.compression, lossless=is_lossless, decoder="",
                  decoder_fingerprint="", schema=(("txid", "int64"),))  # fmt: skip
    empty = Manifest(number=0, export=UUID(int=3), cluster=catalog.key, source="", written="", shape=shape)
    manifest = empty.extended(pieces, source="here", written="2026-01-01T00:00:00Z")
    assert destination.put_new(manifest_path(1), encode(manifest))
    return manifest


@pytest.fixture
def log(original: Path) -> DirectoryOrigin:
    return DirectoryOrigin(storages=(str(original / "storage1"),))


def content(origin: ExportOrigin | DirectoryOrigin, catalog: Catalog, partition: int, span: Span) -> bytes:
    splits = plan(catalog, {partition: span})
    found = [run for split in splits for run in runs(origin, split, batch_bytes=BATCH)]
    return bytes(join_runs(found).data) if found else b""


@pytest.mark.parametrize("format_", ["parquet", "orc", "json", "csv"])
def test_the_records_are_those_of_the_log(log: DirectoryOrigin, tmp_path: Path, format_: str) -> None:
    export(log, tmp_path / "out", format_=format_)
    archive = pickle.loads(pickle.dumps(open_origin({"path": str(tmp_path / "out")})))  # noqa: S301
    assert isinstance(archive, ExportOrigin)
    before, after = log.catalog(), archive.catalog()
    assert after.key == before.key
    assert after.spans == {number: span for number, span in before.spans.items() if span.count}
    for number, span in after.spans.items():
        assert content(archive, after, number, span) == content(log, before, number, span)
    for first, last in ((0, 0), (149, 150), (7, 301), (389, 389)):
        span = Span(first, last)
        assert content(archive, after, 0, span) == content(log, before, 0, span)


@pytest.mark.parametrize("format_", ["parquet", "orc", "json", "csv"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_log_of_both_formats_is_the_same_log_out_of_an_export(tmp_path: Path, format_: str, seed: int) -> None:
    """Times, locks and groups, too, wherever files were cut; and the same in parquet that is lossless."""
    log = mixed_log(tmp_path / "storage" / "0", seed)
    origin = DirectoryOrigin(storages=(str(tmp_path / "storage"),), allows_uncommitted=True)
    manifest = export(origin, tmp_path / "out", format_=format_, is_lossless=format_ == "parquet")
    archive = ExportOrigin(output=str(tmp_path / "out"))
    assert findings(check_files(destination_of(str(tmp_path / "out")), manifest)) == []
    assert findings(check_log(origin, origin.catalog(), manifest)) == []
    catalog = archive.catalog()
    reading = Reading(archive, columns_of(log.rows[0]))
    given = tasks(archive, catalog, {0: Span(3, len(log.rows) - 2)}, Sizing())
    assert [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()] == log.rows[3:-1]
    times = [-1 if row["time"] is None else microseconds(row["time"]) for row in log.rows]
    for time in {0, *(time for time in times[::5] if time >= 0), times[-1] + 1}:
        expected = next((number for number, when in enumerate(times) if when >= time), len(times))
        assert archive.first_at(catalog, 0, time) == expected


def test_what_stands_beside_the_records_is_proven_too(tmp_path: Path) -> None:
    log = mixed_log(tmp_path / "storage" / "0", 4, plain=False)
    origin = DirectoryOrigin(storages=(str(tmp_path / "storage"),), allows_uncommitted=True)
    manifest = export(origin, tmp_path / "out")
    other = Log(directory=tmp_path / "other" / "0", time=log.time)
    for batch in log.batches:  # the same records at other times
        other.put(batch.run, batch.locks)
    foreign = DirectoryOrigin(storages=(str(tmp_path / "other"),), allows_uncommitted=True)
    assert findings(check_log(origin, origin.catalog(), manifest)) == []
    said = findings(check_log(foreign, foreign.catalog(), manifest))
    assert len(said) == len(manifest.pieces)
    assert set(said) == {"the log says other times, groups or locks of these records"}


def test_runs_are_about_so_large(log: DirectoryOrigin, tmp_path: Path) -> None:
    export(log, tmp_path / "out")
    archive = ExportOrigin(output=str(tmp_path / "out"))
    extent = archive.catalog([0]).extents[0]
    found = list(archive.read(extent, extent.span, batch_bytes=1000))
    assert len(found) > 5
    assert all(len(run.data) <= 1000 or len(run) == 1 for run in found)
    assert [run.first_id for run in found[1:]] == [run.last_id + 1 for run in found[:-1]]
    assert list(archive.read(extent, Span(5, 4), batch_bytes=1000)) == []


def test_headers_of_segments_are_kept_where_they_were(log: DirectoryOrigin, tmp_path: Path) -> None:
    export(log, tmp_path / "plain")
    export(log, tmp_path / "lossless", is_lossless=True)
    plain, lossless = (ExportOrigin(output=str(tmp_path / name)) for name in ("plain", "lossless"))
    assert plain.header(plain.catalog().extents[0]) is None
    before, after = log.catalog([1]).extents[1], lossless.catalog([1]).extents[1]
    assert lossless.header(after) == log.header(before)


def test_a_file_that_is_not_what_was_written_gives_no_row(log: DirectoryOrigin, tmp_path: Path) -> None:
    manifest = export(log, tmp_path / "out")
    archive = ExportOrigin(output=str(tmp_path / "out"))
    extent, piece = archive.catalog([0]).extents[0], manifest.pieces[0]
    path = tmp_path / "out" / piece.path
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    with pytest.raises(ExportDamaged, match=r"ids 0 to .* of partition 0: its hash is not the one in the manifest"):
        next(archive.read(extent, Span(3, 3), batch_bytes=BATCH))
    path.write_bytes(whole[:-1])
    with pytest.raises(ExportDamaged, match=f"it has {len(whole) - 1} bytes; {len(whole)} were written"):
        next(archive.read(extent, extent.span, batch_bytes=BATCH))
    path.unlink()
    with pytest.raises(ExportDamaged, match="it is missing"):
        next(archive.read(extent, extent.span, batch_bytes=BATCH))


def test_rows_that_are_not_the_log_s_are_noticed(log: DirectoryOrigin, tmp_path: Path) -> None:
    """The file is what was written, and what was written was wrong."""
    manifest = export(log, tmp_path / "out")
    lying = replace(manifest, number=2, pieces=tuple(replace(piece, crc=piece.crc ^ 1) for piece in manifest.pieces))
    assert destination_of(str(tmp_path / "out")).put_new(manifest_path(2), encode(lying))
    archive = ExportOrigin(output=str(tmp_path / "out"))
    extent = archive.catalog([0]).extents[0]
    with pytest.raises(ExportDamaged, match="its records have the checksum"):
        list(archive.read(extent, extent.span, batch_bytes=BATCH))


def test_what_is_not_there(log: DirectoryOrigin, tmp_path: Path) -> None:
    export(log, tmp_path / "out")
    with pytest.raises(NoSuchPartition, match="has nothing of partition 3, 8"):
        ExportOrigin(output=str(tmp_path / "out")).catalog([0, 3, 8])
    (tmp_path / "begun" / "_waltz").mkdir(parents=True)
    with pytest.raises(NoSuchName, match="there is no export in"):
        open_origin({"path": str(tmp_path / "begun")}).catalog()
    with pytest.raises(BadArgument, match="an export holds only what is committed"):
        open_origin({"path": str(tmp_path / "out"), "allowUncommitted": "true"})
