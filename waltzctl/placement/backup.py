"""A store as the source of a restored cluster: its logs, its documents, and the end that an operator chose for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from waltzctl.shell import moment
from waltzctl.shell.options import From, Misused
from waltzd.archive.cut_point import ArchivedLog, Cut, cut_at_marks, cut_at_time, cut_latest, empty_log, logs_in
from waltzd.archive.listing import ONE_LOG, label_of, metadata_at, newest_metadata
from waltzd.archive.location import open_archive
from waltzd.archive.manifest import Label, folder_of, manifest_name
from waltzd.archive.store import Store
from waltzd.cluster.metadata import SavedDocuments, read
from waltzd.disk.real import translate
from waltzd.errors import BadArgument
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectAbsent
from waltzd.format.layout import ID_MAX, NO_MARK
from waltzd.protocol.timelines import NEVER_FORKED, Lineage


@dataclass(frozen=True, kw_only=True)
class End:
    """Options that say where the logs end."""

    through: Annotated[
        str | None,
        Option("--through", metavar="TIME", help=f"End all partitions at this time, inclusive. {moment.HELP}"),
    ] = None
    through_marks: Annotated[
        Path | None,
        Option(
            "--through-marks",
            metavar="FILE",
            help="End each partition at its id in FILE, in the form that `waltzctl archive status STORE` prints: a fork.",
        ),
    ] = None
    latest: Annotated[bool, Option("--latest", help="The newest time up to which the store has all partitions.")] = False
    each: Annotated[
        bool,
        Option(
            "--each-as-far-as-it-goes",
            help="Accept partitions of which the store may lack transactions before that time.",
        ),
    ] = False

    timelines: Annotated[
        tuple[str, ...],
        Option(
            "--timeline",
            metavar="PARTITION=NUMBER",
            help="Use an older timeline of a partition, which a rescue or a restore ended. Default: the newest. "
            "Repeatable; `waltzctl archive status STORE --timelines` lists the timelines.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        self.check()

    @property
    def is_given(self) -> bool:
        return self.latest or self.each or bool(self.timelines or self.through or self.through_marks)

    def check(self) -> None:
        """Raise `Misused` unless exactly one end is given."""
        if (self.through is not None) + (self.through_marks is not None) + self.latest != 1:
            raise Misused("Give one of --through, --through-marks and --latest.")
        if self.each and self.through_marks is not None:
            raise Misused("--each-as-far-as-it-goes does not go with --through-marks, which says where each one ends.")

    @property
    def words(self) -> str:
        """Return the options as they were typed."""
        chosen = "".join(f" --timeline {one}" for one in self.timelines)
        if self.through is not None:
            return f"--through {self.through}{chosen}"
        return ("--latest" if self.latest else f"--through-marks {self.through_marks}") + chosen

    @property
    def chosen(self) -> dict[int, int]:
        """Return the timelines that were asked for: partition → number."""
        found = dict[int, int]()
        for text in self.timelines:
            partition, _, number = text.partition("=")
            if not partition.isdecimal() or not number.isdecimal() or int(number) < 1:
                raise BadArgument(
                    f"--timeline {text} is not a timeline", next_step="give partition and number, as in --timeline 3=1"
                )
            found[int(partition)] = int(number)
        return found

    def cut(self, logs: Mapping[int, ArchivedLog], now: datetime) -> Cut:
        if self.through_marks is not None:
            return cut_at_marks(logs, marks_in(self.through_marks))
        if self.through is None:
            return cut_latest(logs, is_each=self.each)
        time = moment.microseconds(self.through, now, "--through")
        return cut_at_time(logs, time, now=int(now.timestamp() * 1_000_000), is_each=self.each)


@dataclass(frozen=True, kw_only=True)
class MaybeEnd(End):
    """The same options without a required one; a command that needs an end calls `check`."""

    def __post_init__(self) -> None:
        pass


Ending = Annotated[End, From(End)]
MaybeEnding = Annotated[MaybeEnd, From(MaybeEnd)]


def marks_in(file: Path) -> dict[int, int]:
    """Read the last id of each partition from a JSON object."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise translate(error, f"reading {file}") from error
    try:
        found = json.loads(text)
        rows = found.get("marks", found) if isinstance(found, dict) else None
        marks = {int(number): mark for number, mark in rows.items()} if isinstance(rows, dict) else None
    except (ValueError, RecursionError):
        marks = None
    if not marks or not all(type(mark) is int and NO_MARK <= mark <= ID_MAX for mark in marks.values()):
        raise BadArgument(
            f"{file} holds no marks",
            next_step='write a JSON object, like {"0": 4711, "1": -1}; -1 is a partition without a transaction',
        )
    return marks


