"""Backup of the documents of the cluster into the archive: the leader asks a storage to write them whenever they have
changed.

It checks every few seconds, and asks no storage before something was backed up or archived. Counters that only rise do
not count as a change (`waltzd.cluster.metadata`). A new leader saves once, because it does not know what was saved
before. Nothing depends on this backup; while a storage or its store does not answer, it is made later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from uuid import UUID

from waltzd.cluster.cluster import ARCHIVES, Cluster, all_archived
from waltzd.cluster.documents import StorageMeta
from waltzd.cluster.metadata import document_versions, read_documents, without_secret, write
from waltzd.errors import WaltzError
from waltzd.errors.operations import NoArchive
from waltzd.protocol.descriptions import MetadataBackup
from waltzd.protocol.peers import ReplicaPort

log = logging.getLogger("waltz.server")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class MetadataSaver:
    def __init__(
        self,
        cluster: Cluster,
        connect: Callable[[StorageMeta], ReplicaPort],
        *,
        is_leader: Callable[[], bool],
        is_backing_up: Callable[[], bool],
        seconds: float,
        moment: Callable[[], str] = _now,
    ) -> None:
        """`is_backing_up`: whether a partition of this server is backed up. `seconds`: interval of the checks; 0 for
        none. `moment`: the time in the file, for people."""
        self._cluster = cluster
        self._connect = connect
        self._is_leader = is_leader
        self._is_backing_up = is_backing_up
        self._seconds = seconds
        self._moment = moment
        self._saved: Mapping[str, object] | None = None
        """Documents that were saved last; None before the first save."""
        self._number = 0
        self._seen_at: float | None = None
        self._trouble = ""
        self._is_archiving = False
        self._asked = ""
        """Storage that saved last; it is asked first."""

    async def run(self) -> None:
        while self._seconds:
            await asyncio.sleep(self._seconds)
            if not self._is_leader():
                self._saved = self._seen_at = None
                continue
            try:
                await self.save_if_changed()
                trouble = ""
            except WaltzError as error:
                trouble = f"{error.code} {error.message}"
            if trouble and trouble != self._trouble:
                log.warning("the documents of the cluster are not saved in the archive: %s", trouble)
            self._trouble = trouble

    async def save_if_changed(self) -> None:
        """Save the documents if they have changed."""
        if not self._is_backing_up() and not await self._cluster.coordinator.children(ARCHIVES):
            self._is_archiving = False
            return
        began = asyncio.get_running_loop().time()
        found = await document_versions(self._cluster)
        if found != self._saved:
            archives = {meta.archive for meta in (await all_archived(self._cluster.coordinator)).values()}
            text = write(without_secret(await read_documents(self._cluster, moment=self._moment())))
            self._number = await self._save(text, min(archives, default=None))
            if not self._number:
                return
            self._saved = found
        self._seen_at = began

    async def _save(self, text: bytes, archive: UUID | None) -> int:
        """Save by the first able storage; return the number of the copy, or 0 if no storage has an archive."""
        failed: WaltzError | None = None
        self._is_archiving = False
        storages = await self._cluster.storages()
        for name in sorted(storages, key=lambda name: (name != self._asked, name)):
            try:
                number = await self._connect(storages[name]).save_metadata(text, archive)
            except NoArchive:
                continue
            except WaltzError as error:
                failed = error
                continue
            self._is_archiving, self._asked = True, name
            return number
        if failed is not None:
            self._is_archiving = True
            raise failed
        return 0

    def describe(self) -> MetadataBackup | None:
        """Return the state of the backup; None if this server does not lead, and if no storage has an archive."""
        if not self._is_leader() or not self._is_archiving:
            return None
        since = self._seen_at
        age = -1 if since is None else round(1000 * (asyncio.get_running_loop().time() - since))
        return MetadataBackup(number=self._number, age_ms=age, trouble=self._trouble)
