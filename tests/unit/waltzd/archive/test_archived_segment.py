"""What goes into an archive is proven: each byte of a segment of either format, and nothing of an index."""

from __future__ import annotations

from hashlib import sha256
from uuid import UUID
from zlib import crc32

import pytest

from tests.batches import batches_of, index_raw, segment_raw
from waltzd.archive.archived_segment import segment_entry
from waltzd.archive.manifest import Entry
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.errors.operations import UnfitSegment, UnknownVersion
from waltzd.format.layout import INDEX_ENTRY_BYTES, FileHeader
from waltzd.format.record import encode_payloads

KEY = UUID(int=5)
EXPECTED = FileHeader(created_ms=7, key=KEY, partition=0, first_id=0)
BATCHES = batches_of([[b"a", b"bc"], [b"d" * 300]], locks=[[[(7, 2)], []], None], cuts=[1])
SEALED, INDEX = segment_raw(BATCHES, key=KEY)[0], index_raw(BATCHES, key=KEY)
RECORDS = encode_payloads(0, [b"a", b"bc", b"d" * 300])
OLD = EXPECTED.encode() + bytes(RECORDS.data)


def proven(data: bytes, index: bytes = INDEX, *, expected: FileHeader = EXPECTED, last_id: int = 2) -> Entry:
    return segment_entry(data, index, expected=expected, last_id=last_id, path="0.seg")


@pytest.mark.parametrize("data", [SEALED, OLD], ids=["format 1", "format 0"])
def test_a_sound_segment_is_known_by_its_records(data: bytes) -> None:
    found = proven(data)
    records = b"".join(bytes(batch.run.data) for batch in BATCHES) if data is SEALED else bytes(RECORDS.data)
    assert (found.first, found.last, found.record_bytes, found.crc) == (0, 2, len(records), crc32(records))
    assert found.sha256 == sha256(data + INDEX).hexdigest()
    assert (found.size, found.index_bytes, found.segments) == (len(data) + len(INDEX), len(INDEX), 1)


def test_an_index_that_is_not_whole_is_left_out_and_what_is_behind_it_is() -> None:
    assert proven(SEALED, INDEX + b"1234567").index_bytes == len(INDEX)
    assert proven(SEALED, INDEX[:-1]).index_bytes == 0
    assert proven(SEALED, b"").size == len(SEALED)
    assert len(INDEX) == 128 + 3 * INDEX_ENTRY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("data", [SEALED, OLD], ids=["format 1", "format 0"])
def test_each_wrong_bit_is_noticed(data: bytes) -> None:
    """But in the date of the header of format 0, which no checksum covers and which means nothing."""
    for bit in range(8 * len(data)):
        if data is OLD and 4 <= bit // 8 < 12:
            continue
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises((UnfitSegment, UnknownVersion, ForeignCluster)):
            proven(bytes(wrong))
    for end in range(0, len(data), 3):
        with pytest.raises(WaltzError):
            proven(data[:end])


def test_a_segment_of_other_ids_is_not_taken() -> None:
    for data in (SEALED, OLD):
        for last_id in (1, 3):
            with pytest.raises(UnfitSegment):
                proven(data, last_id=last_id)
    with pytest.raises(UnfitSegment, match="no sound footer"):
        proven(segment_raw(batches_of([[b"a"]]), key=KEY)[0], last_id=0)
