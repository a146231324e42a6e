"""Directories and archives of both formats against what was put into them, one transaction after the other."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from waltz_spark.log.archive_segments import ArchiveSegments
from waltz_spark.log.arrow import BESIDE
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.origin import Catalog, Origin, Span
from waltz_spark.log.plan import Sizing
from waltz_spark.log.segment import SegmentPlace, read_segment_runs
from waltz_spark.table.columns import columns_of, record_batch
from waltz_spark.table.pushdown import Filters, Ranges
from waltz_spark.table.read_task import Reading, tasks

from tests.spark.archiving import archive_of, joined, make_small, only_archived, plain, rows
from tests.spark.batches import Log, microseconds, mixed_log
from waltzd.disk.real import RealDisk
from waltzd.errors.operations import PartitionDamaged
from waltzd.format.batch import HEAD_BYTES
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import NO_TIME

NAMES = ("partition", "txid", "client_id", "header", "data", "time", "locks", "group")
Opened: TypeAlias = Callable[[Log], tuple[Origin, Catalog, list[dict[str, Any]]]]


def only(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in NAMES} for row in found]


@pytest.fixture(params=["directory", "archive"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open a log as the directory of a storage, or as far as it is archived; return the rows that it must give, too."""

    def open_log(log: Log) -> tuple[Origin, Catalog, list[dict[str, Any]]]:
        origin: Origin = plain(log)
        if request.param == "directory":
            return origin, origin.catalog(), log.rows
        origin = joined(log, ArchiveSegments(place=str(archive_of([log.directory], tmp_path / "archive"))))
        origin, catalog = copy.deepcopy((origin, only_archived(origin.catalog())))
        span = catalog.spans[0]
        assert 0 < span.last < len(log.rows) - 1, "what is not sealed is not archived"
        assert rows(origin, catalog, span) == rows(plain(log), plain(log).catalog(), span), "all columns"
        return origin, catalog, log.rows[: span.count]

    make_small(monkeypatch)
    return open_log


