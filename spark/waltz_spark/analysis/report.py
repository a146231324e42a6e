"""What a log holds, counted by Spark: by partition, header, client and time in one pass over it, by lock in another one.

An export is read as its files, by Spark's own readers; everything else by `report_source`, which hands over the sizes of
the payloads and not the payloads. Times are those of format 1; in format 0, what stands for them is a column that was
decoded, or the day on which the record's segment was begun. Percentiles are near the true value, within a ten thousandth
of the ranks. Of clients that shared a lock there are about so many.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from waltz_spark.exporting.destination import Destination, destination_of, the_manifest
from waltz_spark.exporting.manifest import Manifest, Piece
from waltz_spark.log.origin import Origin
from waltzd.errors import ArchiveUnfit, ExportDamaged, NoSuchName, NoSuchPartition
from waltzd.format.layout import FileHeader
from waltzd.format.record import OVERHEAD_BYTES

if TYPE_CHECKING:
    from waltz_spark.engine.session import SparkSettings

HOUR, DAY = "hour", "day"
_FORMATS = {"parquet": "parquet", "delta": "parquet", "orc": "orc"}
"""What a report can read, and as what Spark does."""
_COUNTED = frozenset(("partition", "txid", "header", "client_id", "data"))
_ACCURACY = 10_000
_CONF = {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "16"}
_TOTAL, _PARTITION, _HEADER, _CLIENT, _TIME = 0b1111, 0b0111, 0b1011, 0b1101, 0b1110
"""What Spark calls the sets of a grouping: a bit for each column that is not in it."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Bytes are those of payloads."""

    transactions: int
    bytes: int
    p50: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How one lock was used in one partition: a lock of the same name in another one is another lock."""

    partition: int
    lock: int
    """64 bits, without a sign."""
    transactions: int
    writes: int
    appends: int
    reads: int
    clients: int
    """About."""
    first: int
    last: int
    """The ids between which it was used."""


NOTHING = Measure(transactions=0, bytes=0, p50=0, p99=0, max=0)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition, a header, a client or a time."""

    name: str
    first: int
    """The lowest and the highest id; for anything but a partition, of whichever partition."""
    last: int
    measure: Measure


@dataclass(frozen=True, kw_only=True)
class Report:
    source: str
    total: Measure
    partitions: Sequence[Part]
    """In order of their numbers."""
    headers: Sequence[Part]
    """Those with the most bytes, in that order; clients likewise."""
    header_count: int
    clients: Sequence[Part]
    client_count: int
    times: Sequence[Part]
    """In order; those without one have the name ""."""
    time_unit: str
    """`hour` or `day`; empty where no time is known."""
    locks: Sequence[Usage] = ()
    """Those that were marked most, in that order."""
    lock_count: int = 0

    def hottest(self) -> Sequence[Part]:
        return sorted(self.partitions, key=lambda part: (-part.measure.bytes, int(part.name)))

    def share(self, part: Part) -> float:
        return part.measure.bytes / self.total.bytes if self.total.bytes else 0.0


class Log(Protocol):
    """What is counted: a frame with the columns partition, txid, header, client_id, size, and as text moment and wrong; and
    one with partition, txid, client_id, locks and wrong, where there are any."""

    @property
    def time_unit(self) -> str: ...
    @property
    def has_locks(self) -> bool: ...
    def describe(self) -> str: ...
    def frame(self, spark: Any) -> Any: ...
    def lock_frame(self, spark: Any) -> Any: ...


# -- where it comes from -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ArchiveLog:
    archive: Destination
    pieces: Sequence[Piece]
    format: str
    time_column: str
    time_unit: str
    has_locks: bool

    def describe(self) -> str:
        return self.archive.place

    def _rows(self, spark: Any) -> Any:
        where = self.archive.place if "://" in self.archive.place else "file://" + self.archive.place
        return spark.read.format(self.format).load([_escaped(f"{where}/{piece.path}") for piece in self.pieces])

    def lock_frame(self, spark: Any) -> Any:
        from pyspark.sql import functions as f

        rows = self._rows(spark)
        return rows.select("partition", "txid", "client_id", "locks", f.lit(None).cast("string").alias("wrong"))

    def frame(self, spark: Any) -> Any:
        from pyspark.sql import functions as f

        rows = self._rows(spark)
        nothing = f.lit(None).cast("string")
        plain = ["partition", "txid", "header", "client_id", f.octet_length("data").alias("size"), nothing.alias("wrong")]
        if self.time_column:
            return rows.select(*plain, _hour(f.col(f"`{self.time_column}`")).alias("moment"))
        if not self.time_unit:
            return rows.select(*plain, nothing.alias("moment"))
        days = [(piece.path.rpartition("/")[2], _day_of(piece)) for piece in self.pieces]
        names = f.broadcast(spark.createDataFrame(days, "name string, moment string"))
        named = rows.select(*plain, f.col("_metadata.file_name").alias("name"))
        return named.join(names, "name").drop("name")


