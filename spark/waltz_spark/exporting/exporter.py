"""The tasks of a run, given a Spark: the same on a driver of ours and on one that the cluster runs.

It is a value without a session, and imports no tool of operators, so that it can travel to where the driver is.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waltz_spark.exporting.query import SPARK, Query

if TYPE_CHECKING:
    from waltz_spark.exporting.destination import Destination
    from waltz_spark.exporting.form import Form
    from waltz_spark.exporting.pace import Pace
    from waltz_spark.exporting.sight import Watch
    from waltz_spark.exporting.task import Assignment, Written
    from waltz_spark.log.origin import Origin
    from waltz_spark.payloads.payload import Decoder


@dataclass(frozen=True, kw_only=True)
class Exporter:
    origin: Origin
    destination: Destination
    cluster: str
    form: Form
    is_lossless: bool
    decoder: Decoder | None
    bytes_per_second: int | None
    query: Query = field(default=Query())
    columns: Sequence[tuple[str, str]] | None = None
    """What the files of the export have already, if it is not new."""

    def tasks(
        self, spark: Any, bucket: Path | None, run: str, assignments: Sequence[Assignment], watch: Watch | None = None
    ) -> Generator[Written, None, None]:
        """`bucket`: what all tasks share, where all of them run on this machine."""
        from waltz_spark.exporting.sight import unwatched
        from waltz_spark.exporting.task import Job
        from waltz_spark.exporting.wave import run_waves

        slots = min(spark.sparkContext.defaultParallelism, len(assignments))
        job = Job(
            run=run, origin=self.origin, destination=self.destination, cluster=self.cluster, form=self.form,
            is_lossless=self.is_lossless, decoder=self.decoder, pace=self._pace(bucket, slots),
        )  # fmt: skip
        if self.query.engine == SPARK:
            from waltz_spark.exporting.spark_engine import SparkEngine

            yield from SparkEngine(spark, job, self.query, self.columns).tasks(assignments, watch or unwatched)
        else:
            yield from run_waves(spark, job, assignments, watch or unwatched)

    def _pace(self, bucket: Path | None, slots: int) -> Pace | None:
        from waltz_spark.exporting.pace import Pace

        if self.bytes_per_second is None:
            return None
        if bucket is not None:
            return Pace(bytes_per_second=self.bytes_per_second, path=str(bucket))
        return Pace(bytes_per_second=self.bytes_per_second / slots, path=None)
