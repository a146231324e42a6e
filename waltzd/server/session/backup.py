"""Backup of a partition: every few seconds a replica uploads what is committed and in no archived segment.

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

from waltzd.cluster.cluster import archived, of_timeline, said
from waltzd.cluster.coordinator import Coordinator
from waltzd.errors import WaltzError
from waltzd.protocol.descriptions import Archived, BackedUp
from waltzd.server.session.archive_upload import ArchiveUploader
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.server.session.replicated_log import ReplicatedLog

_logger = logging.getLogger("waltz.server")
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
