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
    <store>/partition-<n>/tail/<slot>                                         what no segment above has yet, see `unsealed`
    <store>/partition-<n>/tail.json                                           which slots count
    <store>/partition-<n>/timeline/<identity>/begin.json                      what a later timeline takes over
    <store>/partition-<n>/timeline/<identity>/manifest/<number>.json          its manifests from there on
    <store>/partition-<n>/timeline/<identity>/tail.json, tail/<slot>          its tail
    <store>/metadata/<number>.json                                            the documents of the cluster, see `metadata`

The first timeline of a log has its manifests and its tail in the folder of the partition, each later one in a folder of
its own (`waltzd.protocol.timelines`). Segments and chunks have their names from their bytes, so timelines share them.
`begin.json` is a manifest: the whole segments up to the fork, which the timeline takes over from its ancestors. All
manifests and the tail of a later timeline name the whole lineage, so the store alone tells the tree.

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
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, TIMELINES_MAX, Fork, Lineage, Timeline

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
    lineage: Lineage = NEVER_FORKED
    """Timelines of the log; the manifest is of the last one."""
    shared: int = 0
    """Number of the manifest with which this timeline begins (`begin.json`), which is the number of segments that it takes
    over from its ancestors. 0 for the first timeline."""

    @property
    def timeline(self) -> UUID:
        return self.lineage.current

    @property
    def is_begin(self) -> bool:
        """Whether it is the one with which a later timeline begins."""
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

    @cached_property
    def text(self) -> bytes:
        total = self.total
        forked = {} if self.timeline == FIRST else {"shared": self.shared, "timelines": lineage_rows(self.lineage)}
        return sealed(
            {
                "kind": "manifest", "archive": str(self.archive), "cluster": str(self.cluster),
                "partition": self.partition, **forked, "number": self.number, "before": self.before,
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
                entries=_entries(value["entries"]) if value["entries"] or "timelines" not in value else (),
                lineage=lineage_in(value),
                shared=whole_number(value.get("shared", 0)),
            )
            if not found.entries and not found.is_begin:
                raise ValueError("there is no entry")
            if found.shared > found.number or (found.is_begin and found.last > found.lineage.fork):
                raise ValueError("it takes over more than its timeline shares with its ancestors")
        return same(found, text, where)

    def begun(self, lineage: Lineage, fetch: Callable[[Entry], Chunk]) -> Manifest:
        """The manifest with which the newest timeline of `lineage` begins: of the segments here those that are whole up to
        where both are the same log. `fetch` gives the chunk that an entry names."""
        shared = lineage.shared_to(self.timeline)
        entries = self.entries if shared is None else tuple(_up_to(self.entries, shared, fetch))
        count = total_of(entries).segments
        return replace(self, number=count, before="", entries=entries, lineage=lineage, shared=count)

    def extended(self, piece: Entry) -> tuple[Manifest, tuple[Chunk, ...]]:
        """The next manifest, with this piece behind all others, and the chunks that have to be in the store before it."""
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
        """What the next manifest calls the one before; nothing for the empty one that is in no store."""
        return self.sha256 if self.number or self.is_begin else ""

    def follows(self, before: Manifest) -> bool:
        """Whether it can be what `before` became by more pieces."""
        is_next = self.number == before.number + 1 and self.before == before._hash
        is_same = self._place == before._place
        return is_next and is_same and self.last > before.last

    @property
    def _place(self) -> tuple[object, ...]:
        return self.archive, self.cluster, self.partition, self.lineage, self.shared


def _up_to(entries: Sequence[Entry], last_id: int, fetch: Callable[[Entry], Chunk]) -> Iterator[Entry]:
    """Those whose ids all are up to this one; of a chunk that goes on behind it, its entries. This is how the entries stood
    when they were as many."""
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


# -- timelines as text -------------------------------------------------------------------------------------------------


def lineage_rows(lineage: Lineage) -> list[list[Any]]:
    return [
        [str(one.identity), one.number, one.parent, one.fork, one.session, one.cause, one.began, one.who]
        for one in lineage.later
    ]


def lineage_in(value: Mapping[str, Any]) -> Lineage:
    """What the object says of its timelines. Raises what `strictly` takes for damage."""
    rows = value.get("timelines", [])
    if len(rows) > TIMELINES_MAX or ("timelines" in value and not rows):
        raise ValueError(f"it names {len(rows)} timelines")
    return Lineage(map(_timeline, rows))


def _timeline(row: Any) -> Timeline:
    identity, number, parent, fork, session, *texts = row
    if type(fork) is not int or not -1 <= fork <= ID_MAX or len(texts) != 3:
        raise ValueError(f"{row!r} is no timeline")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"{row!r} is no timeline")
    return Timeline(
        identity=UUID(identity), number=whole_number(number), parent=whole_number(parent), fork=Fork(fork),
        session=whole_number(session), cause=texts[0], began=texts[1], who=texts[2],
    )  # fmt: skip


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
