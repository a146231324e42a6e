"""Trimming by the owner: storages remove what is archived and need not stay. The coordinator's document gets the floor
first, then each storage does.

`waltzd.server.core.retention` decides the floor from what the replicas report. Before anything is removed, a storage
checks that the objects which become the only copy are in the store at this moment: trimming stops at the first one that
is missing. The highest floor that is found anywhere counts, so a document that went back is brought forward again. A
storage that cannot be told now is told later: each step can be repeated.

The group log is trimmed by another rule. What is no longer needed to know the positions of the groups is removed, also
without an archive. No document has its floor; the replicas have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from waltzd.cluster.cluster import Cluster, archived, of_timeline, said, save_archived
from waltzd.cluster.documents import ArchiveMeta, Keep, keep_of
from waltzd.errors import Trimmed, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, ObjectAbsent
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.retention import Sealed, next_floor, reach_of
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
        """Trim the group log below the first id that its readers need. If there is an archive, that is archived first;
        unless the beginning of the log was trimmed before there was an archive, and can never be in one."""
        log, core = self._log, self._log.core
        meta, _ = await archived(self._cluster.coordinator, log.partition)
        floor = max((status.floor for status in core.statuses.values()), default=0)
        if meta is None and floor == 0 and any(status.archives for status in core.statuses.values()):
            return
        names = [
            name for name, replicator in sorted(log.replicators.items()) if replicator.is_readable and name in core.roles
        ]
        held = {name: core.held(name) for name in core.statuses}
        reach = min(log.committed, reach_of(core.meta, core.roles, core.statuses, held))
        last = log.committed if meta is None else meta.last
        looked_at = (last, reach, needed, tuple(names), floor)
        if looked_at != self._looked_at:
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
