"""Dumps a file of a storage directory: every record, and all other bytes, in the order of the file.

Damage is never an error. Items go to a sink one by one, so the memory is that of one chunk for files of any size. Bytes
between two sound records are reported as damaged bytes, with an explanation by `waltzd.format.explain`. Nothing is written
or locked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from waltzd.disk.seam import Disk, File, opened
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import HeaderDamaged, UnknownVersion
from waltzd.format.batch import Batch, Head
from waltzd.format.explain import BadRecord, explain
from waltzd.format.footer import Footer
from waltzd.format.index import places_of, read_index
from waltzd.format.layout import (
    BATCHES,
    CONTROL_INFO_BYTES,
    CONTROL_NAME,
    CONTROL_STRUCT_BYTES,
    GROUPS_NAME,
    HARD_STATE_BYTES,
    HARD_STATE_NAME,
    HARD_STATE_SLOT_SPACING,
    HEADER_BYTES,
    IDENTITY_BYTES,
    IDENTITY_NAME,
    INDEX_SUFFIX,
    PARTITIONS_MAX,
    SEGMENT_SUFFIX,
    VERSION,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    control_bytes,
    control_struct_offset,
    first_id_of,
    index_entries,
    index_name,
    index_offset,
)
from waltzd.format.record import Record, Run, decode_record
from waltzd.format.scan import survey, version_behind
from waltzd.format.span import RecordSpan, Span
from waltzd.protocol.timelines import Lineage

INDEX_CHUNK_ENTRIES = 1 << 16
FOOTER_BYTES_MAX = 16 << 20
"""Limit of the bytes that are reported in the place of a footer."""


@dataclass(frozen=True, kw_only=True)
class FileStart:
    """Kind and header of the file, or the `problem` with the header."""

    kind: str
    path: str
    size: int
    fields: dict[str, object] = field(default_factory=dict)
    problem: str = ""
    raw: bytes = b""


@dataclass(frozen=True, kw_only=True)
class WholeRecord:
    offset: int
    raw: memoryview
    time: int | None = None
    """Time of the record; None in format 0, as the next two fields are unset."""
    group: int | None = None
    """First id of the group of the record."""
    locks: tuple[tuple[int, int], ...] = ()
    """Mode and id of each lock."""

    def record(self) -> Record:
        return decode_record(self.raw)


@dataclass(frozen=True, kw_only=True)
class BatchStart:
    """The start of a batch, which precedes its records."""

    offset: int
    head: Head
    preamble: memoryview
    locks: int
    groups: tuple[tuple[int, int], ...]
    """First and last id of each group with more than one record."""


@dataclass(frozen=True, kw_only=True)
class FooterBytes:
    """The bytes after the last batch of a sealed segment. `footer` is None if they are no sound footer."""

    offset: int
    raw: bytes
    footer: Footer | None


@dataclass(frozen=True, kw_only=True)
class DamagedBytes:
    """Bytes that are no sound records. `last_id` is None at the end of the file, where the number of ids is unknown."""

    first_byte: int
    last_byte: int
    first_id: int
    last_id: int | None
    records: tuple[BadRecord, ...]
    read: Callable[[int, int], bytes]
    """Function that reads the file at (offset, size)."""


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    id: int
    offset: int
    """Offset of the entry in the index file."""
    points_to: int
    head: int | None = None
    """Offset of the batch; None in format 0."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One checksummed struct of a small file."""

    name: str
    offset: int
    is_sound: bool
    fields: dict[str, object] = field(default_factory=dict)
    note: str = ""


Item: TypeAlias = FileStart | BatchStart | WholeRecord | FooterBytes | DamagedBytes | IndexEntry | Slot
Sink: TypeAlias = Callable[[Item], None]


class _Enough(Exception):
    """Raised to stop after the last wanted id; not an error."""


def dump(disk: Disk, path: str, sink: Sink, *, first_id: int = 0, last_id: int | None = None) -> None:
    """Send everything in a file to `sink`; records and index entries only from `first_id` to `last_id`."""
    name = path.rpartition("/")[2]
    small = {
        CONTROL_NAME: _dump_control,
        GROUPS_NAME: _dump_control,
        IDENTITY_NAME: _dump_identity,
        HARD_STATE_NAME: _dump_hard_state,
    }.get(name)
    with closing(disk.open(path)) as file, suppress(_Enough):
        if name.endswith(SEGMENT_SUFFIX):
            _dump_segment(disk, file, sink, first_id, last_id)
        elif name.endswith(INDEX_SUFFIX):
            _dump_index(file, sink, first_id, last_id)
        elif small is not None:
            small(file, sink)
        else:
            raise BadArgument(
                f"{path} is not a file of a storage directory",
                not_done="nothing was dumped",
                next_step=f"give a .seg or .idx file, {CONTROL_NAME}, {IDENTITY_NAME} or a hard-state file",
            )


