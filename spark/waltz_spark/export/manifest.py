"""The manifest of an export: the list of its files, with the checksums that prove them.

A manifest is complete and never changed. The next one has the next number, and has all files of the one before and new
ones. The export is the manifest with the highest number; other files in the directory do not belong to it.

Each file has the ids of one partition from a first to a last, and its `crc` is the CRC-32 of these records as they are in
the log. CRC-32 can be combined: that of a partition follows from those of its files, and does not depend on how the log
was cut into files. Pure: `destination` writes manifests.

    <output>/_waltz/manifest/<number, 8 digits>.json      manifests; the newest one is the export
    <output>/_waltz/pending.json                          the next manifest, while its files are renamed
    <output>/_waltz/tmp/<run>/                            files under construction
    <output>/_waltz/lock                                  the current writer
    <output>/partition-<n>-<first>-<last>.parquet         files

All files are in one directory, because every reader accepts that layout: Spark reads subdirectories only if they are named
after a column, and Arrow then refuses files that have this column themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import UUID

from waltz_spark.log.origin import Span
from waltzd.errors.operations import ExportDamaged, ExportUnfit
from waltzd.format.checksum import joined_crc
from waltzd.protocol.document import DigestFormat, sha256_of
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST

TEXT_FORMAT = DigestFormat(name="waltz-export", version=1, thing="the manifest of an export", damage=ExportDamaged)
HIDDEN = "_waltz"
"""Directory for all other files; Spark and Arrow ignore names that begin with an underscore."""
FORMATS = ("parquet", "delta")
MANIFESTS, UNFINISHED, LOCK = f"{HIDDEN}/manifest", f"{HIDDEN}/tmp", f"{HIDDEN}/lock"
PENDING = f"{HIDDEN}/pending.json"

META_CLUSTER, META_PARTITION = "waltz.cluster", "waltz.partition"
META_FIRST, META_LAST, META_RECORDS, META_CRC = "waltz.first_txid", "waltz.last_txid", "waltz.records", "waltz.crc"
META_BESIDE = "waltz.beside"
"""Keys in the metadata of the Parquet files: numbers as decimal text, `crc` and `beside` as 8 hexadecimal digits. The
values are in the manifest as well."""

_WHOLE = (1 << 63) - 1


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One file of an export."""

    path: str
    """Path relative to the output."""
    partition: int
    span: Span
    data_bytes: int
    """Bytes of the records in the log."""
    crc: int
    """CRC-32 of these bytes."""
    size: int
    sha256: str
    times: tuple[int, int] | None = None
    """First and last time, in µs since 1970; None if no record has a time, as in format 0."""
    beside: int | None = None
    """CRC-32 of the times, groups and locks (`waltz_spark.log.arrow.Proof`); None if there are none."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sums of all files of one partition, which have no gaps."""

    span: Span
    data_bytes: int
    crc: int
    size: int
    files: int
    times: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The properties that all files of an export share. They never change, because readers rely on them."""

    format: str
    compression: str
    decoder: str
    """Argument of `--decode`; empty without a decoder."""
    decoder_fingerprint: str
    """Fingerprint of the decoder, which differs if the decoder would make other rows; empty without a decoder."""
    schema: Sequence[tuple[str, str]]
    """Names and types of all columns."""

    @property
    def fingerprint(self) -> str:
        return sha256_of(json.dumps(list(map(list, self.schema))).encode())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    number: int
    """Number of the manifest, from 1."""
    export: UUID
    """Identity of the export, in all its manifests."""
    cluster: UUID
    """Key of the exported cluster."""
    source: str
    """Description of the origin of the newest files, for people."""
    written: str
    """Time of writing, in UTC as ISO 8601. Nothing is decided by it."""
    shape: Shape
    pieces: Sequence[Piece] = field(default=())
    """Files, in order of partition and id."""
    timelines: Mapping[int, UUID] = field(default_factory=dict)
    """Identity of the timeline that was read last, for each partition whose log has forked."""

    @cached_property
    def partitions(self) -> Mapping[int, Total]:
        return totals_of(self.pieces)

    @property
    def next_ids(self) -> Mapping[int, int]:
        """First id after the files of each partition."""
        return {partition: part.span.last + 1 for partition, part in self.partitions.items()}

    @property
    def ends(self) -> Mapping[int, Position]:
        """Last id in the files of each partition, with its timeline."""
        return {number: Position(part.span.last, self.timelines.get(number)) for number, part in self.partitions.items()}

    def extended(
        self, pieces: Iterable[Piece], *, source: str, written: str, timelines: Mapping[int, UUID] | None = None
    ) -> Manifest:
        """Return the next manifest, with more files. `timelines`: their timelines, except the first one."""
        news = tuple(pieces)
        grown = sorted((*self.pieces, *news), key=_order)
        read = {**self.timelines, **{piece.partition: (timelines or {}).get(piece.partition, FIRST) for piece in news}}
        following = replace(
            self, number=self.number + 1, source=source, written=written, pieces=tuple(grown),
            timelines={number: timeline for number, timeline in read.items() if timeline != FIRST},
        )  # fmt: skip
        assert following.partitions.keys() >= self.partitions.keys()
        return following


def _order(piece: Piece) -> tuple[int, Span]:
    return piece.partition, piece.span


def path_of(partition: int, span: Span) -> str:
    """Return the name of a file. It depends on the ids in the file only: the same records never get two names."""
    return f"partition-{partition}-{span.first:019d}-{span.last:019d}.parquet"


def manifest_path(number: int) -> str:
    return f"{MANIFESTS}/{number:08d}.json"


# -- sums --------------------------------------------------------------------------------------------------------------


def totals_of(pieces: Iterable[Piece]) -> dict[int, Total]:
    """Sum files in order; raise `ExportDamaged` for a gap or an overlap."""
    found: dict[int, Total] = {}
    for piece in pieces:
        part = found.get(piece.partition)
        if part is None:
            found[piece.partition] = Total(
                span=piece.span, data_bytes=piece.data_bytes, crc=piece.crc, size=piece.size, files=1,
                times=piece.times,
            )  # fmt: skip
            continue
        if piece.span.first != part.span.last + 1:
            raise ExportDamaged(
                f"{piece.path} begins at id {piece.span.first} of partition {piece.partition}, and the file before it ends "
                f"at id {part.span.last}"
            )
        found[piece.partition] = Total(
            span=Span(part.span.first, piece.span.last),
            data_bytes=part.data_bytes + piece.data_bytes,
            crc=joined_crc(part.crc, piece.crc, piece.data_bytes),
            size=part.size + piece.size,
            files=part.files + 1,
            times=_joined_times(part.times, piece.times),
        )
    return found


def _joined_times(before: tuple[int, int] | None, behind: tuple[int, int] | None) -> tuple[int, int] | None:
    return (before[0], behind[1]) if before and behind else before or behind


# -- as text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A type of JSON values, with functions that write and read it; reading raises ValueError or TypeError."""

    put: Callable[[Any], Any]
    take: Callable[[Any], Any]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _WHOLE:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _crc(value: Any) -> int:
    if len(_text(value)) != 8:
        raise ValueError(f"{value!r} is no checksum")
    return int(value, 16)


