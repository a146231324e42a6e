"""The archive of a partition at its owner: segments are uploaded, unsealed records are backed up, and storages are
trimmed.

**Uploads.** The owner asks the replicas in turn, and records progress in the coordinator. The storage uploads, proves
and reads back. This side knows how far the archive reaches, and only owners change that document. Another owner may
upload at the same time: then one of the two finds the document changed, and reads it again.

**Trimming.** Storages remove what is archived and need not stay. The coordinator's document gets the floor first, then
each storage does.

`waltzd.server.core.archive` decides the floor from what the replicas report. Before anything is removed, a storage
checks that the objects which become the only copy are in the store at this moment: trimming stops at the first one that
is missing. The highest floor that is found anywhere counts, so a document that went back is brought forward again. A
storage that cannot be told now is told later: each step can be repeated.

The group log is trimmed by another rule. What is no longer needed to know the positions of the groups is removed, also
without an archive. No document has its floor; the replicas have it.

**Backup.** Every few seconds a replica uploads what is committed and in no archived segment.

The log does not depend on it. This side adds the moment: a majority confirms the session after that moment, so no newer
owner had begun by then, and all that was committed by then is at or below the mark that is uploaded. An idle partition is
reported in each round as well: a cluster is restored to the oldest of these moments, so a partition that skips rounds
costs transactions of other partitions. One storage is asked as long as it succeeds, because it has the newest `tail.json`
in memory; after a failure another one is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from waltzd.cluster.cluster import Cluster, archived, of_timeline, said, save_archived
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ArchiveMeta, Keep, keep_of
from waltzd.errors import Trimmed, WaltzError
from waltzd.errors.operations import BadFrame, ChangedMeanwhile, ForeignArchive, ObjectAbsent, UnfitSegment
from waltzd.protocol.descriptions import ArchiveCheck, Archived, BackedUp
from waltzd.protocol.level import ARCHIVED_KEYS
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import Lineage
from waltzd.server.core.archive import IDLE_SECONDS, ArchiveRounds, Sealed, UploadTurns, next_floor, reach_of
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.server.session.replicated_log import ReplicatedLog


class Trimmer:
    """Trimming of one session."""

    def __init__(self, log: ReplicatedLog, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._log = log
        self._cluster = cluster
        self._say = say
        self._next_look = 0.0
        self._looked_at: tuple[object, ...] = ()
        """Inputs with which nothing was found to remove; until they change nothing is."""
        self.trouble = ""

    async def step(self) -> None:
        """Raise the floor as far as it goes now, if the interval has passed."""
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return
        self._next_look = now + self._log.settings.trim_seconds
        try:
            await self._step()
            self._tell("")
        except ChangedMeanwhile:
            return  # another owner changed the document; the next look reads it again
        except WaltzError as error:
            self._tell(f"{error.code} {error.message}")

    def _tell(self, trouble: str) -> None:
        """Set the trouble; log it if it has changed."""
        if trouble and trouble != self.trouble:
            self._say(f"nothing is trimmed: {trouble}")
        self.trouble = trouble

    async def _step(self) -> None:
        log, core = self._log, self._log.core
        if log.settings.needed_from is not None:
            await self._trim_behind(log.settings.needed_from())
            return
        if not any(status.archives or status.floor for status in core.statuses.values()):
            return  # there is no archive
        found, version = await archived(self._cluster.coordinator, log.partition)
        meta = of_timeline(found, core.meta.lineage)
        if meta is None:
            return
        floor, missing = max([meta.floor, *(status.floor for status in core.statuses.values())]), ""
        keep = keep_of((await self._cluster.meta()).keep_local)
        if keep is not None and keep != Keep():
            floor, missing = await self._further(floor, meta, keep)
        if floor > meta.floor:
            await save_archived(self._cluster.coordinator, log.partition, replace(meta, floor=floor), meta, version)
        kept = await self._tell_storages(floor, said(meta))
        missing = missing or kept
        if missing:
            raise ObjectAbsent(
                f"the archive cannot stand in for what would go: {missing}",
                not_done=f"nothing from id {floor} on was removed from storages",
            )

    async def _further(self, floor: int, meta: ArchiveMeta, keep: Keep) -> tuple[int, str]:
        """Return the next floor; and what is missing in the store, if nothing can be removed because of that."""
        log, core = self._log, self._log.core
        names = [
            name for name, replicator in sorted(log.replicators.items()) if replicator.is_readable and name in core.roles
        ]
        held = {name: core.held(name) for name in core.statuses}
        reach = min(log.committed, reach_of(core.meta, core.roles, core.statuses, held))
        older = await self._older(keep)
        looked_at = (meta.last, reach, log.committed, tuple(names), keep, older, floor)
        if (keep.seconds is not None and older < floor) or looked_at == self._looked_at:
            return floor, ""
        replicas = await self._sealed(names)
        found = next_floor(floor, archived=meta.last, reach=reach, replicas=replicas, keep=keep, older=older)
        if found <= floor:
            self._looked_at = looked_at
            return floor, ""
        seen = await self._see(meta, floor, names)
        firsts = [first for own in replicas for first, _, _ in own if first <= min(found, seen.last_id + 1)]
        return max([floor, *firsts]), seen.missing if seen.last_id < floor else ""

    async def _sealed(self, names: list[str]) -> list[list[Sealed]]:
        log, found = self._log, list[list[Sealed]]()
        for name in names:
            found.append(await log.port(name).segments(log.partition, session=log.session))
        return found

    async def _older(self, keep: Keep) -> int:
        """Return the id up to which everything is older than the policy keeps. A record without a time is at least as old
        as the first one with a time. The clocks of the storages bound the time of this owner: what a wrong clock would
        remove does not come back."""
        if keep.seconds is None:
            return EMPTY
        log, last = self._log, self._log.committed
        untimed = await self._before(1, last)
        now = log.storage_clocks.bounded(log.settings.wall(), asyncio.get_running_loop().time())
        older = await self._before(now - keep.seconds * 1_000_000, last)
        return older if older > untimed else EMPTY

    async def _before(self, time: int, last: int) -> int:
        """Return the highest id up to `last` before this time; the id before the floor if all that is left is later. A
        replica of format 0 answers with its last id, which may be above `last`, and rises from call to call."""
        try:
            return min(last, await self._log.find_time(time, last))
        except Trimmed as error:
            return int(error.facts["floor"]) - 1

    async def _see(self, meta: ArchiveMeta, first_id: int, names: list[str]) -> ArchiveCheck:
        """Return up to where the objects are in the store, as reported by the first storage that can look."""
        log, core = self._log, self._log.core
        known = said(meta)
        able = [name for name in names if (status := core.status(name)) is not None and status.archives]
        failed: WaltzError | None = None
        for name in able:
            try:
                return await log.port(name).check_archive(log.partition, known, first_id, session=log.session)
            except WaltzError as error:
                failed = error
        if failed is not None:
            raise failed
        return ArchiveCheck(last_id=first_id - 1, missing="no storage that can look into the archive answers")

    async def _trim_behind(self, needed: int) -> None:
        """Trim the group log below the first id that its readers need. If there is an archive, its timeline has that first;
        unless the beginning of the log was trimmed before there was an archive, and can never be in one."""
        log, core = self._log, self._log.core
        document, _ = await archived(self._cluster.coordinator, log.partition)
        meta = of_timeline(document, core.meta.lineage)
        floor = max((status.floor for status in core.statuses.values()), default=0)
        last = log.committed if meta is None else meta.last
        if meta is None and (document or floor == 0) and any(status.archives for status in core.statuses.values()):
            last = EMPTY  # nothing of this timeline is archived yet
        names = [
            name for name, replicator in sorted(log.replicators.items()) if replicator.is_readable and name in core.roles
        ]
        held = {name: core.held(name) for name in core.statuses}
        reach = min(log.committed, reach_of(core.meta, core.roles, core.statuses, held))
        looked_at = (last, reach, needed, tuple(names), floor)
        if last > EMPTY and looked_at != self._looked_at:
            replicas = await self._sealed(names)
            found = next_floor(floor, archived=last, reach=reach, replicas=replicas, keep=Keep(seconds=0), older=needed - 1)
            if found <= floor:
                self._looked_at = looked_at
            floor = found
        await self._tell_storages(floor, None)

    async def _tell_storages(self, floor: int, known: Archived | None) -> str:
        """Send the floor to the storages; return why one of them keeps what it should remove, or an empty text. `known`:
        the archive that replaces what is removed; None if no archive is needed. A planned new session may begin
        meanwhile, with new replicators: then some are told at the next step."""
        log, kept = self._log, ""
        for name, replicator in sorted(log.replicators.items()):
            core = log.core
            status, progress = core.status(name), core.progress(name)
            is_told = status is not None and max(status.floor, progress.trimmed) >= floor and not status.untrimmed
            if status is None or not replicator.is_readable or is_told:
                continue
            status = await log.port(name).trim(log.partition, log.session, floor, known, needs_none=known is None)
            core.trimmed(name, floor, status)
            kept = kept or (f"{name}: {status.untrimmed}" if status.untrimmed else "")
        return kept


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


ARCHIVES_FIRST_SECONDS = 1.0
"""Pause before the next request, when a sealed segment has to be archived first."""
SPREAD = 16
"""Number of different times at which partitions begin, so that their uploads do not coincide."""


class Backup:
    """Backup of one session."""

    def __init__(
        self, log: ReplicatedLog, coordinator: Coordinator, uploader: ArchiveUploader, say: Callable[[str], None]
    ) -> None:
        self._log = log
        self._coordinator = coordinator
        self._uploader = uploader
        self._say = say
        self._confirmation = SessionConfirmation(log)
        self._asked = ""
        """Storage that is asked; empty before the first choice."""
        self._failed: dict[str, str] = {}
        """Failures of storages since the last upload."""
        self._told = ""
        self._since: float | None = None
        """Newest time at which the store had all that was committed."""
        self.known: BackedUp | None = None
        self.trouble = ""

    @property
    def lag(self) -> float:
        """Seconds for which something committed is not backed up; 0 if all is backed up."""
        if self._since is None or self._log.committed <= self._reached:
            return 0.0
        return asyncio.get_running_loop().time() - self._since

    @property
    def _reached(self) -> int:
        known, tail = self._uploader.known, self.known
        return max(-1 if known is None else known.last_id, -1 if tail is None else tail.last_id)

    async def run(self) -> None:
        """Upload until cancelled. An internal error in here ends nothing else."""
        seconds = self._log.settings.backup_seconds
        try:
            await asyncio.sleep(seconds * (self._log.partition % SPREAD) / SPREAD)
            while True:
                pause = await self._look(seconds)
                await asyncio.sleep(pause)
        except Exception as error:
            _logger.exception("a mistake in Waltz itself")
            self._tell(f"a mistake in Waltz itself: {error!r}")

    async def _look(self, seconds: float) -> float:
        able = [
            name
            for name, replicator in sorted(self._log.replicators.items())
            if replicator.is_readable and self._uploader.archives(name)
        ]
        if not able or self._uploader.begins_late:
            return seconds
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
        try:
            return await self._round(able, seconds)
        except WaltzError as error:
            self._failed[self._asked] = f"{self._asked}: {error.code} {error.message}" if self._asked else error.message
            if self._asked and any(name not in self._failed for name in able):
                return 0.0
            self._tell(self._failed[min(self._failed)])
            self._failed.clear()
            return seconds

    async def _round(self, able: list[str], seconds: float) -> float:
        owned = self._log
        free = [name for name in able if name not in self._failed]
        if self._asked not in free:
            self._asked = free[owned.partition % len(free)] if free else ""
        if not self._asked:
            self._failed.clear()
            return seconds
        began = asyncio.get_running_loop().time()
        moment = owned.storage_clocks.bounded(owned.settings.wall(), began)
        known, lineage = self._uploader.known, owned.core.meta.lineage
        if known is None:
            meta = of_timeline((await archived(self._coordinator, owned.partition))[0], lineage)
            known = Archived() if meta is None else said(meta)
        await self._confirmation.confirm()
        committed = owned.committed
        found = await owned.port(self._asked).back_up(
            owned.partition, known, session=owned.session, committed=committed, moment=moment, lineage=lineage
        )
        self._failed.clear()
        if found.archives_first:
            self._uploader.hurry()
            return ARCHIVES_FIRST_SECONDS
        self.known = found
        if found.last_id >= committed:
            self._since = began
        self._tell("")
        return seconds

    def _tell(self, trouble: str) -> None:
        """Set the trouble; log it if it has changed."""
        self.trouble = trouble
        if trouble and trouble != self._told:
            self._say(f"the backup fails: {trouble}")
        elif self._told and not trouble:
            self._say("the backup works again")
        self._told = trouble
