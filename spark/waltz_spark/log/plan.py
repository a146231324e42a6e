"""The division of a read into tasks. Pure.

A split is a range of ids of one partition, perhaps over several extents, and is read by one task. One extent is one split,
unless it is so small that starting a task would cost more than reading it: then neighbours are joined. Extents are cut only
if smaller or more splits were requested. The splits cover exactly the selected ids, each once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from waltz_spark.log.origin import Catalog, Extent, Origin, Span
from waltz_spark.log.selection import number_of
from waltzd.daemon.settings import parse_size
from waltzd.errors import BadArgument
from waltzd.format.record import OVERHEAD_BYTES, Run

MIN_PARTITIONS, MAX_RECORDS, SPLIT_BYTES = "minPartitions", "maxRecordsPerPartition", "splitBytes"
OPTIONS = (MIN_PARTITIONS, MAX_RECORDS, SPLIT_BYTES)
TASK_BYTES_MIN = 64 << 20
"""Bytes below which splits are joined: a task costs 60 to 100 ms, in which about this amount is read."""
SPLITS_MAX = 1_000_000
"""Limit of splits; the driver needs 3.4 KB of memory for each."""


@dataclass(frozen=True, kw_only=True)
class Sizing:
    splits_min: int = 1
    """Lowest number of splits, if there are enough records."""
    records_max: int | None = None
    bytes_max: int | None = None
    """Largest estimated size of a split; a single record may be larger."""
    bytes_joined: int = TASK_BYTES_MIN
    """Estimated size up to which neighbours are joined."""


@dataclass(frozen=True)
class Part:
    """The part of an extent that one task reads."""

    extent: Extent
    span: Span

    @property
    def bytes(self) -> int:
        """Estimated size: at least head and trailer of each record."""
        share = self.extent.bytes * self.span.count // max(1, self.extent.span.count)
        return max(share, OVERHEAD_BYTES * self.span.count)

    def cut(self, pieces: int) -> list[Part]:
        """Cut into pieces with nearly equal numbers of records."""
        count, first = self.span.count, self.span.first
        at = [first + count * number // pieces for number in range(pieces + 1)]
        return [Part(self.extent, Span(start, stop - 1)) for start, stop in pairwise(at)]


@dataclass(frozen=True)
class Split:
    """The parts that one task reads, in this order: ids of one partition without a gap."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert self.parts

    @property
    def partition(self) -> int:
        return self.parts[0].extent.partition

    @property
    def span(self) -> Span:
        return Span(self.parts[0].span.first, self.parts[-1].span.last)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def cut(self, pieces: int) -> list[Split]:
        """Cut into splits with nearly equal numbers of records."""
        whole = Part(self.parts[0].extent, self.span)
        return [Split(tuple(parts_of(piece.span, (part.extent for part in self.parts)))) for piece in whole.cut(pieces)]


def runs(origin: Origin, split: Split, *, batch_bytes: int) -> Iterator[Run]:
    """Yield the records of a split with times, groups and locks."""
    for part in split.parts:
        yield from origin.read(part.extent, part.span, batch_bytes=batch_bytes, with_locks=True)


def sizing_of(options: Mapping[str, str]) -> Sizing:
    """Parse the options about splits; names are in lower case."""

    def number(name: str) -> int | None:
        text = options.get(name.lower())
        return None if text is None else number_of(name, text)

    splits = number(MIN_PARTITIONS) or 1
    if splits > SPLITS_MAX:
        raise BadArgument(f"{MIN_PARTITIONS} is {splits}; {SPLITS_MAX} are the most that a driver can hold")
    text = options.get(SPLIT_BYTES.lower())
    return Sizing(
        splits_min=splits, records_max=number(MAX_RECORDS), bytes_max=None if text is None else size_of(SPLIT_BYTES, text)
    )


