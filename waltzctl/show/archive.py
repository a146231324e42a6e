"""Output about archives and backups: their coverage, damage in a store, and the end of a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waltzctl.shell.moment import shown
from waltzctl.shell.numbers import format_partitions
from waltzctl.show.forms import (
    Column,
    Columns,
    Line,
    Listing,
    Part,
    Table,
    attributes,
    draw,
    objects,
    plain,
    verdict,
    warnings,
)
from waltzctl.show.terminal import console, count, rate, size

if TYPE_CHECKING:
    from waltzd.archive.cut_point import ArchivedLog, Cut
    from waltzd.archive.manifest import Manifest
    from waltzd.archive.verification import Flaw, Survey
    from waltzd.format.finding import Finding

# -- how far archives reach --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reaching:
    """Archive coverage of one partition."""

    partition: int
    archived: int | None
    committed: int | None
    """Last committed id, as the owner reports it; None if it does not answer."""
    floor: int
    """First id that storages hold."""
    manifest: int | None
    archive: str
    sha256: str
    trouble: str
    checked_ms: int | None
    """Age of the start of the last complete check of the archived objects; None if there was none."""
    missing: str

    @property
    def checked(self) -> str:
        """For people."""
        if self.missing:
            return "incomplete"
        if self.checked_ms is None:
            return "" if self.archived is None else "not yet"
        hours = self.checked_ms / 3_600_000
        return f"{hours:.0f} h ago" if hours >= 1 else f"{60 * hours:.0f} min ago"

    @property
    def behind(self) -> int | None:
        """Committed transactions that are not archived: at least what stands in the segment that is being written."""
        return None if self.committed is None else self.committed - (-1 if self.archived is None else self.archived)


REACHING: Columns[Reaching] = (
    Column("partition"),
    Column("archived", json="archived_to"),
    *attributes("committed behind floor manifest"),
    Column("checked", json=""),
    Column("", "checked_ms", json="checked_ms_ago"),
    *attributes("archive sha256 trouble missing", is_wide=True),
)


def troubles(found: Sequence[Reaching]) -> list[str]:
    """Return a sentence for each trouble, with all partitions that have it."""
    sentences: dict[str, list[int]] = {}
    for one in found:
        for trouble, words in ((one.trouble, "does not go on"), (one.missing, "lacks what was in it")):
            if trouble:
                sentences.setdefault(f"{words}: {trouble}", []).append(one.partition)
    return [f"{format_partitions(numbers)}: the archive {sentence}" for sentence, numbers in sentences.items()]


def reaching(found: Sequence[Reaching]) -> Listing[Reaching]:
    unused = "Nothing is archived yet: no segment is full, or no storage has the setting `archive`."
    notes: list[Part] = [*warnings(troubles(found)), *([] if any(one.archive for one in found) else [unused])]
    return Listing(kind="partitions", columns=REACHING, rows=found, notes=notes)


# -- how far a cluster is backed up ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BackedUpPartition:
    partition: int
    committed: int | None
    """Last committed id, as the owner reports it; None if it was not asked or does not answer."""
    backed_up: int | None
    """Last id in the store, in a segment or in the unsealed part."""
    transactions: int | None
    """Number of transactions that are committed and not in the store; None if unknown."""
    seconds: float | None
    """Age in seconds of the oldest commit that is not in the store, as the owner reports it; from a store alone, the age
    of its newest complete moment. None if unknown."""
    moment: int
    """Time up to which all commits are in the store, in microseconds since 1970; 0 if unknown."""
    trouble: str


@dataclass(frozen=True, kw_only=True)
class SavedMetadata:
    """Documents of the cluster in the store."""

    number: int
    seconds: float | None
    """Time since the leader last found them there in this state."""
    moment: str
    """Time at which the newest ones in the store were read."""
    trouble: str


PARTITIONS: Columns[BackedUpPartition] = (
    Column("partition"),
    Column("committed"),
    Column("backed up", json="backed_up_to"),
    Column("lost now", "transactions", json="lost_transactions"),
    Column("seconds", lambda one: None if one.seconds is None else round(one.seconds, 1), json="lost_seconds"),
    Column("complete to", lambda one: shown(one.moment) if one.moment else None),
    Column("trouble"),
)


@dataclass(frozen=True, kw_only=True)
class Backups:
    place: str
    """Store that was read; "" if owners were asked."""
    partitions: Sequence[BackedUpPartition]
    metadata: SavedMetadata | None

    def is_behind(self, seconds: float) -> bool:
        """Return whether the backup stopped, or is more than `seconds` behind."""
        is_late = not self.place and any((one.seconds or 0) > seconds for one in self.partitions)
        return is_late or any(one.trouble for one in self.partitions) or bool(self.metadata and self.metadata.trouble)

    def page(self) -> Listing[BackedUpPartition]:
        unused = "Nothing is backed up: set `archive` in the configuration of the storages."
        return Listing(
            kind="partitions",
            columns=PARTITIONS,
            rows=self.partitions,
            notes=[
                *([unused] if all(one.backed_up is None for one in self.partitions) else []),
                f"Documents of the cluster: {self.documents()}",
            ],
            content={
                "store": self.place or None,
                "partitions": objects(PARTITIONS, self.partitions),
                "metadata": self.metadata and {**plain(self.metadata), "moment": self.metadata.moment or None},
            },
        )

    def documents(self) -> str:
        """Describe how the documents of the cluster are saved."""
        saved = self.metadata
        if saved is None:
            return "none are saved" if self.place else "no leader says that they are saved"
        if saved.trouble:
            return saved.trouble
        if saved.moment:
            return f"number {saved.number}, as at {saved.moment}"
        if saved.seconds is None:
            return "not saved yet"
        return f"number {saved.number}, seen as they are {saved.seconds:.0f} seconds ago"


# -- what is in a store ------------------------------------------------------------------------------------------------

FLAWS: Columns[Flaw] = (Column("object", "name"), *attributes("partition first last detail"))
BRANCHES: Columns[Manifest] = (
    Column("partition"),
    Column("timeline", "lineage.number"),
    Column("fork", lambda one: one.lineage.fork if one.lineage.later else None),
    Column("archived", "last", json="archived_to"),
    Column("segments", "total.segments"),
    Column("shared", json="shared_segments"),
    Column("began", lambda one: one.lineage.later[-1].began if one.lineage.later else None),
    Column("cause", lambda one: one.lineage.later[-1].cause if one.lineage.later else None),
    Column("identity", lambda one: str(one.timeline), is_wide=True),
)


def branches(found: Sequence[Manifest]) -> Listing[Manifest]:
    """Return the timelines in a store, by partition and order."""
    return Listing(kind="timelines", columns=BRANCHES, rows=found)


SIGNATURES = {
    "verified": "signatures: {} verified",
    "unsigned": "{} without a signature: whoever could write to the store may have put them there",
    "unchecked": "{} signed, and not checked: WALTZ_ARCHIVE_KEY names no key",
}


def verified(
    place: str, found: Survey, flaws: Sequence[Flaw], seconds: float, *, is_quick: bool, signatures: Mapping[str, int]
) -> Listing[Flaw]:
    totals = [manifest.total for manifest in found.manifests.values()]
    segments, stored = sum(total.segments for total in totals), sum(total.stored_bytes for total in totals)
    how = "sizes of" if is_quick else "all bytes of"
    of = f"{count(segments, 'segment')} of {count(len(totals), 'partition')}, {size(stored)}"
    page: list[Part] = [
        verdict(count(len(flaws), "finding") if flaws else "clean", is_good=not flaws),
        *(part for flaw in flaws for part in ("", *flaw_lines(flaw))),
        f"{how} {of}, in {seconds:.1f} s",
        *(words.format(count(signatures[kind], "object")) for kind, words in SIGNATURES.items() if signatures.get(kind)),
        *([f"{count(len(found.orphans), 'orphan')}: `waltzctl archive heal --clean` removes them"] * bool(found.orphans)),
    ]
    content = {
        "result": "findings" if flaws else "clean", "store": place, "archive": str(found.label.archive),
        "cluster": str(found.label.cluster), "is_quick": is_quick, "seconds": round(seconds, 3),
        "partitions": [_partition(number, found) for number in sorted(found.manifests)],
        "signatures": {kind: signatures.get(kind, 0) for kind in SIGNATURES},
        "orphans": len(found.orphans), "pending": len(found.pending), "strange": [one.name for one in found.strange],
        "findings": objects(FLAWS, flaws),
    }  # fmt: skip
    return Listing(kind="findings", columns=FLAWS, rows=flaws, page=page, content=content)


def _partition(number: int, found: Survey) -> dict[str, Any]:
    manifest, total = found.manifests[number], found.manifests[number].total
    return {
        "partition": number, "manifest": manifest.number, "sha256": manifest.sha256, "first": total.first,
        "last": total.last, "segments": total.segments, "record_bytes": total.record_bytes, "crc": f"{total.crc:08x}",
        "bytes": total.stored_bytes,
    }  # fmt: skip


def flaw_lines(flaw: Flaw) -> list[Part]:
    ids = [] if flaw.first is None else [f"  partition {flaw.partition}, ids {flaw.first:,} to {flaw.last:,}"]
    return [Line(flaw.name, "bold"), *ids, f"  {flaw.detail}"]


def print_flaw(flaw: Flaw, why: str) -> None:
    """Print a flaw that stays, and why."""
    draw(console(to_stderr=True), [*flaw_lines(flaw), f"  {why}"])


def print_strange(found: Survey) -> None:
    """Print a note about objects that belong to no archive; they are not touched."""
    if found.strange:
        text = f"{count(len(found.strange), 'object')} that no archive has: {found.strange[0].name}"
        draw(console(to_stderr=True), [text if len(found.strange) == 1 else f"{text} and others"])


# -- where a restore would end, and what came of a drill ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Result of a drill."""

    place: str
    cut: Cut
    logs: Mapping[int, ArchivedLog]
    bytes: int
    restored_seconds: float
    verified_seconds: float
    records: int
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        return not self.findings and self.records == sum(point.mark + 1 for point in self.cut.points.values())


