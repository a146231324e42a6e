"""The columns of a log as Arrow types, and columns out of times, locks and groups, without a Python object for each."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from waltzd.format.checksum import I64
from waltzd.format.record import NO_TIME, LockColumns
from waltzd.protocol.locks import Mode

RECORD = pa.schema(
    [
        ("partition", pa.int32()),
        ("txid", pa.int64()),
        ("client_id", pa.int32()),
        ("generation", pa.int32()),
        ("req_partition", pa.int32()),
        ("seq", pa.int32()),
        ("header", pa.int32()),
        ("crc", pa.int32()),
        ("data", pa.binary()),
    ]
)
"""Columns from the record itself. `crc` is the stored checksum of the payload as signed 32 bits, because Arrow on the JVM
has no unsigned integers."""

TIME = pa.timestamp("us", tz="UTC")
LOCKS = pa.list_(pa.field("element", pa.struct([("lock", pa.int64()), ("mode", pa.string())])))
BESIDE = pa.schema([("time", TIME), ("locks", LOCKS), ("group", pa.int64())])
"""Columns from the record's batch; null in format 0, which has no batches. `lock` is the hash as signed 64 bits; `group` is
the id of the first transaction of its group, null without a group."""

SCHEMA = pa.schema([*RECORD, *BESIDE])
NO_GROUP = -1

BATCH_BYTES_MAX = (1 << 31) - 1
"""Arrow's `binary` addresses its bytes with 32-bit signed offsets."""


def time_column(times: I64 | None, count: int) -> pa.Array:
    if times is None:
        return pa.nulls(count, TIME)
    return pa.array(times, pa.int64(), mask=times == NO_TIME).cast(TIME)


MODES = pa.array([mode.name for mode in sorted(Mode)])
assert min(Mode) == 1


def lock_column(locks: LockColumns | None, times: I64 | None, count: int) -> pa.Array:
    """Return the column of locks: an empty list for a transaction without locks; null if they are unknown."""
    if locks is None or times is None:
        return pa.nulls(count, LOCKS)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(locks.counts, out=offsets[1:])
    modes = MODES.take(pa.array(locks.modes.astype(np.int32) - 1))
    each = pa.StructArray.from_arrays([pa.array(locks.ids.view(np.int64)), modes], fields=list(LOCKS.value_type))
    unknown = times == NO_TIME
    mask = pa.array(unknown) if unknown.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), each, type=LOCKS, mask=mask)


def group_column(groups: I64 | None, count: int) -> pa.Array:
    if groups is None:
        return pa.nulls(count, pa.int64())
    return pa.array(groups, pa.int64(), mask=groups == NO_GROUP)
