"""The work that writes key indexes beside sealed segments, off the append path.

An index that a question missed is written at once. Every `LOOK_SECONDS`, the missing indexes of all partitions are
written in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from waltzd.storage.append_queue import RunBlocking
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition

LOOK_SECONDS = 5.0
"""Time between two looks for sealed segments without a key index."""


class Replicas(Protocol):
    """The replicas of this storage, as far as the indexer needs them."""

    @property
    def directory(self) -> Directory: ...


class KeyIndexer:
    def __init__(self, replicas: Replicas, run: RunBlocking, write: Callable[..., Awaitable[Any]]) -> None:
        """`run`: runs a function that reads on a thread. `write`: runs one that writes, to its end."""
        self._replicas = replicas
        self._run = run
        self._write = write
        self._under_way: dict[tuple[int, int], None] = {}
        """Partition and first id of the segments whose index is being written."""
        self._tried: dict[tuple[int, int], None] = {}
        """Segments that `step` has indexed, or that can have no index; a question asks for them again."""

    async def run(self) -> None:
        """Index sealed segments until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(LOOK_SECONDS)

    async def step(self) -> None:
        """Index the sealed segments that have no index."""
        for partition in self._replicas.directory.partitions():
            for first_id in await self._run(partition.missing_keys):
                if (partition.number, first_id) not in self._tried:
                    self._tried[partition.number, first_id] = None
                    await self._index(partition, first_id)

    async def index_missed(self, partition: Partition) -> None:
        """Index the segments whose index a question missed."""
        for first_id in partition.unwritten_keys():
            await self._index(partition, first_id)

    async def _index(self, partition: Partition, first_id: int) -> None:
        name = partition.number, first_id
        if name in self._under_way:
            return
        self._under_way[name] = None
        try:
            await self._write(partition.write_key, first_id)
        finally:
            del self._under_way[name]
