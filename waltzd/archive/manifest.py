"""What an archive of a partition consists of, and what proves it. Pure.

A manifest is an object with a number, made where none of that number was, and never changed; the newest counts. It names
all that the archive has of one partition, in the order of ids and without a gap: *pieces*, which are sealed segments, and
*chunks*, which are objects that name 64 pieces, or 64 smaller chunks. So an upload writes few names again, however long the
log is, and the newest manifest proves every byte below it: each entry carries the SHA-256 of its object, and the CRC-32 of
its records, which joins to that of the whole partition, the same as that of an export of these ids.

    <store>/archive.json                                                      the label: which archive of which cluster
    <store>/partition-<n>/segment/<first>-<last>-<hash>                       a segment as on the disk, its index behind it
    <store>/partition-<n>/chunk/<level>-<first>-<last>-<hash>.json            64 entries of the level below
    <store>/partition-<n>/manifest/<number>.json                              from 1 on
    <store>/partition-<n>/tail/<slot>                                         what no segment above has yet, see `tail`
    <store>/partition-<n>/tail.json                                           which slots count
    <store>/metadata/<number>.json                                            the documents of the cluster, see `metadata`

What lies there besides is no part of the archive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, Protocol, TypeVar
from uuid import UUID

from waltzd.disk.seam import Buffer
from waltzd.errors import ArchiveDamaged, UnknownVersion
from waltzd.format.checksum import joined_crc
from waltzd.format.layout import ID_MAX

MARK, VERSION = "waltz-archive", 1
LABEL = "archive.json"
FAN_OUT = 64
LEVEL_MAX = 8
MANIFEST_BYTES_MAX = 256 << 10
"""More than the largest manifest or chunk has."""
_HASH_DIGITS = 64


def sha256_of(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A piece, or a chunk: an object that holds the ids from a first to a last one."""

    level: int
    """0: a piece."""
    first: int
    last: int
    record_bytes: int
    """Of the records, without what stands around them."""
    crc: int
    """CRC-32 of these bytes."""
    segments: int
    stored_bytes: int
    """Of all segments with their indexes."""
    size: int
    """Of the object."""
    index_bytes: int
    """How many at the end of a piece are its index."""
    sha256: str
    """Of the object."""

    def name(self, partition: int) -> str:
        ids = f"{self.first:019d}-{self.last:019d}-{self.sha256[:16]}"
        if self.level == 0:
            return f"{folder_of(partition)}/segment/{ids}"
        return f"{folder_of(partition)}/chunk/{self.level}-{ids}.json"

    def row(self) -> list[Any]:
        return [getattr(self, name) for name in COLUMNS[:-2]] + [f"{self.crc:08x}", self.sha256]


