"""Uploads of a partition to the archive: the owner asks the replicas in turn, and records progress in the
coordinator.

The storage uploads, proves and reads back. This side knows how far the archive reaches, and only owners change that
document. Another owner may upload at the same time: then one of the two finds the document changed, and reads it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from waltzd.cluster.cluster import Cluster, archived, of_timeline, said, save_archived
from waltzd.cluster.documents import ArchiveMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame, ChangedMeanwhile, ForeignArchive, UnfitSegment
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.level import ARCHIVED_KEYS
from waltzd.protocol.timelines import Lineage
from waltzd.server.core.archive import IDLE_SECONDS, ArchiveRounds, UploadTurns
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.trimmer import Trimmer

_logger = logging.getLogger("waltz.server")


class ArchiveUploader:
    """Uploads and trimming of one session."""

    def __init__(self, log: ReplicatedLog, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._log = log
        self._coordinator = cluster.coordinator
        self._trimmer = Trimmer(log, cluster, say)
        self._say = say
        self._turns = UploadTurns()
        self._rounds = ArchiveRounds()
        self._looks = 0
        self._told = ""
        self._signal = ChangeSignal()
        self.known: Archived | None = None
        """Reach of the archive by the coordinator; None before it was asked, and if nothing is archived."""
        self.trouble = ""
        self.begins_late = False
        """Whether the beginning of this log was trimmed before there was an archive, so that no archive can have it."""

    async def run(self) -> None:
        """Upload until cancelled. An internal error in here ends nothing else, because the log does not depend on its
        archive. Trimming runs in between, because both change the same document."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._go_on())
                both.create_task(self._look_again())
        except Exception as error:
            _logger.exception("a mistake in Waltz itself")
            self._tell(f"a mistake in Waltz itself: {error!r}")

    async def _go_on(self) -> None:
        while True:
            try:
                pause = await self._step()
            except ChangedMeanwhile:  # another owner changed the document; the next step reads it again
                pause = IDLE_SECONDS
            except WaltzError as error:
                self._tell(f"{error.code} {error.message}")
                pause = IDLE_SECONDS
            await self._trimmer.step()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._signal.wait(self._signal.version)

    @property
    def trim_trouble(self) -> str:
        return self._trimmer.trouble

    def hurry(self) -> None:
        """Upload now, except after a failure: a sealed segment waits."""
        if not self.trouble:
            self._turns.hurry()
            self._signal.notify()

    def _able(self) -> list[str]:
        return [
            name
            for name, replicator in sorted(self._log.replicators.items())
            if replicator.is_readable and self.archives(name)
        ]

    def archives(self, name: str) -> bool:
        status = self._log.core.status(name)
        return status is not None and status.archives

    def _tell(self, trouble: str) -> None:
        """Set the trouble; log it if it has changed."""
        self.trouble = trouble
        if trouble and trouble != self._told:
            self._say(f"uploads to the archive fail: {trouble}")
        elif self._told and not trouble:
            self._say("uploads to the archive work again")
        self._told = trouble

    async def _step(self) -> float:
        owned, turns, committed = self._log, self._turns, self._log.committed
        able = self._able()
        name = turns.choose(able, committed)
        if name is None:
            return turns.pause
        meta, version = await archived(self._coordinator, owned.partition)
        lineage = owned.core.meta.lineage
        own = of_timeline(meta, lineage)
        self.known = None if own is None else said(own)
        known = Archived() if meta is None else said(meta)
        if known.timeline not in lineage:  # of a timeline that the documents have lost: the store is asked
            known = Archived()
        try:
            found = await owned.port(name).archive(
                owned.partition, known, session=owned.session, lineage=lineage,
                with_keys=owned.settings.level() >= ARCHIVED_KEYS,
            )  # fmt: skip
            is_trimmed = any(status.floor for status in owned.core.statuses.values())
            check(found, known, owned.committed, lineage, is_trimmed=is_trimmed)
        except WaltzError as error:
            self.begins_late = self._begins_late(error)
            if self.begins_late:
                turns.found_none(name, committed)
            else:
                turns.failed(name, f"{error.code} {error.message}", able)
        else:
            if found == known:
                turns.found_none(name, committed)
            else:
                floor = 0 if own is None else own.floor
                await save_archived(self._coordinator, owned.partition, meta_of(found, floor), meta, version)
                self.known = found
                turns.uploaded(name)
                self._rounds.uploaded(known.last_id, found.last_id)
        self._tell(turns.trouble)
        return turns.pause

    def _begins_late(self, error: WaltzError) -> bool:
        """Return whether the error means that the archive cannot begin at id 0. Only the group log is trimmed without an
        archive."""
        core, settings = self._log.core, self._log.settings
        is_unfit = isinstance(error, ForeignArchive | UnfitSegment)
        is_trimmed = any(status.floor for status in core.statuses.values())
        return settings.needed_from is not None and self.known is None and is_trimmed and is_unfit

    # -- whether it is all there still

    @property
    def seen(self) -> ArchiveCheck | None:
        return self._rounds.describe(asyncio.get_running_loop().time())

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(self._rounds.pause)
            before = self._rounds.missing
            try:
                await self._look()
            except WaltzError:  # that the store is away is no news of an object; uploads tell it
                self._rounds.failed()
            if self._rounds.missing != before:
                lost = self._rounds.missing
                self._say(
                    f"the archive lacks what was archived: {lost}" if lost else "the archive has the missing objects again"
                )

    async def _look(self) -> None:
        owned, rounds, known, able = self._log, self._rounds, self.known, self._able()
        if known is None or not able:
            rounds.failed()
            return
        asked, name = asyncio.get_running_loop().time(), able[self._looks % len(able)]
        self._looks += 1
        found = await owned.replicators[name].port.check_archive(
            owned.partition, known, rounds.first_id, session=owned.session
        )
        if not rounds.first_id - 1 <= found.last_id <= known.last_id:
            raise BadFrame(f"{name} was asked to look from id {rounds.first_id} to {known.last_id}, and answered {found}")
        rounds.record(found, known.last_id, asked)


def meta_of(found: Archived, floor: int) -> ArchiveMeta:
    assert found.archive is not None, "it was checked"
    return ArchiveMeta(
        archive=found.archive, number=found.number, sha256=found.sha256, last=found.last_id, floor=floor,
        timeline=found.timeline,
    )  # fmt: skip


def check(found: Archived, known: Archived, committed: int, lineage: Lineage, *, is_trimmed: bool) -> None:
    """Validate what a storage archived; raise `BadFrame` unless it continues `known` by committed ids. If nothing is
    known of a trimmed log, the documents were created anew, and the storage has found the archive again. If nothing is
    known of the current timeline, the archive begins with what it takes over."""
    if found == known:
        return
    is_beginning = known.timeline != lineage.current or (bool(lineage.later) and known.number == 0)
    is_found_again = is_trimmed and known.number == 0
    is_next = (found.number == known.number + 1 or is_found_again) and known.last_id < found.last_id
    is_next = (is_next or is_beginning) and found.timeline == lineage.current and found.last_id <= committed
    if not is_next or found.archive is None or known.archive not in (None, found.archive):
        raise BadFrame(f"the archive of a partition was {known}, and a storage made {found} of it")
