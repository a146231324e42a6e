"""Read the sealed segments in the store of an archive, for the origin of the cluster that they belong to.

The newest manifests list the segments; each one is an extent. A task that reads an extent opens the store by itself: the
extent carries the address of the store, never a credential. Of a segment only the bytes that a read needs are fetched, some
MiB at a time. Records are proven by their checksums; a segment that was read from end to end is also compared with its
manifest. An error about a missing or damaged object names the object and the ids that it holds.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast
from uuid import UUID

from waltz_spark.log.origin import Catalog, Extent, Span
from waltz_spark.log.segment import Segment, SegmentPlace, first_at
from waltzd.archive.listing import all_pieces, label_of, newest_manifests
from waltzd.archive.location import open_archive
from waltzd.archive.manifest import Entry
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive
from waltzd.disk.seam import File
from waltzd.errors.operations import (
    ArchiveDamaged,
    HeaderDamaged,
    ObjectAbsent,
    PartitionDamaged,
    StoreRefused,
    StoreUnavailable,
)
from waltzd.format.checksum import crc32
from waltzd.format.layout import HEADER_BYTES, FileHeader
from waltzd.format.record import Run
from waltzd.protocol.timelines import FIRST, Lineage

READ_BYTES = 16 << 20
"""Bytes of one request of a read; they are in memory beside the rows that are made of them."""
REMEMBERED_SECONDS = 10.0
"""Seconds for which the list of segments is cached: a stream asks a hundred times a second, and listing costs money."""
INDEX_BYTES = 1 << 20
"""Bytes of one request for an index."""
LOOK_BYTES = 64 << 10
"""Bytes of one request of a search for a time."""
_NOT_READ = "nothing was read"
T = TypeVar("T")


@functools.lru_cache(maxsize=8)
def _opened(place: str, _process: int) -> Store:
    return open_archive(place)


class ObjectFile:
    """A range of an object as a read-only file, with a buffer and read-ahead."""

    def __init__(self, store: Store, name: str, start: int, size: int, ahead: int) -> None:
        self._store, self._name, self._start, self._size, self._ahead = store, name, start, size, ahead
        self._offset, self._kept = 0, b""

    @property
    def path(self) -> str:
        return f"{self._store.place}: {self._name}"

    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes; fewer only at the end."""
        size = max(0, min(size, self._size - offset))
        if not self._offset <= offset <= offset + size <= self._offset + len(self._kept):
            goes_on = self._offset <= offset <= self._offset + len(self._kept)
            kept = self._kept[offset - self._offset :] if goes_on else b""
            begin = offset + len(kept)
            wanted = min(max(size - len(kept), self._ahead), self._size - begin)
            self._offset, self._kept = offset, kept + self._store.get_range(self._name, self._start + begin, wanted)
        return self._kept[offset - self._offset : offset - self._offset + size]

    def read_into(self, offset: int, buffer: memoryview) -> int:
        found = self.read(offset, len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._kept = b""


@dataclass(frozen=True)
class Place:
    """A segment in the archive of a cluster with this key."""

    key: UUID
    piece: Entry


@dataclass(frozen=True)
class Contents:
    """The segments in an archive at one moment."""

    key: UUID
    """Key of the cluster."""
    pieces: dict[int, list[Entry]]
    """Archived segments of each partition, in the order of ids."""
    lineages: dict[int, Lineage] = field(default_factory=dict)
    """Timelines of these partitions; the segments belong to the last one."""

    @property
    def timelines(self) -> dict[int, UUID]:
        return {number: lineage.current for number, lineage in self.lineages.items() if lineage.current != FIRST}

    def extents(self, partition: int) -> Iterator[Extent]:
        for piece in self.pieces.get(partition, ()):
            size = piece.size - piece.index_bytes
            yield Extent(partition=partition, span=_span(piece), bytes=size, place=Place(self.key, piece))


class _Memory:
    """The contents that were found last, for each set of partitions: a stream asks a hundred times a second."""

    def __init__(self) -> None:
        self._found: dict[frozenset[int], tuple[float, Contents]] = {}

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        """Pickle as an empty memory."""
        return _Memory, ()

    def contents(self, partitions: frozenset[int], ask: Callable[[], Contents]) -> Contents:
        now = time.monotonic()
        since, found = self._found.get(partitions, (-REMEMBERED_SECONDS, None))
        if found is None or now - since >= REMEMBERED_SECONDS:
            found = ask()
            self._found[partitions] = now, found
        return found


@dataclass(frozen=True, kw_only=True)
class ArchiveSegments:
    place: str
    """Address of the store, in the form of the setting `archive` of storages."""
    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    def describe(self) -> str:
        return f"the archive {self.place}"

    def contents(self, partitions: Collection[int]) -> Contents:
        """Return what the archive has of these partitions, at most `REMEMBERED_SECONDS` old."""
        among = frozenset(partitions)
        return self._memory.contents(among, lambda: self._contents(among))

    def _contents(self, partitions: Collection[int]) -> Contents:
        with _asking(_NOT_READ):
            label = label_of(self._store, not_done=_NOT_READ)
            found = newest_manifests(self._store, label, partitions)
            return Contents(
                key=label.cluster,
                pieces={
                    number: all_pieces(PartitionArchive(self._store, label, number), manifest)
                    for number, manifest in found.items()
                },
                lineages={number: manifest.lineage for number, manifest in found.items()},
            )

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        piece = extent.place.piece
        crc = record_bytes = 0
        with self._named(extent, span.first), closing(self._segment(extent, READ_BYTES)) as segment:
            for run in segment.runs(span, batch_bytes, with_locks=with_locks):
                crc, record_bytes = crc32(run.data, crc), record_bytes + len(run.data)
                yield run
        if span == _span(piece) and (crc, record_bytes) != (piece.crc, piece.record_bytes):
            raise self._damage(extent, "it holds other records than its manifest states", span.first)

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        extents = [extent for extent in catalog.extents if extent.partition == partition]
        return first_at(extents, catalog.spans[partition].first, time, self._asked)

    def header(self, extent: Extent) -> FileHeader | None:
        """Return the header of a segment; None if it cannot be read, which the read of its records reports."""
        try:
            with self._named(extent, extent.span.first):
                file, _ = self._files(extent, LOOK_BYTES)
                return FileHeader.decode(file.read(0, HEADER_BYTES), file.path)
        except ArchiveDamaged:
            return None

    # -- pieces

    @property
    def _store(self) -> Store:
        return _opened(self.place, os.getpid())

    def _files(self, extent: Extent, ahead: int) -> tuple[File, File | None]:
        piece = extent.place.piece
        name, size = piece.name(extent.partition), piece.size - piece.index_bytes
        file = ObjectFile(self._store, name, 0, size, ahead)
        index = ObjectFile(self._store, name, size, piece.index_bytes, min(ahead, INDEX_BYTES))
        return cast(File, file), cast(File, index) if piece.index_bytes else None

    def _segment(self, extent: Extent, ahead: int) -> Segment:
        piece = extent.place.piece
        place = SegmentPlace("", extent.partition, extent.place.key)
        return Segment(*self._files(extent, ahead), place, piece.first, piece.last + 1)

    def _asked(self, extent: Extent, ask: Callable[[Segment], T]) -> T:
        with self._named(extent, extent.span.first), closing(self._segment(extent, LOOK_BYTES)) as segment:
            return ask(segment)

    def _path(self, extent: Extent) -> str:
        return f"{self._store.place}: {extent.place.piece.name(extent.partition)}"

    @contextmanager
    def _named(self, extent: Extent, next_id: int) -> Iterator[None]:
        with _asking(_not_returned(next_id)):
            try:
                yield
            except ObjectAbsent as error:
                raise self._damage(extent, "it is not in the store", next_id) from error
            except (PartitionDamaged, HeaderDamaged) as error:
                raise self._damage(extent, error.message.removeprefix(f"{self._path(extent)}: "), next_id) from error

    def _damage(self, extent: Extent, what: str, next_id: int) -> ArchiveDamaged:
        piece = extent.place.piece
        return ArchiveDamaged(
            f"{self._path(extent)}, ids {piece.first} to {piece.last} of partition {extent.partition}: {what}",
            not_done=_not_returned(next_id),
            next_step="bring the object back from a copy or an older version of it in the store, or read the ids from a "
            "storage that still has them",
            partition=extent.partition, first_id=piece.first, last_id=piece.last,
        )  # fmt: skip


def is_piece(extent: Extent) -> bool:
    """Return whether an extent is a segment in an archive."""
    return isinstance(extent.place, Place)


def _span(piece: Entry) -> Span:
    return Span(piece.first, piece.last)


def _not_returned(next_id: int) -> str:
    return f"no row from id {next_id} on was returned as sound"


@contextmanager
def _asking(not_done: str) -> Iterator[None]:
    """Replace the advice in errors of a store, which is for writers."""
    try:
        yield
    except (StoreRefused, StoreUnavailable) as error:
        refused = isinstance(error, StoreRefused)
        raise type(error)(
            error.message, not_done=not_done,
            next_step="check the address and the credentials here: reading and listing are needed" if refused
            else "check that the store is up and can be reached from here, then read again",
        ) from error  # fmt: skip
