"""The protocol of an export: what is missing, who writes it, and when it counts.

Nothing counts before a manifest says so. A run looks at the newest manifest, plans the ids behind it, and writes the plan
down before its first file; tasks write under hidden names; the run gives finished files their names, in the order of their
ids, and then publishes a manifest with all of them. A run that dies leaves the newest manifest as it was, and its plan says
which names it may have given: the next run removes those that no manifest has. So each id is in exactly one file, whenever
a run was stopped, and a run that was stopped goes on from its last manifest.

Spark is known to `by_spark` alone: a runner is a function from tasks to answers.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from waltz_spark.exporting.destination import Destination, Hold, newest_manifest, who_we_are
from waltz_spark.exporting.manifest import (
    PLANS,
    SPARK,
    UNFINISHED,
    Manifest,
    Piece,
    Shape,
    below_output,
    encode,
    manifest_path,
)
from waltz_spark.exporting.tasks import Assignment, Job, Watch, Written, assignments_of, run_waves, unseen
from waltz_spark.log.origin import Catalog, Origin, Span, check_reached
from waltz_spark.log.plan import Sizing, Split, plan
from waltzd.errors import BadArgument, BeyondLog, ExportDamaged, ExportGap, ExportHeld, NoSuchPartition, NotOurExport

if TYPE_CHECKING:
    from waltz_spark.exporting.delta import DeltaTable

PUBLISH_SECONDS, PUBLISH_SHARE = 2.0, 0.05
"""How often a run publishes: a run that is killed loses so much work. Publishing takes at most this share of the time."""
KEPT_MANIFESTS = 3
_NOT_WRITTEN = "nothing was written"

Runner = Callable[[Job, Sequence[Assignment]], Generator[Written, None, None]]
"""Given what is to be done and its tasks: what they tell, in any order. Closing it stops what still runs."""


@dataclass(frozen=True, kw_only=True)
class Range:
    partitions: tuple[int, ...] | None = None
    first: Mapping[int, int] = field(default_factory=dict)
    last: Mapping[int, int] = field(default_factory=dict)
    first_of_others: int | None = None
    last_of_others: int | None = None
    since: int | None = None
    """µs since 1970: then `first` says nothing, until it is `timed`; so with `until`, which is not included, and `last`."""
    until: int | None = None

    def timed(self, origin: Origin, catalog: Catalog) -> Range:
        """With ids in place of times."""
        wanted = sorted(catalog.spans if self.partitions is None else set(self.partitions) & catalog.spans.keys())

        def ids(time: int) -> dict[int, int]:
            return {number: origin.first_at(catalog, number, time) for number in wanted}

        first = self.first if self.since is None else ids(self.since)
        ends = self.last if self.until is None else {number: id_ - 1 for number, id_ in ids(self.until).items()}
        return replace(self, first=first, last=ends)

    @property
    def may_be_empty(self) -> bool:
        """Nothing may have been written between two moments."""
        return self.since is not None or self.until is not None

    def first_of(self, partition: int) -> int | None:
        return self.first.get(partition, self.first_of_others)

    def last_of(self, partition: int) -> int | None:
        return self.last.get(partition, self.last_of_others)


# -- what there is and what is missing ---------------------------------------------------------------------------------


def check_same(before: Manifest, *, cluster: UUID, shape: Shape, place: str) -> None:
    """Refuses a run whose files would differ from those that are there."""
    if before.cluster != cluster:
        raise NotOurExport(f"{place} is an export of the cluster {before.cluster}, and what is to be read is {cluster}")
    there = before.shape
    for what, was, now in (
        ("the format", there.format, shape.format),
        ("the compression", there.compression, shape.compression),
        ("lossless", there.lossless, shape.lossless),
        ("the decoder", there.decoder or "none", shape.decoder or "none"),
        ("what the decoder makes", there.decoder_fingerprint, shape.decoder_fingerprint),
        ("the engine", there.query.engine, shape.query.engine),
        ("--select", there.query.select or "none", shape.query.select or "none"),
        ("--where", there.query.where or "none", shape.query.where or "none"),
        ("the list of columns", there.fingerprint, shape.fingerprint),
    ):
        if was != now:
            raise NotOurExport(f"{place} was made differently: {what} was {was}, and is to be {now}")


def check_history(origin: Origin, catalog: Catalog, before: Manifest | None, place: str) -> None:
    """Raise `OtherTimeline` where the export has ids above the last one that its timeline and the log share."""
    if before is not None:
        check_reached(
            origin, catalog, before.ends, what=f"the export {place}",
            next_step=lambda _number, _fork: "export the log anew into another folder; this one keeps the old history",
        )  # fmt: skip


def wanted(catalog: Catalog, before: Manifest | None, asked: Range) -> dict[int, Span]:
    """The ids that are missing in the export. Pure."""
    for named in (*(asked.partitions or ()), *asked.first, *asked.last):
        if named not in catalog.spans:
            raise NoSuchPartition(f"there is no partition {named} in what is to be read", not_done=_NOT_WRITTEN)
    reached = {} if before is None else before.next_ids
    numbers = sorted(catalog.spans) if asked.partitions is None else asked.partitions
    return {number: _missing(number, catalog.spans[number], reached.get(number), before, asked) for number in numbers}


def behind(catalog: Catalog, before: Manifest | None) -> dict[int, int]:
    """The partitions whose log ends before the export does, and where. A replica may be slow; a cluster that is, was set
    back, and what it appends from now on is not what the export has under the same ids. Pure."""
    reached = {} if before is None else before.next_ids
    return {
        number: span.last for number, span in catalog.spans.items() if number in reached and span.last < reached[number] - 1
    }


def _missing(number: int, there: Span, reached: int | None, before: Manifest | None, asked: Range) -> Span:
    first, last = asked.first_of(number), asked.last_of(number)
    if first is not None and last is not None and last < first - asked.may_be_empty:
        raise BadArgument(f"partition {number}: --to-txn {last} lies before --from-txn {first}", not_done=_NOT_WRITTEN)
    if last is not None and last > there.last and number in asked.last:
        raise BeyondLog(
            f"partition {number}: --to-txn is {last}, and the last id that can be read is {there.last}",
            not_done=_NOT_WRITTEN,
            next_step=f"ask for ids up to {there.last}, or leave --to-txn out",
        )
    if reached is not None:
        assert before is not None
        begin = before.partitions[number].span.first
        if first is not None and first > reached:
            raise ExportGap(f"partition {number}: --from-txn is {first}, and the export ends before id {reached}")
        if first is not None and first < begin:
            raise ExportGap(f"partition {number}: --from-txn is {first}, and the export begins at id {begin} already")
        start = reached
    else:
        start = there.first if first is None else first
        if start < there.first:
            raise ExportGap(
                f"partition {number}: --from-txn is {start}, and the first id that is still there is {there.first}"
            )
    if start < there.first:
        raise ExportGap(f"partition {number}: the export ends before id {start}, and the log begins at {there.first} now")
    return Span(start, there.last if last is None else min(last, there.last))


def planned(
    catalog: Catalog, spans: Mapping[int, Span], *, is_lossless: bool, file_data_bytes: int | None
) -> list[Assignment]:
    """`file_data_bytes`: how many bytes of log to put in one file; else what a task is best at."""
    missing = {number: span for number, span in spans.items() if span.count}
    splits = plan(catalog, missing, Sizing(bytes_max=file_data_bytes))
    if file_data_bytes is not None and not is_lossless:
        splits = _together(splits, file_data_bytes)
    return assignments_of(splits, is_lossless=is_lossless)


def _together(splits: Iterable[Split], bytes_max: int) -> list[Split]:
    """Joins neighbours into splits of up to so many bytes."""
    grown: dict[int, list[Split]] = {}
    for split in sorted(splits, key=lambda split: (split.partition, split.span)):
        there = grown.setdefault(split.partition, [])
        if there and there[-1].bytes + split.bytes <= bytes_max:
            there[-1] = Split((*there[-1].parts, *split.parts))
        else:
            there.append(split)
    return [split for turn in zip_longest(*grown.values()) for split in turn if split is not None]


# -- a run -------------------------------------------------------------------------------------------------------------


class Finished:
    """What tasks told, until it can be published: a partition's files count in the order of their ids. Pure."""

    def __init__(self, assignments: Iterable[Assignment]) -> None:
        self._open = {given.number: given for given in assignments}
        self._order: dict[int, list[Assignment]] = {}
        for given in sorted(self._open.values(), key=lambda given: given.span):
            self._order.setdefault(given.partition, []).append(given)
        self._done: dict[int, Written] = {}
        self._told: set[int] = set()

    def add(self, written: Written) -> None:
        """Idempotent: Spark may run a task twice."""
        given = self._open[written.number]
        assert written.piece is not None
        assert (written.piece.partition, written.piece.span) == (given.partition, given.span)
        if written.number not in self._told:
            self._told.add(written.number)
            self._done[written.number] = written

    def ready(self) -> list[Written]:
        """Takes out those that have no gap before them."""
        found = []
        for queue in self._order.values():
            while queue and queue[0].number in self._done:
                found.append(self._done.pop(queue.pop(0).number))
        return found

    @property
    def waiting(self) -> int:
        return len(self._done)


