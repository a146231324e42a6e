"""Archives for tests: the sealed segments of directories, as storages upload them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

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
