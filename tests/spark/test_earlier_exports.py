"""Exports that an earlier version made: they are read and verified, and go on; and what the commands print about them.

`tests/fixtures/exports/log` is the directory of a storage with two partitions; partition 0 goes over from format 0 to
format 1, and was forked at id 60. `parquet` and `delta` were made in two runs, one before and one behind the fork, each of
a part of the log. Never change these files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
import pytest
from waltz_spark.export import export_command
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.tasks import Written
from waltz_spark.log.arrow import SCHEMA, read_grouped
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.table.columns import record_batch

from tests.spark.exporting import tasks
from waltzctl.main import run
from waltzd.errors import EXIT_OK
from waltzd.errors.operations import ExportUnfit

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"
GOLDEN = EXPORTS / "printed.json"
"""What `-o json` of each command printed: `printed` writes it."""
LATER = UUID(int=99)
"""The timeline of partition 0 since the fork."""
CHANGING = {"seconds", "megabytes_per_second", "task_seconds", "runs_on", "written", "bytes"}
"""What differs from run to run; the size of a file depends on the version of PyArrow."""


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, and Java is not looked for."""

    def here(*arguments: Any) -> Generator[Written, None, None]:
        job, given = arguments[-2:]
        yield from tasks(job, given)

    monkeypatch.setattr(export_command, "_tasks", here)
    monkeypatch.setattr("waltz_spark.engine.session.SparkChoice.ready", lambda _self: None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of all that is there."""
    return Path(shutil.copytree(EXPORTS, tmp_path / "exports"))


def printed(place: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run([*words, "-o", "json"]) == EXIT_OK, capsys.readouterr().err
    return json.loads(capsys.readouterr().out, object_hook=lambda found: plain(found, place))


def plain(found: dict[str, Any], place: Path) -> dict[str, Any]:
    return {
        name: "…" if name in CHANGING else value.replace(str(place), "…") if isinstance(value, str) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_an_earlier_export_is_verified_and_goes_on(place: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, source = str(place / kind), ("--source", str(place / "log"))
    told = {
        "status": printed(place, capsys, "export", "status", out),
        "verify": printed(place, capsys, "export", "verify", out, "--against-log", *source),
        "dry run": printed(place, capsys, "spark-export", out, *source, "--dry-run"),
        "run": printed(place, capsys, "spark-export", out, *source),
        "status after it": printed(place, capsys, "export", "status", out),
        "verify after it": printed(place, capsys, "export", "verify", out, "--against-log", *source),
        "run again": printed(place, capsys, "spark-export", out, *source),
    }
    assert told == json.loads(GOLDEN.read_text())[kind]
    manifest = newest_manifest(LocalDestination(out))
    assert manifest is not None
    assert (manifest.number, manifest.timelines) == (4, {0: LATER})
    rows = pq.ParquetDataset(sorted(str(path) for path in Path(out).glob("*.parquet"))).read().to_pylist()
    assert [{name: row[name] for name in SCHEMA.names} for row in rows] == log_in(place / "log")


@pytest.mark.parametrize(("kind", "ability"), [("json", "JSON"), ("lossless", "lossless")])
def test_an_export_of_a_removed_ability_is_refused_by_name(
    place: Path, kind: str, ability: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = str(place / kind), ("--source", str(place / "log"))
    before = {path: path.read_bytes() for path in (place / kind).rglob("*") if path.is_file()}
    for words in (["export", "status", out], ["export", "verify", out], ["spark-export", out, *source]):
        assert run(words) == ExportUnfit.exit_code, words
        told = capsys.readouterr().err
        assert told.startswith("W2240"), told
        assert ability.lower() in told.lower(), told
        assert "docs/spark.md" in told
    assert {path: path.read_bytes() for path in (place / kind).rglob("*") if path.is_file()} == before


def log_in(directory: Path) -> list[dict[str, Any]]:
    """The log itself, row by row."""
    origin = DirectoryOrigin(storages=(str(directory),))
    return [
        row
        for extent in origin.catalog().extents
        for found in read_grouped(origin, extent, extent.span, batch_bytes=1 << 20, with_locks=True)
        for row in record_batch(found.run, extent.partition, found.groups).to_pylist()
    ]
