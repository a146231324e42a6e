"""Rows as text against what Python's own modules make of each value: the slow twins."""

from __future__ import annotations

import base64
import binascii
import json
import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from waltz_spark.exporting import form
from waltz_spark.exporting.form import as_text, base64_of, bytes_of, json_lines, text_schema
from waltz_spark.log.decode import record_batch

from waltzd.errors import ExportDamaged
from waltzd.format.record import encode_payloads

pick = random.Random(7)
KINDS: dict[pa.DataType, Callable[[], Any]] = {
    pa.float64(): lambda: pick.choice(
        [pick.random(), float(pick.randrange(9)), 1e20, 1e-7, -0.0, 1e15, 123456789012345680.0, math.nan, math.inf]
    ),
    pa.float32(): pick.random,
    pa.timestamp("us", "UTC"): lambda: pick.choice([pick.randrange(10**15), pick.randrange(10**9) * 10**6, -1, 0]),
    pa.timestamp("us"): lambda: pick.choice([pick.randrange(10**15), pick.randrange(10**9) * 10**6]),
    pa.timestamp("s", "Europe/Berlin"): lambda: pick.randrange(10**10),
    pa.decimal128(15, 3): lambda: Decimal(pick.randrange(-(10**9), 10**9)).scaleb(-3),
    pa.decimal128(38, 20): lambda: Decimal(pick.randrange(10**9)).scaleb(-20),
    pa.date32(): lambda: pick.randrange(10_000),
    pa.string(): lambda: "".join(pick.choices(["a", '"', "\\", "\n", "\0", "\x1f", " ", "é", "😀"], k=pick.randrange(9))),
    pa.time64("us"): lambda: pick.randrange(86_400) * 10**6,
    pa.list_(pa.binary()): lambda: [pick.choice([None, b"", b"\xfe"])] * pick.randrange(3),
    pa.struct({"d": pa.float64(), "b": pa.binary()}): lambda: {"d": pick.choice([math.nan, 0.5]), "b": pick.randbytes(2)},
    pa.list_(pa.int64()): lambda: [pick.randrange(9)] * pick.randrange(3),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_value_is_what_json_would_write(kind: pa.DataType) -> None:
    column = pa.array([None if pick.random() < 0.1 else KINDS[kind]() for _ in range(300)], kind)
    for part in (column, column.slice(100, 50), column.slice(7, 1)):
        lines = json_lines(pa.RecordBatch.from_arrays([part], names=["x"])).decode().splitlines()
        if pa.types.is_string(kind):
            assert [json.loads(line)["x"] for line in lines] == part.to_pylist()
        else:
            assert lines == [f'{{"x":{json.dumps(said(value))}}}' for value in part.to_pylist()]


def said(value: Any) -> Any:
    """The slow twin: what stands in JSON for it."""
    match value:
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case datetime() | date() | time():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case float() if not math.isfinite(value):
            return None
        case Decimal():
            return str(value)
        case list():
            return [said(inner) for inner in value]
        case dict():
            return {name: said(inner) for name, inner in value.items()}
        case _:
            return value


def test_moments_that_python_has_no_value_for() -> None:
    column = pa.array([1, 1_700_000_000_500_000_000, None], pa.int64()).cast(pa.timestamp("ns", "UTC"))
    lines = json_lines(pa.RecordBatch.from_arrays([column], names=["x"])).decode().splitlines()
    assert [json.loads(line)["x"] for line in lines] == [
        "1970-01-01T00:00:00.000000001+00:00", "2023-11-14T22:13:20.500000000+00:00", None,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(4), pa.binary_view()], ids=str)
def test_bytes_of_any_width_are_base64_and_nothing_stays_nothing(kind: pa.DataType, tmp_path: Path) -> None:
    from pyarrow import csv

    values = [None if pick.random() < 0.3 else pick.randbytes(4) for _ in range(50)]
    batch = pa.RecordBatch.from_arrays([pa.array(range(50)), pa.array(values, kind)], names=["n", "x"])
    for part in (batch, batch.slice(7, 20)):
        expected = [said(value) for value in part.column(1).to_pylist()]
        assert [json.loads(line)["x"] for line in json_lines(part).splitlines()] == expected
        with csv.CSVWriter(str(tmp_path / "x.csv"), text_schema(part.schema)) as writer:
            writer.write_batch(as_text(part))
        options = csv.ConvertOptions(
            column_types={"x": pa.string()}, strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        assert csv.read_csv(tmp_path / "x.csv", convert_options=options).column("x").to_pylist() == expected


def test_base64_is_read_as_strictly_as_it_can_be() -> None:
    """Against the reader of Python, one text at a time, beside texts that are sound."""
    seen = set[bool]()
    for _ in range(1500):
        text = bytearray(base64.b64encode(pick.randbytes(pick.randrange(7))))
        for _ in range(pick.randrange(3)):
            if text:
                text[pick.randrange(len(text))] = pick.choice(b"A=B/+ \n!")
        column = [*base64_of(pa.array([b"", b"before"], pa.binary())).to_pylist(), text.decode(), "QQ=="]
        try:
            expected = base64.b64decode(bytes(text), validate=True)
        except binascii.Error:
            with pytest.raises(ExportDamaged, match="here: the column data holds what is not base64"):
                bytes_of(pa.array(column), "here")
            seen.add(False)
        else:
            assert bytes_of(pa.array(column), "here").to_pylist() == [b"", b"before", expected, b"A"]
            seen.add(True)
    assert seen == {True, False}


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("format_", ["json", "csv"])
def test_files_with_rows_longer_than_a_block_are_read(
    format_: str, compression: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Among short ones, with quotes and lines in another column."""
    monkeypatch.setattr(form, "TEXT_BLOCK_BYTES", 1000)
    shape = form.Form(format=format_, compression=compression)
    payloads = [pick.randbytes(pick.choice([0, 5, 300, 700, 5000])) for _ in range(60)]
    batch = record_batch(encode_payloads(3, payloads), 7)
    beside = pa.array([pick.choice(["", '"', 'a\n"b"\n', "\r\n", ","]) for _ in payloads])
    wide = pa.RecordBatch.from_arrays([*batch.columns, beside], names=[*batch.schema.names, "beside"])
    with (tmp_path / "file").open("wb") as file:
        writer = form.open_writer(shape, file, wide.schema, {})
        writer.write(wide)
        writer.close({})
    with pa.OSFile(str(tmp_path / "file")) as source:
        found = pa.Table.from_batches(form.read_batches(shape, source, "here"))
    assert found.column("data").to_pylist() == payloads
    assert found.column("txid").to_pylist() == list(range(3, 63))
