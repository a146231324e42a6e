"""Print a dump of a file: as a table, JSON Lines, CSV, or a hex dump with the meaning of each field.

Each form prints the items of `waltzd.storage.offline.dump` as they are read. Raw payload bytes never reach a terminal: a
table and the right column of a hex dump show a dot for all bytes that are not printable ASCII.
"""

from __future__ import annotations

import base64
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from waltzctl.shell import moment
from waltzctl.show.forms import JSON_VERSION, Columns, attributes, stream
from waltzctl.show.terminal import count
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.explain import BadRecord, describe
from waltzd.format.footer import END_BYTES, FRONT_BYTES
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, decode_record
from waltzd.protocol.locks import Mode
from waltzd.storage.offline.dump import (
    BatchStart,
    DamagedBytes,
    FileStart,
    FooterBytes,
    IndexEntry,
    Item,
    Sink,
    Slot,
    WholeRecord,
)

_TABLE_PAYLOAD_BYTES = 64
_ROW_BYTES = 16
_FIELD_BYTES = 8
"""Maximum size of a field whose name is on the same line."""


def sink(output: str, payload_bytes: int | None) -> Sink:
    if output in ("json", "csv"):
        return _rows(output, payload_bytes)
    if output == "hex":
        return _Hex(payload_bytes)
    return _Table(_TABLE_PAYLOAD_BYTES if payload_bytes is None else payload_bytes)


def plain(data: bytes | memoryview) -> str:
    return "".join(chr(value) if 32 <= value < 127 else "." for value in data)


def _start_lines(item: FileStart) -> Iterator[str]:
    yield f"{item.kind} {item.path}, {item.size} bytes"
    for name, value in item.fields.items():
        shown = f"{value} ({_when(int(str(value)))})" if name == "created_ms" else str(value)
        yield f"  {name:<12} {shown}"
    if item.problem:
        yield f"  damaged: {item.problem}"


