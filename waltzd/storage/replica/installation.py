"""Whether there is room on the disk for an append: stop before it is full, go on when there is clearly more.

A segment file on its way into a replica: received beside the log, proven record by record, then given its name.

Until it has its name nothing of it counts, and a crash leaves only files that the next start removes. It knows nothing of
sessions or marks: whether it may stand where it wants to is decided by `waltzd.storage.replica.healing`.
"""

from __future__ import annotations

import numpy as np

from waltzd.disk.seam import Buffer, Disk, File, join
from waltzd.errors import DiskFull, HeaderDamaged, TooLarge, UnfitSegment, WaltzError
from waltzd.format.index import offsets_of
from waltzd.format.layout import HEADER_BYTES, NEW_SUFFIX, FileHeader, check_header, index_name, index_offset, segment_name
from waltzd.format.record import OVERHEAD_BYTES, Run, id_and_length
from waltzd.format.scan import Stop, read_index, scan
from waltzd.storage.replica.segment import Segment


class Room:
    def __init__(self, disk: Disk, directory: str, free_bytes_min: int) -> None:
        self._disk = disk
        self._directory = directory
        self._least = free_bytes_min
        self.is_full = False

    def check(self, size: int) -> None:
        """Refused when less than the least would stay free. After that an eighth more is asked for, so as not to flap."""
        if self._least == 0:
            return
        free = self._disk.free_bytes(self._directory)
        least = self._least + self._least // 8 if self.is_full else self._least
        if free - size < least:
            self.is_full = True
            raise DiskFull(f"{self._directory}: {free} bytes are free, {size} are to be written and {least} must stay free")


class Installation:
    def __init__(
        self,
        disk: Disk,
        directory: str,
        expected: FileHeader,
        room: Room,
        *,
        turn: int,
        begun_at: tuple[int, int, bool],
        file_bytes: int,
        record_bytes_max: int,
    ) -> None:
        """`file_bytes`: how large the file will be; 0 where the sender does not know. `turn` keeps the names of two
        installations apart, `begun_at` is the moment that it belongs to."""
        self.expected = expected
        self.begun_at = begun_at
        self.next_id = expected.first_id
        self._disk = disk
        self._directory = directory
        self._room = room
        self._file_bytes = file_bytes
        self._record_bytes_max = record_bytes_max
        self._size = 0
        self._names = [
            (join(directory, f"{name}.{turn}{NEW_SUFFIX}"), join(directory, name))
            for name in (index_name(expected.first_id), segment_name(expected.first_id))
        ]
        self._files: list[File] = []
        try:
            for new, _ in self._names:
                self._files.append(disk.create(new))
        except WaltzError:
            self.abandon()
            raise

    @property
    def first_id(self) -> int:
        return self.expected.first_id

    @property
    def _index(self) -> File:
        return self._files[0]

    @property
    def _data(self) -> File:
        return self._files[1]

    def _unfit(self, why: str) -> UnfitSegment:
        return UnfitSegment(f"the file for the segment at id {self.first_id} of partition {self.expected.partition} {why}")

    def write(self, piece: Buffer) -> None:
        """The next bytes of the file."""
        if self._file_bytes and self._size + len(piece) > self._file_bytes:
            raise self._unfit(f"is larger than the {self._file_bytes} bytes that were announced")
        self._room.check(len(piece))
        self._data.write(self._size, piece)
        self._size += len(piece)

    def prove(self) -> None:
        """The whole file is here: check every record, make the index, and have both on the disk."""
        if self._file_bytes and self._size != self._file_bytes:
            raise self._unfit(f"ended after {self._size} of {self._file_bytes} bytes")
        header = self._header().encode()
        self._data.write(0, header)  # without whatever damage stood in the part of it that means nothing
        self._index.write(0, header)
        stop = scan(
            self._data,
            segment_first_id=self.first_id,
            next_id=self.first_id,
            offset=HEADER_BYTES,
            end=self._size,
            on_run=self._add,
            record_bytes_max=self._record_bytes_max,
        )
        if stop.offset != self._size:
            raise self._bad_record(stop)
        if stop.next_id == self.first_id:
            raise self._unfit("has no record in it")
        self._data.flush()
        self._index.flush()
        self.next_id = stop.next_id

    def _header(self) -> FileHeader:
        where = f"the file for the segment at id {self.first_id}"
        try:
            return check_header(self._data.read(0, HEADER_BYTES), where, self.expected)
        except HeaderDamaged as error:
            raise UnfitSegment(error.message) from error

    def _bad_record(self, stop: Stop) -> UnfitSegment | TooLarge:
        head = self._data.read(stop.offset, OVERHEAD_BYTES)
        size = id_and_length(head)[1] + OVERHEAD_BYTES if len(head) == OVERHEAD_BYTES else 0
        if size > self._record_bytes_max and id_and_length(head)[0] == stop.next_id:
            return self._too_large(stop.next_id, size)
        return self._unfit(f"has no sound record {stop.next_id} at byte {stop.offset}")

    def _too_large(self, id_: int, size: int) -> TooLarge:
        return TooLarge(f"record {id_} has {size} bytes; {self._record_bytes_max} are allowed")

    def _add(self, offset: int, run: Run) -> None:
        sizes = np.diff(run.bounds)
        largest = int(sizes.argmax())
        if sizes[largest] > self._record_bytes_max:
            raise self._too_large(run.first_id + largest, int(sizes[largest]))
        entry = run.first_id - self.first_id
        self._index.write(index_offset(entry), offsets_of(offset, run).astype(">i8").tobytes())

    def leave_out(self, next_id: int) -> None:
        """Nothing from this id on: another segment has it."""
        assert self.first_id < next_id < self.next_id
        end = int(read_index(self._index, next_id - self.first_id, 1)[0])
        self._data.truncate(end)
        self._data.flush()
        self._index.truncate(index_offset(next_id - self.first_id))
        self._index.flush()
        self._size, self.next_id = end, next_id

    def take_names(self) -> Segment:
        """Under their names, durably, one after the other: an index that is too short or alone is noticed at a start."""
        for new, name in self._names:
            self._disk.rename(new, name)
            self._disk.flush_directory(self._directory)
        self._close()
        index, data = (self._disk.open(name, write=True) for _, name in self._names)
        header = FileHeader.decode(data.read(0, HEADER_BYTES), data.path)
        return Segment(self._directory, header, data, index, end=self._size, next_id=self.next_id)

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def abandon(self) -> None:
        """Nothing stays of what has no name yet. Harmless after the end."""
        self._close()
        for new, _ in self._names:
            if self._disk.exists(new):
                self._disk.remove(new)
