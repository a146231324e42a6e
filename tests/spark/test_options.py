"""What is refused before anything is written: places within each other, logs that were set back, odd columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from waltz_spark.export import options
from waltz_spark.export.form import check_columns, form_of
from waltz_spark.export.options import SourceOptions, check_ends, check_no_overlap
from waltz_spark.log.arrow import SCHEMA

from waltzctl.shell.cluster_target import ClusterOptions
from waltzd.errors import BadArgument
from waltzd.errors.operations import ExportGap

PLAIN = [pa.int32(), pa.uint8(), pa.float64(), pa.string(), pa.bool_(), pa.binary(), pa.timestamp("us", "UTC"), pa.date32()]


def test_what_decoders_usually_make_has_a_place() -> None:
    schema = pa.schema([*SCHEMA, *(pa.field(f"c{number}", kind) for number, kind in enumerate(PLAIN))])
    check_columns(form_of("parquet", None), schema)


def test_a_column_without_a_place_is_named() -> None:
    schema = pa.schema([*SCHEMA, pa.field("sound", pa.int64()), pa.field("odd", pa.month_day_nano_interval())])
    with pytest.raises(BadArgument, match="no place for the column odd"):
        check_columns(form_of("parquet", None), schema)


def test_an_output_within_what_is_read(tmp_path: Path) -> None:
    source, beside = tmp_path / "storage", tmp_path / "storage-export"
    source.mkdir()
    check_no_overlap(str(beside), [str(source)])
    (tmp_path / "link").symlink_to(source)
    for output, read in (
        (source, source),
        (source / "data" / "5", source),
        (tmp_path, source),
        (tmp_path / "link" / "x", source),
    ):
        with pytest.raises(BadArgument, match="lie within each other"):
            check_no_overlap(str(output), [str(beside), str(read)])


def test_a_cluster_that_was_set_back() -> None:
    check_ends({}, {0: 7}, "the cluster")
    with pytest.raises(ExportGap, match="partition 1: the export has ids up to 9, and the cluster ends at id 3"):
        check_ends({1: 3}, {0: 7, 1: 10}, "the cluster")


def test_a_channel_is_asked_of_a_running_cluster_and_of_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "chosen", lambda _reach, text: {"orders,0": [3, 1, 0]}[text])
    live = SourceOptions(cluster=ClusterOptions(coordinator="127.0.0.1:1"))
    assert live.numbers("orders,0") == (0, 1, 3)
    assert live.numbers("0-1") == (0, 1)
    with pytest.raises(BadArgument, match="'orders' is no partition"):
        SourceOptions(sources=("/var/lib/waltz",), cluster=ClusterOptions()).numbers("orders")
