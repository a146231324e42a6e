"""Key indexes: for each lock the transactions of a sealed segment that marked it, in the file `.key` beside the segment.

    0  magic `WZK1`      4     24 first id                    8     72 entries           8
    4  partition         4     32 last id                     8     80 CRC-32 of fence   4
    8  cluster key      16     40 SHA-256 of the footer      32     84 CRC-32 of this    4
       fence · filter pages · entry pages

An entry is a lock that a transaction marked (WRITE or APPEND) and the distance of its id from the first id. Entries are
sorted by lock and id; a page holds the locks of 256 entries, then their distances, then a CRC-32. The fence holds the
first lock of each page. The filter is a blocked Bloom filter: a lock sets six bits in one block of 512 bits, and a page
holds 32 blocks and a CRC-32. So a look-up of a lock that the segment lacks reads one page, and any other look-up about
one page more. The CRC-32 of a page goes on from that of the header plus the offset of the page, modulo 2³².

An index is never believed. It names the footer of its segment, and every byte that decides an answer is checked. An index
that is missing, damaged, or of another segment is made again from the heads of the batches, without reading a payload.

Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer, Readable
from waltzd.format.batch import HEAD_BYTES, Head, are_locks, decode_locks
from waltzd.format.checksum import I64, crc32
from waltzd.format.layout import HEADER_BYTES as SEGMENT_HEADER_BYTES
from waltzd.format.layout import ID_MAX
from waltzd.format.record import LockColumns

MAGIC = b"WZK1"
_HEAD = struct.Struct(">4si16sqq32sqII")
HEADER_BYTES = _HEAD.size
assert HEADER_BYTES == 88
_CRC = struct.Struct(">I")
PAGE_ENTRIES = 256
_IDS_AT = 8 * PAGE_ENTRIES
PAGE_BYTES = 12 * PAGE_ENTRIES + _CRC.size
BLOCK_BITS = 512
FILTER_BITS = 10
"""Bits of the filter for each entry: about one look-up in a hundred reads an entry page in vain."""
PROBES = 6
"""Bits that a lock sets in its block."""
_PAGE_BLOCKS = 32
FILTER_PAGE_BYTES = _PAGE_BLOCKS * BLOCK_BITS // 8 + _CRC.size
_READ = 1
"""`Mode.READ`: a lock that is checked and not marked."""
LEAD_BYTES, WINDOW_BYTES = 4096, 64 << 10
"""Bytes that a scan reads at once: the head of a large batch with most often all its locks, or many small batches."""

U64 = NDArray[np.uint64]
_32, _64 = (1 << 32) - 1, (1 << 64) - 1


class KeyIndexWrong(Exception):
    """The file is not a sound index of its segment."""


@dataclass(frozen=True, kw_only=True)
class LockQuery:
    """A question for the transactions that marked a lock."""

    lock: int
    first_id: int = 0
    last_id: int = ID_MAX
    """Highest id in the range; below `first_id` the range is empty."""
    limit: int
    """Largest number of ids in the answer; at least 1."""
    newest_first: bool = False

    @property
    def next_id(self) -> int:
        """First id that an answer has to cover."""
        return self.last_id if self.newest_first else self.first_id

    def within(self, first_id: int, last_id: int) -> LockQuery:
        """Return the query, limited to the ids from `first_id` to `last_id`."""
        if first_id <= self.first_id and self.last_id <= last_id:
            return self
        return replace(self, first_id=max(first_id, self.first_id), last_id=min(last_id, self.last_id))

    def after(self, part: LockMarks) -> LockQuery:
        """Return the question for what follows `part`, which answers the start of this one."""
        left = self.limit - len(part.ids)
        if self.newest_first:
            return replace(self, last_id=part.through - 1, limit=left)
        return replace(self, first_id=part.through + 1, limit=left)

    def is_answered_by(self, part: LockMarks) -> bool:
        """Return whether nothing follows `part`, which answers the start of this question."""
        is_whole = part.through <= self.first_id if self.newest_first else part.through >= self.last_id
        return is_whole or len(part.ids) >= self.limit

    @property
    def is_done(self) -> bool:
        return self.limit <= 0 or self.first_id > self.last_id


@dataclass(frozen=True, kw_only=True)
class LockMarks:
    """Part of the answer to a `LockQuery`, from the start of its range."""

    ids: tuple[int, ...]
    """Transactions that marked the lock: ascending, or descending with `newest_first`."""
    through: int
    """Last id that was considered, in the direction of the query; an answer that is full considers its last id last."""


def selected(ids: I64, query: LockQuery) -> list[int]:
    """Return the ids that answer the query, of `ids` in ascending order."""
    start, stop = np.searchsorted(ids, [query.first_id, query.last_id + 1]).tolist()
    if query.newest_first:
        return ids[max(start, stop - query.limit) : stop][::-1].tolist()  # type: ignore[no-any-return]
    return ids[start : min(stop, start + query.limit)].tolist()  # type: ignore[no-any-return]


# -- marks of batches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MarkColumns:
    """Locks and the ids that marked them, in the order of the ids."""

    locks: U64
    ids: I64

    @staticmethod
    def join(parts: Iterable[MarkColumns]) -> MarkColumns:
        found = list(parts)
        if not found:
            return MarkColumns(np.zeros(0, np.uint64), np.zeros(0, np.int64))
        return MarkColumns(np.concatenate([one.locks for one in found]), np.concatenate([one.ids for one in found]))

    def find(self, query: LockQuery) -> list[int]:
        ids = self.ids[self.locks == np.uint64(query.lock)]
        return selected(ids if len(ids) < 2 else np.unique(ids), query)


def marks_of(first_id: int, locks: LockColumns) -> MarkColumns:
    """Return the marks of consecutive transactions, without the locks that they only checked."""
    marks = locks.modes != _READ
    ids = np.repeat(np.arange(first_id, first_id + len(locks.counts)), locks.counts)
    return MarkColumns(locks.ids[marks].astype(np.uint64), ids[marks])


def lone_marks(section: Buffer) -> list[int] | None:
    """Return the locks that one transaction marked, given the section of locks of its batch; None if the section has
    another form. It does what `marks_of` does, in a loop, which costs less than ten calls of numpy."""
    if len(section) == 0 or section[0] != 0 or not are_locks(section, 1):
        return None
    total = int.from_bytes(section[1:5], "big")
    behind = 5 + 8 * total
    modes = int.from_bytes(section[behind:], "big") >> 2 * (-total % 4)
    locks = struct.unpack_from(f">{total}Q", section, 5)
    return [lock for at, lock in enumerate(locks) if modes >> 2 * (total - 1 - at) & 3 != _READ]


def scan_marks(data: Readable, offset: int, first_id: int, last_id: int) -> tuple[MarkColumns, int, int] | None:
    """Read the marks of the batches from `offset` on, where the batch with `first_id` begins, up to the last batch that
    ends at or before `last_id`. Return them, the offset behind them and the next id; None if a batch is not sound."""
    parts, packed = list[MarkColumns](), _PackedLocks(first_id)
    raw, start, step = b"", offset, LEAD_BYTES  # the bytes from `start` on
    while first_id <= last_id:
        if offset - start + HEAD_BYTES > len(raw):
            raw, start = data.read(offset, step), offset
        head = Head.decode(raw, offset - start)
        if head is None or head.first_id != first_id:
            return None
        records, lock_bytes, sections = head.records, head.lock_bytes, head.lock_bytes + head.group_bytes
        next_id, size = first_id + records, HEAD_BYTES + sections + head.record_bytes
        if next_id > last_id + 1:
            break
        at = offset - start + HEAD_BYTES
        if at + sections > len(raw):
            raw, start, at = data.read(offset, max(step, HEAD_BYTES + sections)), offset, HEAD_BYTES
        section = raw[at : at + lock_bytes]
        if lock_bytes and crc32(section if sections == lock_bytes else raw[at : at + sections]) != head.section_crc:
            return None
        if not packed.add(section, records):
            locks, before = decode_locks(section, records), packed.marks()
            if locks is None or before is None:
                return None
            parts += [before, marks_of(first_id, locks)]
            packed = _PackedLocks(next_id)
        step = WINDOW_BYTES if 16 * size <= WINDOW_BYTES else LEAD_BYTES
        first_id, offset = next_id, offset + size
    rest = packed.marks()
    return None if rest is None else (MarkColumns.join([*parts, rest]), offset, first_id)


class _PackedLocks:
    """Sections of locks of consecutive batches, which are decoded together: numpy takes as long for one small section."""

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id
        self._counts, self._locks, self._modes = bytearray(), bytearray(), bytearray()
        self._totals: list[int] = []
        """Number of locks in each section; the modes of a section end at a whole byte."""

    def add(self, section: bytes, records: int) -> bool:
        """Add the section of the next batch. Return False, and add nothing, if it has another form, or a wrong size."""
        if not section:
            self._counts += bytes(records)
            return True
        each = int.from_bytes(section[1:5], "big")
        if section[0] == 0 and each < 256:
            at, counts, total = 5, bytes((each,)) * records, each * records
        elif section[0] == 1:
            at, counts = 1 + records, section[1 : 1 + records]
            total = sum(counts)
        else:
            return False
        behind = at + 8 * total
        if total == 0 or len(section) != behind + (total + 3) // 4:
            return False
        self._counts += counts
        self._locks += section[at:behind]
        self._modes += section[behind:]
        self._totals.append(total)
        return True

    def marks(self) -> MarkColumns | None:
        """Return the marks in all sections; None if a lock has no mode."""
        if not self._totals:
            return MarkColumns.join([])
        totals = np.array(self._totals)
        stored = (totals + 3) // 4 * 4  # with the unused modes in the last byte of each section
        places = np.arange(int(totals.sum())) + np.repeat(np.cumsum(stored - totals) - (stored - totals), totals)
        modes = (np.frombuffer(self._modes, np.uint8)[:, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).ravel()[places]
        if not modes.all():
            return None
        counts = np.frombuffer(self._counts, np.uint8)
        ids = np.repeat(np.arange(self._first_id, self._first_id + len(counts)), counts)
        marks = modes != _READ
        return MarkColumns(np.frombuffer(self._locks, ">u8")[marks].astype(np.uint64), ids[marks])


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeyHeader:
    """Beginning of an index: the segment to which it belongs."""

    key: UUID
    partition: int
    first_id: int
    last_id: int
    footer: bytes
    """SHA-256 of the footer of the segment."""

    def encode(self, entries: int, fence_crc: int) -> bytes:
        raw = _HEAD.pack(
            MAGIC, self.partition, self.key.bytes, self.first_id, self.last_id, self.footer, entries, fence_crc, 0
        )[:-4]  # fmt: skip
        return raw + _CRC.pack(crc32(raw))

    @staticmethod
    def decode(raw: bytes) -> KeyHeader | None:
        """Return the header that an index begins with, unchecked; None if it is no index."""
        if len(raw) < HEADER_BYTES or raw[:4] != MAGIC:
            return None
        _, partition, key, first_id, last_id, footer, *_ = _HEAD.unpack_from(raw)
        return KeyHeader(key=UUID(bytes=key), partition=partition, first_id=first_id, last_id=last_id, footer=footer)


def encode_key_index(header: KeyHeader, marks: MarkColumns) -> bytes:
    """Return the bytes of the index of a segment with these marks."""
    order = _order_of(marks)
    locks, ids = marks.locks[order], marks.ids[order] - header.first_id
    if len(locks):
        is_new = np.append(True, (locks[1:] != locks[:-1]) | (ids[1:] != ids[:-1]))
        locks, ids = locks[is_new], ids[is_new]
    pages = -(-len(locks) // PAGE_ENTRIES)
    columns = np.zeros(pages * PAGE_ENTRIES, ">u8"), np.zeros(pages * PAGE_ENTRIES, ">u4")
    columns[0][: len(locks)], columns[1][: len(locks)] = locks, ids
    fence = columns[0][::PAGE_ENTRIES].tobytes()
    body = np.concatenate([column.reshape(pages, PAGE_ENTRIES).view(np.uint8) for column in columns], axis=1)
    lead = header.encode(len(locks), crc32(fence))
    start, seed = HEADER_BYTES + len(fence), _crc_of(lead)
    filter_ = _sealed(_filter_of(locks), start, seed)
    return b"".join((lead, fence, filter_, _sealed(body, start + len(filter_), seed)))


def _order_of(marks: MarkColumns) -> I64:
    """Return the order of marks by lock and id. They come in the order of their ids. A sort that is not stable takes a
    fifth of the time of a stable one, so only locks with several marks are sorted by that."""
    order = np.argsort(marks.locks)
    locks = marks.locks[order]
    is_same = locks[1:] == locks[:-1]
    several = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
    if len(several):
        found = np.sort(order[several])
        order[several] = found[np.argsort(marks.locks[found], kind="stable")]
    return order


def _crc_of(lead: bytes) -> int:
    """Return the checksum in an encoded header, from which the checksums of all pages go on."""
    return int.from_bytes(lead[-_CRC.size :], "big")


def key_index_of(data: Readable, header: KeyHeader) -> bytes | None:
    """Return the bytes of the index of a sealed segment; None if the heads or locks of its batches are damaged."""
    found = scan_marks(data, SEGMENT_HEADER_BYTES, header.first_id, header.last_id)
    return None if found is None or found[2] != header.last_id + 1 else encode_key_index(header, found[0])


def _sealed(pages: NDArray[np.uint8], offset: int, seed: int) -> bytes:
    """Return pages of bytes, each with its checksum; the first one is at `offset`."""
    size = pages.shape[1] + _CRC.size
    places = range(offset, offset + size * len(pages), size)
    return b"".join(
        piece + _CRC.pack(crc32(piece, seed + at & _32)) for at, piece in zip(places, map(bytes, pages), strict=True)
    )


def _blocks(entries: int) -> int:
    return -(-entries * FILTER_BITS // BLOCK_BITS)


def _filter_pages(entries: int) -> int:
    return -(-_blocks(entries) // _PAGE_BLOCKS)


def _filter_of(locks: U64) -> NDArray[np.uint8]:
    blocks = _blocks(len(locks))
    bits = np.zeros(_filter_pages(len(locks)) * _PAGE_BLOCKS * BLOCK_BITS, np.bool_)
    mixed = np.sort(_mixed(locks))  # the bits of one block are set one after the other
    start = ((mixed >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)) * np.uint64(BLOCK_BITS)
    mixed = _mixed(mixed)
    for probe in range(PROBES):
        bits[start + (mixed >> np.uint64(9 * probe) & np.uint64(BLOCK_BITS - 1))] = True
    return np.packbits(bits).reshape(-1, FILTER_PAGE_BYTES - _CRC.size)


def _mixed(values: U64) -> U64:
    """Spread the bits of locks, which an application in another language may not have hashed (splitmix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _mix(value: int) -> int:
    """Return what `_mixed` returns, for one value."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _64
    return value ^ value >> 31


@dataclass(frozen=True, eq=False)
class KeyIndex:
    """The header and fence of a sound index, by which pages of its file are found."""

    header: KeyHeader
    entries: int
    seed: int
    """Checksum of the header, from which the checksums of the pages go on. So a page of another index is noticed even if
    the file was replaced after its header was read."""
    fence: U64

    @staticmethod
    def read(file: Readable, header: KeyHeader) -> KeyIndex:
        """Read the index of the segment that `header` describes. Raise `KeyIndexWrong` if it is of another one, or its
        header, fence or size is wrong."""
        raw = file.read(0, HEADER_BYTES)
        if len(raw) < HEADER_BYTES:
            raise KeyIndexWrong("the file is shorter than a header")
        entries, fence_crc, _ = struct.unpack_from(">qII", raw, HEADER_BYTES - 16)
        if raw != header.encode(entries, fence_crc):
            raise KeyIndexWrong("the header is damaged, or of another segment")
        pages = -(-entries // PAGE_ENTRIES)
        size = HEADER_BYTES + 8 * pages + FILTER_PAGE_BYTES * _filter_pages(entries) + PAGE_BYTES * pages
        if entries < 0 or file.size() != size:
            raise KeyIndexWrong(f"the file has {file.size()} bytes, not {size}")
        fence = file.read(HEADER_BYTES, 8 * pages)
        if len(fence) != 8 * pages or crc32(fence) != fence_crc:
            raise KeyIndexWrong("the fence is damaged")
        return KeyIndex(header, entries, _crc_of(raw), np.frombuffer(fence, ">u8").astype(np.uint64))

    def find(self, file: Readable, query: LockQuery) -> list[int]:
        """Return the ids that answer the query. Raise `KeyIndexWrong` if a page is damaged."""
        lock = np.uint64(query.lock)
        if self.entries == 0 or query.is_done or not self._may_have(file, query.lock):
            return []
        low = max(0, int(self.fence.searchsorted(lock, "left")) - 1)
        high = int(self.fence.searchsorted(lock, "right")) - 1
        found: list[int] = []
        at = self._start(file, query, low, high)
        while low <= at <= high and len(found) < query.limit:
            ids = self._ids(file, at, lock)
            found += selected(ids, replace(query, limit=query.limit - len(found)))
            if len(ids) and (ids[0] < query.first_id if query.newest_first else ids[-1] > query.last_id):
                break
            at += -1 if query.newest_first else 1
        return found

    def _start(self, file: Readable, query: LockQuery, low: int, high: int) -> int:
        """Return the page from which to go on: behind `low`, each page begins with an entry of the lock, so the last page
        that begins at or below an id is found by halving."""
        id_ = query.next_id
        while low < high:
            middle = (low + high + 1) // 2
            ids = self._ids(file, middle, np.uint64(query.lock))
            if len(ids) and int(ids[0]) <= id_:
                low = middle
            else:
                high = middle - 1
        return low

    def _ids(self, file: Readable, page: int, lock: np.uint64) -> I64:
        """Return the ids of a lock in one page."""
        start = HEADER_BYTES + 8 * len(self.fence) + FILTER_PAGE_BYTES * _filter_pages(self.entries)
        raw = self._page(file, start + PAGE_BYTES * page, PAGE_BYTES)
        count = min(PAGE_ENTRIES, self.entries - page * PAGE_ENTRIES)
        locks = np.frombuffer(raw, ">u8", count)
        first, stop = locks.searchsorted(lock, "left"), locks.searchsorted(lock, "right")
        return np.frombuffer(raw, ">u4", count, _IDS_AT)[first:stop].astype(np.int64) + self.header.first_id

    def _page(self, file: Readable, offset: int, size: int) -> memoryview:
        """Return a page without its checksum. Raise `KeyIndexWrong` if the checksum is wrong."""
        raw = memoryview(file.read(offset, size))
        body = raw[: size - _CRC.size]
        if len(raw) != size or _CRC.pack(crc32(body, self.seed + offset & _32)) != raw[size - _CRC.size :]:
            raise KeyIndexWrong("a page is damaged, or of another index")
        return body

    def _may_have(self, file: Readable, lock: int) -> bool:
        """Return False if the filter proves that no transaction of the segment marked the lock."""
        mixed = _mix(lock)
        page, block = divmod((mixed >> 32) * _blocks(self.entries) >> 32, _PAGE_BLOCKS)
        start = HEADER_BYTES + 8 * len(self.fence) + FILTER_PAGE_BYTES * page
        raw = self._page(file, start, FILTER_PAGE_BYTES)
        mixed = _mix(mixed)
        for probe in range(PROBES):
            bit = block * BLOCK_BITS + (mixed >> 9 * probe & BLOCK_BITS - 1)
            if not raw[bit >> 3] & 0x80 >> (bit & 7):
                return False
        return True
