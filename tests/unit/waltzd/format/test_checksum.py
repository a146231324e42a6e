"""The fast checksums against zlib, one record at a time."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.format.checksum import (
    _T0_LIST,
    _TOP_TO_INDEX,
    NEAR_BYTES_MAX,
    crc32,
    crc_of_rows,
    is_one_byte_wrong,
    joined_crc,
    multiply_mod,
    shift,
    shift_one,
    single_byte_error,
    suspect_blocks,
)
from waltzd.format.record import Run, encode_payloads, trailers

ONE = 0x80000000
"""x^0 in reflected form."""
X8 = 0x00800000
u32 = st.integers(0, 2**32 - 1)


def shift_slowly(crc: int, length: int) -> int:
    """The twin of `shift`: x^(8 * length) by squaring, one bit of the length at a time."""
    power, square = ONE, X8
    while length:
        if length & 1:
            power = multiply_mod(power, square)
        square = multiply_mod(square, square)
        length >>= 1
    return multiply_mod(crc, power)


def shifted(crcs: list[int], lengths: list[int]) -> list[int]:
    result: list[int] = shift(np.array(crcs, np.uint32), np.array(lengths, np.int64)).tolist()
    return result


@given(st.binary(max_size=300), u32)
def test_native_checksum_is_that_of_zlib(data: bytes, start: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, start) == zlib.crc32(data, start)


@given(u32, u32, u32)
def test_products_of_polynomials(a: int, b: int, c: int) -> None:
    assert multiply_mod(a, ONE) == a
    assert multiply_mod(a, b) == multiply_mod(b, a)
    assert multiply_mod(multiply_mod(a, b), c) == multiply_mod(a, multiply_mod(b, c))
    assert multiply_mod(a, b ^ c) == multiply_mod(a, b) ^ multiply_mod(a, c)


@given(st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=500)), max_size=20))
def test_shift_joins_checksums(pairs: list[tuple[bytes, bytes]]) -> None:
    moved = shifted([zlib.crc32(a) for a, _ in pairs], [len(b) for _, b in pairs])
    assert [m ^ zlib.crc32(b) for m, (_, b) in zip(moved, pairs, strict=True)] == [zlib.crc32(a + b) for a, b in pairs]


@pytest.mark.parametrize(
    "length",
    [
        0,
        1,
        65_535,
        65_536,
        65_537,
        3 * 65_536 + 5,
        (16 << 20) - 65_536,
        (16 << 20) - 1,
        16 << 20,
        (16 << 20) + 1,
        35_000_003,
    ],
)
def test_shift_over_long_records_is_what_zlib_says(length: int) -> None:
    a, b = b"head", bytes(length)
    assert shifted([zlib.crc32(a)], [length]) == [zlib.crc32(a + b) ^ zlib.crc32(b)] == [shift_one(zlib.crc32(a), length)]


@given(st.lists(st.tuples(u32, st.integers(0, 2**31 - 1)), min_size=1, max_size=30))
def test_shift_and_its_twin_agree_up_to_the_longest_record(pairs: list[tuple[int, int]]) -> None:
    crcs, lengths = [c for c, _ in pairs], [n for _, n in pairs]
    assert shifted(crcs, lengths) == [shift_slowly(c, n) for c, n in pairs]


@given(st.sampled_from([4, 32, 36, 40]), st.integers(0, 40), st.randoms(use_true_random=False))
def test_checksums_of_rows(width: int, count: int, pick: random.Random) -> None:
    rows = np.frombuffer(pick.randbytes(width * count), np.uint8).reshape(count, width)
    assert crc_of_rows(rows).tolist() == [zlib.crc32(row.tobytes()) for row in rows]


def single_byte_error_slowly(codeword: bytearray) -> tuple[int, int] | None:
    """The twin: the difference of checksums is moved back, a byte at a time, until it fits in one byte."""
    size = len(codeword) - 4
    assert size >= 0
    view = memoryview(codeword)
    syndrome = zlib.crc32(view[:size]) ^ int.from_bytes(view[size:], "big")
    if syndrome == 0:
        return None
    for k in range(4):  # the error is in the trailer itself
        if syndrome & ~(0xFF << 8 * (3 - k)) & 0xFFFFFFFF == 0:
            return size + k, view[size + k] ^ (syndrome >> 8 * (3 - k))
    moved = syndrome  # crc moved over its last byte: undo one byte step at a time
    for position in range(size - 1, -1, -1):
        high = moved >> 24
        index = _TOP_TO_INDEX[high]
        moved = ((moved ^ _T0_LIST[index]) << 8 | index) & 0xFFFFFFFF
        if moved <= 0xFF:
            return position, view[position] ^ moved
    return None


def run_of_sizes(sizes: list[int], seed: int = 1) -> Run:
    pick = random.Random(seed)
    return encode_payloads(0, [pick.randbytes(size) for size in sizes])


def suspects(run: Run, data: bytes | bytearray) -> list[tuple[int, int]]:
    damaged = Run(run.first_id, memoryview(data), run.bounds)
    return suspect_blocks(damaged.data, damaged.bounds[1:], trailers(damaged))


@pytest.mark.parametrize(
    "sizes",
    [[0], [0, 0, 0], [5, 0, 70_000, 3], [65_536 - 40] * 3, [65_536] * 3, [100] * 2000, [1 << 20, 0, 0, 200_000] * 2],
)
def test_blocks_of_sound_records_are_not_suspect(sizes: list[int]) -> None:
    run = run_of_sizes(sizes)
    assert suspects(run, bytes(run.data)) == []


@pytest.mark.slow
@given(st.lists(st.sampled_from([0, 1, 30, 500, 30_000, 70_000]), min_size=1, max_size=30), st.data())
def test_a_damaged_byte_makes_exactly_its_block_suspect(sizes: list[int], data: st.DataObject) -> None:
    run = run_of_sizes(sizes)
    at = data.draw(st.integers(0, len(run.data) - 1))
    raw = bytearray(run.data)
    raw[at] ^= data.draw(st.integers(1, 255))
    number = int(np.searchsorted(run.bounds, at, "right")) - 1
    [(first, last)] = suspects(run, raw)
    assert first <= number <= last


def test_damage_in_two_blocks_is_told_apart() -> None:
    run = run_of_sizes([1000] * 300)
    raw = bytearray(run.data)
    for number in (10, 290):
        raw[int(run.bounds[number]) + 50] ^= 1
    (first, last), (later_first, later_last) = suspects(run, raw)
    assert first <= 10 <= last < later_first <= 290 <= later_last


@pytest.mark.slow
def test_every_wrong_byte_of_a_record_is_named_with_its_right_value() -> None:
    sound = bytes(run_of_sizes([9]).data)
    assert single_byte_error(sound) is None
    for at, right in enumerate(sound):
        for wrong in range(256):
            if wrong != right:
                assert single_byte_error(sound[:at] + bytes([wrong]) + sound[at + 1 :]) == (at, right)


def test_a_wrong_byte_in_a_long_record_is_named() -> None:
    sound = bytes(run_of_sizes([100_000]).data)
    for at in (0, 35, 36, 50_000, 100_035, 100_036, 100_039):
        wrong = bytearray(sound)
        wrong[at] ^= 0x40
        assert single_byte_error(wrong) == (at, sound[at])


def test_two_wrong_bytes_are_not_explained_by_one() -> None:
    wrong = bytearray(run_of_sizes([50]).data)
    wrong[3] ^= 1
    wrong[60] ^= 128
    assert single_byte_error(wrong) is None


@given(st.binary(max_size=5000), st.data())
def test_one_wrong_byte_is_found_like_by_its_twin(payload: bytes, data: st.DataObject) -> None:
    codeword = bytearray(payload + crc32(payload).to_bytes(4, "big"))
    assert not is_one_byte_wrong(codeword)
    for _ in range(data.draw(st.integers(1, 3))):
        codeword[data.draw(st.integers(0, len(codeword) - 1))] ^= data.draw(st.integers(0, 255))
        where = single_byte_error_slowly(codeword)
        assert single_byte_error(codeword) == where
        assert is_one_byte_wrong(codeword) == (where is not None)


@pytest.mark.slow
@pytest.mark.parametrize("size", [NEAR_BYTES_MAX, NEAR_BYTES_MAX + 1, 3 << 20])
def test_one_wrong_byte_is_found_anywhere_in_a_large_record(size: int) -> None:
    random = np.random.default_rng(size)
    payload = random.bytes(size)
    codeword = bytearray(payload + crc32(payload).to_bytes(4, "big"))
    for at in (0, 1, size // 2, size - 1024, size - 1, size, size + 3, *random.integers(0, size, 5).tolist()):
        codeword[at] ^= 0x20
        assert is_one_byte_wrong(codeword)
        codeword[at] ^= 0x20 ^ 0x31
        assert is_one_byte_wrong(codeword) == (size <= NEAR_BYTES_MAX)
        codeword[at] ^= 0x31


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_checksum_combines_as_the_bytes_do(first: bytes, second: bytes) -> None:
    assert joined_crc(crc32(first), crc32(second), len(second)) == crc32(first + second)


def test_a_checksum_combines_over_any_distance() -> None:
    """The twin walks; the sum of two distances is the distance of their sum, far beyond what could be walked."""
    zeros = bytes(3 << 20)
    assert joined_crc(crc32(b"x"), crc32(zeros), len(zeros)) == crc32(b"x" + zeros)
    for near, far in ((5, 1 << 40), ((1 << 33) + 17, (1 << 50) + 3)):
        in_steps = joined_crc(joined_crc(0x12345678, 0, near), 0, far)
        assert joined_crc(0x12345678, 0, near + far) == in_steps
