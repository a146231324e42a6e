"""Unsealed records in an archive: committed records that are in no archived segment yet.

Segments are large, so each round uploads only new records, as they are on disk, into *slots*: objects that are overwritten
once their records are in an archived segment. One small object, the index `tail.json`, lists the valid slots with their
hashes, and states up to which time all committed records are in the archive. The slots and the newest manifest leave no
gap.

A round writes the slot, reads it back, and then writes `tail.json`. A writer overwrites a slot only if the slot still has
the tag that the writer read in `tail.json`, and only if `tail.json` does not list the slot or a manifest holds all its ids.
So with crashes and several writers, `tail.json` never lists a slot that is not there, unless a manifest holds its ids by
then. A reader that finds other bytes in a slot reads manifest and `tail.json` again.

The last 16 bytes of a slot are unique to its upload, because some stores derive the tag of an object from its bytes: equal
records that are uploaded twice must get two tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Annotated
from uuid import UUID

from waltzd.archive.manifest import MANIFEST_BYTES_MAX, ArchiveObject, Label, Manifest, folder_of
from waltzd.archive.store import Store, read_object
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import ArchiveDamaged, BadFrame, ForeignArchive, ObjectAbsent
from waltzd.format.batch import End, parse_batches, why_wrong
from waltzd.format.checksum import crc32
from waltzd.format.layout import BATCHES, VERSIONS
from waltzd.format.record import Run, first_bad, walk
from waltzd.protocol.digest import sha256_of
from waltzd.protocol.document import ADDED, ROW, AnyText, Crc, Document, Sha256
from waltzd.protocol.peers import Content, runs_of
from waltzd.protocol.timelines import FIRST, Lineage, Timeline, lineage_mistake

SLOTS_MAX = 64
UNIQUE_BYTES = 16
"""Number of unique bytes at the end of a slot."""
READS_MAX = 10
"""Number of attempts to read slots while uploads overwrite them."""


def unsealed_index_name(partition: int, timeline: UUID = FIRST) -> str:
    return f"{folder_of(partition, timeline)}/tail.json"


def slot_name(partition: int, slot: int, timeline: UUID = FIRST) -> str:
    return f"{folder_of(partition, timeline)}/tail/{slot}"


@dataclass(frozen=True, kw_only=True)
class Slot(Document):
    """The entry of one slot, which holds records of one segment in the format of that segment."""

    slot: int
    first: int
    last: int
    format: int
    record_bytes: int
    """Bytes of the records alone."""
    size: int
    """Bytes of the object."""
    time: int
    """Time of the last batch, in microseconds since 1970; 0 in format 0."""
    crc: Crc
    """CRC-32 of the records."""
    sha256: Sha256
    """SHA-256 of the object."""

    def mistake(self) -> tuple[str, str] | None:
        if self.first > self.last:
            return "last", f"must be {self.first} or above, not {self.last}"
        if self.format not in VERSIONS:
            return "format", f"must be one of {', '.join(map(str, VERSIONS))}, not {self.format}"
        if self.size < self.record_bytes + UNIQUE_BYTES:
            return "size", f"must be at least {self.record_bytes + UNIQUE_BYTES}, not {self.size}"
        return None


@dataclass(frozen=True, kw_only=True)
class UnsealedIndex(ArchiveObject):
    """The object `tail.json`. Its slots follow each other without a gap, and the first begins at `since` or before."""

    kind = "tail"
    archive: UUID
    cluster: UUID
    partition: int
    timelines: tuple[Annotated[Timeline, ROW], ...] = field(default=(), metadata={ADDED: True})
    """Timelines of the log after the first one. The index belongs to the last of them."""
    number: int
    """Number of the write, from 1 on."""
    session: int
    """Highest session in which an owner requested a write."""
    since: int
    """First id that was in no manifest."""
    moment: int
    """Time up to which all committed records are here or in a manifest: microseconds since 1970, by the clock of an
    owner."""
    tags: Mapping[int, AnyText] = field(default_factory=dict)
    """Last known tag of each slot that was ever written."""
    slots: tuple[Annotated[Slot, ROW], ...] = ()

    def mistake(self) -> tuple[str, str] | None:
        if (mistake := lineage_mistake(self.timelines)) is not None:
            return "timelines", mistake
        for at, (one, behind) in enumerate(pairwise(self.slots), 1):
            if behind.first != one.last + 1:
                return f"slots[{at}]", f"begins at id {behind.first} and does not follow the one that ends at id {one.last}"
        if self.slots and not self.slots[0].first <= self.since <= self.last + 1:
            return "slots", f"have a gap in front of id {self.slots[0].first}"
        if len({slot.slot for slot in self.slots}) < len(self.slots):
            return "slots", "have one twice"
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in fields(Slot))

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.timelines)

    @property
    def last(self) -> int:
        """Id up to which all records are here or in a manifest."""
        return self.slots[-1].last if self.slots else self.since - 1


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SlotRecords:
    """The records of a slot whose hash was compared with `tail.json`."""

    slot: Slot
    data: memoryview
    where: str

    def content(self) -> Content:
        """Check and return the records: a run of format 0, or whole batches."""
        found = self._batches() if self.slot.format == BATCHES else self._run()
        runs, crc = runs_of(found), 0
        for run in runs:
            crc = crc32(run.data, crc)
        if not runs or (runs[0].first_id, runs[-1].last_id, crc) != (self.slot.first, self.slot.last, self.slot.crc):
            raise ArchiveDamaged(f"{self.where} holds other records than tail.json states")
        return found

    def _run(self) -> Run:
        bounds = walk(self.data)
        if bounds[-1] != len(self.data):
            raise ArchiveDamaged(f"{self.where} has no whole record at byte {bounds[-1]}")
        run = Run(self.slot.first, self.data, bounds)
        bad = first_bad(run)
        if bad is not None:
            raise ArchiveDamaged(f"{self.where}: record {run.first_id + bad} fails its checks")
        return run

    def _batches(self) -> Content:
        try:
            found = parse_batches(self.data)
        except BadFrame as error:
            raise ArchiveDamaged(f"{self.where}: {error.message}") from error
        before: End | None = None
        for batch in found:
            wrong = why_wrong(batch, before)
            if wrong:
                raise ArchiveDamaged(f"{self.where}: the batch at id {batch.first_id}: {wrong}")
            before = batch.end(before or End())
        return found


def unsealed_index_at(store: Store, label: Label, partition: int, timeline: UUID = FIRST) -> UnsealedIndex | None:
    """Read `tail.json` of a timeline; return None if there is none."""
    name = unsealed_index_name(partition, timeline)
    where = f"{store.place}: {name}"
    try:
        found = UnsealedIndex.decode(read_object(store, name, MANIFEST_BYTES_MAX), where)
    except ObjectAbsent:
        return None
    if (found.archive, found.cluster) != (label.archive, label.cluster):
        raise ForeignArchive(f"{where} belongs to the archive {found.archive} of the cluster {found.cluster}")
    if (found.partition, found.lineage.current) != (partition, timeline):
        raise ArchiveDamaged(f"{where} is that of partition {found.partition} on timeline {found.lineage.current}")
    return found


def read_unsealed(archive: PartitionArchive, known: Manifest) -> tuple[Manifest, UnsealedIndex | None, list[SlotRecords]]:
    """Return the newest manifest, starting from a known one, `tail.json`, and the records of its slots that go beyond the
    manifest. The first slot may begin within the manifest; no id is missing between the two. The index is None if there is
    none."""
    for _ in range(READS_MAX):
        index = unsealed_index_at(archive.store, archive.label, archive.partition, archive.timeline)
        known = archive.newest_after(known)
        if index is None:
            return known, None, []
        if index.since > known.last + 1:
            continue  # a manifest was created between the two reads
        parts, wrong = [], ""
        for slot in index.slots:
            if slot.last > known.last:
                part, wrong = _part(archive, slot)
                if part is None:
                    break
                parts.append(part)
        if not wrong:
            return known, index, parts
        again = archive.newest_after(known)
        newest = unsealed_index_at(archive.store, archive.label, archive.partition, archive.timeline)
        if again.number == known.number and newest == index:
            raise ArchiveDamaged(wrong)
        known = again
    name = unsealed_index_name(archive.partition, archive.timeline)
    raise ArchiveDamaged(
        f"{archive.store.place}: {name} and the manifests of its timeline do not fit together: the newest manifest ends at "
        f"id {known.last}"
    )


def _part(archive: PartitionArchive, slot: Slot) -> tuple[SlotRecords | None, str]:
    """Read a slot; return its records, or None and what is wrong with it."""
    name = slot_name(archive.partition, slot.slot, archive.timeline)
    where = f"{archive.store.place}: {name}"
    try:
        data = archive.store.get_range(name, 0, slot.size + 1)
    except ObjectAbsent:
        return None, f"{where}, which holds the ids {slot.first} to {slot.last}, is not there"
    if sha256_of(data) != slot.sha256:
        return None, f"{where}, which holds the ids {slot.first} to {slot.last}, has other bytes than tail.json states"
    return SlotRecords(slot=slot, data=memoryview(data)[:-UNIQUE_BYTES], where=where), ""
