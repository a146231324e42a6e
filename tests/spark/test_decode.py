"""Arrow columns against the manifest of the original's files, and against records decoded one by one."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from waltz_spark.log.decode import SCHEMA, read_segment, record_batch

from waltzd.disk.real import RealDisk
from waltzd.disk.seam import join
from waltzd.disk.simulated import SimDisk
from waltzd.errors import HeaderDamaged, PartitionDamaged
from waltzd.format.checksum import crc32
from waltzd.format.layout import HEADER_BYTES, FileHeader, index_name, segment_name
from waltzd.format.record import Run, encode_payloads, encode_run

KEY = UUID(int=5)
FIRST_ID = 1000


def signed(value: int) -> int:
    return int.from_bytes(value.to_bytes(4, "big"), "big", signed=True)


def rows_of(run: Run, partition: int) -> list[dict[str, object]]:
    """The twin of `record_batch`, one record after the other."""
    out: list[dict[str, object]] = []
    for number in range(len(run)):
        record = run.record(number)
        request = record.request
        out.append(
            {
                "partition": partition,
                "txid": record.id,
                "client_id": request.client,
                "generation": request.generation,
                "req_partition": request.partition,
                "seq": request.sequence,
                "header": record.header,
                "crc": signed(record.data_crc),
                "data": record.payload,
            }
        )
    return out


def extreme_run() -> Run:
    edges = [-(2**31), -1, 0, 1, 2**31 - 1]
    pick = random.Random(3)
    payloads = [b"", b"x", pick.randbytes(100_000), b"", "é😀".encode()]
    return encode_run(
        2**63 - 100,
        requests=np.array([edges, edges[::-1], edges[1:] + edges[:1], edges[2:] + edges[:2]], np.int32).T,
        headers=np.array(edges, np.int32),
        lengths=np.array([len(payload) for payload in payloads], np.int64),
        data_crcs=np.array([crc32(payload) for payload in payloads], np.uint32),
        payloads=b"".join(payloads),
    )


def write_segment(disk: SimDisk, run: Run, *, with_index: bool = True) -> str:
    header = FileHeader(created_ms=1, key=KEY, partition=4, first_id=run.first_id).encode()
    path = segment_name(run.first_id)
    disk.create(path).write_many(0, [header, run.data])
    if with_index:
        entries = (run.bounds[:-1] + HEADER_BYTES).astype(">i8").tobytes()
        disk.create(index_name(run.first_id)).write_many(0, [header, entries])
    return path


def test_columns_are_what_each_record_says() -> None:
    run = extreme_run()
    batch = record_batch(run, 7)
    assert batch.schema == SCHEMA
    batch.validate(full=True)
    assert batch.to_pylist() == rows_of(run, 7)


def test_no_records_are_no_rows() -> None:
    batch = record_batch(extreme_run().part(2, 2), 7)
    assert (batch.num_rows, batch.schema) == (0, SCHEMA)


def test_a_batch_outlives_the_buffer_that_it_was_made_from() -> None:
    run = encode_payloads(0, [b"first", b"second"])
    raw = bytearray(run.data)
    batch = record_batch(Run(0, memoryview(raw), run.bounds), 0)
    raw[:] = b"#" * len(raw)
    assert batch.to_pylist() == rows_of(run, 0)


@pytest.mark.parametrize("storage", ["storage0", "storage1", "storage2"])
def test_the_files_of_the_original(original: Path, storage: str) -> None:
    section = (original / "manifest.txt").read_text().partition(f"## {storage}\n")[2].partition("\n## ")[0]
    said = [line.split() for line in section.splitlines() if line.startswith("rec ")]
    found = []
    for path in sorted((original / storage).glob("*/*.seg"), key=lambda path: (int(path.parent.name), path.name)):
        for batch in read_segment(RealDisk(), str(path), batch_bytes=4096):
            for row in batch.to_pylist():
                request = ":".join(str(row[name]) for name in ("client_id", "generation", "req_partition", "seq"))
                digest = hashlib.sha256(row["data"]).hexdigest()
                crc = f"{row['crc'] & 0xFFFFFFFF:08x}"
                words = [row["partition"], row["txid"], request, row["header"], len(row["data"]), digest, crc]
                found.append(["rec", *map(str, words)])
    assert found == [words[:8] for words in said]


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("batch_bytes", [41, 1000, 1 << 20])
def test_a_segment_is_read_in_batches_whatever_the_size_of_its_records(with_index: bool, batch_bytes: int) -> None:
    pick = random.Random(1)
    sizes = [0, 5, 70_000, 0, 300, 2_000, 0, 0, 150_000]
    run = encode_payloads(FIRST_ID, [pick.randbytes(size) for size in sizes])
    disk = SimDisk()
    path = write_segment(disk, run, with_index=with_index)
    rows = [row for batch in read_segment(disk, path, batch_bytes=batch_bytes) for row in batch.to_pylist()]
    assert rows == rows_of(run, 4)


def test_a_wrong_index_changes_nothing() -> None:
    run = encode_payloads(FIRST_ID, [b"payload %d" % n for n in range(200)])
    disk = SimDisk()
    path = write_segment(disk, run)
    disk.corrupt(index_name(FIRST_ID), HEADER_BYTES + 8 * 50, b"\x7f" * 80)
    assert [row for batch in read_segment(disk, path) for row in batch.to_pylist()] == rows_of(run, 4)


def test_damage_ends_the_rows_and_names_the_record() -> None:
    run = encode_payloads(FIRST_ID, [b"payload %d" % n for n in range(200)])
    disk = SimDisk()
    path = write_segment(disk, run)
    start, stop = (HEADER_BYTES + int(run.bounds[number]) for number in (150, 151))
    disk.corrupt(path, start + 40, b"\xff")
    for is_last in (True, False):
        seen: list[dict[str, object]] = []
        batches = map(pa.RecordBatch.to_pylist, read_segment(disk, path, is_last=is_last))
        with pytest.raises(PartitionDamaged, match=f"bytes {start} to {stop - 1} are not the record of id 1150 of"):
            deque(map(seen.extend, batches))
        assert seen == rows_of(run.part(0, 150), 4)


def test_a_torn_tail_is_allowed_in_the_last_segment_only() -> None:
    run = encode_payloads(FIRST_ID, [b"payload %d" % n for n in range(20)])
    disk = SimDisk()
    path = write_segment(disk, run)
    file = disk.open(path, write=True)
    file.truncate(file.size() - 3)
    rows = [row for batch in read_segment(disk, path, is_last=True) for row in batch.to_pylist()]
    assert rows == rows_of(run.part(0, 19), 4)
    with pytest.raises(PartitionDamaged, match="of id 1019 of partition 4"):
        list(read_segment(disk, path))


def test_a_segment_under_a_wrong_name_is_refused() -> None:
    disk = SimDisk()
    path = write_segment(disk, encode_payloads(FIRST_ID, [b"x"]))
    disk.make_directory("d")
    disk.rename(path, segment_name(3))
    with pytest.raises(HeaderDamaged, match="starts at id 1000, which is not its name"):
        list(read_segment(disk, join("", segment_name(3))))
