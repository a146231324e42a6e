"""Arrow columns against the manifest of the original's files, and against records decoded one by one."""

from __future__ import annotations

import random

from waltz_spark.log.arrow import BESIDE, SCHEMA
from waltz_spark.table.columns import record_batch

from tests.spark.growing import run_of
from waltzd.format.record import Run, encode_payloads


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
                **dict.fromkeys(BESIDE.names),
            }
        )
    return out


def extreme_run() -> Run:
    edges = [-(2**31), -1, 0, 1, 2**31 - 1]
    pick = random.Random(3)
    payloads = [b"", b"x", pick.randbytes(100_000), b"", "é😀".encode()]
    requests = zip(edges, edges[::-1], edges[1:] + edges[:1], edges[2:] + edges[:2], strict=True)
    return run_of(2**63 - 100, [(*request, *rest) for request, *rest in zip(requests, edges, payloads, strict=True)])


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