COLUMNS = ("level", "first", "last", "record_bytes", "segments", "stored_bytes", "size", "index_bytes", "crc", "sha256")
"""Of an entry, as they stand in manifests and chunks."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """What entries hold together."""

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
class Label:
    """The first object of an archive: a store that has none, or another one, is not the archive that was meant."""

    archive: UUID
    cluster: UUID

    @cached_property
    def text(self) -> bytes:
        return sealed({"kind": "label", "archive": str(self.archive), "cluster": str(self.cluster)})

    @staticmethod
    def decode(text: bytes, where: str) -> Label:
        value = unsealed(text, where, "label")
        with strictly(where):
            found = Label(archive=UUID(value["archive"]), cluster=UUID(value["cluster"]))
        return same(found, text, where)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Entries of one level, in an object of their own."""

    partition: int
    entries: tuple[Entry, ...]

    @cached_property
    def text(self) -> bytes:
        return sealed({"kind": "chunk", "partition": self.partition, **_table(self.entries)})

    @staticmethod
    def decode(text: bytes, where: str) -> Chunk:
        value = unsealed(text, where, "chunk")
        with strictly(where):
            found = Chunk(partition=whole_number(value["partition"]), entries=_entries(value["entries"]))
            if len({entry.level for entry in found.entries}) != 1:
                raise ValueError("its entries are not of one level")
        return same(found, text, where)

    def entry(self) -> Entry:
        """What names this chunk."""
        text, total = self.text, total_of(self.entries)
        return Entry(
            level=self.entries[0].level + 1, first=total.first, last=total.last, record_bytes=total.record_bytes,
            crc=total.crc, segments=total.segments, stored_bytes=total.stored_bytes, size=len(text), index_bytes=0,
            sha256=sha256_of(text),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    archive: UUID
    cluster: UUID
    partition: int
    number: int = 0
    """0 is the empty one, which is in no store."""
    before: str = ""
    """SHA-256 of the manifest before."""
    entries: tuple[Entry, ...] = field(default=())
    """Large chunks first: levels never rise, and ids follow each other."""

    @cached_property
    def total(self) -> Total:
        return total_of(self.entries)

    @property
    def last(self) -> int:
        return self.entries[-1].last if self.entries else -1

    @property
    def name(self) -> str:
        return manifest_name(self.partition, self.number)

    @cached_property
    def text(self) -> bytes:
        total = self.total
        return sealed(
            {
                "kind": "manifest", "archive": str(self.archive), "cluster": str(self.cluster),
                "partition": self.partition, "number": self.number, "before": self.before,
                "first": total.first, "last": total.last, "record_bytes": total.record_bytes,
                "crc": f"{total.crc:08x}", "segments": total.segments, "stored_bytes": total.stored_bytes,
                **_table(self.entries),
            }
        )  # fmt: skip

    @cached_property
    def sha256(self) -> str:
        return sha256_of(self.text)

    @staticmethod
    def decode(text: bytes, where: str) -> Manifest:
        """Strict: whatever is not exactly as it was written is damage."""
        value = unsealed(text, where, "manifest")
        with strictly(where):
            found = Manifest(
                archive=UUID(value["archive"]),
                cluster=UUID(value["cluster"]),
                partition=whole_number(value["partition"]),
                number=whole_number(value["number"]),
                before=checked_hash(value["before"]) if value["before"] else "",
                entries=_entries(value["entries"]),
            )
        return same(found, text, where)

    def extended(self, piece: Entry) -> tuple[Manifest, tuple[Chunk, ...]]:
        """The next manifest, with this piece behind all others, and the chunks that have to be in the store before it."""
        assert piece.level == 0
        assert piece.first == self.last + 1, f"{piece.first} follows {self.last}"
        entries, chunks = [*self.entries, piece], []
        while len(entries) >= FAN_OUT and entries[-FAN_OUT].level == entries[-1].level:
            chunk = Chunk(partition=self.partition, entries=tuple(entries[-FAN_OUT:]))
            chunks.append(chunk)
            entries[-FAN_OUT:] = [chunk.entry()]
        before = self.sha256 if self.number else ""
        return replace(self, number=self.number + 1, before=before, entries=tuple(entries)), tuple(chunks)

    def follows(self, before: Manifest) -> bool:
        """Whether it can be what `before` became by more pieces."""
        is_next = self.number == before.number + 1 and self.before == (before.sha256 if before.number else "")
        is_same = (self.archive, self.cluster, self.partition) == (before.archive, before.cluster, before.partition)
        return is_next and is_same and self.last > before.last


def folder_of(partition: int) -> str:
    return f"partition-{partition}"


def manifest_name(partition: int, number: int) -> str:
    return f"{folder_of(partition)}/manifest/{number:010d}.json"


# -- as text -----------------------------------------------------------------------------------------------------------


def _table(entries: Sequence[Entry]) -> dict[str, Any]:
    return {"columns": list(COLUMNS), "entries": [entry.row() for entry in entries]}


def sealed(value: Mapping[str, Any]) -> bytes:
    """With a digest of everything else, to find bit rot. A line for each entry, for people."""
    said = {"format": MARK, "version": VERSION, **value}
    said["sha256"] = sha256_of(_plain(said))
    lines = [f"{json.dumps(name)}: {_spelled(part)}" for name, part in said.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _plain(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _spelled(part: Any) -> str:
    if isinstance(part, list) and part and isinstance(part[0], list):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in part) + "\n]"
    return json.dumps(part)


def unsealed(text: bytes, where: str, kind: str) -> dict[str, Any]:
    with strictly(where):
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != MARK:
            raise ValueError("it is no object of an archive")
    version = value.get("version")
    if type(version) is int and version > VERSION:
        raise UnknownVersion(f"{where} is of version {version} of archives; this program knows {VERSION}")
    if value.pop("sha256", None) != sha256_of(_plain(value)) or version != VERSION:
        raise ArchiveDamaged(f"{where} does not have the checksum that it carries")
    if value.get("kind") != kind:
        raise ArchiveDamaged(f"{where} is no {kind}")
    return value


@contextmanager
def strictly(where: str) -> Iterator[None]:
    """Whatever cannot be understood is damage."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveDamaged(f"{where} cannot be understood: {error}") from error


class Spelled(Protocol):
    @property
    def text(self) -> bytes: ...


T = TypeVar("T", bound=Spelled)


def same(found: T, text: bytes, where: str) -> T:
    """What was understood, where it would be written exactly so."""
    if found.text != text:
        raise ArchiveDamaged(f"{where} does not agree with itself, or was written by something else")
    return found


def whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def checked_hash(value: Any) -> str:
    if not isinstance(value, str) or len(value) != _HASH_DIGITS or value.strip("0123456789abcdef"):
        raise ValueError(f"{value!r} is no SHA-256")
    return value


def _entries(value: Any) -> tuple[Entry, ...]:
    found = tuple(map(_entry, value))
    if not found:
        raise ValueError("there is no entry")
    for one, behind in pairwise(found):
        if behind.first != one.last + 1 or behind.level > one.level:
            raise ValueError(f"the entry at id {behind.first} does not follow the one that ends at id {one.last}")
    return found


def _entry(row: Any) -> Entry:
    *numbers, crc, sha256 = row
    if len(row) != len(COLUMNS) or not isinstance(crc, str) or len(crc) != 8:
        raise ValueError(f"{row!r} is no entry")
    found = Entry(
        **dict(zip(COLUMNS, map(whole_number, numbers), strict=False)), crc=int(crc, 16), sha256=checked_hash(sha256)
    )  # fmt: skip
    if found.first > found.last or found.index_bytes > found.size or found.level > LEVEL_MAX:
        raise ValueError(f"{row!r} is no entry")
    return found


def opened(entry: Entry, text: bytes, partition: int, where: str) -> Chunk:
    """The chunk that an entry names, once it is proven to be that one."""
    if sha256_of(text) != entry.sha256:
        raise ArchiveDamaged(f"{where} has other bytes than the manifest says")
    found = Chunk.decode(text, where)
    if found.partition != partition or found.entry() != entry:
        raise ArchiveDamaged(f"{where} holds other ids than the manifest says")
    return found


def pieces_of(entries: Sequence[Entry], fetch: Callable[[Entry], Chunk]) -> Iterator[Entry]:
    """All pieces below these entries, in order. `fetch` gives the chunk that an entry names."""
    for entry in entries:
        if entry.level == 0:
            yield entry
        else:
            yield from pieces_of(fetch(entry).entries, fetch)
