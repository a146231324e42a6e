"""The interface of origins: a live cluster, alone or with its archive, or directories of storages.

An origin has a catalog of what can be read, and reads it as runs of whole records with checked checksums. The data source,
exports and verification depend only on this interface. An origin is a value: it is pickled, sent to the tasks, and opens
files and connections there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from waltzd.errors import OtherTimeline
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

BATCH_BYTES = 4 << 20
"""Bytes of a batch. Smaller batches cost more (1 MiB: a fifth); larger ones do not fit into the processor's caches."""


@dataclass(frozen=True, order=True)
class Span:
    """Ids from `first` to `last`, both included; none when `last` is below `first`."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return max(0, self.last - self.first + 1)

    def cut(self, other: Span) -> Span:
        return Span(max(self.first, other.first), min(self.last, other.last))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A range of ids of one partition that is best read at once, such as a segment."""

    partition: int
    span: Span
    bytes: int
    """Estimated size on disk, for balancing tasks only."""
    place: Any
    """Value that only its origin interprets, such as a path; it is pickled with the tasks."""

    def cut(self, span: Span) -> Extent:
        """Return the part of the extent within a span, which may be empty."""
        part = self.span.cut(span)
        return replace(self, span=part, bytes=self.bytes * part.count // max(1, self.span.count))


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The committed records that could be read at one moment."""

    key: UUID
    """Key of the cluster."""
    spans: Mapping[int, Span]
    """Ids of each partition that can be read."""
    extents: tuple[Extent, ...]
    """Extents that cover the spans without overlap, in order of partition and id."""
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Identity of the timeline that is read, for each partition whose log has forked."""
    routes: Mapping[int, Any] = field(default_factory=dict)
    """Value for each partition by which `Origin.check` reaches its log from a task; empty for directories."""

    def position(self, partition: int, id_: int) -> Position:
        """Return this id as a position of the timeline that is read."""
        return Position(id_, self.timelines.get(partition, FIRST))


class Origin(Protocol):
    def describe(self) -> str:
        """Return a short description for people."""
        ...

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        """Return the catalog of these partitions, or of all."""
        ...

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        """Yield the records of `span`, which lies within the extent, in order and without a gap, in runs of `batch_bytes`.

        Missing, damaged or uncommitted records raise an error with the partition and the ids. Runs have times and groups,
        and locks on request."""
        ...

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """Return the first id in the catalog with time `time` (µs since 1970) or later; the id after the last if there is
        none. Records of format 0 have no time, and come before all others."""
        ...

    def check(self, partition: int, position: Position, *, route: Any = None) -> None:
        """Raise `OtherTimeline` if a position of another timeline is not on the log. Tasks pass the catalog's `route`."""
        ...

    def header(self, extent: Extent) -> FileHeader | None:
        """Return the header of the extent's segment; None if the extent is none, or if it cannot be read, which the read of
        its records reports."""
        return None

    def marked(self, catalog: Catalog, spans: Mapping[int, Span], lock: int) -> dict[int, list[Span]]:
        """Return for each partition ids in its span among which are all that marked the lock."""
        return {number: [span] for number, span in spans.items()}


def check_reached(
    origin: Origin,
    catalog: Catalog,
    reached: Mapping[int, Position],
    *,
    what: str,
    not_done: str,
    next_step: Callable[[Mapping[int, int]], str],
) -> None:
    """Raise `OtherTimeline` if a last id that was read is not on the log any more; ids up to the fork are.

    Args:
        origin: Where the log is read from.
        catalog: What it has.
        reached: Last id that was read of each partition.
        what: The thing that stores the ids, for the message.
        not_done: What is not done if an id is refused, for the error.
        next_step: Function from the last shared id of each refused partition to the advice in the error.
    """
    refused: dict[int, OtherTimeline] = {}
    for number, position in sorted(reached.items()):
        if number not in catalog.spans or position == EMPTY:
            continue
        if position.timeline == catalog.position(number, position).timeline:
            continue
        try:
            origin.check(number, position)
        except OtherTimeline as error:
            refused[number] = error
    if refused:
        number, first = next(iter(refused.items()))
        message = f"{what} has ids up to {reached[number]} of partition {number} that are not on the log: {first.message}"
        if others := ", ".join(str(other) for other in refused if other != number):
            message += f". Its ids of partition {others} are not all on the log either"
        forks = {each: EMPTY if (fork := one.number("fork")) is None else fork for each, one in refused.items()}
        raise OtherTimeline(message, not_done=not_done, next_step=next_step(forks), **first.facts) from first


def check_read(
    origin: Origin, partition: int, span: Span, timeline: UUID, *, route: Any, not_done: str, next_step: str
) -> None:
    """Raise `OtherTimeline` if ids that were read are not on the log any more. Call it once, after the last id: an operator
    may end the log at any time while it is read. `timeline`: the one that the catalog named."""
    try:
        origin.check(partition, Position(span.last, timeline), route=route)
    except OtherTimeline as error:
        raise OtherTimeline(
            f"an operator ended the log while ids {span.first} to {span.last} of partition {partition} were read: "
            f"{error.message}",
            not_done=not_done, next_step=next_step, **error.facts,
        ) from error  # fmt: skip


CREDIT_SECONDS = 0.25
_BATCH_SECONDS, _LEAST_BYTES = 0.05, 64 << 10
_MOMENT = struct.Struct("=d")


class Throttle:
    """A rate limit in bytes a second, shared by all readers, so that an export leaves disks and network to appends.

    A reader sleeps after each batch for the time that the batch takes at the agreed rate; the sender feels
    backpressure. Unused rate of the last quarter of a second may be caught up: the start of a task, or one slow
    response, does not lower the rate.

    All tasks of one machine can share one bucket: a number in a file, the time from which the next bytes may be read.
    The rate then holds for any number of tasks. Tasks on several machines cannot share a file: each of them gets an
    equal part.
    """

    def __init__(self, bytes_per_second: float | None, bucket: str = "") -> None:
        """`bytes_per_second`: None for no limit. `bucket`: file that tasks of this machine share; empty for none."""
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate = bytes_per_second
        self._bucket = bucket
        self._free_at: float | None = None

    def __reduce__(self) -> tuple[type[Throttle], tuple[float | None, str]]:
        """Pickle without state: clocks differ between processes, except for a file that is shared on one machine."""
        return Throttle, (self._rate, self._bucket)

    def shared(self, tasks: int, bucket: Path | None) -> Throttle:
        """Return the limit for each task: its share, or the whole rate with a file for all tasks on this machine."""
        if self._rate is None:
            return self
        return Throttle(self._rate / tasks) if bucket is None else Throttle(self._rate, str(bucket))

    @property
    def is_on(self) -> bool:
        return self._rate is not None

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch: small batches disturb other work less."""
        return BATCH_BYTES if self._rate is None else int(min(BATCH_BYTES, max(_LEAST_BYTES, self._rate * _BATCH_SECONDS)))

    def delay(self, size: int, now: float) -> float:
        """Return the seconds to wait after reading `size` bytes."""
        if self._rate is None:
            return 0.0
        if self._bucket:
            return max(0.0, _drawn(self._bucket, now, size / self._rate) - now)
        self._free_at = _next(self._free_at, now, size / self._rate)
        return max(0.0, self._free_at - now)

    async def wait(self, size: int) -> None:
        seconds = self.delay(size, asyncio.get_running_loop().time())
        if seconds:
            await asyncio.sleep(seconds)

    def sleep(self, size: int) -> None:
        seconds = self.delay(size, time.monotonic())
        if seconds:
            time.sleep(seconds)


NO_THROTTLE = Throttle(None)


def _next(before: float | None, now: float, seconds: float) -> float:
    return (now if before is None else max(before, now - CREDIT_SECONDS)) + seconds


def _drawn(path: str, now: float, seconds: float) -> float:
    """Reserve time in the shared bucket; return its end. All processes of a machine share the monotonic clock."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        raw = os.pread(number, _MOMENT.size, 0)
        moment = _next(_MOMENT.unpack(raw)[0] if len(raw) == _MOMENT.size else None, now, seconds)
        os.pwrite(number, _MOMENT.pack(moment), 0)
    finally:
        os.close(number)
    return moment