# -- segments ----------------------------------------------------------------------------------------------------------


def _start(file: File, kind: str, sink: Sink) -> tuple[int, int]:
    """Report the header; return the first id, by the name of the file or else by its header, and the version."""
    named = first_id_of(file.path.rpartition("/")[2])
    raw = file.read(0, HEADER_BYTES)
    try:
        header = FileHeader.decode(raw, "the file")
    except (HeaderDamaged, UnknownVersion) as error:
        sink(FileStart(kind=kind, path=file.path, size=file.size(), problem=error.message, raw=raw))
        return named or 0, VERSION
    fields: dict[str, object] = {**vars(header), "key": str(header.key)}
    fields["format"] = fields.pop("version")
    problem = "the reserved part of the header is not zero" if raw != header.encode() else ""
    if named is not None and named != header.first_id:
        problem = f"the file name states first id {named}"
    sink(FileStart(kind=kind, path=file.path, size=file.size(), fields=fields, problem=problem, raw=raw))
    return header.first_id if named is None else named, header.version


def _dump_segment(disk: Disk, file: File, sink: Sink, low: int, high: int | None) -> None:
    directory, slash, _ = file.path.rpartition("/")
    end = file.size()
    first_id, said = _start(file, "segment", sink)
    version = version_behind(file, said, first_id)
    index = opened(disk, directory + slash + index_name(first_id))
    at, next_id = HEADER_BYTES, first_id
    group = first_id

    def damaged(first_byte: int, last_byte: int, first: int, last: int | None) -> None:
        if (last is not None and max(first, last) < low) or (high is not None and first > high):
            return
        records = explain(
            file, first_byte=first_byte, last_byte=last_byte, first_id=first, last_id=last,
            segment_first_id=first_id, index=index, version=version,
        )  # fmt: skip
        sink(DamagedBytes(
            first_byte=first_byte, last_byte=last_byte, first_id=first, last_id=last,
            records=tuple(records), read=file.read,
        ))  # fmt: skip

    def stand(offset: int, size: int, first: int, last: int) -> None:
        nonlocal at, next_id
        if offset > at:
            damaged(at, offset - 1, next_id, first - 1)
        at, next_id = offset + size, last + 1

    def on_run(offset: int, run: Run) -> None:
        stand(offset, len(run.data), run.first_id, run.last_id)
        start = max(0, low - run.first_id)
        stop = len(run) if high is None else min(len(run), high + 1 - run.first_id)
        bounds = run.bounds[start : stop + 1].tolist() if start < stop else []
        for first, last in pairwise(bounds):
            sink(WholeRecord(offset=offset + first, raw=run.data[first:last]))
        if high is not None and run.last_id >= high:
            raise _Enough

    def on_batch(offset: int, batch: Batch) -> None:
        nonlocal group
        stand(offset, batch.size, batch.first_id, batch.last_id)
        wanted = range(max(low, batch.first_id), min(batch.last_id, batch.last_id if high is None else high) + 1)
        if wanted:
            sink(_batch_start(offset, batch))
        records, locks, bounds = offset + batch.head.lead, _lock_rows(batch), batch.run.bounds.tolist()
        for number, id_ in enumerate(range(batch.first_id, batch.last_id + 1)):
            group = group if batch.run.follows is not None and batch.run.follows[number] else id_
            if id_ in wanted:
                first, last = bounds[number], bounds[number + 1]
                raw = batch.run.data[first:last]
                sink(WholeRecord(offset=records + first, raw=raw, time=batch.head.time, group=group, locks=locks[number]))
        if high is not None and batch.last_id >= high:
            raise _Enough

    def on_span(span: Span) -> None:
        if isinstance(span, RecordSpan):
            on_run(span.offset, span.run)
        else:
            for offset, batch in span.batches():
                on_batch(offset, batch)

    try:
        found = survey(file, first_id=first_id, end=end, version=version, index=index, on_span=on_span)
        if found.footer_bytes:
            raw = file.read(found.end, min(found.footer_bytes, FOOTER_BYTES_MAX))
            sink(FooterBytes(offset=found.end, raw=raw, footer=found.footer))
        if found.tail_bytes:
            damaged(found.end, end - 1, found.next_id, None)
    finally:
        if index is not None:
            index.close()


def _batch_start(offset: int, batch: Batch) -> BatchStart:
    groups: list[tuple[int, int]] = []
    if batch.run.follows is not None:
        for id_ in (np.flatnonzero(batch.run.follows) + batch.first_id).tolist():
            if groups and groups[-1][1] == id_ - 1:
                groups[-1] = groups[-1][0], id_
            else:
                groups.append((id_ - 1, id_))
    return BatchStart(
        offset=offset, head=batch.head, preamble=memoryview(batch.preamble), locks=len(batch.locks.ids),
        groups=tuple(groups),
    )  # fmt: skip