@dataclass(kw_only=True)
class Run:
    """One run of a job over a destination."""

    job: Job
    before: Manifest | None
    assignments: Sequence[Assignment]
    watch: Watch = unseen
    table: DeltaTable | None = None
    task_seconds: tuple[float, float] = (math.inf, -math.inf)
    """When the first task began and the last one ended, by the clocks of the machines that ran them."""
    _foreign: frozenset[str] = frozenset()
    """A name that was taken by others while this run was at work."""

    def __post_init__(self) -> None:
        if self.before is not None:
            check_same(self.before, cluster=self.job.cluster, shape=self.job.shape, place=self.destination.place)

    @property
    def destination(self) -> Destination:
        return self.job.destination

    @property
    def paths(self) -> list[str]:
        return [given.path(self.job.form) for given in self.assignments]

    def carry_out(self, runner: Runner) -> Manifest | None:
        """All of it, or the first error; what is finished is published in any case. The newest manifest."""
        with self.destination.hold(who_we_are(self.job.run)) as hold:
            newest = self._settle()
            self._check_names()
            text = json.dumps({"run": self.job.run, "paths": sorted(self.paths)}).encode()
            is_new = self.destination.put_new(f"{PLANS}/{self.job.run}.json", text)
            assert is_new, "the name of a run is unique"
            try:
                return self._write(runner, hold, newest)
            finally:
                self._clear_up(hold)

    @property
    def has_leftovers(self) -> bool:
        """Whether a run that was killed left something, or did not tell its table."""
        is_behind = self.table is not None and self.table.is_behind(self.before)
        return has_leftovers(self.destination) or is_behind

    def tidy(self) -> None:
        """Clears up after an earlier run."""
        with self.destination.hold(who_we_are(self.job.run)):
            self._settle()

    def _settle(self) -> Manifest | None:
        newest = newest_manifest(self.destination)
        if (newest and newest.number) != (self.before and self.before.number):
            raise ExportHeld(f"another run has just added to {self.destination.place}", next_step="run it again")
        clear_up(self.destination, newest)
        if self.table is not None and self.table.is_behind(newest):
            self._tell_table(newest)
        return newest

    def _clear_up(self, hold: Hold) -> None:
        """By the newest manifest that is there, whatever this run believes that it published. Without the lock nothing is
        removed: plans and unfinished files may be those of the run that has it now."""
        try:
            hold.check()
        except ExportHeld:
            return
        clear_up(self.destination, newest_manifest(self.destination), spared=self._foreign)

    def _check_names(self) -> None:
        """What a plan names is the run's own from then on: it is removed when no manifest has it. So what lies there under
        such a name already ends the run before it begins."""
        taken = sorted(set(self.paths).intersection(self.destination.names()))
        if taken:
            raise self._taken(taken[0])

    def _taken(self, path: str) -> NotOurExport:
        return NotOurExport(
            f"{self.destination.place}/{path} is there, and no manifest has it",
            next_step="put the manifest back that has it, or move the file away; then run the same command again",
        )

    def _write(self, runner: Runner, hold: Hold, newest: Manifest | None) -> Manifest | None:
        finished = Finished(self.assignments)
        ready: list[Written] = []
        answers = runner(self.job, self.assignments)
        due = time.monotonic() + PUBLISH_SECONDS
        try:
            for written in answers:
                if written.error is not None:
                    raise written.error
                finished.add(written)
                first, last = self.task_seconds
                self.task_seconds = min(first, written.started), max(last, written.ended)
                self.watch([written.number])
                ready += finished.ready()
                start = time.monotonic()
                if start >= due:
                    publishable, ready = ready, []
                    newest = self._publish(hold, newest, publishable)
                    end = time.monotonic()
                    due = end + max(PUBLISH_SECONDS, (end - start) / PUBLISH_SHARE)
            assert finished.waiting == 0
        finally:
            answers.close()
            newest = self._publish(hold, newest, ready)
        return newest

    def _publish(self, hold: Hold, newest: Manifest | None, ready: Sequence[Written]) -> Manifest | None:
        if not ready:
            return newest
        hold.check()
        for written in ready:
            assert written.piece is not None
            if not self.destination.move_new(written.place, written.piece.path):
                self._foreign = frozenset({written.piece.path})
                raise self._taken(written.piece.path)
        pieces: list[Piece] = [written.piece for written in ready if written.piece is not None]
        now, source = datetime.now(UTC).isoformat(timespec="seconds"), self.job.origin.describe()
        if newest is None:
            shape = self.job.shape
            newest = Manifest(number=0, export=uuid.uuid4(), cluster=self.job.cluster, source=source, written=now,
                              shape=replace(shape, schema=ready[0].columns or shape.schema))  # fmt: skip
        following = newest.extended(pieces, source=source, written=now, timelines=self.job.timelines)
        hold.check()
        if not self.destination.put_new(manifest_path(following.number), encode(following)):
            raise ExportHeld(f"another run has published number {following.number} in {self.destination.place}")
        if following.number > KEPT_MANIFESTS:
            self.destination.remove(manifest_path(following.number - KEPT_MANIFESTS))
        self._tell_table(following)
        return following

    def _tell_table(self, newest: Manifest | None) -> None:
        """After a manifest is published, never before: a table never has what no manifest has. A run may die between the
        two, so the next one begins with it, and ends if it fails. A table is one manifest behind at most."""
        if self.table is not None and newest is not None:
            self.table.follow(newest)


