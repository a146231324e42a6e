"""The work that writes key indexes beside sealed segments, off the append path.

An index that a question missed is written at once. All other missing indexes are written one at a time, the newest segment
of a partition first, each followed by a pause: a storage that was upgraded has an index beside none of its segments, and
must not spend its disk and processor on them at once. Until then questions read the heads of the batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from waltzd.errors import WaltzError
from waltzd.errors.operations import FlushFailed
from waltzd.storage.append_queue import RunBlocking
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition

INDEX_SECONDS = 5.0
"""Time between two looks for sealed segments without a key index."""
log = logging.getLogger("waltz.storage")
BYTES_PER_SECOND = 32 << 20
"""Bytes of segments that are indexed in a second: faster than most logs grow, and a twentieth of what a disk reads."""


class IndexedReplicas(Protocol):
    """The replicas of this storage, as far as the indexer needs them."""

    @property
    def directory(self) -> Directory: ...


class KeyIndexer:
    def __init__(self, replicas: IndexedReplicas, run: RunBlocking, write: Callable[..., Awaitable[Any]]) -> None:
        """`run`: runs a function that reads on a thread. `write`: runs one that writes, to its end."""
        self._replicas = replicas
        self._run = run
        self._write = write
        self._under_way: dict[tuple[int, int], None] = {}
        """Partition and first id of the segments whose index is being written."""
        self._tried: dict[tuple[int, int], None] = {}
        """Segments that `step` has tried and that still have no index; a request for their index tries again."""

    async def run(self) -> None:
        """Index sealed segments until cancelled."""
        while True:
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Index the newest sealed segment of some partition that has no index. Return the seconds until the next step."""
        missing: dict[tuple[int, int], Partition] = {}
        for partition in self._replicas.directory.partitions():
            for first_id in reversed(await self._run(partition.missing_keys)):
                missing[partition.number, first_id] = partition
        self._tried = {name: None for name in self._tried if name in missing}
        for name, partition in missing.items():
            if name not in self._tried:
                self._tried[name] = None
                size = await self._run(partition.segment_bytes, name[1])
                await self._index(partition, name[1])
                return float(size / BYTES_PER_SECOND)
        return INDEX_SECONDS

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
        except FlushFailed:
            raise
        except WaltzError as error:  # a segment that cannot be read or indexed now ends neither the storage nor a question
            log.warning("%s the segment at id %d of partition %d has no key index: %s", error.code, first_id,
                        partition.number, error.message)  # fmt: skip
        finally:
            del self._under_way[name]
