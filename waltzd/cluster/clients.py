"""The documents in ZooKeeper about applications: when each name was seen, and the epoch of its newest instance.

The epoch tells which of several instances of one name is the newest. It is raised by compare-and-set and is never below
the clock in seconds, so an epoch is not issued twice even if the document was deleted or restored from a backup. A clock
that is behind has no effect; a clock that is ahead skips epochs.

`newest_epoch` never returns an old value. ZooKeeper may answer a read with stale data, but commits a check only on the
newest version, so the read is confirmed by a transaction that checks its version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from waltzd.cluster.cluster import CLIENTS, NO_VERSION, put
from waltzd.cluster.coordinator import Change, Check, Coordinator, Create, Delete, Node
from waltzd.cluster.documents import ClientMeta
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, NodeMissing, TooManyCallers
from waltzd.protocol.document import decode, encode

NAMES_MAX = 10_000
"""Names that are kept at most. They come from certificates, so an authority that signs many can fill the list."""
SEEN_SECONDS = 600
"""Seconds between two writes of the time at which a connected name was seen, and so the precision of that time."""
KEPT_SECONDS = 90 * 24 * 3600
"""Seconds after which a name that was not seen is deleted."""
ATTEMPTS_MAX = 100
"""Lost races for one document in a row before a call fails."""


def client_path(name: str) -> str:
    return f"{CLIENTS}/{name}"


class ClientNames:
    def __init__(self, coordinator: Coordinator, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._coordinator = coordinator
        self._clock = clock

    async def all(self) -> Mapping[str, ClientMeta]:
        """Return the documents of all applications, without the unreadable ones."""
        found: dict[str, ClientMeta] = {}
        for name in await self._coordinator.children(CLIENTS):
            node = await self._coordinator.get(client_path(name))
            meta = None if node is None else _meta(name, node)
            if meta is not None:
                found[name] = meta
        return found

    async def newest_epoch(self, name: str) -> int:
        """Return the highest epoch that was issued before this call; 0 if none was."""
        path = client_path(name)
        for _ in range(ATTEMPTS_MAX):
            node = await self._coordinator.get(path)
            try:
                if node is None:
                    await self._coordinator.commit([*await self._folder(), Create(path, b""), Delete(path, 0)])
                    return 0
                await self._coordinator.commit([Check(path, node.version)])
            except ChangedMeanwhile:
                continue
            return decode(ClientMeta, node.data, path).epoch
        raise ChangedMeanwhile(f"{path} was changed by others {ATTEMPTS_MAX} times in a row")

    async def raise_epoch(self, name: str) -> int:
        """Issue an epoch above all others of this name and return it. If ZooKeeper's answer is lost, an issued epoch may be
        unused."""
        return (await self._write(name, lambda meta, now: replace(meta, epoch=max(meta.epoch + 1, now)))).epoch

    async def note_seen(self, name: str) -> None:
        """Record that an instance of this name is connected; write only if the record is older than `SEEN_SECONDS`."""
        node = await self._coordinator.get(client_path(name))
        meta = None if node is None else _meta(name, node)
        if meta is None or self._clock() - meta.last_seen >= SEEN_SECONDS:
            await self._write(name, lambda meta, now: meta)

    async def forget(self) -> list[str]:
        """Delete the names that were not seen for `KEPT_SECONDS`, and return them."""
        gone = []
        for name in await self._coordinator.children(CLIENTS):
            node = await self._coordinator.get(client_path(name))
            meta = None if node is None else _meta(name, node)
            if node is None or meta is None or self._clock() - meta.last_seen < KEPT_SECONDS:
                continue
            try:
                await self._coordinator.commit([Delete(client_path(name), node.version)])
            except ChangedMeanwhile:  # the application has connected again
                continue
            gone.append(name)
        return gone

    async def _write(self, name: str, change: Callable[[ClientMeta, int], ClientMeta]) -> ClientMeta:
        for _ in range(ATTEMPTS_MAX):
            node = await self._coordinator.get(client_path(name))
            folder: list[Change] = []
            if node is None:
                folder = await self._folder()
                if len(await self._coordinator.children(CLIENTS)) >= NAMES_MAX:
                    raise TooManyCallers(
                        f"the coordinator keeps {NAMES_MAX} names of applications already",
                        not_done=f"{name} was not written down",
                        next_step=f"delete names that are no longer used below {CLIENTS} in the coordinator",
                    )
            now = int(self._clock())
            meta = None if node is None else _meta(name, node)
            meta = change(meta or ClientMeta(name=name, first_seen=now, last_seen=now), now)
            meta = replace(meta, last_seen=max(meta.last_seen, now))
            version = NO_VERSION if node is None else node.version
            try:
                await self._coordinator.commit([*folder, put(client_path(name), encode(meta), version)])
            except NodeMissing:  # the cluster or this document was deleted at this moment
                if node is None:
                    raise
            except ChangedMeanwhile:
                continue
            else:
                return meta
        raise ChangedMeanwhile(f"{client_path(name)} was changed by others {ATTEMPTS_MAX} times in a row")

    async def _folder(self) -> list[Change]:
        """Return the change that creates the folder, which clusters of older versions do not have."""
        return [] if await self._coordinator.get(CLIENTS) is not None else [Create(CLIENTS, b"")]


def _meta(name: str, node: Node) -> ClientMeta | None:
    """Decode a document; return None if it is corrupt, so that it is rewritten. Raise if a newer version wrote it."""
    try:
        return decode(ClientMeta, node.data, client_path(name))
    except BadMetadata as error:
        if "schema" in error.facts:
            raise
        return None
