"""Uploads of unsealed records, in the format of `unsealed`. A crash between any two steps does no harm.

Records are read from the local replica. Small slots are merged: a slot is uploaded again together with the following
records until it has some megabytes. So each byte is uploaded a few times, and a segment needs some dozens of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias
from uuid import UUID

from waltzd.archive.manifest import LABEL, MANIFEST_BYTES_MAX, Label
from waltzd.archive.store import Store, read_object
from waltzd.archive.unsealed import SLOTS_MAX, Slot, UnsealedIndex, slot_name, unsealed_index_at, unsealed_index_name
from waltzd.archive.upload import has
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectAbsent, ObjectExists
from waltzd.format.checksum import crc32, joined_crc
from waltzd.format.layout import BATCHES
from waltzd.format.record import Run
from waltzd.protocol.digest import sha256_of
from waltzd.protocol.peers import Content, runs_of
from waltzd.protocol.timelines import NEVER_FORKED, Lineage

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
        for piece in self._pieces(kept, reached, last, read):
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

    def _pieces(self, kept: list[Slot], reached: int, last: int, read: Read) -> Iterator[_Piece]:
        """Yield the records after `reached`, in pieces for one slot each. Slots that are merged are removed from `kept`."""
        while reached < last and len(kept) < SLOTS_MAX:
            size_max = SLOT_BYTES << len(kept) // CROWD
            piece = _collected(read, reached + 1, last, size_max)
            if piece is None:
                return
            while kept and piece.is_behind(kept[-1], size_max):
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
