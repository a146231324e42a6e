"""Reads committed records from an archive, through a bounded cache on disk. All calls block.

Archived segments and key indexes are fetched whole, in steps. No byte of one is used before its SHA-256 was compared with
the manifest. It is then a file in the cache, and every read of that file checks the checksums of records or pages. So a
damaged cache costs another fetch, and never returns wrong records.

A look-up of a lock fetches the key index of a segment. If the segment has none, or the store lost or changed it, the
look-up reads the heads of the batches in the segment itself.

Files in the cache are unlinked when they are created, so they vanish with the process, and no old file is ever taken for
the archive. A segment that is evicted from the cache lives as long as a reader holds it."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeAlias, TypeVar
from uuid import UUID, uuid4

from waltzd.archive.archived_segment import footer_of
from waltzd.archive.manifest import Chunk, Entry, Label
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.disk.seam import Buffer
from waltzd.errors import NeedsBatches, WaltzError
from waltzd.errors.operations import ArchiveDamaged, CacheFailed, HeaderDamaged, ObjectAbsent
from waltzd.format.batch import HEAD_BYTES, Batch, Head, records_of, sound_batches
from waltzd.format.footer import Footer, read_footer
from waltzd.format.key_index import (
    HEADER_BYTES as KEY_HEADER_BYTES,
)
from waltzd.format.key_index import (
    KeyHeader,
    KeyIndex,
    KeyIndexWrong,
    LockMarks,
    LockQuery,
    MarkColumns,
    scan_marks,
)
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, check_header, index_offset
from waltzd.format.record import NO_TIME, OVERHEAD_BYTES, Run, first_bad, id_and_length, walk
from waltzd.format.scan import is_sound_record, scan, survey
from waltzd.format.span import Span
from waltzd.protocol.descriptions import Archived

STEP_BYTES = 8 << 20
"""Bytes of one request, which limits how much of a segment is in memory at a time."""
ATTEMPTS = 3
"""Number of attempts to fetch a segment with the right bytes: the fault may be on the network."""
PARTITIONS_MAX, CHUNKS_MAX, TIMES_MAX = 256, 256, 4096
"""Numbers of newest manifests, of chunks, and of times of segments that are kept in memory."""

K = TypeVar("K")
V = TypeVar("V")
_logger = logging.getLogger("waltz.server")


class CachedSegmentDamaged(Exception):
    """Bytes of a segment or key index in the cache differ from those that were fetched."""


# -- pieces ------------------------------------------------------------------------------------------------------------


class _UnnamedFile:
    """An unlinked temporary file, which is freed with the last reference to it."""

    def __init__(self, directory: str | None, path: str) -> None:
        self.path = path
        self._size = 0
        try:
            self._fd, name = tempfile.mkstemp(dir=directory, prefix="waltz-archive-")
            os.unlink(name)
        except OSError as error:
            raise _cache_failed(directory, error) from error
        self._directory = directory
        weakref.finalize(self, os.close, self._fd)

    def append(self, data: Buffer) -> None:
        left = memoryview(data).cast("B")
        try:
            while left:
                done = os.pwrite(self._fd, left, self._size)
                left, self._size = left[done:], self._size + done
        except OSError as error:
            raise _cache_failed(self._directory, error) from error

    def cut(self, size: int) -> None:
        """Treat the first `size` bytes as the whole file: the segment without the index that follows it."""
        self._size = size

    def size(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise CachedSegmentDamaged(self.path) from error

    def read_into(self, offset: int, buffer: memoryview) -> int:
        try:
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            raise CachedSegmentDamaged(self.path) from error


def _cache_failed(directory: str | None, error: OSError) -> CacheFailed:
    return CacheFailed(f"{directory or tempfile.gettempdir()}: {os.strerror(error.errno or 0)}")


class _Found(Exception):
    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class CachedSegment:
    """One archived segment that was proven, to be read from. Its methods raise `CachedSegmentDamaged` where its bytes are
    not sound any more."""

    def __init__(self, file: _UnnamedFile, entry: Entry, header: FileHeader) -> None:
        self.entry = entry
        self.sha256, self.size = entry.sha256, entry.size
        self._file = file
        file.cut(entry.size - entry.index_bytes)
        self._next = entry.first, HEADER_BYTES
        """Id after the last read and its offset, in format 0: most reads are consecutive."""
        self._footer: Footer | None = None
        self._marks: MarkColumns | None = None
        """Marks of the segment; None until a lock was looked up in it."""
        try:
            version = check_header(file.read(0, HEADER_BYTES), file.path, header).version
        except HeaderDamaged as error:
            raise CachedSegmentDamaged(file.path) from error
        if version == BATCHES:
            self._footer = read_footer(file)
            if self._footer is None or (self._footer.first_id, self._footer.last_id) != (entry.first, entry.last):
                raise CachedSegmentDamaged(file.path)

    def read(self, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> Run:
        """Return sound records from `first_id` on, up to `last_id`, the end of the segment and `bytes_max`; at least
        one."""
        assert self.entry.first <= first_id <= self.entry.last
        last_id = min(last_id, self.entry.last)
        if self._footer is None:
            return self._records(first_id, last_id, bytes_max)
        found = self._batches(self._footer, first_id, bytes_max)
        return records_of(found, first_id, last_id, bytes_max, with_locks=with_locks)

    def first_since(self, time: int) -> int:
        """Return the first id whose time is `time` or later; the id after the segment if there is none."""
        if self._footer is None:
            return self.entry.last + 1
        places = self._footer.batches
        at = bisect_left(places, time, key=lambda place: self._head(place).time)
        return self._head(places[at]).first_id if at < len(places) else self.entry.last + 1

    def find_marks(self, query: LockQuery) -> LockMarks:
        """Return the answer for the ids of this segment. Raise `NeedsBatches` if its format keeps no locks."""
        first_id, last_id = self.entry.first, self.entry.last
        if self._footer is None:
            raise NeedsBatches(
                f"archived transactions up to id {last_id} are of format 0, which keeps no locks",
                next_step=f"ask only for ids above {last_id}: after={last_id}, or --after {last_id}",
                first_id=last_id + 1,
            )
        if self._marks is None:
            found = scan_marks(self._file, HEADER_BYTES, first_id, last_id)
            if found is None or found[2] != last_id + 1:
                raise CachedSegmentDamaged(self._file.path)
            self._marks = found[0]
        return _answer(self.entry, query, self._marks.find)

    # -- batches

    def _head(self, place: int) -> Head:
        head = Head.decode(self._file.read(int(place), HEAD_BYTES))
        if head is None:
            raise CachedSegmentDamaged(self._file.path)
        return head

    def _batches(self, footer: Footer, first_id: int, bytes_max: int) -> list[Batch]:
        """Return the batches from the one that holds `first_id` on, up to `bytes_max` bytes, at least one."""
        places = footer.batches
        at = bisect_right(places, first_id, key=lambda place: self._head(place).first_id) - 1
        place, fits = int(places[at]), int(places.searchsorted(places[at] + bytes_max, "right")) - 1
        fits = fits + 1 if footer.offset <= place + bytes_max else max(fits, at + 1)
        stop = int(places[fits]) if fits < len(places) else footer.offset
        raw = memoryview(self._file.read(place, stop - place))
        if len(raw) < stop - place:
            raise CachedSegmentDamaged(self._file.path)
        found = sound_batches(raw, first_id)
        if sum(batch.size for batch in found) < len(raw):
            raise CachedSegmentDamaged(self._file.path)
        return found

    # -- records of format 0

    def _records(self, first_id: int, last_id: int, bytes_max: int) -> Run:
        offset, end = self._place_of(first_id), self._file.size()
        raw = memoryview(self._file.read(offset, min(bytes_max, end - offset)))
        bounds = walk(raw)
        if len(bounds) == 1:  # the record is larger than bytes_max
            head = self._file.read(offset, min(OVERHEAD_BYTES, end - offset))
            size = OVERHEAD_BYTES + id_and_length(head)[1] if len(head) == OVERHEAD_BYTES else 0
            if not OVERHEAD_BYTES <= size <= end - offset:
                raise CachedSegmentDamaged(self._file.path)
            raw = memoryview(self._file.read(offset, size))
            bounds = walk(raw)
        bounds = bounds[: last_id - first_id + 2]
        run = Run(first_id, raw[: int(bounds[-1])], bounds)
        bad = first_bad(run) if len(run) else 0
        if bad is not None:
            raise CachedSegmentDamaged(self._file.path)
        self._next = run.last_id + 1, offset + len(run.data)
        return run

    def _place_of(self, id_: int) -> int:
        """Return the offset of a record: where the last read ended, or where the index says, if a sound record starts
        there; else by a scan of all records before it."""
        end, known = self._file.size(), self._next
        if known[0] == id_:
            return known[1]
        entry = self._file.read(end + index_offset(id_ - self.entry.first), 8) if self.entry.index_bytes else b""
        if len(entry) == 8 and is_sound_record(self._file, place := int.from_bytes(entry, "big"), end, id_):
            return place

        def look(span: Span) -> None:
            if span.run.last_id >= id_:
                raise _Found(span.offset + int(span.run.bounds[id_ - span.first_id]))

        try:
            scan(
                self._file,
                segment_first_id=self.entry.first, next_id=self.entry.first, offset=HEADER_BYTES, end=end, on_span=look,
            )  # fmt: skip
        except _Found as found:
            return found.offset
        raise CachedSegmentDamaged(self._file.path)


class CachedKeyIndex:
    """The key index of one archived segment that was proven, for look-ups in that segment."""

    def __init__(self, file: _UnnamedFile, entry: Entry, cluster: UUID, partition: int) -> None:
        """Raise `KeyIndexWrong` if the file is the index of another segment."""
        self.entry = entry
        self.sha256, self.size = entry.key_sha256, entry.key_bytes
        self._file = file
        found = KeyHeader.decode(file.read(0, KEY_HEADER_BYTES))
        expected = cluster, partition, entry.first, entry.last
        if found is None or (found.key, found.partition, found.first_id, found.last_id) != expected:
            raise KeyIndexWrong("it is the index of another segment")
        self._index = KeyIndex.read(file, found)

    def find_marks(self, query: LockQuery) -> LockMarks:
        """Return the answer for the ids of this segment."""
        try:
            return _answer(self.entry, query, lambda here: self._index.find(self._file, here))
        except KeyIndexWrong as error:
            raise CachedSegmentDamaged(self._file.path) from error


CachedObject: TypeAlias = CachedSegment | CachedKeyIndex
C = TypeVar("C", CachedSegment, CachedKeyIndex)


def _answer(entry: Entry, query: LockQuery, find: Callable[[LockQuery], list[int]]) -> LockMarks:
    """Return the answer of `find` for the ids of one segment."""
    here = query.within(entry.first, entry.last)
    ids = tuple(find(here))
    through = here.first_id if here.newest_first else here.last_id
    return LockMarks(ids=ids, through=ids[-1] if len(ids) >= query.limit else through)


# -- the cache ---------------------------------------------------------------------------------------------------------


class SegmentCache:
    """Archived segments and key indexes in files of one directory, up to a number of bytes; the least recently used is
    evicted first. The object that was fetched last stays, however large. Threads may share the cache."""

    def __init__(self, bytes_max: int, directory: str | None = None) -> None:
        """`directory`: directory of the files; None for the temporary directory of the system."""
        self.bytes = 0
        self._bytes_max = bytes_max
        self._directory = directory
        self._pieces: OrderedDict[str, CachedObject] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sha256: str, kind: type[C]) -> C | None:
        """Return the object with this SHA-256; None if it is not in the cache."""
        with self._lock:
            found = self._pieces.get(sha256)
            if not isinstance(found, kind):
                return None
            self._pieces.move_to_end(sha256)
            return found

    def holds(self, size: int) -> bool:
        """Return whether `size` bytes fit into the empty cache."""
        return size <= self._bytes_max

    def begin(self, size: int, path: str) -> _UnnamedFile:
        """Create the file of an object of `size` bytes, after evicting others to make room for it."""
        with self._lock:
            while self._pieces and self.bytes + size > self._bytes_max:
                self._take_out(next(iter(self._pieces)))
        return _UnnamedFile(self._directory, path)

    def put(self, piece: CachedObject) -> None:
        with self._lock:
            self._take_out(piece.sha256)
            self._pieces[piece.sha256] = piece
            self.bytes += piece.size
            while len(self._pieces) > 1 and self.bytes > self._bytes_max:
                self._take_out(next(iter(self._pieces)))

    def drop(self, piece: CachedObject) -> None:
        with self._lock:
            if self._pieces.get(piece.sha256) is piece:
                self._take_out(piece.sha256)

    def _take_out(self, name: str) -> None:
        found = self._pieces.pop(name, None)
        if found is not None:
            self.bytes -= found.size


# -- the archive -------------------------------------------------------------------------------------------------------


@dataclass
class ReadCounters:
    """Counters since the start of the process."""

    fetched_bytes: int = 0
    """Bytes of segments and key indexes that were fetched from the store."""
    pieces: int = 0
    """Number of segments that were fetched completely."""
    key_indexes: int = 0
    """Number of key indexes that were fetched completely."""
    key_faults: int = 0
    """Number of look-ups that read a segment because its key index was lost or changed in the store."""
    hits: int = 0
    misses: int = 0
    """Reads that did not find their segment in the cache; `hits` counts those that did."""
    failures: int = 0
    """Reads that failed because of the store or the cache."""
    cached_bytes: int = 0
    """Current size of the cache in bytes."""


class ArchiveReader:
    """Reader of all partitions of one cluster in one store. Threads may share it."""

    def __init__(self, store: Store, cluster: UUID, cache: SegmentCache) -> None:
        self.counters = ReadCounters()
        self.cache = cache
        self._store = store
        self._cluster = cluster
        self._labels: dict[UUID | None, Label] = {}
        self._archives: OrderedDict[tuple[int, UUID], PartitionArchive] = OrderedDict()
        self._chunks: OrderedDict[str, Chunk] = OrderedDict()
        self._times: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lost_keys: OrderedDict[str, None] = OrderedDict()
        """Names of key indexes whose loss was logged."""
        self._lock = threading.Lock()

    def told(self) -> ReadCounters:
        """Return the counters, with the current size of the cache."""
        return replace(self.counters, cached_bytes=self.cache.bytes)

    def read(
        self, partition: int, known: Archived, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False
    ) -> Run:
        """Return records from `first_id` on, which the manifest `known` holds, up to `last_id`, the end of their segment
        and `bytes_max`; at least one."""
        for _ in range(ATTEMPTS):
            piece = self.piece(partition, self.entry(partition, known, first_id))
            try:
                return piece.read(first_id, last_id, bytes_max, with_locks=with_locks)
            except CachedSegmentDamaged:
                self.cache.drop(piece)
        raise self.rotten(partition, piece.entry)

    # -- by id

    def entry(self, partition: int, known: Archived, id_: int) -> Entry:
        """Return the manifest entry of the segment that holds this id."""
        assert 0 <= id_ <= known.last_id
        archive = self._archive(partition, known)
        entries = archive.manifest(known.number, known.sha256).entries
        while (found := _holder(entries, id_)).level:
            entries = self._chunk(archive, found).entries
        return found

    def at_hand(self, partition: int, known: Archived, id_: int) -> CachedSegment | None:
        """Return the segment that holds this id if no call to the store is needed; else None."""
        found = self._entry_at_hand(partition, known, id_)
        return None if found is None else self.cache.get(found.sha256, CachedSegment)

    def marks_at_hand(self, partition: int, known: Archived, id_: int) -> CachedObject | None:
        """Return what answers look-ups in the segment with this id if no call to the store is needed; else None."""
        found = self._entry_at_hand(partition, known, id_)
        return None if found is None else self._cached_marks(found)

    def _entry_at_hand(self, partition: int, known: Archived, id_: int) -> Entry | None:
        archive = self._archives.get((partition, known.timeline))
        manifest = None if archive is None else archive.known(known)
        if manifest is None:
            return None
        entries = manifest.entries
        while (found := _holder(entries, id_)).level:
            chunk = self._chunks.get(found.sha256)
            if chunk is None:
                return None
            entries = chunk.entries
        return found

    def _cached_marks(self, entry: Entry) -> CachedObject | None:
        return self.cache.get(entry.key_sha256, CachedKeyIndex) or self.cache.get(entry.sha256, CachedSegment)

    def marks(self, partition: int, entry: Entry) -> CachedObject:
        """Return what answers look-ups in a segment: its key index, or the segment if it has none that can be used."""
        found = self._cached_marks(entry)
        if found is None and entry.key_bytes:
            found = self._key_index(partition, entry)
        return self.piece(partition, entry) if found is None else found

    def _key_index(self, partition: int, entry: Entry) -> CachedKeyIndex | None:
        """Fetch the key index of a segment. Return None, and log it once, if the store does not have the archived bytes."""
        name, trouble = entry.key_name(partition), ""
        self.counters.misses += 1
        for _ in range(ATTEMPTS):
            file = self.cache.begin(entry.key_bytes, f"{self._store.place}: {name}")
            try:
                trouble = self._fetch(name, entry.key_bytes, entry.key_sha256, file)
                if trouble:
                    continue
                found = CachedKeyIndex(file, entry, self._cluster, partition)
            except ObjectAbsent:
                trouble = "it is not in the store"
                break
            except KeyIndexWrong as error:
                trouble = str(error)
                break
            except CachedSegmentDamaged:
                continue
            self.counters.key_indexes += 1
            self._lost_keys.pop(name, None)
            self.cache.put(found)
            return found
        self.counters.key_faults += 1
        if name not in self._lost_keys:
            _logger.warning(
                "%s: %s: %s; look-ups read the segment of the ids %s to %s instead, until `waltzctl archive heal` makes "
                "the key index again", self._store.place, name, trouble, entry.first, entry.last,
            )  # fmt: skip
        self._keep(self._lost_keys, name, None, CHUNKS_MAX)
        return None

    def piece(self, partition: int, entry: Entry) -> CachedSegment:
        """Return a segment from the cache, or else from the store."""
        found = self.cache.get(entry.sha256, CachedSegment)
        if found is not None:
            self.counters.hits += 1
            return found
        self.counters.misses += 1
        name, trouble = entry.name(partition), ""
        for _ in range(ATTEMPTS):
            file = self.cache.begin(entry.size, f"{self._store.place}: {name}")
            try:
                trouble = self._fetch(name, entry.size, entry.sha256, file)
            except ObjectAbsent as error:
                raise ArchiveDamaged(
                    f"{file.path}, which has the ids {entry.first} to {entry.last}, is not in the store",
                    first_id=entry.first,
                    last_id=entry.last,
                ) from error
            if not trouble:
                self.counters.pieces += 1
                try:
                    piece = CachedSegment(file, entry, self._header(partition, entry))
                except CachedSegmentDamaged:
                    continue
                self.cache.put(piece)
                return piece
        raise self.rotten(partition, entry, trouble, file)

    def _header(self, partition: int, entry: Entry) -> FileHeader:
        return FileHeader(created_ms=0, key=self._cluster, partition=partition, first_id=entry.first)

    def _fetch(self, name: str, size: int, expected: str, file: _UnnamedFile) -> str:
        """Fetch an object into `file`; return what is wrong with its bytes, or "" for nothing. `expected`: its SHA-256."""
        hashing = sha256()
        while file.size() < size:
            data = self._store.get_range(name, file.size(), min(STEP_BYTES, size - file.size()))
            if not data:
                return f"it has {file.size()} bytes, and had {size}"
            hashing.update(data)
            file.append(data)
            self.counters.fetched_bytes += len(data)
        return "" if hashing.hexdigest() == expected else "it has other bytes than were written there"

    def rotten(self, partition: int, entry: Entry, trouble: str = "", file: _UnnamedFile | None = None) -> ArchiveDamaged:
        """Return the error about a segment whose records fail their checks, with the damaged ranges."""
        bad = _bad_ids(file, entry, self._header(partition, entry)) if file is not None else []
        where = ", ".join(f"the ids {first} to {last} (bytes {start} to {end})" for first, last, start, end in bad[:8])
        first_id, last_id = (bad[0][0], bad[-1][1]) if bad else (entry.first, entry.last)
        return ArchiveDamaged(
            f"{self._store.place}: {entry.name(partition)}, which has the ids {entry.first} to {entry.last}: "
            f"{trouble or 'its records fail their checks'}; damaged: {where or 'no record by itself'}",
            not_done="nothing of it was given to a reader",
            partition=partition,
            first_id=first_id,
            last_id=last_id,
        )

    # -- by time

    def find_time(self, partition: int, known: Archived, time: int, last_id: int) -> int:
        """Return the highest id before the first transaction whose time is `time` or later, among the ids up to `last_id`.
        Transactions of format 0 have no time and count as earlier than any."""
        archive = self._archive(partition, known)
        entries = _up_to(last_id, archive.manifest(known.number, known.sha256).entries)
        while (at := bisect_left(entries, time, key=lambda one: self._last_time(archive, one, last_id))) < len(entries):
            found = entries[at]
            if found.level == 0:
                break
            entries = _up_to(last_id, self._chunk(archive, found).entries)
        else:
            return last_id
        for _ in range(ATTEMPTS):
            piece = self.piece(partition, found)
            try:
                return min(last_id, piece.first_since(time) - 1)
            except CachedSegmentDamaged:
                self.cache.drop(piece)
        raise self.rotten(partition, found)

    def times_of(self, partition: int, piece: Entry) -> tuple[int, int]:
        """Return the first and the last time of a segment by its footer alone; `NO_TIME` for both in format 0."""
        found = self._times.get(piece.sha256)
        if found is None:
            found = self._read_times(partition, piece)
            self._keep(self._times, piece.sha256, found, TIMES_MAX)
        return found

    def _last_time(self, archive: PartitionArchive, entry: Entry, last_id: int) -> int:
        while entry.level:
            entry = _up_to(last_id, self._chunk(archive, entry).entries)[-1]
        return self.times_of(archive.partition, entry)[1]

    def _read_times(self, partition: int, piece: Entry) -> tuple[int, int]:
        name = piece.name(partition)
        for _ in range(ATTEMPTS):
            try:
                footer = footer_of(lambda offset, size: self._store.get_range(name, offset, size), piece, name)
            except ArchiveDamaged:
                continue
            return (NO_TIME, NO_TIME) if footer is None else (footer.first_time, footer.last_time)
        raise self.rotten(partition, piece, "its footer is not sound")

    # -- what is kept in memory

    def _archive(self, partition: int, known: Archived) -> PartitionArchive:
        label = self._labels.get(known.archive)
        if label is None:
            label = self._labels[known.archive] = label_in(self._store, self._cluster, uuid4, known.archive)
        found = self._archives.get((partition, known.timeline))
        if found is None or found.label != label:
            found = PartitionArchive(self._store, label, partition, known.timeline)
            self._keep(self._archives, (partition, known.timeline), found, PARTITIONS_MAX)
        return found

    def _chunk(self, archive: PartitionArchive, entry: Entry) -> Chunk:
        found = self._chunks.get(entry.sha256)
        if found is None:
            found = archive.chunk(entry)
            self._keep(self._chunks, entry.sha256, found, CHUNKS_MAX)
        return found

    def _keep(self, kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
        with self._lock:
            kept[key] = value
            kept.move_to_end(key)
            while len(kept) > most:
                kept.popitem(last=False)


def _up_to(last_id: int, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries that hold ids up to `last_id`. Storages have later ids, whose segments the store may lack."""
    return entries[: bisect_right(entries, last_id, key=lambda entry: entry.first)]


def _holder(entries: Sequence[Entry], id_: int) -> Entry:
    found = entries[bisect_left(entries, id_, key=lambda entry: entry.last)]
    assert found.first <= id_ <= found.last, "a manifest has no gap"
    return found


def _bad_ids(file: _UnnamedFile, entry: Entry, header: FileHeader) -> list[tuple[int, int, int, int]]:
    """Return the damaged ranges of a segment, as (first id, last id, first byte, last byte)."""
    end = min(file.size(), entry.size - entry.index_bytes)
    try:
        version = check_header(file.read(0, HEADER_BYTES), file.path, header).version
        found = survey(file, first_id=entry.first, end=end, version=version, id_limit=entry.last + 1)
    except (WaltzError, CachedSegmentDamaged):  # its header is wrong
        return [(entry.first, entry.last, 0, HEADER_BYTES - 1)]
    bad = [(gap.first_id, gap.last_id, gap.first_byte, gap.last_byte) for gap in found.gaps]
    if found.next_id <= entry.last:
        bad.append((found.next_id, entry.last, found.end, end - 1))
    return bad
