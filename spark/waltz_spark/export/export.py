"""The protocol of an export: planning, publishing, and the recovery of killed runs.

Only files in a manifest belong to an export. A run reads the newest manifest and plans the ids after it; tasks write files
under hidden names. The run publishes finished files repeatedly, in the order of ids: it writes the next manifest under a
hidden name (`pending.json`), renames the files, and creates the manifest, which must not exist yet. A run that is killed
before `pending.json` leaves hidden files, which the next run removes; a run that is killed after it leaves a manifest whose
files all exist, and the next run completes it. So each id is in exactly one file, whenever a run was killed, and the next
run continues after the last manifest.

Only `tasks.run_by_spark` depends on Spark: a runner is a function from tasks to their results.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from waltz_spark.export.delta import DeltaTable
from waltz_spark.export.destination import Destination, Hold, encode_writer, measured, newest_manifest
from waltz_spark.export.manifest import PENDING, UNFINISHED, Manifest, Piece, Shape, decode, encode, manifest_path
from waltz_spark.export.tasks import Assignment, Job, Written
from waltz_spark.log.origin import Catalog, Origin, Span, check_reached
from waltz_spark.log.plan import Sizing, plan
from waltz_spark.log.selection import EARLIEST, LATEST, Selection
from waltzd.errors import BadArgument, BeyondLog, NoSuchPartition
from waltzd.errors.operations import ExportDamaged, ExportGap, ExportHeld, NotOurExport

PUBLISH_SECONDS, PUBLISH_SHARE = 2.0, 0.05
"""Interval between two publications, which is the work that a killed run loses, and the largest share of time for them."""
KEPT_MANIFESTS = 3
_OURS = re.compile(r"partition-\d+-\d{19}-\d{19}\..+")
_NOT_WRITTEN = "nothing was written"

Runner = Callable[[Job, Sequence[Assignment]], Generator[Written, None, None]]
"""From a job and its tasks to their results, in any order. Closing the generator stops what still runs."""


# -- planning ----------------------------------------------------------------------------------------------------------


def check_same(before: Manifest, *, cluster: UUID, shape: Shape, place: str) -> None:
    """Raise `NotOurExport` if the files of a run would differ from existing ones."""
    if before.cluster != cluster:
        raise NotOurExport(f"{place} is an export of the cluster {before.cluster}, and what is to be read is {cluster}")
    there = before.shape
    for what, was, now in (
        ("the format", there.format, shape.format),
        ("the compression", there.compression, shape.compression),
        ("the decoder", there.decoder or "none", shape.decoder or "none"),
        ("what the decoder makes", there.decoder_fingerprint, shape.decoder_fingerprint),
        ("the list of columns", there.fingerprint, shape.fingerprint),
    ):
        if was != now:
            raise NotOurExport(f"{place} was made differently: {what} was {was}, and is to be {now}")


def check_history(origin: Origin, catalog: Catalog, before: Manifest | None, place: str) -> None:
    """Raise `OtherTimeline` if the export has ids above the last one that its timeline and the log share."""
    if before is not None:
        check_reached(
            origin, catalog, before.ends, what=f"the export {place}",
            not_done="nothing was exported, and the export was left as it is",
            next_step=lambda _forks: "export the log anew into another folder, and begin a stream over the export there "
            "with a new checkpoint; this folder keeps the old history",
        )  # fmt: skip


def wanted(catalog: Catalog, before: Manifest | None, asked: Selection) -> dict[int, Span]:
    """Return the ids that are missing in the export. Pure."""
    for named in (*(asked.partitions or ()), *asked.starting.named, *asked.ending.named):
        if named not in catalog.spans:
            raise NoSuchPartition(f"there is no partition {named} in what is to be read", not_done=_NOT_WRITTEN)
    reached = {} if before is None else before.next_ids
    numbers = sorted(catalog.spans) if asked.partitions is None else asked.partitions
    return {number: _missing(number, catalog.spans[number], reached.get(number), before, asked) for number in numbers}


def behind(catalog: Catalog, before: Manifest | None) -> dict[int, int]:
    """Return the partitions whose log ends before the export, with its last id. Pure.

    Directories may be behind. A cluster that is behind was set back, and appends other transactions under the ids."""
    reached = {} if before is None else before.next_ids
    return {
        number: span.last for number, span in catalog.spans.items() if number in reached and span.last < reached[number] - 1
    }


def _missing(number: int, there: Span, reached: int | None, before: Manifest | None, asked: Selection) -> Span:
    first, end = asked.starting.of(number), asked.ending.of(number)
    if first != EARLIEST and end != LATEST and end < first + (0 if asked.has_times else 1):
        raise BadArgument(
            f"partition {number}: there are no ids after {first - 1} through {end - 1}", not_done=_NOT_WRITTEN
        )
    if end - 1 > there.last and number in asked.ending.named:
        raise BeyondLog(
            f"partition {number}: --through is {end - 1}, and the last id that can be read is {there.last}",
            not_done=_NOT_WRITTEN,
            next_step=f"ask for ids up to {there.last}, or leave --through out",
        )
    start = first
    if reached is not None:
        assert before is not None
        begin = before.partitions[number].span.first
        if first > reached:
            raise ExportGap(f"partition {number}: --after is {first - 1}, and the export ends before id {reached}")
        if first != EARLIEST and first < begin:
            raise ExportGap(f"partition {number}: --after is {first - 1}, and the export begins at id {begin} already")
        start = reached
    elif first == EARLIEST:
        start = there.first
    elif start < there.first:
        raise ExportGap(
            f"partition {number}: --after is {start - 1}, and the first id that is still there is {there.first}"
        )
    if start < there.first:
        raise ExportGap(f"partition {number}: the export ends before id {start}, and the log begins at {there.first} now")
    return Span(start, there.last if end == LATEST else min(end - 1, there.last))


def planned(catalog: Catalog, spans: Mapping[int, Span], *, file_data_bytes: int | None) -> list[Assignment]:
    """Return the files to write. `file_data_bytes`: bytes of log in a file; None for the best size of a task."""
    missing = {number: span for number, span in spans.items() if span.count}
    sizing = Sizing() if file_data_bytes is None else Sizing(bytes_max=file_data_bytes, bytes_joined=file_data_bytes)
    splits = plan(catalog, missing, sizing)
    return [Assignment(number=number, split=split) for number, split in enumerate(splits)]


# -- a run -------------------------------------------------------------------------------------------------------------


class Finished:
    """Results of tasks until they can be published: the files of a partition count in the order of their ids. Pure."""

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
        """Take out the results that have no gap before them."""
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
    table: DeltaTable | None = None
    task_seconds: tuple[float, float] = (math.inf, -math.inf)
    """When the first task began and the last one ended, by the clocks of the machines that ran them."""

    def __post_init__(self) -> None:
        if self.before is not None:
            check_same(self.before, cluster=self.job.cluster, shape=self.job.shape, place=self.destination.place)

    @property
    def destination(self) -> Destination:
        return self.job.destination

    @property
    def has_leftovers(self) -> bool:
        """True if a killed run left files, or did not commit its last manifest to the table."""
        is_behind = self.table is not None and self.table.is_behind(self.before)
        return has_leftovers(self.destination) or is_behind

    def carry_out(self, runner: Runner) -> Manifest | None:
        """Carry out all tasks, or those up to the first error; what is finished is published in any case.

        Returns:
            The newest manifest.
        """
        with self.destination.hold(encode_writer(self.job.run)) as hold:
            newest = self._settle()
            if (newest and newest.number) != (self.before and self.before.number):
                raise ExportHeld(f"another run has just added to {self.destination.place}", next_step="run it again")
            if foreign := stray_files(self.destination, newest):
                raise _taken(self.destination, foreign[0])
            try:
                return self._write(runner, hold, newest)
            finally:
                with suppress(ExportHeld):  # another run has the lock: unfinished files may be its own
                    hold.check()
                    self._settle()  # Ctrl-C may have come in the middle of a publication

    def tidy(self) -> None:
        """Complete the publication of an earlier run, and remove its unfinished files."""
        with self.destination.hold(encode_writer(self.job.run)):
            self._settle()

    def _settle(self) -> Manifest | None:
        finish_pending(self.destination)
        self._remove_unfinished()
        newest = newest_manifest(self.destination)
        if self.table is not None and self.table.is_behind(newest) and newest is not None:
            self.table.follow(newest)
        return newest

    def _remove_unfinished(self) -> None:
        """Remove files under construction, unless a pending manifest needs them."""
        if self.destination.size(PENDING) is not None:
            return
        for name in self.destination.names(UNFINISHED):
            self.destination.remove_tree(f"{UNFINISHED}/{name}")

    def _write(self, runner: Runner, hold: Hold, newest: Manifest | None) -> Manifest | None:
        finished = Finished(self.assignments)
        ready: list[Written] = []
        results = runner(self.job, self.assignments)
        due = time.monotonic() + PUBLISH_SECONDS
        try:
            for written in results:
                if written.error is not None:
                    raise written.error
                finished.add(written)
                first, last = self.task_seconds
                self.task_seconds = min(first, written.started), max(last, written.ended)
                ready += finished.ready()
                start = time.monotonic()
                if start >= due:
                    publishable, ready = ready, []
                    newest = self._publish(hold, newest, publishable)
                    end = time.monotonic()
                    due = end + max(PUBLISH_SECONDS, (end - start) / PUBLISH_SHARE)
            assert finished.waiting == 0
        finally:
            results.close()
            newest = self._publish(hold, newest, ready)
        return newest

    def _publish(self, hold: Hold, newest: Manifest | None, ready: Sequence[Written]) -> Manifest | None:
        if not ready:
            return newest
        pieces = [written.piece for written in ready if written.piece is not None]
        now, source = datetime.now(UTC).isoformat(timespec="seconds"), self.job.origin.describe()
        if newest is None:
            newest = Manifest(number=0, export=uuid.uuid4(), cluster=self.job.cluster, source=source, written=now,
                              shape=self.job.shape)  # fmt: skip
        following = newest.extended(pieces, source=source, written=now, timelines=self.job.timelines)
        places = {written.piece.path: written.place for written in ready if written.piece is not None}
        pending = {"manifest": encode(following).decode(), "places": places}
        hold.check()
        self._check_alone(newest)
        if not self.destination.put_new(PENDING, json.dumps(pending).encode()):
            raise ExportHeld(f"another run is publishing in {self.destination.place}")
        hold.check()
        finish_pending(self.destination)
        if self.table is not None:  # after the manifest: a table never has a file that no manifest has
            self.table.follow(following)
        return following

    def _check_alone(self, newest: Manifest) -> None:
        """Raise `ExportHeld` if another run has published after `newest`. Where a store has no conditional put, two runs
        may take the lock at the same moment."""
        found = newest_manifest(self.destination)
        if (0 if found is None else found.number) != newest.number or (found and found.export != newest.export):
            raise ExportHeld(
                f"another run has just added to {self.destination.place}",
                not_done="what was not published yet was not exported",
                next_step="run it again",
            )


# -- publishing --------------------------------------------------------------------------------------------------------


def recover(destination: Destination, who: str) -> None:
    """Publish the manifest of a run that was killed while it published."""
    if destination.size(PENDING) is not None:
        with destination.hold(encode_writer(who)):
            finish_pending(destination)


def finish_pending(destination: Destination) -> None:
    """Publish the pending manifest, if there is one, under the lock. Idempotent: completed steps are kept."""
    place = f"{destination.place}/{PENDING}"
    text = destination.read(PENDING)
    if text is None:
        return
    try:
        pending = json.loads(text)
        manifest, places = decode(pending["manifest"].encode(), place), dict(pending["places"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportDamaged(f"{place} cannot be understood: {error}", next_step=_REMOVE_PENDING) from error
    newest = newest_manifest(destination)
    reached = 0 if newest is None else newest.number
    if manifest.number > reached:
        for piece in manifest.pieces:
            if piece.path in places:
                _move(destination, piece, places[piece.path])
        if not destination.put_new(manifest_path(manifest.number), encode(manifest)):
            raise ExportHeld(f"another run has published number {manifest.number} in {destination.place}")
        if manifest.number > KEPT_MANIFESTS:
            destination.remove(manifest_path(manifest.number - KEPT_MANIFESTS))
    destination.remove(PENDING)


_REMOVE_PENDING = "remove pending.json and what `waltzctl export verify` says that no manifest has; then run it again"


def _move(destination: Destination, piece: Piece, hidden: str) -> None:
    """Give a file its name. If the name is taken, the bytes decide whether an earlier attempt did it."""
    if destination.size(piece.path) is None:
        if destination.size(hidden) is None:
            raise ExportDamaged(
                f"{destination.place}/{hidden} is missing, and {PENDING} needs it", next_step=_REMOVE_PENDING
            )
        if destination.move_new(hidden, piece.path):
            return
    if destination.size(piece.path) != piece.size or measured(destination, piece.path)[1] != piece.sha256:
        raise _taken(destination, piece.path)


def _taken(destination: Destination, path: str) -> NotOurExport:
    return NotOurExport(
        f"{destination.place}/{path} is there, and no manifest has it",
        next_step="put the manifest back that has it, or move the file away; then run the same command again",
    )


def stray_files(destination: Destination, manifest: Manifest | None) -> list[str]:
    """Return files with names of an export that are in no manifest; readers of the directory would read them."""
    known = () if manifest is None else {piece.path for piece in manifest.pieces}
    return [name for name in destination.names() if name not in known and _OURS.fullmatch(name)]


def has_leftovers(destination: Destination) -> bool:
    """Return whether a run was killed, or is active."""
    return bool(destination.names(UNFINISHED)) or destination.size(PENDING) is not None
