"""What people see of an export while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import has_leftovers
from waltz_spark.export.render_export import Course
from waltz_spark.export.tasks import Assignment, Job, Written, run_by_spark
from waltz_spark.log.origin import Extent, Span
from waltz_spark.log.plan import Part, Split

from tests.spark.exporting import Exporting
from tests.spark.growing import GrowingStorage
from waltzctl.shell.progress import Amount
from waltzd.errors.operations import PartitionDamaged
from waltzd.format.layout import segment_name
from waltzd.format.record import Run
from waltzd.protocol.positions import Position


def given(number: int, partition: int, records: int = 100, data_bytes: int = 10_000) -> Assignment:
    span = Span(number * records, number * records + records - 1)
    return Assignment(number=number, split=Split((Part(Extent(partition=partition, span=span, bytes=data_bytes, place=""),
                                                       span),)))  # fmt: skip


def assignments(files: int, partitions: int) -> list[Assignment]:
    return [given(number, number % partitions) for number in range(files)]


def test_a_task_counts_once_whoever_tells_it() -> None:
    heard: list[tuple[str, Amount | None]] = []
    course = Course(assignments(4, 2), lambda sentence, amount=None: heard.append((sentence, amount)))
    for numbers in ([], [0, 1], [0, 1, 2]):
        course.ended(numbers)
    assert heard == [
        ("starting Spark", None),
        *(
            (f"{done * 100} of 400 records are exported", Amount(done=done * 10_000, total=40_000, unit="bytes"))
            for done in (0, 2, 3)
        ),
    ]


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

        def check(self, partition: int, position: Position, *, route: Any = None) -> None:
            real.check(partition, position, route=route)

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
