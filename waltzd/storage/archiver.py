"""Uploads to an archive: sealed segments with their manifests, the unsealed tail, and the documents of the cluster.

The owner of a partition sends the end of the archive that the coordinator knows. The storage proves the next segment,
uploads it, and answers with the new end. The tail is what is committed after all sealed segments; some of it is uploaded
every few seconds. Only committed records are uploaded.

One upload runs at a time, in the order of the requests, on a thread of its own. So a slow store takes no turn of an
appender or a reader, and memory for no more than one segment, twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeVar
from uuid import UUID

from waltzd.archive.archived_segment import content_of, footer_in, index_to_keep, keyed, records_hash, segment_entry
from waltzd.archive.listing import METADATA_BYTES_MAX, highest_numbers, save_metadata
from waltzd.archive.manifest import Entry, Label, Manifest, folder_of
from waltzd.archive.store import Store
from waltzd.archive.unsealed import SlotRecords, UnsealedIndex, UnsealedWriter, read_unsealed
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.archive.verification import check_from, check_piece, pieces_from
from waltzd.disk.seam import Disk, join, opened
from waltzd.errors import OtherTimeline, TooLarge, WaltzError
from waltzd.errors.operations import (
    ArchiveDamaged,
    BadFrame,
    ForeignArchive,
    NoArchive,
    ObjectAbsent,
    PartitionDamaged,
    UnfitSegment,
)
from waltzd.format.layout import FileHeader, index_name
from waltzd.protocol.descriptions import ArchiveCheck, Archived, BackedUp
from waltzd.protocol.document import sha256_of
from waltzd.protocol.peers import NOBODY, Contact, Content
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.storage.append_queue import AppendQueue, RunBlocking
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import Suspect

T = TypeVar("T")
ARCHIVES_MAX = 256
"""Partitions whose newest manifest and tail are kept in memory."""
READ_BYTES = 1 << 20
"""Bytes of records that are compared at once."""


def _said(manifest: Manifest) -> Archived:
    return Archived(
        archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last_id=manifest.last,
        timeline=manifest.timeline,
    )  # fmt: skip


class Replicas(Protocol):
    """The replicas of this storage, as far as an archiver needs them."""

    def readable(self, number: int, session: int | None, contact: Contact) -> AppendQueue: ...
    async def examine(self, queue: AppendQueue, first_id: int) -> None: ...


class Archiver:
    def __init__(self, replicas: Replicas, key: UUID, disk: Disk, store: Store | None, run: RunBlocking) -> None:
        """`key`: key of the cluster."""
        self._replicas = replicas
        self._key = key
        self._disk = disk
        self._store = store
        self._run = run
        self._turn = asyncio.Lock()
        self._label: Label | None = None
        self._archives: OrderedDict[int, PartitionArchive] = OrderedDict()
        self._tails: OrderedDict[int, UnsealedWriter] = OrderedDict()

    async def add(
        self,
        number: int,
        session: int,
        known: Archived,
        lineage: Lineage = NEVER_FORKED,
        *,
        with_keys: bool = False,
        contact: Contact = NOBODY,
    ) -> Archived:
        """Upload the next segment for the owner, and return the new end of the archive; `known` if no segment behind it is
        sealed and committed. If nothing of the current timeline is known, return what it takes over from its ancestors.
        `with_keys`: archive the key index of the segment, too."""
        queue, store = self._replicas.readable(number, session, contact), self._open()
        partition, asked = queue.partition, known
        _check(known, partition, lineage)
        if lineage.later and not (known.timeline == lineage.current and known.number):
            async with self._turn:
                known = await self._run(self._begun, store, partition, known, lineage)
            if known.number:
                return known
        is_forgotten = known.number == 0 and partition.first_id > 0
        found = self._sealed(partition, partition.first_id if is_forgotten else known.last_id + 1)
        if found is None:
            return asked
        async with self._turn:
            try:
                if is_forgotten:
                    return await self._run(self._recognized, store, partition, *found)
                return await self._run(self._add, store, partition, *found, known, with_keys)
            except UnfitSegment as error:
                # a damaged segment is repaired by its owner; a missing footer is written again
                await self._replicas.examine(queue, found[0])
                raise PartitionDamaged(
                    f"partition {number}: the segment at id {found[0]} is not archived: {error.message}",
                    not_done="nothing was uploaded",
                    next_step="nothing, if it heals; the owner asks again, and other replicas meanwhile",
                ) from error

    async def back_up(
        self,
        number: int,
        session: int,
        known: Archived,
        committed: int,
        moment: int,
        lineage: Lineage = NEVER_FORKED,
        *,
        contact: Contact = NOBODY,
    ) -> BackedUp:
        """For the owner: what is behind `known`, up to `committed`."""
        queue, store = self._replicas.readable(number, session, contact), self._open()
        partition = queue.partition
        _check(known, partition, lineage)
        if lineage.later and not (known.timeline == lineage.current and known.number):
            async with self._turn:
                archive = await self._run(self._archive, store, partition, known.archive, lineage.current)
                begin = await self._run(archive.begin)
            if begin is None or begin.number:  # the archive says first what the timeline takes over
                return BackedUp(last_id=-1, archives_first=True)
            known = Archived(timeline=lineage.current)
        first_id = known.last_id + 1
        if any(first == first_id and last <= partition.visible_mark for first, last in partition.sealed_segments()):
            return BackedUp(last_id=known.last_id, archives_first=True)
        last_id = partition.decided_to(session, committed)
        async with self._turn:
            try:
                tail = await self._run(
                    self._back_up, store, partition, known, session, last_id, moment if last_id >= committed else 0,
                    lineage,
                )  # fmt: skip
            except Suspect as question:
                await self._replicas.examine(queue, question.first_id)
                raise PartitionDamaged(
                    f"partition {number}: the segment at id {question.first_id} has wrong bytes",
                    not_done="nothing of it was uploaded",
                    next_step="nothing, if it heals; the owner asks again, and other replicas meanwhile",
                ) from None
        return BackedUp(last_id=max(tail.last, known.last_id), moment=tail.moment)

    def _back_up(
        self,
        store: Store,
        partition: Partition,
        known: Archived,
        session: int,
        last_id: int,
        moment: int,
        lineage: Lineage,
    ) -> UnsealedIndex:
        """On the thread."""
        label = self._labelled(store, partition.key, known.archive)
        tail = self._tails.pop(partition.number, None)
        if tail is None or (tail.label, tail.lineage) != (label, partition.lineage):
            tail = UnsealedWriter(store, label, partition.number, self._disk.fresh_id, lineage)
        _keep(self._tails, partition.number, tail)

        def read(first_id: int, last_id: int, bytes_max: int) -> Content:
            return partition.read_whole(first_id, last_id, bytes_max, session=session)

        return tail.add(session=session, since=known.last_id + 1, last=last_id, moment=moment, read=read)

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        """Save the documents of the cluster in the archive and return their number. `archive`: identity of the
        archive, if known."""
        store = self._open()
        if len(text) > METADATA_BYTES_MAX:
            raise TooLarge(f"metadata of {len(text)} bytes; an archive takes {METADATA_BYTES_MAX}")

        def save() -> int:
            self._labelled(store, self._key, archive)
            return save_metadata(store, text)

        async with self._turn:
            return await self._run(save)

    def _open(self) -> Store:
        if self._store is None:
            raise NoArchive("this storage has no `archive` in its configuration")
        return self._store

    async def check(
        self, number: int, session: int, known: Archived, first_id: int, *, contact: Contact = NOBODY
    ) -> ArchiveCheck:
        """Check for the owner, from an id on, that the store still has objects that `known` leads to; some at a time."""
        queue = self._replicas.readable(number, session, contact)
        if self._store is None:
            raise NoArchive("this storage has no `archive` in its configuration")
        if known.number <= 0 or known.archive is None or not 0 <= first_id <= known.last_id:
            raise BadFrame(f"{known} leads to nothing from id {first_id} on")
        async with self._turn:
            return await self._run(self._check, self._store, queue.partition, first_id, known)

    def _check(self, store: Store, partition: Partition, first_id: int, known: Archived) -> ArchiveCheck:
        """On the thread. In the beginning nothing is believed that is in memory."""
        if first_id == 0:
            self._label = None
            self._archives.pop(partition.number, None)
        try:
            return check_from(store, self._archive(store, partition, known.archive, known.timeline), known, first_id)
        except ForeignArchive as error:
            return ArchiveCheck(last_id=first_id - 1, missing=error.message)

    def _sealed(self, partition: Partition, first_id: int) -> tuple[int, int] | None:
        if first_id < partition.first_id:
            raise UnfitSegment(
                f"partition {partition.number}: the archive goes on at id {first_id}, and this replica begins at id "
                f"{partition.first_id}",
                not_done="nothing was uploaded",
                next_step="bring the store or the coordinator's document back: what was trimmed had been archived",
            )
        for first, last in partition.sealed_segments():
            if first == first_id and last <= partition.visible_mark:
                return first, last
            if first < first_id <= last:
                raise UnfitSegment(
                    f"partition {partition.number}: the archive goes on at id {first_id}, and this replica has a "
                    f"segment of the ids {first} to {last}",
                    not_done="nothing was uploaded",
                    next_step="nothing: the owner asks the replica whose segments end where those in the archive do",
                )
        return None

    def _add(
        self, store: Store, partition: Partition, first_id: int, last_id: int, known: Archived, with_keys: bool
    ) -> Archived:
        """Upload a segment, on the thread."""
        archive = self._archive(store, partition, known.archive, partition.lineage.current)
        (piece, data), key = self._piece(partition, first_id, last_id), b""
        if with_keys:
            piece, key = keyed(piece, data, partition.key, partition.number)
        return _said(archive.add(known, piece, data, key))

    def _recognized(self, store: Store, partition: Partition, first_id: int, last_id: int) -> Archived:
        """On the thread. What this replica has trimmed was archived, and the coordinator has forgotten where: its documents
        were made anew. The newest manifest counts when the first segment here is a piece of it."""
        archive, number = self._archive(store, partition, None), partition.number
        newest = self._newest(archive)
        if newest.last < last_id:
            raise ForeignArchive(
                f"partition {number} begins at id {first_id} here, and the archive in {store.place} "
                f"{'has nothing of it' if not newest.entries else f'ends at id {newest.last}'}",
                not_done="nothing was uploaded",
            )
        self._compare_first(archive, newest, partition, first_id, last_id)
        return _said(newest)

    def _compare_first(
        self, archive: PartitionArchive, newest: Manifest, partition: Partition, first_id: int, last_id: int
    ) -> None:
        mine, _ = self._piece(partition, first_id, last_id)
        theirs = next(pieces_from(archive, newest.entries, first_id))
        if (theirs.first, theirs.last, theirs.crc) != (mine.first, mine.last, mine.crc):
            raise ForeignArchive(
                f"the archive in {archive.store.place} has other records of partition {partition.number} than the segment "
                f"of the ids {first_id} to {last_id} here",
                not_done="nothing was uploaded",
            )

    # -- a timeline that begins

    def _begun(self, store: Store, partition: Partition, known: Archived, lineage: Lineage) -> Archived:
        """Begin the archive of the current timeline, which the coordinator does not know yet, on the archiver's thread.
        Return how far it reaches: to the end of what it takes over from its ancestors or, if this replica was trimmed
        beyond that, of what the store has."""
        archive = self._archive(store, partition, known.archive, lineage.current)
        begin = archive.begin()
        if begin is None:
            begin = archive.begin_timeline(lineage, self._ancestors(store, archive, known, lineage))
        newest = archive.newest_after(begin)
        if partition.first_id > newest.last + 1:
            raise ForeignArchive(
                f"partition {partition.number} begins at id {partition.first_id} here, and what the archive in "
                f"{store.place} has of timeline {lineage.number} ends at id {newest.last}",
                not_done="nothing was uploaded",
                next_step="bring the store back: what was trimmed had been archived",
            )
        first = next(iter(partition.sealed_segments()), None)
        if partition.first_id > begin.last + 1 and first is not None and first[1] <= newest.last:
            self._compare_first(archive, newest, partition, *first)
            return _said(newest)
        return _said(begin) if begin.number else Archived(timeline=lineage.current)

    def _ancestors(self, store: Store, archive: PartitionArchive, known: Archived, lineage: Lineage) -> Iterator[Manifest]:
        """Yield the newest manifest of each earlier timeline of the log."""
        for identity in (FIRST, *(one.identity for one in lineage.later[:-1])):
            of_it = PartitionArchive(store, archive.label, archive.partition, identity)
            if of_it.begin() is not None:
                yield self._newest(of_it, known if known.timeline == identity else None)

    def _newest(self, archive: PartitionArchive, known: Archived | None = None) -> Manifest:
        """Return the newest manifest. A listing of the store may lag, so it only says where to begin."""
        home = folder_of(archive.partition, archive.timeline)
        number = highest_numbers(archive.store.list(f"{home}/manifest")).get((archive.partition, archive.timeline), 0)
        found = archive.manifest_at(number) if number else archive.start()
        if known is not None and known.number > number:
            found = archive.manifest(known.number, known.sha256)
        if found is None:
            raise ArchiveDamaged(f"{archive.store.place}: {archive.name_at(number)} was listed, and is not in the store")
        return archive.newest_after(found)

    # -- what a replica takes back

    async def source(self, partition: Partition) -> ArchivedSource:
        """All that the archive of this storage proves of the log of this replica's timeline. Until that timeline has begun
        in the archive, or is backed up beyond its fork, an earlier one may prove more of what both share."""
        store, lineage = self._open(), partition.lineage

        def find() -> ArchivedSource:
            self._label = None
            archive = self._archive(store, partition, None, lineage.current)
            found = self._source(archive, None)
            for identity in (FIRST, *(one.identity for one in lineage.later))[: len(lineage.later)]:
                earlier = PartitionArchive(store, archive.label, partition.number, identity)
                with suppress(ArchiveDamaged):  # the log of the current timeline does not rest on it
                    found = max(found, self._source(earlier, lineage.shared_to(identity)), key=lambda one: one.last)
            return found

        async with self._turn:
            return await self._run(find)

    def _source(self, archive: PartitionArchive, limit: int | None) -> ArchivedSource:
        if archive.begin() is None:
            return ArchivedSource(archive, None, (), limit)
        manifest, _, parts = read_unsealed(archive, self._newest(archive))
        return ArchivedSource(archive, manifest, tuple(parts), limit)

    # -- what may leave the disk

    async def proven(
        self, queue: AppendQueue, session: int, floor: int, known: Archived | None
    ) -> tuple[int, tuple[int, ...], str]:
        """Find out up to where the archive holds what is below a floor. Return the first id for which that is not
        proven, the first ids of the segments below it that are damaged here and cannot be compared, and the reason
        why the first id is not the floor. Each segment here is compared with the manifest, and its object has to
        exist."""
        partition = queue.partition
        first_id = partition.first_id
        if known is None or known.number <= 0 or self._store is None:
            return first_id, (), "nothing of this timeline is archived" if self._store else "this storage has no `archive`"
        if not partition.lineage.covers(known.timeline, known.last_id):
            return first_id, (), f"the archive is that of timeline {known.timeline}"
        async with self._turn:
            try:
                return await self._run(self._proven, self._store, partition, session, floor, known)
            except WaltzError as error:
                return first_id, (), error.message

    def _proven(
        self, store: Store, partition: Partition, session: int, floor: int, known: Archived
    ) -> tuple[int, tuple[int, ...], str]:
        """On the thread. No manifest in memory is believed: the store may have lost it."""
        self._archives.pop(partition.number, None)
        archive = self._archive(store, partition, known.archive, known.timeline)
        manifest = archive.manifest(known.number, known.sha256)
        at, end, damaged = partition.first_id, min(floor - 1, partition.last_id), list[int]()
        try:
            for piece in pieces_from(archive, manifest.entries, at):
                if at > end or piece.last > known.last_id:
                    break
                flaw = check_piece(store, archive.label, archive.partition, piece, is_quick=True)
                if flaw is not None:
                    return at, tuple(damaged), f"{flaw.name} {flaw.detail}"
                last_id = min(piece.last, partition.last_id)
                try:
                    is_same = self._is_same(archive, partition, session, piece, at, last_id)
                except (Suspect, UnfitSegment, PartitionDamaged):
                    damaged += partition.segments_with(at, last_id)
                    is_same = True
                if not is_same:
                    return at, tuple(damaged), f"{archive.where(piece)} has other records than this replica"
                at = last_id + 1
        except WaltzError as error:  # what was compared before it stays proven
            return at, tuple(dict.fromkeys(damaged)), error.message
        return at, tuple(dict.fromkeys(damaged)), "" if at > end else f"the archive ends at id {at - 1}"

    def _is_same(
        self, archive: PartitionArchive, partition: Partition, session: int, piece: Entry, first_id: int, last_id: int
    ) -> bool:
        """Return whether a segment in the archive has the bytes that this replica has for the ids from `first_id` to
        `last_id`."""
        if (piece.first, piece.last) in partition.sealed_segments():
            mine, data = self._piece(partition, piece.first, piece.last)
            if mine.sha256 == piece.sha256:
                return True
            # An index may be left out, and the date in a header of format 0 is that of its storage.
            footer = footer_in(data, mine)
            theirs = archive.footer(piece)
            if (footer is None) != (theirs is None) or (footer and theirs and footer.hash != theirs.hash):
                return False
            return (mine.crc, mine.record_bytes) == (piece.crc, piece.record_bytes)
        # Segments of format 0 may end elsewhere on each storage, and the last one is not sealed.
        hashing = sha256()
        at = first_id
        while at <= last_id:
            run = partition.read(at, last_id, READ_BYTES, session=session)
            hashing.update(run.data)
            at = run.last_id + 1
        whole = archive.bytes_of(piece, 0, piece.size)
        if sha256_of(whole) != piece.sha256:
            return False
        return hashing.hexdigest() == records_hash(whole, piece, first_id, last_id, archive.where(piece))

    def _piece(self, partition: Partition, first_id: int, last_id: int) -> tuple[Entry, memoryview]:
        data, size = self._read(partition, first_id, last_id)
        expected = FileHeader(created_ms=0, key=partition.key, partition=partition.number, first_id=first_id)
        path = partition.sealed_path(first_id)
        piece = segment_entry(data[:size], data[size:], expected=expected, last_id=last_id, path=path)
        return piece, data[: piece.size]

    def _archive(self, store: Store, partition: Partition, wanted: UUID | None, timeline: UUID = FIRST) -> PartitionArchive:
        label = self._labelled(store, partition.key, wanted)
        found = self._archives.pop(partition.number, None)
        if found is None or (found.label, found.timeline) != (label, timeline):
            found = PartitionArchive(store, label, partition.number, timeline)
        _keep(self._archives, partition.number, found)
        return found

    def _labelled(self, store: Store, cluster: UUID, wanted: UUID | None) -> Label:
        if self._label is None or wanted not in (None, self._label.archive):
            self._label = label_in(store, cluster, self._disk.fresh_id, wanted)
        return self._label

    def _read(self, partition: Partition, first_id: int, last_id: int) -> tuple[memoryview, int]:
        """Return the segment followed by its index, and the offset at which the segment ends."""
        data = self._disk.open(partition.sealed_path(first_id))
        index = opened(self._disk, join(partition.directory, index_name(first_id)))
        size, records = data.size(), last_id - first_id + 1
        kept = index_to_keep(b"" if index is None else index.read(0, index.size()), records=records)
        whole = memoryview(bytearray(size + len(kept)))
        got = data.read_into(0, whole[:size])
        whole[size:] = kept
        data.close()
        if index is not None:
            index.close()
        return (whole, size) if got == size else (whole[:got], got)


@dataclass(frozen=True)
class ArchivedSource:
    """The log of one timeline in the store: its segments, and the tail behind them."""

    archive: PartitionArchive
    manifest: Manifest | None
    """Newest manifest of the timeline; None if the store has none."""
    parts: tuple[SlotRecords, ...]
    limit: int | None
    """Last id that the log shares with this timeline; None for no limit."""

    @property
    def last(self) -> int:
        """The last id that the store proves; -1 where it proves none."""
        known = -1 if self.manifest is None else self.manifest.last
        known = max(known, self.parts[-1].slot.last) if self.parts else known
        return known if self.limit is None else min(known, self.limit)

    def bytes_behind(self, last_id: int) -> int:
        entries = () if self.manifest is None else self.manifest.entries
        pieces = sum(piece.size for piece in pieces_from(self.archive, entries, last_id + 1))
        return pieces + sum(len(part.data) for part in self.parts if part.slot.last > last_id)

    def content(self, id_: int) -> Content:
        """Return the records of the segment or slot with this id, proven by the hash of the object."""
        assert self.manifest is not None
        if id_ > self.manifest.last:
            return next(part for part in self.parts if part.slot.last >= id_).content()
        piece = next(pieces_from(self.archive, self.manifest.entries, id_))
        where = self.archive.where(piece)
        try:
            data = self.archive.bytes_of(piece, 0, piece.size + 1)
        except ObjectAbsent as error:
            raise ArchiveDamaged(f"{where}, which holds the ids {piece.first} to {piece.last}, is not there") from error
        if sha256_of(data) != piece.sha256:
            raise ArchiveDamaged(f"{where} has other bytes than the manifest states")
        return content_of(data, piece)


def _check(known: Archived, partition: Partition, lineage: Lineage) -> None:
    if known.number < 0 or known.last_id < -1 or (known.archive is None) != (known.number == 0):
        raise BadFrame(f"{known} is nothing that an archive can reach to")
    if partition.lineage != lineage or known.timeline not in lineage:
        raise OtherTimeline(
            f"partition {partition.number} holds the log of timeline {partition.lineage.current} here; the one of timeline "
            f"{lineage.current} was to be archived behind that of timeline {known.timeline}",
            not_done="nothing was uploaded",
            next_step="nothing: the owner asks again, once the replica has gone over to the timeline of the log",
        )


def _keep(kept: OrderedDict[int, T], partition: int, one: T) -> None:
    """Insert an entry as the newest, and drop the oldest above `ARCHIVES_MAX`."""
    kept[partition] = one
    if len(kept) > ARCHIVES_MAX:
        kept.popitem(last=False)
