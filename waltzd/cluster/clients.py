"""What the coordinator keeps of each application: when it was seen, and the epoch of its newest instance.

An epoch says which of several instances of one name is the newest. It is raised by compare-and-set, and never lags behind
the clock, in seconds: so a document that was deleted, put back or forgotten meanwhile gives out none a second time. A clock
that is behind changes nothing, one that is ahead leaves epochs out.

`newest_epoch` is never old news: ZooKeeper may answer a read with what was true a moment ago, and commits nothing on a
version that is not the newest. So what was read is committed to, unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from waltzd.cluster.cluster import CLIENTS, NO_VERSION, put
from waltzd.cluster.coordinator import Change, Check, Coordinator, Create, Delete, Node
from waltzd.cluster.documents import ClientMeta
from waltzd.errors import BadMetadata, ChangedMeanwhile, NodeMissing, TooManyCallers
from waltzd.protocol.document import decode, encode

NAMES_MAX = 10_000
"""So many names are kept. Names come from certificates, so whoever signs those can fill this up."""
SEEN_SECONDS = 600
"""How exact it is when a name was seen last: it is written down that seldom."""
KEPT_SECONDS = 90 * 24 * 3600
"""A name that was not seen for so long is forgotten."""
ATTEMPTS_MAX = 100


def client_path(name: str) -> str:
    return f"{CLIENTS}/{name}"


class ClientNames:
    def __init__(self, coordinator: Coordinator, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._coordinator = coordinator
        self._clock = clock

    async def all(self) -> Mapping[str, ClientMeta]:
        """Those that can be understood."""
        found: dict[str, ClientMeta] = {}
        for name in await self._coordinator.children(CLIENTS):
            node = await self._coordinator.get(client_path(name))
            meta = None if node is None else _meta(name, node)
            if meta is not None:
                found[name] = meta
        return found

    async def newest_epoch(self, name: str) -> int:
        """The highest that was given out before this was asked; 0 for none."""
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
        """An epoch that is above every other one of this name. When the answer of the coordinator is lost one may have been
        given out to nobody."""
        return (await self._write(name, lambda meta, now: replace(meta, epoch=max(meta.epoch + 1, now)))).epoch

    async def note_seen(self, name: str) -> None:
        """It is connected at this moment. Written only when that was not known, or some minutes ago."""
        node = await self._coordinator.get(client_path(name))
        meta = None if node is None else _meta(name, node)
        if meta is None or self._clock() - meta.last_seen >= SEEN_SECONDS:
            await self._write(name, lambda meta, now: meta)

    async def forget(self) -> list[str]:
        """Take out the names that were not seen for `KEPT_SECONDS`, and say which."""
        gone = []
        for name in await self._coordinator.children(CLIENTS):
            node = await self._coordinator.get(client_path(name))
            meta = None if node is None else _meta(name, node)
            if node is None or meta is None or self._clock() - meta.last_seen < KEPT_SECONDS:
                continue
            try:
                await self._coordinator.commit([Delete(client_path(name), node.version)])
            except ChangedMeanwhile:  # it is there again
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
            except NodeMissing:  # the cluster was deleted, or this document was at this moment
                if node is None:
                    raise
            except ChangedMeanwhile:
                continue
            else:
                return meta
        raise ChangedMeanwhile(f"{client_path(name)} was changed by others {ATTEMPTS_MAX} times in a row")

    async def _folder(self) -> list[Change]:
        """A cluster that was made by an older version has none."""
        return [] if await self._coordinator.get(CLIENTS) is not None else [Create(CLIENTS, b"")]


def _meta(name: str, node: Node) -> ClientMeta | None:
    """None where an operator has spoiled it: it is written anew then. What a newer version has written stays."""
    try:
        return decode(ClientMeta, node.data, client_path(name))
    except BadMetadata as error:
        if "schema" in error.facts:
            raise
        return None