@dataclass(frozen=True, kw_only=True)
class OriginLog:
    origin: Origin
    partitions: tuple[int, ...] | None
    time_unit: str
    has_locks: bool

    def describe(self) -> str:
        return self.origin.describe()

    def frame(self, spark: Any) -> Any:
        from pyspark.sql import functions as f

        from waltz_spark.analysis.report_source import COUNTED, ERROR, read

        rows = read(spark, self.origin, self.partitions, COUNTED)
        size = (f.col("record_bytes") - f.lit(OVERHEAD_BYTES)).alias("size")
        day = f.date_format("segment_created", "yyyy-MM-dd")
        moment = (_hour(f.col("time")) if self.time_unit == HOUR else day).alias("moment")
        return rows.select("partition", "txid", "header", "client_id", size, moment, ERROR)

    def lock_frame(self, spark: Any) -> Any:
        from waltz_spark.analysis.report_source import LOCKED, read

        return read(spark, self.origin, self.partitions, LOCKED)


def _hour(moment: Any) -> Any:
    from pyspark.sql import functions as f

    return f.date_format(f.date_trunc("hour", moment), "yyyy-MM-dd'T'HH':00'")


def archive_log(text: str, partitions: Collection[int] | None, time_column: str | None) -> ArchiveLog:
    """Refuses what a report cannot read, before there is a Spark."""
    archive = destination_of(text)
    found = the_manifest(archive)
    if found.shape.format not in _FORMATS:
        raise ArchiveUnfit(
            f"the export is {found.shape.format}; a report reads {' and '.join(_FORMATS)}",
            not_done="nothing was read",
            next_step="report on the log itself: --source DIR, or the running cluster",
        )
    lacking = sorted(_COUNTED - {name for name, _ in found.shape.schema})
    if lacking:
        raise ArchiveUnfit(
            f"{archive.place} was exported with --select {found.shape.query.select!r}: it has no column {lacking[0]}",
            not_done="nothing was read",
            next_step=f"report on the log, or on an export with the columns {', '.join(sorted(_COUNTED))}",
        )
    missing = sorted(set(partitions or ()) - set(found.partitions))
    if missing:
        raise NoSuchPartition(f"the export holds no partition {missing[0]}", not_done="nothing was read")
    pieces = tuple(piece for piece in found.pieces if partitions is None or piece.partition in partitions)
    if time_column is not None:
        _check_time(found, time_column)
    there = set(archive.names())
    gone = [piece.path for piece in pieces if piece.path not in there]
    if gone:
        raise ExportDamaged(f"{archive.place}/{gone[0]} is missing, and the manifest has it", not_done="nothing was read")
    names = {name for name, _ in found.shape.schema}
    has_times = any(piece.times is not None for piece in pieces)
    column = time_column or ("time" if has_times and "time" in names else "")
    return ArchiveLog(
        archive=archive, pieces=pieces, format=_FORMATS[found.shape.format], time_column=column,
        time_unit=HOUR if column else DAY if found.shape.lossless else "", has_locks=has_times and "locks" in names,
    )  # fmt: skip


def _check_time(found: Manifest, name: str) -> None:
    kinds = dict(found.shape.schema)
    times = [column for column, kind in kinds.items() if kind.startswith(("timestamp", "date"))]
    if name in times:
        return
    what = (
        f"the column {name} of the export is {kinds[name]}, and no time" if name in kinds else f"there is no column {name}"
    )
    raise NoSuchName(
        what, not_done="nothing was read",
        next_step=f"its times are {', '.join(times)}" if times else "leave --time-column out: no column of it is a time",
    )  # fmt: skip


def origin_log(origin: Origin, partitions: tuple[int, ...] | None) -> OriginLog:
    """What is wrong with the place or the partitions is found here, before there is a Spark."""
    from waltz_spark.log.segment import KeepsSegments

    catalog = origin.catalog(partitions)
    has_times = any(origin.first_at(catalog, number, 0) <= span.last for number, span in catalog.spans.items())
    unit = HOUR if has_times else DAY if isinstance(origin, KeepsSegments) else ""
    return OriginLog(origin=origin, partitions=partitions, time_unit=unit, has_locks=has_times)


def _day_of(piece: Piece) -> str:
    assert piece.segment is not None
    created = FileHeader.decode(piece.segment.header, piece.path).created_ms
    return datetime.fromtimestamp(created / 1000, UTC).strftime("%Y-%m-%d")


