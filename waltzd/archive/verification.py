"""Checks of an archive by its store alone, without a cluster.

The newest manifest of each partition counts, and everything that it names is checked. An object that no manifest names is
an *orphan* if its ids are archived already: no manifest will ever name it. If its ids follow the last archived id it is
*pending*: its upload is running, or was interrupted and will be continued."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from uuid import UUID

from waltzd.archive.archived_segment import segment_entry, unkeyed
from waltzd.archive.listing import (
    TIMELINE,
    Branch,
    branch_of,
    contradictions,
    highest_numbers,
    is_manifest,
    label_of,
    number_of,
    rank,
)
from waltzd.archive.manifest import LABEL, Chunk, Entry, Label, Manifest, begin_name, folder_of
from waltzd.archive.store import Listed, Store
from waltzd.archive.unsealed import read_unsealed, unsealed_index_name
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import (
    ArchiveDamaged,
    ForeignArchive,
    HeaderDamaged,
    ObjectAbsent,
    UnfitSegment,
    UnknownVersion,
)
from waltzd.format.footer import NO_HASH, Footer
from waltzd.format.layout import FileHeader
from waltzd.protocol.descriptions import ArchiveCheck, Archived
from waltzd.protocol.document import sha256_of
from waltzd.protocol.timelines import FIRST

_OBJECT = re.compile(
    r"partition-(0|[1-9][0-9]{0,4})/(segment|key|chunk)/(?:[0-9]-)?([0-9]{19})-([0-9]{19})-[0-9a-f]{16}(?:\.json)?"
)
_TAIL = re.compile(rf"partition-(0|[1-9][0-9]{{0,4}})/{TIMELINE}tail(\.json|/(?:0|[1-9][0-9]{{0,2}}))")
CHECK_PIECES = 32
"""Number of segments that one check looks for, because uploads wait meanwhile."""
_WRONG = (ArchiveDamaged, ForeignArchive, ObjectAbsent, UnknownVersion)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """An object that is missing or wrong."""

    name: str
    partition: int | None = None
    """Partition of the object; None if it belongs to none."""
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
    """Newest readable manifest of the current timeline of each partition."""
    older: list[Manifest] = field(default_factory=list)
    """Newest readable manifests of all earlier timelines."""
    pieces: dict[int, list[Entry]] = field(default_factory=dict)
    """Segments that any timeline of the partition names, each once, in order of ids."""
    flaws: list[Flaw] = field(default_factory=list)
    orphans: list[Listed] = field(default_factory=list)
    pending: list[Listed] = field(default_factory=list)
    unsealed: list[Branch] = field(default_factory=list)
    """Timelines that have a `tail.json`."""
    metadata: list[int] = field(default_factory=list)
    """Numbers of the objects with cluster metadata."""
    strange: list[Listed] = field(default_factory=list)
    """Objects whose name is no name of an archive object."""


def survey(store: Store) -> Survey:
    """Read all objects except segments and slots. Raise `ForeignArchive` if there is no archive."""
    listed = store.list("")  # before any manifest is read: later objects are no orphans
    found = Survey(label=label_of(store, not_done="nothing was checked"))
    named: set[str] = {LABEL}
    for (partition, timeline), number in sorted(highest_numbers(listed).items()):
        archive = PartitionArchive(store, found.label, partition, timeline)
        manifest = _newest(archive, partition, number, found.flaws)
        if manifest is None:
            continue
        before = found.manifests.get(partition, manifest)
        older, found.manifests[partition] = sorted((before, manifest), key=rank)
        found.older += [older] if before is not manifest else []
        pieces = [*found.pieces.get(partition, ()), *_walk(archive, partition, manifest.entries, named, found.flaws)]
        found.pieces[partition] = sorted(set(pieces), key=lambda piece: (piece.first, piece.sha256))
    for other, detail in contradictions(sorted((*found.older, *found.manifests.values()), key=rank)):
        found.flaws.append(Flaw(name=folder_of(other.partition, other.timeline), partition=other.partition, detail=detail))
    for one in listed:
        if tail := _TAIL.fullmatch(one.name):
            found.unsealed += [branch_of(tail)] if tail[3] == ".json" else []
        elif saved := number_of(one.name):
            found.metadata.append(saved)
        elif one.name not in named and not is_manifest(one.name):
            _sort(one, found)
    return found


def _newest(archive: PartitionArchive, partition: int, number: int, flaws: list[Flaw]) -> Manifest | None:
    """Return the newest sound manifest: from the highest listed number upwards, as a list may lag, else downwards."""
    found: Manifest | None = None
    highest = number
    if archive.timeline != FIRST:
        try:
            found = archive.start()
        except _WRONG as error:
            flaws.append(Flaw(name=begin_name(partition, archive.timeline), partition=partition, detail=error.message))
            return None
        if number == 0:
            return found
        found = None
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
        named.update(entry.names(partition))
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
    # An earlier timeline may have had ids that the current one only now writes and uploads.
    current = found.manifests.get(int(match[1]))
    is_behind = current is None or int(match[4]) > current.last
    # If a chunk cannot be read, it is unknown what it names.
    is_unknown = any(flaw.partition == int(match[1]) for flaw in found.flaws)
    (found.pending if is_behind or is_unknown else found.orphans).append(one)


def chain_flaws(archive: PartitionArchive, pieces: Sequence[Entry]) -> Iterator[Flaw]:
    """Yield the pieces whose footer does not name the footer of the piece in front. Unreadable pieces are skipped: another
    check reports them."""
    front: Footer | None = None
    before: Entry | None = None
    for piece in pieces:
        try:
            footer = archive.footer(piece)
        except (*_WRONG, HeaderDamaged):
            before = None
            continue
        named = NO_HASH if front is None else front.hash
        if footer is not None and footer.before != named and (before is not None or piece.first == 0):
            where = "nothing" if before is None else before.name(archive.partition)
            yield Flaw.of(
                piece, archive.partition, f"does not continue {where}: its footer names another footer in front of it"
            )
        front, before = footer, piece


def branch_flaws(store: Store, label: Label, manifest: Manifest) -> list[Flaw]:
    """Return what is wrong with the chain of footers of one timeline. Unreadable segments are skipped."""
    archive = PartitionArchive(store, label, manifest.partition, manifest.timeline)
    pieces = list(_walk(archive, manifest.partition, manifest.entries, set(), []))
    return list(chain_flaws(archive, pieces))


def check_from(store: Store, archive: PartitionArchive, known: Archived, first_id: int) -> ArchiveCheck:
    """Check by name and size whether the store still has the next few pieces of a manifest, from an id on."""
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
    """Yield the pieces in order, from the one that holds `first_id` on. Chunks before it are not fetched."""
    for entry in entries:
        if entry.last >= first_id and entry.level == 0:
            yield entry
        elif entry.last >= first_id:
            yield from pieces_from(archive, archive.chunk(entry).entries, first_id)


def check_unsealed(store: Store, found: Survey, partition: int, timeline: UUID = FIRST) -> Flaw | None:
    """Check the unsealed records of a timeline, record by record; return what is wrong, or None."""
    archive = PartitionArchive(store, found.label, partition, timeline)
    known = [one for one in (found.manifests.get(partition), *found.older) if one is not None]
    try:
        newest = next((one for one in known if (one.partition, one.timeline) == (partition, timeline)), None)
        _, _, parts = read_unsealed(archive, newest or archive.start())
        for part in parts:
            part.content()
    except _WRONG as error:
        return Flaw(name=unsealed_index_name(partition, timeline), partition=partition, detail=error.message)
    return None


def check_piece(store: Store, label: Label, partition: int, piece: Entry, *, is_quick: bool) -> Flaw | None:
    """Check a segment byte by byte and record by record; return what is wrong, or None. `is_quick`: compare only its
    size."""
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
        again = segment_entry(view[:size], view[size:], expected=expected, last_id=piece.last, path=name)
    except UnfitSegment as error:
        return Flaw.of(piece, partition, error.message.removeprefix(f"{name} "))
    except _WRONG as error:
        return Flaw.of(piece, partition, error.message)
    if len(data) != piece.size or sha256_of(data) != piece.sha256:
        return Flaw.of(
            piece, partition, f"has sound records, and its index of {piece.index_bytes} bytes differs from the archived one"
        )
    return None if again == unkeyed(piece) else Flaw.of(piece, partition, "holds other records than its manifest states")


def check_key(store: Store, partition: int, piece: Entry, *, is_quick: bool) -> Flaw | None:
    """Check the key index of a segment, if it has one; return what is wrong, or None. `is_quick`: compare only its size."""
    if not piece.key_bytes:
        return None
    name = piece.key_name(partition)
    detail = "is not in the store"
    with suppress(ObjectAbsent):
        data = b"" if is_quick else store.get_range(name, 0, piece.key_bytes + 1)
        size = store.head(name).size if is_quick else len(data)
        if size == piece.key_bytes and (is_quick or sha256_of(data) == piece.key_sha256):
            return None
        detail = f"has {size} bytes; it had {piece.key_bytes}"
        if size == piece.key_bytes:
            detail = "has other bytes than its manifest states"
    return Flaw(name=name, partition=partition, first=piece.first, last=piece.last, detail=detail)