@pytest.mark.parametrize("seed", range(6))
def test_any_ids_of_a_log_of_both_formats(tmp_path: Path, opened: Opened, seed: int) -> None:
    log, chance = mixed_log(tmp_path / "s" / "0", seed, plain=seed != 4), random.Random(seed)
    origin, catalog, expected = opened(log)
    assert catalog.spans == {0: Span(0, len(expected) - 1)}
    for index in (True, False):
        if not index:
            for path in log.directory.glob("*.idx"):
                path.unlink()
        for batch_bytes in (1, 300, 1 << 20):
            assert only(rows(origin, catalog, catalog.spans[0], batch_bytes=batch_bytes)) == expected
            for _ in range(6):
                first = chance.randrange(len(expected))
                some = Span(first, chance.randrange(first, len(expected)))
                assert only(rows(origin, catalog, some, batch_bytes=batch_bytes)) == expected[some.first : some.last + 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_first_of_each_time(tmp_path: Path, opened: Opened, seed: int) -> None:
    log = mixed_log(tmp_path / "s" / "0", seed, plain=seed != 3)
    origin, catalog, expected = opened(log)
    times = [NO_TIME if row["time"] is None else microseconds(row["time"]) for row in expected]
    for time in {0, *(time + more for time in times if time > 0 for more in (-1, 0, 1))}:
        at = next((number for number, when in enumerate(times) if when >= time), len(times))
        assert origin.first_at(catalog, 0, time) == at


@pytest.mark.parametrize("seed", range(4))
def test_filters_by_time_find_the_same_rows_and_read_less(tmp_path: Path, opened: Opened, seed: int) -> None:
    log, chance = mixed_log(tmp_path / "s" / "0", seed), random.Random(seed)
    origin, catalog, expected = opened(log)
    times = [NO_TIME if row["time"] is None else microseconds(row["time"]) for row in expected]
    projection = columns_of(NAMES)
    for _ in range(12):
        lows = chance.choices(times, k=chance.randrange(1, 4))
        ranges = Ranges([(low, low + chance.randrange(9_000_000)) for low in lows])
        reading = Reading(origin, projection, Filters(time=ranges))
        given = tasks(origin, catalog, catalog.spans, Sizing(), reading.filters)
        found = [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()]
        assert found == [row for row, time in zip(expected, times, strict=True) if time in ranges]


def test_what_is_not_asked_for_is_not_made(tmp_path: Path) -> None:
    log = mixed_log(tmp_path / "0", 3)
    origin = plain(log)
    extent = origin.catalog().extents[-1]
    for run in origin.read(extent, extent.span, batch_bytes=1 << 20):
        assert run.locks is None
        assert run.times is not None


def test_in_format_0_nothing_is_known_beside_the_record(tmp_path: Path) -> None:
    log = Log(directory=tmp_path / "0")
    log.add_plain(3)
    for row in rows(plain(log), plain(log).catalog(), Span(0, 2)):
        assert [row[name] for name in BESIDE.names] == [None] * 3
    assert record_batch(next(iter(plain(log).read(*whole(plain(log)), batch_bytes=99))), 0).schema.names[-3:] == [
        "time", "locks", "group",
    ]  # fmt: skip


def whole(origin: DirectoryOrigin) -> Any:
    extent = origin.catalog().extents[0]
    return extent, extent.span


def test_locks_are_columns_that_are_whole(tmp_path: Path) -> None:
    log = mixed_log(tmp_path / "0", 5)
    origin = plain(log)
    for extent in origin.catalog().extents:
        for run in origin.read(extent, extent.span, batch_bytes=500, with_locks=True):
            record_batch(run, 0).validate(full=True)


# -- damage ----------------------------------------------------------------------------------------------------------------


def test_every_wrong_byte_is_found_as_one_batch_after_the_other_finds_it(tmp_path: Path) -> None:
    """What is given before it is what was there."""
    log = Log(directory=tmp_path / "0", segment_bytes_max=1 << 20)
    for count in (1, 3, 1, 1, 8, 2):
        log.add(count, groups=(2,) if count > 2 else ())
    (path,) = log.directory.glob("*.seg")
    sound = path.read_bytes()
    chance = random.Random(4)
    ends = np.cumsum([HEADER_BYTES, *(batch.size for batch in log.batches)])
    place = SegmentPlace(str(log.directory), 0, None)
    for index in (True, False):
        if not index:
            next(log.directory.glob("*.idx")).unlink()
        for _ in range(150):
            at = chance.randrange(HEADER_BYTES, len(sound))
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << chance.randrange(8)]) + sound[at + 1 :])
            number = int(np.searchsorted(ends, at, "right")) - 1
            first_wrong = log.batches[number].first_id
            given: list[bytes] = []
            runs = read_segment_runs(RealDisk(), place, Span(0, len(log.rows) - 1), batch_bytes=1 << 20, with_locks=True)
            with pytest.raises(PartitionDamaged) as caught:
                given += (row for run in runs for row in record_batch(run, 0).column("data").to_pylist())
            assert caught.value.facts["first_id"] == str(first_wrong)
            assert caught.value.facts["first_byte"] == str(ends[number])
            assert given == [row["data"] for row in log.rows[:first_wrong]]


def test_damage_names_the_ids_and_another_directory_gives_them(tmp_path: Path) -> None:
    logs = [mixed_log(tmp_path / name / "0", 8) for name in ("one", "other")]
    path = max(logs[0].directory.glob("*.seg"))
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + HEAD_BYTES + 20] ^= 1
    path.write_bytes(raw)
    first = int(path.stem)
    span = Span(first, len(logs[0].rows) - 1)
    damaged = DirectoryOrigin(storages=(str(tmp_path / "other"),), allows_uncommitted=True)
    catalog = damaged.catalog()
    alone = DirectoryOrigin(storages=(str(tmp_path / "one"),), allows_uncommitted=True)
    extent = next(extent for extent in catalog.extents if extent.span.first == first)
    place = extent.place.replace("/other/", "/one/")
    with pytest.raises(PartitionDamaged, match=rf"ids? {first}") as caught:
        list(alone.read(type(extent)(partition=0, span=span, bytes=1, place=place), span, batch_bytes=1 << 20))
    assert caught.value.facts["first_id"] == str(first)
    both = DirectoryOrigin(storages=(str(tmp_path / "other"), str(tmp_path / "one")), allows_uncommitted=True)
    assert only(rows(both, both.catalog(), Span(0, span.last))) == logs[0].rows


def test_types_are_those_that_are_promised() -> None:
    assert BESIDE.field("time").type == pa.timestamp("us", tz="UTC")
    assert str(BESIDE.field("locks").type) == "list<element: struct<lock: int64, mode: string>>"
