"""Index files: one entry for each record of a segment, which says where the record starts.

The entry of a damaged record is 0, where no record can start, so every reader notices. A new index is written beside the
old index, and is renamed over it once it is complete and flushed."""

from __future__ import annotations

import struct

import numpy as np

from waltzd.disk.seam import Disk, File, join
from waltzd.errors.operations import DiskFull
from waltzd.format.batch import Batch
from waltzd.format.checksum import I64
from waltzd.format.layout import INDEX_ENTRY_BYTES, NEW_SUFFIX, FileHeader, index_name, index_offset
from waltzd.format.record import Run

_ENTRY = struct.Struct(">q")

LEAD_BITS = 36
"""Number of bits of an entry of format 1 that hold the offset of the record, which may be up to 64 GiB. The higher bits
hold its distance from the head of its batch, up to 128 MiB."""


def read_index(file: File, first_entry: int, count: int) -> I64:
    """Read `count` entries, or fewer at the end of the file."""
    raw = file.read(index_offset(first_entry), count * INDEX_ENTRY_BYTES)
    return np.frombuffer(raw[: len(raw) // 8 * 8], ">i8").astype(np.int64)


def offsets_of(offset: int, run: Run) -> I64:
    """Return the index entries of a run whose first record starts at `offset` in the file."""
    if not run.lead:
        return run.bounds[:-1] + offset
    return (run.bounds[:-1] + offset) | (run.bounds[:-1] + run.lead) << LEAD_BITS


def encode_entries(offset: int, batch: Batch) -> bytes:
    """Encode the index entries of a batch whose head starts at `offset` in the file."""
    start, lead = offset + batch.head.lead, batch.head.lead
    if len(batch) == 1:
        return _ENTRY.pack(start | lead << LEAD_BITS)
    return offsets_of(start, batch.run).astype(">i8").tobytes()


def places_of(entries: I64) -> tuple[I64, I64]:
    """Return where the records of index entries of format 1 start, and where their batches start."""
    starts = entries & (1 << LEAD_BITS) - 1
    return starts, starts - (entries >> LEAD_BITS)


def write_entries(index: File, entry: int, offsets: I64) -> None:
    """Write entries from number `entry` on."""
    index.write(index_offset(entry), offsets.astype(">i8").tobytes())


def install_index(disk: Disk, directory: str, first_id: int) -> None:
    """Rename a sealed new index over the old index, and flush the directory."""
    path = join(directory, index_name(first_id))
    disk.rename(path + NEW_SUFFIX, path)
    disk.flush_directory(directory)


class IndexWriter:
    """Writer of a new index for the segment with this header."""

    def __init__(self, disk: Disk, directory: str, header: FileHeader) -> None:
        self._disk = disk
        self._directory = directory
        self._first_id = header.first_id
        self._path = join(directory, index_name(header.first_id)) + NEW_SUFFIX
        self._file = disk.create(self._path)
        try:
            self._file.write(0, header.encode())
        except DiskFull:
            self.abandon()
            raise

    def add(self, first_id: int, entries: I64) -> None:
        write_entries(self._file, first_id - self._first_id, entries)

    def finish(self, next_id: int) -> None:
        """Seal the index at `next_id`, and install it."""
        self.seal(next_id)
        install_index(self._disk, self._directory, self._first_id)

    def seal(self, next_id: int) -> None:
        """End the index in front of `next_id` and flush it. Entries that were never added are 0. `install_index` renames
        it."""
        self._file.truncate(index_offset(next_id - self._first_id))
        self._file.flush()
        self._file.close()

    def abandon(self) -> None:
        self._file.close()
        self._disk.remove(self._path)


class IndexChecker:
    """Comparison of an existing index with the data of its segment."""

    def __init__(self, index: File, first_id: int) -> None:
        self._index = index
        self._first_id = first_id
        self.is_right = True

    def add(self, first_id: int, entries: I64) -> None:
        if self.is_right:
            found = read_index(self._index, first_id - self._first_id, len(entries))
            self.is_right = bool(np.array_equal(found, entries))