def _when(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "no date"


def _damage_lines(item: DamagedBytes) -> Iterator[str]:
    size = item.last_byte - item.first_byte + 1
    if item.last_id is None:
        ids = f"from id {item.first_id} on"
    elif item.last_id < item.first_id:
        ids = f"no id is missing, in front of id {item.first_id}"
    else:
        ids = f"id {item.first_id}" if item.first_id == item.last_id else f"ids {item.first_id} to {item.last_id}"
    yield f"-- damaged: bytes {item.first_byte} to {item.last_byte} ({size} bytes), {ids}"
    if item.last_id is None:
        yield "   no valid record follows: a torn tail, or damage"
    for record in item.records:
        yield f"   {describe([record])}"


def _slot_lines(item: Slot) -> Iterator[str]:
    yield f"{item.offset:>10}  {item.name}" + (f" ({item.note})" if item.note else "")
    facts = ", ".join(f"{name} {value}" for name, value in item.fields.items())
    for line in textwrap.wrap(facts, 68, break_on_hyphens=False):
        yield " " * 12 + line


def _batch_lines(item: BatchStart) -> Iterator[str]:
    head = item.head
    last_byte = item.offset + head.size - 1
    yield f"-- batch: bytes {item.offset} to {last_byte} ({head.size} bytes), {_ids(head.first_id, head.last_id)}"
    facts = [
        moment.iso(head.time),
        f"session {head.session}",
        f"generation {head.generation}",
        f"committed {head.committed}",
    ]
    if item.locks:
        facts.append(count(item.locks, "lock"))
    facts += [f"group {first}-{last}" for first, last in item.groups]
    if head.is_last:
        facts.append("last of its segment")
    whole = ", ".join(fact.replace(" ", "\xa0") for fact in facts)  # lines break between facts
    for line in textwrap.wrap(whole, 76, break_on_hyphens=False):
        yield "   " + line.replace("\xa0", " ")


def _ids(first: int, last: int) -> str:
    return f"id {first}" if first == last else f"ids {first} to {last}"


def _footer_lines(item: FooterBytes) -> Iterator[str]:
    size, footer = len(item.raw), item.footer
    where = f"bytes {item.offset} to {item.offset + size - 1} ({size} bytes)"
    if footer is None:
        yield f"-- no valid footer: {where}, where one belongs"
        yield "   the storage rebuilds it from the records"
        return
    batches = "1 batch" if len(footer.batches) == 1 else f"{len(footer.batches)} batches"
    yield f"-- footer: {where}, {batches}, {_ids(footer.first_id, footer.last_id)}"
    yield f"   from {moment.iso(footer.first_time)} to {moment.iso(footer.last_time)}"
    yield f"   SHA-256 {footer.digest.hex()}"
    yield f"   before  {footer.before.hex()}"


def _locks(item: WholeRecord) -> list[dict[str, str]]:
    return [{"mode": Mode(mode).name.lower(), "lock": f"{lock:016x}"} for mode, lock in item.locks]


_TITLES = {
    "segment": f"{'offset':>10} {'id':>8} {'request':>15} {'header':>11} {'length':>8}  payload",
    "index": f"{'offset':>10} {'id':>12} {'record at':>12}",
}


class _Table:
    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80

    def __call__(self, item: Item) -> None:
        if isinstance(item, WholeRecord):
            record = item.record()
            start = f"{item.offset:>10} {record.id:>8} {record.request!s:>15} {record.header:>11} {record.length:>8}  "
            room = max(0, self._width - len(start))
            typer.echo((start + plain(record.payload[: self._payload_bytes])[:room]).rstrip())
            for lock in _locks(item):
                typer.echo(f"{'':>10} {lock['mode']:>8} {lock['lock']}")
        elif isinstance(item, IndexEntry):
            note = "  left out" if item.points_to == 0 else "" if item.head is None else f"  in the batch at {item.head}"
            typer.echo(f"{item.offset:>10} {item.id:>12} {item.points_to:>12}{note}")
        elif isinstance(item, FileStart):
            for line in _start_lines(item):
                typer.echo(line)
            if item.kind in _TITLES:
                typer.echo(_TITLES[item.kind])
        else:
            for line in _lines(item):
                typer.echo(line)


def _lines(item: BatchStart | FooterBytes | DamagedBytes | Slot) -> Iterator[str]:
    if isinstance(item, BatchStart):
        return _batch_lines(item)
    if isinstance(item, FooterBytes):
        return _footer_lines(item)
    return _damage_lines(item) if isinstance(item, DamagedBytes) else _slot_lines(item)


ENTRIES: Columns[dict[str, Any]] = attributes(
    "kind offset id client generation partition sequence header length data_crc crc payload_base64 payload_is_whole "
    "points_to first_byte last_byte first_id last_id name is_sound note time time_us group session committed batch_at"
)
"""Columns of CSV, one table for batches, records, footers, index entries, slots and damage. JSON also has the fields of
files."""


def _rows(output: str, payload_bytes: int | None) -> Sink:
    put = stream(ENTRIES, output)

    def put_item(item: Item) -> None:
        found = _object(item, payload_bytes)
        if output == "json":
            put(found)
        elif not isinstance(item, FileStart):
            put({column.key: found.get(column.key) for column in ENTRIES})

    return put_item


def _object(item: Item, payload_bytes: int | None) -> dict[str, Any]:
    """Return the objects of JSON Lines; the first one carries the version."""
    if isinstance(item, WholeRecord):
        record = item.record()
        shown = record.payload[:payload_bytes]
        known = {"group": item.group, **_time(item.time), "locks": _locks(item)} if item.time is not None else {}
        return {
            "kind": "record", "offset": item.offset, "id": record.id, "client": record.request.client,
            "generation": record.request.generation, "partition": record.request.partition,
            "sequence": record.request.sequence, "header": record.header, "length": record.length,
            "data_crc": f"{record.data_crc:08x}", "crc": f"{record.crc:08x}",
            "payload_base64": base64.b64encode(shown).decode(), "payload_is_whole": len(shown) == record.length,
            **known,
        }  # fmt: skip
    if isinstance(item, BatchStart):
        head = item.head
        return {
            "kind": "batch", "offset": item.offset, "size": head.size, "first_id": head.first_id, "last_id": head.last_id,
            **_time(head.time), "session": head.session, "generation": head.generation, "committed": head.committed,
            "lock_bytes": head.lock_bytes, "group_bytes": head.group_bytes, "record_bytes": head.record_bytes,
            "is_last": head.is_last, "before": f"{head.before:08x}", "section_crc": f"{head.section_crc:08x}",
            "record_crc": f"{head.record_crc:08x}", "crc": f"{head.crc:08x}", "locks": item.locks,
            "groups": [{"first_id": first, "last_id": last} for first, last in item.groups],
        }  # fmt: skip
    if isinstance(item, FooterBytes):
        return _footer_object(item)
    if isinstance(item, DamagedBytes):
        return {
            "kind": "damage", "first_byte": item.first_byte, "last_byte": item.last_byte,
            "first_id": item.first_id, "last_id": item.last_id,
            "records": [_bad_record(record) for record in item.records],
        }  # fmt: skip
    if isinstance(item, IndexEntry):
        found = {"kind": "index-entry", "id": item.id, "offset": item.offset, "points_to": item.points_to}
        return found if item.head is None else {**found, "batch_at": item.head}
    if isinstance(item, Slot):
        return {
            "kind": "slot", "name": item.name, "offset": item.offset, "is_sound": item.is_sound,
            "note": item.note, "fields": item.fields,
        }  # fmt: skip
    return {
        "version": JSON_VERSION, "kind": item.kind, "path": item.path, "size": item.size,
        "problem": item.problem, **item.fields,
    }  # fmt: skip


def _time(time: int) -> dict[str, object]:
    return {"time": moment.iso(time), "time_us": time}


def _footer_object(item: FooterBytes) -> dict[str, Any]:
    footer = item.footer
    where = {"kind": "footer", "offset": item.offset, "size": len(item.raw), "is_sound": footer is not None}
    if footer is None:
        return where
    return {
        **where, "first_id": footer.first_id, "last_id": footer.last_id, "first_time": moment.iso(footer.first_time),
        "last_time": moment.iso(footer.last_time), "first_time_us": footer.first_time, "last_time_us": footer.last_time,
        "batches": footer.batches.tolist(), "sha256": footer.digest.hex(), "before_sha256": footer.before.hex(),
        "footer_sha256": footer.hash.hex(),
    }  # fmt: skip


def _bad_record(record: BadRecord) -> dict[str, object]:
    out: dict[str, object] = {"id": record.id, "first_byte": record.first_byte, "last_byte": record.last_byte}
    if record.bad_byte is not None:
        out |= {"bad_byte": record.bad_byte, "is": record.is_value, "right": record.right_value}
    return out | {"detail": describe([record])}


_FIELDS = ((0, 8, "transaction id"), (8, 4, "client"), (12, 4, "generation"), (16, 4, "partition"), (20, 4, "sequence"),
           (24, 4, "header"), (28, 4, "payload length"), (32, 4, "payload CRC"))  # fmt: skip
_BATCH_FIELDS = (
    (0, 4, "magic"), (4, 4, "bytes in all"), (8, 8, "first id"), (16, 4, "records"), (20, 8, "session"),
    (28, 4, "generation"), (32, 8, "committed mark"), (40, 8, "time, µs"), (48, 4, "bytes of locks"),
    (52, 4, "bytes of groups"), (56, 4, "bytes of records"), (60, 4, "flags"), (64, 4, "CRC of the head before"),
    (68, 4, "CRC of locks and groups"), (72, 4, "CRC of the records"), (76, 16, "zeros"), (92, 4, "CRC of the head"),
)  # fmt: skip
_FOOTER_FIELDS = (
    (0, 4, "magic"), (4, 4, "batches"), (8, 8, "first id"), (16, 8, "last id"), (24, 8, "records"),
    (32, 8, "offset of the footer"), (40, 8, "first time, µs"), (48, 8, "last time, µs"),
    (56, 32, "SHA-256 of everything in front"), (88, 32, "SHA-256 of the footer before"),
)  # fmt: skip
_FOOTER_END = ((4, "bytes of the footer"), (4, "CRC of the footer"), (4, "magic"))
_NUMBERS = ("magic", "zeros", "CRC", "SHA")
"""Prefixes of the names of fields that are not numbers."""
_HEADER_FIELDS = ((0, 4, "format version"), (4, 8, "creation date, ms"), (12, 16, "cluster key"), (28, 4, "partition"),
                  (32, 8, "first id"), (40, 88, "reserved"))  # fmt: skip


class _Hex:
    """Hex dump with each field on its own line, and payloads in rows of sixteen bytes."""

    def __init__(self, payload_bytes: int | None) -> None:
        self._payload_bytes = payload_bytes
        self._on, self._off = ("\x1b[7m", "\x1b[0m") if sys.stdout.isatty() else ("", "")

    def __call__(self, item: Item) -> None:
        if isinstance(item, WholeRecord):
            typer.echo(f"record {item.record().id}, bytes {item.offset} to {item.offset + len(item.raw) - 1}")
            self._record(item.offset, bytes(item.raw), None)
        elif isinstance(item, BatchStart):
            for line in _batch_lines(item):
                typer.echo(line)
            self._batch(item.offset, bytes(item.preamble), None)
        elif isinstance(item, FooterBytes):
            for line in _footer_lines(item):
                typer.echo(line)
            self._footer(item)
        elif isinstance(item, DamagedBytes):
            self._damaged(item)
        elif isinstance(item, FileStart):
            for line in _start_lines(item):
                typer.echo(line)
            if item.kind in ("segment", "index"):
                for at, size, name in _HEADER_FIELDS:
                    self._rows(at, item.raw[at : min(at + size, HEADER_BYTES)], name)
            else:
                self._rows(0, item.raw, "")
        elif isinstance(item, IndexEntry):
            typer.echo(self._row(item.offset, item.points_to.to_bytes(8, "big", signed=True), f"id {item.id}"))
        else:
            for line in _slot_lines(item):
                typer.echo(line)

    def _damaged(self, item: DamagedBytes) -> None:
        for line in _damage_lines(item):
            typer.echo(line)
        at = item.first_byte
        for record in item.records:
            if record.bad_byte is not None:
                part = self._record if record.what == "record" else self._batch
                part(at, item.read(at, record.last_byte + 1 - at), record.bad_byte)
                at = record.last_byte + 1
            else:
                at = self._stream(item, at, record.last_byte)
        self._stream(item, at, item.last_byte)

    def _stream(self, item: DamagedBytes, at: int, last_byte: int) -> int:
        while at <= last_byte:
            piece = item.read(at, min(_ROW_BYTES * 4096, last_byte + 1 - at))
            if not piece:
                break
            self._rows(at, piece, "")
            at += len(piece)
        return at

    def _fields(self, offset: int, raw: bytes, fields: Sequence[tuple[int, int, str]], bad: int | None) -> None:
        for at, size, name in fields:
            value = int.from_bytes(raw[at : at + size], "big", signed=True)
            shown = name if name.startswith(_NUMBERS) else f"{name} {value}"
            self._rows(offset + at, raw[at : at + size], shown, bad)

    def _batch(self, offset: int, raw: bytes, bad: int | None) -> None:
        """Print the head of a batch, and what follows it in `raw`."""
        self._fields(offset, raw, _BATCH_FIELDS, bad)
        at = BATCH_HEAD_BYTES
        for start, name in ((48, "locks"), (52, "groups"), (56, "records")):
            size = int.from_bytes(raw[start : start + 4], "big")
            self._rows(offset + at, raw[at : at + size], name, bad)
            at += size

    def _footer(self, item: FooterBytes) -> None:
        if item.footer is None:
            self._rows(item.offset, item.raw, "")
            return
        self._fields(item.offset, item.raw, _FOOTER_FIELDS, None)
        at, end = FRONT_BYTES, len(item.raw) - END_BYTES
        places = [(place, 4, "offset of a batch") for place in range(at, end, 4)]
        ends = [(end + 4 * number, size, name) for number, (size, name) in enumerate(_FOOTER_END)]
        self._fields(item.offset, item.raw, [*places, *ends], None)

    def _record(self, offset: int, raw: bytes, bad: int | None) -> None:
        if len(raw) < HEAD_BYTES + TRAILER_BYTES:
            self._rows(offset, raw, "", bad)
            return
        record = decode_record(raw)
        values = (record.id, record.request.client, record.request.generation, record.request.partition,
                  record.request.sequence, record.header, record.length, f"{record.data_crc:08x}")  # fmt: skip
        for (at, size, name), value in zip(_FIELDS, values, strict=True):
            self._rows(offset + at, raw[at : at + size], f"{name} {value}", bad)
        end = len(raw) - TRAILER_BYTES
        self._payload(offset + HEAD_BYTES, raw[HEAD_BYTES:end], bad)
        self._rows(offset + end, raw[end:], f"CRC {record.crc:08x}", bad)

    def _payload(self, offset: int, payload: bytes, bad: int | None) -> None:
        limit = len(payload) if self._payload_bytes is None else min(self._payload_bytes, len(payload))
        self._rows(offset, payload[:limit], "payload", bad)
        if limit == len(payload):
            return
        if bad is not None and offset + limit <= bad < offset + len(payload):
            start = limit + (bad - offset - limit) // _ROW_BYTES * _ROW_BYTES
            if start > limit:
                typer.echo(f"{'...':>10}  {start - limit} bytes of payload not shown")
            self._rows(offset + start, payload[start : start + _ROW_BYTES], "", bad)
            limit = min(start + _ROW_BYTES, len(payload))
        if limit < len(payload):
            typer.echo(f"{'...':>10}  {len(payload) - limit} bytes of payload not shown")

    def _rows(self, offset: int, data: bytes, name: str, bad: int | None = None) -> None:
        if len(data) > _FIELD_BYTES and name:  # no room beside sixteen bytes in 80 columns
            typer.echo(f"{'':>10}  {name}")
            name = ""
        for at in range(0, len(data), _ROW_BYTES):
            typer.echo(self._row(offset + at, data[at : at + _ROW_BYTES], name, bad))

    def _row(self, offset: int, data: bytes, name: str, bad: int | None = None) -> str:
        """Format bytes in three columns each, so that the mark of a bad byte shifts nothing."""
        seams = [" "] * (len(data) + 1)
        cells = [f"{value:02x}" for value in data]
        mark = "" if bad is None or not offset <= bad < offset + len(data) else "  <- bad byte"
        if mark and bad is not None:
            number = bad - offset
            seams[number], seams[number + 1] = ">", "<"
            cells[number] = f"{self._on}{cells[number]}{self._off}"
        body = "".join(seam + cell for seam, cell in zip(seams, cells, strict=False)) + seams[-1]
        padding = " " * (3 * max(0, _FIELD_BYTES - len(data)))
        text = plain(data) if len(data) > 4 or not name else ""
        return f"{offset:>10} {body}{padding} {text}{'  ' + name if name else ''}".rstrip() + mark