# -- what a store has --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Source:
    """A store that holds the logs of a cluster."""

    place: str
    """The store as it was named."""
    label: Label
    logs: Mapping[int, ArchivedLog]
    newest: SavedDocuments | None
    """Documents that were saved last; None if none were saved."""
    store: Store
    chosen: frozenset[int] = frozenset()
    """Partitions whose timeline the operator chose."""

    def lineage(self, partition: int) -> Lineage:
        """Return all known timelines of a partition: from its archive, or from the saved documents, which know of a
        rescue before the first upload after it."""
        log, saved = self.logs.get(partition), None if self.newest is None else self.newest.partition(partition)
        known = [NEVER_FORKED if log is None else log.tree, NEVER_FORKED if saved is None else saved.lineage]
        fewer, more = sorted(known, key=lambda lineage: lineage.number)
        if not more.continues(fewer):
            raise ArchiveDamaged(
                f"{self.store.place}: timelines of partition {partition} in the store, up to {known[0].number}, and those "
                f"in the saved documents, up to {known[1].number}, are of two logs",
                next_step=f"{ONE_LOG}: {folder_of(partition, known[0].current)}, or the newest objects of `metadata`",
            )
        return more

    def cut_at(self, end: End, now: datetime) -> Cut:
        """Return the cut that the options ask for. Raise `ArchiveDamaged` if they ask for the end of a log, and the store
        lacks a manifest or a timeline that the saved documents name."""
        archives = {} if self.newest is None or not end.latest or end.each else self.newest.archives
        for number, meta in archives.items():
            log = self.logs.get(number) or empty_log(self.store, self.label, number)
            if log.archive.timeline == meta.timeline:
                has_it = log.manifest.number >= meta.number
            else:  # of the newest timeline, it has no more than an earlier one of which more is there
                has_it = log.last_shared >= meta.last if log.tree.current == meta.timeline else meta.timeline in log.tree
            if number in self.chosen or has_it:
                continue
            raise ArchiveDamaged(
                f"{self.store.place}: {manifest_name(number, meta.number, meta.timeline)}, which has ids up to {meta.last} "
                "by the saved documents of the cluster, is not in the store",
                next_step="bring it back with `waltzctl archive heal`, or from a copy of the store; or take what is left, "
                "with --each-as-far-as-it-goes",
            )
        return self.within_newest(end.cut(self.logs, now))

    def within_newest(self, cut: Cut) -> Cut:
        """Return the cut, limited to the fork of any newer timeline of which the archive holds nothing yet."""
        points = dict(cut.points)
        for partition, point in cut.points.items():
            log = self.logs[partition]
            shared = self.lineage(partition).shared_to(log.archive.timeline)
            if partition not in self.chosen and shared is not None and point.mark > shared:
                points[partition] = log.at_mark(shared)
        return replace(cut, points=points)

    def completed(self, partitions: int) -> Source:
        """Return a log for each partition, including partitions of which the store holds nothing."""
        logs = {number: self.logs.get(number) or empty_log(self.store, self.label, number) for number in range(partitions)}
        return replace(self, logs=logs)

    def documents_at(self, cut: Cut) -> SavedDocuments | None:
        """Return the newest documents that were saved before the moment of the cut; the newest of all if the cut has no
        moment or all are later."""
        if cut.time is None or self.newest is None:
            return self.newest
        number, limit = self._newest_number, datetime.fromtimestamp(cut.time / 1e6, UTC)
        while number > 0:
            try:
                found = _saved(metadata_at(self.store, number), number)
            except ObjectAbsent:
                break
            if _moment_of(found) <= limit:
                return found
            number -= 1
        return self.newest

    @property
    def _newest_number(self) -> int:
        found = newest_metadata(self.store)
        return 0 if found is None else found[0]


def source_at(place: str, chosen: Mapping[int, int] | None = None) -> Source:
    """Read everything but the segments. Blocks until the store has answered. `chosen`: partition → number of an older
    timeline to take."""
    store = open_archive(place)
    label = label_of(store, not_done="nothing was changed")
    found = newest_metadata(store)
    newest = None if found is None else _saved(found[1], found[0])
    if newest is not None and newest.meta.key != label.cluster:
        raise ForeignArchive(
            f"{store.place} holds the log of the cluster {label.cluster}, and documents of {newest.meta.key}",
            not_done="nothing was changed",
            next_step="find out what was put into this store by hand",
        )
    logs = logs_in(store, label, None if newest is None else newest.logs, chosen)
    return Source(place=place, label=label, logs=logs, newest=newest, store=store, chosen=frozenset(chosen or ()))


def _saved(text: bytes, number: int) -> SavedDocuments:
    return read(text, f"the documents {number} in the store")


def _moment_of(saved: SavedDocuments) -> datetime:
    try:
        found = datetime.fromisoformat(saved.moment)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def moment_of(cut: Cut) -> str | None:
    """Return the moment of the cut as JSON; None if each partition ends by itself."""
    return None if cut.time is None else moment.iso(cut.time)


def cut_rows(cut: Cut, logs: Mapping[int, ArchivedLog]) -> list[dict[str, Any]]:
    """Return a row for each partition as JSON."""
    return [
        {
            "partition": number,
            "last_id": point.mark,
            "time": None if point.time is None else moment.iso(point.time),
            "stored_to": logs[number].last,
            "timeline": logs[number].tree.number_of(logs[number].archive.timeline),
            "given_up": logs[number].last - point.mark,
        }
        for number, point in sorted(cut.points.items())
    ]


def bytes_up_to(log: ArchivedLog, mark: int) -> int:
    """Return the bytes to fetch, which is slightly more than what is written."""
    pieces = sum(piece.size for piece in log.pieces if piece.first <= mark)
    return pieces + sum(len(rest.data) for rest in log.rest if rest.first <= mark)
