"""Where a log is read from: a live cluster with its archive, an archive alone, or directories of storages.

Each of them tells what there is (`catalog`) and gives it, as runs of whole records whose checksums were checked (`read`).
Everything above, the data source, the export, the verification, sees only this. An origin is a value: it is pickled and
sent to the tasks, and opens what it needs there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from waltzd.errors import OtherTimeline
from waltzd.format.record import Run
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST

BATCH_BYTES = 4 << 20
"""What to read at once. Smaller batches cost more for each (1 MiB: a fifth), larger ones leave the processor's caches."""


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
    """A stretch of one partition that lies in one place and is best read in one go: a segment, a file, a range of ids."""

    partition: int
    span: Span
    bytes: int
    """On the disk, as far as it is known; for weighing, not for allocating."""
    place: str
    """What only its origin understands: a path, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What there was to read at one moment. Only what is committed: a replica may hold more, which may yet be cut."""

    key: UUID
    """Of the cluster."""
    spans: Mapping[int, Span]
    """For each partition, the ids that can be read."""
    extents: tuple[Extent, ...]
    """Together they cover the spans, without overlap; in order of partition and id."""
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Of each partition whose log has forked, the identity of the timeline that is read."""

    def position(self, partition: int, id_: int) -> Position:
        """Return this id as a position of the timeline that is read."""
        return Position(id_, self.timelines.get(partition, FIRST))


class Origin(Protocol):
    def describe(self) -> str:
        """For people: what is read, in a few words."""
        ...

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        """Of these partitions, or of all."""
        ...

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        """The records of `span`, which lies within the extent, in order and without a gap, each run about so large. What is
        missing, damaged or not committed raises an error that names the partition and the ids. Locks are made only where
        they are asked for, times and groups always."""
        ...

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """The id of the first record in the catalog whose time is `time` (µs since 1970) or later; the one behind the last
        where there is none. Records of format 0 have no time, and lie in front of all that have one."""
        ...

    def check(self, partition: int, position: Position) -> None:
        """Raise `OtherTimeline` where the position, which is of another timeline than the log, is not on the log."""
        ...


def check_reached(
    origin: Origin, catalog: Catalog, reached: Mapping[int, Position], *, what: str, next_step: Callable[[int, int], str]
) -> None:
    """Raise `OtherTimeline` where a last id that was read is not on the log any more. A position at or below the fork is.

    Args:
        origin: Where the log is read from.
        catalog: What it has.
        reached: Last id that was read of each partition.
        what: Which remembers the ids, for the message.
        next_step: Makes the next step of a partition and of the last id that both timelines share.
    """
    for number, position in sorted(reached.items()):
        if number not in catalog.spans or position == EMPTY:
            continue
        if position.timeline == catalog.position(number, position).timeline:
            continue
        try:
            origin.check(number, position)
        except OtherTimeline as error:
            fork = error.number("fork")
            message = f"{what} has ids up to {position} of partition {number} that are not on the log: {error.message}"
            raise OtherTimeline(
                message, next_step=next_step(number, EMPTY if fork is None else fork), **error.facts
            ) from error
