"""Batches to records: the columns against one transaction at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mounting import batch_of
from waltzd.errors import BadFrame
from waltzd.format.checksum import shift
from waltzd.format.record import RequestId, bad_payloads, first_bad
from waltzd.protocol.batches import AppendBatch
from waltzd.protocol.locks import Mode
from waltzd.server.core.step import Portion, build, check_payloads, slices

payload_lists = st.lists(st.binary(max_size=12), min_size=1, max_size=12)


@given(batches=st.lists(st.tuples(payload_lists, st.sets(st.integers(0, 11))), min_size=1, max_size=4))
def test_the_records_of_a_step_are_those_of_its_accepted_rows(batches: list[tuple[list[bytes], set[int]]]) -> None:
    portions, expected = [], []
    for client, (payloads, rows) in enumerate(batches):
        refused = sorted(row for row in rows if row < len(payloads))
        batch = replace(batch_of(*payloads, first=100), headers=np.arange(len(payloads), dtype=np.int32))
        portions.append(Portion(client, batch, np.array(refused, np.int64)))
        assert portions[-1].accepted == len(payloads) - len(refused)
        expected += [
            (RequestId(client=client, generation=6, partition=2, sequence=100 + row), row, payload)
            for row, payload in enumerate(payloads)
            if row not in refused
        ]
    run = build(40, portions, partition=2, generation=6)
    records = [run.record(number) for number in range(len(run))]
    assert [(record.request, record.header, record.payload) for record in records] == expected
    assert [record.id for record in records] == list(range(40, 40 + len(expected)))
    assert first_bad(run) is None
    assert not bad_payloads(run).size


@given(
    rows=st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 3)), min_size=1, max_size=20), rows_max=st.integers(1, 25)
)
def test_pieces_of_a_batch_are_the_batch(rows: list[tuple[bytes, int]], rows_max: int) -> None:
    locks = [[(10 * number + k, Mode.WRITE) for k in range(count)] for number, (_, count) in enumerate(rows)]
    batch = batch_of(*[payload for payload, _ in rows], first=7, marks=list(range(len(rows))), locks=locks)
    pieces = list(slices(batch, rows_max, 1 << 20))
    assert all(len(piece) <= rows_max for piece in pieces)
    assert sum(piece.bytes for piece in pieces) == batch.bytes
    assert b"".join(bytes(piece.payloads) for piece in pieces) == batch.payloads
    sequence = 7
    for piece in pieces:
        assert piece.first_sequence == sequence
        sequence += len(piece)
    for name in ("marks", "headers", "lengths", "data_crcs", "lock_counts", "lock_ids", "lock_modes"):
        assert np.concatenate([getattr(piece, name) for piece in pieces]).tolist() == getattr(batch, name).tolist(), name


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
