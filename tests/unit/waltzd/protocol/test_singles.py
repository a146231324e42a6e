"""A transaction alone beside a batch of one: the same columns, the same verdict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mounting import single_of
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.batches import AppendBatch, Committals, Limits, SingleAppend, SingleCommittal

LIMITS = Limits(payload_bytes_max=9, locks_max=2, frame_bytes_max=50)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
NEAR = st.integers(-3, 3)
COLUMNS = ("marks", "headers", "lengths", "data_crcs", "lock_counts", "lock_ids", "lock_modes")


def verdict(batch: AppendBatch) -> tuple[type[WaltzError], str] | None:
    try:
        batch.check(LIMITS)
    except WaltzError as error:
        return type(error), error.message
    return None


@given(
    sequence=st.integers(-2, 2) | st.integers(0x7FFFFFFD, 0x7FFFFFFF),
    mark=NEAR | I64,
    header=st.integers(-(1 << 31), (1 << 31) - 1),
    data_crc=st.integers(0, (1 << 32) - 1),
    locks=st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 5)), max_size=4),
    payload=st.binary(max_size=12),
)
def test_a_transaction_alone_is_judged_like_a_batch_of_one(
    sequence: int, mark: int, header: int, data_crc: int, locks: list[tuple[int, int]], payload: bytes
) -> None:
    columns = AppendBatch(
        first_sequence=sequence,
        marks=np.array([mark], np.int64),
        headers=np.array([header], np.int32),
        lengths=np.array([len(payload)], np.int64),
        data_crcs=np.array([data_crc], np.uint32),
        lock_counts=np.array([len(locks)], np.int64),
        lock_ids=np.array([lock for lock, _ in locks], np.uint64),
        lock_modes=np.array([mode for _, mode in locks], np.uint8),
        payloads=payload,
        seen_time=5,
    )
    alone = single_of(columns)
    assert verdict(alone) == verdict(columns)
    for name in COLUMNS:
        mine, theirs = getattr(alone, name), getattr(columns, name)
        assert (mine.tolist(), mine.dtype) == (theirs.tolist(), theirs.dtype), name
    assert (len(alone), alone.bytes, alone.highest_mark) == (len(columns), columns.bytes, columns.highest_mark)
    assert [list(column) for column in alone.lock_lists] == [list(column) for column in columns.lock_lists]
    assert (alone.follows, alone.seen_time, alone.payloads) == (None, 5, payload)


def test_modes_that_are_missing_are_noticed() -> None:
    with pytest.raises(BadFrame, match="1 lock ids and 0 modes"):
        SingleAppend(0, -1, 0, 0, (5,), (), b"", 0).check(LIMITS)


def test_a_committal_alone_is_like_a_column_of_one() -> None:
    alone, columns = SingleCommittal(4, 9, 7), Committals(np.array([4]), np.array([9]), 7)
    for one in (alone, columns):
        one.check()
        assert (len(one), one.highest_id, one.time) == (1, 9, 7)
        assert [list(column) for column in one.lists] == [[4], [9]]
        assert (one.sequences.tolist(), one.ids.tolist()) == ([4], [9])
