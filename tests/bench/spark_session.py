"""What is measured inside one Spark that goes on: reading, writing and planning.

The Java of this session compiles as Java does by default, not as the commands' own does: the reference, Spark rewriting
Parquet, needs that, and an export loses by it if anything.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from waltz_spark.engine.session import SparkChoice, default_master, find_java, running
from waltz_spark.export.destination import LocalDestination
from waltz_spark.export.export import Run, planned, wanted
from waltz_spark.export.form import form_of
from waltz_spark.export.origin_options import open_origin
from waltz_spark.export.tasks import Assignment, Job, Written, run_by_spark
from waltz_spark.log.origin import NO_THROTTLE, Origin, Throttle
from waltz_spark.log.selection import Selection

from tests.bench.cost import Cost, cost_here, forget_peaks, medians, peak_bytes

WORKER = "pyspark.daemon"
"""Stands in the command line of each Python that works for Spark, and not in that of its Java."""
_NUMBERS = count()


@contextmanager
def spark_at(home: Path) -> Iterator[Any]:
    from waltz_spark.source import WaltzDataSource

    conf = {"spark.driver.extraJavaOptions": "-Dwaltz.bench=true", "spark.sql.shuffle.partitions": "2"}
    with running(SparkChoice(master=default_master(), conf=conf), find_java(), home / "spark.log") as session:
        session.dataSource.register(WaltzDataSource)
        yield session


def reading(spark: Any, storage: Path) -> Any:
    return spark.read.format("waltz").load(str(storage))


def copy_as_parquet(spark: Any, storage: Path, copy: Path, records: int) -> None:
    """The same rows as Spark itself writes them, not compressed."""
    reading(spark, storage).write.option("compression", "none").parquet(str(copy))
    found = spark.read.parquet(str(copy)).count()
    if found != records:
        raise SystemExit(f"the copy has {found} rows and should have {records}")


# -- exports in this session -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exported:
    records: int
    data_bytes: int
    """Of the log."""
    file_bytes: int
    task_seconds: float
    """From when the first task began until the last one ended."""


def export(spark: Any, origin: Origin, output: Path, throttle: Throttle = NO_THROTTLE) -> Exported:
    """What `waltzctl spark-export` does once its Spark runs: plan, tasks, manifest."""
    destination, form = LocalDestination(str(output)), form_of("parquet", "zstd:3")
    catalog = origin.catalog()
    assignments = planned(catalog, wanted(catalog, None, Selection()), file_data_bytes=None)
    told: list[Written] = []

    def tasks(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        for written in run_by_spark(spark, job, given):
            told.append(written)
            yield written

    job = Job(origin=origin, destination=destination, cluster=catalog.key, form=form, throttle=throttle)
    run = Run(job=job, before=None, assignments=assignments)
    newest = run.carry_out(tasks)
    assert newest is not None
    return Exported(
        records=sum(piece.span.count for piece in newest.pieces),
        data_bytes=sum(piece.data_bytes for piece in newest.pieces),
        file_bytes=sum(piece.size for piece in newest.pieces),
        task_seconds=max(each.ended for each in told) - min(each.started for each in told),
    )


def _removed(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path


# -- B3, B4, B5 --------------------------------------------------------------------------------------------------------


def scans(spark: Any, storage: Path, copy: Path, rounds: int) -> dict[str, Cost]:
    """B3: read all rows and throw them away."""

    def thrown_away(rows: Callable[[], Any]) -> Callable[[], Cost]:
        return lambda: cost_here(lambda: rows().write.format("noop").mode("overwrite").save())

    return medians(
        rounds,
        {
            "waltz": thrown_away(lambda: reading(spark, storage)),
            "parquet": thrown_away(lambda: spark.read.parquet(str(copy))),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    costs: dict[str, Cost]
    file_bytes: dict[str, int]


def rewritings(spark: Any, home: Path, storage: Path, copy: Path, rounds: int) -> Rewritten:
    """B4 and B5: to Parquet with zstd, from Parquet by Spark (the reference), from the log by Spark, and by an export."""
    origin = open_origin({"path": str(storage)})
    sizes: dict[str, int] = {}

    def by_spark(name: str, rows: Callable[[], Any]) -> Callable[[], Cost]:
        output = home / name

        def action() -> Cost:
            cost = cost_here(lambda: rows().write.mode("overwrite").option("compression", "zstd").parquet(str(output)))
            sizes[name] = sum(path.stat().st_size for path in output.glob("*.parquet"))
            return cost

        return action

    def by_export() -> Cost:
        output = _removed(home / "export")

        def action() -> None:
            sizes["export"] = export(spark, origin, output).file_bytes

        return cost_here(action)

    actions = {
        "reference": by_spark("reference", lambda: spark.read.parquet(str(copy))),
        "source": by_spark("source", lambda: reading(spark, storage)),
        "export": by_export,
    }
    return Rewritten(costs=medians(rounds, actions), file_bytes=sizes)


# -- B8, B14 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planned:
    splits: int
    seconds: float
    heap_bytes: int


def planning(spark: Any, storage: Path, records: int, splits: int) -> Planned:
    """B8: how long until Spark knows its tasks, and what the driver's Java holds for them."""
    per_split = max(1, records // splits)
    before = _heap(spark)
    started = time.perf_counter()
    rows = spark.read.format("waltz").option("maxRecordsPerPartition", per_split).load(str(storage))
    tasks = rows._jdf.queryExecution().toRdd()
    found = tasks.getNumPartitions()
    took = time.perf_counter() - started
    return Planned(splits=found, seconds=took, heap_bytes=max(0, _heap(spark) - before))


def _heap(spark: Any) -> int:
    java = spark.sparkContext._jvm.java.lang
    for _ in range(3):
        java.System.gc()
    runtime = java.Runtime.getRuntime()
    return int(runtime.totalMemory()) - int(runtime.freeMemory())


def worker_peaks(spark: Any, home: Path, storage: Path, large: Path) -> tuple[int, int]:
    """B14: the most memory of any Python worker: reading and exporting small records, then reading large ones."""

    def read(place: Path) -> None:
        reading(spark, place).write.format("noop").mode("overwrite").save()

    read(storage)
    forget_peaks(WORKER)
    read(storage)
    export(spark, open_origin({"path": str(storage)}), _removed(home / "export"))
    small = peak_bytes(WORKER)
    forget_peaks(WORKER)
    read(large)
    return small, peak_bytes(WORKER)
