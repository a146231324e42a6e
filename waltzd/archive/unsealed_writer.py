"""One round of the upload of unsealed records, plain code over a store. A crash between any two steps does no harm. The
format is in `unsealed`.

Records come from the replica at hand. Small slots are merged as they grow old: a slot is uploaded again together with the
one behind it until it has some megabytes, so a byte is uploaded a few times, and a segment needs some dozens of slots.
"""

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
from waltzd.errors import ArchiveDamaged, ForeignArchive, ObjectAbsent, ObjectExists
from waltzd.format.checksum import crc32, joined_crc
from waltzd.format.layout import BATCHES
from waltzd.format.record import Run
from waltzd.protocol.digest import sha256_of
from waltzd.protocol.peers import Content, runs_of
from waltzd.protocol.timelines import NEVER_FORKED, Lineage

SLOT_BYTES = 8 << 20
"""A slot of more is not uploaded again."""
CROWD = 16
"""With each so many slots they may have twice as many bytes: 64 of them hold a gigabyte."""
TRIES_MAX = 20

Read: TypeAlias = Callable[[int, int, int], Content]
"""Records as the disk has them, from an id on, of up to so many bytes and at least one. None behind the second id, but in
the last batch."""


class _Moved(Exception):
    """Another writer was at it, or this one when an answer was lost: it begins again with what is there."""


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
        """Whether it is worth to upload that slot again together with this piece."""
        is_small = slot.size < 2 * self.size and slot.size + self.size <= size_max
        return is_small and slot.format == self.format and slot.last + 1 == self.first


class UnsealedWriter:
    """What one archive has of the tail of one partition, on its current timeline. Another timeline has another tail."""

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
        """Of `tail.json`, which the next write replaces; None where there is none."""

    def add(self, *, session: int, since: int, last: int, moment: int, read: Read) -> UnsealedIndex:
        """The tail with all committed records up to `last`, once it is in the store. `since`: the first id that no manifest
        in the store has. `moment`: all that was committed by then is not behind `last`."""
        for _ in range(TRIES_MAX):
            stored, self._known = self._known or self._load(), None  # where this ends midway, it is read again
            try:
                found = self._add(stored, session, max(since, stored.since), last, moment, read)
            except _Moved:
                continue
            self._known = found
            return found
        raise ObjectExists(
            f"{self._where(self._index_name)} was changed by another writer again and again",
            next_step="nothing, if two owners were at it; otherwise find out who else writes to this store",
        )

    def _load(self) -> UnsealedIndex:
        name = self._index_name
        try:
            self._tag = self.store.head(name).tag  # first: what is written then is written over nothing newer
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
        return self._empty()  # it has rotted, and names nothing any more

    def _check_label(self) -> None:
        """Where nothing of this tail is, the store may have been emptied: nothing is begun there then."""
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
        if session < stored.session:  # a newer owner is at it, and knows more
            return stored
        kept = [slot for slot in stored.slots if slot.last >= since]
        reached = kept[-1].last if kept else since - 1
        if last <= stored.last and moment <= stored.moment and stored.number:
            return stored
        taken = {slot.slot for slot in kept}
        """Slots that nobody writes over: `tail.json` counts them, and no manifest has their ids."""
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
        """What is behind `reached`, in pieces for one slot each. Slots that the first one takes in leave `kept`."""
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
        """Both as one. What the slot holds is read from the replica."""
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
        """Its new tag, once the bytes were seen there."""
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
        """Another writer was there, and may be about to count it. Once `tail.json` has the tag, that one cannot any more,
        as it would write over what it has not read."""
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
    """Records of one format from `first` on, as many as fit. None where no whole batch ends at `last` or before."""
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
