"""Which byte of a damaged place is wrong.

One changed byte leaves a difference of checksums that gives its position and its right value, once the exact extent of the
record is known: from its own length field, from the index, or from the record behind. A byte is claimed only when the
corrected record has the expected id, the right length, and a payload with the client's own checksum, which rules out a
guess by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

from waltzd.disk.seam import File
from waltzd.format.checksum import crc32, single_byte_error
from waltzd.format.index import read_index
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, decode_record, id_and_length

RECORDS_MAX = 64
"""So many records of one damaged place are explained."""
SOUND_BYTES_MAX = 4 << 20
"""Of one record; in larger ones a second byte could explain the same damage."""
BUDGET_BYTES = 8 << 20
"""Read of one damaged place for its explanation, where several ends are tried."""


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """The extent of one damaged record, and its one wrong byte where there is only one."""

    id: int
    first_byte: int
    last_byte: int
    bad_byte: int | None = None
    is_value: int = 0
    right_value: int = 0
    note: str = ""

    def sentence(self) -> str:
        if self.bad_byte is not None:
            return (
                f"record {self.id}: byte {self.bad_byte} is 0x{self.is_value:02x}, "
                f"a sound record has 0x{self.right_value:02x}"
            )
        return f"record {self.id}: {self.note or 'no single byte explains it'}"


def explain(
    file: File, *, first_byte: int, last_byte: int, first_id: int, last_id: int | None, segment_first_id: int,
    index: File | None = None,
) -> list[BadRecord]:  # fmt: skip
    """The damaged records in a range of bytes. `last_id` is known when a sound record follows."""
    out: list[BadRecord] = []
    at, end, id_ = first_byte, last_byte + 1, first_id
    budget = BUDGET_BYTES
    while at < end and len(out) < RECORDS_MAX and (last_id is None or id_ <= last_id):
        by_index = _end_by_index(index, id_, segment_first_id, at, end)
        found = None
        for stop in _possible_ends(file, at, end, by_index, is_only=id_ == last_id):
            size = stop - at
            if not OVERHEAD_BYTES <= size <= min(SOUND_BYTES_MAX, budget):
                continue
            budget -= size
            found = _correct(file.read(at, size), at, id_)
            if found is not None:
                break
        if found is None:
            stop = by_index if by_index is not None else end
            found = BadRecord(id=id_, first_byte=at, last_byte=stop - 1, note=_cut_off(file, at, end, id_))
        out.append(found)
        at, id_ = found.last_byte + 1, id_ + 1
    return out


def describe(records: list[BadRecord], most: int = 4) -> str:
    said = [record.sentence() for record in records[:most]]
    if len(records) > most:
        said.append(f"{len(records) - most} more")
    return "; ".join(said)


def _end_by_index(index: File | None, id_: int, segment_first_id: int, at: int, end: int) -> int | None:
    """The index's start of the next record, provided that it agrees where this one starts."""
    if index is None:
        return None
    entries = read_index(index, id_ - segment_first_id, 2).tolist()
    if len(entries) == 2 and entries[0] == at and at + OVERHEAD_BYTES <= entries[1] <= end:
        return int(entries[1])
    return None


def _possible_ends(file: File, at: int, end: int, by_index: int | None, *, is_only: bool) -> list[int]:
    ends = [] if by_index is None else [by_index]
    if is_only:
        ends.insert(0, end)
    head = file.read(at, HEAD_BYTES)
    if len(head) == HEAD_BYTES:
        length = id_and_length(head)[1]
        if 0 <= length <= end - at - OVERHEAD_BYTES:
            ends.append(at + length + OVERHEAD_BYTES)
    ends.append(end)
    return list(dict.fromkeys(ends))


def _cut_off(file: File, at: int, end: int, id_: int) -> str:
    """A phrase about how much of the record is there, when the bytes end inside it."""
    head = file.read(at, min(HEAD_BYTES, end - at))
    if len(head) < HEAD_BYTES:
        return f"only {len(head)} bytes of it are there"
    claimed_id, length = id_and_length(head)
    if claimed_id == id_ and length > end - at - OVERHEAD_BYTES:
        return f"only {end - at} of its {length + OVERHEAD_BYTES} bytes are there"
    return ""


def _correct(raw: bytes, at: int, id_: int) -> BadRecord | None:
    last_byte = at + len(raw) - 1
    error = single_byte_error(raw)
    if error is None:
        record = decode_record(raw)
        if crc32(raw[:-4]) == record.crc and record.length == len(raw) - OVERHEAD_BYTES:
            note = f"a sound record with id {record.id} stands in its place"
            return BadRecord(id=id_, first_byte=at, last_byte=last_byte, note=note)
        return None
    position, right = error
    record = decode_record(raw[:position] + bytes([right]) + raw[position + 1 :])
    if record.id != id_ or record.length != len(raw) - OVERHEAD_BYTES or crc32(record.payload) != record.data_crc:
        return None
    return BadRecord(
        id=id_, first_byte=at, last_byte=last_byte, bad_byte=at + position, is_value=raw[position], right_value=right
    )
