"""The owner lets storages remove what is archived and need not stay: first the coordinator's document says the floor, then
each storage is told.

What the floor may become is decided in `waltzd.server.core.retention`, by what the replicas answer. Before anything goes, a
storage looks whether the objects that are to be the only copy are in the store at this moment: trimming stops at the first
one that is missing. The highest floor that is met anywhere counts, so a document that went back is brought forward again.
A storage that is not told now is told later: each step can be done again.

The group log is trimmed by another measure: what is not needed any more to know where the groups stand goes, also without
an archive, and no document says its floor. The replicas do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from waltzd.cluster.archives import archived, of_timeline, said, save_archived
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ArchiveMeta
from waltzd.errors import ChangedMeanwhile, ObjectAbsent, Trimmed, WaltzError
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.retention import Keep, keep_of
from waltzd.server.core.retention import Sealed, next_floor, reach_of
from waltzd.server.session.partition_leader import PartitionLeader


class Trimming:
    """Of one session."""

    def __init__(self, leader: PartitionLeader, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._leader = leader
        self._cluster = cluster
        self._say = say
        self._next_look = 0.0
        self._looked_at: tuple[object, ...] = ()
        """What was known when a policy of size found nothing to remove: until it changes there is nothing."""
        self.trouble = ""

    async def step(self) -> None:
        """If it is time: one floor further, as far as it goes now."""
        now = asyncio.get_running_loop().time()
        if now < self._next_look:
            return
        self._next_look = now + self._leader.settings.trim_seconds
        try:
            await self._step()
            self._tell("")
        except ChangedMeanwhile:
            return  # by another owner: it is read again
        except WaltzError as error:
            self._tell(f"{error.code} {error.message}")

    def _tell(self, trouble: str) -> None:
        """Once, however often it is tried again."""
        if trouble and trouble != self.trouble:
            self._say(f"nothing is trimmed: {trouble}")
        self.trouble = trouble

    async def _step(self) -> None:
        leader, core = self._leader, self._leader.core
        if leader.settings.needed_from is not None:
            await self._trim_behind(leader.settings.needed_from())
            return
        if not any(status.archives or status.floor for status in core.statuses.values()):
            return  # there is no archive
        found, version = await archived(self._cluster.coordinator, leader.partition)
        meta = of_timeline(found, core.meta.lineage)
        if meta is None:
            return
        floor, missing = max([meta.floor, *(status.floor for status in core.statuses.values())]), ""
        keep = keep_of((await self._cluster.meta()).keep_local)
        if keep is not None and keep != Keep():
            floor, missing = await self._further(floor, meta, keep)
        if floor > meta.floor:
            await save_archived(self._cluster.coordinator, leader.partition, replace(meta, floor=floor), meta, version)
        kept = await self._tell_storages(floor, said(meta))
        missing = missing or kept
        if missing:
            raise ObjectAbsent(
                f"the archive cannot stand in for what would go: {missing}",
                not_done=f"nothing from id {floor} on was removed from storages",
            )

    async def _further(self, floor: int, meta: ArchiveMeta, keep: Keep) -> tuple[int, str]:
        """The next floor; and what is missing, where nothing can be removed for that."""
        leader, core = self._leader, self._leader.core
        names = [
            name for name, replicator in sorted(leader.replicators.items()) if replicator.is_readable and name in core.roles
        ]
        held = {name: core.held(name) for name in core.statuses}
        reach = min(leader.committed, reach_of(core.meta, core.roles, core.statuses, held))
        older = await self._older(keep)
        looked_at = (meta.last, reach, leader.committed, tuple(names), keep, older, floor)
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
        leader, found = self._leader, list[list[Sealed]]()
        for name in names:
            found.append(await leader.port(name).segments(leader.partition, session=leader.session))
        return found

    async def _older(self, keep: Keep) -> int:
        """Up to here everything is older than the policy keeps. What has no time of its own is as old as the first that has
        one, at least."""
        if keep.seconds is None:
            return EMPTY
        untimed = await self._before(1)
        older = await self._before(self._leader.settings.wall() - keep.seconds * 1_000_000)
        return older if older > untimed else EMPTY

    async def _before(self, time: int) -> int:
        """The highest id in front of this time; in front of the floor where everything that is left is later."""
        try:
            return await self._leader.find_time(time, self._leader.committed)
        except Trimmed as error:
            return int(error.facts["floor"]) - 1

    async def _see(self, meta: ArchiveMeta, first_id: int, names: list[str]) -> ArchiveCheck:
        """Up to where the objects are in the store, as the first storage sees it that can look."""
        leader, core = self._leader, self._leader.core
        known = said(meta)
        able = [name for name in names if (status := core.status(name)) is not None and status.archives]
        failed: WaltzError | None = None
        for name in able:
            try:
                return await leader.port(name).check_archive(leader.partition, known, first_id, session=leader.session)
            except WaltzError as error:
                failed = error
        if failed is not None:
            raise failed
        return ArchiveCheck(last_id=first_id - 1, missing="no storage that can look into the archive answers")

    async def _trim_behind(self, needed: int) -> None:
        """Of the group log, all that nobody needs to know where the groups stand. What was trimmed before there was an
        archive can never be in one; else it is archived first."""
        leader, core = self._leader, self._leader.core
        meta, _ = await archived(self._cluster.coordinator, leader.partition)
        floor = max((status.floor for status in core.statuses.values()), default=0)
        if meta is None and floor == 0 and any(status.archives for status in core.statuses.values()):
            return
        names = [
            name for name, replicator in sorted(leader.replicators.items()) if replicator.is_readable and name in core.roles
        ]
        held = {name: core.held(name) for name in core.statuses}
        reach = min(leader.committed, reach_of(core.meta, core.roles, core.statuses, held))
        last = leader.committed if meta is None else meta.last
        looked_at = (last, reach, needed, tuple(names), floor)
        if looked_at != self._looked_at:
            replicas = await self._sealed(names)
            found = next_floor(floor, archived=last, reach=reach, replicas=replicas, keep=Keep(seconds=0), older=needed - 1)
            if found <= floor:
                self._looked_at = looked_at
            floor = found
        await self._tell_storages(floor, None)

    async def _tell_storages(self, floor: int, known: Archived | None) -> str:
        """Why a storage keeps what it was to let go; empty where none does. `known`: what stands in for it; None where it
        needs no archive. A planned new session may begin meanwhile, with new links: then some are told at the next look."""
        leader, kept = self._leader, ""
        for name, replicator in sorted(leader.replicators.items()):
            core = leader.core
            status, progress = core.status(name), core.progress(name)
            is_told = status is not None and max(status.floor, progress.trimmed) >= floor and not status.untrimmed
            if status is None or not replicator.is_readable or is_told:
                continue
            status = await leader.port(name).trim(leader.partition, leader.session, floor, known, needs_none=known is None)
            core.trimmed(name, floor, status)
            kept = kept or (f"{name}: {status.untrimmed}" if status.untrimmed else "")
        return kept
