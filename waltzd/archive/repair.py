"""Rebuilds objects that follow from the rest of the archive, byte by byte: the label, manifests, chunks and key indexes.

Each manifest states the archive and the cluster, which is all of the label. A manifest, with the chunks that were created
for it, is the manifest before it with one piece more. A key index follows from its segment. Damaged objects are not used at
all, and a rebuilt object has to agree with every other object that refers to it. If two pieces could be the added one,
nothing is rebuilt. Whether the last segment of a lost newest manifest had a key index is told by the key indexes in the
store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from uuid import UUID

from waltzd.archive.archived_segment import keyed, segment_entry
from waltzd.archive.listing import Branch, highest_numbers
from waltzd.archive.manifest import LABEL, MANIFEST_BYTES_MAX, Chunk, Entry, Label, Manifest, folder_of, manifest_name
from waltzd.archive.store import Listed, Store, read_object
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import pieces_from
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectAbsent, ObjectExists, UnfitSegment
from waltzd.format.layout import HEADER_BYTES, INDEX_ENTRY_BYTES, FileHeader
from waltzd.protocol.timelines import FIRST

_SEGMENT = re.compile(r"([0-9]{19})-([0-9]{19})-([0-9a-f]{16})")
_WRONG = (ArchiveDamaged, ForeignArchive, ObjectAbsent)


def rebuilt_objects(store: Store) -> dict[str, bytes]:
    """Return the right bytes of missing and damaged objects, by name. Objects that cannot be rebuilt are left out."""
    listed = store.list("")
    numbers = highest_numbers(listed)
    for branch in [branch for branch in numbers if branch[1] != FIRST]:  # `begin.json` may come from the first timeline
        numbers.setdefault((branch[0], FIRST), 0)
    found: dict[str, bytes] = {}
    label = _label(store, numbers, found)
    if label is not None:
        for (partition, timeline), number in sorted(numbers.items()):
            others = {branch[1]: highest for branch, highest in numbers.items() if branch[0] == partition}
            others.pop(timeline)
            _Partition(store, label, partition, timeline, listed, found, others).run(number)
    return found


def _label(store: Store, numbers: Mapping[Branch, int], found: dict[str, bytes]) -> Label | None:
    with suppress(*_WRONG):
        return Label.decode(read_object(store, LABEL, MANIFEST_BYTES_MAX), LABEL)
    said = set()
    for (partition, timeline), highest in numbers.items():
        for number in range(highest, 0, -1):
            with suppress(*_WRONG):
                name = manifest_name(partition, number, timeline)
                manifest = Manifest.decode(read_object(store, name, MANIFEST_BYTES_MAX), name)
                said.add((manifest.archive, manifest.cluster))
                break
    if len(said) != 1:
        return None
    ((archive, cluster),) = said
    label = Label(archive=archive, cluster=cluster)
    found[LABEL] = label.text
    return label


class _Partition:
    """Repair of one timeline of one partition."""

    def __init__(
        self,
        store: Store,
        label: Label,
        partition: int,
        timeline: UUID,
        listed: Sequence[Listed],
        found: dict[str, bytes],
        others: Mapping[UUID, int],
    ) -> None:
        """`others`: other timelines of the partition, each with the highest number of its manifests."""
        self._archive = PartitionArchive(store, label, partition, timeline)
        self._others = others
        self._begin = self._begin_again(store, found)
        self._store, self._label, self._partition, self._found = store, label, partition, found
        folder = f"{folder_of(partition)}/segment/"
        self._segments = [one.name for one in listed if one.name.startswith(folder)]
        folder = f"{folder_of(partition)}/key/"
        self._keys = {one.name for one in listed if one.name.startswith(folder)}

    def _begin_again(self, store: Store, found: dict[str, bytes]) -> Manifest | None:
        """Return the manifest with which the timeline begins. If it is damaged, rebuild it: the next manifest states its
        hash, and manifests of earlier timelines have its entries. Return None if that fails."""
        archive = self._archive
        with suppress(*_WRONG):
            return archive.start()
        folder = f"{folder_of(archive.partition, archive.timeline)}/manifest"
        for one in store.list(folder):
            with suppress(*_WRONG):
                behind = Manifest.decode(read_object(store, one.name, MANIFEST_BYTES_MAX), one.name)
                if behind.number != behind.shared + 1 or behind.timeline != archive.timeline:
                    continue
                for identity in (FIRST, *(each.identity for each in behind.lineage.later[:-1])):
                    before = PartitionArchive(store, archive.label, archive.partition, identity).manifest_at(behind.shared)
                    made = None if before is None else before.begun(behind.lineage, archive.chunk)
                    if made is not None and made.sha256 == behind.before:
                        found[made.name] = made.text
                        return made
        return None

    def run(self, highest: int) -> None:
        newest = self._manifest(highest)
        if newest is not None:
            self._walk(newest.entries, 0)

    def _manifest(self, number: int) -> Manifest | None:
        if self._begin is None or number <= self._begin.number:
            return self._begin
        with suppress(*_WRONG):
            found = self._archive.manifest_at(number)
            if found is not None:
                return found
        again = self._again(number)
        if again is None:
            return None
        self._found[again[0].name] = again[0].text
        return again[0]

    def _again(self, number: int) -> tuple[Manifest, tuple[Chunk, ...]] | None:
        """Rebuild the manifest with this number, and its new chunks, from the manifest before and one more piece."""
        before = self._manifest(number - 1)
        if before is None:
            return None
        names = self._names_behind(before.last)
        pieces = [piece for name in names for piece in self._pieces(name)]
        possible, following = [before.extended(piece) for piece in pieces], None
        with suppress(*_WRONG):
            following = self._archive.manifest_at(number + 1)
        if following is not None:
            possible = [one for one in possible if following.follows(one[0])]
        elif len(names) > 1:  # an unreadable one may be the right one
            return None
        else:  # an archive that has key indexes has one of this piece, too
            possible = [
                one
                for one, piece in zip(possible, pieces, strict=True)
                if self._is_likely(piece) and self._is_ours(before, piece)
            ]
        return possible[0] if len(possible) == 1 else None

    def _walk(self, entries: tuple[Entry, ...], count: int) -> None:
        """Rebuild the damaged chunks below these entries. `count`: number of pieces, and so of manifests, before them."""
        for entry in entries:
            if entry.level:
                chunk = self._chunk(entry, count + entry.segments)
                if chunk is not None:
                    self._walk(chunk.entries, count)
            count += entry.segments

    def _chunk(self, entry: Entry, number: int) -> Chunk | None:
        with suppress(*_WRONG):
            return self._archive.chunk(entry)
        again = self._again(number)
        chunk = next((one for one in again[1] if one.entry() == entry), None) if again is not None else None
        if chunk is not None:
            self._found[entry.name(self._partition)] = chunk.text
        return chunk

    def _names_behind(self, last_id: int) -> list[str]:
        """Return the names of the segments that begin after this id: one, or more in format 0 if storages raced."""
        return [name for name in self._segments if name.rpartition("/")[2].startswith(f"{last_id + 1:019d}-")]

    def _is_likely(self, piece: Entry) -> bool:
        """Return whether the store has the key index of a piece, or no key index at all if the piece has none."""
        return piece.key_name(self._partition) in self._keys if piece.key_bytes else not self._keys

    def _is_ours(self, before: Manifest, piece: Entry) -> bool:
        """Return whether no other timeline names a piece that is not shared with it. Behind a fork both have segments that
        begin at the same id. False as well if a manifest of another timeline cannot be read."""
        for timeline, number in self._others.items():
            archive = PartitionArchive(self._store, self._label, self._partition, timeline)
            try:
                newest = archive.manifest_at(number) if number else archive.start()
                theirs = () if newest is None else pieces_from(archive, newest.entries, piece.first)
                named = next(iter(theirs), None)
            except _WRONG:
                return False
            if newest is None:
                return False
            fewer, more = sorted((before.lineage, newest.lineage), key=lambda lineage: lineage.number)
            shared = more.shared_to(fewer.current)
            is_shared = shared is not None and piece.last <= shared
            if named is not None and named.name(self._partition) == piece.name(self._partition) and not is_shared:
                return False
        return True

    def _pieces(self, name: str) -> list[Entry]:
        """Return the entries that a sound segment under its right name may have: without a key index, and with one."""
        match = _SEGMENT.fullmatch(name.rpartition("/")[2])
        if match is None:
            return []
        try:
            data = memoryview(self._store.get_range(name, 0, self._store.head(name).size))
        except ObjectAbsent:
            return []
        first_id, last_id = int(match[1]), int(match[2])
        expected = FileHeader(created_ms=0, key=self._label.cluster, partition=self._partition, first_id=first_id)
        for index_bytes in (HEADER_BYTES + INDEX_ENTRY_BYTES * (last_id - first_id + 1), 0):
            size = len(data) - index_bytes
            if size > 0:
                with suppress(UnfitSegment):
                    piece = segment_entry(data[:size], data[size:], expected=expected, last_id=last_id, path=name)
                    if piece.name(self._partition) != name:
                        return []
                    with_key, _ = keyed(piece, data, self._label.cluster, self._partition)
                    return [piece, with_key] if with_key.key_bytes else [piece]
        return []


def rebuilt_key(piece: Entry, data: Buffer, label: Label, partition: int) -> bytes | None:
    """Return the key index of a segment; None if it is not the archived one. `data`: the proven bytes of the segment."""
    again, raw = keyed(piece, data, label.cluster, partition)
    return raw if again == piece else None


class RepairedStore:
    """A store as it would be with some objects repaired. Writes fail."""

    def __init__(self, store: Store, objects: Mapping[str, bytes]) -> None:
        self._store = store
        self._objects = objects

    @property
    def place(self) -> str:
        return self._store.place

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        data = self._objects.get(name)
        return self._store.get_range(name, offset, size) if data is None else data[offset : offset + size]

    def head(self, name: str) -> Listed:
        data = self._objects.get(name)
        return self._store.head(name) if data is None else Listed(name, len(data), "")

    def list(self, folder: str) -> list[Listed]:
        kept = [one for one in self._store.list(folder) if one.name not in self._objects]
        prefix = f"{folder}/" if folder else ""
        return sorted([*kept, *(self.head(name) for name in self._objects if name.startswith(prefix))])

    def put_new(self, name: str, data: Buffer) -> str:
        raise AssertionError("a repaired store is read-only")

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        raise AssertionError("a repaired store is read-only")

    def remove(self, name: str) -> None:
        raise AssertionError("a repaired store is read-only")


def put_back(store: Store, name: str, data: bytes) -> None:
    """Write an object, over other bytes or where there is none, and read it back."""
    try:
        store.put_new(name, data)
    except ObjectExists:
        store.put_if(name, data, store.head(name).tag)
    if store.get_range(name, 0, len(data) + 1) != data:
        raise ArchiveDamaged(f"{store.place}: {name} has other bytes than were written there")
