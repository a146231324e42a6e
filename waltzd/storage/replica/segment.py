"""One segment: a data file of records, and an index that says where each one starts.

The index follows the data and can always be made again, so nothing is ever decided from it alone: a record that it points
to is checked when it is read. A segment is written only at its end. Neither file exists under its final name before its
header is on the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import FlushFailed, ForeignCluster, HeaderDamaged, PathMissing, UnknownVersion, WaltzError
from waltzd.format.checksum import I64
from waltzd.format.index import read_index, write_entries
from waltzd.format.layout import HEADER_BYTES, NEW_SUFFIX, FileHeader, check_header, index_name, index_offset, segment_name
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, Run, first_bad, id_and_length

WRITE_AGAIN_BYTES = 1 << 20
PAGE_BYTES = 4096
UNUSABLE = (HeaderDamaged, UnknownVersion, ForeignCluster, PathMissing)
"""The errors of a file that is not the segment, or the index, of its place."""


def header_of(file: File, expected: FileHeader) -> FileHeader:
    """The header of a segment or an index; raises one of `UNUSABLE` when it belongs elsewhere."""
    return check_header(file.read(0, HEADER_BYTES), file.path, expected)


class Suspect(Exception):
    """Not an error but a question: a read met bytes that are not the expected records. Index or data is wrong, and the lane
    must find out which."""

    def __init__(self, first_id: int) -> None:
        super().__init__(f"segment {first_id}")
        self.first_id = first_id


class Segment:
    """An open segment. `end` and `next_id` say where the next record goes."""

    def __init__(self, directory: str, header: FileHeader, data: File, index: File, *, end: int, next_id: int) -> None:
        self.directory = directory
        self.header = header
        self.data = data
        self.index = index
        self.end = end
        self.next_id = next_id
        self._flushed = (end, next_id)

    @property
    def first_id(self) -> int:
        return self.header.first_id

    # -- opening

    @staticmethod
    def create(disk: Disk, directory: str, header: FileHeader) -> Segment:
        """Both files, whole and named durably. A leftover of that name is replaced."""
        paths = [join(directory, name(header.first_id)) for name in (index_name, segment_name)]
        opened: list[File] = []
        try:
            for path in paths:
                opened.append(disk.create(path + NEW_SUFFIX))
                opened[-1].write(0, header.encode())
                opened[-1].flush()
            for path in paths:  # the segment last: an index alone is harmless
                disk.rename(path + NEW_SUFFIX, path)
            disk.flush_directory(directory)
        except FlushFailed:
            raise
        except WaltzError:
            for file in opened:
                file.close()
            for path in paths:
                if disk.exists(path + NEW_SUFFIX):
                    disk.remove(path + NEW_SUFFIX)
            raise
        for file in opened:
            file.close()
        index, data = (disk.open(path, write=True) for path in paths)
        return Segment(directory, header, data, index, end=HEADER_BYTES, next_id=header.first_id)

    @staticmethod
    def open(disk: Disk, directory: str, *, expected: FileHeader, next_id: int | None, write: bool = False) -> Segment:
        """`expected` is the header of this place. A sealed segment ends in front of `next_id`, the next segment's first id.

        Raises `Suspect` when the index, or the data of a sealed segment, is unusable."""
        try:
            data = disk.open(join(directory, segment_name(expected.first_id)), write=write)
            header = header_of(data, expected)
        except UNUSABLE as error:
            if next_id is None:
                raise
            raise Suspect(expected.first_id) from error
        try:
            index = disk.open(join(directory, index_name(expected.first_id)), write=write)
            header_of(index, expected)
        except UNUSABLE as error:
            raise Suspect(expected.first_id) from error
        segment = Segment(directory, header, data, index, end=data.size(), next_id=expected.first_id)
        if next_id is not None:
            segment.next_id = next_id
            segment._leave_out_rest()
        return segment

    def _leave_out_rest(self) -> None:
        """Bytes behind the last record of a sealed segment are no part of it."""
        last_id = self.next_id - 1
        if last_id >= self.first_id:
            with contextlib.suppress(Suspect):  # a read of that record will ask
                self.end = self._end_by_head(last_id, self.offset_of(last_id))

    def close(self) -> None:
        self.data.close()
        self.index.close()

    def stands_at(self, *, end: int, next_id: int) -> None:
        """Set the end. Everything in front of it counts as flushed."""
        self.end, self.next_id = end, next_id
        self._flushed = (end, next_id)

    # -- writing

    def write(self, runs: Sequence[Run]) -> None:
        """Append consecutive runs with one call for the data and one for the index, without a flush."""
        offsets: list[I64] = []
        end, next_id = self.end, self.next_id
        for run in runs:
            assert run.first_id == next_id, f"run starts at {run.first_id}, the segment's next id is {next_id}"
            offsets.append(run.bounds[:-1] + end)
            end += len(run.data)
            next_id += len(run)
        self.data.write_many(self.end, [run.data for run in runs])
        self.write_index(self.next_id, np.concatenate(offsets))
        self.end, self.next_id = end, next_id

    def write_index(self, id_: int, offsets: I64) -> None:
        write_entries(self.index, id_ - self.first_id, offsets)

    def flush(self) -> None:
        """The data is on the disk; the index follows at a checkpoint."""
        self.data.flush()
        self._flushed = (self.end, self.next_id)

    def take_back(self) -> None:
        """Cut bytes and index entries that were written since the last flush."""
        end, next_id = self._flushed
        self.cut(end=end, next_id=next_id)

    def cut(self, *, end: int, next_id: int) -> None:
        """Durably. Data first: an index that is too long is noticed."""
        self.data.truncate(end)
        self.data.flush()
        self.index.truncate(index_offset(next_id - self.first_id))
        self.index.flush()
        self.stands_at(end=end, next_id=next_id)

    def write_again(self, offset: int) -> None:
        """Write the bytes from `offset` on once more, and flush: a flush that failed in an earlier process may have left
        the cache ahead of the disk, marked as clean."""
        offset = max(0, offset // PAGE_BYTES * PAGE_BYTES)
        while offset < self.end:
            piece = self.data.read(offset, min(WRITE_AGAIN_BYTES, self.end - offset))
            self.data.write(offset, piece)
            offset += len(piece)
        self.data.flush()

    # -- reading

    def offset_of(self, id_: int) -> int:
        """Where record `id_` starts, or the next one would."""
        assert self.first_id <= id_ <= self.next_id
        if id_ == self.next_id:
            return self.end
        found = read_index(self.index, id_ - self.first_id, 1)
        if len(found) != 1 or not HEADER_BYTES <= found[0] <= self.end:
            raise Suspect(self.first_id)
        return int(found[0])

    def read(self, first_id: int, last_id: int, bytes_max: int) -> Run:
        """Sound records from `first_id` on: up to `last_id`, up to `bytes_max` bytes, at least one."""
        assert self.first_id <= first_id <= last_id < self.next_id
        count = min(last_id - first_id + 1, bytes_max // OVERHEAD_BYTES + 1)
        starts = read_index(self.index, first_id - self.first_id, count + 1)
        if first_id + count == self.next_id:
            starts = np.append(starts[:count], self.end)
        elif len(starts) == count or (len(starts) == count + 1 and starts[count] == 0):
            # Damage follows: the last record says itself where it ends.
            starts = np.append(starts[:count], self._end_by_head(first_id + count - 1, int(starts[count - 1])))
        if len(starts) != count + 1 or starts[0] < HEADER_BYTES:
            raise Suspect(self.first_id)
        taken = max(1, int(np.searchsorted(starts, starts[0] + bytes_max, "right")) - 1)
        bounds = starts[: taken + 1] - starts[0]
        is_possible = starts[taken] <= self.end and not (np.diff(bounds) < OVERHEAD_BYTES).any()
        # One record above the limit: its size is believed only when its head says the same.
        if not is_possible or (
            bounds[-1] > bytes_max and self._end_by_head(first_id, int(starts[0])) != starts[1]
        ):  # the entry behind it may be that of a damaged record, which can hold anything
            return self._sound_record(first_id)[1]
        raw = self.data.read(int(starts[0]), int(bounds[-1]))
        if len(raw) != bounds[-1]:
            raise Suspect(self.first_id)
        run = Run(first_id, memoryview(raw), bounds)
        bad = first_bad(run)
        if bad == 0:  # the record itself may be sound and only the entry behind it wrong: its head says where it ends
            return self._sound_record(first_id)[1]
        return run if bad is None else run.part(0, bad)

    def end_of(self, id_: int) -> int:
        """Where the record `id_` ends. The record is checked: a cut is never decided from the index alone."""
        start, run = self._sound_record(id_)
        return start + len(run.data)

    def _sound_record(self, id_: int) -> tuple[int, Run]:
        start = self.offset_of(id_)
        size = self._end_by_head(id_, start) - start
        raw = self.data.read(start, size)
        if len(raw) < size:
            raise Suspect(self.first_id)
        run = Run(id_, memoryview(raw), np.array([0, size]))
        if first_bad(run) is not None:
            raise Suspect(self.first_id)
        return start, run

    def _end_by_head(self, id_: int, offset: int) -> int:
        head = self.data.read(offset, HEAD_BYTES) if offset >= HEADER_BYTES else b""
        if len(head) < HEAD_BYTES:
            raise Suspect(self.first_id)
        found, length = id_and_length(head)
        if found != id_ or not 0 <= length <= self.end - offset - OVERHEAD_BYTES:
            raise Suspect(self.first_id)
        return offset + OVERHEAD_BYTES + length