def size_of(name: str, text: str) -> int:
    """Parse a size above 0, as 64MiB or 67108864; raise `BadArgument` for anything else."""
    try:
        size = parse_size(text.strip())
    except ValueError as error:
        raise BadArgument(f"{name}: {error}") from error
    if size <= 0:
        raise BadArgument(f"{name} is {text!r}; it has to be above 0")
    return size


def plan(catalog: Catalog, spans: Mapping[int, Span], sizing: Sizing | None = None) -> list[Split]:
    """Return the splits, round-robin over the partitions, so that concurrent tasks read different partitions."""
    sizing = sizing or Sizing()
    extents: dict[int, list[Extent]] = {}
    for extent in catalog.extents:
        extents.setdefault(extent.partition, []).append(extent)
    splits: list[Split] = []
    for number, span in sorted(spans.items()):
        parts = parts_of(span, extents.get(number, ()))
        assert sum(part.span.count for part in parts) == span.count, f"no extent covers all of {span} of partition {number}"
        splits += _together(_apart(parts, sizing), sizing)
    if len(splits) > SPLITS_MAX:
        raise _too_many(len(splits))
    return _in_turn(_at_least(splits, sizing.splits_min))


def _too_many(splits: int) -> BadArgument:
    return BadArgument(
        f"{splits} splits are more than a driver can hold ({SPLITS_MAX})",
        not_done="nothing was read",
        next_step=f"ask for larger ones ({MAX_RECORDS}, {SPLIT_BYTES}), or read fewer ids at once",
    )


def parts_of(span: Span, extents: Iterable[Extent]) -> list[Part]:
    """Return the parts of consecutive extents that lie within a span."""
    found = [Part(extent, extent.span.cut(span)) for extent in extents]
    return [part for part in found if part.span.count]


def _apart(parts: Sequence[Part], sizing: Sizing) -> Iterator[Part]:
    """Cut parts that are too large."""
    for part in parts:
        by_bytes = -(-part.bytes // sizing.bytes_max) if sizing.bytes_max is not None else 1
        by_records = -(-part.span.count // sizing.records_max) if sizing.records_max is not None else 1
        pieces = min(part.span.count, max(by_bytes, by_records))
        if pieces > SPLITS_MAX:
            raise _too_many(pieces)
        yield from part.cut(pieces)


def _together(parts: Iterable[Part], sizing: Sizing) -> list[Split]:
    """Join neighbours that are too small for a task of their own, up to the limits."""
    found: list[Split] = []
    current: list[Part] = []
    size = records = 0
    for part in parts:
        fits = (
            size < sizing.bytes_joined
            and (sizing.bytes_max is None or size + part.bytes <= sizing.bytes_max)
            and (sizing.records_max is None or records + part.span.count <= sizing.records_max)
        )
        if current and not fits:
            found.append(Split(tuple(current)))
            current, size, records = [], 0, 0
        current.append(part)
        size, records = size + part.bytes, records + part.span.count
    if current:
        found.append(Split(tuple(current)))
    return found


def _at_least(splits: list[Split], wanted: int) -> list[Split]:
    """Cut the largest splits until there are at least `wanted`, as far as there are records."""
    missing = wanted - len(splits)
    if missing <= 0:
        return splits
    pieces = [1] * len(splits)
    largest: list[tuple[float, int]] = [
        (-split.bytes, number) for number, split in enumerate(splits) if split.span.count > 1
    ]
    heapq.heapify(largest)
    while missing and largest:
        _, number = heapq.heappop(largest)
        pieces[number] += 1
        missing -= 1
        if pieces[number] < splits[number].span.count:
            heapq.heappush(largest, (-splits[number].bytes / pieces[number], number))
    return [piece for split, count in zip(splits, pieces, strict=True) for piece in split.cut(count)]


def _in_turn(splits: Iterable[Split]) -> list[Split]:
    queues: dict[int, list[Split]] = {}
    for split in splits:
        queues.setdefault(split.partition, []).append(split)
    return [split for turn in zip_longest(*queues.values()) for split in turn if split is not None]
