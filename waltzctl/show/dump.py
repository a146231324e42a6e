"""A dump of a file: a line a record, an object a line, a row of CSV for each entry, or all bytes with their meaning.

Each form is a sink for the items of `waltzd.storage.offline.dump` and prints them as they come. Payload bytes never reach a
terminal as they are: a table and the right column of a hex dump show a dot for all that is not plain ASCII.
"""

from __future__ import annotations

import base64
import shutil
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import typer

from waltzctl.show.forms import JSON_VERSION, Column, Columns, stream
from waltzd.format.explain import BadRecord, describe
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, decode_record
from waltzd.storage.offline.dump import DamagedBytes, FileStart, IndexEntry, Item, Sink, Slot, WholeRecord

_TABLE_PAYLOAD_BYTES = 64
_ROW_BYTES = 16
_FIELD_BYTES = 8
"""A field of up to this size has its name on the same line."""


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
        yield "   nothing sound stands behind them: a torn tail, or damage"
    for record in item.records:
        yield f"   {describe([record])}"


def _slot_lines(item: Slot) -> Iterator[str]:
    yield f"{item.offset:>10}  {item.name}" + (f" ({item.note})" if item.note else "")
    facts = ", ".join(f"{name} {value}" for name, value in item.fields.items())
    for line in textwrap.wrap(facts, 68, break_on_hyphens=False):
        yield " " * 12 + line


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
        elif isinstance(item, IndexEntry):
            note = "  left out" if item.points_to == 0 else ""
            typer.echo(f"{item.offset:>10} {item.id:>12} {item.points_to:>12}{note}")
        elif isinstance(item, FileStart):
            for line in _start_lines(item):
                typer.echo(line)
            if item.kind in _TITLES:
                typer.echo(_TITLES[item.kind])
        elif isinstance(item, DamagedBytes):
            for line in _damage_lines(item):
                typer.echo(line)
        else:
            for line in _slot_lines(item):
                typer.echo(line)


ENTRIES: Columns[dict[str, Any]] = tuple(
    Column(name)
    for name in (
        "kind", "offset", "id", "client", "generation", "partition", "sequence", "header", "length", "data_crc", "crc",
        "payload_base64", "payload_is_whole", "points_to", "first_byte", "last_byte", "first_id", "last_id", "name",
        "is_sound", "note",
    )
)  # fmt: skip
"""Of CSV: one table for records, entries of an index, slots and damage. Of a file's own fields JSON tells."""


def _rows(output: str, payload_bytes: int | None) -> Sink:
    put = stream(ENTRIES, output)

    def put_item(item: Item) -> None:
        found = _object(item, payload_bytes)
        if output == "json":
            put(found)
        elif not isinstance(item, FileStart):
            put({**dict.fromkeys(column.name for column in ENTRIES), **found})

    return put_item


def _object(item: Item, payload_bytes: int | None) -> dict[str, Any]:
    """Of JSON Lines; the first one carries the version."""
    if isinstance(item, WholeRecord):
        record = item.record()
        shown = record.payload[:payload_bytes]
        return {
            "kind": "record", "offset": item.offset, "id": record.id, "client": record.request.client,
            "generation": record.request.generation, "partition": record.request.partition,
            "sequence": record.request.sequence, "header": record.header, "length": record.length,
            "data_crc": f"{record.data_crc:08x}", "crc": f"{record.crc:08x}",
            "payload_base64": base64.b64encode(shown).decode(), "payload_is_whole": len(shown) == record.length,
        }  # fmt: skip
    if isinstance(item, DamagedBytes):
        return {
            "kind": "damage", "first_byte": item.first_byte, "last_byte": item.last_byte,
            "first_id": item.first_id, "last_id": item.last_id,
            "records": [_bad_record(record) for record in item.records],
        }  # fmt: skip
    if isinstance(item, IndexEntry):
        return {"kind": "index-entry", "id": item.id, "offset": item.offset, "points_to": item.points_to}
    if isinstance(item, Slot):
        return {
            "kind": "slot", "name": item.name, "offset": item.offset, "is_sound": item.is_sound,
            "note": item.note, "fields": item.fields,
        }  # fmt: skip
    return {
        "version": JSON_VERSION, "kind": item.kind, "path": item.path, "size": item.size,
        "problem": item.problem, **item.fields,
    }  # fmt: skip


def _bad_record(record: BadRecord) -> dict[str, object]:
    out: dict[str, object] = {"id": record.id, "first_byte": record.first_byte, "last_byte": record.last_byte}
    if record.bad_byte is not None:
        out |= {"bad_byte": record.bad_byte, "is": record.is_value, "right": record.right_value}
    return out | {"detail": describe([record])}


_FIELDS = ((0, 8, "transaction id"), (8, 4, "client"), (12, 4, "generation"), (16, 4, "partition"), (20, 4, "sequence"),
           (24, 4, "header"), (28, 4, "payload length"), (32, 4, "payload CRC"))  # fmt: skip
_HEADER_FIELDS = ((0, 4, "format version"), (4, 8, "creation date, ms"), (12, 16, "cluster key"), (28, 4, "partition"),
                  (32, 8, "first id"), (40, 88, "reserved"))  # fmt: skip


class _Hex:
    """Each field on a line of its own with its meaning; payloads in rows of sixteen."""

    def __init__(self, payload_bytes: int | None) -> None:
        self._payload_bytes = payload_bytes
        self._on, self._off = ("\x1b[7m", "\x1b[0m") if sys.stdout.isatty() else ("", "")

    def __call__(self, item: Item) -> None:
        if isinstance(item, WholeRecord):
            typer.echo(f"record {item.record().id}, bytes {item.offset} to {item.offset + len(item.raw) - 1}")
            self._record(item.offset, bytes(item.raw), None)
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
                self._record(at, item.read(at, record.last_byte + 1 - at), record.bad_byte)
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
        """Three columns a byte, so that the marks around a bad one do not shift the others."""
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
