"""Documents of a cluster in ZooKeeper that a snapshot needs, read in one go and cached until one of them changes.

Documents hardly ever change, and a cluster with a thousand partitions has more than a thousand of them. A caller that
takes snapshots repeatedly caches them and waits for a change notice. The order matters: get a token, read, wait with
the token. A change before the read is read; a later change ends the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from waltzd.cluster.cluster import (
    ASSIGNMENT,
    CHANNELS,
    EXPECTED,
    LEADER,
    MOVES,
    POLICY,
    REPLICAS,
    ROOT,
    SERVERS,
    STORAGES,
    Cluster,
    channels_of,
    replicas_path,
)
from waltzd.cluster.documents import Assignment, ClusterMeta, Moves, ReplicaSets, ServerMeta, StorageMeta
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadMetadata

PATHS = (ROOT, ASSIGNMENT, LEADER, MOVES, POLICY, CHANNELS, REPLICAS, EXPECTED, STORAGES, SERVERS)


@dataclass(frozen=True, kw_only=True)
class Documents:
    meta: ClusterMeta
    assignment: Assignment
    sets: ReplicaSets
    leader: str | None
    moves: Moves
    expected: Mapping[str, ServerMeta]
    storages: Mapping[str, StorageMeta]
    servers: Mapping[str, ServerMeta]
    unreadable: Mapping[str, WaltzError]
    """Documents that cannot be decoded: path → error."""


async def read(cluster: Cluster) -> Documents:
    meta = await cluster.meta()
    unreadable: dict[str, WaltzError] = {}
    (assignment, _), (sets, _), leader, (moves, _), expected, storages = await asyncio.gather(
        cluster.assignment(),
        cluster.replicas(unreadable),
        cluster.leader(),
        cluster.moves(),
        cluster.expected_servers(),
        cluster.storages(unreadable),
    )
    for path, ask in ((POLICY, cluster.policy), (CHANNELS, partial(channels_of, cluster.coordinator))):
        try:
            await ask()
        except BadMetadata as error:
            unreadable[path] = error
    return Documents(
        meta=meta,
        assignment=assignment,
        sets=sets,
        leader=leader.name if leader is not None else None,
        moves=moves,
        expected=expected,
        storages=storages,
        servers=await cluster.servers(),  # read last, so that a server that registers meanwhile is not missing
        unreadable=dict(sorted(unreadable.items())),
    )


def paths_of(found: Documents) -> list[str]:
    """Return the paths of all documents. Waiting for the folder of servers or storages waits for each document in it."""
    numbers = {*range(len(found.assignment.owners)), *found.sets.partitions}
    return [*PATHS, *(f"{EXPECTED}/{name}" for name in sorted(found.expected)), *map(replicas_path, sorted(numbers))]


class DocumentCache:
    """Cache of the documents between snapshots. Watching costs more than one read, so it begins only after two
    successive reads returned equal documents."""

    def __init__(self) -> None:
        self._before: Documents | None = None
        self._trusted: Documents | None = None
        self._watching: asyncio.Task[None] | None = None

    async def read(self, cluster: Cluster) -> Documents:
        if self._trusted is not None and cluster.coordinator.is_connected:
            return self._trusted
        found = await read(cluster)
        if found == self._before and self._watching is None:
            self._watching = asyncio.create_task(self._watch(cluster))
        self._before = found
        return found

    async def _watch(self, cluster: Cluster) -> None:
        try:
            with suppress(WaltzError):  # the next read raises it
                paths = paths_of(await read(cluster))
                token = await cluster.wait_for_change(paths, None)
                found = await read(cluster)
                if paths_of(found) == paths:
                    self._trusted = found
                    await cluster.wait_for_change(paths, token)
        finally:
            self._trusted = self._watching = None

    async def forget(self) -> None:
        """Drop the cached documents and stop watching."""
        self._trusted = self._before = None
        if self._watching is not None:
            watching = self._watching
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
