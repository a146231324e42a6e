"""Restores from an archive: makes replicas, one at a time, on threads of its own.

The tool sends an order (`RestoreOrder`): the store and the archive in it, a manifest, the last id, and the session at whose
end the replica shall stand. The storage fetches and proves the segments by itself, so no byte of a segment passes the tool.
An order that was carried out is answered at once; an interrupted order continues after the segments that are proven.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar

from waltzd.archive.cut_point import ArchivedLog, log_of
from waltzd.archive.listing import label_of
from waltzd.archive.location import open_store
from waltzd.archive.restoration import restore_partition
from waltzd.archive.store import Store
from waltzd.archive.upload import PartitionArchive
from waltzd.daemon.config import StorageConfig
from waltzd.disk.seam import Disk
from waltzd.errors import BadArgument, OtherTimeline
from waltzd.errors.operations import DiskFull, Diverged, FlushFailed, ForeignArchive, TargetNotEmpty, TooManyCallers
from waltzd.format.batch import Piece
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus, RestoreOrder, Restoring
from waltzd.protocol.peers import NOBODY, Contact, Content
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import Lineage, lineage_mistake
from waltzd.storage.append_queue import AppendQueue, RunBlocking
from waltzd.storage.archiver import Archiver
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.restored import folder_for, give_name

T = TypeVar("T")
TOLD_SECONDS = 0.5
"""Between two words of how far it is."""


class Home(Protocol):
    """The part of a storage that is needed to make a replica in it."""

    @property
    def directory(self) -> Directory: ...
    @property
    def config(self) -> StorageConfig: ...
    @property
    def archiver(self) -> Archiver: ...
    def readable(self, number: int, session: int | None, contact: Contact) -> AppendQueue: ...
    def status(self, number: int) -> ReplicaStatus: ...
    async def make_replica(self, make: Callable[[int], Partition | None], number: int) -> None: ...


def pieces_between(content: Content, first_id: int, last_id: int) -> list[Piece]:
    """Return the records of a run with these ids, or whole batches without what ends before or after them."""
    if isinstance(content, Run):
        return [content.part(max(0, first_id - content.first_id), min(len(content), last_id + 1 - content.first_id))]
    return [batch for batch in content if first_id <= batch.last_id <= last_id]


def certain_end(partition: Partition) -> int:
    """Return the id up to which the records of a replica are known to be committed: at least all that it has trimmed."""
    return max(partition.visible_mark, partition.first_id - 1)


class Restorer:
    def __init__(
        self,
        home: Home,
        disk: Disk,
        run: RunBlocking,
        on_fatal: Callable[[BaseException], None],
        open_store: Callable[[str], Store] = open_store,
    ) -> None:
        self._home = home
        self._disk = disk
        self._run = run
        self._on_fatal = on_fatal
        self._open_store = open_store
        self._turn = asyncio.Lock()
        self._underway: set[int] = set()

    async def restore(self, order: RestoreOrder) -> AsyncGenerator[Restoring, None]:
        """Restore a replica, and yield the progress; the last item has the status."""
        number, home = order.partition, self._home
        if order.completes:
            async with aclosing(self._complete(order)) as states:
                async for state in states:
                    yield state
            return
        mistake = lineage_mistake(order.timelines)
        if order.mark < -1 or order.session <= 0 or order.number < 0 or mistake is not None:
            raise BadArgument(f"{order} is no order that can be carried out")
        if number in self._underway:
            raise TooManyCallers(f"partition {number} is being restored on this storage already")
        if home.directory.control.is_assigned(number):
            yield Restoring(bytes=0, bytes_total=0, status=self._same(order))
            return
        self._underway.add(number)
        try:
            async with self._turn:
                log = await self._run(self._read, order)
                done, total = 0, sum(piece.size for piece in log.pieces if piece.first <= order.mark)
                total += sum(len(rest.data) for rest in log.rest if rest.first <= order.mark)
                await self._run(self._check_room, number, total)

                def add(size: int) -> None:
                    nonlocal done
                    done += size

                work = asyncio.ensure_future(self._make(order, log, add))
                try:
                    while not work.done():
                        yield Restoring(bytes=done, bytes_total=total)
                        await asyncio.wait((work,), timeout=TOLD_SECONDS)
                    kept = work.result()
                finally:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
        finally:
            self._underway.discard(number)
        yield Restoring(bytes=done, bytes_total=total, kept=kept, status=home.status(number))

    async def _complete(self, order: RestoreOrder) -> AsyncGenerator[Restoring, None]:
        """Complete a replica that an operator has fenced: take what is after its certain end from the archive of its
        timeline. Records that it holds already have to be equal to those of the archive; uncertain records that
        differ are cut first."""
        home, number, session = self._home, order.partition, order.session
        queue = home.readable(number, None, NOBODY)
        partition = queue.partition
        if partition.lineage != Lineage(order.timelines):
            raise OtherTimeline(f"partition {number} holds the log of timeline {partition.lineage.current} here")
        source = await home.archiver.source(partition)
        if order.looks:
            yield Restoring(bytes=0, bytes_total=0, proven_to=source.last)
            return
        partition.check_session(session)
        end, at, done = min(order.mark, source.last), max(partition.first_id, certain_end(partition)), 0
        total = source.bytes_behind(at)
        async with self._turn:
            while at <= end:
                content = await self._run(source.content, at)
                pieces = pieces_between(content, partition.first_id, end)
                if not pieces:
                    break
                await self._take(queue, session, pieces)
                done += sum(len(piece.data) if isinstance(piece, Run) else piece.size for piece in pieces)
                at = pieces[-1].last_id + 1
                yield Restoring(bytes=min(done, total), bytes_total=total)
            status = await queue.call(lambda: partition.note_archived(session, end))
        yield Restoring(bytes=total, bytes_total=total, status=status)

    async def _take(self, queue: AppendQueue, session: int, pieces: Sequence[Piece]) -> None:
        partition = queue.partition
        try:
            await queue.call(lambda: partition.write(session, pieces, EMPTY))
        except Diverged:
            mark = max(certain_end(partition), pieces[0].first_id - 1)  # what is in front was compared
            await queue.call(lambda: partition.truncate(session, mark))
            await queue.call(lambda: partition.write(session, pieces, EMPTY))

    async def _whole(self, function: Callable[..., T], /, *arguments: object) -> T:
        """To its end, also when the caller has gone: two attempts never write to the same files."""
        step, gone = asyncio.ensure_future(self._run(function, *arguments)), None
        while not step.done():
            try:
                await asyncio.wait((step,))
            except asyncio.CancelledError as error:
                gone = error
        if gone is not None:
            raise gone
        return step.result()

    def _same(self, order: RestoreOrder) -> ReplicaStatus:
        """Return the status of the replica that is here, if it is the one that was ordered; else raise
        `TargetNotEmpty`."""
        status = self._home.status(order.partition)
        is_it = (status.session, status.promised_session) == (order.session, order.session)
        is_it = is_it and Lineage(status.timelines) == Lineage(order.timelines)
        if not is_it or not status.last_id == status.committed == order.mark or not status.is_sound:
            raise TargetNotEmpty(
                f"partition {order.partition} has a replica here that ends at id {status.last_id} in session "
                f"{status.session}; one was to be made that ends at id {order.mark} in session {order.session}"
            )
        return status

    def _read(self, order: RestoreOrder) -> ArchivedLog:
        """On a thread."""
        store = self._open_store(order.store)
        label = label_of(store, not_done="nothing was changed")
        if (label.archive, label.cluster) != (order.archive, order.cluster):
            raise ForeignArchive(
                f"{store.place}, as this storage sees it, holds the archive {label.archive} of the cluster "
                f"{label.cluster}; {order.archive} of {order.cluster} was meant",
                not_done="nothing was restored",
                next_step="name a store that is the same for all storages and this machine",
            )
        archive = PartitionArchive(store, label, order.partition, order.source)
        return log_of(archive, archive.manifest(order.number, order.sha256) if order.number else archive.start())

    def _check_room(self, number: int, needed: int) -> None:
        home = self._home.directory.path
        folder = folder_for(home, number)
        there = sum(entry.size for entry in self._disk.list(folder)) if self._disk.exists(folder) else 0
        free, least = self._disk.free_bytes(home) + there, self._home.config.free_bytes_min
        if needed > free - least:
            raise DiskFull(
                f"{home}: {needed} bytes are needed, {free} are free and {least} must stay free",
                not_done=f"nothing of partition {number} was written",
                next_step="free space there, or restore into more or larger storages",
            )

    async def _make(self, order: RestoreOrder, log: ArchivedLog, on_bytes: Callable[[int], None]) -> int:
        """Make the replica; return the number of segments that an earlier attempt had left."""
        number, directory = order.partition, self._home.directory
        folder = folder_for(directory.path, number)
        key = directory.control.header.key
        try:
            built = await restore_partition(
                self._disk, log, order.mark, key=key, folder=folder, run=self._whole, on_bytes=on_bytes
            )
        except FlushFailed as error:
            self._on_fatal(error)
            raise
        name = partial(
            give_name, self._disk, directory.path, directory.control, session=order.session, last_id=built.last_id,
            newest=built.newest, segments=built.segments, timelines=Lineage(order.timelines).encode(),
        )  # fmt: skip

        def stand(number: int) -> Partition:
            name(number=number)
            return directory.stand(number)

        await self._home.make_replica(stand, number)
        return built.kept