def _columns(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple((_text(name), _text(type_)) for name, type_ in value)


def below_output(value: Any) -> str:
    """Read a relative path; raise ValueError for one outside of the export, as in a forged manifest."""
    path = _text(value)
    if not path or path.startswith(("/", HIDDEN)) or "\0" in path or {"..", ".", ""} & set(path.split("/")):
        raise ValueError(f"{path!r} is no path below the output")
    return path


_COUNT, _TEXT, _CRC, _KEY = _Kind(int, _count), _Kind(str, _text), _Kind("{:08x}".format, _crc), _Kind(str, UUID)
_IDS = {"first": _COUNT, "last": _COUNT}
_MANIFEST = {"number": _COUNT, "export": _KEY, "cluster": _KEY, "source": _TEXT, "written": _TEXT}
_SHAPE = {"format": _TEXT, "compression": _TEXT, "decoder": _TEXT, "decoder_fingerprint": _TEXT,
          "schema": _Kind(lambda schema: list(map(list, schema)), _columns)}  # fmt: skip
_PIECE = {"path": _Kind(str, below_output), "partition": _COUNT, **_IDS, "data_bytes": _COUNT, "crc": _CRC, "bytes": _COUNT,
          "sha256": _TEXT}  # fmt: skip
"""Members of the objects in a manifest, with their types."""


def _put(kinds: Mapping[str, _Kind], value: object, **more: Any) -> dict[str, Any]:
    """Return the members of a value. `more`: members that are not its fields."""
    return {name: kind.put(more[name] if name in more else getattr(value, name)) for name, kind in kinds.items()}


def _taken(kinds: Mapping[str, _Kind], value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kind.take(value[name]) for name, kind in kinds.items()}


def encode(manifest: Manifest) -> bytes:
    return json.dumps(TEXT_FORMAT.with_digest(_manifest_json(manifest)), indent=1).encode() + b"\n"


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    shape = manifest.shape
    return {
        **_put(_MANIFEST, manifest),
        # Earlier versions require `lossless`.
        "shape": {**_put(_SHAPE, shape), "lossless": False, "schema_fingerprint": shape.fingerprint},
        "partitions": {
            str(number): {**total_json(part), **_timeline_json(manifest.timelines.get(number))}
            for number, part in manifest.partitions.items()
        },
        "files": [piece_json(piece) for piece in manifest.pieces],
    }


def _timeline_json(timeline: UUID | None) -> dict[str, Any]:
    """Return the timeline as a member; none for the first one, so that manifests of unforked logs stay unchanged."""
    return {} if timeline is None else {"timeline": str(timeline)}


def total_json(part: Total) -> dict[str, Any]:
    return {
        "first": part.span.first,
        "last": part.span.last,
        "next": part.span.last + 1,
        "records": part.span.count,
        "data_bytes": part.data_bytes,
        "crc": f"{part.crc:08x}",
        "bytes": part.size,
        "files": part.files,
        **({"times": {"first": part.times[0], "last": part.times[1]}} if part.times is not None else {}),
    }


def piece_json(piece: Piece) -> dict[str, Any]:
    found = _put(_PIECE, piece, first=piece.span.first, last=piece.span.last, bytes=piece.size)
    if piece.times is not None and piece.beside is not None:
        first, last = piece.times
        found["times"] = {"first": first, "last": last, "crc": _CRC.put(piece.beside)}
    return found


def decode(text: bytes, place: str) -> Manifest:
    """Return the manifest that was read at `place`; raise `ExportDamaged` if it is damaged."""
    value = TEXT_FORMAT.parse(text, place)
    try:
        _check_abilities(value["shape"], place)
        found = Manifest(
            **_taken(_MANIFEST, value),
            shape=Shape(**_taken(_SHAPE, value["shape"])),
            pieces=tuple(map(piece_of, value["files"])),
            timelines={
                int(number): UUID(part["timeline"]) for number, part in value["partitions"].items() if "timeline" in part
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportDamaged(f"{place} cannot be understood: {error}") from error
    if _manifest_json(found) != value:
        raise ExportDamaged(f"{place} does not agree with itself: its sums are not those of its files")
    return found


def _check_abilities(shape: Mapping[str, Any], place: str) -> None:
    """Raise `ExportUnfit` if the export was made by an ability that was removed."""
    made = [f"--format {shape['format']}"] if shape["format"] not in FORMATS else []
    made += ["--lossless"] if shape.get("lossless") else []
    made += [f"--{name} {shape[name]!r}" for name in ("select", "where") if shape.get(name)]
    made += ["--engine spark"] if shape.get("engine", "arrow") != "arrow" else []
    if made:
        raise ExportUnfit(f"{place} is of an export that was made with {' and '.join(made)}, which was removed")


def piece_of(value: Mapping[str, Any]) -> Piece:
    said, times = _taken(_PIECE, value), value.get("times")
    span = Span(said.pop("first"), said.pop("last"))
    if span.count == 0:
        raise ValueError(f"the file {value['path']} holds no id")
    return Piece(
        size=said.pop("bytes"), **said, span=span,
        times=None if times is None else (_count(times["first"]), _count(times["last"])),
        beside=None if times is None else _crc(times["crc"]),
    )  # fmt: skip