ENDS: Columns[Mapping[str, Any]] = tuple(map(Column, ("partition", "last id", "time", "stored to", "given up")))


def marks(place: str, cut: Cut, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Listing[Mapping[str, Any]]:
    """Return the marks of a restore; their JSON is a file for `--through-marks`."""
    content = {
        "store": place, "moment": moment, "marks": {str(row["partition"]): row["last_id"] for row in rows},
        "partitions": rows,
    }  # fmt: skip
    return Listing(kind="partitions", columns=ENDS, rows=rows, page=_ends(moment, rows), content=content)


def _ends(moment: str | None, rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    return [
        Line(f"all partitions at {moment}" if moment is not None else "each partition by itself", "bold"),
        Table(ENDS, rows),
    ]


def drilled(found: Drill, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Listing[Mapping[str, Any]]:
    took = f"restored in {found.restored_seconds:.1f} s ({rate(found.bytes, found.restored_seconds)} MB/s)"
    page = [
        verdict("restored and whole" if found.is_right else "NOT whole", is_good=found.is_right),
        *(f"  {finding.sentence()}" for finding in found.findings),
        *_ends(moment, rows),
        f"{count(found.records, 'record')}, {size(found.bytes)}: {took}, every record checked in "
        f"{found.verified_seconds:.1f} s",
    ]
    content = {
        "result": "whole" if found.is_right else "findings", "store": found.place, "moment": moment,
        "bytes": found.bytes, "records": found.records, "restored_seconds": round(found.restored_seconds, 3),
        "verified_seconds": round(found.verified_seconds, 3), "partitions": rows,
        "findings": [finding.sentence() for finding in found.findings],
    }  # fmt: skip
    return Listing(kind="partitions", columns=ENDS, rows=rows, page=page, content=content)
