"""What a storage uploads: the sealed segment that the owner of a partition asks for, and the manifest that names it.

The owner says how far the archive reaches, as the coordinator knows it; the storage proves the segment behind that, has it
in the store, and answers how far the archive reaches then. Only committed records leave, of segments that are never written
again. One segment is on its way at a time, on a thread of its own, so that a slow store takes no appender's and no reader's
turn, and no more than one segment's memory, twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol
from uuid import UUID

from waltzd.archive.archiving import PartitionArchive, label_in
from waltzd.archive.manifest import Label
from waltzd.archive.piece import index_to_keep, piece_of
from waltzd.archive.store import Store
from waltzd.archive.verification import check_from
from waltzd.disk.seam import Disk, join, opened
from waltzd.errors import BadFrame, ForeignArchive, NoArchive, PartitionDamaged, UnfitSegment
from waltzd.format.layout import FileHeader, index_name
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.peers import NOBODY, Contact
from waltzd.storage.lane import Lane, RunBlocking
from waltzd.storage.replica.partition import Partition

ARCHIVES_MAX = 256
"""Partitions whose newest manifest is kept in memory."""


class Replicas(Protocol):
    """The replicas of this storage, as far as an archiver needs them."""

    def readable(self, number: int, session: int | None, contact: Contact) -> Lane: ...
    async def examine(self, lane: Lane, first_id: int) -> None: ...


class Archiver:
    def __init__(self, replicas: Replicas, disk: Disk, store: Store | None, run: RunBlocking) -> None:
        self._replicas = replicas
        self._disk = disk
        self._store = store
        self._run = run
        self._turn = asyncio.Lock()
        self._label: Label | None = None
        self._archives: OrderedDict[int, PartitionArchive] = OrderedDict()

    async def add(self, number: int, session: int, known: Archived, *, contact: Contact = NOBODY) -> Archived:
        """For the owner. `known` again where no segment behind it is sealed and committed."""
        lane = self._replicas.readable(number, session, contact)
        if self._store is None:
            raise NoArchive("this storage has no `archive` in its configuration")
        if known.number < 0 or known.last_id < -1 or (known.archive is None) != (known.number == 0):
            raise BadFrame(f"{known} is nothing that an archive can reach to")
        found = self._sealed(lane.partition, known.last_id + 1)
        if found is None:
            return known
        async with self._turn:
            try:
                return await self._run(self._add, self._store, lane.partition, *found, known)
            except UnfitSegment as error:
                await self._replicas.examine(lane, found[0])  # it is damaged, and is healed; or its footer is made again
                raise PartitionDamaged(
                    f"partition {number}: the segment at id {found[0]} is not archived: {error.message}",
                    not_done="nothing was uploaded",
                    next_step="nothing, if it heals; the owner asks again, and other replicas meanwhile",
                ) from error

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
        data, size = self._read(partition, first_id, last_id)
        expected = FileHeader(created_ms=0, key=partition.key, partition=partition.number, first_id=first_id)
        path = partition.sealed_path(first_id)
        piece = piece_of(data[:size], data[size:], expected=expected, last_id=last_id, path=path)
        manifest = archive.add(known, piece, data[: piece.size])
        return Archived(
            archive=manifest.archive, number=manifest.number, sha256=manifest.sha256, last_id=manifest.last
        )  # fmt: skip

    def _archive(self, store: Store, partition: Partition, wanted: UUID | None) -> PartitionArchive:
        if self._label is None or wanted not in (None, self._label.archive):
            self._label = label_in(store, partition.key, self._disk.fresh_id, wanted)
        found = self._archives.pop(partition.number, None)
        if found is None or found.label != self._label:
            found = PartitionArchive(store, self._label, partition.number)
        self._archives[partition.number] = found
        if len(self._archives) > ARCHIVES_MAX:
            self._archives.popitem(last=False)
        return found

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
