"""Find the wrong byte in a damaged range of a segment.

If one byte was changed, the difference between two checksums gives its position and its right value, once the extent of the
record is known: from its length field, from the index, or from the record that follows. A byte is reported only if the
corrected record has the expected id, the right length, and a payload with the client's own checksum, so no report is a
coincidence. The head of a batch states the extent of its sections, and a corrected batch has to pass all checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from waltzd.disk.seam import File
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import Head, batch_at, why_wrong
from waltzd.format.checksum import crc32, single_byte_error
from waltzd.format.index import read_index
from waltzd.format.layout import BATCHES, VERSION
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, decode_record, id_and_length

RECORDS_MAX = 64
"""Number of records of one damaged range that are explained."""
SOUND_BYTES_MAX = 4 << 20
"""Size of the largest record that is explained: in a larger one, several single bytes could explain the same damage."""
SECTION_BYTES_MAX = 16 << 10
"""Size of the largest section of locks and groups that is explained: no second checksum confirms a byte of it."""
BUDGET_BYTES = 8 << 20
"""Number of bytes that are read to explain one damaged range, over all ends that are tried."""


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """The extent of one damaged record or batch, and its wrong byte if a single one explains the damage."""

    what: str = "record"
    id: int
    """Id of the record, or first id of the batch."""
    first_byte: int
    last_byte: int
    bad_byte: int | None = None
    is_value: int = 0
    right_value: int = 0
    note: str = ""
    is_whole: bool = False
    """Whether this is a sound batch in the wrong place. `note` says why it is wrong there."""

    def sentence(self) -> str:
        name = f"{self.what} {self.id}" if self.what == "record" else f"{self.what} at id {self.id}"
        if self.bad_byte is not None:
            return (
                f"{name}: byte {self.bad_byte} is 0x{self.is_value:02x}, a sound {self.what} has 0x{self.right_value:02x}"
            )
        return f"{name}: {self.note or 'no single byte explains it'}"


def explain(
    file: File, *, first_byte: int, last_byte: int, first_id: int, last_id: int | None, segment_first_id: int,
    index: File | None = None, version: int = VERSION,
) -> list[BadRecord]:  # fmt: skip
    """Return the damaged records, or batches, in a range of bytes. `last_id`: None unless a sound record follows."""
    if version == BATCHES:
        return _explain_batches(file, first_byte, last_byte + 1, first_id, last_id)
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
    """Return one sentence about the first `most` records, and the number of the rest."""
    said = [record.sentence() for record in records[:most]]
    if len(records) > most:
        said.append(f"{len(records) - most} more")
    return "; ".join(said)


def _end_by_index(index: File | None, id_: int, segment_first_id: int, at: int, end: int) -> int | None:
    """Return where the index says that the next record starts; None unless it agrees where this record starts."""
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
    """Return a phrase about how much of the record is there if the bytes end inside it; else ""."""
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
            note = f"a sound record with id {record.id} is in its place"
            return BadRecord(id=id_, first_byte=at, last_byte=last_byte, note=note)
        return None
    position, right = error
    record = decode_record(raw[:position] + bytes([right]) + raw[position + 1 :])
    if record.id != id_ or record.length != len(raw) - OVERHEAD_BYTES or crc32(record.payload) != record.data_crc:
        return None
    return BadRecord(
        id=id_, first_byte=at, last_byte=last_byte, bad_byte=at + position, is_value=raw[position], right_value=right
    )


# -- batches -----------------------------------------------------------------------------------------------------------


def _explain_batches(file: File, at: int, end: int, first_id: int, last_id: int | None) -> list[BadRecord]:
    """Explain batch by batch, from one sound or corrected head to the next, up to the last batch of the segment."""
    out: list[BadRecord] = []
    id_, budget, is_last = first_id, BUDGET_BYTES, False
    while at < end and len(out) < RECORDS_MAX and not is_last and (last_id is None or id_ <= last_id):
        raw = file.read(at, min(BATCH_HEAD_BYTES, end - at))
        head, wrong = Head.decode(raw), None
        if head is None and len(raw) == BATCH_HEAD_BYTES:
            head, wrong = _corrected_head(raw)
        if head is None or head.first_id < id_ or head.size > min(end - at, SOUND_BYTES_MAX, budget):
            note = "" if head is None else _why_unread(head, id_, end - at)
            if len(raw) < BATCH_HEAD_BYTES:
                note = f"only {len(raw)} bytes of it are there"
            out.append(BadRecord(what="batch", id=id_, first_byte=at, last_byte=end - 1, note=note))
            break
        budget -= head.size
        out.append(_explain_batch(file.read(at, head.size), at, id_, head, wrong))
        at, id_, is_last = at + head.size, head.last_id + 1, head.is_last
    return out


def _why_unread(head: Head, id_: int, room: int) -> str:
    if head.first_id < id_:
        return f"a batch with ids from {head.first_id} on is in its place"
    return (
        f"only {room} of its {head.size} bytes are there"
        if head.size > room
        else "it is too large to search it for the wrong byte"
    )


def _corrected_head(raw: bytes) -> tuple[Head | None, tuple[int, int] | None]:
    error = single_byte_error(raw)
    if error is None:
        return None, None
    at, right = error
    return Head.decode(raw[:at] + bytes([right]) + raw[at + 1 :]), error


def _explain_batch(raw: bytes, at: int, id_: int, head: Head, wrong: tuple[int, int] | None) -> BadRecord:
    """Explain one batch. `wrong`: position and right value of the byte of its head that was corrected already."""
    bare = BadRecord(what="batch", id=id_, first_byte=at, last_byte=at + len(raw) - 1)
    if wrong is None and (why := _why(raw, head)):
        wrong = _wrong_byte(raw, head)
        if wrong is None or _why(raw[: wrong[0]] + bytes([wrong[1]]) + raw[wrong[0] + 1 :], head):
            return replace(bare, note=f"{why}, and no single byte explains it")
    elif wrong is None:
        where = "it" if head.first_id == id_ else f"the batch at id {head.first_id} is whole, and"
        return replace(bare, note=f"{where} does not continue the batch in front of it", is_whole=True)
    elif _why(raw, head):
        return replace(bare, note="its head has one wrong byte, and other bytes are wrong as well")
    return replace(bare, bad_byte=at + wrong[0], is_value=raw[wrong[0]], right_value=wrong[1])


def _why(raw: bytes, head: Head) -> str:
    batch = batch_at(memoryview(raw), head)
    return "its records have other lengths" if batch is None else why_wrong(batch)


def _wrong_byte(raw: bytes, head: Head) -> tuple[int, int] | None:
    for start, stop, crc, most in (
        (BATCH_HEAD_BYTES, head.lead, head.section_crc, SECTION_BYTES_MAX),
        (head.lead, head.size, head.record_crc, SOUND_BYTES_MAX),
    ):
        if crc32(memoryview(raw)[start:stop]) != crc:
            if stop - start > most:
                return None
            error = single_byte_error(raw[start:stop] + crc.to_bytes(4, "big"))
            return None if error is None or start + error[0] >= stop else (start + error[0], error[1])
    return None
