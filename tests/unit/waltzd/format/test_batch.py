"""Batches: taken apart they are what was put together, and each wrong byte of one shows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.errors.operations import BadFrame
from waltzd.format.batch import (
    HEAD_BYTES,
    Batch,
    End,
    Head,
    batch_at,
    decode_groups,
    decode_locks,
    encode_batch,
    encode_groups,
    encode_locks,
    parse_batches,
    why_wrong,
)
from waltzd.format.checksum import crc32
from waltzd.format.index import encode_entries, offsets_of
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import HEAD_BYTES as RECORD_HEAD_BYTES
from waltzd.format.record import LockColumns, Run, encode_payloads, heads, join_runs, trailers
from waltzd.format.span import BatchSpan
from waltzd.wire.streams import batches_of, batches_parts

LOCKS = st.lists(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 3)), max_size=5), min_size=1, max_size=40)


def columns(rows: list[list[tuple[int, int]]]) -> LockColumns:
    flat = [lock for row in rows for lock in row]
    return LockColumns(
        np.array([len(row) for row in rows], np.int64),
        np.array([id_ for id_, _ in flat], np.uint64),
        np.array([mode for _, mode in flat], np.uint8),
    )


def plain(locks: LockColumns) -> list[list[tuple[int, int]]]:
    found, at = [], 0
    for count in locks.counts.tolist():
        found.append(list(zip(locks.ids[at : at + count].tolist(), locks.modes[at : at + count].tolist(), strict=True)))
        at += count
    return found


def batch(first_id: int = 5, count: int = 3, *, before: End | None = None, **more: object) -> Batch:
    values: dict[str, object] = {
        "session": 7, "generation": 2, "committed": first_id - 2, "time": 1_700_000_000_000_000,
        "segment_bytes_max": 1 << 20,
    }  # fmt: skip
    run = encode_payloads(first_id, [bytes([65 + number]) * (number + 1) for number in range(count)])
    return encode_batch(run, before=before or End(), **{**values, **more})  # type: ignore[arg-type]


def raw(*batches: Batch) -> bytes:
    return b"".join(piece for one in batches for piece in one.pieces)


@pytest.mark.slow
@given(LOCKS)
def test_locks_come_back(rows: list[list[tuple[int, int]]]) -> None:
    found = decode_locks(encode_locks(columns(rows)), len(rows))
    assert found is not None
    assert plain(found) == rows


@pytest.mark.parametrize("counts", [[0, 0], [3, 3, 3], [1, 0, 255], [300, 1], [70_000, 70_000]])
def test_each_form_of_counts(counts: list[int]) -> None:
    total = sum(counts)
    locks = LockColumns(
        np.array(counts, np.int64), np.arange(total).astype(np.uint64), (np.arange(total) % 3 + 1).astype(np.uint8)
    )
    encoded = encode_locks(locks)
    assert len(encoded) <= 9 * total + 5 + 4 * len(counts) * (max(counts) > 255)
    found = decode_locks(encoded, len(counts))
    assert found is not None
    assert (found.counts.tolist(), found.ids.tolist(), found.modes.tolist()) == (
        counts, locks.ids.tolist(), locks.modes.tolist(),
    )  # fmt: skip


def test_bytes_that_are_no_locks() -> None:
    sound = encode_locks(columns([[(1, 1)], [(2, 2), (3, 3)]]))
    for end in range(1, len(sound)):
        assert decode_locks(sound[:end], 2) is None
    assert decode_locks(b"\3" + sound[1:], 2) is None
    assert decode_locks(sound + b"\0", 2) is None
    assert decode_locks(b"\0\0\0\0\0", 2) is None, "a section without locks has no bytes"
    assert decode_locks(sound[:-1] + b"\0", 2) is None, "no mode is 0"


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_groups_come_back(follows: list[bool]) -> None:
    found = decode_groups(encode_groups(np.array(follows)), len(follows))
    assert (found.tolist() if found is not None else [False] * len(follows)) == follows


@pytest.mark.slow
@given(LOCKS, st.randoms(use_true_random=False))
def test_a_batch_comes_back(rows: list[list[tuple[int, int]]], random: random.Random) -> None:
    follows = np.array([False, *(random.random() < 0.3 for _ in rows[1:])])
    first = batch(count=len(rows), locks=columns(rows), follows=follows)
    end = first.end(End())
    second = batch(first.last_id + 1, before=end)
    for bounds in (None, join_runs([first.run, second.run]).bounds):
        found = parse_batches(raw(first, second), bounds)
        assert [one.head for one in found] == [first.head, second.head]
        assert plain(found[0].locks) == rows
        assert [why_wrong(found[0], End()), why_wrong(found[1], end)] == ["", ""]
        assert found[0].run.times.tolist() == [first.head.time] * len(rows)  # type: ignore[union-attr]
        known = found[0].run.follows
        assert (known.tolist() if known is not None else [False] * len(rows)) == follows.tolist()
        assert found[0].is_same_as(first)


def test_where_the_next_one_has_to_fit() -> None:
    first = batch()
    end = first.end(End())
    assert end == End(crc=first.head.crc, time=first.head.time, segment_bytes=HEADER_BYTES + first.size)
    assert "another head in front" in why_wrong(batch(8), end)
    assert "time" in why_wrong(batch(8, before=end, time=first.head.time - 1), end)
    last = batch(8, before=end, segment_bytes_max=HEADER_BYTES + first.size + 10)
    assert last.head.is_last
    assert not first.head.is_last
    assert last.end(end).segment_bytes == 0


def test_every_wrong_bit_shows() -> None:
    """In the head it is no batch at all, behind it something is wrong with it."""
    sound = raw(batch(locks=columns([[(1, 1)], [], [(2, 2), (3, 3)]]), follows=np.array([False, True, False])))
    for bit in range(8 * len(sound)):
        wrong = bytearray(sound)
        wrong[bit // 8] ^= 1 << bit % 8
        head = Head.decode(wrong)
        if bit < 8 * HEAD_BYTES:
            assert head is None
        else:
            assert head is not None
            found = batch_at(memoryview(wrong), head)
            assert found is None or (why_wrong(found, deeply=False) and why_wrong(found))


def test_a_head_of_a_newer_program_is_none_although_its_checksum_is_right() -> None:
    """It uses flags or bytes that mean nothing today: to read it as if they were not there would be a guess."""
    head, sound = batch().head, raw(batch())
    forged = [head._replace(flags=1 << bit).encode() for bit in range(1, 32)]
    start = HEAD_BYTES - 20
    assert sound[start : HEAD_BYTES - 4] == bytes(16)
    for at in range(start, HEAD_BYTES - 4):
        front = bytearray(sound[: HEAD_BYTES - 4])
        front[at] = 1
        forged.append(bytes(front) + crc32(front).to_bytes(4, "big"))
    for wrong in forged:
        assert Head.decode(wrong) is None
        span = BatchSpan(memoryview(wrong + sound[HEAD_BYTES:]), np.array([0, len(sound)]), None)
        assert span.count == 0
    assert Head.decode(head.encode()) == head


def test_what_is_said_of_a_wrong_one() -> None:
    """Its checksums are right, so its owner was wrong."""
    with pytest.raises(BadFrame, match="no sound batch"):
        parse_batches(raw(batch())[:-1])
    with pytest.raises(BadFrame, match="follows id"):
        parse_batches(raw(batch(), batch(9)))
    with pytest.raises(BadFrame, match="records that its head states"):
        parse_batches(raw(batch()), encode_payloads(5, [b"", b"", b""]).bounds)
    assert why_wrong(batch(follows=np.array([True, False, False]))) == "its groups are not encoded as they have to be"
    run = encode_payloads(5, [b"a", b"b"])
    data = bytearray(run.data)
    data[7] = 9
    other = encode_batch(
        type(run)(5, memoryview(bytes(data)), run.bounds), session=1, generation=1, committed=0, time=1, before=End(),
        segment_bytes_max=1 << 20,
    )  # fmt: skip
    assert why_wrong(other, deeply=False) == "its records do not have consecutive ids"
    assert why_wrong(other) == "record 5 fails its checks"


def test_parts_and_joins_keep_what_stands_beside() -> None:
    first = batch(locks=columns([[(1, 1)], [], [(2, 2), (3, 3)]]), follows=np.array([False, True, False]))
    run = first.run_with_locks
    part = run.part(1, 3)
    assert (part.first_id, part.lead) == (6, run.lead + int(run.bounds[1]))
    assert part.follows is not None
    assert part.follows.tolist() == [True, False]
    assert part.locks is not None
    assert plain(part.locks) == [[], [(2, 2), (3, 3)]]
    joined = join_runs([run, encode_payloads(8, [b"x"])])
    assert joined.times is not None
    assert joined.times.tolist() == [first.head.time] * 3 + [-1]
    assert joined.locks is not None
    assert plain(joined.locks) == [*plain(first.locks), []]


@pytest.mark.slow
@given(LOCKS)
def test_few_locks_are_encoded_like_many(rows: list[list[tuple[int, int]]]) -> None:
    found = columns(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("waltzd.format.batch.FEW_LOCKS", 0)
        many = encode_locks(found)
    assert encode_locks(found) == many


def is_sound_by_columns(run: Run) -> bool:
    """What `first_bad` checks of many records, on the columns of one."""
    [head], [crc] = heads(run), trailers(run)
    size = int(run.bounds[1])
    return (
        int(head["id"]) == run.first_id
        and int(head["length"]) == size - RECORD_HEAD_BYTES - 4
        and int(crc) == crc32(run.data[: size - 4])
    )


@pytest.mark.parametrize("locks", [None, [[(7, 2), (9, 1)]]])
def test_a_single_record_is_judged_like_a_row_of_columns(locks: list[list[tuple[int, int]]] | None) -> None:
    sound = batch(count=1, locks=None if locks is None else columns(locks))
    assert why_wrong(sound) == ""
    judged: list[bool] = []
    for bit in range(8 * len(sound.data)):
        records = bytearray(sound.data)
        records[bit // 8] ^= 1 << bit % 8
        for mended in (records, bytearray((*records[:-4], *crc32(records[:-4]).to_bytes(4, "big")))):
            # The checksum over all records is right, so that the check of the record itself decides.
            head = sound.head._replace(record_crc=crc32(mended))
            crc = int.from_bytes(head.encode()[-4:], "big")
            preamble = head.encode() + bytes(sound.preamble[HEAD_BYTES:])
            bad = Batch(head._replace(crc=crc), preamble, memoryview(bytes(mended)), sound.bounds)
            judged.append(why_wrong(bad) == "")
            assert judged[-1] == is_sound_by_columns(bad.run), bit
            [found] = batches_of(b"".join(batches_parts((bad,), -1))).pieces
            assert isinstance(found, Batch)
            assert why_wrong(found) == why_wrong(bad)
    assert {True, False} == set(judged)


@given(st.integers(1, 40), st.integers(32, 1 << 33))
def test_the_entries_and_lengths_of_one_record_are_those_of_its_columns(size: int, offset: int) -> None:
    one = encode_batch(
        encode_payloads(5, [b"x" * size]), session=1, generation=1, committed=4, time=1, before=End(), segment_bytes_max=99
    )
    column = offsets_of(offset + one.head.lead, one.run)
    assert encode_entries(offset, one) == column.astype(">i8").tobytes()
    assert one.sent_lengths == one.run.sent_lengths


def test_a_frame_that_announces_one_record_holds_no_second_batch() -> None:
    first = batch(count=1)
    second = batch(6, 1, before=first.end(End()))
    content = bytearray(b"".join(bytes(part) for part in batches_parts((first,), -1)))
    with pytest.raises(BadFrame):
        batches_of(bytes(content) + raw(second))
