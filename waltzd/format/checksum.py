"""CRC-32 of thousands of records at once.

CRC-32 (with the polynomial of zlib) is linear: the checksum of `a + b` is `shift(crc(a), len(b)) ^ crc(b)`, where `shift`
multiplies by x^(8 * length) modulo the polynomial. So the checksum of a block of whole records follows from the checksums
in the records, and one native pass over the block checks all of them. One damaged record is found as surely as by a check
of each record; two damaged records in the same 64 KiB hide each other with a chance of 2^-32. The arithmetic runs on numpy
columns, so its cost does not depend on the size of the records.

Numbers are *reflected*, as in zlib: bit 31 is x^0. Pure. Tests compare with `zlib.crc32` of each record.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer

U32: TypeAlias = NDArray[np.uint32]
I64: TypeAlias = NDArray[np.int64]

try:  # the same function with the vector instructions of x86 and ARM: 20 instead of 4 GB/s
    from isal.isal_zlib import crc32 as _native
except ImportError:
    _native = zlib.crc32

crc32: Callable[..., int] = _native

_POLYNOMIAL = 0xEDB88320
_WINDOW_BITS = 16
_WINDOW_BYTES = 1 << _WINDOW_BITS


def _byte_tables() -> tuple[U32, U32, U32, U32]:
    """Return four tables: entry b of table k is the register after byte b and k zero bytes."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    out = [table]
    for _ in range(3):
        out.append((out[-1] >> np.uint32(8)) ^ table[out[-1] & np.uint32(255)])
    return out[0], out[1], out[2], out[3]


_T0, _T1, _T2, _T3 = _byte_tables()
_T0_LIST = _T0.tolist()


