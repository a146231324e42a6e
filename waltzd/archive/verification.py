"""What a store holds of an archive, and whether that is so: without a cluster, by the store alone.

The newest manifest of each partition counts, and everything that it names is looked for. What no manifest names is an
*orphan* where its ids are archived already: nothing will ever name it. What lies behind the last archived id is *pending*:
an upload that is under way, or was cut short and is gone on with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from waltzd.archive.archiving import PartitionArchive
from waltzd.archive.contents import highest_numbers, is_manifest, label_of
from waltzd.archive.manifest import LABEL, Chunk, Entry, Label, Manifest, sha256_of
from waltzd.archive.metadata import number_of
from waltzd.archive.piece import piece_of
from waltzd.archive.store import Listed, Store
from waltzd.archive.tail import tail_name, tail_of
from waltzd.errors import ArchiveDamaged, ForeignArchive, ObjectAbsent, UnfitSegment, UnknownVersion
from waltzd.format.layout import FileHeader
from waltzd.protocol.descriptions import ArchiveCheck, Archived

_OBJECT = re.compile(
    r"partition-(0|[1-9][0-9]{0,4})/(segment|chunk)/(?:[0-9]-)?([0-9]{19})-([0-9]{19})-[0-9a-f]{16}(?:\.json)?"
)
_TAIL = re.compile(r"partition-(0|[1-9][0-9]{0,4})/tail(\.json|/(?:0|[1-9][0-9]{0,2}))")
CHECK_PIECES = 32
"""Looked for at once, as uploads wait meanwhile."""
_WRONG = (ArchiveDamaged, ForeignArchive, ObjectAbsent, UnknownVersion)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """An object that is not what it has to be."""

    name: str
    partition: int | None = None
    """None where it is of no partition."""
    first: int | None = None
    last: int | None = None
    detail: str

    @staticmethod
    def of(entry: Entry, partition: int, detail: str) -> Flaw:
        return Flaw(name=entry.name(partition), partition=partition, first=entry.first, last=entry.last, detail=detail)


@dataclass(kw_only=True)
class Survey:
    label: Label
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """The newest of each partition that can be read."""
    pieces: dict[int, list[Entry]] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    orphans: list[Listed] = field(default_factory=list)
    pending: list[Listed] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)
    """Partitions that have one."""
    metadata: list[int] = field(default_factory=list)
    """Numbers of the objects that hold the documents of the cluster."""
    strange: list[Listed] = field(default_factory=list)
    """Objects that no archive has."""


def survey(store: Store) -> Survey:
    """All but the segments themselves. `ForeignArchive` where there is no archive."""
    listed = store.list("")  # before any manifest: what is written meanwhile is no orphan
    found = Survey(label=label_of(store, not_done="nothing was checked"))
    named: set[str] = {LABEL}
    for partition, number in sorted(highest_numbers(listed).items()):
        archive = PartitionArchive(store, found.label, partition)
        manifest = _newest(archive, partition, number, found.flaws)
        if manifest is not None:
            found.manifests[partition] = manifest
            found.pieces[partition] = list(_walk(archive, partition, manifest.entries, named, found.flaws))
    for one in listed:
        if tail := _TAIL.fullmatch(one.name):
            found.tails += [int(tail[1])] if tail[2] == ".json" else []
        elif saved := number_of(one.name):
            found.metadata.append(saved)
        elif one.name not in named and not is_manifest(one.name):
            _sort(one, found)
    return found


def _newest(archive: PartitionArchive, partition: int, number: int, flaws: list[Flaw]) -> Manifest | None:
    """From the highest one that is listed: up, as a list may lag, and down to one that is sound."""
    found: Manifest | None = None
    highest = number
    while number > 0 and found is None:
        try:
            found = archive.manifest_at(number)
        except _WRONG as error:
            flaws.append(Flaw(name=archive.name_at(number), partition=partition, detail=error.message))
        number -= 1
    while found is not None and found.number >= highest:
        try:
            following = archive.manifest_at(found.number + 1)
        except _WRONG as error:
            flaws.append(Flaw(name=archive.name_at(found.number + 1), partition=partition, detail=error.message))
            break
        if following is None:
            break
        found = following
    return found


def _walk(
    archive: PartitionArchive, partition: int, entries: tuple[Entry, ...], named: set[str], flaws: list[Flaw]
) -> Iterator[Entry]:
    for entry in entries:
        named.add(entry.name(partition))
        if entry.level == 0:
            yield entry
            continue
        try:
            chunk: Chunk = archive.chunk(entry)
        except _WRONG as error:
            flaws.append(Flaw.of(entry, partition, error.message))
            continue
        yield from _walk(archive, partition, chunk.entries, named, flaws)


def _sort(one: Listed, found: Survey) -> None:
    match = _OBJECT.fullmatch(one.name)
    if match is None:
        found.strange.append(one)
        return
    manifest = found.manifests.get(int(match[1]))
    is_behind = manifest is None or int(match[4]) > manifest.last
    # Where a chunk cannot be read, nobody knows what it names.
    is_unknown = any(flaw.partition == int(match[1]) for flaw in found.flaws)
    (found.pending if is_behind or is_unknown else found.orphans).append(one)


def check_from(store: Store, archive: PartitionArchive, known: Archived, first_id: int) -> ArchiveCheck:
    """Whether the store still has a few of the pieces that a manifest names, from an id on: by their names and sizes."""
    last_id = first_id - 1
    try:
        manifest = archive.manifest(known.number, known.sha256)
        for piece in islice(pieces_from(archive, manifest.entries, first_id), CHECK_PIECES):
            flaw = check_piece(store, archive.label, archive.partition, piece, is_quick=True)
            if flaw is not None:
                missing = f"{flaw.name}, with the ids {flaw.first} to {flaw.last}, {flaw.detail}"
                return ArchiveCheck(last_id=last_id, missing=missing)
            last_id = piece.last
    except _WRONG as error:
        return ArchiveCheck(last_id=last_id, missing=error.message)
    return ArchiveCheck(last_id=last_id)


def pieces_from(archive: PartitionArchive, entries: tuple[Entry, ...], first_id: int) -> Iterator[Entry]:
    """In order, from the one on that holds this id. Only chunks that lead to them are fetched."""
    for entry in entries:
        if entry.last >= first_id and entry.level == 0:
            yield entry
        elif entry.last >= first_id:
            yield from pieces_from(archive, archive.chunk(entry).entries, first_id)


def check_tail(store: Store, found: Survey, partition: int) -> Flaw | None:
    """Whether all that the tail of this partition counts is there, record for record."""
    archive = PartitionArchive(store, found.label, partition)
    try:
        _, _, parts = tail_of(archive, found.manifests.get(partition) or archive.manifest(0, ""))
        for part in parts:
            part.content()
    except _WRONG as error:
        return Flaw(name=tail_name(partition), partition=partition, detail=error.message)
    return None


def check_piece(store: Store, label: Label, partition: int, piece: Entry, *, is_quick: bool) -> Flaw | None:
    """Whether a segment is there, byte for byte and record for record; quickly: whether it is there."""
    name = piece.name(partition)
    try:
        if is_quick:
            size = store.head(name).size
            return None if size == piece.size else Flaw.of(piece, partition, f"has {size} bytes; it had {piece.size}")
        data = store.get_range(name, 0, piece.size + 1)
    except ObjectAbsent:
        return Flaw.of(piece, partition, "is not in the store")
    size = piece.size - piece.index_bytes
    expected = FileHeader(created_ms=0, key=label.cluster, partition=partition, first_id=piece.first)
    view = memoryview(data)
    try:
        again = piece_of(view[:size], view[size:], expected=expected, last_id=piece.last, path=name)
    except UnfitSegment as error:
        return Flaw.of(piece, partition, error.message.removeprefix(f"{name} "))
    except _WRONG as error:
        return Flaw.of(piece, partition, error.message)
    if len(data) != piece.size or sha256_of(data) != piece.sha256:
        return Flaw.of(
            piece, partition, f"its records are whole, and its index of {piece.index_bytes} bytes is not what it was"
        )
    return None if again == piece else Flaw.of(piece, partition, "holds other records than its manifest says")
