"""What docs/spark.md says about reading: its programs run, its options and columns are those that there are."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from waltz_spark.export.origin_options import OPTIONS
from waltz_spark.table.columns import EVERY

from tests.spark.growing import GrowingStorage

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def reading() -> str:
    return PAGE.read_text().partition("\n## Reading\n")[2].partition("\n## ")[0]


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_programs_run(spark: Any, growing: GrowingStorage, tmp_path: Path, capfd: Any) -> None:
    """Those for a cluster run in test_live_source.py."""
    growing.append(0, [b"%d" % number for number in range(30)], headers=[number % 3 for number in range(30)])
    growing.append(1, [b"x"] * 5)
    names: dict[str, Any] = {}
    before = spark.conf.get("spark.sql.python.filterPushdown.enabled")
    try:
        for program in programs():
            if "coordinator" not in program:
                moved = program.replace("data/storage-0", str(growing.directory)).replace("out/", f"{tmp_path}/out/")
                exec(compile(moved, str(PAGE), "exec"), names)
    finally:
        spark.catalog.dropTempView("log")
        spark.conf.set("spark.sql.python.filterPushdown.enabled", before)
    shown = capfd.readouterr().out
    assert "|        0|   30|" in shown
    assert "|     2|   10|" in shown
    assert "only showing" not in shown
    assert spark.read.parquet(str(tmp_path / "out" / "log")).count() == 35
    assert {row["data"] for row in spark.read.json(str(tmp_path / "out" / "some")).collect()} == {
        base64.b64encode(b"%d" % number).decode() for number in range(10, 30) if number % 3 == 2
    }
    assert len(programs()) == 8


def test_every_option_and_column_is_told() -> None:
    told = {name.lower() for name in re.findall(r"`([A-Za-z_.]+)`", reading())}
    assert {name.lower() for name in OPTIONS} - {"paths"} <= told
    assert set(EVERY.names) <= told