def multiply_mod(a: int, b: int) -> int:
    """Multiply two polynomials modulo the polynomial of CRC-32, one bit at a time."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _run4(register: U32) -> U32:
    """Run four zero bytes through each register."""
    octets = register.view(np.uint8).reshape(-1, 4)
    if np.little_endian:
        b0, b1, b2, b3 = octets[:, 0], octets[:, 1], octets[:, 2], octets[:, 3]
    else:  # pragma: no cover - no such machine at hand
        b3, b2, b1, b0 = octets[:, 0], octets[:, 1], octets[:, 2], octets[:, 3]
    out = _T3.take(b0)
    out ^= _T2.take(b1)
    out ^= _T1.take(b2)
    out ^= _T0.take(b3)
    return out


_HOLES = tuple(np.uint64(0x1111111111111111 << k & 0xFFFFFFFFFFFFFFFF) for k in range(4))
_HOLES32 = tuple(np.uint64(0x11111111 << k & 0xFFFFFFFF) for k in range(4))


def _carryless(a: U32, b: U32) -> NDArray[np.uint64]:
    """Multiply without carries. Each factor is split in four parts with three zero bits between its bits: at most eight
    partial products meet at one bit, their sum fits into the gap, and the mask drops the carries."""
    wide_a, wide_b = a.astype(np.uint64), b.astype(np.uint64)
    parts_a = [wide_a & hole for hole in _HOLES32]
    parts_b = [wide_b & hole for hole in _HOLES32]
    total = np.zeros(len(a), np.uint64)
    scratch = np.empty(len(a), np.uint64)
    for k in range(4):
        column = parts_a[0] * parts_b[k]
        for i in range(1, 4):
            np.multiply(parts_a[i], parts_b[(k - i) & 3], out=scratch)
            column ^= scratch
        column &= _HOLES[k]
        total |= column
    return total


def _reduce(product: NDArray[np.uint64]) -> U32:
    """Reduce products of 63 bits modulo the polynomial: the half of high degree runs through the register for 32 more
    bits."""
    product = product << np.uint64(1)
    low_degrees = (product >> np.uint64(32)).astype(np.uint32)
    return low_degrees ^ _run4(product.astype(np.uint32))


def _squares() -> tuple[int, ...]:
    out = [0x00800000]  # x^8, reflected: one byte
    while len(out) < 64:
        out.append(multiply_mod(out[-1], out[-1]))
    return tuple(out)


_FAR = _squares()
"""x^(8 * 2^k): the factor of a checksum that 2^k bytes follow."""


def _powers(factor: int, count: int) -> U32:
    """Return 1, `factor`, its square and so on: 1 is 0x80000000 in reflected form. Each step doubles the table."""
    out = np.array([0x80000000], np.uint32)
    while len(out) < count:
        out = np.append(out, _reduce(_carryless(out, np.array([factor], np.uint32))))
        factor = multiply_mod(factor, factor)
    return out[:count]


def _window_powers() -> U32:
    """Return x^(8n) for n below 64 Ki, in a millisecond of every import: 256 rows at once, a byte further in each step."""
    table = np.empty((256, _WINDOW_BYTES // 256), np.uint32)
    table[:, 0] = register = _powers(_FAR[8], 256)
    for column in range(1, table.shape[1]):
        register = (register >> np.uint32(8)) ^ _T0[register & np.uint32(255)]
        table[:, column] = register
    return table.reshape(-1)


_POWER = _window_powers()
"""x^(8n) for n below 64 Ki: the factor of a checksum that n bytes follow."""

_POWER_HIGH = _powers(_FAR[_WINDOW_BITS], 256)
"""x^(8 * 64Ki * n) for n below 256: enough for 16 MiB at once; longer records take several steps."""


def shift(crcs: U32, lengths: I64) -> U32:
    """Return the share of each `crc(a)` in `crc(a + b)`, where b has `lengths` bytes."""
    out = _reduce(_carryless(crcs, _POWER[lengths & (_WINDOW_BYTES - 1)]))
    far = np.flatnonzero(lengths >= _WINDOW_BYTES)
    if len(far):
        windows = lengths[far] >> _WINDOW_BITS
        while len(far):
            step = np.minimum(windows, len(_POWER_HIGH) - 1)
            out[far] = _reduce(_carryless(out[far], _POWER_HIGH[step]))
            windows = windows - step
            far, windows = far[windows > 0], windows[windows > 0]
    return out


_ZEROS = memoryview(bytes(_WINDOW_BYTES))


def shift_one(crc: int, length: int) -> int:
    """Return the share of one `crc(a)` in `crc(a + b)`, by running zeros through it: faster than `shift` for a few."""
    register = crc ^ 0xFFFFFFFF
    while length > _WINDOW_BYTES:
        register = crc32(_ZEROS, register)
        length -= _WINDOW_BYTES
    return crc32(_ZEROS[:length], register) ^ 0xFFFFFFFF


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of two byte strings back to back from the checksum of each, in microseconds for any length."""
    first = shift_one(first, second_bytes & (_WINDOW_BYTES - 1))
    for bit in range(_WINDOW_BITS, second_bytes.bit_length()):
        if second_bytes >> bit & 1:
            first = multiply_mod(first, _FAR[bit])
    return first ^ second


def crc_of_rows(rows: NDArray[np.uint8]) -> U32:
    """Return the CRC-32 of each row, whose width must be a multiple of four."""
    words = np.ascontiguousarray(rows).view("<u4").astype(np.uint32, copy=False)
    register = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for k in range(words.shape[1]):
        register ^= words[:, k]
        register = _run4(register)
    return ~register


def _over_own_trailer(stored: U32) -> U32:
    """Return the CRC of each record with its trailer: the stored CRC continued over its own four big-endian bytes."""
    return ~_run4(~stored ^ stored.byteswap())


