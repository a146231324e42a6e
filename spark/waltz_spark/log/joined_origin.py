"""A running cluster with its archive as one origin: archived segments come from the store, later records from the cluster.

Reading old ids costs the cluster nothing, and ids that have left its storages are available. The cluster determines the end
of each partition: ids that the archive has above it are not returned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from waltz_spark.log.archive_segments import ArchiveSegments, Contents, is_piece
from waltz_spark.log.live_origin import LiveOrigin
from waltz_spark.log.origin import Catalog, Extent, Span
from waltzd.errors import OtherTimeline
from waltzd.errors.operations import ForeignArchive
from waltzd.format.layout import FileHeader
from waltzd.format.record import Run
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST


@dataclass(frozen=True, kw_only=True)
class JoinedOrigin:
    archive: ArchiveSegments
    live: LiveOrigin

    def describe(self) -> str:
        return f"{self.live.describe()} and {self.archive.describe()}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        live = self.live.catalog(partitions)
        archived = self.archive.contents(live.spans.keys())
        if archived.key != live.key:
            raise ForeignArchive(
                f"{self.archive.describe()} is of the cluster {archived.key}; {self.live.describe()} is {live.key}",
                not_done="nothing was read",
                next_step="name the archive of this cluster, as its storages do in `archive`",
            )
        shared = {number: self._shared(live, archived, number) for number in archived.pieces}
        pieces = [part for extent in archived.extents() if (part := _cut(extent, shared[extent.partition])) is not None]
        return replace(live, extents=tuple(_joined(live, pieces)))

    def _shared(self, live: Catalog, archived: Contents, partition: int) -> Span:
        """Return the ids of the archive that are on the log of the cluster; the archive may end with an older timeline."""
        pieces = archived.pieces[partition]
        if not pieces:
            return Span(0, EMPTY)
        last = Position(pieces[-1].last, archived.timelines.get(partition, FIRST))
        if last.timeline != live.position(partition, last).timeline:
            try:
                self.live.check(partition, last)
            except OtherTimeline as error:
                fork = error.number("fork")
                return Span(pieces[0].first, EMPTY if fork is None else fork)
        return Span(pieces[0].first, last)

    def check(self, partition: int, position: Position, *, route: str = "") -> None:
        self.live.check(partition, position, route=route)

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        origin = self.archive if is_piece(extent) else self.live
        yield from origin.read(extent, span, batch_bytes=batch_bytes, with_locks=with_locks)

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """Search the archive first, and then the cluster for later times."""
        own = [extent for extent in catalog.extents if extent.partition == partition]
        archived = [extent for extent in own if is_piece(extent)]
        rest = [extent for extent in own if not is_piece(extent)]
        if archived:
            last = archived[-1].span.last
            found = self.archive.first_at(_of(catalog, partition, archived), partition, time)
            if found <= last or not rest:
                return min(found, last + 1)
        return self.live.first_at(_of(catalog, partition, rest), partition, time)

    def marked(self, catalog: Catalog, spans: Mapping[int, Span], lock: int) -> dict[int, list[Span]]:
        """Ask the cluster, whose servers look into the archive too; ids that they cannot answer for are read."""
        return self.live.marked(catalog, spans, lock)

    def header(self, extent: Extent) -> FileHeader | None:
        """Return the header of an archived segment; None for extents of the cluster."""
        return self.archive.header(extent) if is_piece(extent) else None


def _joined(live: Catalog, archived: Iterable[Extent]) -> Iterator[Extent]:
    """Yield extents in order of partition and id: archived segments, then the later ids of the cluster."""
    pieces, rest = _by_partition(archived), _by_partition(live.extents)
    for number, span in live.spans.items():
        own = pieces.get(number, [])
        behind = Span(own[-1].span.last + 1 if own else span.first, span.last)
        yield from (part for extent in own if (part := _cut(extent, span)) is not None)
        yield from (part for extent in rest.get(number, []) if (part := _cut(extent, behind)) is not None)


def _by_partition(extents: Iterable[Extent]) -> dict[int, list[Extent]]:
    found: dict[int, list[Extent]] = {}
    for extent in extents:
        found.setdefault(extent.partition, []).append(extent)
    return found


def _of(catalog: Catalog, partition: int, extents: Sequence[Extent]) -> Catalog:
    """Return the catalog with only these extents of a partition."""
    span = Span(extents[0].span.first, extents[-1].span.last) if extents else catalog.spans[partition]
    return replace(catalog, spans={partition: span}, extents=tuple(extents))


def _cut(extent: Extent, span: Span) -> Extent | None:
    part = extent.span.cut(span)
    return replace(extent, span=part, bytes=extent.bytes * part.count // extent.span.count) if part.count else None
