"""What operators want of a cluster, and what they did: their documents in the coordinator, a part of `waltzd.cluster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from waltzd.coordinator import Change, Check, Coordinator, Create, Delete, Set
from waltzd.document import decode, encode
from waltzd.errors import NodeExists, NodeMissing
from waltzd.meta import HistoryEntry, Moves, Preferences

REPLICAS = "/replicas"
PREFERRED = "/preferred"
MOVES = "/moves"
HISTORY = "/history"
HISTORY_MAX = 1000
"""Entries that are kept: the oldest go first."""
NO_VERSION = -1
"""Of a document that is not there."""
W = TypeVar("W", Preferences, Moves)
"""Documents that are only there once somebody wanted something."""


def replicas_path(partition: int) -> str:
    return f"{REPLICAS}/{partition}"


class OperatorDocuments:
    coordinator: Coordinator

    async def preferences(self) -> tuple[Preferences, int]:
        return await self._wish(PREFERRED, Preferences, Preferences(partitions={}))

    async def save_preferences(self, preferences: Preferences, version: int) -> None:
        await self.coordinator.commit([put(PREFERRED, encode(preferences), version)])

    async def moves(self) -> tuple[Moves, int]:
        return await self._wish(MOVES, Moves, Moves(partitions={}))

    async def save_moves(
        self, moves: Moves, version: int, *, replicas: Mapping[int, int] | None = None, there: Iterable[str] = ()
    ) -> None:
        """`replicas`: only if these partitions have the replicas that they had in these versions. `there`: only if there
        are these documents."""
        checks = [Check(path, await self._version_of(path)) for path in there]
        await self.coordinator.commit([*checks, *unchanged(replicas or {}), put(MOVES, encode(moves), version)])

    async def history(self, newest: int = HISTORY_MAX) -> list[tuple[int, HistoryEntry]]:
        """The newest entries, oldest first."""
        found = []
        for name in (await self.coordinator.children(HISTORY))[-newest:]:
            node = await self.coordinator.get(f"{HISTORY}/{name}")
            if node is not None:  # else it has made room since
                found.append((int(name), decode(HistoryEntry, node.data, f"{HISTORY}/{name}")))
        return found

    async def begin_history(self, entry: HistoryEntry) -> int:
        """The number of the entry."""
        while True:
            names = await self.coordinator.children(HISTORY)
            number = int(names[-1]) + 1 if names else 1
            changes: list[Change] = [Create(f"{HISTORY}/{number:010}", encode(entry))]
            try:
                for name in names[: -(HISTORY_MAX - 1)]:
                    path = f"{HISTORY}/{name}"
                    changes.append(Delete(path, await self._version_of(path)))
                await self.coordinator.commit(changes)
            except (NodeExists, NodeMissing):
                continue  # somebody else wrote an entry, or made room, at the same moment
            return number

    async def end_history(self, number: int, entry: HistoryEntry) -> None:
        path = f"{HISTORY}/{number:010}"
        await self.coordinator.commit([Set(path, encode(entry), await self._version_of(path))])

    async def _version_of(self, path: str) -> int:
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        return node.version

    async def _wish(self, path: str, kind: type[W], nothing: W) -> tuple[W, int]:
        node = await self.coordinator.get(path)
        return (nothing, NO_VERSION) if node is None else (decode(kind, node.data, path), node.version)


def unchanged(versions: Mapping[int, int]) -> list[Change]:
    return [Check(replicas_path(partition), version) for partition, version in sorted(versions.items())]


def untouched(path: str, version: int) -> list[Change]:
    """It has this version, or is not there."""
    return [Create(path, b""), Delete(path, 0)] if version == NO_VERSION else [Check(path, version)]


def put(path: str, data: bytes, version: int) -> Change:
    """A document that may not be there yet."""
    return Create(path, data) if version == NO_VERSION else Set(path, data, version)
