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

`UnsealedWriter` uploads the records of one partition. A crash between any two steps does no harm.

Records are read from the local replica. Small slots are merged: a slot is uploaded again together with the following
records until it has some megabytes. So each byte is uploaded a few times, and a segment needs some dozens of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, TypeAlias
from uuid import UUID

from waltzd.archive.manifest import LABEL, MANIFEST_BYTES_MAX, ArchiveObject, Label, Manifest, folder_of
from waltzd.archive.store import Store, read_object
from waltzd.archive.upload import PartitionArchive, has
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ArchiveDamaged, BadFrame, ForeignArchive, ObjectAbsent, ObjectExists
from waltzd.format.batch import End, parse_batches, why_wrong
from waltzd.format.checksum import crc32, joined_crc
from waltzd.format.layout import BATCHES, VERSIONS
from waltzd.format.record import Run, first_bad, walk
from waltzd.protocol.document import ADDED, ROW, AnyText, Crc, Document, Sha256, sha256_of
from waltzd.protocol.peers import Content, runs_of
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage, Timeline, lineage_mistake

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


SLOT_BYTES = 8 << 20
"""Size above which a slot is not merged any more."""
CROWD = 16
"""Number of slots after which the size limit doubles, so that 64 slots hold a gigabyte."""
TRIES_MAX = 20

Read: TypeAlias = Callable[[int, int, int], Content]
"""Function (first id, last id, bytes) that reads records from disk: at least one, up to a number of bytes, and none after
the last id, except in the batch that holds it."""


class _Moved(Exception):
    """Another writer changed an object, or this one did and the answer was lost: the round starts again."""


@dataclass
class _Piece:
    """Records of one format, on their way to a slot."""

    first: int
    last: int
    format: int
    time: int
    record_bytes: int
    crc: int
    parts: list[Buffer]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def is_behind(self, slot: Slot, size_max: int) -> bool:
        """Return whether that slot is small enough to be merged with this piece."""
        is_small = slot.size < 2 * self.size and slot.size + self.size <= size_max
        return is_small and slot.format == self.format and slot.last + 1 == self.first


