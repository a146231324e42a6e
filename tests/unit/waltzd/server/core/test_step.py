"""Batches to records: the columns against one transaction at a time.

The hybrid clock against what it promises: it never falls, and nothing is earlier than what its client had seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.mounting import batch_of, single_of
from waltzd.errors.operations import BadFrame, ClockAhead
from waltzd.format.batch import End, encode_batch
from waltzd.format.checksum import crc32, shift
from waltzd.format.record import (
    FEW_TO_ENCODE,
    OVERHEAD_BYTES,
    RequestId,
    bad_payloads,
    encode_record,
    encode_run,
    first_bad,
)
from waltzd.protocol.batches import AppendBatch
from waltzd.protocol.locks import Mode
from waltzd.server.core.step import (
    AHEAD_MAX,
    OWN_AHEAD_MAX,
    HybridClock,
    QueuedBatch,
    StorageClocks,
    build,
    check_payloads,
    check_seen,
    groups_of,
    locks_of,
    slices,
)


@dataclass
class Mount:
    client: int


payload_lists = st.lists(st.binary(max_size=12), min_size=1, max_size=12)


@pytest.mark.slow
@given(batches=st.lists(st.tuples(payload_lists, st.sets(st.integers(0, 11))), min_size=1, max_size=4))
def test_the_records_of_a_step_are_those_of_its_accepted_rows(batches: list[tuple[list[bytes], set[int]]]) -> None:
    items, expected = [], []
    for client, (payloads, rows) in enumerate(batches):
        refused = sorted(row for row in rows if row < len(payloads))
        batch = replace(batch_of(*payloads, first=100), headers=np.arange(len(payloads), dtype=np.int32))
        items.append(QueuedBatch(Mount(client), batch))
        assert items[-1].decide(np.array(refused, np.int64)) == len(payloads) - len(refused)
        expected += [
            (RequestId(client=client, generation=6, partition=2, sequence=100 + row), row, payload)
            for row, payload in enumerate(payloads)
            if row not in refused
        ]
    run = build(40, items, partition=2, generation=6)
    records = [run.record(number) for number in range(len(run))]
    assert [(record.request, record.header, record.payload) for record in records] == expected
    assert [record.id for record in records] == list(range(40, 40 + len(expected)))
    assert first_bad(run) is None
    assert not bad_payloads(run).size


@example(b"abc", 7, [(5, Mode.WRITE), (6, Mode.READ)], False)
@example(b"abc", 7, [(5, Mode.WRITE)], True)
@given(
    payload=st.binary(max_size=40),
    header=st.integers(-(1 << 31), (1 << 31) - 1),
    locks=st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.sampled_from(Mode)), max_size=20),
    is_refused=st.booleans(),
)
def test_a_transaction_alone_is_written_like_a_batch_of_one(
    payload: bytes, header: int, locks: list[tuple[int, Mode]], is_refused: bool
) -> None:
    columns = batch_of(payload, first=100, locks=[locks], header=header)
    built = []
    for batch in (columns, single_of(columns)):
        check_payloads(batch)
        (piece,) = slices(batch, 1, 1 << 20)
        assert piece is batch
        items = [QueuedBatch(Mount(3), piece)]
        accepted = items[0].decide(np.array([0] if is_refused else [], np.int64))
        assert (accepted, list(items[0].sequences)) == ((0, []) if is_refused else (1, [100]))
        run, found = build(40, items, partition=2, generation=6), locks_of(items)
        assert len(run) == accepted
        if is_refused:
            continue
        made = encode_batch(
            run, session=9, generation=6, committed=30, time=5, before=End(crc=1, time=4, segment_bytes=70),
            locks=found, follows=groups_of(items), segment_bytes_max=1000,
        )  # fmt: skip
        items[0].take_off(40, 5)
        built.append((made.head, b"".join(made.pieces), items[0].bytes, items[0].last_id))
        assert made.run.record(0).request == RequestId(client=3, generation=6, partition=2, sequence=100)
    assert built[1:] == built[:-1]


INT = st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.integers(0, 1 << 62), st.tuples(INT, INT, INT, INT), INT, st.binary(max_size=40), st.booleans())
def test_a_record_alone_is_encoded_like_a_row_of_columns(
    id_: int, request: tuple[int, int, int, int], header: int, payload: bytes, is_right: bool
) -> None:
    data_crc = crc32(payload) if is_right else crc32(payload) ^ 1
    rows = FEW_TO_ENCODE  # from there on records are encoded as columns
    columns = encode_run(
        id_,
        requests=np.array([request] * rows, np.int32),
        headers=np.full(rows, header, np.int32),
        lengths=np.full(rows, len(payload)),
        data_crcs=np.full(rows, data_crc, np.uint32),
        payloads=payload * rows,
    ).part(0, 1)
    alone = encode_record(id_, request, header, data_crc, payload)
    assert (alone.first_id, alone.data, alone.bounds.tolist()) == (id_, columns.data, columns.bounds.tolist())
    assert (first_bad(alone) is None) == is_right


@pytest.mark.slow
@given(
    groups=st.lists(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 3)), min_size=1, max_size=4), min_size=1),
    rows_max=st.integers(1, 25),
    bytes_max=st.integers(1, 400),
    is_grouped=st.booleans(),
)
def test_pieces_of_a_batch_are_the_batch(
    groups: list[list[tuple[bytes, int]]], rows_max: int, bytes_max: int, is_grouped: bool
) -> None:
    rows = [row for group in groups for row in group]
    sizes = [len(group) for group in groups] if is_grouped else []
    locks = [[(10 * number + k, Mode.WRITE) for k in range(count)] for number, (_, count) in enumerate(rows)]
    batch = batch_of(
        *[payload for payload, _ in rows], first=7, marks=list(range(len(rows))), locks=locks, groups=sizes, seen_time=5
    )
    pieces = list(slices(batch, rows_max, bytes_max))
    assert sum(piece.bytes for piece in pieces) == batch.bytes
    assert b"".join(bytes(piece.payloads) for piece in pieces) == batch.payloads
    sequence = 7
    for piece in pieces:
        assert piece.first_sequence == sequence
        assert piece.seen_time == 5
        assert piece.follows is None or not piece.follows[0], "a group is never cut"
        parts = len(piece) if piece.follows is None else int((~piece.follows).sum())
        size = len(piece.payloads) + OVERHEAD_BYTES * len(piece)
        assert parts == 1 or (len(piece) <= rows_max and size <= bytes_max) or piece.bytes == batch.bytes <= bytes_max
        sequence += len(piece)
    columns = ["marks", "headers", "lengths", "data_crcs", "lock_counts", "lock_ids", "lock_modes"]
    for name in [*columns, *(["follows"] if is_grouped else [])]:
        assert np.concatenate([getattr(piece, name) for piece in pieces]).tolist() == getattr(batch, name).tolist(), name


@pytest.mark.slow
@given(
    clients=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    refused=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3))),
    is_grouped=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_the_locks_and_groups_of_a_step_are_those_of_its_accepted_rows(
    clients: list[list[list[list[int]]]], refused: set[tuple[int, int]], is_grouped: list[bool]
) -> None:
    """Of each client some groups, of each group some rows, of each row some locks; a group is refused as a whole."""
    items, locks, follows = [], [], []
    for client, groups in enumerate(clients):
        gone, row = [], 0
        for number, group in enumerate(groups):
            for place, mine in enumerate(group):
                if (client, number) in refused:
                    gone.append(row)
                else:
                    locks.append(mine)
                    follows.append(is_grouped[client] and place > 0)
                row += 1
        rows = [[(lock, Mode.READ) for lock in mine] for group in groups for mine in group]
        sizes = [len(group) for group in groups] if is_grouped[client] else []
        batch = batch_of(*[b""] * row, locks=rows, groups=sizes)
        items.append(QueuedBatch(Mount(client), batch))
        items[-1].decide(np.array(gone, np.int64))
    found, groups_found = locks_of(items), groups_of(items)
    assert [[]] * len(locks) == locks if found is None else list(found.counts) == [len(mine) for mine in locks]
    assert found is None or list(found.ids) == [lock for mine in locks for lock in mine]
    assert follows == ([False] * len(follows) if groups_found is None else groups_found.tolist())


def many(count: int) -> AppendBatch:
    return batch_of(*[b"%d" % number * (number % 7) for number in range(count)])


@pytest.mark.parametrize("count", [1, 5, 129, 3000])
def test_payloads_that_are_right_pass(count: int) -> None:
    check_payloads(many(count))
    check_payloads(batch_of(*[b""] * count))


@pytest.mark.parametrize("count", [5, 129])
def test_every_byte_and_every_checksum_is_checked(count: int) -> None:
    batch = many(count)
    for at in range(len(batch.payloads)):
        damaged = bytearray(batch.payloads)
        damaged[at] ^= 1 << at % 8
        row = int(np.searchsorted(np.cumsum(batch.lengths), at, "right"))
        with pytest.raises(BadFrame) as bad:
            check_payloads(replace(batch, payloads=bytes(damaged)))
        assert bad.value.facts == {"sequence": str(row)}
    for row in range(count):
        crcs = batch.data_crcs.copy()
        crcs[row] ^= np.uint32(1 << row % 32)
        with pytest.raises(BadFrame):
            check_payloads(replace(batch, data_crcs=crcs))


def test_payloads_that_changed_places_are_noticed() -> None:
    payloads = [b"%03d" % number for number in range(128)]
    batch = batch_of(*payloads)
    payloads[3], payloads[4] = payloads[4], payloads[3]
    with pytest.raises(BadFrame):
        check_payloads(replace(batch, payloads=b"".join(payloads)))


def test_checksums_that_make_up_for_each_other_are_refused() -> None:
    batch = batch_of(*[b"0123456789abcdef"] * 128)
    crcs, delta = batch.data_crcs.copy(), np.array([1], np.uint32)
    crcs[0] ^= delta[0]
    crcs[1] ^= shift(delta, np.array([16]))[0]
    with pytest.raises(BadFrame):
        check_payloads(replace(batch, data_crcs=crcs))


TIMES = st.integers(0, 1 << 60)


@given(TIMES, st.lists(st.tuples(TIMES, TIMES)))
def test_it_never_falls(last: int, steps: list[tuple[int, int]]) -> None:
    clock = HybridClock(last)
    for now, seen in steps:
        before = clock.last
        time = clock.next(now, seen)
        assert time == clock.last == max(before, now, seen)


@pytest.mark.parametrize(("ahead", "is_refused"), [(-1, False), (0, False), (AHEAD_MAX, False), (AHEAD_MAX + 1, True)])
def test_a_client_far_ahead_is_refused(ahead: int, is_refused: bool) -> None:
    now = 1_700_000_000_000_000
    if is_refused:
        with pytest.raises(ClockAhead, match="60 seconds ahead"):
            check_seen(now + ahead, now)
    else:
        check_seen(now + ahead, now)


SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND


def test_an_application_does_not_move_the_time_of_a_partition_by_passing_on_its_own() -> None:
    """Each batch passes on the time of the one before and almost a minute more: the log gets ahead by one minute only."""
    clock, refused = HybridClock(NOW), 0
    for _ in range(500):
        seen = clock.last + 59 * SECOND
        try:
            check_seen(seen, NOW, clock.last)
        except ClockAhead:
            refused += 1
            continue
        clock.next(NOW, seen)
    assert clock.last <= NOW + AHEAD_MAX
    assert refused == 499
    check_seen(clock.last, NOW, clock.last)  # what it has read in this very log


def test_a_log_that_stands_ahead_takes_what_moves_it_no_further() -> None:
    check_seen(NOW + 3600 * SECOND, NOW, last=NOW + 3600 * SECOND)
    with pytest.raises(ClockAhead):
        check_seen(NOW + 3601 * SECOND, NOW, last=NOW + 3600 * SECOND)


def test_an_owner_whose_clock_is_a_day_ahead_is_held_by_its_storages() -> None:
    day, storage_clocks = 86_400 * SECOND, StorageClocks()
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + day, "nobody told a time"
    for name, offset in (("a", -SECOND), ("b", 0), ("c", 7 * day)):
        storage_clocks.note(name, NOW + offset, 5.0, 5.0)
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + OWN_AHEAD_MAX
    assert storage_clocks.bounded(NOW + day, 65.0) == NOW + 60 * SECOND + OWN_AHEAD_MAX, "their time goes on"
    assert storage_clocks.bounded(NOW + 3 * SECOND, 5.0) == NOW + 3 * SECOND
    storage_clocks.note("b", 0, 6.0, 6.0)
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + OWN_AHEAD_MAX, "an answer without a time changes nothing"
    assert not storage_clocks.note("b", NOW, 5.0, 405.0)
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + OWN_AHEAD_MAX, "nor does one that was long under way"


DAY = 86_400 * SECOND


@pytest.mark.parametrize(
    ("own", "storages", "corrected"),
    [
        pytest.param(DAY, [0, 0, 0], OWN_AHEAD_MAX, id="owner-ahead"),
        pytest.param(-DAY, [0, 0, 0], -OWN_AHEAD_MAX, id="owner-behind"),
        pytest.param(-DAY, [0, 0, -DAY], -OWN_AHEAD_MAX, id="owner-and-a-storage-behind"),
        pytest.param(DAY, [DAY, 0, 0], OWN_AHEAD_MAX, id="owner-and-a-storage-ahead"),
        pytest.param(0, [-DAY, 0], 0, id="one-of-two-behind"),
        pytest.param(0, [DAY, 0], 0, id="one-of-two-ahead"),
        pytest.param(-DAY, [0, 0], -OWN_AHEAD_MAX, id="owner-behind-two"),
        pytest.param(-DAY, [0, 0, 0, DAY], -OWN_AHEAD_MAX, id="owner-behind-and-a-storage-ahead"),
        pytest.param(0, [DAY], 0, id="one-storage-ahead"),
        pytest.param(DAY, [0], OWN_AHEAD_MAX, id="owner-ahead-of-one"),
        pytest.param(DAY, [], DAY, id="no-storage-tells-a-time"),
        pytest.param(-3 * SECOND, [0, 0, 0], -3 * SECOND, id="as-far-off-as-clocks-are"),
    ],
)
def test_a_single_wrong_clock_does_not_move_the_time_of_a_log(own: int, storages: list[int], corrected: int) -> None:
    storage_clocks = StorageClocks()
    for number, ahead in enumerate(storages):
        storage_clocks.note(f"storage-{number}", NOW + ahead, 5.0, 5.0)
    assert storage_clocks.corrected(NOW + own, 5.0) == NOW + corrected
    assert storage_clocks.corrected(NOW + own + 60 * SECOND, 65.0) == NOW + corrected + 60 * SECOND