def by_spark(
    spark: Any, job: Job, assignments: Sequence[Assignment], *, bucket: Path | None = None, watch: Watch = unseen
) -> Generator[Written, None, None]:
    """What became of them, in any order. `bucket`: a file that all tasks share, where all of them run on this machine."""
    slots = min(spark.sparkContext.defaultParallelism, len(assignments))
    job = replace(job, throttle=job.throttle.shared(slots, bucket))
    if job.query.engine == SPARK:
        from waltz_spark.exporting.spark_engine import SparkEngine

        yield from SparkEngine(spark, job).tasks(assignments, watch)
    else:
        yield from run_waves(spark, job, assignments, watch)


# -- clearing up --------------------------------------------------------------------------------------------------------


def has_leftovers(destination: Destination) -> bool:
    """Whether a run ended without clearing up, or is at work."""
    return bool(destination.names(PLANS) or destination.names(UNFINISHED))


def clear_up(destination: Destination, newest: Manifest | None, *, spared: Collection[str] = ()) -> None:
    """What runs left that are over, under the lock. Files first: as long as a plan is there, it is known what may be."""
    kept = {*spared, *(() if newest is None else (piece.path for piece in newest.pieces))}
    for name in destination.names(PLANS):
        plan_path = f"{PLANS}/{name}"
        for path in _paths_in(destination.read(plan_path), f"{destination.place}/{plan_path}"):
            if path not in kept:
                destination.remove(path)
        destination.remove(plan_path)
    for name in destination.names(UNFINISHED):
        destination.remove_tree(f"{UNFINISHED}/{name}")


def _paths_in(text: bytes | None, place: str) -> list[str]:
    try:
        return [below_output(path) for path in json.loads(text or b'{"paths": []}')["paths"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportDamaged(
            f"{place} cannot be understood, so nobody knows which files a run left that was killed",
            next_step="remove files that `waltzctl export verify` does not know, then that plan, and run it again",
        ) from error
