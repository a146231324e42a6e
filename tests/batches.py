"""Segments of format 1 for tests: batches out of payloads, and the files that a storage makes of them.

log = batches_of([[b"a", b"b"], [b"c"]], locks=[[[(7, WRITE)], []], None], cuts=[0])
put_batches(disk, "s/0", log, key=KEY)      # a sealed segment 0 with its footer, and segment 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Disk, join
from waltzd.format.batch import Batch, End, encode_batch
from waltzd.format.footer import NO_HASH, FooterBuilder
from waltzd.format.index import offsets_of
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, index_name, segment_name
from waltzd.format.record import LockColumns, encode_payloads

READ, WRITE, APPEND = 1, 2, 3
TIME = 1_700_000_000_000_000
"""Of the first batch; each later one is a second later."""
LockRows: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""For each record of a batch its locks: id and mode."""


def lock_columns(rows: LockRows) -> LockColumns:
    flat = [lock for row in rows for lock in row]
    return LockColumns(
        np.array([len(row) for row in rows], np.int64),
        np.array([id_ for id_, _ in flat], np.uint64),
        np.array([mode for _, mode in flat], np.uint8),
    )


def batches_of(
    payloads: Sequence[Sequence[bytes]],
    *,
    first_id: int = 0,
    before: End | None = None,
    locks: Sequence[LockRows | None] | None = None,
    follows: Sequence[Sequence[bool] | None] | None = None,
    times: Sequence[int] | None = None,
    session: int = 4,
    partition: int = 0,
    cuts: Collection[int] = (),
    segment_bytes_max: int = 64 << 20,
) -> list[Batch]:
    """A batch for each list of payloads, one behind the other. `locks`, `follows` and `times` have a row for each batch;
    `cuts`: the numbers of the batches that are the last of their segments."""
    out: list[Batch] = []
    end = before or End()
    for number, own in enumerate(payloads):
        rows = None if locks is None else locks[number]
        group = None if follows is None else follows[number]
        batch = encode_batch(
            encode_payloads(first_id, own, partition=partition, client=9),
            session=session,
            generation=1,
            committed=first_id - 1,
            time=max(TIME, end.time) + 1_000_000 * (number > 0 or end.time > 0) if times is None else times[number],
            before=end,
            locks=None if rows is None else lock_columns(rows),
            follows=None if group is None else np.array(group, np.bool_),
            segment_bytes_max=0 if number in cuts else segment_bytes_max,
        )
        out.append(batch)
        first_id, end = batch.last_id + 1, batch.end(end)
    return out


def raw(batches: Sequence[Batch]) -> bytes:
    return b"".join(piece for batch in batches for piece in batch.pieces)


def segments_of(batches: Sequence[Batch]) -> list[list[Batch]]:
    out: list[list[Batch]] = [[]]
    for batch in batches:
        if out[-1] and out[-1][-1].head.is_last:
            out.append([])
        out[-1].append(batch)
    return out


def header_of(batches: Sequence[Batch], *, key: UUID, partition: int = 0) -> FileHeader:
    head = batches[0].head
    return FileHeader(created_ms=head.time // 1000, key=key, partition=partition, first_id=head.first_id, version=BATCHES)


def segment_raw(
    batches: Sequence[Batch], *, key: UUID, partition: int = 0, footer_before: bytes = NO_HASH
) -> tuple[bytes, bytes]:
    """One segment, with its footer where its last batch says so; and the hash of that footer."""
    header = header_of(batches, key=key, partition=partition).encode()
    if not batches[-1].head.is_last:
        return header + raw(batches), NO_HASH
    builder = FooterBuilder(header)
    for batch in batches:
        builder.add(batch.head, batch.pieces)
    footer = builder.footer(footer_before)
    return header + raw(batches) + footer.encode(), footer.hash


def index_raw(batches: Sequence[Batch], *, key: UUID, partition: int = 0) -> bytes:
    entries, at = b"", HEADER_BYTES
    for batch in batches:
        entries += offsets_of(at + batch.head.lead, batch.run).astype(">i8").tobytes()
        at += batch.size
    return header_of(batches, key=key, partition=partition).encode() + entries


def put_batches(
    disk: Disk, directory: str, batches: Sequence[Batch], *, key: UUID, partition: int = 0, footer_before: bytes = NO_HASH
) -> bytes:
    """The segments and indexes of these batches, durably; returns the hash of the last footer."""
    for own in segments_of(batches):
        content, footer_before = segment_raw(own, key=key, partition=partition, footer_before=footer_before)
        for name, value in (
            (segment_name(own[0].first_id), content),
            (index_name(own[0].first_id), index_raw(own, key=key, partition=partition)),
        ):
            file = disk.create(join(directory, name))
            file.write(0, value)
            file.flush()
            file.close()
    disk.flush_directory(directory)
    return footer_before
