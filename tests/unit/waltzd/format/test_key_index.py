"""The key index beside a list of pairs and a loop, and what becomes of each flipped bit."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import UUID

import numpy as np
import pytest

from tests.batches import APPEND, READ, WRITE, batches_of, lock_columns, segment_raw
from tests.tiers import together
from waltzd.format.batch import encode_locks
from waltzd.format.key_index import (
    FILTER_PAGE_BYTES,
    HEADER_BYTES,
    PAGE_ENTRIES,
    KeyHeader,
    KeyIndex,
    KeyIndexWrong,
    LockMarks,
    LockQuery,
    MarkColumns,
    encode_key_index,
    lone_marks,
    marks_of,
    scan_marks,
)
from waltzd.format.layout import HEADER_BYTES as SEGMENT_HEADER_BYTES

KEY = UUID(int=7)
HEADER = KeyHeader(key=KEY, partition=3, first_id=1000, last_id=9000, footer=bytes(range(32)))


class Bytes:
    """A file in memory."""

    path = "here"

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.reads = 0

    def size(self) -> int:
        return len(self.raw)

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        return self.raw[offset : offset + size]

    def read_into(self, offset: int, buffer: memoryview) -> int:
        raise AssertionError("nobody calls it")


def answer(file: Bytes, lock: int) -> list[int]:
    return KeyIndex.read(file, HEADER).find(file, LockQuery(lock=lock, limit=9))


Pairs = list[tuple[int, int]]


def columns(pairs: Pairs) -> MarkColumns:
    return MarkColumns(np.array([lock for lock, _ in pairs], np.uint64), np.array([id_ for _, id_ in pairs], np.int64))


def drawn(chance: random.Random) -> Pairs:
    """Marks in the order of ids: a few locks that are marked often, many that are marked once, and the extremes."""
    hot = [chance.getrandbits(64) for _ in range(chance.randint(1, 4))] + [0, (1 << 64) - 1, 1]
    pairs: Pairs = []
    for id_ in range(HEADER.first_id, HEADER.first_id + chance.choice([0, 1, 5, 300, 2500])):
        for _ in range(chance.choice([0, 1, 1, 3])):
            pairs.append((chance.choice(hot) if chance.random() < 0.5 else chance.getrandbits(64), id_))
    return pairs


def slow(pairs: Pairs, query: LockQuery) -> list[int]:
    """The twin: a loop over all marks."""
    found = sorted({id_ for lock, id_ in pairs if lock == query.lock and query.first_id <= id_ <= query.last_id})
    return (found[::-1] if query.newest_first else found)[: query.limit]


def a_query(chance: random.Random, pairs: Pairs) -> LockQuery:
    lock = chance.choice(pairs)[0] if pairs and chance.random() < 0.8 else chance.getrandbits(64)
    low = chance.randint(990, 3600)
    return LockQuery(
        lock=lock,
        first_id=chance.choice([0, low]),
        last_id=chance.choice([1 << 62, low + chance.randint(-2, 2000)]),
        limit=chance.choice([1, 2, 50, 10_000]),
        newest_first=chance.random() < 0.5,
    )


@together("seed", range(25))
def test_an_index_answers_like_a_loop(seed: int) -> None:
    chance = random.Random(seed)
    pairs = drawn(chance)
    marks, file = columns(pairs), Bytes(encode_key_index(HEADER, columns(pairs)))
    index = KeyIndex.read(file, HEADER)
    for _ in range(60):
        query = a_query(chance, pairs)
        assert index.find(file, query) == marks.find(query) == slow(pairs, query)


def test_a_page_border_between_two_locks_and_within_one() -> None:
    pairs = [(5, 1000 + n) for n in range(PAGE_ENTRIES)] + [(6, 1000 + n) for n in range(PAGE_ENTRIES * 2 + 1)]
    file = Bytes(encode_key_index(HEADER, columns(pairs)))
    index = KeyIndex.read(file, HEADER)
    for lock in (4, 5, 6, 7):
        for first_id in (0, 1000, 1255, 1256, 1257, 1511, 1512, 1513):
            for newest_first in (False, True):
                query = LockQuery(lock=lock, first_id=first_id, limit=300, newest_first=newest_first)
                assert index.find(file, query) == slow(pairs, query)


def test_a_lock_with_very_many_marks_is_not_read_whole() -> None:
    pairs = [(5, 1000 + n) for n in range(200 * PAGE_ENTRIES)]
    file = Bytes(encode_key_index(HEADER, columns(pairs)))
    index = KeyIndex.read(file, HEADER)
    file.reads = 0
    assert index.find(file, LockQuery(lock=5, last_id=30_000, limit=2, newest_first=True)) == [30_000, 29_999]
    assert file.reads <= 12


def test_the_filter_spares_most_look_ups_a_page() -> None:
    chance = random.Random(1)
    pairs = [(chance.getrandbits(64), 1000 + n) for n in range(4000)]
    file = Bytes(encode_key_index(HEADER, columns(pairs)))
    index = KeyIndex.read(file, HEADER)
    file.reads = 0
    for lock in range(2000):  # locks that nobody hashed
        assert index.find(file, LockQuery(lock=lock, limit=9)) == []
    assert file.reads < 2000 * 1.03


@pytest.mark.parametrize("count", [0, 3, 300])
def test_each_flipped_bit_is_noticed_or_harmless(count: int) -> None:
    chance = random.Random(count)
    pairs = [(chance.choice([9, 10, chance.getrandbits(64)]), 1000 + n) for n in range(count)]
    raw = encode_key_index(HEADER, columns(pairs))
    queries = [LockQuery(lock=lock, limit=1000) for lock in [9, 10, *[lock for lock, _ in pairs[:3]], 12345]]
    right = [slow(pairs, query) for query in queries]
    noticed = 0
    for bit in chance.sample(range(len(raw) * 8), min(len(raw) * 8, 2500)):
        file = Bytes(raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :])
        try:
            index = KeyIndex.read(file, HEADER)
            assert [index.find(file, query) for query in queries] == right
        except KeyIndexWrong:
            noticed += 1
    assert noticed


@pytest.mark.parametrize("field", ["header", "fence", "filter", "page"])
def test_damage_in_each_part_is_noticed(field: str) -> None:
    raw = bytearray(encode_key_index(HEADER, columns([(9, 1000)])))
    at = {"header": 40, "fence": HEADER_BYTES, "filter": HEADER_BYTES + 8, "page": HEADER_BYTES + 8 + FILTER_PAGE_BYTES}
    raw[at[field] + 7] ^= 1
    with pytest.raises(KeyIndexWrong):
        answer(Bytes(bytes(raw)), 9)


@pytest.mark.parametrize(
    "other",
    [
        replace(HEADER, key=UUID(int=8)),
        replace(HEADER, partition=4),
        replace(HEADER, first_id=999),
        replace(HEADER, last_id=9001),
        replace(HEADER, footer=bytes(32)),
    ],
)
def test_an_index_of_another_segment_is_refused(other: KeyHeader) -> None:
    with pytest.raises(KeyIndexWrong):
        KeyIndex.read(Bytes(encode_key_index(other, columns([(9, 1000)]))), HEADER)


@pytest.mark.parametrize("size", [0, 50, HEADER_BYTES, HEADER_BYTES + 9, -1])
def test_a_torn_index_is_refused(size: int) -> None:
    with pytest.raises(KeyIndexWrong):
        KeyIndex.read(Bytes(encode_key_index(HEADER, columns([(9, 1000)]))[:size]), HEADER)


def test_checked_locks_leave_no_mark() -> None:
    found = marks_of(10, lock_columns([[(7, READ), (8, WRITE)], [], [(7, APPEND)]]))
    assert (found.locks.tolist(), found.ids.tolist()) == ([8, 7], [10, 12])


# -- the heads of the batches ------------------------------------------------------------------------------------------


@together("seed", range(20))
def test_the_marks_of_one_transaction_are_those_of_the_columns(seed: int) -> None:
    chance = random.Random(seed)
    for count in range(1, 20):
        row = [(chance.randrange(1 << 64), chance.choice([READ, WRITE, APPEND])) for _ in range(count)]
        section = encode_locks(lock_columns([row]))
        assert lone_marks(section) == marks_of(7, lock_columns([row])).locks.tolist()
        for wrong in (b"", b"\1" + section[1:], section[:-1], section + b"\0", section[:5]):
            assert lone_marks(wrong) is None


def a_row(chance: random.Random) -> list[tuple[int, int]]:
    return [(chance.getrandbits(3), chance.choice([READ, WRITE, APPEND])) for _ in range(chance.randint(0, 300))]


def a_log(chance: random.Random) -> tuple[bytes, Pairs, list[int]]:
    """A segment file, its marks, and the last id of each batch."""
    payloads = [[bytes(chance.choice([0, 9, 6000])) for _ in range(chance.randint(1, 5))] for _ in range(20)]
    rows = [None if chance.random() < 0.2 else [a_row(chance) for _ in own] for own in payloads]
    log = batches_of(payloads, locks=rows, first_id=50)
    pairs = [
        (lock, batch.first_id + row)
        for batch, own in zip(log, rows, strict=True)
        for row, locks in enumerate(own or [])
        for lock, mode in locks
        if mode != READ
    ]
    return segment_raw(log, key=KEY)[0], pairs, [batch.last_id for batch in log]


@pytest.mark.parametrize("seed", range(5))
def test_a_scan_finds_all_marks_and_stops_at_the_end_of_a_batch(seed: int) -> None:
    raw, pairs, ends = a_log(random.Random(seed))
    file = Bytes(raw)
    for last_id in (50, ends[0], ends[7], ends[7] + 1, ends[-1]):
        found = scan_marks(file, SEGMENT_HEADER_BYTES, 50, last_id)
        assert found is not None
        marks, offset, next_id = found
        end = max((end for end in ends if end <= last_id), default=49)
        assert next_id == end + 1
        assert list(zip(marks.locks.tolist(), marks.ids.tolist(), strict=True)) == [
            pair for pair in pairs if pair[1] <= end
        ]
        rest = scan_marks(file, offset, next_id, ends[-1])
        assert rest is not None
        joined = MarkColumns.join([marks, rest[0]])
        assert joined.ids.tolist() == [id_ for _, id_ in pairs]


def test_a_scan_refuses_damaged_heads_and_locks() -> None:
    raw, _, ends = a_log(random.Random(4))
    for at in (SEGMENT_HEADER_BYTES + 9, SEGMENT_HEADER_BYTES + 97):
        bad = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        assert scan_marks(Bytes(bad), SEGMENT_HEADER_BYTES, 50, ends[-1]) is None
    assert scan_marks(Bytes(raw), SEGMENT_HEADER_BYTES, 51, ends[-1]) is None


def test_what_follows_a_part_of_an_answer() -> None:
    query = LockQuery(lock=1, first_id=10, last_id=20, limit=5)
    rest = query.after(LockMarks(ids=(11, 12), through=15))
    assert (rest.first_id, rest.last_id, rest.limit) == (16, 20, 3)
    rest = replace(query, newest_first=True).after(LockMarks(ids=(19,), through=18))
    assert (rest.first_id, rest.last_id, rest.limit, rest.next_id) == (10, 17, 4, 17)
    assert query.after(LockMarks(ids=(), through=20)).is_done
