"""Manifests: the objects that name everything that the archive holds of a partition. Pure.

A manifest is a numbered object that is created once and never changed; the newest one counts. It names everything that the
archive has of one partition, in the order of ids and without a gap: *pieces*, which are sealed segments, and *chunks*,
which are objects that name 64 pieces or 64 smaller chunks. So an upload rewrites few names, however long the log is. The
newest manifest proves every byte below it: each entry carries the SHA-256 of its object and the CRC-32 of its records.
These checksums combine to that of the whole partition, which is equal to the checksum of an export of the same ids.

    <store>/archive.json                                                      the label: which archive of which cluster
    <store>/partition-<n>/segment/<first>-<last>-<hash>                       a segment as on the disk, its index behind it
    <store>/partition-<n>/key/<first>-<last>-<hash>                           the key index of a segment
    <store>/partition-<n>/chunk/<level>-<first>-<last>-<hash>.json            64 entries of the level below
    <store>/partition-<n>/manifest/<number>.json                              from 1 on
    <store>/partition-<n>/tail/<slot>                                         unsealed records, see `unsealed`
    <store>/partition-<n>/tail.json                                           which slots count
    <store>/partition-<n>/timeline/<identity>/begin.json                      segments that a later timeline takes over
    <store>/partition-<n>/timeline/<identity>/manifest/<number>.json          its manifests from there on
    <store>/partition-<n>/timeline/<identity>/tail.json, tail/<slot>          its unsealed records
    <store>/metadata/<number>.json                                            the documents of the cluster, see `metadata`

The first timeline of a log has its manifests and its unsealed records in the folder of the partition, each later timeline
in a folder of its own (`waltzd.protocol.timelines`). Segments and chunks are named by their content, so timelines share
them. `begin.json` is a manifest of the whole segments up to the fork, which the timeline takes over from its ancestors. All
manifests of a later timeline, and its `tail.json`, name the whole lineage, so the store alone describes the tree.

A manifest or chunk that names no key index has the bytes of version 1, from before key indexes were archived. Their size
and SHA-256 are in the manifest: otherwise a forged index could hide transactions from a history.

Other objects in the store are no part of the archive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self, TypeAlias
from uuid import UUID

from waltzd.errors.operations import ArchiveDamaged
from waltzd.format.checksum import joined_crc
from waltzd.protocol.document import (
    ADDED,
    IS_SHA256,
    ROW,
    Crc,
    DigestFormat,
    Document,
    Rule,
    Sha256,
    read,
    sha256_of,
    whole,
)
from waltzd.protocol.timelines import FIRST, Lineage, Timeline, lineage_mistake

TEXT_FORMAT = DigestFormat(name="waltz-archive", version=2, thing="an object of an archive", damage=ArchiveDamaged)
LABEL = "archive.json"
FAN_OUT = 64
LEVEL_MAX = 8
MANIFEST_BYTES_MAX = 256 << 10
"""Limit of the size of a manifest or chunk."""
MaybeSha256: TypeAlias = Annotated[
    str, Rule(f"{IS_SHA256.what}, or nothing", lambda value: value == "" or IS_SHA256.holds(value))
]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entry(Document):
    """The entry of a piece or a chunk: an object that holds the ids from `first` to `last`."""

    level: Annotated[int, whole(0, LEVEL_MAX)]
    """0 for a piece, 1 for a chunk of pieces, and so on."""
    first: int
    last: int
    record_bytes: int
    """Bytes of the records alone, without headers, batch heads, locks and footers."""
    segments: int
    stored_bytes: int
    """Bytes of all segments with their indexes and key indexes."""
    size: int
    """Bytes of the object."""
    index_bytes: int
    """Bytes of the index, which is the end of the object of a piece."""
    crc: Crc
    """CRC-32 of the records."""
    sha256: Sha256
    """SHA-256 of the object."""
    key_bytes: Annotated[int, whole(0)] = field(default=0, metadata={ADDED: True})
    """Bytes of the key index of a piece, which is an object of its own; 0 for an entry without one."""
    key_sha256: MaybeSha256 = field(default="", metadata={ADDED: True})
    """SHA-256 of the key index; "" for an entry without one."""

    def mistake(self) -> tuple[str, str] | None:
        if self.first > self.last:
            return "last", f"must be {self.first} or above, not {self.last}"
        if self.index_bytes > self.size:
            return "index_bytes", f"must be at most {self.size}, not {self.index_bytes}"
        if (self.key_bytes > 0) != (self.key_sha256 != "") or (self.level > 0 and self.key_bytes > 0):
            return "key_bytes", f"does not agree with the level and the hash, {self.level} and {self.key_sha256!r}"
        return None

    def name(self, partition: int) -> str:
        ids = f"{self.first:019d}-{self.last:019d}-{self.sha256[:16]}"
        if self.level == 0:
            return f"{folder_of(partition)}/segment/{ids}"
        return f"{folder_of(partition)}/chunk/{self.level}-{ids}.json"

    def key_name(self, partition: int) -> str:
        """Return the name of the key index of a piece; the entry must have one."""
        return f"{folder_of(partition)}/key/{self.first:019d}-{self.last:019d}-{self.key_sha256[:16]}"

    def names(self, partition: int) -> tuple[str, ...]:
        """Return the names of all objects of the entry."""
        return (self.name(partition), self.key_name(partition)) if self.key_bytes else (self.name(partition),)


COLUMNS = tuple(column.name for column in fields(Entry))
"""Fields of an entry, in the order in which manifests and chunks have them."""
_OLD_COLUMNS = tuple(column.name for column in fields(Entry) if ADDED not in column.metadata)
"""Columns of a table of which no entry has a key index."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """Totals of several entries."""

    first: int = 0
    last: int = -1
    record_bytes: int = 0
    crc: int = 0
    segments: int = 0
    stored_bytes: int = 0

    def plus(self, entry: Entry) -> Total:
        assert self.last < 0 or entry.first == self.last + 1
        return Total(
            first=entry.first if self.last < 0 else self.first,
            last=entry.last,
            record_bytes=self.record_bytes + entry.record_bytes,
            crc=joined_crc(self.crc, entry.crc, entry.record_bytes),
            segments=self.segments + entry.segments,
            stored_bytes=self.stored_bytes + entry.stored_bytes,
        )


def total_of(entries: Sequence[Entry]) -> Total:
    return reduce(Total.plus, entries, Total())


@dataclass(frozen=True, kw_only=True)
class ArchiveObject(Document):
    """An object of the archive in JSON: its fields in their order, and totals for people."""

    kind: ClassVar[str]
    """The member `kind` of the text."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the last field; empty if that is no table."""
        return ()

    def sums(self) -> Mapping[str, Any]:
        """Return members that stand in front of the table."""
        return {}

    @cached_property
    def text(self) -> bytes:
        value: dict[str, Any] = {"kind": self.kind}
        for one in fields(self):
            part = getattr(self, one.name)
            if ADDED in one.metadata and not getattr(self, "timelines", ()):
                continue  # logs that never forked are written as before timelines existed
            if isinstance(part, tuple):
                part = [list(_members(row).values()) for row in part]
            elif isinstance(part, Mapping):
                part = {str(key): part[key] for key in sorted(part)}
            value[one.name] = str(part) if isinstance(part, UUID) else part
        if self.columns:
            name, rows = value.popitem()
            rows = [row[: len(self.columns)] for row in rows]
            value |= {**self.sums(), "columns": list(self.columns), name: rows}
        value = TEXT_FORMAT.with_digest(value, version=2 if self.columns == COLUMNS else 1)
        # A line for each row, for people.
        lines = [f"{json.dumps(name)}: {_format_part(part)}" for name, part in value.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def decode(cls, text: bytes, where: str) -> Self:
        """Return the object of this text. Raise `ArchiveDamaged` for a text that is not exactly as it was written."""
        value = TEXT_FORMAT.parse(text, where)
        if value.get("kind") != cls.kind:
            raise ArchiveDamaged(f"{where} is no {cls.kind}")
        # The sums are right if the same text is written again.
        members = {one.name: value[one.name] for one in fields(cls) if one.name in value}
        found = read(cls, members, where, ArchiveDamaged)
        if found.text != text:
            raise ArchiveDamaged(f"{where} does not agree with itself, or was written by something else")
        return found


@dataclass(frozen=True, kw_only=True)
class Label(ArchiveObject):
    """The first object of an archive. Without this label, a store is not the archive that is wanted."""

    kind = "label"
    archive: UUID
    cluster: UUID


@dataclass(frozen=True, kw_only=True)
class Chunk(ArchiveObject):
    """Entries of one level in an object of their own."""

    kind = "chunk"
    partition: int
    entries: tuple[Annotated[Entry, ROW], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return _columns_of(self.entries)

    def mistake(self) -> tuple[str, str] | None:
        if len({entry.level for entry in self.entries}) != 1:
            return "entries", "must be of one level"
        return _gap(self.entries)

    def entry(self) -> Entry:
        """Return the entry that names this chunk."""
        text, total = self.text, total_of(self.entries)
        return Entry(
            level=self.entries[0].level + 1, first=total.first, last=total.last, record_bytes=total.record_bytes,
            crc=total.crc, segments=total.segments, stored_bytes=total.stored_bytes, size=len(text), index_bytes=0,
            sha256=sha256_of(text),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest(ArchiveObject):
    kind = "manifest"
    archive: UUID
    cluster: UUID
    partition: int
    shared: int = field(default=0, metadata={ADDED: True})
    """Number of the manifest in `begin.json`, which is the number of segments that this timeline takes over from its
    ancestors. 0 for the first timeline."""
    timelines: tuple[Annotated[Timeline, ROW], ...] = field(default=(), metadata={ADDED: True})
    """Timelines of the log after the first one. The manifest belongs to the last of them."""
    number: int = 0
    """Number from 1 on; 0 for the empty manifest, which is not stored."""
    before: MaybeSha256 = ""
    """SHA-256 of the manifest before; "" for the first one."""
    entries: tuple[Annotated[Entry, ROW], ...] = ()
    """Entries in order of ids, without a gap. Levels never rise: large chunks come first."""

    def mistake(self) -> tuple[str, str] | None:
        if (mistake := lineage_mistake(self.timelines)) is not None:
            return "timelines", mistake
        if not self.entries and not self.is_begin:
            return "entries", "must not be empty"
        if self.shared > self.number or (self.is_begin and self.last > self.lineage.fork):
            return "shared", "is more than the timeline shares with its ancestors"
        return _gap(self.entries)

    @property
    def columns(self) -> tuple[str, ...]:
        return _columns_of(self.entries)

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.timelines)

    @property
    def timeline(self) -> UUID:
        return self.lineage.current

    @property
    def is_begin(self) -> bool:
        """True if this is the manifest in the `begin.json` of a later timeline."""
        return self.timeline != FIRST and self.number == self.shared

    @cached_property
    def total(self) -> Total:
        return total_of(self.entries)

    @property
    def last(self) -> int:
        return self.entries[-1].last if self.entries else -1

    @property
    def name(self) -> str:
        if self.is_begin:
            return begin_name(self.partition, self.timeline)
        return manifest_name(self.partition, self.number, self.timeline)

    def sums(self) -> Mapping[str, Any]:
        return _members(self.total)

    @cached_property
    def sha256(self) -> str:
        return sha256_of(self.text)

    def begun(self, lineage: Lineage, fetch: Callable[[Entry], Chunk]) -> Manifest:
        """Return the manifest with which the newest timeline of `lineage` begins: the segments here that end at or below
        the last id that both timelines share. `fetch` returns the chunk that an entry names."""
        shared = lineage.shared_to(self.timeline)
        entries = self.entries if shared is None else tuple(_up_to(self.entries, shared, fetch))
        count = total_of(entries).segments
        return replace(self, number=count, before="", entries=entries, timelines=lineage.later, shared=count)

    def extended(self, piece: Entry) -> tuple[Manifest, tuple[Chunk, ...]]:
        """Return the next manifest, with this piece as its last, and the new chunks, which have to be stored before it."""
        assert piece.level == 0
        assert piece.first == self.last + 1, f"{piece.first} follows {self.last}"
        entries, chunks = [*self.entries, piece], []
        while len(entries) >= FAN_OUT and entries[-FAN_OUT].level == entries[-1].level:
            chunk = Chunk(partition=self.partition, entries=tuple(entries[-FAN_OUT:]))
            chunks.append(chunk)
            entries[-FAN_OUT:] = [chunk.entry()]
        return replace(self, number=self.number + 1, before=self._hash, entries=tuple(entries)), tuple(chunks)

    @property
    def _hash(self) -> str:
        """SHA-256 that the next manifest states as `before`; "" for the empty manifest."""
        return self.sha256 if self.number or self.is_begin else ""

    def follows(self, before: Manifest) -> bool:
        """Return whether this can be the manifest that followed `before`."""
        is_next = self.number == before.number + 1 and self.before == before._hash
        is_same = self._place == before._place
        return is_next and is_same and self.last > before.last

    @property
    def _place(self) -> tuple[object, ...]:
        return self.archive, self.cluster, self.partition, self.lineage, self.shared


def _up_to(entries: Sequence[Entry], last_id: int, fetch: Callable[[Entry], Chunk]) -> Iterator[Entry]:
    """Yield the entries up to an id, with a chunk that goes beyond it replaced by its own entries. These are the entries of
    the manifest that ended there."""
    for entry in entries:
        if entry.last <= last_id:
            yield entry
        elif entry.first <= last_id and entry.level:
            yield from _up_to(fetch(entry).entries, last_id, fetch)


def folder_of(partition: int, timeline: UUID = FIRST) -> str:
    folder = f"partition-{partition}"
    return folder if timeline == FIRST else f"{folder}/timeline/{timeline}"


def manifest_name(partition: int, number: int, timeline: UUID = FIRST) -> str:
    return f"{folder_of(partition, timeline)}/manifest/{number:010d}.json"


def begin_name(partition: int, timeline: UUID) -> str:
    return f"{folder_of(partition, timeline)}/begin.json"


# -- as text -----------------------------------------------------------------------------------------------------------


def _members(value: Any) -> dict[str, Any]:
    """Return the fields of an entry, a slot, a timeline or a total as they are written."""
    found = {one.name: getattr(value, one.name) for one in fields(value)}
    if "crc" in found:
        found["crc"] = f"{found['crc']:08x}"
    return {name: str(part) if isinstance(part, UUID) else part for name, part in found.items()}


def _format_part(part: Any) -> str:
    if isinstance(part, list) and part and isinstance(part[0], list):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in part) + "\n]"
    return json.dumps(part)


def _columns_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    return COLUMNS if any(entry.key_bytes for entry in entries) else _OLD_COLUMNS


def _gap(entries: Sequence[Entry]) -> tuple[str, str] | None:
    for at, (one, behind) in enumerate(pairwise(entries), 1):
        if behind.first != one.last + 1 or behind.level > one.level:
            return f"entries[{at}]", f"begins at id {behind.first} and does not follow the one that ends at id {one.last}"
    return None


def opened(entry: Entry, text: bytes, partition: int, where: str) -> Chunk:
    """Decode the chunk that an entry names; raise `ArchiveDamaged` if it is not that chunk."""
    if sha256_of(text) != entry.sha256:
        raise ArchiveDamaged(f"{where} has other bytes than the manifest states")
    found = Chunk.decode(text, where)
    if found.partition != partition or found.entry() != entry:
        raise ArchiveDamaged(f"{where} holds other ids than the manifest states")
    return found


def pieces_of(entries: Sequence[Entry], fetch: Callable[[Entry], Chunk]) -> Iterator[Entry]:
    """Yield all pieces below these entries, in order. `fetch` returns the chunk that an entry names."""
    for entry in entries:
        if entry.level == 0:
            yield entry
        else:
            yield from pieces_of(fetch(entry).entries, fetch)