def suspect_blocks(data: memoryview, ends: I64, stored: U32) -> list[tuple[int, int]]:
    """Return the blocks whose checksum is not the one that the stored checksums of their records imply.

    `data` holds whole records back to back, `ends` where each record ends, `stored` the checksum in the last four bytes of
    each, in native order. Each bad block of about 64 KiB is returned as the numbers of its first and last record."""
    count = len(ends)
    if count == 0:
        return []
    window = ends >> _WINDOW_BITS
    lasts = np.append(np.flatnonzero(window[1:] != window[:-1]), count - 1)
    firsts = np.append(0, lasts[:-1] + 1)
    block_ends = ends[lasts]
    behind = np.repeat(block_ends, lasts - firsts + 1) - ends
    products = _carryless(_over_own_trailer(stored), _POWER[behind])
    implied = _reduce(np.bitwise_xor.reduceat(products, firsts))
    bounds = [0, *block_ends.tolist()]
    bad: list[tuple[int, int]] = []
    for i, want in enumerate(implied.tolist()):
        if crc32(data[bounds[i] : bounds[i + 1]]) != want:
            bad.append((int(firsts[i]), int(lasts[i])))
    return bad


_TOP_TO_INDEX = {value >> 24: index for index, value in enumerate(_T0_LIST)}
"""Index of a table entry by its top byte. Each top byte occurs once, so a step of the register can be undone."""
assert len(_TOP_TO_INDEX) == 256


NEAR_BYTES_MAX = 128 << 10
"""Size of the largest record that counts as sound with one wrong byte: random bytes of that size do so with a chance of 1
in 130. A longer record counts as sound with one wrong bit only."""
_STEP = 1024
_BYTES = tuple(range(1, 256))
_BITS = tuple(1 << bit for bit in range(8))


@functools.cache
def _near(errors: tuple[int, ...]) -> tuple[U32, I64]:
    """Return the syndromes of each error at each of the last `_STEP` positions, sorted, and the position of each before."""
    rows = np.empty((_STEP, len(errors)), np.uint32)
    rows[0] = _T0[list(errors)]
    for distance in range(1, _STEP):
        before = rows[distance - 1]
        rows[distance] = (before >> np.uint32(8)) ^ _T0[before & np.uint32(255)]
    order = np.argsort(rows, axis=None, kind="stable")
    return rows.ravel()[order], order.astype(np.int64)


@functools.cache
def _back_step() -> int:
    """Return x^(-8 * _STEP)."""
    value = 0x80000000
    for _ in range(_STEP):
        index = _TOP_TO_INDEX[value >> 24]
        value = ((value ^ int(_T0_LIST[index])) << 8 & 0xFFFFFFFF) | index
    return value


def single_byte_error(codeword: Buffer, errors: tuple[int, ...] = _BYTES) -> tuple[int, int] | None:
    """Return position and right value of the one byte in which a record with its trailer differs from a sound record.

    The difference between the computed and the stored checksum is the error, moved by its distance from the end. The search
    takes large steps (baby step, giant step): 70 ms for 16 MiB. Return None if no single byte explains the difference. The
    answer is unique for records under some megabytes."""
    size = len(codeword) - 4
    assert size >= 0
    view = memoryview(codeword)
    syndrome = crc32(view[:size]) ^ int.from_bytes(view[size:], "big")
    if syndrome == 0:
        return None
    for k in range(4):  # in the trailer itself
        error = syndrome >> 8 * (3 - k)
        if error in errors and error << 8 * (3 - k) == syndrome:
            return size + k, view[size + k] ^ error
    near, places = _near(errors)
    moved = [syndrome]
    for _ in range((size - 1) // _STEP):
        moved.append(multiply_mod(moved[-1], _back_step()))
    giants = np.array(moved, np.uint32)
    at = np.minimum(np.searchsorted(near, giants), len(near) - 1)
    for step in np.flatnonzero(near[at] == giants).tolist():
        distance, number = divmod(int(places[at[step]]), len(errors))
        position = size - 1 - step * _STEP - distance
        if position >= 0:
            return position, view[position] ^ errors[number]
    return None


def is_one_byte_wrong(codeword: Buffer) -> bool:
    """Return whether one wrong byte explains the checksum of a record with its trailer; in a long record, one wrong bit."""
    return single_byte_error(codeword, _BITS if len(codeword) - 4 > NEAR_BYTES_MAX else _BYTES) is not None
