"""What people see of an export while it runs."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from waltz_spark.export import render_export as progress
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import has_leftovers
from waltz_spark.export.render_export import Progress, Tasks, picture
from waltz_spark.export.tasks import Assignment, Job, Written, run_by_spark
from waltz_spark.log.origin import Extent, Span
from waltz_spark.log.plan import Part, Split

from tests.spark.exporting import Exporting
from tests.spark.growing import GrowingStorage
from waltzctl.shell.progress import duration
from waltzd.errors.operations import PartitionDamaged
from waltzd.format.layout import segment_name
from waltzd.format.record import Run


def given(number: int, partition: int, records: int = 100, data_bytes: int = 10_000) -> Assignment:
    span = Span(number * records, number * records + records - 1)
    return Assignment(number=number, split=Split((Part(Extent(partition=partition, span=span, bytes=data_bytes, place=""),
                                                       span),)))  # fmt: skip


def assignments(files: int, partitions: int) -> list[Assignment]:
    return [given(number, number % partitions) for number in range(files)]


def shown(course: Tasks, now: float, *, parts: int = 12, width: int = 80) -> list[str]:
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    out.print(picture(course, now, waited=3.0, parts=parts))
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_a_task_counts_once_whoever_tells_it() -> None:
    course = Tasks(assignments(4, 2))
    for number in (0, 1, 0, 1, 2):
        course.end(number, 1.0)
    assert (course.records_done, course.records, course.percent) == (300, 400, 75)
    assert [(part.partition, part.records_done) for part in course.parts.values()] == [(0, 200), (1, 100)]


def test_the_estimate_goes_by_what_has_ended_and_runs_down_between_two_tasks() -> None:
    course = Tasks(assignments(10, 1))
    assert course.forecast(5.0) is None
    course.begin(10.0)
    course.end(0, 14.0)
    course.end(1, 20.0)
    assert course.forecast(20.0) == (2000.0, 40.0)
    assert [course.forecast(at) for at in (25.0, 70.0)] == [(2000.0, 35.0), (2000.0, 0.0)]
    assert course.sentence(20.0) == "20.0 kB of 100.0 kB, 0.0 MB/s, about 0:40 left"


def test_the_estimate_forgets_how_fast_it_was_long_ago() -> None:
    course = Tasks(assignments(10, 1))
    course.begin(0.0)
    for number, at in enumerate((100.0, 200.0, 210.0, 220.0, 230.0, 240.0, 250.0, 260.0, 270.0)):
        course.end(number, at)
    assert course.forecast(270.0) == (1000.0, 10.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600 * 25 + 62, "25:01:02")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_terminal_of_80_columns() -> None:
    course = Tasks(assignments(8, 2))
    assert shown(course, 3.0) == ["Starting Spark: 0:03"]
    course.end(0, 10.0)
    course.end(2, 20.0)
    lines = shown(course, 20.0)
    assert [line.split()[0] for line in lines] == ["partition", "partition", "together", "20.0"]
    assert [line[-23:].strip() for line in lines[:3]] == ["200 of 400 records", "0 of 400 records", "200 of 800 records"]
    assert max(map(len, lines)) <= 80
    assert all(len(line) <= 40 for line in shown(course, 20.0, width=40))


def test_of_many_partitions_those_at_work_are_shown_and_the_others_counted() -> None:
    course = Tasks(assignments(100, 50))
    for number in (0, 50, 1, 51, 3):
        course.end(number, 1.0)
    lines = shown(course, 2.0, parts=3)
    assert [" ".join(line.split()[:2]) for line in lines[:4]] == ["partition 2", "partition 3", "partition 4", "and 47"]
    assert lines[3].endswith("2 of them complete")
    assert len(lines) == 6
    assert len(shown(course, 2.0, parts=0)) == 3


def test_what_is_no_terminal_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress(assignments(4, 2)) as watched, Progress(assignments(4, 2), is_quiet=True) as quiet:
        for at, ended in ((100.0, []), (104.0, [0]), (108.0, [1]), (111.0, []), (115.0, [2]), (121.5, [])):
            now = at
            watched.ended(ended)
            quiet.ended(ended)
    assert capsys.readouterr().err.splitlines() == [
        "50 %: 200 of 400 records, 20.0 kB of 40.0 kB, 0.0 MB/s, about 0:05 left",
        "75 %: 300 of 400 records, 30.0 kB of 40.0 kB, 0.0 MB/s, about 0:00 left",
    ]
    assert progress.LINE_SECONDS == 10.0


def test_who_asks_for_objects_gets_one_whenever_tasks_have_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    both = (Progress(assignments(4, 2), is_quiet=True, shown="json"), Progress(assignments(4, 2), shown="off"))
    for at, ended in ((101.0, []), (105.0, [0, 1]), (108.0, [0, 1]), (130.0, []), (135.0, [2, 3])):
        now = at
        for one in both:
            one.ended(ended)
    first, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert first == {
        "version": 1, "event": "progress", "seconds": 5.0, "text": "export", "unit": "bytes", "done": 20_000,
        "total": 40_000, "per_second": 5000.0, "seconds_left": 4.0, "records": 200, "records_total": 400,
        "partitions": {"0": 100, "1": 100},
    }  # fmt: skip
    assert (last["seconds"], last["done"], last["seconds_left"], last["partitions"]) == (
        35.0,
        40_000,
        0.0,
        {"0": 200, "1": 200},
    )


def test_results_arrive_before_the_last_task_ends(spark: Any, tmp_path: Path, growing: GrowingStorage) -> None:
    """All tasks are one job; the second one waits until the driver has the result of the first one."""
    growing.append(0, [b"one"])
    growing.append(1, [b"two"])
    exporting = Exporting(storage=growing, destination=LocalDestination(str(tmp_path / "out")))
    real, may_end = exporting.origin, str(tmp_path / "may end")

    class Waiting:
        def describe(self) -> str:
            return "a test"

        def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
            end = time.monotonic() + 120
            while extent.partition == 1 and not os.path.exists(may_end):
                assert time.monotonic() < end, "the driver did not get the result of the other task"
                time.sleep(0.02)
            yield from real.read(extent, span, batch_bytes=batch_bytes, with_locks=with_locks)

    ended: list[int] = []

    def runner(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        waiting = replace(job, origin=cast(Any, Waiting()))
        for written in run_by_spark(spark, waiting, given, watch=ended.extend):
            Path(may_end).touch()
            yield written

    manifest = exporting.prepared().carry_out(runner)
    assert manifest is not None
    exporting.check_proof(manifest)
    assert ended == [0, 1]


def test_an_error_of_ours_comes_back_from_a_task_with_all_its_parts(
    spark: Any, tmp_path: Path, growing: GrowingStorage
) -> None:
    growing.append(0, [b"one"])
    path = growing.directory / "0" / segment_name(0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    run = Exporting(storage=growing, destination=LocalDestination(str(tmp_path / "out"))).prepared()
    with pytest.raises(PartitionDamaged, match="are not the record of id 0 of partition 0") as caught:
        run.carry_out(lambda job, given: run_by_spark(spark, job, given))
    assert caught.value.detail_not_done == "no row from id 0 on was returned"
    assert caught.value.number("first_id") == 0
    assert newest_manifest(run.destination) is None
    assert not has_leftovers(run.destination)
