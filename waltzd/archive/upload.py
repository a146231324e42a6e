"""Uploads of segments to the archive of a partition. A crash after any step does no harm.

The order of the steps ensures this: the objects, which are read back; the chunks, which are read back; the manifest that
names them. Before the manifest exists, uploaded objects are orphans; once it exists, everything that it names was seen in
the store. Each step is idempotent: an object that exists is compared, and a manifest that another storage created first is
adopted if it proves the same log and the store still has what it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from uuid import UUID

import numpy as np

from waltzd.archive.archived_segment import footer_in, footer_of
from waltzd.archive.manifest import (
    LABEL,
    MANIFEST_BYTES_MAX,
    Chunk,
    Entry,
    Label,
    Manifest,
    begin_name,
    manifest_name,
    opened,
)
from waltzd.archive.store import Store, read_object
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectAbsent, ObjectExists
from waltzd.format.footer import NO_HASH, Footer
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.document import sha256_of
from waltzd.protocol.timelines import FIRST, Lineage

STEP_BYTES = 1 << 20
READ_BYTES = 256 << 20
"""Bytes of one request when an object is read back: one request for most segments, a few for larger ones."""


def label_in(store: Store, cluster: UUID, fresh_id: Callable[[], UUID], wanted: UUID | None) -> Label:
    """Return the label of the archive in this store. Create it if there is none and the cluster knows no archive."""
    try:
        text = read_object(store, LABEL, MANIFEST_BYTES_MAX)
    except ObjectAbsent:
        if wanted is not None:
            raise ForeignArchive(
                f"{store.place} holds no archive; the archive {wanted} of this cluster is somewhere else, or was emptied"
            ) from None
        made = Label(archive=fresh_id(), cluster=cluster)
        try:
            store.put_new(LABEL, made.text)
        except ObjectExists:  # another storage was first
            return label_in(store, cluster, fresh_id, wanted)
        return made
    found = Label.decode(text, f"{store.place}: {LABEL}")
    if found.cluster != cluster or wanted not in (None, found.archive):
        raise ForeignArchive(
            f"{store.place} holds the archive {found.archive} of the cluster {found.cluster}; this is "
            f"{'the cluster ' + str(cluster) if found.cluster != cluster else 'the archive ' + str(wanted)}"
        )
    return found


class PartitionArchive:
    """The archive of one timeline of one partition."""

    def __init__(self, store: Store, label: Label, partition: int, timeline: UUID = FIRST) -> None:
        self.store = store
        self.label = label
        self.partition = partition
        self.timeline = timeline
        self._newest: Manifest | None = None
        """Newest manifest that was read or created; None before."""
        self._begin: Manifest | None = None
        """Manifest with which the timeline begins; None before it was read or created."""
        self._last_footer: tuple[str, bytes] | None = None
        """SHA-256 of the last piece, and the hash of its footer, which the next footer has to name."""

    # -- reading

    def begin(self) -> Manifest | None:
        """Return the manifest with which this timeline begins: an empty one for the first timeline; None if the store has
        no `begin.json` of a later one."""
        if self._begin is None and self.timeline == FIRST:
            self._begin = Manifest(archive=self.label.archive, cluster=self.label.cluster, partition=self.partition)
        elif self._begin is None:
            name = begin_name(self.partition, self.timeline)
            try:
                text = read_object(self.store, name, MANIFEST_BYTES_MAX)
            except ObjectAbsent:
                return None
            found = self._checked(Manifest.decode(text, self._where(name)), name)
            if not found.is_begin:
                raise ArchiveDamaged(f"{self._where(name)} is not the manifest with which a timeline begins")
            self._begin = found
        return self._begin

    def start(self) -> Manifest:
        """Return the manifest with which this timeline begins; raise `ArchiveDamaged` if the store does not have it."""
        found = self.begin()
        if found is None:
            raise ArchiveDamaged(f"{self._where(begin_name(self.partition, self.timeline))} is not in the store")
        return found

    def manifest(self, number: int, sha256: str) -> Manifest:
        """Return the manifest with this number and hash. Number 0 of the first timeline is the empty manifest."""
        begin = self.start()
        if number == 0 and self.timeline == FIRST:
            return begin
        for known in (self._newest, begin):
            if known is not None and (known.number, known.sha256) == (number, sha256):
                return known
        found = self.manifest_at(number)
        if found is None:
            raise ObjectAbsent(f"{self._where(self.name_at(number))} is not in the store")
        if found.sha256 != sha256:
            raise ArchiveDamaged(f"{self._where(found.name)} is not the manifest that the cluster knows")
        self._newest = found
        return found

    def known(self, wanted: Archived) -> Manifest | None:
        """Return the wanted manifest if it was the last one that was read; else None."""
        newest = self._newest
        is_it = newest is not None and (newest.number, newest.sha256) == (wanted.number, wanted.sha256)
        return newest if is_it else None

    def name_at(self, number: int) -> str:
        begin = self._begin
        if begin is not None and begin.is_begin and begin.number == number:
            return begin.name
        return manifest_name(self.partition, number, self.timeline)

    def manifest_at(self, number: int) -> Manifest | None:
        """Return the manifest with this number, which only its own digest proves; None if there is none."""
        if self.timeline != FIRST and (begin := self.begin()) is not None and begin.number == number:
            return begin
        name = manifest_name(self.partition, number, self.timeline)
        try:
            text = read_object(self.store, name, MANIFEST_BYTES_MAX)
        except ObjectAbsent:
            return None
        return self._checked(Manifest.decode(text, self._where(name)), name, number)

    def _checked(self, found: Manifest, name: str, number: int | None = None) -> Manifest:
        """Return the manifest; raise an error unless it belongs to this archive, partition, timeline and number."""
        where = self._where(name)
        if (found.archive, found.cluster) != (self.label.archive, self.label.cluster):
            raise ForeignArchive(f"{where} belongs to the archive {found.archive} of the cluster {found.cluster}")
        expected = self.partition, found.number if number is None else number, self.timeline
        if (found.partition, found.number, found.timeline) != expected:
            raise ArchiveDamaged(
                f"{where} is the manifest {found.number} of partition {found.partition} on timeline {found.timeline}"
            )
        return found

    def newest(self, known: Archived) -> Manifest:
        """Return the newest manifest, by following numbers from a known one."""
        return self.newest_after(self.manifest(known.number, known.sha256))

    def newest_after(self, found: Manifest) -> Manifest:
        while (following := self.manifest_at(found.number + 1)) is not None:
            if not following.follows(found):
                raise ArchiveDamaged(f"{self._where(following.name)} does not follow the manifest before it")
            found = following
        return found

    def chunk(self, entry: Entry) -> Chunk:
        name = entry.name(self.partition)
        text = read_object(self.store, name, MANIFEST_BYTES_MAX)
        return opened(entry, text, self.partition, self._where(name))

    def bytes_of(self, piece: Entry, offset: int, size: int) -> bytes:
        """Read a range of the object of a piece, unchecked."""
        return self.store.get_range(piece.name(self.partition), offset, size)

    def where(self, piece: Entry) -> str:
        return self._where(piece.name(self.partition))

    def footer(self, piece: Entry) -> Footer | None:
        """Read the footer of a piece; return None if the segment has format 0. Raise `ArchiveDamaged` if it has neither a
        sound footer nor a header of format 0."""
        return footer_of(lambda offset, size: self.bytes_of(piece, offset, size), piece, self.where(piece))

    def _where(self, name: str) -> str:
        return f"{self.store.place}: {name}"

    # -- writing

    def begin_timeline(self, lineage: Lineage, ancestors: Iterable[Manifest]) -> Manifest:
        """Create `begin.json` of this timeline, the current one of `lineage`, and return it. It takes over the manifest of
        an ancestor that shares the most segments with this timeline. If another storage created it first, that one
        counts."""
        assert lineage.current == self.timeline != FIRST
        found = self.begin()
        if found is not None:
            return found
        empty = Manifest(
            archive=self.label.archive, cluster=self.label.cluster, partition=self.partition, timelines=lineage.later
        )
        made = max(
            (one.begun(lineage, self.chunk) for one in ancestors), key=lambda manifest: manifest.number, default=empty
        )
        assert made.last <= lineage.fork
        try:
            self.store.put_new(made.name, made.text)
        except ObjectExists:
            return self.start()
        self._begin = made
        return made

    def add(self, known: Archived, piece: Entry, data: Buffer, key: Buffer = b"") -> Manifest:
        """Upload a piece, and return the new manifest, which has this piece after everything in the manifest `known`.
        `data`: the bytes of the object. `key`: the bytes of its key index, if the piece has one."""
        assert (piece.size, piece.key_bytes) == (len(data), len(key))
        before = self.manifest(known.number, known.sha256) if known.number else self.start()
        if not before.last == known.last_id == piece.first - 1:
            raise ArchiveDamaged(
                f"{self._where(before.name)} ends at id {before.last}; by the cluster it ends at {known.last_id}, and the "
                f"next segment begins at id {piece.first}"
            )
        self._check_chain(before, piece, data)
        following, chunks = before.extended(piece)
        for name, content in zip(piece.names(self.partition), (data, key), strict=False):
            self._put(name, content)
        for chunk in chunks:
            self._put(chunk.entry().name(self.partition), chunk.text)
        try:
            self.store.put_new(following.name, following.text)
        except ObjectExists:
            following = self._of_another(before, piece)
        self._newest = following
        return following

    def _check_chain(self, before: Manifest, piece: Entry, data: Buffer) -> None:
        """Raise `ArchiveDamaged` if the footer of the new piece does not name the footer of the last piece."""
        mine = footer_in(data, piece)
        if mine is None or not before.entries:
            return
        last = self.last_piece(before)
        if self._last_footer is None or self._last_footer[0] != last.sha256:
            theirs = self.footer(last)
            self._last_footer = last.sha256, NO_HASH if theirs is None else theirs.hash
        if mine.before != self._last_footer[1]:
            raise ArchiveDamaged(
                f"the segment of the ids {piece.first} to {piece.last} of this replica does not name {self.where(last)} as "
                "the segment in front of it: they do not belong to one log",
                not_done="nothing was uploaded",
                next_step="find out which is the log: `waltzctl partition compare` holds replicas against each other",
            )
        self._last_footer = piece.sha256, mine.hash

    def put_back(self, entry: Entry, data: Buffer) -> None:
        """Restore a segment that a manifest names, and that the store lost or damaged."""
        assert sha256_of(data) == entry.sha256, "the bytes have the hash of the object"
        self._put(entry.name(self.partition), data)

    def _of_another(self, before: Manifest, piece: Entry) -> Manifest:
        """Return the manifest that exists under the new number: another storage created it, or this one did and the answer
        was lost. Raise an error unless it adds exactly the records of this piece."""
        found = self.manifest_at(before.number + 1)
        if found is None or not found.follows(before):
            raise ArchiveDamaged(f"{self._where(self.name_at(before.number + 1))} does not follow upon "
                                 "the manifest before it")  # fmt: skip
        theirs = self.last_piece(found)
        if (theirs.first, theirs.last) != (piece.first, piece.last):
            raise ObjectExists(
                f"{self._where(found.name)} ends at id {theirs.last}, and the segment of this replica at id {piece.last}",
                next_step="none: the owner asks a replica whose segments end where those of the archive end",
            )
        if (theirs.crc, theirs.record_bytes) != (piece.crc, piece.record_bytes):
            raise ArchiveDamaged(
                f"{self._where(found.name)} has other records from id {piece.first} to {piece.last} than this replica",
                next_step="find out which is the log: `waltzctl partition compare` holds replicas against each other",
            )
        if theirs != piece:  # else `_put` has just read its objects
            self._check_objects(theirs)
        return found

    def _check_objects(self, piece: Entry) -> None:
        """Raise `ArchiveDamaged` if the store does not have the objects of a piece of another storage as they were when its
        manifest was created: an upload that was repeated may have damaged them since."""
        expected = (piece.sha256, piece.size), (piece.key_sha256, piece.key_bytes)
        for name, (digest, size) in zip(piece.names(self.partition), expected, strict=False):
            data = b""
            with suppress(ObjectAbsent):
                data = self.store.get_range(name, 0, size + 1)
            if sha256_of(data) != digest:
                raise ArchiveDamaged(
                    f"{self._where(name)} has other bytes than its manifest states",
                    not_done="nothing more was archived",
                    next_step="nothing, if the storage that uploaded it is asked next; else `waltzctl archive heal`",
                )

    def last_piece(self, manifest: Manifest) -> Entry:
        entry = manifest.entries[-1]
        while entry.level:
            entry = self.chunk(entry).entries[-1]
        return entry

    def _put(self, name: str, data: Buffer) -> None:
        """Create an object, and read it back. If the name exists with other bytes, these are damaged, because the name
        holds the hash of `data`: replace them. One wrong answer is no reason to replace what a manifest may name."""
        try:
            self.store.put_new(name, data)
        except ObjectExists:
            if has(self.store, name, data) or has(self.store, name, data):
                return
            self.store.put_if(name, data, self.store.head(name).tag)
        if not has(self.store, name, data):
            raise ArchiveDamaged(f"{self._where(name)} has other bytes than were written there")


def has(store: Store, name: str, data: Buffer) -> bool:
    """Return whether an object has exactly these bytes. One more byte is requested, to detect a longer object."""
    whole, offset = memoryview(data).cast("B"), 0
    while offset < len(whole):
        wanted = whole[offset : offset + READ_BYTES]
        offset += len(wanted)
        is_last = offset == len(whole)
        if not _are_same(store.get_range(name, offset - len(wanted), len(wanted) + is_last), wanted):
            return False
    return True


def _are_same(found: bytes, wanted: memoryview) -> bool:
    """Compare as arrays in steps: memory views are compared item by item, which is slow, and bytes would be copied."""
    if len(found) != len(wanted):
        return False
    one, other = np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8)
    steps = range(0, len(wanted), STEP_BYTES)
    return all(np.array_equal(one[at : at + STEP_BYTES], other[at : at + STEP_BYTES]) for at in steps)