def _escaped(path: str) -> str:
    """Spark takes paths for patterns."""
    return "".join(f"\\{letter}" if letter in "{}[]*?\\" else letter for letter in path)


# -- counting ----------------------------------------------------------------------------------------------------------


def made_by(settings: SparkSettings, log: Log, *, top: int) -> Report:
    from waltz_spark.engine.session import new_log, running

    with running(replace(settings, conf={**_CONF, **settings.conf}), new_log(os.environ)) as spark:
        return gather(spark, log, top=top)


def gather(spark: Any, log: Log, *, top: int) -> Report:
    """In the session's time zone."""
    from waltz_spark.exporting.tasks import error_told

    rows = spark.sql(
        f"""
        WITH counted AS (
            SELECT grouping_id(partition, header, client_id, moment) AS which, partition, header, client_id, moment,
                count(*) AS transactions, sum(size) AS bytes, min(txid) AS first, max(txid) AS last,
                max(size) AS largest, max(wrong) AS wrong,
                percentile_approx(size, array(0.5D, 0.99D), {_ACCURACY}) AS percentiles
            FROM {{log}} GROUP BY GROUPING SETS ((), (partition), (header), (client_id), (moment))
        ), ranked AS (
            SELECT *, count(*) OVER (PARTITION BY which) AS kinds,
                row_number() OVER (PARTITION BY which ORDER BY bytes DESC, transactions DESC, header, client_id) AS place
            FROM counted
        )
        SELECT * FROM ranked WHERE place <= {top} OR which NOT IN ({_HEADER}, {_CLIENT}) ORDER BY which, place
        """,
        log=log.frame(spark),
    ).collect()
    by_set: dict[int, list[Any]] = {}
    for row in rows:
        if row.wrong is not None:
            raise error_told(row.wrong)
        by_set.setdefault(row.which, []).append(row)

    def parts(which: int, column: str) -> list[Part]:
        return [_part(row, "" if row[column] is None else str(row[column])) for row in by_set.get(which, ())]

    locks = _locks(spark, log, top) if log.has_locks else []
    total = next((_part(row, "").measure for row in by_set.get(_TOTAL, ()) if row.transactions), NOTHING)
    return Report(
        source=log.describe(),
        total=total,
        partitions=sorted(parts(_PARTITION, "partition"), key=lambda part: int(part.name)),
        headers=parts(_HEADER, "header"),
        header_count=_kinds(by_set.get(_HEADER)),
        clients=parts(_CLIENT, "client_id"),
        client_count=_kinds(by_set.get(_CLIENT)),
        times=sorted(parts(_TIME, "moment"), key=lambda part: part.name) if log.time_unit else [],
        time_unit=log.time_unit,
        locks=[_usage(row) for row in locks],
        lock_count=_kinds(locks),
    )


def _locks(spark: Any, log: Log, top: int) -> list[Any]:
    from waltz_spark.exporting.tasks import error_told

    rows: list[Any] = spark.sql(
        f"""
        WITH used AS (SELECT partition, txid, client_id, wrong, explode_outer(locks) AS each FROM {{log}}), counted AS (
            SELECT partition, each.lock AS lock, count(*) AS transactions, max(wrong) AS wrong,
                count_if(each.mode = 'WRITE') AS writes, count_if(each.mode = 'APPEND') AS appends,
                count_if(each.mode = 'READ') AS reads, approx_count_distinct(client_id) AS clients,
                min(txid) AS first, max(txid) AS last
            FROM used GROUP BY partition, each.lock
        )
        SELECT *, count(lock) OVER () AS kinds FROM counted WHERE lock IS NOT NULL OR wrong IS NOT NULL
        ORDER BY wrong NULLS LAST, writes + appends DESC, reads DESC, partition, lock LIMIT {top}
        """,
        log=log.lock_frame(spark),
    ).collect()
    if rows and rows[0].wrong is not None:
        raise error_told(rows[0].wrong)
    return rows


def _usage(row: Any) -> Usage:
    return Usage(
        partition=row.partition, lock=row.lock % (1 << 64), transactions=row.transactions, writes=row.writes,
        appends=row.appends, reads=row.reads, clients=row.clients, first=row.first, last=row.last,
    )  # fmt: skip


def _kinds(rows: Sequence[Any] | None) -> int:
    return rows[0].kinds if rows else 0


def _part(row: Any, name: str) -> Part:
    if not row.transactions:
        return Part(name=name, first=0, last=-1, measure=NOTHING)
    p50, p99 = row.percentiles
    measure = Measure(transactions=row.transactions, bytes=row.bytes, p50=p50, p99=p99, max=row.largest)
    return Part(name=name, first=row.first, last=row.last, measure=measure)
