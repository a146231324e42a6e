"""Footers: what follows from a segment, and the chain that they are."""

from __future__ import annotations

from hashlib import sha256

from tests.unit.waltzd.format.test_batch import batch, raw
from waltzd.format.batch import End
from waltzd.format.footer import END_BYTES, NO_HASH, Footer, FooterBuilder, footer_bytes

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
