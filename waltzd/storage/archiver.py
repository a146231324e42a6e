"""What a storage uploads: sealed segments with the manifests that name them, tails, and the documents of the cluster.

The owner of a partition says how far the archive reaches, as the coordinator knows it; the storage proves the segment
behind that, has it in the store, and answers how far the archive reaches then. What is committed behind all sealed segments
is the tail, of which some is uploaded every few seconds. Only committed records leave.

One of these is on its way at a time, in the order in which they were asked for, on a thread of its own: so a slow store
takes no appender's and no reader's turn, and no more than one segment's memory, twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol, TypeVar
from uuid import UUID

from waltzd.archive.archiving import PartitionArchive, label_in
from waltzd.archive.contents import newest_manifests
from waltzd.archive.manifest import Entry, Label, Manifest
from waltzd.archive.metadata import METADATA_BYTES_MAX, save_metadata
from waltzd.archive.piece import index_to_keep, piece_of
from waltzd.archive.store import Store
from waltzd.archive.tail import Tail
from waltzd.archive.tailing import PartitionTail
from waltzd.archive.verification import check_from, pieces_from
from waltzd.disk.seam import Disk, join, opened
from waltzd.errors import BadFrame, ForeignArchive, NoArchive, PartitionDamaged, TooLarge, UnfitSegment
from waltzd.format.layout import FileHeader, index_name
from waltzd.protocol.descriptions import ArchiveCheck, Archived, BackedUp
from waltzd.protocol.peers import NOBODY, Contact, Content
from waltzd.storage.lane import Lane, RunBlocking
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import Suspect

T = TypeVar("T")
ARCHIVES_MAX = 256
"""Partitions whose newest manifest and tail are kept in memory."""


def _said(manifest: Manifest) -> Archived:
    return Archived(
        archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last_id=manifest.last
    )  # fmt: skip


class Replicas(Protocol):
    """The replicas of this storage, as far as an archiver needs them."""

    def readable(self, number: int, session: int | None, contact: Contact) -> Lane: ...
    async def examine(self, lane: Lane, first_id: int) -> None: ...


class Archiver:
    def __init__(self, replicas: Replicas, key: UUID, disk: Disk, store: Store | None, run: RunBlocking) -> None:
        """`key`: of the cluster."""
        self._replicas = replicas
        self._key = key
        self._disk = disk
        self._store = store
        self._run = run
        self._turn = asyncio.Lock()
        self._label: Label | None = None
        self._archives: OrderedDict[int, PartitionArchive] = OrderedDict()
        self._tails: OrderedDict[int, PartitionTail] = OrderedDict()

    async def add(self, number: int, session: int, known: Archived, *, contact: Contact = NOBODY) -> Archived:
        """For the owner. `known` again where no segment behind it is sealed and committed."""
        lane, store = self._replicas.readable(number, session, contact), self._open()
        _check(known)
        partition = lane.partition
        is_forgotten = known.number == 0 and partition.first_id > 0
        found = self._sealed(partition, partition.first_id if is_forgotten else known.last_id + 1)
        if found is None:
            return known
        async with self._turn:
            try:
                if is_forgotten:
                    return await self._run(self._recognized, store, partition, *found)
                return await self._run(self._add, store, partition, *found, known)
            except UnfitSegment as error:
                await self._replicas.examine(lane, found[0])  # it is damaged, and is healed; or its footer is made again
                raise PartitionDamaged(
                    f"partition {number}: the segment at id {found[0]} is not archived: {error.message}",
                    not_done="nothing was uploaded",
                    next_step="nothing, if it heals; the owner asks again, and other replicas meanwhile",
                ) from error

    async def back_up(
        self, number: int, session: int, known: Archived, committed: int, moment: int, *, contact: Contact = NOBODY
    ) -> BackedUp:
        """For the owner: what is behind `known`, up to `committed`."""
        lane, store = self._replicas.readable(number, session, contact), self._open()
        _check(known)
        partition = lane.partition
        first_id = known.last_id + 1
        if any(first == first_id and last <= partition.visible_mark for first, last in partition.sealed_segments()):
            return BackedUp(last_id=known.last_id, archives_first=True)
        last_id = partition.decided_to(session, committed)
        async with self._turn:
            try:
                tail = await self._run(
                    self._back_up, store, partition, known, session, last_id, moment if last_id >= committed else 0
                )  # fmt: skip
            except Suspect as question:
                await self._replicas.examine(lane, question.first_id)
                raise PartitionDamaged(
                    f"partition {number}: the segment at id {question.first_id} has wrong bytes",
                    not_done="nothing of it was uploaded",
                    next_step="nothing, if it heals; the owner asks again, and other replicas meanwhile",
                ) from None
        return BackedUp(last_id=max(tail.last, known.last_id), moment=tail.moment)

    def _back_up(
        self, store: Store, partition: Partition, known: Archived, session: int, last_id: int, moment: int
    ) -> Tail:
        """On the thread."""
        label = self._labelled(store, partition.key, known.archive)
        tail = self._tails.pop(partition.number, None)
        if tail is None or tail.label != label:
            tail = PartitionTail(store, label, partition.number, self._disk.fresh_id)
        _keep(self._tails, partition.number, tail)

        def read(first_id: int, last_id: int, bytes_max: int) -> Content:
            return partition.read_whole(first_id, last_id, bytes_max, session=session)

        return tail.add(session=session, since=known.last_id + 1, last=last_id, moment=moment, read=read)

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        """The number under which the documents of the cluster are in the archive. `archive`: which one it is, if known."""
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
        """For the owner: whether the store still has some of the objects that `known` leads to, from an id on."""
        lane = self._replicas.readable(number, session, contact)
        if self._store is None:
            raise NoArchive("this storage has no `archive` in its configuration")
        if known.number <= 0 or known.archive is None or not 0 <= first_id <= known.last_id:
            raise BadFrame(f"{known} leads to nothing from id {first_id} on")
        async with self._turn:
            return await self._run(self._check, self._store, lane.partition, first_id, known)

    def _check(self, store: Store, partition: Partition, first_id: int, known: Archived) -> ArchiveCheck:
        """On the thread. In the beginning nothing is believed that is in memory."""
        if first_id == 0:
            self._label = None
            self._archives.pop(partition.number, None)
        try:
            return check_from(store, self._archive(store, partition, known.archive), known, first_id)
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

    def _add(self, store: Store, partition: Partition, first_id: int, last_id: int, known: Archived) -> Archived:
        """On the thread."""
        archive = self._archive(store, partition, known.archive)
        manifest = archive.add(known, *self._piece(partition, first_id, last_id))
        return _said(manifest)

    def _recognized(self, store: Store, partition: Partition, first_id: int, last_id: int) -> Archived:
        """On the thread. What this replica has trimmed was archived, and the coordinator has forgotten where: its documents
        were made anew. The newest manifest counts when the first segment here is a piece of it."""
        archive, number = self._archive(store, partition, None), partition.number
        newest = newest_manifests(store, archive.label, [number]).get(number)
        if newest is None or newest.last < last_id:
            raise ForeignArchive(
                f"partition {number} begins at id {first_id} here, and the archive in {store.place} "
                f"{'has nothing of it' if newest is None else f'ends at id {newest.last}'}",
                not_done="nothing was uploaded",
            )
        mine, _ = self._piece(partition, first_id, last_id)
        theirs = next(pieces_from(archive, newest.entries, first_id))
        if (theirs.first, theirs.last, theirs.crc) != (mine.first, mine.last, mine.crc):
            raise ForeignArchive(
                f"the archive in {store.place} has other records of partition {number} than the segment of the ids "
                f"{first_id} to {last_id} here",
                not_done="nothing was uploaded",
            )
        return _said(newest)

    def _piece(self, partition: Partition, first_id: int, last_id: int) -> tuple[Entry, memoryview]:
        data, size = self._read(partition, first_id, last_id)
        expected = FileHeader(created_ms=0, key=partition.key, partition=partition.number, first_id=first_id)
        path = partition.sealed_path(first_id)
        piece = piece_of(data[:size], data[size:], expected=expected, last_id=last_id, path=path)
        return piece, data[: piece.size]

    def _archive(self, store: Store, partition: Partition, wanted: UUID | None) -> PartitionArchive:
        label = self._labelled(store, partition.key, wanted)
        found = self._archives.pop(partition.number, None)
        if found is None or found.label != label:
            found = PartitionArchive(store, label, partition.number)
        _keep(self._archives, partition.number, found)
        return found

    def _labelled(self, store: Store, cluster: UUID, wanted: UUID | None) -> Label:
        if self._label is None or wanted not in (None, self._label.archive):
            self._label = label_in(store, cluster, self._disk.fresh_id, wanted)
        return self._label

    def _read(self, partition: Partition, first_id: int, last_id: int) -> tuple[memoryview, int]:
        """The segment and its index, one behind the other, and where the segment ends."""
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


def _check(known: Archived) -> None:
    if known.number < 0 or known.last_id < -1 or (known.archive is None) != (known.number == 0):
        raise BadFrame(f"{known} is nothing that an archive can reach to")


def _keep(kept: OrderedDict[int, T], partition: int, one: T) -> None:
    """As the newest of a bounded number."""
    kept[partition] = one
    if len(kept) > ARCHIVES_MAX:
        kept.popitem(last=False)
