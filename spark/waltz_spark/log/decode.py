"""Records as Arrow columns, without a Python object per record.

The heads are read as one structured array (`waltzd.format.record.heads`, the same decoder that storages use), the payloads
are cut out of the run by one native call. A batch owns its memory, so the run's buffer may be used again. Only runs whose
checksums were checked become rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waltzd.errors import TooLarge
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, Run, heads

SCHEMA = pa.schema(
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
"""`crc` is the payload's checksum as stored, as signed 32 bits: Arrow readers on the JVM have no unsigned integers."""

BATCH_BYTES_MAX = (1 << 31) - 1
"""Arrow's `binary` addresses its bytes with 32-bit signed offsets."""

_COLUMN = {
    "client_id": "client",
    "generation": "generation",
    "req_partition": "partition",
    "seq": "sequence",
    "header": "header",
}


def record_batch(run: Run, partition: int) -> pa.RecordBatch:
    """The records of a run whose checksums were checked, as rows in order of their ids."""
    if len(run.data) > BATCH_BYTES_MAX:
        raise TooLarge(
            f"{len(run.data)} bytes of records do not fit one Arrow batch of {BATCH_BYTES_MAX} bytes",
            not_done="no batch was made",
            next_step="decode fewer records at once",
        )
    count = len(run)
    head = heads(run)
    offsets = pa.py_buffer(run.bounds.astype(np.int32))
    records = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(run.data)])
    columns = {
        "partition": np.full(count, partition, np.int32),
        "txid": head["id"].astype(np.int64),
        "crc": head["data_crc"].astype(np.uint32).view(np.int32),
        **{name: head[field].astype(np.int32) for name, field in _COLUMN.items()},
        "data": pc.binary_slice(records, HEAD_BYTES, -TRAILER_BYTES),
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[name]) for name in SCHEMA.names], schema=SCHEMA)
