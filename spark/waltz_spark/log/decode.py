"""Records as Arrow columns, without a Python object per record.

The heads are read as one structured array (`waltzd.format.record.heads`, the same decoder that storages use), the payloads
are cut out of the run by one native call. A batch owns its memory, so the run's buffer may be used again. Nothing that a
checksum does not prove becomes a row: a damaged segment ends with an error that names the ids and bytes, never with fewer
rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waltzd.disk.seam import Disk, File
from waltzd.errors import HeaderDamaged, PartitionDamaged, TooLarge
from waltzd.format.layout import HEADER_BYTES, INDEX_SUFFIX, NO_MARK, SEGMENT_SUFFIX, FileHeader, first_id_of
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, Run, heads
from waltzd.format.scan import CHUNK_BYTES, Tail, judge_tail, next_sound, scan

SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("txid", pa.int64()),
        ("client_id", pa.int32()),
        ("generation", pa.int32()),
        ("req_partition", pa.int32()),
        ("seq", pa.int32()),
        ("header", pa.int32()),
        ("crc", pa.int32()),
        ("data", pa.binary()),
    ]
)
"""`crc` is the payload's checksum as stored, as signed 32 bits: Arrow readers on the JVM have no unsigned integers."""

BATCH_BYTES_MAX = (1 << 31) - 1
"""Arrow's `binary` addresses its bytes with 32-bit signed offsets."""

_COLUMN = {
    "client_id": "client",
    "generation": "generation",
    "req_partition": "partition",
    "seq": "sequence",
    "header": "header",
}


def record_batch(run: Run, partition: int) -> pa.RecordBatch:
    """The records of a run whose checksums were checked, as rows in order of their ids."""
    if len(run.data) > BATCH_BYTES_MAX:
        raise TooLarge(
            f"{len(run.data)} bytes of records do not fit one Arrow batch of {BATCH_BYTES_MAX} bytes",
            not_done="no batch was made",
            next_step="decode fewer records at once",
        )
    count = len(run)
    head = heads(run)
    offsets = pa.py_buffer(run.bounds.astype(np.int32))
    records = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(run.data)])
    columns = {
        "partition": np.full(count, partition, np.int32),
        "txid": head["id"].astype(np.int64),
        "crc": head["data_crc"].astype(np.uint32).view(np.int32),
        **{name: head[field].astype(np.int32) for name, field in _COLUMN.items()},
        "data": pc.binary_slice(records, HEAD_BYTES, -TRAILER_BYTES),
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[name]) for name in SCHEMA.names], schema=SCHEMA)


def read_segment(
    disk: Disk, path: str, *, is_last: bool = False, batch_bytes: int = CHUNK_BYTES
) -> Iterator[pa.RecordBatch]:
    """All records of a segment file, checked on the way.

    `is_last`: the partition's last segment may end inside a record, because a daemon was writing or stopped there; the rows
    then end before it. In any other segment that is damage."""
    file = disk.open(path)
    index = None
    try:
        header = _header(file)
        index_path = path.removesuffix(SEGMENT_SUFFIX) + INDEX_SUFFIX
        index = disk.open(index_path) if disk.exists(index_path) else None
        yield from _batches(file, index, header, is_last, batch_bytes)
    finally:
        file.close()
        if index is not None:
            index.close()


def _header(file: File) -> FileHeader:
    header = FileHeader.decode(file.read(0, HEADER_BYTES), file.path)
    named = first_id_of(file.path.rpartition("/")[2])
    if named != header.first_id:
        raise HeaderDamaged(f"{file.path} says that it starts at id {header.first_id}, which is not its name")
    return header


def _batches(
    file: File, index: File | None, header: FileHeader, is_last: bool, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    end, offset, next_id = file.size(), HEADER_BYTES, header.first_id
    window = batch_bytes
    while offset < end:
        ready: list[pa.RecordBatch] = []
        stop = scan(
            file,
            segment_first_id=header.first_id,
            next_id=next_id,
            offset=offset,
            end=min(end, offset + window),
            index=index,
            on_run=lambda _, run, ready=ready: ready.append(record_batch(run, header.partition)),  # type: ignore[misc]
        )
        yield from ready
        if stop.offset > offset:
            window = batch_bytes
        elif offset + window < end:
            window *= 2  # a record larger than the window, or damage: only the rest of the file can tell
        else:
            _judge_rest(file, header, offset, end, next_id, is_last)
            return
        offset, next_id = stop.offset, stop.next_id


def _judge_rest(file: File, header: FileHeader, offset: int, end: int, next_id: int, is_last: bool) -> None:
    """Raises unless the bytes from `offset` on are a torn tail."""
    behind = next_sound(file, offset=offset + 1, end=end, low_id=next_id, high_id=next_id + (end - offset))
    tail = judge_tail(tail_bytes=end - offset, next_id=next_id, is_last=is_last, has_gaps=behind is not None, floor=NO_MARK)
    if tail is Tail.TORN:
        return
    last_byte = (behind.offset if behind is not None else end) - 1
    raise PartitionDamaged(
        f"{file.path}: bytes {offset} to {last_byte} are not the record of id {next_id} of partition {header.partition}",
        not_done=f"no row from id {next_id} on was returned",
    )