def _lock_rows(batch: Batch) -> list[tuple[tuple[int, int], ...]]:
    locks = batch.locks
    pairs = list(zip(locks.modes.tolist(), locks.ids.tolist(), strict=True))
    ends = np.cumsum(locks.counts).tolist()
    return [tuple(pairs[first:last]) for first, last in pairwise([0, *ends])]


def _dump_index(file: File, sink: Sink, low: int, high: int | None) -> None:
    first_id, version = _start(file, "index", sink)
    count = index_entries(file.size())
    stop = count if high is None else min(count, high + 1 - first_id)
    entry = max(0, low - first_id)
    while entry < stop:
        entries = read_index(file, entry, min(INDEX_CHUNK_ENTRIES, stop - entry))
        chunk, heads = entries.tolist(), [None] * len(entries)
        if version == BATCHES:
            chunk, heads = (column.tolist() for column in places_of(entries))
        for number, (points_to, head) in enumerate(zip(chunk, heads, strict=True), entry):
            sink(IndexEntry(id=first_id + number, offset=index_offset(number), points_to=points_to, head=head))
        entry += len(chunk)
        if not chunk:
            break
    rest = max(0, file.size() - HEADER_BYTES) % 8
    if rest and high is None:
        at = file.size() - rest
        sink(Slot(name="rest", offset=at, is_sound=False, note=f"{rest} bytes, less than a whole entry"))


# -- small files -------------------------------------------------------------------------------------------------------


def _dump_control(file: File, sink: Sink) -> None:
    raw = file.read(0, control_bytes(PARTITIONS_MAX))
    fields: dict[str, object] = {}
    problem = ""
    try:
        header = ControlHeader.decode(raw, "the control file")
        fields = {**vars(header), "key": str(header.key)}
    except WaltzError as error:
        problem = error.message
    sink(FileStart(kind="control", path=file.path, size=len(raw), fields=fields, problem=problem, raw=raw[:HEADER_BYTES]))
    for number in range(max(0, len(raw) - HEADER_BYTES) // CONTROL_INFO_BYTES):
        offsets = [control_struct_offset(number, slot) for slot in (0, 1)]
        structs = [ControlStruct.decode(raw[at : at + CONTROL_STRUCT_BYTES]) for at in offsets]
        newest = max((struct.sequence for struct in structs if struct), default=None)
        for slot, (at, struct) in enumerate(zip(offsets, structs, strict=True)):
            if struct is None:
                note, said = "fails its checksum", {}
            else:
                said = {**struct.__dict__, "is_available": struct.is_available, "is_assigned": struct.is_assigned}
                note = "current" if struct.sequence == newest else ""
            name = f"partition {number} struct {slot + 1}"
            sink(Slot(name=name, offset=at, is_sound=struct is not None, fields=said, note=note))


def _dump_identity(file: File, sink: Sink) -> None:
    raw = file.read(0, IDENTITY_BYTES + 1)
    try:
        identity = Identity.decode(raw, "the identity file")
    except WaltzError as error:
        sink(FileStart(kind="identity", path=file.path, size=file.size(), problem=error.message, raw=raw))
        return
    fields: dict[str, object] = {
        **vars(identity.control),
        "key": str(identity.control.key),
        "directory": str(identity.directory),
        "name": identity.name,
    }
    sink(FileStart(kind="identity", path=file.path, size=file.size(), fields=fields, raw=raw))


def _dump_hard_state(file: File, sink: Sink) -> None:
    raw = file.read(0, HARD_STATE_BYTES)
    sink(FileStart(kind="promise", path=file.path, size=file.size(), raw=b""))
    slots: list[HardState | None] = []
    notes: list[str] = []
    for at in (0, HARD_STATE_SLOT_SPACING):
        piece = raw[at : at + HARD_STATE_SLOT_SPACING]
        try:
            slots.append(HardState.decode(piece, "the slot"))
            notes.append("" if slots[-1] else ("fails its checksum" if any(piece) else "never written"))
        except UnknownVersion as error:
            slots.append(None)
            notes.append(error.message)
    newest = max((slot.sequence for slot in slots if slot), default=None)
    for number, (slot, note) in enumerate(zip(slots, notes, strict=True)):
        fields: dict[str, object] = {}
        if slot is not None:
            fields = {**slot.__dict__, "key": str(slot.key), "incarnation": str(slot.incarnation)}
            lineage = Lineage.decode(slot.timelines)
            fields["timelines"] = [] if lineage is None else [str(one.identity) for one in lineage.later]
            note = "current" if slot.sequence == newest else ""
        is_sound, offset = slot is not None or note == "never written", HARD_STATE_SLOT_SPACING * number
        sink(Slot(name=f"slot {number + 1}", offset=offset, is_sound=is_sound, fields=fields, note=note))
