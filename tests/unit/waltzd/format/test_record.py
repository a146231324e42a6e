"""Records against a twin made of `struct` and `zlib`; every prefix is incomplete, every flipped bit is found."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.disk.simulated import SimDisk
from waltzd.format.checksum import single_byte_error
from waltzd.format.record import (
    FEW_RECORDS,
    OVERHEAD_BYTES,
    Run,
    bad_payloads,
    decode_record,
    empty_run,
    encode_payloads,
    encode_run,
    first_bad,
    first_bad_one_by_one,
    heads,
    id_and_length,
    join_runs,
    likely_starts,
    trailers,
    walk,
)
from waltzd.format.scan import Gap, Stop, scan, survey

LARGEST_ID = 2**63 - 1
i32 = st.integers(-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Row:
    request: tuple[int, int, int, int]
    header: int
    payload: bytes


rows = st.lists(st.builds(Row, st.tuples(i32, i32, i32, i32), i32, st.binary(max_size=80)), max_size=100)


def encode(first_id: int, given_rows: list[Row], data_crcs: list[int] | None = None) -> Run:
    return encode_run(
        first_id,
        requests=np.array([row.request for row in given_rows], np.int32).reshape(-1, 4),
        headers=np.array([row.header for row in given_rows], np.int32),
        lengths=np.array([len(row.payload) for row in given_rows], np.int64),
        data_crcs=np.array(data_crcs or [zlib.crc32(row.payload) for row in given_rows], np.uint32),
        payloads=b"".join(row.payload for row in given_rows),
    )


def encode_slowly(first_id: int, given_rows: list[Row]) -> bytes:
    """The twin of `encode_run`: one record after the other."""
    out = b""
    for id_, row in enumerate(given_rows, first_id):
        crc = zlib.crc32(row.payload)
        body = struct.pack(">q4iiiI", id_, *row.request, row.header, len(row.payload), crc) + row.payload
        out += body + struct.pack(">I", zlib.crc32(body))
    return out


def small_run(count: int, first_id: int = 7) -> Run:
    pick = random.Random(count)
    return encode_payloads(first_id, [pick.randbytes(pick.randrange(9)) for _ in range(count)])


def changed(run: Run, at: int, mask: int) -> Run:
    raw = bytearray(run.data)
    raw[at] ^= mask
    return Run(run.first_id, memoryview(raw), run.bounds)


@pytest.mark.slow
@given(st.one_of(st.integers(0, 10**6), st.integers(LARGEST_ID - 200, LARGEST_ID - 100)), rows)
def test_encoding_equals_its_twin_and_decodes_again(first_id: int, given_rows: list[Row]) -> None:
    with patch("waltzd.format.record.FEW_TO_ENCODE", 0):
        run = encode(first_id, given_rows)
    assert bytes(run.data) == encode_slowly(first_id, given_rows)
    assert run.data == encode(first_id, given_rows).data  # a few are made one by one
    assert len(run) == len(given_rows)
    assert walk(run.data).tolist() == run.bounds.tolist()
    assert first_bad(run) is None
    assert not bad_payloads(run).size
    for number, row in enumerate(given_rows):
        record = run.record(number)
        request = record.request
        assert record.id == first_id + number
        assert (request.client, request.generation, request.partition, request.sequence) == row.request
        assert (record.header, record.length, record.payload) == (row.header, len(row.payload), row.payload)
        assert record.data_crc == zlib.crc32(row.payload)
    assert heads(run)["id"].tolist() == [first_id + number for number in range(len(run))]
    assert trailers(run).tolist() == [run.record(number).crc for number in range(len(run))]


@pytest.mark.slow
@pytest.mark.parametrize("size", [65_536 - OVERHEAD_BYTES, 65_536, 65_537, (16 << 20) - 40, (16 << 20) + 1])
def test_large_records(size: int) -> None:
    row = Row((1, 2, 3, 4), -5, random.Random(size).randbytes(1000) * (size // 1000) + bytes(size % 1000))
    run = encode(3, [row, Row((0, 0, 0, 0), 0, b""), row])
    assert bytes(run.data) == encode_slowly(3, [row, Row((0, 0, 0, 0), 0, b""), row])
    assert first_bad(run) is None
    assert not bad_payloads(run).size
    assert first_bad(changed(run, len(run.data) - 100, 1)) == 2


def test_a_record_reads_as_people_expect() -> None:
    record = encode(8, [Row((1000, 1, 0, 2), 1, b"one")]).record(0)
    assert str(record.request) == "1000:1:0:2"
    assert record.payload == b"one"
    assert record.data_crc == 0x7A6C86F1


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_part_of_a_run_is_a_run(start: int, length: int) -> None:
    run = small_run(60)
    start, stop = min(start, 60), min(start + length, 60)
    part = run.part(start, stop)
    assert (part.first_id, len(part)) == (7 + start, stop - start)
    assert first_bad(part) is None
    assert [part.record(i) for i in range(len(part))] == [run.record(i) for i in range(start, stop)]


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.lists(st.integers(0, 20)), st.booleans())
def test_a_run_that_is_cut_anywhere_says_where_groups_go_on(flags: list[bool], cuts: list[int], goes_on: bool) -> None:
    count = len(flags)
    whole = replace(
        small_run(count), follows=np.array(flags, np.bool_), times=np.arange(count, dtype=np.int64), goes_on=goes_on
    )
    edges = sorted({0, count, *[cut for cut in cuts if cut < count]})
    parts = [whole.part(start, stop) for start, stop in pairwise(edges)]
    assert [part.goes_on for part in parts] == [*[flags[edge] for edge in edges[1:-1]], goes_on]
    joined = join_runs(parts)
    assert joined.follows is not None
    assert joined.times is not None
    assert (joined.follows.tolist(), joined.times.tolist(), joined.goes_on) == (flags, list(range(count)), goes_on)


def test_empty_run() -> None:
    run = empty_run(5)
    assert (len(run), run.last_id, first_bad(run), bad_payloads(run).tolist()) == (0, 4, None, [])
    assert len(heads(run)) == 0


# -- torn --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, FEW_RECORDS + 3])
def test_every_prefix_is_the_whole_records_in_it_and_a_rest(count: int) -> None:
    run = small_run(count)
    bounds = run.bounds.tolist()
    for size in range(len(run.data) + 1):
        prefix = run.data[:size]
        whole = [bound for bound in bounds if bound <= size]
        assert walk(prefix).tolist() == whole
        assert first_bad(Run(run.first_id, prefix[: whole[-1]], run.bounds[: len(whole)])) is None


def test_every_prefix_of_a_file_is_a_sound_beginning_and_a_tail() -> None:
    run = small_run(5)
    for size in range(len(run.data) + 1):
        disk = SimDisk()
        file = disk.create("segment")
        file.write(0, run.data[:size])
        whole = [bound for bound in run.bounds.tolist() if bound <= size]
        found = survey(file, first_id=7, end=size, offset=0)
        assert (found.next_id, found.end, found.tail_bytes) == (7 + len(whole) - 1, whole[-1], size - whole[-1])
        assert found.gaps == []


def test_a_negative_length_ends_the_walk() -> None:
    run = small_run(3)
    at = int(run.bounds[1]) + 28
    assert walk(changed(run, at, 0x80).data).tolist() == run.bounds[:2].tolist()


# -- damaged -----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_few_records_is_located() -> None:
    run = small_run(3)
    for at in range(len(run.data)):
        number = int(np.searchsorted(run.bounds, at, "right")) - 1
        start, stop = int(run.bounds[number]), int(run.bounds[number + 1])
        for bit in range(8):
            damaged = changed(run, at, 1 << bit)
            assert first_bad(damaged) == number
            assert single_byte_error(damaged.data[start:stop]) == (at - start, run.data[at])


@pytest.mark.slow
def test_every_damaged_byte_of_many_records_is_located_both_ways() -> None:
    run = small_run(FEW_RECORDS + 8)
    for at in range(len(run.data)):
        number = int(np.searchsorted(run.bounds, at, "right")) - 1
        damaged = changed(run, at, 1 << at % 8)
        assert first_bad(damaged) == number
        assert first_bad_one_by_one(damaged, 0, len(damaged)) == number


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), min_size=1, max_size=6), st.integers(70, 90))
def test_fast_and_slow_checks_agree_on_any_damage(damage: list[tuple[int, int]], count: int) -> None:
    run = small_run(count)
    raw = bytearray(run.data)
    for at, mask in damage:
        raw[at % len(raw)] ^= mask
    damaged = Run(run.first_id, memoryview(raw), run.bounds)
    assert first_bad(damaged) == first_bad_one_by_one(damaged, 0, count)


@pytest.mark.slow
def test_ten_thousand_random_corruptions_are_all_named() -> None:
    """One record of a batch: changed bits and bytes, a stretch of nothing, two records in each other's place, an index that
    points beside. The first record that is not what it was is the one that is named."""
    pick = random.Random(29)
    runs = [
        encode_payloads(
            pick.randrange(1 << 40), [pick.randbytes(pick.randrange(OVERHEAD_BYTES, 300)) for _ in range(count)]
        )
        for count in (FEW_RECORDS - 1, FEW_RECORDS, 150, 400)
    ]
    for _ in range(10_000):
        run = pick.choice(runs)
        raw, bounds = bytearray(run.data), run.bounds.copy()
        number = pick.randrange(len(run) - 1)
        start, stop, next_stop = map(int, bounds[number : number + 3])
        at = pick.randrange(start, stop)
        match pick.randrange(5):
            case 0:
                raw[at] ^= 1 << pick.randrange(8)
            case 1:
                size = min(pick.choice([1, 2, 4, 8]), stop - at)
                raw[at : at + size] = pick.randbytes(size)
            case 2:
                raw[at : min(at + 40, stop)] = bytes(min(at + 40, stop) - at)
            case 3:
                raw[start:next_stop] = raw[stop:next_stop] + raw[start:stop]
                bounds[number + 1] = start + next_stop - stop
            case _:
                bounds[number + 1] += pick.choice([-1, 1]) * pick.randrange(1, OVERHEAD_BYTES)
        is_changed = raw != run.data or bounds[number + 1] != stop
        assert first_bad(Run(run.first_id, memoryview(raw), bounds)) == (number if is_changed else None)


def test_every_flipped_bit_in_a_file_stops_the_scan_there_and_the_survey_goes_on_behind_it() -> None:
    run = small_run(3)
    disk = SimDisk()
    file = disk.create("segment")
    file.write(0, run.data)
    size = len(run.data)
    for at in range(size):
        number = int(np.searchsorted(run.bounds, at, "right")) - 1
        start, stop = int(run.bounds[number]), int(run.bounds[number + 1])
        for bit in range(8):
            disk.corrupt("segment", at, bytes([run.data[at] ^ 1 << bit]))
            found = scan(file, segment_first_id=7, next_id=7, offset=0, end=size)
            assert found == Stop(start, 7 + number)
            whole = survey(file, first_id=7, end=size, offset=0)
            if number < 2:
                assert whole.gaps == [Gap(start, stop - 1, 7 + number, 7 + number)]
                assert (whole.next_id, whole.tail_bytes) == (10, 0)
            else:
                assert (whole.gaps, whole.next_id, whole.tail_bytes) == ([], 9, stop - start)
        disk.corrupt("segment", at, run.data[at : at + 1].tobytes())


@pytest.mark.parametrize("count", [3, FEW_RECORDS + 8])
def test_records_in_the_wrong_order_are_found(count: int) -> None:
    run = encode_payloads(0, [b"same size"] * count)
    one = int(run.bounds[1])
    swapped = bytes(run.data[one : 2 * one]) + bytes(run.data[:one]) + bytes(run.data[2 * one :])
    assert first_bad(Run(0, memoryview(swapped), run.bounds)) == 0
    assert first_bad(Run(1, run.data, run.bounds)) == 0


@pytest.mark.parametrize("bad", [0, 41, 99])
def test_a_payload_that_was_damaged_before_it_became_a_record_is_told(bad: int) -> None:
    given_rows = [Row((1, 1, 1, n), n, bytes([n]) * n) for n in range(100)]
    crcs = [zlib.crc32(row.payload) for row in given_rows]
    crcs[bad] ^= 1 << 7
    body = struct.pack(">q4iiiI", bad, 1, 1, 1, bad, bad, bad, crcs[bad]) + given_rows[bad].payload
    run = encode(0, given_rows)
    raw = bytearray(run.data)
    raw[int(run.bounds[bad]) : int(run.bounds[bad + 1])] = body + struct.pack(">I", zlib.crc32(body))
    stored_so = Run(0, memoryview(raw), run.bounds)
    assert first_bad(stored_so) is None
    assert bad_payloads(stored_so).tolist() == [bad]


def test_a_payload_that_is_not_what_its_sender_saw_stays_visible() -> None:
    """`encode_run` takes the sender's checksum for true, so damage on the way does not get a fresh, right checksum."""
    given_rows = [Row((1, 1, 1, 1), 0, b"what arrived")]
    run = encode(0, given_rows, [zlib.crc32(b"what was sent")])
    assert first_bad(run) == 0


def test_likely_starts_are_all_starts_and_few_others() -> None:
    run = small_run(40)
    found = likely_starts(run.data, 7, 46, len(run.data))
    truth = [(start, *id_and_length(run.data, start)) for start in run.bounds[:-1].tolist()]
    assert set(truth) <= set(found)
    assert likely_starts(run.data, 20, 20, len(run.data))[0][:2] == (int(run.bounds[13]), 20)
    assert likely_starts(b"short", 0, 9, 5) == []


def test_decoding_takes_any_buffer() -> None:
    raw = bytes(small_run(1).data)
    assert decode_record(raw) == decode_record(memoryview(raw)) == decode_record(bytearray(raw))
