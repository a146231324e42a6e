"""Footers: what follows from a segment, and the chain that they are."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np

from tests.unit.waltzd.format.test_batch import batch, raw
from waltzd.disk.simulated import SimDisk
from waltzd.format.batch import End
from waltzd.format.footer import END_BYTES, NO_HASH, Footer, FooterBuilder, footer_at, footer_bytes, read_footer

HEADER = bytes(range(128))


def made(before: bytes = NO_HASH) -> tuple[Footer, bytes]:
    first = batch()
    second = batch(8, before=first.end(End()), time=first.head.time + 5)
    builder = FooterBuilder(HEADER)
    for one in (first, second):
        builder.add(one.head, one.pieces)
    return builder.footer(before), HEADER + raw(first, second)


def test_it_says_what_the_segment_holds() -> None:
    footer, data = made()
    assert (footer.first_id, footer.last_id, footer.records) == (5, 10, 6)
    assert footer.last_time - footer.first_time == 5
    assert footer.offset == len(data)
    assert footer.digest == sha256(data).digest()
    assert [data[at : at + 4] for at in footer.batches.tolist()] == [b"WZB1", b"WZB1"]


def test_it_is_found_from_the_end_of_the_file() -> None:
    encoded = made()[0].encode()
    assert footer_bytes(encoded[-END_BYTES:]) == len(encoded)
    found = Footer.decode(encoded)
    assert found is not None
    assert found.encode() == encoded
    assert footer_bytes(bytes(END_BYTES)) is None
    assert footer_bytes(encoded[-END_BYTES + 1 :]) is None


def test_each_wrong_bit_and_each_end_shows() -> None:
    encoded = made()[0].encode()
    for bit in range(8 * len(encoded)):
        wrong = bytearray(encoded)
        wrong[bit // 8] ^= 1 << bit % 8
        assert Footer.decode(wrong) is None
    for end in range(len(encoded)):
        assert Footer.decode(encoded[:end]) is None


def test_one_proves_all_in_front_of_it() -> None:
    first, _ = made()
    assert first.hash == sha256(first.encode()).digest()
    assert made(first.hash)[0].hash != made()[0].hash


def test_a_footer_is_that_of_its_place() -> None:
    """Sound in itself, and behind other bytes than those that it proves: an older end of the file, or another file's."""
    footer, data = made()
    encoded = footer.encode()
    for wrong, found in ((b"", True), (bytes(7), False), (data[-64:], False)):
        file = SimDisk(0).create("data")
        file.write(0, data + wrong + encoded)
        offset, end = len(data) + len(wrong), len(data) + len(wrong) + len(encoded)
        assert (footer_at(file, offset, end) is not None) is found
        assert (read_footer(file) is not None) is found


def test_a_footer_whose_batches_have_no_room_is_none() -> None:
    footer, data = made()
    places = footer.batches.tolist()
    for batches in ([places[0] + 1, places[1]], [places[0], places[0] + 8], [places[0], len(data) - 8], []):
        file = SimDisk(0).create("data")
        encoded = replace(footer, batches=np.array(batches, np.int64)).encode()
        file.write(0, data + encoded)
        assert footer_at(file, len(data), len(data) + len(encoded)) is None
