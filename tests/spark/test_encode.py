"""Rows as records again: whatever `decode` took apart, byte for byte."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.arrow import SCHEMA, encode, resealed
from waltz_spark.table.columns import record_batch

from tests.spark.growing import Row, run_of
from waltzd.errors.operations import ExportDamaged
from waltzd.format.checksum import crc32
from waltzd.format.record import Run, decode_record, encode_payloads, first_bad

int32 = st.integers(-(2**31), 2**31 - 1)
payload = st.binary(max_size=200) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=3), st.just(40_000))
record = st.tuples(int32, int32, int32, int32, int32, payload)


@given(first_id=st.integers(0, 2**63 - 100), records=st.lists(record, min_size=1, max_size=40), data=st.data())
def test_records_come_back(first_id: int, records: list[Row], data: st.DataObject) -> None:
    run = run_of(first_id, records)
    batch = record_batch(run, 3)
    found = encode(batch)
    assert (found.first_id, bytes(found.data), found.bounds.tolist()) == (first_id, bytes(run.data), run.bounds.tolist())
    start = data.draw(st.integers(0, len(records) - 1))
    part = encode(batch.slice(start, 7))
    assert bytes(part.data) == bytes(run.part(start, min(start + 7, len(run))).data)
    assert resealed(found) is found


@given(records=st.lists(record, min_size=1, max_size=40), wrong=st.frozensets(st.integers(0, 39)))
def test_a_record_with_a_wrong_checksum_of_its_client_comes_back_resealed(
    records: list[Row], wrong: frozenset[int]
) -> None:
    """The original seals each record over its bytes, whatever the client said of the payload."""
    made = run_of(5, records, wrong)
    raw = bytearray(made.data)
    for end, start in zip(made.bounds[1:].tolist(), made.bounds[:-1].tolist(), strict=True):
        raw[end - 4 : end] = crc32(raw[start : end - 4]).to_bytes(4, "big")
    sound = Run(5, memoryview(bytes(raw)), made.bounds)
    assert first_bad(sound) is None
    found = encode(record_batch(sound, 0))
    assert (bytes(found.data) == bytes(raw)) == wrong.isdisjoint(range(len(records)))
    assert bytes(resealed(found).data) == bytes(raw)


def test_a_payload_that_was_changed_makes_a_damaged_record() -> None:
    batch = record_batch(encode_payloads(0, [b"one", b"two", b"three"]), 0)
    columns = {name: batch.column(name) for name in SCHEMA.names}
    columns["data"] = pa.array([b"one", b"TWO", b"three"], pa.binary())
    assert first_bad(encode(pa.RecordBatch.from_pydict(columns, schema=SCHEMA))) == 1


def test_no_rows_are_no_records() -> None:
    assert len(encode(record_batch(encode_payloads(0, [b"x"]), 0).slice(1))) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"txid": pa.array([0, 2, 3])}, "the ids from 0 on do not follow each other"),
        ({"txid": pa.array([-1, 0, 1])}, "the ids from -1 on do not follow"),
        ({"partition": pa.array([0, 0, 1], pa.int32())}, "rows of partition 0 and 1"),
        ({"seq": pa.array([0, None, 1], pa.int32())}, "the column seq has rows without a value"),
        ({"data": pa.array(["a", "b", "c"])}, "the column data is string; a record needs binary"),
        ({"crc": None}, "there is no column crc"),
    ],
)
def test_rows_that_are_no_records(change: dict[str, pa.Array | None], words: str) -> None:
    batch = record_batch(encode_payloads(0, [b"one", b"two", b"three"]), 0)
    columns = {name: batch.column(name) for name in SCHEMA.names} | change
    with pytest.raises(ExportDamaged, match=words):
        encode(pa.RecordBatch.from_pydict({name: column for name, column in columns.items() if column is not None}))


def test_one_record_is_what_a_person_reads() -> None:
    run = run_of(7, [(1, 2, 3, 4, 5, b"hello")])
    assert decode_record(encode(record_batch(run, 9)).data) == run.record(0)
