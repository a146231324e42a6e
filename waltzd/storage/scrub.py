"""What a storage does in the background: the scrub, and key indexes. The scrub reads every sealed segment of a storage
once in a period, so that rot is found while other replicas are sound.

One round visits the sealed segments in the order of partition and first id. A segment of n bytes is followed by a pause of
`n / bytes in all * period`, so a round takes one period however the log grows; the pause is computed anew each minute.
`Round` says how far the round is and is kept in a file beside the partitions, because a storage that restarts each day
would otherwise read the same first seventh for ever. The file decides nothing: a lost or damaged one begins a round.

A segment is read on a thread of its own, by the code of `storage verify`, and without a turn of the replica's queue. Only a
segment with a finding takes a turn: the replica examines it, and its owner heals it.

`KeyIndexer` writes key indexes beside sealed segments, off the append path.

An index that a question missed is written at once. All other missing indexes are written one at a time, the newest segment
of a partition first, each followed by a pause: a storage that was upgraded has an index beside none of its segments, and
must not spend its disk and processor on them at once. Until then questions read the heads of the batches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from waltzd.disk.seam import Disk, join, read_whole
from waltzd.errors import WaltzError
from waltzd.errors.operations import FlushFailed, PathMissing, TooManyFiles
from waltzd.format.finding import Finding
from waltzd.format.layout import NEW_SUFFIX, SCRUB_NAME, segment_name
from waltzd.protocol.descriptions import ScrubStatus
from waltzd.storage.append_queue import AppendQueue, RunBlocking
from waltzd.storage.offline.inspection import SegmentTask, inspect_segment
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition

LOOK_SECONDS = 60.0
"""Longest time between two looks at which segments there are."""
STATE_BYTES_MAX = 1 << 10
log = logging.getLogger("waltz.storage")


@dataclass(frozen=True, order=True)
class Sealed:
    """One sealed segment, in the order of a round."""

    partition: int
    first_id: int
    next_id: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """Progress of a round. Times are milliseconds since 1970."""

    began_ms: int = 0
    """Start of this round; 0 before the first one."""
    partition: int = -1
    """Partition of the segment that was read last; -1 at the start of a round."""
    first_id: int = -1
    """First id of the segment that was read last."""
    complete_since_ms: int = 0
    """Start of the last complete round: every segment that was sealed then was read since. 0: no round is complete."""

    def is_read(self, segment: Sealed) -> bool:
        return (segment.partition, segment.first_id) <= (self.partition, self.first_id)

    def next(self, sealed: Iterable[Sealed], now_ms: int) -> tuple[Round, Sealed | None]:
        """Return the next segment to read, and its round. A round ends behind the last segment, and while there is none."""
        found = sorted(sealed)
        begun = self if 0 < self.began_ms <= now_ms else Round(began_ms=now_ms)
        rest = [segment for segment in found if not begun.is_read(segment)]
        if not rest:
            begun = Round(began_ms=now_ms, complete_since_ms=begun.began_ms)
            rest = found
        return begun, rest[0] if rest else None

    def with_read(self, segment: Sealed) -> Round:
        return replace(self, partition=segment.partition, first_id=segment.first_id)


def pause_seconds(segment_bytes: int, total_bytes: int, period_seconds: float) -> float:
    """Return the time from the start of one read to the start of the next one."""
    return period_seconds * min(1.0, segment_bytes / total_bytes) if total_bytes else period_seconds


class Replicas(Protocol):
    """The replicas of this storage, as far as a scrub and the indexer need them."""

    @property
    def directory(self) -> Directory: ...
    def queue_of(self, number: int) -> AppendQueue | None: ...
    async def examine(self, queue: AppendQueue, first_id: int) -> None: ...


class Scrub:
    def __init__(
        self, replicas: Replicas, disk: Disk, run: RunBlocking, *, period_seconds: float, clock: Callable[[], int]
    ) -> None:
        """`period_seconds`: time for one round; 0 turns the scrub off. `clock`: milliseconds since 1970, for the age."""
        self._replicas = replicas
        self._disk = disk
        self._run = run
        self._period = period_seconds
        self._clock = clock
        self._path = join(replicas.directory.path, SCRUB_NAME)
        self.round = Round()
        self._read_bytes = 0
        """Size of the segment that was read last; 0 before the first one of this process."""
        self._read_at = 0.0
        """Time by the loop's clock at which the last read began."""
        self._total_bytes = self._done_bytes = 0
        """Bytes of all sealed segments, and of those that this round has read."""
        self._damaged = 0
        """Segments with a finding since this process started."""
        self._last_finding = ""

    def status(self) -> ScrubStatus:
        since = self.round.complete_since_ms
        return ScrubStatus(
            period_seconds=int(self._period),
            bytes_per_second=int(self._total_bytes / self._period) if self._period else 0,
            done_bytes=self._done_bytes,
            total_bytes=self._total_bytes,
            age_ms=max(0, self._clock() - since) if since else None,
            damaged_segments=self._damaged,
            last_finding=self._last_finding,
        )

    async def run(self) -> None:
        """Read segments until cancelled."""
        if not self._period:
            return
        self.round = await self._run(kept, self._disk, self._path)
        while True:
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Read one segment if its time has come. Return the seconds until the next look."""
        now = asyncio.get_running_loop().time()
        try:
            sealed = await self._run(self._sealed)
        except TooManyFiles as error:  # without a list of all segments no round may end
            log.warning("%s the scrub could not list the segments: %s", error.code, error.message)
            return LOOK_SECONDS
        self._measure(sealed)
        due = self._read_at + self._pause() if self._read_bytes else now
        if due > now:
            return min(due - now, LOOK_SECONDS)
        self.round, segment = self.round.next(sealed, self._clock())
        if segment is None:
            return min(LOOK_SECONDS, self._period)
        self._read_at, self._read_bytes = now, segment.bytes
        await self._read(segment)
        self.round = self.round.with_read(segment)
        self._measure(sealed)
        await self._run(self._keep, self.round)
        return min(self._pause(), LOOK_SECONDS)

    def _pause(self) -> float:
        return pause_seconds(self._read_bytes, self._total_bytes, self._period)

    def _measure(self, sealed: Iterable[Sealed]) -> None:
        self._total_bytes = sum(one.bytes for one in sealed)
        self._done_bytes = sum(one.bytes for one in sealed if self.round.is_read(one))

    def _sealed(self) -> list[Sealed]:
        """On the thread. Segments that are known to be damaged are left out: their owners heal them."""
        found: list[Sealed] = []
        for partition in self._replicas.directory.partitions():
            try:
                known = partition.status().damaged_segments
                sizes = {entry.name: entry.size for entry in self._disk.list(partition.directory)}
            except PathMissing:  # the replica was removed meanwhile
                continue
            except TooManyFiles:
                raise
            except WaltzError as error:
                log.warning("%s the scrub could not list partition %d: %s", error.code, partition.number, error.message)
                continue
            found += [
                Sealed(partition.number, first_id, last_id + 1, sizes.get(segment_name(first_id), 0))
                for first_id, last_id in partition.sealed_segments()
                if first_id not in known
            ]
        return found

    async def _read(self, segment: Sealed) -> None:
        queue = self._replicas.queue_of(segment.partition)
        if queue is None:
            return
        partition = queue.partition
        cuts = partition.cuts
        task = SegmentTask(
            directory=partition.directory,
            first_id=segment.first_id,
            partition=segment.partition,
            key=partition.key,
            next_first_id=segment.next_id,
            floor=partition.floor,
        )
        try:
            report = await self._run(inspect_segment, self._disk, task)
            if report.findings and partition.cuts == cuts and partition.first_id <= segment.first_id:
                await self._tell(queue, segment, report.findings)
        except FlushFailed:
            raise
        except WaltzError as error:  # one segment that cannot be read now does not end the scrub of the others
            log.warning("%s the scrub could not read the segment at id %d of partition %d: %s", error.code,
                        segment.first_id, segment.partition, error.message)  # fmt: skip

    async def _tell(self, queue: AppendQueue, segment: Sealed, findings: list[Finding]) -> None:
        self._damaged += 1
        self._last_finding = findings[0].sentence()
        log.warning("the scrub found: %s", self._last_finding)
        found = [first_id for finding in findings for first_id in queue.partition.concerned(finding)]
        for first_id in dict.fromkeys((segment.first_id, *found)):
            await self._replicas.examine(queue, first_id)

    def _keep(self, found: Round) -> None:
        """Write how far the round is. Not flushed: a lost file costs nothing but a round that begins again."""
        new = self._path + NEW_SUFFIX
        try:
            with closing(self._disk.create(new)) as file:
                file.write(0, json.dumps(asdict(found)).encode())
            self._disk.rename(new, self._path)
        except FlushFailed:
            raise
        except WaltzError as error:
            log.debug("%s how far the scrub is was not written: %s", error.code, error.message)


def kept(disk: Disk, path: str) -> Round:
    """Return the round of an earlier process, or a new one if there is none that can be understood."""
    try:
        found = Round(**json.loads(read_whole(disk, path, STATE_BYTES_MAX)))
    except (WaltzError, ValueError, TypeError):
        return Round()
    return found if all(isinstance(value, int) for value in asdict(found).values()) else Round()


INDEX_SECONDS = 5.0
"""Time between two looks for sealed segments without a key index."""

BYTES_PER_SECOND = 32 << 20
"""Bytes of segments that are indexed in a second: faster than most logs grow, and a twentieth of what a disk reads."""


class KeyIndexer:
    def __init__(self, replicas: Replicas, run: RunBlocking, write: Callable[..., Awaitable[Any]]) -> None:
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
