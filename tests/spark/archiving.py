"""Archives for tests: the sealed segments of directories, as storages upload them, and origins that read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from waltz_spark.log import archive_segments
from waltz_spark.log.archive_segments import ArchiveSegments, is_piece
from waltz_spark.log.arrow import read_grouped
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import JoinedOrigin, LiveOrigin
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.table.columns import record_batch

from tests.spark.batches import Log
from waltzd.archive import manifest
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.local import LocalStore
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.format.layout import FileHeader, index_entries, index_name, segment_ids, segment_name
from waltzd.protocol.descriptions import Archived

ARCHIVE = UUID(int=88)


def archived(directories: Iterable[Path], store: Store, *, open_segments: int = 1) -> Store:
    """Of each partition's directory all segments but the last ones, which are not sealed."""
    for directory in directories:
        known, first_ids = Archived(), segment_ids(path.name for path in directory.iterdir())
        for first_id in first_ids[: len(first_ids) - open_segments]:
            data, index = ((directory / name(first_id)).read_bytes() for name in (segment_name, index_name))
            header, last_id = FileHeader.decode(data, str(directory)), first_id + index_entries(len(index)) - 1
            piece = segment_entry(data, index, expected=header, last_id=last_id, path=str(directory))
            archive = PartitionArchive(store, label_in(store, header.key, lambda: ARCHIVE, None), header.partition)
            made = archive.add(known, piece, data + index)
            known = Archived(archive=made.archive, number=made.number, sha256=made.sha256, last_id=made.last)
    return store


def archive_of(directories: Iterable[Path], place: Path, *, open_segments: int = 1) -> Path:
    """In a directory."""
    place.mkdir()
    archived(directories, LocalStore(str(place)), open_segments=open_segments)
    return place


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks after a few segments, and windows that end anywhere."""
    monkeypatch.setattr(manifest, "FAN_OUT", 3)
    monkeypatch.setattr(archive_segments, "READ_BYTES", 1500)
    monkeypatch.setattr(archive_segments, "LOOK_BYTES", 200)
    monkeypatch.setattr(archive_segments, "REMEMBERED_SECONDS", 0.0)


def plain(log: Log) -> DirectoryOrigin:
    return DirectoryOrigin(storages=(str(log.directory.parent),), allows_uncommitted=True)


def joined(log: Log, archive: ArchiveSegments) -> JoinedOrigin:
    """Directories in place of the cluster: an origin like any other."""
    return JoinedOrigin(archive=archive, live=cast(LiveOrigin, plain(log)))


def only_archived(catalog: Catalog) -> Catalog:
    """The catalog without the segments that are not in the archive."""
    extents = [extent for extent in catalog.extents if is_piece(extent)]
    return replace(catalog, spans={0: Span(0, extents[-1].span.last)}, extents=tuple(extents))


def rows(origin: Origin, catalog: Catalog, span: Span, *, batch_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for extent in catalog.extents:
        part = extent.span.cut(span)
        if part.count:
            runs = read_grouped(origin, extent, part, batch_bytes=batch_bytes, with_locks=True)
            found += [row for run, groups in runs for row in record_batch(run, extent.partition, groups).to_pylist()]
    return found
