"""Batches of chosen columns and records against all columns of all records."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.table.columns import EVERY, METADATA, Projection, Surroundings, record_batch, wanted
from waltz_spark.table.pushdown import Filters, Ranges

from tests.spark.growing import run_of
from waltzd.errors import BadArgument
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run

SEGMENT = FileHeader(created_ms=1_700_000_000_123, key=UUID(int=1), partition=3, first_id=90)
AROUND = Surroundings(partition=3, source="somewhere", segment=SEGMENT)
FIRST = 100


def made_up(count: int) -> Run:
    chance = random.Random(count)
    payloads = [chance.randbytes(chance.choice([0, 1, 7, 300])) for _ in range(count)]
    requests = [tuple(chance.randrange(-(2**31), 2**31) for _ in range(4)) for _ in payloads]
    return run_of(
        FIRST, [(*request, chance.randrange(5) - 2, payload) for request, payload in zip(requests, payloads, strict=True)]
    )


@given(st.integers(0, 50), st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True))
def test_chosen_columns_are_those_of_the_whole(count: int, names: list[str]) -> None:
    run = made_up(count)
    projection = Projection(pa.schema([SCHEMA.field(name) for name in names]))
    batch = projection.batch(run, AROUND)
    batch.validate(full=True)
    assert batch.schema == projection.schema
    assert batch.to_pylist() == record_batch(run, 3).select(names).to_pylist()


@given(st.integers(0, 50), st.sets(st.integers(-2, 2)), st.lists(st.tuples(st.integers(95, 155), st.integers(95, 155))))
def test_chosen_records_are_those_that_the_filters_let_through(
    count: int, headers: set[int], ids: list[tuple[int, int]]
) -> None:
    run = made_up(count)
    filters = Filters(txid=Ranges(ids), header=Ranges((each, each) for each in headers))
    batch = Projection(SCHEMA).batch(run, AROUND, filters)
    batch.validate(full=True)
    whole = record_batch(run, 3).to_pylist()
    assert batch.to_pylist() == [row for row in whole if row["txid"] in filters.txid and row["header"] in headers]


def test_what_surrounds_a_record() -> None:
    run = made_up(9)
    filters = Filters(txid=Ranges([(103, 104)]))
    rows = Projection(METADATA).batch(run, AROUND, filters).to_pylist()
    for row, number in zip(rows, (3, 4), strict=True):
        record = run.record(number)
        assert row["record_crc"] & 0xFFFFFFFF == record.crc
        assert row["record_bytes"] == record.length + 40
        assert row["segment_first_txid"] == 90
        assert row["segment_created"] == datetime.fromtimestamp(1_700_000_000.123, UTC)
        assert row["source"] == "somewhere"


def test_where_no_segment_is_known_its_columns_are_null() -> None:
    (row,) = Projection(METADATA).batch(made_up(1), Surroundings(partition=0, source="x")).to_pylist()
    assert row["segment_first_txid"] is row["segment_created"] is None


def test_a_batch_outlives_its_buffer() -> None:
    run = made_up(20)
    raw = bytearray(run.data)
    for filters in (Filters(), Filters(txid=Ranges([(105, 109)]))):
        batch = Projection(EVERY).batch(Run(FIRST, memoryview(raw), run.bounds), AROUND, filters)
        expected = batch.to_pylist()
        raw[:] = b"#" * len(raw)
        assert batch.to_pylist() == expected
        raw[:] = run.data


def test_names_of_the_user_are_kept_whatever_their_case() -> None:
    schema = pa.schema([("TxId", pa.int64()), ("DATA", pa.binary())])
    assert Projection(schema).batch(made_up(3), AROUND).schema == schema


def test_all_that_there_is_or_what_was_named() -> None:
    assert wanted(None, metadata=False) == SCHEMA
    assert wanted(None, metadata=True) == EVERY
    assert wanted(" data , TXID", metadata=False).names == ["data", "txid"]


@pytest.mark.parametrize("names", ["", "txid,", "heder", "txid,txid"])
def test_names_that_make_no_sense(names: str) -> None:
    with pytest.raises(BadArgument, match=r"a column|asked for twice"):
        wanted(names, metadata=False)


@pytest.mark.parametrize(
    "schema", [pa.schema([]), pa.schema([("txid", pa.int32())]), pa.schema([("txid", pa.int64()), ("TXID", pa.int64())])]
)
def test_schemas_that_make_no_sense(schema: pa.Schema) -> None:
    with pytest.raises(BadArgument, match=r"schema|twice"):
        Projection(schema)
