"""One segment: a data file of records or batches, and an index file with the offset of each record.

The index follows from the data and can be rebuilt, so nothing is decided by it alone: a record that it points to is checked
when it is read. A segment is written only at its end. Neither file gets its final name before its header is on disk.

A segment of format 1 (`BatchSegment`) writes and reads whole batches. It is full when its owner flags a batch as the last.
A footer is then written after that batch was flushed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from waltzd.disk.seam import Buffer, Disk, File, join
from waltzd.errors import BadArgument, ForeignCluster, WaltzError
from waltzd.errors.operations import DiskFull, FlushFailed, HeaderDamaged, PathMissing, UnknownVersion
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import Batch, End, Head, decode_locks, records_of, sound_batches
from waltzd.format.checksum import I64, crc32
from waltzd.format.footer import FooterBuilder, read_footer
from waltzd.format.index import encode_entries, places_of, read_index, write_entries
from waltzd.format.layout import (
    BATCHES,
    HEADER_BYTES,
    NEW_SUFFIX,
    FileHeader,
    check_header,
    index_name,
    index_offset,
    segment_name,
)
from waltzd.format.record import (
    HEAD_BYTES,
    OVERHEAD_BYTES,
    LockColumns,
    Run,
    first_bad,
    id_and_length,
)
from waltzd.format.scan import scan
from waltzd.format.span import BatchSpan, Span

WRITE_AGAIN_BYTES = 1 << 20
PAGE_BYTES = 4096
BATCH_SEGMENT_BYTES_MAX = (1 << 32) - 1
"""Largest size of the batches of a segment: a footer holds offsets of 32 bits."""
NEWEST_BYTES_MAX = 64 << 10
"""Size of the last batch up to which a segment keeps it in memory."""
UNUSABLE = (HeaderDamaged, UnknownVersion, ForeignCluster, PathMissing)
"""Errors of a file that is not the segment or index of its place."""


def header_of(file: File, expected: FileHeader) -> FileHeader:
    """Return the header of a segment or an index; raise one of `UNUSABLE` if it belongs elsewhere."""
    return check_header(file.read(0, HEADER_BYTES), file.path, expected)


class Suspect(Exception):
    """A read met bytes that are not the expected records. The caller has to examine the segment, to find out whether index
    or data is wrong."""

    def __init__(self, first_id: int) -> None:
        super().__init__(f"segment {first_id}")
        self.first_id = first_id


@contextlib.contextmanager
def whole_or_fatal() -> Iterator[None]:
    """Make an error fatal, because it leaves files open that have no name any more: what is appended to them would be gone
    with the process."""
    try:
        yield
    except (FlushFailed, PathMissing):  # the second: the directory is gone
        raise
    except WaltzError as error:
        raise FlushFailed(error.message, **error.facts) from error


class Segment:
    """An open segment of format 0. The next record is `next_id`, and is written at `end`."""

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
        """Create both files with their headers, and flush files and names. Leftovers under these names are replaced."""
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
        segment = Segment.of(directory, header, data, index, end=HEADER_BYTES)
        segment.begin()
        return segment

    @staticmethod
    def of(directory: str, header: FileHeader, data: File, index: File, *, end: int, next_id: int | None = None) -> Segment:
        """Return a segment of the format in its header."""
        kind = BatchSegment if header.version == BATCHES else Segment
        return kind(directory, header, data, index, end=end, next_id=header.first_id if next_id is None else next_id)

    def begin(self) -> None:
        """Note that this process has created the segment, which is empty."""

    @staticmethod
    def open(disk: Disk, directory: str, *, expected: FileHeader, next_id: int | None, write: bool = False) -> Segment:
        """Open a segment. `expected`: the header of this place. `next_id`: the first id of the next segment, None for the
        last.

        Raise `Suspect` if the index, or the data of a sealed segment, is unusable."""
        try:
            data = disk.open(join(directory, segment_name(expected.first_id)), write=write)
            header = header_of(data, expected)
        except UNUSABLE as error:
            if next_id is None:
                raise
            raise Suspect(expected.first_id) from error
        try:
            index = disk.open(join(directory, index_name(expected.first_id)), write=write)
            version = header_of(index, expected).version
        except UNUSABLE as error:
            raise Suspect(expected.first_id) from error
        if version != header.version:
            raise Suspect(expected.first_id)
        segment = Segment.of(directory, header, data, index, end=data.size())
        if next_id is not None:
            segment.stands_at(end=segment.end, next_id=next_id)
            if next_id > segment.first_id:
                with contextlib.suppress(Suspect):  # a read of the last record raises it again
                    segment.stands_at(end=segment._last_end(), next_id=next_id)
        return segment

    def _last_end(self) -> int:
        """Return where the last record of a sealed segment ends. Bytes after it are no records."""
        last_id = self.next_id - 1
        return self._end_by_head(last_id, self.offset_of(last_id))

    def close(self) -> None:
        self.data.close()
        self.index.close()

    def stands_at(self, *, end: int, next_id: int) -> None:
        """Set the end. All bytes before it count as flushed."""
        self.end, self.next_id = end, next_id
        self._flushed = (end, next_id)

    def anchor(self, id_: int) -> tuple[int, int | None]:
        """Return where the record `id_`, or its batch, begins by the index, and its first id; None as first id if the entry
        is impossible."""
        found = read_index(self.index, id_ - self.first_id, 1)
        return (int(found[0]), id_) if len(found) == 1 and HEADER_BYTES <= found[0] < self.end else (0, None)

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
        entries = np.concatenate(offsets).astype(">i8").tobytes()
        self._put([run.data for run in runs], entries, end=end, next_id=next_id)

    def _put(self, pieces: Sequence[Buffer], entries: bytes, *, end: int, next_id: int) -> None:
        self.data.write_many(self.end, pieces)
        self.index.write(index_offset(self.next_id - self.first_id), entries)
        self.end, self.next_id = end, next_id

    def write_index(self, id_: int, offsets: I64) -> None:
        write_entries(self.index, id_ - self.first_id, offsets)

    def flush(self) -> None:
        """Flush the data. The index is flushed at a checkpoint."""
        self.data.flush()
        self._flushed = (self.end, self.next_id)

    def take_back(self) -> None:
        """Cut bytes and index entries that were written since the last flush."""
        end, next_id = self._flushed
        self.cut(end=end, next_id=next_id)

    def cut(self, *, end: int, next_id: int) -> None:
        """Truncate and flush data and index. The data comes first, because a start notices an index that is too long."""
        self.data.truncate(end)
        self.data.flush()
        self.index.truncate(index_offset(next_id - self.first_id))
        self.index.flush()
        self.stands_at(end=end, next_id=next_id)

    def write_again(self, offset: int) -> None:
        """Write the bytes from `offset` on again, and flush. A failed flush of an earlier process may have left pages in
        the cache that are marked clean, and are not on the disk."""
        offset, end = max(0, offset // PAGE_BYTES * PAGE_BYTES), self.data.size()
        while offset < end:
            piece = self.data.read(offset, min(WRITE_AGAIN_BYTES, end - offset))
            self.data.write(offset, piece)
            offset += len(piece)
        self.data.flush()

    # -- reading

    def offset_of(self, id_: int) -> int:
        """Return where record `id_` starts by the index; the end for `next_id`."""
        assert self.first_id <= id_ <= self.next_id
        if id_ == self.next_id:
            return self.end
        found = read_index(self.index, id_ - self.first_id, 1)
        if len(found) != 1 or not HEADER_BYTES <= found[0] <= self.end:
            raise Suspect(self.first_id)
        return int(found[0])

    def start_of(self, id_: int) -> int:
        """Return where the record or batch begins that holds `id_`; the end for `next_id`."""
        return self.offset_of(id_)

    def read(self, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> Run:
        """Return sound records from `first_id` on, up to `last_id` and up to `bytes_max` bytes, at least one."""
        assert self.first_id <= first_id <= last_id < self.next_id
        count = min(last_id - first_id + 1, bytes_max // OVERHEAD_BYTES + 1)
        starts = read_index(self.index, first_id - self.first_id, count + 1)
        if first_id + count == self.next_id:
            starts = np.append(starts[:count], self.end)
        elif len(starts) == count or (len(starts) == count + 1 and starts[count] == 0):
            # Damage follows, so the length of the last record says where it ends.
            starts = np.append(starts[:count], self._end_by_head(first_id + count - 1, int(starts[count - 1])))
        if len(starts) != count + 1 or not HEADER_BYTES <= starts[0] <= self.end:
            raise Suspect(self.first_id)
        taken = max(1, int(np.searchsorted(starts, starts[0] + bytes_max, "right")) - 1)
        bounds = starts[: taken + 1] - starts[0]
        is_possible = starts[taken] <= self.end and not (np.diff(bounds) < OVERHEAD_BYTES).any()
        # A single record above the limit: its size by the index counts only if its head agrees.
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

    def end_of(self, id_: int) -> tuple[int, int]:
        """Return where to cut after the record `id_`, and the next id there. If a batch goes beyond `id_`, the cut is
        before that batch. The record or batch is checked: a cut is never decided by the index alone."""
        start, run = self._sound_record(id_)
        return start + len(run.data), id_ + 1

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


class BatchSegment(Segment):
    """An open segment of format 1. The next batch, or the footer, is written at `end`."""

    def __init__(self, directory: str, header: FileHeader, data: File, index: File, *, end: int, next_id: int) -> None:
        super().__init__(directory, header, data, index, end=end, next_id=next_id)
        self.log_end: End | None = None
        """End of the last batch of the segment that is being written; None without batches."""
        self.has_footer = False
        self._builder: FooterBuilder | None = None
        """Builder of the footer, which has all flushed batches except `_unhashed`; None if an earlier process began the
        segment."""
        self._unflushed: list[Batch] = []
        self._newest: Batch | None = None
        """Last batch, if it was flushed alone and is small. An owner sends it once more to confirm a read, which then
        needs no disk."""
        self._unhashed: deque[Batch] = deque()
        self._hashed_to = end
        """End of the last batch in `_unhashed`."""

    @property
    def is_full(self) -> bool:
        return self.log_end is not None and self.log_end.segment_bytes == 0

    # -- opening

    def begin(self) -> None:
        self._builder = FooterBuilder(self.header.encode())

    def _last_end(self) -> int:
        place, head = self._head_of(self.next_id - 1)
        if head.last_id != self.next_id - 1:
            raise Suspect(self.first_id)
        return place + head.size

    def goes_on(self, log_end: End | None, *, has_footer: bool) -> None:
        """Continue the segment after the batch that ends at `log_end`."""
        self.log_end, self.has_footer = log_end, has_footer

    def anchor(self, id_: int) -> tuple[int, int | None]:
        places = places_of(read_index(self.index, id_ - self.first_id, 1))[1]
        if len(places) and HEADER_BYTES <= places[0] < self.end:
            head = Head.decode(self.data.read(int(places[0]), BATCH_HEAD_BYTES))
            if head is not None and head.first_id <= id_ <= head.last_id:
                return int(places[0]), head.first_id
        return 0, None

    def found_log_end(self) -> End | None:
        if self.next_id == self.first_id:
            return None
        head = self._head_of(self.next_id - 1)[1]
        return End(crc=head.crc, time=head.time, segment_bytes=0 if head.is_last else self.end)

    # -- writing

    def write_batches(self, batches: Sequence[Batch]) -> None:
        """Append batches that follow each other, without a flush."""
        pieces: list[Buffer] = []
        entries: list[bytes] = []
        end, next_id = self.end, self.next_id
        for batch in batches:
            assert batch.first_id == next_id, f"a batch starts at {batch.first_id}, the segment's next id is {next_id}"
            assert not self.is_full, f"a batch at {batch.first_id} comes behind the last one of its segment"
            pieces += batch.pieces
            entries.append(encode_entries(end, batch))
            end += batch.size
            next_id += len(batch)
        self._put(pieces, b"".join(entries), end=end, next_id=next_id)
        head = batches[-1].head
        self.log_end = End(crc=head.crc, time=head.time, segment_bytes=0 if head.is_last else end)
        self._unflushed += batches

    def flush(self) -> None:
        super().flush()
        if self._builder is not None:
            self._unhashed += self._unflushed
            self._hashed_to = self.end
        if self._unflushed:
            is_kept = len(self._unflushed) == 1 and self._unflushed[0].size <= NEWEST_BYTES_MAX
            self._newest = self._unflushed[0] if is_kept else None
        self._unflushed = []

    @property
    def unhashed_bytes(self) -> int:
        return 0 if self._builder is None else self._hashed_to - self._builder.offset

    def hash_flushed(self) -> None:
        """Add all flushed batches to the footer. This may run in parallel with the next append. Only an append that fills
        the segment, and a cut, must wait for it."""
        builder, batches = self._builder, self._unhashed
        while batches and builder is not None:
            batch = batches.popleft()
            builder.add(batch.head, batch.pieces)

    def cut(self, *, end: int, next_id: int) -> None:
        """Truncate batches, and with them the footer, which covers all batches."""
        self.has_footer = False
        self._newest = None
        super().cut(end=end, next_id=next_id)
        self._unflushed = []
        if self._hashed_to != end:
            self._builder, self._unhashed = None, deque()
        self.log_end = self.found_log_end()

    def write_footer(self, before: bytes) -> None:
        """Write the footer after the last batch, which has been flushed. `before`: the hash of the footer before."""
        assert self.is_full
        assert self._flushed == (self.end, self.next_id), "a footer never goes to the disk before its data"
        self.hash_flushed()
        builder = self._builder or self._caught_up()
        assert builder.offset == self.end
        try:
            self.data.write(self.end, builder.footer(before).encode())
            self.data.flush()
        except DiskFull:
            self.data.truncate(self.end)
            raise
        self.has_footer, self._builder = True, None

    def _caught_up(self) -> FooterBuilder:
        builder = FooterBuilder(self.data.read(0, HEADER_BYTES))

        def add(span: Span) -> None:
            assert isinstance(span, BatchSpan)
            builder.add_span(span)

        stop = scan(
            self.data,
            segment_first_id=self.first_id,
            next_id=self.first_id,
            offset=HEADER_BYTES,
            end=self.end,
            version=BATCHES,
            on_span=add,
        )
        if stop.offset != self.end:
            raise Suspect(self.first_id)
        return builder

    def footer_hash(self) -> bytes | None:
        """Return the hash of the footer in the file; None without a sound footer."""
        footer = read_footer(self.data)
        return None if footer is None or footer.last_id != self.next_id - 1 else footer.hash

    # -- reading

    def start_of(self, id_: int) -> int:
        return self.end if id_ == self.next_id else self._head_of(id_)[0]

    def offset_of(self, id_: int) -> int:
        return self.end if id_ == self.next_id else int(self._places(id_, 1)[0][0])

    def _places(self, first_id: int, count: int) -> tuple[I64, I64]:
        """Return where records and their batches start by the index, up to the first impossible entry, for one record at
        least."""
        end, next_id = self._flushed
        if not self.first_id <= first_id < next_id:  # it was truncated meanwhile
            raise Suspect(self.first_id)
        starts, places = places_of(read_index(self.index, first_id - self.first_id, min(count, next_id - first_id)))
        is_possible = (places >= HEADER_BYTES) & (starts >= places + BATCH_HEAD_BYTES) & (starts < end)
        is_possible[1:] &= (np.diff(starts) >= OVERHEAD_BYTES) & (np.diff(places) >= 0)
        if not is_possible.all():
            known = int(np.argmin(is_possible))
            starts, places = starts[:known], places[:known]
        if len(starts) == 0:
            raise Suspect(self.first_id)
        return starts, places

    def _head_of(self, id_: int) -> tuple[int, Head]:
        """Return offset and head of the batch that holds a record. The head is checked, the rest of the batch is not."""
        place = int(self._places(id_, 1)[1][0])
        head = Head.decode(self.data.read(place, BATCH_HEAD_BYTES))
        if head is None or not head.first_id <= id_ <= head.last_id or head.size > self._flushed[0] - place:
            raise Suspect(self.first_id)
        return place, head

    def _batches(self, first_id: int, last_id: int, bytes_max: int) -> list[Batch]:
        """Return sound batches from the one that holds `first_id`, to the one that holds `last_id` or a later one, up to
        `bytes_max`, at least one."""
        end, next_id = self._flushed
        starts, places = self._places(first_id, min(last_id - first_id + 1, bytes_max // OVERHEAD_BYTES + 1) + 1)
        place = int(places[0])
        stops = places[1:][np.diff(places) > 0]
        if first_id + len(places) == next_id:
            stops = np.append(stops, end)
        stops = stops[stops <= place + bytes_max]
        stop = int(stops[-1]) if len(stops) else place + self._head_of(first_id)[1].size
        raw = memoryview(self.data.read(place, stop - place))
        found = sound_batches(raw, first_id, starts - place)
        if not found:
            raise Suspect(self.first_id)
        return found

    def read(self, first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> Run:
        found = self._batches(first_id, last_id, bytes_max)
        return records_of(found, first_id, last_id, bytes_max, with_locks=with_locks)

    def read_whole(self, first_id: int, last_id: int, bytes_max: int) -> tuple[Batch, ...]:
        """Return sound batches from `first_id`, where a batch must begin, to the one that holds `last_id`."""
        found = self._batches(first_id, last_id, bytes_max)
        begin, end = found[0].first_id, found[0].last_id
        if begin != first_id:
            raise BadArgument(f"no batch begins at id {first_id}: one has the ids {begin} to {end}")
        return tuple(batch for batch in found if batch.first_id <= last_id)

    def flushed_batch(self, id_: int) -> Batch:
        """Return the batch that holds a record; from memory if it is the newest one, which this process has flushed."""
        newest = self._newest
        if newest is not None and newest.first_id <= id_ <= newest.last_id:
            return newest
        return self.batch_with(id_)

    def batch_with(self, id_: int) -> Batch:
        return self._batches(id_, id_, 0)[0]

    def end_of(self, id_: int) -> tuple[int, int]:
        batch, place = self.batch_with(id_), self._head_of(id_)[0]
        return (place + batch.size, id_ + 1) if batch.last_id == id_ else (place, batch.first_id)

    def locks_up_to(self, last_id: int) -> Iterator[tuple[Head, LockColumns]]:
        """Yield head and locks of each batch, backwards from `last_id`, without reading records."""
        size = BATCH_HEAD_BYTES
        while last_id >= self.first_id:
            place = int(self._places(last_id, 1)[1][0])
            raw = self.data.read(place, size)  # the size that the batch after it had
            head = Head.decode(raw)
            if head is None or not head.first_id <= last_id <= head.last_id:
                raise Suspect(self.first_id)
            size = head.lead
            if len(raw) < size:
                raw = self.data.read(place, size)
            sections = memoryview(raw)[BATCH_HEAD_BYTES:size]
            locks = decode_locks(sections[: head.lock_bytes], head.records)
            if crc32(sections) != head.section_crc or locks is None:
                raise Suspect(self.first_id)
            yield head, locks
            last_id = head.first_id - 1

    def time_of(self, id_: int) -> int:
        return self._head_of(id_)[1].time

    def first_since(self, time: int, last_id: int) -> int:
        """Return the first id up to `last_id` whose time is `time` or later; `last_id` + 1 if there is none."""
        low, high = self.first_id, last_id + 1
        while low < high:
            head = self._head_of((low + high) // 2)[1]
            if head.time < time:
                low = head.last_id + 1
            else:
                high = head.first_id
        return min(low, last_id + 1)