class UnsealedWriter:
    """Writer of the unsealed records of one partition, on one timeline."""

    def __init__(
        self,
        store: Store,
        label: Label,
        partition: int,
        fresh_id: Callable[[], UUID],
        lineage: Lineage = NEVER_FORKED,
    ) -> None:
        self.store = store
        self.lineage = lineage
        self._fresh_id = fresh_id
        self.label = label
        self.partition = partition
        self._known: UnsealedIndex | None = None
        self._tag: str | None = None
        """Tag of `tail.json`, which the next write replaces; None if there is none."""

    def add(self, *, session: int, since: int, last: int, moment: int, read: Read) -> UnsealedIndex:
        """Upload committed records up to `last`, and return the new index. `since`: the first id that is in no stored
        manifest. `moment`: time up to which all committed records have ids up to `last`."""
        for _ in range(TRIES_MAX):
            stored, self._known = self._known or self._load(), None  # after an error it is read again
            try:
                found = self._add(stored, session, max(since, stored.since), last, moment, read)
            except _Moved:
                continue
            self._known = found
            return found
        raise ObjectExists(
            f"{self._where(self._index_name)} was changed by another writer again and again",
            next_step="none, if the partition changed its owner; otherwise find out what else writes to this store",
        )

    def _load(self) -> UnsealedIndex:
        name = self._index_name
        try:
            self._tag = self.store.head(name).tag  # read first, so that a newer version is never overwritten
        except ObjectAbsent:
            self._tag = None
            self._check_label()
            return self._empty()
        try:
            return unsealed_index_at(self.store, self.label, self.partition, self.lineage.current) or self._empty()
        except ArchiveDamaged:
            text = read_object(self.store, name, MANIFEST_BYTES_MAX)
            if text != read_object(self.store, name, MANIFEST_BYTES_MAX):
                raise
        return self._empty()  # the index is damaged; the slots are written anew

    def _check_label(self) -> None:
        """Raise `ForeignArchive` if the label is gone: the store was emptied, and must not be filled again."""
        try:
            found = Label.decode(read_object(self.store, LABEL, MANIFEST_BYTES_MAX), self._where(LABEL))
        except ObjectAbsent:
            found = None
        if found != self.label:
            raise ForeignArchive(f"{self.store.place} does not hold the archive {self.label.archive} any more")

    def _empty(self) -> UnsealedIndex:
        archive, cluster = self.label.archive, self.label.cluster
        return UnsealedIndex(
            archive=archive, cluster=cluster, partition=self.partition, number=0, session=0, since=0, moment=0,
            timelines=self.lineage.later,
        )  # fmt: skip

    def _add(self, stored: UnsealedIndex, session: int, since: int, last: int, moment: int, read: Read) -> UnsealedIndex:
        if session < stored.session:  # a newer owner has written
            return stored
        kept = [slot for slot in stored.slots if slot.last >= since]
        reached = kept[-1].last if kept else since - 1
        if last <= stored.last and moment <= stored.moment and stored.number:
            return stored
        taken = {slot.slot for slot in kept}
        """Slots that must not be overwritten: `tail.json` lists them, and no manifest has their ids."""
        tags = dict(stored.tags)
        for piece in self._pieces(kept, since, reached, last, read):
            slot = next(slot for slot in range(2 * SLOTS_MAX) if slot not in taken)
            data = b"".join((*piece.parts, self._fresh_id().bytes))
            tags[slot] = self._put(stored, slot, data)
            taken.add(slot)
            kept.append(
                Slot(
                    slot=slot, first=piece.first, last=piece.last, format=piece.format, record_bytes=piece.record_bytes,
                    size=len(data), time=piece.time, crc=piece.crc, sha256=sha256_of(data),
                )
            )  # fmt: skip
        is_whole = (kept[-1].last if kept else since - 1) >= last
        said = replace(
            stored, number=stored.number + 1, session=session, since=since, slots=tuple(kept), tags=tags,
            moment=max(stored.moment, moment) if is_whole else stored.moment,
        )  # fmt: skip
        self._publish(said)
        return said

    def _pieces(self, kept: list[Slot], since: int, reached: int, last: int, read: Read) -> Iterator[_Piece]:
        """Yield the records after `reached`, in pieces for one slot each. Slots that are merged are removed from `kept`. A
        slot that begins before `since` is not merged: the replica may have trimmed its records, which are archived."""
        while reached < last and len(kept) < SLOTS_MAX:
            size_max = SLOT_BYTES << len(kept) // CROWD
            piece = _collected(read, reached + 1, last, size_max)
            if piece is None:
                return
            while kept and kept[-1].first >= since and piece.is_behind(kept[-1], size_max):
                piece = self._with(kept.pop(), piece, read)
            reached = piece.last
            yield piece

    def _with(self, slot: Slot, piece: _Piece, read: Read) -> _Piece:
        """Merge a slot and the piece after it. The records of the slot are read from the replica."""
        again = _collected(read, slot.first, slot.last, slot.size)
        if again is None or (again.last, again.crc) != (slot.last, slot.crc):
            raise ArchiveDamaged(
                f"{self._where(self._slot_name(slot.slot))} has other records from id {slot.first} to "
                f"{slot.last} than this replica",
                next_step="find out which is the log: `waltzctl partition compare` holds replicas against each other",
            )
        return _joined(again, piece)

    # -- writing

    def _put(self, stored: UnsealedIndex, slot: int, data: bytes) -> str:
        """Write a slot, read it back, and return its new tag."""
        name = self._slot_name(slot)
        try:
            if slot in stored.tags:
                tag = self.store.put_if(name, data, stored.tags[slot])
            else:
                tag = self.store.put_new(name, data)
        except (ObjectExists, ObjectAbsent):
            self._learn(stored, slot)
            raise _Moved from None
        if not has(self.store, name, data):
            raise ArchiveDamaged(f"{self._where(name)} has other bytes than were written there")
        return tag

    def _learn(self, stored: UnsealedIndex, slot: int) -> None:
        """Save the new tag of a slot that another writer overwrote and may be about to list. Its write of `tail.json` then
        fails, because `tail.json` has changed since that writer read it."""
        tags = {known: tag for known, tag in stored.tags.items() if known != slot}
        with suppress(ObjectAbsent):
            tags[slot] = self.store.head(self._slot_name(slot)).tag
        self._publish(replace(stored, number=stored.number + 1, tags=tags))

    def _publish(self, index: UnsealedIndex) -> None:
        name = self._index_name
        try:
            if self._tag is None:
                self._tag = self.store.put_new(name, index.text)
            else:
                self._tag = self.store.put_if(name, index.text, self._tag)
        except (ObjectExists, ObjectAbsent):
            raise _Moved from None

    @property
    def _index_name(self) -> str:
        return unsealed_index_name(self.partition, self.lineage.current)

    def _slot_name(self, slot: int) -> str:
        return slot_name(self.partition, slot, self.lineage.current)

    def _where(self, name: str) -> str:
        return f"{self.store.place}: {name}"


def _collected(read: Read, first: int, last: int, bytes_max: int) -> _Piece | None:
    """Read records of one format from `first` on, up to `bytes_max`; return None if no whole batch ends by `last`."""
    found: _Piece | None = None
    size = 0
    while first <= last and size < bytes_max:
        more = _piece(read(first, last, bytes_max - size), last)
        if more is None or (found is not None and more.format != found.format):
            break
        assert more.first == first
        first, size = more.last + 1, size + more.size
        found = more if found is None else _joined(found, more)
    return found


def _piece(content: Content, last: int) -> _Piece | None:
    batches = () if isinstance(content, Run) else tuple(batch for batch in content if batch.last_id <= last)
    runs = [content] if isinstance(content, Run) else runs_of(batches)
    if not runs:
        return None
    crc = 0
    for run in runs:
        crc = crc32(run.data, crc)
    return _Piece(
        first=runs[0].first_id, last=runs[-1].last_id, format=BATCHES if batches else 0, crc=crc,
        time=batches[-1].head.time if batches else 0, record_bytes=sum(len(run.data) for run in runs),
        parts=[part for batch in batches for part in batch.pieces] if batches else [runs[0].data],
    )  # fmt: skip


def _joined(one: _Piece, behind: _Piece) -> _Piece:
    return replace(
        one, last=behind.last, time=behind.time, parts=[*one.parts, *behind.parts],
        record_bytes=one.record_bytes + behind.record_bytes, crc=joined_crc(one.crc, behind.crc, behind.record_bytes),
    )  # fmt: skip
